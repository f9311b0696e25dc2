"""Answers that a tiny student draws, and recipes of rounds over the chat lab."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from vocagnolm.chat import ChatTokenizer
from vocagnolm.chat.messages import Message, shared_text
from vocagnolm.generate.decoder import Decoder, PromptTokens
from vocagnolm.generate.draw import Sampling
from vocagnolm.generate.reading import end_ids, known_ids
from vocagnolm.model import open_model
from vocagnolm.rounds.targets import Rollout


def drawn(
    student: ChatTokenizer, folder: Path, prompts: list[str], limit: int = 24, seed: int = 0
) -> list[Rollout]:
    """Answers of the student in `folder` to these prompts."""
    files = open_model(folder, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = Decoder(
        model, ends=end_ids(files, student), known=known_ids(files), sampling=Sampling(1.0)
    )
    texts = [shared_text([Message("user", prompt)]) for prompt in prompts]
    ids = [student.answering_ids(text) for text in texts]
    asked = [PromptTokens(row, (seed * 10**9 + 10**6 * n,), limit) for n, row in enumerate(ids)]
    answers = {done.prompt: done.tokens for done in decoder.answers(asked)}
    decoder.close()
    return [
        Rollout(texts[n], ids[n], answers[n].ids.tolist(), answers[n].finished, answers[n].nll)
        for n in range(len(prompts))
    ]


def write_prompts(path: Path, prompts: list[str], expected: list[str] | None = None) -> Path:
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    for row, answer in zip(rows, expected or [], strict=False):
        row["answer"] = answer
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def exact_log_p(folder: Path, rows: list[list[int]]) -> list[np.ndarray]:
    """The log probabilities [T, V] of a model after each token of each row, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            torch.log_softmax(model(torch.tensor([row])).logits[0].double(), -1).numpy()
            for row in rows
        ]


def teach(folder: Path, steps: int, conversations: list[list[Message]], *, seed: int = 0) -> None:
    """Train the model in `folder` on answers to the prompts, until it writes words."""
    from chat_kit import loaded
    from torch.nn import functional as F

    from vocagnolm.chat.tokens import trained_ranges, trained_tokens

    torch.manual_seed(seed)
    tokenizer = loaded(folder)
    rows = []
    for messages in conversations:
        text = shared_text(messages)
        tokens = tokenizer.spans(text)
        trained = trained_tokens(tokens, trained_ranges(text, "assistant"))
        labels = np.where(trained, tokens.ids, -100)
        rows.append((torch.from_numpy(tokens.ids.astype(np.int64)), torch.from_numpy(labels)))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row, _ in rows])
    labels = torch.stack([F.pad(row, (0, width - len(row)), value=-100) for _, row in rows])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        some = torch.arange(8) * 7 % len(rows) + step
        some = some % len(rows)
        logits = model(ids[some]).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[some][:, 1:].flatten().long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


ASKED = ["the sum of", "two numbers", "a prime", "let x be", "theorem", "café ½", "42", "東京"]


def make_rounds_lab(folder: Path) -> None:
    """The chat lab, with a student that has learned to write a few words and end, a twin of it
    that has learned more, and a teacher with other tokens that has too."""
    import random

    from chat_kit import make_chat_lab
    from training_kit import WORDS

    make_chat_lab(folder, 2)
    rng = random.Random(5)
    talks = [
        [
            Message("user", asked),
            Message("assistant", " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 6)))),
        ]
        for asked in ASKED * 6
    ]
    teach(folder / "start", 40, talks)
    teach(folder / "twin", 80, talks, seed=1)
    teach(folder / "teacher", 80, talks, seed=2)
    write_prompts(folder / "prompts.jsonl", ASKED, ["42"] * len(ASKED))
