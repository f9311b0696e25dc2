"""What the speed benchmarks share: time, memory, tables."""

import argparse
import gc
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import STDOUT, add_json, keep, note_rounds, table_of
from torch import Tensor

from vocagnolm.objective import ObjectiveConfig, Targets

GIB = float(1 << 30)


def arguments(
    description: str | None, *, parts: Sequence[str] = (), **extra: dict[str, Any]
) -> argparse.Namespace:
    """--smoke, --json, --third-party and what a benchmark adds; one of `parts`, the first by
    default, as `part`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if parts:
        parser.add_argument("part", nargs="?", choices=parts, default=parts[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU")
    add_json(parser)
    parser.add_argument(
        "--third-party", type=Path, help="folder with unpacked wheels of the peers (liger, trl)"
    )
    for name, options in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), **options)
    given = parser.parse_args()
    if given.third_party:
        sys.path.insert(0, str(given.third_party))
    if not torch.cuda.is_available() and not given.smoke:
        parser.error("no CUDA device: use --smoke to try the script on a CPU")
    return given


def stored_targets(
    labels: Tensor,
    guidance: Tensor,
    config: ObjectiveConfig,
    vocabulary: int = 0,
    alternatives: int = 0,
) -> Targets:
    """The targets of a batch with stored losses; by stretch, about one token in seven goes on with
    the stretch of the one before it. `alternatives`: so many tokens beside each label."""
    if alternatives:
        shape = (*labels.shape, alternatives)
        p = torch.rand(shape, device=labels.device).sort(dim=-1, descending=True).values
        p = 0.8 * p / p.sum(-1, keepdim=True)
        ids = torch.randint(0, vocabulary, shape, device=labels.device, dtype=torch.int32)
        return Targets(
            labels_BT=labels, guidance_BT=guidance, soft_ids_BTK=ids, soft_p_BTK=p.half()
        )
    if not config.by_stretch:
        return Targets(labels_BT=labels, guidance_BT=guidance)
    begins = torch.rand(labels.shape, device=labels.device) < 0.85
    begins[:, 0] = False
    stretch = begins.long().cumsum(1)
    return Targets(labels_BT=labels, guidance_BT=guidance.gather(1, stretch), stretch_BT=stretch)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def milliseconds(call: Callable[[], Any]) -> float:
    """One call, on the device's own clock where there is one."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def side_by_side(
    calls: dict[str, Callable[[], Any]], *, rounds: int, warm_up: int = 2
) -> dict[str, float]:
    """Median milliseconds of each, taking turns: clocks and neighbours hit all alike."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    note_rounds(times)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_gib(call: Callable[[], Any]) -> float:
    """Device memory a call takes at its peak beyond what was held before; 0 on a CPU."""
    if not torch.cuda.is_available():
        call()
        return 0.0
    clean()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def large_product(size: int = 8192) -> tuple[Callable[[], Any], float]:
    """A bf16 product that fills the device, and its operations."""
    if not torch.cuda.is_available():
        size = 256
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a.t(), out=out), 2.0 * size**3


def matmul_peak() -> float:
    """bf16 operations a second this device reaches in one large product: the honest 100 %."""
    call, operations = large_product()
    return operations / (side_by_side({"mm": call}, rounds=20)["mm"] / 1e3)


def liger_cross_entropy() -> Callable[..., torch.Tensor] | None:
    """Liger's fused linear cross entropy as a function with keywords, if it can be imported."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction as Function,
        )
    except Exception as error:  # a peer that fails to load is reported, not fatal
        print(f"Liger is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    names = list(inspect.signature(Function.forward).parameters.values())[1:]

    def call(
        hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        unknown = set(options) - {p.name for p in names}
        assert not unknown, f"this Liger has no option {unknown}"
        rest = [options.get(p.name, p.default) for p in names[3:]]
        loss: torch.Tensor = Function.apply(hidden, weight, labels, *rest)[0]
        return loss

    return call


def report(title: str, rows: list[dict[str, Any]], as_json: str) -> None:
    """Print rows as a table and keep them; with --json and no file the table goes to stderr and the
    rows to stdout."""
    stream = sys.stderr if as_json == STDOUT else sys.stdout
    columns, cells = table_of(rows)
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    print(f"\n{title}", file=stream)
    for line in [columns, *cells]:
        print("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)), file=stream)
    keep(as_json, title, rows)
