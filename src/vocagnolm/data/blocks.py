"""Packed blocks: a folder of safetensors parts behind one index of tokens.

```
manifest.json             written last: settings, summary, parts with their token counts
part-00000.safetensors    ids [T], document_tokens [D], document_index [D]
                          guidance [T] float16, NaN = unmapped      (with a store)
                          stretch [T] float16: the teacher's loss of the whole stretch; with a
                          minus sign where the token goes on with it (compare: stretch, alm)
                          target_ids [T, K], target_p [T, K] float16: tokens that the teacher
                          finds likely beside this one (distill)
                          teacher_nll [M], teacher_range [T, 2]     (chunk; unmapped: mean)
                          text [B] bytes, spans [T, 2]              (online teacher)
                          trained [T], first_trained [D]            (conversations)
```

A block of size L is a window of L + 1 tokens: L that are read and L that are predicted, as LitGPT
packs. The next window begins with the last token of this one, so that every token of the stream is
predicted once. What a block holds belongs to its tokens; the collator shifts, once.

A block of conversations holds whole ones, as many as fit (`data.bins`), and is filled up with
tokens that nobody is trained on.

No torch here: `Blocks` is map-style and gives NumPy arrays, the only kind of data with which
Hugging Face's Trainer resumes exactly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from vocagnolm.alignment.alignment import Aggregation, Alignment
from vocagnolm.base.files import file_digests, local_path, plain_name, read_json
from vocagnolm.data.bins import Bins, fill_bins
from vocagnolm.data.guidance import CarryRule, carry_losses, cut_stretches
from vocagnolm.errors import BlocksError
from vocagnolm.storage import Folder, Storage

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_MANIFEST_KEYS = {
    "format_version": int,
    "settings": dict,
    "fingerprint": str,
    "tokens": int,
    "columns": list,
    "summary": dict,
    "parts": list,
}

Block = dict[str, Any]


class Blocks:
    """Random access to the blocks of a folder that `prepare` made."""

    def __init__(
        self,
        folder: str | Path,
        block_size: int,
        *,
        chunks: int | None = None,
        aggregation: Aggregation = "max",
        stretches: bool = False,
        teacher_sums: bool = False,
        targets: bool = False,
    ):
        """`chunks`: guidance is that of so many chunks, by `aggregation` of the losses of each.
        `stretches`: it is that of whole stretches, which blocks number. `teacher_sums`: blocks also
        hold the sum and the number of the losses of the teacher tokens behind them. `targets`: they
        hold the teacher's alternatives too."""
        self.folder = local_path(folder)
        self.block_size = block_size
        self.chunks = chunks
        self.aggregation: Aggregation = aggregation
        self.stretches = stretches
        self.teacher_sums = teacher_sums
        self.targets = targets
        self.manifest = read_manifest(self.folder)
        self.tokens: int = self.manifest["tokens"]
        parts = self.manifest["parts"]
        self._names = [part["name"] for part in parts]
        self._starts = np.concatenate([[0], np.cumsum([p["tokens"] for p in parts])]).astype(int)
        self._handles: dict[int, Any] = {}
        self._documents: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self.bins: Bins | None = None
        """Conversations: which of them stand in which block."""
        if self.conversations:
            counts, first = self._whole("document_tokens"), self._whole("first_trained")
            self.bins = fill_bins(counts, first, block_size + 1)
        if not len(self):
            raise too_few_tokens(str(self.folder), self.tokens, block_size)

    def __len__(self) -> int:
        return block_count(self.tokens, self.block_size) if self.bins is None else len(self.bins)

    @property
    def conversations(self) -> bool:
        return bool(self.manifest["settings"].get("conversations"))

    @property
    def has_guidance(self) -> bool:
        return "guidance" in self.manifest["columns"]

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    @property
    def teacher(self) -> str | None:
        """The name of the teacher, or of several; None for blocks without guidance."""
        name: str | None = self.manifest.get("teacher")
        return name

    def __getitem__(self, index: int) -> Block:
        """Per token of the window [L + 1]: `input_ids` int64, `guidance` float32 (with a store),
        `document` int64, the ordinal of its document within the block. With `stretches` also
        `stretch` int64, with `targets` also `target_ids` int32 and `target_p` float32 [L + 1, K],
        with `teacher_sums` also `teacher_sums` float64 [2]. Of conversations also
        `trained` bool: whether the token is trained on."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        windows = self.windows(index)
        block: Block = {"input_ids": self._filled("ids", windows, np.int64, 0)}
        if self.bins is not None:
            block["trained"] = self._filled("trained", windows, bool, False)
        if self.stretches:
            block["guidance"], block["stretch"] = self._stretches(windows)
        elif self.has_guidance:
            block["guidance"] = self._filled("guidance", windows, np.float32, np.nan)
        if self.targets:
            block["target_ids"] = self._filled("target_ids", windows, np.int32, 0)
            block["target_p"] = self._filled("target_p", windows, np.float32, 0)
        if self.chunks is not None or self.teacher_sums:
            self._add_teacher(block, *self._teacher(windows))
        block["document"] = self._ordinals(windows)
        return block

    def _filled(
        self, column: str, windows: list[tuple[int, int]], dtype: Any, filling: Any
    ) -> NDArray[Any]:
        """A column of several windows, one behind the other; the rest of the block is padding."""
        values = np.concatenate([self.read(column, *window) for window in windows])
        return _padded(values.astype(dtype), self.block_size + 1, filling)

    def _ordinals(self, windows: list[tuple[int, int]]) -> NDArray[np.int64]:
        if self.bins is not None:
            lengths = [stop - start for start, stop in windows]
            padding = self.block_size + 1 - sum(lengths)
            return np.repeat(np.arange(len(lengths) + 1), [*lengths, padding])
        ((start, stop),) = windows
        starts, _ = self._document_table()
        first = np.searchsorted(starts, start, side="right")
        marks = np.zeros(stop - start, np.int64)
        marks[starts[first : np.searchsorted(starts, stop, side="left")] - start] = 1
        return np.cumsum(marks)

    def _stretches(
        self, windows: list[tuple[int, int]]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Per token the loss and the number of its stretch. Where a window is cut, the loss of its
        last stretch is not known."""
        starts, _ = self._document_table()
        columns = []
        for start, stop in windows:
            behind = int(np.searchsorted(starts, start, side="right"))
            to_end = self.bins is None or behind == len(starts)
            end = self.tokens if to_end else int(starts[behind])
            # one token more tells whether the last stretch ends with the window
            column = self.read("stretch", start, min(stop + 1, end))
            goes_on = np.signbit(column)
            column = column[: stop - start].copy()
            if goes_on[stop - start :].any():
                begins = np.flatnonzero(~goes_on[: stop - start])
                column[begins[-1] if len(begins) else 0 :] = np.nan
            columns.append(column)
        column = _padded(np.concatenate(columns), self.block_size + 1, np.nan)
        return cut_stretches(np.abs(column), np.signbit(column), cut_at_end=False)

    def windows(self, index: int) -> list[tuple[int, int]]:
        """The stream's tokens of a block; of conversations one window each, cut to its length."""
        if self.bins is None:
            return [self.window(index)]
        starts, _ = self._document_table()
        ends = np.append(starts[1:], self.tokens)
        return [
            (int(starts[n]), min(int(ends[n]), int(starts[n]) + self.block_size + 1))
            for n in self.bins.documents(index)
        ]

    def conversation_texts(self, index: int) -> list[tuple[str, NDArray[np.int64]]]:
        """Per conversation of a block its shared text, and the spans [N, 2] of its tokens in it."""
        texts = []
        for start, stop in self.windows(index):
            ((part, a, b),) = self._pieces(start, stop)
            handle = self._handle(part)
            begins = handle.get_tensor("document_tokens").astype(np.int64).cumsum()
            behind = int(begins[np.searchsorted(begins, a, side="right")])
            spans, text = handle.get_slice("spans"), handle.get_slice("text")
            own = spans[a:b].astype(np.int64)
            low = int(own[0, 0])
            last = behind == begins[-1]
            high = text.get_shape()[0] if last else int(spans[behind : behind + 1][0, 0])
            texts.append((text[low:high].tobytes().decode(), own - low))
        return texts

    def window(self, index: int) -> tuple[int, int]:
        """The stream's tokens of a block: `start..stop`."""
        assert self.bins is None
        return index * self.block_size, (index + 1) * self.block_size + 1

    def text(self, index: int) -> tuple[bytes, NDArray[np.int64]]:
        """The block's text and the spans [L + 1, 2] of its tokens in it (online teacher)."""
        start, stop = self.window(index)
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
        if self.bins is not None:
            return [int(indices[n]) for n in self.bins.documents(index)]
        low, high = self.window(index)
        first = int(np.searchsorted(starts, low, side="right")) - 1
        documents: list[int] = indices[
            first : int(np.searchsorted(starts, high, side="left"))
        ].tolist()
        return documents

    def positions(self, index: int) -> NDArray[np.int64]:
        """Where the tokens of the window [L + 1] stand in the stream; -1 for padding."""
        positions = np.concatenate([np.arange(*window) for window in self.windows(index)])
        return _padded(positions, self.block_size + 1, -1)

    def places(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Per token of the window [L + 1]: the corpus index of its document, and its number there
        (separators counted); -1 for padding."""
        starts, indices = self._document_table()
        positions = self.positions(index)
        at = np.searchsorted(starts, positions, side="right") - 1
        documents = np.where(positions < 0, -1, np.asarray(indices)[at])
        return documents, np.where(positions < 0, -1, positions - np.asarray(starts)[at])

    def read(self, column: str, start: int, stop: int) -> NDArray[Any]:
        """Tokens `start..stop` of a per-token column, over part borders."""
        pieces = [
            self._handle(part).get_slice(column)[a:b] for part, a, b in self._pieces(start, stop)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _add_teacher(self, block: Block, ranges: NDArray[np.int64], nll: NDArray[Any]) -> None:
        """Add to a window, in place, what is computed from all of the teacher's losses behind
        it."""
        if self.chunks is not None:
            # the chunks are cut among the tokens that are predicted: all but the first
            predicted = Alignment(ranges[1:, 0], ranges[1:, 1])
            rule = CarryRule("chunk", self.aggregation, self.chunks)
            guidance = carry_losses(predicted, nll, rule)
            block["guidance"] = np.concatenate([[np.float32(np.nan)], guidance])
        if self.teacher_sums:
            known = nll[np.isfinite(nll)].astype(np.float64)
            block["teacher_sums"] = np.array([known.sum(), len(known)])

    def _teacher(self, windows: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Teacher ranges of the block's tokens, and the losses that they point to."""
        ranges = np.full((self.block_size + 1, 2), -1, np.int64)
        losses: list[NDArray[Any]] = []
        done = origin = 0
        for window in windows:
            for part, a, b in self._pieces(*window):
                handle = self._handle(part)
                here = handle.get_slice("teacher_range")[a:b].astype(np.int64)
                mapped = here[:, 0] >= 0
                if mapped.any():
                    low, high = int(here[mapped, 0].min()), int(here[mapped, 1].max()) + 1
                    losses.append(handle.get_slice("teacher_nll")[low:high])
                    here[mapped] += origin - low
                    origin += high - low
                ranges[done : done + len(here)] = here
                done += len(here)
        return ranges, np.concatenate(losses) if losses else np.zeros(0, np.float16)

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
                    "Run `vocagnolm prepare` again to rebuild what is missing or damaged."
                ) from error
        return self._handles[part]

    def _document_table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Stream position where each document starts, and its index in the corpus."""
        if self._documents is None:
            lengths = self._whole("document_tokens")
            self._documents = np.cumsum(lengths) - lengths, self._whole("document_index")
        return self._documents

    def _whole(self, column: str) -> NDArray[np.int64]:
        """A per-document column over all parts."""
        parts = range(len(self._names))
        columns = [self._handle(part).get_tensor(column) for part in parts]
        return np.concatenate(columns).astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        # open files do not travel to the loader's processes; they are opened again there
        return {**self.__dict__, "_handles": {}}


def _padded(values: NDArray[Any], width: int, filling: Any) -> NDArray[Any]:
    result = np.full((width, *values.shape[1:]), filling, values.dtype)
    result[: len(values)] = values
    return result


def block_count(tokens: int, block_size: int) -> int:
    """The number of blocks in a stream of so many tokens; the stream's first token is only read,
    never predicted."""
    return max(tokens - 1, 0) // block_size


def too_few_tokens(where: str, tokens: int, block_size: int) -> BlocksError:
    return BlocksError(
        f"{where} holds {tokens:,} tokens; a block of {block_size:,} needs {block_size + 1:,}. Use "
        "a smaller data.block_size or a larger corpus."
    )


def read_manifest(folder: Path | Storage) -> dict[str, Any]:
    """The manifest of complete blocks, or an error that says what to run."""
    storage = Folder(folder) if isinstance(folder, Path) else folder
    path = storage.shown(MANIFEST)
    mend = "Run: vocagnolm prepare RECIPE"
    try:
        manifest = read_json(
            path, BlocksError, mend, _MANIFEST_KEYS, read=lambda: storage.read(MANIFEST)
        )
    except (FileNotFoundError, NotADirectoryError):
        state = "is not complete" if storage.files() else "has no blocks"
        raise BlocksError(f"{storage} {state}: there is no {MANIFEST}. {mend}") from None
    if manifest["format_version"] != FORMAT_VERSION:
        raise BlocksError(
            f"{path} has format version {manifest['format_version']}, this program reads "
            f"{FORMAT_VERSION}. Prepare the blocks again into another folder."
        )
    for part in manifest["parts"]:
        if not (isinstance(part, dict) and plain_name(part.get("name"))):
            raise BlocksError(f"{path} lists an invalid part: {part!r:.60}.")
    return manifest


def cut_parts(manifest: dict[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Parts of blocks that are missing or truncated; `sizes`: bytes of the files that are there."""
    return [
        f"{part['name']}: it is missing or truncated"
        for part in manifest["parts"]
        if sizes.get(part["name"]) != part.get("bytes", sizes.get(part["name"], -1))
    ]


def damaged_parts(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """`part: what is wrong`, for every damaged part; reads all parts. Blocks of older versions have
    no checksums: their parts only need to exist."""
    here = [part for part in manifest["parts"] if (folder / part["name"]).is_file()]
    lines = [f"{part['name']}: it is missing" for part in manifest["parts"] if part not in here]
    known = [part for part in here if "sha256" in part]
    digests = file_digests([folder / part["name"] for part in known])
    lines += [
        f"{part['name']}: its bytes do not match its checksum"
        for part, digest in zip(known, digests, strict=True)
        if digest != part["sha256"]
    ]
    return lines


# ---- the order of training ----


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
        epoch, number = divmod(position, len(self.blocks))
        if self._permutation is None or self._permutation[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
            self._permutation = epoch, order
        return int(self._permutation[1][number])

    def __getitem__(self, position: int) -> Block:
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of {self.length}")
        index = self.block_index(position)
        return {**self.blocks[index], "block": index}
