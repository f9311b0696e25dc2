"""Scoring on one GPU: its rate, share of the matmul peak and memory, in three parts.

    PYTHONPATH=src python benchmarks/score_gpu.py [--few] [--profile] [--no-mixed]
    PYTHONPATH=src python benchmarks/score_gpu.py alternatives [--shapes tinyllama,qwen2.5-1.5b]
    PYTHONPATH=src python benchmarks/score_gpu.py corpus --teacher DIR --corpus FILE [--random]
        [--documents N] [--dtype bfloat16|fp8]

All take [--json FILE] and [--smoke], which needs no GPU.

`engines`, the first, stands beside Hugging Face's full logits, in bf16 and in fp8; six minutes. A
7B Qwen2.5-shaped teacher with random weights in bf16. `packed` is 8 documents of 2,048 tokens;
`mixed` is a shard of 1,024 documents with the lengths of a real corpus (nLab, Qwen2.5's tokenizer),
cut into windows and batches by the plan that `vocagnolm score` uses. fp8 is of two kinds: the
decoder's layers alone, and the head as well. Both stand beside bf16 in memory, and the three take
turns with large products of the same duration: a card that draws all the power it may lowers its
clock, and the peak of a short burst is not that of a day. One row has bf16 with cuDNN's attention
instead of torch's own choice. --few: compiled bf16 and fp8 of layers and head alone, and mixed
lengths in fp8 alone. --profile adds where the time of a batch goes, by kind of work. Targets: at
least 1.15 x the tokens/s of full logits, at least 85 % of the measured matmul peak, at most 3 GiB
over the weights; mixed lengths at least 97 % of the packed rate; fp8 at least 1.5 x bf16 and 72
thousand tokens/s, with no more memory, and 95 % of that with four alternatives; the same documents
give the same bits. Errors are against a float32 head on the hidden states of bf16. A contestant
that fails says why, and the rest goes on.

`alternatives`: losses alone, with 1, 4, 16 and 64 alternatives, and with 4 that are drawn, taking
turns, for teachers of 32,000 and 151,936 tokens; two minutes. What is kept is brought to the host,
as `score` does. The logits of random weights are flatter than a teacher's, which changes nothing of
the work. Target: with 4 alternatives at least 0.95 x the rate without.

`corpus`: `vocagnolm score` as a user runs it, against the rate of its model alone on the same
documents. Two starts of the command in processes of their own, with real text of mixed lengths,
tokenising and writing included: the first finds no compiled graphs, the second those of the first.
Each row has the seconds as the command reports them, and its rate over that of `alone`: the same
documents, shard by shard as they are scored, tokenised before the clock starts and written nowhere,
on a model that is loaded and compiled. `warm process` is the work of the command once more, in the
process of `alone`: what reading and writing cost without what a device does only at its first use.
--random: DIR has a configuration and a tokenizer, the weights are made up. Where typer is missing,
the library is called instead of the command. Target: scoring within 5 % of `alone`.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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
from record import STDOUT
from shapes import CUDA, DEVICE, config_of, forward_flops, random_teacher, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from vocagnolm.alternatives import Alternatives, AlternativesSpec
from vocagnolm.data.corpus import open_corpus
from vocagnolm.model import fp8, open_model
from vocagnolm.model.fp8 import Fp8Linear, to_fp8
from vocagnolm.model.nll import NllModel
from vocagnolm.model.runtime import compiling_seconds
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.score.teacher import LocalTeacher
from vocagnolm.score.work import prepare_shard

RATE_TARGET, PEAK_TARGET, MEMORY_TARGET_GIB, MIXED_TARGET = 1.15, 0.85, 3.0, 0.97
ALONE_TARGET = 0.95
FP8_TARGET, FP8_RATE_TARGET, FOUR_TARGET = 1.5, 72_000, 0.95
FULL, PLAIN, BF16 = "HF full logits", "chunked head", "chunked head, compiled layers"
PRODUCTS = "large products"
CUDNN = "the same, cuDNN's attention"  # torch prefers FlashAttention 2
WHOLE = "fp8 layers and head"
FP8 = {"fp8 layers, bf16 head": False, WHOLE: True}  # name -> the head too
FOUR = f"{WHOLE}, 4 alternatives"
STARTED = time.perf_counter()
# Every 4th percentile of document lengths in tokens: nLab, 2,210 documents, mean 1,589. The
# longest is cut to 40,000: one document of 181,391 would be a tenth of the work.
LENGTH_QUANTILES = (
    *(1, 18, 45, 102, 153, 187, 226, 269, 307, 358, 416, 482, 550, 626, 733, 833, 966, 1108),
    *(1287, 1510, 1797, 2220, 2965, 3995, 6384, 40000),
)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def bytes_of(model: Any) -> int:
    held = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(held.values())


def same_bits(first: list[np.ndarray], again: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


def mixed_lengths(documents: int, scale: float) -> list[int]:
    """Lengths with the corpus's quantiles, in a fixed random order."""
    draw = np.random.default_rng(0)
    places = draw.random(documents) * (len(LENGTH_QUANTILES) - 1)
    lengths = np.interp(places, np.arange(len(LENGTH_QUANTILES)), LENGTH_QUANTILES)
    whole: list[int] = np.maximum(2, lengths * scale).astype(int).tolist()
    return whole


def full_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    flat = logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none")


def exact_head(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 products of the model's own hidden states, a few tokens at a time."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    weight = model.lm_head.weight.float()
    parts = [
        F.cross_entropy(h.float() @ weight.T, y, reduction="none")
        for h, y in zip(hidden.split(512), labels.split(512), strict=True)
    ]
    return torch.cat(parts)


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
    as_json: str
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, NllModel] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.length = (2, 256) if self.smoke else (8, 2048)
        self.rounds = 2 if self.smoke else 5
        self.tokens = self.rows * self.length
        self.config = config_of("qwen2.5-7b", self.smoke, 640)
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

    def teacher(self) -> Any:
        return random_teacher("qwen2.5-7b", self.smoke, vocabulary=640)

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
        model = self.teacher()
        self.flops = forward_flops(self.config, self.length)
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
        model = self.teacher()
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
def engines(given: Any) -> None:
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
        print(f"FAILED {failure}", file=sys.stderr if given.json == STDOUT else sys.stdout)
    say("done")


# ---- alternatives ----

KEPT = ("0", "1", "4", "16", "64", "sampled:4")


def scored(scorer: NllModel, documents: list[np.ndarray]) -> Callable[[], Any]:
    return lambda: scorer.start(documents)()


def alternatives(given: Any) -> None:
    batch, length = (2, 64) if given.smoke else (8, 2048)
    for name in given.shapes.split(","):
        model = random_teacher(name, given.smoke, vocabulary=2000)
        vocabulary = model.config.vocab_size
        draw = np.random.default_rng(0)
        documents = [
            draw.integers(0, vocabulary, length - 1).astype(np.int32) for _ in range(batch)
        ]
        options: dict[str, Any] = {
            "context": length,
            "stride": length // 8,
            "batch_tokens": batch * length,
            "prefix_ids": (0,),
        }
        scorers = {
            kept: NllModel(
                model,
                **options,
                compiled=CUDA and kept == "0",  # the layers, once for all of them
                alternatives=AlternativesSpec.parse(kept),
            )
            for kept in KEPT
        }
        calls = {kept: scored(scorer, documents) for kept, scorer in scorers.items()}
        plain = calls["0"]()
        times = side_by_side(calls, rounds=1 if given.smoke else given.rounds)
        rows = []
        for kept, call in calls.items():
            clean()
            first, second = call(), call()
            same = all(
                a.nll.tobytes() == b.nll.tobytes()
                and (a.alternatives is None or a.alternatives.tobytes() == b.alternatives.tobytes())
                for a, b in zip(first, second, strict=True)
            )
            losses = all(np.array_equal(a.nll, b.nll) for a, b in zip(first, plain, strict=True))
            row: dict[str, Any] = {
                "alternatives": kept,
                "ms": times[kept],
                "tokens/s": batch * length / times[kept] * 1e3,
                "of losses alone": times["0"] / times[kept],
                "GiB beside the weights": peak_gib(call),
                "same bits twice": same,
                "same losses as alone": losses,
            }
            if kept == "4":
                row["right tokens"] = right_tokens(model, documents[0], first[0].alternatives)
            rows.append(row)
        report(f"scoring with alternatives, {name}, {batch} x {length}", rows, given.json)
        reached = times["0"] / times["4"]
        print(f"{name}: {reached:.3f} of the rate without, target {FOUR_TARGET}", file=sys.stderr)
        del model, scorers, calls
        clean()


@torch.inference_mode()
def right_tokens(model: Any, ids: np.ndarray, packed: np.ndarray) -> float:
    """Share of the alternatives that a plain search of full float32 logits finds too; bf16 layers
    give the same hidden states, and logits that are equal may come in any order."""
    tokens = torch.tensor([[0, *ids.tolist()]], device=DEVICE)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1].float()
    logits = hidden @ model.lm_head.weight.float().T
    found = Alternatives(packed).ids
    best = logits.topk(found.shape[1]).indices.cpu().numpy()
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(found, best, strict=True)]))


# ---- a corpus, from end to end ----

LIBRARY = """
import time
began = time.perf_counter()
import dataclasses, json, sys
from vocagnolm.score import ScoreSettings, score_corpus
imported = time.perf_counter() - began
teacher, corpus, out, limit, settings = json.loads(sys.argv[1])
summary = score_corpus(
    teacher, corpus, out, settings=ScoreSettings(**settings), limit_documents=limit
)
summary = dataclasses.replace(summary, times=summary.times.with_earlier(imported))
print(json.dumps(dataclasses.asdict(summary)))
"""


def command(
    teacher: str, corpus: str, out: Path, limit: int | None, settings: dict[str, Any]
) -> list[str]:
    if importlib.util.find_spec("typer") is None:
        given = json.dumps([teacher, corpus, str(out), limit, settings])
        return [sys.executable, "-c", LIBRARY, given]
    words = [sys.executable, "-m", "vocagnolm", "score", "--json"]
    words += ["--teacher", teacher, "--corpus", corpus, "--out", str(out)]
    if limit is not None:
        words += ["--limit-documents", str(limit)]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def started(name: str, words: list[str], cache: Path) -> dict[str, Any]:
    """One start of the command: its times, and its rates over those seconds."""
    environment = os.environ | {"VOCAGNOLM_CACHE": str(cache)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    began = time.perf_counter()
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    wall = time.perf_counter() - began
    if ended.returncode != 0:
        raise SystemExit(f"{name} failed: {ended.stdout[-2000:]}")
    return told(name, json.loads(ended.stdout), wall)


def told(name: str, summary: dict[str, Any], wall: float) -> dict[str, Any]:
    times = summary["times"]
    row = {"run": name, **times, "all": wall}
    row |= {"tokens": summary["tokens"], "tokens/s": summary["tokens"] / times["scoring"]}
    row["tokens/s, all"] = summary["tokens"] / wall
    say(str(row))
    return row


def alone(
    teacher: str, corpus: str, limit: int | None, settings: ScoreSettings
) -> tuple[float, dict[str, Any]]:
    """Tokens a second of plan and forward, after everything else; and how long tokenising takes."""
    opened = LocalTeacher(
        open_model(teacher, device=settings.device, dtype=settings.dtype), settings
    )
    texts = open_corpus(corpus, limit=limit)
    count = -(-len(texts) // settings.shard_documents)
    began = time.perf_counter()
    shards = [prepare_shard(texts, opened, settings, number) for number in range(count)]
    reading = time.perf_counter() - began
    opened.load()
    opened.nll(shards[0].tokenized)  # all graphs are made
    synchronise()
    compiled, began = compiling_seconds(), time.perf_counter()
    for shard in shards:
        opened.nll(shard.tokenized)
    synchronise()
    seconds = time.perf_counter() - began - (compiling_seconds() - compiled)
    tokens = sum(shard.tokens for shard in shards)
    row = {"run": "alone", "scoring": seconds, "tokens": tokens, "tokens/s": tokens / seconds}
    row["reading and tokenising"] = reading
    say(str(row))
    return tokens / seconds, row


def with_random_weights(source: str, folder: Path) -> str:
    """A teacher with this configuration and tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.gguf"))
    config = AutoConfig.from_pretrained(source)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return str(folder)


def smoke_corpus(path: Path) -> str:
    from vocagnolm.report.comparison import SAMPLE

    texts = [text * (1 + number % 3) for number in range(8) for text in SAMPLE]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def corpus(given: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: dict[str, Any] = {"dtype": given.dtype}
        teacher, corpus = given.teacher, given.corpus
        if given.smoke:
            teacher = tiny_model(folder / "teacher", 500, layers=2)
            corpus = smoke_corpus(folder / "corpus.jsonl")
            settings |= {"context": 64, "shard_documents": 16}
        elif given.random:
            teacher = with_random_weights(teacher, folder / "teacher")
        rows = []
        for start in ("first start", "second start"):
            out = folder / start.replace(" ", "-")
            words = command(teacher, corpus, out, given.documents, settings)
            rows.append(started(start, words, folder / "cache"))
        os.environ["VOCAGNOLM_CACHE"] = str(folder / "cache")
        chosen = ScoreSettings(**settings)
        rate, row = alone(teacher, corpus, given.documents, chosen)
        began = time.perf_counter()
        again = score_corpus(
            teacher, corpus, folder / "warm", settings=chosen, limit_documents=given.documents
        )
        rows.append(told("warm process", asdict(again), time.perf_counter() - began))
        for measured in rows:
            measured["scoring x alone"] = measured["tokens/s"] / rate
            measured["all x alone"] = measured["tokens/s, all"] / rate
            measured["met"] = measured["scoring x alone"] >= ALONE_TARGET
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        title = (
            f"{Path(given.teacher or 'tiny').name}, {given.dtype}, end to end, {device}; seconds"
        )
        report(title, [*rows, row], given.json)


PARTS = {"engines": engines, "alternatives": alternatives, "corpus": corpus}


def main() -> None:
    given = arguments(
        __doc__,
        parts=tuple(PARTS),
        few={"action": "store_true", "help": "engines: compiled bf16 and whole fp8 alone"},
        profile={"action": "store_true", "help": "engines: where the time goes, by kind of work"},
        no_mixed={"action": "store_true", "help": "engines: without documents of mixed lengths"},
        shapes={"default": "tinyllama,qwen2.5-1.5b", "help": "alternatives: of these teachers"},
        rounds={"type": int, "default": 7, "help": "alternatives: how often each takes its turn"},
        teacher={"help": "corpus: a model folder"},
        corpus={"help": "corpus: jsonl with a field `text`"},
        random={"action": "store_true", "help": "corpus: made-up weights for --teacher"},
        documents={"type": int, "help": "corpus: read at most so many documents"},
        dtype={"default": "auto", "help": "corpus: bfloat16 or fp8"},
    )
    if given.part == "corpus" and not given.smoke and None in (given.teacher, given.corpus):
        raise SystemExit("corpus needs --teacher and --corpus, or --smoke to try without them")
    PARTS[given.part](given)


if __name__ == "__main__":
    main()
