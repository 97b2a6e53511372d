"""What goes wrong between a client and the fake API server, on request of a test, a scenario or a person.

Every request of either door passes ``Gate.arrive`` before the store acts and ``Gate.answer`` after it. Faults are
matched against the request, so they hit an observed step ("the second status patch of web-0") and never a moment that
was slept for; a fault counts its hits, and a test that placed one asserts that it was met.

``match`` is a glob over ``"VERB path"`` (``"PATCH */pods/web-0/status"``, ``"* */leases/*"``) or a predicate over the
``Request``. Verbs are GET, LIST, WATCH, POST, PUT, PATCH, DELETE and DELETECOLLECTION.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from gevent.event import Event

from simulator.chance import Chance
from vkcocoon_kube import ApiError
from vkcocoon_probes import Clock

__all__ = ["Failure", "Gate", "Hold", "Match", "Request"]

JITTER_S = 0.002  # what moves greenlets against each other


class Request(NamedTuple):
    """One request as it arrived; ``at`` in seconds of the clock, ``path`` without its query.

    ``options`` is the query by its wire names, and for a PATCH its ``kind``.
    """

    at: float
    verb: str
    path: str
    body: Any = None
    options: Mapping[str, str] = {}

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


Match = str | Callable[[Request], bool]
Delay = float | Callable[[Request], float]


def _matches(match: Match, request: Request) -> bool:
    return fnmatchcase(str(request), match) if isinstance(match, str) else match(request)


def _seconds(delay: Delay, request: Request) -> float:
    return delay(request) if callable(delay) else delay


class Failure:
    """Answers matching requests with an error, ``times`` times, or until ``cancel`` when it is None."""

    def __init__(self, match: Match, error: ApiError, times: int | None, stored: bool) -> None:
        self.match = match
        self.error = error
        self.left = times
        self.stored = stored
        self.hits = 0

    def cancel(self) -> None:
        self.left = 0

    def strike(self, request: Request) -> None:
        """Raise the error when the request is one of those to fail."""
        if self.left == 0 or not _matches(self.match, request):
            return
        self.hits += 1
        if self.left is not None:
            self.left -= 1
        raise self.error


class Hold:
    """Keeps matching requests waiting; what a client sees is a connection that stays open and silent.

    ``reached`` is set when the first request is held, ``release`` lets all of them go on.
    """

    def __init__(self, match: Match, stored: bool) -> None:
        self.match = match
        self.stored = stored
        self.hits = 0
        self.reached = Event()
        self.released = False
        self._kept: set[Event] = set()

    def release(self) -> None:
        self.released = True
        for event in self._kept:
            event.set()
        self._kept.clear()

    def catches(self, request: Request) -> bool:
        return not self.released and _matches(self.match, request)

    def keep(self, event: Event) -> None:
        """Count one who waits on ``event``, and set it at the release."""
        if event not in self._kept:
            self._kept.add(event)
            self.hits += 1
            self.reached.set()


class Gate:
    """All faults in force. Waits through the clock only, and not at all while there is no fault and no seed."""

    def __init__(self, clock: Clock, rng: random.Random | None) -> None:
        self.down = False
        self.latency: Delay = 0.0
        self.watch_delay: Delay = 0.0
        self.jitter_s = JITTER_S  # with a seed, each way of a request takes up to this long
        self.failures: list[Failure] = []
        self.holds: list[Hold] = []
        self.clock = clock
        self._rng = rng

    def arrive(self, request: Request, patience: float | None) -> None:
        """Let a request through to the store, late, or raise; ``patience``: how long its client waits for an answer."""
        self._refuse_when_down()
        self._travel(request)
        self._refuse_when_down()
        self._strike(request, stored=False)
        self._hold(request, patience, stored=False)

    def answer(self, request: Request, patience: float | None) -> None:
        """Let the answer of an executed request through, late, or raise: stored, and yet not known to the client."""
        self._strike(request, stored=True)
        self._hold(request, patience, stored=True)
        self._travel(request)
        self._refuse_when_down()

    def holding(self, request: Request) -> Hold | None:
        """The hold that keeps this request from getting anything more, if there is one."""
        self.holds = [hold for hold in self.holds if not hold.released]
        return next((hold for hold in self.holds if not hold.stored and hold.catches(request)), None)

    def event_delay(self, request: Request) -> float:
        """Seconds until a change reaches the watch that ``request`` opened."""
        return _seconds(self.watch_delay, request) + self._jitter(request)

    def _jitter(self, request: Request) -> float:
        if isinstance(self._rng, Chance):  # by request and instant, whatever else is under way
            return self.jitter_s * self._rng.unit(request, self.clock.monotonic())
        return 0.0 if self._rng is None else self._rng.uniform(0, self.jitter_s)

    def _refuse_when_down(self) -> None:
        if self.down:
            raise ApiError(0, "ConnectionRefused", "the API server does not answer: connection refused")

    def _travel(self, request: Request) -> None:
        seconds = _seconds(self.latency, request) / 2 + self._jitter(request)
        if seconds > 0:
            self.clock.sleep(seconds)

    def _strike(self, request: Request, *, stored: bool) -> None:
        self.failures = [failure for failure in self.failures if failure.left != 0]
        for failure in self.failures:
            if failure.stored is stored:
                failure.strike(request)

    def _hold(self, request: Request, patience: float | None, *, stored: bool) -> None:
        for hold in list(self.holds):
            if hold.stored is stored and hold.catches(request):
                released = Event()
                hold.keep(released)
                if not self.clock.wait(released, patience):
                    raise ApiError(0, "Timeout", f"no answer to {request} within {patience:g} s")
