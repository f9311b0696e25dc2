"""The training objective: guided loss, its baselines and its controls, as pure tensor functions.

    output = objective_loss(hidden_BTD, Head(weight=...), labels_BT, guidance_BT, ObjectiveConfig())
    output.loss.backward()

`objective_loss` is the door; the two-pass form for scope global over accumulation steps is
`student_nll` -> `select_step` -> `objective_loss(selected_BT=..., nll_BT=..., denominator=...)`.
"""

from vocagnolm.errors import ObjectiveError
from vocagnolm.objective.config import (
    IGNORE_INDEX,
    Head,
    Implementation,
    Method,
    ObjectiveConfig,
    ObjectiveOutput,
    Teacher,
)
from vocagnolm.objective.loss import objective_loss, student_nll, token_losses
from vocagnolm.objective.selection import ScoredBatch, StepSelection, select, select_step

__all__ = [
    "IGNORE_INDEX",
    "Head",
    "Implementation",
    "Method",
    "ObjectiveConfig",
    "ObjectiveError",
    "ObjectiveOutput",
    "ScoredBatch",
    "StepSelection",
    "Teacher",
    "objective_loss",
    "select",
    "select_step",
    "student_nll",
    "token_losses",
]
