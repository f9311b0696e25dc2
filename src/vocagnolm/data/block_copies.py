"""Blocks at an address: made in a local folder and uploaded, copied to a local folder to be
read."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vocagnolm.data.blocks import MANIFEST, Blocks, block_count, read_manifest
from vocagnolm.data.identity import blocks_place
from vocagnolm.data.packing import Bins
from vocagnolm.errors import BlocksError
from vocagnolm.files import json_bytes, json_digest, move_folder, parse_json
from vocagnolm.recipe import Recipe
from vocagnolm.storage import Folder, Place
from vocagnolm.storage.copies import Wanted, cache_folder, copy_files, tell

SETTINGS = "settings.json"
_THREADS = 8


def local_blocks(recipe: Recipe) -> Path:
    """The folder to read the recipe's blocks from. Those at an address are copied to `data.cache`,
    by one process of a machine while the others wait, and found there the next time."""
    place = blocks_place(recipe)
    if isinstance(place, Folder):
        return place.path
    manifest = read_manifest(place)
    folder = _copy_folder(recipe, manifest["fingerprint"])
    parts = [
        Wanted(part["name"], part.get("bytes"), part.get("sha256")) for part in manifest["parts"]
    ]
    mend = "Remove it there and run `vocagnolm prepare` again: it makes what is missing."
    copy_files(place, parts, folder, mend)
    Folder(folder).create(MANIFEST, json_bytes(manifest))
    return folder


def making_folder(recipe: Recipe, place: Place) -> Path:
    """Where blocks are made: their own folder, or one of this machine for those of a bucket."""
    if isinstance(place, Folder):
        return place.path
    return _cache(recipe) / f"making-{json_digest(str(place))[:32]}"


def _copy_folder(recipe: Recipe, fingerprint: str) -> Path:
    return _cache(recipe) / fingerprint[:32]


def _cache(recipe: Recipe) -> Path:
    return Path(recipe.data.cache) if recipe.data.cache else cache_folder() / "blocks"


def uploaded(place: Place, settings: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The manifest of the blocks in a bucket, and whether all their parts are there. Refuses a
    place that holds something else."""
    found = place.files()
    if MANIFEST in found:
        manifest = read_manifest(place)
        sizes = [(part["name"], part.get("bytes")) for part in manifest["parts"]]
        whole = all(name in found and size in (None, found[name]) for name, size in sizes)
        return manifest, whole
    if SETTINGS in found:
        _refuse_other_settings(place, settings)
    elif found:
        raise BlocksError(
            f"{place} is not empty and holds no blocks. Choose another place for data.blocks."
        )
    return None, False


def upload(recipe: Recipe, folder: Path, place: Place, manifest: dict[str, Any]) -> None:
    """Settings first, which make the place ours; then the parts, the manifest last. The folder
    becomes the local copy of what was uploaded."""
    settings = manifest["settings"]
    if not place.create(SETTINGS, json_bytes(settings)):
        _refuse_other_settings(place, settings)
    found = place.files()
    parts = [part for part in manifest["parts"] if found.get(part["name"]) != part["bytes"]]
    total, done = sum(part["bytes"] for part in parts), 0

    def send(part: dict[str, Any]) -> int:
        place.put(part["name"], (folder / part["name"]).read_bytes())
        return int(part["bytes"])

    with ThreadPoolExecutor(_THREADS) as pool:
        for size in pool.map(send, parts):
            done += size
            tell(f"{folder} to {place}", folder, done, total)
    if not place.create(MANIFEST, json_bytes(manifest)):
        place.put(MANIFEST, json_bytes(manifest))
    move_folder(folder, _copy_folder(recipe, manifest["fingerprint"]))


def _refuse_other_settings(place: Place, settings: Mapping[str, Any]) -> None:
    try:
        found = parse_json(bytes(place.read(SETTINGS)))
    except ValueError:
        found = None
    if found != settings:
        raise BlocksError(
            f"{place} holds blocks that are being made with other settings. Choose another place "
            "for data.blocks, or give the settings back."
        )


def opened_count(recipe: Recipe, manifest: dict[str, Any]) -> tuple[int, Bins | None]:
    """How many blocks the recipe's folder gives; of conversations also how they fill them, for
    which the blocks are read."""
    size = recipe.data.block_size
    if not manifest["settings"].get("conversations"):
        return block_count(manifest["tokens"], size), None
    blocks = Blocks(local_blocks(recipe), size)
    return len(blocks), blocks.bins
