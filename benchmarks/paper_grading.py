"""`--protocol paper` beside the harness that it follows, on the answers of finished evaluations.

    git clone https://github.com/ZubinGou/math-evaluation-harness HARNESS
    vocagnolm evaluate MODEL --protocol paper --out RUN
    python benchmarks/paper_grading.py --harness HARNESS --run RUN [--run RUN2 ...] [--show 20]

Runs in the harness's environment (sympy, antlr4-python3-runtime 4.11, word2number, latex2sympy2,
regex), which cannot be that of math-verify; it reads the runs' files and imports nothing of ours.
"""

import argparse
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

THEIR_NAMES = {"math500": "minerva_math", "sat": "sat_math"}
SECONDS = 3  # the harness's own limit for a comparison


def harness_grade(parser: Any, grader: Any, task: str, record: dict[str, Any]) -> bool:
    """As its `run_execute` and `math_equal_process` do; what takes too long is wrong."""
    gold = re.sub(r"\(.*?\)", "", record["gold"]) if task == "asdiv" else record["gold"]
    output = record["output"].strip()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        found = parser.strip_string(parser.extract_answer(output, THEIR_NAMES.get(task, task)))
        return bool(output) and grader.math_equal(found, parser.strip_string(gold))
    except (TimeoutError, RecursionError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def stop(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--harness", type=Path, required=True)
    options.add_argument("--run", type=Path, action="append", required=True)
    options.add_argument("--show", type=int, default=0, help="answers that are graded otherwise")
    given = options.parse_args()
    sys.path.insert(0, str(given.harness))
    import grader
    import parser

    signal.signal(signal.SIGALRM, stop)
    differ = []
    for path in [p for run in given.run for p in sorted(run.glob("evaluation/outputs/*.jsonl"))]:
        task = path.stem
        counts = {"answers": 0, "right here": 0, "right there": 0, "graded alike": 0}
        # not splitlines: an output may hold U+2028
        for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
            record = json.loads(line)
            theirs = harness_grade(parser, grader, task, record)
            counts["answers"] += 1
            counts["right here"] += record["correct"]
            counts["right there"] += theirs
            counts["graded alike"] += theirs == record["correct"]
            if theirs != record["correct"]:
                differ.append((task, record["output"][-200:], record["gold"], theirs))
        print(json.dumps({"run": str(path.parents[2]), "task": task, **counts}), flush=True)
    for answer in differ[: given.show]:
        print(answer)


if __name__ == "__main__":
    main()
