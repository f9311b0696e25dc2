"""Files that strangers write, read with limits before a library reads them: a model's
configuration, the index of its weights, a tokenizer. What passes here has known types, lies inside
its folder and is of a size that a machine can hold. Standard library only."""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vocagnolm.base.files import plain_name, read_json
from vocagnolm.errors import VocagnolmError

MOST_JSON_BYTES = 2**26
"""More than the configurations, indices and tokenizers of all known models."""
MOST_ID = 2**24 - 1
"""Tables have a row for every id up to the largest, and beyond 2^31 libraries end the process."""
_MEND = "Get it again from where it came from."

# what a configuration may ask for, by its name: far beyond every model that there is
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4096),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "head_dim"), 2**20),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner"), 2**23),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2**14),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2**14),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2**40),
    "vocab_size": 2**24,
}
MOST_PARAMETERS = 10**14
_LONG_NUMBER = re.compile(rb"\d{8}")
_DEEPEST = 16


def require_file(path: Path, error: type[VocagnolmError], most_bytes: int | None = None) -> None:
    """Refuse what is no plain file (a pipe would be waited for), or is larger than `most_bytes`.
    FileNotFoundError where nothing is there."""
    try:
        about = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}.") from None
    if not stat.S_ISREG(about.st_mode):
        raise error(f"{path} is no file (a pipe, a device or a folder); a file is needed here.")
    if most_bytes is not None and about.st_size > most_bytes:
        raise error(f"{path} has {about.st_size:,} bytes; at most {most_bytes:,} are read.")


def read_stranger(path: Path, error: type[VocagnolmError], mend: str = _MEND) -> dict[str, Any]:
    """A JSON object, as `read_json` gives it, from a plain file of bounded size."""
    require_file(path, error, MOST_JSON_BYTES)
    return read_json(path, error, mend)


# ---- a model's configuration ----


def read_config(folder: Path, error: type[VocagnolmError]) -> dict[str, Any]:
    """A folder's config.json, whose sizes a model can have."""
    path = folder / "config.json"
    config = read_stranger(path, error)
    if problem := config_problem(config):
        raise error(f"{path}: {problem}. {_MEND}")
    return config


def config_problem(config: Mapping[str, Any]) -> str | None:
    """Why no model can be built from a configuration, or None. The parts of a model that reads more
    than text have configurations of their own."""
    for where, part in _parts(config, "", 0):
        for name, value in part.items():
            place, kind = f"{where}{name}", type(value)
            if name in _MOST:
                if value is not None and (kind is not int or not 0 <= value <= _MOST[name]):
                    return f"{place} is {_brief(value)}, expected a number up to {_MOST[name]:,}"
            elif str(name).endswith("_token_id"):
                ids = value if kind is list else [value]
                if any(
                    i is not None and (type(i) is not int or not -1 <= i <= MOST_ID) for i in ids
                ):
                    return f"{place} is {_brief(value)}, expected a token id"
        if (count := _parameters(part)) > MOST_PARAMETERS:
            return f"{where or 'it '}asks for about {count:.1g} parameters"
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        return f"model_type is {_brief(model_type)}, expected a name"
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(map(_is_name, names))):
        return f"architectures is {_brief(names)}, expected a list of names"
    return None


def _parts(
    config: Mapping[str, Any], where: str, depth: int
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield where, config
    for name, value in config.items():
        if isinstance(value, Mapping) and str(name).endswith("config") and depth < _DEEPEST:
            yield from _parts(value, f"{where}{name}.", depth + 1)


def _parameters(part: Mapping[str, Any]) -> float:
    """About how many: the layers' matrices, and the embeddings."""

    def size(*names: str) -> int:
        values = (part.get(name) for name in names)
        return max((value for value in values if type(value) is int), default=0)

    width = size("hidden_size", "n_embd", "d_model", "dim")
    inner = size("intermediate_size", "moe_intermediate_size", "n_inner")
    experts = max(1, size("num_experts", "num_local_experts", "n_routed_experts"))
    layers = size("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    each = 4.0 * width * width + 3.0 * width * inner * experts
    return layers * each + 2.0 * width * size("vocab_size")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _brief(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    return repr(value)[:40] if not isinstance(value, int) else f"{value:.3g}"


# ---- weights ----


def require_weights(folder: Path, error: type[VocagnolmError]) -> None:
    """Refuse an index of weights that names files outside the folder, or others than plain files;
    and weights that are pipes."""
    for path in folder.glob("*.safetensors"):
        require_file(path, error)
    for path in folder.glob("*.safetensors.index.json"):
        names = read_stranger(path, error).get("weight_map")
        if not isinstance(names, dict):
            raise error(f"{path} has no weight_map. {_MEND}")
        listed = sorted(set(map(str, names.values())))
        for name in listed:
            if not plain_name(name) or not name.endswith(".safetensors"):
                raise error(
                    f"{path} names the weights {name!r:.80}, which are not a safetensors file of "
                    f"this folder. {_MEND}"
                )
        for name in listed:
            try:
                require_file(folder / name, error)
            except FileNotFoundError:
                raise error(f"{path} names {name}, which is not there. {_MEND}") from None


# ---- tokenizers ----


def require_tokenizer(path: Path, error: type[VocagnolmError]) -> None:
    """Refuse a tokenizer.json whose ids no library can hold."""
    require_file(path, error, MOST_JSON_BYTES)
    if _LONG_NUMBER.search(path.read_bytes()) is None:  # nearly always: parsing takes a second
        return
    about = read_stranger(path, error)
    model, added = about.get("model"), about.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    ids += (
        [token.get("id") for token in added if isinstance(token, dict)]
        if isinstance(added, list)
        else []
    )
    for value in ids:
        if type(value) is not int or not 0 <= value <= MOST_ID:
            raise error(f"{path} has the token id {_brief(value)}, expected one up to {MOST_ID:,}.")
