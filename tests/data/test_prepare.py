import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from training_kit import make_lab, recipe_dict, save_tokenizer, write_corpus, write_store

from vocagnolm.alignment import align, carry, load_tokenizer
from vocagnolm.base.files import whole_path
from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.data.materials import Materials, student_tokenizer
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError, VocagnolmWarning, WriteError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.store import LossStore
from vocagnolm.train.run import open_blocks


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    return folder, make_lab(folder)


def files_digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }


def reference_stream(texts, student_folder, store, how, eos):
    """The obvious way: a document at a time."""
    student = load_tokenizer(str(student_folder))
    ids, guidance = [], []
    for number, text in enumerate(texts):
        own = student.spans(text)
        token_bytes, nll = store[number]
        ends = np.cumsum(token_bytes)
        teacher_spans = np.stack([ends - token_bytes, ends], axis=1)
        ids += [*own.ids.tolist(), eos]
        guidance += [*carry(align(own.spans, teacher_spans), nll, how).tolist(), math.nan]
    return np.array(ids), np.array(guidance, np.float16)


@pytest.mark.parametrize("how", ["max", "mean", "sum"])
def test_blocks_equal_the_document_by_document_reference(lab, tmp_path, how):
    folder, texts = lab
    recipe = recipe_from_dict(
        recipe_dict(folder, data={"blocks": str(tmp_path / "b")}, objective={"aggregation": how})
    )
    manifest = prepare(recipe)
    eos = load_tokenizer(str(folder / "student")).id_of("<end>")
    ids, guidance = reference_stream(
        texts, folder / "student", LossStore.open(folder / "store"), how, eos
    )
    blocks = Blocks(tmp_path / "b", 32)
    assert blocks.tokens == len(ids) and len(blocks) == (len(ids) - 1) // 32
    assert len(manifest["parts"]) == 4  # so blocks cross part borders
    got = [blocks[i] for i in range(len(blocks))]
    # 32 tokens are predicted; each block begins with the last token of the one before
    for index, block in enumerate(got):
        window = slice(32 * index, 32 * index + 33)
        np.testing.assert_array_equal(block["input_ids"], ids[window])
        np.testing.assert_array_equal(block["guidance"].astype(np.float16), guidance[window])
    summary = manifest["summary"]
    assert summary["documents"] == len(texts) and summary["separators"] == len(texts)
    assert summary["mapped"] == int((~np.isnan(guidance)).sum())
    assert sum(summary["guidance_histogram"]) == summary["mapped"]
    assert summary["mapped_share"] == summary["mapped"] / len(ids)
    assert 0 < summary["one_to_one_share"] < 1


def test_documents_are_numbered_within_a_block(lab, tmp_path):
    folder, _ = lab
    recipe = recipe_from_dict(recipe_dict(folder, data={"blocks": str(tmp_path / "b")}))
    prepare(recipe)
    blocks = Blocks(tmp_path / "b", 32)
    eos = load_tokenizer(str(folder / "student")).id_of("<end>")
    for index in range(len(blocks)):
        block = blocks[index]
        ends = np.concatenate([[0], np.cumsum(block["input_ids"] == eos)])[:-1]
        first = int(block["document"][0])  # a block that starts with a new document
        np.testing.assert_array_equal(block["document"] - first, ends)
        touched = blocks.documents(index)
        assert len(touched) == int(ends[-1]) + 1
        assert touched == sorted(touched)


def _prepare_slowly(tree, delay):
    from vocagnolm.data import prepare as part

    original = part.tokenise

    def slow(*args):
        time.sleep(delay)
        return original(*args)

    part.tokenise = slow
    prepare(recipe_from_dict(tree))


@pytest.mark.parametrize("parts_before_kill", [1, 3])
def test_killed_and_run_again_equals_uninterrupted(lab, tmp_path, parts_before_kill):
    folder, _ = lab
    tree = recipe_dict(folder, data={"blocks": str(tmp_path / "killed")})
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_prepare_slowly, args=(tree, 0.3))
    process.start()
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "killed").glob("part-*"))) < parts_before_kill:
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(BlocksError, match="not complete"):
        Blocks(tmp_path / "killed", 32)
    prepare(recipe_from_dict(tree))
    prepare(recipe_from_dict(recipe_dict(folder, data={"blocks": str(tmp_path / "whole")})))
    assert files_digest(tmp_path / "killed") == files_digest(tmp_path / "whole")


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path):
    """The library that writes it has errors of its own."""
    path = tmp_path / "part.safetensors"
    with pytest.raises(WriteError, match="could not be written"), whole_path(path) as temporary:
        save_file({"ids": np.zeros(3)}, temporary / "no folder")
    assert not list(tmp_path.iterdir())
    with whole_path(path) as temporary:
        save_file({"ids": np.zeros(3)}, temporary)
    assert [*tmp_path.iterdir()] == [path]


def test_other_settings_are_refused_and_named(lab, tmp_path):
    folder, _ = lab
    base = {"blocks": str(tmp_path / "b")}
    prepare(recipe_from_dict(recipe_dict(folder, data=base)))
    with pytest.raises(BlocksError, match=r"objective.aggregation: max in the blocks, mean now"):
        prepare(recipe_from_dict(recipe_dict(folder, data=base, objective={"aggregation": "mean"})))
    with pytest.raises(BlocksError, match=r"data.eos: token 0 in the blocks, None now"):
        prepare(recipe_from_dict(recipe_dict(folder, data={**base, "eos": None})))
    # a method that needs less may share them
    prepare(recipe_from_dict(recipe_dict(folder, data=base, objective={"method": "cpt"})))
    with pytest.raises(BlocksError, match="teacher_losses"):
        prepare(recipe_from_dict(recipe_dict(folder, data=base, objective={"method": "chunk"})))


def test_a_recipe_that_names_another_corpus_is_refused(lab, tmp_path):
    """By `train` too, which reads the corpus only where names or dates differ."""
    folder, texts = lab
    first = write_corpus(tmp_path / "first.jsonl", texts[:40])
    other = write_corpus(tmp_path / "other.jsonl", texts[40:])

    def opened(*files, **corpus):
        given = {"files": [*map(str, files)], **corpus}
        tree = recipe_dict(folder, corpus=given, data={"blocks": str(tmp_path / "b")})
        return open_blocks(Materials(recipe_from_dict(tree)), verify=True)

    tree = recipe_dict(folder, corpus={"files": [str(first)]}, data={"blocks": str(tmp_path / "b")})
    prepare(recipe_from_dict(tree))
    assert len(opened(first))
    another = r"(?s)do not belong to this recipe.*other.jsonl is new.*first.jsonl is not in it"
    for files, message in (
        ([other], another),
        ([tmp_path / "elsewhere" / "other.jsonl"], another),
        ([first, other], "other.jsonl is new"),
    ):
        with pytest.raises(BlocksError, match=message):
            opened(*files)
    with pytest.raises(BlocksError, match=r"corpus.limit_documents: None then, 7 now"):
        opened(first, limit_documents=7)
    with pytest.raises(BlocksError, match=r"corpus.text_field: text then, body now"):
        opened(tmp_path / "elsewhere" / "first.jsonl", text_field="body")
    # blocks stand for themselves: the corpus may be elsewhere, and may have got another name
    assert len(opened(tmp_path / "elsewhere" / "first.jsonl", limit_documents=40))
    assert len(opened(tmp_path / "elsewhere")) and len(opened("s3://bucket/first.jsonl"))
    assert len(opened(first.rename(tmp_path / "renamed.jsonl")))


def test_blocks_without_guidance_or_without_a_block_are_refused(lab, tmp_path):
    folder, texts = lab
    strangers = write_corpus(tmp_path / "c.jsonl", ["not scored at all"] * 20)

    def tree(name, corpus, **data):
        data = {"blocks": str(tmp_path / name), "missing": "keep", **data}
        return recipe_from_dict(recipe_dict(folder, corpus={"files": [str(corpus)]}, data=data))

    with pytest.raises(BlocksError, match=r"No token of .*c.jsonl has guidance: .*store holds no"):
        prepare(tree("none", strangers))
    few = write_corpus(tmp_path / "few.jsonl", ["not scored at all " * 9] * 20 + texts[:1])
    with pytest.warns(VocagnolmWarning, match=r"only \d+\.\d% of the tokens have guidance"):
        prepare(tree("few", few))
    manifest = json.loads((tmp_path / "few" / "manifest.json").read_text())
    manifest["summary"]["mapped"] = 0  # as an earlier version made them
    del manifest["content_sha256"]
    (tmp_path / "few" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BlocksError, match=r"guidance: no token has any"):
        open_blocks(Materials(tree("few", few)))
    with pytest.raises(BlocksError, match=r"a block of 100,000 needs 100,001"):
        prepare(tree("small", folder / "corpus.jsonl", block_size=100_000))


def test_a_folder_with_other_things_is_left_alone(lab, tmp_path):
    folder, _ = lab
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(BlocksError, match="not empty"):
        prepare(recipe_from_dict(recipe_dict(folder, data={"blocks": str(tmp_path)})))
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_documents_that_the_store_lacks(lab, tmp_path):
    folder, texts = lab
    corpus = write_corpus(tmp_path / "c.jsonl", [*texts[:5], "not in the store", *texts[5:8]])

    def tree(name, missing):
        return recipe_from_dict(
            recipe_dict(
                folder,
                corpus={"files": [str(corpus)]},
                data={"blocks": str(tmp_path / name), "missing": missing},
            )
        )

    with pytest.raises(BlocksError, match=r"Document 5 .*'not in the store"):
        prepare(tree("error", "error"))
    dropped = prepare(tree("drop", "drop"))["summary"]
    kept = prepare(tree("keep", "keep"))["summary"]
    assert dropped["documents"] == 8 and kept["documents"] == 9
    assert dropped["missing_documents"] == kept["missing_documents"] == 1
    assert dropped["mapped"] == kept["mapped"] and dropped["tokens"] < kept["tokens"]


def test_an_edited_document_is_noticed_by_its_hash(lab, tmp_path):
    folder, texts = lab
    corpus = write_corpus(tmp_path / "c.jsonl", [texts[0], texts[1].replace("a", "e", 1)])
    tree = recipe_dict(
        folder, corpus={"files": [str(corpus)]}, data={"blocks": str(tmp_path / "b")}
    )
    with pytest.raises(BlocksError, match="Document 1 "):
        prepare(recipe_from_dict(tree))


def test_unusable_documents_are_counted(lab, tmp_path):
    folder, texts = lab
    corpus = write_corpus(tmp_path / "c.jsonl", [texts[0], "", "\ud800", texts[1]])
    corpus.write_text(corpus.read_text() + "{broken\n")
    recipe = recipe_from_dict(
        recipe_dict(folder, corpus={"files": [str(corpus)]}, data={"blocks": str(tmp_path / "b")})
    )
    summary = prepare(recipe)["summary"]
    assert summary["documents"] == 2 and summary["unusable_documents"] == 3


def test_without_a_store_there_is_no_guidance(lab, tmp_path):
    folder, _ = lab
    recipe = recipe_from_dict(
        recipe_dict(
            folder,
            store={"path": None},
            data={"blocks": str(tmp_path / "b")},
            objective={"method": "cpt"},
        )
    )
    manifest = prepare(recipe)
    block = Blocks(tmp_path / "b", 32)[0]
    assert "guidance" not in block and manifest["columns"] == [
        *("ids", "document_tokens", "document_index")
    ]


def test_bos_from_the_template(tmp_path):
    texts = make_lab(tmp_path, 10)
    folder = save_tokenizer(tmp_path / "framed", kind="pieces")
    description = json.loads((folder / "tokenizer.json").read_text())
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(description))
    write_store(tmp_path / "s2", texts, tmp_path / "student")
    recipe = recipe_from_dict(
        recipe_dict(
            tmp_path, student={"tokenizer": str(folder)}, store={"path": str(tmp_path / "s2")}
        )
    )
    manifest = prepare(recipe)
    assert (manifest["settings"]["bos"], manifest["settings"]["eos"]) == (1, 2)
    blocks = Blocks(tmp_path / "blocks", 16)
    stream = np.concatenate([blocks[i]["input_ids"] for i in range(len(blocks))])
    guidance = np.concatenate([blocks[i]["guidance"] for i in range(len(blocks))])
    assert stream[0] == 1
    after_end = np.flatnonzero(stream[:-1] == 2) + 1
    assert (stream[after_end] == 1).all()
    assert np.isnan(guidance[np.isin(stream, [1, 2])]).all()


def test_block_text_and_spans_are_exact(lab, tmp_path):
    folder, texts = lab
    recipe = recipe_from_dict(
        recipe_dict(folder, data={"blocks": str(tmp_path / "b"), "extra_columns": ["text"]})
    )
    prepare(recipe)
    blocks = Blocks(tmp_path / "b", 32)
    tokenizer = load_tokenizer(str(folder / "student"))
    joined = b""
    for index in range(len(blocks)):
        text, spans = blocks.text(index)
        joined += text[spans[1 if index else 0, 0] :]  # its first token ended the block before
        for token, (start, end) in zip(blocks[index]["input_ids"], spans, strict=True):
            expected = tokenizer.bytes_of(int(token)) if tokenizer.token(token) != "<end>" else b""
            assert text[start:end] == expected
    assert "".join(texts).encode().startswith(joined) and len(joined) > 0


@pytest.mark.parametrize("aggregation", ["max", "mean", "sum"])
def test_chunk_guidance_aggregates_the_teacher_chunk(lab, tmp_path, aggregation):
    folder, _ = lab
    recipe = recipe_from_dict(
        recipe_dict(folder, data={"blocks": str(tmp_path / "b")}, objective={"method": "chunk"})
    )
    prepare(recipe)
    blocks = Blocks(tmp_path / "b", 32, chunks=4, aggregation=aggregation)
    store = LossStore.open(folder / "store")
    everything = np.concatenate([nll for _, nll in store])
    counts = [len(nll) for _, nll in store]
    starts = np.cumsum([0, *(int(p["tokens"]) for p in blocks.manifest["parts"])])
    checked = separators = 0
    for index in range(len(blocks)):
        if ((starts > index * 32) & (starts < index * 32 + 33)).any():
            continue  # crosses a part: the ranges of two parts do not share one numbering
        ranges = blocks.read("teacher_range", index * 32 + 1, index * 32 + 33)
        mapped = ranges[ranges[:, 0] >= 0]
        part = int(np.searchsorted(starts, index * 32, side="right")) - 1
        origin = sum(counts[: 16 * part])
        behind = everything[origin + mapped[:, 0].min() : origin + mapped[:, 1].max() + 1]
        # positions 8c..8c+7 predict tokens 8c+1..8c+8; what has no text has no guidance
        bounds = [len(behind) * chunk // 4 for chunk in range(5)]
        phi = [getattr(behind[low:high], aggregation)() for low, high in pairwise(bounds)]
        has_text = ranges[:, 0] >= 0
        expected = np.where(has_text, np.repeat(phi, 8), np.nan)
        np.testing.assert_allclose(blocks[index]["guidance"][1:], expected, rtol=1e-3)
        separators += int((~has_text).sum())
        checked += 1
    assert checked > 5 and separators > 5


def test_blocks_tell_the_mean_of_the_teachers_own_tokens(lab, tmp_path):
    folder, _ = lab
    tree = recipe_dict(folder, data={"blocks": str(tmp_path / "b")}, objective={"unmapped": "mean"})
    prepare(recipe_from_dict(tree))
    blocks = Blocks(tmp_path / "b", 32, teacher_sums=True)
    store = LossStore.open(folder / "store")
    losses = np.concatenate([store[i][1] for i in range(16)])  # the first part's documents
    ranges = blocks.read("teacher_range", 0, 33)
    behind = losses[ranges[ranges[:, 0] >= 0, 0].min() : ranges[:, 1].max() + 1]
    total, count = blocks[0]["teacher_sums"]
    assert count == len(behind)
    assert total == pytest.approx(behind.astype(np.float16).astype(float).sum())


def test_order_is_a_permutation_per_epoch_and_depends_on_the_seed(lab, tmp_path):
    folder, _ = lab
    prepare(recipe_from_dict(recipe_dict(folder, data={"blocks": str(tmp_path / "b")})))
    blocks = Blocks(tmp_path / "b", 32)
    n = len(blocks)
    order = TrainingOrder(blocks, 2 * n + 3, seed=5)
    visited = [order.block_index(i) for i in range(len(order))]
    assert sorted(visited[:n]) == sorted(visited[n : 2 * n]) == list(range(n))
    assert visited[:n] != visited[n : 2 * n]
    again = TrainingOrder(blocks, 2 * n + 3, seed=5)
    assert [again.block_index(i) for i in reversed(range(len(order)))] == visited[::-1]
    other = TrainingOrder(blocks, n, seed=6)
    assert [other.block_index(i) for i in range(n)] != visited[:n]
    assert order[n]["block"] == visited[n]


def test_too_small_a_corpus_says_so(lab, tmp_path):
    folder, _ = lab
    prepare(recipe_from_dict(recipe_dict(folder, data={"blocks": str(tmp_path / "b")})))
    with pytest.raises(BlocksError, match="a block of 10,000,000 needs"):
        Blocks(tmp_path / "b", 10_000_000)


def test_the_students_revision_is_that_of_its_tokenizer_too(lab, monkeypatch):
    folder, _ = lab
    asked = []

    def load(source, **options):
        asked.append((source, options))
        return load_tokenizer(str(folder / "student"))

    monkeypatch.setattr("vocagnolm.data.materials.load_tokenizer", load)
    tree = recipe_dict(folder, student={"model": "owner/name", "revision": "v2", "tokenizer": None})
    recipe = recipe_from_dict(tree)
    student_tokenizer(recipe)
    recipe.student.tokenizer = "owner/other"
    student_tokenizer(recipe)
    assert asked == [("owner/name", {"revision": "v2"}), ("owner/other", {"revision": None})]


def test_blocks_begin_documents_as_the_tokenizer_says(lab, tmp_path):
    """`data.bos: auto` is the same rule as in scoring and evaluation, whatever files say it."""
    folder, texts = lab
    student = shutil.copytree(folder / "student", tmp_path / "student")
    settings = json.loads((student / "tokenizer_config.json").read_text())
    settings |= {"add_bos_token": True, "bos_token": "<end>"}
    (student / "tokenizer_config.json").write_text(json.dumps(settings))
    tree = recipe_dict(
        folder, student={"tokenizer": str(student)}, data={"blocks": str(tmp_path / "b")}
    )
    manifest = prepare(recipe_from_dict(tree))
    assert manifest["summary"]["separators"] == 2 * len(texts)
    prefix = load_tokenizer(student).prefix_ids
    ids = Blocks(tmp_path / "b", 32).read("ids", 0, manifest["tokens"])
    starts, _ = Blocks(tmp_path / "b", 32)._document_table()
    assert (ids[starts] == prefix[0]).all()


def test_progress_is_told_as_lines(lab, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from vocagnolm.cli import app

    monkeypatch.setenv("VOCAGNOLM_PROGRESS_SECONDS", "0")
    path = tmp_path / "r.yaml"
    data = {"blocks": str(tmp_path / "blocks"), "part_documents": 5}
    path.write_text(json.dumps(recipe_dict(lab[0], data=data)))
    result = CliRunner().invoke(app, ["prepare", str(path), "--workers", "1"])
    lines = [line for line in result.stderr.splitlines() if line.startswith("preparing: ")]
    assert len(lines) > 1 and "100%" in lines[-1] and "ETA" in lines[-1], result.output
