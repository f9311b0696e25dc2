"""Solutions to word problems, written by a model and not checked: the corpora of the study
`unchecked`.

    python runs/solutions.py questions BENCHMARKS QUESTIONS.jsonl
    python runs/solutions.py write MODEL QUESTIONS.jsonl OUT.jsonl [--samples 6] [--share 1/1]
    python runs/solutions.py mix QUESTIONS.jsonl WRITTEN.jsonl ... --out MATERIALS
    python runs/solutions.py measures BENCHMARKS OTHERS.jsonl --out MATERIALS

`questions` takes GSM8K's *training* questions (BENCHMARKS/gsm8k/train.jsonl), with the worked
examples of the evaluation before them, in their form. `write` samples several solutions to each;
nothing is filtered. `mix` grades them by the project's grader and writes corpora of equal size and
equal questions that differ in one thing, the share of wrong solutions:

    unchecked-WW.jsonl         WW % of the solutions are wrong
    unchecked-WW-right.jsonl   its right solutions alone (the oracle's corpus)
    unchecked.jsonl            every document of these, for the teacher to read
    solutions-right.jsonl,     right and wrong solutions to questions of no corpus: how likely they
    solutions-wrong.jsonl      are to a trained student, given the question

The label is in the field `correct` and no method reads it. `measures` writes texts of which a part
counts: answers.jsonl and results.jsonl (final answers and intermediate results of GSM8K's test
solutions), mmlu-right.jsonl and mmlu-wrong.jsonl (solutions of other writers to other questions,
from a file with `text`, `question` and `correct`).
"""

import argparse
import json
import random
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LEVELS = (0, 25, 50, 75)
HELD_OUT_QUESTIONS = 300
SEED = 20261116
MARK = "\nAnswer:"


def questions(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.render import render, write_requests
    from vocagnolm.questions.suite import task_named

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "gsm8k").mkdir()
        source = options.benchmarks / "gsm8k" / "train.jsonl"
        shutil.copyfile(source, Path(name) / "gsm8k" / "test.jsonl")
        rendered = render([task_named("gsm8k")], benchmarks=name)["gsm8k"]
    write_requests(options.out, rendered)
    print(f"{len(rendered):,} questions in {options.out}")


def write(options: argparse.Namespace) -> None:
    from vocagnolm.evaluate.render import read_requests
    from vocagnolm.generate import Generator, Sampling
    from vocagnolm.model import open_model

    share, shares = map(int, options.share.split("/"))
    asked = read_requests(options.questions)[: options.limit][share - 1 :: shares]
    files = open_model(options.model, device=options.device)
    generator = Generator(
        files.load(),
        files,
        options.batch_size,
        sampling=Sampling(options.temperature, options.top_p),
        seed=options.seed * shares + share,
    )
    prompts = [request.prompt for request in asked for _ in range(options.samples)]
    done = 0
    with open(options.out, "w", encoding="utf-8") as file:
        for batch in generator.generate(
            prompts,
            stop=asked[0].stop,
            max_new_tokens=options.max_new_tokens,
        ):
            for place, answer in batch:
                request, sample = asked[place // options.samples], place % options.samples
                line = {"question": request.index, "sample": sample, "output": answer.output}
                file.write(json.dumps({**line, "complete": answer.complete}) + "\n")
            done += len(batch)
            print(f"{done:,} of {len(prompts):,}", flush=True)


def mix(options: argparse.Namespace) -> None:
    solutions = graded(options.questions, options.written)
    share = sum(s["correct"] for both in solutions.values() for s in both)
    count = sum(len(both) for both in solutions.values())
    rng = random.Random(SEED)
    usable = [q for q, both in sorted(solutions.items()) if len({s["correct"] for s in both}) == 2]
    rng.shuffle(usable)
    held_out, used = usable[:HELD_OUT_QUESTIONS], usable[HELD_OUT_QUESTIONS:]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, correct in (("right", True), ("wrong", False)):
        chosen = [rng.choice(of_kind(solutions[q], correct)) for q in held_out]
        save(options.out / f"solutions-{name}.jsonl", [marked(s) for s in chosen])
    corpora = levels(solutions, used, rng)
    for level, documents in corpora.items():
        save(options.out / f"unchecked-{level:02d}.jsonl", documents)
        right = [d for d in documents if d["correct"]]
        save(options.out / f"unchecked-{level:02d}-right.jsonl", right)
    save(options.out / "unchecked.jsonl", everything(corpora.values()))
    about = {
        "solutions": count,
        "right": share / count,
        "questions": len(solutions),
        "questions with both": len(usable),
        "documents in a corpus": len(corpora[0]),
        "megabytes": {
            f"{level} %": round(sum(len(d["text"].encode()) for d in documents) / 1e6, 2)
            for level, documents in corpora.items()
        },
    }
    print(json.dumps(about, indent=1))


def graded(questions: Path, written: Iterable[Path]) -> dict[int, list[dict[str, Any]]]:
    """Question -> its different solutions, each with whether its answer is right."""
    from vocagnolm.evaluate.render import read_requests
    from vocagnolm.questions import grade

    asked = {request.index: request for request in read_requests(questions)}
    found: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for path in written:
        with open(path, encoding="utf-8") as file:
            for answer in map(json.loads, file):
                request = asked[answer["question"]]
                question = request.prompt[request.prompt.rindex("Question:") :]
                text = question + answer["output"].rstrip()
                right = grade(
                    "gsm8k",
                    answer["output"],
                    request.gold,
                    complete=answer["complete"],
                    protocol=request.protocol,
                ).correct
                about = {"question": request.index, "text": text, "correct": right}
                found[request.index].setdefault(text, {"source": str(right), **about})
    return {question: list(texts.values()) for question, texts in found.items()}


def of_kind(solutions: list[dict[str, Any]], correct: bool) -> list[dict[str, Any]]:
    return [s for s in solutions if s["correct"] == correct]


def levels(
    solutions: dict[int, list[dict[str, Any]]], used: list[int], rng: random.Random
) -> dict[int, list[dict[str, Any]]]:
    """Every corpus has the same questions, each as often as in the others: as often as it has
    solutions of the rarer kind. Which of them are wrong is nested: what is wrong at
    25 % is wrong at 50 % too."""
    slots = []
    for question in used:
        both = [of_kind(solutions[question], correct) for correct in (True, False)]
        slots += list(zip(*(rng.sample(kind, len(kind)) for kind in both), strict=False))
    rng.shuffle(slots)
    turn = [(number + 0.5) / len(slots) for number in range(len(slots))]
    corpora = {}
    order = rng.sample(range(len(slots)), len(slots))
    for level in LEVELS:
        chosen = [
            slot[1] if at < level / 100 else slot[0] for slot, at in zip(slots, turn, strict=True)
        ]
        corpora[level] = [chosen[number] for number in order]
    return corpora


def everything(corpora: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All documents of the corpora, once each: what a teacher has to read."""
    return list({d["text"]: d for documents in corpora for d in documents}.values())


def measures(options: argparse.Namespace) -> None:
    answers, results = [], []
    with open(options.benchmarks / "gsm8k" / "test.jsonl", encoding="utf-8") as file:
        for row in map(json.loads, file):
            text, steps, answer = worked_solution(row)
            answers.append({"text": text, "counts": [answer]})
            if steps:
                results.append({"text": text, "counts": steps})
    save(options.out / "answers.jsonl", answers)
    save(options.out / "results.jsonl", results)
    by_question: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with open(options.others, encoding="utf-8") as file:
        for document in map(json.loads, file):
            by_question[document["question"]].append(document)
    rng = random.Random(SEED)
    both = [s for s in by_question.values() if len({one["correct"] for one in s}) == 2]
    for name, correct in (("right", True), ("wrong", False)):
        chosen = [rng.choice(of_kind(solutions, correct)) for solutions in both]
        save(options.out / f"mmlu-{name}.jsonl", [marked(s) for s in chosen])
    print(f"{len(answers):,} answers, {len(results):,} with results, {len(both):,} questions")


def worked_solution(row: dict[str, Any]) -> tuple[str, list[list[int]], list[int]]:
    """A GSM8K solution as the corpora write it; where its intermediate results and its answer lie.
    A calculation stands as <<48/2=24>>24."""
    reasoning, _, answer = row["answer"].partition("####")
    text = f"Question: {row['question']}{MARK} "
    steps, at = [], 0
    for match in re.finditer(r"<<[^>]*>>(-?[\d,]*\.?\d+)", reasoning.strip()):
        text += reasoning.strip()[at : match.start()]
        steps.append([len(text), len(text) + len(match[1])])
        text, at = text + match[1], match.end()
    text += f"{reasoning.strip()[at:]} The answer is "
    answer = answer.strip()
    return f"{text}{answer}.", steps, [len(text), len(text) + len(answer)]


def marked(solution: dict[str, Any]) -> dict[str, Any]:
    """With the part that counts: the solution without its question."""
    text = solution["text"]
    return {**solution, "counts": [[text.index(MARK) + len(MARK), len(text)]]}


def save(path: Path, documents: list[dict[str, Any]]) -> None:
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("questions")
    asking.add_argument("benchmarks", type=Path)
    asking.add_argument("out", type=Path)
    asking.set_defaults(function=questions)
    writing = commands.add_parser("write")
    writing.add_argument("model")
    writing.add_argument("questions", type=Path)
    writing.add_argument("out", type=Path)
    writing.add_argument("--samples", type=int, default=6)
    writing.add_argument("--temperature", type=float, default=0.7)
    writing.add_argument("--top-p", type=float, default=0.95)
    writing.add_argument("--max-new-tokens", type=int, default=256)
    writing.add_argument("--seed", type=int, default=1)
    writing.add_argument("--share", default="1/1")
    writing.add_argument("--limit", type=int)
    writing.add_argument("--batch-size", type=int)
    writing.add_argument("--device", default="auto")
    writing.set_defaults(function=write)
    mixing = commands.add_parser("mix")
    mixing.add_argument("questions", type=Path)
    mixing.add_argument("written", type=Path, nargs="+")
    mixing.add_argument("--out", type=Path, required=True)
    mixing.set_defaults(function=mix)
    measuring = commands.add_parser("measures")
    measuring.add_argument("benchmarks", type=Path)
    measuring.add_argument("others", type=Path)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.set_defaults(function=measures)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
