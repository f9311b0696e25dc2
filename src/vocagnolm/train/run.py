"""`vocagnolm train`: one recipe, one run folder.

```
RUN/recipe.yaml      the resolved recipe, written first
RUN/run.json         world size, versions, schedule; `finished` when the model is there
RUN/metrics.jsonl    one object a step
RUN/checkpoints/     checkpoint-N, each with a marker written last
RUN/model/           the result: an ordinary model folder
RUN/tensorboard/     where run.report_to names tensorboard
```
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PrinterCallback, ProgressCallback

from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.data.prepare import (
    blocks_folder,
    student_tokenizer,
    train_settings,
    unmet_needs,
)
from vocagnolm.errors import BlocksError, RecipeError, TrainingError
from vocagnolm.model import open_model
from vocagnolm.recipe import Recipe
from vocagnolm.train.arguments import objective_config, training_arguments
from vocagnolm.train.card import model_card
from vocagnolm.train.checkpoint import newest_complete
from vocagnolm.train.collate import BlockCollator
from vocagnolm.train.console import Console
from vocagnolm.train.folder import (
    begin_run,
    finish_run,
    read_run,
    refuse_other_run,
    run_folder,
    run_summary,
)
from vocagnolm.train.metrics import MetricsFile, flops_per_token, peak_flops
from vocagnolm.train.online import OnlineTeacher, TeacherView
from vocagnolm.train.schedule import Schedule, plan_schedule
from vocagnolm.train.student import add_lora, build_student, compile_layers, save_tokenizer
from vocagnolm.train.trackers import keep_in_run, tracker_problems
from vocagnolm.train.trainer import GuidedTrainer
from vocagnolm.train.vocabulary import refuse_other_vocabulary


def train(recipe: Recipe, *, quiet: bool = False) -> dict[str, Any]:
    """Train a recipe, or go on where it was interrupted. Returns the run's summary."""
    transformers.utils.logging.disable_progress_bar()
    folder = run_folder(recipe)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_main = int(os.environ.get("RANK", "0")) == 0
    found = read_run(folder)
    refuse_other_run(folder, recipe, world_size, found)
    if found.get("finished"):
        return run_summary(folder)
    if problems := tracker_problems(recipe.run.report_to):
        raise RecipeError("\n".join(problems))

    blocks = open_blocks(recipe)
    schedule = plan_schedule(recipe, len(blocks), world_size)
    arguments = training_arguments(recipe, schedule)  # also starts torch.distributed
    if is_main:
        begin_run(folder, recipe, schedule)
    resumed = newest_complete(folder / "checkpoints")
    metrics = MetricsFile(folder / "metrics.jsonl")
    if is_main:
        metrics.resume_at(resumed[1] if resumed else 0)

    trainer = build_trainer(recipe, blocks, schedule, arguments)
    console = Console(schedule, quiet=quiet, log_every=recipe.run.log_every)
    mfu_of = _mfu(trainer, schedule)

    def on_step(record: dict[str, Any]) -> None:
        record["mfu"] = mfu_of(record["tokens_per_second"])
        metrics.append(record)
        console.step(record)

    trainer.on_step = on_step
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    keep_in_run(trainer, folder)
    if is_main:
        console.start(resumed[1] if resumed else 0)
    trainer.train(resume_from_checkpoint=str(resumed[0]) if resumed else None)
    save_result(trainer, recipe, schedule, folder, blocks.manifest.get("teacher"))
    if dist.is_initialized():
        dist.barrier()
    return run_summary(folder)


def open_blocks(recipe: Recipe) -> Blocks:
    """The recipe's blocks; refused where they were made for something else."""
    folder = blocks_folder(recipe)
    chunks = recipe.objective.n_chunks if recipe.needs_teacher_losses else None
    blocks = Blocks(folder, recipe.data.block_size, chunks=chunks)
    tokenizer = student_tokenizer(recipe)
    wanted = train_settings(recipe, tokenizer)
    unmet = unmet_needs(blocks.manifest["settings"], recipe, wanted)
    if unmet:
        raise BlocksError(
            f"The blocks in {folder} do not belong to this recipe:\n  "
            + "\n  ".join(unmet)
            + "\nRun `vocagnolm prepare` with this recipe into another data.blocks."
        )
    return blocks


def build_trainer(
    recipe: Recipe, blocks: Blocks, schedule: Schedule, arguments: Any
) -> GuidedTrainer:
    student = build_student(recipe)
    embeddings: Any = student.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    vocabulary = student_tokenizer(recipe).vocabulary
    if max(vocabulary.values()) >= rows:
        raise TrainingError(
            f"The student has {rows:,} embedding rows, its tokenizer has ids up to "
            f"{max(vocabulary.values()):,}. They do not belong together."
        )
    if recipe.train.compile:
        compile_layers(student)
    model = add_lora(student, recipe.lora)
    order = TrainingOrder(blocks, schedule.steps * schedule.batch_blocks, recipe.run.seed)
    dataset: Any = order
    teacher = None
    if recipe.needs_online_teacher:
        teacher, dataset = _online_teacher(recipe, order)
    return GuidedTrainer(
        model,
        arguments,
        objective=objective_config(recipe),
        data_collator=BlockCollator(recipe.data.document_mask),
        train_dataset=dataset,
        teacher=teacher,
        keep_checkpoints=recipe.run.keep_checkpoints,
    )


def _online_teacher(recipe: Recipe, order: TrainingOrder) -> tuple[OnlineTeacher, Any]:
    if recipe.teacher.model is None:
        raise TrainingError(
            f"Method {recipe.objective.method} needs an online teacher: set teacher.model."
        )
    files = open_model(
        recipe.teacher.model,
        device="cpu",
        dtype=_teacher_dtype(recipe),
        revision=recipe.teacher.revision,
    )
    teacher = OnlineTeacher(
        files.load(),
        config=objective_config(recipe),
        aggregation=recipe.objective.aggregation,
    )
    if not recipe.needs_block_text:
        refuse_other_vocabulary(student_tokenizer(recipe).vocabulary, files.tokenizer.vocabulary)
        return teacher, order
    return teacher, TeacherView(order, files.tokenizer, files.prefix_ids)


def _teacher_dtype(recipe: Recipe) -> str:
    """auto: half precision beside a student on an accelerator, float32 on a CPU."""
    if recipe.teacher.dtype != "auto":
        return recipe.teacher.dtype
    on_cpu = recipe.train.device == "cpu" or not torch.cuda.is_available()
    return "float32" if on_cpu else "bfloat16"


def save_result(
    trainer: GuidedTrainer, recipe: Recipe, schedule: Schedule, folder: Path, teacher: str | None
) -> None:
    """The model folder appears by rename, then the run is finished."""
    temporary = folder / ".model.tmp"
    trainer.save_merged(temporary)
    if not trainer.is_world_process_zero():
        return
    save_tokenizer(recipe, temporary)
    card = model_card(recipe, schedule, teacher, trainer.last_record)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    os.replace(temporary, folder / "model")
    finish_run(folder)


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
