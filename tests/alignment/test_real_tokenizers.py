"""The paper's numbers, and exact tiling, on the real tokenizers."""

import pytest
from faults_kit import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real import PACKAGES, SOURCES, real

from vocagnolm.alignment import align, shares, token_overlap, vocabulary_overlap
from vocagnolm.pair.sample import SAMPLE, STRESS

pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="the packages with real tokenizers are not installed: make test"
)


@pytest.mark.parametrize(
    ("teacher", "size", "overlap", "n_tokens"),
    [
        ("llama2", 32_000, 1.0, 7),
        ("mistral", 32_000, 0.7558, 8),
        ("deepseek", 100_002, 0.0960, 6),
        ("qwen2.5", 151_665, 0.0632, 4),
    ],
)
def test_the_numbers_of_the_paper(teacher, size, overlap, n_tokens):
    tokenizer = real(teacher)
    assert tokenizer.vocabulary_size == size
    found = vocabulary_overlap(real("llama2"), tokenizer)
    assert round(found.raw, 4) == pytest.approx(overlap, abs=1e-4)
    assert found.raw <= found.marks <= 1 and found.bytes <= 1
    assert len(tokenizer.spans("Probability, Uncertainty")) == n_tokens


FRAGMENTS = [
    *SAMPLE[4].split("\n"),
    *("é", "e\u0301", "👩‍👩‍👧", "½", "▁", "<0x0A>", "</s>", "<tool_call>", "한", "\u1112\u1161"),
    *("\u0958", "\x00", "\ufeff", "  ", "\r\n", "\t", "東京", "𝔘", "\u0301"),
]
TEXTS = st.one_of(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.text())


@pytest.mark.parametrize("name", SOURCES)
@settings(
    max_examples=examples(150),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(text=TEXTS)
def test_spans_tile_any_text(name, text):
    tokens = real(name).spans(text)
    assert tokens.exact
    assert (tokens.spans[1:, 0] == tokens.spans[:-1, 1]).all()
    assert not text or (tokens.spans[0, 0] == 0 and tokens.spans[-1, 1] == len(text.encode()))


@pytest.mark.parametrize("student", ["llama2", "llama3"])
@pytest.mark.parametrize("teacher", SOURCES)
def test_every_student_token_with_text_is_covered(student, teacher):
    for text in (*SAMPLE, *STRESS):
        ours, theirs = real(student).spans(text), real(teacher).spans(text)
        alignment = align(ours.spans, theirs.spans)
        overlap = token_overlap(ours.spans, theirs.spans, alignment)
        with_text = ours.token_bytes > 0
        assert (overlap.ios[with_text] == 1.0).all()
        assert shares(alignment).unmapped == int((~with_text).sum())


def test_a_quarter_of_a_megabyte_of_one_document():
    text = "".join(SAMPLE) * (2**18 // len("".join(SAMPLE).encode()) + 1)
    for name in ("llama2", "qwen2.5"):
        assert real(name).spans_batch([text])[0].exact
