"""The command line without running it."""

import typer

from vocagnolm.cli import app


def parse(words: list[str]) -> None:
    """What the command line makes of the words, without running it."""
    name, command = "vocagnolm", typer.main.get_command(app)
    while hasattr(command, "resolve_command"):
        context = command.make_context(name, words, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        assert command is not None, "No such command"
    command.make_context(name, words)
