"""Errors that a user can act on. The command line prints only their message, without a
traceback."""

import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any


class VocagnolmError(Exception):
    """An error that the user can fix. The message says what was found, what was expected and what
    to do next. The command line exits with `exit_code`."""

    exit_code = 1


class UsageError(VocagnolmError):
    """The call itself is wrong: an unknown name, two options that exclude each other."""

    exit_code = 2


class SettingError(UsageError, ValueError):
    """A setting is of the wrong type, or beyond its limits."""


class MissingExtraError(VocagnolmError):
    """An optional dependency is not installed, or is installed and cannot be imported."""

    def __init__(self, package: str, extra: str, purpose: str, broken: str | None = None) -> None:
        """`broken`: why an installed package cannot be imported."""
        self._parts = (package, extra, purpose, broken)
        wrong, how = "is not installed", "Install it"
        if broken is not None:
            wrong, how = f"is installed but cannot be imported ({broken})", "Update it"
        super().__init__(
            f"{purpose} needs the package '{package}', which {wrong}. "
            f"{how} with: pip install {'--upgrade ' * (broken is not None)}'vocagnolm[{extra}]'"
        )

    def __reduce__(self) -> tuple[type, tuple[str | None, ...]]:
        return type(self), self._parts  # sent from one process to another


class WriteError(VocagnolmError):
    """A file cannot be written: no room, no right, no such folder."""


class AddressError(VocagnolmError):
    """A bucket or another address cannot be reached, read or written."""


class VocagnolmWarning(UserWarning):
    """Something the user should know; the work goes on. The command line prints it as one line."""


class StorageWarning(VocagnolmWarning):
    """A bucket does not keep what the protocol of stores needs of it."""


class WaitingWarning(StorageWarning):
    """Storage or a cluster does not answer or has no room, and is waited for."""


class BusyError(VocagnolmError):
    """Another process holds the folder."""


class TokenizerError(VocagnolmError):
    """A tokenizer cannot be loaded, or cannot be trusted."""


class TilingError(VocagnolmError):
    """A tokenizer's tokens do not tile the bytes of a text."""


class TemplateError(VocagnolmError):
    """A chat template cannot render a conversation, or its contents cannot be found in it."""


class CorpusError(VocagnolmError):
    """A corpus cannot be read as documents."""


class RecipeError(UsageError):
    """A recipe names something unknown, or contradicts itself."""


class BlocksError(VocagnolmError):
    """Packed blocks cannot be made, or do not belong to this recipe."""


class TrainingError(VocagnolmError):
    """A training run cannot start, cannot be resumed, or went wrong."""


class StoppedError(VocagnolmError):
    """A run was asked to stop and did, with all it has made kept."""

    exit_code = 143  # 128 + SIGTERM, as shells and schedulers write it


class InterruptedRunError(StoppedError):
    """A run stopped at Ctrl-C, with all it has made kept."""

    exit_code = 130  # 128 + SIGINT


class PushError(VocagnolmError):
    """The hub does not take a model."""


class ModelError(VocagnolmError):
    """A model cannot be loaded, or cannot be loaded safely."""


class StoreError(VocagnolmError):
    """A loss store is damaged, incomplete, or not the one that was asked for."""


class ScoreError(VocagnolmError):
    """Scoring cannot go on: the teacher's numbers or a document (with --strict) are not usable."""


class ClusterError(VocagnolmError):
    """A Ray cluster cannot be reached, has no live worker, or has set shards aside."""


class BenchmarkError(VocagnolmError):
    """A benchmark's questions are missing or malformed."""


class StudyError(UsageError):
    """A study names something unknown, or its materials are missing."""


class EvaluationError(VocagnolmError):
    """An evaluation folder does not fit the command, or holds no results."""


class ServerError(ScoreError, EvaluationError):
    """A server does not answer, or its answers are not usable."""


class LimitError(VocagnolmError):
    """A limit that the user has set is reached; what was made is kept."""


class ObjectiveError(VocagnolmError):
    """Teacher and student do not fit the chosen method."""


# ---- imports, and what other people's packages say ----


def lazy_names(package: str, public: Mapping[str, Collection[str]]) -> tuple[Any, Any]:
    """`__getattr__` and `__dir__` of a package whose names are loaded on first use: by its modules,
    the public names that each defines."""

    def load(name: str) -> Any:
        for module, names in public.items():
            if name in names:
                return getattr(import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: sorted(sys.modules[package].__all__)


def optional(module: str, extra: str, purpose: str) -> Any:
    """A module that comes with one of our extras."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        broken = None if missing else first_line(error)
        raise MissingExtraError(package.replace("_", "-"), extra, purpose, broken) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message: those of other packages may be long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
