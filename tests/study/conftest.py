import copy
from collections.abc import Iterator
from functools import cache

import pytest

from vocagnolm.recipe import schema
from vocagnolm_studies import design


@pytest.fixture(scope="session", autouse=True)
def _a_file_is_parsed_once() -> Iterator[None]:
    """To load one study parses all, and that is what takes time."""
    parsed = cache(schema.parse_yaml)
    with pytest.MonkeyPatch.context() as patch:
        for module in (schema, design):
            patch.setattr(module, "parse_yaml", lambda text: copy.deepcopy(parsed(text)))
        yield
