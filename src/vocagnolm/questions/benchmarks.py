"""Read the benchmarks' own files, from a folder or from where their authors keep them.

Every reader turns a row into the same three things: the question as it is put to the model, the
reference answer, and the option letters where there are any. A benchmark of one's own is a YAML
file (`task_from_file`).
"""

import ast
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vocagnolm.base.files import parse_json
from vocagnolm.errors import BenchmarkError, UsageError, first_line, optional
from vocagnolm.questions.graders import gold_letter, gold_math, gold_number
from vocagnolm.questions.suite import TASKS, AnswerKind, Protocol, Task, task_named, tasks_named
from vocagnolm.recipe.schema import Schema, build, read_tree

Row = dict[str, Any]


@dataclass(frozen=True)
class Example:
    question: str
    gold: str
    letters: str = ""


class _Malformed(Exception):
    """What is wrong with a row, in words."""


def _field(row: Row, *names: str) -> Any:
    lowered = {key.lower(): value for key, value in row.items()}
    for name in names:
        if lowered.get(name.lower()) is not None:
            return lowered[name.lower()]
    raise _Malformed(f"no field '{names[0]}' (it has: {', '.join(row) or 'nothing'})")


def _text(row: Row, *names: str) -> str:
    value = _field(row, *names)
    if not isinstance(value, str) or not value.strip():
        raise _Malformed(f"field '{names[0]}' is {value!r}; expected text")
    return value.strip()


def _yes_or_no(question: str, gold: str) -> str:
    """A question whose answer is a plain yes or no says so: the protocol tells the model."""
    return f"{question} (Yes or No)" if gold.strip().lower() in ("yes", "no") else question


def _number_row(question: str, gold: Any) -> Example:
    text = gold if isinstance(gold, str) else repr(gold)
    if isinstance(gold, bool) or gold_number(text) is None:
        raise _Malformed(f"the answer {gold!r} is not a number")
    return Example(question, text)


def _gsm8k(row: Row) -> Example:
    answer = _text(row, "answer")
    if "####" not in answer:
        raise _Malformed("field 'answer' has no '#### NUMBER' line")
    return _number_row(_text(row, "question"), answer.rpartition("####")[2].strip())


def _math(row: Row) -> Example:
    if isinstance(row.get("answer"), str):  # MATH-500 has it beside the solution
        return Example(_text(row, "problem"), _text(row, "answer"))
    solution = _text(row, "solution")
    gold = gold_math(solution)
    if gold == solution:
        raise _Malformed("field 'solution' has no \\boxed{...} answer")
    return Example(_text(row, "problem"), gold)


def _svamp(row: Row) -> Example:
    body = _text(row, "Body")
    body = body if body.endswith(".") else f"{body}."
    return _number_row(f"{body} {_text(row, 'Question')}", _field(row, "Answer"))


def _asdiv(row: Row) -> Example | None:
    gold = _text(row, "answer")
    if ";" in gold:  # several answers: the protocol leaves such rows out
        return None
    question = f"{_text(row, 'body')} {_text(row, 'question')}"
    return Example(_yes_or_no(question, gold), gold)


def _mawps(row: Row) -> Example:
    return _number_row(_text(row, "input", "question"), _field(row, "target", "answer"))


def _tabmwp(row: Row, paper: bool = False) -> Example:
    title = row.get("table_title")
    about = f'regarding "{title}" ' if title else ""
    question = f"Read the following table {about}and answer a question:\n{_text(row, 'table')}\n"
    question += _text(row, "question")
    if choices := row.get("choices"):
        question += f" Please select from the following options: {list(choices)}"
    gold = str(_field(row, "answer")).strip()
    if paper and gold.lower() in ("true", "false"):
        question += " (True or False)"
    return Example(_yes_or_no(question, gold), gold)


def with_options(question: str, options: list[str], letters: str, comma: str = ",") -> str:
    listed = f"{comma} ".join(f"({a}) {b}" for a, b in zip(letters, options, strict=False))
    return f"{question}\nWhat of the following is the right choice? Explain your answer.\n{listed}"


def _choice_row(
    task: Task, question: str, options: list[str], gold: Any, comma: str = ","
) -> Example:
    if not 2 <= len(options) <= len(task.letters):
        raise _Malformed(f"{len(options)} options found; expected up to {len(task.letters)}")
    letters = task.letters[: len(options)]
    try:
        answer = gold_letter(gold, task)
    except ValueError as error:
        raise _Malformed(str(error)) from None
    if answer not in letters:
        raise _Malformed(f"the answer {answer} is none of the {len(options)} options")
    return Example(with_options(question, options, letters, comma), answer, letters)


def split_options(text: str, letters: str) -> list[str]:
    """`a ) 12 , b ) 16`, `A) 50 B) 42` or `A. 1 B. 2` as a list of option texts.

    A label counts only after the one before it, so that a `c )` inside option b stays there.
    """
    starts: list[tuple[int, int]] = []
    position = 0
    for letter in letters:
        small = letter.lower()
        # "a ) a ) 1055": some rows carry the label twice
        label = rf"(?:^|[\s,(\[])[{letter}{small}]\s?[).](?:\s|(?=\S))(?:\s*{small}\s\)\s)?"
        match = re.compile(label).search(text, position)
        if match is None:
            break
        starts.append(match.span())
        position = match.end()
    ends = [begin for begin, _ in starts[1:]] + [len(text)]
    return [text[a:b].strip().rstrip(",").strip() for (_, a), b in zip(starts, ends, strict=False)]


def _mathqa(row: Row, paper: bool = False) -> Example:
    task = task_named("mathqa")
    options = _text(row, "options")
    if options.startswith("["):
        options = " , ".join(ast.literal_eval(options))
    problem = _text(row, "problem")
    listed = split_options(options, task.letters)
    if paper:
        listed = [option.replace(" , ", ", ") for option in listed]
    return _choice_row(task, problem[0].upper() + problem[1:], listed, _text(row, "correct"))


def _mmlu_stem(row: Row) -> Example:
    options = [str(option).strip() for option in _field(row, "choices")]
    return _choice_row(
        task_named("mmlu_stem"), _text(row, "question"), options, _field(row, "answer")
    )


def _sat(row: Row, paper: bool = False) -> Example:
    task = task_named("sat")
    # the hub's column is called "Possible Answers", the evaluation harness's "options"
    listed = split_options(_text(row, "options", "Possible Answers"), task.letters)
    comma = "" if paper else ","
    return _choice_row(task, _text(row, "question"), listed, _text(row, "Answer"), comma)


@dataclass(frozen=True)
class Source:
    read: Callable[[Row], Example | None]  # None: a row that is left out
    fields: str
    files: tuple[str, ...]  # the first that exists is read; `a+b` means both
    where: str  # for people
    hub: tuple[tuple[str, str | None, str], ...] = ()  # dataset, configuration, split
    url: tuple[str, ...] = ()
    read_paper: Callable[[Row], Example | None] | None = None  # where the harness differs

    def error(self, what: str, advice: str = "The original is at") -> BenchmarkError:
        expected = f"Expected one JSON object a line with {self.fields}"
        return BenchmarkError(f"{what}. {expected}. {advice} {self.where}")


_HARNESS = "https://raw.githubusercontent.com/ZubinGou/math-evaluation-harness/main/data"
_MAWPS_PARTS = ("singleeq", "singleop", "addsub", "multiarith")
_TABMWP_URL = (
    "https://raw.githubusercontent.com/lupantech/PromptPG/main/data/tabmwp/problems_test1k.json"
)
_MATH_SUBJECTS = (
    "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra "
    "precalculus"
)
_STEM_SUBJECTS = (
    "abstract_algebra astronomy college_biology college_chemistry college_computer_science "
    "college_mathematics college_physics computer_security conceptual_physics "
    "electrical_engineering elementary_mathematics high_school_biology high_school_chemistry "
    "high_school_computer_science high_school_mathematics high_school_physics "
    "high_school_statistics machine_learning"
)

SOURCES: dict[str, Source] = {
    "gsm8k": Source(
        _gsm8k,
        "question, answer (ending in '#### NUMBER')",
        ("gsm8k/test.jsonl",),
        "https://huggingface.co/datasets/openai/gsm8k",
        hub=(("openai/gsm8k", "main", "test"),),
    ),
    "math500": Source(
        _math,
        "problem, answer or solution (with \\boxed{...})",
        ("math_oai/test.jsonl", "math500/test.jsonl"),
        "https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
        hub=(("HuggingFaceH4/MATH-500", None, "test"),),
    ),
    "math": Source(
        _math,
        "problem, solution (with \\boxed{...})",
        ("math/test.jsonl",),
        "https://huggingface.co/datasets/EleutherAI/hendrycks_math",
        hub=tuple(("EleutherAI/hendrycks_math", s, "test") for s in _MATH_SUBJECTS.split()),
    ),
    "svamp": Source(
        _svamp,
        "Body, Question, Answer",
        ("svamp/test.jsonl",),
        "https://huggingface.co/datasets/ChilleD/SVAMP (train and test together)",
        hub=(("ChilleD/SVAMP", None, "train"), ("ChilleD/SVAMP", None, "test")),
    ),
    "asdiv": Source(
        _asdiv,
        "body, question, answer",
        ("asdiv/test.jsonl",),
        "https://huggingface.co/datasets/EleutherAI/asdiv",
        hub=(("EleutherAI/asdiv", None, "validation"),),
    ),
    "mawps": Source(
        _mawps,
        "input, target",
        ("mawps/test.jsonl", "+".join(f"mawps/{part}.jsonl" for part in _MAWPS_PARTS)),
        f"{_HARNESS}/mawps/test.jsonl",
        url=(f"{_HARNESS}/mawps/test.jsonl",),
    ),
    "tabmwp": Source(
        _tabmwp,
        "question, choices, answer, table_title, table",
        ("tabmwp/problems_test1k.json", "tabmwp/test.jsonl"),
        "https://github.com/lupantech/PromptPG (data/tabmwp)",
        url=(_TABMWP_URL,),
        read_paper=partial(_tabmwp, paper=True),
    ),
    "mathqa": Source(
        _mathqa,
        "problem, options, correct",
        ("mathqa/test.jsonl",),
        f"{_HARNESS}/mathqa/test.jsonl",
        url=(f"{_HARNESS}/mathqa/test.jsonl",),
        read_paper=partial(_mathqa, paper=True),
    ),
    "mmlu_stem": Source(
        _mmlu_stem,
        "question, choices, answer (0 to 3)",
        ("mmlu_stem/test.jsonl",),
        "https://huggingface.co/datasets/cais/mmlu (18 subjects)",
        hub=tuple(("cais/mmlu", s, "test") for s in _STEM_SUBJECTS.split()),
    ),
    "sat": Source(
        _sat,
        "question, options or Possible Answers ('A) ... B) ...'), Answer",
        ("sat_math/test.jsonl", "sat/test.jsonl"),
        "https://huggingface.co/datasets/mcaleste/sat_multiple_choice_math_may_23",
        hub=(("mcaleste/sat_multiple_choice_math_may_23", None, "train"),),
        read_paper=partial(_sat, paper=True),
    ),
    "gsm_hard": Source(
        _mawps,
        "input, target",
        ("gsm_hard/test.jsonl",),
        "https://huggingface.co/datasets/reasoning-machines/gsm-hard",
        hub=(("reasoning-machines/gsm-hard", None, "train"),),
    ),
}


if SOURCES.keys() != TASKS.keys():
    missing = ", ".join(sorted(SOURCES.keys() ^ TASKS.keys()))
    raise LookupError(f"tasks without a source, or sources without a task: {missing}")


def load_examples(
    task: str, folder: str | Path | None = None, protocol: Protocol = "strict"
) -> list[Example]:
    """The questions of a task, from `folder` or, without one, from where they are published."""
    name = task_named(task).name
    source = SOURCES[name]
    read = (source.read_paper if protocol == "paper" else None) or source.read
    if folder is None and (source.hub or source.url):
        rows = _published_rows(name, source)
    else:
        rows = _local_rows(name, source, Path(folder or ""))
    examples = []
    for where, row in rows:
        try:
            example = read(row)
        except (_Malformed, ValueError, SyntaxError, TypeError) as error:
            raise source.error(f"{where}: {error}") from None
        if example is not None:
            examples.append(example)
    if not examples:
        raise source.error(f"{name}: no questions in {folder or source.where}")
    return examples


def _local_rows(name: str, source: Source, folder: Path) -> Iterator[tuple[str, Row]]:
    for candidate in source.files:
        paths = [folder / part for part in candidate.split("+")]
        if all(path.is_file() for path in paths):
            for path in paths:
                yield from _parse(str(path), path.read_bytes(), source)
            return
    expected = " or ".join(str(folder / file.replace("+", ", ")) for file in source.files)
    problem = "is no folder" if not folder.is_dir() else f"has no questions for {name}"
    raise source.error(
        f"{folder} {problem}: expected {expected}",
        "Leave out --benchmarks to download them, or get them from",
    )


def _parse(name: str, data: bytes, source: Source) -> Iterator[tuple[str, Row]]:
    """Rows of a .jsonl file, or of a .json file that holds a list or an object of objects."""
    at, problem = name, "cannot be read as JSON"
    rows: list[tuple[str, Any]] = []
    try:
        text = data.decode("utf-8-sig")
        if name.endswith(".json"):
            whole = parse_json(text)
            listed = list(whole.values()) if isinstance(whole, dict) else whole
            if not isinstance(listed, list):
                raise ValueError(f"it holds {listed!r:.40}, not rows")
            rows = [(f"{name}, entry {n}", row) for n, row in enumerate(listed, start=1)]
        else:
            problem = "is not valid JSON"
            # not splitlines: U+2028 is legal inside a JSON string
            for number, line in enumerate(text.split("\n"), start=1):
                at = f"{name}, line {number}"
                if line.strip():
                    rows.append((at, parse_json(line)))
    except ValueError as error:
        raise source.error(f"{at} {problem}: {error}", "Get it again from") from None
    for at, row in rows:
        if not isinstance(row, dict):
            raise source.error(f"{at} is not a JSON object", "Get it again from")
        yield at, row


def _published_rows(name: str, source: Source) -> Iterator[tuple[str, Row]]:
    try:
        for url in source.url:
            with urllib.request.urlopen(url, timeout=60) as answer:
                yield from _parse(url, answer.read(), source)
        for dataset, configuration, split in source.hub:
            rows = _hub_split(dataset, configuration, split)
            for number, row in enumerate(rows):
                yield f"{dataset} {configuration or ''} {split}, row {number}", dict(row)
    # RuntimeError: what `datasets` makes of a dataset that is still a script
    except (OSError, ValueError, RuntimeError) as error:
        raise BenchmarkError(
            f"the questions of {name} could not be downloaded ({first_line(error)}). Get them from "
            f"{source.where} and pass --benchmarks DIR with DIR/{source.files[0].split('+')[0]}"
        ) from None


def _hub_split(dataset: str, configuration: str | None, split: str) -> Any:
    datasets = optional("datasets", "eval", f"Loading {dataset} from the hub")
    return datasets.load_dataset(dataset, configuration, split=split)


# ---- a benchmark of one's own ----

_MOST_LETTERS = "ABCDEFGH"


class OwnExample(Schema):
    question: str
    answer: str | int


class OwnTask(Schema):
    """A task of the user's own, as its YAML file describes it (see `task_from_file`)."""

    title: str | None = None
    kind: AnswerKind
    file: str
    question: str = "question"
    answer: str = "answer"
    options: str = "options"
    examples: list[OwnExample] | None = None


def tasks_asked(names: str | Sequence[str] | None, suite: str = "math") -> list[Task]:
    """Tasks by name, and those that YAML files describe, once each; None is the whole suite."""
    if isinstance(names, str):
        names = names.split(",")
    if names is not None:
        names = [
            task_from_file(name).name if name.strip().endswith((".yaml", ".yml")) else name
            for name in map(str, names)
            if name.strip()
        ]
    return tasks_named(names, suite)


def task_from_file(path: str | Path) -> Task:
    """A task that a YAML file describes, known by the file's name from now on:

    title: Sums            # the file's name
    kind: number           # number, mixed (or short text), math (LaTeX) or choice
    file: sums.jsonl       # beside this file: one JSON object a line
    question: question     # its fields; options: a list of texts, for kind choice
    answer: answer
    examples:              # worked examples; those of GSM8K or Minerva
      - {question: "What is 1 + 1?", answer: "1 + 1 = 2. The answer is 2."}
    """
    path = Path(str(path).strip())
    own = build(OwnTask, read_tree(path, UsageError, "It describes a task."), str(path), UsageError)
    choice = own.kind == "choice"
    shots, examples = 4 if own.kind == "math" else 8, None  # Minerva's or GSM8K's
    if choice or own.examples is not None:
        examples = tuple((example.question, str(example.answer)) for example in own.examples or ())
        shots = len(examples)
    task = Task(
        name=path.stem,
        title=own.title or path.stem,
        kind=own.kind,
        shots=shots,
        letters=_MOST_LETTERS if choice else "",
        examples=examples,
    )

    def read(row: Row) -> Example:
        question, gold = _text(row, own.question), _field(row, own.answer)
        if choice:
            options = [str(option) for option in _field(row, own.options)]
            return _choice_row(task, question, options, gold)
        return _number_row(question, gold) if own.kind == "number" else Example(question, str(gold))

    if path.stem in TASKS and SOURCES[path.stem].where != str(path):
        raise UsageError(f"{path}: task '{path.stem}' already exists: give the file another name")
    fields = ", ".join([own.question, own.answer, *([own.options] if choice else [])])
    TASKS[task.name] = task
    file = str((path.parent / own.file).absolute())
    SOURCES[task.name] = Source(read, fields, (file,), str(path))
    return task
