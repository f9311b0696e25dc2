"""Tries whose speed is told, so that their samples depend on no clock, and that are interrupted."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vocagnolm.demo import corpus as demo_corpus
from vocagnolm.demo import students
from vocagnolm.tryout import prompt_sample, text_sample
from vocagnolm.tryout.folder import Tryout

START, TEACHER = str(students.START), str(students.TEACHER)


class Killed(BaseException):
    pass


def chat_models(folder: Path) -> tuple[str, str]:
    """The demo's student and teacher with the template in which they read questions."""
    for model in (students.START, students.TEACHER):
        shutil.copytree(model, folder / model.name)
        (folder / model.name / "chat_template.jinja").write_text(students.TEMPLATE)
    return str(folder / students.START.name), str(folder / students.TEACHER.name)


def demo_prompts(path: Path, count: int = 48, right: bool = False) -> Path:
    """Prompts with given answers and expected ones; `right`: only those that are answered right."""
    demo_corpus.write_prompts(path, count)
    if right:
        rows = map(json.loads, path.read_text().splitlines())
        kept = [row for row in rows if row["completion"].endswith(f"is {row['answer']}.")]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path


@contextmanager
def speed(value: float) -> Iterator[None]:
    """A machine of this speed, whatever is measured: little is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_sample, "PILOT_PROMPTS", (8,))
        for module in (prompt_sample, text_sample):
            patch.setattr(module, "rounded_speed", lambda _: value)
        yield


@contextmanager
def killed_in(step: str) -> Iterator[None]:
    """Ends a try when this step is done and nothing of that is kept yet."""
    original = Tryout.once

    def once(self, name, make, *given):
        if name == step and name not in self.state:
            make(*given)
            raise Killed
        return original(self, name, make, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tryout, "once", once)
        yield


def killed_at_every_step(steps: list[str], attempt) -> None:
    """Run a try that is killed in every step but the plan, each time on a machine of another
    speed, and then to its end."""
    for number, step in enumerate(steps):
        if step not in ("try", "plan"):
            with speed(2.0 ** (number % 3)), killed_in(step), pytest.raises(Killed):
                attempt()
    with speed(64.0):
        attempt()


def digests(folder: Path) -> dict[str, str]:
    """The samples and the students' weights of a try."""
    files = [*folder.glob("sample/*"), *folder.glob("runs/*/model/model.safetensors")]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }
