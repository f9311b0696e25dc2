"""One teacher and one corpus, scored in this process and by a server of vLLM on the same CPU.

    PYTHONPATH=src python benchmarks/score_server.py --teacher DIR --corpus FILE
        [--vllm-python .venv-vllm/bin/python] [--documents N] [--characters N] [--rounds N]

`make test-vllm` builds the environment of the server; without it, the local scorer is measured
alone. Rows are told as they come, and an engine that fails does not take the others with it. Every
engine scores the same documents; the
server is started for each row that needs other options, and the local scorer takes a turn with each
of them, so that the ratios hold on a busy machine. The memory is what the engine's processes needed
at most while they scored, over what they held before. Differences are in nats a token against the
local scorer in float32; `other bits` is the share of the values that a store, in float16, keeps
otherwise. `again` is the mean difference of the engine from itself when the same documents come in
other requests.
"""

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import report
from record import add_json
from score_precision import read_texts, say

from vocagnolm.model import open_model
from vocagnolm.score import LocalTeacher, ScoreSettings, Server, ServerTeacher, TokenizedDocument
from vocagnolm.store.format import to_float16

CONTEXT, STRIDE = 1024, 128
MODEL = "teacher"
START_SECONDS = 900
PATIENCE_SECONDS = 600.0  # a server that dies ends the run


class Memory:
    """Of some processes, in MiB: the most that they have held over what they hold now."""

    def __init__(self, pids: list[int]):
        self._pids = pids
        for pid in pids:
            # forgets the peak of the start
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
        self._before = self._sum("VmRSS")

    def more(self) -> float:
        return self._sum("VmHWM") - self._before

    def _sum(self, name: str) -> float:
        total = 0
        for pid in self._pids:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
        return total / 1024


def of_session(leader: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def started(python: str, teacher: str, *options: str) -> Iterator[tuple[str, Memory]]:
    """A server of vLLM: its address, and the memory of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", teacher]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(CONTEXT + 1), "--enforce-eager", *options]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile(prefix="vllm-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=kept, start_new_session=True
        )
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/version"):
                    break
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(Path(log.name).read_text(encoding="utf-8")[-2000:])
                time.sleep(1)
            time.sleep(2)
            yield url, Memory(of_session(process.pid))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def timed(
    teacher: LocalTeacher | ServerTeacher, documents: list[TokenizedDocument]
) -> tuple[float, np.ndarray]:
    """Tokens a second, and the losses."""
    began = time.perf_counter()
    found = teacher.nll(documents)
    seconds = time.perf_counter() - began
    tokens = sum(len(d.ids) for d in documents)
    nll = [one if isinstance(one, np.ndarray) else one.nll for one in found]
    return tokens / seconds, np.concatenate(nll)


def differences(name: str, found: np.ndarray, exact: np.ndarray) -> dict[str, Any]:
    known = ~np.isnan(exact)
    size = np.abs(found[known].astype(np.float64) - exact[known])
    other = to_float16(found[known]) != to_float16(exact[known])
    return {
        "engine": name,
        "mean nll": round(float(found[known].mean()), 5),
        "mean |difference|": float(size.mean()),
        "max": float(size.max()),
        "other bits": f"{other.mean():.1%}",
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    local = LocalTeacher(
        open_model(arguments.teacher, device="cpu", dtype="float32"),
        ScoreSettings(context=CONTEXT, stride=STRIDE, device="cpu", dtype="float32"),
    )
    texts = read_texts(arguments.corpus, arguments.documents, arguments.characters)
    documents = [d for d in local.tokenize(texts) if isinstance(d, TokenizedDocument)]
    say(f"{len(documents)} documents, {sum(len(d.ids) for d in documents):,} tokens")
    local.load()
    here = Memory([os.getpid()])
    _, exact = timed(local, documents)
    rows = [differences("ours, float32", exact, exact)]
    rows[0] |= {"against ours": 1.0, "MiB more": here.more()}
    say(str(rows[0]))
    if arguments.vllm_python is None:
        rates = [timed(local, documents)[0] for _ in range(arguments.rounds)]
        return [rows[0] | {"tokens/s": statistics.median(rates)}]
    of_ours: list[float] = []
    kinds = [
        ("vLLM, float32", "float32", []),
        ("vLLM, float32, 256 batched tokens", "float32", ["--max-num-batched-tokens", "256"]),
        ("vLLM, bfloat16", "bfloat16", []),
    ]
    for name, dtype, options in kinds:
        try:
            with started(
                arguments.vllm_python, arguments.teacher, "--dtype", dtype, *options
            ) as found:
                rows.append(of_vllm(name, found, local, documents, exact, of_ours, arguments))
                say(str(rows[-1]))
        except (Exception, SystemExit) as error:  # the other engines are still to be measured
            say(f"FAILED {name}: {type(error).__name__}: {str(error).strip()[-500:]}")
    if of_ours:
        rows[0]["tokens/s"] = statistics.median(of_ours)
    return rows


def of_vllm(
    name: str,
    found: tuple[str, Memory],
    local: LocalTeacher,
    documents: list[TokenizedDocument],
    exact: np.ndarray,
    of_ours: list[float],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One row. The local scorer's rates of its turns go to `of_ours`."""
    url, memory = found
    say(f"{name}: started")
    files = open_model(arguments.teacher, device="cpu", weights=False)
    settings = ScoreSettings(context=CONTEXT, stride=STRIDE)
    teacher = ServerTeacher(files, Server(url=url, patience_seconds=PATIENCE_SECONDS), settings)
    rounds = []
    for _ in range(arguments.rounds):
        rate, nll = timed(teacher, documents)
        of_ours.append(timed(local, documents)[0])
        rounds.append((rate, rate / of_ours[-1]))
        say(f"{name}: {rate:.0f} tokens/s, ours {of_ours[-1]:.0f}")
    rates, ratios = zip(*rounds, strict=True)
    mib = memory.more()
    alone = ScoreSettings(context=CONTEXT, stride=STRIDE, batch_tokens=1)
    single = ServerTeacher(
        files, Server(url=url, requests=1, patience_seconds=PATIENCE_SECONDS), alone
    )
    rate, again = timed(single, documents)
    say(f"{name}: {rate:.0f} tokens/s a document at a time")
    row = differences(name, nll, exact)
    row |= {"tokens/s": statistics.median(rates), "against ours": statistics.median(ratios)}
    row |= {"MiB more": mib, "again": float(np.nanmean(np.abs(again - nll)))}
    return row | {"tokens/s, one a request": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--teacher", required=True, help="a model folder with safetensors")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--vllm-python", help="Python of vLLM's environment")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--characters", type=int, default=6000, help="of a document at most")
    parser.add_argument("--rounds", type=int, default=2)
    add_json(parser)
    arguments = parser.parse_args()
    report("engines on one teacher and corpus", measure(arguments), arguments.json)


if __name__ == "__main__":
    main()
