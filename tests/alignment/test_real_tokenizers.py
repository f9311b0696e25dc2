"""The paper's numbers, exact tiling, spelled vocabularies and chat templates, all on the real
tokenizers: to load those takes seconds, so they have one file."""

import copy

import chat_kit
import pytest
from faults_kit import LONG, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real import PACKAGES, SOURCES, real
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from vocagnolm.alignment import (
    align,
    shares,
    token_overlap,
    token_texts,
    vocabulary_overlap,
)
from vocagnolm.alignment.targets import spell
from vocagnolm.alignment.tokenizer import Frame
from vocagnolm.chat import ChatTokenizer, Message, shared_text, template_of
from vocagnolm.chat.template import DATE
from vocagnolm.report.comparison import SAMPLE, STRESS

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


@pytest.mark.parametrize(
    ("student", "teacher", "exact", "spelled"),
    [("llama2", "qwen2.5", 0.14, 0.99), *([("qwen2.5", "llama2", 0.75, 0.98)] if LONG else [])],
)
def test_real_vocabularies(student, teacher, exact, spelled):
    """TinyLlama's students and Qwen's: nearly all of a vocabulary can be spelled, some of it as one
    token."""
    vocabulary = token_texts(real(teacher), [])
    found, held = spell(real(student), vocabulary), vocabulary.lengths > 0
    assert (found.token[vocabulary.offsets[:-1][held]] >= 0).mean() > spelled
    assert found.exact[held].mean() > exact


ENDS = {
    "qwen2.5": (None, "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "llama2": ("<s>", "</s>"),
}
TALK = [
    Message("user", "What is 2+2 in naïve 東京?"),
    Message("assistant", "It's **4**.\n\nDone."),
    Message("user", "{{ ok }}"),
    Message("assistant", "bye"),
]


@pytest.mark.parametrize("name", ENDS if LONG else ("mistral",))
def test_ids_spans_and_ends_of_turns(name):
    base = real(name)
    special = {n: t for n, t in zip(("bos_token", "eos_token"), ENDS[name], strict=True) if t}
    source = (chat_kit.TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    own = copy.copy(base)  # to prepare one of this size anew takes seconds
    own.frame = Frame(template=source, special_tokens=tuple(special.items()))
    chat = ChatTokenizer(own, template_of(own))
    inner = Tokenizer.from_str(base._spanner.as_json())
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=source, **special)
    written = [{"role": m.role, "content": m.content} for m in TALK]
    options = {"date_string": DATE} if name == "llama3" else {}
    expected = theirs.apply_chat_template(written, return_dict=False, **options)
    text = shared_text(TALK)
    tokens = chat.spans(text)
    assert tokens.ids.tolist() == list(expected)
    assert tokens.lost_bytes == 0
    assert chat.token(chat.end_of_turn) == ENDS[name][1]
    # a control token that is written in a content is text
    spelled = [TALK[0], Message("assistant", f"so {ENDS[name][1]} then")]
    plain = [TALK[0], Message("assistant", "so then")]
    counts = [int(chat._is_control[chat.spans(shared_text(t)).ids].sum()) for t in (spelled, plain)]
    assert counts[0] == counts[1]
