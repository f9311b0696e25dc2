"""What the measures of a step were once called. No torch."""

from typing import Any

# before 0.2.0 -> now, in metrics.jsonl: runs of that time stay readable
_BEFORE = {"loss_selected": "nll_kept", "loss_all": "nll_all", "selected_share": "kept_share"}


def with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    return {_BEFORE.get(name, name): value for name, value in record.items()}
