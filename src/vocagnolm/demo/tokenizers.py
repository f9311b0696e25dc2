"""Two unlike tokenizers, trained on the spot: a byte-level BPE that reads numbers digit by digit,
as Qwen does, for the teacher; a SentencePiece-style BPE with byte fallback, as Llama has, for the
student."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEACHER_VOCABULARY = 768
STUDENT_VOCABULARY = 640
END = "</s>"
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
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
