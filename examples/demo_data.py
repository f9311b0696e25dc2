"""Data for the examples: some documents of the demo, its teacher's losses of them, its student."""

import json
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from vocagnolm.demo import corpus, students

# ChatML, which says what the assistant writes
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def student() -> tuple[Any, Any]:
    """The model, in float32 though its file is in float16, and its tokenizer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(students.START)
    tokenizer.chat_template = CHAT
    model = AutoModelForCausalLM.from_pretrained(students.START, dtype=torch.float32)
    return model, tokenizer


def texts(folder: Path, count: int = 200) -> tuple[datasets.Dataset, Path]:
    """Documents, and the store that the teacher leaves when it reads them."""
    rows = [{"text": text} for _, text in corpus.corpus_documents(count)]
    return _scored(folder, rows)


def conversations(folder: Path, count: int = 200) -> tuple[datasets.Dataset, Path]:
    found = [problem.text() for problem in corpus.held_out_problems(count, [])]
    turns = [text.split("\nSolution: ") for text in found]
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in turns
    ]
    return _scored(folder, rows)


def _scored(folder: Path, rows: list[dict[str, Any]]) -> tuple[datasets.Dataset, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    students.score(
        students.TEACHER, folder / "corpus.jsonl", folder / "store", students.ALTERNATIVES
    )
    return datasets.Dataset.from_list(rows), folder / "store"
