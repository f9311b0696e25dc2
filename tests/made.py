"""Tokenizers made on the spot: every kind in the wild, small, without a download."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from vocagnolm.report.comparison import SAMPLE

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = [f"<0x{value:02X}>" for value in range(256)]
SPECIALS = ["<unk>", "<s>", "</s>"]
WORDS = r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


def byte_level(
    vocabulary_size: int = 500,
    *,
    add_prefix_space: bool = False,
    normalizer: normalizers.Normalizer | None = None,
    split: bool = False,
) -> Tokenizer:
    """GPT-2's way, or Qwen's with a regular expression of its own in front."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split:
        steps.append(pre_tokenizers.Split(Regex(WORDS), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not split))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=ALPHABET,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(
    vocabulary_size: int = 700, *, prepend: str = "normalizer", split: bool = False
) -> Tokenizer:
    """Llama's way: space marks and byte fallback. `prepend`: 'normalizer' or a Metaspace scheme."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        # only for the training: words, so that no merge spans the whole text
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIALS + BYTES,
        show_progress=False,
        limit_alphabet=80,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    description = json.loads(tokenizer.to_str())
    description["model"]["byte_fallback"] = True
    # byte tokens belong to the model, not to the added tokens, as in Llama's file
    added = description["added_tokens"]
    description["added_tokens"] = [t for t in added if t["content"] not in BYTES]
    if prepend == "normalizer":
        description["pre_tokenizer"] = None
    else:
        description["pre_tokenizer"]["split"] = split
    return Tokenizer.from_str(json.dumps(description))


def without_a_mark_of_its_own(tokenizer: Tokenizer) -> Tokenizer:
    """Gemma's way."""
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def unigram(*, nfkc: bool = False, byte_fallback: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    if nfkc:
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600,
        special_tokens=SPECIALS + (BYTES if byte_fallback else []),
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    if byte_fallback:
        description = json.loads(tokenizer.to_str())
        description["model"]["byte_fallback"] = True
        added = description["added_tokens"]
        description["added_tokens"] = [t for t in added if t["content"] not in BYTES]
        tokenizer = Tokenizer.from_str(json.dumps(description))
    return tokenizer


def wordpiece(*, lowercase: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(["<tool>", AddedToken("<wide>", lstrip=True, rstrip=True)])
    tokenizer.add_special_tokens(["<ctrl>"])
    return tokenizer


EXACT: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level large": lambda: byte_level(900, split=True),
    "byte-level prefix space": lambda: byte_level(add_prefix_space=True),
    "byte-level NFC": lambda: byte_level(split=True, normalizer=normalizers.NFC()),
    "byte-level lower-case": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "byte-level NFD": lambda: byte_level(normalizer=normalizers.NFD()),
    "byte-level added": lambda: with_added_tokens(byte_level()),
    "sentencepiece prepend": sentencepiece_bpe,
    "sentencepiece always": lambda: sentencepiece_bpe(prepend="always"),
    "sentencepiece always split": lambda: sentencepiece_bpe(prepend="always", split=True),
    "sentencepiece first": lambda: sentencepiece_bpe(prepend="first"),
    "sentencepiece never": lambda: sentencepiece_bpe(prepend="never"),
    "sentencepiece replace": lambda: without_a_mark_of_its_own(sentencepiece_bpe()),
    "sentencepiece added": lambda: with_added_tokens(sentencepiece_bpe()),
    "sentencepiece first added": lambda: with_added_tokens(sentencepiece_bpe(prepend="first")),
    "unigram byte fallback": lambda: unigram(byte_fallback=True),
}

LOSSY: dict[str, Callable[[], Tokenizer]] = {
    "unigram": unigram,
    "unigram NFKC": lambda: unigram(nfkc=True),
    "wordpiece": wordpiece,
    "byte-level no accents": lambda: byte_level(
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "byte-level stripped": lambda: byte_level(normalizer=normalizers.Strip()),
}


@cache
def tokenizer(name: str) -> Tokenizer:
    """A made tokenizer by name, trained once a session."""
    return (EXACT | LOSSY)[name]()


def save(name: str, folder: Path) -> Path:
    """The tokenizer as a folder with a tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(name).save(str(folder / "tokenizer.json"))
    return folder
