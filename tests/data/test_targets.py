"""Targets in blocks, against the obvious way: a document at a time."""

import functools
import json

import chat_kit
import made
import numpy as np
import pytest
from training_kit import (
    make_lab,
    recipe_dict,
    save_tokenizer,
    some_alternatives,
    write_corpus,
    write_store,
)
from typer.testing import CliRunner

from vocagnolm.alignment import (
    TargetTable,
    TeacherTokens,
    align,
    carry_alternatives,
    load_tokenizer,
)
from vocagnolm.alignment.targets import TARGETS_RULE
from vocagnolm.alternatives import Alternatives, AlternativesSpec, Vocabulary, pack
from vocagnolm.base.files import write_json
from vocagnolm.chat import shared_text, trained_ranges, trained_tokens
from vocagnolm.cli import app
from vocagnolm.data import guidance as module
from vocagnolm.data.blocks import Blocks
from vocagnolm.data.guidance import Laid, LaidTeacher, TargetsPlan, carry_targets
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError, RecipeError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.store import LossStore
from vocagnolm.train.check import check

K = 3


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A second teacher with a third tokenizer, whose store lacks the last ten documents."""
    folder = tmp_path_factory.mktemp("lab")
    texts = make_lab(folder, alternatives=K)
    save_tokenizer(folder / "third", kind="bytes", size=400)
    write_store(folder / "second", texts[:50], folder / "third", seed=1, alternatives=K)
    write_store(folder / "more", texts, folder / "third", seed=1, alternatives=K + 2)
    write_store(folder / "drawn", texts, folder / "teacher", alternatives=K, sampled=True)
    write_store(folder / "losses", texts, folder / "teacher")
    return folder, texts


def recipe_of(folder, target, objective=None, **sections):
    sections["data"] = {"blocks": str(target), **sections.get("data", {})}
    tree = recipe_dict(folder, objective={"method": "distill", **(objective or {})}, **sections)
    return recipe_from_dict(tree)


@functools.cache
def student_and_table(folder, path):
    student = load_tokenizer(str(folder / "student"))
    vocabulary = LossStore.open(path).vocabulary
    return student, TargetTable(student, vocabulary, student.id_of("<end>"))


def obvious(folder, text, store, count=None, inside=True):
    """Of one document: (ids, probabilities, where the teacher has a say) [tokens, K]."""
    student, table = student_and_table(folder, store.path)
    index = store.of(text)
    own = student.spans(text)
    given = store.alternatives(index)
    known = TeacherTokens(
        spans=store.spans(index),
        alternatives=Alternatives(given.packed[:, :count], given.sampled),
    )
    encoded = np.frombuffer(text.encode(), np.uint8)
    mapping = align(own.spans, known.spans)
    return carry_alternatives(table, own.ids, own.spans, known, mapping, encoded, inside=inside)


def columns(folder):
    """The streams of all parts, one behind the other."""
    blocks = Blocks(folder, 32)
    return [blocks.read(name, 0, blocks.tokens) for name in ("target_ids", "target_p")]


def assert_same(target, folder, texts, store, **options):
    ids, p = columns(target)
    at = 0
    for text in texts:
        found = obvious(folder, text, store, **options)
        rows = slice(at, at + len(found.ids))
        np.testing.assert_array_equal(ids[rows], found.ids)
        np.testing.assert_array_equal(p[rows], found.probability.astype(np.float16))
        at = rows.stop
        assert (p[at] == 0).all()  # what stands behind a document has its label alone
        at += 1
    assert at == len(ids)


@pytest.mark.parametrize(
    ("objective", "options"),
    [({}, {}), ({"inside": False}, {"inside": False}), ({"alternatives": 2}, {"count": 2})],
    ids=str,
)
def test_blocks_equal_the_document_by_document_reference(lab, tmp_path, objective, options):
    folder, texts = lab
    manifest = prepare(recipe_of(folder, tmp_path / "b", objective))
    assert len(manifest["parts"]) == 4
    assert {"target_ids", "target_p", "guidance"} <= set(manifest["columns"])
    store = LossStore.open(folder / "store")
    assert_same(tmp_path / "b", folder, texts, store, **options)
    shares = manifest["summary"]["target_shares"]
    assert 0.3 < shares["shared"] < 1 and shares["shared"] + shares["inside"] < 1.001
    spelled = [shares[name] for name in ("following", "exact", "several", "unspelled", "beyond")]
    assert sum(spelled) == pytest.approx(1.0)


def test_drawn_alternatives(lab, tmp_path):
    folder, texts = lab
    recipe = recipe_of(folder, tmp_path / "b", store={"path": str(folder / "drawn")})
    prepare(recipe)
    assert_same(tmp_path / "b", folder, texts, LossStore.open(folder / "drawn"))
    _, p = columns(tmp_path / "b")
    np.testing.assert_allclose(np.unique(p[p > 0]), [1 / 3, 1 / 2, 1], rtol=1e-3)


def test_blocks_give_windows_of_them(lab, tmp_path):
    folder, _ = lab
    prepare(recipe_of(folder, tmp_path / "b"))
    ids, p = columns(tmp_path / "b")
    blocks = Blocks(tmp_path / "b", 32, targets=True)
    for index in (0, 7, len(blocks) - 1):
        block = blocks[index]
        window = slice(32 * index, 32 * index + 33)
        np.testing.assert_array_equal(block["target_ids"], ids[window])
        np.testing.assert_array_equal(block["target_p"], p[window].astype(np.float32))
        assert block["target_ids"].dtype == np.int32 and block["target_p"].dtype == np.float32
    assert "target_ids" not in Blocks(tmp_path / "b", 32)[0]


def test_teachers_are_averaged_by_their_weights(lab, tmp_path):
    folder, texts = lab
    paths = [str(folder / "store"), str(folder / "second")]
    prepare(recipe_of(folder, tmp_path / "b", store={"path": paths, "weights": [3.0, 1.0]}))
    ids, p = columns(tmp_path / "b")
    assert ids.shape[1] == 2 * K
    first, second = (LossStore.open(path) for path in paths)
    at = shared = alone = 0
    for number, text in enumerate(texts):
        one = obvious(folder, text, first)
        other = obvious(folder, text, second) if number < 50 else None
        rows, nobody = slice(at, at + len(one.ids)), np.zeros(len(one.ids), bool)
        second_has = nobody if other is None else other.has_targets
        weights = np.stack([3.0 * one.has_targets, 1.0 * second_has])
        shares = weights / np.maximum(weights.sum(0), 1e-30)
        expected = one.probability * shares[0][:, None]
        np.testing.assert_allclose(p[rows, :K], expected, atol=1e-3)
        if other is not None:
            expected = other.probability * shares[1][:, None]
            np.testing.assert_allclose(p[rows, K:], expected, atol=1e-3)
        else:
            assert (p[rows, K:] == 0).all()
        shared += int(weights.all(0).sum())
        alone += int(((weights[0] > 0) & (weights[1] == 0)).sum())
        at += len(one.ids) + 1
    assert shared > 100 and alone > 50
    assert p.sum(axis=1).max() <= 1.001


def test_agreement_with_the_text_keeps_a_teachers_weight():
    """The first teacher expected what follows, a token that goes on beyond the student's: all that
    it says leads to the label there, and the second has a quarter of the say, as everywhere."""
    student = load_tokenizer(made.tokenizer("byte-level"))
    ours = student.spans("%#@")
    assert ours.spans.tolist() == [[0, 1], [1, 2], [2, 3]]
    entries = [b"%", b"#", b"@", b"%#@", b"%#", b"x"]
    table = TargetTable(student, Vocabulary.of(entries, [], False), None)
    laid = Laid(ours.spans, np.zeros(3, np.int64), np.zeros(1, np.int64))

    def teacher(spans, expected):
        """`expected`: of each token what follows and what else may, of probability 0.4 and 0.3."""
        ids = np.array([[entries.index(one) for one in row] for row in expected])
        nll = np.broadcast_to(-np.log([0.4, 0.3]), ids.shape)
        follows = np.broadcast_to([True, False], ids.shape)
        packed = pack(ids, nll, follows)
        return LaidTeacher(np.array(spans), np.zeros(len(spans)), np.ones(1), packed)

    sure = teacher([[0, 3]], [[b"%#@", b"x"]])
    other = teacher(ours.spans, [[b"%", b"x"], [b"#", b"x"], [b"@", b"x"]])
    plan = TargetsPlan(
        tables=(table, table), spec=AlternativesSpec(2), inside=True, weights=(3.0, 1.0)
    )
    both = [sure, other]
    mappings = [align(ours.spans, one.spans) for one in both]
    text = np.frombuffer(b"%#@", np.uint8)
    found, _ = carry_targets(ours.ids, laid, both, mappings, text, plan)
    assert found.has_targets.all()
    # `x`: of both at the beginning, then of the second alone, a quarter of 0.3
    np.testing.assert_allclose(found.probability[:, 1], [0.75 * 0.3, 0, 0], atol=2e-3)
    np.testing.assert_allclose(found.probability[:, 3], np.full(3, 0.25 * 0.3), atol=2e-3)


def test_blocks_say_by_which_rule_and_older_ones_train_on(lab, tmp_path):
    folder, _ = lab
    recipe = recipe_of(folder, tmp_path / "b")
    manifest = prepare(recipe)
    assert manifest["settings"]["guidance"]["targets"]["rule"] == TARGETS_RULE
    del manifest["settings"]["guidance"]["targets"]["rule"]
    write_json(tmp_path / "b" / "manifest.json", manifest, sealed=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").glob("part-*")}
    assert "rule" not in prepare(recipe)["settings"]["guidance"]["targets"]
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "b").glob("part-*")}
    (warning,) = [line for line in check(recipe).warnings if "older rule" in line]
    assert f"(1; this program has {TARGETS_RULE})" in warning


def test_any_number_of_workers_gives_the_same_bytes(lab, tmp_path):
    folder, _ = lab
    for workers in (1, 2):
        prepare(recipe_of(folder, tmp_path / f"b{workers}"), workers=workers)
    alone, together = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("[!.]*")}
        for name in ("b1", "b2")
    )
    assert alone == together and len(alone) == 4 + 2  # parts, settings, manifest


def test_one_preparation_serves_every_method(lab, tmp_path):
    """The columns stand beside the others; a recipe that does not read them takes the blocks."""
    folder, _ = lab
    made = recipe_of(
        folder, tmp_path / "b", {"method": "guided"}, data={"extra_columns": ["targets"]}
    )
    prepare(made)
    assert prepare(recipe_of(folder, tmp_path / "b"))["summary"]["targets"]
    plain = recipe_of(folder, tmp_path / "plain", {"method": "guided"})
    assert "targets" not in prepare(plain)["summary"]


def test_the_table_is_made_once(lab, tmp_path, monkeypatch):
    folder, _ = lab
    monkeypatch.setenv("VOCAGNOLM_CACHE", str(tmp_path / "cache"))
    made = []
    monkeypatch.setattr(module, "spell", lambda *a: made.append(1) or REAL_SPELL(*a))
    prepare(recipe_of(folder, tmp_path / "a"))
    (cached,) = (tmp_path / "cache" / "spelling").iterdir()
    prepare(recipe_of(folder, tmp_path / "b"))
    assert len(made) == 1
    content = bytearray(cached.read_bytes())
    content[len(content) // 2] ^= 1  # a disk may forget a bit: it is made again
    cached.write_bytes(content)
    prepare(recipe_of(folder, tmp_path / "c"))
    assert len(made) == 2
    parts = [(tmp_path / name / "part-00000.safetensors").read_bytes() for name in "abc"]
    assert parts[0] == parts[1] == parts[2]
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("VOCAGNOLM_CACHE", str(tmp_path / "file" / "cache"))
    prepare(recipe_of(folder, tmp_path / "d"))  # nowhere to keep it
    assert len(made) == 3


REAL_SPELL = module.spell


# ---- conversations ----


def test_conversations_have_targets_where_they_are_trained_on(tmp_path):
    talks = chat_kit.make_chat_lab(tmp_path, 12)
    settings = ScoreSettings(device="cpu", threads=1, alternatives=K)
    corpus = tmp_path / "corpus.jsonl"
    score_corpus(tmp_path / "teacher", corpus, tmp_path / "store", settings=settings)
    tree = {
        "student": {"model": str(tmp_path / "start")},
        "corpus": {"files": [str(corpus)]},
        "store": {"path": str(tmp_path / "store")},
        "data": {"blocks": str(tmp_path / "b"), "block_size": 128},
        "objective": {"method": "distill"},
    }
    prepare(recipe_from_dict(tree))
    store = LossStore.open(tmp_path / "store")
    student = chat_kit.loaded(tmp_path / "student")
    table = TargetTable(student.base, store.vocabulary, student.end_of_turn)
    ids, p = columns(tmp_path / "b")
    at = told = ends = 0
    for index, talk in enumerate(talks):
        text = shared_text(talk)
        own = student.spans(text)
        trained = trained_tokens(own, trained_ranges(text, "assistant"))
        known = TeacherTokens(spans=store.spans(index), alternatives=store.alternatives(index))
        wanted = carry_alternatives(
            table,
            own.ids[trained],
            own.spans[trained],
            known,
            align(own.spans[trained], known.spans),
            np.frombuffer(text.encode(), np.uint8),
        )
        here = slice(at, at + len(own))
        np.testing.assert_array_equal(p[here][trained], wanted.probability.astype(np.float16))
        kept = p[here][trained] > 0
        np.testing.assert_array_equal(ids[here][trained][kept], wanted.ids[kept])
        assert (p[here][~trained] == 0).all()
        told += int(wanted.has_targets.sum())
        ends += int(wanted.has_targets[own.ids[trained] == student.end_of_turn].sum())
        at += len(own)
    assert told > 100 and ends >= len(talks)
    block = Blocks(tmp_path / "b", 128, targets=True)[0]
    assert block["target_p"].shape == (129, K) and (block["target_p"] > 0).any()


# ---- bad input ----


def test_a_store_without_alternatives(lab, tmp_path):
    folder, _ = lab
    recipe = recipe_of(folder, tmp_path / "b", store={"path": str(folder / "losses")})
    with pytest.raises(BlocksError, match=r"losses holds no alternatives.*--alternatives 4"):
        prepare(recipe)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("stores", "objective", "message"),
    [
        (["store"], {"alternatives": 5}, r"objective.alternatives is 5, but .*store holds 3"),
        (["store", "more"], {}, r"different numbers of alternatives: .*3, .*5.*at most 3"),
        (["store", "drawn"], {}, r"kinds of alternatives: .*store has 3, .*drawn has sampled:3"),
        (["store", "more"], {"alternatives": 4}, r"a store holds 3 per token"),
    ],
)
def test_stores_that_do_not_fit(lab, tmp_path, stores, objective, message):
    folder, _ = lab
    paths = [str(folder / name) for name in stores]
    store = {"path": paths if len(paths) > 1 else paths[0]}
    with pytest.raises(BlocksError, match=message):
        prepare(recipe_of(folder, tmp_path / "b", objective, store=store))


def test_as_many_as_all_stores_have(lab, tmp_path):
    folder, _ = lab
    paths = [str(folder / name) for name in ("store", "more")]
    manifest = prepare(
        recipe_of(folder, tmp_path / "b", {"alternatives": 3}, store={"path": paths})
    )
    assert columns(tmp_path / "b")[0].shape[1] == 6
    assert manifest["settings"]["guidance"]["targets"]["alternatives"] == 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0], "one for each"), ([1.0, -1.0], "must not be negative"), ([0.0, 0.0], "not all")],
)
def test_weights_that_do_not_fit(lab, tmp_path, weights, message):
    folder, _ = lab
    paths = [str(folder / "store"), str(folder / "second")]
    with pytest.raises(RecipeError, match=message):
        prepare(recipe_of(folder, tmp_path / "b", store={"path": paths, "weights": weights}))


def test_a_student_that_cannot_spell(tmp_path):
    """No characters and no bytes to write the teacher's tokens with."""
    from tokenizers import Tokenizer, models

    texts = ["東京は大きい。" * 5, "京都は古い。" * 5]
    save_tokenizer(tmp_path / "teacher", kind="bytes")
    (tmp_path / "student").mkdir()
    words = {"<unk>": 0, "</s>": 1, **{c: n + 2 for n, c in enumerate(sorted(set("".join(texts))))}}
    Tokenizer(models.BPE(words, [], unk_token="<unk>")).save(
        str(tmp_path / "student" / "tokenizer.json")
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "student" / "tokenizer_config.json").write_text(json.dumps(config))
    write_corpus(tmp_path / "corpus.jsonl", texts)
    write_store(tmp_path / "store", texts, tmp_path / "teacher", alternatives=K)
    with pytest.raises(
        BlocksError, match=r"student \(BPE\) can represent \d\.\d% of the teacher's"
    ):
        prepare(recipe_of(tmp_path, tmp_path / "b"))


def test_blocks_with_other_targets_are_refused(lab, tmp_path):
    folder, _ = lab
    prepare(recipe_of(folder, tmp_path / "b"))
    for objective, message in (
        ({"alternatives": 2}, "objective.alternatives: 3 in the blocks, 2 now"),
        ({"inside": False}, "objective.inside: True in the blocks, False now"),
    ):
        with pytest.raises(BlocksError, match=message):
            prepare(recipe_of(folder, tmp_path / "b", objective))
    prepare(recipe_of(folder, tmp_path / "plain", {"method": "guided"}))
    with pytest.raises(BlocksError, match="made without the teacher's alternatives"):
        prepare(recipe_of(folder, tmp_path / "plain"))


def test_the_command_tells_what_became_of_them(lab, tmp_path):
    folder, _ = lab
    recipe = recipe_of(folder, tmp_path / "b")
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    done = CliRunner().invoke(app, ["prepare", str(tmp_path / "r.yaml"), "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "targets" in done.output and "inside a teacher token" in done.output


def test_made_up_alternatives_hold_the_token_itself():
    ids = np.arange(100)
    found = Alternatives(some_alternatives(ids, K, 0))
    assert 0.3 < found.follows[:, 0].mean() < 0.7
