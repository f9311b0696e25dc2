"""The benchmarks for a GPU run from end to end with tiny models on a CPU (`make smoke`): minutes on
a GPU are for measuring."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

TINY = "--shapes smollm2-135m"
RUNS = (
    f"train_gpu.py {TINY} --contestants ours-eager,hf-liger --no-second",
    f"train_profile.py {TINY} --only baseline,micro-4,documents,not-compiled",
    "score_gpu.py --profile",
    "score_gpu.py alternatives",
    "score_gpu.py corpus",
    "write_cpu.py",
    "write_gpu.py",
    "rounds_gpu.py",
    "head_gpu.py --only TinyLlama --rounds 1",
    "train_step_gpu.py",
    "alternatives_rounding.py",  # which needs no GPU, but models that take minutes
)


@pytest.mark.parametrize("command", RUNS)
def test_a_benchmark_runs_on_a_cpu(command):
    script, *options = command.split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options, "--smoke", "--json"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FAILED" not in done.stderr, done.stderr[-2000:]  # of one row: the others go on
    tables = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"title"')]
    rows = [row for table in tables for row in table["rows"]]
    assert rows and not [row for row in rows if "failed" in row]
    if script == "train_profile.py":
        micro = next(row for row in rows if row.get("variant") == "micro-4")
        assert micro["same loss"]
    if script == "head_gpu.py":
        fp8 = next(row for row in rows if row["method"] == "guided, phase 1 in fp8")
        assert 0 <= fp8["selection changed"] < 0.2
    if script == "alternatives_rounding.py":
        for ours, simple in zip(rows[1::3], rows[2::3], strict=True):
            assert ours["format"].startswith("11 bits") and simple["format"].startswith("8 bits")
            assert 0 < 4 * ours["gradient"] < simple["gradient"] < 0.1
