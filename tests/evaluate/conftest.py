"""Fixtures of the evaluation tests."""

import json
import random
from pathlib import Path

import pytest
from evaluation_kit import QUICK, ROWS, make_model, write_rows

from vocagnolm.evaluate import evaluate


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


@pytest.fixture(scope="session")
def finished(model_folder, benchmarks, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    evaluation = evaluate(model_folder, suite="math", benchmarks=benchmarks, out=out, **QUICK)
    return out, evaluation


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "held-out.jsonl"
    words = ["apple", "Ölberg", "x^2", "∫", "seven", "table", "🍎", "mean"]
    dice = random.Random(0)
    documents = [" ".join(dice.choices(words, k=k)) for k in (1, 5, 40, 400)]
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    return path, documents
