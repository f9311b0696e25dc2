"""Less to import."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def left_out(*packages: str) -> Iterator[None]:
    """transformers imports packages because they are installed. Those named here are not found
    inside the block; whoever asks for one later gets it."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
