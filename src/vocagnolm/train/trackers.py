"""`run.report_to`: are the trackers there, and where do they write?"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Packages of transformers' trackers, by name; one of them is enough.
PACKAGES = {
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet_ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow",),
    "neptune": ("neptune",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def tracker_problems(names: list[str]) -> list[str]:
    """What the Trainer would stumble over, in words, before anything is loaded or written."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    problems = []
    for name in names:
        packages = PACKAGES.get(name, ())
        if name not in INTEGRATION_TO_CALLBACK and name not in ("all", "none"):
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            problems.append(f"run.report_to: {name} is no tracker. Known are: {known}.")
        elif packages and not any(map(_installed, packages)):
            problems.append(
                f"run.report_to: {name} needs the package {' or '.join(packages)}, which is not "
                f"installed: pip install {packages[0]}, or take {name} out of run.report_to."
            )
    return problems


def _installed(package: str) -> bool:
    """Also where a mere folder of that name lies about: wandb leaves one where it ran."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def keep_in_run(trainer: Any, folder: Path) -> None:
    """TensorBoard's files beside the metrics, and not among the checkpoints."""
    from transformers.integrations.integration_utils import TensorBoardCallback

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = str(folder / "tensorboard")
