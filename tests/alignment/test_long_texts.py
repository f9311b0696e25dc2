"""Long texts are read in pieces: the same tokens, in little memory."""

import random
import subprocess
import sys
from pathlib import Path

import made
import numpy as np
import pytest
from faults_kit import LONG

from vocagnolm.alignment import load_tokenizer, spans
from vocagnolm.report.comparison import SAMPLE

MADE_UP = "e\u0301 ½ \u2581x <tool> <wide> \n\n\tif x<=10:\r\n  12345"


def long_text(seed: int, lines: int) -> str:
    rng = random.Random(seed)
    found = [line for text in (*SAMPLE, MADE_UP) for line in text.splitlines(keepends=True)]
    return "".join(rng.choice(found) + rng.choice(["", "\n", " "]) for _ in range(lines))


@pytest.mark.parametrize("name", [*made.EXACT, *made.LOSSY])
def test_pieces_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(made.tokenizer(name))
    texts = [long_text(seed, 300) for seed in range(3 if LONG else 1)] + ["short", "x" * 5000]
    whole = tokenizer.spans_batch(texts)
    monkeypatch.setattr(spans, "LONG_TEXT", 4000)
    monkeypatch.setattr(spans, "PIECE", 500)
    for one, other in zip(whole, tokenizer.spans_batch(texts), strict=True):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.spans, other.spans)
        assert (one.n_bytes, one.lost_bytes) == (other.n_bytes, other.lost_bytes)
        assert (one.ids.dtype, one.spans.dtype) == (other.ids.dtype, other.spans.dtype)


@pytest.mark.parametrize(
    "name",
    [
        *(f"sentencepiece {way}" for way in ("prepend", "always", "first", "never", "replace")),
        "sentencepiece always split",
        "sentencepiece first added",
        "unigram",
        "byte-level large",
    ],
)
def test_usual_texts_are_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "LONG_TEXT", 4000)
    monkeypatch.setattr(spans, "PIECE", 500)
    text = "\n".join(["Two words, and a line of text"] * 300)
    cuts = load_tokenizer(made.tokenizer(name)).cuts(text)
    assert cuts is not None and len(cuts) > 10


MEASURE = """
import resource, sys
from vocagnolm.alignment import load_tokenizer
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
tokenizer = load_tokenizer(sys.argv[1])
text = "Two words, and a line of text: 12 numbers.\\n" * 100_000
tokenizer.spans_batch(["a short text"])
before = peak()
(tokens,) = tokenizer.spans_batch([text])
assert tokens.exact
print((peak() - before) / len(text))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted otherwise")
def test_a_long_text_takes_little_memory(tmp_path: Path) -> None:
    """In bytes a byte of text: its spans take five; read at once it takes two hundred."""
    folder = made.save("byte-level large", tmp_path)
    command = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60
