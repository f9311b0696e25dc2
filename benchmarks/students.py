"""Students of known shapes with random weights, and blocks of random ids for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_up import made_up, made_up_store
from numpy.typing import NDArray
from safetensors.numpy import save
from shapes import config_of, random_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PretrainedConfig

from vocagnolm.alignment import load_tokenizer
from vocagnolm.base.files import file_digest, read_json, write_json
from vocagnolm.data.blocks import MANIFEST
from vocagnolm.data.prepare import METADATA_KEY, part_name, prepare, tokenise
from vocagnolm.errors import BlocksError
from vocagnolm.recipe import Recipe, recipe_from_dict

DOCUMENT_TOKENS = 700
"""Tokens of a made-up document, about as many as one of web text has."""


@dataclass(frozen=True)
class Shape:
    """A student and the batch it is measured with."""

    name: str
    blocks: int
    """Blocks of a step."""
    length: int = 2048
    smoke: bool = False

    @property
    def config(self) -> PretrainedConfig:
        return config_of(self.name, self.smoke)

    @property
    def step_tokens(self) -> int:
        return self.blocks * self.length


SHAPES = {shape.name: shape for shape in (Shape("smollm2-135m", 32), Shape("tinyllama", 8))}


def chosen_shapes(names: str, smoke: bool) -> list[Shape]:
    """Shapes by their names, separated by commas; all of them without names."""
    wanted = [SHAPES[name] for name in names.split(",")] if names else [*SHAPES.values()]
    return [Shape(s.name, 4, 32, True) if smoke else s for s in wanted]


def save_student(shape: Shape, folder: Path, device: str) -> None:
    """A model folder, in bfloat16 as most are, with a tokenizer of as many ids."""
    random_model(shape.config, torch.bfloat16, device).save_pretrained(folder)
    byte_tokenizer(shape.config.vocab_size).save(str(folder / "tokenizer.json"))


def byte_tokenizer(vocabulary: int) -> Tokenizer:
    """One token a byte, and names that no text holds up to the wanted size."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<unused {number}>" for number in range(len(names), vocabulary)]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def random_blocks(shape: Shape, lab: Path, tokens: int, settings: dict[str, Any]) -> Recipe:
    """A recipe (`settings` and what goes with the blocks) whose blocks hold random ids and losses:
    `prepare` makes those of one document, whose part is then replaced by a long one."""
    text = "made up " * (shape.length // 8 + 1)  # one token a byte, at least one block
    student = lab / "student"
    (lab / "corpus.jsonl").write_text(f'{{"text": "{text}"}}\n', "utf-8")
    if not (lab / "store").exists():
        (spans,) = tokenise(load_tokenizer(str(student / "tokenizer.json")), [text])
        made_up_store(lab / "store", [text], [made_up(spans.token_bytes)])
    tree = {
        **settings,
        "student": {
            "model": str(student),
            "bits_per_byte": 9.0,  # known, so that it is not measured
            **settings.get("student", {}),
        },
        "corpus": {"files": [str(lab / "corpus.jsonl")]},
        "store": {"path": str(lab / "store")},
        "data": {
            "blocks": str(lab / "blocks"),
            "bos": None,
            "eos": None,
            "block_size": shape.length,
            **settings.get("data", {}),
        },
    }
    recipe = recipe_from_dict(tree)
    if not (lab / "blocks" / MANIFEST).exists():
        prepare(recipe)
        _replace_part(lab / "blocks", shape, tokens)
    return recipe


def _replace_part(folder: Path, shape: Shape, tokens: int) -> None:
    rng = np.random.default_rng(0)
    documents = -(-tokens // DOCUMENT_TOKENS)
    counts = np.full(documents, DOCUMENT_TOKENS, np.uint32)
    counts[-1] = tokens - DOCUMENT_TOKENS * (documents - 1)
    columns: dict[str, NDArray[Any]] = {
        "ids": rng.integers(0, shape.config.vocab_size, tokens).astype(np.uint16),
        "document_tokens": counts,
        "document_index": np.arange(documents, dtype=np.int64),
        "guidance": rng.gamma(2.0, 3.0, tokens).astype(np.float16),
    }
    path = folder / part_name(0)
    path.write_bytes(save(columns, metadata={METADATA_KEY: "{}"}))
    manifest = read_json(folder / MANIFEST, BlocksError, "")
    part = {"tokens": tokens, "bytes": path.stat().st_size, "sha256": file_digest(path)}
    manifest["parts"][0].update(part)
    manifest["tokens"] = tokens
    write_json(folder / MANIFEST, manifest)
