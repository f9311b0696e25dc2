"""The rounds of a run: in each the student writes with its present weights, the teacher reads what
it wrote, and both are in a folder before the first optimizer step of the round."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from vocagnolm.base.files import differences, json_digest
from vocagnolm.base.ranks import Ranks
from vocagnolm.base.statistics import bits_per_byte
from vocagnolm.chat import ChatTokenizer, Refused
from vocagnolm.chat.answers import LaidAnswer
from vocagnolm.chat.tokens import ChatTokens
from vocagnolm.data.guidance import TargetsPlan, nats_and_bytes
from vocagnolm.data.prompts import Prompt, Prompts, open_prompts
from vocagnolm.errors import TrainingError
from vocagnolm.recipe import Recipe
from vocagnolm.rounds.blocks import dealt_blocks, empty_block, packed_blocks
from vocagnolm.rounds.folder import (
    RoundAnswer,
    StoredRound,
    found_round,
    read_round,
    write_round,
)
from vocagnolm.rounds.offline import OfflineAnswers
from vocagnolm.rounds.targets import (
    Columns,
    Rollout,
    lay_rollout,
    rollout_columns,
    targets_plan,
)
from vocagnolm.rounds.teacher import AnswerTeacher, Reading
from vocagnolm.rounds.writer import Asked, StudentWriter
from vocagnolm.score.write import grader_of
from vocagnolm.score.writers import answer_seed
from vocagnolm.storage.copies import version
from vocagnolm.store import LossStore
from vocagnolm.store.format import encode_vocabulary
from vocagnolm.store.writer import measured_apart, refuse_other_identity, with_values_of

_PACKAGES = ("tokenizers", "torch", "transformers")
FOLDER = "rounds"
COMPARED_PROMPTS, LEAST_COMPARED_BYTES = 32, 256
"""Prompts on which the teacher is compared with the student, and the text that this takes."""


@dataclass(frozen=True)
class PromptPool:
    """The prompts of a run, and which of them a round asks: every pass over them in an order of its
    own, by seed."""

    prompts: Prompts
    seed: int
    per_round: int

    @classmethod
    def of(cls, recipe: Recipe) -> "PromptPool":
        rounds = recipe.rounds
        prompts = open_prompts(rounds.prompts, answer_field=rounds.answer_field)
        return cls(prompts, recipe.run.seed, rounds.prompts_per_round)

    def of_round(self, number: int) -> list[Prompt]:
        count, first = len(self.prompts), number * self.per_round
        chosen = []
        for place in range(first, first + self.per_round):
            epoch, position = divmod(place, count)
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
            chosen.append(int(order[position]))
        return [prompt for n in chosen for prompt in self.prompts.read(n, n + 1)]


@dataclass
class Rounds:
    """Makes the rounds of a run, or reads those that are there."""

    recipe: Recipe
    folder: Path
    pool: PromptPool
    writer: StudentWriter
    teacher: AnswerTeacher
    about_student: dict[str, Any]
    offline: OfflineAnswers | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """What the round that was opened last took, by what it was spent on."""

    @property
    def chat(self) -> ChatTokenizer:
        return self.writer.chat

    @cached_property
    def plan(self) -> TargetsPlan:
        return targets_plan(self.chat, self.teacher)

    @property
    def by_drawn_tokens(self) -> bool:
        """Whether the objective asks how likely the drawn tokens were."""
        towards = self.recipe.objective.towards
        return towards is not None and not towards.bucket

    def path(self, number: int) -> Path:
        return self.folder / FOLDER / f"{number + 1:06d}"

    def open(self, number: int, student: nn.Module, *, may_write: bool) -> StoredRound:
        """Round `number`, from 0, out of its folder. It is written first by the student as it is
        now, if it is not there. `may_write`: the student still has the weights of its beginning."""
        path, ranks = self.path(number), Ranks.of()
        self.seconds = {}
        if not ranks.decide(lambda: found_round(path)):
            if not may_write:
                raise TrainingError(
                    f"{path} is gone, and the run has trained on a part of it. Restore it from a "
                    "copy, or remove the checkpoints of its steps."
                )
            self._write(number, student)
        round_ = read_round(path)
        wanted = self.identity(number)
        refuse_other_identity(path, round_.identity, with_values_of(round_.identity, wanted))
        return round_

    def identity(self, number: int) -> dict[str, Any]:
        """Everything that decides a round, but for the weights that training has made."""
        rounds, prompts = self.recipe.rounds, self.pool.prompts
        names = ("samples", "temperature", "max_new_tokens", "prefix_tokens", "prompts_per_round")
        writing = {name: getattr(rounds, name) for name in names}
        about = self.teacher.describe()
        return {
            **about,
            "writing": {
                **writing,
                "seed": self.recipe.run.seed,
                "cut": "keep",
                "student": self.about_student,
                "round": number + 1,
                "system": about["reading"]["system"],
                "examples": about["reading"]["examples"],
                "template": self.chat.template.describe(),
            },
            "corpus": {
                **prompts.describe(),
                "prompts": rounds.prompts_per_round,
                "documents": rounds.prompts_per_round * rounds.samples,
            },
            "shard_documents": rounds.prompts_per_round * rounds.samples,
            "software": {name: version(name) for name in _PACKAGES},
        }

    @property
    def fingerprint(self) -> str:
        """The prompts of the run."""
        return json_digest(self.pool.prompts.describe())

    # ---- writing a round ----

    def _write(self, number: int, student: nn.Module) -> None:
        """Every rank writes and reads its share of the answers; the first puts all into the
        folder."""
        ranks, began = Ranks.of(), time.perf_counter()
        ranks.decide(lambda: self._require_first_teacher(number))
        self.writer.follow(student)
        reads = [(prompt, self.writer.read(prompt)) for prompt in self.pool.of_round(number)]
        samples = self.recipe.rounds.samples
        slots = [(n * samples + m, *reads[n]) for n in range(len(reads)) for m in range(samples)]
        mine = slots[ranks.rank :: ranks.count]
        asked = [(slot, read) for slot, _, read in mine if isinstance(read, Asked)]
        first = number * len(slots)
        seeds = [
            answer_seed(self.recipe.run.seed, read.prompt.text or "", 0, first + slot)
            for slot, read in asked
        ]
        rollouts = self.writer.draw([read for _, read in asked], seeds)
        drawn = {slot: rollout for (slot, _), rollout in zip(asked, rollouts, strict=True)}
        self.seconds["writing"] = time.perf_counter() - began
        answers = self._read(mine, drawn)
        self.seconds["reading"] = time.perf_counter() - began - self.seconds["writing"]
        gathered: list[Any] = [answers]
        if ranks.count > 1:
            gathered = [None] * ranks.count
            dist.all_gather_object(gathered, answers)
        every = sorted((a for part in gathered for a in part), key=lambda answer: answer.slot)
        ranks.decide(lambda: self._put(number, every))

    def _require_first_teacher(self, number: int) -> None:
        """Refuse a teacher that is not the one of the first round: a server may have been started
        again with another model."""
        if number == 0 or not found_round(self.path(0)):
            return
        first, now = LossStore.open(self.path(0)).manifest["identity"], self.identity(0)
        for name, then, here in differences(first, with_values_of(first, now)):
            apart = measured_apart(name, then, here) or f"{here!r:.60}, and was {then!r:.60}"
            raise TrainingError(
                f"round {number + 1} has another teacher or other settings than the first: {name} "
                f"is {apart}. Give the run its first teacher back, or choose another run.folder."
            )

    def _put(self, number: int, answers: Sequence[RoundAnswer]) -> None:
        measures = round_measures(answers)
        if not measures["kept"]:
            reason = next((a.reason for a in answers if a.reason is not None), "unknown")
            raise TrainingError(
                f"round {number + 1}: none of the {len(answers):,} answers can be trained on. The "
                f"first: {reason}."
            )
        if number == 0 and self.recipe.rounds.prefix_tokens is None:
            refuse_endless(measures)
        vocabulary = encode_vocabulary(self.teacher.vocabulary)
        write_round(self.path(number), self.identity(number), vocabulary, answers, measures)

    def _read(
        self, slots: Sequence[tuple[int, Prompt, Asked | str]], drawn: dict[int, Rollout]
    ) -> list[RoundAnswer]:
        """The answers of this rank, with what the teacher makes of them."""
        kept: list[tuple[int, Prompt, Rollout, LaidAnswer]] = []
        answers: list[RoundAnswer] = []
        for slot, prompt, read in slots:
            if isinstance(read, str):
                answers.append(RoundAnswer(slot, prompt, reason=read))
                continue
            rollout = drawn[slot]
            try:
                if rollout.nll is not None and not np.isfinite(rollout.nll).all():
                    raise Refused("not finite: the student's losses are NaN or infinite")
                laid = lay_rollout(rollout, self.chat)
            except Refused as error:
                text = self._shown(rollout)
                answers.append(RoundAnswer(slot, prompt, text, str(error), rollout))
                continue
            kept.append((slot, prompt, rollout, laid))
        readings = self.teacher.read([(laid.text, laid.begin) for *_, laid in kept])
        for (slot, prompt, rollout, laid), reading in zip(kept, readings, strict=True):
            text = self._shown(rollout)
            if not isinstance(reading, Reading):
                reason = f"teacher: {reading}"
                answers.append(RoundAnswer(slot, prompt, text, reason, rollout))
                continue
            answers.append(
                RoundAnswer(
                    *(slot, prompt, text, None, rollout, laid, reading),
                    other_ids=tokenizes_to_others(rollout, laid, self.chat),
                    right=self._is_right(prompt, laid.content, rollout.finished),
                )
            )
        return answers

    def _shown(self, rollout: Rollout) -> str:
        pieces = [self.chat.private_bytes_of(token) or b"" for token in rollout.ids]
        return self.chat.with_control_tokens(b"".join(pieces).decode(errors="replace"))

    def _is_right(self, prompt: Prompt, content: str, finished: bool) -> bool | None:
        kind = self.recipe.rounds.grade
        if kind is None or prompt.expected is None:
            return None
        return grader_of(kind)(content, prompt.expected, prompt.text or "", finished)

    def prompt_bits(self, student: nn.Module) -> tuple[float, float] | None:
        """Bits per byte of the teacher and of the student on the text of some prompts; None where
        there is too little to compare."""
        self.writer.follow(student)
        prompts = (prompt.text for prompt in self.pool.of_round(0)[:COMPARED_PROMPTS])
        texts = [text for text in prompts if text is not None]
        theirs: list[tuple[float, int]] = []
        for reading in self.teacher.read([(text, 0) for text in texts]):
            if isinstance(reading, Reading):
                theirs.append(nats_and_bytes(reading.token_bytes, reading.nll))  # type: ignore[arg-type]
        reads = [read for read in self.chat.outcomes(texts) if isinstance(read, ChatTokens)]
        losses = self.writer.losses([read.ids.tolist() for read in reads])
        own = [
            nats_and_bytes(read.token_bytes, np.where(read.token_bytes > 0, nll, np.nan))
            for read, nll in zip(reads, losses, strict=True)
        ]
        sides = [np.sum(side, axis=0) for side in (theirs, own) if side]
        if len(sides) < 2 or min(covered for _, covered in sides) < LEAST_COMPARED_BYTES:
            return None
        teacher_bits, student_bits = (float(bits_per_byte(*sums)) for sums in sides)
        return teacher_bits, student_bits

    # ---- training on a round ----

    def micro_batches(self, round_: StoredRound, update: int) -> list[list[Columns]]:
        """The micro-batches of this rank for one update of a round."""
        recipe, ranks = self.recipe, Ranks.of()
        updates, width = recipe.rounds.updates_per_round, recipe.data.block_size + 1
        numbers = np.arange(len(round_.answers))
        some = np.array_split(numbers, updates)[update].tolist()
        rows = self.rows(round_, some)
        if self.offline is not None:
            number = int(round_.identity["writing"]["round"]) - 1
            rows += self.offline.rows(number, update, updates)
        blocks = packed_blocks(rows, width)
        if not blocks:  # few answers were kept, and none of them fell to this update
            whole = packed_blocks(self.rows(round_, numbers.tolist()), width)
            if not whole:
                raise TrainingError(
                    f"round {round_.identity['writing']['round']}: the teacher can judge no token "
                    "of the answers. See its folder with `vocagnolm view`."
                )
            blocks = [empty_block(whole[0])]
        micro_batch = recipe.train.micro_batch
        assert isinstance(micro_batch, int)
        return dealt_blocks(blocks, micro_batch, ranks.rank, ranks.count)

    def rows(self, round_: StoredRound, numbers: Sequence[int]) -> list[Columns]:
        """Rows of prompt and answer for these answers of a round."""
        rollouts, laid = [], []
        several = self.recipe.rounds.updates_per_round > 1 and self.by_drawn_tokens
        for answer in (round_.answers[number] for number in numbers):
            (prompt,) = self.pool.prompts.read(answer.prompt_index, answer.prompt_index + 1)
            assert prompt.text is not None
            ids = self.chat.prompt_ids(prompt.messages)
            nll = answer.nll if several else None
            rollouts.append(Rollout(prompt.text, ids, answer.ids, answer.finished, nll))
            laid.append(lay_rollout(rollouts[-1], self.chat))
        readings = [round_.answers[number].reading for number in numbers]
        return rollout_columns(rollouts, laid, readings, self.plan)

    # ---- held-out prompts ----

    @cached_property
    def _held_out(self) -> list[Asked]:
        rounds = self.recipe.rounds
        prompts = open_prompts(rounds.held_out, answer_field=rounds.answer_field)
        reads = [self.writer.read(prompt) for prompt in prompts.read()]
        asked = [read for read in reads if isinstance(read, Asked)]
        asked = [read for read in asked if read.prompt.expected is not None]
        if not asked:
            raise TrainingError(
                f"rounds.held_out: no prompt of {', '.join(rounds.held_out)} can be asked and has "
                f"an expected answer in its field {rounds.answer_field}."
            )
        return asked

    def held_out_accuracy(self, student: nn.Module, device: torch.device) -> float:
        """The share of held-out prompts whose greedy answer is right."""
        ranks = Ranks.of()
        self.writer.follow(student)
        mine = self._held_out[ranks.rank :: ranks.count]
        right = 0
        for read, rollout in zip(mine, self.writer.likeliest(mine), strict=True):
            try:
                content = lay_rollout(rollout, self.chat).content
            except Refused:
                continue
            right += bool(self._is_right(read.prompt, content, rollout.finished))
        total = ranks.sum(torch.tensor(float(right), device=device))
        return float(total) / len(self._held_out)


def tokenizes_to_others(rollout: Rollout, laid: LaidAnswer, chat: ChatTokenizer) -> bool:
    """Whether the text of an answer tokenizes to other ids than the student drew."""
    (tokens,) = chat.outcomes([laid.text])
    if not isinstance(tokens, ChatTokens):
        return True
    own: list[int] = tokens.ids[tokens.turns == len(laid.text.encode()) - 1].tolist()
    return own != list(rollout.ids)


def round_measures(answers: Sequence[RoundAnswer]) -> dict[str, Any]:
    """Counts and sums over the answers of a round."""
    kept = [a for a in answers if a.reason is None and a.rollout is not None]
    written = [a.rollout for a in answers if a.rollout is not None]
    marked = [a.right for a in kept if a.right is not None]
    losses = [rollout.nll for a in kept if (rollout := a.rollout) and rollout.nll is not None]
    student = [float(np.sum(nll, dtype=np.float64)) for nll in losses]
    teacher = [float(np.nansum(a.reading.nll, dtype=np.float64)) for a in kept if a.reading]
    return {
        "answers": len(answers),
        "written": len(written),
        "kept": len(kept),
        "finished": sum(rollout.finished for rollout in written),
        "tokens": sum(len(rollout.ids) for rollout in written),
        "kept_tokens": sum(len(a.rollout.ids) for a in kept if a.rollout is not None),
        "other_ids": sum(a.other_ids for a in kept),
        "marked": len(marked),
        "right": sum(marked),
        "student_nats": sum(student),
        "teacher_nats": sum(teacher),
    }


LEAST_FINISHED = 0.1
FEW_FINISHED = 0.5


def refuse_endless(measures: dict[str, Any]) -> None:
    """Refuse a student that ends hardly any answer: it would be trained on what it broke off."""
    share = measures["finished"] / max(measures["written"], 1)
    if share < LEAST_FINISHED:
        raise TrainingError(
            f"the student finished {share:.0%} of the answers of the first round. Let the teacher "
            "write first (`vocagnolm write`) and distill the student from that; or raise "
            "rounds.max_new_tokens, or train on beginnings alone with rounds.prefix_tokens."
        )


def shown_measures(measures: dict[str, Any]) -> dict[str, float | None]:
    """A round's measures as metrics: shares and means."""
    written, kept = max(measures["written"], 1), max(measures["kept"], 1)
    tokens = max(measures["kept_tokens"], 1)
    return {
        "finished_share": measures["finished"] / written,
        "answer_tokens": measures["tokens"] / written,
        "other_ids_share": measures["other_ids"] / kept,
        "left_out_share": 1 - measures["kept"] / measures["answers"],
        "right_share": measures["right"] / measures["marked"] if measures["marked"] else None,
        "sampled_divergence": (measures["teacher_nats"] - measures["student_nats"]) / tokens,
    }
