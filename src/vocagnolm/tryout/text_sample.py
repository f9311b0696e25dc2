"""What a try reads: how much fits into its minutes, and which documents that is."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from vocagnolm.base.files import write_text
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.errors import CorpusError
from vocagnolm.evaluate.bits import bits_per_byte
from vocagnolm.score.written import plain_record
from vocagnolm.tryout.folder import LEAST, Facts, Tryout, rounded_speed

CHARACTERS = 500, 8_000
"""At least and at most of a text in the sample, from its beginning: where time is short, many
documents say more than long ones. Conversations are never cut."""
MOST_HELD_OUT, MOST_DOCUMENTS = 2_000, 300_000
"""Documents: on the held-out side, in all."""
HELD_OUT_SHARE, TRAINING_SHARE = 0.25, 0.65
"""Shares of the minutes: for reading the held-out documents, before and after training; for scoring
and training. The rest is for loading."""
SCORING_COST, TRAINING_COST = 1.2, 4.0
"""In the time that reading takes: guesses that choose the size of the sample and nothing else."""


class TextSample:
    """The documents of a corpus that a try takes, by a random order that the seed decides."""

    def __init__(self, tryout: Tryout, corpus: Corpus) -> None:
        self.tryout, self.corpus = tryout, corpus
        self._most_held_out = max(LEAST, min(MOST_HELD_OUT, len(corpus) // 4))

    def texts(self, start: int, count: int) -> list[tuple[int, str]]:
        """Usable documents from this part of the order, with their positions in it."""
        documents = len(self.corpus)
        draw = random.Random(self.tryout.settings.seed)
        order = draw.sample(range(documents), min(documents, MOST_DOCUMENTS))
        positions = {index: start + at for at, index in enumerate(order[start : start + count])}
        # from front to back: a compressed file is then read once
        read = (d for index in sorted(positions) for d in self.corpus.read(index, index + 1))
        return sorted((positions[d.index], d.text) for d in read if d.text is not None)

    def candidates(self) -> list[tuple[int, str]]:
        """Different documents that may be held out."""
        drawn = self.texts(0, self._most_held_out)
        unique = {document_hash(text): (position, text) for position, text in reversed(drawn)}
        return sorted(unique.values())

    def cut(self, text: str, characters: int) -> str:
        return text if self.corpus.conversations else text[:characters]

    def write(self, name: str, texts: Sequence[str]) -> Facts:
        if len(texts) < LEAST:
            raise CorpusError(
                f"The corpus is too small to split: it has {len(self.corpus):,} documents, and a "
                f"try needs at least {2 * LEAST} different ones with text, half of them held "
                "out. Give more text; a text file is one document unless --split cuts it."
            )
        records = as_records(texts, self.corpus.conversations)
        write_records(self.tryout.sample(name), records)
        return {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}

    def plan(self, methods: int) -> Facts:
        """How much of the corpus fits into the minutes, by the speed with which the student reads
        a little of it. `methods`: the number of short runs."""
        usable, tryout = self.candidates(), self.tryout
        sizes = list(tryout.parameters().values())
        files = tryout.files[tryout.student]
        model, place = files.load(), tryout.sample("pilot")
        for count in (LEAST, 8 * LEAST, 64 * LEAST):  # a little text; more where that is quick
            self.write("pilot", [self.cut(text, 300) for _, text in usable[:count]])
            pilot = bits_per_byte(model, files, [place])
            if pilot.seconds > 1.0 or count >= len(usable):
                break
        place.unlink()
        speed = rounded_speed(pilot.scored_bytes / pilot.seconds)
        seconds = 60 * tryout.settings.minutes
        times_read = methods + sum(sizes) / sizes[0]
        held_out = HELD_OUT_SHARE * seconds * speed / times_read
        a_byte = SCORING_COST * max(sizes[1:]) / sizes[0] + methods * TRAINING_COST
        whole = sum(len(text.encode()) for _, text in usable) / self._most_held_out
        return {
            "bytes_per_second": speed,
            "parameters": sizes[0],
            "corpus_bytes": round(whole * len(self.corpus)),
            "held_out_bytes": held_out,
            "training_bytes": TRAINING_SHARE * seconds * speed / a_byte,
            "characters": round(min(CHARACTERS[1], max(CHARACTERS[0], held_out / (4 * LEAST)))),
        }

    def held_out(self, plan: Facts) -> Facts:
        """Documents that no student trains on, at most a quarter of the corpus."""
        usable = [(at, self.cut(text, plan["characters"])) for at, text in self.candidates()]
        ends = accumulate(len(text.encode()) for _, text in usable)
        chosen = usable[: max(LEAST, sum(end <= plan["held_out_bytes"] for end in ends))]
        facts = self.write("held-out", [text for _, text in chosen])
        self.tryout.say(f"held out: {facts['documents']:,} of {len(self.corpus):,} documents")
        return facts | {"next_place": chosen[-1][0] + 1}

    def training(self, plan: Facts, held_out: Facts) -> Facts:
        """Documents to train on, none of them held out."""
        count = round(plan["training_bytes"] * held_out["documents"] / held_out["bytes"])

        def drawn(start: int, count: int) -> list[str]:
            return [self.cut(text, plan["characters"]) for _, text in self.texts(start, count)]

        next_place = held_out["next_place"]
        never = {document_hash(text) for text in drawn(0, next_place)}
        texts = drawn(next_place, max(LEAST, count))
        texts = [text for text in texts if document_hash(text) not in never]
        facts = self.write("training", texts)
        lengths = self.tryout.student_lengths(texts[:64], self.corpus.conversations)
        if not lengths:
            raise CorpusError(
                "The student's chat template refuses the conversations of the sample. `vocagnolm "
                "compare --student S --teacher T --corpus F` says why."
            )
        read_bytes = sum(len(text.encode()) for text in texts[:64])
        share = sum(lengths) / read_bytes * min(len(texts), 64) / len(lengths)
        self.tryout.say(
            f"to train on: {facts['documents']:,} documents, {facts['bytes'] / 1e6:,.2f} MB"
        )
        return facts | {
            "student_tokens": round(share * facts["bytes"]),
            "longest": max(lengths) if self.corpus.conversations else None,
        }


def as_records(texts: Iterable[str], conversations: bool) -> Iterator[dict[str, Any]]:
    """Records of texts, or of the shared texts of conversations."""
    return (plain_record(text) if conversations else {"text": text} for text in texts)


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records))
