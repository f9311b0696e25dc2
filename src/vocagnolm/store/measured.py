"""Numbers of an identity that were measured, and that nobody measures twice to the last bit.

They stand there as `{"measured": [...], "tolerance": 0.05}`. Two runs that agree within the
tolerance have the values of the first: the rest of a store is compared by digests.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_DECIMALS = 4


def measured(values: Sequence[float], tolerance: float) -> dict[str, Any]:
    return {"tolerance": tolerance, "measured": [round(value, _DECIMALS) for value in values]}


def apart(found: Sequence[float], ours: Sequence[float]) -> float:
    """How far two measurements are from each other, on the mean of their values."""
    if len(found) != len(ours):
        return float("inf")
    pairs = zip(found, ours, strict=True)
    return sum(abs(a - b) for a, b in pairs) / max(1, len(found))


def with_values_of(found: Any, ours: Any) -> Any:
    """`ours`, with what `found` has measured wherever the two agree."""
    if not (isinstance(found, Mapping) and isinstance(ours, Mapping)):
        return ours
    if _is_measured(found) and _is_measured(ours):
        tolerance = ours["tolerance"]
        same = tolerance == found["tolerance"]
        near = same and apart(found["measured"], ours["measured"]) <= tolerance
        return found if near else ours
    return {key: with_values_of(found.get(key), value) for key, value in ours.items()}


def told(name: str, found: Any, ours: Any) -> str | None:
    """How far two measurements of the name are apart, in words; None: it is something else."""
    both = isinstance(found, list) and isinstance(ours, list)
    if not both or name.rpartition(".")[2] != "measured" or len(found) != len(ours):
        return None
    return f"{apart(found, ours):.3f} apart on the mean of {len(ours)} values, more than allowed"


def _is_measured(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("measured"), list) and "tolerance" in value
