"""Products in fp8: the rounding, emulated on a CPU."""

import copy
import dataclasses
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faults_kit import LONG
from score.teacher_kit import SETTINGS, save_teacher, write_corpus
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vocagnolm.errors import UsageError
from vocagnolm.model import NllModel, fp8, load, open_model
from vocagnolm.model.fp8 import (
    Fp8Linear,
    Fp8TrainedLinear,
    head_to_fp8,
    rounded_rows,
    to_fp8,
    train_in_fp8,
)
from vocagnolm.model.runtime import compile_layers, last_hidden
from vocagnolm.report.comparison import SAMPLE
from vocagnolm.score import LocalTeacher, score_corpus


@pytest.fixture(scope="module", autouse=True)
def _autograd_has_begun():
    """`FakeTensorMode` makes torch 2.10 count eight GPUs. Autograd, if it began after that, would
    start threads for them, and processes that later tests fork could not train."""
    torch.ones(1, requires_grad=True).backward()


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


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rows", [1, 17, 256])
def test_the_kernel_would_take_what_it_is_given(monkeypatch, whole, rows):
    """Layouts, scales and types, by torch's own checks for a GPU: nothing is computed."""
    layer = Fp8Linear(nn.Linear(64, 128, bias=False).bfloat16())
    monkeypatch.setattr(fp8, "_scales_into_float32", lambda device: whole)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.weight = torch.empty(128, 64, dtype=layer.weight.dtype, device="cuda")
        layer.scale = torch.empty(128, 1, device="cuda")
        x = torch.empty(rows, 64, dtype=torch.bfloat16, device="cuda")
        for dtype in (torch.bfloat16, torch.float32):
            out = layer.product(x, dtype)
            assert (out.dtype, out.device.type, out.shape) == (dtype, "cuda", (rows, 128))


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
    with pytest.raises(UsageError, match="remove one of them"):
        files.require_shardable(2)
    with pytest.raises(UsageError, match="no linear layers"):
        to_fp8(files.load())  # they are exchanged already
    monkeypatch.undo()
    settings = dataclasses.replace(SETTINGS, dtype="fp8")
    with pytest.raises(UsageError, match=r"Hopper.*this is a CPU\. Use --dtype bfloat16"):
        score_corpus(folder, write_corpus(tmp_path / "c.jsonl"), tmp_path / "s", settings=settings)


def open_plain(folder):
    return open_model(folder, device="cpu", dtype="float32").load()


def nll_model(model, **options):
    return NllModel(model, context=64, stride=16, batch_tokens=256, prefix_ids=(0,), **options)


DOCUMENTS = [np.arange(n) * 7 % 416 for n in (5, 60, 150, 33)]


@pytest.mark.parametrize("head", [{}, {"tie_word_embeddings": True}, {"kind": "gemma2"}])
def test_a_head_in_fp8(tmp_path, head):
    """Its losses are those of full logits of rounded rows; what the head does to them comes
    after."""
    folder = save_teacher(tmp_path / "t", **head)
    plain, narrow = open_plain(folder), open_plain(folder)
    exact = np.concatenate(nll_model(plain).document_nll(DOCUMENTS))
    ours = nll_model(narrow, fp8_head=True)
    assert isinstance(narrow.get_output_embeddings(), Fp8Linear)
    assert narrow.get_input_embeddings().weight.dtype == torch.float32
    got = np.concatenate(ours.document_nll(DOCUMENTS))
    assert 0 < np.abs(got - exact).mean() < 0.05

    ids = torch.from_numpy(np.concatenate([[0], DOCUMENTS[1]]))[None]
    with torch.no_grad():  # through transformers: its own scale and soft cap
        logits = narrow(input_ids=ids).logits[0, :-1].float()
    whole = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(got[5:65], whole.numpy(), rtol=1e-5, atol=1e-5)


def test_a_head_in_chunks(tmp_path):
    torch.manual_seed(0)
    layer, hidden = Fp8Linear(nn.Linear(32, 48)), torch.randn(10, 32)
    labels = torch.arange(10)
    transform = fp8.Transform(layer.bias.detach())
    one, four = (layer.token_nll(hidden, labels, transform, chunk) for chunk in (10, 3))
    torch.testing.assert_close(one, four)
    wanted = nn.functional.cross_entropy(layer(hidden), labels, reduction="none")
    torch.testing.assert_close(one, wanted.detach())
    assert layer.token_nll(hidden[:0], labels[:0], transform, 4).shape == (0,)


def test_a_head_that_the_kernel_cannot_take_stays(tmp_path):
    model = open_plain(save_teacher(tmp_path / "t", vocab_size=417))
    assert not head_to_fp8(model) and type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("head_too", [True, False])
def test_a_teacher_in_fp8_is_its_layers_and_its_head_rounded(
    tmp_path, anywhere, monkeypatch, head_too
):
    """The constant decides about the head alone: the same model, rounded part by part here."""
    monkeypatch.setattr(fp8, "HEAD_TOO", head_too)
    folder = save_teacher(tmp_path / "t")
    settings = dataclasses.replace(SETTINGS, dtype="fp8")
    teacher = LocalTeacher(open_model(folder, device="cpu", dtype="fp8"), settings)
    tokenized = teacher.tokenize(SAMPLE[:4])
    by_part = open_model(folder, device="cpu", dtype="bfloat16").load()
    to_fp8(by_part)
    sizes = {"context": teacher.context, "stride": teacher.stride}
    sizes |= {"batch_tokens": teacher.batch_tokens, "prefix_ids": teacher.prefix_ids}
    ours = {
        in_fp8: NllModel(model, fp8_head=in_fp8, **sizes).document_nll([t.ids for t in tokenized])
        for in_fp8, model in ((False, by_part), (True, copy.deepcopy(by_part)))
    }
    wanted, other = (np.concatenate(ours[in_fp8]) for in_fp8 in (head_too, not head_too))
    losses = np.concatenate(teacher.nll(tokenized))
    assert np.array_equal(losses, wanted) and not np.array_equal(losses, other)


class Counted(TorchDispatchMode):
    """Bytes of the tensors that operations make, while they live."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            for tensor in filter(torch.is_tensor, tree_leaves(out)):
                self.live += tensor.nbytes
                self.most = max(self.most, self.live)
                weakref.finalize(tensor, self._gone, tensor.nbytes)
        return out

    def _gone(self, size):
        self.live -= size


def test_rounding_frees_what_it_replaces(tmp_path, monkeypatch):
    """Layer by layer, so that at no time there is more than the model, one weight's copies and
    what is left of it."""
    monkeypatch.setattr(fp8, "_STRIP_ROWS", 16)
    wide = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    model = open_plain(save_teacher(tmp_path / "t", **wide)).bfloat16()
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    shapes = [m.weight.shape for m in linears.values()]
    old = [weakref.ref(m.weight) for m in linears.values()]
    before = _bytes(model)
    largest = max(m.weight.nbytes for m in linears.values())
    del linears
    alive = []

    def noted(values):
        alive.append(sum(weight() is not None for weight in old))
        return rounded_rows(values)

    monkeypatch.setattr(fp8, "rounded_rows", noted)
    with Counted() as counted:
        to_fp8(model)
        assert head_to_fp8(model)
    assert sorted({*alive}, reverse=True) == list(range(len(old), 0, -1))
    assert all(weight() is None for weight in old)
    saved = sum(rows * columns - 4 * rows for rows, columns in shapes)
    assert _bytes(model) == before - saved
    assert counted.live == sum(rows * columns + 4 * rows for rows, columns in shapes)
    # what is new and not yet paid for by what was freed: one weight, twice, and a strip's copies
    assert counted.most - counted.live <= largest + 16 * 512 * 16


def _bytes(model):
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@pytest.mark.slow
def test_compiled_layers_round_alike(tmp_path):
    """In float32: sums in another order may move a value over a rounding edge, rarely. The graphs
    run as they are traced; at length they are turned into code, which takes a minute."""
    folder = save_teacher(tmp_path / "t")
    eager, compiled = open_plain(folder), open_plain(folder)
    for model in (eager, compiled):
        to_fp8(model)
    assert compile_layers(compiled, (2, 32), backend="inductor" if LONG else "aot_eager")
    ids = torch.arange(64).view(2, 32) * 5 % 416
    with torch.inference_mode():
        one, two = last_hidden(eager, ids), last_hidden(compiled, ids)
    assert (one - two).abs().mean() < 1e-3 * one.abs().mean()
    torch.testing.assert_close(one, two, rtol=0.05, atol=0.05 * float(one.abs().max()))


# ---- training ----


def rounded(values):
    """Each row by itself, as numbers again."""
    narrow, scale = rounded_rows(values)
    return narrow.float() * scale


def trained_layer(**options):
    torch.manual_seed(1)
    layer = nn.Linear(32, 48, **options)
    layer.__class__ = Fp8TrainedLinear
    return layer


def test_a_trained_layer_rounds_all_three_products():
    layer, x = trained_layer(), (torch.randn(2, 16, 32) * 3).requires_grad_()
    upstream = torch.randn(2, 16, 48)
    (layer(x) * upstream).sum().backward()
    rows, gradient = x.detach().flatten(0, 1), upstream.flatten(0, 1)
    weight = layer.weight.detach()
    _, row_scale = rounded_rows(rows)
    _, weight_scale = rounded_rows(weight)
    out = rounded(rows) @ rounded(weight).t() + layer.bias.detach()
    torch.testing.assert_close(layer(x).flatten(0, 1).detach(), out)
    # what is summed over has its scales in the gradient
    of_rows = rounded(gradient * weight_scale.t()) @ (rounded(weight) / weight_scale)
    of_weight = rounded((gradient * row_scale).t()) @ (rounded(rows) / row_scale)
    torch.testing.assert_close(x.grad.flatten(0, 1), of_rows)
    torch.testing.assert_close(layer.weight.grad, of_weight)
    torch.testing.assert_close(layer.bias.grad, gradient.sum(0))
    for ours, exact in (
        (x.grad.flatten(0, 1), gradient @ weight),
        (of_weight, gradient.t() @ rows),
    ):
        assert 0 < (ours - exact).norm() < 0.05 * exact.norm()


def test_a_trained_layer_under_autocast_and_with_odd_rows():
    layer, x = trained_layer(bias=False), torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    odd = torch.randn(5, 32)  # a sum over 5 rows is nothing for the kernel
    assert torch.equal(layer(odd), nn.functional.linear(odd, layer.weight))


@pytest.mark.gpu
def test_a_trained_layer_on_a_gpu_is_the_emulated_one():
    x, upstream, found = torch.randn(64, 32) * 3, torch.randn(64, 48), []
    for device in ("cpu", "cuda"):
        layer = trained_layer().to(device)
        rows = x.to(device, copy=True).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            out = layer(rows)
        (out.float() * upstream.to(device)).sum().backward()
        found.append([t.cpu().float() for t in (out, rows.grad, layer.weight.grad)])
    for ours, wanted in zip(*found, strict=True):
        assert (ours - wanted).norm() < 0.01 * wanted.norm()


def test_the_kernel_would_take_what_training_gives_it():
    context = SimpleNamespace(needs_input_grad=(True, True, False))
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        rows, weight = torch.empty(64, 32, **half), torch.empty(48, 32, device="cuda")
        out = fp8._Products.forward(context, rows, weight, torch.bfloat16)
        assert (out.dtype, out.shape) == (torch.bfloat16, (64, 48))
        of_rows, of_weight, _ = fp8._Products.backward(context, torch.empty(64, 48, **half))
    assert (of_rows.dtype, of_rows.shape) == (torch.bfloat16, rows.shape)
    assert (of_weight.dtype, of_weight.shape) == (torch.float32, weight.shape)


def test_the_layers_that_are_trained_in_fp8(tmp_path):
    model = open_plain(save_teacher(tmp_path / "t", num_hidden_layers=4))
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    assert train_in_fp8(model) == 2 * 7
    kinds = [type(layer.mlp.down_proj) for layer in model.model.layers]
    assert kinds == [nn.Linear, Fp8TrainedLinear, Fp8TrainedLinear, nn.Linear]
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert type(model.lm_head) is nn.Linear
    with pytest.raises(UsageError, match="no linear layers were found in the decoder of Llama"):
        train_in_fp8(model)  # they do already
