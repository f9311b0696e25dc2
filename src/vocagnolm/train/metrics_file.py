"""`metrics.jsonl`: one JSON object a step. No torch."""

import json
from pathlib import Path
from typing import Any

from vocagnolm.files import append_lines, parse_json, write_text
from vocagnolm.train.names import with_current_names


class MetricsFile:
    """`metrics.jsonl`: appended a line a step, cut back to the checkpoint on resume."""

    def __init__(self, path: Path):
        self.path = path

    def resume_at(self, step: int) -> None:
        """Drop what was written after `step`, and a line that a kill left half-written."""
        if not self.path.exists():
            return
        kept = [json.dumps(r) + "\n" for r in read_metrics(self.path) if r["step"] <= step]
        write_text(self.path, "".join(kept))

    def append(self, record: dict[str, Any]) -> None:
        append_lines(self.path, json.dumps(record) + "\n", sync=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; what is no record (a last line cut short) ends it."""
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    for line in path.read_bytes().splitlines():
        try:
            record = parse_json(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        records.append(with_current_names(record))
    return records
