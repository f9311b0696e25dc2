"""`vocagnolm recipe`: the recipes that come with the package."""

import typer

from vocagnolm.cli.common import App, print_json
from vocagnolm.cli.options import JSON

app = App(help="List and show the recipes in the package.")


@app.command("list", example="vocagnolm recipe list")
def list_recipes(
    as_json: bool = JSON,
) -> None:
    """List the recipes in the package, including every run of the paper's tables and figures."""
    from vocagnolm.recipe.load import shipped_recipes

    found = shipped_recipes().values()
    if as_json:
        rows = {r.name: {"shows": r.shows, "about": r.about, "after": r.after} for r in found}
        print_json(rows)
        return
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        shows = f"{recipe.shows}: " if recipe.shows else ""
        after = f" (first: {recipe.after})" if recipe.after else ""
        typer.echo(f"{recipe.name:{width}}  {shows}{recipe.about}{after}")


@app.command(example="vocagnolm recipe show laptop > recipe.yaml")
def show(name: str = typer.Argument(help="A name from `vocagnolm recipe list`.")) -> None:
    """Print a recipe with every key explained, as a file to start from."""
    from vocagnolm.recipe.load import shipped_recipe

    typer.echo(shipped_recipe(name).text, nl=False)
