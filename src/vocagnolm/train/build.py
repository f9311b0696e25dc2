"""From a recipe and its blocks to a trainer that can begin."""

from typing import Any

from transformers import PreTrainedModel

from vocagnolm.alignment import TextTokenizer, token_texts
from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.data.guidance import TargetsPlan, target_table
from vocagnolm.data.identity import (
    student_chat,
    student_tokenizer,
    teacher_chat,
    teacher_tokenizer,
)
from vocagnolm.errors import TrainingError
from vocagnolm.model import ModelFiles, open_model
from vocagnolm.recipe import Recipe
from vocagnolm.train.arguments import objective_config, refuse_other_vocabulary, uses_accelerator
from vocagnolm.train.collate import BlockCollator
from vocagnolm.train.online import OnlineTeacher, TeacherView
from vocagnolm.train.schedule import Schedule
from vocagnolm.train.student import add_lora, build_student, choose_attention, compile_layers
from vocagnolm.train.trainer import GuidedTrainer

ONLINE_ALTERNATIVES = 4


def build_trainer(
    recipe: Recipe,
    blocks: Blocks,
    schedule: Schedule,
    arguments: Any,
    student: PreTrainedModel | None = None,
) -> GuidedTrainer:
    """`student`: where it is loaded already."""
    student = student or build_student(recipe)
    embeddings: Any = student.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    vocabulary = student_tokenizer(recipe).vocabulary
    if max(vocabulary.values()) >= rows:
        raise TrainingError(
            f"The student has {rows:,} embedding rows, its tokenizer has ids up to "
            f"{max(vocabulary.values()):,}. They do not belong together."
        )
    model = add_lora(student, recipe.lora)
    documents = recipe.data.document_mask or blocks.conversations
    order = TrainingOrder(blocks, schedule.steps * schedule.batch_blocks, recipe.run.seed)
    dataset: Any = order
    teacher = None
    if recipe.needs_online_teacher:
        teacher, dataset = _online_teacher(recipe, order)
    trainer = GuidedTrainer(
        model,
        arguments,
        objective=objective_config(recipe),
        data_collator=BlockCollator(documents),
        train_dataset=dataset,
        teacher=teacher,
        keep_checkpoints=recipe.run.keep_checkpoints,
        router_loss=recipe.train.router_loss,
        within_machines=recipe.train.parallel == "hsdp",
    )
    # after the probes of the head, which have another shape
    choose_attention(student, recipe, documents=documents)
    if recipe.train.compile:
        compile_layers(student)
    return trainer


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
    tokenizer = teacher_tokenizer(recipe)
    teacher = OnlineTeacher(
        files.load(),
        config=objective_config(recipe),
        aggregation=recipe.objective.aggregation,
        targets=_online_targets(recipe, order, files, tokenizer) if recipe.needs_targets else None,
    )
    if not recipe.needs_block_text:
        refuse_other_vocabulary(student_tokenizer(recipe).vocabulary, tokenizer.vocabulary)
        return teacher, order
    if order.blocks.conversations:
        tokenizer = teacher_chat(recipe, tokenizer)
    view = TeacherView(
        order,
        tokenizer,
        tokenizer.prefix_ids,
        pairing=recipe.objective.pairing,
        by_stretch=recipe.needs_stretches,
        with_text=recipe.needs_targets,
    )
    return teacher, view


def _online_targets(
    recipe: Recipe, order: TrainingOrder, files: ModelFiles, teacher: TextTokenizer
) -> TargetsPlan:
    """As from a store: the same table, the same rounding."""
    student = student_tokenizer(recipe)
    ends = set(files.end_ids)
    if order.blocks.conversations:
        student = student_chat(recipe, student)
        turn = teacher_chat(recipe, teacher).end_of_turn
        ends |= set() if turn is None else {turn}
    eos = order.blocks.manifest["settings"]["eos"]
    return TargetsPlan(
        tables=(target_table(student, token_texts(teacher, ends), eos),),
        spec=AlternativesSpec(recipe.objective.alternatives or ONLINE_ALTERNATIVES),
        inside=recipe.objective.inside,
        weights=(1.0,),
    )


def _teacher_dtype(recipe: Recipe) -> str:
    """auto: half precision beside a student on an accelerator, float32 on a CPU."""
    if recipe.teacher.dtype != "auto":
        return recipe.teacher.dtype
    return "bfloat16" if uses_accelerator(recipe) else "float32"
