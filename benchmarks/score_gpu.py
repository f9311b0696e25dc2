"""Scoring beside Hugging Face's full logits, in bf16 and in fp8: rate, share of the matmul peak,
memory. One GPU, about six minutes.

    PYTHONPATH=src python benchmarks/score_gpu.py [--few] [--profile] [--no-mixed] [--json [FILE]]
        [--smoke]

A 7B Qwen2.5-shaped teacher with random weights in bf16. `packed` is 8 documents of 2,048 tokens;
`mixed` is a shard of 1,024 documents with the lengths of a real corpus (nLab, Qwen2.5's
tokenizer), cut into windows and batches by the plan that `vocagnolm score` uses.

fp8 is of two kinds: the decoder's layers alone, and the head as well. Both stand beside bf16 in
memory, and the three take turns with large products of the same duration: a card that draws all the
power it may lowers its clock, and the peak of a short burst is not that of a day. One row has bf16
with cuDNN's attention instead of torch's own choice. --few: compiled bf16 and fp8 of layers and
head alone, and mixed lengths in fp8 alone. --profile adds where the time of a batch goes, by kind
of work.

Targets: at least 1.15 x the tokens/s of full logits, at least 85 % of the measured matmul peak, at
most 3 GiB over the weights; mixed lengths at least 97 % of the packed rate; fp8 at least 1.5 x bf16
and 72 thousand tokens/s, with no more memory, and 95 % of that with four alternatives; the same
documents give the same bits. Errors are against a float32 head on the hidden states of bf16. A
contestant that fails says why, and the rest goes on.
"""

import sys
import time
import traceback
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from kinds import profiled
from measure import (
    GIB,
    arguments,
    clean,
    large_product,
    matmul_peak,
    peak_gib,
    report,
    side_by_side,
    synchronise,
)
from teachers import build, exact_head, flops_per_token, full_logits, mixed_lengths, teacher_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.model import fp8
from vocagnolm.model.fp8 import Fp8Linear, to_fp8
from vocagnolm.model.nll import NllModel

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
RATE_TARGET, PEAK_TARGET, MEMORY_TARGET_GIB, MIXED_TARGET = 1.15, 0.85, 3.0, 0.97
FP8_TARGET, FP8_RATE_TARGET, FOUR_TARGET = 1.5, 72_000, 0.95
FULL, PLAIN, BF16 = "HF full logits", "chunked head", "chunked head, compiled layers"
PRODUCTS = "large products"
CUDNN = "the same, cuDNN's attention"  # torch prefers FlashAttention 2
WHOLE = "fp8 layers and head"
FP8 = {"fp8 layers, bf16 head": False, WHOLE: True}  # name -> the head too
FOUR = f"{WHOLE}, 4 alternatives"
STARTED = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def bytes_of(model: Any) -> int:
    held = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(held.values())


def same_bits(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True))


def kernel_check(smoke: bool) -> list[dict[str, Any]]:
    """fp8's products on the device beside their emulation on the CPU, whole tiles and not."""
    torch.manual_seed(0)
    inputs, outputs = (64, 128) if smoke else (3584, 512)
    linear = torch.nn.Linear(inputs, outputs, bias=False).bfloat16()
    here, there = Fp8Linear(linear), Fp8Linear(linear).to(DEVICE)
    rows = []
    for count in (1, 17, 1000, 2048):
        x = torch.randn(count, inputs).bfloat16()
        for dtype in (torch.bfloat16, torch.float32):
            wanted = here.product(x, torch.float32)
            found = [there.product(x.to(DEVICE), dtype) for _ in range(2)]
            error = (found[0].float().cpu() - wanted).norm() / wanted.norm()
            row = {"rows": count, "into": str(dtype), "relative error": float(error)}
            rows.append(row | {"same bits twice": torch.equal(*found)})
    say(str(rows))
    if CUDA:
        whole = fp8._scales_into_float32(torch.device(DEVICE, torch.cuda.current_device()))
        say(f"the kernel with a scale per row gives float32: {whole}")
    return rows


@dataclass
class Benchmark:
    """The batch, what is measured of it, and the rows so far."""

    smoke: bool
    peak: float
    profile: bool
    few: bool
    as_json: str | None
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, NllModel] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.length = (2, 256) if self.smoke else (8, 2048)
        self.rounds = 2 if self.smoke else 5
        self.tokens = self.rows * self.length
        self.config = teacher_config(self.smoke)
        draw = np.random.default_rng(1)
        vocabulary = self.config.vocab_size
        packed = [draw.integers(0, vocabulary, self.length) for _ in range(self.rows)]
        self.packed = [ids.astype(np.int32) for ids in packed]
        lengths = mixed_lengths(64 if self.smoke else 1024, self.length / 2048)
        self.mixed = [draw.integers(0, vocabulary, n).astype(np.int32) for n in lengths]
        self.ids = torch.from_numpy(np.stack(self.packed)).long().to(DEVICE)
        self.flops = 0.0
        self.exact = torch.zeros(0)

    def guarded(self, name: str, step: Callable[[], Any]) -> Any:
        """One failure must not cost the rest of the run."""
        try:
            return step()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
            self.failures.append(f"{name}: {reason}")
            traceback.print_exc()
            say(f"FAILED {name}: {reason}")
            return None
        finally:
            clean()

    def tell(self, title: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            report(title, rows, self.as_json)

    def scorer(self, model: Any, **options: Any) -> NllModel:
        return NllModel(
            model,
            context=self.length,
            stride=self.length // 8,
            batch_tokens=self.tokens,
            **options,
        )

    def batch(self, scorer: NllModel) -> Callable[[], torch.Tensor]:
        (batch,) = scorer.plan([self.length] * self.rows)
        return lambda: scorer.batch_scores(batch, self.packed).nll_N

    def measure(self, name: str, call: Callable[[], torch.Tensor], model: Any) -> None:
        error = (call()[: len(self.exact)].float() - self.exact).abs()
        bits = torch.equal(call(), call())
        clean()
        memory = peak_gib(call)
        ms = side_by_side({name: call}, rounds=self.rounds, warm_up=1)[name]
        rate = self.tokens / ms * 1e3
        full = self.table.get(FULL, {}).get("tokens/s", rate)
        self.table[name] = {
            "scoring": name,
            "tokens/s": rate,
            "x full logits": rate / full,
            "share of peak": rate * self.flops / self.peak,
            "GiB weights": bytes_of(model) / GIB,
            "GiB over weights": memory,
            "mean error": float(error.mean()),
            "max error": float(error.max()),
            "same bits twice": bits,
        }
        say(str(self.table[name]))

    def bf16(self) -> None:
        model = build(self.config)
        self.flops = flops_per_token(model, self.length)
        self.exact = exact_head(model, self.ids[:1])
        say("teacher built")
        if not self.few:
            full = partial(full_logits, model, self.ids)
            self.guarded(FULL, lambda: self.measure(FULL, full, model))
            plain = self.scorer(model)
            self.guarded(PLAIN, lambda: self.measure(PLAIN, self.batch(plain), model))
        compiled = self.models[BF16] = self.scorer(model, compiled=CUDA)
        self.guarded(BF16, lambda: self.measure(BF16, self.batch(compiled), model))
        self.guarded(f"{BF16}, profile", lambda: self.tell_kinds(BF16))

    def cudnn(self) -> None:
        """The kernel is chosen when a graph is made: these are made anew, and so are the next."""
        scorer = self.models[BF16]
        preferred = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        torch._dynamo.reset()
        try:
            with sdpa_kernel(preferred, set_priority=True):
                self.measure(CUDNN, self.batch(scorer), scorer.model)
                self.tell_kinds(BF16, CUDNN)
        finally:
            torch._dynamo.reset()

    def fp8(self, name: str) -> None:
        model = build(self.config)
        to_fp8(model)
        clean()
        scorer = self.scorer(model, compiled=CUDA, fp8_head=FP8[name])
        self.measure(name, self.batch(scorer), model)
        self.models[name] = scorer
        self.guarded(f"{name}, profile", lambda: self.tell_kinds(name))

    def turns(self) -> list[dict[str, Any]]:
        """Large products, bf16 and fp8 one after the other, over and over."""
        product, operations = large_product()
        count = max(1, round(self.tokens / self.table[BF16]["tokens/s"] * self.peak / operations))

        def products() -> None:
            for _ in range(count):
                product()

        calls = {name: self.batch(scorer) for name, scorer in self.models.items()}
        if WHOLE in self.models:
            with_others = copy(self.models[WHOLE])
            with_others.alternatives = AlternativesSpec(4)
            calls[FOUR] = self.batch(with_others)
        found = side_by_side({PRODUCTS: products, **calls}, rounds=2 * self.rounds, warm_up=1)
        peak = count * operations / found.pop(PRODUCTS) * 1e3
        rows = [
            {
                "taking turns": name,
                "ms": ms,
                "tokens/s": self.tokens / ms * 1e3,
                "x bf16": found[BF16] / ms if BF16 in found else None,
                "x fp8": found[WHOLE] / ms if WHOLE in found else None,
                "share of peak": self.tokens / ms * 1e3 * self.flops / self.peak,
                "share beside": self.tokens / ms * 1e3 * self.flops / peak,
            }
            for name, ms in found.items()
        ]
        say(f"peak beside them {peak / 1e12:.1f} TFLOP/s; {rows}")
        return rows

    def other_shapes(self) -> list[dict[str, Any]]:
        """As many tokens in shorter rows, which a graph for all shapes computes."""
        rows = []
        for name, scorer in self.models.items():
            row: dict[str, Any] = {"shorter rows, x packed rate": name}
            for length in (self.length // 2, self.length // 4):
                count = self.tokens // length
                documents = [np.resize(self.packed[0], length) for _ in range(count)]
                (batch,) = scorer.plan([length] * count)
                call = partial(scorer.batch_scores, batch, documents)
                ms = side_by_side({name: call}, rounds=self.rounds, warm_up=2)[name]
                rate = self.tokens / ms * 1e3
                row[f"{count} x {length}"] = rate / self.table[name]["tokens/s"]
            say(str(row))
            rows.append(row)
        return rows

    def tell_kinds(self, name: str, title: str | None = None) -> None:
        if not self.profile:
            return
        scorer = self.models[name]
        attention = 2 * self.config.num_hidden_layers * self.length * self.config.hidden_size
        rows = profiled(
            self.batch(scorer),
            scorer.model,
            peak=self.peak,
            attention_flops=float(attention * self.tokens),
        )
        self.tell(f"{title or name}: by kind", rows)

    def of_mixed_lengths(self, name: str) -> dict[str, Any]:
        scorer = self.models[name]
        documents = self.mixed
        lengths = [len(ids) for ids in documents]
        scorer.document_nll([d[:700] for d in documents[:40]])  # the other graphs
        say(f"{name}: graphs for other shapes are made")
        some = documents[: len(documents) // 16]
        bits = same_bits(scorer.document_nll(some), scorer.document_nll(some))
        clean()
        plan = scorer.plan(lengths)
        synchronise()
        began = time.perf_counter()
        memory = peak_gib(lambda: scorer.document_nll(documents))
        seconds = time.perf_counter() - began
        processed = sum(len(w) for b in plan for w in b.windows)
        cells = sum(len(b.windows) * b.row_tokens for b in plan)
        packed_rate = self.table[name]["tokens/s"]
        row = {
            "mixed lengths": name,
            "documents": len(documents),
            "batches": len(plan),
            "shapes": len({(len(b.windows), b.row_tokens) for b in plan}),
            "share not padding": processed / cells,
            "tokens through the model/s": processed / seconds,
            "x packed rate": processed / seconds / packed_rate,
            "scored tokens/s": sum(lengths) / seconds,
            "scored x packed": sum(lengths) / seconds / packed_rate,
            "GiB over weights": memory,
            "same bits twice": bits,
        }
        say(str(row))
        return row


def targets(
    table: dict[str, dict[str, Any]], turns: list[dict[str, Any]], mixed: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(name: str, value: float | None, **limit: float) -> None:
        if value is not None:
            low, high = limit.get("at_least", 0.0), limit.get("at_most", float("inf"))
            told = {key.replace("_", " "): number for key, number in limit.items()}
            found.append({"target": name, **told, "found": value, "met": low <= value <= high})

    ours = table.get(BF16, {})
    add("bf16: x full logits", ours.get("x full logits"), at_least=RATE_TARGET)
    add("bf16: share of peak", ours.get("share of peak"), at_least=PEAK_TARGET)
    add("bf16: GiB over weights", ours.get("GiB over weights"), at_most=MEMORY_TARGET_GIB)
    for row in mixed:
        name = row["mixed lengths"]
        add(f"{name}: mixed x packed", row["x packed rate"], at_least=MIXED_TARGET)
        add(f"{name}: GiB over weights, mixed", row["GiB over weights"], at_most=MEMORY_TARGET_GIB)
    for row in turns:
        name = row["taking turns"]
        if name == WHOLE:
            add(f"{name}: tokens/s", row["tokens/s"], at_least=FP8_RATE_TARGET)
        if name == FOUR:
            add(f"{name}: x losses alone", row["x fp8"], at_least=FOUR_TARGET)
        if name == BF16:
            add("bf16: share of the peak beside it", row["share beside"], at_least=PEAK_TARGET)
        if name in FP8 and ours:
            memory = [t["GiB weights"] + t["GiB over weights"] for t in (table[name], ours)]
            add(f"{name}: x bf16", row["x bf16"], at_least=FP8_TARGET)
            add(f"{name}: GiB in all", memory[0], at_most=memory[1])
    return found


@torch.inference_mode()
def main() -> None:
    given = arguments(
        __doc__,
        few={"action": "store_true", "help": "compiled bf16 and fp8 of layers and head alone"},
        profile={"action": "store_true", "help": "where the time goes, by kind of work"},
        no_mixed={"action": "store_true", "help": "leave documents of mixed lengths out"},
    )
    # TF32 would spoil the reference
    torch.backends.cuda.matmul.allow_tf32 = False
    peak = matmul_peak()
    say(f"matmul peak {peak / 1e12:.1f} TFLOP/s")
    run = Benchmark(given.smoke, peak, given.profile, given.few, given.json)
    check = run.guarded("fp8 kernel", partial(kernel_check, given.smoke)) or []
    run.tell("fp8 products against their emulation", check)
    run.guarded("bf16", run.bf16)
    if not given.few:
        run.guarded(CUDNN, run.cudnn)
    for name, head_too in FP8.items():
        if head_too or not given.few:
            run.guarded(name, partial(run.fp8, name))
    title = f"scoring {run.rows} x {run.length}, peak {peak / 1e12:.0f} TFLOP/s"
    run.tell(title, list(run.table.values()))
    turns = run.guarded("turns", run.turns) or []
    run.tell("bf16 and fp8, taking turns", turns)
    names = [] if given.no_mixed else [n for n in run.models if n in FP8 or not given.few]
    if names:
        run.tell("shorter rows", run.guarded("shorter rows", run.other_shapes) or [])
    rows = [run.guarded(f"{n}, mixed", partial(run.of_mixed_lengths, n)) for n in names]
    mixed = [row for row in rows if row is not None]
    run.tell("documents of mixed lengths", mixed)
    run.tell("targets", targets(run.table, turns, mixed))
    for failure in run.failures:
        print(f"FAILED {failure}", file=sys.stderr if given.json else sys.stdout)
    say("done")


if __name__ == "__main__":
    main()
