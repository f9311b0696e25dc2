"""*Finish*, the last of three verbs: every shard is there, and the store becomes complete."""

import contextlib
from typing import Any

from vocagnolm.errors import BusyError, ScoreError, StoreError
from vocagnolm.score.plan import Plan, remove_plan
from vocagnolm.score.share import Share
from vocagnolm.store.check import inspect_store
from vocagnolm.store.writer import StoreWriter, store_lock


def finish(plan: Plan, writer: StoreWriter) -> dict[str, Any]:
    """The process that holds the store for itself completes it. Returns what the store is now."""
    plan.corpus.require_unchanged()
    _complete(writer)
    return _inspected(plan)


def finish_share(
    plan: Plan, writer: StoreWriter, share: Share, scored: bool
) -> tuple[list[int], dict[str, Any]]:
    """Complete the store if nothing is missing and nobody else is at work on it; otherwise the
    last of them will. The shards that are missing, and what the store is now."""
    plan.corpus.require_unchanged()
    if absent := writer.absent_shards():
        return absent, _inspected(plan)
    with contextlib.suppress(BusyError), store_lock(writer.path):
        if writer.completed_by_others or (writer.was_complete and not scored):
            _tidy(writer)
        else:
            _require_whole(writer, share)
            _complete(writer)
    return [], _inspected(plan)


def _require_whole(writer: StoreWriter, share: Share) -> None:
    states = [writer.has_shard(number) for number in range(writer.shard_count)]
    if damaged := [number for number, (whole, _) in enumerate(states) if not whole]:
        raise StoreError(
            f"{states[damaged[0]][1]} Run the shares "
            f"{', '.join(share.of_shards(damaged))} again, or `score` without --share: "
            "what is damaged is scored again."
        )


def _complete(writer: StoreWriter) -> None:
    writer.finish()
    _tidy(writer)


def _tidy(writer: StoreWriter) -> None:
    remove_plan(writer.path)
    writer.tidy()


def _inspected(plan: Plan) -> dict[str, Any]:
    summary = inspect_store(plan.out)
    if summary["complete"] and summary["documents"] == 0:
        first = summary["skipped_documents"][0]
        raise ScoreError(
            f"none of the {len(plan.corpus):,} documents could be scored; the first: "
            f"{first['place']}: {first['reason']}."
        )
    return summary
