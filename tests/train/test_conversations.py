"""Conversations from files to trained students: two tiny models with two different templates."""

import json
from pathlib import Path

import chat_kit
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from faults_kit import LONG
from training_kit import recipe_dict
from transformers import AutoModelForCausalLM

from vocagnolm.alignment import align, carry, stretch_losses, stretches
from vocagnolm.chat import shared_text, trained_ranges, trained_tokens
from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.data.guidance import tiling
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError, StoreError
from vocagnolm.model import open_model
from vocagnolm.objective import ObjectiveConfig, ScoredBatch, Targets, select
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import LocalTeacher, ScoreSettings, score_corpus
from vocagnolm.store import LossStore
from vocagnolm.train.check import check
from vocagnolm.train.collate import GuidedCollator
from vocagnolm.train.run import train
from vocagnolm.train.teacher import OnlineTeacher, TeacherView

SETTINGS = ScoreSettings(device="cpu", shard_documents=16)
SIZE = 160


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("talks")
    chat_kit.make_chat_lab(folder)
    score_corpus(folder / "teacher", folder / "corpus.jsonl", folder / "store", settings=SETTINGS)
    extra = ["text", "teacher_losses", "stretch"]
    prepare(recipe(folder, data={"extra_columns": extra}))
    return folder


def recipe(lab: Path, **sections):
    own = {
        "student": {"model": str(lab / "start"), "tokenizer": None, "config": None},
        "data": {"blocks": str(lab / "blocks"), "block_size": SIZE, "part_documents": 16},
        "train": {"device": "cpu", "batch_blocks": 4, "micro_batch": 2, "epochs": 2.0},
    }
    tree = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
    return recipe_from_dict(recipe_dict(lab, **tree))


def texts(lab: Path) -> list[str]:
    lines = (lab / "corpus.jsonl").read_text().splitlines()
    talks = [[chat_kit.Message(**m) for m in json.loads(line)["messages"]] for line in lines]
    return [shared_text(talk) for talk in talks]


def float32_entries(lab: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What the store holds, before it is rounded."""
    files = open_model(str(lab / "teacher"), device="cpu")
    teacher = LocalTeacher(files, SETTINGS, conversations=True)
    found = texts(lab)
    read = teacher.tokenize(found)
    stored = [d.stored(scores) for d, scores in zip(read, teacher.start(read)(), strict=True)]
    return {text: (sizes, one.nll) for text, (sizes, one) in zip(found, stored, strict=True)}


def test_a_store_holds_contents_and_ends_of_turns(lab):
    store = LossStore.open(lab / "store")
    model = AutoModelForCausalLM.from_pretrained(lab / "teacher").eval()
    chat = chat_kit.loaded(lab / "teacher")
    for place, text in list(enumerate(texts(lab)))[:6]:
        token_bytes, nll = store[place]
        tokens = chat.spans(text)
        assert int(token_bytes.sum()) == len(text.encode())
        with torch.no_grad():
            logits = model(torch.tensor(tokens.ids.astype(np.int64))[None]).logits[0]
        own = F.cross_entropy(
            logits[:-1], torch.tensor(tokens.ids[1:].astype(np.int64)), reduction="none"
        )
        held = tokens.token_bytes > 0
        np.testing.assert_allclose(nll, own.numpy()[held[1:]], atol=6e-3)
    identity = store.manifest["identity"]
    assert identity["template"]["origin"] == "own"
    assert identity["corpus"]["format"] == ["messages"]


def test_another_template_is_another_store(lab):
    other = ScoreSettings(device="cpu", shard_documents=16, chat_template="plain")
    with pytest.raises(StoreError, match=r"template\.fingerprint"):
        score_corpus(lab / "teacher", lab / "corpus.jsonl", lab / "store", settings=other)


def test_blocks_hold_whole_conversations_and_train_on_answers(lab):
    blocks = Blocks(lab / "blocks", SIZE)
    chat = chat_kit.loaded(lab / "student")
    by_index = dict(enumerate(texts(lab)))
    seen = []
    for index in range(len(blocks)):
        block = blocks[index]
        at = 0
        for number, document in enumerate(blocks.documents(index)):
            text = by_index[document]
            tokens = chat.spans(text)
            size = min(len(tokens), SIZE + 1)
            here = slice(at, at + size)
            assert block["input_ids"][here].tolist() == tokens.ids[:size].tolist()
            assert set(block["document"][here].tolist()) == {number}
            trained = trained_tokens(tokens, trained_ranges(text, "assistant"))[:size]
            assert block["trained"][here].tolist() == trained.tolist()
            at += size
            seen.append(document)
        assert not block["trained"][at:].any() and np.isnan(block["guidance"][at:]).all()
        assert np.isnan(block["guidance"][~block["trained"]]).all()
    assert sorted(seen) == list(range(len(by_index)))
    assert blocks.bins.tokens > 0.8 * len(blocks) * (SIZE + 1)


@pytest.mark.parametrize("size", [40, SIZE])
@pytest.mark.parametrize("how", ["max", "mean", "sum", "stretch"])
def test_store_and_online_teacher_agree(lab, how, size):
    """To 1e-6 before the store rounds; the blocks hold what is rounded to half precision."""
    whole = how == "stretch"
    config = ObjectiveConfig(compare="stretch" if whole else "token")
    blocks = Blocks(lab / "blocks", size, stretches=whole)
    chat = chat_kit.loaded(lab / "teacher")
    view = TeacherView(TrainingOrder(blocks, 4, seed=0), chat, (), by_stretch=whole)
    model = AutoModelForCausalLM.from_pretrained(lab / "teacher").eval()
    teacher = OnlineTeacher(model, config=config, aggregation="max" if whole else how)
    items = [view[n] for n in range(4)]
    batch = GuidedCollator.for_blocks(True)(items)
    guided = teacher.guide(batch)["guidance"].numpy()
    student, entries = chat_kit.loaded(lab / "student"), float32_entries(lab)
    by_index, mapped = texts(lab), 0
    for row, item in enumerate(items):
        expected = np.full(size + 1, np.nan, np.float32)
        at = 0
        for document in blocks.documents(item["block"]):
            text = by_index[document]
            tokens = student.spans(text)
            kept = min(len(tokens), size + 1)
            token_bytes, nll = entries[text]
            trained = np.flatnonzero(trained_tokens(tokens, trained_ranges(text, "assistant")))
            spans, theirs = tokens.spans[trained], tiling(token_bytes)
            if whole:
                found = stretches(spans, theirs)
                values = stretch_losses(found, theirs, nll)
                cut = np.unique(found.number[trained >= kept])  # not all of it is there
                values[np.isin(found.number, cut)] = np.nan
            else:
                values = carry(align(spans, theirs), nll, how)
            inside = trained < kept
            expected[at + trained[inside]] = values[inside]
            at += kept
        np.testing.assert_allclose(guided[row], expected[1:], rtol=2e-6, atol=1e-6)
        if how in ("max", "stretch"):  # the aggregation of the blocks
            stored = item["guidance"][1:]
            np.testing.assert_allclose(stored, expected[1:], rtol=2e-3, atol=1e-3)
        mapped += int((~np.isnan(expected)).sum())
        if whole:
            assert (blocks[item["block"]]["stretch"][1:] == batch["stretch"][row].numpy()).all()
    assert mapped > 10


def test_the_end_of_a_turn_is_guided_by_the_teachers(lab):
    blocks = Blocks(lab / "blocks", 480)
    end = chat_kit.loaded(lab / "student").id_of("<|im_end|>")
    entries = float32_entries(lab)
    by_index = texts(lab)
    block, expected = blocks[0], []
    for document in blocks.documents(0):
        text = by_index[document]
        token_bytes, nll = entries[text]
        ends = np.cumsum(token_bytes)
        for low, high in trained_ranges(text, "assistant").tolist():
            if any(b == high for b in ends):
                expected.append(nll[list(ends).index(high)])
            assert text.encode()[high - 1] == 3 and low < high
    ids = block["input_ids"]
    found = block["guidance"][(ids == end) & block["trained"]]
    np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_what_the_template_writes_is_kept_without_guidance(lab, tmp_path):
    """Of Qwen3 the empty think block before an answer, whatever is selected among the others."""
    own = {
        "student": {"chat_template": str(chat_kit.TEMPLATES / "trl" / "qwen3_training.jinja")},
        "data": {"blocks": str(tmp_path / "blocks"), "block_size": 480, "missing": "drop"},
        "corpus": {"limit_documents": 8},
    }
    prepare(recipe(lab, **own))
    blocks = Blocks(tmp_path / "blocks", 480)
    batch = GuidedCollator.for_blocks()([blocks[n] for n in range(len(blocks))])
    labels, guidance = batch["labels"], batch["guidance"]
    nll = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0))
    targets = Targets(labels_BT=labels, guidance_BT=guidance)
    kept = select(ScoredBatch(targets, nll), ObjectiveConfig())
    unguided = (labels >= 0) & guidance.isnan()
    assert kept[unguided].all() and 0.3 < kept[(labels >= 0) & ~unguided].float().mean() < 0.5
    chat = chat_kit.loaded(lab / "student")
    written = b"".join(chat.bytes_of(n) or b"" for n in labels[unguided].tolist())
    answers = sum(len(trained_ranges(text, "assistant")) for text in texts(lab)[:8])
    assert written.count(b"<think>\n\n</think>\n\n") == answers > 8
    lines = check(recipe(lab, **own), measure=False).warnings
    assert any("marks generation, and adds 'Ċ' in 8 of 8 conversations" in line for line in lines)


def plain_loss(lab: Path, blocks: Blocks, indices: list[int]) -> float:
    """Mean nll of the answers, one conversation at a time."""
    model = AutoModelForCausalLM.from_pretrained(lab / "start").eval()
    chat, by_index = chat_kit.loaded(lab / "student"), texts(lab)
    losses = []
    for index in indices:
        for document in blocks.documents(index):
            tokens = chat.spans(by_index[document])
            trained = trained_tokens(tokens, trained_ranges(by_index[document], "assistant"))
            ids = torch.tensor(tokens.ids[: blocks.block_size + 1].astype(np.int64))
            with torch.no_grad():
                nll = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            losses.append(nll[torch.tensor(trained[1 : len(ids)])])
    return float(torch.cat(losses).mean())


def test_assistant_only_loss_equals_plain_pytorch(lab, tmp_path):
    tree = {"objective": {"method": "cpt"}, "run": {"folder": str(tmp_path / "run")}}
    tree["train"] = {"batch_blocks": 4, "micro_batch": 4, "tokens": 4 * SIZE}
    train(recipe(lab, **tree), quiet=True)
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    blocks = Blocks(lab / "blocks", SIZE)
    order = TrainingOrder(blocks, 4, seed=0)
    expected = plain_loss(lab, blocks, [order.block_index(n) for n in range(4)])
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    card = (tmp_path / "run/model/README.md").read_text()
    assert "| conversations | trained on: assistant; its own template |" in card
    assert (tmp_path / "run/model/chat_template.jinja").read_text() == chat_kit.CHATML


METHODS = {
    "guided": {},
    "guided-mean": {"objective": {"unmapped": "mean"}},
    "guided-stretch": {"objective": {"compare": "stretch"}},
    "guided-online": {"teacher": {"online": True}},
    "random": {},
    "chunk": {},
    "alm": {},
    "alm-online": {"teacher": {"online": True}},
    "uld": {},
    "kld": {"teacher": {"model": "twin"}},
    "rho1": {"teacher": {"model": "twin", "online": True}},
}


@pytest.mark.parametrize(
    "name", [n for n in METHODS if LONG or n not in ("guided-mean", "alm-online")]
)
def test_every_method_reads_conversations(lab, tmp_path, name):
    method, given = name.partition("-")[0], METHODS[name]
    model = given.get("teacher", {}).get("model", "teacher")
    tree = {
        "teacher": {**given.get("teacher", {}), "model": str(lab / model)},
        "objective": {"method": method, **given.get("objective", {})},
        "run": {"folder": str(tmp_path / "run")},
        "train": {"tokens": 2 * 4 * SIZE},
    }
    ready = check(recipe(lab, **tree), measure=False)
    assert ready.problems == []
    train(recipe(lab, **tree), quiet=True)
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps and all(np.isfinite(step["loss"]) for step in steps)
    if method == "guided":
        assert all(0.3 < step["kept_share"] < 0.6 for step in steps)
        assert all(step["mapped_share"] > 0.9 for step in steps)


def test_what_blocks_were_made_for_is_compared(lab, tmp_path):
    blocks = {"blocks": str(tmp_path / "blocks"), "train_on": "last"}
    some = {"corpus": {"limit_documents": 24}, "data": {**blocks, "missing": "drop"}}
    manifest = prepare(recipe(lab, **some))
    everything = json.loads((lab / "blocks/manifest.json").read_text())["summary"]
    assert 0 < manifest["summary"]["trained"] < everything["trained"]
    for change, line in (
        ({"data": {**some["data"], "train_on": "all"}}, "data.train_on: last in the blocks, all"),
        ({"student": {"chat_template": "plain"}}, "student.chat_template: the blocks were made"),
    ):
        with pytest.raises(BlocksError, match=line):
            prepare(recipe(lab, **(some | change)))


def test_check_says_what_templates_do(lab, tmp_path):
    talks = [
        [chat_kit.Message("user", "hi"), chat_kit.Message("assistant", " yes ")],
        [chat_kit.Message("assistant", "first"), chat_kit.Message("user", "b")],
    ]
    chat_kit.write_conversations(tmp_path / "c.jsonl", talks)
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.content | trim }}>"
        "{% endfor %}"
    )
    report = check(
        recipe(
            lab,
            student={"chat_template": str(strict)},
            corpus={"files": [str(tmp_path / "c.jsonl")]},
            store={"path": None},
            objective={"method": "cpt"},
            data={"blocks": str(tmp_path / "blocks")},
            train={"tokens": 4 * SIZE},
            run={"folder": str(tmp_path / "run")},
        ),
        measure=False,
    )
    assert report.problems == []
    assert report.plan["student_template"] == {
        "template": "the template that is given",
        "conversations": 2,
        "refused": 1,
    }
    assert [line for line in report.warnings if "template" in line] == [
        "student start: its template refuses 1 of 2 conversations (template: roles must "
        "alternate); they are left out",
        "student start: its template strips the assistant's content in 1 of 2 conversations; what "
        "is left out is not aligned",
    ]
