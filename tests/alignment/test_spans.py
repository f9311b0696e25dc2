"""Spans tile the bytes of the text, for every kind of tokenizer and every kind of text."""

import unicodedata
from functools import cache

import made
import numpy as np
import pytest
from faults_kit import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from vocagnolm.alignment import (
    TextTokenizer,
    align,
    align_batch,
    load_tokenizer,
    token_overlap,
    token_spans,
)
from vocagnolm.errors import TilingError

FRAGMENTS = [
    *("a", " ", "  ", "\n", "\t", "\r\n", "Hello", " world", "12345", "\\frac{1}{2}", "x^2"),
    *("e\u0301", "é", "A\u030a", "q\u0307\u0323", "\u0301", "\u1112\u1161\u11ab", "한", "\u0958"),
    *("👩‍👩‍👧", "🇩🇰", "½", "ﬁ", "İ", "ß", "東京", "\u212b", "\u2126"),
    *(
        "▁",
        "▁▁x",
        "<0x0A>",
        "</s>",
        "<s>",
        "<unk>",
        "<|endoftext|>",
        "<tool>",
        " <wide> ",
        "<ctrl>",
    ),
    *("\ufeff", "\x00", "\x07", "\u200d", "\u00a0", "\u3000", "\u2028"),
]
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.text(max_size=30),
)
many = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)


def prepared(name: str) -> TextTokenizer:
    return load_tokenizer(made.tokenizer(name))


def assert_tiles(tokens, text: str) -> None:
    n_bytes = len(text.encode())
    assert tokens.exact and tokens.n_bytes == n_bytes
    edges = np.append(tokens.spans[:, 0], n_bytes)
    assert edges[0] == 0
    np.testing.assert_array_equal(tokens.spans[:, 1], edges[1:])
    assert (np.diff(edges) >= 0).all()


@pytest.fixture(scope="module", params=made.EXACT)
def exact(request) -> TextTokenizer:
    return prepared(request.param)


@pytest.fixture(scope="module", params=made.LOSSY)
def lossy(request) -> TextTokenizer:
    return prepared(request.param)


@many
@given(text=TEXTS)
@example(text="")
@example(text=" hello")
@example(text="".join(FRAGMENTS))
def test_every_byte_is_in_exactly_one_token(exact, text):
    assert_tiles(exact.spans(text), text)


@many
@given(texts=st.lists(TEXTS, max_size=5))
def test_batch_equals_one_by_one(exact, texts):
    for text, tokens in zip(texts, exact.spans_batch(texts), strict=True):
        alone = exact.spans(text)
        np.testing.assert_array_equal(tokens.ids, alone.ids)
        np.testing.assert_array_equal(tokens.spans, alone.spans)


@many
@given(text=TEXTS)
def test_ids_are_those_of_the_tokenizer(exact, text):
    ids = reference_of(exact).encode(text, add_special_tokens=False).ids
    assert exact.spans(text).ids.tolist() == ids


@cache
def reference_of(tokenizer: TextTokenizer) -> Tokenizer:
    reference = Tokenizer.from_str(tokenizer._tokenizer.to_str())
    reference.encode_special_tokens = True
    return reference


@many
@given(text=TEXTS)
def test_tokenizers_that_lose_text_stay_monotone_and_count_the_loss(lossy, text):
    tokens = lossy.spans(text)
    flat = tokens.spans.ravel()
    assert (np.diff(flat) >= 0).all()
    assert not len(flat) or (flat[0] >= 0 and flat[-1] <= len(text.encode()))
    assert tokens.lost_bytes == len(text.encode()) - int(tokens.token_bytes.sum())


@pytest.mark.parametrize("name", ["byte-level", "byte-level large"])
@many
@given(text=TEXTS)
def test_a_byte_level_token_spells_its_own_bytes(name, text):
    tokenizer, encoded = prepared(name), text.encode()
    tokens = tokenizer.spans(text)
    for index, (start, end) in zip(tokens.ids.tolist(), tokens.spans.tolist(), strict=True):
        assert tokenizer.bytes_of(index) == encoded[start:end]


@many
@given(text=TEXTS)
def test_nfc_spans_lie_over_the_original(text):
    """Cut at token boundaries that split no composed character, the original's pieces compose to
    what the tokens spell."""
    tokenizer = prepared("byte-level NFC")
    tokens = tokenizer.spans(text)
    spelled = b"".join(tokenizer.bytes_of(i) or b"" for i in tokens.ids.tolist())
    assert spelled.decode() == unicodedata.normalize("NFC", text)
    position = 0
    for index, (_, end) in zip(tokens.ids.tolist(), tokens.spans.tolist(), strict=True):
        position += len(tokenizer.bytes_of(index))
        try:
            before, original = spelled[:position].decode(), text.encode()[:end].decode()
        except UnicodeDecodeError:  # the token ends inside a character
            continue
        halves = [unicodedata.normalize("NFC", part) for part in (original, text[len(original) :])]
        if "".join(halves) == spelled.decode():
            assert halves[0] == before


def test_a_composed_character_has_the_span_of_its_original_sequence():
    tokenizer = prepared("byte-level NFC")
    text = "x e\u0301\u0323 y"
    tokens = tokenizer.spans(text)
    encoded = text.encode()
    start, end = encoded.index(b"e"), encoded.index(b" y")
    inside = (tokens.spans[:, 0] < end) & (tokens.spans[:, 1] > start)
    assert tokens.spans[inside][-1, 1] == end
    assert tokens.spans[inside][0, 0] in (start, start - 1)  # with or without its leading space


def test_the_dummy_space_takes_no_byte():
    tokenizer = prepared("sentencepiece prepend")
    hello = tokenizer.spans("hello").spans
    assert hello[0, 0] == 0 and hello[-1, 1] == 5
    # ' hello': the first mark is the dummy, the second stands for the space
    tokens = tokenizer.spans(" hello")
    marks = [tokenizer.token(i).count("▁") for i in tokens.ids.tolist()]
    assert sum(marks) == 2 and tokens.spans[0, 0] == 0 and tokens.spans[-1, 1] == 6


def test_byte_fallback_tokens_take_one_byte_each():
    tokenizer = prepared("sentencepiece prepend")
    tokens = tokenizer.spans("👧")
    named = [tokenizer.token(i) for i in tokens.ids.tolist()]
    assert named[-4:] == ["<0xF0>", "<0x9F>", "<0x91>", "<0xA7>"]
    assert tokens.spans[-4:].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_literal_space_mark_takes_its_three_bytes():
    tokens = prepared("sentencepiece never").spans("a▁b c")
    assert_tiles(tokens, "a▁b c")
    assert 1 in tokens.spans[:, 1] or 4 in tokens.spans[:, 1]


def test_added_tokens_in_the_text_are_literal_and_control_needs_asking():
    plain = made.tokenizer("byte-level added")
    text = "a<tool>b <ctrl>"
    tokens = load_tokenizer(plain).spans(text)
    tool, ctrl = plain.token_to_id("<tool>"), plain.token_to_id("<ctrl>")
    where = tokens.ids.tolist().index(tool)
    assert tokens.spans[where].tolist() == [1, 7]
    assert ctrl not in tokens.ids
    control = load_tokenizer(plain, special_tokens="control").spans(text)
    assert control.spans[control.ids.tolist().index(ctrl)].tolist() == [9, 15]
    assert_tiles(control, text)


def test_special_tokens_around_the_text_have_no_width():
    tokens = token_spans(made.tokenizer("wordpiece"), "red marbles", add_special_tokens=True)
    assert tokens.ids[0] == 1 and tokens.ids[-1] == 2
    assert tokens.spans[0].tolist() == [0, 0] and tokens.spans[-1].tolist() == [11, 11]
    plain = token_spans(made.tokenizer("wordpiece"), "red marbles")
    np.testing.assert_array_equal(tokens.spans[1:-1], plain.spans)


def test_a_vocabulary_without_every_byte_is_lossy_not_wrong():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = load_tokenizer(tokenizer).spans("azb")
    assert tokens.ids.tolist() == [0, 1]
    assert tokens.spans.tolist() == [[0, 1], [2, 3]] and tokens.lost_bytes == 1
    assert load_tokenizer(tokenizer).spans("zz").lost_bytes == 2


def test_truncation_and_padding_of_the_file_are_off_and_the_original_is_untouched():
    original = Tokenizer.from_str(made.tokenizer("byte-level").to_str())
    original.enable_truncation(3)
    original.enable_padding(length=64)
    text = "A bag holds 3 red marbles"
    assert_tiles(load_tokenizer(original).spans(text), text)
    assert len(original.encode(text).ids) == 64


def test_a_lone_surrogate_is_one_clear_error():
    for call in (prepared("byte-level").spans, lambda t: prepared("byte-level").spans_batch([t])):
        with pytest.raises(TilingError, match=r"lone surrogate \(U\+D800\) at character 2"):
            call("ab\ud800")


def test_half_a_megabyte_tiles_in_linear_time():
    text = ("Let $x \\in \\mathbb{R}$, then é ½ 👧 holds.\n" * 12_500)[: 2**19]
    assert len(text.encode()) > 2**19
    for name in ("byte-level NFC", "sentencepiece first"):
        assert_tiles(prepared(name).spans(text), text)


def test_token_spans_sees_what_a_tokenizer_has_become():
    tokenizer = Tokenizer.from_str(made.tokenizer("byte-level").to_str())
    assert len(token_spans(tokenizer, "<new>")) > 1
    tokenizer.add_tokens(["<new>"])
    assert len(token_spans(tokenizer, "<new>")) == 1
    upper = token_spans(tokenizer, "RED").ids.tolist()
    tokenizer.normalizer = normalizers.Lowercase()  # of the same size as before
    assert token_spans(tokenizer, "RED").ids.tolist() != upper


def test_align_takes_tokens_with_their_spans():
    text = "A bag holds 3 red marbles, café 👧"
    ours, theirs = (prepared(n).spans(text) for n in ("byte-level NFC", "sentencepiece prepend"))
    wanted = align(ours.spans, theirs.spans)
    found = [align(ours, theirs), align(ours, theirs.spans), *align_batch([ours], [theirs])]
    for alignment in found:
        np.testing.assert_array_equal(alignment.first, wanted.first)
        np.testing.assert_array_equal(alignment.last, wanted.last)
    assert token_overlap(ours, theirs, wanted).mean_ios == 1.0


def test_added_tokens_are_read_as_the_tokenizer_reads_them_in_a_batch():
    """Spaces are marked outside of the library only where no added token could be met."""
    base = made.sentencepiece_bpe()
    base.add_tokens([AddedToken("<tag>"), AddedToken("two words", normalized=True)])
    tokenizer = TextTokenizer(base, name="added")
    texts = ["", " ", "a b", "x <tag> y", "<s> two words", "two▁words", "▁", " ▁a  b"]
    for text in texts:
        (tokens,) = tokenizer.spans_batch([text])
        np.testing.assert_array_equal(tokens.ids, tokenizer.spans(text).ids, err_msg=repr(text))
    assert tokenizer._spanner._bare is not None


def test_a_list_of_texts_and_a_single_text_are_told_apart(exact):
    with pytest.raises(TypeError, match="got list: use spans_batch for a list of texts"):
        exact.spans(["a", "b"])
    with pytest.raises(TypeError, match="got one str: use spans"):
        exact.spans_batch("ab")
