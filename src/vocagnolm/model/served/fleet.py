"""One server or several that run the same model: requests go to the address that is free, one that
does not answer is left alone and tried again, and the work goes on with the others."""

import datetime
import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from vocagnolm.base.children import calling_after
from vocagnolm.errors import ServerError, UsageError, WaitingWarning
from vocagnolm.model.served.exchange import Exchange, PassingError
from vocagnolm.recipe.sections import ServerSection

USUAL_REQUESTS = 4
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 15.0
# An address that nobody answers is told soon; a server that has answered once is waited for.
_START_SECONDS = 5.0
# After so long without any answer we say what we wait for.
_SAID_SECONDS = 15.0
Engine = TypeVar("Engine")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Server(ServerSection, frozen=True):
    """A server that runs a model, or several of them, and how requests are sent to it. If it needs
    a key, the key is in the environment of every process that sends requests."""

    url: str | Sequence[str]

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)

    @classmethod
    def of(cls, server: "str | Sequence[str] | Server") -> "Server":
        """From what a caller gives: an address, several, or a `Server`."""
        return server if isinstance(server, Server) else cls(url=server)


@dataclass(eq=False)
class _Address(Generic[Engine]):
    """A server of a fleet, as far as it is known."""

    exchange: Exchange
    engine: Engine | None = None
    """None until it has answered."""
    opening: bool = False
    under_way: int = 0
    """Requests that wait for its answer."""
    used: int = 0
    """When it was last given a request, as a count of requests."""
    pause: float = 0.0
    """How long it is left alone, after it has failed again and again."""
    away_until: float = 0.0
    failing_since: float | None = None
    reason: str = ""


@dataclass
class _State:
    """What the threads that send requests share."""

    useful_at: float = field(default_factory=time.monotonic)
    """When any server last gave a useful answer."""
    requests: int = 0
    spread: bool = False
    said: bool = False
    given_up: bool = False


class Fleet(Generic[Engine]):
    """Servers that all run one model. What may pass is tried again, by any of them and not before
    a server's `Retry-After`, until none of them has been of use for the whole patience; what does
    not pass is an error at once."""

    def __init__(
        self, server: Server, opened: Callable[[Exchange], Engine], requests: int = USUAL_REQUESTS
    ):
        """`opened` meets a server: it is asked what it is before the first request. `requests`: how
        many each is sent at a time, where the user does not say."""
        urls = server.urls
        if not urls:
            raise UsageError("--server needs at least one address.")
        self._opened, self._patience = opened, server.patience_seconds
        exchanges = [Exchange(url, self._patience) for url in urls]
        by_url = {exchange.url: exchange for exchange in exchanges}
        if len(by_url) < len(exchanges):
            raise UsageError("--server names an address twice.")
        self._addresses = [_Address[Engine](exchange) for exchange in exchanges]
        self._each = server.requests or requests
        self._changed = threading.Condition()  # of a lock that its holder may take again
        self._state = _State()

    @property
    def named(self) -> str:
        return _listed([address.exchange.url for address in self._addresses])

    @property
    def most_requests(self) -> int:
        return self._each * len(self._addresses)

    def first(self, *, patient: bool) -> Engine:
        """The first server that answers. `patient` waits for servers that are being started."""
        start = self._patience if patient else min(_START_SECONDS, self._patience)
        for address in self._addresses:
            address.exchange.patience_seconds = start
        engine: Engine = self._call(lambda engine: engine, start)
        for address in self._addresses:
            address.exchange.patience_seconds = self._patience
        return engine

    def spread(self) -> None:
        """Use the other servers, too. Until then only the first that has answered is asked, so that
        the others can be compared with it when they are met."""
        self._state.spread = True

    def call(self, work: Callable[[Engine], _Result]) -> _Result:
        """What `work` makes of a server that is free, sent again where its request fails."""
        return self._call(work, self._patience)

    def each(
        self, work: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[tuple[_Item, _Result]]:
        """What `work` makes of every item by a `call`, as it comes, with several requests under
        way. What has come before an error, or together with it, comes before it here."""
        pool = ThreadPoolExecutor(self.most_requests)
        left = iter(items)
        calls: dict[Future[_Result], _Item] = {}

        self._state.useful_at = time.monotonic()  # nobody was asked before
        with self._all_or_none(pool):
            while True:
                for item in itertools.islice(left, 2 * self.most_requests - len(calls)):
                    calls[pool.submit(work, item)] = item
                if not calls:
                    return
                while not (done := wait(calls, _SAID_SECONDS, FIRST_COMPLETED).done):
                    since = self._state.useful_at
                    self._say_silence(time.monotonic() - since, since + self._patience)
                for call in sorted(done, key=lambda call: call.exception() is not None):
                    yield calls.pop(call), call.result()

    @contextmanager
    def _all_or_none(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """For requests of several threads that belong together: when the block ends by an error,
        those that are under way end at once."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._state.given_up = True
                self._changed.notify_all()
            for address in self._addresses:
                address.exchange.give_up()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self._state.given_up = False

    # ---- one request ----

    def _call(self, work: Callable[[Engine], _Result], patience: float) -> _Result:
        failing_since = None
        while True:
            address = self._taken(failing_since, patience)
            began = time.monotonic()
            try:
                if address.engine is None:
                    address.engine = self._opened(address.exchange)
                with calling_after(_SAID_SECONDS, partial(self._say_hanging, began, patience)):
                    result = work(address.engine)
            except PassingError as error:
                now = time.monotonic()
                silent = isinstance(error.__cause__, TimeoutError)
                failing_since = failing_since or (began if silent else now)
                self._failed(address, error, now)
            else:
                self._answered(address)
                return result
            finally:
                self._release(address)

    def _taken(self, failing_since: float | None, patience: float) -> "_Address[Engine]":
        """The address with the fewest requests among those that may be asked now. Waits for one,
        as long as the patience allows a request that has failed before."""
        with self._changed:
            while True:
                if self._state.given_up:
                    raise ServerError("given up, because another request has failed.")
                now = time.monotonic()
                asked = self._asked
                free = [a for a in asked if a.away_until <= now and self._has_room(a)]
                if free:
                    address = min(free, key=lambda a: (a.under_way, a.used))
                    self._state.requests += 1
                    address.under_way += 1
                    address.used = self._state.requests
                    address.opening = address.engine is None
                    return address
                away = [a.away_until for a in asked if a.away_until > now]
                pause = min(away) - now if away else None
                if len(away) == len(asked) and failing_since is not None:
                    since = max(failing_since, self._state.useful_at)
                    assert pause is not None
                    if now + pause - since > patience:
                        raise ServerError(self._last_words(patience))
                    self._say_silence(now - since, since + patience)
                self._changed.wait(pause)

    @property
    def _asked(self) -> "list[_Address[Engine]]":
        """The servers among which requests are spread."""
        met = [address for address in self._addresses if address.engine is not None]
        return met if met and not self._state.spread else self._addresses

    def _has_room(self, address: "_Address[Engine]") -> bool:
        """Whether the server takes another request; until it has been met, one at a time."""
        return address.under_way < self._each and not address.opening

    def _failed(self, address: "_Address[Engine]", error: PassingError, now: float) -> None:
        with self._changed:
            address.failing_since = address.failing_since or now
            address.reason = str(error)
            # several requests of one moment that fail together are one failure
            if now >= address.away_until:
                longer = min(2 * address.pause, _LONGEST_PAUSE_SECONDS)
                address.pause = longer or _FIRST_PAUSE_SECONDS
            wanted = max(address.pause * random.uniform(0.5, 1.0), error.after_seconds)
            address.away_until = max(address.away_until, now + wanted)
            others = [a for a in self._addresses if a.failing_since is None]
            is_new = address.failing_since == now
        if is_new and others:
            text = (
                f"{address.exchange.url} does not answer ({_brief(address.reason)}). The work goes "
                f"on with {_listed([a.exchange.url for a in others])}; it is tried again."
            )
            warnings.warn(text, WaitingWarning, stacklevel=2)

    def _answered(self, address: "_Address[Engine]") -> None:
        with self._changed:
            address.pause = address.away_until = 0.0
            address.failing_since, address.reason = None, ""
            self._state.useful_at, self._state.said = time.monotonic(), False

    def _release(self, address: "_Address[Engine]") -> None:
        with self._changed:
            address.under_way -= 1
            address.opening = False
            self._changed.notify_all()

    # ---- words ----

    def _say_hanging(self, began: float, patience: float) -> None:
        """Say that a request which began then has no answer, unless others are answered."""
        since = max(began, self._state.useful_at)
        self._say_silence(time.monotonic() - since, since + patience)

    def _say_silence(self, seconds: float, until: float) -> None:
        """Say what is waited for, how long, and until when; once until an answer comes."""
        with self._changed:
            if self._state.said or seconds < _SAID_SECONDS:
                return
            self._state.said = True
        left = datetime.timedelta(seconds=until - time.monotonic())
        text = (
            f"waiting for {self._reasons()} for {seconds:.0f} s, until "
            f"{datetime.datetime.now() + left:%H:%M:%S} (--server-patience)"
        )
        warnings.warn(text, WaitingWarning, stacklevel=2)

    def _reasons(self) -> str:
        why = [f" ({_brief(a.reason)})" if a.reason else "" for a in self._addresses]
        urls = [address.exchange.url for address in self._addresses]
        return _listed([url + said for url, said in zip(urls, why, strict=True)])

    def _last_words(self, patience: float) -> str:
        kept = "Finished work is kept: check the server, and run the same command again."
        if len(self._addresses) == 1:
            (address,) = self._addresses
            return (
                f"the server at {address.exchange.url} has not responded usefully for "
                f"{patience:.0f} s; last error: {address.reason[:300].rstrip('.')}. {kept}"
            )
        return (
            f"no server has responded usefully for {patience:.0f} s; last errors: "
            f"{self._reasons()}. {kept}"
        )


def _brief(reason: str) -> str:
    return reason[:80].rstrip(".")


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
