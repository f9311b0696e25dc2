import copy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from vocagnolm.recipe import schema
from vocagnolm_studies import design

sys.path.append(str(Path(__file__).parents[2] / "research"))  # scripts beside the source


@pytest.fixture(scope="session", autouse=True)
def _a_file_is_parsed_once() -> Iterator[None]:
    """A study is merged from files that others share: parsing them is what takes time."""
    parsed = cache(schema.parse_yaml)
    with pytest.MonkeyPatch.context() as patch:
        for module in (schema, design):
            patch.setattr(module, "parse_yaml", lambda text: copy.deepcopy(parsed(text)))
        yield
