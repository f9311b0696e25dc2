"""How far a teacher's losses depend on the arithmetic, on a real model and real text.

    PYTHONPATH=src python benchmarks/score_precision.py MODEL CORPUS [--student MODEL]
        [--only fp8 --emulate] [--json [FILE]]
    PYTHONPATH=src python benchmarks/score_precision.py --smoke

The same documents, evenly spread over CORPUS, are scored as `vocagnolm score` does it: in bfloat16
with compiled layers, without compiling, without compiling in batches of half the size, in fp8 (the
decoder's layers alone, and the head as well), and in float32 (no TF32, plain attention), which is
the reference. --emulate: fp8 on a CPU, where the operands are rounded as on a GPU and
multiplied in float32; all else is float32 there too, so that the row tells what fp8 alone does. One
more row is the reference rounded to float16, as a store keeps it: the yardstick for the rest. A row
that fails says why, and the rest goes on.

Differences are in nats a token, `bias` is their mean. With --student, its losses (float32, the same
for all rows) and the teacher's, carried to its tokens by maximum, choose the 40 % with the largest
excess among all tokens; `selection changed` is the share of the reference's choice that a row does
not choose. A checkpoint in bfloat16 has the same weights in every row; of any other the weights are
rounded as well.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import clean, report
from record import add_json
from shapes import tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from vocagnolm.alignment import align, carry
from vocagnolm.data.corpus import open_corpus
from vocagnolm.evaluate.render import spread
from vocagnolm.model import fp8, load, open_model
from vocagnolm.objective import IGNORE_INDEX, ObjectiveConfig, ScoredBatch, Targets, select
from vocagnolm.score.teacher import LocalTeacher, ScoreSettings, TokenizedDocument
from vocagnolm.store.format import to_float16

KEEP = 0.4
STARTED = time.perf_counter()


@dataclass(frozen=True)
class Losses:
    """What one way of computing gave; `documents` and `nll` go together."""

    documents: list[TokenizedDocument]
    nll: list[np.ndarray]

    def all(self) -> np.ndarray:
        return np.concatenate(self.nll).astype(np.float64)

    def bits_per_byte(self) -> float:
        nll = self.all()
        scored = ~np.isnan(nll)
        sizes = np.concatenate([d.token_bytes for d in self.documents])
        return float(nll[scored].sum() / np.log(2) / sizes[scored].sum())


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def read_texts(corpus_path: str, documents: int, characters: int) -> list[str]:
    corpus = open_corpus(corpus_path)
    found = [next(iter(corpus.read(i, i + 1))).text for i in spread(len(corpus), documents)]
    return [text[:characters] for text in found if text]


def teacher_of(model: str, *, dtype: str, **settings: Any) -> LocalTeacher:
    files = open_model(model, dtype=dtype)
    if dtype == "fp8" and files.device.type == "cpu":
        files = replace(files, dtype=torch.float32)  # many a CPU has no arithmetic for bf16
    return LocalTeacher(files, ScoreSettings(dtype=dtype, **settings))


def both_tile(texts: list[str], models: Sequence[str]) -> list[str]:
    """The texts that every model can score."""
    for model in models:
        outcomes = teacher_of(model, dtype="float32").tokenize(texts)
        texts = [
            t for t, o in zip(texts, outcomes, strict=True) if isinstance(o, TokenizedDocument)
        ]
    return texts


def score(name: str, teacher: LocalTeacher, texts: list[str]) -> Losses:
    # the fused attention kernels have an arithmetic of their own, also in float32
    exact = teacher.describe()["scoring"]["dtype"] == "float32"
    documents = [d for d in teacher.tokenize(texts) if isinstance(d, TokenizedDocument)]
    teacher.load()
    began = time.perf_counter()
    with sdpa_kernel(SDPBackend.MATH) if exact else nullcontext():
        nll = teacher.nll(documents)
    tokens = sum(len(d.ids) for d in documents)
    say(f"{name}: {tokens:,} tokens in {time.perf_counter() - began:.1f} s")
    return Losses(documents, nll)


def spans(document: TokenizedDocument) -> np.ndarray:
    ends = np.cumsum(document.token_bytes.astype(np.int64))
    return np.stack([ends - document.token_bytes, ends], 1)


def choice(student: Losses, teacher: Losses) -> np.ndarray:
    """Which student tokens are kept, all documents together."""
    carried = [
        carry(align(spans(ours), spans(theirs)), nll, "max")
        for ours, theirs, nll in zip(student.documents, teacher.documents, teacher.nll, strict=True)
    ]
    student_nll = torch.from_numpy(np.concatenate(student.nll))[None]
    labels = torch.where(student_nll.isnan(), IGNORE_INDEX, 0)
    guidance = torch.from_numpy(np.concatenate(carried))[None]
    batch = ScoredBatch(Targets(labels_BT=labels, guidance_BT=guidance), student_nll)
    config = ObjectiveConfig(keep=KEEP, unmapped="exclude", scope="batch")
    return select(batch, config)[0].numpy()


def compare(name: str, found: Losses, reference: Losses, student: Losses | None) -> dict[str, Any]:
    difference = found.all() - reference.all()
    # the first token of a text has no loss where the model has no beginning-of-text token
    difference = difference[~np.isnan(reference.all())]
    assert np.isfinite(difference).all(), f"{name} has losses that are not finite"
    size = np.abs(difference)
    row = {
        "scoring": name,
        "bias": float(difference.mean()),
        "mean |difference|": float(size.mean()),
        "99.9 %": float(np.percentile(size, 99.9)),
        "max": float(size.max()),
        "bits/byte": found.bits_per_byte(),
        "bits/byte over float32": found.bits_per_byte() - reference.bits_per_byte(),
    }
    if student is not None:
        ours, exact = choice(student, found), choice(student, reference)
        row["selection changed"] = float((exact & ~ours).sum() / exact.sum())
    return row


def measure(
    model: str,
    texts: list[str],
    student_model: str | None,
    context: int,
    compiled: bool,
    can_fp8: bool,
    only: str,
) -> list[dict[str, Any]]:
    def scored(name: str, model: str = model, **settings: Any) -> Losses:
        teacher = teacher_of(model, context=context, **settings)
        found = score(name, teacher, texts)
        del teacher
        clean()
        return found

    # TF32 would spoil the reference
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    half_batch = teacher_of(model, dtype="bfloat16").batch_tokens // 2
    student = None
    if student_model is not None:
        student = scored("student", student_model, dtype="float32", compiled=False)
    reference = scored("float32", dtype="float32", compiled=False)
    bf16: dict[str, Any] = {"dtype": "bfloat16", "compiled": False}
    ways: dict[str, tuple[dict[str, Any], bool]] = {
        "bfloat16": (bf16, False),
        "bfloat16, half the batch": (bf16 | {"batch_tokens": half_batch}, False),
    }
    if compiled:
        ways = {"bfloat16, compiled layers": (bf16 | {"compiled": True}, False)} | ways
    if can_fp8:
        narrow = {"dtype": "fp8", "compiled": compiled}
        ways |= {"fp8 layers, bf16 head": (narrow, False), "fp8 layers and head": (narrow, True)}
    rows = []

    def add(name: str, found: Losses) -> None:
        rows.append(compare(name, found, reference, student))
        say(str(rows[-1]))

    for name, (settings, head_too) in ways.items():
        if only not in name:
            continue
        try:
            with head_in_fp8(head_too):
                add(name, scored(name, **settings))
        except Exception as error:  # one failure must not cost the rest of the run
            traceback.print_exc()
            say(f"FAILED {name}: {type(error).__name__}: {str(error).strip()[:300]}")
    rounded = [to_float16(nll).astype(np.float32) for nll in reference.nll]
    add("float32, kept as float16", Losses(reference.documents, rounded))
    add("float32", reference)
    return rows


@contextmanager
def head_in_fp8(wanted: bool) -> Iterator[None]:
    before, fp8.HEAD_TOO = fp8.HEAD_TOO, wanted
    try:
        yield
    finally:
        fp8.HEAD_TOO = before


def has_fp8(emulate: bool) -> bool:
    """On a GPU that can."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (9, 0)
    if emulate:
        load.require_fp8 = lambda device, setting="": None  # type: ignore[attr-defined]
    return emulate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="the teacher: a model folder")
    parser.add_argument("corpus", nargs="?", help="jsonl with a field `text`")
    parser.add_argument("--student", help="model folder, for the selection")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--characters", type=int, default=4000, help="of a document, at most")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument(
        "--compile", action="store_true", help="also on a CPU, where scoring does not by itself"
    )
    parser.add_argument("--emulate", action="store_true", help="fp8 on a CPU, slowly")
    parser.add_argument("--only", default="", help="rows that have this in their name")
    parser.add_argument("--smoke", action="store_true", help="tiny random models, also on a CPU")
    add_json(parser)
    given = parser.parse_args()
    if not given.smoke and given.corpus is None:
        parser.error("MODEL and CORPUS are needed: use --smoke to try the script without them")
    with tempfile.TemporaryDirectory() as folder:
        if given.smoke:
            from vocagnolm.report.comparison import SAMPLE

            model = tiny_model(Path(folder) / "teacher", 500, layers=4)
            student: str | None = tiny_model(Path(folder) / "student", 320, layers=2)
            texts, context = list(SAMPLE), 128
        else:
            model, student, context = given.model, given.student, given.context
            texts = read_texts(given.corpus, given.documents, given.characters)
        texts = both_tile(texts, [model] if student is None else [model, student])
        compiled = given.compile or torch.cuda.is_available()
        can_fp8 = has_fp8(given.emulate or given.smoke)
        rows = measure(model, texts, student, context, compiled, can_fp8, given.only)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    title = f"losses of {Path(model).name} by arithmetic, {len(texts)} documents, {device}"
    report(title, rows, given.json)
    say("done")


if __name__ == "__main__":
    main()
