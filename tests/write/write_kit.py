"""Teachers that write: small models with random weights that prefer words and come to an end, and
prompts for them."""

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat_kit import CHATML, LLAMA_LIKE, save_chat_tokenizer
from tokenizers import Tokenizer
from training_kit import LLAMA, documents, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from vocagnolm.alternatives import AlternativesSpec, Vocabulary, pack
from vocagnolm.base.files import LOCK_FILE
from vocagnolm.data.prompts import Prompt
from vocagnolm.model import open_model
from vocagnolm.score import ReadPrompt, WriteSettings, WrittenAnswer
from vocagnolm.score.teacher import described_alternatives

SETTINGS = WriteSettings(
    device="cpu", threads=1, samples=3, max_new_tokens=20, alternatives=4, shard_prompts=4, seed=1
)
CHATS = {
    "bytes": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "pieces": (LLAMA_LIKE, ["<|header|>", "<|body|>", "<|eot|>"], "<|eot|>"),
}


def save_writer(
    folder: Path,
    kind: str = "bytes",
    *,
    chat: bool = True,
    seed: int = 0,
    end_share: float = 0.12,
    **changes: Any,
) -> Path:
    """A tiny Llama that writes ASCII words and ends every answer after some tokens. Its first
    hidden number is nearly constant, so that the head's first column acts as a bias."""
    plain = save_tokenizer(folder / "plain", kind=kind)
    template, marks, end = CHATS[kind]
    if chat:
        save_chat_tokenizer(folder, plain, template, marks)
    else:
        for file in plain.iterdir():
            shutil.copyfile(file, folder / file.name)
        end = json.loads((plain / "tokenizer_config.json").read_text())["eos_token"]
    if kind == "pieces":
        about = json.loads((folder / "tokenizer_config.json").read_text())
        about |= {"bos_token": "<s>", "add_bos_token": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    shutil.rmtree(plain)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [
        index
        for token, index in tokenizer.get_vocab().items()
        if len(word := token.replace("Ġ", "").replace("▁", "")) > 1 and word.isalpha()
    ]
    torch.manual_seed(seed)
    size = (tokenizer.get_vocab_size() + 15) // 8 * 8
    config = {**LLAMA, "vocab_size": size, "max_position_embeddings": 512, **changes}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12.0 if parameter.dim() > 1 else 1.0)
        model.model.embed_tokens.weight[:, 0] = 16.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head, end_id = model.lm_head.weight, tokenizer.token_to_id(end)
        head[:, 0] = -2.0
        head[words, 0] = 1.0
        head[end_id] = 0.0
        hidden = model.model(torch.randint(size, (8, 40))).last_hidden_state
        others = (hidden @ head.T / 0.7).logsumexp(-1)  # of draws at temperature 0.7
        wanted = 0.7 * (others + math.log(end_share / (1 - end_share)))
        head[end_id, 0] = (wanted / hidden[..., 0]).mean()
    model.save_pretrained(folder)
    return folder


class PlayedWriter:
    """Writes words that follow from its seeds. Quick; answers come in an order of its own."""

    chat = device_name = None
    spec = AlternativesSpec(2)
    settings = replace(SETTINGS, alternatives=2)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def describe(self) -> dict[str, Any]:
        chosen = {name: getattr(self.settings, name) for name in ("samples", "seed", "cut")}
        about = {"teacher": {"name": "played"}, "tokenizer": {}, "writing": chosen}
        return about | described_alternatives(self.spec, self.vocabulary)

    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of([bytes([n]) for n in range(256)], [0], False)

    def load(self) -> None:
        pass

    def read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt | str]:
        return [ReadPrompt(prompt, []) for prompt in prompts]

    def spelled(self, read: ReadPrompt) -> str:
        return read.shown

    def write(self, reads, seeds, on_tokens=None):
        for number in reversed(range(len(reads))):
            self.asked.append(reads[number].prompt.place)
            for answer, seed in enumerate(seeds[number]):
                yield number, answer, played_answer(seed)
                if on_tokens is not None:
                    on_tokens(1)


def played_answer(seed: int) -> WrittenAnswer:
    """One of six words and a number, or one that was cut."""
    draw = random.Random(seed)
    pieces = [draw.choice("abcdef").encode(), b" ", str(draw.randrange(10**6)).encode(), b""]
    nll = np.array([draw.random() for _ in pieces], np.float32)
    ids = np.array([[draw.randrange(256) for _ in range(2)] for _ in pieces])
    packed = pack(ids, np.tile([0.5, 2.0], (len(pieces), 1)), ids == 65)
    ended = draw.random() < 0.8
    return WrittenAnswer(pieces, nll, packed, finished=ended, ended=ended)


@cache
def opened(folder: Path):
    """The model's files, and the model."""
    files = open_model(folder, device="cpu")
    return files, files.load()


def write_prompts(path: Path, count: int = 10, seed: int = 0, **more: object) -> Path:
    """Prompts in a field of this name, the last one equal to the first."""
    texts = [text.strip() for text in documents(count - 1, seed=seed, words=12)]
    rows = [{"prompt": text, "answer": str(n), **more} for n, text in enumerate(texts)]
    rows.append({**rows[0], "answer": str(count - 1)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a written folder with its content, but for its lock."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != LOCK_FILE)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def rows_of(folder: Path, name: str = "data") -> list[dict]:
    """The rows of all files of documents, in order."""
    return [
        json.loads(line)
        for path in sorted((folder / name).glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
