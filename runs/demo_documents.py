"""Training on whole documents instead of blocks, in the demo's setting: by an objective over a
store, by the loss of TRL's GOLD with the teacher online, or by both (for `runs/demo.py peers`).
"""

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

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from vocagnolm import GuidedCollator, guide, guided_loss
from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.demo import students
from vocagnolm.objective import ObjectiveConfig

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


@dataclass(frozen=True)
class Row:
    """A document in one vocabulary, behind the token that ends one; where its tokens lie."""

    ids: list[int]
    spans: list[tuple[int, int]]


def tokenized(tokenizer: TextTokenizer, text: str) -> Row:
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
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    spans = torch.zeros(len(rows), longest, 2, dtype=torch.long)
    for place, row in enumerate(rows):
        length = len(row.ids)
        ids[place, :length] = torch.tensor(row.ids)
        labels[place, 1:length] = ids[place, 1:length]
        spans[place, :length] = torch.tensor(row.spans)
    return ids, labels, spans


def guided_rows(out: Path, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Columns of a store, placed as the tokens of `tokenized`: one more in front, no end behind."""
    import datasets

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
        {name: [first[name], *columns[name][:-1]] for name in first}
        for columns in guide(dataset, out / "store", tokenizer)
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
    ours, theirs = (AutoTokenizer.from_pretrained(p) for p in (students.START, students.TEACHER))
    return ULDLoss(config, ours, theirs, torch.device("cpu"))


def train_on_documents(
    out: Path, rule: Documents, rate: float, tokens: int, seed: int, folder: Path
) -> float:
    """Train by the demo's recipe in a plain loop; student tokens a second."""
    lines = (out / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [str(json.loads(line)["text"]) for line in lines]
    tokenizers = [load_tokenizer(path) for path in (students.START, students.TEACHER)]
    ours, theirs = ([tokenized(tokenizer, text) for text in texts] for tokenizer in tokenizers)
    plan = list(batches([len(row.ids) - 1 for row in ours], tokens, seed))
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
        ids, labels, spans = padded([ours[document] for document in batch])
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
