"""`vocagnolm train` beside Hugging Face Trainer with Liger, end to end: one GPU, four minutes.

    PYTHONPATH=src python benchmarks/train_gpu.py [--third-party DIR] [--shapes NAME,...]
        [--contestants NAME,...] [--steps 40] [--micro-batch N] [--compile-mode MODE]
        [--seconds 230] [--json [FILE]] [--smoke]

A 135M student of SmolLM2's shape at 32 x 2,048 tokens a step and TinyLlama at 8 x 2,048, both with
fp32 weights and bf16 autocast, fused AdamW, random weights read from a model folder and random ids
as blocks. Every contestant trains on the same blocks in a process of its own, with caches of its
own that are empty at its first start; its second start finds what the first one left. `steady` is
the rate behind the warm-up steps, `with start` that of the whole process, `first step` the seconds
from the start of the process to the end of its first step. Nothing is saved.

Rows are printed as they come in, the important ones first; what does not fit into --seconds is left
out. Targets: 1.5 x Hugging Face with Liger for the 135M student, 1.25 x for TinyLlama (steady), and
a second start of at most 15 s.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import GIB, arguments, report
from students import Shape, chosen_shapes, random_blocks, save_student

CUDA = torch.cuda.is_available()
WARM_UP = 10
"""Steps that the steady rate leaves out."""
SECOND_START_STEPS = 2


@dataclass(frozen=True)
class Contestant:
    ours: bool
    compiled: bool
    fp8: bool = False


CONTESTANTS = {
    "ours": Contestant(ours=True, compiled=True),
    "ours-fp8": Contestant(ours=True, compiled=True, fp8=True),
    "hf-liger": Contestant(ours=False, compiled=False),
    "hf-liger-compiled": Contestant(ours=False, compiled=True),
    "ours-eager": Contestant(ours=True, compiled=False),
}
"""In the order of their importance. Without a GPU there is no Liger: Trainer alone."""


# ---- in the contestant's process ----


def contest(task: dict[str, Any]) -> None:
    """Train, say when which step was done, and leave."""
    contestant = CONTESTANTS[task["contestant"]]
    (_train_ours if contestant.ours else _train_hf)(task, contestant)
    raise RuntimeError("training ended before its last step")


def _say(task: dict[str, Any], step: int) -> None:
    """Waits for the device at the steps that count, and nowhere else."""
    if step not in {1, min(WARM_UP, task["steps"]), task["steps"]}:
        return
    peak = 0.0
    if CUDA:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / GIB
    said = {"step": step, "seconds": time.time() - task["began"]}
    print(json.dumps({**said, "peak": peak}), flush=True)
    if step == task["steps"]:
        os._exit(0)  # saving the model is not measured


def _recipe(task: dict[str, Any], contestant: Contestant) -> Any:
    shape = Shape(**task["shape"])
    settings = {
        "optimizer": {"name": "adamw_torch_fused"},
        "train": {
            "tokens": task["steps"] * shape.step_tokens,
            "batch_blocks": shape.blocks,
            "micro_batch": task["micro_batch"],
            "compile": contestant.compiled,
            "dtype": ("fp8" if contestant.fp8 else "bfloat16") if CUDA else "float32",
        },
        "run": {"folder": task["run"], "save_every": 0},
    }
    return random_blocks(shape, Path(task["lab"]), 0, settings)


def _train_ours(task: dict[str, Any], contestant: Contestant) -> None:
    from vocagnolm.train import run, student
    from vocagnolm.train.loop import TrainingLoop

    class Watched(TrainingLoop):
        def end_step(self, learning_rate: float) -> None:
            super().end_step(learning_rate)
            _say(task, self.step)

    setattr(run, "TrainingLoop", Watched)  # noqa: B010
    if task["compile_mode"]:
        changed = partial(student.compile_layers, mode=task["compile_mode"])
        setattr(student, "compile_layers", changed)  # noqa: B010
    run.train(_recipe(task, contestant), quiet=True)


def _train_hf(task: dict[str, Any], contestant: Contestant) -> None:
    """What a user of transformers would write, with our recipe's settings and our blocks."""
    import numpy as np
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from vocagnolm.data.blocks import Blocks

    shape = Shape(**task["shape"])
    recipe = _recipe(task, contestant)
    optimizer = recipe.optimizer
    liger = CUDA
    compiling = {"torch_compile_mode": task["compile_mode"]} if task["compile_mode"] else {}
    settings = TrainingArguments(
        output_dir=task["run"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["micro_batch"],
        gradient_accumulation_steps=shape.blocks // task["micro_batch"],
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": optimizer.min_learning_rate},
        optim=optimizer.name,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.max_grad_norm,
        bf16=recipe.train.half_precision,
        use_liger_kernel=liger,
        use_cpu=not CUDA,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_drop_last=True,
        torch_compile=contestant.compiled,
        **compiling,
    )

    def collate(blocks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(np.stack([block["input_ids"][:-1] for block in blocks]))
        return {"input_ids": ids, "labels": ids}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _say(task, state.global_step)

    model = AutoModelForCausalLM.from_pretrained(
        recipe.student.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=Blocks(recipe.data.blocks, shape.length),
        data_collator=collate,
        callbacks=[Clock()],
    )
    trainer.train()


# ---- in the benchmark's own process ----


class Lab:
    """Runs contestants one after the other until the time is over."""

    def __init__(self, given: Any, folder: Path):
        self.given = given
        self.folder = folder
        self.began = time.time()

    @property
    def left(self) -> float:
        return float(self.began + self.given.seconds - time.time())

    def make(self, shape: Shape, steps: int) -> Path:
        lab = self.folder / shape.name
        save_student(shape, lab / "student", "cuda" if CUDA else "cpu")
        random_blocks(shape, lab, (steps + 1) * shape.step_tokens + 1, {})
        if CUDA:
            torch.cuda.empty_cache()
        return lab

    def start(self, shape: Shape, name: str, number: int, steps: int) -> list[dict[str, Any]]:
        """One process, killed when the time is over. What it said."""
        lab = self.folder / shape.name
        run = lab / f"run-{name}-{number}"
        task = {
            "shape": vars(shape),
            "contestant": name,
            "steps": steps,
            "micro_batch": min(self.given.micro_batch or shape.blocks, shape.blocks),
            "compile_mode": self.given.compile_mode,
            "lab": str(lab),
            "run": str(run),
            "began": time.time(),
        }
        with (lab / f"{run.name}.err").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, __file__, "--contest", json.dumps(task)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment(lab / f"caches-{name}"),
                start_new_session=True,
            )
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, max(self.left, 1.0))
        assert process.stdout is not None
        said = [json.loads(line) for line in process.stdout if line.startswith('{"step"')]
        process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if process.returncode:
            lines = (lab / f"{run.name}.err").read_text("utf-8").splitlines()[-12:]
            print(f"{shape.name}, {name}: it ended with {process.returncode}", file=sys.stderr)
            print("\n".join(lines), file=sys.stderr, flush=True)
        shutil.rmtree(run, ignore_errors=True)
        return said

    def _environment(self, caches: Path) -> dict[str, str]:
        """Every cache a start may leave, in a folder of the contestant's own."""
        (caches / "tmp").mkdir(parents=True, exist_ok=True)
        unset = {
            *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VOCAGNOLM_CACHE"),
            "PYTHONDONTWRITEBYTECODE",  # bytecode is a cache as well
        }
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        paths = [str(self.given.third_party)] if self.given.third_party else []
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "PYTHONPYCACHEPREFIX": str(caches / "bytecode"),
            "XDG_CACHE_HOME": str(caches),
            "TRITON_HOME": str(caches),
            "TMPDIR": str(caches / "tmp"),
        }


def row_of(shape: Shape, name: str, first: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": shape.name, "contestant": name}
    if not first:
        return {**row, "failed": True}
    row["first step, s"] = first[0]["seconds"]
    row["peak GiB"] = first[-1]["peak"]
    if len(first) == 3:
        warm, last = first[1:]
        steps = last["step"] - warm["step"]
        row["steady tokens/s"] = steps * shape.step_tokens / (last["seconds"] - warm["seconds"])
        row["with start tokens/s"] = last["step"] * shape.step_tokens / last["seconds"]
    return row


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Of every row over the fastest of Hugging Face's of the same shape."""
    for name in {row["shape"] for row in rows}:
        here = [row for row in rows if row["shape"] == name and "steady tokens/s" in row]
        theirs = [row["steady tokens/s"] for row in here if row["contestant"].startswith("hf")]
        for row in here:
            if theirs:
                row["x Hugging Face"] = row["steady tokens/s"] / max(theirs)


def main() -> None:
    given = arguments(
        __doc__,
        shapes={"default": "", "help": "names with a comma between; all: smollm2-135m,tinyllama"},
        contestants={"default": "", "help": f"of {','.join(CONTESTANTS)}; default: all"},
        steps={"type": int, "default": 40, "help": "of the first start"},
        micro_batch={"type": int, "default": 0, "help": "blocks at once; default: the whole step"},
        compile_mode={"default": "", "help": "torch.compile's mode, for all who compile"},
        no_second={"action": "store_true", "help": "leave the second starts out"},
        seconds={"type": float, "default": 230.0, "help": "when to stop"},
    )
    steps = WARM_UP + 2 if given.smoke else given.steps
    names = given.contestants.split(",") if given.contestants else [*CONTESTANTS]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        lab = Lab(given, Path(temporary))
        shapes = chosen_shapes(given.shapes, given.smoke)
        for shape in shapes:
            lab.make(shape, steps)
        print(f"students and blocks: {time.time() - lab.began:.0f} s", file=sys.stderr, flush=True)
        for name in names:
            for shape in shapes:
                if lab.left < 5:
                    print(f"no time left for {shape.name}, {name}", file=sys.stderr, flush=True)
                    continue
                row = row_of(shape, name, lab.start(shape, name, 1, steps))
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
                if given.no_second or lab.left < 5 or row.get("failed"):
                    continue
                second = lab.start(shape, name, 2, SECOND_START_STEPS)
                if second:
                    row["second start, s"] = second[0]["seconds"]
                    print(json.dumps(row), file=sys.stderr, flush=True)
    add_ratios(rows)
    title = torch.cuda.get_device_name() if CUDA else "smoke"
    report(f"train, end to end, {title}", rows, given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contest"]:
        contest(json.loads(sys.argv[2]))
    else:
        main()
