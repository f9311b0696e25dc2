"""What becomes of a teacher's alternatives in other vocabularies, measured with real models.

    python benchmarks/target_shares.py --corpus F.jsonl [F.jsonl ...] --out FOLDER
        --pair STUDENT TEACHER [--pair ...] [--documents 40] [--characters 1500] [--json [FILE]]

STUDENT is a tokenizer (folder, tokenizer.json or GGUF), TEACHER a model (folder or GGUF). Each
teacher scores the beginnings of some documents of every corpus once, with 16 alternatives per
token; `prepare` then makes targets of the first 1, 4 and 16 for every student. The table has, in
per cent: student tokens that begin with a teacher token, and inside one; at shared starts the
probability of the token that follows, of other tokens of the student's, of what it spells by
several tokens (only the first is a target), of what it cannot spell, and of what lies beyond the
alternatives. FOLDER keeps the stores. On a CPU: minutes per teacher.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from record import STDOUT, add_json, keep

from vocagnolm.base.files import write_text
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import ScoreSettings, score_corpus

COUNTS = (1, 4, 16)
SHARES = ("shared", "inside", "continued", "following", "exact", "several", "unspelled", "beyond")


def sample(corpora: list[str], documents: int, characters: int, path: Path) -> None:
    """Beginnings of documents, evenly spread over each corpus."""
    lines = []
    for name in corpora:
        corpus = open_corpus(name)
        step = max(1, len(corpus) // documents)
        for index in range(0, step * documents, step):
            for document in corpus.read(index, index + 1):
                if document.text:
                    lines.append(json.dumps({"text": document.text[:characters]}))
    write_text(path, "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pair", nargs=2, action="append", required=True)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--characters", type=int, default=1500)
    add_json(parser)
    given = parser.parse_args()
    texts = given.out / "sample.jsonl"
    if not texts.exists():
        sample(given.corpus, given.documents, given.characters, texts)
    rows: list[dict[str, Any]] = []
    for student, teacher in given.pair:
        store = given.out / f"store-{_name(teacher)}"
        settings = ScoreSettings(alternatives=max(COUNTS), context=1024, dtype="float32")
        score_corpus(teacher, texts, store, settings=settings)
        for count in COUNTS:
            blocks = given.out / f"blocks-{_name(student)}-{_name(teacher)}-{count}"
            tree = {
                "student": {"tokenizer": student},
                "corpus": {"files": [str(texts)]},
                "store": {"path": str(store)},
                "data": {"blocks": str(blocks), "eos": None, "bos": None},
                "objective": {"method": "distill", "alternatives": count},
            }
            summary = prepare(recipe_from_dict(tree))["summary"]
            shares = summary["target_shares"]
            pair = {"student": _name(student), "teacher": _name(teacher), "alternatives": count}
            rows.append({**pair, "tokens": summary["tokens"], **shares})
    if given.json == STDOUT:
        print(json.dumps(rows, indent=1))
        return
    keep(given.json, "what the alternatives become", rows)
    print("student under teacher, alternatives: " + ", ".join(SHARES) + " (%)")
    for row in rows:
        shares_ = "  ".join(f"{100 * row[name]:5.1f}" for name in SHARES)
        names = f"{row['student']} under {row['teacher']}"
        print(f"{names:40} {row['alternatives']:>3}  {shares_}")


def _name(source: str) -> str:
    path = Path(source)
    if path.name == "tokenizer.json":
        return path.parent.name
    return path.name.removesuffix(".gguf")


if __name__ == "__main__":
    main()
