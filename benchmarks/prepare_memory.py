"""Memory of `prepare` for one long document, in bytes per byte of its text.

    python benchmarks/prepare_memory.py --student S [S ...] --teacher T [T ...] --corpus F.jsonl
        [--megabytes 16] [--alternatives 4] [--json [FILE]]

The documents of the corpus are joined into one. The loss store is made up (`made_up.py`). Two
processes, one with the whole document and one with its first 2,000 characters: the difference of
the peaks of their resident memory. `anon` is what the process holds; `file` is mapped from files
(the store, and long columns that wait for the end of the part), which the system takes back when
it needs memory. Linux only.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from made_up import made_up, made_up_alternatives, made_up_store
from record import add_json, keep

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.recipe import recipe_from_dict

SHORT = 2000


def resident() -> dict[str, int]:
    """Bytes by kind: anonymous memory, mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    lines = [line.split() for line in status.splitlines()]
    return {line[0][3:-1].lower(): 1024 * int(line[1]) for line in lines if line[0][:3] == "Rss"}


def measure(lab: Path, student: str, method: str, name: str, answers: Any) -> None:
    blocks = Path(tempfile.mkdtemp(dir=lab))
    store = f"{name}-{'distill' if method == 'distill' else 'guided'}"
    tree = {
        "objective": {"method": method},
        "student": {"tokenizer": student},
        "corpus": {"files": [str(lab / f"{name}.jsonl")]},
        "store": {"path": str(lab / store)},
        "data": {"blocks": str(blocks), "bos": None, "eos": None, "block_size": 32},
    }
    peak, over = resident(), threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            for kind, value in resident().items():
                peak[kind] = max(peak[kind], value)

    watching = threading.Thread(target=watch)
    watching.start()
    prepare(recipe_from_dict(tree))
    over.set()
    watching.join()
    answers.put(peak)


def peak_of(*arguments: Any) -> dict[str, int]:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    child = context.Process(target=measure, args=(*arguments, answers))
    child.start()
    found: dict[str, int] = answers.get()
    child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", nargs="+", required=True)
    parser.add_argument("--teacher", nargs="+", required=True, help="one for every student")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--alternatives", type=int, default=4)
    add_json(parser)
    given = parser.parse_args()
    size, texts, found = int(given.megabytes * 1e6), [], 0
    for document in open_corpus(given.corpus):
        if document.text is not None and found < size:
            texts.append(document.text)
            found += len(document.text.encode()) + 2
    long, rows = "\n\n".join(texts).encode()[:size].decode(errors="ignore"), []
    for student, teacher in zip(given.student, given.teacher, strict=True):
        row: dict[str, Any] = {"student x teacher": f"{Path(student).name} x {Path(teacher).name}"}
        with tempfile.TemporaryDirectory() as lab:
            write_lab(Path(lab), long, load_tokenizer(teacher), given.alternatives)
            for method in ("guided", "distill"):
                # the first one asks transformers about the tokenizer and makes the targets' table
                names = ("short", "short", "long")
                _, start, whole = (peak_of(Path(lab), student, method, name) for name in names)
                above = {kind: (whole[kind] - start[kind]) / len(long.encode()) for kind in whole}
                row |= {method: above["anon"], f"{method}, mapped": above["file"]}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    keep(given.json, "memory of prepare for one long document", rows)


def write_lab(lab: Path, long: str, teacher: TextTokenizer, alternatives: int) -> None:
    for name, text in (("long", long), ("short", long[:SHORT])):
        (lab / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n", "utf-8")
        read = teacher.spans_batch([text])
        losses = [made_up(read[0].token_bytes)]
        made_up_store(lab / f"{name}-guided", [text], losses)
        others = made_up_alternatives(read, alternatives)
        made_up_store(lab / f"{name}-distill", [text], losses, teacher, others)


if __name__ == "__main__":
    main()
