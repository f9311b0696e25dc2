"""From a recipe and its blocks to a trainer that can begin."""

from typing import Any

from transformers import PreTrainedModel

from vocagnolm.data.blocks import Blocks
from vocagnolm.data.identity import student_tokenizer, teacher_chat, teacher_tokenizer
from vocagnolm.data.order import TrainingOrder
from vocagnolm.errors import TrainingError
from vocagnolm.model import open_model
from vocagnolm.recipe import Recipe
from vocagnolm.train.arguments import objective_config, uses_accelerator
from vocagnolm.train.collate import BlockCollator
from vocagnolm.train.online import OnlineTeacher, TeacherView
from vocagnolm.train.schedule import Schedule
from vocagnolm.train.student import add_lora, build_student, choose_attention, compile_layers
from vocagnolm.train.trainer import GuidedTrainer
from vocagnolm.train.vocabulary import refuse_other_vocabulary


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
    teacher = OnlineTeacher(
        files.load(),
        config=objective_config(recipe),
        aggregation=recipe.objective.aggregation,
    )
    tokenizer = teacher_tokenizer(recipe)
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
    )
    return teacher, view


def _teacher_dtype(recipe: Recipe) -> str:
    """auto: half precision beside a student on an accelerator, float32 on a CPU."""
    if recipe.teacher.dtype != "auto":
        return recipe.teacher.dtype
    return "bfloat16" if uses_accelerator(recipe) else "float32"
