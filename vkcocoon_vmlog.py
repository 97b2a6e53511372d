"""What somebody who asks for a log wants of it, and that much of what the hypervisor wrote.

The kubelet's log options are about lines with times. The log of a VM is what its hypervisor writes, in a form of its
own: cloud-hypervisor counts from its start, Firecracker writes local time without a zone, and either may print lines
with no time at all. Here each line gets a time, its own if it has one, else that of the line before it; that is enough
to prefix lines with times and to begin at one.

Everything works on pieces of bytes as they come and keeps no more than one unfinished line. Nothing here waits or knows
where the bytes come from. Used by vkcocoon_kubelet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from urllib.parse import parse_qs

__all__ = ["BadLogQuery", "LogQuery", "selected"]

LONGEST_LINE = 1024 * 1024  # a longer one is passed on in parts, of which only the first has a time
NANO = 1_000_000_000

UNITS = {b"s": 1.0, b"ms": 1e-3, "µs".encode(): 1e-6, "μs".encode(): 1e-6, b"us": 1e-6, b"ns": 1e-9}
SINCE_START = re.compile(rb"cloud-hypervisor: +(\d+(?:\.\d+)?)([a-z\xc2\xb5\xce\xbc]{1,3}): ")
AT_MOMENT = re.compile(rb"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?(?=[\s\[\]]|$)")
MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


class BadLogQuery(Exception):
    """Options that cannot be met; `str()` is the sentence for the client."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """The options of a log request. `tail` None is everything and 0 nothing of the past; `since` is in nanoseconds of
    the epoch; `limit` counts the bytes that are sent, times included."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: int | None = None
    limit: int | None = None

    @classmethod
    def parse(cls, query: str, now: datetime) -> LogQuery:
        """From the query of a URL; `sinceSeconds` counts back from `now`, unknown options are ignored.

        Raises BadLogQuery: 400 for what cannot be read, 422 for what makes no sense, as a kubelet does.
        """
        options = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        tail = _whole(options, "tailLines", least=0)
        limit = _whole(options, "limitBytes", least=1)
        seconds = _whole(options, "sinceSeconds", least=1)
        since = _moment(options, "sinceTime")
        if seconds is not None:
            if since is not None:
                raise BadLogQuery(HTTPStatus.UNPROCESSABLE_ENTITY, "only one of sinceSeconds and sinceTime is possible")
            since = max(0, _nanoseconds(now) - seconds * NANO)
        return cls(
            follow=_switch(options, "follow"),
            previous=_switch(options, "previous"),
            timestamps=_switch(options, "timestamps"),
            tail=tail,
            since=since,
            limit=limit,
        )


def _switch(options: dict[str, str], name: str) -> bool:
    """As the API machinery reads it: named at all is yes, unless it says no."""
    return name in options and options[name].lower() not in ("false", "0")


def _whole(options: dict[str, str], name: str, *, least: int) -> int | None:
    text = options.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        raise BadLogQuery(HTTPStatus.BAD_REQUEST, f"{name}: {text[:40]!r} is not a whole number")
    if int(text) < least:
        raise BadLogQuery(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: {int(text)} is less than {least}")
    return int(text)


def _moment(options: dict[str, str], name: str) -> int | None:
    text = options.get(name, "")
    if not text:
        return None
    # A plus sign that nobody escaped has become a blank.
    found = MOMENT.fullmatch(text.replace(" ", "+"))
    try:
        if found is None:
            raise ValueError(text)
        day, time, fraction, zone = found.groups()
        return _nanoseconds(datetime.fromisoformat(f"{day}T{time}{zone.upper()}"), fraction)
    except ValueError:
        raise BadLogQuery(HTTPStatus.BAD_REQUEST, f"{name}: {text[:40]!r} is not a time such as "
                          "2026-01-02T15:04:05Z") from None  # fmt: skip


def _nanoseconds(moment: datetime, fraction: str = "") -> int:
    """Of the epoch; `fraction` are the digits after the seconds, for those a datetime cannot hold."""
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    whole = (since.days * 86400 + since.seconds) * NANO
    return whole + (int(fraction.ljust(9, "0")) if fraction else since.microseconds * 1000)


def _shown(nanoseconds: int) -> bytes:
    """RFC 3339 with all nine digits, as kubelets write it."""
    seconds, rest = divmod(nanoseconds, NANO)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z".encode()


class _LineTimes:
    """When lines were written, as well as can be told."""

    def __init__(self, started: datetime | None, now: Callable[[], datetime]) -> None:
        self._started = None if started is None else _nanoseconds(started)
        self._now = now
        self._last: int | None = self._started

    def of(self, line: bytes) -> int:
        """Nanoseconds of the epoch: what the line says, else the time of the one before it, else now."""
        said = self._said(line[:80])
        if said is not None:
            self._last = said
        return _nanoseconds(self._now()) if self._last is None else self._last

    def _said(self, head: bytes) -> int | None:
        if (found := SINCE_START.match(head)) and found[2] in UNITS:
            return None if self._started is None else self._started + round(float(found[1]) * UNITS[found[2]] * NANO)
        if found := AT_MOMENT.match(head):
            day, time, fraction, zone = (group.decode() if group else "" for group in found.groups())
            try:
                moment = datetime.fromisoformat(f"{day}T{time}{zone}")
                # Without a zone it is the host's, where the hypervisor and we run; aware from here on.
                return _nanoseconds(moment if zone else moment.astimezone(), fraction)
            except (ValueError, OverflowError):
                return None
        return None


def selected(
    pieces: Iterable[bytes], query: LogQuery, *, started: datetime | None, now: Callable[[], datetime]
) -> Iterator[bytes]:
    """That much of a log as was asked for. `pieces` has only the last lines already; `started` is when the hypervisor
    started, None when nobody knows. Leaving this iteration leaves that of `pieces`."""
    if query.timestamps or query.since is not None:
        pieces = _lines(pieces, query, _LineTimes(started, now))
    left = query.limit
    for piece in pieces:
        if left is None:
            yield piece
            continue
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def _lines(pieces: Iterable[bytes], query: LogQuery, times: _LineTimes) -> Iterator[bytes]:
    """Line by line, but handed on as many at a time as came together."""
    choice = _Choice(query, times)
    pending = bytearray()
    for piece in pieces:
        pending += piece
        *lines, pending = pending.split(b"\n")
        chosen = bytearray()
        for line in lines:
            chosen += choice.of(bytes(line) + b"\n")
        if len(pending) > LONGEST_LINE:
            chosen += choice.of(bytes(pending))
            pending.clear()
        if chosen:
            yield bytes(chosen)
    if pending and (chosen_end := choice.of(bytes(pending))):
        yield chosen_end


class _Choice:
    """Which lines are late enough, and how they look."""

    def __init__(self, query: LogQuery, times: _LineTimes) -> None:
        self._query = query
        self._times = times
        self._inside = False  # of a line that comes in parts
        self._late_enough = query.since is None

    def of(self, line: bytes) -> bytes:
        if not self._inside:
            at = self._times.of(line)
            # Once one is, all that follow are: they were written later, whatever a clock may have done.
            self._late_enough = self._late_enough or at >= (self._query.since or 0)
            prefix = _shown(at) + b" " if self._query.timestamps else b""
        else:
            prefix = b""
        self._inside = not line.endswith(b"\n")
        return prefix + line if self._late_enough else b""
