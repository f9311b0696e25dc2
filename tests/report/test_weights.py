"""The page's weights are those of the objective, for every method."""

import dataclasses

import numpy as np
import pytest
import torch
from report.pages import known_passage, select_passages, spans_of

from vocagnolm.alignment import align, carry, stretch_losses, stretches
from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.objective import ObjectiveConfig, Targets, weigh_step
from vocagnolm.objective.selection import ScoredBatch
from vocagnolm.report.page_data import Passage
from vocagnolm.report.passage import teacher_row, token_row
from vocagnolm.report.selection import statistics

WORDS = ["pro", "bab", "il", "ity", " of", " a", "n", " e", "vent", "."]


def passage(seed: int, tokens: int = 40, teachers: int = 1) -> Passage:
    """Random losses over a text that the teachers cut at other places than the student."""
    random = np.random.default_rng(seed)
    student = random.choice(WORDS, tokens).tolist()
    text = "".join(student)
    ours = spans_of(student)
    rows = []
    for number in range(teachers):
        cuts = [0, *sorted(random.choice(np.arange(1, len(text)), 30, replace=False)), len(text)]
        theirs = np.stack([cuts[:-1], cuts[1:]], axis=1)
        row = token_row(f"teacher {number}", text.encode(), theirs, nll=random.exponential(2, 31))
        rows.append(teacher_row(row, align(ours, theirs)))
    nll = random.exponential(2, tokens)
    nll[0] = np.nan
    return Passage(
        title=str(seed), student=token_row("s", text.encode(), ours, nll=nll), teachers=rows
    )


def expected(passages: list[Passage], config: ObjectiveConfig) -> list[list[float]]:
    """The same by hand: one row of a batch for each text, which are equally long here."""
    nll, guidance, number = [], [], []
    for one in passages:
        spans, [teacher] = spans_of(one.student.text), one.teachers
        theirs = spans_of(teacher.text)
        found = stretches(spans, theirs)
        by_stretch = stretch_losses(found, theirs, teacher.nll)
        carried = carry(align(spans, theirs), np.array(teacher.nll), "max")
        guidance.append(by_stretch if config.by_stretch else carried)
        number.append(found.number)
        nll.append([0.0, *one.student.nll[1:]])
    first = int(config.rule.unit == "chunk")  # chunks are cut among the predicted tokens
    labels = torch.zeros(len(passages), 40, dtype=torch.int64)
    labels[:, 0] = -100
    targets = Targets(
        labels_BT=labels[:, first:],
        guidance_BT=torch.tensor(np.array(guidance), dtype=torch.float32)[:, first:],
        stretch_BT=torch.tensor(np.array(number)) if config.by_stretch else None,
    )
    batch = ScoredBatch(targets, torch.tensor(nll, dtype=torch.float32)[:, first:])
    weights = weigh_step([batch], config).weights[0].tolist()
    return [[0.0] * first + row for row in weights]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"keep": 0.7, "scope": "sequence"},
        {"scope": "global"},
        {"method": "rho1"},
        {"method": "random"},
        {"method": "no_teacher"},
        {"method": "chunk", "chunk_choice": "random", "n_chunks": 5},
        {"method": "cpt"},
        {"method": "distill", "keep": 0.6},
        {"method": "kld"},
        {"method": "uld"},
        {"method": "alm", "distill_weight": 2.0},
        {"weighting": "reducible", "floor": 0.1},
        {"compare": "stretch"},
        {"compare": "stretch", "weighting": "reducible"},
    ],
    ids=str,
)
def test_every_method_has_its_own_rule(config: dict) -> None:
    passages = [passage(seed) for seed in range(3)]
    shown, rule = select_passages(passages, **config)
    assert rule.method == config.get("method", "guided")
    for one, weights in zip(shown, expected(passages, ObjectiveConfig(**config)), strict=True):
        assert one.weights == pytest.approx(weights, abs=2e-4)


def test_methods_differ_and_those_without_a_choice_keep_all() -> None:
    passages = [passage(seed) for seed in range(2)]
    seen = {
        method: str([one.weights for one in select_passages(passages, method=method)[0]])
        for method in ("guided", "random", "no_teacher", "chunk", "cpt", "alm")
    }
    assert len(set(seen.values())) == len(seen)
    [one], rule = select_passages(passages[:1], method="cpt")
    assert one.weights == [0.0] + [1.0] * 39
    assert (rule.keep, rule.threshold, rule.unmapped) == (None, None, None)
    assert (rule.mix, rule.alternatives) == (None, None)
    four = AlternativesSpec(4)
    [one], rule = select_passages(passages[:1], method="distill", alternatives=four, mix=0.3)
    assert one.weights == [0.0] + [1.0] * 39
    assert (rule.mix, rule.alternatives, rule.threshold) == (0.3, "4", None)
    assert rule.label is not None
    assert rule.label.endswith("most likely, with a mix of 0.3 and 4 alternatives a token")
    moving = {"mix": 0.8, "mix_end": 0.0, "mix_by": "reducible"}
    drawn = AlternativesSpec(1, sampled=True)
    _, rule = select_passages(passages[:1], method="distill", alternatives=drawn, **moving)
    assert rule.label is not None and rule.label.endswith(
        ", with a mix from 0.8 to 0 times what is reducible and 1 sampled alternative a token"
    )


def test_chunks_are_kept_whole_by_the_mean_loss_of_the_teachers_chunk() -> None:
    [one], rule = select_passages([passage(1)], method="chunk", n_chunks=3, keep=0.3)
    kept = np.array(one.weights[1:])
    guidance = np.array([np.nan if g is None else g for g in one.guidance[1:]])
    chunk = np.arange(39) * 3 // 39
    assert {tuple(set(kept[chunk == number])) for number in range(3)} == {(0.0,), (1.0,)}
    for number in range(3):  # one number for a whole chunk
        assert len(set(guidance[chunk == number])) == 1
    excess = np.array(one.student.nll[1:]) - guidance
    means = [excess[chunk == number].mean() for number in range(3)]
    assert kept[chunk == np.argmax(means)].all()
    assert (rule.chunks, rule.threshold) == (3, None)


def test_a_stretch_shows_the_losses_that_were_compared() -> None:
    [one], rule = select_passages([known_passage()], compare="stretch", keep=0.4)
    # " Un" "certain" "ty" spell " Unc" "ertainty": 3 + 4 + 0.25 against 2.5 + 1.25
    assert one.guidance[4:7] == [3.75] * 3
    assert one.excess[4:7] == [3.5] * 3
    assert one.weights[4:7] == [1.0] * 3
    assert (rule.compare, rule.aggregation) == ("stretch", None)


def test_documents_of_one_passage_share_no_stretch() -> None:
    one = passage(3)
    joined, _ = select_passages([one], compare="stretch")
    apart, _ = select_passages([dataclasses.replace(one, breaks=[20])], compare="stretch")
    assert joined[0].guidance[:15] == apart[0].guidance[:15]
    assert len(apart[0].weights) == 40


def test_grades_are_summed_not_counted() -> None:
    [one], rule = select_passages([known_passage()], weighting="reducible", floor=0.5)
    certain = 0.5 + 0.5 * (1 - 2.5 / 4.0)
    assert one.weights[5] == pytest.approx(certain)
    counted = statistics([one])
    assert rule.graded and rule.floor == 0.5
    assert counted.kept == pytest.approx(sum(one.weights), abs=0.01)
    assert sum(counted.excess.kept) + sum(counted.excess.dropped) == pytest.approx(8, abs=0.3)


def test_several_teachers_are_combined() -> None:
    both = passage(4, teachers=2)
    alone = [dataclasses.replace(both, teachers=[teacher]) for teacher in both.teachers]
    [first, second] = (np.array(select_passages([one])[0][0].guidance, float) for one in alone)
    [together], rule = select_passages([both])
    assert np.array(together.guidance, float) == pytest.approx(np.minimum(first, second))
    assert rule.combine == "min"
