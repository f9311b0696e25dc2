"""`vocagnolm score` as a user runs it, against the rate of its model alone on the same documents.

    PYTHONPATH=src python benchmarks/score_corpus_gpu.py --teacher DIR --corpus FILE
        [--random] [--documents N] [--dtype bfloat16|fp8] [--json [FILE]]
    PYTHONPATH=src python benchmarks/score_corpus_gpu.py --smoke

Two starts of the command in processes of their own, with real text of mixed lengths, tokenising and
writing included: the first finds no compiled graphs, the second those of the first. Each row has
the seconds as the command tells them, and its rate over that of `alone`: the same documents, shard
by shard as they are scored, tokenised before the clock starts and written nowhere, on a model that
is loaded and compiled. `warm process` is the work of the command once more, in the process of
`alone`: what reading and writing cost without what a device does only at its first use.
--random: DIR has a configuration and a tokenizer, the weights are made up. Where typer is missing,
the library is called instead of the command.

Target: scoring within 5 % of `alone`.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import report, synchronise
from record import add_json
from score_precision import say, tiny_model

from vocagnolm.data.corpus import open_corpus
from vocagnolm.model import open_model
from vocagnolm.model.runtime import compiling_seconds
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.score.teacher import LocalTeacher
from vocagnolm.score.work import prepare_shard

TARGET = 0.95
LIBRARY = """
import time
began = time.perf_counter()
import dataclasses, json, sys
from vocagnolm.score import ScoreSettings, score_corpus
imported = time.perf_counter() - began
teacher, corpus, out, limit, settings = json.loads(sys.argv[1])
summary = score_corpus(
    teacher, corpus, out, settings=ScoreSettings(**settings), limit_documents=limit
)
summary = dataclasses.replace(summary, times=summary.times.with_earlier(imported))
print(json.dumps(dataclasses.asdict(summary)))
"""


def command(
    teacher: str, corpus: str, out: Path, limit: int | None, settings: dict[str, Any]
) -> list[str]:
    if importlib.util.find_spec("typer") is None:
        given = json.dumps([teacher, corpus, str(out), limit, settings])
        return [sys.executable, "-c", LIBRARY, given]
    words = [sys.executable, "-m", "vocagnolm", "score", "--json"]
    words += ["--teacher", teacher, "--corpus", corpus, "--out", str(out)]
    if limit is not None:
        words += ["--limit-documents", str(limit)]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def started(name: str, words: list[str], cache: Path) -> dict[str, Any]:
    """One start of the command: its times, and its rates over those seconds."""
    environment = os.environ | {"VOCAGNOLM_CACHE": str(cache)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    began = time.perf_counter()
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    wall = time.perf_counter() - began
    if ended.returncode != 0:
        raise SystemExit(f"{name} failed: {ended.stdout[-2000:]}")
    return told(name, json.loads(ended.stdout), wall)


def told(name: str, summary: dict[str, Any], wall: float) -> dict[str, Any]:
    times = summary["times"]
    row = {"run": name, **times, "all": wall}
    row |= {"tokens": summary["tokens"], "tokens/s": summary["tokens"] / times["scoring"]}
    row["tokens/s, all"] = summary["tokens"] / wall
    say(str(row))
    return row


def alone(
    teacher: str, corpus: str, limit: int | None, settings: ScoreSettings
) -> tuple[float, dict[str, Any]]:
    """Tokens a second of plan and forward, after everything else; and how long tokenising takes."""
    opened = LocalTeacher(
        open_model(teacher, device=settings.device, dtype=settings.dtype), settings
    )
    texts = open_corpus(corpus, limit=limit)
    count = -(-len(texts) // settings.shard_documents)
    began = time.perf_counter()
    shards = [prepare_shard(texts, opened, settings, number) for number in range(count)]
    reading = time.perf_counter() - began
    opened.load()
    opened.nll(shards[0].tokenized)  # all graphs are made
    synchronise()
    compiled, began = compiling_seconds(), time.perf_counter()
    for shard in shards:
        opened.nll(shard.tokenized)
    synchronise()
    seconds = time.perf_counter() - began - (compiling_seconds() - compiled)
    tokens = sum(shard.tokens for shard in shards)
    row = {"run": "alone", "scoring": seconds, "tokens": tokens, "tokens/s": tokens / seconds}
    row["reading and tokenising"] = reading
    say(str(row))
    return tokens / seconds, row


def with_random_weights(source: str, folder: Path) -> str:
    """A teacher with this configuration and tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.gguf"))
    config = AutoConfig.from_pretrained(source)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return str(folder)


def smoke_corpus(path: Path) -> str:
    from vocagnolm.pair import SAMPLE

    texts = [text * (1 + number % 3) for number in range(8) for text in SAMPLE]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", help="a model folder")
    parser.add_argument("--corpus", help="jsonl with a field `text`")
    parser.add_argument("--random", action="store_true", help="made-up weights for --teacher")
    parser.add_argument("--documents", type=int, help="of the corpus, at most")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--smoke", action="store_true", help="a tiny teacher, also on a CPU")
    add_json(parser)
    given = parser.parse_args()
    if not given.smoke and (given.teacher is None or given.corpus is None):
        parser.error("--teacher and --corpus are needed: use --smoke to try without them")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: dict[str, Any] = {"dtype": given.dtype}
        teacher, corpus = given.teacher, given.corpus
        if given.smoke:
            teacher = tiny_model(folder / "teacher", 500, layers=2)
            corpus = smoke_corpus(folder / "corpus.jsonl")
            settings |= {"context": 64, "shard_documents": 16}
        elif given.random:
            teacher = with_random_weights(teacher, folder / "teacher")
        rows = []
        for start in ("first start", "second start"):
            out = folder / start.replace(" ", "-")
            words = command(teacher, corpus, out, given.documents, settings)
            rows.append(started(start, words, folder / "cache"))
        os.environ["VOCAGNOLM_CACHE"] = str(folder / "cache")
        chosen = ScoreSettings(**settings)
        rate, row = alone(teacher, corpus, given.documents, chosen)
        began = time.perf_counter()
        again = score_corpus(
            teacher, corpus, folder / "warm", settings=chosen, limit_documents=given.documents
        )
        rows.append(told("warm process", asdict(again), time.perf_counter() - began))
        for found in rows:
            found["scoring x alone"] = found["tokens/s"] / rate
            found["all x alone"] = found["tokens/s, all"] / rate
            found["met"] = found["scoring x alone"] >= TARGET
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        title = (
            f"{Path(given.teacher or 'tiny').name}, {given.dtype}, end to end, {device}; seconds"
        )
        report(title, [*rows, row], given.json)


if __name__ == "__main__":
    main()
