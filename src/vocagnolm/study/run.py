"""`vocagnolm study`: do what is missing, then one table and one figure."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vocagnolm.errors import MissingExtraError, StudyError
from vocagnolm.files import write_json, write_text
from vocagnolm.study.figure import draw
from vocagnolm.study.laboratory import Laboratory
from vocagnolm.study.load import load_study
from vocagnolm.study.table import markdown, study_table
from vocagnolm.study.worker import work


def run_study(
    source: str | Path,
    folder: str | Path,
    *,
    materials: str | Path | None = None,
    overrides: Iterable[str] = (),
    only_table: bool = False,
    deadline: float | None = None,
    say: Callable[[str], None] = print,
) -> tuple[dict[str, Any], str]:
    """The study's table as data and as markdown. Both are also written to `FOLDER/NAME.json`,
    `NAME.md`, and the figure to `NAME.svg`."""
    if materials is not None and not Path(materials).is_dir():
        raise StudyError(
            f"There is no folder {materials} (--materials). It holds the models and texts of the "
            "study: docs/log/miniature-protocols.md says how it is filled."
        )
    study = load_study(source, overrides, materials=materials)
    laboratory = Laboratory(study, folder)
    if not only_table:
        outcome = work(laboratory, deadline=deadline, say=say)
        for name in outcome.failed:
            report = laboratory.folder / "failed" / f"{name}.txt"
            say(f"{name} failed: {report} says why. The same command tries it again.")
        _explain_waiting(laboratory, outcome.left, outcome.failed, say)
    table = study_table(laboratory)
    if not table["rows"]:
        raise StudyError(f"No run of '{study.name}' in {folder} is finished: there is no table.")
    text = markdown(table)
    out = laboratory.folder
    write_json(out / f"{study.name}.json", table)
    write_text(out / f"{study.name}.md", text)
    try:
        draw(table, study.figure, out / f"{study.name}.svg")
    except (MissingExtraError, StudyError) as error:
        say(f"no figure: {error}")
    return table, text


def _explain_waiting(
    laboratory: Laboratory, left: list[str], failed: list[str], say: Callable[[str], None]
) -> None:
    """Files that nobody makes: the user has to bring them."""
    tasks = laboratory.tasks()
    made = {task.done for task in tasks}
    for task in tasks:
        if task.name in left and task.name not in failed:
            missing = [path for path in task.needs if not path.exists() and path not in made]
            if missing:
                say(f"{task.name} waits for {', '.join(map(str, missing))}")
