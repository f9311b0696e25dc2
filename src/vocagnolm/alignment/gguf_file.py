"""The tokenizer inside a GGUF file."""

import mmap
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vocagnolm.errors import MissingExtraError, TokenizerError

_BOOL, _STRING = 7, 8
# Metadata stand before the weights; the largest vocabularies take 20 MiB.
_HEADER_BYTES = 128 * 2**20


def gguf_tokenizer(path: Path) -> Any:
    """As a tokenizer of transformers."""
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist")
    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf", f"reading {path.name}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
    except Exception as error:  # of many kinds; all mean: no tokenizer in there
        raise TokenizerError(f"{path} has no tokenizer that can be read: {error}") from None
    # transformers passes over what the file says of the tokens around a text; without its first
    # token Gemma predicts every other one far worse
    for side, otherwise in (("bos", _is_sentencepiece(path)), ("eos", False)):
        wanted = metadata(path, f"tokenizer.ggml.add_{side}_token")
        wanted = otherwise if wanted is None else bool(wanted)
        if wanted != getattr(tokenizer, f"add_{side}_token"):
            setattr(tokenizer, f"add_{side}_token", wanted)
    return tokenizer


def _is_sentencepiece(path: Path) -> bool:
    """Then a text begins with the token for its beginning, where the file does not say."""
    return metadata(path, "tokenizer.ggml.model") == "llama"


def metadata(path: Path, key: str) -> bool | str | None:
    """A truth value or a text under a key, found by the key's bytes: package gguf makes an object
    of every token before it can say anything, which takes it tens of seconds."""
    name = struct.pack("<Q", len(key)) + key.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.find(name, 0, _HEADER_BYTES)
        if place < 0:
            return None
        place += len(name)
        (kind,) = struct.unpack_from("<I", content, place)
        if kind == _BOOL:
            return bool(content[place + 4])
        if kind == _STRING:
            (size,) = struct.unpack_from("<Q", content, place + 4)
            return content[place + 12 : place + 12 + size].decode()
    return None
