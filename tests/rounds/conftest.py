from pathlib import Path

import pytest
from rounds.rounds_kit import make_rounds_lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds")
    make_rounds_lab(folder)
    return folder
