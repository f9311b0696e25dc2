"""Rows that hold one document each, without asking the device whether they do."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from transformers import masking_utils

_KNOWN = ContextVar("rows hold one document each", default=False)
_SEARCH = "find_packed_sequence_indices"


@contextlib.contextmanager
def one_document_a_row() -> Iterator[None]:
    """transformers looks through the positions of every batch for a second document, also through
    those that it has made itself, and the host waits for the device's answer before it can launch
    the first layer. Inside this context the answer is known: there is none."""
    _teach_transformers()
    token = _KNOWN.set(True)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@functools.cache
def _teach_transformers() -> None:
    search: Any = getattr(masking_utils, _SEARCH, None)
    if search is None:  # another version, which has its own way
        return

    @functools.wraps(search)
    def unless_known(position_ids: Any) -> Any:
        return None if _KNOWN.get() else search(position_ids)

    setattr(masking_utils, _SEARCH, unless_known)
