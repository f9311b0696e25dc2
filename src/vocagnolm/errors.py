"""Errors a user can act on. The command line prints their message alone, without a traceback."""


class VocagnolmError(Exception):
    """Something the user can mend: the message says what was found, what was expected and
    what to do next. The command line exits with `exit_code`."""

    exit_code = 1


class UsageError(VocagnolmError):
    """The call itself is wrong: an unknown name, two options that exclude each other."""

    exit_code = 2


class MissingExtraError(VocagnolmError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'vocagnolm[{extra}]'"
        )


class TokenizerError(VocagnolmError):
    """A tokenizer cannot be loaded, or cannot be trusted."""


class TilingError(VocagnolmError):
    """A tokenizer's tokens do not tile the bytes of a text."""


class CorpusError(VocagnolmError):
    """A corpus cannot be read as documents."""
