"""`prepare` beside tokenising alone, in one run: how much of the tokenizer's rate is left?

    python benchmarks/prepare.py --student S --teacher T --corpus F.jsonl [--megabytes 8] [--json]

S and T are tokenizers (folder or tokenizer.json). The loss store is made up: real teacher tokens
with random losses, because its content does not change the work. Tokenising alone is
`encode_batch` of the student's tokenizer over the same documents with all cores; `prepare` reads
the corpus and the store, checks every document's hash, tokenises, finds spans, aligns, carries,
packs and writes. Measured with the tokenizer's threads (one process) and with one process a core,
whose start-up is measured apart and left out: it does not grow with the corpus.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from vocagnolm.alignment import load_tokenizer
from vocagnolm.data.corpus import document_hash, open_corpus
from vocagnolm.data.part import tokenise
from vocagnolm.data.prepare import prepare
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.store import StoreWriter
from vocagnolm.store.format import Shard, narrowest_unsigned, to_float16

BATCH_DOCUMENTS = 64


def read_texts(corpus: str, field: str, n_bytes: int) -> list[str]:
    texts, size = [], 0
    for document in open_corpus(corpus, text_field=field):
        if document.text is not None:
            texts.append(document.text)
            size += len(document.text.encode())
        if size >= n_bytes:
            break
    return texts


def made_up_store(folder: Path, texts: list[str], teacher: str) -> None:
    spans = tokenise(load_tokenizer(teacher), texts)
    tokens = sum(len(s) for s in spans)
    writer = StoreWriter(folder, {"teacher": {"name": "made-up"}}, 1)
    writer.begin()
    writer.write_shard(
        Shard(
            number=0,
            first_document=0,
            document_span=len(texts),
            document_hash=np.stack(
                [np.frombuffer(document_hash(text), np.uint8) for text in texts]
            ),
            document_index=np.arange(len(texts), dtype="<u8"),
            token_count=np.array([len(s) for s in spans], "<u4"),
            token_bytes=narrowest_unsigned(np.concatenate([s.token_bytes for s in spans])),
            nll=to_float16(np.random.default_rng(0).gamma(2.0, 1.0, tokens)),
        )
    )
    writer.finish()


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--text-field", default="text")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    texts = read_texts(given.corpus, given.text_field, int(given.megabytes * 1e6))
    raw = Tokenizer.from_str(load_tokenizer(given.student)._tokenizer.to_str())
    batches = [texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(texts), BATCH_DOCUMENTS)]

    with tempfile.TemporaryDirectory() as temporary:
        lab = Path(temporary)
        corpus = lab / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        made_up_store(lab / "store", texts, given.teacher)
        runs = iter(range(10**6))

        def prepare_with(workers: int, documents: int | None = None) -> dict[str, Any]:
            tree = {
                "student": {"tokenizer": given.student},
                "corpus": {"files": [str(corpus)], "limit_documents": documents},
                "store": {"path": str(lab / "store")},
                "data": {
                    "blocks": str(lab / f"blocks-{next(runs)}"),
                    "bos": None,
                    "eos": None,
                    "part_documents": 256,
                },
            }
            return prepare(recipe_from_dict(tree), workers=workers)

        calls: dict[str, Callable[[], Any]] = {
            "tokenise": lambda: [raw.encode_batch(b, add_special_tokens=False) for b in batches],
            "threads": lambda: prepare_with(1),
            "processes": lambda: prepare_with(given.workers),
            "start": lambda: prepare_with(given.workers, documents=given.workers),
        }
        tokens = prepare_with(1)["tokens"]
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(given.rounds):  # taking turns: a busy machine hits all alike
            for name, call in calls.items():
                times[name].append(seconds(call))
    median = {name: statistics.median(values) for name, values in times.items()}
    processes = max(median["processes"] - median["start"], 1e-9)
    result = {
        "documents": len(texts),
        "tokens": tokens,
        "workers": given.workers,
        "tokenise_tokens_per_second": tokens / median["tokenise"],
        "prepare_threads_tokens_per_second": tokens / median["threads"],
        "prepare_processes_tokens_per_second": tokens / processes,
        "ratio_threads": median["tokenise"] / median["threads"],
        "ratio_processes": median["tokenise"] / processes,
        "start_seconds": median["start"],
    }
    if given.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        shown = f"{value:,.2f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"
        print(f"{name.replace('_', ' '):40} {shown}", file=sys.stdout)


if __name__ == "__main__":
    main()
