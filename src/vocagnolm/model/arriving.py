"""Numbers on their way from a device, which goes on with its work meanwhile."""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
