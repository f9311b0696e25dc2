"""A bucket of an object store, through obstore (extra `bucket`).

Every step is one request that happens as a whole or not at all; `create` is put-if-absent, which
the server decides. There are no locks and no renames. Credentials are those of the usual places
and go nowhere else.
"""

import contextlib
import datetime
import os
import random
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vocagnolm.base import files
from vocagnolm.base.children import calling_after
from vocagnolm.errors import AddressError, VocagnolmError, WaitingWarning, optional

BUCKET_SCHEMES = ("s3", "gs", "az")
PROBE = "probe"
PATIENCE_VARIABLE, PATIENCE_SECONDS = "VOCAGNOLM_STORAGE_PATIENCE", 600.0
"""For so long a storage may be away before a run ends: an environment variable, in seconds."""
_START_SECONDS, _SAID_SECONDS, _HANGING_SECONDS = 20.0, 5.0, 30.0
_REQUEST_SECONDS = 900.0
"""For a whole request with its body: a large shard over a slow line."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0
_REFRESH = datetime.timedelta(minutes=10)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
Result = TypeVar("Result")


class Bucket:
    """The storage behind an address like `s3://bucket/stores/qwen`. It can be sent to other
    processes; a forked process cannot use what its parent has opened."""

    _conditional = True

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        parts = urlsplit(self.address)
        if "@" in parts.netloc:  # not repeated: it may hold a secret
            raise AddressError(
                f"an address {parts.scheme}://...@... with credentials in it is refused: they "
                f"would appear in manifests and logs. Use the environment or a profile."
            )
        if not parts.netloc:
            raise AddressError(f"{address} names no bucket.")

    def __str__(self) -> str:
        return self.address

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address}

    def shown(self, name: str) -> str:
        return f"{self.address}/{name}"

    def files(self, *folders: str) -> dict[str, int]:
        listed = self._request("listed", lambda obstore: obstore.list(self._store).collect())
        return {entry["path"]: entry["size"] for entry in listed}

    def has(self, name: str) -> bool:
        try:
            self._request("read", lambda obstore: obstore.head(self._store, name), name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> memoryview:
        content = self._request("read", lambda o: o.get(self._store, name).bytes(), name)
        return memoryview(content)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        def attempt(obstore: Any) -> bytes:
            return bytes(obstore.get_range(self._store, name, start=start, end=stop))

        return self._request("read", attempt, name)

    def create(self, name: str, content: bytes) -> bool:
        def attempt(obstore: Any) -> bool:
            try:
                obstore.put(self._store, name, content, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                return self._holds(name, content)  # an attempt of ours whose answer was lost
            except (obstore.exceptions.BaseError, NotImplementedError) as error:
                unknown = isinstance(error, NotImplementedError)
                if not unknown and _code(str(error)) != "NotImplemented":
                    raise
                self._conditional = False  # the best that it has
                if self.has(name):
                    return self._holds(name, content)
                obstore.put(self._store, name, content)
            return True

        files.reached("begin", PurePosixPath(name))
        created = self._request("written", attempt, name)
        files.reached("created", PurePosixPath(name))
        return created

    def _holds(self, name: str, content: bytes) -> bool:
        """Whether a file that was just there is ours. Its writer may have removed it since."""
        try:
            return self.read(name) == content
        except FileNotFoundError:
            return False

    def put(self, name: str, content: bytes) -> None:
        files.reached("begin", PurePosixPath(name))
        self._request("written", lambda obstore: obstore.put(self._store, name, content), name)
        files.reached("put", PurePosixPath(name))

    def remove(self, *names: str) -> None:
        if names:
            files.reached("begin removing", PurePosixPath(names[0]))
            with contextlib.suppress(FileNotFoundError):
                self._request("removed", lambda o: o.delete(self._store, list(names)))

    def tidy(self, *folders: str) -> None:
        """Nothing unfinished has a name here; only a probe of a killed process may be left."""
        self.remove(*(name for name in self.files() if name.startswith(f"{PROBE}-")))

    def try_writing(self) -> str | None:
        """Test put-if-absent twice: rclone's server silently ignores it, others refuse it."""
        name = f"{PROBE}-{secrets.token_hex(4)}"
        try:
            first, second = self.create(name, b"first"), self.create(name, b"second")
        finally:
            with contextlib.suppress(AddressError):
                self.remove(name)
        if first and not second and self._conditional:
            return None
        return (
            f"{self.address}: the server does not keep to put-if-absent, so of two processes at "
            "one shard the last one may count, not the first. Let no two of them score the same "
            "share."
        )

    def lock(
        self, advice: str, *, shared: bool = False, patience: float = 0.0
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @cached_property
    def _store(self) -> Any:
        _obstore(self.address)
        from obstore import store

        from_url: Any = store.from_url  # whose types know one kind of bucket each
        options = _s3_options() if self.address.startswith("s3:") else {}
        client = {
            "timeout": f"{_REQUEST_SECONDS:.0f}s",
            "connect_timeout": "10s",
            **options.pop("client", {}),
        }
        retries = {"max_retries": 3, "retry_timeout": datetime.timedelta(seconds=30)}
        with self._translated("opened", self.address):
            return from_url(self.address, client_options=client, retry_config=retries, **options)

    def _request(self, done: str, request: Callable[[Any], Result], name: str = "") -> Result:
        obstore, shown = _obstore(self.address), self.shown(name) if name else self.address

        def attempt() -> Result:
            with self._translated(done, shown):
                return request(obstore)

        return patiently(attempt, _server_of(self.address), limit_seconds=_REQUEST_SECONDS)

    @contextlib.contextmanager
    def _translated(self, done: str, shown: str) -> Iterator[None]:
        """obstore's errors in our words; its own hold whole responses."""
        from obstore import exceptions

        try:
            yield
        except (FileNotFoundError, exceptions.BaseError) as error:
            code = _code(str(error))
            if isinstance(error, FileNotFoundError) and code not in _NO_BUCKET:
                raise FileNotFoundError(shown) from None
            refused = isinstance(
                error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
            )
            message, final = _explained(shown, done, str(error), code, refused)
            raise (AddressError if final else BrokenOffError)(message) from None


# ---- patience ----


class BrokenOffError(Exception):
    """A request that may go well the next time."""


def patiently(
    request: Callable[[], Result],
    server: str,
    error: type[VocagnolmError] = AddressError,
    limit_seconds: float | None = None,
) -> Result:
    """Repeat a request that breaks off, for minutes and with random pauses, so that a storage that
    is away for a while ends nobody's run. A server that has never answered is given up soon: its
    address may be wrong. `limit_seconds`: how long a single request may take, if it has a limit;
    one that takes long is mentioned."""
    longest = float(os.environ.get(PATIENCE_VARIABLE, PATIENCE_SECONDS))
    began, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
    said = False

    def say(what: str, until: float) -> None:
        """Say what is waited for, how long, and until when; once for a request."""
        nonlocal said
        if not said:
            now = time.monotonic()
            end = datetime.datetime.now() + datetime.timedelta(seconds=until - now)
            text = f"{what} for {now - began:.0f} s; it is waited for until {end:%H:%M:%S}"
            warnings.warn(text, WaitingWarning, stacklevel=3)
        said = True

    def hangs() -> None:
        say(f"a request to {server} has been under way", time.monotonic() + (limit_seconds or 0.0))

    while True:
        watched = nullcontext() if limit_seconds is None else calling_after(_HANGING_SECONDS, hangs)
        try:
            with watched:
                result = request()
        except BrokenOffError as broken:
            waited = time.monotonic() - began
            if waited + pause > (longest if server in _answered else min(longest, _START_SECONDS)):
                raise error(str(broken)) from None
            if waited > _SAID_SECONDS:
                say(f"{server} has not answered", began + longest)
        except Exception:
            _answered.add(server)
            raise
        else:
            _answered.add(server)
            return result
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


_answered: set[str] = set()
"""Servers that have answered this process."""


def _server_of(address: str) -> str:
    return "://".join(urlsplit(address)[:2])


def _code(text: str) -> str | None:
    """What S3 calls the error."""
    match = re.search(r"<Code>(\w+)</Code>", text)
    return match[1] if match else None


def _explained(
    shown: str, done: str, text: str, code: str | None, refused: bool
) -> tuple[str, bool]:
    """The message, and whether another attempt is vain."""
    bucket = _server_of(shown)
    status = re.search(r"status code: (\d{3})", text)
    number = status[1] if status else ""
    if code in _NO_BUCKET or (number == "404" and "list request" in text):
        return f"{shown} could not be {done}: there is no bucket {bucket}. Make it first.", True
    if refused or number in ("401", "403") or "credential" in text.lower():
        said = f" ({code})" if code else ""
        return (
            f"{shown} could not be {done}: the server of {bucket} does not accept the "
            f"credentials{said}, or they may not do this. They are taken from the usual places: "
            f"{_USUAL[urlsplit(shown).scheme]}.",
            True,
        )
    first = text.strip().partition("\n")[0].partition(" - Server returned")[0]
    reason = f"{code}, {first}" if code else first
    return (
        f"{shown} could not be {done}: {reason[:300]}. What was finished before is kept. Check the "
        "address, the endpoint and the network, and run the same command again.",
        number.startswith("4") and number not in ("408", "429"),
    )


_USUAL = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws (AWS_PROFILE); "
    "AWS_ENDPOINT_URL for a server that is not Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or `az login`",
}


def _obstore(address: str) -> Any:
    return optional("obstore", "bucket", f"reading and writing {address}")


def _s3_options() -> dict[str, Any]:
    """Credentials, region and endpoint as the AWS tools find them, where botocore is there; obstore
    itself knows the environment only."""
    options: dict[str, Any] = {"config": {}, "client": {}}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        pass
    else:
        session = botocore.session.get_session()
        try:
            endpoint = endpoint or session.get_scoped_config().get("endpoint_url")
            resolved = session.get_credentials()
            region = session.get_config_variable("region")
        except botocore.exceptions.BotoCoreError as error:  # a profile that is not there
            raise AddressError(f"the AWS settings cannot be read: {error}.") from None
        options["config"]["region"] = region or "us-east-1"
        if resolved is None:
            options["config"]["skip_signature"] = True  # a public bucket needs none
        else:
            options["credential_provider"] = _refreshed(resolved)
    if endpoint:
        options["config"]["endpoint"] = endpoint
        options["client"]["allow_http"] = endpoint.startswith("http://")
    return options


def _refreshed(resolved: Any) -> Callable[[], dict[str, Any]]:
    """botocore's credentials, which it refreshes when they end, for obstore."""

    def credentials() -> dict[str, Any]:
        now = resolved.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.datetime.now(datetime.UTC) + _REFRESH,
        }

    return credentials
