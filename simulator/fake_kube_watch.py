"""One open watch of the fake API server: the changes a client may see, in order, as they happen.

A stream is an iterator of ``{"type", "object"}`` that both doors read. It waits on the clock of the server, so it works
in virtual time. Its position is a revision: it reads the history behind it and never misses a change, however long its
reader was busy; when the history it needs is gone it ends with the ERROR event a real server sends.

Lifetime: the server knows a stream from its creation until its iterator ends or is closed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gevent.event import Event

from simulator.fake_kube_faults import Gate, Request
from simulator.fake_kube_resources import Refusal, Target, status_of
from simulator.fake_kube_selectors import Selector
from simulator.fake_kube_store import Change, Store
from vkcocoon_kube import ApiError

__all__ = ["TornStream", "WatchOptions", "WatchStream"]

Object = dict[str, Any]


class TornStream(Exception):
    """The server broke the connection in the middle of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """``revision`` None means from now, with everything that exists first; ``timeout`` and intervals in seconds.

    ``silence`` is how long the client of a held stream waits before it gives up, None when the door cannot know.
    """

    revision: int | None
    timeout: float
    bookmarks: bool = True
    bookmark_interval: float = 60.0
    silence: float | None = None


class WatchStream:
    """Invariant: everything at or before ``cursor`` was delivered or does not match the selector."""

    def __init__(self, store: Store, gate: Gate, *, request: Request, target: Target, selects: Selector) -> None:
        self.request = request
        self.target = target
        self.cursor = 0
        self.wake = Event()
        self._clock = gate.clock
        self._store = store
        self.gate = gate
        self._selects = selects
        self._cut = ""
        self._injected: list[Object] = []
        self._idle = False
        self._heard = 0.0

    def notify(self, target: Target) -> None:
        """Something was written; called by the server without switching."""
        if target.resource is self.target.resource:
            self._idle = False
            self.wake.set()

    def cut(self, *, torn: bool) -> None:
        """End the stream at its next step: cleanly, or in the middle of a line. A held one does not hear of it."""
        self._cut = "torn" if torn else "clean"
        self.wake.set()

    def abandon(self) -> None:
        """Nobody listens any more: end at once."""
        self._cut = "abandoned"
        self.wake.set()

    def inject(self, event: Object) -> None:
        """Say ``event`` at the next step, whatever it is."""
        self._injected.append(event)
        self.wake.set()

    def skip_to(self, revision: int) -> None:
        """The history up to ``revision`` is gone; one who has seen all of it does not miss it."""
        if self._idle:
            self.cursor = max(self.cursor, revision)

    def events(self, options: WatchOptions) -> Iterator[Object]:
        """The stream itself; raises ``TornStream``, and ``ApiError`` (status 0) when a held client gives up."""
        self._heard = self._clock.monotonic()
        for event in self._events(options):
            self._heard = self._clock.monotonic()
            yield event

    def _events(self, options: WatchOptions) -> Iterator[Object]:
        ends = self._clock.monotonic() + options.timeout
        if options.revision is None:
            self.cursor = self._store.revision
            yield from self._existing()
        else:
            self.cursor = options.revision
        bookmark = self._clock.monotonic() + options.bookmark_interval
        while True:
            self._stay_silent_while_held(options.silence)
            if self._ended():
                return
            self.wake.clear()
            while self._injected:
                yield self._injected.pop(0)
            try:
                changes = self._store.changes_after(self.target.resource, self.cursor)
            except Refusal as error:
                yield {"type": "ERROR", "object": status_of(error)}
                return
            if changes:
                yield from self._deliver(changes)
                if self._ended() or self.gate.holding(self.request) is not None:
                    continue
            else:
                self._idle = True
                self.cursor = max(self.cursor, self._store.revision)
            now = self._clock.monotonic()
            if options.bookmarks and now >= min(bookmark, ends):
                bookmark = now + options.bookmark_interval
                yield self._bookmark()
            if now >= ends:
                return
            if not changes:
                self._clock.wait(self.wake, min(ends, bookmark if options.bookmarks else ends) - now)

    def _existing(self) -> Iterator[Object]:
        everything = dataclasses.replace(self.target, name="")
        for obj in self._store.list(everything, self._selects)["items"]:
            yield {"type": "ADDED", "object": obj}

    def _deliver(self, changes: list[Change]) -> Iterator[Object]:
        delay = self.gate.event_delay(self.request)
        if delay > 0:
            self._clock.sleep(delay)
        for change in changes:
            if self._ended() or self.gate.holding(self.request) is not None:
                return
            self.cursor = change.revision
            event = self._visible(change)
            if event is not None:
                yield event

    def _visible(self, change: Change) -> Object | None:
        """What the change is to this selector: an object that starts to match is added, one that stops is deleted."""
        if self.target.namespace not in ("", change.last["metadata"].get("namespace", "")):
            return None
        before = change.old is not None and self._selects(change.old)
        after = change.new is not None and self._selects(change.new)
        if after:
            return {"type": "MODIFIED" if before else "ADDED", "object": change.new}
        if not before or change.old is None:
            return None
        if change.new is None:
            return {"type": "DELETED", "object": change.last}
        # The content it had while it matched, with the revision at which it stopped.
        metadata = {**change.old["metadata"], "resourceVersion": str(change.revision)}
        return {"type": "DELETED", "object": {**change.old, "metadata": metadata}}

    def _bookmark(self) -> Object:
        resource = self.target.resource
        metadata = {"resourceVersion": str(self.cursor)}
        bookmark = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return {"type": "BOOKMARK", "object": bookmark}

    def _ended(self) -> bool:
        if self._cut == "torn":
            raise TornStream
        return bool(self._cut)

    def _stay_silent_while_held(self, silence: float | None) -> None:
        while (hold := self.gate.holding(self.request)) is not None and self._cut != "abandoned":
            hold.keep(self.wake)
            self.wake.clear()
            patience = None if silence is None else self._heard + silence - self._clock.monotonic()
            if not self._clock.wait(self.wake, patience):
                raise ApiError(0, "Timeout", f"nothing came from {self.request} for {silence:g} s")
