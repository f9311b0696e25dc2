"""Nothing in the tests reaches the network."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """`training_kit.fresh_process` does without threads: only for the test that asked for it."""
    torch = sys.modules.get("torch")
    before = torch and (torch.get_num_threads(), torch._C._get_mkldnn_enabled())
    yield
    if before:
        torch.set_num_threads(before[0])
        torch.backends.mkldnn.set_flags(before[1])
