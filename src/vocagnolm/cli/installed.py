"""Commands that installed packages bring: entry points of the group `vocagnolm.commands`, each of
them a Typer application. `study` is one, of `vocagnolm_studies`.

The installed packages are looked through only when all commands are shown, or when the one that is
asked for is not among our own: the other commands do not wait for that.
"""

from typing import Any

import typer
from typer.main import get_command

from vocagnolm.cli.common import Commands

GROUP = "vocagnolm.commands"


class AllCommands(Commands):
    """The root command: our own commands, and after them those of other packages."""

    _looked = False

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_installed()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_installed()
        return super().get_command(ctx, cmd_name)

    def _add_installed(self) -> None:
        if self._looked:
            return
        self._looked = True
        from importlib.metadata import entry_points

        found = typer.Typer(add_completion=False)
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            found.add_typer(entry.load(), name=entry.name)
        if found.registered_groups:
            for name, command in getattr(get_command(found), "commands", {}).items():
                self.commands.setdefault(name, command)
