"""What a store is (`inspect`) and whether it can be trusted (`verify`)."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.errors import StoreError
from vocagnolm.files import file_digest, local_path
from vocagnolm.store.format import (
    FORMAT_VERSION,
    HISTOGRAM_STEP_NATS,
    MANIFEST_FILE,
    PARTIAL_MANIFEST_FILE,
    SHARD_FOLDER,
    ShardFile,
    add_statistics,
    count_reasons,
    identity_digest,
    open_shard,
    read_manifest,
    shard_name,
)
from vocagnolm.store.reader import require_complete
from vocagnolm.store.records import read_record

MOST_SKIPPED_SHOWN = 100


def inspect_store(path: str | Path) -> dict[str, Any]:
    """What the store is, from its manifest and the shards' headers; complete or not."""
    path = local_path(path)
    complete = (path / MANIFEST_FILE).exists()
    if not complete and not (path / PARTIAL_MANIFEST_FILE).exists():
        require_complete(path)  # raises with the right message
    try:
        manifest = read_manifest(path, partial=not complete)
    except FileNotFoundError:  # completed at this moment
        return inspect_store(path)
    files = sorted((path / SHARD_FOLDER).glob("*.safetensors"))
    there = {*files}
    shards = [open_shard(file) for file in files]
    totals = add_statistics([shard.about["statistics"] for shard in shards])
    skipped = [entry for shard in shards for entry in shard.about["skipped"]]
    reasons = count_reasons(entry["reason"] for entry in skipped)
    file_bytes = sum(file.stat().st_size for file in files)
    identity = manifest["identity"]
    scored, scored_bytes = totals["scored_tokens"], totals["scored_bytes"]
    return {
        "path": str(path),
        "complete": complete,
        "format_version": FORMAT_VERSION,
        "documents": totals["documents"],
        "tokens": totals["tokens"],
        "bytes": totals["bytes"],
        "scored_tokens": scored,
        "mean_nll": totals["nll_sum"] / scored if scored else None,
        "bits_per_byte": totals["nll_sum"] / math.log(2) / scored_bytes if scored_bytes else None,
        "skipped": totals["skipped"],
        "skipped_reasons": reasons,
        "skipped_documents": skipped[:MOST_SKIPPED_SHOWN],
        "nonfinite": totals["nonfinite"],
        "shards": len(shards),
        "shards_expected": manifest["shard_count"],
        "missing_shards": _ranges(
            n for n in range(manifest["shard_count"]) if path / shard_name(n) not in there
        ),
        "devices": _devices(path, manifest),
        "file_bytes": file_bytes,
        "bytes_per_token": file_bytes / totals["tokens"] if totals["tokens"] else None,
        "histogram": {"step_nats": HISTOGRAM_STEP_NATS, "counts": totals["histogram"]},
        **identity,
    }


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """`[first, last]` of every run of numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def _devices(path: Path, manifest: dict[str, Any]) -> dict[str, int]:
    """How many shards each GPU has scored, as far as it is known."""
    if "shards" in manifest:
        named = [entry.get("device") for entry in manifest["shards"]]
    else:
        digest = identity_digest(manifest["identity"])
        records = (read_record(path, n, digest) for n in range(manifest["shard_count"]))
        named = [record.device for record in records if record is not None]
    return dict(Counter(name for name in named if name is not None))


def verify_store(path: str | Path) -> list[str]:
    """Everything that is wrong with the store; empty when it is whole. Reads every byte."""
    path = local_path(path)
    require_complete(path)
    manifest = read_manifest(path)
    digest = identity_digest(manifest["identity"])
    problems: list[str] = []
    expected_first = 0
    seen_files = set()
    for number, entry in enumerate(manifest["shards"]):
        seen_files.add(entry["file"])
        try:
            shard = open_shard(path / entry["file"])
        except StoreError as error:
            problems.append(str(error))
            expected_first = entry["first_document"] + entry["document_span"]
            continue
        found = [*_shard_problems(shard, entry, number, digest, expected_first)]
        problems += [f"{entry['file']}: {problem}" for problem in found]
        expected_first = entry["first_document"] + entry["document_span"]
    if expected_first != manifest["identity"]["corpus"]["documents"]:
        problems.append(
            f"{MANIFEST_FILE}: the shards cover {expected_first:,} documents, the corpus has "
            f"{manifest['identity']['corpus']['documents']:,}"
        )
    parts = [{**entry, "histogram": [0] * 41} for entry in manifest["shards"]]
    totals = {k: v for k, v in add_statistics(parts).items() if k != "histogram"}
    if any(manifest["totals"][key] != value for key, value in totals.items()):
        problems.append(f"{MANIFEST_FILE}: the totals do not add up")
    for file in sorted((path / SHARD_FOLDER).glob("*.safetensors")):
        if f"{SHARD_FOLDER}/{file.name}" not in seen_files:
            problems.append(f"{SHARD_FOLDER}/{file.name}: not in the manifest")
    return problems


def _shard_problems(
    shard: ShardFile, entry: dict[str, Any], number: int, digest: str, expected_first: int
) -> list[str]:
    if file_digest(shard.path) != entry["sha256"]:
        return ["its bytes do not match the checksum in the manifest"]
    problems = []
    about, columns = shard.about, shard.columns
    if (damage := shard.damage()) is not None:
        problems.append(damage)
    if about["identity"] != digest or about["shard"] != number:
        problems.append("it belongs to another run or place")
    if about["first_document"] != expected_first:
        problems.append(f"it starts at document {about['first_document']}, not {expected_first}")
    if int(columns["token_count"].astype(np.int64).sum()) != len(columns["nll"]):
        problems.append("its token counts do not add up to its tokens")
    indices = [*columns["document_index"].tolist(), *(e["document"] for e in about["skipped"])]
    wanted = range(expected_first, expected_first + about["document_span"])
    if len(set(indices)) != len(indices):
        problems.append("a document appears twice")
    elif sorted(indices) != list(wanted):
        problems.append("documents are missing")
    return problems
