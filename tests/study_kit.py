"""A study small enough for a CPU: tiny models, a tiny corpus, the questions of a child."""

import json
import random
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from made import byte_level, sentencepiece_bpe
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vocagnolm.evaluate.render import Request

WORDS = ["apples", "coins", "books", "stones", "birds", "cards"]


def save_model(folder: Path, tokenizer: Tokenizer, seed: int, hidden: int = 32) -> Path:
    torch.manual_seed(seed)
    end = "<|endoftext|>" if tokenizer.token_to_id("<|endoftext|>") is not None else "</s>"
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.token_to_id(end),
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    return folder


def problem(rng: random.Random) -> tuple[str, int]:
    a, b, thing = rng.randint(1, 9), rng.randint(1, 9), rng.choice(WORDS)
    return f"Question: Ann has {a} {thing} and finds {b} more. How many?\nAnswer:", a + b


def write_materials(folder: Path) -> Path:
    """Models, corpus, held-out text and questions as the shipped setting names them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "student", byte_level(500), seed=1)
    save_model(folder / "qwen", sentencepiece_bpe(700), seed=2, hidden=48)
    save_model(folder / "gemma", byte_level(450, split=True), seed=3)
    rng = random.Random(0)

    def documents(count: int) -> list[dict[str, str]]:
        found = []
        for _ in range(count):
            if rng.random() < 0.5:
                prompt, answer = problem(rng)
                text = f"{prompt} The answer is {answer}. " * 3
                found.append({"source": "problems", "text": text})
            else:
                words = " ".join(rng.choice(WORDS) for _ in range(60))
                found.append({"source": "noise", "text": f"Notes: {words} é 🙂"})
        return found

    main, extra = documents(90), documents(20)
    rest = [d for d in main if d["source"] != "problems"]
    files = {
        "main": main,
        "extra": extra,
        "without": rest * 2 + extra,
        "start": documents(30),
        **{f"held-out-{n}": documents(3) for n in ("gsm8k", "math", "nlab", "openstax")},
        **{f"validation-{n}": documents(3) for n in ("problems", "text")},
    }
    for name, found in files.items():
        lines = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in found)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    with open(folder / "requests.jsonl", "w", encoding="utf-8") as file:
        for task in ("gsm8k", "svamp"):
            for index in range(6):
                prompt, answer = problem(rng)
                request = Request(
                    task=task,
                    index=index,
                    prompt=f"Question: Bob has 2 coins and finds 2 more. How many?\nAnswer: The "
                    f"answer is 4.\n\n\n{prompt}",
                    gold=str(answer),
                    stop=("\n\nQuestion:",),
                    max_new_tokens=8,
                )
                file.write(json.dumps(asdict(request)) + "\n")
    return folder


TINY: dict[str, Any] = {
    "base": {
        "student": {"bits_per_byte": 8.0},  # given, it is not measured in every run
        "data": {"block_size": 64},
        "train": {
            "tokens": 1024,
            "batch_blocks": 4,
            "micro_batch": 2,
            "dtype": "float32",
            "compile": False,
            "device": "cpu",
        },
        "optimizer": {"warmup_steps": 1},
    },
    "score": {"context": 128, "device": "cpu", "threads": 1},
    "start": {"train.tokens": 512},
    "teachers": {"same": {"train": {"train.tokens": 512}}},
    "tune": {"learning_rates": [1e-3, 3e-3], "set": {"train.tokens": 512}},
    "evaluate": {"max_new_tokens": 8, "batch_size": 8, "device": "cpu", "context": 128},
    "prepare_workers": 1,
}


def tiny_study(path: Path, **changes: Any) -> Path:
    """A study file that extends the shipped setting with tiny numbers."""
    from vocagnolm_studies.design import SHIPPED

    tree = {"extends": str(SHIPPED / "setting.yaml"), **TINY, **changes}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def kept_runs(study: str, row: str, folder: str = "runs") -> dict[int, dict[str, Any]]:
    """Seed -> what a run of the archive holds, read without the package."""
    from result_tables import archive_of

    archive = archive_of(study)
    assert archive is not None
    runs: dict[int, dict[str, Any]] = {}
    with tarfile.open(archive) as kept:
        for member in kept.getmembers():
            path = member.name.removeprefix("./")
            run, _, file = path.removeprefix(f"{folder}/").partition("/")
            name, _, seed = run.rpartition("-s")
            if name == row and file in ("grades.json", "evaluation.json"):
                content = kept.extractfile(member)
                assert content is not None
                runs.setdefault(int(seed), {})[file] = json.load(content)
    return runs
