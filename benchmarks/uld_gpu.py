"""ULD's distance by counting beside sorting: time, memory, error. One GPU, under a minute.

    PYTHONPATH=src python benchmarks/uld_gpu.py [--json] [--smoke]

The distance and its gradient for one chunk of tokens, from probabilities like those of two trained
models, for a student and a teacher of the study and of the paper.
"""

from collections.abc import Callable
from typing import Any

import torch
from measure import arguments, clean, peak_gib, report, side_by_side

from vocagnolm.objective.distill import by_counting, by_sorting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = {"SmolLM2 x Qwen2.5": (49152, 151936), "TinyLlama x Qwen2.5-Math": (32000, 152064)}
TOKENS = 128  # what one chunk of the objective holds


def probabilities(tokens: int, rows: int, seed: int) -> torch.Tensor:
    """Logits with a normal spread of 3 and a few likely candidates."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    z = 3 * torch.randn(tokens, rows, device=DEVICE, generator=generator)
    z[:, :5] += 12
    return torch.softmax(z, -1)


def measured(name: str, rows: tuple[int, int], tokens: int) -> dict[str, Any]:
    p, q = (probabilities(tokens, size, seed) for seed, size in enumerate(rows))
    calls: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "sort": lambda: by_sorting(p, q),
        "count": lambda: by_counting(p, q),
    }
    times = side_by_side({**calls}, rounds=10)
    (exact, exact_by_p), (distance, by_p) = (call() for call in calls.values())
    wrong = (p * (by_p - exact_by_p).abs()).sum(-1) / (p * exact_by_p.abs()).sum(-1)
    return {
        "pair": name,
        **{f"{call} us/token": 1e3 * ms / tokens for call, ms in times.items()},
        "ratio": times["count"] / times["sort"],
        **{f"{call} GiB": peak_gib(run) for call, run in calls.items()},
        "largest error": float((distance - exact).abs().max()),
        "gradient changed": float(wrong.mean()),
    }


def main() -> None:
    given = arguments(__doc__)
    tokens = 8 if given.smoke else TOKENS
    rows = []
    for name, sizes in PAIRS.items():
        clean()
        rows.append(measured(name, sizes, tokens))
    report(f"ULD's distance, chunks of {tokens} tokens", rows, as_json=given.json)


if __name__ == "__main__":
    main()
