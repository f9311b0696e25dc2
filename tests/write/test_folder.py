"""What a teacher leaves: a corpus and its store in one folder, for our own commands and for other
people's programs."""

import dataclasses
import json

import datasets
import numpy as np
import pytest
import yaml
from chat_kit import CHATML, save_chat_tokenizer, save_random_model
from safetensors.numpy import load_file
from training_kit import LLAMA, documents, recipe_dict, save_tokenizer, write_corpus
from typer.testing import CliRunner
from write.write_kit import SETTINGS, rows_of, save_writer, write_prompts

from vocagnolm.cli import app
from vocagnolm.data.blocks import Blocks
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError, CorpusError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import ScoreSettings, score_corpus, write_answers
from vocagnolm.store import LossStore
from vocagnolm.train.folder import read_metrics, read_run
from vocagnolm.train.run import train

GRADED = dataclasses.replace(SETTINGS, grade="mixed", system="Be brief.", samples=4)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A SentencePiece teacher that wrote, with marks, and a byte-level student that has not read
    anything."""
    folder = tmp_path_factory.mktemp("lab")
    teacher = save_writer(folder / "teacher", "pieces")
    prompts = write_prompts(folder / "prompts.jsonl", 12)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    drafts = folder / "draft"
    write_answers(teacher, prompts, drafts, settings=dataclasses.replace(GRADED, grade=None))
    first = {row["prompt_index"]: row["messages"][1]["content"] for row in rows_of(drafts)[::-1]}
    for number, row in enumerate(rows):  # one answer of most prompts is right
        row["answer"] = first.get(number, "nothing").split()[0] if number < 8 else "never"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_answers(teacher, prompts, folder / "written", settings=GRADED, answer_field="answer")
    save_tokenizer(folder / "bytes", kind="bytes")
    marks = ["<|im_start|>", "<|im_end|>"]
    save_chat_tokenizer(folder / "student", folder / "bytes", CHATML, marks)
    room = {**LLAMA, "max_position_embeddings": 256, "vocab_size": 328}
    save_random_model(folder / "start", folder / "student", room, seed=3)
    return folder


def recipe_of(lab, out, **sections):
    tree = {
        "student": {"model": str(lab / "start"), "config": None, "tokenizer": None},
        "corpus": {"files": [str(lab / "written")]},
        "store": {"path": str(lab / "written")},
        "data": {"blocks": str(out / "blocks"), "block_size": 96},
        "objective": {"method": "distill", "mix": 0.5},
        "train": {"epochs": 2.0, "batch_blocks": 4, "micro_batch": 2},
        "run": {"folder": str(out / "run"), "save_every": 0},
    }
    for name, content in sections.items():
        tree[name] = {**tree.get(name, {}), **content}
    tree = recipe_dict(lab, **tree)
    tree["student"].pop("config")
    tree["student"].pop("tokenizer")
    return recipe_from_dict(tree)


def command(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_a_student_is_prepared_and_distilled_from_it(lab, tmp_path):
    recipe = recipe_of(lab, tmp_path)
    manifest = prepare(recipe)
    store = LossStore.open(lab / "written")
    summary = manifest["summary"]
    assert summary["documents"] == len(store) and summary["missing_documents"] == 0
    assert summary["mapped_share"] > 0.99, "every trained token lies in tokens that were drawn"
    assert summary["targets"]["shared"] > 0
    part = next((tmp_path / "blocks").glob("part-*"))
    columns = load_file(part)
    trained = columns["trained"].astype(bool)
    assert np.isnan(columns["guidance"][~trained]).all() and trained.any()
    assert (columns["target_p"][~trained] == 0).all() and (columns["target_p"][trained] > 0).any()
    done = train(recipe, quiet=True)
    assert done["steps"] > 4 and np.isfinite(done["last"]["loss"])
    blocks = Blocks(tmp_path / "blocks", 96)
    assert len(blocks) and manifest["tokens"] > summary["trained"] > 0
    command("report", tmp_path / "run", "--html", tmp_path / "report.html")
    assert "distill" in (tmp_path / "report.html").read_text()


def test_answers_among_other_corpora(lab, tmp_path):
    """Mid-training: plain text, and answers with the alternatives of their teacher."""
    write_corpus(tmp_path / "web.jsonl", documents(20))
    corpora = {
        "web": {"files": [str(tmp_path / "web.jsonl")], "share": 0.5},
        "answers": {
            "files": [str(lab / "written")],
            "store": {"path": str(lab / "written")},
            "answers": "right",
            "share": 0.5,
        },
    }
    alone = recipe_of(lab, tmp_path).to_dict()
    del alone["corpus"], alone["store"]
    recipe = recipe_from_dict(alone | {"corpora": corpora})
    made = prepare(recipe)["corpora"]
    assert made["answers"]["summary"]["wrong_documents"] > 0 and made["web"]["teacher"] is None
    done = train(recipe, quiet=True)
    about = read_run(tmp_path / "run")["corpora"]
    reads = {name: facts["blocks_read"] for name, facts in about.items()}
    assert reads["answers"] == reads["web"] == done["steps"] * 2
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0 < last["mapped_share"] < 1 and last["kept_share"] == 1 and last["target_mass"] > 0


def test_documents_are_found_by_their_text_in_other_files_too(lab, tmp_path):
    """The conversations in one file, in another order, without what stands beside them."""
    rows = [{"messages": row["messages"]} for row in rows_of(lab / "written")][::-1]
    copy = tmp_path / "copy.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = prepare(recipe_of(lab, tmp_path / "a"))
    there = prepare(recipe_of(lab, tmp_path / "b", corpus={"files": [str(copy)]}))
    for name in ("documents", "trained", "mapped_share", "one_to_one_share", "targets"):
        assert there["summary"][name] == pytest.approx(here["summary"][name])


def test_right_answers_alone(lab, tmp_path):
    rows = rows_of(lab / "written")
    right = sum(row["right"] for row in rows)
    assert 0 < right < len(rows)
    recipe = recipe_of(lab, tmp_path, corpus={"answers": "right"})
    manifest = prepare(recipe)
    assert manifest["summary"]["documents"] == right
    assert manifest["summary"]["wrong_documents"] == len(rows) - right
    assert manifest["summary"]["unusable_documents"] == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.to_dict()))
    assert f"not marked as right: {len(rows) - right} answers, left out" in command("prepare", path)
    with pytest.raises(BlocksError, match=r"corpus\.answers: right in the blocks, all now"):
        prepare(recipe_of(lab, tmp_path))
    unmarked = {"files": [str(lab / "draft")], "answers": "right"}
    other = recipe_of(lab, tmp_path / "b", corpus=unmarked, store={"path": str(lab / "draft")})
    with pytest.raises(BlocksError, match=r"has no answer that is marked as right.*write --grade"):
        prepare(other)


def test_datasets_loads_the_conversations_and_nothing_else(lab, tmp_path):
    rows = datasets.load_dataset(str(lab / "written"), split="train", cache_dir=str(tmp_path))
    own = rows_of(lab / "written")
    assert rows.to_list() == own
    assert set(rows.column_names) == {
        *("messages", "prompt_index", "answer_index", "finished", "right")
    }
    # TRL tells conversations from texts by any of these fields
    assert not {"prompt", "completion", "chosen", "rejected"} & {*rows.column_names}
    for row in own:
        assert [{*message} for message in row["messages"]] == [{"role", "content"}] * 2
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_the_commands_of_stores_work_on_it(lab, tmp_path):
    folder, store = lab / "written", LossStore.open(lab / "written")
    assert "every checksum matches" in command("store", "verify", folder)
    shown = command("store", "inspect", folder)
    assert "4 answers to each of 12 prompts" in shown and "temperature 0.7" in shown
    about = json.loads(command("store", "inspect", folder, "--json"))
    assert about["written"]["prompts"] == 12 and about["writing"]["samples"] == 4
    assert about["documents"] + about["skipped"] == 48 == about["corpus"]["documents"]
    command("store", "export", folder, "--out", tmp_path / "losses.parquet")
    rows = datasets.Dataset.from_parquet(
        str(tmp_path / "losses.parquet"), cache_dir=str(tmp_path / "hf")
    )
    assert len(rows) == len(store) and rows[0]["nll"][0] is None
    assert [len(given) for given in rows[0]["alternatives"]][-1] == 4
    page = tmp_path / "view.html"
    command(
        *("view", "--student", lab / "student", "--teacher", lab / "teacher"),
        *("--messages", folder, "--html", page),
    )
    assert rows_of(folder)[0]["messages"][1]["content"].split()[0] in page.read_text()


def test_it_is_compared_with_what_another_teacher_reads(lab, tmp_path):
    """The student scores what the teacher wrote: both stores hold every document."""
    folder, scored = lab / "written", tmp_path / "scored"
    settings = ScoreSettings(device="cpu", threads=1, context=256)
    score_corpus(lab / "start", folder, scored, settings=settings)
    for stores in ((folder, scored), (scored, folder)):
        found = json.loads(command("store", "compare", *stores, "--corpus", folder, "--json"))
        assert found["documents"] == len(LossStore.open(folder))
        texts = [stretch["text"] for stretch in found["stretches"]]
        assert len(texts) > 3 and None not in texts
    store = LossStore.open(folder)
    for number in (0, 3, len(store) - 1):
        assert store.place_of(store.document_index(number)) == number


def test_the_card_says_who_wrote_what_and_how(lab, tmp_path):
    text = (lab / "written" / "README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["configs"][0]["data_files"] == [{"split": "train", "path": "data/*.jsonl"}]
    facts, about = (
        header["loss_store"],
        json.loads(command("store", "inspect", lab / "written", "--json")),
    )
    assert (facts["teacher"], facts["prompts"], facts["prompts_from"]) == (
        "teacher",
        12,
        "prompts.jsonl",
    )
    assert (facts["samples"], facts["temperature"], facts["chat_template"]) == (4, 0.7, "own")
    assert facts["left_out"] == about["skipped"] and facts["left_out:_cut"] > 0
    marked = about["written"]["marked_answers"]
    assert facts["right_answers"].endswith(f"% of {marked} that were marked")
    assert "    system: Be brief." in text and "depends on the teacher's licence" in text
    assert str(lab) not in text and "license" not in header
    command("store", "card", lab / "written", "--license", "odc-by", "--out", tmp_path / "card.md")
    assert (
        yaml.safe_load((tmp_path / "card.md").read_text().split("---\n")[1])["license"] == "odc-by"
    )


def test_a_folder_that_grows_is_no_corpus_yet(lab, tmp_path):
    folder = tmp_path / "growing"
    folder.mkdir()
    manifest = json.loads((lab / "written" / "manifest.json").read_text())
    del manifest["content_sha256"]
    (folder / "manifest.partial.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"growing is still being written\. Run the command"):
        open_corpus(folder)


def test_dropped_answers_and_cards_are_no_documents(lab):
    corpus = open_corpus(lab / "written")
    assert len(corpus) == len(rows_of(lab / "written"))
    assert all(source.name.startswith("data/") for source in corpus.sources)
    assert rows_of(lab / "written", "dropped")
