"""A teacher that reads answers: the bytes that a student wrote, in the teacher's own template and
behind the context that it would have for writing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocagnolm.alignment import token_texts
from vocagnolm.alternatives import NOTHING, AlternativesSpec, Vocabulary
from vocagnolm.chat import ChatTokenizer, Refused, template_of
from vocagnolm.chat.answers import tiling_pieces
from vocagnolm.chat.messages import messages_of, shared_text
from vocagnolm.model.load import ModelFiles
from vocagnolm.model.nll import NllModel, TokenScores
from vocagnolm.model.served import SERVER_REQUEST_TOKENS, ServedModel, Server
from vocagnolm.score.teacher import described_alternatives, require_choice
from vocagnolm.score.writers import Surroundings, WriteSettings

GPU_BATCH_TOKENS = 16384
CPU_BATCH_TOKENS = 1  # one answer at a time, whose numbers then depend on nothing else
LONGEST_WINDOW = 32768
_STRIDE_SHARE = 8


@dataclass(frozen=True)
class Reading:
    """A teacher's tokens of a conversation, which tile its shared text: losses and alternatives of
    the answer, and none before it."""

    token_bytes: NDArray[np.int64]
    nll: NDArray[np.float32]
    """NaN where there is none."""
    packed: NDArray[np.uint32]
    """[M, K] Alternatives, as `vocagnolm.alternatives` packs them."""


class AnswerTeacher:
    """A causal language model that reads answers: in this process, or behind a server that takes
    token ids. Its weights are loaded when there is something to read."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        alternatives: int = 16,
        system: str | None = None,
        examples: str | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        server: Server | None = None,
    ):
        """`system` and `examples`: a message and worked examples that the teacher reads before
        every conversation, and the student never sees."""
        self._files, self.alternatives = files, alternatives
        template = template_of(files.tokenizer, chat_template, dict(template_options or {}))
        self.chat = ChatTokenizer(files.tokenizer, template)
        self._surroundings = Surroundings(WriteSettings(system=system, examples=examples))
        require_choice(files, AlternativesSpec(alternatives))
        self._context = min(files.max_context or LONGEST_WINDOW, LONGEST_WINDOW)
        self._served: ServedModel | None = None
        if server is not None:
            self._served = ServedModel(server)
            longest = self._served.engine.longest
            self._context = min(self._context, longest or self._context)
            self._served.take_probe(
                files.tokenizer, files.prefix_ids, context=self._context, given="teacher.model"
            )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token, and which of them end a text or a turn."""
        ends = {*self._files.end_ids, self.chat.end_of_turn}
        return token_texts(self._files.tokenizer, {end for end in ends if end is not None})

    def describe(self) -> dict[str, Any]:
        """Everything about the teacher that decides its numbers."""
        tokenizer = self._files.tokenizer
        kept = AlternativesSpec(self.alternatives)
        served = {} if self._served is None else {"server": self._served.describe()}
        where = {"dtype": self._files.dtype_name, "device": self._files.device.type}
        return {
            "teacher": self._files.describe(),
            "tokenizer": {
                "name": tokenizer.name,
                "kind": tokenizer.kind,
                "vocabulary_size": tokenizer.vocabulary_size,
                "fingerprint": tokenizer.fingerprint,
            },
            "reading": {
                **({"device": "a server"} if served else where),
                "context": self._context,
                **self._surroundings.describe(),
                "template": self.chat.template.describe(),
            },
            **served,
            **described_alternatives(kept, lambda: self.vocabulary),
        }

    def read(self, answers: Sequence[tuple[str, int]]) -> list[Reading | str]:
        """Losses and alternatives of answers, each the shared text of a conversation and the byte
        at which its last message begins; or the reason why the teacher cannot read it."""
        readings: list[Reading | str] = []
        rows: list[NDArray[np.int64]] = []
        places: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = []
        for number, (text, begin) in enumerate(answers):
            laid = self._laid(text, begin)
            readings.append(laid if isinstance(laid, str) else "")
            if not isinstance(laid, str):
                ids, where, spans = laid
                rows.append(ids)
                places.append((number, where, spans))
        for scores, (number, where, spans) in zip(self._scores(rows), places, strict=True):
            text, begin = answers[number]
            readings[number] = _tiled(len(text.encode()), begin, where, spans, scores)
        return readings

    def _laid(
        self, text: str, begin: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | str:
        """(the ids that the teacher reads, which of them lie in the answer, their spans there)."""
        try:
            messages = self._surroundings.around(messages_of(text))
        except Refused as error:
            return str(error)
        whole = shared_text(messages)
        (tokens,) = self.chat.outcomes([whole])
        if isinstance(tokens, str):
            return tokens
        spans = tokens.spans - (len(whole.encode()) - len(text.encode()))
        (where,) = np.nonzero((spans[:, 0] >= begin) & (spans[:, 0] < spans[:, 1]))
        last = int(where[-1]) + 1 if len(where) else 0
        return tokens.ids[:last].astype(np.int64), where, spans[where]

    def _scores(self, rows: Sequence[NDArray[np.int64]]) -> list[TokenScores]:
        if not rows:
            return []
        if self._served is None:
            return self._model.start(rows)()
        return self._served.document_scores(
            rows,
            context=self._context,
            stride=max(1, self._context // _STRIDE_SHARE),
            batch_tokens=SERVER_REQUEST_TOKENS,
            prefix_ids=(),
            alternatives=self.alternatives,
        )

    @cached_property
    def _model(self) -> NllModel:
        on_gpu = self._files.device.type == "cuda"
        model = self._files.load()
        return NllModel(
            model.eval().requires_grad_(False),
            context=self._context,
            stride=max(1, self._context // _STRIDE_SHARE),
            batch_tokens=GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS,
            alternatives=AlternativesSpec(self.alternatives),
        )


def _tiled(
    n_bytes: int,
    begin: int,
    where: NDArray[np.int64],
    spans: NDArray[np.int64],
    scores: TokenScores,
) -> Reading:
    """Scores of the tokens `where`, as a reading of the whole text."""
    assert scores.alternatives is not None
    before = tiling_pieces(begin)
    edges = np.concatenate([[begin], spans.ravel(), [n_bytes]])
    gaps = np.diff(edges)
    source = np.full(len(gaps), -1)
    source[1::2] = where
    source = np.concatenate([np.full(len(before), -1), source[gaps > 0]])
    known = source >= 0
    nll = np.full(len(source), np.nan, np.float32)
    nll[known] = scores.nll[source[known]]
    packed = np.full((len(source), scores.alternatives.shape[1]), NOTHING, np.uint32)
    packed[known] = scores.alternatives[source[known]]
    packed[np.isnan(nll)] = NOTHING
    return Reading(np.concatenate([before, gaps[gaps > 0]]), nll, packed)
