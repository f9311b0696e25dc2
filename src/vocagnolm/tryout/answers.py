"""Right answers of several models to the same questions, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vocagnolm.base.statistics import middle_95, resampled_ratios
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.generate import Generator
from vocagnolm.model import open_model
from vocagnolm.score.write import grader_of
from vocagnolm.tryout.folder import Facts, Tryout


@dataclass(frozen=True)
class Question:
    """A held-out prompt and its expected answer."""

    prompt: str
    """The shared text of its conversation."""
    expected: str


@dataclass(frozen=True)
class AnswerScore:
    """The right answers of one of several models."""

    name: str
    questions: int
    right: float
    """Share of the questions."""
    interval: tuple[float, float]
    """95 %, bootstrap over questions."""
    difference: float
    """Difference from the baseline, paired; above zero is better."""
    difference_interval: tuple[float, float]
    outcome: Literal["better", "worse", "equal"]
    """Compared with the baseline; equal: no difference that these questions can show."""


def answer_questions(
    tryout: Tryout,
    source: str,
    name: str,
    questions: Sequence[Question],
    writing: Mapping[str, Any],
) -> Facts:
    """1 for every question that a model answers right, 0 for the others: the most likely answer in
    its chat template, graded."""
    files = open_model(source, device=tryout.settings.device)
    chat = ChatTokenizer(files.tokenizer, template_of(files.tokenizer, None, None))
    generator = Generator(files.load(), files, chat=chat)
    is_right = grader_of(writing["grade"])
    right = [0] * len(questions)
    batches = generator.generate(
        [question.prompt for question in questions],
        stop=writing["stop"],
        max_new_tokens=writing["max_new_tokens"],
    )
    done = 0
    with tryout.bar(f"{name} answers", "questions") as note:
        for batch in batches:
            for at, answer in batch:
                asked = questions[at]
                finished = bool(answer.complete)
                marked = is_right(answer.output, asked.expected, asked.prompt, finished)
                right[at] = int(bool(marked))
            done += len(batch)
            note(done, len(questions))
    generator.close()
    share = sum(right) / len(right)
    tryout.say(f"{name}: {share:.1%} of {len(right):,} held-out questions right")
    return {"right": right}


def rank_answers(right: Mapping[str, Sequence[int]], baseline: str) -> list[AnswerScore]:
    """Models by their right answers, the best first, each compared with the baseline."""
    names = list(right)
    right_MQ = np.array([right[name] for name in names], np.float64)
    drawn_RM = resampled_ratios(right_MQ, np.ones_like(right_MQ))
    share_M, base = right_MQ.mean(1), names.index(baseline)
    scores = []
    for at in np.argsort(-share_M, kind="stable").tolist():
        low, high = middle_95(drawn_RM[:, at] - drawn_RM[:, base])
        scores.append(
            AnswerScore(
                name=names[at],
                questions=right_MQ.shape[1],
                right=float(share_M[at]),
                interval=middle_95(drawn_RM[:, at]),
                difference=float(share_M[at] - share_M[base]),
                difference_interval=(low, high),
                outcome="better" if low > 0 else "worse" if high < 0 else "equal",
            )
        )
    return scores
