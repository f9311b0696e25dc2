"""The card of a store: README.md with the metadata that the Hugging Face hub reads, so that a plain
`hf upload` of the folder publishes it."""

import textwrap
from pathlib import PurePath
from typing import Any

import yaml

from vocagnolm.errors import StoreError
from vocagnolm.storage import Storage
from vocagnolm.store.format import DATA_FOLDER
from vocagnolm.store.reader import inspect_store, mend_hint

CARD = "README.md"
_ALTERNATIVES = """
It also holds the teacher's alternatives at every position, with their probabilities: a student with
any vocabulary can be distilled from them. **The most likely alternative is often the text**, so
much of the text can be read back from this store: publish it only where you may publish the text.
"""
PARQUET_FOLDER = "parquet"


def store_card(storage: Storage, licence: str | None = None) -> str:
    """The card of a complete store. `licence`: as the hub calls it (`cc-by-4.0`, `odc-by`); which
    one may stand there depends on those of corpus and teacher."""
    about = inspect_store(str(storage))
    if about["problems"]:
        raise StoreError(
            f"{storage} is damaged: {'; '.join(about['problems'][:3])}. {mend_hint(str(storage))}"
        )
    name = PurePath(str(storage)).name
    facts = _facts(about)
    if "written" in about:
        return _written_card(about, facts, licence)
    has_parquet = any(name.endswith(".parquet") for name in storage.files(PARQUET_FOLDER))
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


# ---- the card of a folder that a teacher wrote ----

_WRITTEN = """
`data/` holds the {kind} that {teacher} wrote, as `datasets`, TRL and axolotl read them; `dropped/`
holds what was left out, with the reasons. The rest is a loss store over exactly these documents:
the teacher's loss on every token that it wrote{kept}. A student with any vocabulary can be trained
from them without the teacher:

```yaml
corpus: {{files: ["hf://datasets/OWNER/NAME"]}}
store: {{path: "hf://datasets/OWNER/NAME"}}
objective: {{method: distill, mix: 0.5}}
```

Whether you may train a model on this text, and publish that model, depends on the teacher's licence
and on those of the prompts.
"""


def _written_card(about: dict[str, Any], facts: dict[str, Any], licence: str | None) -> str:
    """Who wrote what, and how."""
    written = about["written"]
    facts = {
        **{k: v for k, v in facts.items() if k not in ("corpus", "corpus fingerprint")},
        **_asked(about),
        **_settings(about["writing"]),
        "left out": about["skipped"],
        **{f"left out: {why}": count for why, count in about["skipped_reasons"].items()},
    }
    header: dict[str, Any] = {"pretty_name": f"Written by {facts['teacher']}"}
    if licence is not None:
        header["license"] = licence
    header["tags"] = ["vocagnolm", "loss-store", "distillation", "synthetic"]
    data = [{"split": "train", "path": f"{DATA_FOLDER}/*.jsonl"}]
    header["configs"] = [{"config_name": "default", "data_files": data}]
    header["loss_store"] = {key.replace(" ", "_"): value for key, value in facts.items()}
    rows = "\n".join(f"| {key} | {_shown(value)} |" for key, value in facts.items())
    kept = ", and the tokens that it found most likely there" if "alternatives" in about else ""
    kind = "conversations" if written.get("format") else "texts"
    body = _WRITTEN.format(kind=kind, teacher=facts["teacher"], kept=kept)
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"""---
{text}---

# Written by {facts["teacher"]}
{body}
| | |
| --- | --- |
{rows}
| licence | {licence or "not stated"} |
{_context(about)}"""


def _asked(about: dict[str, Any]) -> dict[str, Any]:
    """What the teacher was asked, and how many of its answers are right."""
    asked, written = about["corpus"], about["written"]
    without = asked.get("without") or {}
    facts = {
        "prompts": written["prompts"],
        "prompts from": ", ".join(source["name"] for source in asked["sources"][:20]),
        "asked for": asked.get("instruction"),
        "tokens of a text that it went on with": asked.get("continue"),
        "without the questions of": ", ".join(without.get("names", [])) or None,
    }
    if written.get("marked_answers"):
        share = written["right_answers"] / written["marked_answers"]
        facts["right answers"] = f"{share:.1%} of {written['marked_answers']:,} that were marked"
    return {name: value for name, value in facts.items() if value is not None}


def _settings(writing: dict[str, Any]) -> dict[str, Any]:
    names = ("samples", "temperature", "top_p", "max_new_tokens", "seed", "dtype")
    facts = {name.replace("_", " "): writing.get(name) for name in names}
    template = writing.get("template", {"origin": "the server's"})
    facts["chat template"] = template["origin"] if template else "none"
    facts["cut answers"] = "kept" if writing.get("cut") == "keep" else "left out"
    return {name: value for name, value in facts.items() if value is not None}


def _context(about: dict[str, Any]) -> str:
    """What stood before every prompt: no document holds it."""
    writing = about["writing"]
    turns = [("system", writing["system"])] if writing.get("system") else []
    turns += writing.get("examples") or []
    if not turns:
        return ""
    shown = textwrap.indent("\n".join(f"{role}: {text}" for role, text in turns), "    ")
    return f"""
Before every prompt the teacher read this, which is not in the conversations:

{shown}
"""


# ---- facts ----


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
        **_alternatives_facts(about),
        "format": f"vocagnolm-loss-store {about['format_version']}",
    }


def _alternatives_facts(about: dict[str, Any]) -> dict[str, Any]:
    kept = about.get("alternatives")
    if kept is None:
        return {}
    if kept["sampled"]:
        return {
            "alternatives per token": f"{kept['count']}, sampled from the teacher's distribution"
        }
    return {
        "alternatives per token": f"{kept['count']}, most likely first",
        "probability they cover": f"{sum(kept['mass']):.1%}",
    }


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
