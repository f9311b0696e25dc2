"""How the runs of a study answer: length, and how many outputs keep to the form of the examples.

    python runs/study_answers.py FOLDER

FOLDER is a study's folder whose table has been made (`vocagnolm study run NAME --table` leaves the
grades beside the answers). A model that has forgotten to say "The answer is ..." loses points of
another kind than one that says the wrong number: the last column is the accuracy of those that say
it.
"""

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

FORM = "answer is"


def measured(folder: Path) -> dict[str, float]:
    """Averages over tasks, as the study's accuracy is."""
    grades = json.loads((folder / "grades.json").read_text("utf-8"))
    length, in_form, right_in_form = (defaultdict[str, list[int]](list) for _ in range(3))
    with gzip.open(folder / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            answer = json.loads(line)
            task, says_it = answer["task"], FORM in answer["output"]
            length[task].append(len(answer["output"]))
            in_form[task].append(says_it)
            if says_it:
                right_in_form[task].append(grades[task][str(answer["index"])])

    def average(values: dict[str, list[int]]) -> float:
        return sum(sum(v) / len(v) for v in values.values()) / len(values)

    return {
        "characters": average(length),
        "in form": 100 * average(in_form),
        "right of these": 100 * average(right_in_form),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for path in sorted((parser.parse_args().folder / "runs").glob("*/grades.json")):
        rows[path.parent.name.rpartition("-s")[0]].append(measured(path.parent))
    print("| row | runs | characters | in form, % | right of these, % |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row, found in rows.items():
        mean = {key: sum(one[key] for one in found) / len(found) for key in found[0]}
        print(
            f"| {row} | {len(found)} | {mean['characters']:.0f} | {mean['in form']:.1f} "
            f"| {mean['right of these']:.2f} |"
        )


if __name__ == "__main__":
    main()
