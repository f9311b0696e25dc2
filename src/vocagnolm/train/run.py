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

import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.neftune import neftune_post_forward_hook

from vocagnolm.alignment import TextTokenizer
from vocagnolm.data.blocks import Blocks, TrainingOrder, damaged_parts
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
    VocagnolmWarning,
)
from vocagnolm.files import (
    address_of,
    as_write_error,
    file_records,
    folder_lock,
    model_damage,
    remove_leftovers,
    whole_folder,
)
from vocagnolm.model.fp8 import FP8_WIDTH, require_fp8, train_in_fp8
from vocagnolm.model.runtime import import_compiler_meanwhile, torch_threads
from vocagnolm.objective import Decided, count_kept
from vocagnolm.processes import Ranks, world_size
from vocagnolm.recipe import Recipe
from vocagnolm.store import LossStore
from vocagnolm.store.analysis import best_store, teacher_warning
from vocagnolm.train.check import measure_strength
from vocagnolm.train.checkpoint import Resumable, newest_complete
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
from vocagnolm.train.loop import TrainingLoop
from vocagnolm.train.metrics import (
    Clock,
    Console,
    MetricsFile,
    StepReport,
    Trackers,
    flops_share,
    tracker_problems,
)
from vocagnolm.train.parallel import (
    Requests,
    full_state_dict,
    is_main,
    listening,
    refuse_lone_process,
    sharding_group,
)
from vocagnolm.train.settings import (
    Schedule,
    first_micro_batch,
    plan_schedule,
    slow_arithmetic,
    training_arguments,
    uses_accelerator,
)
from vocagnolm.train.student import (
    BlockCollator,
    GuidedStudent,
    add_lora,
    batch_targets,
    build_student,
    choose_attention,
    compile_layers,
    require_separation,
    save_tokenizer,
)
from vocagnolm.train.teacher import online_teacher


def train(
    recipe: Recipe, *, quiet: bool = False, restart: bool = False, earlier: float = 0.0
) -> dict[str, Any]:
    """Train a recipe, or resume it. Returns a summary of the run.

    `restart`: start over if no checkpoint can be used. SIGTERM writes a checkpoint and raises
    `StoppedError`; SIGUSR1 writes one and continues. `earlier`: seconds that a command has used
    before this call.
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
            wrong = model_damage(folder / "model")
            if wrong is None and (folder / "model" / "config.json").is_file():
                return run_summary(folder, already=True)
            found["finished"] = False
            if is_main():
                note_in_run(folder, finished=False)
                lost = wrong or f"{folder}: the model of this finished run is missing."
                warnings.warn(f"{lost} It is made again now.", VocagnolmWarning, stacklevel=2)
        if recipe.train.compile:
            import_compiler_meanwhile()
        tokenizer = student_tokenizer(recipe)
        with ThreadPoolExecutor(1) as loader:  # the student, while the blocks are read
            whole = recipe.train.parallel == "ddp"
            loading = loader.submit(build_student, recipe) if whole else None
            blocks = open_blocks(recipe, tokenizer, verify=is_main())
            clock.end("start")
        student = None if loading is None else loading.result()
        refuse_other_run(folder, recipe, found, blocks.manifest["fingerprint"])
        requests = held.enter_context(listening())
        schedule = plan_schedule(recipe, len(blocks), world_size(), found_micro_batch(folder))
        arguments = training_arguments(recipe, schedule)
        arguments.device  # noqa: B018  (starts torch.distributed)
        transformers.utils.logging.set_verbosity(arguments.get_process_log_level())
        if recipe.train.parallel != "ddp":
            held.enter_context(sharding_group(accelerator=uses_accelerator(recipe)))
        run = Run(recipe, folder, blocks, tokenizer, schedule, arguments, requests, clock)
        # Beside a GPU the CPU does small things, such as pinning a batch, and waking its
        # threads takes longer than the work: 6 ms an operation were measured.
        held.enter_context(torch_threads(1 if arguments.device.type == "cuda" else None))
        return _train(run, student, quiet=quiet, restart=restart)


@dataclass(frozen=True)
class Run:
    """A run that may begin."""

    recipe: Recipe
    folder: Path
    blocks: Blocks
    tokenizer: TextTokenizer
    """The student's."""
    schedule: Schedule
    arguments: TrainingArguments
    requests: Requests
    clock: Clock


def _train(
    run: Run, student: PreTrainedModel | None, *, quiet: bool, restart: bool
) -> dict[str, Any]:
    """`student`: None where each process loads its own, for its shards."""
    recipe, folder, clock = run.recipe, run.folder, run.clock
    known, schedule = found_micro_batch(folder), run.schedule
    metrics = MetricsFile(folder / "metrics.jsonl")
    console = Console(schedule, quiet=quiet, log_every=recipe.run.log_every)
    resumed: Resumable = Ranks.of().decide(lambda: _where_to_resume(folder, console, restart))
    if is_main():
        begin_run(folder, recipe, schedule, run.blocks.manifest["fingerprint"])
        metrics.resume_at(resumed.step)
    loop = build_loop(recipe, run.blocks, schedule, run.arguments, run.tokenizer, student)
    clock.end("loading")
    if recipe.train.micro_batch == "auto" and known is None:
        found = find_micro_batch(loop, schedule.batch_blocks // schedule.world_size)
        micro_batch = found.micro_batch
        schedule = plan_schedule(recipe, len(run.blocks), schedule.world_size, micro_batch)
        loop.schedule = console.schedule = schedule
        if is_main():
            note_in_run(folder, schedule=asdict(schedule), found_micro_batch=asdict(found))
            console.say(str(found))
    if is_main():
        if resumed.step == 0 and recipe.student.model is not None:
            _warn_of_teacher(run, loop, console)
        if advice := slow_arithmetic(recipe):
            console.say(f"warning: {advice}")
        if loop.arguments.report_to:
            about = (run.arguments, recipe, folder, run.tokenizer)
            loop.trackers = Trackers(*about, model=loop.student.model, step=resumed.step)
            loop.trackers.shows_texts &= not loop.objective.selects_all
    clock.end("measuring")
    share = flops_share(loop.student.model, loop.schedule, loop.device)
    loop.on_step = StepReport(metrics, console, clock, share)
    loop.requests = run.requests
    if is_main():
        console.start(resumed.step)
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
    if loop.stopped and loop.step < schedule.steps:
        raise StoppedError(
            f"stopped on request after step {loop.step:,} of {schedule.steps:,}; a checkpoint "
            f"was written. Run the same command again to resume."
        )
    clock.end("training")
    save_result(run, loop)
    Ranks.of().wait_for_all()
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
            f"{folder}: no checkpoint can be used ({'; '.join(resumed.damaged)}). Restore them "
            f"from a copy, or start over with --restart."
        )
    return resumed


def _warn_of_teacher(run: Run, loop: TrainingLoop, console: Console) -> None:
    """Measured on this machine if corpus and store are here."""
    recipe = run.recipe
    if not (recipe.needs_guidance and recipe.stores) or loop.sharded:
        return
    student = recipe.student.bits_per_byte
    if student is None and any(map(address_of, (*recipe.stores, *recipe.corpus.files))):
        return  # not copied here for the sake of a warning
    try:
        stores = [LossStore.open(path) for path in recipe.stores]
        corpus = recipe_corpus(recipe) if student is None else None
    except VocagnolmError:
        return  # they need not be on the machine that trains
    store = best_store(stores)
    teacher = store.bits_per_byte
    if corpus is not None:
        tokenizer = run.tokenizer
        if corpus.conversations:
            tokenizer = student_chat(recipe, tokenizer)
        # its shapes are not those of training: nothing is compiled for them
        eager = torch.compiler.set_stance("force_eager") if recipe.train.compile else nullcontext()
        with eager:
            strength = measure_strength(loop.student.causal_lm, tokenizer, store, corpus)
        if strength is None:
            return
        teacher, student = strength.teacher, strength.student
        console.say(
            f"on {strength.documents} documents: teacher {teacher:.3f}, student {student:.3f} bits "
            "per byte"
        )
    if warning := teacher_warning(teacher, student):
        console.say(f"warning: {warning}")


def open_blocks(
    recipe: Recipe, tokenizer: TextTokenizer | None = None, *, verify: bool = False
) -> Blocks:
    """The recipe's blocks; refused where they were made for or from something else. `tokenizer`:
    the student's, where it is loaded already. `verify`: read them through once, and look at the
    files they were made from."""
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
    tokenizer = tokenizer or student_tokenizer(recipe)
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
                "Run `vocagnolm prepare` again to rebuild these parts."
                if address_of(recipe.data.blocks or "") is None
                else f"Remove these files: they are copied again from {recipe.data.blocks}."
            )
        )
    return blocks


def save_result(run: Run, loop: TrainingLoop) -> None:
    """The model folder appears by rename, then the run is finished."""
    recipe, folder, blocks = run.recipe, run.folder, run.blocks
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
        template = None
        if blocks.conversations:
            template = student_chat(recipe, run.tokenizer).template
            (target / "chat_template.jinja").write_text(template.source, encoding="utf-8")
        teacher = blocks.manifest.get("teacher")
        # of a model that is made again from the checkpoint of the last step
        written = read_metrics(folder / "metrics.jsonl")[-1:] or [{}]
        last = loop.last_record or written[0]
        card = model_card(recipe, loop.schedule, teacher, last, template)
        (target / "README.md").write_text(card, encoding="utf-8")
    run.clock.end("finishing")
    note_in_run(
        folder,
        finished=True,
        times=asdict(run.clock.times),
        seconds_to_first_step=run.clock.first_step,
        model_files=file_records(folder / "model", "README.md"),  # the card may be edited
    )


# ---- from a recipe to a loop ----


def build_loop(
    recipe: Recipe,
    blocks: Blocks,
    schedule: Schedule,
    arguments: TrainingArguments,
    tokenizer: TextTokenizer,
    student: PreTrainedModel | None = None,
) -> TrainingLoop:
    """`student`: where it is loaded already."""
    student = student or build_student(recipe)
    embeddings: Any = student.get_input_embeddings()
    rows, largest = embeddings.weight.shape[0], max(tokenizer.vocabulary.values())
    if largest >= rows:
        raise TrainingError(
            f"The student has {rows:,} embedding rows, its tokenizer has ids up to {largest:,}. "
            "They do not belong together."
        )
    if recipe.train.dtype == "fp8":
        require_fp8(arguments.device, "train.dtype:")
        train_in_fp8(student)
        if embeddings.weight.shape[1] < FP8_WIDTH:
            warnings.warn(
                f"train.dtype: fp8 is slower than bfloat16 for a student that is "
                f"{embeddings.weight.shape[1]} wide. It pays from about {FP8_WIDTH:,} on.",
                VocagnolmWarning,
                stacklevel=2,
            )
    model = add_lora(student, recipe.lora)
    documents = recipe.data.document_mask or blocks.conversations
    order: Any = TrainingOrder(blocks, schedule.steps * schedule.batch_blocks, recipe.run.seed)
    teacher = None
    if recipe.needs_online_teacher:
        teacher, order = online_teacher(recipe, order, tokenizer)
    guided = GuidedStudent(model, router_loss=recipe.train.router_loss)
    if documents:
        require_separation(student, "The student")
        if teacher is not None:
            require_separation(teacher.model, "The teacher")
    collator = BlockCollator(documents)
    loop = TrainingLoop(
        guided, order, recipe, schedule, arguments, collator=collator, teacher=teacher
    )
    # after the probes of the head, which have another shape
    choose_attention(student, recipe, documents=documents)
    if recipe.train.compile:
        compile_layers(student)
    if recipe.train.liger:
        from transformers.integrations.liger import apply_liger_kernel

        # its fused loss would replace the objective's
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    if recipe.train.gradient_checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    if arguments.neftune_noise_alpha is not None:
        embeddings.neftune_noise_alpha = arguments.neftune_noise_alpha
        embeddings.register_forward_hook(neftune_post_forward_hook)
    return loop


# ---- train.micro_batch: auto ----


WORTH = 1.03
"""A micro-batch that is larger must be faster by this, or its memory is not worth it."""
_PASSES = 3


@dataclass(frozen=True)
class Tried:
    micro_batch: int
    tokens_per_second: float | None
    """None: out of memory."""

    def __str__(self) -> str:
        rate = self.tokens_per_second
        return f"{self.micro_batch}: " + ("no room" if rate is None else f"{rate:,.0f} tokens/s")


@dataclass(frozen=True)
class FoundMicroBatch:
    micro_batch: int
    seconds: float
    """What it cost to find out."""
    tried: list[Tried]
    """By the leading process."""

    def __str__(self) -> str:
        tried = ", ".join(map(str, self.tried))
        return f"micro-batch {self.micro_batch}, found in {self.seconds:,.1f} s ({tried})"


def choose(share: int, measure: Callable[[int], float | None]) -> tuple[int, list[Tried]]:
    """Of the numbers that divide `share`, the blocks of a process in a step: twice as many as
    before, as long as that pays. `measure` gives tokens per second, None where they do not fit.
    0 where not even one does."""
    fitting = [n for n in range(1, share + 1) if share % n == 0]
    size = first_micro_batch(share)
    tried = [Tried(size, measure(size))]
    while tried[-1].tokens_per_second is None:
        smaller = [n for n in fitting if n <= size // 2]
        if not smaller:
            return 0, tried
        size = smaller[-1]
        tried.append(Tried(size, measure(size)))
    if len(tried) > 1:
        return size, tried
    while larger := [n for n in fitting if n >= 2 * size]:
        rate = tried[-1].tokens_per_second
        tried.append(Tried(larger[0], measure(larger[0])))
        new = tried[-1].tokens_per_second
        if rate is None or new is None or new < WORTH * rate:
            break
        size = larger[0]
    return size, tried


def find_micro_batch(loop: TrainingLoop, share: int) -> FoundMicroBatch:
    """Before the first step. Weights and random numbers stay as they are; all ranks take the
    smallest that one of them has found."""
    began = time.perf_counter()
    device = loop.device
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        # a step needs more than the passes: AdamW's two moments, and the buckets in which several
        # processes exchange their gradients
        copies = (2 + (loop.ranks.count > 1)) * on_gpu
        trained = [p for p in loop.model.parameters() if p.requires_grad]
        room = [torch.empty_like(p) for p in trained for _ in range(copies)]
        found, tried = choose(share, lambda blocks: _tokens_per_second(loop, blocks))
        del room
    agreed = -int(loop.ranks.max(torch.tensor(-found, device=device)))
    if agreed == 0:
        raise TrainingError(
            "train.micro_batch: auto has found no room for a single block on "
            + ("this process's device" if found == 0 else "another process's device")
            + ". Use gradient_checkpointing, lora, a shorter data.block_size or parallel: fsdp2."
        )
    return FoundMicroBatch(agreed, time.perf_counter() - began, tried)


def _tokens_per_second(loop: TrainingLoop, blocks: int) -> float | None:
    model: Any = loop.model
    best = math.inf
    try:
        batch = loop.sent(loop.collator([loop.blocks[index] for index in range(blocks)]))
        for _ in range(1 + _PASSES):  # the first one compiles, and fills the gradients
            began = time.perf_counter()
            try_pass(loop, batch)
            if loop.device.type == "cuda":
                torch.cuda.synchronize(loop.device)
            best = min(best, time.perf_counter() - began)
        return float(batch["labels"].numel() / best)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def try_pass(loop: TrainingLoop, batch: dict[str, Any]) -> None:
    """Forward and backward of a micro-batch by itself, before the training. Nothing is left of it
    but gradients, and no other rank takes part."""
    config = loop.objective
    if config.scope == "global":
        config = replace(config, scope="batch")
    if loop.teacher is not None and not loop.teacher.distils:
        batch = {**batch, **loop.teacher.guide(batch), "counts": None}
    targets = batch_targets(batch)
    kept = count_kept(batch.get("counts"), config)
    loop.model.train()
    decided = Decided(denominator=targets.valid_BT.sum(), kept=kept)
    loop.forward(batch, targets, config, decided)["loss"].backward()
