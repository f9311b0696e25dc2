"""Fixtures of the evaluation tests."""

from pathlib import Path

import pytest
from evaluation_kit import ROWS, make_model, write_rows


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, rows in ROWS.items():
        write_rows(folder, name, rows)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), seed=1)
