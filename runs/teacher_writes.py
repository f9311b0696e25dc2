"""Materials of the study "the teacher writes" (protocol: research/teacher-writes.md).

    python runs/teacher_writes.py BENCHMARKS OUT

BENCHMARKS holds gsm8k, svamp, asdiv, mawps and math as they are published. Written are the prompts
(the questions of GSM8K's training set without those that share 13 words in a row with a question
that grades), the human solutions as conversations, two worked examples for the teacher, the
students' template, and the questions: rendered without worked examples, those that choose learning
rates apart from those that are reported.
"""

import argparse
import json
import re
from pathlib import Path

from vocagnolm.data.prompts import open_prompts, word_sequences
from vocagnolm.evaluate.render import Request, spread, write_requests
from vocagnolm.questions.benchmarks import Example, load_examples
from vocagnolm.questions.graders import gold_number

REPORTED = {"gsm8k": 700, "svamp": 700, "mawps": 700, "asdiv": 700, "math500": 500}
CHOOSING = {"gsm8k": 300, "svamp": 300, "mawps": 300, "asdiv": 300}
NEW_TOKENS = 256
TEMPLATE = (
    "{{ bos_token if BOS else '' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ 'Question: ' + message['content'] + '\\nAnswer:\\n' }}{% endif %}{% endfor %}"
)
SYSTEM = (
    "Solve the problem in a few short steps, one equation a line. End with a line '#### ' and the "
    "number."
)
SHOTS = (
    (
        "A baker makes 24 muffins and sells them for $2 each. If he sells three quarters of them, "
        "how much money does he make?",
        "He sells 24 * 3/4 = 18 muffins.\nHe makes 18 * $2 = $36.\n#### 36",
    ),
    (
        "Tom has 5 boxes with 12 pencils each. He gives 8 pencils to each of his 3 friends. How "
        "many pencils are left?",
        "Tom has 5 * 12 = 60 pencils.\nHe gives away 8 * 3 = 24 pencils.\nThere are 60 - 24 = 36 "
        "pencils left.\n#### 36",
    ),
)
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def request(task: str, index: int, example: Example, **more: object) -> Request:
    prompt = f"Question: {example.question}\nAnswer:\n"
    return Request(task, index, prompt, example.gold, max_new_tokens=NEW_TOKENS, **more)  # type: ignore[arg-type]


def wrong_numbers(gold: str) -> list[str]:
    """Three numbers near a whole one, none of them right; none for other answers."""
    number = gold_number(gold)
    if number is None or number.percent or number.value != int(number.value):
        return []
    value = int(number.value)
    return [str(n) for n in (value, value + 1, value - 1 if value else 2, 2 * value or 10)]


def questions(benchmarks: Path, out: Path) -> list[str]:
    """Writes all requests, and returns the texts that no prompt may share words with."""
    every, choosing, compared, texts = [], [], [], []
    for name, count in REPORTED.items():
        examples = list(load_examples(name, benchmarks))
        texts += [example.question for example in examples]
        reported = spread(len(examples), count)
        rest = [n for n in range(len(examples)) if n not in set(reported)]
        chosen = [rest[n] for n in spread(len(rest), CHOOSING.get(name, 0) or 1)]
        chosen = chosen if name in CHOOSING else []
        every += [request(name, n, examples[n]) for n in sorted([*reported, *chosen])]
        choosing += [request(name, n, examples[n]) for n in chosen]
        for n in reported:
            options = tuple(f"#### {number}" for number in wrong_numbers(examples[n].gold))
            if options:
                compared.append(request(name, n, examples[n], options=options, letters="ABCD"))
    write_requests(out / "requests.jsonl", every)
    write_requests(out / "choosing.jsonl", choosing)
    write_requests(out / "compared.jsonl", compared)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("benchmarks", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    graded = questions(options.benchmarks, options.out)
    for name, bos in (("plain", "false"), ("bos", "true")):
        path = options.out / f"template-{name}.jinja"
        path.write_text(TEMPLATE.replace("BOS", bos), encoding="utf-8")
    write_lines(options.out / "examples.jsonl", [{"question": q, "answer": a} for q, a in SHOTS])
    (options.out / "system.txt").write_text(SYSTEM, encoding="utf-8")
    train = options.benchmarks / "gsm8k" / "train.jsonl"
    read = open_prompts(
        str(train),
        text_field="question",
        answer_field="answer",
        without=word_sequences(graded),
    )
    kept, left_out = [], 0
    for prompt in read.read():
        if prompt.text is None:
            left_out += 1
            continue
        question = prompt.messages[0].content
        kept.append((question, prompt.expected or ""))
    write_lines(options.out / "prompts.jsonl", [{"question": q, "answer": a} for q, a in kept])
    write_lines(
        options.out / "human.jsonl",
        [{"prompt": q, "completion": _CALCULATOR.sub("", a)} for q, a in kept],
    )
    print(f"{len(kept):,} prompts, {left_out:,} left out")


if __name__ == "__main__":
    main()
