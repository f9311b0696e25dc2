"""Where a guided training step goes, by kind of work, and what other ways of running it cost.

    PYTHONPATH=src python benchmarks/train_profile.py [--shapes NAME,...] [--only NAME,...]
        [--steps 10] [--documents] [--fp8] [--no-profile] [--no-variants] [--seconds 420]
        [--trace FOLDER] [--json [FILE]] [--smoke]

The students of `train_gpu.py`: SmolLM2-135M's shape at 32 x 2,048 tokens and TinyLlama at
8 x 2,048, fp32 weights, bf16 autocast. The profile is of `vocagnolm train` itself (its loop,
blocks and metrics) over a few steps behind the warm-up; `gaps` is time in which no kernel runs.
--documents profiles with `data.document_mask`: the names of the kernels tell which attention that
ends in. --fp8 profiles `train.dtype: fp8`. --trace keeps the profile's trace there, for a viewer of
traces.

The variants are steps of the same work in a plain loop, one change each against `baseline`
(compiled layers, the attention that torch chooses, the whole step as one micro-batch, fused AdamW,
the host waiting at every step): milliseconds a step, tokens a second, how far the losses of the
first and of the last step are from the baseline's, and whether the first, before any update, is the
same to 1e-3. Rows are printed as they come in; one that fails says why and the others go on.
--seconds: nothing is begun after that.
"""

import contextlib
import gzip
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import GIB, arguments, clean, report, synchronise
from profile_kinds import CLIPPING, DATA, HEAD_1, HEAD_2, by_kind, table
from shapes import CUDA, DEVICE, random_model
from students import DOCUMENT_TOKENS, Shape, chosen_shapes, random_blocks, save_student
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

from vocagnolm.model.fp8 import train_in_fp8
from vocagnolm.model.runtime import (
    find_layers,
    head_form,
    last_hidden,
    prepare_compiler,
    run_decoder,
)
from vocagnolm.objective import Decided, ObjectiveConfig, Targets, objective_loss
from vocagnolm.objective import head as head_module
from vocagnolm.objective import loss as loss_module

SAME_LOSS = 1e-3


# ---- the profile ----


def in_range(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return call(*args, **kwargs)

    return marked


@contextlib.contextmanager
def marked_head() -> Iterator[None]:
    """Both phases of the head as ranges."""
    with mock.patch.multiple(
        loss_module,
        row_losses=in_range(HEAD_1, head_module.row_losses),
        summed_loss=in_range(HEAD_2, head_module.summed_loss),
    ):
        yield


class _Profiled:
    """Profiles some steps behind the warm-up."""

    def __init__(self, warm_up: int, steps: int, trace: Path):
        self.warm_up, self.steps, self.trace = warm_up, steps, trace
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
        self.profiler = profile(activities=kinds)

    def after(self, step: int) -> None:
        if step == self.warm_up:
            synchronise()
            self.profiler.__enter__()
        if step == self.warm_up + self.steps:
            synchronise()
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.trace))


def profiled(shape: Shape, lab: Path, given: Any, steps: int) -> list[dict[str, Any]]:
    from vocagnolm.data.materials import Materials
    from vocagnolm.train.loop import TrainingLoop
    from vocagnolm.train.run import build_setup, open_blocks
    from vocagnolm.train.settings import plan_schedule, training_arguments

    warm_up = 2 if given.smoke else 8
    settings = {
        "optimizer": {"name": "adamw_torch_fused"},
        "data": {"document_mask": given.documents},
        "train": {
            "tokens": (warm_up + steps) * shape.step_tokens,
            "batch_blocks": shape.blocks,
            "micro_batch": shape.blocks,
            "compile": CUDA,
            "dtype": ("fp8" if given.fp8 else "bfloat16") if CUDA else "float32",
        },
        "run": {"folder": str(lab / "run"), "save_every": 0},
    }
    save_student(shape, lab / "student", DEVICE)
    recipe = random_blocks(shape, lab, (warm_up + steps + 1) * shape.step_tokens + 1, settings)
    materials = Materials(recipe)
    blocks = open_blocks(materials)
    schedule = plan_schedule(recipe, len(blocks))
    arguments = training_arguments(recipe, schedule)
    setup = build_setup(materials, blocks, schedule, arguments)
    loop: Any = TrainingLoop(setup, recipe, schedule, arguments)
    watch, end_step = _Profiled(warm_up, steps, lab / "trace.json"), loop.end_step

    def watched(rate: float) -> None:
        end_step(rate)
        watch.after(loop.step)

    loop.end_step = watched
    loop.next_batch = in_range(DATA, loop.next_batch)
    loop.clip_gradients = in_range(CLIPPING, loop.clip_gradients)
    with marked_head():
        loop.run()
    if given.trace:
        kept = Path(given.trace) / f"{shape.name}.json.gz"
        kept.write_bytes(gzip.compress((lab / "trace.json").read_bytes(), 1))
    found, whole = by_kind(json.loads((lab / "trace.json").read_text("utf-8")))
    return [{"shape": shape.name, **row} for row in table(found, whole, steps)]


# ---- the variants ----


@dataclass(frozen=True)
class Variant:
    compiled: str = "layers"
    """layers, decoder or nothing."""
    mode: str | None = None
    micro_batch: int | None = None
    """None: the whole step."""
    attention: str = "sdpa"
    backend: SDPBackend | None = None
    documents: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of Inductor."""
    narrow: bool = False
    """The stream of hidden states in bf16 instead of float32."""
    fused: bool = True
    fp8: bool = False
    wait_every: int = 1
    against: str | None = "baseline"
    """The variant whose loss it should have."""


FLASH, CUDNN, EFFICIENT = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
VARIANTS = {
    "baseline": Variant(against=None),
    "attention-cudnn": Variant(backend=CUDNN),
    "attention-flash": Variant(backend=FLASH),
    "attention-flex": Variant(attention="flex_attention"),
    "documents": Variant(documents=True, against=None),
    "documents-flex": Variant(documents=True, attention="flex_attention", against="documents"),
    "documents-cudnn": Variant(documents=True, backend=CUDNN, against="documents"),
    "documents-efficient": Variant(documents=True, backend=EFFICIENT, against="documents"),
    "wait-10": Variant(wait_every=10),
    "optimizer-torch": Variant(fused=False),
    "micro-4": Variant(micro_batch=4),
    "micro-8": Variant(micro_batch=8),
    "micro-16": Variant(micro_batch=16),
    "fp8": Variant(fp8=True),
    "micro-2": Variant(micro_batch=2),
    "micro-32": Variant(micro_batch=32),
    "layers-reduce-overhead": Variant(mode="reduce-overhead"),
    "decoder": Variant(compiled="decoder"),
    "decoder-reduce-overhead": Variant(compiled="decoder", mode="reduce-overhead", wait_every=10),
    "layers-max-autotune": Variant(mode="max-autotune-no-cudagraphs"),
    "decoder-max-autotune": Variant(compiled="decoder", mode="max-autotune-no-cudagraphs"),
    "micro-8-reduce-overhead": Variant(micro_batch=8, mode="reduce-overhead"),
    "micro-8-cpp": Variant(micro_batch=8, options={"cpp_wrapper": True}),
    "layers-tuned": Variant(options={"coordinate_descent_tuning": True}),
    "narrow": Variant(narrow=True),
    "not-compiled": Variant(compiled="nothing"),
}
"""In the order of their importance."""


class Loop:
    """Guided steps of one student on one batch."""

    def __init__(self, shape: Shape, variant: Variant):
        self.variant = variant
        model = random_model(shape.config, torch.float32)
        model.set_attn_implementation(variant.attention)
        model.train()
        self.model, self.form = model, head_form(model)
        if variant.narrow:
            model.get_input_embeddings().register_forward_hook(
                lambda module, ids, hidden: hidden.bfloat16()
            )
        micro = variant.micro_batch or shape.blocks
        self.rows = max(micro, shape.blocks) // micro * micro
        g = torch.Generator().manual_seed(0)
        size = (self.rows, shape.length + 1)
        self.ids = torch.randint(0, shape.config.vocab_size, size, generator=g).to(DEVICE)
        self.guidance = (10 * torch.rand(size, generator=g)).to(DEVICE)
        place = torch.arange(shape.length, device=DEVICE)
        # where documents begin differs from row to row
        shift = 97 * torch.arange(self.rows, device=DEVICE)[:, None]
        period = min(DOCUMENT_TOKENS, shape.length // 2)
        begun = place + 1 - ((place + shift) % period + 1)
        self.positions = torch.where(begun < 0, place, (place + shift) % period)
        self.micro = micro
        # of every sequence alone: then micro-batches do not change what is selected
        self.config = ObjectiveConfig(method="guided", keep=0.4, scope="sequence")
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=variant.fused
        )
        if variant.fp8 and CUDA:
            train_in_fp8(model)
        self._compile()

    def _compile(self) -> None:
        variant = self.variant
        if not CUDA or variant.compiled == "nothing":
            return
        prepare_compiler()
        options: dict[str, Any] = {"mode": variant.mode} if variant.mode else {}
        if variant.options:
            options["options"] = variant.options
        if variant.compiled == "decoder":
            self.model.model.compile(**options)
            return
        for layer in find_layers(self.model) or ():
            layer.compile(**options)

    def step(self) -> Tensor:
        losses = []
        denominator = torch.tensor(float(self.rows * (self.ids.shape[1] - 1)), device=DEVICE)
        for a in range(0, self.rows, self.micro):
            if self.variant.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            part = slice(a, a + self.micro)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
                if self.variant.documents:
                    decoded = run_decoder(self.model, self.ids[part, :-1], self.positions[part])
                    hidden = decoded.last_hidden_state
                else:
                    hidden = last_hidden(self.model, self.ids[part, :-1].contiguous())
                targets = Targets(
                    labels_BT=self.ids[part, 1:].contiguous(),
                    guidance_BT=self.guidance[part, 1:].contiguous(),
                )
                assert self.form is not None
                loss = objective_loss(
                    hidden,
                    self.form.head(self.model),
                    targets,
                    self.config,
                    decided=Decided(denominator=denominator),
                ).loss
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    def run(self, steps: int) -> tuple[float, float, float]:
        """(seconds a step, loss of the first, loss of the last)."""
        backend = self.variant.backend
        chosen = sdpa_kernel(backend) if CUDA and backend else contextlib.nullcontext()
        with chosen:
            first = float(self.step())
            for _ in range(2):
                self.step()
            synchronise()
            began = time.perf_counter()
            for number in range(steps):
                loss = self.step()
                if (number + 1) % self.variant.wait_every == 0:
                    loss.item()
            synchronise()
            return (time.perf_counter() - began) / steps, first, float(loss)


def measured(shape: Shape, name: str, variant: Variant, steps: int) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": shape.name, "variant": name}
    began = time.perf_counter()
    try:
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        loop = Loop(shape, variant)
        seconds, first, last = loop.run(steps)
        row["ms a step"] = 1e3 * seconds
        row["tokens/s"] = loop.rows * shape.length / seconds
        row["first loss"], row["last loss"] = first, last
        if CUDA:
            row["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
    except Exception as error:  # of any library: the other variants go on
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        traceback.print_exc()
    torch._dynamo.reset()
    clean()
    row["seconds in all"] = time.perf_counter() - began
    return row


def compare(rows: list[dict[str, Any]]) -> None:
    """Add each row's throughput and losses relative to the variant that it is compared with."""
    by_name = {(row["shape"], row["variant"]): row for row in rows}
    for row in rows:
        variant = VARIANTS[row["variant"]]
        other = by_name.get((row["shape"], variant.against or ""))
        if other is None or "tokens/s" not in row or "tokens/s" not in other:
            continue
        row["x baseline"] = row["tokens/s"] / other["tokens/s"]
        for name in ("first loss", "last loss"):
            row[f"{name} off"] = abs(row[name] - other[name])
        row["same loss"] = row["first loss off"] <= SAME_LOSS


def main() -> None:
    given = arguments(
        __doc__,
        shapes={"default": "", "help": "names with a comma between; all: smollm2-135m,tinyllama"},
        only={"default": "", "help": "variants: " + ", ".join(VARIANTS)},
        steps={"type": int, "default": 10, "help": "that are measured"},
        documents={"action": "store_true", "help": "profile with data.document_mask"},
        fp8={"action": "store_true", "help": "profile with train.dtype: fp8"},
        no_profile={"action": "store_true"},
        no_variants={"action": "store_true"},
        seconds={"type": float, "default": 420.0, "help": "nothing is begun after that"},
        trace={"default": "", "help": "a folder for the profile's trace"},
    )
    began = time.time()
    steps = 2 if given.smoke else given.steps
    shapes = chosen_shapes(given.shapes, given.smoke)
    title = torch.cuda.get_device_name() if CUDA else "smoke"
    for shape in [] if given.no_profile else shapes:
        with tempfile.TemporaryDirectory() as temporary:
            rows = profiled(shape, Path(temporary), given, min(steps, 4))
        report(f"a guided step of {shape.name}, {title}", rows, given.json)
        sys.stdout.flush()
        torch._dynamo.reset()
        clean()
    if given.no_variants:
        return
    names = given.only.split(",") if given.only else [*VARIANTS]
    found: list[dict[str, Any]] = []
    for name in names:
        for shape in shapes:
            if time.time() - began > given.seconds:
                print(f"no time left for {shape.name}, {name}", file=sys.stderr, flush=True)
                continue
            variant = VARIANTS[name]
            if given.smoke and variant.micro_batch:
                variant = replace(variant, micro_batch=max(1, variant.micro_batch // 4))
            found.append(measured(shape, name, variant, steps))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    compare(found)
    report(f"variants of a guided step, {title}", found, given.json)


if __name__ == "__main__":
    main()
