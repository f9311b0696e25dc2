"""How a corpus is scored."""

from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.recipe.sections import ScoreSection, ServerSection

DEFAULT_CONTEXT = 2048
CUDA_BATCH_TOKENS = 16384
CPU_BATCH_TOKENS = 4096
SERVER_REQUEST_TOKENS = 16384
MOST_THREADS = 16
# Below this a stride gives hardly any context; an eighth of the window costs at most 1/7 more work.
STRIDE_SHARE = 8


class Server(ServerSection, frozen=True):
    """A server that has a teacher's weights, and how it is asked. The key, where it wants one, is
    in the environment of every process that asks."""

    url: str


class ScoreSettings(ScoreSection, frozen=True):
    """Settings of `vocagnolm score`. None means: chosen by model and device, and written down in
    the manifest."""

    @property
    def kept_alternatives(self) -> AlternativesSpec | None:
        return AlternativesSpec.parse(self.alternatives)
