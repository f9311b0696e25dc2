"""The corpus of the study `noisy`: worked problems among what the web puts around them.

    python runs/noisy_materials.py NOISY OUT [--scale 1.0]

NOISY holds jsonl files with a `text` field: khan_problems (clean, all of it), planetmath,
solutions_written_by_models (right and wrong), sage_docs_naive (pages with their menus and
footers), forum_categories_naive and forum_lean (listings, names, dates, chatter). Writes
OUT/noisy.jsonl: 200 MB, in random order, each document with its source; long ones in parts. A
benchmark that shares questions with the solutions (MMLU) must not be reported from it.
"""

import argparse
import random
from pathlib import Path

from study_materials import Shelf, pieces, read_jsonl, write

MEGABYTES = {
    "khan_problems": 28.0,
    "planetmath": 10.0,
    "solutions_written_by_models": 48.0,
    "sage_docs_naive": 40.0,
    "forum_categories_naive": 40.0,
    "forum_lean": 34.0,
}
SEED = 20261116


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("noisy", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    documents: list[tuple[str, str]] = []
    for source, megabytes in MEGABYTES.items():
        rows = read_jsonl(options.noisy / f"{source}.jsonl")
        shelf = Shelf([part for row in rows for part in pieces(row["text"])], rng)
        documents += [(source, text) for text in shelf.take(megabytes * options.scale)]
    rng.shuffle(documents)
    write(options.out / "noisy.jsonl", documents)
    size = sum(len(text.encode()) for _, text in documents)
    print(f"{len(documents):,} documents, {size / 1e6:.1f} MB in {options.out / 'noisy.jsonl'}")


if __name__ == "__main__":
    main()
