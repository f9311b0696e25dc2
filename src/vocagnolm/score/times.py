"""Where the seconds of a run went."""

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds, one after the other: they add up to all that passed."""

    start: float = 0.0
    """Imports, opening the teacher, counting and hashing the corpus, looking at the store."""
    loading: float = 0.0
    """The weights, while the first shard is tokenised; on a cluster, until a worker scores."""
    compiling: float = 0.0
    scoring: float = 0.0
    """Reading and writing shards included."""
    finishing: float = 0.0
    """Waiting for other processes, writing the manifest, reading the store through."""

    @property
    def total(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))

    def with_earlier(self, seconds: float) -> "Times":
        """What passed before the run was called: the imports of a command."""
        return replace(self, start=self.start + seconds)

    def __str__(self) -> str:
        parts = (f"{field.name} {getattr(self, field.name):,.1f}" for field in fields(self))
        return f"seconds: {', '.join(parts)}; {self.total:,.1f} in all"
