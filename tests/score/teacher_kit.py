"""Teachers for tests: a real two-layer model in a folder, and one made of arithmetic."""

import dataclasses
import hashlib
import json
import pickle
import random
from functools import partial

import made
import numpy as np
from tokenizers import processors

from vocagnolm.alternatives import AlternativesSpec, Vocabulary, pack
from vocagnolm.base.files import LOCK_FILE
from vocagnolm.jobs.cluster import ShardActor
from vocagnolm.model.nll import TokenScores
from vocagnolm.report.comparison import SAMPLE
from vocagnolm.score import ScoreSettings, TokenizedDocument
from vocagnolm.score.teacher import described_alternatives
from vocagnolm.score.work import open_worker

SETTINGS = ScoreSettings(
    device="cpu", context=64, stride=16, batch_tokens=256, shard_documents=5, threads=1
)


def save_teacher(folder, *, bos=True, seed=0, kind="llama", **changes):
    """A tiny Llama with a byte-level tokenizer and padded embedding rows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = made.byte_level(400)
    end = tokenizer.token_to_id("<|endoftext|>")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
        )
    torch.manual_seed(seed)
    config = {
        "vocab_size": 416,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config | changes))
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    if kind != "llama":  # whose own tokenizer class would split the text otherwise
        about = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def write_corpus(path, documents=23, seed=0, longest=700):
    draw = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(documents):
            text = f"{number}: " + draw.choice(SAMPLE) * 3
            file.write(json.dumps({"text": text[: draw.randrange(5, longest)]}) + "\n")
    return path


class ArithmeticTeacher:
    """Tokens of three bytes; the nll is a function of the bytes. Quick, and never wrong."""

    name = "arithmetic"

    def describe(self):
        return {"teacher": {"name": self.name}, "tokenizer": {}, "scoring": {"dtype": "float32"}}

    def load(self):
        pass

    def tokenize(self, texts):
        out = []
        for text in texts:
            n_bytes = len(text.encode())
            lengths = [3] * (n_bytes // 3) + ([n_bytes % 3] if n_bytes % 3 else [])
            ids = np.frombuffer(hashlib.shake_128(text.encode()).digest(len(lengths)), np.uint8)
            out.append(TokenizedDocument(ids.astype(np.int32), np.array(lengths)))
        return out

    def nll(self, documents, on_tokens=None):
        if on_tokens is not None:
            on_tokens(sum(len(d.ids) for d in documents))
        return [np.r_[np.nan, d.ids[1:] / 16].astype(np.float32) for d in documents]


class TellingTeacher(ArithmeticTeacher):
    """Also says what else it would have expected: two bytes, one of them often the token itself."""

    spec = AlternativesSpec(2)

    def describe(self):
        return super().describe() | described_alternatives(self.spec, self.vocabulary)

    def vocabulary(self):
        return Vocabulary.of([bytes([n]) for n in range(256)], [0], False)

    def nll(self, documents, on_tokens=None):
        found = super().nll(documents, on_tokens)
        return [TokenScores(n, _two(d.ids)) for n, d in zip(found, documents, strict=True)]


def _two(ids):
    chosen = np.stack([ids ^ (ids % 2), (ids + 7) % 256], axis=1)
    nll = np.tile([0.5, 2.0], (len(ids), 1)) + chosen / 512
    return pack(chosen, nll, chosen == ids[:, None])


TEACHERS = {
    "losses": (ArithmeticTeacher, SETTINGS),
    "alternatives": (TellingTeacher, dataclasses.replace(SETTINGS, alternatives=2)),
}
"""Of either version of the format."""


def store_bytes(folder):
    """Every file of a store with its content, but for its lock, which tells the time."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != LOCK_FILE)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def actor_of(out, digest):
    """What Ray makes in a process of its own, from the plan in `out`."""
    return ShardActor(pickle.dumps(partial(open_worker, out, digest)))
