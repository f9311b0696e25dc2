"""Word problems and algebra lines with worked solutions: small numbers, many wordings."""

import random
from dataclasses import dataclass


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
HOLDERS = words("boxes bags baskets jars drawers crates")

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
        value = self.answer if result is None else result
        line = self.sum(result)
        worked = f"$x = {line}$" if self.algebra else line
        return f"{worked}. The answer is {value}."

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
