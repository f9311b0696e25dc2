"""docs/paper.md is walked: its commands parse, its recipes are ready."""

import functools
import re
import shutil
from pathlib import Path

import pytest
import real
from command_kit import parse
from tokenizers import Tokenizer
from training_kit import documents, write_corpus, write_store
from transformers import AutoConfig, AutoModelForCausalLM

from vocagnolm.alignment import load_tokenizer
from vocagnolm.recipe import load_recipe
from vocagnolm.recipe.shipped import shipped_recipes
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
    # the whole setting; questions of our own
    beyond = {"miniature", "stretch", "unchecked", "noisy", "share", "second", "uld", "weak"}
    beyond |= {"distill", "distill-why", "distill-clean", "distill-long"}
    assert studies == set(shipped_studies()) - beyond
    for name in shipped_studies():
        load_study(name, materials="materials")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The paper's tokenizers with tiny weights, a corpus, and a store of every teacher."""
    folder = tmp_path_factory.mktemp("paper")
    write_corpus(folder / "corpus.jsonl", documents(12))
    made = {"student": real.real("llama2"), "mistral": real.real("mistral")}
    made |= {"deepseek": real.real("deepseek"), "qwen": real.real("qwen2.5")}
    for name, tokenizer in made.items():
        save(folder / name, tokenizer._tokenizer)
    llemma = Tokenizer.from_str(made["student"]._tokenizer.to_str())
    llemma.add_tokens([f"<extra{number}>" for number in range(16)])
    save(folder / "llemma", llemma)
    for name in ("mistral", "deepseek", "qwen", "llemma", "student"):
        write_store(folder / f"store-{name}", documents(12), folder / name)
    return folder


def save(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.id_to_token(2)}
    (folder / "tokenizer_config.json").write_text(str(settings).replace("'", '"'))
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
    monkeypatch.setattr("vocagnolm.data.identity.load_tokenizer", functools.cache(load_tokenizer))
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
