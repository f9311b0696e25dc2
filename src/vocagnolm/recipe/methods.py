"""The methods of training: what each needs of a teacher, and what it is called. No torch.

A method is a row of `METHODS`. A row names what the objective does, by keys of three tables:
`objective.selection.RANKINGS` (which tokens are kept), `objective.selection.WEIGHTINGS` (what each
counts) and `objective.distill.DISTANCES` (how far two distributions are apart). Everything else
asks the row; a row that names what is in no table is an error when `vocagnolm.objective` is
imported or the method is used.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Method:
    label: str
    """One line for cards and tables."""
    ranking: str | None = None
    """Trains on some of the tokens: those that this ranking puts first; None: on all."""
    unit: Literal["token", "chunk"] = "token"
    """What is ranked: tokens one by one (or their stretches), or whole chunks of a sequence."""
    weighting: str | None = None
    """Every token counts by this weighting, whatever `objective.weighting` says."""
    guidance: bool = False
    """Reads one number per token from the teacher, out of a store or online."""
    by_stretch: bool = False
    """Always compares whole stretches of text."""
    alternatives: bool = False
    """Reads the tokens that the teacher finds likeliest, out of a store or online."""
    keep: float = 0.4
    """Share of the tokens that is kept where nothing else is said."""
    distance: str | None = None
    """Adds this distance to the teacher's whole distribution: the teacher is held online."""
    one_vocabulary: bool = False
    """Student and teacher must share it; an online teacher then reads the student's ids."""
    entropy: bool = False
    """May also ask how sure the reference model is (`entropy_keep`)."""
    on_policy: bool = False
    """The student writes the answers that it is trained on, in the rounds of a recipe (`rounds`);
    what it is trained towards is a row of `DIVERGENCES`."""

    @property
    def selects(self) -> bool:
        return self.ranking is not None

    @property
    def by_excess(self) -> bool:
        """Ranks tokens one by one by what their loss exceeds the teacher's."""
        return self.ranking == "excess" and self.unit == "token"


METHODS: dict[str, Method] = {
    "cpt": Method(label="plain continual pretraining on every token"),
    "guided": Method(
        label="training on the tokens whose loss exceeds the teacher's most (VocAgnoLM)",
        ranking="excess",
        guidance=True,
    ),
    "distill": Method(
        label="distillation: training towards the tokens that the teacher finds most likely",
        ranking="excess",
        guidance=True,
        alternatives=True,
        keep=1.0,
    ),
    "random": Method(label="training on a random selection of tokens", ranking="chance"),
    "chunk": Method(
        label="training on whole chunks of a sequence (coarse alignment)",
        ranking="excess",
        unit="chunk",
        guidance=True,
    ),
    "rho1": Method(
        label="training on the tokens whose loss exceeds the reference model's most (Rho-1)",
        ranking="excess",
        guidance=True,
        one_vocabulary=True,
        entropy=True,
    ),
    "no_teacher": Method(
        label="training on the tokens of highest student loss, without a teacher", ranking="loss"
    ),
    "kld": Method(
        label="cross entropy plus Kullback-Leibler divergence of the two distributions",
        distance="kl",
        one_vocabulary=True,
    ),
    "uld": Method(
        label="cross entropy plus the Wasserstein distance of the sorted distributions (ULD)",
        distance="wasserstein",
    ),
    "alm": Method(
        label="cross entropy plus the distance of the two probabilities of each stretch (ALM)",
        guidance=True,
        by_stretch=True,
        weighting="likelihood",
    ),
    "on_policy": Method(
        label="on-policy distillation: the student writes, and the teacher reads its answers",
        on_policy=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """What `on_policy` minimizes."""

    label: str
    bucket: bool = False
    """Compares the two probabilities of the teacher's alternatives and of everything else together
    (`objective.on_policy.BUCKETS`)."""
    weighting: str | None = None
    """Weights the tokens that were drawn, stretch by stretch, by this row of `WEIGHTINGS`."""


DIVERGENCES: dict[str, Divergence] = {
    "forward": Divergence(label="KL(teacher || student) over the alternatives", bucket=True),
    "reverse": Divergence(label="KL(student || teacher) over the alternatives", bucket=True),
    "sampled_token": Divergence(
        label="KL(student || teacher), estimated by the tokens that were drawn",
        weighting="advantage",
    ),
}
CHOOSABLE_WEIGHTINGS: list[str] = ["top_k", "reducible"]
"""What `objective.weighting` may be: `top_k`, a choice among tokens, or a name of `WEIGHTINGS`."""


def chunk_bound(chunk: Any, length: int, n_chunks: int) -> Any:
    """Where a chunk of a sequence begins, and the one before it ends: `n_chunks` chunks whose
    lengths differ by at most one token. `chunk` is a number, or a NumPy array or tensor of them."""
    return chunk * length // n_chunks
