"""Alignment against an O(N x M) reference, and what must always hold."""

import inspect
import math
import pydoc

import numpy as np
import pytest
from faults_kit import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import vocagnolm
from vocagnolm.alignment import (
    Alignment,
    TokenSpans,
    align,
    align_batch,
    carry,
    character_spans,
    chunk_align,
    chunk_overlap,
    granularity,
    shares,
    token_overlap,
)
from vocagnolm.alignment.alignment import ranks

TOKENS = TokenSpans(np.array([1, 2], np.int32), np.array([[0, 2], [2, 4]]), 4, 0)
many = settings(max_examples=examples(200), deadline=None, derandomize=True)


@st.composite
def tilings(draw, n_bytes: int):
    """A tokenizer's spans over n_bytes: sorted cuts; repeated cuts are zero-width tokens."""
    cuts = sorted(draw(st.lists(st.integers(0, n_bytes), max_size=12)))
    edges = [0, *cuts, n_bytes] if draw(st.booleans()) or not cuts else [0, *cuts]
    return np.array([edges[:-1], edges[1:]]).T.reshape(-1, 2)


@st.composite
def gapped(draw, n_bytes: int):
    """Spans that leave text out, as a tokenizer that loses text does."""
    spans = draw(tilings(n_bytes))
    keep = draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    return spans[np.array(keep, bool)]


@st.composite
def pairs(draw, teacher=tilings):
    n_bytes = draw(st.integers(0, 40))
    return draw(tilings(n_bytes)), draw(teacher(n_bytes))


def slow_align(student, teacher) -> list[tuple[int, int]]:
    """By definition: the range of all teacher tokens that share a byte with the student's."""
    result = []
    for start, end in student:
        hits = [j for j, (s, e) in enumerate(teacher) if max(start, s) < min(end, e)]
        result.append((hits[0], hits[-1]) if hits else (-1, -1))
    return result


def ranges(alignment: Alignment) -> list[tuple[int, int]]:
    return list(zip(alignment.first.tolist(), alignment.last.tolist(), strict=True))


@many
@given(pair=pairs())
def test_equals_the_reference(pair):
    assert ranges(align(*pair)) == slow_align(*pair)


@many
@given(pair=pairs(teacher=gapped))
def test_equals_the_reference_where_the_teacher_leaves_gaps(pair):
    assert ranges(align(*pair)) == slow_align(*pair)


def test_the_public_name_is_the_function():
    import pydoc

    import vocagnolm
    import vocagnolm.alignment  # whatever was imported before

    assert vocagnolm.align is vocagnolm.alignment.align
    shown = pydoc.render_doc(vocagnolm.align, renderer=pydoc.plaintext)
    head, _, body = shown.partition("Map every student token")
    assert "align(student_spans: 'Spans', teacher_spans: 'Spans')" in head
    assert len(head) < 200 and body, "help begins with the signature in a line, and a sentence"


def test_tokens_of_two_texts_are_refused():
    longer = TokenSpans(np.array([1, 2], np.int32), np.array([[0, 2], [2, 5]]), 5, 0)
    with pytest.raises(ValueError, match="text of 4 bytes, the teacher's of one of 5: give the"):
        align(TOKENS, longer)
    with pytest.raises(ValueError, match="document 1: the student's tokens are of a text of 5"):
        align_batch([TOKENS, longer], [TOKENS, TOKENS])
    assert ranges(align(TOKENS.spans, longer)) == ranges(align(TOKENS, TOKENS)), "arrays do not say"


@many
@given(pair=pairs())
def test_the_roles_can_be_swapped(pair):
    student, teacher = pair
    forward, backward = align(student, teacher), align(teacher, student)
    together = {
        (i, j)
        for i, (first, last) in enumerate(ranges(forward))
        if first >= 0
        for j in range(first, last + 1)
    }
    for j, (first, last) in enumerate(ranges(backward)):
        if first >= 0:
            assert (first, j) in together and (last, j) in together


@many
@given(pair=pairs())
def test_covered_text_is_covered_whole(pair):
    student, teacher = pair
    teacher_end = teacher[-1, 1] if len(teacher) else 0
    ios = token_overlap(student, teacher, align(student, teacher)).ios
    inside = (student[:, 1] <= teacher_end) & (student[:, 0] < student[:, 1])
    assert (ios[inside] == 1.0).all()


@many
@given(spans=st.integers(0, 40).flatmap(tilings))
def test_identical_tokenizers_give_the_identity(spans):
    own = np.arange(len(spans))
    expected = np.where(spans[:, 0] < spans[:, 1], own, -1)
    alignment = align(spans, spans)
    np.testing.assert_array_equal(alignment.first, expected)
    np.testing.assert_array_equal(alignment.last, expected)


@many
@given(documents=st.lists(pairs(), max_size=5))
def test_a_batch_equals_its_documents(documents):
    together = align_batch([s for s, _ in documents], [t for _, t in documents])
    assert [ranges(a) for a in together] == [ranges(align(s, t)) for s, t in documents]


@pytest.mark.parametrize(
    ("spans", "message"),
    [([[0, 2], [1, 1]], "runs backwards"), ([[2, 1]], "runs backwards"), ([0, 1], "integer array")],
)
def test_spans_that_are_none_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        align(spans, [[0, 2]])


def slow_carry(alignment, values, how):
    result = []
    for first, last in ranges(alignment):
        known = [v for v in values[first : last + 1] if first >= 0 and not math.isnan(v)]
        pick = {"max": max, "sum": sum, "mean": lambda vs: sum(vs) / len(vs)}[how]
        result.append(pick(known) if known else math.nan)
    return np.array(result)


@many
@given(pair=pairs(), how=st.sampled_from(["max", "mean", "sum"]), data=st.data())
def test_carry_equals_the_reference(pair, how, data):
    number = st.one_of(st.just(math.nan), st.floats(0, 30, width=32))
    n_teacher = len(pair[1])
    values = np.array(data.draw(st.lists(number, min_size=n_teacher, max_size=n_teacher)))
    alignment = align(*pair)
    np.testing.assert_allclose(
        carry(alignment, values, how), slow_carry(alignment, values.tolist(), how), rtol=1e-12
    )


def test_carry_aggregates_half_precision_in_float32():
    values = np.full(3000, 0.1, np.float16)
    total = carry(Alignment(np.array([0]), np.array([2999])), values, "sum")
    assert total.dtype == np.float32
    assert total[0] == pytest.approx(3000 * float(np.float16(0.1)), rel=1e-5)


def test_carry_refuses_too_few_values_and_unknown_names():
    alignment = Alignment(np.array([0]), np.array([2]))
    with pytest.raises(ValueError, match="teacher token 2, but there are 2"):
        carry(alignment, [1.0, 2.0])
    with pytest.raises(ValueError, match="one of max, mean, sum"):
        carry(alignment, [1.0, 2.0, 3.0], "median")  # type: ignore[arg-type]


@many
@given(n_student=st.integers(0, 70), n_teacher=st.integers(0, 70), n=st.integers(1, 80))
def test_chunks_cover_every_token_once_in_order(n_student, n_teacher, n):
    alignment = chunk_align(n_student, n_teacher, n)
    mapped = alignment.mapped
    first, last = alignment.first[mapped], alignment.last[mapped]
    assert len(alignment) == n_student
    assert (np.diff(first) >= 0).all() and (first <= last).all()
    if n_student >= n and n_teacher >= n:
        assert mapped.all()
        covered = {j for a, b in zip(first, last, strict=True) for j in range(a, b + 1)}
        assert covered == set(range(n_teacher))
        _, sizes = np.unique(first, return_counts=True)
        assert sizes.max() - sizes.min() <= 1


def test_chunks_by_hand():
    alignment = chunk_align(4, 6, 2)
    assert ranges(alignment) == [(0, 2), (0, 2), (3, 5), (3, 5)]


def test_overlap_by_hand():
    student, teacher = [[0, 4], [4, 6]], [[0, 2], [2, 6]]
    overlap = token_overlap(student, teacher, align(student, teacher))
    np.testing.assert_allclose(overlap.ios, [1.0, 1.0])
    np.testing.assert_allclose(overlap.iou, [4 / 6, 2 / 4])
    chunks = chunk_overlap(student, teacher, 2)
    np.testing.assert_allclose(chunks.iou, [2 / 4, 2 / 4])
    np.testing.assert_allclose(chunks.ios, [2 / 4, 1.0])


def test_one_chunk_is_the_whole_text_and_token_level_comes_last():
    student, teacher = np.array([[0, 4], [4, 6]]), np.array([[0, 2], [2, 6]])
    points = granularity([(student, teacher, align(student, teacher))], [1, 2])
    assert [p.n_chunks for p in points] == [1, 2, None]
    assert points[0].iou == points[0].ios == points[-1].ios == 1.0


def test_kinds_of_mapping_by_hand():
    #            1:1     N:1     N:1     1:N     zero width
    student = [[0, 2], [2, 3], [3, 4], [4, 8], [8, 8]]
    teacher = [[0, 2], [2, 4], [4, 6], [6, 8]]
    counts = shares(align(student, teacher))
    assert (counts.one_to_one, counts.many_to_one, counts.one_to_many, counts.unmapped) == (
        1,
        2,
        1,
        1,
    )
    assert counts.mapped == 4 and counts.tokens == 5


@many
@given(pair=pairs())
def test_kinds_of_mapping_add_up(pair):
    counts = shares(align(*pair))
    kinds = counts.one_to_one + counts.one_to_many + counts.many_to_one
    assert kinds + counts.unmapped == counts.tokens


def test_character_spans_of_split_characters_overlap():
    assert character_spans("aé👧b", [[0, 1], [1, 2], [2, 3], [3, 7], [7, 7], [7, 8]]).tolist() == [
        [0, 1],
        [1, 2],
        [1, 2],
        [2, 3],
        [3, 3],
        [3, 4],
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: align([[0, 1], [1]], [[0, 1]]), r"student_spans\[1\] has 1 numbers where .* 2"),
        (lambda: align([[0, 1]], [np.arange(2), np.arange(3)]), r"teacher_spans\[1\] has 3"),
        (lambda: align_batch([[[0, 1], [1]]], [[[0, 1]]]), r"student_spans\[0\]\[1\] has 1"),
        (lambda: carry(align([[0, 1]], [[0, 1]]), [[1.0], [2.0, 3.0]]), r"teacher_values\[1\]"),
        (lambda: align([TOKENS, TOKENS], [TOKENS, TOKENS]), "align_batch those of many"),
    ],
)
def test_rows_of_unequal_length_and_many_documents_are_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tokens_with_their_spans_are_spans():
    assert align(TOKENS, [[0, 4]]).first.tolist() == [0, 0]
    assert align(TOKENS, TOKENS).last.tolist() == [0, 1]


def test_help_shows_the_function():
    assert "Map every student token" in pydoc.render_doc(vocagnolm.align)
    assert "function align" in pydoc.render_doc("vocagnolm.align")
    for name in ("score_corpus", "objective_loss", "Head", "align", "carry"):
        assert len(inspect.getdoc(getattr(vocagnolm, name))) > 200, name


@many
@given(
    values=st.lists(st.integers(0, 60), max_size=20).map(sorted),
    queries=st.lists(st.integers(-3, 70), max_size=20),
    apart=st.sampled_from([1, 10**9]),
    side=st.sampled_from(["left", "right"]),
)
def test_counting_equals_searching(values, queries, apart, side):
    """Tokens close together are counted, tokens far apart searched."""
    places, asked = np.array(values, np.int64) * apart, np.array(queries, np.int64) * apart
    expected = np.searchsorted(places, asked, side=side)
    np.testing.assert_array_equal(ranks(places, asked, side=side), expected)
