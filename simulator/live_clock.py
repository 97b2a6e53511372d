"""Real time with a beginning: what a scenario plans with when it is played live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gevent.pool import Group

from vkcocoon_probes import SystemClock, microseconds, spawn

__all__ = ["LiveClock"]


class LiveClock(SystemClock):
    """The system's clocks, counted from `begin` on, with a simulation's ways to plan.

    `failed` is told who owned something planned that did not come off, and why.
    """

    def __init__(self, failed: Callable[[str, Exception], object] = lambda owner, error: None) -> None:
        self._failed = failed
        self._begin = self.monotonic()
        self._greenlets = Group()

    def begin(self) -> None:
        """This is the instant 0."""
        self._begin = self.monotonic()

    def elapsed(self) -> float:
        return self.monotonic() - self._begin

    @property
    def now_us(self) -> int:
        return microseconds(self.elapsed())

    def at(self, seconds: float, function: Callable[..., Any], *args: Any, owner: str = "") -> None:
        """Do that so many seconds after the beginning."""
        self.spawn(owner or "an event", self._later, owner, seconds, function, args)

    def spawn(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        spawn(self._greenlets, name, function, *args)

    def _later(self, owner: str, seconds: float, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.sleep(seconds - self.elapsed())
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001  whoever plans has to know what did not come off
            self._failed(owner, error)

    def close(self) -> None:
        self._greenlets.kill()
