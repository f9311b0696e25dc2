"""Where a batch's time goes, by kind of work: from torch's profiler, by the shapes of the products
and the names of the kernels. On a CPU, where there are no kernels, by the operations themselves."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from measure import synchronise
from profile_kinds import ATTENTION, GAPS, covered, kind_of
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# operations that multiply, and at which of their inputs the two factors begin
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "aten::is_nonzero")


def weights_by_shape(model: nn.Module) -> dict[tuple[int, ...], str]:
    """(inputs, outputs) of every linear layer -> what it belongs to."""
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and "embed" not in name:
            kind = "attention projections" if "attn" in name else "MLP" if "mlp" in name else "head"
            found[tuple(reversed(weight.shape))] = kind
    return found


def profiled(
    call: Callable[[], Any],
    model: nn.Module,
    *,
    peak: float,
    attention_flops: float,
) -> list[dict[str, Any]]:
    """Rows by kind: milliseconds, share of the time from the first kernel to the last, operations a
    second, and the time beyond what the matmul peak would need."""
    call()
    synchronise()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as found:
        call()
        synchronise()
    events = [e for e in found.events() or () if not _is_region(e)]
    seconds, flops = _by_kind(events, weights_by_shape(model))
    flops[ATTENTION] = attention_flops
    kernels = [e for e in events if e.device_type == DeviceType.CUDA]
    busy, span = _busy_and_span(kernels) if kernels else (sum(seconds.values()),) * 2
    seconds[GAPS] = span - busy
    rows = []
    for kind, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        row: dict[str, Any] = {"kind": kind, "ms": 1e3 * spent, "share of time": spent / span}
        if flops.get(kind):
            row["TFLOP/s"] = flops[kind] / spent / 1e12
        row["ms beyond the peak"] = 1e3 * (spent - flops.get(kind, 0.0) / peak)
        rows.append(row)
    waits = sum(e.name in WAITS for e in events)
    rows.append({"kind": "all", "ms": 1e3 * span, "share of time": 1.0, "host waits": waits})
    return rows


def _by_kind(
    events: list[Any], weights: dict[tuple[int, ...], str]
) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds, operations) of every kind."""
    seconds: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    taken = set()  # kernels whose operation told their kind
    on_device = any(e.device_type == DeviceType.CUDA for e in events)
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        kind = None
        if event.name in PRODUCTS and event.input_shapes:
            first = PRODUCTS[event.name]
            (m, k), (_, n) = event.input_shapes[first : first + 2]
            kind = weights.get((k, n), "other products")
            flops[kind] += 2.0 * m * k * n
        elif not on_device:
            kind = kind_of(event.name)
        if kind is None:
            continue
        if on_device:
            taken |= {kernel.name for kernel in event.kernels}
            seconds[kind] += sum(kernel.duration for kernel in event.kernels) / 1e6
        else:
            seconds[kind] += event.self_cpu_time_total / 1e6
    for event in events:
        if event.device_type == DeviceType.CUDA and event.name not in taken:
            seconds[kind_of(event.name)] += event.time_range.elapsed_us() / 1e6
    return seconds, flops


def _is_region(event: Any) -> bool:
    """Compiled graphs and the like, which lie over the kernels that they launch."""
    names = ("##", "Torch-Compiled", "ProfilerStep")
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(names)


def _busy_and_span(kernels: list[Any]) -> tuple[float, float]:
    """Seconds in which some kernel ran, and from the first to the last."""
    pieces = [(e.time_range.start, e.time_range.end) for e in kernels]
    span = max(end for _, end in pieces) - min(start for start, _ in pieces)
    return covered(pieces) / 1e6, span / 1e6
