"""Nothing in the tests reaches the network; whole folders and files of slow tests are marked."""

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tqdm import tqdm

gc.disable()  # until all is imported: see `pytest_collection_finish`
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# otherwise torch.compile starts a process for every core, each of which imports torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Progress bars share a lock with forked processes: one that is killed within a bar would stop all
# later bars of the process that it was forked from.
tqdm.set_lock(threading.RLock())
os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))

TESTS = Path(__file__).parent
# they need a real server of vLLM, from an environment of its own: `make test-vllm`
collect_ignore = [] if "VOCAGNOLM_VLLM_PYTHON" in os.environ else ["vllm"]
# They start processes, train, generate, open a browser or read large vocabularies; those that take
# longest come first.
SLOW = (
    "score/test_ray.py",
    "chat/test_turns.py",
    "train/test_elastic.py",
    "study/test_study.py",
    "train/test_trainer.py",
    "alignment/test_real_tokenizers.py",
    "score",
    "write",
    "faults",
    "train/test_processes.py",
    "rounds",
    "report/test_browser.py",
    "train/test_read_behind.py",
    "generate/test_generator.py",
    "train/test_conversations.py",
    "storage",
    "train/test_resume.py",
    "evaluate/test_run.py",
    "evaluate/test_served.py",
    "train/test_conversation_example.py",
    "demo/test_demo.py",
    "demo/test_demo_studies.py",
    "study/test_selection_study.py",
    "chat/test_templates.py",
    "evaluate/test_compare.py",
    "questions/graders/test_hostile.py",
    "model/test_architectures.py",
    "model/test_document_nll.py",
    "objective/test_ranks.py",
    "study/test_tuning.py",
    "train/test_check.py",
    "train/test_corpora.py",
    "train/test_examples.py",
    "train/test_launchers.py",
    "train/test_online.py",
    "test_cli.py",
    "test_paper.py",
    "tryout/test_prompts.py",
    "tryout/test_text.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests also wait, for servers, processes and disks."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu and not _gpu():
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    for item in items:
        if _place(item.path) < len(SLOW):
            item.add_marker(pytest.mark.slow)
    # first what takes long: of files side by side none is then left for the end alone
    items.sort(key=lambda item: _place(item.path))


def pytest_collection_finish() -> None:
    """A collection would look at every object of torch and transformers: 0.3 s each time."""
    gc.freeze()
    gc.enable()


@cache
def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """`make test-gpu`: what ran where."""
    if terminalreporter.config.option.markexpr != "gpu":
        return
    import torch

    terminalreporter.section(f"{_gpu() or 'no GPU'}, torch {torch.__version__}")
    files = Counter(
        report.nodeid.split("::")[0] for report in terminalreporter.getreports("passed")
    )
    for name, count in sorted(files.items()):
        terminalreporter.write_line(f"{count:5} passed  {name}")


@cache
def _place(file: Path) -> int:
    """In SLOW, or behind it."""
    found = (n for n, name in enumerate(SLOW) if file.is_relative_to(TESTS / name))
    return next(found, len(SLOW))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tables, graphs and copies are not left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOCAGNOLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _imported_code_is_not_garbage() -> None:
    """Nor what a file of tests has imported: see `pytest_collection_finish`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """`training_kit.fresh_process` does without threads: only for the test that asked for it."""
    torch = sys.modules.get("torch")
    before = torch and (torch.get_num_threads(), torch._C._get_mkldnn_enabled())
    yield
    if before:
        torch.set_num_threads(before[0])
        torch.backends.mkldnn.set_flags(before[1])
