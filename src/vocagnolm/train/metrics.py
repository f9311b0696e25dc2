"""What a run reports: measures of a step, lines on stderr, trackers, and where its time went."""

import html
import itertools
import json
import math
import os
import sys
import time
import uuid
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from vocagnolm.alignment import TextTokenizer
from vocagnolm.errors import TrainingError
from vocagnolm.files import append_lines, read_json, write_json, write_text
from vocagnolm.model.runtime import HostCopy, Moment, compiling_seconds
from vocagnolm.objective import IGNORE_INDEX, Targets
from vocagnolm.objective.loss import BINS, SUMS, measures
from vocagnolm.processes import Ranks
from vocagnolm.progress import Seconds, Throttle, clock_time
from vocagnolm.recipe import Recipe
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.settings import Schedule, room_left

# ---- the measures of a step ----


class StepMeter:
    """The measures of one optimizer step. Its micro-batches are collected on the device, which is
    not waited for until they are read."""

    number = 0
    learning_rate = 0.0

    def __init__(self) -> None:
        self.losses: list[tuple[Tensor, Tensor | None]] = []
        """Of this rank's micro-batches, with their blocks."""
        self._rows: list[Tensor] = []
        self._means: list[dict[str, Tensor]] = []
        self._has_guidance = False

    def add(self, output: dict[str, Any], targets: Targets, blocks: Tensor | None) -> None:
        loss = output["loss"].detach()
        self.losses.append((loss, blocks))
        # filled in, not sent: a number that is copied to a device is waited for
        tokens = loss.new_full((1,), targets.labels_BT.numel(), dtype=torch.float32)
        self._rows.append(torch.cat([loss.float()[None], tokens, output["sums"]]))
        self._means.append(output["means"])
        self._has_guidance = targets.guidance_BT is not None

    def finish(self, number: int, learning_rate: float, **sums: float) -> None:
        """Send totals over micro-batches and ranks to the host, and with them `sums` over ranks:
        requests, which all ranks must know of in the same step, and seconds."""
        ranks = Ranks.of()
        self.number, self.learning_rate = number, learning_rate
        self._of_means, self._of_sums = sorted(self._means[0]), list(sums)
        rows = [
            torch.cat([row, *(means[name].float()[None] for name in self._of_means)])
            for row, means in zip(self._rows, self._means, strict=True)
        ]
        # fp64 where there is one: the sum must not depend on how a step is split
        stacked = torch.stack(rows)
        total = (stacked if stacked.is_mps else stacked.double()).sum(0)
        further = [total.new_full((1,), float(value)) for value in sums.values()]
        self._values = HostCopy(ranks.sum(torch.cat([total, *further])))
        self._micro_batches = len(rows) * ranks.count

    @property
    def ended(self) -> Moment:
        return self._values.moment

    def read(self) -> dict[str, Any]:
        """Measures as plain numbers; waits for the step, and for nothing after it."""
        values = self._values.numpy().tolist()
        end = 2 + len(SUMS) + BINS
        found = {"loss": values[0], "tokens": values[1], **measures(values[2:end])}
        for name, value in zip(self._of_means, values[end:], strict=False):
            found[name] = value / self._micro_batches
        found |= zip(self._of_sums, values[end + len(self._of_means) :], strict=True)
        return found if self._has_guidance else {**found, "mapped_share": None}


def require_finite(step: int, losses: list[tuple[Tensor, Tensor | None]], rank: int) -> None:
    """Waits for these losses."""
    values = torch.stack([loss for loss, _ in losses]).tolist()
    for number, (value, (_, blocks)) in enumerate(zip(values, losses, strict=True)):
        if math.isfinite(value):
            continue
        named = "" if blocks is None else f", blocks {blocks.tolist()}"
        raise TrainingError(
            f"The loss is {value} in step {step}, micro-batch {number} of rank {rank}{named}. The "
            "weights are still those of the step before; the newest checkpoint is untouched. Lower "
            "optimizer.learning_rate, or check these blocks."
        )


# Dense bfloat16 peak of a device in TFLOP/s, as its maker states it; the longest match counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "A10": 125.0,
    "A40": 149.7,
    "B200": 2250.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H200": 989.0,
    "H800": 989.0,
    "L4": 121.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
}


def flops_share(model: Any, schedule: Schedule, device: torch.device) -> float | None:
    """Of the devices' peak, what one token a second takes, forward and backward of plain training:
    6 N + 12 layers x hidden x length (PaLM, app. B). None where the peak is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [key for key in PEAK_TFLOPS if key in name]
    if not known:
        return None
    config = model.config.get_text_config()
    parameters = sum(int(p.numel()) for p in model.parameters())
    layers, hidden = int(config.num_hidden_layers), int(config.hidden_size)
    flops = 6.0 * parameters + 12.0 * layers * hidden * schedule.block_size
    return flops / (PEAK_TFLOPS[max(known, key=len)] * 1e12) / schedule.world_size


# ---- metrics.jsonl and progress on stderr ----


@dataclass(frozen=True)
class MetricsFile:
    """`metrics.jsonl`: appended a line a step, cut back to the checkpoint on resume."""

    path: Path

    def resume_at(self, step: int) -> None:
        """Drop what was written after `step`, and a line that a kill left half-written."""
        if self.path.exists():
            kept = [json.dumps(r) + "\n" for r in read_metrics(self.path) if r["step"] <= step]
            write_text(self.path, "".join(kept))

    def append(self, record: dict[str, Any]) -> None:
        append_lines(self.path, json.dumps(record) + "\n", sync=False)


class Console:
    """A line every so many steps, or now and then where steps are slow."""

    def __init__(self, schedule: Schedule, *, quiet: bool, log_every: int):
        self.schedule, self.quiet, self.log_every = schedule, quiet, log_every
        self._began, self._throttle = (0, time.monotonic()), Throttle()

    def start(self, step: int) -> None:
        self._began, s = (step, time.monotonic()), self.schedule
        self.say(
            f"{'going on after step ' + str(step) if step else 'training'}: {s.steps:,} steps of "
            f"{s.tokens_per_step:,} tokens ({s.accumulation} x {s.micro_batch} blocks on "
            f"{s.world_size} process{'es' if s.world_size > 1 else ''})"
        )

    def step(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if self.quiet:
            return
        if step % self.log_every and step != self.schedule.steps and not self._throttle.due():
            return
        self._throttle.said()
        first, began = self._began
        left = (time.monotonic() - began) / max(step - first, 1) * (self.schedule.steps - step)
        self.say(
            f"step {step:>6,}/{self.schedule.steps:,}  loss {record['loss']:.4f}  "
            f"nll kept {record['nll_kept']:.4f} all {record['nll_all']:.4f}  "
            f"kept {record['kept_share']:.1%}  "
            f"lr {record['learning_rate']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"ETA {clock_time(left)}"
        )

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)


# ---- seconds ----


@dataclass(frozen=True, kw_only=True)
class Times(Seconds):
    start: float = 0.0
    """Imports, opening the blocks and reading them through, while the student is loaded."""
    loading: float = 0.0
    """The rest of the weights, and moving them to the device."""
    measuring: float = 0.0
    """Student against teacher, and `micro_batch: auto`."""
    compiling: float = 0.0
    training: float = 0.0
    """Steps and checkpoints."""
    finishing: float = 0.0
    """Gathering and writing the model."""


class Clock:
    """Runs from the start of a command."""

    def __init__(self, earlier: float = 0.0):
        self.times = Times(start=earlier)
        self.first_step: float | None = None
        """Seconds until it was made."""
        self._began = time.perf_counter() - earlier
        self._last, self._compiled = time.perf_counter(), compiling_seconds()

    def end(self, stage: str) -> None:
        """What has passed since the last one belongs to `stage`, but for compiling."""
        now, compiled = time.perf_counter(), compiling_seconds()
        compiling = compiled - self._compiled
        seconds = getattr(self.times, stage) + now - self._last - compiling
        added = {stage: seconds, "compiling": self.times.compiling + compiling}
        self.times = replace(self.times, **added)
        self._last, self._compiled = now, compiled

    def step(self) -> bool:
        """A step was made; whether it was the first."""
        first = self.first_step is None
        if first:
            self.first_step = time.perf_counter() - self._began
        return first


@dataclass(frozen=True)
class StepReport:
    """What becomes of a step's measures: a line of metrics.jsonl, now and then one on stderr."""

    metrics: MetricsFile
    console: Console
    clock: Clock
    flops_share: float | None
    """As the function of this name gives it."""

    def __call__(self, record: dict[str, Any]) -> None:
        share, rate = self.flops_share, record["tokens_per_second"]
        record["mfu"] = None if share is None else rate * share
        self.metrics.append(record)
        if self.clock.step():
            self.console.say(f"the first step was made after {self.clock.first_step:,.1f} s")
            if advice := room_left(self.console.schedule):
                self.console.say(advice)
        self.console.step(record)


# ---- trackers ----


# Packages of transformers' trackers; one of tensorboard's is enough, these are called like them.
_CALLED_ALIKE = ("clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab")
PACKAGES = {name: [name] for name in (*_CALLED_ALIKE, "trackio", "wandb")}
PACKAGES |= {"tensorboard": ["tensorboard", "tensorboardX"]}


def tracker_problems(names: list[str]) -> list[str]:
    """What transformers would stumble over, in words, before anything is loaded or written."""
    problems = []
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in names:
        packages = PACKAGES.get(name, [])
        if name not in known and name not in ("all", "none"):
            listed = ", ".join(sorted(known))
            problems.append(f"run.report_to: {name} is not a tracker. Supported: {listed}.")
        elif packages and not any(map(_installed, packages)):
            problems.append(
                f"run.report_to: {name} needs the package {' or '.join(packages)}, which is not "
                f"installed: pip install {packages[0]}, or take {name} out of run.report_to."
            )
    return problems


def _installed(package: str) -> bool:
    """Also where a mere folder of that name lies about: wandb leaves one where it ran."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


SAMPLES = 10
"""Times in a run that texts with their selection are sent."""
SAMPLE_ROWS = 2
SAMPLE_TOKENS = 256
_NOTES = "trackers.json"
_ours: set[str] = set()  # W&B runs that this process began


class Trackers:
    """The trackers of `run.report_to`: transformers' own callbacks, which also get the recipe, the
    same run when it is resumed, and a few texts with their selection. In the first process."""

    def __init__(
        self,
        arguments: TrainingArguments,
        recipe: Recipe,
        folder: Path,
        tokenizer: TextTokenizer,
        *,
        model: Any = None,
        step: int = 0,
    ):
        """A run that is resumed goes on after `step`."""
        self.recipe, self.tokenizer = recipe, tokenizer
        self._arguments, self._model = arguments, model
        makers = integration_utils.get_reporting_integration_callbacks(arguments.report_to)
        self.callbacks: list[Any] = [make() for make in makers]
        self._state = TrainerState(max_steps=arguments.max_steps, global_step=step)
        self._state.logging_steps = int(arguments.logging_steps)
        self._losses: list[float] = []
        self._wandb: Any = None
        names = {type(callback).__name__ for callback in self.callbacks}
        self.shows_texts = bool(names & {"WandbCallback", "TensorBoardCallback"})
        for callback in self._tensorboards():
            if callback.logging_dir is None:  # beside the metrics, not among the checkpoints
                callback.logging_dir = str(folder / "tensorboard")
            if step and callback.tb_writer is None:
                # steps that a stopped run has logged after its checkpoint are logged again
                callback.tb_writer = callback._SummaryWriter(
                    log_dir=callback.logging_dir, purge_step=step + 1
                )
        if "WandbCallback" in names:
            self._wandb = _start_wandb(recipe, folder)

    def _tensorboards(self) -> list[Any]:
        return [one for one in self.callbacks if type(one).__name__ == "TensorBoardCallback"]

    def _writers(self) -> list[Any]:
        return [one.tb_writer for one in self._tensorboards() if one.tb_writer is not None]

    def _call(self, event: str, **more: Any) -> None:
        control = TrainerControl()
        for callback in self.callbacks:
            getattr(callback, event)(
                self._arguments, self._state, control, model=self._model, **more
            )

    def begin(self) -> None:
        self._call("on_init_end")
        self._call("on_train_begin")
        for writer in self._writers():
            writer.add_text("recipe", f"```yaml\n{self.recipe.to_yaml()}\n```")

    def step(self, record: dict[str, Any], gradient_norm: Tensor | None) -> None:
        """A step that was read. The loss is the mean since the last one that was sent."""
        self._losses.append(record["loss"])
        self._state.global_step = number = record["step"]
        self._state.epoch = number / self._arguments.max_steps
        first = number == 1 and self._arguments.logging_first_step
        if number % self._arguments.logging_steps and not first:
            return
        logs = {name: value for name, value in record.items() if value is not None}
        del logs["step"]
        logs |= {"loss": sum(self._losses) / len(self._losses), "epoch": self._state.epoch}
        if gradient_norm is not None:
            logs["grad_norm"] = float(gradient_norm)
        self._losses = []
        self._call("on_log", logs=logs)

    def wants_texts(self, step: int) -> bool:
        every = max(1, self._arguments.max_steps // SAMPLES)
        return self.shows_texts and (step == 1 or step % every == 0)

    def show(self, step: int, labels_BT: Tensor, weights_BT: Tensor) -> None:
        text = selected_text(self.tokenizer, labels_BT, weights_BT)
        for writer in self._writers():
            writer.add_text("selected tokens", text, step)
        if self._wandb is not None:
            shown = self._wandb.Html(f'<div style="white-space: pre-wrap">{text}</div>')
            self._wandb.log({"selected tokens": shown, "train/global_step": step})

    def saved(self) -> None:
        self._call("on_save")

    def end(self) -> None:
        self._call("on_train_end")
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(recipe: Recipe, folder: Path) -> Any:
    """The module, where this run of it is ours to end; None where the caller has one open."""
    import wandb

    if wandb.run is not None and wandb.run.id not in _ours:
        wandb.config.update({"recipe": recipe.to_dict()}, allow_val_change=True)
        return None
    if wandb.run is not None:  # left open by a previous training that failed
        wandb.finish()
    wandb.init(
        project=os.environ.get("WANDB_PROJECT", "vocagnolm"),
        name=os.environ.get("WANDB_NAME", folder.name),
        id=os.environ.get("WANDB_RUN_ID") or _noted_id(folder),
        resume="allow",
        dir=os.environ.get("WANDB_DIR", str(folder)),
        config={"recipe": recipe.to_dict()},
    )
    _ours.add(wandb.run.id)
    return wandb


def _noted_id(folder: Path) -> str:
    """One for all of a run's life, kept in its folder."""
    path = folder / _NOTES
    mend = "Remove it: the tracker then begins a new run."
    try:
        return str(read_json(path, TrainingError, mend, {"wandb": str})["wandb"])
    except FileNotFoundError:
        noted = uuid.uuid4().hex[:12]
        write_json(path, {"wandb": noted})
        return noted


def selected_text(tokenizer: TextTokenizer, labels_BT: Tensor, weights_BT: Tensor) -> str:
    """The first sequences of a batch as HTML, the tokens that are trained on in bold."""
    rows = []
    labels, kept = labels_BT[:SAMPLE_ROWS].tolist(), (weights_BT[:SAMPLE_ROWS] != 0).tolist()
    for ids, bold in zip(labels, kept, strict=True):
        tokens = [*zip(bold, ids, strict=True)][:SAMPLE_TOKENS]
        shown = [token for token in tokens if token[1] != IGNORE_INDEX]
        rows.append("")
        for is_kept, run in itertools.groupby(shown, key=itemgetter(0)):
            content = b"".join(tokenizer.bytes_of(index) or b"" for _, index in run)
            text = html.escape(content.decode(errors="replace")).replace("\n", "<br>")
            rows[-1] += f"<strong>{text}</strong>" if is_kept else text
    return "<br><br>".join(rows)
