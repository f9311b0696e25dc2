"""The scripts of runs/ are what a shell and the program understand."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from command_kit import parse
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "runs").rglob("*.sh"))
SLURM = ROOT / "runs/slurm"


def commands(path: Path, program: str) -> list[list[str]]:
    """Every call of `program` in a script, without its name; variables stay as they are written."""
    found = []
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#") or "..." in line:
            continue
        for match in re.finditer(rf"(?<![\w./-]){program} ([^|;&>]*)", line):
            found.append(shlex.split(match[1]))
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shell_reads_it(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.sh")), ids=lambda path: path.name)
def test_its_commands_parse(path):
    found = commands(path, "vocagnolm")
    assert found
    for words in found:
        parse(words)


def test_torchrun_reads_its_part():
    (words,) = commands(SLURM / "train.sh", "torchrun")
    given = get_args_parser().parse_args(words)
    assert given.rdzv_backend == "c10d" and given.module and given.training_script == "vocagnolm"
    assert given.training_script_args[0] == "train"


def fake_program(folder: Path, name: str) -> None:
    """Tells what it was called with."""
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s " {name} "$@"\n')
    path.chmod(0o755)


@pytest.mark.parametrize(("shares", "told"), [(None, "3/8"), ("32", "3/32")])
def test_every_job_of_the_array_has_its_share(tmp_path, shares, told):
    fake_program(tmp_path, "vocagnolm")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "3"}
    environment |= {"SLURM_ARRAY_TASK_MAX": "8"} | ({"SHARES": shares} if shares else {})
    done = subprocess.run(
        ["bash", str(SLURM / "score.sh"), "a teacher", "corpus", "store"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["--share", told]
    assert "--teacher a teacher --corpus corpus --out store" in done.stdout


def test_the_launchers_meet_on_the_first_node(tmp_path):
    fake_program(tmp_path, "srun")
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'n1\\nn2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "41234"}
    done = subprocess.run(
        ["bash", str(SLURM / "train.sh"), "recipe.yaml"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "--rdzv_endpoint n1:21234 " in done.stdout
    assert done.stdout.rstrip().endswith("-m vocagnolm train recipe.yaml")
