"""What W&B and TensorBoard get beyond the numbers: the recipe, the same run when it is resumed, and
a few texts with their selection.

The numbers themselves are sent by transformers' own callbacks."""

import html
import os
import uuid
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.alignment import TextTokenizer
from vocagnolm.data.identity import student_tokenizer
from vocagnolm.errors import TrainingError
from vocagnolm.files import read_json, write_json
from vocagnolm.objective import IGNORE_INDEX
from vocagnolm.recipe import Recipe
from vocagnolm.train.trackers import keep_in_run
from vocagnolm.train.trainer import GuidedTrainer

SAMPLES = 10
"""Times in a run that texts are sent."""
SAMPLE_ROWS = 2
SAMPLE_TOKENS = 256
_NOTES = "trackers.json"
_ours: set[str] = set()  # W&B runs that this process began


def start_trackers(trainer: GuidedTrainer, recipe: Recipe, folder: Path, step: int) -> None:
    """Before the training: tell the trackers which run this is. It goes on after `step`."""
    keep_in_run(trainer, folder)
    if not trainer.is_world_process_zero():
        return
    names = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    if not names & {"WandbCallback", "TensorBoardCallback"}:
        return
    if step:
        _pick_up_tensorboard(trainer, step)
    wandb = _start_wandb(recipe, folder) if "WandbCallback" in names else None
    trainer.add_callback(RunTracker(trainer, recipe, wandb))


def _pick_up_tensorboard(trainer: Any, step: int) -> None:
    """Steps that a stopped run has logged after its last checkpoint are logged again: the old
    ones are taken off the curves."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "TensorBoardCallback" and callback.tb_writer is None:
            callback.tb_writer = callback._SummaryWriter(
                log_dir=callback.logging_dir, purge_step=step + 1
            )


def _start_wandb(recipe: Recipe, folder: Path) -> Any:
    """The module, where this run of it is ours to end; None where the caller has one open."""
    import wandb

    if wandb.run is not None and wandb.run.id not in _ours:
        wandb.config.update({"recipe": recipe.to_dict()}, allow_val_change=True)
        return None
    if wandb.run is not None:  # of a training before, which ended in an error
        wandb.finish()
    wandb.init(
        project=os.environ.get("WANDB_PROJECT", "vocagnolm"),
        name=os.environ.get("WANDB_NAME", folder.name),
        id=os.environ.get("WANDB_RUN_ID") or _noted_id(folder),
        resume="allow",
        dir=os.environ.get("WANDB_DIR", str(folder)),
        config={"recipe": recipe.to_dict()},
    )
    _ours.add(wandb.run.id)
    return wandb


def _noted_id(folder: Path) -> str:
    """One for all of a run's life, kept in its folder."""
    path = folder / _NOTES
    mend = "Remove it: the tracker then begins a new run."
    try:
        return str(read_json(path, TrainingError, mend, {"wandb": str})["wandb"])
    except FileNotFoundError:
        noted = uuid.uuid4().hex[:12]
        write_json(path, {"wandb": noted})
        return noted


class RunTracker(TrainerCallback):
    """Sends the recipe at the start and selected texts now and then. Comes after the callbacks of
    transformers, whose writers it uses."""

    def __init__(self, trainer: GuidedTrainer, recipe: Recipe, wandb: Any = None):
        self.trainer: Any = trainer
        self.recipe = recipe
        self.wandb = wandb
        self._tokenizer: TextTokenizer | None = None
        trainer.keep_selection = not trainer.objective.selects_all

    def _tensorboard(self) -> list[Any]:
        return [
            callback.tb_writer
            for callback in self.trainer.callback_handler.callbacks
            if type(callback).__name__ == "TensorBoardCallback" and callback.tb_writer is not None
        ]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for writer in self._tensorboard():
            writer.add_text("recipe", f"```yaml\n{self.recipe.to_yaml()}\n```")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, every = state.global_step, max(1, state.max_steps // SAMPLES)
        selection = self.trainer.last_selection
        if selection is None or (step != 1 and step % every):
            return
        if self._tokenizer is None:
            self._tokenizer = student_tokenizer(self.recipe)
        text = selected_text(self._tokenizer, *selection)
        for writer in self._tensorboard():
            writer.add_text("selected tokens", text, step)
        if self.wandb is not None:
            shown = self.wandb.Html(f'<div style="white-space: pre-wrap">{text}</div>')
            self.wandb.log({"selected tokens": shown, "train/global_step": step})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.wandb is not None:
            self.wandb.finish()


def selected_text(tokenizer: TextTokenizer, labels_BT: Tensor, weights_BT: Tensor) -> str:
    """The first sequences of a batch as HTML, the tokens that are trained on in bold."""
    rows = []
    labels, kept = labels_BT[:SAMPLE_ROWS].tolist(), (weights_BT[:SAMPLE_ROWS] != 0).tolist()
    for ids, bold in zip(labels, kept, strict=True):
        runs: list[tuple[bool, bytearray]] = []
        for index, is_kept in list(zip(ids, bold, strict=True))[:SAMPLE_TOKENS]:
            if index == IGNORE_INDEX:
                continue
            if not runs or runs[-1][0] != is_kept:
                runs.append((is_kept, bytearray()))
            runs[-1][1].extend(tokenizer.bytes_of(index) or b"")
        rows.append("".join(_marked(text.decode(errors="replace"), bold) for bold, text in runs))
    return "<br><br>".join(rows)


def _marked(text: str, bold: bool) -> str:
    shown = html.escape(text).replace("\n", "<br>")
    return f"<strong>{shown}</strong>" if bold else shown
