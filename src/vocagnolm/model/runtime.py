"""How models run: threads, numbers on their way from a device, compiled layers."""

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from vocagnolm.storage.copies import cache_folder


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- numbers on their way ----


class Moment:
    """When the work that is queued now is done: on a GPU a mark in its queue, which takes no time
    and is not waited for; elsewhere, where nothing is queued, the time of day."""

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


class Arriving:
    """From a GPU to pinned memory, behind the work that is queued; other devices are waited for."""

    def __init__(self, values: Tensor):
        self._here = values.to("cpu", non_blocking=values.is_cuda)
        self.moment = Moment(values.device)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Waits for these numbers, and for nothing after them."""
        self.moment.wait()
        return self._here.numpy()


# ---- torch.compile ----


# Layers of one kind share a graph; models that alternate kinds (sliding and full attention) need
# one for each, and torch gives up at 8.
_GRAPHS_ALLOWED = 64
_GRAPH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def _full_layer(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(layer, *args, **kwargs)


def _other_layer(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # The same as above on purpose: torch keeps its graphs by code object, and these two must not
    # share theirs.
    return forward(layer, *args, **kwargs)


def prepare_compiler() -> None:
    """Before the first graph is made, by whoever compiles. Graphs are kept in the user's cache
    folder, where the next start finds them, instead of torch's own choice, a temporary one."""
    torch._dynamo.config.recompile_limit = max(
        _GRAPHS_ALLOWED, torch._dynamo.config.recompile_limit
    )
    # torch writes its own choice into the environment when it is imported
    if os.environ.get(_GRAPH_FOLDER, default_cache_dir()) != default_cache_dir():
        return
    folder = cache_folder() / "compiled"
    with contextlib.suppress(OSError):  # a home that cannot be written: torch's choice stays
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[_GRAPH_FOLDER] = str(folder)


def import_compiler_meanwhile() -> None:
    """torch imports its compiler when it is first needed, which takes seconds: in a thread of its
    own, while a command still loads weights."""
    prepare_compiler()
    module = "torch._inductor.compile_fx"
    threading.Thread(target=importlib.import_module, args=(module,)).start()


def compiling_seconds() -> float:
    """What torch has spent on compiling since this process began."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


def compile_layers(model: nn.Module, full_shape: tuple[int, int], **options: Any) -> bool:
    """Compile every layer of `model` in place; False where no stack of layers is found.
    `full_shape` is (rows, row tokens) of a full batch."""
    layers = find_layers(model)
    if layers is None:
        return False
    prepare_compiler()
    full = torch.compile(_full_layer, dynamic=False, **options)
    other = torch.compile(_other_layer, dynamic=True, **options)
    for layer in layers:
        layer.forward = partial(_dispatch, full, other, full_shape, layer)
    return True


def _dispatch(
    full: Callable[..., Any],
    other: Callable[..., Any],
    full_shape: tuple[int, int],
    layer: nn.Module,
    hidden: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    run = full if tuple(hidden.shape[:2]) == full_shape else other
    return run(layer, type(layer).forward, hidden, *args, **kwargs)


def find_layers(model: nn.Module) -> nn.ModuleList | None:
    """The stack of decoder layers: the longest list of modules, if it is as long as the
    configuration says."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    config: Any = model.config
    expected = getattr(config.get_text_config(), "num_hidden_layers", None)
    return longest if longest is not None and len(longest) == expected else None
