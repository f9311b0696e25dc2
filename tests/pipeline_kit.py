"""The whole pipeline on a small example, by its commands, each in a forked process."""

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evaluation_kit import ROWS, write_rows
from faults_kit import in_child, tiny_tree, write_recipe
from training_kit import documents, fresh_process, save_tokenizer, write_corpus
from write.write_kit import save_writer, write_prompts

from vocagnolm.base import files


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or the negative number of its signal."""

    code: int
    out: str
    said: str
    """On stderr."""


def command(
    words: list[object], folder: Path, prepare: Callable[[], object] = lambda: None
) -> Ended:
    """Run a command in a forked process, where all is imported already. `prepare` is called there
    before; what it prints stands in `folder` meanwhile."""
    out, said = folder / "stdout.txt", folder / "stderr.txt"

    def work() -> None:
        from vocagnolm.cli import main

        for path, number in ((out, 1), (said, 2)):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        fresh_process()
        warnings.simplefilter("default")  # which are errors in tests
        # a shell that runs the tests in the background lets them ignore the key
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["vocagnolm", *map(str, words)]
        prepare()
        code = 0
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(bool(left.code))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    _, status = os.waitpid(in_child(work), 0)
    return Ended(os.waitstatus_to_exitcode(status), out.read_text(), said.read_text())


def import_everything() -> None:
    """So that forked processes need not."""
    import vocagnolm.evaluate.run
    import vocagnolm.generate
    import vocagnolm.report.view
    import vocagnolm.score
    import vocagnolm.train.check
    import vocagnolm.train.run  # noqa: F401


def make_material(folder: Path) -> Path:
    """A teacher that writes, a student's tokenizer, a corpus, prompts and questions."""
    save_writer(folder / "teacher", "pieces")
    save_tokenizer(folder / "student", kind="bytes")
    write_corpus(folder / "corpus.jsonl", documents(12))
    write_prompts(folder / "prompts.jsonl", 5)
    write_rows(folder / "questions", "gsm8k/test.jsonl", ROWS["gsm8k/test.jsonl"][:3])
    return folder


def recipe_tree(material: Path, home: Path) -> dict:
    return tiny_tree(
        material,
        home / "run",
        store={"path": str(home / "store")},
        objective={"method": "distill", "mix": 0.5},
        data={"blocks": str(home / "blocks"), "block_size": 32, "part_documents": 5},
    )


def words_of(name: str, material: Path, home: Path) -> list[object]:
    """A command of the pipeline, which writes below `home`."""
    recipe = home / "recipe.yaml"
    if not recipe.exists():
        home.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, recipe_tree(material, home))
    teacher: list[object] = ["--teacher", material / "teacher", "--device", "cpu", "--threads", 1]
    asked = ["--device", "cpu", "--batch-size", 2, "--max-new-tokens", 6]
    return {
        "score": [
            *("score", *teacher, "--corpus", material / "corpus.jsonl", "--out", home / "store"),
            *("--shard-documents", 5, "--alternatives", 2, "--context", 64),
        ],
        "write": [
            *("write", *teacher, "--prompts", material / "prompts.jsonl", "--out"),
            *(home / "written", "--max-new-tokens", 8, "--alternatives", 2, "--shard-prompts", 2),
        ],
        "prepare": ["prepare", recipe, "--workers", 1],
        "train": ["train", recipe, "--quiet"],
        "evaluate": [
            *("evaluate", material / "teacher", "--tasks", "gsm8k", "--out", home / "evaluated"),
            *("--benchmarks", material / "questions", "--text", material / "corpus.jsonl", *asked),
        ],
    }[name]


PIPELINE = ("score", "write", "prepare", "train", "evaluate")
MADE = {
    "score": "store",
    "write": "written",
    "prepare": "blocks",
    "train": "run",
    "evaluate": "evaluated",
}
"""The folder that a command makes."""


NEEDED = {"prepare": ("store",), "train": ("store", "blocks")}
"""The folders that a command reads."""


def noting(path: Path) -> None:
    """Write every step of writing into a file; the cache is beside the results."""
    os.environ["VOCAGNOLM_CACHE"] = str(path.parent / "home" / "cache")
    file = open(path, "a", buffering=1)  # noqa: SIM115  (until the process ends)
    files.reached = lambda point, place: file.write(f"{point}\t{place.name}\n")


def whole_pipeline(material: Path, home: Path) -> Path:
    """All commands, and beside `home` the steps of writing of each, in NAME.steps."""
    for name in PIPELINE:
        steps = home.parent / f"{name}.steps"
        ended = command(words_of(name, material, home), home.parent, partial(noting, steps))
        assert ended.code == 0, (name, ended.said)
    return home


def home_before(name: str, whole: Path, home: Path) -> Path:
    """A home with what a command reads."""
    for folder in NEEDED.get(name, ()):
        shutil.copytree(whole / folder, home / folder)
    return home
