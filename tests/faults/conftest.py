from pathlib import Path

import pytest
from training_kit import make_lab, recipe_dict

from vocagnolm.data.prepare import prepare
from vocagnolm.recipe import recipe_from_dict


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Path:
    """Tokenizers, corpus, store and blocks. Tests that break something work on copies."""
    folder = tmp_path_factory.mktemp("faults")
    make_lab(folder, 20)
    prepare(recipe_from_dict(recipe_dict(folder)))
    return folder
