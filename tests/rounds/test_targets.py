"""What a teacher that has read an answer gives to the tokens that the student drew."""

import numpy as np
import pytest
import torch
from chat_kit import loaded
from rounds.rounds_kit import ASKED, drawn, exact_log_p

from vocagnolm.chat.messages import Message, messages_of, shared_text
from vocagnolm.model import open_model
from vocagnolm.objective import ObjectiveConfig, guided_loss
from vocagnolm.rounds.rounds import tokenizes_to_others
from vocagnolm.rounds.targets import Rollout, lay_rollout, merged_targets, rollout_targets
from vocagnolm.rounds.teacher import AnswerTeacher
from vocagnolm.train import GuidedCollator


@pytest.fixture(scope="module")
def student(lab):
    return loaded(lab / "start")


@pytest.fixture(scope="module")
def rollouts(lab, student):
    """Finished answers, and some that were cut, of which the student can read all."""
    some = [
        *drawn(student, lab / "start", ASKED * 2),
        *drawn(student, lab / "start", ASKED, limit=3, seed=1),
    ]
    kept = []
    for rollout in some:
        try:
            lay_rollout(rollout, student)
            kept.append(rollout)
        except ValueError:  # not UTF-8
            continue
    assert len(kept) > 10
    assert {rollout.finished for rollout in kept} == {True, False}
    return kept


@pytest.fixture(scope="module")
def canonical(student, rollouts):
    """Answers in which a teacher with the student's tokens has the drawn ones."""
    some = [
        rollout
        for rollout in rollouts
        if not tokenizes_to_others(rollout, lay_rollout(rollout, student), student)
    ]
    assert 5 < len(some) < len(rollouts)
    return some


def columns(lab, student, rollouts, name, **options):
    teacher = AnswerTeacher(open_model(lab / name, device="cpu"), **options)
    rows = rollout_targets(rollouts, student, teacher)
    assert all(row is not None for row in rows)
    return rows


@pytest.mark.parametrize("name", ["twin", "teacher"])
def test_a_row_is_what_was_read_and_drawn(lab, student, rollouts, name):
    """The drawn ids, never those of the text tokenized again."""
    for rollout, row in zip(rollouts, columns(lab, student, rollouts, name), strict=True):
        before = len(rollout.prompt_ids)
        assert row["input_ids"].tolist() == [*rollout.prompt_ids, *rollout.ids]
        assert (row["labels"][:before] == -100).all()
        taught = row["labels"][before:]
        # one that was cut may end within a character, whose tokens have no text
        assert (taught != -100).mean() > (0.9 if rollout.finished else 0.0)
        assert all(a in (-100, b) for a, b in zip(taught.tolist(), rollout.ids, strict=True))
        if rollout.finished:  # the end of the turn is taught, and the teacher may want it
            assert taught[-1] == rollout.ids[-1]
            assert row["target_p"][-1].sum() > 0
        assert np.array_equal(row["drawn_nll"][before:], rollout.nll)
        assert row["stretch"].max() < len(rollout.prompt_ids) + len(rollout.ids) - 1
        together = row["target_p"].sum(1)
        assert together.max() <= 1 + 1e-6 and (row["target_p"] >= 0).all()
        for ids, p in zip(row["target_ids"], row["target_p"], strict=True):
            listed = ids[p > 0].tolist()
            assert len(set(listed)) == len(listed)


def test_in_one_vocabulary_targets_are_the_teachers_distribution(lab, student, canonical):
    rows = columns(lab, student, canonical, "twin", alternatives=328)
    exact = exact_log_p(lab / "twin", [row["input_ids"].tolist() for row in rows])
    for rollout, row, log_p in zip(canonical, rows, exact, strict=True):
        for at in range(len(rollout.prompt_ids), len(row["input_ids"])):
            if row["labels"][at] == -100:
                continue
            p = np.exp(log_p[at - 1])
            pairs = zip(row["target_ids"][at].tolist(), row["target_p"][at].tolist(), strict=True)
            listed = {token: value for token, value in pairs if value > 0}
            assert row["labels"][at] in listed
            assert sum(listed.values()) > 0.93  # a few tokens depend on what follows
            # a token that its own tokenizer never writes there is told as the one that it does
            off = {token: value - p[token] for token, value in listed.items()}
            assert min(off[token] / p[token] for token in listed) > -0.01
            assert sum(off.values()) < 0.05


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_in_one_vocabulary_the_divergence_is_that_of_the_distributions(
    lab, student, canonical, divergence
):
    rows = columns(lab, student, canonical, "twin", alternatives=328)
    given = [row["input_ids"].tolist() for row in rows]
    theirs, ours = exact_log_p(lab / "twin", given), exact_log_p(lab / "start", given)
    total = count = 0.0
    for row, q, p in zip(rows, theirs, ours, strict=True):
        for at in np.flatnonzero(row["labels"] != -100) - 1:
            a, b = (q[at], p[at]) if divergence == "forward" else (p[at], q[at])
            total += float((np.exp(a) * (a - b)).sum())
            count += 1
    batch = GuidedCollator()(rows)
    width = batch["input_ids"].shape[1]
    logits = torch.zeros(len(rows), width, ours[0].shape[1])
    for n, log_p in enumerate(ours):
        logits[n, : len(log_p)] = torch.from_numpy(log_p)
    config = ObjectiveConfig(method="on_policy", divergence=divergence)
    loss = guided_loss(logits.requires_grad_(), batch["labels"], batch, config)
    assert total / count * 0.9 < float(loss.detach()) < total / count * 1.02


def test_stretches_add_up_to_the_teachers_losses(lab, student, rollouts):
    """Each piece of the answer is told once, whichever tokens cut it."""
    teacher = AnswerTeacher(open_model(lab / "teacher", device="cpu"))
    rows = rollout_targets(rollouts, student, teacher)
    laid = [lay_rollout(rollout, student) for rollout in rollouts]
    readings = teacher.read([(answer.text, answer.begin) for answer in laid])
    stretched = 0
    for row, reading in zip(rows, readings, strict=True):
        known = ~np.isnan(row["guidance"])
        by_stretch = dict(zip(row["stretch"][known], row["guidance"][known], strict=True))
        stretched += len(by_stretch) < known.sum()
        assert sum(by_stretch.values()) == pytest.approx(np.nansum(reading.nll), rel=1e-5)
    assert stretched  # some stretches have several tokens


def test_a_token_of_several_teacher_tokens_has_their_product(lab, student, rollouts):
    """As far as is known: what the teacher would write instead of its later tokens is not the
    student's token."""
    teacher = AnswerTeacher(open_model(lab / "teacher", device="cpu"))
    seen = 0
    for rollout, row in zip(rollouts, rollout_targets(rollouts, student, teacher), strict=True):
        laid = lay_rollout(rollout, student)
        (reading,) = teacher.read([(laid.text, laid.begin)])
        ends = np.cumsum(reading.token_bytes)
        starts = ends - reading.token_bytes
        for n, (start, end) in enumerate(laid.spans.tolist()):
            if start == end or start not in starts or end not in ends:
                continue
            inside = (starts >= start) & (ends <= end)
            at = len(rollout.prompt_ids) + n
            own = row["target_p"][at][row["target_ids"][at] == rollout.ids[n]].sum()
            assert own >= np.exp(-reading.nll[inside].sum()) * 0.99
            seen += inside.sum() > 1
    assert seen


def test_the_context_of_the_teacher_changes_numbers_alone(lab, student, rollouts, tmp_path):
    shots = tmp_path / "shots.jsonl"
    shots.write_text('{"prompt": "a number", "completion": "42"}\n')
    plain = columns(lab, student, rollouts, "teacher")
    told = columns(
        lab, student, rollouts, "teacher", system="prime integers divide", examples=str(shots)
    )
    for a, b in zip(plain, told, strict=True):
        assert np.array_equal(a["input_ids"], b["input_ids"])
        assert np.array_equal(a["stretch"], b["stretch"])
    assert any(
        not np.allclose(a["guidance"], b["guidance"], equal_nan=True, atol=1e-3)
        for a, b in zip(plain, told, strict=True)
    )
    # read as one conversation by hand
    teacher = AnswerTeacher(open_model(lab / "teacher", device="cpu"))
    laid = lay_rollout(rollouts[0], student)
    whole = [
        Message("system", "prime integers divide"),
        Message("user", "a number"),
        Message("assistant", "42"),
        *messages_of(laid.text),
    ]
    text = shared_text(whole)
    begin = laid.begin + len(text.encode()) - len(laid.text.encode())
    (reading,) = teacher.read([(text, begin)])
    known = ~np.isnan(told[0]["guidance"])
    by_stretch = dict(zip(told[0]["stretch"][known], told[0]["guidance"][known], strict=True))
    assert sum(by_stretch.values()) == pytest.approx(np.nansum(reading.nll), rel=1e-4)


def test_an_answer_that_nobody_can_read_has_no_row(lab, student, rollouts):
    (lone,) = student.base.spans("é").ids[:1].tolist()
    broken = Rollout(rollouts[0].prompt, rollouts[0].prompt_ids, [lone] * 3, False)
    if (student.base.bytes_of(lone) or b"").decode(errors="ignore"):
        lone = next(n for n in range(328) if student.base.bytes_of(n) == b"\xff")
        broken = Rollout(rollouts[0].prompt, rollouts[0].prompt_ids, [lone] * 3, False)
    teacher = AnswerTeacher(open_model(lab / "twin", device="cpu"))
    there, missing = rollout_targets([rollouts[0], broken], student, teacher)
    assert there is not None and missing is None


def test_merged_targets():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, (50, 6)).astype(np.int32)
    p = (rng.random((50, 6)) * 0.4).astype(np.float32)
    merged_ids, merged = merged_targets(ids, p)
    for a, b, c, d in zip(ids, p, merged_ids, merged, strict=True):
        expected: dict[int, float] = {}
        for token, value in zip(a.tolist(), b.tolist(), strict=True):
            expected[token] = expected.get(token, 0.0) + value
        above = max(sum(expected.values()), 1.0)
        listed = [(t, v) for t, v in zip(c.tolist(), d.tolist(), strict=True) if v > 0]
        assert len(listed) == len(expected)
        for token, value in listed:
            assert value == pytest.approx(expected[token] / above, rel=1e-5)
