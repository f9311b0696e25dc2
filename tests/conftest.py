"""Nothing in the tests reaches the network; whole folders and files of slow tests are marked."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# otherwise torch.compile starts a process for every core, each of which imports torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

TESTS = Path(__file__).parent
# they need a real server of vLLM, from an environment of its own: `make test-vllm`
collect_ignore = [] if "VOCAGNOLM_VLLM_PYTHON" in os.environ else ["vllm"]
# they start processes, train, generate, open a browser or read large vocabularies
SLOW = (
    "faults",
    "alignment/test_real_tokenizers.py",
    "chat/test_real_tokenizers.py",
    "chat/test_templates.py",
    "demo/test_demo.py",
    "evaluate/test_compare.py",
    "evaluate/test_generation.py",
    "evaluate/test_run.py",
    "evaluate/graders/test_hostile.py",
    "model/test_architectures.py",
    "model/test_document_nll.py",
    "objective/test_ranks.py",
    "storage",
    "report/test_browser.py",
    "score",
    "study/test_selection_study.py",
    "study/test_study.py",
    "study/test_tuning.py",
    "train/test_check.py",
    "train/test_conversation_example.py",
    "train/test_conversations.py",
    "train/test_elastic.py",
    "train/test_examples.py",
    "train/test_launchers.py",
    "train/test_online.py",
    "train/test_processes.py",
    "train/test_resume.py",
    "train/test_trainer.py",
    "test_cli.py",
    "test_paper.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_in_slow_file(item):
            item.add_marker(pytest.mark.slow)
    # first what takes long: of files side by side none is then left for the end alone
    items.sort(key=lambda item: not _is_in_slow_file(item))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tables, graphs and copies are not left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOCAGNOLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _imported_code_is_not_garbage() -> None:
    """A collection would look at every object of torch and transformers again: 0.3 s each time."""
    gc.collect()
    gc.freeze()


def _is_in_slow_file(item: pytest.Item) -> bool:
    return any(item.path.is_relative_to(TESTS / name) for name in SLOW)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """`training_kit.fresh_process` does without threads: only for the test that asked for it."""
    torch = sys.modules.get("torch")
    before = torch and (torch.get_num_threads(), torch._C._get_mkldnn_enabled())
    yield
    if before:
        torch.set_num_threads(before[0])
        torch.backends.mkldnn.set_flags(before[1])
