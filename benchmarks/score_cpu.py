"""Scoring and the loss store on a CPU: rate and memory beside plain Hugging Face, open and access.

    PYTHONPATH=src python benchmarks/score_cpu.py [--json [FILE]] [--documents N]
        [--store-documents N]

1. A small model with a large vocabulary scores documents of mixed lengths in float32. Both sides
   run the same length-sorted batches: `HF` makes all logits and takes the cross entropy, `ours`
   goes through the chunked head. Each side runs in a process of its own, so that the peak memory is
   its own; the two take turns.
2. A store of a million documents is written; then opening it, random access and lookup by hash are
   timed, each in a fresh process where the system's cache may be warm.

Targets: at least 1.0 x the rate of HF; open under 1 s; access under 100 microseconds.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from record import STDOUT, add_json, keep

CONTEXT, STRIDE, BATCH_TOKENS = 256, 32, 2048
VOCABULARY = 49_152


def build() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def documents(count: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(4.6, 1.0, count), 2, 600).astype(int)
    return [draw.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]


def score_once(side: str, count: int) -> dict[str, float]:
    """One pass of one side in this process."""
    import torch

    from vocagnolm.model.nll import NllModel

    texts = documents(count)
    model = build()
    ours = NllModel(model, context=CONTEXT, stride=STRIDE, batch_tokens=BATCH_TOKENS)
    plan = ours.plan([len(t) for t in texts])
    ours.document_nll(texts[:2])  # first calls are slower on both sides
    resting = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if side == "ours":
        total = float(sum(np.nansum(nll) for nll in ours.document_nll(texts)))
    else:
        total = 0.0
        for batch in plan:
            ids = np.zeros((len(batch.windows), batch.row_tokens), np.int64)
            labels = np.full_like(ids, -100)
            for row, window in enumerate(batch.windows):
                part = texts[window.document][window.start : window.stop]
                ids[row, : len(part)] = part
                fresh = window.first_scored - window.start
                labels[row, fresh : len(part)] = part[fresh:]
            with torch.inference_mode():
                logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
                nll = torch.nn.functional.cross_entropy(
                    logits[:, :-1].float().flatten(0, 1),
                    torch.from_numpy(labels)[:, 1:].flatten(),
                    reduction="none",
                )
            total += float(nll.double().sum())
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = sum(len(t) for t in texts)
    return {
        "tokens_per_second": tokens / seconds,
        "peak_mib": (peak - resting) / 1024,
        "nll_sum": total,
    }


def fresh(function: str, *arguments: Any) -> dict[str, float]:
    """Call a function of this file in a new process."""
    command = [sys.executable, __file__, "--call", function, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def write_store(path: str, count: int) -> dict[str, float]:
    from vocagnolm.store import StoreWriter
    from vocagnolm.store.format import Shard, to_float16

    per_shard, tokens = 1024, 64
    shards = -(-count // per_shard)
    identity = {"teacher": {"name": "none"}, "corpus": {"documents": count}}
    writer = StoreWriter(Path(path), identity, shards)
    writer.begin()
    draw = np.random.default_rng(0)
    nll = to_float16(draw.exponential(2.0, per_shard * tokens))
    lengths = draw.integers(1, 9, per_shard * tokens).astype("u1")
    started = time.perf_counter()
    for number in range(shards):
        first = number * per_shard
        here = min(per_shard, count - first)
        shard = Shard(
            number=number,
            first_document=first,
            document_span=here,
            document_hash=draw.integers(0, 256, (here, 16)).astype("u1"),
            document_index=np.arange(first, first + here, dtype="<u8"),
            token_count=np.full(here, tokens, "<u4"),
            token_bytes=lengths[: here * tokens],
            nll=nll[: here * tokens],
        )
        writer.write_shard(shard)
    writer.finish()
    writer.tidy()
    size = sum(p.stat().st_size for p in Path(path).rglob("*") if p.is_file())
    return {"seconds": time.perf_counter() - started, "bytes_per_token": size / count / tokens}


def read_store(path: str, accesses: int) -> dict[str, float]:
    from vocagnolm.store import LossStore

    started = time.perf_counter()
    store = LossStore.open(path)
    opened = time.perf_counter() - started
    draw = np.random.default_rng(1)
    places = draw.integers(0, len(store), accesses).tolist()
    started = time.perf_counter()
    for place in places:
        store[place]
    cold = (time.perf_counter() - started) / accesses
    started = time.perf_counter()
    for place in places:
        store[place]
    warm = (time.perf_counter() - started) / accesses
    hashes = [store.document_hash(place) for place in places]
    started = time.perf_counter()
    store.find(hashes[0])
    index = time.perf_counter() - started
    started = time.perf_counter()
    for digest in hashes:
        store.find(digest)
    find = (time.perf_counter() - started) / accesses
    return {
        "documents": len(store),
        "open_seconds": opened,
        "access_microseconds_first_pass": cold * 1e6,
        "access_microseconds": warm * 1e6,
        "find_index_seconds": index,
        "find_microseconds": find * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--store-documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    add_json(parser)
    parser.add_argument("--call", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.call:
        print(json.dumps(globals()[given.call[0]](*json.loads(given.call[1]))))
        return
    runs: dict[str, list[dict[str, float]]] = {"HF": [], "ours": []}
    for _ in range(given.rounds):
        for side, found in runs.items():
            found.append(fresh("score_once", side, given.documents))
    middle = {
        side: {key: median(run[key] for run in found) for key in found[0]}
        for side, found in runs.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        written = fresh("write_store", f"{folder}/store", given.store_documents)
        read = fresh("read_store", f"{folder}/store", 20_000)
    result: dict[str, dict[str, Any]] = {
        "scoring": middle
        | {"ratio": middle["ours"]["tokens_per_second"] / middle["HF"]["tokens_per_second"]},
        "store": read | {"bytes_per_token": written["bytes_per_token"]},
    }
    if given.json == STDOUT:
        print(json.dumps(result))
        return
    keep(given.json, "scoring", [{"side": side, **values} for side, values in middle.items()])
    keep(given.json, "the store", [result["store"]])
    for side, values in middle.items():
        print(
            f"{side:<5} {values['tokens_per_second']:8,.0f} tokens/s  peak + "
            f"{values['peak_mib']:6,.0f} MiB  sum of nll {values['nll_sum']:.2f}"
        )
    print(f"ours / HF: {result['scoring']['ratio']:.2f} (target 1.0)")
    for key, value in result["store"].items():
        print(f"store {key}: {value:,.3f}")


if __name__ == "__main__":
    main()
