"""A local HTTP server that replays what a real vLLM 0.32 has answered, and can be made to fail in
every way that real ones do. `tests/vllm/record.py` has made the recording."""

import contextlib
import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from score.teacher_kit import SETTINGS, save_teacher, write_corpus

from vocagnolm.score import ScoreSettings, Server

RECORDING = Path(__file__).with_name("recorded_vllm.json")
SERVER_SETTINGS = ScoreSettings(context=64, stride=16, batch_tokens=192, shard_documents=3)
LOCAL_SETTINGS = SETTINGS
RECORDED_ALTERNATIVES = 2
MODEL = "tiny"


def save_served_teacher(folder, seed=0):
    """Heads of 32 dimensions: the smallest that vLLM has kernels for on a CPU."""
    return save_teacher(folder, seed=seed, hidden_size=128)


def write_served_corpus(path):
    return write_corpus(path, documents=8, seed=5, longest=260)


def key_of(ids):
    return ",".join(map(str, ids))


class Refusal(str):
    """An answer that is an error."""


class Replay:
    """The recorded server. `faults` are taken one for each request for losses."""

    def __init__(self, engine="vllm"):
        self.recorded = json.loads(RECORDING.read_text())
        self.engine = engine
        self.models = self.recorded["models"]
        self.faults = deque()
        self.slow = 0.0
        self.change = lambda choice: choice
        """Done to every prompt's answer."""
        self.max_logprobs = 20
        self.missing = ()
        self.keys = []
        self.requests = []
        """Prompts of every request that was answered."""
        self.at_once = self.most_at_once = 0
        self.on_request = lambda number: None
        self._lock = threading.Lock()
        self._http = None
        self.port = 0
        self.retry_after = None

    def start(self):
        replay = self

        class Handler(_Handler):
            server_of = replay

        ThreadingHTTPServer.allow_reuse_address = True
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def server(self, **changes):
        return Server(**{"url": self.url, "patience_seconds": 20.0, "requests": 2} | changes)

    def get(self, path):
        answers = {"/v1/models": self.models}
        if self.engine == "vllm":
            answers["/version"] = self.recorded["version"]
        if self.engine == "sglang":
            answers["/get_server_info"] = {"version": "0.5.9"}
        return None if path in self.missing else answers.get(path)

    def tokenized(self, content):
        if self.engine != "vllm" or "/tokenize" in self.missing:
            return None
        return self.recorded["tokenize"][content["prompt"]]

    def completed(self, content):
        if content["model"] != MODEL:
            return None
        prompts = content["prompt"]
        count = content["prompt_logprobs"]
        if count > self.max_logprobs:  # in vLLM's own words
            return Refusal(
                f"Requested prompt logprobs of {count}, which is greater than max allowed: "
                f"{self.max_logprobs}"
            )
        choices = [{**self._choice(ids, count), "index": n} for n, ids in enumerate(prompts)]
        return {**self.recorded["completion"], "choices": choices}

    def chatted(self, content):
        return None

    def generated(self, content):
        """SGLang's form, after its documentation."""
        out = []
        for ids in content["input_ids"]:
            count = content.get("top_logprobs_num", 0)
            choice = self._choice(ids, count)
            logprobs = choice["prompt_logprobs"]
            pairs = zip(choice["prompt_token_ids"], logprobs, strict=True)
            rows = [[row and row[str(i)]["logprob"], i, None] for i, row in pairs]
            about = {"input_token_logprobs": rows}
            if count:
                about["input_top_logprobs"] = [row and _ranked(row, count) for row in logprobs]
            out.append({"text": "", "meta_info": about})
        return out

    def _choice(self, ids, count):
        """As it was recorded, with fewer of the likeliest tokens where fewer are asked for."""
        choice = json.loads(json.dumps(self.recorded["choices"][key_of(ids)]))
        for place, row in enumerate(choice["prompt_logprobs"]):
            if row is not None:
                own = str(ids[place])
                choice["prompt_logprobs"][place] = {
                    n: one for n, one in row.items() if n == own or one["rank"] <= count
                }
        return self.change(choice)

    @contextlib.contextmanager
    def counted(self, prompts):
        with self._lock:
            self.requests.append(prompts)
            number = len(self.requests)
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            self.on_request(number)
            time.sleep(self.slow)
            yield
        finally:
            with self._lock:
                self.at_once -= 1


def _ranked(row, count):
    """SGLang's form of the likeliest tokens."""
    ranked = sorted(row.items(), key=lambda entry: entry[1]["rank"])[:count]
    return [[one["logprob"], int(n), None] for n, one in ranked]


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server_of.keys.append(self.headers.get("Authorization"))
        self._answer(self.server_of.get(self.path))

    def do_POST(self):
        replay = self.server_of
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self._answer(replay.tokenized(content))
        routes = {
            "/v1/completions": replay.completed,
            "/generate": replay.generated,
            "/v1/chat/completions": replay.chatted,
        }
        if self.path not in routes or self.path in replay.missing:
            return self._answer(None)
        fault = replay.faults.popleft() if replay.faults else None
        if isinstance(fault, int):
            said = f"no: {self.headers.get('Authorization')}"
            return self._answer({"error": {"message": said}}, fault)
        if fault == "broken":
            return self.connection.close()
        asked = (content.get(name) for name in ("prompt", "input_ids", "messages"))
        with replay.counted(next(filter(None, asked))):
            answer = routes[self.path](content)
        if isinstance(answer, Refusal):
            return self._answer({"error": {"message": str(answer)}}, 400)
        if fault == "silent":
            time.sleep(1.5)
        if fault == "drip":
            return self._drip(answer)
        self._answer(answer, cut=fault == "cut")

    def _drip(self, content):
        """A byte at a time, and never all of them."""
        body = json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for byte in body[:-1]:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.05)

    def _answer(self, content, status=200, cut=False):
        if content is None:
            status, content = 404, {"error": {"message": "not found"}}
        body = json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status in (429, 503) and self.server_of.retry_after is not None:
                self.send_header("Retry-After", self.server_of.retry_after)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
