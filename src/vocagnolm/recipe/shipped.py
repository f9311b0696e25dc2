"""Recipes that come with the package, by name: `laptop`, `paper/cpt`, ..."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vocagnolm.errors import RecipeError
from vocagnolm.recipe.paper import BEST, paper_rows
from vocagnolm.recipe.schema import Tree, merge, parse_yaml, read_tree, unknown

FOLDER = Path(__file__).parent / "recipes"
_LINE = re.compile(r"  (?P<name>\w+): (?P<value>.*?)(?P<comment>\s+#.*)?$")


@dataclass(frozen=True)
class Shipped:
    name: str
    shows: str
    about: str
    after: str | None
    text: str
    """The whole recipe, every key with its comment where there is one."""

    def tree(self) -> Tree:
        return read_tree_of(self.text)


def read_tree_of(text: str) -> Tree:
    tree: Tree = parse_yaml(text)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    return merge(read_tree(FOLDER / parent, RecipeError, ""), tree)


@cache
def shipped_recipes() -> dict[str, Shipped]:
    found = {}
    for path in sorted(FOLDER.glob("laptop*.yaml")):
        text = path.read_text(encoding="utf-8")
        about = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        found[path.stem] = Shipped(path.stem, "", about, None, text)
    complete = (FOLDER / "paper.yaml").read_text(encoding="utf-8")
    for row in paper_rows().values():
        name, after = f"paper/{row.name}", f"paper/{row.after}" if row.after else None
        text = complete if row.name == BEST else with_changes(complete, row.about, row.changes)
        found[name] = Shipped(name, row.shows, row.about, after, text)
    return found


def shipped_recipe(name: str) -> Shipped:
    known = shipped_recipes()
    if name not in known:
        hint = unknown("recipe", name, known).partition("Known:")[0].strip()
        raise RecipeError(
            f"{hint} Give the path of a YAML file, or a name of `vocagnolm recipe list`."
        )
    return known[name]


def with_changes(complete: str, about: str, changes: dict[str, Any]) -> str:
    """The complete recipe with other values, its comments kept: it shows every key on a line."""
    left = dict(changes)
    lines, section = [f"# {about[0].upper()}{about[1:]}."], ""
    for line in complete.splitlines():
        if line.startswith("#"):
            continue
        if line and not line.startswith(" "):
            section = line.partition(":")[0]
        match = _LINE.match(line)
        if match is not None and (path := f"{section}.{match['name']}") in left:
            value = yaml.safe_dump(left.pop(path), default_flow_style=True).partition("\n")[0]
            bare = f"  {match['name']}: {value}"
            line = f"{bare:29} {(match['comment'] or '').strip()}".rstrip()
        lines.append(line)
    assert not left, f"not in the complete recipe: {left}"
    return "\n".join(lines) + "\n"
