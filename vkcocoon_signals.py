"""What an operator may ask a running daemon by a signal, when nothing else answers any more.

    SIGUSR1   log everything for ten minutes, then as before; again: ten minutes from now
    SIGUSR2   where every greenlet stands, into the log: who waits, and in which line

The handlers only set an event; a greenlet of our own does the work, since a log line may block and the hub must not.
Should the greenlets no longer run at all, neither helps; py-spy does.
"""

from __future__ import annotations

import gc
import logging
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import gevent
import greenlet
import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_probes import Clock, spawn

__all__ = ["DEBUG_S", "Signals", "standing"]

log = structlog.get_logger()

DEBUG_S = 600.0


class Signals:
    """Listens from `start` to `close`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._verbose, self._dump, self._stop = Event(), Event(), Event()
        self._handlers: list[Any] = []
        self._group = Group()
        self._level: int | None = None  # what to go back to; None: nothing was changed

    def start(self) -> None:
        for number, event in ((signal.SIGUSR1, self._verbose), (signal.SIGUSR2, self._dump)):
            self._handlers.append(gevent.signal_handler(number, event.set))
        spawn(self._group, "signal USR1", self._verbose_for_a_while)
        spawn(self._group, "signal USR2", self._dump_when_asked)

    def close(self) -> None:
        for handler in self._handlers:
            handler.cancel()
        self._group.kill(block=False)
        self._restore()

    def _verbose_for_a_while(self) -> None:
        root = logging.getLogger()
        while True:
            self._clock.wait(self._verbose, None)
            while self._verbose.is_set():
                self._verbose.clear()
                if self._level is None:
                    self._level = root.level
                root.setLevel(logging.DEBUG)
                log.info("logging everything", seconds=DEBUG_S)
                self._clock.wait(self._verbose, DEBUG_S)
            self._restore()
            log.info("logging as before")

    def _restore(self) -> None:
        if self._level is not None:
            logging.getLogger().setLevel(self._level)
            self._level = None

    def _dump_when_asked(self) -> None:
        while True:
            self._clock.wait(self._dump, None)
            self._dump.clear()
            found = list(standing())
            log.info("all greenlets follow", number=len(found))
            for name, where in found:
                log.info("greenlet", greenlet=name, where=where)


def standing() -> Iterator[tuple[str, str]]:
    """Every greenlet that has begun and not ended, but the one that asks, and where it stands, innermost call last."""
    for found in gc.get_objects():
        if isinstance(found, greenlet.greenlet) and found.gr_frame is not None and not found.dead:
            name = getattr(found, "name", "") or type(found).__name__
            calls = traceback.extract_stack(found.gr_frame)
            yield (
                str(name),
                " > ".join(f"{call.filename.rpartition('/')[2]}:{call.lineno} {call.name}" for call in calls),
            )
