"""A trace of torch.profiler, taken apart by kinds of work. No torch here: traces are JSON."""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

HEAD_1, HEAD_2, CLIPPING, DATA = "head, phase 1", "head, phase 2", "gradient clipping", "data"
"""Ranges (`record_function`) whose kernels are of their kind, whatever their names are."""
HEAD_ROWS = "head, row kernels"
OPTIMIZER = "optimizer"
MATMULS, ATTENTION = "matmuls", "attention"
COPIES, ELEMENTWISE = "casts and copies", "norms, element-wise"
GAPS = "gaps"
KINDS = (
    *(MATMULS, ATTENTION, HEAD_1, HEAD_2, HEAD_ROWS, ELEMENTWISE, COPIES),
    *(OPTIMIZER, CLIPPING, DATA, GAPS),
)

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
# The first that is found counts: attention's kernels are products too, and fused ones have copies
# in their names.
_NAMES = (
    (HEAD_ROWS, r"^_losses_kernel|^_gradient_kernel"),
    (ATTENTION, r"flash|fmha|sdpa|attention|_attn"),
    (OPTIMIZER, r"adam|multi_tensor_apply.*(lamb|sgd)|FusedOptimizer"),
    (CLIPPING, r"LpNorm|foreach_norm|clip_grad|linalg_vector_norm"),
    (MATMULS, r"gemm|cutlass|nvjet|xmma|cublas|wgmma|splitk|_mm\b|aten::(add|b|baddb)?mm$|matmul"),
    (DATA, r"Memcpy HtoD|Memcpy DtoH|_local_scalar_dense|aten::item$"),
    (COPIES, r"memcpy|memset|copy|CatArray|aten::(cat|_to_copy|to|clone|contiguous)$"),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES)


def kind_of(name: str, ranges: Iterable[str] = ()) -> str:
    """Of a kernel, or of an operator on a CPU, that was started inside of these ranges."""
    if _PATTERNS[0][1].search(name):
        return HEAD_ROWS
    for inside in ranges:
        if inside in (HEAD_1, HEAD_2, CLIPPING, DATA):
            return inside
        if inside.startswith("Optimizer.step"):
            return OPTIMIZER
    if name.startswith("triton_") and "attention" not in name:
        # templates multiply; others are only named after the product that they round or cast for
        return MATMULS if name.startswith("triton_tem") else ELEMENTWISE
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), ELEMENTWISE)


@dataclass
class Taken:
    """Milliseconds of a kind, and the names that took most of them."""

    milliseconds: float = 0.0
    names: Counter[str] = field(default_factory=Counter)


def by_kind(trace: dict[str, Any]) -> tuple[dict[str, Taken], float]:
    """Milliseconds by kind, gaps among them, and of all from the first piece of work to the last.
    On a device those of its kernels, without one those of the operators themselves."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    ranges = _Ranges(e for e in events if e.get("cat") == "user_annotation")
    kernels = [e for e in events if e.get("cat") in _DEVICE]
    if kernels:
        launches = {
            e["args"]["correlation"]: e
            for e in events
            if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
        }
        work = []
        for kernel in kernels:
            launch = launches.get(kernel.get("args", {}).get("correlation"))
            inside = ranges.around(launch) if launch else []
            work.append((kernel, kernel["dur"], inside))
    else:
        operators = [e for e in events if e.get("cat") == "cpu_op"]
        work = [(event, length, ranges.around(event)) for event, length in _own_times(operators)]
    found: dict[str, Taken] = {kind: Taken() for kind in KINDS}
    for event, length, inside in work:
        kind = kind_of(event["name"], inside)
        found[kind].milliseconds += length / 1e3
        found[kind].names[event["name"]] += length
    if not work:
        return found, 0.0
    pieces = [(event["ts"], event["ts"] + event["dur"]) for event, _, _ in work]
    whole = max(stop for _, stop in pieces) - min(start for start, _ in pieces)
    found[GAPS].milliseconds = (whole - covered(pieces)) / 1e3
    return found, whole / 1e3


class _Ranges:
    """Annotations of the host, by thread: which of them are open at a moment."""

    def __init__(self, events: Iterable[dict[str, Any]]):
        self._threads: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            stop = event["ts"] + event["dur"]
            self._threads[event["tid"]].append((event["ts"], stop, event["name"]))
        for thread in self._threads.values():
            thread.sort()

    def around(self, event: dict[str, Any]) -> list[str]:
        """The innermost first."""
        thread = self._threads.get(event["tid"], [])
        behind = bisect_right(thread, (event["ts"], float("inf"), ""))
        return [name for _, stop, name in reversed(thread[:behind]) if stop >= event["ts"]]


def _own_times(operators: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], float]]:
    """Operators call operators: (operator, microseconds without those it calls)."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in operators:
        threads[event["tid"]].append(event)
    for events in threads.values():
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
        own = [event["dur"] for event in events]
        stack: list[int] = []
        for n, event in enumerate(events):
            while stack and event["ts"] >= events[stack[-1]]["ts"] + events[stack[-1]]["dur"]:
                stack.pop()
            if stack:
                own[stack[-1]] -= event["dur"]
            stack.append(n)
        for event, length in zip(events, own, strict=True):
            yield event, max(length, 0.0)


def covered(pieces: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(pieces):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def table(found: dict[str, Taken], whole: float, steps: int) -> list[dict[str, Any]]:
    rows = []
    for kind, taken in found.items():
        names = [f"{name[:60]}" for name, _ in taken.names.most_common(2)]
        rows.append(
            {
                "kind": kind,
                "ms a step": taken.milliseconds / steps,
                "share": taken.milliseconds / whole if whole else None,
                "most in": "; ".join(names),
            }
        )
    rows.append({"kind": "all", "ms a step": whole / steps, "share": 1.0})
    return rows
