"""Where the seconds of a run went."""

from dataclasses import dataclass

from vocagnolm.times import Seconds


@dataclass(frozen=True, kw_only=True)
class Times(Seconds):
    start: float = 0.0
    """Imports, opening the teacher, counting and hashing the corpus, looking at the store."""
    loading: float = 0.0
    """The weights and a first pass through them, while the first shard is tokenised; on a cluster,
    until a worker scores."""
    compiling: float = 0.0
    scoring: float = 0.0
    """Reading and writing shards included."""
    finishing: float = 0.0
    """Waiting for other processes, writing the manifest, reading the store through."""
