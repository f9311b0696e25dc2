"""`vocagnolm train`: one recipe, one run folder.

```
RUN/recipe.yaml      the resolved recipe, written first
RUN/run.json         versions, schedule, processes; `finished` when the model is there
RUN/metrics.jsonl    one object per step
RUN/checkpoints/     checkpoint-N, each with a marker written last
RUN/model/           the result: an ordinary model folder
RUN/tensorboard/     where run.report_to names tensorboard
```
"""

import contextlib
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel, TrainingArguments

from vocagnolm.base.files import (
    address_of,
    as_write_error,
    file_records,
    folder_lock,
    model_damage,
    remove_leftovers,
    whole_folder,
)
from vocagnolm.base.ranks import Ranks, world_size
from vocagnolm.chat import ChatTemplate
from vocagnolm.data.blocks import Blocks, TrainingOrder, damaged_parts
from vocagnolm.data.differences import differing_inputs
from vocagnolm.data.fingerprints import block_settings
from vocagnolm.data.materials import Materials, local_blocks
from vocagnolm.data.mixture import MixedBlocks, MixedOrder
from vocagnolm.errors import (
    BlocksError,
    InterruptedRunError,
    RecipeError,
    StoppedError,
    TrainingError,
    UsageError,
    VocagnolmError,
    VocagnolmWarning,
)
from vocagnolm.model.runtime import import_compiler_meanwhile, torch_threads
from vocagnolm.recipe import Recipe
from vocagnolm.train.checkpoint import Resumable, newest_complete
from vocagnolm.train.collate import GuidedCollator
from vocagnolm.train.folder import (
    begin_run,
    found_micro_batch,
    model_card,
    note_in_run,
    read_metrics,
    read_run,
    refuse_other_run,
    run_folder,
    run_summary,
)
from vocagnolm.train.loop import GuidedStudent, Requests, Setup, TrainingLoop
from vocagnolm.train.metrics import Clock, Console, MetricsFile, Report, RunReport, flops_share
from vocagnolm.train.parallel import full_state_dict, sharding_group
from vocagnolm.train.settings import (
    Schedule,
    corpora_read,
    objective_config,
    plan_schedule,
    slow_arithmetic,
    training_arguments,
    uses_accelerator,
)
from vocagnolm.train.strength import best_store, measure_strength, teacher_warning
from vocagnolm.train.student import (
    adapt_student,
    add_lora,
    autocast_dtype,
    build_student,
    require_separation,
    save_tokenizer,
    set_up_layers,
)
from vocagnolm.train.teacher import online_teacher


def train(
    recipe: Recipe, *, quiet: bool = False, restart: bool = False, earlier: float = 0.0
) -> dict[str, Any]:
    """Train a recipe, or resume it. Returns a summary of the run.

    `restart`: remove the run's checkpoints and start over, even if it is finished. SIGTERM and
    Ctrl-C write a checkpoint and raise `StoppedError`; a second Ctrl-C raises `KeyboardInterrupt`
    at once. SIGUSR1 writes a checkpoint and continues. `earlier`: seconds that a command has used
    before this call.
    """
    if recipe.in_rounds:
        raise UsageError(
            "this recipe trains in rounds: use vocagnolm.rounds.train_rounds, or `vocagnolm train`."
        )
    clock = Clock(earlier)
    with ExitStack() as held:
        folder, summary = hold_run(recipe, held, restart=restart)
        if summary is not None:
            return summary
        about = read_run(folder)
        about |= {"finished": False} if about else {}
        if recipe.train.compile:
            import_compiler_meanwhile()
        materials = Materials(recipe)
        materials.tokenizer  # noqa: B018  (loaded before the threads begin)
        with ThreadPoolExecutor(1) as loader:  # loads the student while the blocks are read
            whole = recipe.train.parallel == "ddp"
            loading = loader.submit(build_student, recipe) if whole else None
            blocks = open_corpora(materials, verify=is_main())
            clock.end("start")
        model = None if loading is None else loading.result()
        refuse_other_run(folder, recipe, about, blocks.fingerprint)
        requests = held.enter_context(listening())
        schedule = plan_schedule(recipe, len(blocks), world_size(), found_micro_batch(folder))
        arguments = start_processes(recipe, schedule)
        if not whole:
            held.enter_context(sharding_group(accelerator=uses_accelerator(recipe)))
        run = Run(materials, folder, blocks, arguments, clock)
        # Beside a GPU the CPU does small things, such as pinning a batch, and waking its
        # threads takes longer than the work: 6 ms an operation were measured.
        held.enter_context(torch_threads(1 if arguments.device.type == "cuda" else None))
        console = Console(quiet=quiet, log_every=recipe.run.log_every)
        return _train(run, schedule, model, console, requests)


def hold_run(
    recipe: Recipe, held: ExitStack, *, restart: bool
) -> tuple[Path, dict[str, Any] | None]:
    """The folder of a recipe's run, locked until `held` ends, and the summary of the run if it is
    finished already. `restart`: its checkpoints are removed, and it counts as not begun."""
    refuse_lone_process()
    transformers.utils.logging.disable_progress_bar()
    folder = run_folder(recipe)
    refuse_other_run(folder, recipe, read_run(folder))
    refuse_missing_trackers(recipe)
    if is_main():
        held.enter_context(folder_lock(folder, "Wait for it to end, or choose another run.folder."))
        remove_leftovers(folder)
        if restart:
            forget_run(folder)
    return folder, None if restart else finished_run(folder)


def start_processes(recipe: Recipe, schedule: Schedule) -> TrainingArguments:
    """transformers' arguments of a run; with several processes torch.distributed is started."""
    arguments = training_arguments(recipe, schedule)
    arguments.device  # noqa: B018  (starts torch.distributed)
    transformers.utils.logging.set_verbosity(arguments.get_process_log_level())
    return arguments


def finished_run(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that is finished and whole; None for one that has something to do. A
    model that is damaged is made again."""
    if not read_run(folder).get("finished"):
        return None
    damage = model_damage(folder / "model")
    if damage is None and (folder / "model" / "config.json").is_file():
        return run_summary(folder, already=True)
    if is_main():
        note_in_run(folder, finished=False)
        lost = damage or f"{folder}: the model of this finished run is missing."
        warnings.warn(f"{lost} It is made again now.", VocagnolmWarning, stacklevel=3)
    return None


@dataclass(frozen=True)
class Run:
    """The parts of a run that stay the same from its first to its last step."""

    materials: Materials
    folder: Path
    blocks: Blocks | MixedBlocks
    arguments: TrainingArguments
    clock: Clock

    @property
    def recipe(self) -> Recipe:
        return self.materials.recipe


def _train(
    run: Run,
    schedule: Schedule,
    model: PreTrainedModel | None,
    console: Console,
    requests: Requests,
) -> dict[str, Any]:
    """Train a run that may begin. `model`: the student, or None where each process loads its own,
    for its shards."""
    recipe, folder = run.recipe, run.folder
    known = found_micro_batch(folder)
    metrics = MetricsFile(folder / "metrics.jsonl")
    resumed: Resumable = Ranks.of().decide(lambda: where_to_resume(folder, console))
    if is_main():
        corpora = _facts_of_corpora(recipe, run.blocks, schedule)
        begin_run(folder, recipe, schedule, run.blocks.fingerprint, corpora)
        metrics.resume_at(resumed.step)
    setup = build_setup(run.materials, run.blocks, schedule, run.arguments, model)
    run.clock.end("loading")
    if recipe.train.micro_batch == "auto" and known is None:
        schedule = _measured_schedule(run, setup, schedule, console)
    with ExitStack() as held:
        report = Report()
        if is_main():
            if resumed.step == 0 and recipe.student.model is not None:
                _warn_of_teacher(run, setup.student, console)
            if advice := slow_arithmetic(recipe):
                console.say(f"warning: {advice}")
            report = _report(run, setup, schedule, metrics, console, resumed.step, held)
            console.start(schedule, resumed.step)
        run.clock.end("measuring")
        loop = TrainingLoop(
            setup, recipe, schedule, run.arguments, report=report, requests=requests
        )
        run_loop(loop, resumed)
    if loop.stopped and loop.step < schedule.steps:
        kind = InterruptedRunError if requests.interrupted else StoppedError
        raise kind(
            f"stopped on request after step {loop.step:,} of {schedule.steps:,}; a checkpoint "
            f"was written. Run the same command again to resume."
        )
    run.clock.end("training")
    save_result(run, loop)
    Ranks.of().wait_for_all()
    return run_summary(folder)


def _measured_schedule(run: Run, setup: Setup, schedule: Schedule, console: Console) -> Schedule:
    """The schedule with the micro-batch that is fastest here, which is noted in the run."""
    from vocagnolm.train.micro_batch import find_micro_batch

    recipe, share = run.recipe, schedule.batch_blocks // schedule.world_size
    measured = find_micro_batch(setup, objective_config(recipe), run.arguments.device, share)
    schedule = plan_schedule(recipe, len(run.blocks), schedule.world_size, measured.micro_batch)
    if is_main():
        note_in_run(run.folder, schedule=asdict(schedule), found_micro_batch=asdict(measured))
        console.say(str(measured))
    return schedule


def _report(
    run: Run,
    setup: Setup,
    schedule: Schedule,
    metrics: MetricsFile,
    console: Console,
    step: int,
    held: ExitStack,
) -> RunReport:
    """The report of the first process; its trackers end with `held`."""
    recipe, arguments, trackers = run.recipe, run.arguments, None
    if recipe.run.report_to:
        from vocagnolm.train.trackers import Trackers

        texts = not objective_config(recipe).selects_all
        opened = Trackers(recipe, arguments, run.materials.tokenizer, step=step, texts=texts)
        trackers = held.enter_context(opened)
    share = flops_share(setup.student.model, schedule, arguments.device)
    return RunReport(metrics, console, run.clock, schedule, share, trackers)


def run_loop(loop: TrainingLoop, resumed: Resumable) -> None:
    """Train to the end, or to an error that names its cause."""
    try:
        loop.run(resumed.path, resumed.step)
    except BaseException as error:
        with suppress(Exception):
            loop.checkpoints.wait()  # a checkpoint that was begun before the error still counts
        if (reason := _lost_connection(error)) is not None:
            raise TrainingError(
                f"The run has lost the connection to another process ({reason}). The newest "
                "checkpoint is untouched. Check the output of that process; torchrun "
                "--max-restarts N restarts automatically, or run the same command again."
            ) from error
        raise


def _lost_connection(error: BaseException | None) -> str | None:
    """The message of gloo or NCCL if an error means that another process is gone, else None."""
    while error is not None:
        line = str(error).partition("\n")[0]
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in line
        ):
            return line
        error = error.__cause__
    return None


def forget_run(folder: Path) -> None:
    """Remove the checkpoints of a run, which then begins again with its recipe."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if read_run(folder):
        note_in_run(folder, finished=False)


def where_to_resume(folder: Path, console: Console) -> Resumable:
    """The newest checkpoint of a run; refused where all of them are damaged."""
    resumed = newest_complete(folder / "checkpoints")
    for line in resumed.damaged:
        console.say(f"damaged, passed over: {line}")
    if resumed.damaged and resumed.path is None:
        raise TrainingError(
            f"{folder}: no checkpoint can be used ({'; '.join(resumed.damaged)}). Restore them "
            f"from a copy, or start over with --restart."
        )
    return resumed


def _warn_of_teacher(run: Run, student: GuidedStudent, console: Console) -> None:
    """Warn of a teacher that is not clearly better than the student: by the bits per byte that the
    recipe gives, or as measured here if corpus and store are on this machine."""
    for name, materials in run.materials.by_corpus().items():
        _warn_of_teacher_of(materials, student, console, name and f"{name}: ")


def _warn_of_teacher_of(
    materials: Materials, student: GuidedStudent, console: Console, named: str
) -> None:
    """The warning for one corpus, whose name is written before it."""
    recipe = materials.recipe
    if not (recipe.needs_guidance and recipe.stores) or recipe.train.parallel != "ddp":
        return
    student_bits = recipe.student.bits_per_byte
    if student_bits is None and any(map(address_of, (*recipe.stores, *recipe.corpus.files))):
        return  # not copied here for the sake of a warning
    try:
        stores = materials.stores
        corpus = materials.corpus if student_bits is None else None
    except VocagnolmError:
        return  # they need not be on the machine that trains
    store = best_store(stores)
    teacher_bits = store.bits_per_byte
    if corpus is not None:
        tokenizer = materials.reader(corpus.conversations)
        # its shapes are not those of training: nothing is compiled for them
        eager = torch.compiler.set_stance("force_eager") if recipe.train.compile else nullcontext()
        with eager:
            strength = measure_strength(student.causal_lm, tokenizer, store, corpus)
        if strength is None:
            return
        teacher_bits, student_bits = strength.teacher, strength.student
        console.say(f"{named}{strength}")
    if warning := teacher_warning(teacher_bits, student_bits):
        console.say(f"warning: {named}{warning}")


# ---- before the first step ----


def open_corpora(materials: Materials, *, verify: bool = False) -> Blocks | MixedBlocks:
    """The blocks of a run: those of its corpus, or of several corpora together. For `verify` see
    `open_blocks`."""
    recipe = materials.recipe
    if not recipe.corpora:
        return open_blocks(materials, verify=verify)
    if problems := recipe.store_problems():
        raise RecipeError("\n".join(problems))
    parts = {name: open_blocks(part, verify=verify) for name, part in materials.by_corpus().items()}
    return MixedBlocks(parts, document_mask=recipe.data.document_mask)


def open_blocks(materials: Materials, *, verify: bool = False) -> Blocks:
    """A recipe's blocks; refused where they were made for or from something else. `verify`: read
    them through once, and look at the files they were made from."""
    recipe = materials.recipe
    folder = local_blocks(recipe)
    stored = recipe.needs_guidance and not recipe.needs_online_teacher
    by_chunks = stored and recipe.method.unit == "chunk" and not recipe.needs_stretches
    blocks = Blocks(
        folder,
        recipe.data.block_size,
        chunks=recipe.objective.n_chunks if by_chunks else None,
        aggregation=recipe.objective.aggregation,
        stretches=stored and recipe.needs_stretches,
        teacher_sums=stored and recipe.objective.unmapped == "mean",
        targets=stored and recipe.needs_targets,
    )
    wanted = block_settings(materials, materials.reader(blocks.conversations), None)
    unmet = differing_inputs(blocks.manifest, materials, wanted, None, look=verify)
    if unmet:
        raise BlocksError(
            f"The blocks in {folder} do not belong to this recipe:\n  "
            + "\n  ".join(unmet)
            + "\nRun `vocagnolm prepare` with this recipe into another data.blocks."
        )
    if verify and (damaged := damaged_parts(folder, blocks.manifest)):
        raise BlocksError(
            f"The blocks in {folder} are damaged: {'; '.join(damaged[:3])}. "
            + (
                "Run `vocagnolm prepare` again to rebuild these parts."
                if address_of(recipe.data.blocks or "") is None
                else f"Remove these files: they are copied again from {recipe.data.blocks}."
            )
        )
    return blocks


def _facts_of_corpora(
    recipe: Recipe, blocks: Blocks | MixedBlocks, schedule: Schedule
) -> dict[str, Any] | None:
    """What a run reads of each of several corpora, by name, for run.json; None for one corpus."""
    if not isinstance(blocks, MixedBlocks):
        return None
    read = corpora_read(recipe, schedule)
    return {
        name: {
            "share": float(recipe.shares[name]),
            "blocks": len(part),
            "blocks_read": read[name],
            "tokens_read": read[name] * schedule.block_size,
            "epochs": read[name] / len(part),
            "fingerprint": part.fingerprint,
        }
        for name, part in zip(blocks.names, blocks.parts, strict=True)
    }


def build_setup(
    materials: Materials,
    blocks: Blocks | MixedBlocks,
    schedule: Schedule,
    arguments: TrainingArguments,
    model: PreTrainedModel | None = None,
) -> Setup:
    """Student, blocks in their order, collator and teacher of a recipe. `model`: the student, if it
    is loaded already."""
    recipe, tokenizer = materials.recipe, materials.tokenizer
    adapted = adapt_student(recipe, arguments, tokenizer, model or build_student(recipe))
    documents = recipe.data.document_mask or blocks.conversations
    length, seed = schedule.steps * schedule.batch_blocks, recipe.run.seed
    order: Any
    if isinstance(blocks, MixedBlocks):
        order = MixedOrder(blocks, recipe.shares, length, seed)
    else:
        order = TrainingOrder(blocks, length, seed)
    teacher = None
    if recipe.needs_online_teacher:
        teacher, order = online_teacher(recipe, order, tokenizer)
    student = GuidedStudent(
        adapted,
        router_loss=recipe.train.router_loss,
        autocast=autocast_dtype(recipe, arguments),
    )
    if documents:
        require_separation(student.causal_lm, "The student")
        if teacher is not None:
            require_separation(teacher.model, "The teacher")
    if recipe.train.parallel == "ddp":  # shards go to the device when they are made
        student.to(arguments.device)
    if teacher is not None:
        teacher.to(arguments.device)
    set_up_layers(recipe, arguments, adapted, documents=documents)
    return Setup(student, order, GuidedCollator.for_blocks(documents), teacher)


def refuse_missing_trackers(recipe: Recipe) -> None:
    if recipe.run.report_to:
        from vocagnolm.train.trackers import tracker_problems

        if problems := tracker_problems(recipe.run.report_to):
            raise RecipeError("\n".join(problems))


# ---- after the last step ----


def save_result(run: Run, loop: TrainingLoop) -> None:
    """Write the model folder, which appears by rename, and mark the run as finished."""
    template = run.materials.chat.template if run.blocks.conversations else None
    save_model(run.recipe, run.folder, loop, run.clock, template, run.blocks.teacher)


def save_model(
    recipe: Recipe,
    folder: Path,
    loop: TrainingLoop,
    clock: Clock,
    template: ChatTemplate | None,
    teacher: str | None,
) -> None:
    """`save_result` for the parts of a run. `template`: that of its conversations; `teacher`: the
    name that stands in its blocks."""
    model: Any = loop.student.model
    state_dict = full_state_dict(model) if loop.sharded else None
    if not is_main():
        return
    with as_write_error("the model"), whole_folder(folder / "model") as target:
        if recipe.lora.rank:
            if state_dict is not None:  # adapters are merged into whole weights, not into a shard
                model = add_lora(build_student(recipe), recipe.lora)
                model.load_state_dict(state_dict)
            model.merge_and_unload().save_pretrained(target)
        else:
            model.save_pretrained(target, state_dict=state_dict)
        save_tokenizer(recipe, target)
        if template is not None:
            (target / "chat_template.jinja").write_text(template.source, encoding="utf-8")
        # a model that is made again from the checkpoint of the last step makes no step
        written = read_metrics(folder / "metrics.jsonl")[-1:] or [{}]
        last = loop.last_record or written[0]
        card = model_card(recipe, loop.schedule, teacher, last, template)
        (target / "README.md").write_text(card, encoding="utf-8")
    clock.end("finishing")
    note_in_run(
        folder,
        finished=True,
        times=asdict(clock.times),
        seconds_to_first_step=clock.first_step,
        model_files=file_records(folder / "model", "README.md"),  # the card may be edited
    )


# ---- processes and their signals ----


def is_main() -> bool:
    """Whether this is the first process, also before the processes know each other."""
    return int(os.environ.get("RANK", "0")) == 0


def refuse_lone_process() -> None:
    """Refuse the one process that `accelerate launch --num_processes 2` starts without a GPU, where
    it leaves the others to MPI and says nothing. The variables that it sets for several give it
    away."""
    launched = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
    if launched and "RANK" not in os.environ:
        raise UsageError(
            "accelerate launch was asked for several processes and has started one: without GPUs "
            "it starts no others. Use torchrun: torchrun --nproc-per-node N -m vocagnolm train "
            "RECIPE"
        )


_STOPPING = (
    b"\nCtrl-C: the run stops after this step, with a checkpoint. Ctrl-C again leaves at once.\n"
)


@contextlib.contextmanager
def listening() -> Iterator[Requests]:
    """Note SIGTERM, SIGUSR1 and a first Ctrl-C as requests inside the block; only Python's main
    thread can."""
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if requests.interrupted:
                raise KeyboardInterrupt
            requests.interrupted = True
            if is_main():
                os.write(2, _STOPPING)  # not `print`: the signal may have come while it printed
        requests.stop |= number in (signal.SIGTERM, signal.SIGINT)
        requests.save |= number == signal.SIGUSR1

    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # another process handles Ctrl-C
        numbers.remove(signal.SIGINT)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
