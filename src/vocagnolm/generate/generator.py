"""Texts as answers to texts: greedy or sampled, by a model in this process or behind a server.

Prompts of similar length share a batch, which is worked through before the next one begins. The
batches are fixed by the prompts and the batch size, never by what was done before, so that a
resumed run gives the same answers. Only where a GPU has too little memory for a batch is it
answered in halves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from vocagnolm.chat import ChatTokenizer
from vocagnolm.generate.decoder import CPU_ROWS, Decoder, PromptTokens
from vocagnolm.generate.draw import Sampling
from vocagnolm.generate.reading import (
    Answer,
    IsDone,
    Reader,
    TextSoFar,
    common_prefix_length,
    never,
    plan_batches,
)
from vocagnolm.model import ModelFiles
from vocagnolm.model.served import ServedModel, WriteRequest

# below this a shared prefix is not worth a pass of its own
_LEAST_SHARED_TOKENS = 16
_SLOT_TOKENS = 2048  # for which memory is reckoned when no batch size is given
_MOST_ROWS = 256
_SEEDS_APART = 1_000_003  # between prompts, more than an answer has tokens
SERVER_PROMPTS = 32  # in a request
Item = TypeVar("Item")
Done = TypeVar("Done")


class Generator(Reader):
    """A model that answers prompts, and compares continuations."""

    def __init__(
        self,
        model: PreTrainedModel,
        files: ModelFiles,
        batch_size: int | None = None,
        chat: ChatTokenizer | None = None,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(files, batch_size or 1, chat, context=files.max_context)
        self.decoder = Decoder(model, ends=self.ends, known=self.known_ids, sampling=sampling)
        if batch_size is None:
            fitting = self.decoder.fitting_rows(_SLOT_TOKENS)
            self.batch_size = 2 * CPU_ROWS if fitting <= CPU_ROWS else min(_MOST_ROWS, fitting)
        self._seed = seed
        self.halvings = 0

    def notes(self) -> list[str]:
        notes = super().notes()
        if self.halvings:
            notes.append(
                f"The device had too little memory left, and batches were halved {self.halvings:,} "
                f"times. A batch size below {self.batch_size} saves the time."
            )
        return notes

    def close(self) -> None:
        """Give the model its ordinary attention back."""
        self.decoder.close()

    def _share(self, rows: Sequence[Sequence[int]]) -> int:
        """Read what all rows begin with, and say how many tokens that are."""
        length = common_prefix_length(rows) if self.decoder.by_rows else 0
        if length < _LEAST_SHARED_TOKENS:
            length = 0
        self.decoder.share(rows[0][:length])
        return length

    def generate(
        self,
        prompts: Sequence[str],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        is_done: IsDone = never,
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Answers batch by batch, as (index of the prompt, text up to the stop string). Batches
        of which `is_done` says that they are there already are passed over."""
        rows = self.encode(prompts, max_new_tokens)
        batches = plan_batches([len(row) for row in rows], self.batch_size)
        batches = [batch for batch in batches if not is_done(batch)]
        if not batches:
            return
        shared = self._share(rows)
        stops = [text.encode() for text in stop]
        longest = max(len(row) - shared + self.limit(len(row), max_new_tokens) for row in rows)

        def answer(batch: list[int]) -> list[tuple[int, Answer]]:
            texts = [TextSoFar(index) for index in batch]

            def is_over(number: int, _: int, tokens: Sequence[int]) -> bool:
                self.take(texts[number], tokens, stops)
                return texts[number].done

            asked = [
                PromptTokens(
                    rows[i][shared:],
                    (self._seed * _SEEDS_APART**2 + i * _SEEDS_APART,),
                    self.limit(len(rows[i]), max_new_tokens),
                )
                for i in batch
            ]
            for _ in self.decoder.answers(
                asked, rows=len(batch), slot_tokens=longest, is_over=is_over
            ):
                pass
            return [(text.index, self.answer_of(text)) for text in texts]

        for batch in batches:
            yield self._in_memory(answer, batch)

    def _in_memory(self, work: Callable[[list[Item]], list[Done]], batch: list[Item]) -> list[Done]:
        """A batch, in halves where it does not fit beside what else the device holds just now."""
        try:
            return work(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        self.halvings += 1
        torch.cuda.empty_cache()
        half = (len(batch) + 1) // 2
        return self._in_memory(work, batch[:half]) + self._in_memory(work, batch[half:])

    def compare(
        self, prompts: Sequence[str], options: Sequence[Sequence[str]], is_done: IsDone = never
    ) -> Iterator[list[tuple[int, list[float]]]]:
        """Log-likelihood in nats of every option after its prompt, batch by batch."""
        whole = self.with_options(prompts, options)
        batches = plan_batches([len(rows[0][0]) for rows in whole], self.batch_size)
        batches = [batch for batch in batches if not is_done(batch)]
        if not batches:
            return
        # what is compared stays out of the shared part, and so does the token that predicts it
        shared = self._share([row[:agreed] for rows in whole for row, agreed in rows])

        def compare(part: list[tuple[int, list[int], int]]) -> list[float]:
            nll = self.decoder.losses([row[shared:] for _, row, _ in part])
            return [
                _log_likelihood(of_row, agreed - shared)
                for of_row, (_, _, agreed) in zip(nll, part, strict=True)
            ]

        for batch in batches:
            rows = [(i, row, agreed) for i in batch for row, agreed in whole[i]]
            likelihoods: dict[int, list[float]] = {i: [] for i in batch}
            for at in range(0, len(rows), self.batch_size):
                part = rows[at : at + self.batch_size]
                for (i, *_), value in zip(part, self._in_memory(compare, part), strict=True):
                    likelihoods[i].append(value)
            yield list(likelihoods.items())


class ServerGenerator(Reader):
    """A model behind a server that answers prompts, asked in requests of `batch_size` prompts. What
    the server writes is read token by token, as if the model were here."""

    def __init__(
        self,
        served: ServedModel,
        files: ModelFiles,
        batch_size: int | None = None,
        chat: ChatTokenizer | None = None,
    ) -> None:
        limits = [limit for limit in (files.max_context, served.engine.context) if limit]
        super().__init__(
            files,
            SERVER_PROMPTS if batch_size is None else batch_size,
            chat,
            context=min(limits, default=None),
        )
        self._served = served

    def close(self) -> None:
        """The server goes on."""

    def generate(
        self,
        prompts: Sequence[str],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        is_done: IsDone = never,
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Answers as in `Generator.generate`, request by request as they come. A prompt of which
        `is_done` says that its answer is there is not sent."""
        rows = self.encode(prompts, max_new_tokens)
        stops = [text.encode() for text in stop]

        def ask(planned: tuple[list[int], int]) -> list[tuple[int, Answer]]:
            batch, limit = planned
            asked = WriteRequest(tokens=limit, stop=stop, ends=sorted(self.ends))
            answers = self._served.write([rows[i] for i in batch], asked)
            texts = []
            for index, written in zip(batch, answers, strict=True):
                text = TextSoFar(index)
                self.take(text, [n for n in written.ids if n < self.known_ids], stops)
                text.done |= written.ended
                texts.append((index, self.answer_of(text)))
            return texts

        requests = []
        for batch in plan_batches([len(row) for row in rows], self.batch_size):
            limit = self.limit(len(rows[batch[0]]), max_new_tokens)  # all of a batch have room
            if batch := [i for i in batch if not is_done([i])]:
                requests.append((batch, limit))
        for _, answers in self._served.each(ask, requests):
            yield answers

    def compare(
        self, prompts: Sequence[str], options: Sequence[Sequence[str]], is_done: IsDone = never
    ) -> Iterator[list[tuple[int, list[float]]]]:
        """Likelihoods as in `Generator.compare`. A server writes a token after what it reads, which
        needs room."""
        whole = self.with_options(prompts, options, new_tokens=1)

        def ask(batch: list[int]) -> list[tuple[int, list[float]]]:
            scores = iter(self._served.scores([row for i in batch for row, _ in whole[i]]))
            return [
                (i, [_log_likelihood(next(scores).nll, agreed) for _, agreed in whole[i]])
                for i in batch
            ]

        left = [i for i in range(len(prompts)) if not is_done([i])]
        most = max((len(rows) for rows in whole), default=1)
        lengths = [len(whole[i][0][0]) for i in left]
        batches = plan_batches(lengths, max(1, self.batch_size // most))
        for _, compared in self._served.each(ask, [[left[n] for n in batch] for batch in batches]):
            yield compared


def _log_likelihood(nll: np.ndarray, agreed: int) -> float:
    """Sum over a row's tokens from `agreed` on, and the last in any case. A first token has nothing
    before it; one without a loss has the probability zero."""
    compared = nll[max(1, min(agreed, len(nll) - 1)) :]
    return -math.inf if np.isnan(compared).any() else -float(compared.sum(dtype=np.float64))
