"""JSON over HTTP with one address: one attempt at a time, and a key that is never shown.

The standard library's client is enough: a request carries thousands of tokens, so its connection
costs nothing. It follows no redirection, which could carry the key to another host.
"""

import contextlib
import email.utils
import http.client
import json
import os
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from vocagnolm.base.files import parse_json
from vocagnolm.errors import ServerError, UsageError

KEY_VARIABLE = "VOCAGNOLM_SERVER_KEY"
USUAL_KEY_VARIABLE = "OPENAI_API_KEY"  # what other clients of such servers read
MOST_ANSWER_BYTES = 2**28
_NOT_THERE = (404, 405, 501)
_PASSING = (408, 425, 429)
_SERVER_ERROR = 500
_READ_BYTES = 2**20


class RefusedError(ServerError):
    """An answer that will be the same next time."""

    def __init__(self, said: str, status: int = 0):
        super().__init__(said)
        self.status = status

    @property
    def of_the_request(self) -> bool:
        """Whether another request might be taken: nothing is wrong with the key, or the account."""
        return self.status in (400, 413, 422)


class PassingError(Exception):
    """An answer that may be better next time, after so many seconds."""

    def __init__(self, said: str, after_seconds: float = 0.0):
        super().__init__(said)
        self.after_seconds = after_seconds


def read_address(url: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port and path of a server's address, without the `/v1` that others write."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"--server {url:.200}: expected an address like http://localhost:8000.")
    if parts.username or parts.password or parts.query:
        raise UsageError(
            "--server: an address with a user, a password or a query would be written down "
            f"with the plan. Put the key into the environment variable {KEY_VARIABLE}."
        )
    return parts.scheme, host, port, parts.path.rstrip("/").removesuffix("/v1")


class Exchange:
    """One address. `ask` makes one attempt: what may pass (5xx, too many requests, a connection
    that broke or never came, half an answer) is a `PassingError`, what will not is a
    `RefusedError`."""

    def __init__(self, url: str, patience_seconds: float):
        self._scheme, self._host, self._port, self._path = read_address(url)
        port = "" if self._port is None else f":{self._port}"
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{self._scheme}://{host}{port}{self._path}"
        self.patience_seconds = patience_seconds
        """For a whole answer, however slowly it comes."""
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """End the requests that are under way."""
        with self._lock:
            for there in self._open:
                _shut(there)

    def ask(self, path: str, content: dict[str, Any] | None = None) -> Any:
        """A POST of `content`, or a GET; None where the server has nothing under this path."""
        body = None if content is None else json.dumps(content).encode()
        try:
            status, wanted, answer = self._sent(path, body)
        except (OSError, http.client.HTTPException) as error:
            raise PassingError(hidden(f"{type(error).__name__}: {error}")[:300]) from error
        if status in _NOT_THERE:
            return None
        if status >= _SERVER_ERROR or status in _PASSING:
            raise PassingError(f"{status} {_said(answer)}", _seconds_until(wanted))
        if not http.client.OK <= status < http.client.MULTIPLE_CHOICES:
            variables = f"{KEY_VARIABLE} or {USUAL_KEY_VARIABLE}"
            where = f" Its key comes from {variables}." if status in (401, 403) else ""
            raise RefusedError(
                f"the server at {self.url} refuses {path}: {status} {_said(answer)}.{where}", status
            )
        try:
            return parse_json(answer)
        except ValueError:
            raise PassingError(f"a response that is not JSON: {_said(answer)}") from None

    def _sent(self, path: str, content: bytes | None) -> tuple[int, str, bytes]:
        """Status, `Retry-After` and body of the response."""
        secure = self._scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.patience_seconds)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := _key():
            headers["Authorization"] = f"Bearer {key}"
        connection.connect()
        there, late = connection.sock, threading.Event()  # a connection forgets it in the end
        assert there is not None

        def end() -> None:
            late.set()
            _shut(there)

        # the timeout of a connection is for one byte, and an answer may drip for ever
        deadline = threading.Timer(self.patience_seconds, end)
        deadline.daemon = True
        try:
            with self._lock:
                self._open.add(there)
            deadline.start()
            method = "GET" if content is None else "POST"
            connection.request(method, self._path + path, content, headers)
            response = connection.getresponse()
            return response.status, response.headers.get("Retry-After", ""), self._body(response)
        except (OSError, http.client.HTTPException):
            if late.is_set():
                raise TimeoutError(f"no whole response in {self.patience_seconds:.0f} s") from None
            raise
        finally:
            deadline.cancel()
            with self._lock:
                self._open.discard(there)
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        parts, size = [], 0
        while part := response.read(_READ_BYTES):
            parts.append(part)
            size += len(part)
            if size > MOST_ANSWER_BYTES:
                raise ServerError(
                    f"{self.url} sends a response of more than {MOST_ANSWER_BYTES >> 20} MiB. Ask "
                    "for less at a time: fewer --batch-tokens, --samples or --alternatives."
                )
        if response.length:  # of what was announced, something is missing
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)


def _shut(there: socket.socket) -> None:
    with contextlib.suppress(OSError):
        there.shutdown(socket.SHUT_RDWR)


def _seconds_until(retry_after: str) -> float:
    """The header is a number of seconds or a date; 0 where it is neither."""
    if (text := retry_after.strip()).isdecimal():
        return float(text[:9])
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        date = email.utils.parsedate_to_datetime(retry_after)
        return max(0.0, date.timestamp() - time.time())
    return 0.0


def _key() -> str:
    """Read where it is used, so that nothing that is printed, pickled or written can hold it."""
    name = KEY_VARIABLE if KEY_VARIABLE in os.environ else USUAL_KEY_VARIABLE
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{name} contains characters that are not allowed in a header.")
    return key


def _said(body: bytes) -> str:
    """What an answer says, in a line."""
    text = body[:_READ_BYTES].decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        content = parse_json(text)
        error = content.get("error", content) if isinstance(content, dict) else content
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return hidden(" ".join(text.split()))[:300].rstrip(".")


def hidden(text: str) -> str:
    """Servers repeat the key that they refuse."""
    key = _key()
    return text.replace(key, "(key)") if key else text
