"""How much of the source a reader meets: files and functions of one optimizer step, and of a whole
`train`.

    python benchmarks/files_of_a_step.py [--json [FILE]] [--list]

The demo's start trains for six steps on a CPU, guided from a store; `sys.setprofile` tells which
functions of the package are called. A step is what runs between the third and the fourth call of
the optimizer, in the thread that trains; `train` is everything after the imports. Half a minute.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import report
from record import add_json
from torch.optim.optimizer import register_optimizer_step_post_hook

import vocagnolm
from vocagnolm.data.prepare import prepare
from vocagnolm.demo import corpus, students
from vocagnolm.train.run import train

SOURCE = Path(vocagnolm.__file__).parent
Called = set[tuple[str, str]]


class Watch:
    """Functions of the package that are called, in a run and in one of its steps."""

    def __init__(self) -> None:
        self.all: Called = set()
        self.step: Called = set()
        self.optimizer_calls = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            file = Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix()
            called = (file, frame.f_code.co_qualname)
            self.all.add(called)
            if self.optimizer_calls == 3:
                self.step.add(called)

    def optimizer_called(self, *_: Any) -> None:
        self.optimizer_calls += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add_json(parser)
    parser.add_argument("--list", action="store_true", help="also name the files of a step")
    given = parser.parse_args()
    students.one_thread()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        corpus.write_jsonl(out / "corpus.jsonl", corpus.corpus_documents(300))
        students.score(students.TEACHER, out / "corpus.jsonl", out / "store")
        recipe = students.recipe_of(out, "guided", 0, students.Budget(tokens=6 * 1024))
        prepare(recipe)
        hook = register_optimizer_step_post_hook(watch.optimizer_called)
        sys.setprofile(watch)
        try:
            train(recipe, quiet=True)
        finally:
            sys.setprofile(None)
            hook.remove()
    rows = [
        {"of": name, "files": len({file for file, _ in called}), "functions": len(called)}
        for name, called in (("one step", watch.step), ("train", watch.all))
    ]
    report("source that runs", rows, given.json)
    if given.list:
        for file in sorted({file for file, _ in watch.step}):
            names = sorted(name for where, name in watch.step if where == file)
            print(f"{file}: {', '.join(names)}", file=sys.stderr)


if __name__ == "__main__":
    main()
