"""Kubernetes Events: what `kubectl describe` shows last, and the only place it shows reasons at all.

Events are best effort and bounded: `EventRecorder.event` only remembers, one greenlet writes, equal events are counted
into one object, and one object and reason costs at most one write a minute (K5). Nothing waits for an event, and none
is kept over a restart.

Anybody may call `event`; the recorder's greenlet lives from `start` to `close`.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime

import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_kube import ApiError, Backoff, KubeApi, Object
from vkcocoon_probes import Clock, spawn
from vkcocoon_status import format_time

__all__ = ["EventRecorder"]

log = structlog.get_logger()

COMPONENT = "vk-cocoon"
EVENT_EVERY_S = 60.0  # between two writes about one object for one reason
EVENT_MEMORY_S = 600.0  # the same event within this time is counted, not repeated
EVENT_OBJECTS = 2000  # object and reason pairs remembered
EVENT_MESSAGE = 1024  # characters the API accepts


@dataclass(slots=True)
class _Series:
    """One event that keeps happening: same object, reason and message."""

    about: Object
    type: str
    reason: str
    message: str
    first: datetime
    last: datetime
    count: int = 1
    written: int = 0  # the count the API knows
    name: str = ""  # of the Event object in the API


@dataclass(slots=True)
class _Subject:
    """One object and reason: the newest series, and when it may be written."""

    series: _Series
    not_before: float = 0.0
    touched: float = 0.0
    queued: bool = False

    @property
    def dirty(self) -> bool:
        return self.series.count != self.series.written


class EventRecorder:
    """Kubernetes Events, best effort: `event` only remembers, one greenlet writes.

    Equal events are counted into one object, and about one object and reason at most one write a minute is made; of
    different messages within that minute the newest is kept. Events never hold up anything and may be lost.
    """

    def __init__(self, api: KubeApi, clock: Clock, *, node_name: str, rng: random.Random | None = None) -> None:
        self._api = api
        self._clock = clock
        self._node_name = node_name
        self._subjects: OrderedDict[tuple[str, str], _Subject] = OrderedDict()
        self._due: deque[_Subject] = deque()
        self._later: list[tuple[float, int, _Subject]] = []  # a heap by the instant from which it may be written
        self._backoff = Backoff(1.0, 60.0, rng=rng or random.Random(node_name))
        self._wake = Event()
        self._group = Group()
        self._serial = 0

    def event(self, obj: Object, type_: str, reason: str, message: str) -> None:
        """Remember that `reason` happened to a pod or node; `type_` is "Normal" or "Warning". Never switches."""
        about = _about(obj)
        key = (about.get("uid") or about["name"], reason)
        now, wall = self._clock.monotonic(), self._clock.now()
        message = message[:EVENT_MESSAGE]
        self._prune(now)
        subject = self._subjects.get(key)
        if subject is None:
            subject = self._subjects[key] = _Subject(_Series(about, type_, reason, message, wall, wall))
        elif (subject.series.type, subject.series.message) == (type_, message):
            subject.series.count += 1
            subject.series.last = wall
        else:
            subject.series = _Series(about, type_, reason, message, wall, wall)
        subject.touched = now
        self._subjects.move_to_end(key)
        self._queue(subject)

    def start(self) -> None:
        spawn(self._group, "events", self._run)

    def close(self) -> None:
        self._group.kill(block=False)

    def _queue(self, subject: _Subject) -> None:
        if not subject.queued:
            subject.queued = True
            self._serial += 1
            heapq.heappush(self._later, (subject.not_before, self._serial, subject))
            self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            now = self._clock.monotonic()
            while self._later and self._later[0][0] <= now:
                self._due.append(heapq.heappop(self._later)[2])
            if self._due:
                self._write(self._due.popleft())
            else:
                self._clock.wait(self._wake, self._later[0][0] - now if self._later else None)

    def _write(self, subject: _Subject) -> None:
        """Write one of those that are due; it is the next one again when it has to be tried again."""
        series, count = subject.series, subject.series.count
        try:
            if subject.dirty:
                self._send(series, count)
        except ApiError as error:
            if error.status == 404 and series.name:
                series.name = ""  # it had expired: the next round makes a new one
                self._due.appendleft(subject)
                return
            if error.status in (0, 401, 429) or error.status >= 500:
                self._due.appendleft(subject)
                self._clock.sleep(self._backoff.next(error.retry_after))
                return
            log.debug("an event was refused", reason=series.reason, error=str(error))
        self._backoff.reset()
        series.written = count
        subject.not_before = self._clock.monotonic() + EVENT_EVERY_S
        subject.queued = False
        if subject.dirty:  # it happened again meanwhile
            self._queue(subject)

    def _send(self, series: _Series, count: int) -> None:
        namespace = series.about.get("namespace") or "default"
        path = f"/api/v1/namespaces/{namespace}/events"
        if series.name:
            body = {"count": count, "lastTimestamp": format_time(series.last), "message": series.message}
            self._api.patch(f"{path}/{series.name}", body, kind="merge")
            return
        self._serial += 1
        stamp = int(series.first.timestamp() * 1_000_000)
        # Cut anywhere, a legal name may end in a way that no name may go on from.
        about = series.about["name"][:200].rstrip("-.")
        name = f"{about}.{stamp:x}{self._serial:04x}"
        self._api.create(path, self._body(series, count, namespace, name))
        series.name = name

    def _body(self, series: _Series, count: int, namespace: str, name: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": series.about,
            "type": series.type,
            "reason": series.reason,
            "message": series.message,
            "firstTimestamp": format_time(series.first),
            "lastTimestamp": format_time(series.last),
            "count": count,
            "source": {"component": COMPONENT, "host": self._node_name},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._node_name,
        }

    def _prune(self, now: float) -> None:
        """Forget what has been quiet; over the limit also what has not."""
        while self._subjects:
            key, oldest = next(iter(self._subjects.items()))
            quiet = not oldest.dirty and now - oldest.touched >= EVENT_MEMORY_S
            if not quiet and len(self._subjects) < EVENT_OBJECTS:
                break
            oldest.series.written = oldest.series.count  # should it still be queued
            del self._subjects[key]
        if len(self._due) + len(self._later) > 2 * EVENT_OBJECTS:
            self._due = deque(subject for subject in self._due if subject.dirty)
            self._later = [entry for entry in self._later if entry[2].dirty]
            heapq.heapify(self._later)


def _about(obj: Object) -> Object:
    """The reference of an event to its object. Items of a list carry no kind."""
    metadata = obj.get("metadata") or {}
    namespace = metadata.get("namespace") or ""
    reference = {
        "apiVersion": obj.get("apiVersion") or "v1",
        "kind": obj.get("kind") or ("Pod" if namespace else "Node"),
        "name": metadata.get("name") or "",
        "uid": metadata.get("uid") or "",
    }
    if namespace:
        reference["namespace"] = namespace
    return reference
