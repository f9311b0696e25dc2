from pathlib import Path

import pytest
from pipeline_kit import import_everything, make_material, whole_pipeline
from training_kit import make_lab, recipe_dict

from vocagnolm.data.prepare import prepare
from vocagnolm.recipe import recipe_from_dict


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """What the commands of the whole pipeline read."""
    import_everything()
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def whole(material, tmp_path_factory) -> Path:
    """The whole pipeline without a fault."""
    return whole_pipeline(material, tmp_path_factory.mktemp("whole") / "home")


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Path:
    """Tokenizers, corpus, store and blocks. Tests that break something work on copies."""
    folder = tmp_path_factory.mktemp("faults")
    make_lab(folder, 20)
    prepare(recipe_from_dict(recipe_dict(folder)))
    return folder
