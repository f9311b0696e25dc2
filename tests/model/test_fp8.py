"""Products in fp8: the rounding, emulated on a CPU."""

import dataclasses

import numpy as np
import pytest
import torch
from score.teacher_kit import SETTINGS, save_teacher, write_corpus
from torch import nn

from vocagnolm.errors import UsageError
from vocagnolm.model import load, open_model
from vocagnolm.model.fp8 import Fp8Linear, rounded_rows, to_fp8
from vocagnolm.pair.sample import SAMPLE
from vocagnolm.score import LocalTeacher, score_corpus


def test_every_row_uses_the_whole_range():
    values = torch.tensor([[1e-4, -3e-4, 2e-4], [500.0, 10.0, -900.0], [0.0, 0.0, 0.0]])
    rounded, scale = rounded_rows(values)
    assert rounded.float().abs().amax(1).tolist() == [448, 448, 0]
    back = rounded.float() * scale
    assert (back - values).abs().max(1).values.tolist() == pytest.approx([0, 0, 0], abs=15)
    # three bits after the leading one: half of 1/8 at most
    assert ((back - values).abs() <= values.abs() / 16 + scale * 2**-9).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_product_of_rounded_rows(bias):
    torch.manual_seed(0)
    linear = nn.Linear(32, 48, bias=bias)
    x = torch.randn(2, 5, 32) * 7
    ours = Fp8Linear(linear)(x)
    wanted = torch.zeros(2, 5, 48)
    for row in range(2):
        for place in range(5):
            vector = x[row, place]
            one = vector.abs().max() / 448
            narrow = (vector / one).to(torch.float8_e4m3fn).double() * one
            for out in range(48):
                two = linear.weight[out].detach().abs().max() / 448
                weight = (linear.weight[out].detach() / two).to(torch.float8_e4m3fn).double() * two
                wanted[row, place, out] = narrow @ weight
    if bias:
        wanted += linear.bias.detach()
    torch.testing.assert_close(ours.detach(), wanted, rtol=1e-5, atol=1e-4)
    assert 0 < (ours - linear(x)).abs().mean() < 0.1 * linear(x).abs().mean()


@pytest.fixture
def anywhere(monkeypatch):
    """As if this machine had such a GPU."""
    monkeypatch.setattr(load, "require_fp8", lambda device: None)


def test_a_teacher_in_fp8(tmp_path, anywhere):
    folder = save_teacher(tmp_path / "t")

    def losses(dtype):
        settings = dataclasses.replace(SETTINGS, dtype=dtype)
        teacher = LocalTeacher(open_model(folder, device="cpu", dtype=dtype), settings)
        assert teacher.describe()["scoring"]["dtype"] == teacher.settings.dtype == dtype
        return np.concatenate(teacher.nll(teacher.tokenize(SAMPLE[:4])))

    exact, narrow, fp8 = (losses(name) for name in ("float32", "bfloat16", "fp8"))
    assert 0 < np.abs(narrow - exact).mean() < np.abs(fp8 - exact).mean() < 0.2
    assert np.array_equal(fp8, losses("fp8"))

    model = open_model(folder, device="cpu", dtype="fp8").load()
    layer = model.model.layers[1]
    assert isinstance(layer.mlp.down_proj, Fp8Linear) and isinstance(model.lm_head, nn.Linear)
    assert layer.self_attn.q_proj.weight.dtype == torch.float8_e4m3fn


def test_where_it_is_refused(tmp_path, anywhere, monkeypatch):
    folder = save_teacher(tmp_path / "t")
    files = open_model(folder, device="cpu", dtype="fp8")
    with pytest.raises(UsageError, match="leave one out"):
        files.require_shardable(2)
    with pytest.raises(UsageError, match="no linear layers"):
        to_fp8(files.load())  # they are exchanged already
    monkeypatch.undo()
    settings = dataclasses.replace(SETTINGS, dtype="fp8")
    with pytest.raises(UsageError, match=r"Hopper.*this is a CPU\. Use --dtype bfloat16"):
        score_corpus(folder, write_corpus(tmp_path / "c.jsonl"), tmp_path / "s", settings=settings)
