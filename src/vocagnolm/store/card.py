"""The card of a loss store: README.md with the metadata that the Hugging Face hub reads, so that a
plain `hf upload` of the folder publishes it."""

from pathlib import PurePath
from typing import Any

import yaml

from vocagnolm.storage import Place
from vocagnolm.store.check import inspect_store

CARD = "README.md"
_ALTERNATIVES = """
It also holds the teacher's alternatives at every place, with their probabilities: a student with
any vocabulary can be distilled from them. **The likeliest alternative often is the text**, so that
much of the text can be read back from this store: publish it only where you may publish the text.
"""
PARQUET_FOLDER = "parquet"


def store_card(place: Place, licence: str | None = None) -> str:
    """Of a complete store. `licence`: as the hub calls it (`cc-by-4.0`, `odc-by`); who has made
    corpus and teacher says which one may stand there."""
    about = inspect_store(str(place))
    has_parquet = any(name.endswith(".parquet") for name in place.files(PARQUET_FOLDER))
    name = PurePath(str(place)).name
    facts = _facts(about)
    header: dict[str, Any] = {"pretty_name": f"Losses of {facts['teacher']} ({name})"}
    if licence is not None:
        header["license"] = licence
    header["tags"] = ["vocagnolm", "loss-store", "distillation"]
    if has_parquet:  # otherwise `datasets` would take the manifest for data
        data = [{"split": "train", "path": f"{PARQUET_FOLDER}/*.parquet"}]
        header["configs"] = [{"config_name": "default", "data_files": data}]
    else:
        header["viewer"] = False
    header["loss_store"] = {key.replace(" ", "_"): value for key, value in facts.items()}
    rows = "\n".join(f"| {key} | {_shown(value)} |" for key, value in facts.items())
    kept, text_is = "", "The text itself is not here: documents are"
    if "alternatives" in about:
        kept, text_is = _ALTERNATIVES, "Documents are"
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"""---
{text}---

# Losses of {facts["teacher"]}

For every document of a corpus: the byte length of each token of the teacher and its loss, in nats.
A student with any vocabulary can be trained under their guidance, without the teacher.
{kept}
| | |
| --- | --- |
{rows}
| licence | {licence or "not stated"} |

```python
from vocagnolm import LossStore

store = LossStore.open("hf://datasets/OWNER/NAME")
token_bytes, nll = store[0]
```

The files are read by any safetensors reader; `manifest.json` says how they were made, and holds a
checksum of each. {text_is} known by the SHA-256 of their bytes.
"""


def _facts(about: dict[str, Any]) -> dict[str, Any]:
    teacher, corpus = about.get("teacher"), about.get("corpus")
    named = teacher.get("name", "unknown") if isinstance(teacher, dict) else teacher
    # a path of this machine says nothing to the world
    local = str(named).startswith(("/", ".", "~")) or str(named).count("/") > 1
    facts: dict[str, Any] = {"teacher": PurePath(str(named)).name if local else str(named)}
    if isinstance(teacher, dict) and teacher.get("revision"):
        facts["teacher revision"] = teacher["revision"]
    if isinstance(corpus, dict):
        facts["corpus"] = ", ".join(source["name"] for source in corpus.get("sources", [])[:20])
        facts["corpus fingerprint"] = corpus.get("fingerprint")
    bits = about["bits_per_byte"]
    return {
        **facts,
        "documents": about["documents"],
        "tokens": about["tokens"],
        "text bytes": about["bytes"],
        "bits per byte": None if bits is None else round(bits, 4),
        **_alternatives(about),
        "format": f"vocagnolm-loss-store {about['format_version']}",
    }


def _alternatives(about: dict[str, Any]) -> dict[str, Any]:
    kept = about.get("alternatives")
    if kept is None:
        return {}
    if kept["sampled"]:
        return {"alternatives a token": f"{kept['count']}, drawn from the teacher's distribution"}
    return {
        "alternatives a token": f"{kept['count']}, likeliest first",
        "probability they cover": f"{sum(kept['mass']):.1%}",
    }


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
