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
    parser = get_args_parser()
    if "--shutdown-timeout" not in parser.format_help():
        pytest.skip("this torchrun has no --shutdown-timeout: the script asks for torch 2.12")
    given = parser.parse_args(words)
    assert given.rdzv_backend == "c10d" and given.module and given.training_script == "vocagnolm"
    assert given.training_script_args[0] == "train"
    # a launcher that is told to end gives its processes time for a checkpoint, and SLURM more
    (signalled,) = re.findall(r"--signal=TERM@(\d+)", (SLURM / "train.sh").read_text())
    assert 30 < given.shutdown_timeout < int(signalled)


def fake_program(folder: Path, name: str) -> None:
    """Tells what it was called with."""
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s " {name} "$@"\n')
    path.chmod(0o755)


def scored(folder: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    fake_program(folder, "srun")
    return subprocess.run(
        ["bash", str(SLURM / "score.sh"), "a teacher", "corpus", "store"],
        capture_output=True,
        text=True,
        env={"PATH": f"{folder}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "8"} | environment,
    )


@pytest.mark.parametrize(
    ("array", "more", "told"),
    [
        ((3, 1, 8), {}, "3/8"),
        ((0, 0, 31), {}, "1/32"),
        ((31, 0, 31), {}, "32/32"),
        ((5, 5, 8), {}, "5/8"),
        ((3, 3, 17), {"SHARES": "32"}, "3/32"),
        ((0, 0, 17), {"SHARES": "32"}, "1/32"),
        ((17, 17, 17), {"SHARES": "32", "FIRST": "0"}, "18/32"),
    ],
)
def test_every_job_of_the_array_has_its_share(tmp_path, array, more, told):
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")
    done = scored(tmp_path, dict(zip(names, map(str, array), strict=True)) | more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["--share", told]
    assert "--cpus-per-task=8 vocagnolm score" in done.stdout
    assert "--teacher a teacher --corpus corpus --out store" in done.stdout


def test_without_an_array_there_are_no_shares(tmp_path):
    done = scored(tmp_path, {})
    assert done.returncode == 2 and "--array=1-32" in done.stderr and not done.stdout


def test_the_launchers_meet_on_the_first_node(tmp_path):
    fake_program(tmp_path, "srun")
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'n1\\nn2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "41234"}
    environment |= {"SLURM_CPUS_PER_TASK": "64"}
    done = subprocess.run(
        ["bash", str(SLURM / "train.sh"), "recipe.yaml"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "--rdzv_endpoint n1:21234 " in done.stdout and "--cpus-per-task=64 torch" in done.stdout
    assert done.stdout.rstrip().endswith("-m vocagnolm train recipe.yaml")
