"""When to probe, and what counts as a flip.

The problem: nobody polls us, so a pod's readiness is what one small loop per pod last concluded and pushed. This module
owns that loop and nothing else. Keys are opaque strings; it knows no pod, no VM and no network.

    ProbeManager.start(key, probe, on_update)   first probe in the caller, then one greenlet per key
    the greenlet                                pause, probe, debounce, and on a change on_update()
    ProbeManager.get(key)                       what the probes say, debounced
    ProbeManager.forget(key, owner)             the greenlet leaves; a result in flight is dropped

Lifetime rules:

- The agent object is the ownership token. An agent may store a result or call back only while it is the registered
  agent of its key, and asks again after everything that may have switched greenlets (P3).
- There is no lock, because between that question and the use of its answer there is no switch. Keep it so: no logging
  handler, observer or callback that runs in here may wait.
- An agent is stopped by its event. It is never joined or killed from inside its own greenlet; ``close`` kills what has
  not left by itself after a grace.

All waiting and every reading of time goes through a ``Clock``: ``SystemClock`` here, ``simulator.clock.VirtualClock``
in the simulator and in tests. The provider calls the manager; the manager calls the provider's two closures.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import gevent
from gevent import get_hub, getcurrent
from gevent.event import Event
from gevent.hub import Waiter
from gevent.pool import Group

__all__ = [
    "Bound",
    "Cadence",
    "Clock",
    "Deadline",
    "Probe",
    "ProbeAgent",
    "ProbeManager",
    "ProbeResult",
    "ProbeTimeout",
    "SystemClock",
    "deaths",
    "microseconds",
    "spawn",
]

log = logging.getLogger(__name__)

# Kubernetes names beside the values that play their part.
TIMEOUT_S = 3.0  # timeoutSeconds: everything one probe does
FIRST_PAUSE_S = 0.1  # a guest that boots fast is met within 100 ms
GROWTH = 1.5
MAX_PAUSE_S = 1.0  # a slow guest is still met within a second
STEADY_PAUSE_S = 5.0  # periodSeconds once ready
FAILURE_THRESHOLD = 3  # failureThreshold
OVERDUE_PAUSES = 3  # after so many missed pauses a probe is not late but lost
LEAST_PATIENCE_S = 0.25  # an echo of a booting guest waits at least this long (T1)
# A real loop fires two timers for one instant in no promised order. The bound goes last, so that a dial which uses its
# whole deadline fails with its own reason rather than, now and then, with ours.
BOUND_SLACK_S = 0.02
CLOSE_GRACE_S = 1.0  # for probes in flight when the manager closes; after that they are killed

REASON_TIMEOUT = "ProbeTimeout"
REASON_ERROR = "ProbeError"


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Every way to read time or to let it pass."""

    def monotonic(self) -> float:
        """Seconds that never go backwards: for pace, bounds and rate limits (T4)."""

    def now(self) -> datetime:
        """Wall time, aware, UTC: for expiry and timestamps only (T4)."""

    def wait(self, event: Event, timeout: float | None) -> bool:
        """Wait until ``event`` is set (True) or ``timeout`` seconds have passed (False).

        None waits for ever. Zero or less gives everybody else one turn. An event that was set at the very instant of
        the timeout counts as set.
        """

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass; zero or less gives everybody else one turn."""

    def timeout(self, seconds: float) -> AbstractContextManager[None]:
        """Bound a block, even one that swallows every Exception; raises ProbeTimeout (see ``Bound``)."""


class ProbeTimeout(Exception):
    """A block bounded by ``Clock.timeout`` took too long."""


class _Interrupt(BaseException):
    """Thrown into a block that is over its bound. Not an Exception: no library's ``except Exception`` may stop it."""


class Bound:
    """The block behind ``Clock.timeout``: interrupted by a private BaseException that leaves it as ProbeTimeout.

    A block that swallowed the interrupt and went on is late all the same and ends with ProbeTimeout. Somebody else's
    BaseException (a kill, an outer bound) passes through untouched. No time at all fails before the block begins.

    Subclasses say how to start the timer that throws ``self.interrupt`` into the current greenlet, and how to stop it.
    """

    __slots__ = ("_seconds", "interrupt")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.interrupt = _Interrupt()

    def arm(self, seconds: float) -> None:
        """Start the timer."""
        raise NotImplementedError

    def disarm(self) -> bool:
        """Stop the timer; True when it had fired."""
        raise NotImplementedError

    def __enter__(self) -> None:
        if self._seconds <= 0:
            raise ProbeTimeout("no time left")
        self.arm(self._seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.disarm():
            return
        if error is None or error is self.interrupt:
            raise ProbeTimeout(f"took longer than {self._seconds:g} s") from None
        if isinstance(error, Exception):
            raise ProbeTimeout(f"took longer than {self._seconds:g} s") from error


class _SystemBound(Bound):
    __slots__ = ("_timer",)

    def arm(self, seconds: float) -> None:
        # The loop's own timer: gevent.Timeout would cost every probe as much again as the rest of its bookkeeping.
        self._timer: Any = get_hub().loop.timer(seconds + BOUND_SLACK_S)
        self._timer.start(getcurrent().throw, self.interrupt, update=True)

    def disarm(self) -> bool:
        waits = self._timer.active or self._timer.pending
        self._timer.close()
        return not waits


class SystemClock:
    """The system's clocks and gevent's timers."""

    def monotonic(self) -> float:
        return time.monotonic()  # noqa: TID251  this class is where time comes from

    def now(self) -> datetime:
        return datetime.now(UTC)  # noqa: TID251  this class is where time comes from

    def wait(self, event: Event, timeout: float | None) -> bool:
        if event.is_set():
            return True
        if timeout is None:
            return bool(event.wait())
        # As Event.wait does it, without an exception to end it: this is what each probe waits with.
        waiter: Waiter[object] = Waiter()
        wake = waiter.switch
        timer = get_hub().loop.timer(max(0.0, timeout))
        timer.start(wake, None, update=True)  # from now, not from when the loop last looked
        event.rawlink(wake)
        try:
            woken = waiter.get() is event
        finally:
            timer.close()
            event.unlink(wake)
        return woken or event.is_set()  # set at the instant the timer came counts, too

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            gevent.sleep(seconds)  # noqa: TID251  this class is where waiting happens
        else:
            # gevent.sleep(0) goes before all timers: who gives way again and again would hold up probes that are due.
            self.wait(Event(), 0)

    def timeout(self, seconds: float) -> AbstractContextManager[None]:
        return _SystemBound(seconds)


def microseconds(seconds: float) -> int:
    """``seconds`` as the integer that pauses and deadlines are kept in: sums of floats would drift off the instants."""
    return round(seconds * 1_000_000)


class Deadline:
    """An instant by which something must be done, handed down to what does it.

    ``remaining()`` is exactly 0 or at least a microsecond, so ``while not expired: wait(remaining())`` always ends.
    """

    __slots__ = ("_clock", "_end_us", "_patience_s")

    def __init__(self, clock: Clock, seconds: float, *, patience: float | None = None) -> None:
        self._clock = clock
        self._end_us = microseconds(clock.monotonic() + seconds)
        self._patience_s = patience

    def remaining(self) -> float:
        """Seconds left, never negative."""
        left_us = self._end_us - microseconds(self._clock.monotonic())
        return left_us / 1_000_000 if left_us > 0 else 0.0

    @property
    def expired(self) -> bool:
        return self._end_us <= microseconds(self._clock.monotonic())

    def of_one_echo(self) -> Deadline:
        """The deadline of an echo that begins now: after its patience, if there is a limit to it (T1)."""
        return self if self._patience_s is None else self.at_most(self._patience_s)

    def at_most(self, seconds: float) -> Deadline:
        """A deadline on the same clock that is ``seconds`` away, or this one's instant if that is nearer."""
        nearer = Deadline(self._clock, seconds, patience=self._patience_s)
        return nearer if nearer._end_us < self._end_us else self


# ---------------------------------------------------------------------------------------------------------------------
# Greenlets
# ---------------------------------------------------------------------------------------------------------------------


def spawn(group: Group, name: str, function: Callable[..., Any], *args: Any) -> gevent.Greenlet[..., Any]:
    """Start ``function(*args)`` in a greenlet of ``group``; the only way to spawn in this project.

    ``name`` says what it does for whom (``probe default/web-0``) in logs and dumps. A death by exception is logged.
    """
    greenlet = gevent.Greenlet(function, *args)
    greenlet.name = name
    greenlet.link_exception(_log_death)
    group.start(greenlet)
    return greenlet


_deaths = 0


def deaths() -> int:
    """How many greenlets of this process have ended with an exception so far."""
    return _deaths


def _log_death(greenlet: gevent.Greenlet[..., Any]) -> None:
    global _deaths  # noqa: PLW0603  one process, one count
    _deaths += 1
    log.error("greenlet died greenlet=%r", greenlet.name, exc_info=greenlet.exc_info)


# ---------------------------------------------------------------------------------------------------------------------
# One pod
# ---------------------------------------------------------------------------------------------------------------------


class ProbeResult(NamedTuple):
    """What one probe found.

    ``reason`` is UpperCamelCase for machines and ``message`` a sentence for people, without counters or round-trip
    times: equal states must compare equal (P7). ``at`` is aware, UTC; the manager sets it to the end of the probe.
    """

    ready: bool = False
    reason: str = ""
    message: str = ""
    at: datetime | None = None


NEVER_PROBED = ProbeResult()

Probe = Callable[[Deadline], ProbeResult]


@dataclass(frozen=True, slots=True)
class Cadence:
    """The pace of all agents of a manager, in whole microseconds."""

    ramp_us: tuple[int, ...]  # pauses while not ready; the last one repeats
    steady_us: int
    failure_threshold: int

    @classmethod
    def growing(cls, first: float, growth: float, most: float, steady: float, threshold: int) -> Cadence:
        """Pauses in seconds from ``first``, each ``growth`` times the one before, up to ``most``; raises ValueError."""
        if not (0 < first <= most and steady > 0 and threshold >= 1 and (growth > 1 or first == most)):
            raise ValueError(f"no such pace: {first=} {growth=} {most=} {steady=} {threshold=}")
        ramp_us, pause_us, most_us = [], microseconds(first), microseconds(most)
        while pause_us < most_us:
            ramp_us.append(pause_us)
            # At least one more each time, or a small first pause would be rounded back to itself for ever.
            pause_us = max(pause_us + 1, round(pause_us * growth))
        return cls((*ramp_us, most_us), microseconds(steady), threshold)


class ProbeAgent:
    """The probing of one key: its closures, its debounced state, and its place in the ramp of pauses.

    ``result`` is what readers see: the newest success, or the failure that flipped it and then the newest failure;
    never one of the first failures after a success (P1). Only ``observe`` writes the state.
    """

    __slots__ = (
        "_cadence",
        "_rung",
        "complaint",
        "due",
        "failures",
        "key",
        "last",
        "on_update",
        "probe",
        "result",
        "stop",
        "took",
    )

    def __init__(self, key: str, probe: Probe, on_update: Callable[[], None], cadence: Cadence) -> None:
        self.key = key
        self.probe = probe
        self.on_update = on_update
        self.stop = Event()
        self.result = NEVER_PROBED
        self.failures = 0  # in a row, while still shown as ready
        self.last = NEVER_PROBED  # the newest result, whatever readers see
        self.took = 0.0  # seconds it took
        self.due = 0.0  # monotonic instant of the next probe
        self.complaint = ""  # the error the log already has
        self._cadence = cadence
        self._rung = -1  # on the ramp; before the first result below it

    def __repr__(self) -> str:
        return f"<ProbeAgent {self.key} ready={self.ready} failures={self.failures} stopped={self.stop.is_set()}>"

    @property
    def ready(self) -> bool:
        """What the probes say, debounced; not what is published."""
        return self.result.ready

    @property
    def pause_us(self) -> int:
        """Microseconds between the return of one probe and the next. Follows the debounced state (T2, T3)."""
        if self.result.ready:
            return self._cadence.steady_us
        ramp_us = self._cadence.ramp_us
        return ramp_us[min(max(self._rung, 0), len(ramp_us) - 1)]

    @property
    def patience(self) -> float | None:
        """Seconds one echo may wait (T1); None leaves it the whole bound."""
        return None if self.result.ready else max(LEAST_PATIENCE_S, self.pause_us / 1_000_000)

    def observe(self, result: ProbeResult) -> bool:
        """Count ``result``; True when readers must be told: a flip, or while not ready another reason or message (P7).

        Up with one success, down with the failure that reaches the threshold; a success forgets the failures before it.
        """
        seen = self.result
        if result.ready:
            self.failures = 0
        elif seen.ready:
            self.failures += 1
            if self.failures < self._cadence.failure_threshold:
                return False
            self._rung = 0
        else:
            self._rung += 1
        self.result = result
        if result.ready or seen.ready:
            return result.ready != seen.ready
        return (result.reason, result.message) != (seen.reason, seen.message)


# ---------------------------------------------------------------------------------------------------------------------
# All pods
# ---------------------------------------------------------------------------------------------------------------------

Observer = Callable[[ProbeAgent, ProbeResult, float, float], None]


class ProbeManager:
    """At most one agent per key, each probing in its own greenlet.

    ``observer(agent, result, lateness_s, took_s)`` is called after each probe of a registered agent, with the raw
    result, how late the probe began and how long it took; like ``on_update`` it must not switch greenlets (P4).
    """

    def __init__(
        self,
        clock: Clock,
        *,
        timeout: float = TIMEOUT_S,
        first_pause: float = FIRST_PAUSE_S,
        growth: float = GROWTH,
        max_pause: float = MAX_PAUSE_S,
        steady_pause: float = STEADY_PAUSE_S,
        failure_threshold: int = FAILURE_THRESHOLD,
        observer: Observer | None = None,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"a probe needs time: {timeout=}")
        self._clock = clock
        self._timeout = timeout
        self._cadence = Cadence.growing(first_pause, growth, max_pause, steady_pause, failure_threshold)
        self._observer = observer
        self._agents: dict[str, ProbeAgent] = {}
        self._group = Group()
        self._quiet = Event()  # set while no greenlet of ours is left
        self._quiet.set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._agents)

    def __contains__(self, key: str) -> bool:
        return key in self._agents

    def start(self, key: str, probe: Probe, on_update: Callable[[], None]) -> ProbeAgent:
        """Probe ``key`` once in the caller and then in a greenlet of its own, until ``forget``.

        Replaces an agent the key already has. When this returns, ``get`` tells the first result, and nothing has been
        called back for it: the caller publishes (P2). If the agent lost its key meanwhile, the result is dropped and
        there is no greenlet. After ``close`` nothing is probed at all.
        """
        agent = ProbeAgent(key, probe, on_update, self._cadence)
        if self._closed:
            agent.stop.set()
            return agent
        if (former := self._agents.get(key)) is not None:
            self._retire(former)
        self._agents[key] = agent
        agent.due = self._clock.monotonic()
        try:
            self._probe_once(agent)
        except BaseException:
            # The caller is being killed or interrupted: without a greenlet the agent would be registered for ever.
            self._retire(agent)
            raise
        if self._owns(agent):
            self._quiet.clear()
            greenlet = spawn(self._group, f"probe {key}", self._run, agent)
            # Not a finally in _run: a greenlet killed before its first switch never gets there.
            greenlet.rawlink(functools.partial(self._ended, agent))
        return agent

    def forget(self, key: str, owner: ProbeAgent | None = None) -> bool:
        """Stop probing ``key``; with ``owner``, only if that is still its agent (P3). False when nothing was stopped.

        Does not wait. Once it returned, nothing of that agent is stored or called back any more, even from a probe that
        is still in flight (P4).
        """
        agent = self._agents.get(key)
        if agent is None or (owner is not None and owner is not agent):
            return False
        self._retire(agent)
        return True

    def get(self, key: str) -> ProbeResult:
        """What the probes of ``key`` say, debounced (P1); an empty, not-ready result when it is unknown."""
        agent = self._agents.get(key)
        return NEVER_PROBED if agent is None else agent.result

    def overdue(self) -> list[tuple[str, float]]:
        """The keys whose probe should have come back long ago, and how many seconds ago it was due; memory only.

        A probe may begin late and take its whole bound; one that is late by several pauses on top of that will hardly
        come back, and what is published of its pod has become a guess.
        """
        now = self._clock.monotonic()
        late = []
        for agent in self._agents.values():
            allowed = self._timeout + OVERDUE_PAUSES * agent.pause_us / 1_000_000
            if now - agent.due > allowed:
                late.append((agent.key, now - agent.due))
        return late

    def close(self) -> None:
        """Forget everything and refuse new work; wait until the greenlets have left, and kill those that do not.

        Takes at most twice the grace. Called from a callback, which runs in one of those greenlets, it does not wait.
        """
        self._closed = True
        for agent in list(self._agents.values()):
            self._retire(agent)
        if any(greenlet is getcurrent() for greenlet in self._group):
            return
        if self._clock.wait(self._quiet, CLOSE_GRACE_S):
            return
        self._group.kill(block=False)
        if not self._clock.wait(self._quiet, CLOSE_GRACE_S):
            log.error("probes survived being killed greenlets=%r", sorted(greenlet.name for greenlet in self._group))

    # Inside

    def _owns(self, agent: ProbeAgent) -> bool:
        return self._agents.get(agent.key) is agent

    def _retire(self, agent: ProbeAgent) -> None:
        # First the registry, then the signal: whoever is woken by it must find the key free.
        if self._owns(agent):
            del self._agents[agent.key]
        agent.stop.set()

    def _ended(self, agent: ProbeAgent, _: object) -> None:
        # In the hub, however the greenlet ended.
        self._retire(agent)
        if not self._group:  # which has let go of it already: its own link was made first
            self._quiet.set()

    def _run(self, agent: ProbeAgent) -> None:
        # The pause counts from the return of the previous probe, so time spent in on_update is not added to it (T2).
        while not self._clock.wait(agent.stop, agent.due - self._clock.monotonic()):
            if self._probe_once(agent) and self._owns(agent):
                self._call_back(agent)

    def _probe_once(self, agent: ProbeAgent) -> bool:
        """Probe, and count the result if the agent still owns its key; True when readers must be told."""
        began = self._clock.monotonic()
        result = self._guarded(agent)
        if not self._owns(agent):
            return False
        ended = self._clock.monotonic()
        was_ready = agent.result.ready
        agent.last, agent.took = result, ended - began
        changed = agent.observe(result)
        lateness, agent.due = began - agent.due, ended + agent.pause_us / 1_000_000
        if changed or not result.ready:
            _log_probe(agent, result, was_ready)
        if self._observer is not None:
            try:
                self._observer(agent, result, lateness, ended - began)
            except Exception:  # a metric must not end the loop of a pod
                log.exception("observer failed key=%s", agent.key)
        return changed

    def _guarded(self, agent: ProbeAgent) -> ProbeResult:
        """The result of one bounded probe; what the closure raises is a failed result, a kill ends the agent (P5)."""
        clock = self._clock
        try:
            with clock.timeout(self._timeout):
                result = agent.probe(Deadline(clock, self._timeout, patience=agent.patience))
            ready, reason, message = result.ready, result.reason, result.message
            agent.complaint = ""
        except ProbeTimeout as error:
            ready, reason, message = False, REASON_TIMEOUT, str(error)
        except (Exception, gevent.Timeout) as error:  # noqa: BLE001, TID251  one pod's closure must not end its loop
            # Only the kind of error: its text may differ each time, and each difference would be pushed.
            ready, reason, message = False, REASON_ERROR, f"the probe raised {type(error).__name__}"
            _log_error(agent, message)
        return ProbeResult(ready, reason, message, clock.now())

    def _call_back(self, agent: ProbeAgent) -> None:
        try:
            agent.on_update()
        except (Exception, gevent.Timeout):  # noqa: TID251  a failed push must not end the loop of a pod
            log.exception("on_update failed key=%s", agent.key)


def _log_probe(agent: ProbeAgent, result: ProbeResult, was_ready: bool) -> None:
    if agent.ready != was_ready:
        level = logging.INFO if agent.ready else logging.WARNING
        word = "ready" if agent.ready else "not ready"
        log.log(level, "probe says %s key=%s reason=%s message=%r", word, agent.key, result.reason, result.message)
    elif not result.ready:
        log.debug("probe failed key=%s reason=%s message=%r", agent.key, result.reason, result.message)


def _log_error(agent: ProbeAgent, message: str) -> None:
    # Once per kind of error, not once per tick.
    if agent.complaint != message:
        agent.complaint = message
        log.exception("%s key=%s", message, agent.key)
