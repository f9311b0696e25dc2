"""`vocagnolm train`: one recipe, one run folder.

```
RUN/recipe.yaml      the resolved recipe, written first
RUN/run.json         versions, schedule, processes; `finished` when the model is there
RUN/metrics.jsonl    one object a step
RUN/checkpoints/     checkpoint-N, each with a marker written last
RUN/model/           the result: an ordinary model folder
RUN/tensorboard/     where run.report_to names tensorboard
```
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback

from vocagnolm.data.blocks import Blocks, damaged_parts
from vocagnolm.data.identity import (
    block_settings,
    differing_inputs,
    local_blocks,
    recipe_corpus,
    student_chat,
    student_tokenizer,
)
from vocagnolm.errors import (
    BlocksError,
    RecipeError,
    StoppedError,
    TrainingError,
    VocagnolmError,
)
from vocagnolm.files import (
    address_of,
    as_write_error,
    folder_lock,
    remove_leftovers,
    whole_folder,
)
from vocagnolm.model.runtime import import_compiler_meanwhile
from vocagnolm.processes import Ranks
from vocagnolm.recipe import Recipe
from vocagnolm.store import LossStore
from vocagnolm.store.analysis import best_store, teacher_warning
from vocagnolm.train.arguments import (
    room_left,
    slow_arithmetic,
    training_arguments,
    uses_accelerator,
)
from vocagnolm.train.build import build_trainer
from vocagnolm.train.card import model_card
from vocagnolm.train.checkpoint import Resumable, newest_complete
from vocagnolm.train.console import Clock, Console, Requests, listening
from vocagnolm.train.folder import (
    MetricsFile,
    begin_run,
    found_micro_batch,
    note_in_run,
    read_run,
    refuse_other_run,
    run_folder,
    run_summary,
)
from vocagnolm.train.micro_batch import find_micro_batch
from vocagnolm.train.parallel import is_main, refuse_lone_process, sharding_group, world_size
from vocagnolm.train.schedule import Schedule, plan_schedule
from vocagnolm.train.step_metrics import flops_per_token, peak_flops
from vocagnolm.train.strength import measure_strength
from vocagnolm.train.student import add_lora, build_student, save_tokenizer
from vocagnolm.train.tracked import start_trackers
from vocagnolm.train.trackers import tracker_problems
from vocagnolm.train.trainer import GuidedTrainer, causal_lm_of


def train(
    recipe: Recipe, *, quiet: bool = False, restart: bool = False, earlier: float = 0.0
) -> dict[str, Any]:
    """Train a recipe, or go on where it was interrupted. Returns the run's summary.

    `restart`: begin anew where no checkpoint can be used any more. SIGTERM writes a checkpoint and
    ends with `StoppedError`; SIGUSR1 writes one and goes on. `earlier`: seconds that a command has
    taken before this call.
    """
    clock = Clock(earlier)
    refuse_lone_process()
    transformers.utils.logging.disable_progress_bar()
    folder = run_folder(recipe)
    refuse_other_run(folder, recipe, read_run(folder))
    if problems := tracker_problems(recipe.run.report_to):
        raise RecipeError("\n".join(problems))
    with ExitStack() as held:
        if is_main():
            advice = "Wait for it to end, or choose another run.folder."
            held.enter_context(folder_lock(folder, advice))
            remove_leftovers(folder)
        found = read_run(folder)
        if found.get("finished"):
            return run_summary(folder, already=True)
        if recipe.train.compile:
            import_compiler_meanwhile()
        with ThreadPoolExecutor(1) as loader:  # the student, while the blocks are read
            whole = recipe.train.parallel == "ddp"
            loading = loader.submit(build_student, recipe) if whole else None
            blocks = open_blocks(recipe, verify=is_main())
            clock.end("start")
        student = None if loading is None else loading.result()
        fingerprint = blocks.manifest["fingerprint"]
        refuse_other_run(folder, recipe, found, fingerprint)
        requests = held.enter_context(listening())
        if recipe.train.parallel != "ddp":
            held.enter_context(sharding_group(accelerator=uses_accelerator(recipe)))
        run = Run(recipe, folder, blocks, student, requests, clock)
        return _train(run, quiet=quiet, restart=restart)


@dataclass(frozen=True)
class Run:
    """A run that may begin."""

    recipe: Recipe
    folder: Path
    blocks: Blocks
    student: PreTrainedModel | None
    """None: still to be loaded."""
    requests: Requests
    clock: Clock


def _train(run: Run, *, quiet: bool, restart: bool) -> dict[str, Any]:
    recipe, folder, blocks, clock = run.recipe, run.folder, run.blocks, run.clock
    known = found_micro_batch(folder)
    schedule = plan_schedule(recipe, len(blocks), world_size(), known)
    console = Console(schedule, quiet=quiet, log_every=recipe.run.log_every)
    arguments = training_arguments(recipe, schedule)  # also starts torch.distributed
    resumed: Resumable = Ranks.of_group().decide(lambda: _where_to_resume(folder, console, restart))
    metrics = MetricsFile(folder / "metrics.jsonl")
    if is_main():
        begin_run(folder, recipe, schedule, blocks.manifest["fingerprint"])
        metrics.resume_at(resumed.step)
    trainer = build_trainer(recipe, blocks, schedule, arguments, run.student)
    clock.end("loading")
    mfu_of = _mfu(trainer, schedule)

    def on_step(record: dict[str, Any]) -> None:
        record["mfu"] = mfu_of(record["tokens_per_second"])
        metrics.append(record)
        if clock.step():
            console.say(f"the first step was made after {clock.first_step:,.1f} s")
            if advice := room_left(schedule):
                console.say(advice)
        console.step(record)

    def choose_micro_batch() -> None:
        nonlocal schedule
        share = schedule.batch_blocks // schedule.world_size
        found = find_micro_batch(trainer, share)
        schedule = plan_schedule(recipe, len(blocks), schedule.world_size, found.micro_batch)
        trainer.split_steps(schedule.micro_batch, schedule.accumulation)
        if is_main():
            note_in_run(folder, schedule=asdict(schedule), found_micro_batch=found.to_dict())
            console.say(str(found))
            console.schedule = schedule
            console.start(resumed.step)
        clock.end("measuring")

    if recipe.train.micro_batch == "auto" and known is None:
        trainer.before_training = choose_micro_batch
    trainer.on_step, trainer.requests = on_step, run.requests
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    start_trackers(trainer, recipe, folder, resumed.step)
    if is_main():
        if trainer.before_training is None:
            console.start(resumed.step)
        if resumed.step == 0 and recipe.student.model is not None:
            _warn_of_teacher(recipe, trainer, console)
        if advice := slow_arithmetic(recipe):
            console.say(f"warning: {advice}")
    clock.end("measuring")
    try:
        trainer.train(resume_from_checkpoint=str(resumed.path) if resumed.path else None)
    except BaseException as error:
        with suppress(Exception):
            trainer.finish_saving()  # a checkpoint that was begun before the error still counts
        if (reason := _lost_connection(error)) is not None:
            raise TrainingError(
                f"The run has lost the connection to another process ({reason}). The newest "
                "checkpoint is untouched. Look what that process said; torchrun "
                "--max-restarts N starts them again by itself, or run the same command again."
            ) from error
        raise
    if trainer.stopped and trainer.state.global_step < schedule.steps:
        raise StoppedError(
            f"stopped as asked after step {trainer.state.global_step:,} of {schedule.steps:,}; a "
            "checkpoint is written. Run the same command again: it goes on from there."
        )
    clock.end("training")
    save_result(trainer, recipe, schedule, run)
    Ranks.of_group().wait_for_all()
    return run_summary(folder)


def _lost_connection(error: BaseException | None) -> str | None:
    """What gloo or NCCL said when a process that they were talking to was gone."""
    while error is not None:
        line = str(error).partition("\n")[0]
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in line
        ):
            return line
        error = error.__cause__
    return None


def _where_to_resume(folder: Path, console: Console, restart: bool) -> Resumable:
    resumed = newest_complete(folder / "checkpoints")
    for line in resumed.damaged:
        console.say(f"damaged, passed over: {line}")
    if resumed.damaged and resumed.path is None and not restart:
        raise TrainingError(
            f"{folder}: no checkpoint can be used ({'; '.join(resumed.damaged)}). Mend them from a "
            "copy, or begin the run anew with --restart."
        )
    return resumed


def _warn_of_teacher(recipe: Recipe, trainer: GuidedTrainer, console: Console) -> None:
    """Measured on this machine if corpus and store are here."""
    if not (recipe.needs_guidance and recipe.stores) or trainer.is_fsdp_enabled:
        return
    student = recipe.student.bits_per_byte
    elsewhere = any(address_of(path) for path in (*recipe.stores, *recipe.corpus.files))
    if student is None and elsewhere:
        return  # not copied here for the sake of a warning
    try:
        stores = [LossStore.open(path) for path in recipe.stores]
        corpus = recipe_corpus(recipe) if student is None else None
    except VocagnolmError:
        return  # they need not be on the machine that trains
    store = best_store(stores)
    teacher = store.bits_per_byte
    if corpus is not None:
        model = causal_lm_of(trainer.accelerator.unwrap_model(trainer.model))
        tokenizer = student_tokenizer(recipe)
        if corpus.conversations:
            tokenizer = student_chat(recipe, tokenizer)
        # its shapes are not those of training: nothing is compiled for them
        eager = torch.compiler.set_stance("force_eager") if recipe.train.compile else nullcontext()
        with eager:
            strength = measure_strength(model, tokenizer, store, corpus)
        if strength is None:
            return
        teacher, student = strength.teacher, strength.student
        console.say(
            f"on {strength.documents} documents: teacher {teacher:.3f}, student {student:.3f} bits "
            "per byte"
        )
    warning = teacher_warning(teacher, student)
    if warning is not None:
        console.say(f"warning: {warning}")


def open_blocks(recipe: Recipe, *, verify: bool = False) -> Blocks:
    """The recipe's blocks; refused where they were made for or from something else. `verify`: read
    them through once, and look at the files they were made from."""
    folder = local_blocks(recipe)
    stored = recipe.needs_guidance and not recipe.needs_online_teacher
    by_chunks = stored and recipe.method.unit == "chunk" and not recipe.needs_stretches
    blocks = Blocks(
        folder,
        recipe.data.block_size,
        chunks=recipe.objective.n_chunks if by_chunks else None,
        stretches=stored and recipe.needs_stretches,
        teacher_sums=stored and recipe.objective.unmapped == "mean",
        targets=stored and recipe.needs_targets,
    )
    tokenizer = student_tokenizer(recipe)
    if blocks.conversations:
        tokenizer = student_chat(recipe, tokenizer)
    wanted = block_settings(recipe, tokenizer, None)
    unmet = differing_inputs(blocks.manifest, recipe, wanted, None, look=verify)
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
                "Run `vocagnolm prepare` again: it makes these parts anew."
                if address_of(recipe.data.blocks or "") is None
                else f"Remove these files: they are copied again from {recipe.data.blocks}."
            )
        )
    return blocks


def save_result(trainer: GuidedTrainer, recipe: Recipe, schedule: Schedule, run: Run) -> None:
    """The model folder appears by rename, then the run is finished."""
    folder, blocks = run.folder, run.blocks
    state_dict = trainer.gathered_weights()
    if not trainer.is_world_process_zero():
        return
    with as_write_error("the model"), whole_folder(folder / "model") as model:
        if state_dict is not None and recipe.lora.rank:
            _merged_apart(recipe, state_dict).save_pretrained(model)
        else:
            trainer.save_merged(model, state_dict)
        save_tokenizer(recipe, model)
        template = None
        if blocks.conversations:
            template = student_chat(recipe, student_tokenizer(recipe)).template
            (model / "chat_template.jinja").write_text(template.source, encoding="utf-8")
        teacher = blocks.manifest.get("teacher")
        card = model_card(recipe, schedule, teacher, trainer.last_record, template)
        (model / "README.md").write_text(card, encoding="utf-8")
    run.clock.end("finishing")
    times, first_step = asdict(run.clock.times), run.clock.first_step
    note_in_run(folder, finished=True, times=times, seconds_to_first_step=first_step)


def _merged_apart(recipe: Recipe, state_dict: dict[str, Any]) -> Any:
    """One process alone cannot merge adapters into weights of which it holds a shard."""
    student: Any = add_lora(build_student(recipe), recipe.lora)
    student.load_state_dict(state_dict)
    return student.merge_and_unload()


def _mfu(trainer: GuidedTrainer, schedule: Schedule) -> Any:
    peak = peak_flops(trainer.args.device)
    if peak is None:
        return lambda rate: None
    model: Any = trainer.model
    config = model.config.get_text_config()
    parameters = sum(p.numel() for p in model.parameters())
    per_token = flops_per_token(
        parameters, config.num_hidden_layers, config.hidden_size, schedule.block_size
    )
    return lambda rate: rate * per_token / (peak * schedule.world_size)
