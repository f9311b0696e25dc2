"""JSON over HTTP with patience, and a key that is never shown.

The standard library's client is enough: a request carries thousands of tokens, so its connection
costs nothing. It follows no redirection, which could carry the key to another host.
"""

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from vocagnolm.errors import ScoreError, UsageError

KEY_VARIABLE = "VOCAGNOLM_SERVER_KEY"
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 15.0
_TOO_MANY_REQUESTS = 429
_NOT_THERE = (404, 405, 501)
_SERVER_ERROR = 500


class Exchange:
    """One server. What passes (5xx, too many requests, a connection that broke or never came, half
    an answer) is tried again until the server has been of no use for `patience_seconds`; what does
    not pass is an error at once."""

    def __init__(self, url: str, patience_seconds: float):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--server {url}: expected an address such as http://localhost:8000.")
        if parts.username or parts.password or parts.query:
            raise UsageError(
                "--server: an address with a user, a password or a query would be written down "
                f"with the plan. Put the key into the environment variable {KEY_VARIABLE}."
            )
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.patience_seconds = patience_seconds
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._given_up = threading.Event()

    def get(self, path: str) -> Any:
        """None where the server has nothing under this path."""
        return self._patiently("GET", path, None)

    def post(self, path: str, content: dict[str, Any]) -> Any:
        """None where the server has nothing under this path."""
        return self._patiently("POST", path, json.dumps(content).encode())

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Where requests of several threads belong together: when the block ends by an error, those
        that are under way end at once."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._given_up.set()
                for connection in self._open:
                    if connection.sock is not None:
                        with contextlib.suppress(OSError):
                            connection.sock.shutdown(socket.SHUT_RDWR)
            raise

    def go_on(self) -> None:
        """After `all_or_none` has ended by an error, and all of its threads."""
        self._given_up.clear()

    def _patiently(self, method: str, path: str, content: bytes | None) -> Any:
        failing_since = None
        pause = _FIRST_PAUSE_SECONDS
        while True:
            asked = time.monotonic()
            try:
                return self._once(method, path, content)
            except (OSError, http.client.HTTPException, _PassingError) as error:
                silent = isinstance(error, TimeoutError)
                failing_since = failing_since or (asked if silent else time.monotonic())
                reason = _hidden(f"{type(error).__name__}: {error}".removeprefix("_PassingError: "))
            if time.monotonic() + pause - failing_since > self.patience_seconds:
                raise ScoreError(
                    f"the server at {self.url} has been of no use for "
                    f"{self.patience_seconds:.0f} s; the last word: {reason[:300].rstrip('.')}. "
                    "What is scored is kept: look at the server, and run the same command again."
                )
            if self._given_up.wait(pause):
                raise ScoreError("given up, because another request has failed.")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _once(self, method: str, path: str, content: bytes | None) -> Any:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=self.patience_seconds)
        try:
            with self._lock:
                self._open.add(connection)
            connection.request(method, self._path + path, content, _headers())
            response = connection.getresponse()
            status, body = response.status, response.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if status in _NOT_THERE:
            return None
        if status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS:
            raise _PassingError(f"{status} {_said(body)}")
        if not http.client.OK <= status < http.client.MULTIPLE_CHOICES:
            where = f" Its key comes from {KEY_VARIABLE}." if status in (401, 403) else ""
            raise RefusedError(
                f"the server at {self.url} refuses {path}: {status} {_said(body)}.{where}"
            )
        try:
            return json.loads(body)
        except ValueError:
            raise _PassingError(f"an answer that is no JSON: {_said(body)}") from None


class RefusedError(ScoreError):
    """An answer that will be the same next time."""


class _PassingError(Exception):
    """An answer that may be better next time."""


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if key := _key():
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _key() -> str:
    """Read where it is used and kept nowhere, so that nothing that is printed, pickled or written
    can hold it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{KEY_VARIABLE} holds characters that no header may have.")
    return key


def _said(body: bytes) -> str:
    """What an answer says, in a line."""
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return _hidden(" ".join(text.split())[:300].rstrip("."))


def _hidden(text: str) -> str:
    """Servers repeat the key that they refuse."""
    key = _key()
    return text.replace(key, "(key)") if key else text
