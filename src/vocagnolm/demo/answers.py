"""Exact answers: the model solves held-out problems, and the number it ends with is compared."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from vocagnolm.demo.problems import Problem
from vocagnolm.demo.tokenizers import END

NEW_TOKENS = 48
_ANSWER = re.compile(r"The answer is (-?\d+)\.")


def read_answer(output: str) -> int | None:
    """The number of the first "The answer is N."; None where there is none."""
    found = _ANSWER.search(output)
    return int(found.group(1)) if found else None


@torch.inference_mode()
def solve(folder: Path, problems: Sequence[Problem], batch: int = 128) -> list[int | None]:
    """Greedy answers of the model in `folder`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.padding_side = "left"
    # the shipped models are stored in half precision, which a CPU computes slowly
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    # prompts of like length together: less padding
    order = sorted(range(len(problems)), key=lambda at: len(problems[at].prompt))
    answers: list[int | None] = [None] * len(problems)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        # in training every document stands behind an end token
        prompts = [END + problems[at].prompt for at in chosen]
        inputs = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
        outputs = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            pad_token_id=tokenizer.convert_tokens_to_ids(END),
        )
        new = outputs[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        for at, text in zip(chosen, texts, strict=True):
            answers[at] = read_answer(text)
    return answers


def exact_share(answers: Sequence[int | None], problems: Sequence[Problem]) -> float:
    right = sum(a == p.answer for a, p in zip(answers, problems, strict=True))
    return right / len(problems)
