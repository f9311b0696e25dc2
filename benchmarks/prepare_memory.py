"""Memory of `prepare` for one long document, in bytes per byte of its text.

    python benchmarks/prepare_memory.py --student S --teacher T --corpus F.jsonl
        [--megabytes 16] [--alternatives 4] [--json [FILE]]

The documents of the corpus are joined into one. The loss store is made up (`made_up.py`). `guided`
and `distill` run in processes of their own: the peak of the resident memory above what the process
holds after it has prepared the first 2,000 characters. `file` is the share of it that is mapped
from the store, which the system may take back at any time; the rest is the process's own. Linux
only.
"""

import argparse
import json
import multiprocessing
import tempfile
import threading
from pathlib import Path
from typing import Any

from made_up import made_up, made_up_alternatives, made_up_store
from record import STDOUT, add_json, keep

from vocagnolm.alignment import load_tokenizer
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.recipe import recipe_from_dict

SHORT = 2000


def resident() -> dict[str, int]:
    """Bytes by kind: anonymous memory, mapped files."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0][3:-1].lower(): 1024 * int(line[1]) for line in lines if line[0][:3] == "Rss"}


def measure(lab: Path, student: str, method: str, answers: Any) -> None:
    def prepare_one(name: str) -> None:
        store = f"{name}-{'distill' if method == 'distill' else 'guided'}"
        tree = {
            "objective": {"method": method},
            "student": {"tokenizer": student},
            "corpus": {"files": [str(lab / f"{name}.jsonl")]},
            "store": {"path": str(lab / store)},
            "data": {
                "blocks": str(lab / f"blocks-{name}-{method}"),
                "bos": None,
                "eos": None,
                "block_size": 32,
            },
        }
        prepare(recipe_from_dict(tree))

    prepare_one("short")
    before = resident()
    peak, over = dict(before), threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            for name, value in resident().items():
                peak[name] = max(peak[name], value)

    watching = threading.Thread(target=watch)
    watching.start()
    prepare_one("long")
    over.set()
    watching.join()
    part = sum(p.stat().st_size for p in (lab / f"blocks-long-{method}").glob("part-*"))
    answers.put({"part": part, **{name: peak[name] - before[name] for name in ("anon", "file")}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
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
    long = "\n\n".join(texts).encode()[:size].decode(errors="ignore")
    teacher, rows = load_tokenizer(given.teacher), []
    with tempfile.TemporaryDirectory() as temporary:
        lab = Path(temporary)
        for name, text in (("long", long), ("short", long[:SHORT])):
            (lab / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
            read = teacher.spans_batch([text])
            losses = [made_up(read[0].token_bytes)]
            made_up_store(lab / f"{name}-guided", [text], losses)
            others = made_up_alternatives(read, given.alternatives)
            made_up_store(lab / f"{name}-distill", [text], losses, teacher, others)
        context = multiprocessing.get_context("spawn")
        for method in ("guided", "distill"):
            answers: Any = context.Queue()
            child = context.Process(target=measure, args=(lab, given.student, method, answers))
            child.start()
            answer = {name: n / len(long.encode()) for name, n in answers.get().items()}
            child.join()
            rows.append({"method": method, "bytes": len(long.encode()), **answer})
            if given.json == STDOUT:
                print(json.dumps(rows[-1]), flush=True)
            else:
                numbers = ", ".join(f"{name} {value:.1f}" for name, value in answer.items())
                print(f"{method}: {numbers} bytes a byte of text", flush=True)
    if given.json != STDOUT:
        keep(given.json, "memory of prepare for one long document", rows)


if __name__ == "__main__":
    main()
