"""What a vocabulary's entries stand for: the bytes behind every id, and the tokenizer's kind."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer

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


def only_marks_spaces(description: dict[str, Any]) -> bool:
    """Whether a BPE model reads the whole text as one word, behind a mark and with spaces marked:
    `Prepend ▁`, `Replace ' ' by ▁` and nothing else (Llama-2, Mistral)."""
    steps = components(description.get("normalizer"), "normalizers")
    return bool(
        [step["type"] for step in steps] == ["Prepend", "Replace"]
        and all(is_mark_step(step) for step in steps)
        and description.get("pre_tokenizer") is None
        and description["model"].get("type") == "BPE"
    )


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


def description_of(tokenizer: Tokenizer) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    return description
