"""ULD's distance by counting beside sorting: time, memory, error. One GPU, under a minute.

    PYTHONPATH=src python benchmarks/uld_gpu.py [--json [FILE]] [--smoke]

The distance and its gradient for one chunk of tokens, for a student and a teacher of the study and
of the paper. The gradient by the student's logits by counting, against that by sorting, over
distributions from flat to nearly certain: the error depends on them, and most on single rows where
both models are sure of one token.
"""

from collections.abc import Callable
from typing import Any

import torch
from measure import arguments, clean, peak_gib, report, side_by_side

from vocagnolm.objective.distill import by_counting, by_sorting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = {"SmolLM2 x Qwen2.5": (49152, 151936), "TinyLlama x Qwen2.5-Math": (32000, 152064)}
TOKENS = 128  # what one chunk of the objective holds
SHAPES = {"flat": (2, 0), "likely candidates": (3, 12), "few candidates": (2, 5), "sure": (1, 15)}
"""Name -> spread of normal logits, and what five of them have more."""


def probabilities(
    tokens: int, rows: int, seed: int, shape: str = "likely candidates"
) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    spread, more = SHAPES[shape]
    z = spread * torch.randn(tokens, rows, device=DEVICE, generator=generator)
    z[:, :5] += more
    return torch.softmax(z, -1)


def by_logits(p: torch.Tensor, by_p: torch.Tensor) -> torch.Tensor:
    return (by_p - (by_p * p).sum(-1, keepdim=True)) * p


def errors(rows: tuple[int, int], tokens: int, shape: str) -> dict[str, Any]:
    p, q = (probabilities(tokens, size, seed, shape) for seed, size in enumerate(rows))
    (exact, exact_by_p), (distance, by_p) = by_sorting(p, q), by_counting(p, q)
    right, found = by_logits(p, exact_by_p), by_logits(p, by_p)
    off = (found - right).norm(dim=-1) / right.norm(dim=-1)
    return {
        "rows": f"{rows[0]} x {rows[1]}",
        "distributions": shape,
        "distance off": float((distance - exact).abs().max()),
        "gradient off, mean": float(off.mean()),
        "gradient off, worst row": float(off.max()),
        "least cosine": float(torch.cosine_similarity(found, right).min()),
    }


def measured(name: str, rows: tuple[int, int], tokens: int) -> dict[str, Any]:
    p, q = (probabilities(tokens, size, seed) for seed, size in enumerate(rows))
    calls: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "sort": lambda: by_sorting(p, q),
        "count": lambda: by_counting(p, q),
    }
    times = side_by_side({**calls}, rounds=10)
    return {
        "pair": name,
        **{f"{call} us/token": 1e3 * ms / tokens for call, ms in times.items()},
        "ratio": times["count"] / times["sort"],
        **{f"{call} GiB": peak_gib(run) for call, run in calls.items()},
    }


def main() -> None:
    given = arguments(__doc__)
    tokens = 8 if given.smoke else TOKENS
    rows = []
    for name, sizes in PAIRS.items():
        clean()
        rows.append(measured(name, sizes, tokens))
    report(f"ULD's distance, chunks of {tokens} tokens", rows, as_json=given.json)
    found = [errors(sizes, 4 * tokens, shape) for sizes in PAIRS.values() for shape in SHAPES]
    report(f"Counting against sorting, {4 * tokens} tokens", found, as_json=given.json)


if __name__ == "__main__":
    main()
