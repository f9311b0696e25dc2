"""`vocagnolm recipe new --from FOLDER`: a recipe for a folder that a teacher wrote, with the
reasons for its numbers beside them."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.corpus import Corpus, open_corpus
from vocagnolm.data.materials import student_chat, student_tokenizer
from vocagnolm.errors import StoreError
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.recipe.schema import parse_yaml
from vocagnolm.store import LossStore
from vocagnolm.train.check import about_student
from vocagnolm.train.settings import usual_learning_rate

PASSES, STEP_TOKENS, LEAST_STEPS = 2, 2**15, 100
"""Passes over the answers, tokens per optimizer step, and steps that there should be at least."""
_SAMPLED = 500
_BLOCKS = 2**8, 2**12
_BYTES_PER_TOKEN, _TURN_TOKENS = 4.0, 16
"""Where no student is known: bytes of text in a token, and tokens of a template around a text."""
_RATE = 1e-4

Line = tuple[str, Any, str]
"""A key, its value and a comment."""


@dataclass(frozen=True)
class _Sizes:
    """The folder's documents in tokens of the student."""

    tokens: int
    longest: int
    known: bool
    """Counted with the student's tokenizer, in a sample."""
    positions: int | None = None
    """The longest text that the student reads."""
    parameters: int | None = None


def recipe_for(folder: str, student: str | None = None) -> str:
    """The text of a recipe that trains `student` on what a teacher wrote: distilled from its
    alternatives where the folder has them, else guided by its losses, else plainly."""
    store = LossStore.open(folder)
    if store.written is None:
        raise StoreError(
            f"{folder} was not written by `vocagnolm write`. `vocagnolm try` makes a recipe for a "
            "corpus and a teacher."
        )
    sizes = _measured(store, open_corpus(folder), student)
    text = _text(_sections(folder, store, student, sizes), store)
    recipe_from_dict(parse_yaml(text))  # what is wrong with it shows here
    return text


def _measured(store: LossStore, corpus: Corpus, student: str | None) -> _Sizes:
    step = max(1, len(corpus) // _SAMPLED)
    read = (d for at in range(0, len(corpus), step) for d in corpus.read(at, at + 1))
    texts = [document.text for document in read if document.text is not None]
    if student is None:
        around = _TURN_TOKENS if corpus.conversations else 0
        counts = [round(len(text.encode()) / _BYTES_PER_TOKEN) + around for text in texts]
        return _Sizes(_whole(counts, store), max(counts), known=False)
    recipe = recipe_from_dict({"student": {"model": student}})
    counts = _counted(recipe, texts, corpus.conversations)
    about = about_student(recipe)
    return _Sizes(
        _whole(counts, store),
        max(counts),
        known=True,
        positions=about["positions"],
        parameters=about["parameters"],
    )


def _counted(recipe: Recipe, texts: list[str], conversations: bool) -> list[int]:
    """Tokens of some documents; of conversations in the student's template."""
    tokenizer = student_tokenizer(recipe)
    if not conversations:
        return [len(spans) for spans in tokenizer.spans_batch(texts)]
    chat: ChatTokenizer = student_chat(recipe, tokenizer)
    read = chat.outcomes(texts)
    counts = [len(tokens) for tokens in read if not isinstance(tokens, str)]
    if not counts:
        raise StoreError(f"the template of {tokenizer.name} refuses these conversations: {read[0]}")
    return counts


def _whole(counts: list[int], store: LossStore) -> int:
    return round(sum(counts) / len(counts) * len(store))


def _sections(
    folder: str, store: LossStore, student: str | None, sizes: _Sizes
) -> dict[str, list[Line]]:
    assert store.written is not None
    most = min(_BLOCKS[1], sizes.positions or _BLOCKS[1])
    block = _BLOCKS[0]
    while block < min(sizes.longest, most):
        block *= 2
    block = min(block, most)
    step_tokens = min(STEP_TOKENS, max(block, PASSES * sizes.tokens // LEAST_STEPS))
    batch = 2 ** ((step_tokens // block).bit_length() - 1)
    steps = max(1, round(PASSES * sizes.tokens / (batch * block)))
    rate = usual_learning_rate(sizes.parameters, batch * block) if sizes.parameters else _RATE
    size = f"usual for {sizes.parameters:,} parameters" if sizes.parameters else "a guess"
    place, kept = f"out/{PurePath(folder).name}", store.kept_alternatives
    scored = bool(store.manifest["totals"]["scored_tokens"])
    method: list[Line] = [("method", "cpt", "plain training: the folder holds no losses")]
    if scored:
        method = [("method", "guided", "by the teacher's losses; the folder has no alternatives")]
    if kept is not None:
        method = [
            (
                "method",
                "distill",
                f"towards the teacher's {kept} alternatives per token; cpt: plain",
            ),
            ("mix", 0.5, "targets are half the text, half the teacher's distribution"),
        ]
    conversations = bool(store.written.get("format"))
    answers: list[Line] = []
    if (marked := store.written.get("marked_answers")) is not None:
        share = store.written["right_answers"] / max(marked, 1)
        answers = [("answers", "all", f"right: only those marked as right ({share:.0%})")]
    trained: list[Line] = []
    if conversations:
        trained = [("train_on", "assistant", "the loss is on answers and the ends of their turns")]
    counted = "" if sizes.known else "; guessed, without a student"
    return {
        "student": [("model", student, "folder, hub id or GGUF file")],
        "corpus": [("files", [folder], f"what {store.teacher_name} wrote"), *answers],
        "store": [("path", folder if scored else None, "its losses, in the same folder")],
        "data": [
            ("blocks", f"{place}/blocks", "made by `vocagnolm prepare`"),
            ("block_size", block, f"the longest of a sample has {sizes.longest:,} tokens{counted}"),
            *trained,
        ],
        "objective": method,
        "optimizer": [
            ("learning_rate", rate, f"{size}; not tuned"),
            ("min_learning_rate", float(f"{rate / 10:.2g}"), "at the last step"),
            ("warmup_steps", min(100, steps // 10), "of linear warm-up"),
        ],
        "train": [
            ("epochs", PASSES, f"passes over about {sizes.tokens:,} tokens: {steps:,} steps"),
            ("batch_blocks", batch, f"up to {batch * block:,} tokens per step"),
            ("micro_batch", min(8, batch), "blocks on one device at a time"),
            ("dtype", "bfloat16", "arithmetic on a GPU; float32 on a CPU"),
        ],
        "run": [("folder", f"{place}/run", "metrics, checkpoints, model")],
    }


def _text(sections: dict[str, list[Line]], store: LossStore) -> str:
    assert store.written is not None
    lines = [
        f"# Train a student on what {store.teacher_name} wrote: {len(store):,} answers to",
        f"# {store.written['prompts']:,} prompts. Made by `vocagnolm recipe new`.",
        "# Next: vocagnolm prepare, then vocagnolm train. Every key: docs/recipes.md",
    ]
    for name, entries in sections.items():
        lines += ["", f"{name}:"]
        for key, value, comment in entries:
            written = yaml.safe_dump(value, default_flow_style=True, width=10**6).partition("\n")[0]
            bare = f"  {key}: {written}"
            lines.append(f"{bare:<28}  # {comment}")
    return "\n".join(lines) + "\n"
