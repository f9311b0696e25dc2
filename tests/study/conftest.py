import copy
from collections.abc import Iterator
from functools import cache

import pytest

from vocagnolm.recipe import schema


@pytest.fixture(scope="session", autouse=True)
def _a_file_is_parsed_once() -> Iterator[None]:
    """Every study extends the same large file, and parsing it is what takes time."""
    parsed = cache(schema.parse_yaml)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "parse_yaml", lambda text: copy.deepcopy(parsed(text)))
        yield
