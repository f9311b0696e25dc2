"""A real server of vLLM on this machine's CPU, for as long as a test needs it."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request

START_SECONDS = 600
MODEL = "tiny"


class Vllm:
    """Started in a session of its own, so that all of its processes can be ended."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = None

    def start(self, model, wait=True, length=128, more=()):
        options = ["--model", model, "--served-model-name", MODEL, "--dtype", "float32"]
        options += ["--host", "127.0.0.1", "--port", self.port]
        options += ["--max-model-len", length]
        options += ["--enforce-eager", "--max-num-seqs", 64, *more]
        python = os.environ["VOCAGNOLM_VLLM_PYTHON"]
        # `vllm serve` needs packages that the environment does without
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *map(str, options)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with open(self.folder / "vllm.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        if wait:
            self.wait()

    def wait(self):
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self._process.poll() is None, self._last_words()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/version"):
                return
            time.sleep(1)
        raise AssertionError(self._last_words())

    def send(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        self._process.wait()

    def _last_words(self):
        return (self.folder / "vllm.log").read_text()[-3000:]
