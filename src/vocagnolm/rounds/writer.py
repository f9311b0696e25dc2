"""The student writes: a copy of it that answers prompts, and takes the trained weights over before
every round. The copy keeps the attention of writing, and on a GPU its graphs, whatever the trained
model is wrapped in."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from vocagnolm.chat import ChatTokenizer, Refused
from vocagnolm.data.prompts import Prompt
from vocagnolm.errors import TemplateError
from vocagnolm.generate.decoder import Decoder, PromptTokens
from vocagnolm.generate.draw import Sampling
from vocagnolm.generate.reading import end_ids, known_ids
from vocagnolm.model.load import ModelFiles
from vocagnolm.rounds.targets import Rollout
from vocagnolm.train.student import causal_lm_of

GPU_ROWS = 256
"""Answers that a GPU writes at once; a fixed number, on which the last bits depend."""


@dataclass(frozen=True)
class Asked:
    """A prompt as the student reads it."""

    prompt: Prompt
    ids: Sequence[int]


class StudentWriter:
    """A copy of a student that writes answers."""

    def __init__(
        self,
        model: PreTrainedModel,
        files: ModelFiles,
        chat: ChatTokenizer,
        *,
        device: torch.device,
        dtype: torch.dtype,
        temperature: float,
        limit: int,
        context: int,
    ):
        """`model`: the student before it is trained; it is copied. `limit`: tokens of an answer.
        `context`: tokens of a prompt and its answer."""
        self.chat, self.limit, self.context = chat, limit, context
        copied: Any = copy.deepcopy(model)
        self._model: PreTrainedModel = copied.to(device, dtype).eval().requires_grad_(False)
        about: dict[str, Any] = {"ends": end_ids(files, chat), "known": known_ids(files)}
        self._drawing = Decoder(self._model, sampling=Sampling(temperature), **about)
        self._greedy = Decoder(self._model, sampling=Sampling(0.0), **about)

    def read(self, prompt: Prompt) -> Asked | str:
        """The prompt as the student reads it, or the reason why it cannot be asked."""
        if prompt.text is None:
            return prompt.problem or "unknown"
        try:
            ids = self.chat.prompt_ids(prompt.messages)
        except (TemplateError, Refused) as error:
            return f"template: {error}"
        room = self.context - self.limit
        if len(ids) > room:
            return (
                f"too long: {len(ids):,} tokens, and there is room for {room:,} (data.block_size)"
            )
        return Asked(prompt, ids)

    @torch.no_grad()
    def follow(self, student: nn.Module) -> None:
        """Take over the weights of the trained student, with its adapters merged."""
        merged = merged_weights(student)
        for name, parameter in self._model.named_parameters():
            parameter.copy_(merged[name])

    def draw(self, asked: Sequence[Asked], seeds: Sequence[int]) -> list[Rollout]:
        """One answer to each prompt; its draws follow from the seed and the weights alone."""
        return self._answers(self._drawing, asked, seeds)

    def likeliest(self, asked: Sequence[Asked]) -> list[Rollout]:
        """The greedy answer to each prompt."""
        return self._answers(self._greedy, asked, [0] * len(asked))

    def losses(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """The student's losses on the tokens of some texts; NaN for the first of each."""
        return self._greedy.losses(rows)

    def _answers(
        self, decoder: Decoder, asked: Sequence[Asked], seeds: Sequence[int]
    ) -> list[Rollout]:
        prompts = [
            PromptTokens(read.ids, (seed,), self.limit)
            for read, seed in zip(asked, seeds, strict=True)
        ]
        answers: list[Rollout | None] = [None] * len(asked)
        for done in decoder.answers(prompts, rows=min(len(prompts), GPU_ROWS)):
            read, tokens = asked[done.prompt], done.tokens
            assert read.prompt.text is not None
            answers[done.prompt] = Rollout(
                read.prompt.text, read.ids, tokens.ids.tolist(), tokens.finished, tokens.nll
            )
        return [answer for answer in answers if answer is not None]


def merged_weights(student: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a student by the names of the model without adapters, which are added to
    the weights that they adapt."""
    model = causal_lm_of(student)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            weights[name.replace(".base_layer.", ".")] = parameter.detach()
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
            (adapter,) = module.active_adapters
            key = f"{name}.weight"
            weights[key] = weights[key] + module.get_delta_weight(adapter)
    return weights
