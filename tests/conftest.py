"""Nothing in the tests reaches the network; whole folders and files of slow tests are marked."""

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TESTS = Path(__file__).parent
# they start processes, train or open a browser in nearly every test
SLOW = (
    "faults",
    "evaluate/test_run.py",
    "model/test_architectures.py",
    "report/test_browser.py",
    "score/test_score_crash.py",
    "score/test_score_cli.py",
    "study/test_study.py",
    "study/test_tuning.py",
    "train/test_processes.py",
    "train/test_resume.py",
    "train/test_trainer.py",
    "test_paper.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(TESTS / name) for name in SLOW):
            item.add_marker(pytest.mark.slow)
