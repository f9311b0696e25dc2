"""The students of the demo: one recipe for all, one word changed, the same start and budget."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vocagnolm.base.files import write_json, write_text
from vocagnolm.demo.corpus import Problem
from vocagnolm.recipe import Recipe, recipe_from_dict

# ---- answers ----

END = "</s>"
"""In training every document stands behind this token."""
NEW_TOKENS = 48
_ANSWER = re.compile(r"The answer is (-?\d+)\.")


def read_answer(output: str) -> int | None:
    """The number of the first "The answer is N."; None where there is none."""
    match = _ANSWER.search(output)
    return int(match.group(1)) if match else None


def exact_answers(answers: Sequence[int | None], problems: Sequence[Problem]) -> list[int]:
    """1 for every problem with exactly the right number, 0 for the others."""
    return [int(a == p.answer) for a, p in zip(answers, problems, strict=True)]


# ---- students ----


METHODS = ("cpt", "random", "guided", "distill")
ALTERNATIVES = 4
"""The number that the demo's stores hold for every token."""
BY_STRETCH: dict[str, dict[str, Any]] = {
    "reducible": {"method": "guided", "compare": "stretch", "weighting": "reducible", "floor": 0.2},
    "alm": {"method": "alm"},
}
"""Beside the demo's methods: every token, by how much is left to learn; and likelihood matching."""
WRITTEN = {"written, plain": "cpt", "written, distilled": "distill"}
"""Students of what the teacher wrote, and their methods."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ eos_token + 'Question: ' + message['content'] + '\\nSolution:' }}"
    "{% else %}{{ ' ' + message['content'] + '\\n' + eos_token }}{% endif %}{% endfor %}"
)
"""How teacher and students read a question and its answer: as the pages of the corpus have them."""
SHIPPED = Path(__file__).parent
TEACHER, START = SHIPPED / "teacher", SHIPPED / "start"


@dataclass(frozen=True)
class Budget:
    """How much every student reads, and what it is measured on."""

    tokens: int = 250_000
    """Student tokens of training; the corpus has about as many, so each is seen once."""
    documents: int = 5_800
    problems: int = 400
    seeds: int = 3


def recipe_of(
    out: Path, method: str, seed: int, budget: Budget, *, alternatives: bool = False
) -> Recipe:
    """The recipe of a student. The methods differ in `objective` alone. The seed decides the order
    of the blocks, the same for all methods, and what `random` keeps. `alternatives`: the store has
    some, and the blocks serve distillation too."""
    objective = BY_STRETCH.get(method, {"method": method})
    blocks = "blocks-stretch" if method in BY_STRETCH else "blocks"
    return recipe_from_dict(
        {
            "student": {"model": str(START)},
            "teacher": {"tokenizer": str(TEACHER)},
            "corpus": {"files": [str(out / "corpus.jsonl")]},
            "store": {"path": str(out / "store")},
            "data": {
                "blocks": str(out / blocks),
                "block_size": 128,
                "extra_columns": ["targets"] if alternatives else [],
            },
            "objective": objective,
            "optimizer": {
                "learning_rate": 4e-3,
                "min_learning_rate": 2e-4,
                "warmup_steps": 20,
                "weight_decay": 0.01,
                "beta2": 0.98,
            },
            "train": {
                "tokens": budget.tokens,
                "batch_blocks": 8,
                "micro_batch": 8,
                "device": "cpu",
            },
            "run": {
                "folder": str(out / "runs" / f"{method}-{seed}"),
                "seed": seed,
                "save_every": 0,
            },
        },
        origin="the demo's recipe",
    )


def written_recipe_of(out: Path, name: str, seed: int, budget: Budget) -> Recipe:
    """The recipe of a student that learns from the teacher's answers, with the settings of the
    other students."""
    tree = recipe_of(out, WRITTEN[name], seed, budget).to_dict()
    written = str(out / "written")
    tree["student"]["chat_template"] = str(out / "questions.jinja")
    tree["corpus"]["files"] = [written]
    tree["store"]["path"] = written
    tree["data"] |= {"blocks": str(out / "blocks-written"), "extra_columns": ["targets"]}
    tree["run"]["folder"] = str(out / "runs" / f"{name.replace(', ', '-')}-{seed}")
    return recipe_from_dict(tree, origin="the demo's recipe")


def write(out: Path, questions: Sequence[str]) -> dict[str, Any]:
    """Let the teacher answer questions; gives what the folder holds, in the words of `vocagnolm
    store inspect`."""
    one_thread()
    from vocagnolm.score import WriteSettings, write_answers

    write_text(out / "questions.jinja", TEMPLATE)
    rows = (json.dumps({"prompt": question}) + "\n" for question in questions)
    write_text(out / "prompts.jsonl", "".join(rows))
    settings = WriteSettings(
        device="cpu",
        threads=1,
        samples=1,
        max_new_tokens=NEW_TOKENS,
        alternatives=ALTERNATIVES,
        chat_template=str(out / "questions.jinja"),
        shard_prompts=256,
    )
    return write_answers(TEACHER, out / "prompts.jsonl", out / "written", settings=settings).folder


def score(teacher: Path, corpus: Path, store: Path, alternatives: int | str = 0) -> float:
    """Let the teacher read the corpus once; gives its bits per byte."""
    from vocagnolm.score import ScoreSettings, score_corpus

    settings = ScoreSettings(device="cpu", context=512, bos=END, alternatives=alternatives)
    summary = score_corpus(teacher, corpus, store, settings=settings)
    return float(summary.store["bits_per_byte"])


Record = dict[str, Any]
"""`exact` and `bits_per_byte` of a model, and what they are made of: `answers`, 1 for every problem
that it solves exactly, and `documents`, the bits and bytes of every held-out text."""


def train_and_measure(recipe: Recipe, held_out: Path, problems: Sequence[Problem]) -> Record:
    """Train one student from its start and give its two numbers; what is finished is not done
    again."""
    folder = Path(recipe.run.folder or "")
    measured = folder / "measures.json"
    if measured.is_file():
        known: Record = json.loads(measured.read_text("utf-8"))
        if "answers" in known:  # older versions kept the two numbers alone
            return known
    one_thread()
    from vocagnolm.train.run import train

    train(recipe, quiet=True)
    measures = measure(folder / "model", held_out, problems)
    write_json(measured, measures)
    return measures


def measure(model: Path, held_out: Path, problems: Sequence[Problem]) -> Record:
    """Bits per byte of clean held-out text, and the share of held-out problems that the model
    solves with exactly the right number."""
    from vocagnolm.evaluate.bits import bits_per_byte
    from vocagnolm.generate import Generator
    from vocagnolm.model import open_model

    quiet()
    files = open_model(model, device="cpu")
    loaded = files.load()
    generator = Generator(loaded, files, batch_size=128)
    generator.prefix_ids = [files.tokenizer.vocabulary[END]]
    prompts = [problem.prompt for problem in problems]
    batches = generator.generate(prompts, stop=(), max_new_tokens=NEW_TOKENS)
    written = dict(pair for batch in batches for pair in batch)
    generator.close()
    answers = [read_answer(written[number].output) for number in range(len(problems))]
    right = exact_answers(answers, problems)
    bits = bits_per_byte(loaded, files, [held_out])
    return {
        "exact": sum(right) / len(right),
        "bits_per_byte": bits.value,
        "answers": right,
        "documents": [list(bits.by_document[at]) for at in sorted(bits.by_document)],
    }


def one_thread() -> None:
    """Run torch in one thread: small students side by side are faster than one after the other with
    several threads."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)
    quiet()


def quiet() -> None:
    """Silence the output of libraries; the demo prints its own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
