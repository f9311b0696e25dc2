"""`vocagnolm demo`: the whole pipeline on an embedded example."""

from pathlib import Path

import typer


def demo(
    out: Path = typer.Option(Path("out/demo"), help="Output folder."),
    materials: Path | None = typer.Option(
        None, help="Only write the materials of `vocagnolm study run toy` to this folder."
    ),
) -> None:
    """Run the whole pipeline on an embedded example: no download, no GPU, a few minutes.

    Four methods train the same small student on the same noisy corpus, three seeds each, and are
    evaluated on held-out problems. Run it again to resume after an interruption.
    """
    if materials is not None:
        from vocagnolm.demo.pipeline import write_materials

        write_materials(materials)
        typer.echo(str(materials))
    else:
        from vocagnolm.demo.pipeline import run_demo

        run_demo(out)
