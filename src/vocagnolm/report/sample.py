"""The selection sample: some blocks of a run with every number that decided their tokens.

`tokens.json` in a run folder holds `{"format": 2, "passages": [...], "selection": {...},
"preflight": [...]}` with the fields of `page_data`; `report` shows it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vocagnolm.errors import VocagnolmError
from vocagnolm.files import parse_json, write_text
from vocagnolm.report.page_data import (
    FORMAT_VERSION,
    Passage,
    Preflight,
    Selection,
    TeacherRow,
    TokenRow,
    plain,
)

SAMPLE_FILE = "tokens.json"


class SampleError(VocagnolmError):
    """A selection sample cannot be read or made."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    passages: list[Passage] = field(default_factory=list)
    selection: Selection | None = None
    preflight: list[Preflight] = field(default_factory=list)


def save_sample(sample: Sample, run: str | Path) -> Path:
    """Write `tokens.json` into a run folder, whole or not at all."""
    path = Path(run) / SAMPLE_FILE
    content = json.dumps({"format": FORMAT_VERSION, **plain(sample)}, separators=(",", ":"))
    write_text(path, content)
    return path


def has_sample(run: str | Path) -> bool:
    """Whether there is a sample of today's form; older ones showed another rule's selection."""
    path = Path(run) / SAMPLE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        return True  # damaged: `read_sample` says so
    older = isinstance(content, dict) and isinstance(content.get("format"), int)
    return not (older and content["format"] < FORMAT_VERSION)


def read_sample(run: str | Path) -> Sample:
    path = Path(run) / SAMPLE_FILE
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT_VERSION:
            raise SampleError(
                f"{path} has format {content.get('format')!r}, this program reads "
                f"{FORMAT_VERSION}. Remove it: `vocagnolm report --html` makes it again"
            )
        return Sample(
            passages=[_passage(entry) for entry in content.get("passages", [])],
            selection=Selection(**content["selection"]) if "selection" in content else None,
            preflight=[Preflight(**entry) for entry in content.get("preflight", [])],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SampleError(
            f"{path} is no selection sample ({error}). Remove it and make it again"
        ) from None


def _passage(entry: dict[str, Any]) -> Passage:
    rows = {
        "student": TokenRow(**entry["student"]),
        "teachers": [TeacherRow(**row) for row in entry.get("teachers", [])],
    }
    return Passage(**{**entry, **rows})
