"""The reference of all recipe keys, written from the code into docs/recipes.md.

Run `python -m vocagnolm.recipe.reference docs/recipes.md` after a key has changed.
"""

import sys
from pathlib import Path
from typing import Any

from vocagnolm.recipe.load import Recipe
from vocagnolm.recipe.schema import expected

BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"


def markdown_reference() -> str:
    """A table a section: key, default, what it is."""
    lines = [BEGIN]
    for name, entry in Recipe.model_fields.items():
        section: Any = entry.annotation
        lines += ["", f"### `{name}`", "", str(section.__doc__), ""]
        lines += ["| key | default | value | meaning |", "| --- | --- | --- | --- |"]
        for inner, field in section.model_fields.items():
            value = _written(field.default)
            lines.append(f"| `{inner}` | `{value}` | {expected(field)} | {field.description} |")
    return "\n".join([*lines, "", END])


def _written(value: Any) -> str:
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
