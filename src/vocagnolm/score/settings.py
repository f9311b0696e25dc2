"""How a corpus is scored."""

from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.recipe.sections import ScoreSection

DEFAULT_CONTEXT = 2048
CUDA_BATCH_TOKENS = 16384
CPU_BATCH_TOKENS = 4096
MOST_THREADS = 16
# Below this a stride gives hardly any context; an eighth of the window costs at most 1/7 more work.
STRIDE_SHARE = 8


class ScoreSettings(ScoreSection, frozen=True):
    """Settings of `vocagnolm score`. None: chosen by model and device, and recorded in the
    manifest."""

    @property
    def kept_alternatives(self) -> AlternativesSpec | None:
        return AlternativesSpec.parse(self.alternatives)
