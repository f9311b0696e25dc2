"""What a store is (`inspect`) and whether it can be trusted (`verify`)."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.errors import StoreError
from vocagnolm.files import json_digest
from vocagnolm.storage import Place, place_of
from vocagnolm.store.format import (
    HISTOGRAM_STEP_NATS,
    MANIFEST_FILE,
    PARTIAL_MANIFEST_FILE,
    RECORD_FOLDER,
    SHARD_FOLDER,
    VOCABULARY_FILE,
    ShardFile,
    add_statistics,
    count_reasons,
    read_about,
    read_manifest,
    read_records,
    read_shard,
    shard_name,
    shard_names,
    vocabulary_damage,
)
from vocagnolm.store.reader import require_complete

MOST_SKIPPED_SHOWN = 100
_THREADS = 16


def inspect_store(path: str | Path) -> dict[str, Any]:
    """What the store is, from its manifest and the shards' headers; complete or not."""
    place = place_of(path)
    found = place.files(SHARD_FOLDER, RECORD_FOLDER)
    complete = MANIFEST_FILE in found
    if not complete and PARTIAL_MANIFEST_FILE not in found:
        require_complete(place)  # raises with the right message
    try:
        manifest = read_manifest(place, partial=not complete)
    except FileNotFoundError:  # completed at this moment
        return inspect_store(path)
    names = shard_names(found)
    with ThreadPoolExecutor(_THREADS) as pool:
        shards = list(pool.map(lambda name: read_about(place, name, found[name]), names))
    totals = add_statistics([about["statistics"] for about in shards])
    skipped = [entry for about in shards for entry in about["skipped"]]
    reasons = count_reasons(entry["reason"] for entry in skipped)
    file_bytes = sum(found[name] for name in (*names, VOCABULARY_FILE) if name in found)
    identity = manifest["identity"]
    scored, scored_bytes = totals["scored_tokens"], totals["scored_bytes"]
    return {
        "path": str(path),
        "complete": complete,
        "format_version": manifest["format_version"],
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
            n for n in range(manifest["shard_count"]) if shard_name(n) not in found
        ),
        "devices": _devices(place, manifest, found),
        "file_bytes": file_bytes,
        "bytes_per_token": file_bytes / totals["tokens"] if totals["tokens"] else None,
        "histogram": {"step_nats": HISTOGRAM_STEP_NATS, "counts": totals["histogram"]},
        **identity,
        **_alternatives(identity, totals),
    }


def _alternatives(identity: dict[str, Any], totals: dict[str, Any]) -> dict[str, Any]:
    """Beside how many there are: of every rank the mean probability, and how often it is the token
    that follows."""
    if "alternatives" not in identity:
        return {}
    tokens = max(totals.get("alternative_tokens", 0), 1)
    shares = {
        name: [value / tokens for value in totals.get(f"alternative_{name}", [])]
        for name in ("mass", "hits")
    }
    return {"alternatives": {**identity["alternatives"], **shares}}


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """`[first, last]` of every run of numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def _devices(place: Place, manifest: dict[str, Any], found: dict[str, int]) -> dict[str, int]:
    """How many shards each GPU has scored, as far as it is known."""
    if "shards" in manifest:
        named = [entry.get("device") for entry in manifest["shards"]]
    else:
        digest = json_digest(manifest["identity"])
        records = read_records(place, found, manifest["shard_count"], digest)
        named = [record.get("device") for record in records.values()]
    return dict(Counter(name for name in named if name is not None))


def verify_store(path: str | Path) -> list[str]:
    """Everything that is wrong with the store; empty when it is whole. Reads every byte."""
    place = place_of(path)
    require_complete(place)
    manifest = read_manifest(place)
    digest = json_digest(manifest["identity"])
    problems: list[str] = []
    expected_first = 0
    seen_files = set()
    for number, entry in enumerate(manifest["shards"]):
        seen_files.add(entry["file"])
        try:
            shard = read_shard(place, entry["file"])
        except StoreError as error:
            problems.append(str(error))
            expected_first = entry["first_document"] + entry["document_span"]
            continue
        count = manifest["identity"].get("alternatives", {}).get("count", 0)
        found = [*_shard_problems(shard, entry, number, digest, expected_first, count)]
        problems += [f"{entry['file']}: {problem}" for problem in found]
        expected_first = entry["first_document"] + entry["document_span"]
    if expected_first != manifest["identity"]["corpus"]["documents"]:
        problems.append(
            f"{MANIFEST_FILE}: the shards cover {expected_first:,} documents, the corpus has "
            f"{manifest['identity']['corpus']['documents']:,}"
        )
    totals = add_statistics(manifest["shards"])
    if any(manifest["totals"][key] != value for key, value in totals.items()):
        problems.append(f"{MANIFEST_FILE}: the totals do not add up")
    for name in shard_names(place.files(SHARD_FOLDER)):
        if name not in seen_files:
            problems.append(f"{name}: not in the manifest")
    if "alternatives" in manifest["identity"]:
        try:
            damage = vocabulary_damage(place.read(VOCABULARY_FILE), manifest["identity"])
        except FileNotFoundError:
            damage = "it is missing"
        problems += [f"{VOCABULARY_FILE}: {damage}"] if damage else []
    return problems


def _shard_problems(
    shard: ShardFile,
    entry: dict[str, Any],
    number: int,
    digest: str,
    expected_first: int,
    alternatives: int,
) -> list[str]:
    if hashlib.sha256(shard.content).hexdigest() != entry["sha256"]:
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
    if "alternatives" in columns or alternatives:
        shape = columns["alternatives"].shape if "alternatives" in columns else "none"
        if shape != (len(columns["nll"]), alternatives):
            problems.append(f"it has alternatives {shape}, {alternatives} a token are expected")
    indices = [*columns["document_index"].tolist(), *(e["document"] for e in about["skipped"])]
    wanted = range(expected_first, expected_first + about["document_span"])
    if len(set(indices)) != len(indices):
        problems.append("a document appears twice")
    elif sorted(indices) != list(wanted):
        problems.append("documents are missing")
    return problems
