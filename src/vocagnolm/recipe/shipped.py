"""Recipes that come with the package, by name: `laptop`, `paper/cpt`, ..."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vocagnolm.errors import RecipeError
from vocagnolm.recipe.schema import Tree, merge, parse_yaml, read_tree, unknown

FOLDER = Path(__file__).parent / "recipes"
BEST = "guided-qwen2.5-math-instruct"
"""The run of the paper that paper.yaml shows, every key explained."""
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
        tree: Tree = parse_yaml(self.text)
        parent = tree.pop("extends", None)
        return tree if parent is None else merge(read_tree(FOLDER / parent, RecipeError, ""), tree)


@cache
def shipped_recipes() -> dict[str, Shipped]:
    found = {}
    for path in sorted(FOLDER.glob("laptop*.yaml")):
        text = path.read_text(encoding="utf-8")
        about = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        found[path.stem] = Shipped(path.stem, "", about, None, text)
    complete = (FOLDER / "paper.yaml").read_text(encoding="utf-8")
    runs = parse_yaml((FOLDER / "paper-runs.yaml").read_text(encoding="utf-8"))["runs"]
    for name, run in runs.items():
        after = f"paper/{run['after']}" if "after" in run else None
        changes = {"run.folder": f"out/paper/runs/{name}", **run["set"]}
        text = complete if name == BEST else with_changes(complete, run["about"], changes)
        found[f"paper/{name}"] = Shipped(f"paper/{name}", run["shows"], run["about"], after, text)
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
    import yaml

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
