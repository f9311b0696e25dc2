"""The runs of the paper (arXiv 2503.19123) as one table of rows over one complete recipe. No torch.

Table 1 trains on 15B tokens, table 2 and figure 6 on 5B with Mistral-ProXMath, table 3 and figure
7 on 2B. docs/paper.md says what of the paper each row stands for, and what differs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vocagnolm.methods import METHODS

Changes = dict[str, Any]
"""`section.key` -> value."""

OUT = "out/paper"
BEST = "guided-qwen2.5-math-instruct"


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    shows: str
    """Where the paper shows it."""
    about: str
    changes: Changes = field(default_factory=dict)
    after: str | None = None
    """The row whose model is the teacher here: run it first."""


@dataclass(frozen=True, kw_only=True)
class PaperTeacher:
    model: str
    label: str
    revision: str | None = None
    """Pinned where the main branch has pickled weights only."""
    after: str | None = None


TEACHERS: dict[str, PaperTeacher] = {
    "tinyllama-cpt": PaperTeacher(
        model=f"{OUT}/runs/cpt/model", label="the student after continual pretraining", after="cpt"
    ),
    "llemma": PaperTeacher(
        model="EleutherAI/llemma_7b",
        label="Llemma 7B, the student's vocabulary and 16 tokens more",
        revision="03f81db0ad4105f9615d5418cc523cd31c374b40",
    ),
    "mistral-proxmath": PaperTeacher(
        model="gair-prox/Mistral-7B-ProXMath",
        label="Mistral-7B-ProXMath, another 32k vocabulary, 75.58 % of it shared",
    ),
    "deepseek-math": PaperTeacher(
        model="deepseek-ai/deepseek-math-7b-base",
        label="DeepSeekMath 7B, 100k, 9.60 % of it shared",
        revision="6779f1b605fed54c5115ab537563ac0943c265fe",
    ),
    "deepseek-math-rl": PaperTeacher(
        model="deepseek-ai/deepseek-math-7b-rl",
        label="DeepSeekMath-RL 7B, 100k, 9.60 % of it shared",
    ),
    "qwen2.5-math": PaperTeacher(
        model="Qwen/Qwen2.5-Math-7B", label="Qwen2.5-Math 7B, 150k, 6.32 % of it shared"
    ),
    "qwen2.5-math-instruct": PaperTeacher(
        model="Qwen/Qwen2.5-Math-7B-Instruct",
        label="Qwen2.5-Math-Instruct 7B, 150k, 6.32 % of it shared",
    ),
}
SAME_VOCABULARY = ("tinyllama-cpt", "llemma")
OTHER_VOCABULARY = tuple(name for name in TEACHERS if name not in SAME_VOCABULARY)


def _teacher(name: str) -> Changes:
    teacher = TEACHERS[name]
    return {"teacher.model": teacher.model, "teacher.revision": teacher.revision}


def _stored(name: str, method: str = "guided", **blocks: str) -> Changes:
    """Guided by the teacher's store; blocks of its own where they hold more than guidance."""
    return {
        **_teacher(name),
        "store.path": f"{OUT}/stores/{name}",
        "data.blocks": f"{OUT}/blocks/{name}{blocks.get('suffix', '')}",
        "objective.method": method,
    }


def _online(name: str, method: str) -> Changes:
    """The teacher beside the student: its distributions are in no store."""
    return {
        **_teacher(name),
        "teacher.online": True,
        "store.path": None,
        "data.blocks": f"{OUT}/blocks/{'plain' if METHODS[method].one_vocabulary else 'text'}",
        "objective.method": method,
        "train.micro_batch": 4,  # room for the teacher
    }


_PLAIN: Changes = {
    "teacher.model": None,
    "store.path": None,
    "data.blocks": f"{OUT}/blocks/plain",
}
_KLD: Changes = {"objective.kl_direction": "reverse", "objective.distill_weight": 1.0}


def _rows() -> Iterator[Row]:
    yield Row(
        name="cpt",
        shows="table 1",
        about="continual pretraining on every token",
        changes={**_PLAIN, "objective.method": "cpt"},
    )
    for name in SAME_VOCABULARY:
        yield Row(
            name=f"kld-{name}",
            shows="table 1",
            about=f"cross entropy + KL as printed in equation 5; {TEACHERS[name].label}",
            changes={**_online(name, "kld"), **_KLD},
            after=TEACHERS[name].after,
        )
    for name in OTHER_VOCABULARY:
        yield Row(
            name=f"uld-{name}",
            shows="table 1",
            about=f"ULD, lambda 0.5, paired by index as its authors do; {TEACHERS[name].label}",
            changes={**_online(name, "uld"), "objective.pairing": "index"},
        )
    for name, teacher in TEACHERS.items():
        yield Row(
            name=f"guided-{name}",
            shows="table 1, table 4, figure 5" if name in OTHER_VOCABULARY else "table 1, figure 5",
            about=f"guided, 40 %; {teacher.label}",
            changes=_stored(name),
            after=teacher.after,
        )
    yield from _rho1()
    for method in ("random", "no_teacher"):
        yield Row(
            name=method.replace("_", "-"),
            shows="control",
            about="40 % at random"
            if method == "random"
            else "40 % of highest student loss, no teacher",
            changes={**_PLAIN, "objective.method": method},
        )
    yield from _short_runs()


def _rho1() -> Iterator[Row]:
    """Rho-1 as in its paper (arXiv 2404.07965): a reference of the student's architecture, trained
    on good data; 60 % kept by excess loss, with the reference's entropy as a second criterion."""
    yield Row(
        name="rho1-reference",
        shows="Rho-1",
        about="the reference model: continual pretraining on refined pages; put better data here",
        changes={
            **_PLAIN,
            "corpus.files": ["gair-prox/open-web-math-pro"],
            "data.blocks": f"{OUT}/blocks/rho1-reference",
            "objective.method": "cpt",
            "optimizer.learning_rate": 5.0e-5,
            "optimizer.min_learning_rate": 5.0e-6,
            "train.tokens": 1_500_000_000,
        },
    )
    yield Row(
        name="rho1",
        shows="Rho-1",
        about="60 % by excess over the reference, among the 80 % where it is surest",
        changes={
            **_online("tinyllama-cpt", "rho1"),
            "teacher.model": f"{OUT}/runs/rho1-reference/model",
            "objective.keep": 0.6,
            "objective.entropy_keep": 0.8,
        },
        after="rho1-reference",
    )


def _short_runs() -> Iterator[Row]:
    billions = 1_000_000_000
    tokens = {"train.tokens": 5 * billions}
    where = "table 2, figure 6"
    yield Row(
        name="table2-cpt",
        shows=where,
        about="continual pretraining, 5B tokens",
        changes={**_PLAIN, **tokens, "objective.method": "cpt"},
    )
    yield Row(
        name="table2-guided",
        shows=where,
        about="token level, Mistral-ProXMath, 5B tokens",
        changes={**_stored("mistral-proxmath"), **tokens},
    )
    for chunks in (8, 16, 32, 64):
        yield Row(
            name=f"table2-chunk-{chunks}",
            shows=where,
            about=f"{chunks} chunks, chosen by Mistral-ProXMath, 5B tokens",
            changes={
                **_stored("mistral-proxmath", "chunk", suffix="-losses"),
                **tokens,
                "objective.n_chunks": chunks,
            },
        )
        yield Row(
            name=f"table2-random-chunk-{chunks}",
            shows=where,
            about=f"{chunks} chunks, chosen by chance, 5B tokens",
            changes={
                **_PLAIN,
                **tokens,
                "objective.method": "chunk",
                "objective.chunk_choice": "random",
                "objective.n_chunks": chunks,
            },
        )
    tokens = {"train.tokens": 2 * billions}
    teacher = "qwen2.5-math-instruct"
    for name, changes in {
        "include-max": {},
        "exclude": {"objective.unmapped": "exclude"},
        "unmapped-mean": {
            "objective.unmapped": "mean",
            "data.blocks": f"{OUT}/blocks/{teacher}-losses",
        },
        "mean": {
            "objective.aggregation": "mean",
            "data.blocks": f"{OUT}/blocks/{teacher}-mean",
        },
        "sum": {"objective.aggregation": "sum", "data.blocks": f"{OUT}/blocks/{teacher}-sum"},
    }.items():
        yield Row(
            name=f"table3-{name}",
            shows="table 3",
            about=f"{name.replace('-', ', ')}: unmapped tokens, several teacher tokens; 2B tokens",
            changes={**_stored(teacher), **tokens, **changes},
        )
    for keep in (0.4, 0.5, 0.6, 0.7, 0.8):
        yield Row(
            name=f"figure7-keep-{keep}",
            shows="figure 7",
            about=f"{keep:.0%} kept, 2B tokens",
            changes={**_stored(teacher), **tokens, "objective.keep": keep},
        )
    for weight in (0.3, 0.5, 1.0, 1.5):
        yield Row(
            name=f"uld-lambda-{weight}",
            shows="search of lambda",
            about=f"ULD with lambda {weight}, 2B tokens",
            changes={
                **_online(teacher, "uld"),
                **tokens,
                "objective.pairing": "index",
                "objective.distill_weight": weight,
            },
        )


def paper_rows() -> dict[str, Row]:
    """All rows by name; each run has a folder of its own."""
    rows = {}
    for row in _rows():
        changes = {"run.folder": f"{OUT}/runs/{row.name}", **row.changes}
        rows[row.name] = Row(
            name=row.name, shows=row.shows, about=row.about, changes=changes, after=row.after
        )
    return rows
