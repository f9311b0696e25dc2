import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from vocagnolm.errors import RecipeError
from vocagnolm.recipe import SECTIONS, load_recipe, recipe_difference, recipe_from_dict
from vocagnolm.recipe.reference import markdown_reference

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").rglob("*.yaml"))
COMPLETE = ROOT / "recipes" / "paper" / "qwen2.5-math-instruct.yaml"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_extends_merges_key_by_key(tmp_path):
    write(tmp_path / "base.yaml", "objective: {keep: 0.6, scope: global}\nrun: {seed: 3}\n")
    write(tmp_path / "mid.yaml", "extends: base.yaml\nobjective: {keep: 0.5}\n")
    child = write(tmp_path / "child.yaml", "extends: mid.yaml\nobjective: {method: cpt}\n")
    recipe = load_recipe(child)
    section = recipe.objective
    assert (section.method, section.keep, section.scope, recipe.run.seed) == (
        *("cpt", 0.5, "global", 3),
    )


def test_extends_in_a_circle(tmp_path):
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "extends: a.yaml\n")
    with pytest.raises(RecipeError, match="circle"):
        load_recipe(tmp_path / "a.yaml")


def test_overrides_and_yaml_numbers(tmp_path):
    path = write(tmp_path / "r.yaml", "optimizer:\n  learning_rate: 8e-5\n")
    recipe = load_recipe(
        path,
        [
            "objective.keep=0.6",
            "corpus.files=[a.jsonl, b]",
            "store.path=null",
            "student.config.model_type=llama",
            "student.config.hidden_size=64",
        ],
    )
    assert recipe.optimizer.learning_rate == 8e-5  # YAML 1.1 reads 8e-5 as a text
    assert recipe.objective.keep == 0.6 and recipe.corpus.files == ["a.jsonl", "b"]
    assert recipe.student.config == {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.kepe=0.4", "unknown key in section 'objective': 'kepe'. Did you mean 'keep'"),
        ("objectve.keep=0.4", "unknown section: 'objectve'. Did you mean 'objective'"),
        ("objective.method=guide", "expected one of cpt, guided"),
        ("train.micro_batch=2.5", "expected a whole number"),
        ("train.bf16=yes please", "expected true or false"),
        ("train.micro_batch=true", "expected a whole number"),
        ("corpus.files=a.jsonl", "expected a list"),
        ("optimizer.learning_rate=fast", "expected a number"),
        ("keep=1", "section.key=value"),
        ("run.seed=[", "not a YAML value"),
    ],
)
def test_wrong_keys_and_values_are_named(tmp_path, override, message):
    path = write(tmp_path / "r.yaml", "{}")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "must hold sections"),
        ("train: 5\n", "must hold keys"),
        ("a: b: c\n", "not valid YAML"),
        ("extends: [a]\n", "names one recipe file"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path / "r.yaml", content))
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")


def test_a_resolved_recipe_reads_back_as_itself(tmp_path):
    recipe = load_recipe(COMPLETE, ["objective.keep=0.6"])
    again = load_recipe(write(tmp_path / "recipe.yaml", recipe.to_yaml()))
    assert again == recipe and recipe_difference(again, recipe) == []
    other = load_recipe(COMPLETE)
    assert recipe_difference(recipe, other) == ["objective.keep: 0.6 -> 0.4"]
    assert recipe_difference(recipe, other, frozenset({"objective.keep"})) == []


def test_sections_are_small():
    assert all(len(fields(section)) < 15 for section in SECTIONS.values())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_shipped_recipes_are_valid(path):
    from vocagnolm.train.schedule import plan_schedule
    from vocagnolm.train.static import static_problems

    recipe = load_recipe(path)
    processes = 32 if "paper" in path.parts else 1
    assert static_problems(recipe, processes) == []
    schedule = plan_schedule(recipe, blocks=10_000_000, world_size=processes)
    if "paper" in path.parts:
        assert schedule.steps == 7152 and schedule.tokens_per_step == 2**21


def test_paper_recipes_write_to_places_of_their_own():
    recipes = [load_recipe(path) for path in SHIPPED if "paper" in path.parts]
    assert len({recipe.run.folder for recipe in recipes}) == len(recipes) == 13
    teachers = {r.teacher.model for r in recipes if r.objective.method == "guided"}
    assert len(teachers) == 6


def test_the_complete_recipe_shows_and_comments_every_key():
    text = COMPLETE.read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    assert {name: set(content) for name, content in tree.items()} == {
        name: {entry.name for entry in fields(section)} for name, section in SECTIONS.items()
    }
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if "#" not in line] == []


def test_docs_hold_the_reference_of_every_key():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert markdown_reference() in page, "run: python -m vocagnolm.recipe.reference docs/recipes.md"


def test_recipes_load_without_torch():
    code = (
        "import sys, vocagnolm.recipe as r;"
        f"r.load_recipe({str(COMPLETE)!r});"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_method_needs():
    def recipe(**sections):
        return recipe_from_dict(sections)

    guided = recipe(objective={"method": "guided"}, store={"path": "s"})
    assert guided.needs_guidance and not guided.needs_online_teacher
    online = recipe(objective={"method": "guided"}, teacher={"online": True, "model": "t"})
    assert online.needs_online_teacher and online.needs_block_text
    kld = recipe(objective={"method": "kld"})
    assert kld.needs_online_teacher and not kld.needs_block_text and not kld.needs_guidance
    assert recipe(objective={"method": "uld"}).needs_block_text
    chunk = recipe(objective={"method": "chunk", "chunk_choice": "random"})
    assert not chunk.needs_guidance and not chunk.needs_teacher_losses
    for method in ("cpt", "random", "no_teacher"):
        plain = recipe(objective={"method": method})
        assert not plain.needs_guidance and not plain.needs_online_teacher
