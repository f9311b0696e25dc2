"""From a normalised text back to the bytes of the original."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vocagnolm.alignment.vocabulary import SPACE_MARK

IntArray = NDArray[np.int64]


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
            self._characters = Tokenizer.from_str(
                json.dumps(
                    {
                        "version": "1.0",
                        "added_tokens": [],
                        "normalizer": normaliser,
                        "model": {
                            "type": "BPE",
                            "vocab": {"?": 0},
                            "merges": [],
                            "unk_token": "?",
                            "fuse_unk": False,
                        },
                    }
                )
            )

    def __call__(self, text: str) -> NormalisedText:
        if self._characters is None or self._unchanged(text):
            characters, starts, ends = text, np.arange(len(text)), np.arange(1, len(text) + 1)
        else:
            assert self._characters.normalizer is not None
            characters = self._characters.normalizer.normalize_str(text)
            offsets = self._characters.encode(text, add_special_tokens=False).offsets
            assert len(offsets) == len(characters)
            starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        if self._space_marks:
            characters = characters.replace(SPACE_MARK, " ")
        return _trace(text, characters, starts, ends, self._lossy)

    def _unchanged(self, text: str) -> bool:
        assert self._characters is not None and self._characters.normalizer is not None
        return bool(self._characters.normalizer.normalize_str(text) == text)


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
    place = byte_positions(original)
    starts = np.maximum.accumulate(starts)
    # characters that come from the same original one (an expansion) form a group
    new_group = np.append(True, starts[1:] > starts[:-1])
    group_start = place[starts[new_group]]
    if lossy:
        last_of_group = np.append(new_group[1:], True)
        group_end = np.maximum(place[ends[last_of_group]], group_start)
        group_end = np.minimum(group_end, np.append(group_start[1:], place[-1]))
    else:
        # what a composition swallowed (e + combining accent = é) belongs to the composed character
        group_start[0] = 0
        group_end = np.append(group_start[1:], place[-1])

    normal_place = byte_positions(normalised)
    normal_start = normal_place[:-1][new_group]
    normal_end = np.append(normal_start[1:], normal_place[-1])
    widths = normal_end - normal_start
    # every byte boundary inside a group: spread over the group's original bytes in proportion
    group_of_byte = np.repeat(np.arange(len(normal_start)), widths)
    inside = np.arange(len(encoded)) - normal_start[group_of_byte]
    spread = inside * (group_end - group_start)[group_of_byte] // widths[group_of_byte]
    start_of = np.append(group_start[group_of_byte] + spread, group_end[-1])
    end_of = start_of.copy()
    end_of[normal_end] = group_end
    return NormalisedText(encoded, start_of, end_of)
