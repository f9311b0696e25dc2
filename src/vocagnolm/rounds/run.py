"""`vocagnolm train` for a recipe with rounds: one run folder as for any training, with a folder for
every round in it.

```
RUN/rounds/000001/   what the student wrote in the first round, and the store over it
RUN/metrics.jsonl    one object per optimizer step, with the measures of its round
```

The optimizer, its schedule and the random numbers live through all rounds, and a checkpoint may
stand anywhere between two steps. A step takes its answers out of the folder of its round, so that a
run which was killed makes the same steps again.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from vocagnolm.base.progress import clock_time
from vocagnolm.base.ranks import Ranks, world_size
from vocagnolm.data.materials import student_chat, student_tokenizer
from vocagnolm.errors import RecipeError, StoppedError, TrainingError
from vocagnolm.model import open_model
from vocagnolm.model.runtime import import_compiler_meanwhile, torch_threads
from vocagnolm.model.served import Server
from vocagnolm.recipe import Recipe
from vocagnolm.rounds.folder import StoredRound
from vocagnolm.rounds.offline import OfflineAnswers
from vocagnolm.rounds.rounds import FEW_FINISHED, PromptPool, Rounds, shown_measures
from vocagnolm.rounds.teacher import AnswerTeacher
from vocagnolm.rounds.writer import StudentWriter
from vocagnolm.train.collate import GuidedCollator
from vocagnolm.train.folder import (
    begin_run,
    note_in_run,
    read_metrics,
    read_run,
    run_summary,
)
from vocagnolm.train.loop import Batch, GuidedStudent, Requests, Setup, TrainingLoop, sent
from vocagnolm.train.metrics import Clock, Console, MetricsFile, Report, RunReport, flops_share
from vocagnolm.train.run import (
    hold_run,
    is_main,
    listening,
    run_loop,
    save_model,
    start_processes,
    where_to_resume,
)
from vocagnolm.train.settings import Schedule, uses_accelerator
from vocagnolm.train.strength import CLEARLY_BETTER
from vocagnolm.train.student import (
    adapt_student,
    autocast_dtype,
    build_student,
    require_separation,
    set_up_layers,
)

USUAL_ALTERNATIVES = 16
GROWING_ROUNDS = 10
"""So many rounds in a row with a growing divergence are worth a warning."""


def train_rounds(
    recipe: Recipe, *, quiet: bool = False, restart: bool = False, earlier: float = 0.0
) -> dict[str, Any]:
    """Train a recipe with rounds, or resume it. Returns a summary of the run, as
    `vocagnolm.train.run.train` does, whose arguments and signals these are."""
    clock = Clock(earlier)
    if problems := recipe.rounds_problems():
        raise RecipeError("\n".join(problems))
    with ExitStack() as held:
        folder, summary = hold_run(recipe, held, restart=restart)
        if summary is not None:
            return summary
        if recipe.train.compile:
            import_compiler_meanwhile()
        pool = PromptPool.of(recipe)
        requests = held.enter_context(listening())
        schedule = rounds_schedule(recipe, len(pool.prompts))
        arguments = start_processes(recipe, schedule)
        held.enter_context(torch_threads(1 if arguments.device.type == "cuda" else None))
        clock.end("start")
        setup, rounds = build_rounds(recipe, folder, pool, arguments)
        run = RoundsRun(recipe, folder, rounds, arguments, clock, schedule)
        console = RoundsConsole(quiet=quiet, log_every=recipe.run.log_every)
        console.updates = recipe.rounds.updates_per_round
        return _train(run, setup, console, requests)


def rounds_schedule(recipe: Recipe, prompts: int) -> Schedule:
    """The steps of all rounds. How many blocks a step has depends on what the student writes."""
    rounds, micro_batch = recipe.rounds, recipe.train.micro_batch
    assert isinstance(micro_batch, int)
    return Schedule(
        steps=rounds.rounds * rounds.updates_per_round,
        batch_blocks=micro_batch * world_size(),
        micro_batch=micro_batch,
        accumulation=1,
        world_size=world_size(),
        block_size=recipe.data.block_size,
        blocks=max(prompts, 1),
    )


@dataclass(frozen=True)
class RoundsRun:
    """The parts of a run that stay the same from its first to its last step."""

    recipe: Recipe
    folder: Path
    rounds: Rounds
    arguments: TrainingArguments
    clock: Clock
    schedule: Schedule


def build_rounds(
    recipe: Recipe, folder: Path, pool: PromptPool, arguments: TrainingArguments
) -> tuple[Setup, Rounds]:
    """The student that is trained, the copy that writes, and the teacher that reads."""
    assert recipe.student.model is not None and recipe.teacher.model is not None
    tokenizer = student_tokenizer(recipe)
    chat = student_chat(recipe, tokenizer)
    files = open_model(recipe.student.model, device="cpu", revision=recipe.student.revision)
    teacher = answer_teacher(recipe)
    model = build_student(recipe)
    half = recipe.train.half_precision and arguments.device.type != "cpu"
    limit = recipe.rounds.limit
    context = min(recipe.data.block_size + 1, files.max_context or recipe.data.block_size + 1)
    if context <= limit + 1:
        raise RecipeError(
            f"rounds.max_new_tokens {limit:,} leaves no room for prompts in blocks of "
            f"{context - 1:,} tokens (data.block_size, or the student's context). Use fewer tokens "
            "or longer blocks."
        )
    writer = StudentWriter(
        model,
        replace(files, tokenizer=tokenizer),
        chat,
        device=arguments.device,
        dtype=torch.bfloat16 if half else model.dtype,
        temperature=recipe.rounds.temperature,
        limit=limit,
        context=context,
    )
    adapted = adapt_student(recipe, arguments, tokenizer, model)
    student = GuidedStudent(
        adapted,
        router_loss=recipe.train.router_loss,
        autocast=autocast_dtype(recipe, arguments),
    )
    require_separation(student.causal_lm, "The student")
    student.to(arguments.device)
    set_up_layers(recipe, arguments, adapted, documents=True)
    offline = OfflineAnswers.of(recipe, chat)
    rounds = Rounds(recipe, folder, pool, writer, teacher, files.describe(), offline)
    return Setup(student, None, GuidedCollator.for_blocks(document_mask=True)), rounds


def answer_teacher(recipe: Recipe) -> AnswerTeacher:
    """The teacher of a recipe with rounds."""
    section = recipe.teacher
    assert section.model is not None
    on_gpu = uses_accelerator(recipe)
    files = open_model(
        section.model,
        device="cpu" if section.server or not on_gpu else "auto",
        dtype=section.dtype,
        revision=section.revision,
        weights=section.server is None,
    )
    return AnswerTeacher(
        files,
        alternatives=recipe.objective.alternatives or USUAL_ALTERNATIVES,
        system=section.system,
        examples=section.examples,
        chat_template=section.chat_template,
        template_options=section.template_options,
        server=None if section.server is None else Server.of(section.server),
    )


def _train(
    run: RoundsRun,
    setup: Setup,
    console: "RoundsConsole",
    requests: Requests,
) -> dict[str, Any]:
    recipe, folder, schedule = run.recipe, run.folder, run.schedule
    metrics = MetricsFile(folder / "metrics.jsonl")
    resumed = Ranks.of().decide(lambda: where_to_resume(folder, console))
    begun = read_run(folder).get("blocks")
    if resumed.step and begun not in (None, run.rounds.fingerprint):
        raise TrainingError(
            f"{folder}: the prompts are not those with which the run was begun. Restore them, or "
            "choose another run.folder."
        )
    if is_main():
        begin_run(folder, recipe, schedule, run.rounds.fingerprint)
        note_in_run(folder, rounds=True)
        metrics.resume_at(resumed.step)
    run.clock.end("loading")
    with ExitStack() as held:
        report = Report()
        notes = RoundNotes()
        if is_main():
            records = read_metrics(folder / "metrics.jsonl")
            tokens = records[-1]["tokens"] if records else 0
            report = _report(run, setup, metrics, console, notes, tokens, resumed.step, held)
            if resumed.step == 0:
                warn_of_teacher(run.rounds, setup.student.model, console)
            console.start(schedule, resumed.step)
        run.clock.end("measuring")
        loop = RoundsLoop(setup, recipe, schedule, run.arguments, report=report, requests=requests)
        loop.rounds, loop.notes, loop.say = run.rounds, notes, console.say
        run_loop(loop, resumed)
    if loop.stopped and loop.step < schedule.steps:
        raise StoppedError(
            f"stopped on request after step {loop.step:,} of {schedule.steps:,}; a checkpoint "
            f"was written. Run the same command again to resume."
        )
    run.clock.end("training")
    template = run.rounds.chat.template
    save_model(recipe, folder, loop, run.clock, template, recipe.teacher.model)
    Ranks.of().wait_for_all()
    return run_summary(folder)


def warn_of_teacher(rounds: Rounds, student: torch.nn.Module, console: Console) -> None:
    """Warn of a teacher that does not read the prompts clearly better than the student."""
    bits = rounds.prompt_bits(student)
    if bits is not None and bits[0] > CLEARLY_BETTER * bits[1]:
        console.say(
            f"warning: on the prompts the teacher has {bits[0]:.3f} bits per byte, the student "
            f"{bits[1]:.3f}: a teacher that is not clearly better can teach it little."
        )


def _report(
    run: RoundsRun,
    setup: Setup,
    metrics: MetricsFile,
    console: "RoundsConsole",
    notes: "RoundNotes",
    tokens: int,
    step: int,
    held: ExitStack,
) -> "RoundsReport":
    """The report of the first process; its trackers end with `held`."""
    trackers = None
    if run.recipe.run.report_to:
        from vocagnolm.train.trackers import Trackers

        opened = Trackers(run.recipe, run.arguments, run.rounds.chat.base, step=step, texts=False)
        trackers = held.enter_context(opened)
    share = flops_share(setup.student.model, run.schedule, run.arguments.device)
    report = RoundsReport(metrics, console, run.clock, run.schedule, share, trackers)
    report.notes.append(notes)
    notes.tokens = tokens
    return report


@dataclass
class RoundNotes:
    """What the records of steps say beside the measures of any training."""

    by_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    tokens: int = 0
    """The tokens of the steps so far."""


class RoundsLoop(TrainingLoop):
    """The training loop, whose steps come out of rounds."""

    rounds: Rounds
    notes: RoundNotes
    say: Any

    def steps(self) -> Iterator[list[Batch]]:
        """The micro-batches of this rank for each step; a round is opened before its first."""
        return (self._batches(step) for step in itertools.count(self.step))

    def _batches(self, step: int) -> list[Batch]:
        section = self.recipe.rounds
        number, update = divmod(step, section.updates_per_round)
        noted: dict[str, Any] = {"round": number + 1}
        if update == 0 or not hasattr(self, "_round"):
            began = time.perf_counter()
            if update == 0 and section.held_out and number % section.held_out_every == 0:
                accuracy = self.rounds.held_out_accuracy(self.student.model, self.device)
                noted["held_out_right"] = accuracy
            self._open(number, may_write=update == 0)
            noted |= shown_measures(self._round.measures)
            noted |= {f"seconds_{name}": spent for name, spent in self.rounds.seconds.items()}
            self._waited += time.perf_counter() - began
        self.notes.by_step[step + 1] = noted
        micro_batches = self.rounds.micro_batches(self._round, update)
        return [sent(self.setup.collator(rows), self.device) for rows in micro_batches]

    def _open(self, number: int, *, may_write: bool) -> None:
        self._round: StoredRound = self.rounds.open(number, self.student.model, may_write=may_write)
        measures = shown_measures(self._round.measures)
        share = measures["finished_share"]
        few = self.recipe.rounds.prefix_tokens is None and share is not None
        if few and share < FEW_FINISHED and is_main():  # type: ignore[operator]
            self.say(
                f"warning: the student finished {share:.0%} of its answers in round {number + 1}: "
                "first let the teacher write, or raise rounds.max_new_tokens."
            )


@dataclass(frozen=True)
class RoundsReport(RunReport):
    """The report of a run with rounds."""

    notes: list[RoundNotes] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)

    def step(self, record: dict[str, Any], gradient_norm: Tensor | None) -> None:
        (notes,) = self.notes
        notes.tokens += record["tokens"] // record["step"]  # all steps are counted as this one
        record["tokens"] = notes.tokens
        record |= notes.by_step.pop(record["step"], {})
        super().step(record, gradient_norm)
        if "finished_share" not in record:  # not the first step of its round
            return
        self._losses.append(record["loss"])
        last = self._losses[-GROWING_ROUNDS - 1 :]
        if len(last) > GROWING_ROUNDS and all(a < b for a, b in itertools.pairwise(last)):
            self.console.say(
                f"warning: the divergence has grown for {GROWING_ROUNDS} rounds in a row, from "
                f"{last[0]:.4f} to {last[-1]:.4f}: lower optimizer.learning_rate."
            )
            self._losses.clear()


class RoundsConsole(Console):
    """Lines on stderr, one for a round."""

    updates = 1

    def start(self, schedule: Schedule, step: int) -> None:
        self._steps, self._first, self._began = schedule.steps, step, time.monotonic()
        rounds = schedule.steps // self.updates
        begins = f"going on after step {step}" if step else "training"
        self.say(f"{begins}: {rounds:,} rounds of {self.updates} optimizer step(s)")

    def step(self, record: dict[str, Any]) -> None:
        if self.quiet or "finished_share" not in record:
            return
        number, step = record["round"], record["step"]
        if number % self.log_every and step != self._steps and not self._throttle.due():
            return
        self._throttle.said()
        seconds = time.monotonic() - self._began
        left = seconds / max(step - self._first, 1) * (self._steps - step)
        parts = [
            f"round {number:>5,}/{self._steps // self.updates:,}",
            f"divergence {record['loss']:.4f}",
            f"finished {record['finished_share']:.0%} of {record['answer_tokens']:,.0f} tokens",
            f"other ids {record['other_ids_share']:.1%}",
        ]
        if (entropy := record.get("entropy")) is not None:
            parts.append(f"entropy {entropy:.3f}")
        for name, key in (("right", "right_share"), ("held out", "held_out_right")):
            if record.get(key) is not None:
                parts.append(f"{name} {record[key]:.1%}")
        if "seconds_writing" in record:
            parts.append(f"writing {record['seconds_writing']:.1f} s")
        parts += [f"lr {record['learning_rate']:.2e}", f"ETA {clock_time(left)}"]
        self.say("  ".join(parts))
