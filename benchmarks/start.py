"""What the command line takes before it works: processor seconds and modules of every command.

    python benchmarks/start.py [--student S --teacher T]

Every command runs twice in a process of its own, with a cache of its own: the first time
transformers is asked what it makes of a tokenizer and a configuration, the second time that is
known. Without tokenizers, the demo's small ones. Processor time: it holds on a busy machine.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from record import add_json, keep

import vocagnolm
from vocagnolm.report.comparison import SAMPLE

SHIPPED = Path(vocagnolm.__file__).parent / "demo"
MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
HEAVY = ("torch", "transformers", "datasets", "pyarrow", "scipy", "numpy", "tokenizers", "rich")
CODE = """
import sys
from vocagnolm import cli
sys.argv = ["vocagnolm", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("loaded", *({heavy} & set(sys.modules)), file=sys.stderr)
"""


def measure(arguments: list[str], cache: Path) -> tuple[float, str]:
    """Processor seconds, and which of the heavy packages were loaded."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=set(HEAVY)), *arguments],
        env={**os.environ, "VOCAGNOLM_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    loaded = next(
        line for line in reversed(done.stderr.splitlines()) if line.startswith("loaded")
    ).split()[1:]
    return seconds, ", ".join(name for name in HEAVY if name in loaded)


def write_recipe(folder: Path, tokenizer: str) -> str:
    """A student without weights, and a corpus of a page."""
    corpus = "".join(json.dumps({"text": text}) + "\n" for text in SAMPLE)
    (folder / "corpus.jsonl").write_text(corpus, "utf-8")
    recipe = {
        "student": {"config": {**MODEL, "vocab_size": 160_000}, "tokenizer": tokenizer},
        "corpus": {"files": [str(folder / "corpus.jsonl")]},
        "data": {"blocks": str(folder / "blocks"), "block_size": 32, "eos": None},
        "objective": {"method": "cpt"},
        "train": {"tokens": 256, "batch_blocks": 8, "device": "cpu"},
        "run": {"folder": str(folder / "run"), "save_every": 0},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), "utf-8")
    return str(folder / "recipe.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student", default=str(SHIPPED / "start"))
    parser.add_argument("--teacher", default=str(SHIPPED / "teacher"))
    add_json(parser)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(folder, given.student)
        pair = ["--student", given.student, "--teacher", given.teacher]
        commands = [
            ["--help"],
            ["align", *pair, "--text", "two words"],
            ["compare", *pair],
            ["check", recipe],
            ["prepare", recipe],
            ["train", recipe, "--quiet"],
        ]
        print(f"{'command':10} {'first':>8} {'again':>8}  loaded, the second time")
        for command in commands:
            first, _ = measure(command, folder / "cache")
            again, loaded = measure(command, folder / "cache")
            print(f"{command[0]:10} {first:8.2f} {again:8.2f}  {loaded or 'none'}")
            rows.append({"command": command[0], "first": first, "again": again})
    keep(given.json, "processor seconds of whole commands", rows)


if __name__ == "__main__":
    main()
