"""A Ray cluster that scores: how it is reached, and what it has."""

import contextlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vocagnolm.errors import MissingExtraError, ScoreError
from vocagnolm.recipe.sections import RaySection
from vocagnolm.score.plan import Description, Plan, TeacherSource, describe
from vocagnolm.score.settings import ScoreSettings
from vocagnolm.score.work import Done, Progress

LOCAL = "local"
_LOCAL_OBJECT_STORE_BYTES = 100 * 2**20  # nothing but numbers of shards passes through it


class RayCluster(RaySection, frozen=True):
    """Where shards are scored, by one worker for every GPU, or on CPUs for every `threads` of
    them; with a server, for every CPU. Its workers are as many as the cluster has room for, also
    when it grows, where their number is not given."""

    address: str | None = None
    """As `ray.init` takes it: `auto`, `HOST:6379`. None: the cluster that RAY_ADDRESS names, else
    one on this machine, for this run."""

    @contextlib.contextmanager
    def connected(self) -> Iterator["Connection"]:
        """A connection that the caller's program already has is used and left alone."""
        ray = import_ray()
        ours = not ray.is_initialized()
        if ours:
            self._connect(ray)
        try:
            yield Connection(ray, self)
        finally:
            if ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = self.address or os.environ.get("RAY_ADDRESS") or LOCAL
        if address == LOCAL:
            options |= {
                "include_dashboard": False,
                "object_store_memory": _LOCAL_OBJECT_STORE_BYTES,
            }
        try:
            ray.init(address=address, **options)
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            raise ScoreError(
                f"no Ray cluster at {address}: {first_line(error)} Start one there with `ray start "
                "--head`, or leave the address out for a cluster on this machine."
            ) from None


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError("ray", "ray", "scoring on a Ray cluster") from None


class Connection:
    """A cluster that answers."""

    def __init__(self, ray: Any, cluster: RayCluster):
        self._ray = ray
        self._cluster = cluster

    def describe(self, source: TeacherSource, settings: ScoreSettings) -> Description:
        """The teacher as the workers will have it: a driver without a GPU asks one that has."""
        has_gpus = any(node.get("GPU") for node in self._nodes())
        here = settings.device == "cpu" or source.server is not None
        if here or not has_gpus or torch.cuda.is_available():
            return _describe(source, settings)
        return self.describe_there(source, settings, {"num_gpus": 1})

    def describe_there(
        self, source: TeacherSource, settings: ScoreSettings, resources: dict[str, float]
    ) -> Description:
        task = self._ray.remote(**resources)(_describe)
        try:
            found: Description = self._ray.get(
                task.remote(source.absolute(), settings), timeout=self._cluster.patience_seconds
            )
        except self._ray.exceptions.GetTimeoutError:
            raise ScoreError(
                f"no GPU of the cluster was free within {self._cluster.patience_seconds:.0f} s."
            ) from None
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return found

    def work_through(
        self,
        plan: Plan,
        numbers: list[int],
        digest: str | None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Done:
        """Score these shards; those that are set aside are an error in the end."""
        from vocagnolm.score.ray_driver import Crew

        assert digest is not None
        resources = worker_resources(plan.settings)
        crew = Crew(
            self._ray,
            plan,
            digest,
            resources=resources,
            room=lambda: self._room(resources),
            patience_seconds=self._cluster.patience_seconds,
            on_progress=on_progress,
        )
        return crew.work_through(numbers)

    def _room(self, resources: dict[str, float]) -> int:
        """How many workers there should be now. One is asked for in any case: there are clusters
        that grow when something is wanted of them."""
        if self._cluster.workers is not None:
            return self._cluster.workers
        name = "GPU" if "num_gpus" in resources else "CPU"
        needed = resources.get("num_gpus") or resources["num_cpus"]
        return max(1, sum(int(node.get(name, 0) // needed) for node in self._nodes()))

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]


def worker_resources(settings: ScoreSettings) -> dict[str, float]:
    """What a worker is given; `settings` have been chosen."""
    if settings.device == "cuda":
        return {"num_gpus": 1, "num_cpus": 1}
    assert settings.threads is not None
    return {"num_cpus": settings.threads}


def _describe(source: TeacherSource, settings: ScoreSettings) -> Description:
    return describe(source.open(settings), settings)


def first_line(error: BaseException) -> str:
    """An error of Ray's in a sentence; what it says of the cause, where it does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    said = (causes or lines or [type(error).__name__])[0]
    said = re.sub(r"^The actor [0-9a-f]+ is unavailable: ", "", said)
    return f"{said[:200].rstrip('.')}."
