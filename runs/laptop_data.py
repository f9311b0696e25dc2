"""Corpus and tokenizers for runs/laptop.sh: sums in words, with noise between them."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Grace", "Hugo", "Ines", "Jonas", "Kira")
THINGS = ("apples", "books", "coins", "drums", "eggs", "forks", "grapes", "hats", "jars", "kites")


def problem(rng: random.Random) -> str:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    have, more, friends = rng.randint(2, 60), rng.randint(2, 40), rng.randint(2, 9)
    kind = rng.randrange(4)
    if kind == 0:
        return (
            f"Question: {name} has {have} {thing} and buys {more} more. How many are there?\n"
            f"Answer: {have} + {more} = {have + more}. So {name} has {have + more} {thing}.\n"
        )
    if kind == 1:
        return (
            f"Question: {name} had {have + more} {thing} and gave {more} away. What is left?\n"
            f"Answer: {have + more} - {more} = {have}. So {have} {thing} are left.\n"
        )
    if kind == 2:
        return (
            f"Question: {friends} friends bring {have} {thing} each. How many together?\n"
            f"Answer: {friends} * {have} = {friends * have}. So there are {friends * have}.\n"
        )
    return (
        f"Question: {name} shares {friends * have} {thing} among {friends} friends. What now?\n"
        f"Answer: {friends * have} / {friends} = {have}. So everybody gets {have} {thing}.\n"
    )


def noise(rng: random.Random) -> str:
    """What a crawl brings along: menus, tracking codes, broken markup."""
    code = "".join(rng.choice("0123456789abcdef") for _ in range(24))
    number = rng.randint(1000, 9999)
    return rng.choice(
        [
            f"<div id={code[:8]}>Home | Login | {code[8:14]} | Cart ({rng.randint(0, 99)})</div>\n",
            f"utm_source={code}&ref={rng.randint(10**6, 10**7)}\n",
            f"Posted by user{number} at {rng.randint(0, 23)}:{rng.randint(10, 59)}\n",
        ]
    )


def documents(count: int, seed: int, noisy: bool) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        lines = []
        for _ in range(rng.randint(2, 5)):
            lines.append(problem(rng))
            if noisy and rng.random() < 0.5:
                lines.append(noise(rng))
        yield "".join(lines)


def write_jsonl(path: Path, texts: Iterator[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def save_tokenizer(folder: Path, texts: list[str], size: int, digits: bool) -> None:
    """Byte-level BPE; `digits` cuts numbers into digits, as many newer tokenizers do."""
    tokenizer = Tokenizer(models.BPE())
    cut = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps = [*cut, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "corpus.jsonl", documents(2400, seed=1, noisy=True))
    write_jsonl(folder / "clean.jsonl", documents(2400, seed=2, noisy=False))
    (folder / "held-out.txt").write_text("".join(documents(100, seed=3, noisy=False)), "utf-8")
    sample = list(documents(1500, seed=4, noisy=True))
    save_tokenizer(folder / "student-tokenizer", sample, 1024, digits=False)
    save_tokenizer(folder / "teacher-tokenizer", sample, 2048, digits=True)


if __name__ == "__main__":
    main()
