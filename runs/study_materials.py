"""Texts and questions of the miniature study, from unpacked corpora and benchmarks.

    python runs/study_materials.py CORPORA BENCHMARKS OUT [--scale 1.0]

CORPORA: nlab.jsonl, openstax_*.jsonl, stacks.jsonl, napkin.jsonl, hott.jsonl, noise_webtext.txt.
BENCHMARKS: as `vocagnolm evaluate --benchmarks` reads them, with gsm8k/train.jsonl and
math/train.jsonl. Writes main.jsonl (with problems), without.jsonl (the same size without them),
extra.jsonl (what without.jsonl has and main.jsonl has not), start.jsonl (plain phase), held-out and
validation texts, requests.jsonl (prompts of the word-problem suite), validation-requests.jsonl
(other questions of it), whole-requests.jsonl (all questions but these).
"""

import argparse
import json
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

# megabytes of UTF-8 in main.jsonl, by source: 45 / 18 / 18 / 8 / 11 %
MAIN_MB = {
    "nlab": 7.6,
    "openstax": 3.0,
    "gsm8k": 1.5,
    "math": 1.5,
    "other": 1.4,
    "chat": 1.0,
    "corrupted": 0.9,
}
EXTRA_MB = {"nlab": 1.9, "openstax": 0.8, "other": 0.3}
START_MB = {"nlab": 5.0, "openstax": 1.5, "other": 2.5}
HELD_OUT_MB = {"nlab": 0.3, "openstax": 0.2}
PIECE_CHARACTERS = 8000
QUESTIONS = {"gsm8k": 400, "svamp": 1000, "mawps": 1000, "asdiv": 1000}
# for choosing learning rates by accuracy, from what is left; SVAMP has no more
VALIDATION_QUESTIONS = {"gsm8k": 400, "mawps": 1000, "asdiv": 1000}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def pieces(text: str) -> list[str]:
    """Long documents in parts of bounded length, cut between paragraphs."""
    found, current = [], ""
    for paragraph in re.split(r"(?<=\n\n)", text):
        if current and len(current) + len(paragraph) > PIECE_CHARACTERS:
            found.append(current)
            current = ""
        current += paragraph
    return [part for part in [*found, current] if len(part.strip()) >= 200]


def gsm8k_text(row: dict[str, Any]) -> str:
    reasoning, _, answer = row["answer"].partition("####")
    reasoning = re.sub(r"<<[^>]*>>", "", reasoning).strip()
    return f"Question: {row['question']}\nAnswer: {reasoning} The answer is {answer.strip()}."


def math_text(row: dict[str, Any]) -> str:
    return f"Problem: {row['problem']}\nSolution: {row['solution']}"


def corrupted(text: str, rng: random.Random) -> str:
    """Half of the words replaced by words from anywhere in the text: looks like text, says
    nothing, and cannot be predicted."""
    words = text.split(" ")
    pool = words[:]
    rng.shuffle(pool)
    return " ".join(pool[i] if rng.random() < 0.5 else word for i, word in enumerate(words))


class Shelf:
    """Documents of a source, handed out once each."""

    def __init__(self, documents: list[str], rng: random.Random):
        self.documents = list(dict.fromkeys(documents))
        rng.shuffle(self.documents)

    def take(self, megabytes: float) -> list[str]:
        taken, size = [], 0
        while size < megabytes * 1e6:
            if not self.documents:
                raise SystemExit("a source is too small for this scale")
            taken.append(self.documents.pop())
            size += len(taken[-1].encode())
        return taken


def shelves(corpora: Path, benchmarks: Path, rng: random.Random) -> dict[str, Shelf]:
    def split(*names: str) -> list[str]:
        rows = [row for name in names for row in read_jsonl(corpora / f"{name}.jsonl")]
        return [part for row in rows for part in pieces(row["text"])]

    nlab = split("nlab")
    chat = (corpora / "noise_webtext.txt").read_text(encoding="utf-8", errors="ignore")
    lines = chat.splitlines()
    chat_documents = ["\n".join(lines[i : i + 30]) for i in range(0, len(lines), 30)]
    rng.shuffle(nlab)
    reserve, nlab = nlab[:400], nlab[400:]
    return {
        "nlab": Shelf(nlab, rng),
        "openstax": Shelf(split("openstax_algebra", "openstax_calculus", "openstax_stats"), rng),
        "other": Shelf(split("stacks", "napkin", "hott"), rng),
        "gsm8k": Shelf([gsm8k_text(r) for r in read_jsonl(benchmarks / "gsm8k/train.jsonl")], rng),
        "math": Shelf([math_text(r) for r in read_jsonl(benchmarks / "math/train.jsonl")], rng),
        "chat": Shelf([d for d in chat_documents if len(d) > 200], rng),
        "corrupted": Shelf([corrupted(d, rng) for d in reserve], rng),
    }


def write(path: Path, documents: list[tuple[str, str]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for source, text in documents:
            # one shared text for all tokenizers: some of them (Qwen's) normalise to NFC
            text = unicodedata.normalize("NFC", text)
            file.write(json.dumps({"source": source, "text": text}, ensure_ascii=False) + "\n")


def texts(corpora: Path, benchmarks: Path, out: Path, scale: float) -> None:
    rng = random.Random(20250324)
    shelf = shelves(corpora, benchmarks, rng)

    def take(amounts: dict[str, float], factor: float = scale) -> list[tuple[str, str]]:
        return [(s, text) for s, mb in amounts.items() for text in shelf[s].take(mb * factor)]

    for source, mb in HELD_OUT_MB.items():
        write(out / f"held-out-{source}.jsonl", take({source: mb}, 1.0))
    write(out / "validation-text.jsonl", take({"nlab": 0.15, "openstax": 0.1}, 1.0))
    write(out / "validation-problems.jsonl", take({"gsm8k": 0.1, "math": 0.1}, 1.0))
    for name, make in (("gsm8k", gsm8k_text), ("math", math_text)):
        rows = read_jsonl(benchmarks / name / "test.jsonl")
        chosen = [make(rows[i * len(rows) // 300]) for i in range(300)]
        write(out / f"held-out-{name}.jsonl", [(name, text) for text in chosen])
    write(out / "start.jsonl", _shuffled(take(START_MB), rng))
    main, extra = take(MAIN_MB), take(EXTRA_MB)
    rest = [pair for pair in main if pair[0] not in ("gsm8k", "math")]
    write(out / "main.jsonl", _shuffled(main, rng))
    write(out / "extra.jsonl", _shuffled(extra, rng))
    write(out / "without.jsonl", _shuffled(rest + extra, rng))


def _shuffled(documents: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    documents = list(documents)
    rng.shuffle(documents)
    return documents


def questions(benchmarks: Path, out: Path) -> None:
    from vocagnolm.evaluate.render import render, write_requests
    from vocagnolm.questions.suite import task_named

    requests, validation, whole = [], [], []
    for name, count in QUESTIONS.items():
        chosen = render([task_named(name)], benchmarks=benchmarks, limit=count)[name]
        requests += chosen
        used = {request.index for request in chosen}
        every = render([task_named(name)], benchmarks=benchmarks)[name]
        rest = [request for request in every if request.index not in used]
        count = min(len(rest), VALIDATION_QUESTIONS.get(name, 0))
        choosing = [rest[i * len(rest) // count] for i in range(count)]
        validation += choosing
        whole += [request for request in every if request not in choosing]
    write_requests(out / "requests.jsonl", requests)
    write_requests(out / "validation-requests.jsonl", validation)
    write_requests(out / "whole-requests.jsonl", whole)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpora", type=Path)
    parser.add_argument("benchmarks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only-texts", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    texts(options.corpora, options.benchmarks, options.out, options.scale)
    if not options.only_texts:
        questions(options.benchmarks, options.out)


if __name__ == "__main__":
    main()
