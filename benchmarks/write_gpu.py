"""How fast a model writes on a GPU: our decoder beside transformers' `generate`, in one run.

    python benchmarks/write_gpu.py [--seconds 300] [--smoke]

Random weights in the shape of Qwen2.5-1.5B, prompts of 150 to 300 tokens, 128 new ones at
temperature 0.7, nothing ends by itself. Counted are new tokens over the time of a whole set of
prompts, reading them included. `--smoke` runs a tiny model on a CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from vocagnolm.generate import Decoder, PromptTokens, Sampling

NEW_TOKENS, TEMPERATURE, SAMPLES = 128, 0.7, 4
SHAPE: dict[str, Any] = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def made_up_model(shape: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    config: Any = Qwen2Config(**shape, tie_word_embeddings=True, dtype=torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


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


def measured(name: str, work: Callable[[], int], about: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    tokens = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    row = {"name": name, **about, "tokens": tokens, "seconds": round(seconds, 2)}
    row |= {"tokens_per_second": round(tokens / seconds), "peak_gib": round(peak, 1)}
    print(json.dumps(row), flush=True)


def ours(model: Any, answers: int, samples: int, rows: int, alternatives: int, new: int) -> None:
    vocabulary = model.config.vocab_size
    decoder = Decoder(
        model,
        ends=[],
        known=vocabulary,
        sampling=Sampling(TEMPERATURE),
        alternatives=alternatives,
        compiled=torch.cuda.is_available(),
    )
    assert decoder.by_rows
    prompts = prompts_of(answers // samples, vocabulary, samples, new)

    def work() -> int:
        return sum(len(a.tokens.ids) for a in decoder.answers(prompts, rows=rows, slot_tokens=512))

    about = {"rows": rows, "samples": samples, "alternatives": alternatives, "answers": answers}
    measured("first", work, about)  # compiles, captures
    measured("vocagnolm", work, about)
    decoder.close()
    torch.cuda.empty_cache()


def theirs(model: Any, batch: int, new: int) -> None:
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

    measured("generate", work, {"rows": batch, "samples": 1, "alternatives": 0, "answers": batch})
    torch.cuda.empty_cache()


def profile(model: Any, rows: int) -> None:
    """Where the time of a step goes: the longest kernels, in milliseconds a step."""
    from torch.profiler import ProfilerActivity, profile

    decoder = Decoder(
        model, ends=[], known=model.config.vocab_size, sampling=Sampling(TEMPERATURE),
        alternatives=16, compiled=True,
    )  # fmt: skip
    prompts = prompts_of(rows // SAMPLES, model.config.vocab_size, SAMPLES, 48)
    list(decoder.answers(prompts, rows=rows, slot_tokens=512))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        list(decoder.answers(prompts, rows=rows, slot_tokens=512))
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:22]
    total = sum(e.self_device_time_total for e in found.key_averages())
    print(f"device time of {rows} answers of 48 tokens: {total / 1e6:.3f} s")
    for event in events:
        share = event.self_device_time_total / total
        print(
            f"{share:6.1%} {event.self_device_time_total / 1e3:9.1f} ms "
            f"{event.count:6} {event.key[:90]}"
        )
    decoder.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one setting of ours alone")
    options = parser.parse_args()
    if options.smoke:
        model = made_up_model(SMALL, "cpu").float()
        ours(model, 8, 4, 16, 4, 4)
        theirs(model, 2, 4)
        return
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    model = made_up_model(SHAPE, "cuda")
    if options.profile:
        profile(model, 768)
        return
    for rows, samples, alternatives in (
        [(768, 4, 16)]
        if options.quick
        else [(768, 4, 0), (768, 4, 16), (768, 1, 16), (512, 4, 16), (1024, 4, 16)]
    ):
        ours(model, 3 * rows, samples, rows, alternatives, NEW_TOKENS)
    if not options.quick:
        for batch in (128, 512, 1024):
            theirs(model, batch, NEW_TOKENS)


if __name__ == "__main__":
    main()
