"""Stretches against the definition, one byte at a time."""

import itertools
import math

import made
import numpy as np
import pytest
from faults_kit import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vocagnolm.alignment import KINDS, kinds, load_tokenizer, stretch_losses, stretches
from vocagnolm.report.comparison import SAMPLE, STRESS


def naive(student, teachers, losses):
    """(stretch of each student token as (start, end) or None, each teacher's loss of it)."""
    bounds = [{b for s, e in spans if s < e for b in (s, e)} for spans in (student, *teachers)]
    common = sorted(set.intersection(*bounds))
    pieces = list(itertools.pairwise(common))
    found, sums = [], []
    for start, end in student:
        inside = [p for p in pieces if p[0] <= start and end <= p[1] and start < end]
        piece = inside[0] if inside else None
        if piece:
            spelled = sum(e - s for s, e in student if piece[0] <= s and e <= piece[1])
            piece = piece if spelled == piece[1] - piece[0] else None
        found.append(piece)
        row = []
        for spans, nll in zip(teachers, losses, strict=True):
            if piece is None:
                row.append(math.nan)
                continue
            mine = [k for k, (s, e) in enumerate(spans) if piece[0] <= s < piece[1]]
            width = sum(spans[k][1] - spans[k][0] for k in mine)
            whole = width == piece[1] - piece[0]
            row.append(sum(nll[k] for k in mine) if whole else math.nan)
        sums.append(row)
    return found, sums


def assert_as_defined(student, teachers, losses):
    found = stretches(student, *teachers)
    pieces, sums = naive(student.tolist(), [t.tolist() for t in teachers], losses)
    ours = [
        None if n < 0 else (int(found.boundaries[n]), int(found.boundaries[n + 1]))
        for n in found.number
    ]
    assert ours == pieces
    for number, (spans, nll) in enumerate(zip(teachers, losses, strict=True)):
        expected = [row[number] for row in sums]
        np.testing.assert_allclose(
            stretch_losses(found, spans, nll), expected, rtol=1e-9, atol=1e-9
        )
    known = [p for p in pieces if p is not None]
    assert found.begins.sum() == len(set(known))
    assert found.tokens().tolist() == [0 if p is None else pieces.count(p) for p in pieces]


@st.composite
def tilings(draw):
    """Some tokenisations of a text of n bytes, with tokens without text now and then."""
    n = draw(st.integers(0, 12))
    found = []
    for _ in range(draw(st.integers(2, 4))):
        cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=6))})
        spans = [[a, b] for a, b in itertools.pairwise(cuts)]
        for _ in range(draw(st.integers(0, 2))):
            place = draw(st.integers(0, len(spans)))
            at = spans[place][0] if place < len(spans) else n
            spans.insert(place, [at, at])
        found.append(np.array(spans, np.int64).reshape(-1, 2))
    return found


@settings(max_examples=examples(300), deadline=None)
@given(tilings(), st.randoms(use_true_random=False))
def test_equals_the_definition(spans, draw):
    student, *teachers = spans
    losses = [[draw.random() * 5 for _ in t] for t in teachers]
    assert_as_defined(student, teachers, losses)


@pytest.mark.parametrize(
    "pair", [("sentencepiece prepend", "byte-level"), ("unigram", "wordpiece")]
)
def test_real_kinds_of_tokenizers(pair):
    """Also lossy ones, which leave bytes out."""
    student, teacher = (load_tokenizer(made.tokenizer(name)) for name in pair)
    rng = np.random.default_rng(0)
    for text in (*SAMPLE, *STRESS):
        ours, theirs = student.spans(text).spans, teacher.spans(text).spans
        assert_as_defined(ours, [theirs], [rng.random(len(theirs)).tolist()])


def test_a_missing_loss_makes_its_whole_stretch_unknown():
    student, teacher = [[0, 2], [2, 4], [4, 6]], [[0, 1], [1, 4], [4, 6]]
    found = stretches(student, teacher)
    assert found.number.tolist() == [0, 0, 1]
    losses = stretch_losses(found, teacher, [math.nan, 1.0, 2.0])
    assert np.isnan(losses[:2]).all() and losses[2] == 2.0


def test_the_same_tokens_are_their_own_stretches():
    spans = [[0, 3], [3, 3], [3, 4], [4, 9]]
    found = stretches(spans, spans)
    assert found.number.tolist() == [0, -1, 1, 2]
    # the token without text counts for the text behind it
    assert stretch_losses(found, spans, [1.0, 2.0, 4.0, 8.0]).tolist()[2:] == [6.0, 8.0]


def test_kinds():
    student = [[0, 2], [2, 6], [6, 7], [7, 8], [8, 10], [10, 12], [12, 12]]
    teacher = [[0, 2], [2, 4], [4, 6], [6, 8], [8, 9], [9, 12]]
    names = [KINDS[kind] for kind in kinds(stretches(student, teacher), teacher)]
    assert names == ["1:1", "1:N", "N:1", "N:1", "N:M", "N:M", "unmapped"]


def test_nothing_to_compare():
    assert stretches([], []).number.tolist() == []
    found = stretches([[0, 3]], [])
    assert found.number.tolist() == [-1] and np.isnan(stretch_losses(found, [], [])).all()
    with pytest.raises(ValueError, match="2 teacher losses for 1"):
        stretch_losses(found, [[0, 3]], [1.0, 2.0])


def test_a_long_axis_gives_the_same_stretches():
    """Work for every byte is done only where tokens stand close together."""
    student = np.array([[0, 2], [2, 2], [2, 5], [5, 6], [8, 9]])
    teacher = np.array([[0, 1], [1, 2], [2, 6], [8, 9]])
    near, far = stretches(student, teacher), stretches(student * 10**9, teacher * 10**9)
    np.testing.assert_array_equal(near.number, far.number)
    np.testing.assert_array_equal(near.boundaries * 10**9, far.boundaries)
