"""Running a causal language model: its decoder and its head, the loss of its routers, compiled
layers, and copies from a device to the host.

The form of a head is found with a probe: architectures end in many ways, and a silent difference
would score or train another model.
"""

import contextlib
import functools
import importlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PreTrainedModel, masking_utils

from vocagnolm.errors import ModelError
from vocagnolm.objective.head import Head, Transform
from vocagnolm.storage.copies import cache_folder

# ---- the decoder ----

_KNOWN = ContextVar("rows hold one document each", default=False)
_SEARCH = "find_packed_sequence_indices"


@contextlib.contextmanager
def one_document_a_row() -> Iterator[None]:
    """Tell transformers that no row of a batch holds a second document. It searches the positions
    of every batch for one, even positions that it has made itself, and the host waits for the
    device's answer before it can launch the first layer."""
    _patch_packed_sequence_search()
    token = _KNOWN.set(True)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@functools.cache
def _patch_packed_sequence_search() -> None:
    """Let transformers' search for packed sequences be skipped where the answer is known."""
    search: Any = getattr(masking_utils, _SEARCH, None)
    if search is None:  # another version, which has its own way
        return

    @functools.wraps(search)
    def unless_known(position_ids: Any) -> Any:
        return None if _KNOWN.get() else search(position_ids)

    setattr(masking_utils, _SEARCH, unless_known)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of a model that ends in hidden states. Llama 4's text model does not name it as its
    base."""
    base = model.base_model
    if base is not model:
        return base
    return next(part for part in model.children() if isinstance(part, PreTrainedModel))


def run_decoder(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    position_ids_BT: Tensor | None = None,
    **options: Any,
) -> Any:
    """The outputs of the decoder. Positions that restart mark documents: most architectures of
    transformers then restrict attention to each of them (`separates_documents` tests it). Without
    an attention mask, rows may be padded on the right only."""
    if position_ids_BT is not None:
        options["position_ids"] = position_ids_BT
    with one_document_a_row() if position_ids_BT is None else contextlib.nullcontext():
        return decoder_of(model)(input_ids=input_ids_BT, use_cache=False, **options)


def last_hidden(
    model: PreTrainedModel, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None
) -> Tensor:
    """The hidden states after the final norm [B, T, D]."""
    hidden: Tensor = run_decoder(model, input_ids_BT, position_ids_BT).last_hidden_state
    return hidden


@contextlib.contextmanager
def _probing(model: PreTrainedModel) -> Iterator[None]:
    """Put the model into evaluation mode, without gradients, and back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def separates_documents(model: PreTrainedModel) -> bool:
    """Whether positions that restart keep a document from seeing the one before it: exchanging the
    first of two documents must not change the hidden states of the second."""
    first, other, second = _probe_ids(model, 3, seed=1)[:, None]
    positions = torch.arange(_PROBE_TOKENS, device=model.device).repeat(2)[None]
    try:
        with _probing(model):
            hidden, changed = (
                last_hidden(model, torch.cat([before, second], 1), positions)[:, _PROBE_TOKENS:]
                for before in (first, other)
            )
    except TypeError:  # it takes no positions at all
        return False
    hidden, changed = hidden.float(), changed.float()
    # half precision may round otherwise elsewhere in a batch; leaking is far larger
    tolerance = 1e-5 if model.dtype == torch.float32 else 1e-2
    return bool((hidden - changed).abs().max() <= tolerance * hidden.abs().max())


# ---- the head ----

_PROBE_TOKENS = 16
# what configurations call the factor on the logits, and the power with which they mean it:
# Granite divides by logits_scaling, HyperCLOVA X multiplies
_SCALES = {
    "logit_scale": (1,),
    "lm_head_multiplier": (1,),
    "logits_scaling": (-1, 1),
    "logits_mup_width_multiplier": (-1,),
}
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class HeadForm:
    """The way from a model's last linear layer to its logits. It is determined once, while the
    layer's weights change (and are gathered anew under FSDP)."""

    softcap: float | None = None
    scale: float = 1.0

    def head(self, model: PreTrainedModel) -> Head:
        """The head of a model, with its weights of this moment."""
        linear: Any = model.get_output_embeddings()
        bias = getattr(linear, "bias", None)
        return Head(weight=linear.weight, bias=bias, softcap=self.softcap, scale=self.scale)

    def transform(self, bias: Tensor | None) -> Transform:
        """The transform for the products of a head that has no plain weight."""
        return Transform(None if bias is None else bias.float(), self.softcap, self.scale)


def head_form(model: PreTrainedModel) -> HeadForm | None:
    """The form of head that gives the model's own logits on a few tokens; None if weight, bias,
    scale and soft cap do not explain them."""
    ids = _probe_ids(model, 1, seed=0)
    tolerance = 1e-4 if model.dtype == torch.float32 else 2e-2
    no_usual_decoder = (AttributeError, RuntimeError, TypeError, StopIteration, ValueError)
    with _probing(model), contextlib.suppress(*no_usual_decoder):
        own = model(input_ids=ids, use_cache=False).logits.float()
        hidden = last_hidden(model, ids)
        largest = own.abs().max().clamp(min=1e-6)
        for form in _candidates(model.config.get_text_config()):
            ours = form.head(model).logits(hidden).float()
            if own.shape == ours.shape and (own - ours).abs().max() <= tolerance * largest:
                return form
    return None


def _probe_ids(model: PreTrainedModel, count: int, *, seed: int) -> Tensor:
    """Random tokens [count, _PROBE_TOKENS] for a probe."""
    rows = model.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, (count, _PROBE_TOKENS), generator=generator).to(model.device)


def _candidates(config: Any) -> Iterator[HeadForm]:
    softcap = next((value for name in _SOFTCAPS if (value := _number(config, name))), None)
    scales = [(_number(config, name), powers) for name, powers in _SCALES.items()]
    factors = [[value**power for power in powers] for value, powers in scales if value]
    for chosen in itertools.product(*factors):
        yield HeadForm(softcap, math.prod(chosen, start=1.0))


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# ---- mixtures of experts ----


@dataclass(frozen=True)
class RouterLoss:
    """The loss that makes the routers of a mixture of experts use all of them evenly."""

    function: Callable[..., Tensor]
    experts: int
    experts_per_token: int
    weight: float
    """The coefficient that the model itself uses beside the cross entropy."""

    def __call__(self, router_logits: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self.function(router_logits, self.experts, self.experts_per_token)
        return self.weight * loss


def router_loss_of(model: PreTrainedModel, wanted: bool | None = None) -> RouterLoss | None:
    """The router loss that transformers adds to this model's own loss; None for models without
    experts, and where it is not wanted. `wanted` None: as the configuration says, whose
    `output_router_logits` turns it on in transformers too."""
    config: Any = model.config.get_text_config()
    if wanted is None:
        wanted = bool(getattr(config, "output_router_logits", False))
    weight = getattr(config, "router_aux_loss_coef", getattr(config, "aux_loss_coef", None))
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if not wanted or not weight:
        return None
    experts: Any = getattr(model, "num_experts", None)
    per_token: Any = getattr(model, "num_experts_per_tok", None)
    if function is not None and experts is not None and per_token is not None:
        loss = RouterLoss(function, experts, per_token, float(weight))
        ids = torch.arange(1, 9, device=model.device)[None]
        with _probing(model):
            own = model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
            ours = loss(run_decoder(model, ids, output_router_logits=True).router_logits)
        if torch.allclose(loss.weight * own, ours, rtol=1e-2, atol=1e-6):
            return loss
    raise ModelError(
        f"{type(model).__name__} computes its router loss in an unsupported way. "
        "Set train.router_loss to false to train without it."
    )


# ---- torch.compile ----


# Layers of one kind share a graph; models that alternate kinds (sliding and full attention) need
# one for each, and torch gives up at 8.
_GRAPHS_ALLOWED = 64
_GRAPH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


# Two functions with the same code: torch keeps its graphs by code object, and these must not share.
def _full_layer(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(layer, *args, **kwargs)


def _other_layer(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(layer, *args, **kwargs)


def prepare_compiler() -> None:
    """Set torch's compiler up; call it before anything is compiled. Graphs are kept in the user's
    cache folder, where the next start finds them, instead of torch's temporary one."""
    settings = torch._dynamo.config
    settings.recompile_limit = max(_GRAPHS_ALLOWED, settings.recompile_limit)
    # torch writes its own choice into the environment when it is imported
    if os.environ.get(_GRAPH_FOLDER, default_cache_dir()) != default_cache_dir():
        return
    folder = cache_folder() / "compiled"
    with contextlib.suppress(OSError):  # a home that cannot be written: torch's choice stays
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[_GRAPH_FOLDER] = str(folder)


def import_compiler_meanwhile() -> None:
    """Import torch's compiler, which takes seconds, in a thread of its own, while a command still
    loads weights."""
    prepare_compiler()
    module = "torch._inductor.compile_fx"
    threading.Thread(target=importlib.import_module, args=(module,)).start()


def compiling_seconds() -> float:
    """The seconds that torch has spent on compiling since this process began."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


def compile_layers(model: nn.Module, full_shape: tuple[int, int], **options: Any) -> bool:
    """Compile every layer of `model` in place; False if no stack of layers is found. `full_shape`
    is (rows, row tokens) of a full batch."""
    layers = find_layers(model)
    if layers is None:
        return False
    prepare_compiler()
    full = torch.compile(_full_layer, dynamic=False, **options)
    other = torch.compile(_other_layer, dynamic=True, **options)

    def forward(layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = full if tuple(hidden.shape[:2]) == full_shape else other
        return run(layer, type(layer).forward, hidden, *args, **kwargs)

    for layer in layers:
        layer.forward = functools.partial(forward, layer)
    return True


def find_layers(model: nn.Module) -> nn.ModuleList | None:
    """The stack of decoder layers: the longest list of modules, if it is as long as the
    configuration says."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    config: Any = model.config
    expected = getattr(config.get_text_config(), "num_hidden_layers", None)
    return longest if longest is not None and len(longest) == expected else None


# ---- threads, and copies from a device to the host ----


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads on the CPU inside; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Moment:
    """The moment when the work that is queued now will be done: on a GPU a mark in its queue, which
    takes no time and is not waited for; elsewhere, where nothing is queued, the present time."""

    def __init__(self, device: torch.device):
        self._seconds = time.perf_counter()
        self._mark: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._mark = torch.cuda.Event(enable_timing=True, blocking=True)
            self._mark.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._mark is not None:
            self._mark.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        if self._mark is not None and earlier._mark is not None:
            return float(earlier._mark.elapsed_time(self._mark)) / 1000
        return self._seconds - earlier._seconds


class HostCopy:
    """A copy of values on the host. From a GPU it is made behind the work that is queued, into
    pinned memory; other devices are waited for."""

    def __init__(self, values: Tensor):
        self._here = values.to("cpu", non_blocking=values.is_cuda)
        self.moment = Moment(values.device)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values; waits for them, and for no later work."""
        self.moment.wait()
        return self._here.numpy()
