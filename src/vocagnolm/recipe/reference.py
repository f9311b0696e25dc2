"""The reference of all recipe keys, written from the code into docs/recipes.md.

Run `python -m vocagnolm.recipe.reference docs/recipes.md` after a key has changed.
"""

import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints

from vocagnolm.recipe.load import _describe
from vocagnolm.recipe.sections import SECTIONS

BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"


def markdown_reference() -> str:
    """A table a section: key, default, what it is."""
    lines = [BEGIN]
    for name, section in SECTIONS.items():
        hints = get_type_hints(section)
        lines += ["", f"### `{name}`", "", str(section.__doc__), ""]
        lines += ["| key | default | value | meaning |", "| --- | --- | --- | --- |"]
        for entry in fields(section):
            kind = _describe(hints[entry.name])
            lines.append(
                f"| `{entry.name}` | `{_default(entry)}` | {kind} | {entry.metadata['help']} |"
            )
    return "\n".join([*lines, "", END])


def _default(entry: Field[Any]) -> str:
    value = entry.default
    if entry.default_factory is not MISSING:
        value = entry.default_factory()
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> None:
    path = Path(sys.argv[1])
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    path.write_text(before + markdown_reference() + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
