"""A whole training step: plain pretraining, guided from stored losses, and an online teacher.

    PYTHONPATH=src python benchmarks/train_step_gpu.py [--third-party DIR] [--json [FILE]] [--smoke]

TinyLlama-1.1B's shape with random weights, 8 x 2048 tokens, bf16, compiled decoder layers, fused
AdamW. The same layers serve every head, taking turns. The online part holds a teacher of
Qwen2.5-7B's shape and, where TRL's `gold_trainer.py` lies in --third-party, TRL's GOLD loss.
MFU counts 6 operations per parameter and token (the work of plain training) against the matrix
product rate measured on the same device. Targets: guided at least 1.00 x plain with Liger's cross
entropy, at least 20 x TRL GOLD, at least 70 thousand tokens/s; by stretch at most 1 % slower than
by token; reducible and alm, which train nearly all tokens, at least 0.95 x plain; distilled from
four stored alternatives a token at least 0.97 x plain, in at most 1.1 x its memory. One H200, under
five minutes.
"""

import ast
import random
import sys
import time
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    GIB,
    arguments,
    clean,
    liger_cross_entropy,
    matmul_peak,
    milliseconds,
    report,
    side_by_side,
    stored_targets,
    synchronise,
)
from shapes import CUDA, DEVICE, config_of, forward_flops, random_model, random_teacher
from torch import Tensor, nn

from vocagnolm.objective import Head, ObjectiveConfig, Targets, objective_loss, student_nll

CPT = ObjectiveConfig(method="cpt")
FROM_STORE = {
    "guided, stored losses": ObjectiveConfig(method="guided", keep=0.4),
    "guided by stretch": ObjectiveConfig(method="guided", keep=0.4, compare="stretch"),
    "reducible by stretch": ObjectiveConfig(compare="stretch", weighting="reducible"),
    "alm": ObjectiveConfig(method="alm"),
}
DISTILLED = {
    "distilled, 1 alternative": (ObjectiveConfig(method="distill"), 1),
    "distilled, 4 alternatives": (ObjectiveConfig(method="distill"), 4),
    "distilled, 16 alternatives": (ObjectiveConfig(method="distill"), 16),
    "distilled, 4, kept 40 %": (ObjectiveConfig(method="distill", keep=0.4), 4),
}


def compiled_layers(model: Any, compiled: bool) -> Any:
    """The model with its layers compiled one by one: all of them share one compilation."""
    for layer in model.model.layers if compiled else ():
        layer.compile(dynamic=False)
    return model


def hidden_of(model: Any, ids: Tensor) -> Tensor:
    hidden: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def shifted(ids: Tensor) -> Tensor:
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def heads(ids: Tensor, guidance: Tensor) -> dict[str, Callable[[Any], Tensor]]:
    """Name -> what gives the loss of one step of a model."""
    labels = shifted(ids)
    vocabulary = int(ids.max()) + 1

    def ours(config: ObjectiveConfig, alternatives: int = 0) -> Callable[[Any], Tensor]:
        given = stored_targets(labels, guidance, config, vocabulary, alternatives)

        def loss(model: Any) -> Tensor:
            head = Head(weight=model.lm_head.weight)
            return objective_loss(hidden_of(model, ids), head, given, config).loss

        return loss

    def full(model: Any) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    found = {
        "plain, full logits": full,
        "plain, ours": ours(CPT),
        **{name: ours(config) for name, config in FROM_STORE.items()},
        **{name: ours(*settings) for name, settings in DISTILLED.items()},
    }
    liger = liger_cross_entropy() if CUDA else None
    if liger is not None:
        for const in (1, 16):

            def with_liger(model: Any, const: int = const) -> Tensor:
                hidden = hidden_of(model, ids).flatten(0, 1)
                weight = model.lm_head.weight
                return liger(hidden, weight, labels.flatten(), chunk_mem_const=const)

            found[f"plain, Liger (chunk const {const})"] = with_liger
    return found


def gold_loss(folder: Path | None) -> Callable[..., Tensor] | None:
    """TRL's GOLD loss, taken out of its source: the trainer around it needs all of TRL."""
    sources = sorted(folder.rglob("gold_trainer.py")) if folder else []
    if not sources:
        print("TRL GOLD is left out: no gold_trainer.py in --third-party", file=sys.stderr)
        return None
    tree = ast.parse(sources[0].read_text("utf-8"))
    loss = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ULDLoss")
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "GOLDConfig": object}
    exec(compile(ast.Module([loss], []), str(sources[0]), "exec"), space)
    config = types.SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=1.0,
        uld_teacher_temperature=1.0,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=True,
        uld_token_merge_strategy="observed",
    )
    made: Callable[..., Tensor] = space["ULDLoss"](config)
    return made


def byte_spans(tokens: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Spans of two tokenizers over one text: one teacher token in twenty covers two of the
    student's, as for close vocabularies (more would only cost GOLD more)."""
    rng = random.Random(0)
    bounds = [0]
    for _ in range(tokens):
        bounds.append(bounds[-1] + rng.randint(1, 6))
    student = list(pairwise(bounds))
    teacher, i = [], 0
    while i < tokens:
        j = min(tokens, i + (2 if rng.random() < 0.05 else 1))
        teacher.append((bounds[i], bounds[j]))
        i = j
    return student, teacher


def online(
    student_ids: Tensor, teacher_ids: Tensor, teacher: Any, folder: Path | None
) -> dict[str, Callable[[Any], Tensor]]:
    labels, teacher_labels = shifted(student_ids), shifted(teacher_ids)

    def guided(model: Any) -> Tensor:
        with torch.no_grad():
            head = Head(weight=teacher.lm_head.weight)
            guidance = student_nll(hidden_of(teacher, teacher_ids), head, teacher_labels)
        head = Head(weight=model.lm_head.weight)
        return objective_loss(
            hidden_of(model, student_ids),
            head,
            Targets(labels_BT=labels, guidance_BT=guidance),
            FROM_STORE["guided, stored losses"],
        ).loss

    found: dict[str, Callable[[Any], Tensor]] = {"guided, online 7B teacher": guided}
    gold = gold_loss(folder)
    if gold is not None:
        rows, length = student_ids.shape
        one, other = byte_spans(length)
        spans = torch.tensor([one] * rows, device=DEVICE)
        teacher_spans = torch.tensor([other] * rows, device=DEVICE)
        ids = teacher_ids[:, : len(other)]

        def with_gold(model: Any) -> Tensor:
            with torch.no_grad():
                teacher_logits = teacher(input_ids=teacher_ids, use_cache=False).logits
            logits = model(input_ids=student_ids, use_cache=False).logits
            return gold(
                logits,
                teacher_logits[:, : len(other)],
                student_ids,
                ids,
                student_ids,
                ids,
                spans,
                teacher_spans,
            )

        found["TRL GOLD, online 7B teacher"] = with_gold
    return found


def main() -> None:
    given = arguments(
        __doc__,
        batch={"type": int, "default": 8},
        length={"type": int, "default": 2048},
        rounds={"type": int, "default": 8},
        no_compile={"action": "store_true"},
        no_online={"action": "store_true", "help": "leave the 7B teacher out"},
    )
    torch.manual_seed(0)
    smoke = given.smoke
    batch, length, rounds = (2, 32, 2) if smoke else (given.batch, given.length, given.rounds)
    compiled = CUDA and not given.no_compile
    config = config_of("tinyllama", smoke)
    peak = matmul_peak()
    ids = torch.randint(0, config.vocab_size, (batch, length), device=DEVICE)
    guidance = 10 * torch.rand(batch, length, device=DEVICE)
    model = compiled_layers(random_model(config), compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=CUDA)

    def step(loss_of: Callable[[Any], Tensor]) -> Callable[[], None]:
        def call() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss_of(model).backward()
            optimizer.step()

        return call

    started = time.time()
    stored = {name: step(f) for name, f in heads(ids, guidance).items()}
    times = side_by_side(stored, rounds=rounds)
    memory = {name: peak_total(call) for name, call in stored.items()}
    print(f"stored part: {time.time() - started:.0f} s", file=sys.stderr)
    if not given.no_online:
        clean()
        teacher = compiled_layers(random_teacher("qwen2.5-7b", smoke, vocabulary=500), compiled)
        vocabulary = teacher.config.vocab_size
        teacher_ids = torch.randint(0, vocabulary, (batch, length), device=DEVICE)
        for name, f in online(ids, teacher_ids, teacher, given.third_party).items():
            call = step(f)
            call()  # compiles, warms up
            synchronise()
            times[name] = min(milliseconds(call) for _ in range(2))
            memory[name] = peak_total(call) if "GOLD" not in name else None
        print(f"all: {time.time() - started:.0f} s", file=sys.stderr)
    flops = 3 * forward_flops(config, length)
    rows = [
        {
            "step": name,
            "ms": ms,
            "tokens/s": batch * length / ms * 1e3,
            "MFU": batch * length / ms * 1e3 * flops / peak,
            "peak GiB": memory[name],
        }
        for name, ms in times.items()
    ]
    add_ratios(rows, times)
    title = "smoke" if smoke else f"{torch.cuda.get_device_name()}, {peak / 1e12:.0f} TFLOP/s"
    report(f"train step, {batch} x {length}, {title}", rows, given.json)


def peak_total(call: Callable[[], None]) -> float | None:
    if not CUDA:
        return None
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def add_ratios(rows: list[dict[str, Any]], times: dict[str, float]) -> None:
    guided = next(row for row in rows if row["step"] == "guided, stored losses")
    plain = next(row for row in rows if row["step"] == "plain, ours")
    for row in rows:
        row["rate over plain, ours"] = times["plain, ours"] / row["ms"]
        if row["peak GiB"] and plain["peak GiB"]:
            row["memory over plain, ours"] = row["peak GiB"] / plain["peak GiB"]
    liger = [ms for name, ms in times.items() if "Liger" in name]
    gold = times.get("TRL GOLD, online 7B teacher")
    guided["x plain"] = times["plain, full logits"] / guided["ms"]
    if liger:
        guided["x Liger plain"] = min(liger) / guided["ms"]
    if gold:
        guided["x TRL GOLD"] = gold / guided["ms"]


if __name__ == "__main__":
    main()
