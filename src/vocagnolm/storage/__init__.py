"""Storage of stores and blocks: a local folder, or a bucket behind an address.

A storage offers a few steps, each of which happens completely or not at all. The protocols of
stores and blocks consist only of these steps and are the same for folders and buckets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vocagnolm.base.files import address_of, local_path
from vocagnolm.errors import UsageError
from vocagnolm.storage.backend import HUB_SCHEME, Folder, Storage, hub_folder
from vocagnolm.storage.bucket import BUCKET_SCHEMES, Bucket

__all__ = [
    "BACKENDS",
    "Backend",
    "Bucket",
    "Folder",
    "Storage",
    "require_storage",
    "scheme_of",
    "storage_of",
]


@dataclass(frozen=True)
class Backend:
    """The storage for addresses with one scheme."""

    open: Callable[[str], Storage]
    """The storage at an address."""
    writable: bool = True


BACKENDS: dict[str, Backend] = {
    **{scheme: Backend(Bucket) for scheme in BUCKET_SCHEMES},
    HUB_SCHEME: Backend(lambda address: Folder(hub_folder(address)), writable=False),
}
"""By scheme: `s3` of `s3://bucket/x`. What has no scheme is a folder of this machine."""


def scheme_of(path: str | Path) -> str | None:
    """`s3` of `s3://bucket/x`; None for a local path."""
    address = address_of(path)
    return None if address is None else address.partition(":")[0].lower()


def require_storage(path: str | Path, *, hub: bool = False) -> None:
    """Refuse an address that is not supported. `hub`: also accept a dataset of the hub."""
    scheme = scheme_of(path)
    known = [name for name, backend in BACKENDS.items() if backend.writable or hub]
    if scheme is not None and scheme not in known:
        raise UsageError(
            f"{address_of(path)} has a scheme that is not supported here. Use a local folder or "
            f"{', '.join(f'{name}://' for name in known)}."
        )


def storage_of(path: str | Path) -> Storage:
    """A bucket for an address, the copy that `huggingface_hub` keeps for a dataset of the hub, or a
    folder for anything else."""
    require_storage(path, hub=True)
    address = address_of(path)
    if address is None:
        return Folder(local_path(path))
    return BACKENDS[scheme_of(path) or ""].open(address)
