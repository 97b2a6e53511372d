"""What the lines of an event log must say for a scenario to be made of them (simulator.replay).

A log is a file that people copy, cut and edit. What is read from it is checked here, line by line, so that a
damaged one is refused with the number of the line, and whoever reads the entries later can rely on their fields. Only
those are looked at; what else a line says is its own affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from simulator.document import Kind, Parameter
from simulator.values import IP, NUMBER, pod_name
from vkcocoon_record import Entry

__all__ = ["check"]

LATEST_US = 10 * 366 * 24 * 3600 * 1_000_000  # ten years: no daemon writes one log for longer


def _us(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= LATEST_US:
        raise ValueError(f"{_shown(given)} is no number of microseconds within ten years")
    return given


def _whole(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < 1 << 53:
        raise ValueError(f"{_shown(given)} is no whole number")
    return given


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{_shown(given)} is no text")
    return given


def _texts(given: Any) -> dict[str, str | None]:
    if not isinstance(given, Mapping) or not all(value is None or isinstance(value, str) for value in given.values()):
        raise ValueError(f"{_shown(given)} is no mapping of texts")
    return dict(given)


def _instant(given: Any) -> datetime:
    found = datetime.fromisoformat(_text(given))
    if found.tzinfo is None:
        raise ValueError(f"{_shown(given)} says no time zone")
    return found


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _field(name: str, kind: Kind, *, needed: bool = True) -> Parameter:
    return Parameter(name, kind, "", needed)


_US = Kind("time", "microseconds", _us)
_WHOLE = Kind("number", "a whole number", _whole)
_TEXT = Kind("text", "text", _text)
_TEXTS = Kind("mapping", "texts", _texts)
_INSTANT = Kind("instant", "RFC 3339", _instant)

_PROBE = (
    _field("reason", _TEXT),
    _field("message", _TEXT, needed=False),
    _field("took_us", _US, needed=False),
    _field("n", _WHOLE, needed=False),
)
_BEGINS = (_field("verb", _TEXT), _field("tool", _TEXT))
_REQUEST = (_field("request", _TEXT), _field("took_us", _US))
_BY_KIND: Mapping[tuple[str, str], tuple[Parameter, ...]] = {
    ("record", "begins"): (_field("wall", _INSTANT),),
    ("record", "holds"): (
        _field("wishes", _TEXTS, needed=False),
        *(_field(name, _TEXT, needed=False) for name in ("uid", "ip", "probe", "message")),
        _field("n", _WHOLE, needed=False),
    ),
    ("kube", "created"): (_field("uid", _TEXT, needed=False), _field("wishes", _TEXTS, needed=False)),
    ("kube", "annotations"): (_field("annotations", _TEXTS),),
    ("kube", "ready"): (_field("ready", _TEXT),),
    ("kube", "address"): (_field("address", _TEXT),),
    ("kube", "terminating"): (_field("terminating", _TEXT),),
    ("command", "begins"): _BEGINS,
    ("command", "ends"): (
        *_BEGINS,
        _field("exit", _TEXT),
        _field("took_us", _US),
        _field("error", _TEXT, needed=False),
    ),
    ("lease", "granted"): (_field("ip", IP), _field("ago_us", _US, needed=False)),
    ("lease", "gone"): (_field("ago_us", _US, needed=False),),
    ("probe", "ok"): _PROBE,
    ("probe", "fails"): _PROBE,
    ("vm", "MODIFIED"): (_field("state", _TEXT, needed=False),),
    ("push", "status"): (_field("ready", _TEXT, needed=False), _field("took_us", _US, needed=False)),
    ("push", "annotations"): (_field("took_us", _US, needed=False),),
    ("push", "replace"): (_field("took_us", _US, needed=False),),
    ("push", "delete"): (_field("took_us", _US, needed=False),),
    ("api", "works"): _REQUEST,
    ("api", "fails"): (*_REQUEST, _field("status", _WHOLE), _field("retry_after", NUMBER, needed=False)),
}
_POD_APPEARS = {("record", "holds"), ("kube", "created")}


def check(entry: Entry) -> None:
    """Is it an entry that can be relied on? Raises ValueError with the field that is missing or wrong."""
    try:
        _us(entry.at_us)
    except ValueError as error:
        raise ValueError(f"us: {error}") from error
    if (entry.actor, entry.kind) in _POD_APPEARS and pod_name(entry.key) != entry.key:
        raise ValueError(f"{entry.key!r} has no namespace")
    what, fields = f"{entry.actor} {entry.kind}", dict(entry.fields)
    for each in _BY_KIND.get((entry.actor, entry.kind), ()):
        if each.name in fields:
            try:
                each.kind.read(fields[each.name])
            except ValueError as error:
                raise ValueError(f"{what}: {each.name}: {error}") from error
        elif each.needed:
            raise ValueError(f"{what}: {each.name} is missing")
