"""The training objective: the guided loss, its baselines and its controls, as pure tensor
functions.

    targets = Targets(labels_BT=labels, guidance_BT=guidance)
    output = objective_loss(hidden_BTD, Head(weight=...), targets, ObjectiveConfig())
    output.loss.backward()

`objective_loss` is the entry point. For scope global over accumulation steps, use the two-pass form
`student_nll` -> `weigh_step` -> `objective_loss(..., decided=Decided(...))`.
"""

from typing import Any

from vocagnolm.errors import ObjectiveError
from vocagnolm.objective.distill import DISTANCES, Teacher
from vocagnolm.objective.head import IGNORE_INDEX, Head, Implementation
from vocagnolm.objective.loss import (
    COLUMNS,
    Decided,
    ObjectiveOutput,
    count_items,
    guided_loss,
    objective_loss,
    student_nll,
    token_losses,
)
from vocagnolm.objective.on_policy import BUCKETS
from vocagnolm.objective.selection import (
    RANKINGS,
    WEIGHTINGS,
    Counts,
    ScoredBatch,
    StepWeights,
    Targets,
    count_kept,
    select,
    weigh_step,
)
from vocagnolm.recipe.methods import CHOOSABLE_WEIGHTINGS, DIVERGENCES, METHODS
from vocagnolm.recipe.sections import ObjectiveConfig, Pairing

__all__ = [
    "COLUMNS",
    "IGNORE_INDEX",
    "Counts",
    "Decided",
    "Head",
    "Implementation",
    "ObjectiveConfig",
    "ObjectiveError",
    "ObjectiveOutput",
    "Pairing",
    "ScoredBatch",
    "StepWeights",
    "Targets",
    "Teacher",
    "count_items",
    "count_kept",
    "guided_loss",
    "objective_loss",
    "select",
    "student_nll",
    "token_losses",
    "weigh_step",
]


def check_tables() -> None:
    """Refuse a method or a weighting that is named and does nothing."""
    tables: dict[str, dict[str, Any]] = {
        "ranking": RANKINGS,
        "weighting": WEIGHTINGS,
        "distance": DISTANCES,
    }
    named = [
        (f"method {name}", getattr(method, field), table)
        for name, method in METHODS.items()
        for field, table in tables.items()
    ]
    graded = [name for name in CHOOSABLE_WEIGHTINGS if name != "top_k"]  # which is a choice
    named += [("objective.weighting", name, WEIGHTINGS) for name in graded]
    for name, row in DIVERGENCES.items():
        divergence = f"divergence {name}"
        named += [(divergence, row.weighting, WEIGHTINGS)]
        named += [(divergence, name, BUCKETS)] if row.bucket else []
    for who, key, table in named:
        if key is not None and key not in table:
            raise LookupError(f"{who} names '{key}', and there are only: {', '.join(table)}")


check_tables()
