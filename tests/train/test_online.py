"""The online teacher against a teacher that reads one document at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training_kit import recipe_dict
from transformers import AutoModelForCausalLM

from vocagnolm.align import align, carry, load_tokenizer
from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.train.collate import BlockCollator
from vocagnolm.train.online import OnlineTeacher, TeacherView, _whole_characters, teacher_view


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
    batch = BlockCollator(document_mask)([view[i] for i in range(6)])
    guidance, _ = teacher.guide(batch)
    for row in range(6):
        block = order[row]
        text, spans = order.blocks.text(block["block"])
        ids, losses = [], []
        expected = np.full(32, np.nan, np.float32)
        for number in range(block["document"].max() + 1):
            own = np.flatnonzero(block["document"] == number)
            low, high = int(spans[own[0], 0]), int(spans[own[-1], 1])
            low, high = _whole_characters(text, low, high)
            piece = tokenizer.spans(text[low:high].decode())
            context = [] if document_mask else ids
            whole = torch.tensor([[*context, 1, *piece.ids.tolist()]])
            with torch.no_grad():
                logits = model(whole).logits[0]
            nll = F.cross_entropy(logits[:-1], whole[0, 1:], reduction="none")
            losses = nll[len(nll) - len(piece) :].numpy() if len(piece) else np.zeros(0)
            ids += [1, *piece.ids.tolist()]
            expected[own] = carry(align(spans[own] - low, piece.spans), losses, "mean")
        np.testing.assert_allclose(guidance[row, :-1].numpy(), expected[1:], rtol=1e-4, atol=1e-4)


def test_distributions_are_compared_where_both_stand_at_the_same_place(parts):
    _, tokenizer, view, model = parts
    teacher = OnlineTeacher(model, config=ObjectiveConfig(method="uld"))
    item = view[0]
    distribution = teacher.distribution(BlockCollator()([item]))
    position = distribution.position_BT[0]
    text, spans = view.order.blocks.text(item["block"])
    starts = {}  # byte where a teacher token with text starts -> its index
    offset = 0
    for number in np.unique(item["document"]):
        own = spans[item["document"] == number]
        low, high = _whole_characters(text, int(own[0, 0]), int(own[-1, 1]))
        piece = tokenizer.spans(text[low:high].decode())
        for index, (start, end) in enumerate(piece.spans):
            if end > start:
                starts[int(start) + low] = offset + 1 + index
        offset += 1 + len(piece)
    compared = 0
    for t in range(31):
        start, end = spans[t + 1]
        if end > start and int(start) in starts:
            assert position[t] == starts[int(start)] - 1
            compared += 1
        else:
            assert position[t] == -1
    assert position[31] == -1 and compared > 5


def test_one_vocabulary_reads_the_students_ids(lab, parts):
    order = parts[0]
    model = AutoModelForCausalLM.from_pretrained(lab / "twin").eval()
    config = ObjectiveConfig(method="rho1", entropy_keep=0.8)
    teacher = OnlineTeacher(model, config=config)
    batch = BlockCollator()([order[0], order[1]])
    guidance, entropy = teacher.guide(batch)
    logits = model(batch["input_ids"]).logits[:, :-1].detach()
    nll = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    torch.testing.assert_close(guidance[:, :-1], nll, rtol=1e-4, atol=1e-4)
    own = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy[:, :-1], own, rtol=1e-4, atol=1e-4)
    assert torch.isnan(guidance[:, -1]).all()


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
def test_whole_characters(text, low, high, expected):
    assert _whole_characters(text, low, high) == expected


def test_online_recipes_share_blocks_with_text(lab):
    assert "text" in Blocks(recipe_dict(lab)["data"]["blocks"], 32).manifest["columns"]
