"""The bytes behind every id of a vocabulary, and token ids with their spans in the bytes of a text.

Three ways, from fast to forgiving. Each is taken only where it is right:

1. *Joined*: the bytes behind the ids, joined, are the text itself (or the text behind one dummy
   space), or are so between added tokens. Then the byte lengths are the spans. No offsets are asked
   of the tokenizer at all.
2. *Traced*: the same per segment between added tokens, against the normalised text, and then back
   to the original bytes: NFC, lower-casing, literal space marks, dummy spaces behind added tokens.
3. *Offsets*: tokenizers that lose text (WordPiece, NFKC, unknown tokens) get the best spans that
   their character offsets give: monotone, without overlap, and the bytes left out are counted.
"""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from vocagnolm.alignment.alignment import IntArray, TokenSpans
from vocagnolm.errors import TilingError

# ---- what a vocabulary's entries stand for ----

SPACE_MARK = "\u2581"  # ▁, how SentencePiece writes a space
BYTE_FALLBACK = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}


@cache
def byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 bytes stand for themselves, the other
    bytes are written as the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    return alphabet | {chr(0x100 + i): value for i, value in enumerate(rest)}


@dataclass(frozen=True)
class Pipeline:
    """What matters of a `tokenizer.json` for finding the bytes of its tokens."""

    model: str
    byte_level: bool
    space_marks: bool
    byte_fallback: bool
    inner_prefix: str
    """Written before a token inside a word (`##`); no text."""
    word_suffix: str
    """Written after the last token of a word (`</w>`); no text."""
    lossy_normaliser: bool
    """The normaliser removes text on purpose (accents, control characters, outer white space)."""

    @property
    def joins(self) -> bool:
        """Tokens, one behind the other, spell the text: no word is cut off from its white space."""
        return not (self.inner_prefix or self.word_suffix or self.model == "WordPiece")

    @property
    def kind(self) -> str:
        if self.model in ("BPE", "Unigram") and self.byte_level:
            return f"byte-level {self.model}"
        if self.model in ("BPE", "Unigram") and self.space_marks:
            return f"SentencePiece {self.model}"
        return self.model


def components(section: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """The flat list of steps of a normaliser or pre-tokeniser, whatever the nesting."""
    if section is None:
        return []
    if section["type"] == "Sequence":
        return [step for part in section[parts] for step in components(part, parts)]
    return [section]


def is_mark_step(step: dict[str, Any]) -> bool:
    """A normaliser step that only writes space marks: `Prepend ▁`, `Replace ' ' by ▁`."""
    if step["type"] == "Prepend":
        return bool(step["prepend"] == SPACE_MARK)
    if step["type"] == "Replace":
        return bool(step["content"] == SPACE_MARK and step["pattern"] == {"String": " "})
    return False


def own_mark(description: dict[str, Any]) -> Literal["always", "missing", "never"] | None:
    """When a tokenizer that marks spaces puts one more mark before the text: "always" (`Prepend ▁`,
    `Replace ' ' by ▁`: Llama-2, Mistral), only where the text has none ("missing"; `Metaspace`:
    Llama's as transformers builds it), or "never" (Gemma). None for tokenizers of other kinds."""
    steps = components(description.get("normalizer"), "normalizers")
    splits = components(description.get("pre_tokenizer"), "pretokenizers")
    kinds, bpe = [step["type"] for step in steps], description["model"].get("type") == "BPE"
    if not all(is_mark_step(step) for step in steps):
        return None
    if kinds == ["Prepend", "Replace"]:
        return "always" if bpe and not splits else None
    if kinds == ["Replace"]:  # there are no spaces left to split at
        at_spaces = ({"String": " "}, False)
        idle = all((step.get("pattern"), step.get("invert")) == at_spaces for step in splits)
        return "never" if bpe and idle else None
    if kinds or len(splits) != 1 or splits[0].get("replacement") != SPACE_MARK:
        return None
    (step,) = splits
    if not (bpe or (step["split"] and description["model"].get("type") == "Unigram")):
        return None
    return "never" if step["prepend_scheme"] == "never" else "missing"


def describe(description: dict[str, Any]) -> Pipeline:
    model = description["model"]
    normalisers = components(description.get("normalizer"), "normalizers")
    pre_tokenisers = components(description.get("pre_tokenizer"), "pretokenizers")
    steps = [*normalisers, *pre_tokenisers]
    types = {step["type"] for step in steps}
    return Pipeline(
        model=model.get("type") or "BPE",
        byte_level="ByteLevel" in types,
        space_marks="Metaspace" in types or any(is_mark_step(step) for step in normalisers),
        byte_fallback=bool(model.get("byte_fallback")),
        inner_prefix=model.get("continuing_subword_prefix") or "",
        word_suffix=model.get("end_of_word_suffix") or "",
        lossy_normaliser=bool(types & {"StripAccents", "BertNormalizer", "Strip", "Nmt"}),
    )


def bytes_of_token(token: str, pipeline: Pipeline) -> bytes | None:
    """The text of one vocabulary entry, None where it has none (an entry of no known form).

    Space marks become spaces, so a literal `▁` of the text reads as a space here.
    """
    if pipeline.byte_fallback and token in BYTE_FALLBACK:
        return BYTE_FALLBACK[token]
    token = token.removeprefix(pipeline.inner_prefix).removesuffix(pipeline.word_suffix)
    if pipeline.byte_level:
        alphabet = byte_of_character()
        try:
            return bytes(alphabet[character] for character in token)
        except KeyError:
            return None
    if pipeline.space_marks:
        token = token.replace(SPACE_MARK, " ")
    try:
        return token.encode()
    except UnicodeEncodeError:
        return None


def token_bytes_table(tokenizer: Tokenizer, pipeline: Pipeline) -> list[bytes | None]:
    """The bytes behind every id, added tokens literally; None for an id that nothing holds."""
    entries = tokenizer.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(entries.values(), default=-1) + 1)
    for token, index in entries.items():
        table[index] = bytes_of_token(token, pipeline)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        table[index] = added.content.encode(errors="replace")
    return table


def plain_normaliser(description: dict[str, Any]) -> dict[str, Any] | None:
    """The normaliser without its mark steps: what really changes the text; None if nothing does."""
    steps = components(description.get("normalizer"), "normalizers")
    steps = [step for step in steps if not is_mark_step(step) and step["type"] != "ByteLevel"]
    return {"type": "Sequence", "normalizers": steps} if steps else None


# ---- normalised text ----


@dataclass(frozen=True)
class NormalisedText:
    """A text as the model of a tokenizer sees it, and where each of its bytes comes from.

    `start_of[x]` and `end_of[x]` give, for a boundary before byte x of `encoded`, the place in
    the original's bytes: the first where a token starts at x, the second where one ends at x.
    They differ only around text that the normaliser removed.
    """

    encoded: bytes
    start_of: IntArray
    end_of: IntArray


class Normaliser:
    """Follows a tokenizer's own normaliser character by character.

    The library keeps the alignment of normalised and original text to itself, but shows it in
    the offsets of an encoding. So a throw-away model that knows no character at all is given the
    same normaliser: it emits one unknown token per normalised character, with its offsets.
    """

    def __init__(self, normaliser: dict[str, Any] | None, *, space_marks: bool, lossy: bool):
        self._space_marks = space_marks
        self._lossy = lossy
        self._characters: Tokenizer | None = None
        if normaliser is not None:
            unknown = {"unk_token": "?", "fuse_unk": False}
            model = {"type": "BPE", "vocab": {"?": 0}, "merges": [], **unknown}
            description = {"version": "1.0", "added_tokens": [], "normalizer": normaliser}
            self._characters = Tokenizer.from_str(json.dumps({**description, "model": model}))

    def __call__(self, text: str) -> NormalisedText:
        characters, starts, ends = text, np.arange(len(text)), np.arange(1, len(text) + 1)
        if self._characters is not None:
            assert self._characters.normalizer is not None
            characters = self._characters.normalizer.normalize_str(text)
        if self._characters is not None and characters != text:
            offsets = self._characters.encode(text, add_special_tokens=False).offsets
            assert len(offsets) == len(characters)
            starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        if self._space_marks:
            characters = characters.replace(SPACE_MARK, " ")
        return _trace(text, characters, starts, ends, self._lossy)


def byte_positions(text: str) -> IntArray:
    """The byte where each character begins, and the end."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    return np.append(np.flatnonzero((encoded & 0xC0) != 0x80), len(encoded)).astype(np.int64)


def _trace(
    original: str, normalised: str, starts: IntArray, ends: IntArray, lossy: bool
) -> NormalisedText:
    encoded = normalised.encode()
    if not normalised:
        end = np.array([0 if lossy else len(original.encode())])
        return NormalisedText(encoded, np.zeros(1, np.int64), end)
    byte_of = byte_positions(original)
    starts = np.maximum.accumulate(starts)
    # characters that come from the same original one (an expansion) form a group
    new_group = np.append(True, starts[1:] > starts[:-1])
    group_start = byte_of[starts[new_group]]
    if lossy:
        last_of_group = np.append(new_group[1:], True)
        group_end = np.maximum(byte_of[ends[last_of_group]], group_start)
        group_end = np.minimum(group_end, np.append(group_start[1:], byte_of[-1]))
    else:
        # what a composition swallowed (e + combining accent = é) belongs to the composed character
        group_start[0] = 0
        group_end = np.append(group_start[1:], byte_of[-1])

    normal_bytes = byte_positions(normalised)
    normal_start = normal_bytes[:-1][new_group]
    normal_end = np.append(normal_start[1:], normal_bytes[-1])
    widths = normal_end - normal_start
    # every byte boundary inside a group: spread over the group's original bytes in proportion
    group_of_byte = np.repeat(np.arange(len(normal_start)), widths)
    inside = np.arange(len(encoded)) - normal_start[group_of_byte]
    spread = inside * (group_end - group_start)[group_of_byte] // widths[group_of_byte]
    start_of = np.append(group_start[group_of_byte] + spread, group_end[-1])
    end_of = start_of.copy()
    end_of[normal_end] = group_end
    return NormalisedText(encoded, start_of, end_of)


# ---- spans ----


Item = TypeVar("Item")
BATCH = 10**6
"""Characters of texts to be read at once: enough to keep the library's threads busy, little enough
that the encodings of many texts never lie in memory together."""
CACHED_WORDS = 2**17
"""Whose merges a BPE model remembers; the library's own 10,000 are used up after a megabyte. Not of
models for which whole lines are words: these never come again, and take hundreds of megabytes."""


def batches(documents: Sequence[Item], size: Callable[[Item], int]) -> list[list[Item]]:
    """Documents in batches of at most `BATCH` characters; a longer document is a batch of its
    own."""
    grouped: list[list[Item]] = []
    room = 0
    for document in documents:
        room -= size(document)
        if room < 0 or not grouped:
            grouped.append([])
            room = BATCH - size(document)
        grouped[-1].append(document)
    return grouped


@contextlib.contextmanager
def _without_panic() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no Exception, into a TilingError. A regular
    expression that runs away ends in one."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TilingError(f"the tokenizer failed on the text ({error})") from None


def encode_utf8(text: str) -> bytes:
    """The text's bytes, or a TilingError where it has none: a lone surrogate is not a character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TilingError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}, which UTF-8 cannot encode; replace it, for example with "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


class Spanner:
    """Finds the spans of one tokenizer's tokens. Takes the tokenizer over: its post-processor is
    set apart, because it may trim the offsets (`trim_offsets`); it is asked only for a template."""

    def __init__(self, tokenizer: Tokenizer):
        description: dict[str, Any] = json.loads(tokenizer.to_str())
        self._tokenizer = tokenizer
        self._post_processor = tokenizer.post_processor
        self._decoder = tokenizer.decoder
        tokenizer.post_processor = None
        tokenizer.decoder = None
        self.pipeline = describe(description)
        self._tabulate(token_bytes_table(tokenizer, self.pipeline))
        self._single_bytes = frozenset(e[0] for e in self.token_bytes if e and len(e) == 1)
        self._segmented = False
        self._own_mark = own_mark(description)
        splits = components(description.get("pre_tokenizer"), "pretokenizers")
        by_word = self._own_mark is None or any(step.get("split") for step in splits)
        if by_word and isinstance(tokenizer.model, BPE) and hasattr(BPE, "_resize_cache"):
            tokenizer.model._resize_cache(CACHED_WORDS)
        self._bare = self._bare_of(tokenizer)
        self._normaliser = Normaliser(
            plain_normaliser(description),
            space_marks=self.pipeline.space_marks,
            lossy=self.pipeline.lossy_normaliser,
        )

    def _tabulate(self, token_bytes: list[bytes | None]) -> None:
        """Set up the tables that are looked up by token id."""
        self.token_bytes = token_bytes
        self._pieces = np.array(token_bytes, object)
        lengths = [-1 if entry is None else len(entry) for entry in token_bytes]
        self._lengths = np.array(lengths or [0], np.int64)
        self._added = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._is_added = np.zeros(len(self._lengths), bool)
        self._is_added[[index for index in self._added if index < len(lengths)]] = True

    def as_json(self) -> str:
        """The tokenizer as it was taken over, post-processor and decoder included."""
        whole = Tokenizer.from_str(self._tokenizer.to_str())
        if self._post_processor is not None:
            whole.post_processor = self._post_processor
        if self._decoder is not None:
            whole.decoder = self._decoder
        return str(whole.to_str())

    def renamed(self, tokenizer: Tokenizer, names: dict[int, bytes]) -> "Spanner":
        """A spanner for a tokenizer that differs in the names of added tokens alone."""
        other = copy.copy(self)
        other._tokenizer = tokenizer
        other._post_processor = other._decoder = None
        other._bare = other._bare_of(tokenizer)
        entries = [*self.token_bytes]
        for index in self._added - frozenset(tokenizer.get_added_tokens_decoder()):
            entries[index] = bytes_of_token(tokenizer.id_to_token(index) or "", self.pipeline)
        for index, name in names.items():
            entries[index] = name
        other._tabulate(entries)
        return other

    def spans(self, text: str, *, add_special_tokens: bool = False) -> TokenSpans:
        encoded = encode_utf8(text)
        with _without_panic():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = self._by_bytes(encoding.ids, encoded) or self._traced(text, encoded, encoding)
        if add_special_tokens and self._post_processor is not None:
            return _in_template(tokens, self._post_processor.process(encoding, None, True))
        return tokens

    def spans_batch(self, texts: Sequence[str]) -> list[TokenSpans]:
        """Spans of several texts. The tokenizer reads them in parallel and without the GIL; offsets
        are asked for again only where a text needs them."""
        encoded_texts = [encode_utf8(text) for text in texts]
        with _without_panic():
            encodings = self._encodings([*texts])
        return [
            self._by_bytes(encoding.ids, encoded) or self.spans(text)
            for text, encoded, encoding in zip(texts, encoded_texts, encodings, strict=True)
        ]

    def _bare_of(self, tokenizer: Tokenizer) -> tuple[Tokenizer, list[str]] | None:
        """For a tokenizer that always puts a mark before the text: a tokenizer with its model
        alone, and the names of added tokens, in texts with which the model alone would go wrong.
        None for others."""
        if self._own_mark != "always":
            return None
        literal = tokenizer.encode_special_tokens
        added = tokenizer.get_added_tokens_decoder().values()
        names = [token.content for token in added if not (literal and token.special)]
        return Tokenizer(tokenizer.model), [name.replace(" ", SPACE_MARK) for name in names]

    def _encodings(self, texts: list[str]) -> list[Encoding]:
        """Encode texts without offsets. Spaces are marked here, which is faster than in the
        library."""
        if self._bare is not None:
            model, added = self._bare
            marked = [
                SPACE_MARK + text.replace(" ", SPACE_MARK) if text else text for text in texts
            ]
            if not any(name in text for name in added for text in marked):
                return model.encode_batch_fast(marked, add_special_tokens=False)
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def _by_bytes(self, ids: list[int], encoded: bytes) -> TokenSpans | None:
        """Spans from the bytes behind the ids, of the whole text or of its segments; the way that
        worked for the last text is tried first. None where neither spells the text."""
        ways = (self._joined, self._joined_segments)
        for segmented in (self._segmented, not self._segmented):
            tokens = ways[segmented](ids, encoded)
            if tokens is not None:
                self._segmented = segmented
                return tokens
        return None

    def _joined(self, ids: list[int], encoded: bytes) -> TokenSpans | None:
        if not self.pipeline.joins:
            return None
        array = np.fromiter(ids, np.int32, len(ids))
        try:
            joined = b"".join(self._pieces[array].tolist())
        except TypeError:  # an id without bytes of its own
            return None
        dummy = len(joined) - len(encoded)
        if not (joined == encoded if dummy == 0 else dummy == 1 and joined == b" " + encoded):
            return None
        spans = np.empty((len(ids), 2), np.int64)
        np.cumsum(self._lengths[array], out=spans[:, 1])
        spans[:, 1] -= dummy
        spans[1:, 0] = spans[:-1, 1]
        spans[:1, 0] = 0
        return TokenSpans(array, spans, len(encoded), lost_bytes=0)

    def _joined_segments(self, ids: list[int], encoded: bytes) -> TokenSpans | None:
        """Spans from byte lengths, where each piece between added tokens, with or without a dummy
        space before it, is spelled by its tokens; None where one is not."""
        array = np.array(ids, np.int32)
        added = np.flatnonzero(self._is_added[array]).tolist()
        if not self.pipeline.joins or not added:
            return None
        lengths = self._lengths[array]
        if (lengths < 0).any():
            return None
        cursor = 0
        for before, after in pairwise([-1, *added, len(ids)]):
            joined = b"".join(map(self.token_bytes.__getitem__, ids[before + 1 : after]))  # type: ignore[arg-type]
            behind = self.token_bytes[ids[after]] if after < len(ids) else b""
            assert behind is not None
            ends = after < len(ids) or cursor + len(joined) == len(encoded)
            if not (ends and encoded.startswith(joined + behind, cursor)):
                if joined[:1] != b" " or not encoded.startswith(joined[1:] + behind, cursor):
                    return None
                joined = joined[1:]
                lengths[before + 1] -= 1
            cursor += len(joined) + len(behind)
        if cursor != len(encoded):
            return None
        spans = np.empty((len(ids), 2), np.int64)
        np.cumsum(lengths, out=spans[:, 1])
        spans[:, 0] = spans[:, 1] - lengths
        return TokenSpans(array, spans, len(encoded), lost_bytes=0)

    def _traced(self, text: str, encoded: bytes, encoding: Encoding) -> TokenSpans:
        ids = np.array(encoding.ids, np.int32)
        byte_of = byte_positions(text)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        spans = self._trace_segments(text, ids, offsets, byte_of) if self.pipeline.joins else None
        if spans is None:
            spans = self._offset_spans(text, ids, offsets, byte_of)
        lost = len(encoded) - int((spans[:, 1] - spans[:, 0]).sum())
        return TokenSpans(ids, spans, len(encoded), lost)

    def _trace_segments(
        self, text: str, ids: NDArray[np.int32], offsets: IntArray, byte_of: IntArray
    ) -> IntArray | None:
        """Spans of the text between added tokens, a segment at a time; added tokens literally."""
        spans = np.empty((len(ids), 2), np.int64)
        added = [i for i, index in enumerate(ids.tolist()) if index in self._added]
        spans[added] = byte_of[offsets[added]]
        for before, after in pairwise([-1, *added, len(ids)]):
            start = int(offsets[before, 1]) if before >= 0 else 0
            end = int(offsets[after, 0]) if after < len(ids) else len(text)
            if end < start:
                return None
            inside = slice(before + 1, after)
            segment = self._trace_segment(text[start:end], ids[inside])
            if segment is None:
                return None
            spans[inside] = segment + byte_of[start]
        return spans

    def _trace_segment(self, text: str, ids: NDArray[np.int32]) -> IntArray | None:
        pieces = [self.token_bytes[index] for index in ids.tolist()]
        if None in pieces:
            return None
        normalised = self._normaliser(text)
        located = self._locate(pieces, normalised.encoded)
        if located is None:
            return None
        starts, ends = located
        spans = np.stack([normalised.start_of[starts], normalised.end_of[ends]], axis=1)
        # a zero-width token (a dummy space) stays where it stands
        return np.maximum(spans, spans[:, :1])

    def _locate(self, pieces: list[bytes], text: bytes) -> tuple[IntArray, IntArray] | None:
        """Where each piece stands in the normalised text, None when they do not spell it."""
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        joined = b"".join(pieces)
        if joined in (text, b" " + text):
            ends = np.cumsum(lengths) - (len(joined) - len(text))
            return np.maximum(ends - lengths, 0), ends
        if not self.pipeline.byte_level:
            return None
        # a byte-level model drops the bytes that its vocabulary lacks; nothing else may be skipped
        starts = np.empty(len(pieces), np.int64)
        cursor = 0
        for i, piece in enumerate(pieces):
            starts[i] = text.find(piece, cursor)
            if starts[i] < 0 or not self._single_bytes.isdisjoint(text[cursor : starts[i]]):
                return None
            cursor = int(starts[i]) + len(piece)
        return starts, starts + lengths

    def _offset_spans(
        self, text: str, ids: NDArray[np.int32], offsets: IntArray, byte_of: IntArray
    ) -> IntArray:
        offsets = self._with_leading_space(text, ids, offsets)
        spans = byte_of[offsets]
        # tokens with one and the same offset share its bytes evenly (byte fallback, expansions)
        new_run = np.append(True, (offsets[1:] != offsets[:-1]).any(axis=1))[: len(offsets)]
        run = np.cumsum(new_run) - 1
        size = np.bincount(run) if len(run) else run
        if (size > 1).any():
            first_of_run = np.flatnonzero(new_run)
            rank = np.arange(len(run)) - first_of_run[run]
            width = spans[:, 1] - spans[:, 0]
            origin = spans[:, 0].copy()
            spans[:, 0] = origin + rank * width // size[run]
            spans[:, 1] = origin + (rank + 1) * width // size[run]
        # neighbours that still overlap: the earlier token keeps the shared bytes
        spans[:, 1] = np.maximum.accumulate(spans[:, 1])
        spans[1:, 0] = np.maximum(spans[1:, 0], spans[:-1, 1])
        spans[:, 1] = np.maximum(spans[:, 1], spans[:, 0])
        return spans

    def _with_leading_space(self, text: str, ids: NDArray[np.int32], offsets: IntArray) -> IntArray:
        """Give a marked token (`▁b`) the one white-space character before it, which its mark
        stands for, where the pre-tokeniser had cut it away."""
        if not self.pipeline.space_marks or not len(ids):
            return offsets
        marked = np.array(
            [(self._tokenizer.id_to_token(i) or "").startswith(SPACE_MARK) for i in ids.tolist()]
        )
        previous_end = np.append(0, offsets[:-1, 1])
        gap = marked & (offsets[:, 0] > previous_end)
        gap &= np.array([text[start - 1 : start].isspace() for start in offsets[:, 0]])
        widened = offsets.copy()
        widened[gap, 0] -= 1
        return widened


def _in_template(tokens: TokenSpans, encoding: Encoding) -> TokenSpans:
    """Add the special tokens of the tokenizer's template to a text's tokens. They hold no text and
    get zero-width spans."""
    template = np.array(encoding.special_tokens_mask, bool)
    assert int((~template).sum()) == len(tokens), "the template changed the text's own tokens"
    text_before = np.cumsum(~template)
    spans = np.empty((len(template), 2), np.int64)
    spans[~template] = tokens.spans
    ends = np.append(0, tokens.spans[:, 1])
    ends[-1] = tokens.n_bytes if len(tokens) else 0
    spans[template] = ends[text_before[template]][:, None]
    ids = np.array(encoding.ids, np.int32)
    return TokenSpans(ids, spans, tokens.n_bytes, tokens.lost_bytes)
