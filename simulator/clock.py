"""Virtual time for gevent: what takes an hour in the world takes milliseconds here, at exact instants.

``VirtualClock`` is a ``vkcocoon_probes.Clock``. It keeps whole microseconds and a heap of timers. Code under test runs
in greenlets and waits through the clock; the caller of ``run`` drives it: whenever no greenlet can run, the clock jumps
to the next timer and fires everything due at that instant.

Order is part of the promise, so that a run can be repeated:

- Timers fire in due order; equal ones in the order they were set, or in an order drawn from ``seed`` to explore races.
  The draw of a greenlet depends on its name and the instant and on nobody else, so one more greenlet in the world does
  not shift the others. With a seed, whoever is woken by an event takes part in the draw, too.
- Everything that happens at one instant, happens before the clock moves; a bound (``timeout``) fires last of all, when
  nothing else can happen at that instant, so a wait that ends just then still ends by itself.
- One ``run(60)`` is the same as six thousand ``run(0.01)``.

Lifetime: the greenlet that calls ``run`` is the driver. Everything else belongs into ``spawn`` or ``at``, whose
failures ``run`` raises. A wait of the main greenlet while nobody drives, drives. There must be no socket, subprocess or
thread pool in a virtual world: the clock does not wait for them.
"""

from __future__ import annotations

import gc
import itertools
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from typing import Any

import gevent
from gevent import getcurrent
from gevent.event import Event
from gevent.hub import Waiter
from gevent.pool import Group

from vkcocoon_probes import Bound, microseconds

__all__ = ["VirtualClock"]

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
# So many rounds at one instant are no cascade of events any more but somebody waiting for zero seconds in a loop.
MOST_ROUNDS_AT_ONE_INSTANT = 100_000
# An event log only grows, so every so often the collector looks at all of it in vain: while time passes, less often.
RARE_COLLECTIONS = (50_000, 20, 50)

NEVER = 2**63  # later than every instant

# A timer is a list, which a heap compares at the speed of C: its instant in microseconds, the order of setting, what to
# call (None: canceled; it stays where it is until its instant comes), and who set it, a greenlet or a name, which is
# asked only when the order of an instant is drawn.
_Timer = list[Any]
_INSTANT, _FIRE, _OWNER = 0, 2, 3


class _VirtualBound(Bound):
    __slots__ = ("_clock", "_fired", "_greenlet", "_timer")

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        super().__init__(seconds)
        self._clock = clock
        self._fired = False

    def arm(self, seconds: float) -> None:
        self._greenlet = getcurrent()
        self._timer = self._clock._set(seconds, self._fire, self._greenlet, bound=True)

    def disarm(self) -> bool:
        self._timer[_FIRE] = None
        return self._fired

    def _fire(self, _: object) -> None:
        # From the hub, as gevent's own timers do: the greenlet is waiting, since nothing can run at this moment.
        self._fired = True
        self._greenlet.throw(self.interrupt)


class VirtualClock:
    """Time that passes only when somebody calls ``run``; see the module for order and lifetime."""

    def __init__(self, seed: int | None = None, start: datetime = EPOCH) -> None:
        loop = gevent.get_hub().loop
        if "libuv" in type(loop).__module__:
            # Its idle watchers fire although callbacks are still queued.
            raise RuntimeError("virtual time needs gevent's libev loop, not libuv: unset GEVENT_LOOP")
        if start.tzinfo is None:
            raise ValueError("start needs a time zone")
        self._loop: Any = loop
        self.now_us = 0
        self._start = start
        self._wall_step_us = 0
        self._wall = 0, start  # the answer of now() at an instant: it is asked several times at each
        self._seed = seed
        self._heap: list[_Timer] = []  # waits
        # Nearly every bound is canceled long before its instant. So new ones are not sorted, and nobody looks at them
        # before the earliest instant that one of them had; those still armed by then go into a heap of their own.
        self._new_bounds: list[_Timer] = []
        self._bounds: list[_Timer] = []
        self._bounds_from = NEVER  # no bound is due before
        self._count = itertools.count()
        self._visits = itertools.count()
        self._driver: Waiter[Any] | None = None
        self._rounds_here = 0
        self._group = Group()
        self._failures: list[BaseException] = []

    # Clock

    def monotonic(self) -> float:
        return self.now_us / 1_000_000

    def now(self) -> datetime:
        wall_us = self.now_us + self._wall_step_us
        if wall_us != self._wall[0]:
            self._wall = wall_us, self._start + timedelta(0, 0, wall_us)
        return self._wall[1]

    def wait(self, event: Event, timeout: float | None) -> bool:
        if event.is_set():
            return True
        if self._driver is None and _in_main():
            return self._drive_through(event, timeout)
        if timeout is None:
            event.wait()
            self._take_turn()
            return True
        waiter: Waiter[Any] = Waiter()
        wake = waiter.switch
        timer = self._set(timeout, wake)
        event.rawlink(wake)
        try:
            woken = waiter.get() is event
        finally:
            timer[_FIRE] = None
            event.unlink(wake)
        if woken:
            self._take_turn()
        return woken or event.is_set()

    def sleep(self, seconds: float) -> None:
        if self._driver is None and _in_main():
            self._drive_through(Event(), seconds)
        else:
            self._pause(seconds)

    def timeout(self, seconds: float) -> AbstractContextManager[None]:
        return _VirtualBound(self, seconds)

    # For the driver

    def elapsed(self) -> float:
        """Virtual seconds since the clock was made."""
        return self.now_us / 1_000_000

    def run(self, seconds: float) -> None:
        """Let exactly ``seconds`` pass, timers of the last instant included; 0 lets happen what happens now.

        Raises what a greenlet of ``spawn`` or ``at`` died of, at once.
        """
        self._drive(self.now_us + microseconds(seconds), None)
        self._raise_failures()

    def run_until(self, predicate: Callable[[], object], limit_s: float) -> bool:
        """Let time pass until ``predicate()`` is true, asked whenever nothing can run; False after ``limit_s`` seconds.

        The predicate must not wait. Raises like ``run``.
        """
        reached = self._drive(self.now_us + microseconds(limit_s), predicate)
        self._raise_failures()
        return reached

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock, as an administrator or NTP does. Nothing but ``now`` may notice."""
        self._wall_step_us += microseconds(seconds)

    def spawn(self, name: str, function: Callable[..., Any], *args: Any) -> gevent.Greenlet[..., Any]:
        """Start ``function(*args)`` in a greenlet; what it dies of, ``run`` raises."""
        greenlet = self._prepare(name, function, args)
        greenlet.start()
        return greenlet

    def at(self, seconds: float, function: Callable[..., Any], *args: Any, owner: str = "") -> None:
        """Run ``function(*args)`` in a greenlet at ``seconds`` after the clock's start; ValueError if that is over.

        ``owner`` is by what name it takes part in the draw of its instant; by default it has one of its own.
        """
        delay_us = microseconds(seconds) - self.now_us
        if delay_us < 0:
            raise ValueError(f"{seconds} s is over: it is {self.elapsed()} s")
        name = f"at {seconds} s: {getattr(function, '__qualname__', function)}"
        # Switched to directly, not scheduled: it keeps its place among the timers of that instant.
        begin = lambda _: self._prepare(name, function, args).switch()  # noqa: E731
        self._set(delay_us / 1_000_000, begin, owner or f"visit {next(self._visits)}")

    def close(self) -> None:
        """Kill what ``spawn`` and ``at`` started, and drop all timers."""
        self._group.kill()
        self._heap.clear()
        self._bounds.clear()
        self._new_bounds.clear()
        self._failures.clear()

    # Inside

    def _set(
        self, seconds: float, fire: Callable[[Any], object], owner: object = None, *, bound: bool = False
    ) -> _Timer:
        # A positive wait takes at least a microsecond, or a loop over a tiny remainder would never get past it.
        instant_us = self.now_us + ((round(seconds * 1_000_000) or 1) if seconds > 0 else 0)
        timer = [instant_us, next(self._count), fire, owner or getcurrent()]
        if not bound:
            heappush(self._heap, timer)
            return timer
        self._new_bounds.append(timer)
        if instant_us < self._bounds_from:
            self._bounds_from = instant_us
        return timer

    def _pause(self, seconds: float) -> None:
        waiter: Waiter[Any] = Waiter()
        timer = self._set(seconds, waiter.switch)
        try:
            waiter.get()
        finally:
            timer[_FIRE] = None

    def _take_turn(self) -> None:
        """Between the setting of an event and the running of who waited for it, others may run: as drawn."""
        if self._seed is not None:
            self._pause(0)

    def _prepare(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> gevent.Greenlet[..., Any]:
        greenlet = gevent.Greenlet(function, *args)
        greenlet.name = name
        # Nobody's child, whoever's call needed it: a family of greenlets that is killed does not take it along.
        greenlet.spawn_tree_locals = {}
        greenlet.rawlink(self._note_failure)
        self._group.add(greenlet)
        return greenlet

    def _note_failure(self, greenlet: gevent.Greenlet[..., Any]) -> None:
        if greenlet.exception is not None:
            self._failures.append(greenlet.exception)

    def _raise_failures(self) -> None:
        if self._failures:
            first, *others = self._failures
            self._failures.clear()
            for other in others:
                first.add_note(f"At the same instant another greenlet died of {other!r}")
            raise first

    def _drive_through(self, event: Event, timeout: float | None) -> bool:
        """A wait of the main greenlet: like any other one, but it also makes time pass."""
        ended_by: list[Event | None] = []
        timer = None if timeout is None else self._set(timeout, ended_by.append)
        event.rawlink(ended_by.append)
        try:
            self._drive(None, lambda: ended_by)
        finally:
            event.unlink(ended_by.append)
            if timer is not None:
                timer[_FIRE] = None
        return event in ended_by or event.is_set()

    def _drive(self, end_us: int | None, predicate: Callable[[], object] | None) -> bool:
        """Fire timers up to ``end_us`` (None: without end); True as soon as the predicate is true."""
        if self._driver is not None:
            raise RuntimeError("this clock is already being driven; wait on it instead")
        driver: Waiter[Any] = Waiter()
        self._driver = driver
        # An idle watcher is called when no callback and no greenlet is left to run: the moment to move the clock.
        idle = self._loop.idle()
        idle.start(self._turn, driver, end_us, predicate)
        thresholds = gc.get_threshold()
        gc.set_threshold(*RARE_COLLECTIONS)
        try:
            return bool(driver.get())
        finally:
            gc.set_threshold(*thresholds)
            self._driver = None
            idle.stop()
            idle.close()

    def _turn(self, driver: Waiter[Any], end_us: int | None, predicate: Callable[[], object] | None) -> None:
        # In the hub. Only one of the switches to the driver happens, and nothing of ours may follow it.
        loop = self._loop
        try:
            while (verdict := self._advance(end_us, predicate)) is None:
                if loop._callbacks or loop.pendingcnt:
                    return  # what these woke goes first; then we are called again
        except Exception as error:  # noqa: BLE001  it belongs to the driver, not to the hub
            driver.throw(error)
            return
        driver.switch(verdict)

    def _advance(self, end_us: int | None, predicate: Callable[[], object] | None) -> bool | None:
        """One round: the verdict for the driver, or None after firing the next timers."""
        if self._failures and end_us is not None:  # a wait of the main greenlet is no place to raise them
            return False
        if predicate is not None and predicate():
            return True
        heap = self._heap
        while heap and heap[0][_FIRE] is None:
            heappop(heap)
        instant_us = heap[0][_INSTANT] if heap else NEVER
        if self._bounds_from < instant_us and self._earliest_bound() < instant_us:
            heap, instant_us = self._bounds, self._bounds_from
        if instant_us > (NEVER - 1 if end_us is None else end_us):
            if end_us is None:
                raise RuntimeError("waiting for ever: no timer is left that could change anything")
            self.now_us = end_us
            self._rounds_here = 0
            return False
        self._rounds_here = self._rounds_here + 1 if instant_us == self.now_us else 0
        if self._rounds_here > MOST_ROUNDS_AT_ONE_INSTANT:
            raise RuntimeError(f"time stands still at {self.elapsed()} s: somebody waits for 0 s in a loop")
        self.now_us = instant_us
        timer = heappop(heap)
        if not heap or heap[0][_INSTANT] != instant_us:
            timer[_FIRE](None)
            return None
        due = [timer]
        while heap and heap[0][_INSTANT] == instant_us:
            due.append(heappop(heap))
        self._fire(due)
        return None

    def _earliest_bound(self) -> int:
        """The instant of the bound that is due first."""
        heap = self._bounds
        for timer in self._new_bounds:
            if timer[_FIRE] is not None:
                heappush(heap, timer)
        self._new_bounds.clear()
        while heap and heap[0][_FIRE] is None:
            heappop(heap)
        self._bounds_from = heap[0][_INSTANT] if heap else NEVER
        return self._bounds_from

    def _fire(self, due: list[_Timer]) -> None:
        """Fire all timers that are due now; those set meanwhile have to wait for the next round."""
        if self._seed is not None:
            due.sort(key=self._draw)  # timers of one owner stay in the order they were set
        for timer in due:
            # An earlier one may have canceled it.
            if timer[_FIRE] is not None:
                timer[_FIRE](None)

    def _draw(self, timer: _Timer) -> int:
        owner = timer[_OWNER]
        name = owner if isinstance(owner, str) else getattr(owner, "name", "main")
        return zlib.crc32(f"{self._seed}/{self.now_us}/{name}".encode())


def _in_main() -> bool:
    # Only the main greenlet has no parent; it may be a test that calls the provider directly.
    return getcurrent().parent is None
