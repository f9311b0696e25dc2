"""docs/paper.md is walked: its commands parse, its recipes are ready, and are the paper's rows."""

import functools
import json
import re
import shutil
from pathlib import Path

import made
import pytest
from command_kit import parse
from faults_kit import LONG
from real import real
from tokenizers import Tokenizer, normalizers
from training_kit import documents, write_corpus, write_store
from transformers import AutoConfig, AutoModelForCausalLM

from vocagnolm.alignment import load_tokenizer
from vocagnolm.recipe import load_recipe
from vocagnolm.recipe.load import shipped_recipes
from vocagnolm.train.check import check
from vocagnolm_studies.design import load_study, shipped_studies

PAGE = (Path(__file__).parents[1] / "docs" / "paper.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`vocagnolm ([^`]+)`", PAGE)
PAPER = [name for name in shipped_recipes() if name.startswith("paper/")]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_parses(command):
    parse(command.split())


def test_a_wrong_command_does_not_parse():
    with pytest.raises(Exception, match="No such option"):
        parse(["train", "paper/cpt", "--sed", "1"])
    with pytest.raises(Exception, match="No such command"):
        parse(["trian", "paper/cpt"])


def test_the_page_names_every_run_and_every_study():
    named = set(re.findall(r"(?<=train )paper/[\w.-]+", PAGE))
    assert named <= set(PAPER)
    # runs that are named by their first number: table2-chunk-8 (16, 32, 64)
    families = {re.sub(r"-[\d.]+$", "", name) for name in [*named, "paper/table2-random-chunk-8"]}
    assert {re.sub(r"-[\d.]+$", "", name) for name in PAPER} == families
    studies = {words.split()[2] for words in COMMANDS if words.startswith("study run")}
    assert studies <= set(shipped_studies())
    of_the_paper = {name for name in shipped_studies() if re.match(r"(table|figure)\d", name)}
    assert studies >= of_the_paper


MISTRAL, LLEMMA = "gair-prox/Mistral-7B-ProXMath", "EleutherAI/llemma_7b"
DEEPSEEK, QWEN = "deepseek-ai/deepseek-math-7b-base", "Qwen/Qwen2.5-Math-7B"
TEACHERS = {  # in the order of the tables: table 1 has the student after continual pretraining too
    "tinyllama-cpt": "out/paper/runs/cpt/model",
    "llemma": LLEMMA,
    "mistral-proxmath": MISTRAL,
    "deepseek-math": DEEPSEEK,
    "deepseek-math-rl": "deepseek-ai/deepseek-math-7b-rl",
    "qwen2.5-math": QWEN,
    "qwen2.5-math-instruct": "Qwen/Qwen2.5-Math-7B-Instruct",
}
B = 10**9
GUIDED = ("guided", "max", "include")
# table and row of the paper -> run, teacher, tokens, (method, Phi, unmapped tokens)
ROWS: dict[tuple[str, str], tuple[str, str | None, int, tuple[str, str, str]]] = {
    ("1", "CPT"): ("cpt", None, 15 * B, ("cpt", "max", "include")),
    **{
        ("1", f"KLD {name}"): (f"kld-{name}", TEACHERS[name], 15 * B, ("kld", "max", "include"))
        for name in list(TEACHERS)[:2]
    },
    **{
        ("1", f"ULD {name}"): (f"uld-{name}", TEACHERS[name], 15 * B, ("uld", "max", "include"))
        for name in list(TEACHERS)[2:]
    },
    **{
        ("1", f"ours {name}"): (f"guided-{name}", model, 15 * B, GUIDED)
        for name, model in TEACHERS.items()
    },
    ("2", "CPT"): ("table2-cpt", None, 5 * B, ("cpt", "max", "include")),
    ("2", "ours"): ("table2-guided", MISTRAL, 5 * B, GUIDED),
    **{
        ("2", f"{n} chunks"): (f"table2-chunk-{n}", MISTRAL, 5 * B, ("chunk", "max", "include"))
        for n in (8, 16, 32, 64)
    },
    **{
        ("2", f"{n} at random"): (
            *(f"table2-random-chunk-{n}", None, 5 * B),
            ("chunk", "max", "include"),
        )
        for n in (8, 16, 32, 64)
    },
    ("3", "Mean"): ("table3-unmapped-mean", MISTRAL, 2 * B, ("guided", "mean", "mean")),
    ("3", "Exclude"): ("table3-exclude", MISTRAL, 2 * B, ("guided", "mean", "exclude")),
    ("3", "Include"): ("table3-include-mean", MISTRAL, 2 * B, ("guided", "mean", "include")),
    ("3", "Include + Mean, 2B"): (
        *("table3-include-mean", MISTRAL, 2 * B),
        ("guided", "mean", "include"),
    ),
    ("3", "Include + Max, 2B"): ("table3-include-max", MISTRAL, 2 * B, GUIDED),
    ("3", "Include + Mean, 15B"): (
        *("table3-include-mean-15b", MISTRAL, 15 * B),
        ("guided", "mean", "include"),
    ),
    ("3", "Include + Max, 15B"): ("guided-mistral-proxmath", MISTRAL, 15 * B, GUIDED),
}
# the averages over nine benchmarks that could be read; the tables' other numbers could not
AVERAGES = {"CPT": 20.5, "KLD llemma": 21.4}
AVERAGES |= {"ULD qwen2.5-math-instruct": 22.4, "ours qwen2.5-math-instruct": 29.9}


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[" ".join(place) for place in ROWS])
def test_a_recipe_is_the_row_that_it_stands_for(table, row):
    name, teacher, tokens, rule = ROWS[table, row]
    shipped, recipe = shipped_recipes()[f"paper/{name}"], load_recipe(f"paper/{name}")
    objective = recipe.objective
    assert f"table {table}" in shipped.shows
    assert (recipe.teacher.model, recipe.train.tokens) == (teacher, tokens)
    assert (objective.method, objective.aggregation, objective.unmapped) == rule
    assert recipe.student.model == "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
    assert recipe.corpus.files == ["open-web-math/open-web-math"]
    assert (recipe.data.block_size, recipe.train.batch_blocks) == (2048, 1024)
    rates = (recipe.optimizer.learning_rate, recipe.optimizer.min_learning_rate)
    assert rates == (8e-5, 8e-6)
    if objective.method in ("guided", "chunk"):
        assert (objective.keep, objective.scope) == (0.4, "batch")
    if objective.method == "chunk":
        assert objective.n_chunks == int(row.split()[0])
        assert objective.chunk_choice == ("random" if "random" in row else "teacher")
    if objective.method == "uld":
        assert (objective.distill_weight, objective.pairing) == (0.5, "index")
    if objective.method == "kld":
        assert (objective.distill_weight, objective.kl_direction) == (1.0, "reverse")


def test_the_tables_have_no_other_rows():
    for table in "123":
        shown = {n for n in PAPER if f"table {table}" in shipped_recipes()[n].shows.split(", ")}
        assert shown == {f"paper/{ROWS[place][0]}" for place in ROWS if place[0] == table}
    assert not [name for name in PAPER if "table 4" in shipped_recipes()[name].shows]


def test_other_runs_of_the_paper():
    rho1 = shipped_recipes()["paper/rho1"]
    assert (rho1.after, load_recipe("paper/rho1").teacher.model) == (
        "paper/cpt",
        TEACHERS["tinyllama-cpt"],
    )
    keeps = {n: load_recipe(n) for n in PAPER if n.startswith("paper/figure7-keep-")}
    assert [one.objective.keep for one in keeps.values()] == [0.4, 0.5, 0.6, 0.7, 0.8]
    weights = {n: load_recipe(n) for n in PAPER if n.startswith("paper/uld-lambda-")}
    assert [one.objective.distill_weight for one in weights.values()] == [0.3, 0.5, 1.0, 1.5]
    assert {one.train.tokens for one in (*keeps.values(), *weights.values())} == {2 * B}


def test_table_4_is_the_six_teachers_by_the_papers_protocol():
    six = list(TEACHERS.values())[1:]
    study = load_study("table4", materials="materials")
    assert [teacher.model for teacher in study.teachers.values()] == six
    assert all(teacher.measured for teacher in study.teachers.values()) and not study.rows
    assert {f"evaluate {model} --protocol paper" for model in six} <= set(COMMANDS)


def test_the_numbers_that_could_be_read_agree_with_each_other():
    assert {("1", row) for row in AVERAGES} <= set(ROWS)
    ours = AVERAGES["ours qwen2.5-math-instruct"]
    assert round(100 * (ours / AVERAGES["CPT"] - 1)) == 46  # the abstract
    assert round(100 * (ours / AVERAGES["ULD qwen2.5-math-instruct"] - 1)) == 33
    for share in (6.32, 75.58, 9.60, 99.95):  # figure 1; tests/alignment computes them
        assert f"{share:.2f}" in PAGE
    for average in AVERAGES.values():
        assert f"{average}" in PAGE


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Tokenizers of the paper's kinds (its own with VOCAGNOLM_FAULTS=long) with tiny weights, a
    corpus, and a store of every teacher."""
    folder = tmp_path_factory.mktemp("paper")
    write_corpus(folder / "corpus.jsonl", documents(12))
    if LONG:
        names = {"student": "llama2", "mistral": "mistral", "deepseek": "deepseek"}
        own = {name: real(one)._tokenizer for name, one in (names | {"qwen": "qwen2.5"}).items()}
    else:
        own = {
            "student": made.sentencepiece_bpe(),
            "mistral": made.sentencepiece_bpe(600),
            "deepseek": made.byte_level(500, split=True),
            "qwen": made.byte_level(900, split=True, normalizer=normalizers.NFC()),
        }
    for name, tokenizer in own.items():
        save(folder / name, tokenizer)
    llemma = Tokenizer.from_str(own["student"].to_str())
    llemma.add_tokens([f"<extra{number}>" for number in range(16)])
    save(folder / "llemma", llemma)
    for name in ("mistral", "deepseek", "qwen", "llemma", "student"):
        write_store(folder / f"store-{name}", documents(12), folder / name)
    return folder


def save(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.id_to_token(2)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = AutoConfig.for_model(
        "llama",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def local(lab: Path, model: str | None) -> str | None:
    """The stand-in for a teacher of the paper."""
    if model is None:
        return None
    kinds = ("llemma", "mistral", "deepseek", "qwen")
    return next((kind for kind in kinds if kind in model.lower()), "student")


def test_every_recipe_is_ready(lab, tmp_path, monkeypatch):
    monkeypatch.setattr("vocagnolm.data.materials.load_tokenizer", functools.cache(load_tokenizer))
    for name in PAPER:
        recipe = load_recipe(name)
        kind = local(lab, recipe.teacher.model)
        recipe.student.model = str(lab / "student")
        recipe.teacher.model = kind and str(lab / kind)
        recipe.teacher.revision = None
        recipe.corpus.files = [str(lab / "corpus.jsonl")]
        recipe.store.path = recipe.store.path and str(lab / f"store-{kind}")
        recipe.data.blocks = str(tmp_path / name / "blocks")
        recipe.run.folder = str(tmp_path / name / "run")
        recipe.train.device = "cpu"
        report = check(recipe, processes=32, measure=name == PAPER[0])
        assert report.problems == [], name
    # the vocabularies are really looked at
    recipe = load_recipe("paper/kld-llemma")
    recipe.student.model, recipe.teacher.model = str(lab / "student"), str(lab / "qwen")
    recipe.teacher.revision, recipe.corpus.files = None, [str(lab / "corpus.jsonl")]
    assert any("one vocabulary" in problem for problem in check(recipe, processes=32).problems)


def test_what_is_not_there_is_a_problem(lab, tmp_path):
    recipe = load_recipe("paper/guided-llemma")
    recipe.student.model, recipe.store.path = str(lab / "student"), str(tmp_path / "none")
    recipe.corpus.files = [str(lab / "corpus.jsonl")]
    shutil.rmtree(tmp_path / "none", ignore_errors=True)
    assert any("not a loss store" in problem for problem in check(recipe).problems)
