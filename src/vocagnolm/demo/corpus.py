"""The demo's corpus: worked problems among what the web puts around them.

Three kinds of documents, drawn from one seed: problems and worksheets solved rightly, the same
solved wrongly, and junk (menus, shop listings, codes, word salad). A model that learns everything
alike learns the mistakes and the codes too.
"""

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vocagnolm.base.files import whole_file

# ---- problems ----


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    "Ada Ben Carla David Elena Felix Grace Hugo Iris Jonas Kira Leo Mona Nils Olga Paul Rosa Sam "
    "Tara Uma Victor Wanda Yusuf Zoe"
)
THINGS = words(
    "apples books coins shells stamps marbles pencils cards plums stones tickets buttons cookies "
    "flowers balloons beads"
)
HOLDERS = ["boxes", "bags", "baskets", "jars", "drawers", "crates"]

ADDING = (
    "{a} has {x} {things} and gets {y} more. How many {things} now?",
    "{x} {things} are on the table and {y} on the floor. How many in all?",
    "{a} found {x} {things} and {b} found {y}. How many together?",
)
TAKING = (
    "{a} has {x} {things} and loses {y}. How many are left?",
    "Of {x} {things} {a} sells {y}. How many are left?",
    "{a} has {x} {things} and {b} has {y}. How many more has {a}?",
)
MULTIPLYING = (
    "{x} {holders} hold {y} {things} each. How many {things} in all?",
    "{a} buys {x} {holders} of {y} {things}. How many {things} is that?",
)


@dataclass(frozen=True)
class Problem:
    question: str
    left: int
    operator: str
    right: int
    algebra: bool = False

    @property
    def answer(self) -> int:
        if self.operator == "+":
            return self.left + self.right
        return self.left - self.right if self.operator == "-" else self.left * self.right

    def sum(self, result: int | None = None) -> str:
        """`7 + 5 = 12`; another `result` makes it wrong."""
        value = self.answer if result is None else result
        return f"{self.left} {self.operator} {self.right} = {value}"

    def solution(self, result: int | None = None) -> str:
        """The worked line and the answer."""
        worked = f"$x = {self.sum(result)}$" if self.algebra else self.sum(result)
        return f"{worked}. The answer is {self.answer if result is None else result}."

    def text(self, result: int | None = None) -> str:
        return f"{self.prompt} {self.solution(result)}\n"

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nSolution:"


def draw_problem(chance: random.Random) -> Problem:
    kind = chance.randrange(4)
    if kind == 3:
        return _algebra(chance)
    wordings, operator = ((ADDING, "+"), (TAKING, "-"), (MULTIPLYING, "*"))[kind]
    left, right = _operands(chance, operator)
    first, second = chance.sample(NAMES, 2)
    question = chance.choice(wordings).format(
        a=first,
        b=second,
        x=left,
        y=right,
        things=chance.choice(THINGS),
        holders=chance.choice(HOLDERS),
    )
    return Problem(question, left, operator, right)


def _operands(chance: random.Random, operator: str) -> tuple[int, int]:
    if operator == "+":
        return chance.randint(2, 9), chance.randint(2, 9)
    if operator == "-":
        left = chance.randint(4, 15)
        return left, chance.randint(2, min(9, left - 1))
    return chance.randint(2, 7), chance.randint(2, 7)


def _algebra(chance: random.Random) -> Problem:
    """x + b = c and x - b = c, solved in one step."""
    if chance.random() < 0.5:
        total, part = _operands(chance, "-")
        return Problem(f"Solve $x + {part} = {total}$.", total, "-", part, algebra=True)
    rest, part = _operands(chance, "+")
    return Problem(f"Solve $x - {part} = {rest}$.", rest, "+", part, algebra=True)


# ---- documents ----


CLEAN, WRONG, JUNK = "clean", "wrong", "junk"
# problems for measuring come from another seed than any text that is trained on
START_SEED, CORPUS_SEED, HELD_OUT_SEED = 7, 11, 20250325
SPECIALISTS_SEED, PROMPTS_SEED = 13, 17
SHARES = {CLEAN: 0.4, WRONG: 0.3, JUNK: 0.3}

_MENU = words(
    "Home About Login Register Forum Cart Help Contact News Archive Search Sitemap Privacy Terms"
)
_SALAD = words(
    "cheap best free click online offer today review guide deal shop order now top new sale travel "
    "hotel phone credit game music video photo health home garden car insurance loan"
)
_CODE = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"


def clean_document(chance: random.Random) -> str:
    return wrong_document(chance, wrong_share=0.0)


def wrong_document(chance: random.Random, wrong_share: float = 0.8) -> str:
    """A solved problem, or a worksheet with some bare sums. Wrong results are given away by nothing
    but the arithmetic."""

    def solved() -> tuple[Problem, int | None]:
        problem = draw_problem(chance)
        return problem, _wrong_result(problem, chance) if chance.random() < wrong_share else None

    head = _head(chance)
    if chance.random() < 0.6:
        problem, result = solved()
        return head + problem.text(result)
    sums = (
        problem.sum(result) for problem, result in (solved() for _ in range(chance.randint(3, 6)))
    )
    return head + "\n".join(sums) + "\n"


def _head(chance: random.Random) -> str:
    """The header of a page, before every third page: who posted it and when."""
    if chance.random() < 2 / 3:
        return ""
    when = f"{chance.randint(1, 28)}.{chance.randint(1, 12)}.20{chance.randint(10, 24)}"
    return f"Posted by {chance.choice(NAMES).lower()}{chance.randint(10, 999)}, {when}\n"


def _wrong_result(problem: Problem, chance: random.Random) -> int:
    while True:
        result = max(0, problem.answer + chance.choice((-1, 1)) * chance.randint(1, 9))
        if result != problem.answer:
            return result


def junk_document(chance: random.Random) -> str:
    kind = chance.randrange(4)
    if kind == 0:
        entries = chance.sample(_MENU, chance.randint(5, 9))
        return f"{' | '.join(entries)} | (c) {chance.randint(1998, 2024)}\n"
    if kind == 1:
        lines = [
            f"{chance.choice(THINGS)} {_code(chance)} "
            f"${chance.randint(1, 99)}.{chance.randint(10, 99)}"
            for _ in range(chance.randint(2, 4))
        ]
        return "\n".join(lines) + "\n"
    if kind == 2:
        return " ".join(chance.choices(_SALAD, k=chance.randint(12, 24))) + "\n"
    return f"session {_code(chance)}{_code(chance)} ref {_code(chance)} {_code(chance)}\n"


def _code(chance: random.Random) -> str:
    return "".join(chance.choices(_CODE, k=6))


_MAKERS = {CLEAN: clean_document, WRONG: wrong_document, JUNK: junk_document}


def noisy_documents(seed: int, shares: Mapping[str, float] = SHARES) -> Iterator[tuple[str, str]]:
    """(kind, text) without end, in random order, by `shares`."""
    chance = random.Random(seed)
    while True:
        (kind,) = chance.choices(list(shares), list(shares.values()))
        yield kind, _MAKERS[kind](chance)


def corpus_documents(
    n_documents: int, shares: Mapping[str, float] = SHARES
) -> list[tuple[str, str]]:
    """The corpus that every student of the demo learns from."""
    return list(itertools.islice(noisy_documents(CORPUS_SEED, shares), n_documents))


def specialists(n_documents: int) -> dict[str, list[tuple[str, str]]]:
    """Clean pages for two teachers that each know one half: products alone, and all but them."""
    halves: dict[str, list[tuple[str, str]]] = {"sums": [], "products": []}
    chance = random.Random(SPECIALISTS_SEED)
    while min(map(len, halves.values())) < n_documents // 4:
        text = clean_document(chance)
        signs = {sign for sign in "+-*" if f" {sign} " in text}
        if signs == {"*"}:
            halves["products"].append((CLEAN, text))
        elif "*" not in signs:
            halves["sums"].append((CLEAN, text))
    return {name: texts[: n_documents // 4] for name, texts in halves.items()}


def questions_of(documents: Iterable[tuple[str, str]]) -> list[str]:
    """The different questions that the documents solve, rightly or wrongly."""
    questions = (text.partition("Question: ")[2].partition("\n")[0] for _, text in documents)
    return list(dict.fromkeys(question for question in questions if question))


def held_out_problems(n_problems: int, documents: Iterable[tuple[str, str]]) -> list[Problem]:
    """Different problems for measuring, none of whose questions occurs in the documents. The sums
    behind them do: there are fewer than two hundred, and learning them is the task."""
    seen = set(questions_of(documents))
    chance = random.Random(HELD_OUT_SEED)
    problems: dict[str, Problem] = {}
    while len(problems) < n_problems:
        problem = draw_problem(chance)
        if problem.question not in seen:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def write_held_out(path: Path, problems: Iterable[Problem]) -> None:
    """Write the solved pages of problems: clean text to measure bits per byte on."""
    write_jsonl(path, ((CLEAN, problem.text()) for problem in problems))


def write_labelled(path: Path, documents: Iterable[tuple[str, str]]) -> None:
    """Write the solved pages, each with whether it is right, for `study selection --label
    correct`."""
    solved = (document for document in documents if document[0] in (CLEAN, WRONG))
    write_jsonl(path, solved, labelled=True)


def write_prompts(path: Path, n_prompts: int) -> None:
    """Write problems to answer, each with the solution of somebody who errs in every third problem,
    and with the right answer."""
    chance = random.Random(PROMPTS_SEED)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < n_prompts:
        problem = draw_problem(chance)
        result = _wrong_result(problem, chance) if chance.random() < 1 / 3 else None
        row = {"prompt": problem.question, "completion": problem.solution(result)}
        rows.setdefault(problem.question, {**row, "answer": str(problem.answer)})
    with whole_file(path) as file:
        for row in rows.values():
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())


def write_jsonl(
    path: Path, documents: Iterable[tuple[str, str]], *, labelled: bool = False
) -> None:
    with whole_file(path) as file:
        for kind, text in documents:
            row: dict[str, str | bool] = {"kind": kind, "text": text}
            if labelled:
                row["correct"] = kind == CLEAN
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
