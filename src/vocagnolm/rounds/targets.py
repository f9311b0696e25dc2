"""What a teacher that has read an answer gives to the tokens that the student drew.

The student's tokens stand where it drew them, never where its tokenizer would cut the text; the
teacher's are those of its own tokenizer over the same bytes. Both lie over the shared text of the
conversation, and the rules by which losses and alternatives are carried are those of a store.

Shape letters: N tokens in a row, K listed tokens, M tokens of the teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import align
from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.chat import ChatTokenizer, Refused
from vocagnolm.chat.answers import LaidAnswer, lay_answer
from vocagnolm.data.guidance import (
    CarryRule,
    Laid,
    LaidTeacher,
    TargetsPlan,
    carry_targets,
    end_to_end,
    lay_teacher,
    student_guidance,
    target_table,
    unbroken,
)
from vocagnolm.objective import IGNORE_INDEX
from vocagnolm.rounds.teacher import AnswerTeacher, Reading

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Rollout:
    """An answer that a student drew, token by token."""

    prompt: str
    """The shared text of the conversation before the answer (`vocagnolm.chat`)."""
    prompt_ids: Sequence[int]
    """What the student read."""
    ids: Sequence[int]
    """What it drew, with the token that ended the answer if it ended by itself."""
    finished: bool
    """Whether it ended by itself, not at a limit."""
    nll: NDArray[np.float32] | None = None
    """The student's losses when it drew them."""


def lay_rollout(rollout: Rollout, student: ChatTokenizer) -> LaidAnswer:
    """The conversation with its answer, and where the drawn tokens lie in it. `Refused` for what is
    no answer, such as bytes that are not UTF-8."""
    pieces = [student.private_bytes_of(int(token)) or b"" for token in rollout.ids]
    ended = rollout.finished
    return lay_answer(rollout.prompt, pieces, finished=ended, ended=ended, chat=student)


def targets_plan(student: ChatTokenizer, teacher: AnswerTeacher) -> TargetsPlan:
    """By what the teacher's alternatives become targets in the student's vocabulary."""
    return TargetsPlan(
        tables=(target_table(student, teacher.vocabulary, None),),
        spec=AlternativesSpec(teacher.alternatives),
        inside=True,
        weights=(1.0,),
        with_label=True,
    )


def rollout_targets(
    rollouts: Sequence[Rollout], student: ChatTokenizer, teacher: AnswerTeacher
) -> list[Columns | None]:
    """The columns of answers that a student drew, for a training loop of one's own:

        columns = rollout_targets(rollouts, student, teacher)
        batch = GuidedCollator()([row for row in columns if row is not None])
        config = ObjectiveConfig(method="on_policy", divergence="reverse")
        guided_loss(model(batch["input_ids"]).logits, batch["labels"], batch, config).backward()

    Each is a row of prompt and answer: `input_ids`, `labels` (-100 where nothing is taught),
    `guidance` and `stretch` for `sampled_token`, `target_ids` and `target_p` for `forward` and
    `reverse`, and `drawn_nll` if the rollout has it. None for an answer that the student or the
    teacher cannot read.
    """
    laid: list[LaidAnswer | None] = []
    for rollout in rollouts:
        try:
            laid.append(lay_rollout(rollout, student))
        except Refused:
            laid.append(None)
    readable = [answer for answer in laid if answer is not None]
    outcomes = iter(teacher.read([(answer.text, answer.begin) for answer in readable]))
    kept, readings, places = [], [], []
    for number, answer in enumerate(laid):
        reading = None if answer is None else next(outcomes)
        if answer is not None and isinstance(reading, Reading):
            kept.append(number)
            places.append(answer)
            readings.append(reading)
    asked = [rollouts[number] for number in kept]
    rows = rollout_columns(asked, places, readings, targets_plan(student, teacher))
    by_number = dict(zip(kept, rows, strict=True))
    return [by_number.get(number) for number in range(len(rollouts))]


def rollout_columns(
    rollouts: Sequence[Rollout],
    laid: Sequence[LaidAnswer],
    readings: Sequence[Reading],
    plan: TargetsPlan,
) -> list[Columns]:
    """`rollout_targets` for answers that are laid and read."""
    if not rollouts:
        return []
    texts = [answer.text.encode() for answer in laid]
    origins = np.cumsum([0, *(len(text) + 1 for text in texts[:-1])], dtype=np.int64)
    spans = end_to_end([answer.spans for answer in laid], origins)
    counts = [len(rollout.ids) for rollout in rollouts]
    labels = np.concatenate([np.asarray(rollout.ids, np.int64) for rollout in rollouts])
    # tokens without text (thinking marks, white space that is no part of the answer) have no
    # counterpart
    (where,) = np.nonzero(spans[:, 0] < spans[:, 1])
    document = np.repeat(np.arange(len(counts)), counts)
    ours = Laid(spans[where], document[where], origins)
    theirs = lay_teacher(
        [(reading.token_bytes, reading.nll) for reading in readings],
        ours,
        [reading.packed for reading in readings],
    )
    guidance, stretch = _by_stretch(ours, theirs, where, len(labels))
    listed, r = _listed(labels, ours, theirs, where, b"\0".join(texts) + b"\0", plan)
    cuts = np.cumsum(counts)[:-1]
    columns: Columns = {
        "guidance": guidance,
        "stretch": stretch,
        "target_ids": listed,
        "target_p": r,
    }
    pieces = {name: np.split(values, cuts) for name, values in columns.items()}
    return [
        _row(rollout, {name: split[number] for name, split in pieces.items()})
        for number, rollout in enumerate(rollouts)
    ]


def _by_stretch(
    ours: Laid, theirs: LaidTeacher, where: NDArray[np.int64], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """For every drawn token the teacher's loss on its stretch, NaN where that is not known, and the
    number of the stretch."""
    alignments = [align(ours.spans, theirs.spans)]
    losses, goes_on = student_guidance(ours, [theirs], alignments, CarryRule("stretch"), "min")
    losses = unbroken(losses, goes_on, where)
    guidance = np.full(count, np.nan, np.float32)
    guidance[where] = losses
    begins = np.ones(count, bool)
    begins[where] = ~goes_on | np.isnan(losses)
    return guidance, np.cumsum(begins) - 1


def _listed(
    labels: NDArray[np.int64],
    ours: Laid,
    theirs: LaidTeacher,
    where: NDArray[np.int64],
    text: bytes,
    plan: TargetsPlan,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """For every drawn token the student's tokens of which the teacher's probability is known, its
    own among them."""
    soft, _ = carry_targets(
        labels[where],
        ours,
        [theirs],
        [align(ours.spans, theirs.spans)],
        np.frombuffer(text, np.uint8),
        plan,
    )
    assert soft.label is not None
    given = np.concatenate([soft.probability, soft.label[:, None]], axis=1)
    given[~soft.has_targets] = 0.0
    ids = np.concatenate([soft.ids, labels[where][:, None].astype(np.int32)], axis=1)
    merged_ids, merged = merged_targets(ids, given)
    listed = np.repeat(labels[:, None].astype(np.int32), ids.shape[1], axis=1)
    r = np.zeros(listed.shape, np.float32)
    listed[where], r[where] = merged_ids, merged
    return listed, r


def merged_targets(
    ids_NK: NDArray[np.int32], p_NK: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Each token listed once with the sum of its probabilities, which together are at most 1."""
    order = np.argsort(ids_NK, axis=1, kind="stable")
    ids = np.take_along_axis(ids_NK, order, axis=1)
    p = np.take_along_axis(p_NK, order, axis=1)
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = np.cumsum(begins, axis=1) - 1 + np.arange(len(ids))[:, None] * ids.shape[1]
    sums = np.bincount(place.ravel(), p.ravel(), minlength=ids.size).reshape(ids.shape)
    listed = np.repeat(ids[:, :1], ids.shape[1], axis=1)
    listed.ravel()[place.ravel()] = ids.ravel()
    together = np.maximum(sums.sum(1, keepdims=True), 1.0)
    return listed, (sums / together).astype(np.float32)


def _row(rollout: Rollout, answer: Columns) -> Columns:
    """A row of prompt and answer from the columns of the answer."""
    before = len(rollout.prompt_ids)
    ids = np.concatenate([np.asarray(rollout.prompt_ids), np.asarray(rollout.ids)])
    taught = ~np.isnan(answer["guidance"]) | (answer["target_p"].sum(1) > 0)
    fillings: dict[str, Any] = {
        "guidance": np.nan,
        "stretch": 0,
        "target_ids": 0,
        "target_p": 0.0,
        "drawn_nll": 0.0,
    }
    if rollout.nll is not None:
        answer = {**answer, "drawn_nll": np.asarray(rollout.nll, np.float32)}
    row: Columns = {
        "input_ids": ids.astype(np.int64),
        "labels": np.concatenate(
            [
                np.full(before, IGNORE_INDEX),
                np.where(taught, np.asarray(rollout.ids, np.int64), IGNORE_INDEX),
            ]
        ),
    }
    for name, values in answer.items():
        shape = (before, *values.shape[1:])
        row[name] = np.concatenate([np.full(shape, fillings[name], values.dtype), values])
    # a stretch has a number below the number of positions that predict, as `Targets` wants it
    row["stretch"][before:] += max(before - 1, 0) - row["stretch"][before]
    return row
