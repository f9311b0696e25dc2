"""The student's tokenizer, and which tokens stand before and after every document."""

import json
from pathlib import Path
from typing import Any

from vocagnolm.align import TextTokenizer, load_tokenizer
from vocagnolm.errors import BlocksError


def open_tokenizer(source: str) -> TextTokenizer:
    """Any source of `load_tokenizer`, or the tokenizer inside a GGUF file."""
    if Path(source).suffix.lower() != ".gguf":
        return load_tokenizer(source)
    tokenizer = load_tokenizer(gguf_tokenizer(source))
    tokenizer.name = Path(source).stem
    return tokenizer


def gguf_tokenizer(source: str) -> Any:
    """The transformers tokenizer inside a GGUF file."""
    from transformers import AutoTokenizer

    path = Path(source)
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def separator_ids(
    tokenizer: TextTokenizer, source: str, bos: str | None, eos: str | None
) -> tuple[int | None, int | None]:
    """Ids for `data.bos` and `data.eos`: a token, `auto`, or None."""
    if bos == "auto":
        bos_id = _template_bos(tokenizer)
    else:
        bos_id = None if bos is None else _id_of(tokenizer, bos, "data.bos")
    if eos == "auto":
        eos_id = configured_eos(tokenizer, source)
        if eos_id is None:
            raise BlocksError(
                f"data.eos is auto, but {source} does not say which token ends a document (no "
                "eos_token in tokenizer_config.json, no eos_token_id in config.json). "
                "Name it in the recipe, or set data.eos to null for none."
            )
    else:
        eos_id = None if eos is None else _id_of(tokenizer, eos, "data.eos")
    return bos_id, eos_id


def configured_eos(tokenizer: TextTokenizer, source: str) -> int | None:
    """The token that ends a document, as the files beside the tokenizer say."""
    if Path(source).suffix.lower() == ".gguf":
        index = gguf_tokenizer(source).eos_token_id
        return None if index is None else int(index)
    folder = _folder(source)
    if folder is None:
        return None
    token: Any = _read(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):  # an AddedToken written out
        token = token.get("content")
    if isinstance(token, str) and tokenizer.id_of(token) is not None:
        return tokenizer.id_of(token)
    index = _read(folder / "config.json").get("eos_token_id")
    if isinstance(index, list):
        index = index[0] if index else None
    return index if isinstance(index, int) else None


def _id_of(tokenizer: TextTokenizer, token: str, where: str) -> int:
    index = tokenizer.id_of(token)
    if index is None:
        raise BlocksError(f"{where} is {token!r}, which {tokenizer.name} does not have.")
    return index


def _template_bos(tokenizer: TextTokenizer) -> int | None:
    """The token that the tokenizer's own template puts before a text, if any."""
    bare = tokenizer.spans("a").ids
    framed = tokenizer.spans("a", add_special_tokens=True).ids
    if len(framed) > len(bare) and framed[0] != bare[0]:
        return int(framed[0])
    return None


def _folder(source: str) -> Path | None:
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    from huggingface_hub import snapshot_download

    try:  # what load_tokenizer fetched is in the cache
        return Path(snapshot_download(source, local_files_only=True))
    except Exception:  # not in the cache: many types, one meaning
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
