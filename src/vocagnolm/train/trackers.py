"""The trackers of `run.report_to`: those of accelerate, which also get the recipe and a few texts
with their selection, and the same run again when it is resumed."""

import html
import itertools
import os
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import tracking
from accelerate.utils import LoggerType
from torch import Tensor
from transformers import TrainingArguments

from vocagnolm.alignment import TextTokenizer
from vocagnolm.base.files import read_json, write_json
from vocagnolm.errors import TrainingError
from vocagnolm.objective import IGNORE_INDEX
from vocagnolm.recipe import Recipe

# The package of a tracker has the tracker's name, with one exception.
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}
# What those trackers call the name of a run that take one.
_RUN_NAMES = {"clearml": "task_name", "mlflow": "run_name", "trackio": "name"}
SAMPLES = 10
"""How often texts with their selection are sent during a run."""
SAMPLE_ROWS = 2
SAMPLE_TOKENS = 256
_PROJECT = "vocagnolm"
_NOTES = "trackers.json"


def tracker_problems(names: list[str]) -> list[str]:
    """What is wrong with the names in `run.report_to`, before anything is loaded or written."""
    problems = []
    known = tracking.LOGGER_TYPE_TO_CLASS
    for name in names:
        packages = _PACKAGES.get(name, (name,))
        if name not in known and name not in ("all", "none"):
            listed = ", ".join(sorted(known))
            problems.append(f"run.report_to: {name} is not a tracker. Supported: {listed}.")
        elif name in known and name in LoggerType.list() and not any(map(_installed, packages)):
            problems.append(
                f"run.report_to: {name} needs the package {' or '.join(packages)}, which is not "
                f"installed: pip install {packages[0]}, or take {name} out of run.report_to."
            )
    return problems


def _installed(package: str) -> bool:
    """Whether a package can be imported. A folder of that name is none: wandb leaves one where it
    ran."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class Trackers:
    """The trackers of a run, as a context that ends them."""

    def __init__(
        self,
        recipe: Recipe,
        arguments: TrainingArguments,
        tokenizer: TextTokenizer,
        *,
        step: int = 0,
        texts: bool = True,
    ):
        """The run continues after `step`. `texts`: also show texts with their selection."""
        assert recipe.run.folder is not None
        self._recipe, self._tokenizer = recipe, tokenizer
        self._folder, self._step = Path(recipe.run.folder), step
        self._steps, self._every = arguments.max_steps, int(arguments.logging_steps)
        self._log_first = arguments.logging_first_step
        self._losses: list[float] = []
        self._foreign_wandb = False
        names = [name for name in recipe.run.report_to if name != "none"]
        if "all" in names:
            names = [str(name) for name in tracking.get_available_trackers()]
        self._trackers = [self._started(name) for name in names]
        self._shows_texts = texts and any(t.name in _SHOWS for t in self._trackers)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for tracker in self._trackers:
            if tracker.name != "wandb":
                tracker.finish()
            elif not self._foreign_wandb:  # W&B shows whether a run failed
                tracker.tracker.finish(exit_code=int(kind is not None))

    def step(self, record: dict[str, Any], gradient_norm: Tensor | None) -> None:
        """Send the measures of a step that was read, if it is due. The loss is the mean since the
        last step that was sent."""
        self._losses.append(record["loss"])
        number = record["step"]
        if number % self._every and not (number == 1 and self._log_first):
            return
        values = {name: value for name, value in record.items() if value is not None}
        values["global_step"] = values.pop("step")
        values |= {"loss": sum(self._losses) / len(self._losses), "epoch": number / self._steps}
        if gradient_norm is not None:
            values["grad_norm"] = float(gradient_norm)
        self._losses = []
        for tracker in self._trackers:
            tracker.log({f"train/{name}": v for name, v in values.items()}, step=number)

    def wants_texts(self, step: int) -> bool:
        every = max(1, self._steps // SAMPLES)
        return self._shows_texts and (step == 1 or step % every == 0)

    def texts(self, step: int, labels_BT: Tensor, weights_BT: Tensor) -> None:
        """Send the first sequences of a micro-batch, the tokens that are trained on in bold."""
        text = selected_text(self._tokenizer, labels_BT, weights_BT)
        for tracker in self._trackers:
            if tracker.name in _SHOWS:
                _SHOWS[tracker.name](tracker, text, step)

    # ---- the start of each ----

    def _started(self, name: str) -> Any:
        make = tracking.LOGGER_TYPE_TO_CLASS[name]
        given = self._recipe.train.arguments
        run, project = given.get("run_name", self._folder.name), given.get("project", _PROJECT)
        recipe = self._recipe.to_dict()
        if name == "tensorboard":  # beside the metrics; steps after the checkpoint come again
            purge = {"purge_step": self._step + 1} if self._step else {}
            tracker = make("tensorboard", str(self._folder), **purge)
            tracker.start()
            tracker.tracker.add_text("recipe", f"```yaml\n{self._recipe.to_yaml()}\n```")
            return tracker
        if name == "wandb":
            tracker = self._wandb(make, run)
        elif name in _RUN_NAMES:
            options = {_RUN_NAMES[name]: run}
            if name == "trackio":
                options |= {"resume": "allow", "space_id": given.get("trackio_space_id")}
            tracker = make(project, **options)
        elif make.requires_logging_directory:
            tracker = make(project, str(self._folder / name))
        else:
            tracker = make(project)
        tracker.start()
        tracker.store_init_configuration({"recipe": recipe} if name == "wandb" else _flat(recipe))
        return tracker

    def _wandb(self, make: Callable[..., Any], run: str) -> Any:
        """W&B's tracker of this run; where the caller has a run open, of that one."""
        import wandb

        self._foreign_wandb = wandb.run is not None
        return make(
            os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", run),
            id=os.environ.get("WANDB_RUN_ID") or _noted_id(self._folder),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(self._folder)),
        )


def _flat(recipe: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Keys `section.key` with plain values, as most trackers take them."""
    return {
        f"{section}.{key}": value if isinstance(value, str | int | float | None) else str(value)
        for section, content in recipe.items()
        for key, value in content.items()
    }


def _wandb_text(tracker: Any, text: str, step: int) -> None:
    import wandb

    shown = wandb.Html(f'<div style="white-space: pre-wrap">{text}</div>')
    tracker.log({"selected tokens": shown}, step=step)


_SHOWS: dict[str, Callable[[Any, str, int], None]] = {
    "tensorboard": lambda tracker, text, step: tracker.log({"selected tokens": text}, step=step),
    "wandb": _wandb_text,
}
"""Trackers that can show HTML, and how."""


def _noted_id(folder: Path) -> str:
    """The id of a run in W&B, the same for all of the run's life: it is kept in its folder."""
    path = folder / _NOTES
    mend = "Remove it: the tracker then begins a new run."
    try:
        return str(read_json(path, TrainingError, mend, {"wandb": str})["wandb"])
    except FileNotFoundError:
        noted = uuid.uuid4().hex[:12]
        write_json(path, {"wandb": noted}, sealed=True)
        return noted


def selected_text(tokenizer: TextTokenizer, labels_BT: Tensor, weights_BT: Tensor) -> str:
    """The first sequences of a batch as HTML, the tokens that are trained on in bold."""
    rows = []
    labels, kept = labels_BT[:SAMPLE_ROWS].tolist(), (weights_BT[:SAMPLE_ROWS] != 0).tolist()
    for ids, bold in zip(labels, kept, strict=True):
        tokens = [*zip(bold, ids, strict=True)][:SAMPLE_TOKENS]
        shown = [token for token in tokens if token[1] != IGNORE_INDEX]
        rows.append("")
        for is_kept, run in itertools.groupby(shown, key=itemgetter(0)):
            content = b"".join(tokenizer.bytes_of(index) or b"" for _, index in run)
            text = html.escape(content.decode(errors="replace")).replace("\n", "<br>")
            rows[-1] += f"<strong>{text}</strong>" if is_kept else text
    return "<br><br>".join(rows)
