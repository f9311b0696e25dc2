"""What is published of a store: Parquet for `datasets`, `polars` and the hub's viewer (it needs the
`data` extra), and the card, README.md with the metadata that the Hugging Face hub reads, so that a
plain `hf upload` of the folder publishes it."""

import itertools
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from vocagnolm import files
from vocagnolm.alternatives import Alternatives
from vocagnolm.errors import StoreError, optional
from vocagnolm.storage import Storage
from vocagnolm.store.analysis import RankedDocuments
from vocagnolm.store.reader import LossStore, inspect_store, mend_hint

# ---- Parquet ----

_PYARROW = ("pyarrow", "pyarrow.parquet")


def export_parquet(store: str | Path, out: str | Path) -> int:
    """Write one row per document: document_index, document_hash (hex), token_bytes, nll (float32,
    null where unscored), and, if the store has them, the alternatives of every token with text, id
    and probability. One row group per shard. Returns the number of rows."""
    pa, pq = (optional(name, "data", "exporting to Parquet") for name in _PYARROW)
    loss_store = LossStore.open(store)
    texts = None
    if loss_store.kept_alternatives is not None:
        vocabulary = loss_store.vocabulary
        # tokens that are no whole characters are written as escapes
        entries = (vocabulary[n].decode(errors="backslashreplace") for n in range(len(vocabulary)))
        texts = pa.array(entries, pa.string())
    tables = (_table(pa, shard.columns, texts) for shard in loss_store.shards())
    first = next(tables)
    with (
        files.whole_file(_new_file(out)) as file,
        pq.ParquetWriter(file, first.schema, compression="zstd") as writer,
    ):
        for table in itertools.chain([first], tables):
            writer.write_table(table)
    return len(loss_store)


def export_ranks(ranks: RankedDocuments, out: str | Path) -> None:
    """One row a document, the best first."""
    pa, pq = (optional(name, "data", "exporting to Parquet") for name in _PYARROW)
    hashes = [row.tobytes().hex() for row in ranks.documents.hashes[ranks.order]]
    table = pa.table({**ranks.columns(), "document_hash": hashes})
    with files.whole_file(_new_file(out)) as file:
        pq.write_table(table, file, compression="zstd")


def _new_file(out: str | Path) -> Path:
    path = files.local_path(out)
    if path.exists():
        raise StoreError(f"{out} exists already; choose another name for the export.")
    return path


def _table(pa: Any, columns: dict[str, np.ndarray], texts: Any) -> Any:
    ends = np.concatenate([[0], np.cumsum(columns["token_count"], dtype=np.int64)])
    offsets = pa.array(ends, pa.int32())
    nll = columns["nll"].astype(np.float32)
    hashes = [row.tobytes().hex() for row in columns["document_hash"]]
    token_bytes = pa.array(columns["token_bytes"].astype(np.uint32))
    table = {
        "document_index": pa.array(columns["document_index"]),
        "document_hash": pa.array(hashes, pa.string()),
        "token_bytes": pa.ListArray.from_arrays(offsets, token_bytes),
        "nll": pa.ListArray.from_arrays(offsets, pa.array(nll, mask=np.isnan(nll))),
    }
    if texts is not None:
        per_token = _alternatives(pa, Alternatives(columns["alternatives"]), texts)
        table["alternatives"] = pa.ListArray.from_arrays(offsets, per_token)
    return pa.table(table)


def _alternatives(pa: Any, given: Alternatives, texts: Any) -> Any:
    """A list of structures for every token; empty where the teacher gave none."""
    present = given.present
    ids = given.ids[present]
    known = pa.array(np.where(ids < len(texts), ids, 0), mask=ids >= len(texts))
    fields = {
        "text": texts.take(known),
        "id": pa.array(ids),
        "probability": pa.array(given.probability[present]),
        "follows": pa.array(given.follows[present]),
    }
    structures = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    ends = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), structures)


# ---- the card ----


CARD = "README.md"
_ALTERNATIVES = """
It also holds the teacher's alternatives at every position, with their probabilities: a student with
any vocabulary can be distilled from them. **The most likely alternative is often the text**, so
much of the text can be read back from this store: publish it only where you may publish the text.
"""
PARQUET_FOLDER = "parquet"


def store_card(storage: Storage, licence: str | None = None) -> str:
    """Of a complete store. `licence`: as the hub calls it (`cc-by-4.0`, `odc-by`); who has made
    corpus and teacher says which one may stand there."""
    about = inspect_store(str(storage))
    if about["problems"]:
        raise StoreError(
            f"{storage} is damaged: {'; '.join(about['problems'][:3])}. {mend_hint(str(storage))}"
        )
    name = PurePath(str(storage)).name
    facts = _facts(about)
    if "written" in about:
        return _written_card(name, about, facts, licence)
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


_WRITTEN = """
`data/` holds the {kind} that {teacher} wrote, as `datasets`, TRL and axolotl read them; `dropped/`
what was left out, with the reasons. The rest is a loss store over exactly these documents: what
the teacher thought of every token that it wrote{kept}. A student with any vocabulary can be trained
from it without the teacher:

```yaml
# recipe.yaml
corpus: {{files: [{name}]}}
store: {{path: {name}}}
objective: {{method: distill, mix: 0.5}}
```

Whether you may train a model on this text, and publish that model, is said by the teacher's licence
and by those of the prompts.
"""


def _written_card(
    name: str, about: dict[str, Any], facts: dict[str, Any], licence: str | None
) -> str:
    """The card of a folder that a teacher wrote: who wrote what, and how."""
    writing, written = about["writing"], about["written"]
    shown = ("samples", "temperature", "top_p", "max_new_tokens", "seed")
    facts = {
        **{k: v for k, v in facts.items() if k not in ("corpus fingerprint", "documents")},
        "prompts": written["prompts"],
        "documents": about["documents"],
        "left out": about["skipped"],
        **{key.replace("_", " "): writing[key] for key in shown if key in writing},
        **({"right answers": written["right_answers"]} if "right_answers" in written else {}),
    }
    header: dict[str, Any] = {"pretty_name": f"Written by {facts['teacher']} ({name})"}
    if licence is not None:
        header["license"] = licence
    header["tags"] = ["vocagnolm", "loss-store", "distillation", "synthetic"]
    data = [{"split": "train", "path": "data/*.jsonl"}]
    header["configs"] = [{"config_name": "default", "data_files": data}]
    header["loss_store"] = {key.replace(" ", "_"): value for key, value in facts.items()}
    rows = "\n".join(f"| {key} | {_shown(value)} |" for key, value in facts.items())
    kept = " and the tokens that it found likeliest beside it" if "alternatives" in about else ""
    kind = "conversations" if written.get("format") else "texts"
    body = _WRITTEN.format(kind=kind, teacher=facts["teacher"], kept=kept, name=name)
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"""---
{text}---

# Written by {facts["teacher"]}
{body}
| | |
| --- | --- |
{rows}
| licence | {licence or "not stated"} |
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
