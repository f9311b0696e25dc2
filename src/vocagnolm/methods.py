"""The methods of training: what each needs of a teacher, and what it is called. No torch.

A new method is a row here, its rule in `objective`, and nothing else.
"""

from dataclasses import dataclass
from typing import Literal

MethodName = Literal[
    "cpt", "guided", "distill", "random", "chunk", "rho1", "no_teacher", "kld", "uld", "alm"
]


@dataclass(frozen=True, kw_only=True)
class Method:
    label: str
    """One line for cards and tables."""
    selects: bool = False
    """Trains on some of the tokens."""
    guidance: bool = False
    """Reads one number per token from the teacher, out of a store or online."""
    by_excess: bool = False
    """Ranks tokens one by one by what their loss exceeds the teacher's."""
    alternatives: bool = False
    """Reads the tokens that the teacher finds likeliest, out of a store or online."""
    keep: float = 0.4
    """Share of the tokens that is kept where nothing else is said."""
    distribution: bool = False
    """Reads the teacher's whole distribution: the teacher is held online."""
    one_vocabulary: bool = False
    """Student and teacher must share it; an online teacher then reads the student's ids."""


METHODS: dict[MethodName, Method] = {
    "cpt": Method(label="plain continual pretraining on every token"),
    "guided": Method(
        label="training on the tokens whose loss exceeds the teacher's most (VocAgnoLM)",
        selects=True,
        guidance=True,
        by_excess=True,
    ),
    "distill": Method(
        label="distillation: training towards the tokens that the teacher finds likeliest",
        selects=True,
        guidance=True,
        by_excess=True,
        alternatives=True,
        keep=1.0,
    ),
    "random": Method(label="training on a random selection of tokens", selects=True),
    "chunk": Method(
        label="training on whole chunks of a sequence (coarse alignment)",
        selects=True,
        guidance=True,
    ),
    "rho1": Method(
        label="training on the tokens whose loss exceeds the reference model's most (Rho-1)",
        selects=True,
        guidance=True,
        by_excess=True,
        one_vocabulary=True,
    ),
    "no_teacher": Method(
        label="training on the tokens of highest student loss, without a teacher", selects=True
    ),
    "kld": Method(
        label="cross entropy plus Kullback-Leibler divergence of the two distributions",
        distribution=True,
        one_vocabulary=True,
    ),
    "uld": Method(
        label="cross entropy plus the Wasserstein distance of the sorted distributions (ULD)",
        distribution=True,
    ),
    "alm": Method(
        label="cross entropy plus the distance of the two probabilities of each stretch (ALM)",
        guidance=True,
    ),
}
