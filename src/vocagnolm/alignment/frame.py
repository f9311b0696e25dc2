"""What a tokenizer's files put before and after a text, beyond the tokenizer itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vocagnolm.errors import TokenizerError
from vocagnolm.files import parse_json

_SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


@dataclass(frozen=True)
class Frame:
    """As the files beside a tokenizer say it."""

    bos_id: int | None = None
    """Put before a text where the tokenizer's own template puts nothing."""
    eos_id: int | None = None
    """Ends a document."""
    template: str | None = None
    """The chat template, in Jinja."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """`bos_token`, `eos_token`, ... by name: a template may print them."""


def read_frame(tokenizer: Tokenizer, folder: Path) -> Frame:
    """`tokenizer_config.json` first, `config.json` for the end where that says nothing."""
    settings = _read(folder / "tokenizer_config.json")
    bos = _id(tokenizer, settings.get("bos_token")) if settings.get("add_bos_token") else None
    eos = _id(tokenizer, settings.get("eos_token"))
    if eos is None:
        eos = _read(folder / "config.json").get("eos_token_id")
        if isinstance(eos, list):
            eos = eos[0] if eos else None
    named = {**_read(folder / "special_tokens_map.json"), **settings}
    return Frame(
        bos, eos if isinstance(eos, int) else None, read_template(folder), _special_tokens(named)
    )


def read_template(folder: Path) -> str | None:
    """The chat template of a folder: a file of its own, or a key of the configuration."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (found := _default_template(_read(folder / name).get("chat_template"))) is not None:
            return found
    return None


def _default_template(value: Any) -> str | None:
    """Of several, the one called default."""
    if isinstance(value, list):
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    if isinstance(value, dict):
        value = value.get("default", next(iter(value.values()), None))
    return value if isinstance(value, str) else None


def _special_tokens(named: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    found = {}
    for name in _SPECIAL_NAMES:
        token = named.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and str(token):
            found[name] = str(token)
    return tuple(found.items())


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
    named = getattr(transformers_tokenizer, "special_tokens_map", None)
    return Frame(
        bos if isinstance(bos, int) else None,
        eos if isinstance(eos, int) else None,
        template=_default_template(getattr(transformers_tokenizer, "chat_template", None)),
        special_tokens=_special_tokens(named if isinstance(named, dict) else {}),
    )


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
