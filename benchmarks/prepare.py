"""`prepare` beside tokenising alone, in one run: how much of the tokenizer's rate is left?

    python benchmarks/prepare.py --student S [S ...] --teacher T [T ...] --corpus F.jsonl
        [--megabytes 8] [--rounds 3] [--alternatives 4] [--json [FILE]]

S and T are tokenizers (folder or tokenizer.json), of which all pairs are measured. The loss store
is made up: real teacher tokens with random losses, because its content does not change the work.
Tokenising alone is `encode_batch` of the student's tokenizer over the same documents with all
cores; `prepare` reads the corpus and the store, checks every document's hash, tokenises, finds
spans, aligns, carries, packs and writes. Measured with the tokenizer's threads (one process) and
with one process a core, by the clock on the wall and by processor time, children included, which a
busy machine changes less. Start-up is measured apart and left out: it does not grow with the
corpus. With `--alternatives K` the store also has K made-up alternatives a token, and `prepare` for
distillation, which turns them into targets, takes its turn beside the others.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from made_up import made_up, made_up_alternatives, made_up_store
from record import STDOUT, add_json, keep
from tokenizers import Tokenizer

from vocagnolm.alignment import load_tokenizer
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare, tokenise
from vocagnolm.recipe import recipe_from_dict

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


class Spent(NamedTuple):
    """Seconds on the wall, and of processor time with all processes that have ended."""

    wall: float
    cpu: float


def spent(call: Callable[[], Any]) -> Spent:
    before, started = os.times(), time.perf_counter()
    call()
    after = os.times()
    return Spent(time.perf_counter() - started, sum(after[:4]) - sum(before[:4]))


def measure_pair(student: str, teacher: str, texts: list[str], given: Any) -> dict[str, Any]:
    raw = Tokenizer.from_str(load_tokenizer(student)._tokenizer.to_str())
    batches = [texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(texts), BATCH_DOCUMENTS)]
    with tempfile.TemporaryDirectory() as temporary:
        lab = Path(temporary)
        corpus = lab / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        read = tokenise(load_tokenizer(teacher), texts)
        losses = [made_up(spans.token_bytes) for spans in read]
        made_up_store(lab / "store", texts, losses)
        if given.alternatives:
            others = made_up_alternatives(read, given.alternatives)
            made_up_store(lab / "distill", texts, losses, load_tokenizer(teacher), others)
        runs = iter(range(10**6))

        def prepare_with(
            workers: int, documents: int | None = None, distill: bool = False
        ) -> dict[str, Any]:
            tree = {
                "objective": {"method": "distill" if distill else "guided"},
                "student": {"tokenizer": student},
                "corpus": {"files": [str(corpus)], "limit_documents": documents},
                "store": {"path": str(lab / ("distill" if distill else "store"))},
                "data": {
                    "blocks": str(lab / f"blocks-{next(runs)}"),
                    "bos": None,
                    "eos": None,
                    # a part for every worker also in the run that measures its start
                    "part_documents": 1 if documents else given.part_documents,
                },
            }
            return prepare(recipe_from_dict(tree), workers=workers)

        def tokenise_alone() -> None:
            raw.model._clear_cache()  # as `prepare`, which begins with a tokenizer of its own
            for batch in batches:
                raw.encode_batch(batch, add_special_tokens=False)

        calls: dict[str, Callable[[], Any]] = {
            "tokenise": tokenise_alone,
            "threads": lambda: prepare_with(1),
            "threads start": lambda: prepare_with(1, documents=1),
        }
        if given.alternatives:
            calls["distill"] = lambda: prepare_with(1, distill=True)
            calls["distill start"] = lambda: prepare_with(1, documents=1, distill=True)
        if given.workers > 1:
            calls["processes"] = lambda: prepare_with(given.workers)
            calls["processes start"] = lambda: prepare_with(given.workers, given.workers)
        ways = [name for name in calls if f"{name} start" in calls]
        tokens = prepare_with(1)["tokens"]
        times: dict[str, list[Spent]] = {name: [] for name in calls}
        for _ in range(given.rounds):  # taking turns: a busy machine hits all alike
            for name, call in calls.items():
                times[name].append(spent(call))
    result: dict[str, Any] = {
        "student": name_of(student),
        "teacher": name_of(teacher),
        "documents": len(texts),
        "tokens": tokens,
        "workers": given.workers,
    }
    for clock in Spent._fields:
        median = {n: statistics.median(getattr(one, clock) for one in t) for n, t in times.items()}
        result[f"tokenise_{clock}_seconds"] = median["tokenise"]
        for way in ways:
            alone = max(median[way] - median[f"{way} start"], 1e-9)
            result[f"{way}_{clock}_seconds"] = alone
            result[f"{way}_{clock}_ratio"] = median["tokenise"] / alone
            result[f"{way}_{clock}_start_seconds"] = median[f"{way} start"]
        if given.alternatives:
            without = result[f"threads_{clock}_seconds"]
            result[f"distill_of_threads_{clock}"] = without / result[f"distill_{clock}_seconds"]
    return result


def name_of(tokenizer: str) -> str:
    path = Path(tokenizer)
    return path.parent.name if path.name == "tokenizer.json" else path.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", required=True, nargs="+")
    parser.add_argument("--teacher", required=True, nargs="+")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--text-field", default="text")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="1: only the tokenizer's threads"
    )
    parser.add_argument("--part-documents", type=int, default=256)
    parser.add_argument("--alternatives", type=int, default=0)
    add_json(parser)
    given = parser.parse_args()
    texts = read_texts(given.corpus, given.text_field, int(given.megabytes * 1e6))
    ways = ("threads", "processes") if given.workers > 1 else ("threads",)
    shown = [f"{way}_{clock}_ratio" for clock in Spent._fields for way in ways]
    if given.alternatives:
        shown += [f"distill_of_threads_{clock}" for clock in Spent._fields]
    rows = []
    if given.json != STDOUT:
        print("student x teacher, tokens, " + ", ".join(s.replace("_", " ") for s in shown))
    for student in given.student:
        for teacher in given.teacher:
            if student == teacher:
                continue
            row = measure_pair(student, teacher, texts, given)
            if given.json == STDOUT:
                print(json.dumps(row), flush=True)
                continue
            rows.append(row)
            ratios = "  ".join(f"{row[name]:.2f}" for name in shown)
            pair = f"{row['student']} x {row['teacher']}"
            print(f"{pair:32} {row['tokens']:>10,}  {ratios}", flush=True)
    if given.json != STDOUT:
        keep(given.json, "prepare beside tokenising alone", rows)


if __name__ == "__main__":
    main()
