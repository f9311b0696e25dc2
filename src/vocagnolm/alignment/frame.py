"""What a tokenizer's files put before and after a text, beyond the tokenizer itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vocagnolm.errors import TokenizerError
from vocagnolm.files import parse_json


@dataclass(frozen=True)
class Frame:
    """As the files beside a tokenizer say it."""

    bos_id: int | None = None
    """Put before a text where the tokenizer's own template puts nothing."""
    eos_id: int | None = None
    """Ends a document."""


def read_frame(tokenizer: Tokenizer, folder: Path) -> Frame:
    """`tokenizer_config.json` first, `config.json` for the end where that says nothing."""
    settings = _read(folder / "tokenizer_config.json")
    bos = _id(tokenizer, settings.get("bos_token")) if settings.get("add_bos_token") else None
    eos = _id(tokenizer, settings.get("eos_token"))
    if eos is None:
        eos = _read(folder / "config.json").get("eos_token_id")
        if isinstance(eos, list):
            eos = eos[0] if eos else None
    return Frame(bos, eos if isinstance(eos, int) else None)


def refuse_code(folder: Path) -> None:
    """A tokenizer that is made by Python code of its own: that code is not run, and what
    tokenizer.json says need not be what it does."""
    named = _read(folder / "tokenizer_config.json").get("auto_map")
    if isinstance(named, dict) and named.get("AutoTokenizer"):
        raise TokenizerError(
            f"{folder} needs Python code of its own for its tokenizer (auto_map in "
            "tokenizer_config.json), which is not run. Read that code; if tokenizer.json stands "
            "for itself, pass that file, or --trust-remote-code to `score` or `evaluate`"
        )


def frame_of(transformers_tokenizer: Any) -> Frame:
    """The same for a tokenizer object of transformers."""
    adds_bos = getattr(transformers_tokenizer, "add_bos_token", False)
    bos = getattr(transformers_tokenizer, "bos_token_id", None) if adds_bos else None
    eos = getattr(transformers_tokenizer, "eos_token_id", None)
    return Frame(*(value if isinstance(value, int) else None for value in (bos, eos)))


def _id(tokenizer: Tokenizer, token: Any) -> int | None:
    if isinstance(token, dict):  # an AddedToken written out
        token = token.get("content")
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path} cannot be read as JSON ({error}). It says which tokens begin and end a text: "
            "get it again from where the tokenizer came from"
        ) from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content
