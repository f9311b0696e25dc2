"""What the rounding of alternatives does to the distilled loss and to its gradient.

    python benchmarks/alternatives_rounding.py --teacher MODEL --corpus F.jsonl [--student MODEL]
        [--documents 12] [--characters 1500] [--noise 1.0] [--json [FILE]]
    python benchmarks/alternatives_rounding.py --smoke

The teacher (folder or GGUF) reads the beginnings of some documents in float32. Its 16 likeliest
tokens at every place are packed as a store keeps them, become targets as in `prepare`, and are
rounded to float16 as in blocks; the first 1, 4 and 16 of them give the loss of `method: distill`.
The student has the same tokenizer; without one it is the teacher with Gaussian noise on its logits
(`--noise`: its standard deviation). The reference has the same targets with probabilities in
float64 from the same logits. Losses and gradients are float64 in all rows, so that the targets
alone differ:

    float16             the exact probabilities, rounded as blocks do
    11 bits, float16    what the project does: -log p in steps of 1/128 nat
    8 bits, float16     what a simpler format would do: steps of 1/16 nat, all else the same

Columns: `loss` is the mean over all tokens with exact targets; `mean |difference|` is how far a
token's loss with rounded targets is from that, and `bias` the difference of the two means, all in
nats; `gradient` is the norm of the difference of the gradients by the logits, all tokens together,
over the norm of the exact one. On a CPU with one thread: two minutes for a teacher of 135 million
parameters, half a minute of which a GGUF takes to be read.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import report
from numpy.typing import NDArray
from record import add_json
from score_precision import read_texts, say
from shapes import tiny_model
from torch import Tensor

from vocagnolm.alignment import (
    SoftTargets,
    TargetTable,
    TeacherTokens,
    TokenSpans,
    align,
    carry_alternatives,
    token_texts,
)
from vocagnolm.alternatives import Alternatives, AlternativesSpec, pack
from vocagnolm.model import ModelFiles, open_model
from vocagnolm.model.nll import AlternativeChoice
from vocagnolm.model.runtime import head_form, last_hidden
from vocagnolm.objective.head import TORCH_ROWS, Head, SoftRows, Transform

COUNTS = (1, 4, 16)
MIXES = (1.0, 0.5)
FORMATS = ("float16", "11 bits, float16", "8 bits, float16")
CHUNK = 64
"""Tokens whose logits are alive at a time."""
LONGEST = 1024
"""Tokens of a document, at most."""
SIMPLE_STEPS_PER_NAT, SIMPLE_STEPS = 16, 255
PLAIN = Transform()


class Reader:
    """A model that gives its logits a chunk at a time."""

    def __init__(self, files: ModelFiles):
        self.files = files
        self.model = files.load()
        form = head_form(self.model)
        if form is None:
            raise SystemExit(f"{files.name} has a head that is not understood: use another model")
        self.head: Head = form.head(self.model)

    def hidden(self, ids: NDArray[np.int32], prefix: tuple[int, ...]) -> Tensor:
        """[N, D] What predicts the tokens of a text; not the first where nothing stands before."""
        inputs = torch.tensor([[*prefix, *ids.tolist()]])
        return last_hidden(self.model, inputs)[0, max(len(prefix) - 1, 0) : -1]

    def logits(self, hidden_ND: Tensor) -> Iterator[Tensor]:
        for a in range(0, len(hidden_ND), CHUNK):
            yield self.head.logits(hidden_ND[a : a + CHUNK])


@dataclass(frozen=True)
class Told:
    """What the teacher says of N tokens."""

    labels_N: NDArray[np.int32]
    packed: dict[str, NDArray[np.uint32]]
    """[N, 16] By format."""
    nll: NDArray[np.float64]
    """[N, 16] -log p, exact."""


@dataclass(frozen=True)
class Places:
    """What the student says of the same tokens, at the columns of their targets alone: the gradient
    by all other logits is the probability, whatever the targets are."""

    columns_NC: Tensor
    """The label, and the targets."""
    x_NC: Tensor
    """Logits there."""
    nll_N: Tensor
    lse_N: Tensor
    squares_N: Tensor
    """Squares of the probabilities, summed over the whole vocabulary."""

    def soft(self, ids_NK: NDArray[np.int32], p_NK: NDArray[Any], mix: float) -> SoftRows:
        """Targets by their first place among the columns."""
        ids = torch.from_numpy(ids_NK).long()
        place = (ids[:, :, None] == self.columns_NC[:, None, :]).int().argmax(2)
        return SoftRows(place, torch.from_numpy(p_NK).double() * mix)

    def losses(self, soft: SoftRows) -> Tensor:
        return self.nll_N + soft.distance(self.x_NC, self._own, PLAIN)

    def gradient(self, soft: SoftRows) -> Tensor:
        return TORCH_ROWS.gradient_(self.x_NC.clone(), self._own, self.lse_N, PLAIN, soft)

    def squared_norm(self, gradient_NC: Tensor) -> float:
        """Of a gradient by all logits, of which these are the ones that targets change."""
        here = (self.x_NC - self.lse_N[:, None]).exp()
        return float(self.squares_N.sum() + (gradient_NC.square() - here.square()).sum())

    @property
    def _own(self) -> Tensor:
        return torch.zeros(len(self.x_NC), dtype=torch.int64)


@dataclass
class Sums:
    """Over tokens, of one format against the exact targets."""

    tokens: int = 0
    loss: float = 0.0
    size: float = 0.0
    difference: float = 0.0
    gradient: float = 0.0
    off: float = 0.0
    """Square of the norm of the gradient's difference."""

    def add(self, places: Places, exact: SoftRows, rounded: SoftRows) -> None:
        loss, gradient = places.losses(exact), places.gradient(exact)
        difference = places.losses(rounded) - loss
        self.tokens += len(loss)
        self.loss += float(loss.sum())
        self.size += float(difference.abs().sum())
        self.difference += float(difference.sum())
        self.gradient += places.squared_norm(gradient)
        self.off += float((places.gradient(rounded) - gradient).square().sum())

    def row(self) -> dict[str, float]:
        return {
            "loss": self.loss / self.tokens,
            "mean |difference|": self.size / self.tokens,
            "bias": self.difference / self.tokens,
            "gradient": (self.off / self.gradient) ** 0.5,
        }


def told(labels: NDArray[np.int32], logits: Iterator[Tensor]) -> Told:
    spec = AlternativesSpec(max(COUNTS))
    choice = AlternativeChoice.of(spec, len(labels), torch.device("cpu"))
    exact = torch.empty(len(labels), dtype=torch.float64)
    at = 0
    for z in logits:
        here = slice(at, at + len(z))
        choice.choose(here.start, here.stop, z, torch.logsumexp(z, 1), PLAIN)
        exact[here] = torch.logsumexp(z.double(), 1)
        at = here.stop
    nll = (exact[:, None] - choice.values_NK.double()).numpy()
    chosen = choice.ids_NK.numpy()
    # sixteenths of a nat are also whole 128ths: packing changes nothing more
    steps = np.rint(nll * SIMPLE_STEPS_PER_NAT).clip(0, SIMPLE_STEPS)
    packed = {
        "11 bits, float16": choice.finish(torch.from_numpy(labels)).numpy().view(np.uint32),
        "8 bits, float16": pack(chosen, steps / SIMPLE_STEPS_PER_NAT, chosen == labels[:, None]),
    }
    return Told(labels, packed, nll)


def targets(
    table: TargetTable, spans: NDArray[np.int64], text: str, given: Told, count: int, name: str
) -> SoftTargets:
    """As `prepare` makes them, for a student that reads the same tokens."""
    known = TeacherTokens(spans=spans, alternatives=Alternatives(given.packed[name][:, :count]))
    encoded = np.frombuffer(text.encode(), np.uint8)
    return carry_alternatives(table, given.labels_N, spans, known, align(spans, spans), encoded)


def places(columns: Tensor, logits: Iterator[Tensor], noise: torch.Generator, std: float) -> Places:
    found: list[tuple[Tensor, ...]] = []
    at = 0
    for chunk in logits:
        z = chunk.double()
        if std:
            z += std * torch.randn(z.shape, generator=noise)
        here = columns[at : at + len(z)]
        own = TORCH_ROWS.losses(z, here[:, 0], PLAIN, False)
        squares = (2 * (z - own.lse_N[:, None])).exp_().sum(1)
        found.append((z.gather(1, here), own.nll_N, own.lse_N, squares))
        at += len(z)
    x, nll, lse, squares = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Places(columns, x, nll, lse, squares)


@torch.inference_mode()
def measure(
    teacher: Reader, student: Reader | None, texts: list[str], std: float
) -> tuple[int, list[dict[str, Any]]]:
    """How many tokens there are, and the table. `std`: of the noise on the teacher's logits, where
    there is no student."""
    files = teacher.files
    tokenizer = files.tokenizer
    vocabulary = token_texts(tokenizer, set(files.end_ids))
    table = TargetTable(tokenizer, vocabulary, tokenizer.eos_id)
    prefix = tokenizer.prefix_ids
    limit = min(LONGEST, files.max_context or LONGEST) - len(prefix)
    noise = torch.Generator().manual_seed(0)
    sums = {(k, mix, name): Sums() for k in COUNTS for mix in MIXES for name in FORMATS}
    for number, text in enumerate(texts):
        read: TokenSpans = tokenizer.spans(text)
        ids = read.ids[:limit]
        if len(ids) < 2:
            continue
        hidden = teacher.hidden(ids, prefix)
        given = told(ids[-len(hidden) :], teacher.logits(hidden))
        spans = read.spans[: len(ids)][-len(hidden) :]
        most = targets(table, spans, text, given, max(COUNTS), "11 bits, float16").ids
        columns = torch.from_numpy(np.concatenate([given.labels_N[:, None], most], 1)).long()
        if student is None:
            seen = places(columns, teacher.logits(hidden), noise, std)
        else:
            seen = places(columns, student.logits(student.hidden(ids, prefix)), noise, 0.0)
        for count in COUNTS:
            others = most[:, :count]
            beside = others != given.labels_N[:, None]
            exact = np.where(beside, np.exp(-given.nll[:, :count]), 0.0)
            probability = {"float16": exact}
            for name in given.packed:
                made = targets(table, spans, text, given, count, name)
                assert np.array_equal(made.ids, others)
                probability[name] = made.probability
            for mix in MIXES:
                reference = seen.soft(others, exact, mix)
                for name, p in probability.items():
                    rounded = seen.soft(others, p.astype(np.float16), mix)
                    sums[count, mix, name].add(seen, reference, rounded)
        say(f"document {number + 1} of {len(texts)}: {len(ids)} tokens")
    (tokens,) = {one.tokens for one in sums.values()}
    if not tokens:
        raise SystemExit("the documents have no tokens to predict")
    return tokens, [
        {"K": k, "mix": mix, "format": name, **one.row()} for (k, mix, name), one in sums.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", help="a model: folder or GGUF")
    parser.add_argument("--corpus", help="jsonl with a field `text`")
    parser.add_argument("--student", help="a model with the same tokenizer")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--characters", type=int, default=1500, help="of a document, at most")
    parser.add_argument("--noise", type=float, default=1.0, help="where there is no student")
    parser.add_argument("--smoke", action="store_true", help="tiny random models")
    add_json(parser)
    given = parser.parse_args()
    if not given.smoke and (given.teacher is None or given.corpus is None):
        parser.error("--teacher and --corpus are needed: use --smoke to try it without them")
    with tempfile.TemporaryDirectory() as folder:
        teacher_model, student_model = given.teacher, given.student
        if given.smoke:
            from vocagnolm.report.comparison import SAMPLE

            teacher_model = tiny_model(Path(folder) / "teacher", 500, layers=4)
            student_model = tiny_model(Path(folder) / "student", 500, layers=2)
            texts = list(SAMPLE)
        else:
            texts = read_texts(given.corpus, given.documents, given.characters)
        teacher = Reader(open_model(teacher_model, device="cpu", dtype="float32"))
        student = None
        if student_model is not None:
            student = Reader(open_model(student_model, device="cpu", dtype="float32"))
            if student.files.tokenizer.vocabulary != teacher.files.tokenizer.vocabulary:
                parser.error("--student: its tokenizer is not the teacher's")
        tokens, rows = measure(teacher, student, texts, given.noise)
    who = f"the teacher with noise {given.noise:g}" if student is None else student.files.name
    title = f"rounded alternatives of {teacher.files.name} for {who}, {tokens:,} tokens"
    report(title, rows, given.json)
    say("done")


if __name__ == "__main__":
    main()
