"""Where the time goes: a training step by each method, and a batch of answers.

    PYTHONPATH=src python benchmarks/profile_gpu.py [--parts train uld generate] [--json] [--smoke]

The miniature study's sizes (SmolLM2-135M, Qwen2.5-1.5B as ULD's teacher) with random weights, its
batches, compiled layers, the trainer itself. For each part: seconds of wall time, the share of it
in which the GPU was busy, and the kernels that took most. One GPU, two minutes.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import arguments, clean, report, synchronise
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, TrainingArguments

from vocagnolm.objective import ObjectiveConfig
from vocagnolm.train import GuidedTrainer
from vocagnolm.train.online import OnlineTeacher
from vocagnolm.train.student import compile_layers

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 320, "hidden_size": 72, "intermediate_size": 48, "num_hidden_layers": 2}


def student(smoke: bool) -> Any:
    config = LlamaConfig(**{**SMOLLM2, **(TINY if smoke else {})})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def teacher(smoke: bool) -> Any:
    config = Qwen2Config(**{**QWEN, **(TINY if smoke else {})})
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if CUDA else torch.float32
        )


class Blocks:
    """Blocks of random tokens, with guidance or with a teacher's view of them."""

    def __init__(self, count: int, length: int, rows: int, teacher_rows: int | None):
        self.count, self.length, self.rows, self.teacher_rows = count, length, rows, teacher_rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        random = np.random.default_rng(number)
        n = self.length
        block: dict[str, Any] = {
            "input_ids": random.integers(0, self.rows, n),
            "guidance": random.random(n).astype(np.float32),
        }
        if self.teacher_rows is not None:
            place = np.arange(n) * 9 // 10
            block |= {
                "teacher_ids": random.integers(0, self.teacher_rows, n * 9 // 10 + 1),
                "teacher_document": np.zeros(n * 9 // 10 + 1, np.int64),
                "teacher_range": np.stack([place, place], 1),
                "teacher_same_start": random.random(n) < 0.9,
            }
        return block


def trainer(method: str, steps: int, smoke: bool) -> GuidedTrainer:
    config = ObjectiveConfig(method=method, keep=0.4)  # type: ignore[arg-type]
    model = student(smoke)
    if CUDA:
        compile_layers(model)
    online = OnlineTeacher(teacher(smoke), config=config) if method == "uld" else None
    rows = TINY["vocab_size"] if smoke else SMOLLM2["vocab_size"]
    teacher_rows = (TINY if smoke else QWEN)["vocab_size"] if online else None
    at_once = 2 if smoke else 8 if online else 16
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=1 if smoke else 32 // at_once,
        bf16=CUDA,
        use_cpu=not CUDA,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0 if smoke else 2,
    )
    data = Blocks(steps * 32, 32 if smoke else 1024, rows, teacher_rows)
    return GuidedTrainer(model, settings, objective=config, train_dataset=data, teacher=online)


def training(method: str, smoke: bool) -> dict[str, Any]:
    """Steps 4 and later: compilation and first allocations are over."""
    steps = 6 if method == "uld" else 12
    found: dict[str, Any] = {}
    one = trainer(method, steps, smoke)
    watch = _Watch(found)

    def on_step(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            watch.start()
        if record["step"] == steps:
            watch.stop(steps - 3)

    one.on_step = on_step
    one.train()
    return {"part": f"step, {method}", **found}


class _Watch:
    def __init__(self, found: dict[str, Any]):
        self.found = found

    def start(self) -> None:
        synchronise()
        kinds = [ProfilerActivity.CUDA] if CUDA else [ProfilerActivity.CPU]
        self.profiler = profile(activities=kinds)
        self.profiler.__enter__()
        self.began = time.perf_counter()

    def stop(self, times: int) -> None:
        synchronise()
        wall = time.perf_counter() - self.began
        self.profiler.__exit__(None, None, None)
        events = self.profiler.key_averages()
        busy = sum(e.self_device_time_total if CUDA else e.self_cpu_time_total for e in events)
        self.found.update({"ms": 1e3 * wall / times, "busy": busy / 1e6 / wall})
        top = sorted(events, key=lambda e: -(e.self_device_time_total or e.self_cpu_time_total))
        print(f"\n{1e3 * wall / times:.1f} ms, of which busy {busy / 1e3 / times:.1f} ms")
        for event in top[:16]:
            spent = event.self_device_time_total if CUDA else event.self_cpu_time_total
            print(f"{spent / 1e3 / times:9.2f} ms {event.count / times:8.1f} x  {event.key[:110]}")


def generation(smoke: bool) -> dict[str, Any]:
    """One pass over the question and 48 tokens, behind a shared prefix."""
    from vocagnolm.evaluate import prefix as shared

    model = student(smoke).to(DEVICE, torch.bfloat16 if CUDA else torch.float32).eval()
    rows, length, tokens = (4, 32, 4) if smoke else (2048, 900, 48)
    assert shared.enable_shared_prefix(model)
    found: dict[str, Any] = {}
    watch = _Watch(found)

    @torch.inference_mode()
    def run(times: int, look: Callable[[], None]) -> None:
        keys = shared.prefix_keys_and_values(model, list(range(length)))
        with shared.sharing(keys):
            cache = shared.new_cache(model, True)
            ids = torch.zeros(rows, 20 if smoke else 100, dtype=torch.long, device=DEVICE)
            for step in range(times):
                width = cache.get_seq_length() + ids.shape[1]
                mask = torch.ones(rows, width, dtype=torch.long, device=DEVICE)
                mask[:, :5] = 0
                places = torch.arange(width, device=DEVICE)[-ids.shape[1] :] + length
                logits = model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=places[None].expand(rows, -1),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                if step == 0:
                    look()

    began = time.perf_counter()
    run(2, lambda: None)
    synchronise()
    print(f"first pass with warm-up {time.perf_counter() - began:.2f} s")
    run(tokens + 1, watch.start)
    watch.stop(tokens)
    return {"part": f"token of {rows} answers", **found}


def main() -> None:
    given = arguments(
        __doc__,
        parts={"nargs": "*", "default": ["cpt", "guided", "uld", "generate"]},
    )
    found = []
    for part in given.parts:
        clean()
        began = time.perf_counter()
        one = generation(given.smoke) if part == "generate" else training(part, given.smoke)
        found.append({**one, "seconds with all around it": time.perf_counter() - began})
    report("Where the time goes", found, as_json=given.json)


if __name__ == "__main__":
    main()
