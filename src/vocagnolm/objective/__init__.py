"""The training objective: guided loss, its baselines and its controls, as pure tensor functions.

    targets = Targets(labels_BT=labels, guidance_BT=guidance)
    output = objective_loss(hidden_BTD, Head(weight=...), targets, ObjectiveConfig())
    output.loss.backward()

`objective_loss` is the door; the two-pass form for scope global over accumulation steps is
`student_nll` -> `weigh_step` -> `objective_loss(..., decided=Decided(...))`.
"""

from vocagnolm.errors import ObjectiveError
from vocagnolm.objective.batch import IGNORE_INDEX, Decided, Targets, Teacher
from vocagnolm.objective.config import ObjectiveConfig, Pairing
from vocagnolm.objective.head import Head
from vocagnolm.objective.loss import objective_loss, student_nll, token_losses
from vocagnolm.objective.output import ObjectiveOutput
from vocagnolm.objective.rows import Implementation
from vocagnolm.objective.selection import Counts, ScoredBatch, count_kept, select
from vocagnolm.objective.weighting import StepWeights, weigh_step

__all__ = [
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
    "count_kept",
    "objective_loss",
    "select",
    "student_nll",
    "token_losses",
    "weigh_step",
]
