"""Make the demo's two models:

    python runs/demo_models.py FOLDER [--only teacher|start]

The teacher reads rightly solved pages, and some junk, so that it knows what cannot be known.
The start, from which every student goes on, reads pages of the same kind whose results are all
wrong: it knows how they look, and no arithmetic. The folders `teacher/` and `start/` in
src/vocagnolm/demo were made by this script.
"""

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from vocagnolm.base.files import write_json
from vocagnolm.demo.corpus import START_SEED, clean_document, junk_document, wrong_document
from vocagnolm.demo.students import END

# ---- tokenizers ----

TEACHER_VOCABULARY = 768
STUDENT_VOCABULARY = 640
_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def teacher_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEACHER_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def student_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    # words only for the training, so that no merge spans a space; then as Llama's file has it
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|\p{N}+|[^\s\p{L}\p{N}]"), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="never", split=True),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=STUDENT_VOCABULARY,
        special_tokens=["<unk>", "<s>", END, *_BYTES],
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(texts, trainer)
    description = json.loads(tokenizer.to_str())
    description["model"]["byte_fallback"] = True
    description["pre_tokenizer"] = None
    added = description["added_tokens"]
    description["added_tokens"] = [token for token in added if token["content"] not in _BYTES]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """As `save_pretrained` would: transformers finds the same tokenizer in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return folder


# ---- models ----


BATCH, LENGTH = 16, 128
PEAK, FLOOR, WARMUP = 4e-3, 2e-4, 40


@dataclass(frozen=True)
class Plan:
    """One of the two models: what it reads, how it cuts it, how large it is, how long it trains."""

    name: str
    documents: Callable[[], Iterator[str]]
    tokenizer: Callable[[Iterator[str]], Tokenizer]
    hidden: int
    layers: int
    steps: int


def teacher_documents() -> Iterator[str]:
    """Seven rightly solved pages for every piece of junk."""
    chance = random.Random(2)
    while True:
        yield junk_document(chance) if chance.random() < 0.125 else clean_document(chance)


def start_documents() -> Iterator[str]:
    """Pages without a single right result: how such pages look, but no arithmetic."""
    chance = random.Random(START_SEED)
    while True:
        if chance.random() < 0.3:
            yield junk_document(chance)
        else:
            yield wrong_document(chance, wrong_share=1.0)


PLANS = (
    Plan("teacher", teacher_documents, teacher_tokenizer, hidden=96, layers=3, steps=900),
    Plan("start", start_documents, student_tokenizer, hidden=64, layers=3, steps=1500),
)


def new_model(plan: Plan, tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    end = tokenizer.token_to_id(END)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=plan.hidden,
            intermediate_size=plan.hidden * 8 // 3 // 8 * 8,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.hidden // 32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            # 0.02, made for wide models, keeps one of this width on a plateau for ages
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
        )
    )


def batches(tokenizer: Tokenizer, documents: Iterator[str]) -> Iterator[torch.Tensor]:
    """Packed ids [BATCH, LENGTH], documents parted by the end token."""
    end = tokenizer.token_to_id(END)
    assert end is not None
    held: list[int] = [end]
    need = BATCH * LENGTH
    while True:
        while len(held) < need:
            held += [*tokenizer.encode(next(documents)).ids, end]
        yield torch.tensor(held[:need]).view(BATCH, LENGTH)
        held = held[need:]


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    progress = (step - WARMUP) / (steps - WARMUP)
    return FLOOR + 0.5 * (PEAK - FLOOR) * (1 + math.cos(math.pi * progress))


def make_model(plan: Plan, folder: Path) -> None:
    """Train the model, unless it is there already."""
    if (folder / "model.safetensors").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = plan.tokenizer(itertools.islice(plan.documents(), 6000))
    model = new_model(plan, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, ids in enumerate(itertools.islice(batches(tokenizer, plan.documents()), plan.steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan.steps)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"{plan.name}, step {step:4d}: {loss.item():.4f} nats per token", flush=True)
    model.half().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    about = {"steps": plan.steps, "tokens": plan.steps * BATCH * LENGTH}
    write_json(folder / "made.json", about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=[plan.name for plan in PLANS], help="one of the two")
    options = parser.parse_args()
    for plan in PLANS:
        if options.only in (None, plan.name):
            make_model(plan, options.folder / plan.name)


if __name__ == "__main__":
    main()
