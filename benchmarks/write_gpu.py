"""How fast a model writes on a GPU: our decoder beside transformers' `generate`, in one run.

    PYTHONPATH=src python benchmarks/write_gpu.py [--quick] [--profile] [--json [FILE]] [--smoke]

Random weights in the shape of Qwen2.5-1.5B, prompts of 150 to 300 tokens, 128 new ones at
temperature 0.7, nothing ends by itself. Counted are new tokens over the time of a whole set of
prompts, reading them included; `first` compiles and captures. --quick measures one setting of ours
alone, --profile shows where the time of a step goes. Five minutes.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import GIB, arguments, clean, report, synchronise
from shapes import CUDA, random_teacher

from vocagnolm.generate import Decoder, PromptTokens, Sampling

NEW_TOKENS, TEMPERATURE, SAMPLES = 128, 0.7, 4
Rows = list[dict[str, Any]]


def prompts_of(count: int, vocabulary: int, samples: int, new: int) -> list[PromptTokens]:
    random = np.random.default_rng(0)
    return [
        PromptTokens(
            random.integers(5, vocabulary - 5, int(random.integers(150, 301))).tolist(),
            tuple(n * 1_000_003 + m * 10_007 for m in range(samples)),
            new,
        )
        for n in range(count)
    ]


def measured(name: str, work: Callable[[], int], about: dict[str, Any]) -> dict[str, Any]:
    synchronise()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    tokens = work()
    synchronise()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / GIB if CUDA else 0.0
    rate = {"tokens": tokens, "seconds": seconds, "tokens/s": tokens / seconds, "peak GiB": peak}
    row = {"writing": name, **about, **rate}
    print(json.dumps(row), file=sys.stderr, flush=True)  # a session may end before the table
    return row


def ours(model: Any, answers: int, samples: int, rows: int, alternatives: int, new: int) -> Rows:
    vocabulary = model.config.vocab_size
    decoder = Decoder(
        model,
        ends=[],
        known=vocabulary,
        sampling=Sampling(TEMPERATURE),
        alternatives=alternatives,
        compiled=CUDA,
    )
    assert decoder.by_rows
    prompts = prompts_of(answers // samples, vocabulary, samples, new)

    def work() -> int:
        return sum(len(a.tokens.ids) for a in decoder.answers(prompts, rows=rows, slot_tokens=512))

    about = {"rows": rows, "samples": samples, "alternatives": alternatives, "answers": answers}
    table = [measured(name, work, about) for name in ("vocagnolm, first", "vocagnolm")]
    decoder.close()
    clean()
    return table


def theirs(model: Any, batch: int, new: int) -> Rows:
    prompts = prompts_of(batch, model.config.vocab_size, 1, new)
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p.ids)) + list(p.ids) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts])
    ids, mask = ids.to(model.device), mask.to(model.device)

    def work() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        return int((out.shape[1] - width) * batch)

    about = {"rows": batch, "samples": 1, "alternatives": 0, "answers": batch}
    row = measured("generate", work, about)
    clean()
    return [row]


def profile(model: Any, rows: int) -> Rows:
    """The kernels that take most of a step, by their share of the device's time."""
    from torch.profiler import ProfilerActivity, profile

    decoder = Decoder(
        model,
        ends=[],
        known=model.config.vocab_size,
        sampling=Sampling(TEMPERATURE),
        alternatives=16,
        compiled=True,
    )
    prompts = prompts_of(rows // SAMPLES, model.config.vocab_size, SAMPLES, 48)
    list(decoder.answers(prompts, rows=rows, slot_tokens=512))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        list(decoder.answers(prompts, rows=rows, slot_tokens=512))
    decoder.close()
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    return [
        {
            "kernel": event.key[:90],
            "ms": event.self_device_time_total / 1e3,
            "share": event.self_device_time_total / total,
            "calls": event.count,
        }
        for event in events[:22]
    ]


Settings = tuple[tuple[int, int, int], ...]
"""Rows, answers to a prompt, alternatives."""
MAIN: Settings = ((768, 4, 0), (768, 4, 16))
OTHERS: Settings = ((768, 1, 16), (512, 4, 16), (1024, 4, 16))
BATCHES = (1024, 512, 128)


def main() -> None:
    given = arguments(
        __doc__,
        quick={"action": "store_true", "help": "one setting of ours alone"},
        profile={"action": "store_true", "help": "where the time of a step goes, and no more"},
    )
    model = random_teacher("qwen2.5-1.5b", given.smoke, vocabulary=512)
    device = torch.cuda.get_device_name() if CUDA else "smoke"
    if given.profile:
        report(
            f"kernels of writing 768 answers of 48 tokens, {device}",
            profile(model, 768),
            given.json,
        )
        return
    table: Rows = []
    settings: Settings
    batches: tuple[int, ...]
    if given.smoke:
        table = ours(model, 8, 4, 16, 4, 4) + theirs(model, 2, 4)
        settings, batches = (), ()
    elif given.quick:
        settings, batches = MAIN[1:], ()
    else:
        settings, batches = MAIN + OTHERS, BATCHES
    for number, (rows, samples, alternatives) in enumerate(settings):
        table += ours(model, 3 * rows, samples, rows, alternatives, NEW_TOKENS)
        if number == len(MAIN) - 1:
            for batch in batches:
                table += theirs(model, batch, NEW_TOKENS)
    report(f"writing, {device}", table, given.json)


if __name__ == "__main__":
    main()
