"""How far a teacher's losses depend on the arithmetic, on a real model and real text.

    PYTHONPATH=src python benchmarks/score_precision.py MODEL CORPUS [--student MODEL] [--json]
    PYTHONPATH=src python benchmarks/score_precision.py --smoke

The same documents, evenly spread over CORPUS, are scored as `vocagnolm score` does it: in bfloat16
with compiled layers, without compiling, without compiling in batches of half the size, and in
float32 (no TF32, plain attention), which is the reference. One more row is the reference rounded to
float16, as a store keeps it: the yardstick for the rest.

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
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import clean, report
from torch.nn.attention import SDPBackend, sdpa_kernel

from vocagnolm.alignment import align, carry
from vocagnolm.data.corpus import open_corpus
from vocagnolm.evaluate.render import spread
from vocagnolm.model import open_model
from vocagnolm.objective import IGNORE_INDEX, ObjectiveConfig, ScoredBatch, Targets, select
from vocagnolm.score.settings import ScoreSettings
from vocagnolm.score.teacher import LocalTeacher, TokenizedDocument
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
    return LocalTeacher(open_model(model, dtype=dtype), ScoreSettings(dtype=dtype, **settings))


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


def tiny_model(folder: Path, vocabulary: int, layers: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from vocagnolm.pair.sample import SAMPLE

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    torch.manual_seed(vocabulary)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # at the usual range, all tokens are equally likely and nothing can go wrong
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def measure(
    model: str, texts: list[str], student_model: str | None, context: int, compiled: bool
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
    bf16: dict[str, dict[str, Any]] = {
        "bfloat16": {"compiled": False},
        "bfloat16, half the batch": {"compiled": False, "batch_tokens": half_batch},
    }
    if compiled:
        bf16 = {"bfloat16, compiled layers": {"compiled": True}} | bf16
    found = {name: scored(name, dtype="bfloat16", **settings) for name, settings in bf16.items()}
    rounded = [to_float16(nll).astype(np.float32) for nll in reference.nll]
    found["float32, kept as float16"] = Losses(reference.documents, rounded)
    found["float32"] = reference
    return [compare(name, losses, reference, student) for name, losses in found.items()]


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
    parser.add_argument("--smoke", action="store_true", help="tiny random models, also on a CPU")
    parser.add_argument("--json", action="store_true", help="rows on stdout, the table on stderr")
    given = parser.parse_args()
    if not given.smoke and given.corpus is None:
        parser.error("MODEL and CORPUS are needed: use --smoke to try the script without them")
    with tempfile.TemporaryDirectory() as folder:
        if given.smoke:
            from vocagnolm.pair.sample import SAMPLE

            model = tiny_model(Path(folder) / "teacher", 500, layers=4)
            student: str | None = tiny_model(Path(folder) / "student", 320, layers=2)
            texts, context = list(SAMPLE), 128
        else:
            model, student, context = given.model, given.student, given.context
            texts = read_texts(given.corpus, given.documents, given.characters)
        texts = both_tile(texts, [model] if student is None else [model, student])
        rows = measure(model, texts, student, context, given.compile or torch.cuda.is_available())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    title = f"losses of {Path(model).name} by arithmetic, {len(texts)} documents, {device}"
    report(title, rows, given.json)
    say("done")


if __name__ == "__main__":
    main()
