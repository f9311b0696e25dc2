"""`vocagnolm demo`: the whole pipeline on an embedded example."""

from pathlib import Path

import typer


def demo(
    out: Path = typer.Option(Path("out/demo"), help="Where its files and its page go."),
    materials: Path | None = typer.Option(
        None, help="Run nothing; write what `vocagnolm study run toy` needs into this folder."
    ),
) -> None:
    """Run the whole pipeline on an embedded example: no download, no GPU, a few minutes.

    Four methods train the same small student on the same noisy corpus, three seeds each, and are
    measured on held-out problems. Interrupted, it goes on where it stopped.
    """
    if materials is not None:
        from vocagnolm.demo.pipeline import write_materials

        write_materials(materials)
        typer.echo(str(materials))
    else:
        from vocagnolm.demo.pipeline import run_demo

        run_demo(out)
