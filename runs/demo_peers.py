"""Online losses of other projects against distillation from a store, in the demo's setting: with as
many tokens, and in as much time.

    pip install --no-deps trl==1.16.0
    python runs/demo_peers.py [--seeds 5] [--out out/demo-peers]

GOLD's loss is TRL's own class, unchanged, over whole documents, with the teacher beside the
student. Every rule has its own best rate. Prints two tables, and leaves them in the folder
(protocol and results: research/distillation.md). What is finished is not done again.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from demo_distill import BUDGET, MIXED, TUNING_PROBLEMS, TUNING_SEED, Rule, printed
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from vocagnolm import GuidedCollator, guide, guided_loss
from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.demo.corpus import Problem
from vocagnolm.files import write_json
from vocagnolm.objective import ObjectiveConfig
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.train.folder import read_metrics
from vocagnolm.workers import WorkerPool

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
STEP_TOKENS = 1024
"""As many as in a step of the demo's recipe."""
IGNORED = -100


@dataclass(frozen=True)
class Documents:
    """A rule that trains on whole documents instead of blocks: by an objective, GOLD's loss or
    both."""

    label: str
    objective: dict[str, Any] | None = None
    gold: dict[str, Any] | None = None


# as TRL has it by default; and matched tokens compared one by one, predictions where they belong
DEFAULT = {"uld_use_hybrid_loss": False, "uld_token_merge_strategy": "observed"}
HYBRID = {"uld_use_hybrid_loss": True, "uld_token_merge_strategy": "bayesian"}
CPT = {"method": "cpt"}
RULES: dict[str, Rule | Documents] = {
    "cpt": Rule("every token", CPT),
    "guided": Rule("published: top 40 % by token", {"method": "guided"}),
    "alm": Rule("approximate likelihood matching", {"method": "alm"}),
    "half": Rule("distilled, mix 0.5", MIXED),
    "uld": Rule("ULD, online", {"method": "uld"}),
    "masked": Rule("every token, blocks, masked", CPT),
    "longer": Rule("every token, blocks of 512", CPT),
    "longer-masked": Rule("every token, blocks of 512, masked", CPT),
    "longer-masked-half": Rule("distilled, mix 0.5, blocks of 512, masked", MIXED),
    "documents": Documents("every token, whole documents", CPT),
    "documents-guided": Documents("published: top 40 %, whole documents", {"method": "guided"}),
    "documents-half": Documents(
        "distilled, mix 0.5, whole documents", {"method": "distill", "mix": 0.5}
    ),
    "gold": Documents("GOLD's loss as by default, online", gold=DEFAULT),
    "hybrid": Documents("GOLD's hybrid loss, online", gold=HYBRID),
    "hybrid-text": Documents("GOLD's hybrid loss and every token, online", CPT, HYBRID),
}
LONGER, MASKED = {"block_size": 512}, {"document_mask": True}
PACKING: dict[str, dict[str, Any]] = {
    "masked": MASKED,
    "longer": LONGER,
    "longer-masked": LONGER | MASKED,
    "longer-masked-half": LONGER | MASKED,
}
"""Where the blocks are not the demo's."""
ONLINE = ("uld", "gold", "hybrid", "hybrid-text")


# ---- whole documents ----


@dataclass(frozen=True)
class Row:
    """A document in one vocabulary, behind the token that ends one; where its tokens lie."""

    ids: list[int]
    spans: list[tuple[int, int]]


def row(tokenizer: TextTokenizer, text: str) -> Row:
    tokens = tokenizer.spans(text)
    return Row(
        [tokenizer.vocabulary[students.END], *tokens.ids.tolist()],
        [(0, 0), *(tuple(span) for span in tokens.spans.tolist())],
    )


def batches(lengths: Sequence[int], tokens: int, seed: int) -> Iterator[list[int]]:
    """Documents in a new order for every pass, a step's tokens at a time, until `tokens` are
    read."""
    shuffled, batch, read, pending = random.Random(seed), list[int](), 0, 0
    while True:
        for document in shuffled.sample(range(len(lengths)), len(lengths)):
            batch.append(document)
            pending += lengths[document]
            if pending >= STEP_TOKENS or read + pending >= tokens:
                yield batch
                read += pending
                if read >= tokens:
                    return
                batch, pending = [], 0


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, labels (none for the first token and the padding) and byte offsets."""
    longest = max(len(r.ids) for r in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    spans = torch.zeros(len(rows), longest, 2, dtype=torch.long)
    for place, r in enumerate(rows):
        length = len(r.ids)
        ids[place, :length] = torch.tensor(r.ids)
        labels[place, 1:length] = ids[place, 1:length]
        spans[place, :length] = torch.tensor(r.spans)
    return ids, labels, spans


def guided_rows(out: Path, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Columns of a store, placed as the tokens of `row`: one more in front, no end behind."""
    tokenizer = AutoTokenizer.from_pretrained(students.START)
    dataset = datasets.Dataset.from_list([{"text": text} for text in texts])
    no_targets = [0] * students.ALTERNATIVES
    first = {
        "input_ids": tokenizer.convert_tokens_to_ids(students.END),
        "labels": IGNORED,
        "guidance": math.nan,
        "target_ids": no_targets,
        "target_p": no_targets,
    }
    return [
        {name: [first[name], *found[name][:-1]] for name in first}
        for found in guide(dataset, out / "store", tokenizer)
    ]


def gold_loss(settings: dict[str, Any]) -> Any:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gold.gold_trainer import ULDLoss

    config = types.SimpleNamespace(
        uld_crossentropy_weight=0.0,  # that of the objective, over the tokens of all rows
        uld_distillation_weight=1.0,
        uld_student_temperature=1.0,
        uld_teacher_temperature=1.0,
        uld_skip_student_eos=False,  # no document ends with one
        uld_skip_teacher_eos=False,
        use_extended_uld=True,
        beta=0.5,
        **settings,
    )
    mine, theirs = (AutoTokenizer.from_pretrained(p) for p in (students.START, students.TEACHER))
    return ULDLoss(config, mine, theirs, torch.device("cpu"))


def train_on_documents(
    out: Path, rule: Documents, rate: float, tokens: int, seed: int, folder: Path
) -> float:
    """The demo's recipe in a plain loop; student tokens a second."""
    lines = (out / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [str(json.loads(line)["text"]) for line in lines]
    tokenizers = [load_tokenizer(path) for path in (students.START, students.TEACHER)]
    mine, theirs = ([row(tokenizer, text) for text in texts] for tokenizer in tokenizers)
    plan = list(batches([len(r.ids) - 1 for r in mine], tokens, seed))
    model = AutoModelForCausalLM.from_pretrained(students.START, dtype=torch.float32).train()
    teacher = AutoModelForCausalLM.from_pretrained(students.TEACHER, dtype=torch.float32).eval()
    gold = gold_loss(rule.gold) if rule.gold is not None else None
    objective = ObjectiveConfig(**rule.objective) if rule.objective is not None else None
    needs_store = objective is not None and objective.method != "cpt"
    guided, collate = guided_rows(out, texts) if needs_store else [], GuidedCollator()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=min(20, len(plan) // 2),
        num_training_steps=len(plan),
        scheduler_specific_kwargs={"min_lr": rate / 20},
    )
    speeds = []
    for batch in plan:
        began = time.perf_counter()
        ids, labels, spans = padded([mine[document] for document in batch])
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.zeros(())
        if objective is not None:
            columns = collate([guided[document] for document in batch]) if needs_store else {}
            loss = guided_loss(logits, labels, columns, objective)
        if gold is not None:
            their_ids, their_labels, their_spans = padded([theirs[document] for document in batch])
            with torch.no_grad():
                their_logits = teacher(input_ids=their_ids, use_cache=False).logits
            both = logits, their_logits, labels, their_labels, ids, their_ids, spans, their_spans
            loss = loss + gold(*both)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        speeds.append(int((labels != IGNORED).sum()) / (time.perf_counter() - began))
    shutil.copytree(students.START, folder / "model", dirs_exist_ok=True)
    model.save_pretrained(folder / "model")
    return statistics.median(speeds)


# ---- the study ----


def recipe_of(out: Path, name: str, rate: float, tokens: int, seed: int) -> Recipe:
    rule = RULES[name]
    assert isinstance(rule, Rule)
    tree = students.recipe_of(out, "cpt", seed, BUDGET).to_dict()
    tree["objective"] = rule.objective
    tree["optimizer"] |= {"learning_rate": rate, "min_learning_rate": rate / 20}
    tree["train"]["tokens"] = tokens
    if tokens < BUDGET.tokens:
        steps = math.ceil(tokens / STEP_TOKENS)
        tree["optimizer"]["warmup_steps"] = min(20, steps // 2)
    tree["run"]["folder"] = str(out / "runs" / f"{name}-{tokens}-{rate:g}-{seed}")
    tree["run"]["log_every"] = 1
    if name in ONLINE:
        tree["teacher"] = {"model": str(students.TEACHER), "online": True}
        del tree["store"]
    blocks = f"blocks-{name if name in PACKING else rule.objective['method']}"
    tree["data"] |= {"blocks": str(out / blocks), **PACKING.get(name, {})}
    tree["train"]["batch_blocks"] = STEP_TOKENS // tree["data"]["block_size"]
    tree["train"]["micro_batch"] = tree["train"]["batch_blocks"]
    return recipe_from_dict(tree, origin=f"rule {name}")


def train(
    out: Path,
    name: str,
    rate: float,
    tokens: int,
    seed: int,
    held_out: Path,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    rule = RULES[name]
    if isinstance(rule, Rule):
        recipe = recipe_of(out, name, rate, tokens, seed)
        found = students.train_and_measure(recipe, held_out, problems)
        records = read_metrics(Path(recipe.run.folder or "") / "metrics.jsonl")
        return found | {"speed": statistics.median(r["tokens_per_second"] for r in records)}
    folder = out / "runs" / f"{name}-{tokens}-{rate:g}-{seed}"
    measured = folder / "measures.json"
    if not measured.is_file():
        students.one_thread()
        torch.manual_seed(seed)
        speed = train_on_documents(out, rule, rate, tokens, seed, folder)
        measures = students.measure(folder / "model", held_out, problems)
        write_json(measured, measures | {"speed": speed})
    known: dict[str, Any] = json.loads(measured.read_text("utf-8"))
    return known


def make_materials(out: Path) -> tuple[Path, list[Problem], list[Problem]]:
    """Corpus, store and blocks; problems to report, and problems to choose rates by."""
    documents = corpus.corpus_documents(BUDGET.documents)
    corpus.write_jsonl(out / "corpus.jsonl", documents)
    problems = corpus.held_out_problems(BUDGET.problems + TUNING_PROBLEMS, documents)
    held_out = out / "held-out.jsonl"
    corpus.write_held_out(held_out, problems[: BUDGET.problems])
    students.score(students.TEACHER, out / "corpus.jsonl", out / "store", students.ALTERNATIVES)
    for name, rule in RULES.items():
        if isinstance(rule, Rule):
            prepare(recipe_of(out, name, RATES[0], BUDGET.tokens, 0))
    return held_out, problems[: BUDGET.problems], problems[BUDGET.problems :]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/demo-peers"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    out: Path = given.out
    students.quiet()
    held_out, reported, choosing = make_materials(out)
    os.environ["OMP_NUM_THREADS"] = "1"
    with WorkerPool(given.workers) as pool:

        def study(lengths: dict[str, int]) -> list[dict[str, Any]]:
            tried = {
                (name, rate): pool.submit(
                    train, out, name, rate, tokens, TUNING_SEED, held_out, choosing
                )
                for name, tokens in lengths.items()
                for rate in RATES
            }
            tuning = {key: tried[key].result() for key in track(tried, "rates")}
            best = {
                name: max(RATES, key=lambda rate: tuning[name, rate]["exact"]) for name in lengths
            }
            runs = {
                (name, seed): pool.submit(
                    train, out, name, best[name], tokens, seed, held_out, reported
                )
                for seed in range(given.seeds)
                for name, tokens in lengths.items()
            }
            found = {key: runs[key].result() for key in track(runs, "runs")}
            return [
                {
                    "row": name,
                    "label": RULES[name].label,
                    "tokens": tokens,
                    "tokens_per_second": statistics.median(
                        [found[name, seed]["speed"] for seed in range(given.seeds)]
                    ),
                    "learning_rate": best[name],
                    "tuning": {f"{rate:g}": 100 * tuning[name, rate]["exact"] for rate in RATES},
                    "exact": [100 * found[name, seed]["exact"] for seed in range(given.seeds)],
                    "clean": [found[name, seed]["bits_per_byte"] for seed in range(given.seeds)],
                }
                for name, tokens in lengths.items()
            ]

        equal_tokens = study(dict.fromkeys(RULES, BUDGET.tokens))
        speed = {row["row"]: row["tokens_per_second"] for row in equal_tokens}
        equal_time = study(
            {name: round(BUDGET.tokens * speed[name] / speed["cpt"]) for name in ONLINE}
        )
    offline = [row for row in equal_tokens if row["row"] in ("cpt", "half")]
    write_results(out, equal_tokens, [*offline, *equal_time])


def write_results(
    out: Path, equal_tokens: list[dict[str, Any]], equal_time: list[dict[str, Any]]
) -> None:
    for title, rows in (("equal tokens", equal_tokens), ("equal time", equal_time)):
        print(f"\n**{title}**\n\n{printed(rows)}\n")
        plain = rows[0]["tokens_per_second"]
        for row in rows:
            share = row["tokens_per_second"] / plain
            print(f"{row['row']}: {row['tokens']:,} tokens, {share:.3f} x the speed of every token")
    write_json(out / "demo-peers.json", {"equal_tokens": equal_tokens, "equal_time": equal_time})


if __name__ == "__main__":
    main()
