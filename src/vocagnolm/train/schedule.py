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


def plan_schedule(
    recipe: Recipe, blocks: int, world_size: int = 1, found: int | None = None
) -> Schedule:
    """Whole steps only: the rest of a last, incomplete batch is left out. `found`: the micro-batch
    that `auto` stands for, where it is known; else the one that is tried first."""
    train = recipe.train
    micro_batch = check_batch(recipe, world_size, found)
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
        micro_batch=micro_batch,
        accumulation=train.batch_blocks // (micro_batch * world_size),
        world_size=world_size,
        block_size=recipe.data.block_size,
        blocks=blocks,
    )


def check_batch(recipe: Recipe, world_size: int, found: int | None = None) -> int:
    """The micro-batch; `found` is what `auto` stands for."""
    train = recipe.train
    micro_batch = train.micro_batch
    if micro_batch == "auto":
        if train.parallel != "ddp":
            raise RecipeError(
                f"train.micro_batch: auto measures with the whole model in each process, which "
                f"train.parallel: {train.parallel} does not have. Give a number."
            )
        micro_batch = found or first_micro_batch(train.batch_blocks // world_size)
    if train.batch_blocks % (micro_batch * world_size):
        raise RecipeError(
            f"train.batch_blocks = {train.batch_blocks} is not a multiple of train.micro_batch x "
            f"processes = {micro_batch} x {world_size}. Change one of them."
        )
    return micro_batch


def first_micro_batch(share: int) -> int:
    """The one that `auto` tries first: the largest up to the default that divides the blocks of a
    process in a step."""
    return max((n for n in range(1, 9) if share % n == 0 and n <= share), default=1)
