"""The online teacher against a teacher that reads one document at a time."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_kit import recipe_dict
from transformers import AutoModelForCausalLM

from vocagnolm.alignment import Alignment, align, carry, load_tokenizer
from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.train.collate import GuidedCollator
from vocagnolm.train.teacher import OnlineTeacher, TeacherView, teacher_view


def is_text(content: bytes) -> bool:
    try:
        return bool(content.decode()) or not content
    except UnicodeDecodeError:
        return False


def whole_characters(text: bytes, low: int, high: int) -> tuple[int, int]:
    """The longest part of this range that cuts no character."""
    begins, ends = range(low, min(low + 4, high + 1)), range(max(low, high - 3), high + 1)
    found = [(a, b) for a in begins for b in ends if a <= b and is_text(text[a:b])]
    return max(found, key=lambda part: part[1] - part[0])


@pytest.fixture(scope="module")
def parts(lab):
    order = TrainingOrder(Blocks(lab / "blocks", 32), 64, seed=0)
    tokenizer = load_tokenizer(str(lab / "other"))
    view = TeacherView(order, tokenizer, prefix=[1])
    model = AutoModelForCausalLM.from_pretrained(lab / "other").eval()
    return order, tokenizer, view, model


@pytest.mark.parametrize("document_mask", [False, True])
def test_guidance_equals_a_naive_teacher(parts, document_mask):
    order, tokenizer, view, model = parts
    teacher = OnlineTeacher(model, config=ObjectiveConfig(), aggregation="mean")
    batch = GuidedCollator.for_blocks(document_mask)([view[i] for i in range(6)])
    guided = teacher.guide(batch)
    for row in range(6):
        block = order[row]
        text, spans = order.blocks.text(block["block"])
        ids, losses = [], []
        expected = np.full(33, np.nan, np.float32)
        for number in range(block["document"].max() + 1):
            own = np.flatnonzero(block["document"] == number)
            low, high = int(spans[own[0], 0]), int(spans[own[-1], 1])
            low, high = whole_characters(text, low, high)
            piece = tokenizer.spans(text[low:high].decode())
            context = [] if document_mask else ids
            whole = torch.tensor([[*context, 1, *piece.ids.tolist()]])
            with torch.no_grad():
                logits = model(whole).logits[0]
            nll = F.cross_entropy(logits[:-1], whole[0, 1:], reduction="none")
            losses = nll[len(nll) - len(piece) :].numpy() if len(piece) else np.zeros(0)
            ids += [1, *piece.ids.tolist()]
            expected[own] = carry(align(spans[own] - low, piece.spans), losses, "mean")
        found = guided["guidance"][row].numpy()
        np.testing.assert_allclose(found, expected[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("document_mask", [False, True])
def test_stretches_equal_a_naive_teacher(lab, document_mask):
    """Sums over the teacher's tokens of each piece of text between boundaries that both have."""
    order = TrainingOrder(Blocks(lab / "blocks", 32), 64, seed=0)
    tokenizer = load_tokenizer(str(lab / "other"))
    view = TeacherView(order, tokenizer, prefix=[1], by_stretch=True)
    model = AutoModelForCausalLM.from_pretrained(lab / "other").eval()
    teacher = OnlineTeacher(model, config=ObjectiveConfig(compare="stretch"))
    batch = GuidedCollator.for_blocks(document_mask)([view[i] for i in range(6)])
    guided = teacher.guide(batch)
    several = 0
    for row in range(6):
        block = order[row]
        text, spans = order.blocks.text(block["block"])
        ids: list[int] = []
        expected = np.full(33, np.nan)
        groups: dict[tuple[int, int], list[int]] = {}
        for number in range(block["document"].max() + 1):
            own = np.flatnonzero(block["document"] == number)
            low, high = whole_characters(text, int(spans[own[0], 0]), int(spans[own[-1], 1]))
            piece = tokenizer.spans(text[low:high].decode())
            context = [] if document_mask else ids
            whole = torch.tensor([[*context, 1, *piece.ids.tolist()]])
            with torch.no_grad():
                logits = model(whole).logits[0]
            nll = F.cross_entropy(logits[:-1], whole[0, 1:], reduction="none")
            losses = nll[len(nll) - len(piece) :].numpy() if len(piece) else np.zeros(0)
            ids += [1, *piece.ids.tolist()]
            theirs = (piece.spans + low).tolist()
            ours = [tuple(spans[t]) for t in own]
            edges = {int(e) for s in ours for e in s if s[0] < s[1]}
            edges &= {e for s in theirs for e in s if s[0] < s[1]}
            for a, b in pairwise(sorted(edges)):
                tokens = [int(t) for t in own if a <= spans[t, 0] < spans[t, 1] <= b]
                inside = [n for (c, _), n in zip(theirs, losses, strict=True) if a <= c < b]
                if tokens and tokens[0] > 0:  # the first token of a block is not predicted
                    expected[tokens] = sum(inside)
                    groups[number, a] = tokens
        found = guided["guidance"][row].numpy()
        np.testing.assert_allclose(found, expected[1:], rtol=1e-4, atol=1e-4)
        numbers = batch["stretch"][row].tolist()
        for tokens in groups.values():
            assert len({numbers[t - 1] for t in tokens}) == 1
            several += len(tokens) > 1
        assert len(set(numbers)) == 32 - sum(len(tokens) - 1 for tokens in groups.values())
    assert several > 5


def test_distributions_are_compared_where_both_stand_at_the_same_place(parts):
    _, tokenizer, view, model = parts
    teacher = OnlineTeacher(model, config=ObjectiveConfig(method="uld"))
    item = view[0]
    distribution = teacher.distribution(GuidedCollator.for_blocks()([item]))
    position = distribution.position_BT[0]
    text, spans = view.order.blocks.text(item["block"])
    starts = {}  # byte where a teacher token with text starts -> its index
    offset = 0
    for number in np.unique(item["document"]):
        own = spans[item["document"] == number]
        low, high = whole_characters(text, int(own[0, 0]), int(own[-1, 1]))
        piece = tokenizer.spans(text[low:high].decode())
        for index, (start, end) in enumerate(piece.spans):
            if end > start:
                starts[int(start) + low] = offset + 1 + index
        offset += 1 + len(piece)
    compared = 0
    for t in range(32):
        start, end = spans[t + 1]
        if end > start and int(start) in starts:
            assert position[t] == starts[int(start)] - 1
            compared += 1
        else:
            assert position[t] == -1
    assert compared > 5


def test_one_vocabulary_reads_the_students_ids(lab, parts):
    order = parts[0]
    model = AutoModelForCausalLM.from_pretrained(lab / "twin").eval()
    config = ObjectiveConfig(method="rho1", entropy_keep=0.8)
    teacher = OnlineTeacher(model, config=config)
    batch = GuidedCollator.for_blocks()([order[0], order[1]])
    guided = teacher.guide(batch)
    logits = model(batch["input_ids"]).logits.detach()
    nll = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    torch.testing.assert_close(guided["guidance"], nll, rtol=1e-4, atol=1e-4)
    own = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(guided["entropy"], own, rtol=1e-4, atol=1e-4)


def test_a_teacher_without_bos_starts_every_masked_document_blind(parts):
    """Its first token has no context there: no guidance by the document before, as in a store,
    and no distribution to compare with."""
    order, tokenizer, _, model = parts
    view = TeacherView(order, tokenizer, prefix=[])
    item = next(b for b in (view[i] for i in range(30)) if (b["document"] == 1).sum() > 3)
    first = int(np.flatnonzero(item["teacher_document"] == 1)[0])
    begins = int(np.flatnonzero(item["document"] == 1)[0])
    assert item["teacher_pair"][begins] == first
    for document_mask in (True, False):
        batch = GuidedCollator.for_blocks(document_mask)([item])
        guided = OnlineTeacher(model, config=ObjectiveConfig()).guide(batch)
        alone = item["teacher_range"][begins, 1] == first
        assert bool(torch.isnan(guided["guidance"][0, begins - 1])) == (document_mask and alone)
        uld = OnlineTeacher(model, config=ObjectiveConfig(method="uld"))
        position = uld.distribution(batch).position_BT[0, begins - 1]
        assert int(position) == (-1 if document_mask else first - 1)


def test_pairing_by_index_is_the_nth_with_the_nth_of_a_document(parts):
    order, tokenizer, _, _ = parts
    view = TeacherView(order, tokenizer, prefix=[1], pairing="index")
    for number in range(8):
        item = view[number]
        _, spans = order.blocks.text(item["block"])
        for document in np.unique(item["document"]):
            ours = [
                i for i in np.flatnonzero(item["document"] == document) if spans[i, 0] < spans[i, 1]
            ]
            theirs = np.flatnonzero(item["teacher_document"] == document)[1:]  # behind the BOS
            n = min(len(ours), len(theirs))
            assert item["teacher_pair"][ours[:n]].tolist() == theirs[:n].tolist()
            assert (item["teacher_pair"][ours[n:]] == -1).all()
        separators = spans[:, 0] == spans[:, 1]
        assert (item["teacher_pair"][separators] == -1).all()


def test_a_teacher_whose_head_is_not_understood_speaks_through_its_logits(lab, parts):
    _, _, view, model = parts

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.7 + torch.linspace(0, 3, out.logits.shape[-1])
            return out

    odd = Odd(model.config).eval()
    odd.load_state_dict(model.state_dict())
    batch = GuidedCollator.for_blocks(True)([view[0], view[1]])
    teacher = OnlineTeacher(odd, config=ObjectiveConfig())
    assert teacher.form is None
    ids, positions = batch["teacher_ids"], batch["teacher_position_ids"]
    with torch.no_grad():
        logits = odd(input_ids=ids, position_ids=positions, use_cache=False).logits
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    losses = np.full(ids.shape, np.nan, np.float32)
    losses[:, 1:] = torch.where(batch["teacher_follows"][:, 1:], nll, torch.nan).numpy()
    guided = teacher.guide(batch)["guidance"].numpy()
    for row in range(2):
        ranges = batch["teacher_range"][row].numpy()
        expected = carry(Alignment(ranges[:, 0], ranges[:, 1]), losses[row], "max")
        np.testing.assert_allclose(guided[row], expected, rtol=1e-4, atol=1e-4)
    uld = OnlineTeacher(odd, config=ObjectiveConfig(method="uld")).distribution(batch)
    assert uld.head is None
    torch.testing.assert_close(uld.hidden, logits)


def test_a_block_that_cuts_a_character(lab):
    tokenizer = load_tokenizer(str(lab / "other"))
    text = "é½東京".encode()
    spans = np.array([[i, i + 1] for i in range(len(text))])  # every byte a token
    whole = teacher_view(text, spans, np.zeros(len(text), np.int64), tokenizer, [])
    assert (whole["teacher_range"] >= 0).all()
    cut = text[1:-1]
    view = teacher_view(cut, spans[: len(cut)], np.zeros(len(cut), np.int64), tokenizer, [])
    mapped = view["teacher_range"][:, 0] >= 0
    assert not mapped[0] and mapped[1:6].all() and not mapped[6:].any()


@pytest.mark.parametrize(
    ("text", "low", "high", "expected"),
    [
        (b"abc", 0, 3, (0, 3)),
        ("é".encode(), 0, 2, (0, 2)),
        ("aé".encode(), 0, 2, (0, 1)),
        ("éa".encode(), 1, 3, (2, 3)),
        ("東".encode(), 1, 2, (2, 2)),
        ("a東".encode(), 0, 3, (0, 1)),
    ],
)
def test_the_teacher_reads_whole_characters(lab, text, low, high, expected):
    spans = np.array([[i, i + 1] for i in range(low, high)])
    tokenizer = load_tokenizer(str(lab / "other"))
    view = teacher_view(text, spans, np.zeros(len(spans), np.int64), tokenizer, [])
    read = low + np.flatnonzero(view["teacher_range"][:, 0] >= 0)
    assert read.tolist() == [*range(*expected)]


def test_online_recipes_share_blocks_with_text(lab):
    assert "text" in Blocks(recipe_dict(lab)["data"]["blocks"], 32).manifest["columns"]
