import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vocagnolm.errors import RecipeError
from vocagnolm.recipe import Recipe, load_recipe, recipe_difference, recipe_from_dict
from vocagnolm.recipe.load import FOLDER, shipped_recipes
from vocagnolm.recipe.schema import hints

SHIPPED = list(shipped_recipes())
PAPER = [name for name in SHIPPED if name.startswith("paper/")]
COMPLETE = FOLDER / "paper.yaml"
SECTIONS = {name: section for name, section in hints(Recipe).items() if name != "corpora"}


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


def test_an_empty_mapping_empties_what_it_extends(tmp_path):
    """`set: {}` over `set: {train.tokens: N}` once kept the parent's, unnoticed."""
    write(tmp_path / "base.yaml", "train: {arguments: {max_grad_norm: 2.0}, tokens: 100}\n")
    child = write(tmp_path / "child.yaml", "extends: base.yaml\ntrain: {arguments: {}}\n")
    recipe = load_recipe(child)
    assert recipe.train.arguments == {} and recipe.train.tokens == 100


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
        ("objective.kepe=0.4", "unknown key 'kepe' in objective. Did you mean 'keep'"),
        ("objectve.keep=0.4", "unknown key 'objectve'. Did you mean 'objective'"),
        ("objective.method=guide", "expected one of cpt, guided"),
        ("train.micro_batch=2.5", "expected an integer"),
        ("train.compile=yes please", "expected true or false"),
        ("train.bf16=true", "train.bf16 is gone. Write train.dtype: bfloat16"),
        ("train.micro_batch=true", "expected an integer"),
        ("corpus.files=a.jsonl", "expected a list"),
        ("optimizer.learning_rate=fast", "expected a number"),
        ("keep=1", "unknown key 'keep'"),
        ("objective.keep", "section.key, found 'objective.keep'"),
        ("run.seed=[", "not a YAML value"),
        ("run.seed.deep=1", "'seed' is 3, there are no keys below it"),
        ("run.seed=-1", "run.seed is -1, expected an integer of at least 0"),
        ("optimizer.learning_rate=.nan", "is nan, expected a number above 0"),
        ("optimizer.beta1=2", "expected a number of at least 0 and below 1"),
        ("data.block_size=1", "expected an integer of at least 2"),
        ("train.epochs=.inf", "expected a number above 0"),
        ("data.part_documents=0", "at least 1"),
        ("corpus.limit_documents=0", "at least 1 or null"),
        ("train.loader_workers=-1", "at least 0"),
        ("student.attention=nope", "expected one of auto, eager, sdpa"),
        ("data.extra_columns=[txt]", "expected one of text, teacher_losses"),
    ],
)
def test_wrong_keys_and_values_are_named(tmp_path, override, message):
    path = write(tmp_path / "r.yaml", "run: {seed: 3}")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "must hold keys"),
        ("train: 5\n", "train is 5, expected a mapping"),
        ("a: b: c\n", "not valid YAML"),
        ("extends: [a]\n", "names one file"),
        ("[" * 2000, "not valid YAML"),
        ("extends: paper/cpd\n", "Did you mean 'paper/cpt'"),
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


def test_a_file_that_is_not_text_is_no_recipe(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"run: {folder: '\xff'}")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(tmp_path / "r.yaml")


def test_sections_are_small():
    # the objective holds the settings of all methods, so that a comparison changes one word
    assert all(len(hints(section)) <= 25 for section in SECTIONS.values())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_valid(name):
    from vocagnolm.train.check import static_problems
    from vocagnolm.train.settings import plan_schedule

    recipe = load_recipe(name)
    processes = 32 if name in PAPER else 1
    assert static_problems(recipe, processes) == []
    schedule = plan_schedule(recipe, blocks=10_000_000, world_size=processes)
    if name in PAPER:
        assert schedule.tokens_per_step == 2**21
        assert recipe.optimizer.warmup_steps == 0 and recipe.data.block_size == 2048


def test_paper_recipes_write_to_places_of_their_own():
    recipes = {name: load_recipe(name) for name in PAPER}
    assert len({recipe.run.folder for recipe in recipes.values()}) == len(recipes)
    # blocks of one place are the same blocks: what decides them is equal
    decides = {}
    for name, recipe in recipes.items():
        about = (
            tuple(recipe.corpus.files),
            recipe.store.path,
            recipe.store.path and recipe.objective.aggregation,
            recipe.needs_block_text,
            recipe.needs_teacher_losses,
        )
        assert decides.setdefault(recipe.data.blocks, about) == about, name
    # a store of one place is one teacher's
    stores = {(r.store.path, r.teacher.model, r.teacher.revision) for r in recipes.values()}
    assert len({s[0] for s in stores if s[0]}) == len([s for s in stores if s[0]])


def test_a_shown_recipe_is_the_recipe(tmp_path):
    for name in ("paper/kld-llemma", "paper/rho1", "paper/guided-qwen2.5-math-instruct", "laptop"):
        shown = write(tmp_path / "shown.yaml", shipped_recipes()[name].text)
        assert load_recipe(shown) == load_recipe(name)
    own = write(tmp_path / "own.yaml", "extends: paper/rho1\nobjective: {keep: 0.5}\n")
    assert recipe_difference(load_recipe("paper/rho1"), load_recipe(own)) == [
        "objective.keep: 0.6 -> 0.5"
    ]
    with pytest.raises(RecipeError, match=r"Did you mean 'laptop'.*recipe list"):
        load_recipe("labtop")


def test_the_recipe_for_conversations_sets_rate_and_length():
    from vocagnolm.train.settings import plan_schedule

    recipe, text = load_recipe("chat"), shipped_recipes()["chat"].text
    assert (recipe.objective.method, recipe.data.train_on) == ("distill", "assistant")
    blocks = 100_000 * 500 // recipe.data.block_size
    steps = plan_schedule(recipe, blocks).steps
    assert round(steps, -3) == 3_000 and f"{3_000:,} steps" in text


def test_the_papers_rows_are_as_printed():
    kld = load_recipe("paper/kld-llemma").objective
    assert (kld.kl_direction, kld.distill_weight) == ("reverse", 1.0)
    assert load_recipe("paper/uld-qwen2.5-math").objective.pairing == "index"
    rho1 = load_recipe("paper/rho1")
    assert rho1.teacher.model == load_recipe("paper/cpt").run.folder + "/model"
    assert rho1.objective.entropy_keep is not None and rho1.teacher.online
    tokens = {name: load_recipe(name).train.tokens for name in PAPER}
    assert tokens["paper/table2-chunk-8"] == 5 * 10**9
    assert tokens["paper/table3-exclude"] == tokens["paper/figure7-keep-0.8"] == 2 * 10**9
    assert tokens["paper/guided-llemma"] == 15 * 10**9


def test_the_complete_recipe_shows_and_comments_every_key():
    text = COMPLETE.read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    assert {name: set(content) for name, content in tree.items()} == {
        name: set(hints(section)) for name, section in SECTIONS.items()
    }
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if "#" not in line] == []


def test_recipes_load_without_torch():
    code = (
        "import sys, vocagnolm.recipe as r;"
        "r.load_recipe('paper/cpt');"
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
