"""The arithmetic of a run: blocks, steps, accumulation. No torch."""

from dataclasses import dataclass

from vocagnolm.errors import RecipeError
from vocagnolm.recipe import Recipe


@dataclass(frozen=True)
class Schedule:
    """How a recipe turns blocks into optimizer steps on so many processes."""

    steps: int
    batch_blocks: int
    micro_batch: int
    accumulation: int
    world_size: int
    block_size: int
    blocks: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_blocks * self.block_size

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float:
        return self.steps * self.batch_blocks / self.blocks


def plan_schedule(recipe: Recipe, blocks: int, world_size: int = 1) -> Schedule:
    """Whole steps only: the rest of a last, incomplete batch is left out."""
    train = recipe.train
    check_batch(recipe, world_size)
    per_step = train.batch_blocks * recipe.data.block_size
    if train.tokens is not None:
        steps = train.tokens // per_step
        asked = f"train.tokens = {train.tokens:,}"
    else:
        steps = int(train.epochs * blocks) // train.batch_blocks
        asked = f"train.epochs = {train.epochs:g} of {blocks:,} blocks"
    if steps < 1:
        raise RecipeError(
            f"{asked} is less than one step of {train.batch_blocks:,} blocks "
            f"({per_step:,} tokens). Lower train.batch_blocks or train longer."
        )
    return Schedule(
        steps=steps,
        batch_blocks=train.batch_blocks,
        micro_batch=train.micro_batch,
        accumulation=train.batch_blocks // (train.micro_batch * world_size),
        world_size=world_size,
        block_size=recipe.data.block_size,
        blocks=blocks,
    )


def check_batch(recipe: Recipe, world_size: int) -> None:
    train = recipe.train
    if train.batch_blocks < 1 or train.micro_batch < 1:
        raise RecipeError("train.batch_blocks and train.micro_batch must be at least 1.")
    if train.batch_blocks % (train.micro_batch * world_size):
        raise RecipeError(
            f"train.batch_blocks = {train.batch_blocks} is not a multiple of train.micro_batch x "
            f"processes = {train.micro_batch} x {world_size}. Change one of them."
        )
