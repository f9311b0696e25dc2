"""Scoring on a GPU gives a CPU's losses, in every precision, and the same bits again."""

import dataclasses

import numpy as np
import pytest
from score.teacher_kit import SETTINGS, save_teacher, write_corpus

from vocagnolm.alternatives import Alternatives
from vocagnolm.model import open_model
from vocagnolm.report.comparison import SAMPLE
from vocagnolm.score import LocalTeacher, score_corpus
from vocagnolm.store import LossStore

pytestmark = pytest.mark.gpu


def losses(folder, device, dtype, **changes):
    settings = dataclasses.replace(SETTINGS, device=device, dtype=dtype, **changes)
    teacher = LocalTeacher(open_model(folder, device=device, dtype=dtype), settings)
    return np.concatenate(teacher.nll(teacher.tokenize(SAMPLE)))


@pytest.mark.parametrize("bos", [True, False])
def test_the_losses_are_a_cpus(tmp_path, bos):
    folder = save_teacher(tmp_path / "t", bos=bos)
    wanted = losses(folder, "cpu", "float32")
    np.testing.assert_allclose(losses(folder, "cuda", "float32"), wanted, atol=2e-3)
    for dtype, limit in (("bfloat16", 0.03), ("fp8", 0.2)):
        found = losses(folder, "cuda", dtype)
        assert np.array_equal(np.isnan(found), np.isnan(wanted))
        assert np.nanmean(np.abs(found - wanted)) < limit
        assert found.tobytes() == losses(folder, "cuda", dtype).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_compiled_layers_change_little(tmp_path, dtype):
    folder = save_teacher(tmp_path / "t")
    plain = losses(folder, "cuda", dtype, compiled=False)
    compiled = losses(folder, "cuda", dtype, compiled=True)
    assert np.nanmean(np.abs(plain - compiled)) < 0.03


def alternatives(folder, device, dtype, kept):
    settings = dataclasses.replace(SETTINGS, device=device, dtype=dtype, alternatives=kept)
    teacher = LocalTeacher(open_model(folder, device=device, dtype=dtype), settings)
    found = [scores.alternatives for scores in teacher.start(teacher.tokenize(SAMPLE))()]
    return Alternatives(np.concatenate(found), sampled=kept.startswith("sampled"))


@pytest.mark.parametrize("kept", ["1", "4", "64", "sampled:4"])
def test_the_alternatives_are_a_cpus(tmp_path, kept):
    """Where two tokens are as likely, either may be named; their probabilities are the same."""
    folder = save_teacher(tmp_path / "t")
    wanted = alternatives(folder, "cpu", "float32", kept)
    found = alternatives(folder, "cuda", "float32", kept)
    assert np.mean(found.ids == wanted.ids) > 0.98
    same = found.ids == wanted.ids
    np.testing.assert_allclose(found.probability[same], wanted.probability[same], rtol=0.03)
    for dtype in ("bfloat16", "fp8"):
        once, again = (alternatives(folder, "cuda", dtype, kept) for _ in range(2))
        assert once.packed.tobytes() == again.packed.tobytes()
        assert abs(np.mean(once.mass) - np.mean(wanted.mass)) < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_store(tmp_path, dtype):
    folder = save_teacher(tmp_path / "t")
    corpus = write_corpus(tmp_path / "c.jsonl")
    settings = dataclasses.replace(SETTINGS, device="cuda", dtype=dtype)
    for name in ("one", "two"):
        score_corpus(folder, corpus, tmp_path / name, settings=settings)
    shards = sorted(p.name for p in (tmp_path / "one").rglob("*") if p.suffix == ".safetensors")
    assert shards
    for name in shards:
        one, two = (next((tmp_path / f).rglob(name)).read_bytes() for f in ("one", "two"))
        assert one == two
    assert LossStore.open(tmp_path / "one").manifest["identity"]["scoring"]["dtype"] == dtype
