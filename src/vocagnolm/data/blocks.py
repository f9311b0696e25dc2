"""Packed blocks: a folder of safetensors parts behind one index of tokens.

```
manifest.json             written last: settings, summary, parts with their token counts
part-00000.safetensors    ids [T], document_tokens [D], document_index [D]
                          guidance [T] float16, NaN = unmapped      (with a store)
                          teacher_nll [M], teacher_range [T, 2]     (method chunk)
                          text [B] bytes, spans [T, 2]              (online teacher)
```

No torch here: `Blocks` is map-style and gives NumPy arrays, the only kind of data with which
Hugging Face's Trainer resumes exactly.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from vocagnolm.data.packing import chunk_guidance
from vocagnolm.errors import BlocksError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Block = dict[str, Any]


class Blocks:
    """Random access to the blocks of a folder that `prepare` made."""

    def __init__(self, folder: str | Path, block_size: int, *, chunks: int | None = None):
        self.folder = Path(folder)
        self.block_size = block_size
        self.chunks = chunks
        self.manifest = read_manifest(self.folder)
        self.tokens: int = self.manifest["tokens"]
        parts = self.manifest["parts"]
        self._names = [part["name"] for part in parts]
        self._starts = np.concatenate([[0], np.cumsum([p["tokens"] for p in parts])]).astype(int)
        self._handles: dict[int, Any] = {}
        self._documents: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        if not len(self):
            raise BlocksError(
                f"{self.folder} holds {self.tokens:,} tokens, fewer than one block of "
                f"{block_size:,}. Use a smaller data.block_size or a larger corpus."
            )

    def __len__(self) -> int:
        return self.tokens // self.block_size

    @property
    def has_guidance(self) -> bool:
        return "guidance" in self.manifest["columns"]

    def __getitem__(self, index: int) -> Block:
        """`input_ids` int64 [L], `guidance` float32 [L] (with a store), `document` int64 [L]:
        ordinal of each token's document within the block."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.block_size
        stop = start + self.block_size
        block: Block = {"input_ids": self.read("ids", start, stop).astype(np.int64)}
        if self.chunks is not None and "teacher_range" in self.manifest["columns"]:
            block["guidance"] = self._chunk_guidance(start, stop)
        elif self.has_guidance:
            block["guidance"] = self.read("guidance", start, stop).astype(np.float32)
        starts, _ = self._document_table()
        first = np.searchsorted(starts, start, side="right")
        inside = starts[first : np.searchsorted(starts, stop, side="left")] - start
        marks = np.zeros(self.block_size, np.int64)
        marks[inside] = 1
        block["document"] = np.cumsum(marks)
        return block

    def text(self, index: int) -> tuple[bytes, NDArray[np.int64]]:
        """The block's text and the spans [L, 2] of its tokens in it (online teacher)."""
        start, stop = index * self.block_size, (index + 1) * self.block_size
        pieces, spans, origin = [], [], 0
        for part, a, b in self._pieces(start, stop):
            handle = self._handle(part)
            here = handle.get_slice("spans")[a:b].astype(np.int64)
            low, high = int(here[0, 0]), int(here[-1, 1])
            pieces.append(handle.get_slice("text")[low:high].tobytes())
            spans.append(here - low + origin)
            origin += high - low
        return b"".join(pieces), np.concatenate(spans)

    def documents(self, index: int) -> list[int]:
        """Corpus indices of the documents that the block touches."""
        starts, indices = self._document_table()
        low, high = index * self.block_size, (index + 1) * self.block_size
        first = int(np.searchsorted(starts, low, side="right")) - 1
        return indices[first : int(np.searchsorted(starts, high, side="left"))].tolist()

    def read(self, column: str, start: int, stop: int) -> NDArray[Any]:
        """Tokens `start..stop` of a per-token column, over part borders."""
        pieces = [
            self._handle(part).get_slice(column)[a:b] for part, a, b in self._pieces(start, stop)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _chunk_guidance(self, start: int, stop: int) -> NDArray[np.float32]:
        ranges, losses, origin = [], [], 0
        for part, a, b in self._pieces(start, stop):
            handle = self._handle(part)
            here = handle.get_slice("teacher_range")[a:b].astype(np.int64)
            mapped = here[:, 0] >= 0
            if mapped.any():
                low, high = int(here[mapped, 0].min()), int(here[mapped, 1].max()) + 1
                losses.append(handle.get_slice("teacher_nll")[low:high])
                here[mapped] += origin - low
                origin += high - low
            ranges.append(here)
        nll = np.concatenate(losses) if losses else np.zeros(0, np.float16)
        assert self.chunks is not None
        by_position = chunk_guidance(np.concatenate(ranges), nll, self.chunks)
        # the objective cuts the positions that predict: token i is predicted at position i - 1
        return np.concatenate([by_position[:1], by_position[:-1]])

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """`(part, from, to)` for the stream's tokens `start..stop`; from and to in the part."""
        pieces = []
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._starts[part + 1]))
            if start < end:
                origin = int(self._starts[part])
                pieces.append((part, start - origin, end - origin))
            start, part = end, part + 1
        return pieces

    def _handle(self, part: int) -> Any:
        if part not in self._handles:
            path = self.folder / self._names[part]
            try:
                self._handles[part] = safe_open(path, framework="np")
            except (OSError, ValueError, RuntimeError) as error:
                raise BlocksError(
                    f"{path} cannot be opened ({error}). "
                    "Remove that file and run `vocagnolm prepare` again: it makes what is missing."
                ) from error
        return self._handles[part]

    def _document_table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Stream position where each document starts, and its index in the corpus."""
        if self._documents is None:
            counts, indices = [], []
            for part in range(len(self._names)):
                counts.append(self._handle(part).get_tensor("document_tokens"))
                indices.append(self._handle(part).get_tensor("document_index"))
            lengths = np.concatenate(counts).astype(np.int64)
            self._documents = np.cumsum(lengths) - lengths, np.concatenate(indices)
        return self._documents

    def __getstate__(self) -> dict[str, Any]:
        # open files do not travel to the loader's processes; they are opened again there
        return {**self.__dict__, "_handles": {}}


class TrainingOrder:
    """The blocks in the order of training: every epoch its own permutation, by seed.

    One long sequence instead of epochs of the Trainer: no step mixes a short batch at an epoch's
    end, fractions of an epoch are possible, and a resumed run skips to any place.
    """

    def __init__(self, blocks: Blocks, length: int, seed: int):
        self.blocks = blocks
        self.length = length
        self.seed = seed
        self._permutation: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.length

    def block_index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.blocks))
        if self._permutation is None or self._permutation[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
            self._permutation = epoch, order
        return int(self._permutation[1][place])

    def __getitem__(self, position: int) -> Block:
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of {self.length}")
        index = self.block_index(position)
        return {**self.blocks[index], "block": index}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of complete blocks, or an error that says what to run."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        state = "is not complete" if folder.is_dir() and any(folder.iterdir()) else "has no blocks"
        raise BlocksError(
            f"{folder} {state}: there is no {MANIFEST}. Run: vocagnolm prepare RECIPE"
        ) from None
    except (OSError, ValueError) as error:
        raise BlocksError(
            f"{path} cannot be read ({error}). Run: vocagnolm prepare RECIPE"
        ) from error
    if manifest.get("format_version") != FORMAT_VERSION:
        raise BlocksError(
            f"{path} has format version {manifest.get('format_version')}, this program reads "
            f"{FORMAT_VERSION}. Prepare the blocks again into another folder."
        )
    return manifest
