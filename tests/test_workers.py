"""Ctrl-C reaches every process of a terminal, and the command alone answers it."""

import signal
import subprocess
import sys
import time

import pytest

COMMAND = """
import os, signal, time
from vocagnolm.base.children import WorkerPool

if __name__ == "__main__":
    try:
        with WorkerPool(2) as pool:
            first = [pool.submit(time.sleep, 0.1) for _ in range(2)]
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            while not all(future.done() for future in first):
                os.killpg(0, signal.SIGINT)
                time.sleep(0.01)
            for future in first:
                future.result()
            print("nobody heard it")
            for _ in range(5):
                pool.submit(time.sleep, 60)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
    except KeyboardInterrupt:
        print("answered")
"""


@pytest.mark.slow
def test_workers_hear_of_no_key_and_are_not_waited_for(tmp_path):
    (tmp_path / "command.py").write_text(COMMAND)
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, tmp_path / "command.py"],
        capture_output=True,
        text=True,
        start_new_session=True,
        # a shell that runs the tests in the background lets them ignore the key
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.stdout, ended.stderr) == ("nobody heard it\nanswered\n", "")
    assert time.monotonic() - began < 40
