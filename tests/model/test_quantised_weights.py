"""Weights that are quantised: loaded where the packages are, named where they are not."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from score.teacher_kit import SETTINGS, save_teacher

from vocagnolm.errors import ModelError
from vocagnolm.model import load_causal_lm, open_model
from vocagnolm.model.load import quantisation_of, require_packages
from vocagnolm.report.comparison import SAMPLE
from vocagnolm.score.plan import TeacherSource

BLOCK = 16
KINDS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16}, "gptqmodel"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "optimum gptqmodel"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        "compressed-tensors",
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "bitsandbytes, unnamed": ({"load_in_8bit": True}, "bitsandbytes"),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, "hqq"),
    "torchao": ({"quant_method": "torchao"}, "torchao"),
}


@pytest.fixture
def without_packages(monkeypatch):
    """Some may be installed where the tests run."""
    real = importlib.util.find_spec
    known = {"gptqmodel", "optimum", "compressed_tensors", "bitsandbytes", "hqq", "torchao"}

    def find(name, package=None):
        return None if name in {*known, "kernels"} else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_that_is_missing_is_named(tmp_path, without_packages, kind):
    about, packages = KINDS[kind]
    folder = save_teacher(tmp_path / "teacher")
    change_config(folder, quantization_config=about)
    named = kind.partition(",")[0]
    with pytest.raises(ModelError, match=rf"teacher has {named} weights") as error:
        open_model(folder, device="cpu")
    assert f"pip install {packages}." in str(error.value)


def fp8_teacher(folder):
    """As DeepSeek and Qwen publish theirs: e4m3 with a scale for every block of a matrix."""
    save_teacher(folder)
    path = folder / "model.safetensors"
    out = {}
    for name, tensor in load_file(path).items():
        if "_proj" not in name:
            out[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        scaled = blocks / scale[:, None, :, None]
        out[name] = scaled.view(rows, columns).to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scale
    save_file(out, path, {"format": "pt"})
    change_config(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    )
    return folder


def losses(folder):
    teacher = TeacherSource(str(folder)).open(SETTINGS)
    return np.concatenate(teacher.nll(teacher.tokenize(SAMPLE[:4])))


def test_fp8_weights_become_plain_ones_on_a_cpu(tmp_path, without_packages):
    plain, fp8 = losses(save_teacher(tmp_path / "a")), losses(fp8_teacher(tmp_path / "b"))
    assert 0 < np.abs(plain - fp8).max() < 0.5
    assert np.abs(plain - fp8).mean() < 0.05
    model = load_causal_lm(tmp_path / "b", device="cpu")
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


def test_fp8_weights_need_kernels_on_a_gpu(tmp_path, without_packages):
    config = open_model(fp8_teacher(tmp_path / "t"), device="cpu").config
    assert quantisation_of(config) == "fp8"
    with pytest.raises(ModelError, match="pip install kernels"):
        require_packages("t", config, torch.device("cuda"))


def test_plain_weights_need_nothing(tmp_path, without_packages):
    config = open_model(save_teacher(tmp_path / "t"), device="cpu").config
    assert quantisation_of(config) is None
    require_packages("t", config, torch.device("cuda"))
