"""The values a scenario is written in: times, ranges, weighted choices, shares, ports, pods.

A value may be a draw: ``1s..3s`` is any time in between, and ``{one_of: [...]}`` one of several, by weight. What comes
of it is decided by the seed, in a stream that belongs to the pod and the key; without a seed a range is its beginning
and a choice its heaviest branch, so that a scenario without a seed has exact instants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from ipaddress import IPv4Address
from random import Random
from typing import Any

from simulator.document import Kind, unknown

__all__ = [
    "COUNT",
    "FLAG",
    "IP",
    "LENGTH",
    "MAP",
    "NTH",
    "NUMBER",
    "PARTS",
    "POD",
    "PORT",
    "PORTS",
    "SHARE",
    "SIGNED_TIME",
    "TEXT",
    "TEXT_OR_NONE",
    "TIME",
    "Drawn",
    "drawn",
    "pod_name",
    "seconds_of",
    "split",
    "time_text",
    "word",
]

_UNITS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(us|ms|s|m|h))", re.ASCII)
_POD = re.compile(r"[a-z0-9-]+/[a-z0-9][a-z0-9.-]*")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%", re.ASCII)


def seconds_of(text: Any) -> float:
    """``1m30.5s``, ``500ms``, ``0s`` as seconds, exact to the microsecond. Raises ValueError."""
    parts = _DURATION.findall(str(text))
    if not parts or "".join(number + unit for number, unit in parts) != str(text):
        raise ValueError(f"{text!r} is no time such as 500ms, 3.078125s or 1m30s")
    return float(sum(Decimal(number) * _UNITS[unit] for number, unit in parts))


def time_text(seconds: float) -> str:
    """The way to write that many seconds, to the microsecond: ``3.078125s``, ``20s``."""
    text = f"{seconds:.6f}".rstrip("0").rstrip(".")
    return f"{text}s"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A value that may depend on the seed: branches with their weights, each a value or a range of numbers."""

    branches: tuple[tuple[float, Any, Any], ...]  # weight, value or lower end, upper end (None: no range)

    def draw(self, rng: Random | None) -> Any:
        """Its value; None instead of a source of randomness gives the plainest one."""
        if rng is None:
            return max(self.branches, key=lambda branch: branch[0])[1]
        _, low, high = rng.choices(self.branches, [weight for weight, _, _ in self.branches])[0]
        return low if high is None else round(rng.uniform(low, high), 6)

    @property
    def fixed(self) -> bool:
        """Is it the same for every seed?"""
        return len(self.branches) == 1 and self.branches[0][2] is None


def drawn(kind: Kind) -> Kind:
    """That kind of value, or a range or a weighted choice of it."""
    ranged = kind in (TIME, SHARE, NUMBER)

    def branch(given: Any) -> tuple[Any, Any]:
        if ranged and isinstance(given, str) and ".." in given:
            low, high = (kind.read(part) for part in given.split("..", 1))
            if low > high:
                raise ValueError(f"{given!r} ends before it begins")
            return low, high
        return kind.read(given), None

    def read(given: Any) -> Drawn:
        if not (isinstance(given, Mapping) and "one_of" in given):
            return Drawn(((1.0, *branch(given)),))
        if set(given) != {"one_of"} or not isinstance(given["one_of"], list) or not given["one_of"]:
            raise ValueError("one_of is a list of values, or of mappings with value and weight")
        branches = []
        for each in given["one_of"]:
            weight, value = 1.0, each
            if isinstance(each, Mapping):
                if not {"value"} <= set(each) <= {"value", "weight"}:
                    raise ValueError(f"a branch of one_of has a value and may have a weight; this one is {dict(each)}")
                weight, value = float(each.get("weight", 1)), each["value"]
            if weight <= 0:
                raise ValueError(f"a weight is more than 0, not {weight:g}")
            branches.append((weight, *branch(value)))
        return Drawn(tuple(branches))

    return Kind(kind.name, f"{kind.looks}, may be drawn", read)


def split(pod: str) -> dict[str, str]:
    """``default/web-0`` as the keywords namespace and name."""
    namespace, _, name = pod.partition("/")
    return {"namespace": namespace, "name": name}


def pod_name(given: Any) -> str:
    """``web-0`` is in the namespace default. Raises ValueError."""
    text = str(given) if given else ""
    text = text if "/" in text or not text else f"default/{text}"
    if not _POD.fullmatch(text):
        raise ValueError(f"{given!r} is no pod name such as default/web-0")
    return text


def word(name: str, words: Iterable[str]) -> Kind:
    """One of a few words."""
    allowed = tuple(words)

    def read(given: Any) -> str:
        if given not in allowed:
            raise ValueError(unknown(name, given, allowed))
        return str(given)

    return Kind("word", ", ".join(f"`{each}`" for each in allowed), read)


def _typed(type_: type, article: str) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        if not isinstance(given, type_) or (isinstance(given, bool) and type_ is not bool):
            raise ValueError(f"{given!r} is not {article}")
        return given

    return read


def _count(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ValueError(f"{given!r} is no number of times")
    return given


def _signed(given: Any) -> float:
    text = str(given)
    return -seconds_of(text[1:]) if text.startswith("-") else seconds_of(text)


def _share(given: Any) -> float:
    found = _SHARE.fullmatch(str(given))
    if not found or float(found[1]) > 100:
        raise ValueError(f"{given!r} is no share such as 30%")
    return float(found[1]) / 100


def _port(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= 65535:
        raise ValueError(f"{given!r} is no port from 1 to 65535")
    return given


def _ports(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise ValueError(f"{given!r} is no list of ports")
    return tuple(_port(each) for each in given)


def _ip(given: Any) -> str:
    try:
        return str(IPv4Address(str(given)))
    except ValueError:
        raise ValueError(f"{given!r} is no IPv4 address") from None


def _map(given: Any) -> dict[str, str | None]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{given!r} is no mapping")
    return {str(key): None if value is None else _plain(key, value) for key, value in given.items()}


def _plain(key: Any, value: Any) -> str:
    """Kubernetes holds texts; a port is written as a number all the same, and a switch as true."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int):
        raise ValueError(f"{key} is {value!r}; a value is a text, a whole number, true or false: put it in quotes")
    return str(value)


def _text(given: Any) -> str:
    if not isinstance(given, str | int | float):
        raise ValueError(f"{'nothing' if given is None else repr(given)} is no text")
    return str(given)


def _length(given: Any) -> float:
    seconds = seconds_of(given)
    if not seconds:
        raise ValueError(f"{given!r} is no time; it must be more than 0")
    return seconds


def _turn(given: Any) -> int:
    if _count(given) == 0:
        raise ValueError("0 is never; the first time is 1")
    return int(given)


def _text_or_none(given: Any) -> str | None:
    return None if given is None else str(given)


TIME = Kind("time", "`1m30s`", seconds_of)
SIGNED_TIME = Kind("time", "`1h`, or `-1h`", _signed)
LENGTH = Kind("time", "`1m30s`, more than 0", _length)
TEXT = Kind("text", "text", _text)
TEXT_OR_NONE = Kind("text", "text, or `null`", _text_or_none)
FLAG = Kind("yes or no", "`true` or `false`", _typed(bool, "true or false"))
COUNT = Kind("number", "a whole number", _count)
NTH = Kind("number", "a whole number from 1", _turn)
NUMBER = Kind("number", "a number", _typed((int, float), "a number"))  # type: ignore[arg-type]
SHARE = Kind("share", "`30%`", _share)
PORT = Kind("port", "1 to 65535", _port)
PORTS = Kind("ports", "`[22, 3389]`", _ports)
IP = Kind("address", "`10.88.0.200`", _ip)
MAP = Kind("mapping", "`{key: text}`", _map)
PARTS = Kind("mapping", "`{key: value}`", _typed(Mapping, "a mapping"))
POD = Kind("pod", "`default/web-0`", pod_name)
