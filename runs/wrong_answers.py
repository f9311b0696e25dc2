"""Where a text is wrong, is what would be right among the teacher's alternatives?

    python runs/wrong_answers.py choices TEACHER SOLUTIONS.jsonl --out FOLDER
    python runs/wrong_answers.py results TEACHER BENCHMARKS --out FOLDER
    python runs/wrong_answers.py demo --out FOLDER

`choices`: solutions by models to questions with lettered options (fields `text`, `question` and
`correct`), one right and one wrong for each question. `results`: GSM8K's own solutions, the results
of all calculations. `demo`: sums of the demo's corpus under the demo's teacher. The teacher reads
the texts with 16 alternatives per token; nothing is trained. Prints a table, and adds every result
to FOLDER/wrong-answers.json (protocol and results: research/distillation.md).
"""

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from solutions import MARK, worked_solution

from vocagnolm.base.files import write_text
from vocagnolm.demo import corpus, students
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.store import LossStore

COUNT, FIRST = 16, 4
"""Alternatives in the store, and how many of them the rule takes."""
SEED = 20261119
LETTER = re.compile(r"answer is \(?([A-J])\b")
SUM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
COLUMNS = ("document", "right", "right4", "written", "likeliest")


@dataclass(frozen=True)
class Result:
    """A result in a text: what is written from byte `start` on, and what would be right."""

    start: int
    written: bytes
    right: bytes


@dataclass(frozen=True)
class Page:
    text: str
    kind: str
    results: Sequence[Result]


# ---- pages ----


def choice_pages(path: Path, questions: int) -> list[Page]:
    """For each question one right and one wrong solution of a length worth reading."""
    found: dict[str, dict[bool, list[tuple[str, int, str]]]] = defaultdict(
        lambda: {True: [], False: []}
    )
    with open(path, encoding="utf-8") as file:
        for row in map(json.loads, file):
            mark = row["text"].rfind(MARK)
            letters = list(LETTER.finditer(row["text"], max(mark, 0)))
            if mark >= 0 and letters and 200 <= len(row["text"]) - mark - len(MARK) <= 2500:
                last = letters[-1]
                answer = (row["text"], last.start(1), last[1])
                found[row["question"]][bool(row["correct"])].append(answer)
    usable = [q for q, both in sorted(found.items()) if _differ(both)]
    rng = random.Random(SEED)
    pages = []
    for question in rng.sample(usable, min(questions, len(usable))):
        right = found[question][True][0][2]
        for correct, kind in ((True, "right"), (False, "wrong")):
            text, at, letter = rng.choice(found[question][correct])
            start = len(text[:at].encode())
            pages.append(Page(text, kind, [Result(start, letter.encode(), right.encode())]))
    return pages


def _differ(both: dict[bool, list[tuple[str, int, str]]]) -> bool:
    """Whether there are right and wrong solutions, and all right ones give one letter, which no
    wrong one gives."""
    right, wrong = ({letter for _, _, letter in both[correct]} for correct in (True, False))
    return len(right) == 1 and bool(wrong) and not right & wrong


def result_pages(benchmarks: Path, problems: int) -> list[Page]:
    with open(benchmarks / "gsm8k" / "test.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(problems), strict=False)]
    pages = []
    for text, steps, _ in map(worked_solution, rows):
        found = []
        for start, end in steps:
            written = text[start:end].encode()
            found.append(Result(len(text[:start].encode()), written, written))
        pages.append(Page(text, "right", found))
    return pages


def demo_pages(documents: int) -> list[Page]:
    """Wrong results of the wrong pages, and the results of the clean ones."""
    pages = []
    for kind, text in corpus.corpus_documents(documents):
        found = []
        for match in SUM.finditer(text):
            left, right = int(match[1]), int(match[3])
            value = {"+": left + right, "-": left - right, "*": left * right}[match[2]]
            found.append(Result(match.start(4), match[4].encode(), str(value).encode()))
        if kind == corpus.WRONG:
            pages.append(Page(text, "wrong", [r for r in found if r.written != r.right]))
        elif kind == corpus.CLEAN:
            pages.append(Page(text, "right", found))
    return pages


# ---- what the teacher says there ----


def says(token: bytes, before: bytes, result: bytes, decided: int) -> bool:
    """Whether a token spells the bytes `before` the result and then the result itself, at least up
    to and including its byte `decided`. What follows the result must not continue a number or a
    word."""
    wanted = before + result
    shared = min(len(token), len(wanted))
    ends = len(token) == shared or not token[shared : shared + 1].isalnum()
    return len(token) > len(before) + decided and token[:shared] == wanted[:shared] and ends


def first_difference(a: bytes, b: bytes) -> int:
    shorter = min(len(a), len(b))
    return next((n for n in range(shorter) if a[n] != b[n]), shorter)


def measured(store: LossStore, page: Page) -> Iterator[list[float]]:
    """For every result: the right one's probability among all alternatives and among the first
    few, the written one's probability, and whether the right one is the likeliest."""
    index = store.of(page.text)
    text, spans, nll = page.text.encode(), store.spans(index), store[index][1]
    kept = store.alternatives(index)
    for result in page.results:
        if result.written == result.right:  # all its tokens, one after the other
            end = result.start + len(result.written)
            tokens = np.flatnonzero((spans[:, 1] > result.start) & (spans[:, 0] < end))
            follows = kept.follows[tokens]
            p = np.where(follows, kept.probability[tokens], 0)
            of_all, of_first = (float(q.sum(1).prod()) for q in (p, p[:, :FIRST]))
            written = float(np.exp(-nll[tokens].sum()))
            yield [of_all, of_first, written, float(follows[:, 0].all())]
            continue
        decided = first_difference(result.written, result.right)
        place = result.start + decided
        (token,) = np.flatnonzero((spans[:, 1] > place) & (spans[:, 0] <= place))
        begin = int(spans[token, 0])
        before, inside = text[begin : result.start], max(begin - result.start, 0)
        spelled = [store.vocabulary[id_] for id_ in kept.ids[token]]
        right, wrong = (
            np.array([says(one, before, words[inside:], decided - inside) for one in spelled])
            for words in (result.right, result.written)
        )
        p = kept.probability[token]
        # the token that follows counts as written also where it is no alternative
        written = max(float(p @ wrong), float(np.exp(-nll[token])))
        yield [float(p @ right), float((p * right)[:FIRST].sum()), written, float(right[0])]


def summary(rows: Sequence[Sequence[float]]) -> dict[str, tuple[float, float, float]]:
    """Measure -> mean and 95 % interval in per cent, documents drawn again."""
    table = np.array(rows, dtype=np.float64)
    document = np.unique(table[:, 0], return_inverse=True)[1]
    values = np.column_stack([table[:, 1:], table[:, 1] > table[:, 3]])
    count = np.bincount(document)
    sums = np.stack([np.bincount(document, column) for column in values.T], axis=1)
    drawn = np.random.default_rng(0).multinomial(len(count), np.ones(len(count)) / len(count), 2000)
    again = (drawn @ sums) / (drawn @ count)[:, None]
    low, high = 100 * np.percentile(again, (2.5, 97.5), axis=0)
    names = (*COLUMNS[1:], "above")
    mean = 100 * values.mean(0)
    return {
        n: (float(m), float(a), float(b)) for n, m, a, b in zip(names, mean, low, high, strict=True)
    }


def printed(found: dict[str, list[list[float]]]) -> str:
    lines = [
        "| text | results | right one: probability, % | among the first four | written one "
        "| right one is the likeliest, % | likelier than the written one, % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rows in found.items():
        numbers = summary(rows)
        cells = [f"{m:.1f} ({a:.1f} to {b:.1f})" for m, a, b in numbers.values()]
        if name.endswith("right"):
            cells[-1] = ""
        lines.append(f"| {name} | {len(rows):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("choices", "results", "demo"))
    parser.add_argument("sources", nargs="*", help="TEACHER and what it reads")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="questions, problems or documents")
    parser.add_argument("--dtype", default="bfloat16", help="of the teacher; the demo's: float32")
    given = parser.parse_args()
    if len(given.sources) != (0 if given.what == "demo" else 2):
        parser.error("choices and results take TEACHER and what it reads; demo takes neither")
    settings: dict[str, Any] = {"alternatives": COUNT}
    if given.what == "demo":
        teacher, pages = str(students.TEACHER), demo_pages(given.limit or 2000)
    else:
        teacher, source = given.sources
        make = choice_pages if given.what == "choices" else result_pages
        pages = make(Path(source), given.limit or (400 if given.what == "choices" else 200))
        settings |= {"context": 1024, "dtype": given.dtype}
    texts = given.out / f"{given.what}.jsonl"
    given.out.mkdir(parents=True, exist_ok=True)
    corpus.write_jsonl(texts, ((page.kind, page.text) for page in pages))
    score_corpus(
        teacher, texts, given.out / f"store-{given.what}", settings=ScoreSettings(**settings)
    )
    store = LossStore.open(given.out / f"store-{given.what}")
    kept = given.out / "wrong-answers.json"
    found: dict[str, Any] = (
        json.loads(kept.read_text("utf-8")) if kept.exists() else {"columns": COLUMNS}
    )
    for kind in ("wrong", "right"):
        rows = [
            [number, *(round(float(value), 4) for value in values)]
            for number, page in enumerate(pages)
            if page.kind == kind
            for values in measured(store, page)
        ]
        if rows:
            found[f"{given.what}: {kind}"] = rows
    write_text(kept, json.dumps(found) + "\n")
    print(printed({name: rows for name, rows in found.items() if name != "columns"}))


if __name__ == "__main__":
    main()
