"""Whether a student would write the tokens that it is taught as targets.

    python benchmarks/target_tokens.py --teacher T --student S [S ...] [--kept FILE] [--json [FILE]]
    python benchmarks/target_tokens.py --make MODEL --kept FILE [--texts NAME=FILE.jsonl ...]
        [--questions FILE --system FILE --examples FILE]

A target is right where tokenizing the text, the alternative and what the teacher writes behind it
gives that very token at that place. Measured on a kept set of alternatives (research/results), each
with the text before it and a greedy continuation, so that tokenizers (names or folders) suffice: T
is the tokenizer of the teacher that wrote the set, Qwen2.5's. Every student is measured under both
rules: `alone`, by which alternatives were spelled before (each by itself, and inside a teacher
token what is left of it), and `written`, that of `carry_alternatives`. The table has, in per cent
of the alternatives' mass that is mapped off the label: what lies on tokens that the student would
not write, with a 95 % interval (bootstrap over documents); of that, where the student has no
boundary there, writes a longer token, a shorter one; and wrong mass and all mass inside teacher
tokens. `right`: mapped mass on right tokens, in per cent of the mass of all alternatives. The last
row of a student is `written` minus `alone`, document by document.

`--make` draws the set: from pieces of texts of every source, and from the teacher's own answers to
questions, alternatives by their probability (16 a place, equally many from every document), each
continued by MODEL for eight tokens. On a CPU (`--device cpu`): hours.
"""

import argparse
import copy
import json
import lzma
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import STDOUT, add_json, keep

from vocagnolm.alignment import (
    Speller,
    TargetTable,
    TeacherTokens,
    TextTokenizer,
    align,
    carry_alternatives,
    load_tokenizer,
    token_texts,
)
from vocagnolm.alternatives import NOTHING, Alternatives, Vocabulary, pack

KEPT = Path(__file__).parents[1] / "research/results/target-tokens.jsonl.xz"
RULES = ("alone", "written")
KINDS = ("right", "no boundary", "longer", "shorter", "other")
COUNT = 16
NEW_TOKENS = 8
RESAMPLED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--teacher")
    parser.add_argument("--student", nargs="+", default=[])
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--by-source", action="store_true", help="also a row for every source")
    parser.add_argument("--make", metavar="MODEL")
    parser.add_argument("--texts", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--device", default="cpu", help="where MODEL runs")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--system", type=Path)
    parser.add_argument("--examples", type=Path)
    parser.add_argument("--documents", type=int, default=28, help="of every source")
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=200, help="of a document")
    parser.add_argument("--draws", type=int, default=700, help="of every source")
    add_json(parser)
    given = parser.parse_args()
    if given.make:
        make(given)
        return
    if not given.teacher or not given.student:
        parser.error("--teacher and --student are needed: tokenizers, by name or folder")
    with lzma.open(given.kept, "rt", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    teacher = load_tokenizer(given.teacher, check=False)
    vocabulary = token_texts(teacher, [teacher.id_of("<|endoftext|>") or 0])
    rows: list[dict[str, Any]] = []
    for name in given.student:
        student = load_tokenizer(name, check=False)
        measured = Measured(Pair(student, teacher, vocabulary), documents)
        rows += measured.rows(student.name)
        if given.by_source:
            rows += measured.rows_by_source(student.name)
    if given.json != STDOUT:
        show(rows)
    keep(given.json, "targets that the student would not write", rows)


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")


# ---- what becomes of an alternative ----


class Alone(Speller):
    """Spells every text by itself, as alternatives were before."""

    def _readings(self, text: bytes) -> list[str]:
        try:
            return [text.decode()]
        except UnicodeDecodeError:
            return []


@dataclass
class Pair:
    """A student, and the teacher that wrote the set."""

    student: TextTokenizer
    teacher: TextTokenizer
    vocabulary: Vocabulary

    @cached_property
    def table(self) -> TargetTable:
        return TargetTable(self.student, self.vocabulary, None)

    @cached_property
    def alone(self) -> Speller:
        return Alone(self.student, self.vocabulary)

    def text_of(self, index: int) -> bytes:
        return self.vocabulary[index] if index < len(self.vocabulary) else b""


Target = tuple[int, int, int, float]
"""The rule's number, the student's token (its index in the text), the target, its probability."""


class Document:
    """A document of the set as both models read it, with the targets of both rules."""

    def __init__(self, pair: Pair, record: dict[str, Any]):
        self.pair, self.places = pair, record["places"]
        self.text = record["text"].encode()
        self.ours, theirs = pair.student.spans(record["text"]), pair.teacher.spans(record["text"])
        self.spans = theirs.spans
        packed = np.full((len(theirs), COUNT), NOTHING, np.uint32)
        for place, row, _ in self.places:
            packed[place] = row
        self.given = Alternatives(packed)
        self.found = carry_alternatives(
            pair.table,
            self.ours.ids,
            self.ours.spans,
            TeacherTokens(spans=theirs.spans, alternatives=self.given),
            align(self.ours.spans, theirs.spans),
            np.frombuffer(self.text, np.uint8),
        )

    def targets(self, place: int, column: int) -> Iterator[Target]:
        """What an alternative becomes, for all tokens of the student that begin in this token."""
        start, end = self.spans[place].tolist()
        own = self.ours.spans
        inside = (own[:, 0] >= start) & (own[:, 0] < end) & (own[:, 0] < own[:, 1])
        for token in np.flatnonzero(inside).tolist():
            target, p = self._alone(place, column, token)
            if p > 0 and target not in (-1, int(self.ours.ids[token])):
                yield 0, token, target, p
            if (p := float(self.found.probability[token, column])) > 0:
                yield 1, token, int(self.found.ids[token, column]), p

    def _alone(self, place: int, column: int, token: int) -> tuple[int, float]:
        start, (begin, end) = int(self.spans[place, 0]), self.ours.spans[token].tolist()
        read = self.text[start:begin]
        given, mass = self.given.at(np.array([place])), self.given.mass[place]
        texts = [self.pair.text_of(index) for index in given.ids[0].tolist()]
        if not texts[column].startswith(read) or texts[column] == read:
            return -1, 0.0
        ruled_out = sum(
            float(p)
            for text, p, follows in zip(texts, mass, given.follows[0], strict=True)
            if not follows and not text.startswith(read) and not (text and read.startswith(text))
        )
        label = self.pair.student.bytes_of(int(self.ours.ids[token])) or b""
        dummy = b" " if len(label) == end - begin + 1 and label[:1] == b" " else b""
        (target,), _ = self.pair.alone.first([dummy + texts[column][len(read) :]])
        return int(target), float(mass[column]) / (1.0 - ruled_out)

    def written(self, place: int, column: int, ids: list[int]) -> dict[int, tuple[int, int]] | None:
        """The student's tokens of the text with the alternative and its continuation: end and id,
        by where they begin. None where it is no text."""
        texts = [self.pair.text_of(n) for n in (int(self.given.ids[place, column]), *ids)]
        whole = self.text[: int(self.spans[place, 0])] + b"".join(takewhile(bool, texts))
        text = whole.decode(errors="ignore")
        if not whole.startswith(text.encode()):
            return None
        found = self.pair.student.spans(text)
        pairs = zip(found.spans.tolist(), found.ids.tolist(), strict=True)
        return {start: (end, index) for (start, end), index in pairs if start < end}


# ---- the measure ----


class Measured:
    """Mass by document, rule, whether inside a teacher token, and kind."""

    def __init__(self, pair: Pair, records: Sequence[dict[str, Any]]):
        self.sources = [record["source"] for record in records]
        self.mass = np.zeros((len(records), len(RULES), 2, len(KINDS)))
        self.drawn = np.zeros(len(records))
        self.targets = np.zeros((len(records), len(RULES)), np.int64)
        for n, record in enumerate(records):
            document = Document(pair, record)
            for place, _, drawn in document.places:
                for column, times, ids in drawn:
                    self._add(n, document, place, column, times, ids)

    def _add(
        self, n: int, document: Document, place: int, column: int, times: int, ids: list[int]
    ) -> None:
        """`times`: how often the alternative was drawn. It has more weight inside a teacher token,
        where others are ruled out."""
        self.drawn[n] += times
        given = float(document.given.mass[place, column])
        written: dict[int, tuple[int, int]] | None = None
        for rule, token, target, p in document.targets(place, column):
            if written is None and (written := document.written(place, column, ids)) is None:
                return
            begin = int(document.ours.spans[token, 0])
            inside = int(begin > document.spans[place, 0])
            size = len(document.pair.student.bytes_of(target) or b"")
            kind = _kind(written.get(begin), begin, target, size)
            self.mass[n, rule, inside, KINDS.index(kind)] += times * p / given
            self.targets[n, rule] += times

    def rows(self, name: str, chosen: NDArray[Any] | None = None) -> list[dict[str, Any]]:
        here = np.ones(len(self.drawn), bool) if chosen is None else chosen
        mass, drawn = self.mass[here], self.drawn[here]
        draws = np.random.default_rng(0).integers(0, len(mass), (RESAMPLED, len(mass)))
        shares = wrong_shares(mass.sum(0)[None])[0]
        spread = wrong_shares(mass[draws].sum(1))
        differences = spread[:, 1] - spread[:, 0]
        right = mass[..., 0].sum((0, 2)) / drawn.sum()
        rows = []
        for n, rule in enumerate(RULES):
            together = mass[:, n].sum(0)
            whole = together.sum() / 100
            parts = [round(float(value), 1) for value in together.sum(0)[1:4] / whole]
            inside = together[1]
            rows.append(
                {
                    "student": name,
                    "rule": rule,
                    "targets": int(self.targets[here, n].sum()),
                    "wrong, %": round(100 * float(shares[n]), 1),
                    "±": round(196 * float(spread[:, n].std()), 1),
                    **dict(zip(KINDS[1:4], parts, strict=True)),
                    "inside: wrong": round(float(inside[1:].sum() / whole), 1),
                    "inside: all": round(float(inside.sum() / whole), 1),
                    "right, %": round(100 * float(right[n]), 1),
                }
            )
        change = 100 * (shares[1] - shares[0])
        rows.append(
            {
                "student": name,
                "rule": "written - alone",
                "wrong, %": round(float(change), 1),
                "±": round(196 * float(differences.std()), 1),
                "right, %": round(100 * float(right[1] - right[0]), 2),
            }
        )
        return rows

    def rows_by_source(self, name: str) -> list[dict[str, Any]]:
        rows = []
        for source in dict.fromkeys(self.sources):
            rows += self.rows(f"{name}, {source}", np.array(self.sources) == source)
        return rows


def wrong_shares(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., rules] of sums [..., rules, inside, kinds]."""
    whole = mass.sum((-1, -2))
    shares: NDArray[np.float64] = 1 - mass[..., 0].sum(-1) / np.maximum(whole, 1e-12)
    return shares


def _kind(found: tuple[int, int] | None, begin: int, target: int, size: int) -> str:
    if found is None:
        return "no boundary"
    end, index = found
    if index == target:
        return "right"
    return "longer" if end - begin > size else "shorter" if end - begin < size else "other"


# ---- making the set ----


def make(given: Any) -> None:
    maker = Maker(given.make, given.tokens, given.draws, given.device)
    records: list[dict[str, Any]] = []
    for named in given.texts:
        name, _, path = named.partition("=")
        texts = pieces(Path(path), maker.tokenizer, given.documents, given.tokens)
        records += maker.records(name, [([], text) for text in texts])
    if given.questions:
        records += maker.records("written", maker.answers(given))
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records)
    with lzma.open(given.kept, "ab" if given.kept.exists() else "wb", preset=9) as file:
        file.write(lines.encode())


def spread(length: int, count: int) -> list[int]:
    return [int(n * length / count) for n in range(min(length, count))]


def pieces(path: Path, tokenizer: TextTokenizer, documents: int, tokens: int) -> list[str]:
    """Pieces of documents that are spread over a file; of long ones not their head, which is the
    same on every page of a site."""
    texts = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            text = record.get("text") or ""
            if not text and "question" in record:
                text = f"Question: {record['question']}\nAnswer: {record['answer']}"
            if len(text) > 500:
                texts.append(text)
    chance, found = random.Random(0), []
    for index in spread(len(texts), documents):
        text, begin = texts[index], 0
        if len(text) > 4000:
            begin = text.find("\n", chance.randrange(0, len(text) - 2500)) + 1
        piece = text[begin : begin + 8 * tokens]
        spans = tokenizer.spans(piece).spans
        end = int(spans[min(tokens, len(spans)) - 1, 1])
        found.append(piece.encode()[:end].decode(errors="ignore"))
    return found


class Maker:
    """A teacher that continues alternatives."""

    def __init__(self, model: str, tokens: int, draws: int, device: str):
        import torch
        from transformers import AutoModelForCausalLM

        self.tokenizer, self.device = load_tokenizer(model), torch.device(device)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = loaded.eval().to(self.device)
        self.tokens, self.draws = tokens, draws
        self._no_text = list(self.tokenizer.control_ids)

    def answers(self, given: Any) -> list[tuple[list[int], str]]:
        """Prompts and the teacher's answers at temperature 0.7, those that it finished."""
        import torch

        from vocagnolm.chat import ChatTokenizer, Message, template_of
        from vocagnolm.score.writers import read_examples

        chat = ChatTokenizer(self.tokenizer, template_of(self.tokenizer))
        before = (
            [Message("system", given.system.read_text(encoding="utf-8"))] if given.system else []
        )
        before += read_examples(given.examples) if given.examples else []
        with open(given.questions, encoding="utf-8") as file:
            asked = [json.loads(line)["question"] for line in file]
        prompts = [
            chat.prompt_ids([*before, Message("user", asked[n])])
            for n in spread(len(asked), given.answers)
        ]
        torch.manual_seed(0)
        found: list[tuple[list[int], str]] = []
        end = chat.end_of_turn
        assert end is not None
        for first in range(0, len(prompts), 20):
            part = prompts[first : first + 20]
            width = max(map(len, part))
            ids, mask = torch.full((2, len(part), width), end)
            mask.zero_()
            for row, prompt in enumerate(part):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            sampling = {"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 0}
            ends = {"eos_token_id": end, "pad_token_id": end, "repetition_penalty": 1.0}
            made = self.model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=200,
                **sampling,
                **ends,
            )
            for prompt, row in zip(part, made[:, width:].tolist(), strict=True):
                own = b"".join(self.tokenizer.bytes_of(n) or b"" for n in row[: _until(row, end)])
                text = own.decode(errors="replace")
                if end in row and len(text) > 40:
                    found.append((prompt, text))
        return found

    def records(self, source: str, documents: list[tuple[list[int], str]]) -> list[dict[str, Any]]:
        """Of every document (what the teacher reads before it, and its text) the alternatives that
        were drawn: the token, all that it expects there, and for each that was drawn its number,
        how often, and the continuation."""
        found = []
        for n, (prefix, text) in enumerate(documents):
            ids = self.tokenizer.spans(text).ids.tolist()
            cache, chosen, nll = self._expected(prefix, ids)
            follows = chosen == np.array(ids)[:, None]
            known = ~(follows | np.isnan(nll) | np.isin(chosen, self._no_text))
            p = np.where(known, np.exp(-np.nan_to_num(nll)), 0.0)
            per = self.draws / len(documents)
            count = int(per * (n + 1)) - int(per * n)
            chance = np.random.default_rng([7, len(source), n])
            drawn = chance.choice(p.size, count, p=(p / p.sum()).ravel())
            places, times = np.unique(drawn, return_counts=True)
            wanted = [(at // COUNT, int(chosen.ravel()[at])) for at in places.tolist()]
            continued = self._continued(cache, len(prefix), wanted)
            packed, at_token = pack(chosen, nll, follows), dict[int, list[Any]]()
            for at, often, more in zip(places.tolist(), times.tolist(), continued, strict=True):
                at_token.setdefault(at // COUNT, []).append([at % COUNT, often, more])
            rows = [[token, packed[token].tolist(), these] for token, these in at_token.items()]
            found.append({"source": source, "text": text, "places": rows})
            print(f"{source}: {n + 1} of {len(documents)}", file=sys.stderr, flush=True)
        return found

    def _expected(self, prefix: list[int], ids: list[int]) -> tuple[Any, Any, Any]:
        """What the teacher keeps of its reading, and the likeliest tokens at every token of the
        text with their nll; NaN where it has read nothing."""
        import torch

        with torch.no_grad():
            whole = torch.tensor([[*prefix, *ids]], device=self.device)
            read = self.model(input_ids=whole, use_cache=True)
        logits = read.logits[0, max(len(prefix) - 1, 0) : -1].float().cpu()
        known = logits.log_softmax(-1).topk(COUNT)
        chosen = np.full((len(ids), COUNT), -1)
        nll = np.full((len(ids), COUNT), np.nan)
        chosen[-len(known.indices) :] = known.indices.numpy()
        nll[-len(known.indices) :] = -known.values.numpy()
        return read.past_key_values, chosen, nll

    def _continued(
        self, cache: Any, before: int, wanted: list[tuple[int, int]], size: int = 24
    ) -> list[list[int]]:
        """A greedy continuation of each alternative: the token that it stands at, and its id."""
        found: list[list[int]] = []
        for first in range(0, len(wanted), size):
            part = wanted[first : first + size]
            last = first + size >= len(wanted)
            found += self._greedy(cache if last else copy.deepcopy(cache), before, part)
        return found

    def _greedy(self, cache: Any, before: int, wanted: list[tuple[int, int]]) -> list[list[int]]:
        import torch

        rows, length = len(wanted), cache.get_seq_length()
        cache.batch_repeat_interleave(rows)
        at = torch.tensor([before + place for place, _ in wanted], device=self.device)
        ids, made = torch.tensor([[index] for _, index in wanted], device=self.device), []
        # what stands before the alternative
        own = torch.arange(length, device=self.device)[None] < at[:, None]
        for step in range(NEW_TOKENS):
            new = torch.ones(rows, step + 1, dtype=torch.bool, device=self.device)
            unseen = ~torch.cat([own, new], 1)[:, None, None]
            bias = torch.zeros_like(unseen, dtype=torch.float32)
            bias.masked_fill_(unseen, torch.finfo(torch.float32).min)
            with torch.no_grad():
                output = self.model(
                    input_ids=ids,
                    past_key_values=cache,
                    position_ids=(at + step)[:, None],
                    attention_mask=bias,
                    use_cache=True,
                )
            ids = output.logits[:, -1].argmax(-1)[:, None]
            made.append(ids)
        return [row.tolist() for row in torch.cat(made, 1)]


def _until(row: list[int], end: int) -> int:
    return row.index(end) if end in row else len(row)


if __name__ == "__main__":
    main()
