"""What happened in a run, in order, with the instant of each: the event log and its digest.

An entry is a line of JSON (vkcocoon_record). Two runs of one seed write the same lines, so the digest of the lines is
the fingerprint of the run; where two runs differ, the first line that differs says where. Everything a fake records
ends here, and so does every probe and every write that Kubernetes accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from simulator.clock import VirtualClock
from simulator.live_clock import LiveClock
from vkcocoon_record import Entry

__all__ = ["Timeline"]


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Timeline:
    """The entries of one run."""

    def __init__(self, clock: VirtualClock | LiveClock) -> None:
        self._clock = clock
        self._entries: list[Entry] = []
        self.listeners: list[Callable[[Entry], None]] = []  # told of each entry; must not switch greenlets
        self.backwards: Callable[[str], None] = lambda text: None  # told when an instant lies before the last one

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, actor: str, kind: str, key: str, fields: Mapping[str, Any] = NOTHING) -> None:
        """Add an event that happens now."""
        self.add(actor, kind, key, tuple(fields.items()))

    def add(self, actor: str, kind: str, key: str, fields: tuple[tuple[str, Any], ...]) -> None:
        """The same with the fields as an entry has them, for who can share parts of them between entries."""
        entry = Entry(self._clock.now_us, actor, kind, key, fields)
        entries = self._entries
        if entries and entry.at_us < entries[-1].at_us:
            self.backwards(f"{entry.seconds:.6f} s comes after {entries[-1].seconds:.6f} s")
        entries.append(entry)
        for listener in self.listeners:
            listener(entry)

    def of(self, *, actor: str | None = None, kind: str | None = None, key: str | None = None) -> list[Entry]:
        """The entries that match all that is given."""
        return [
            entry
            for entry in self._entries
            if actor in (None, entry.actor) and kind in (None, entry.kind) and key in (None, entry.key)
        ]

    def at(self, **match: str) -> list[float]:
        """The instants, in seconds, of the entries that `of` finds."""
        return [entry.seconds for entry in self.of(**match)]

    def digest(self) -> str:
        """``sha256:...`` over the lines."""
        digest = hashlib.sha256()
        for entry in self._entries:
            digest.update(entry.line().encode() + b"\n")
        return f"sha256:{digest.hexdigest()}"

    def first_difference(self, other: Timeline) -> str:
        """The first entry in which two runs differ, both sides; "" when they are the same."""
        for mine, theirs in zip(self, other, strict=False):
            if mine != theirs:
                return f"{mine.text()}\n{theirs.text()}"
        if len(self) != len(other):
            longer = self if len(self) > len(other) else other
            return f"one run ends, the other goes on: {list(longer)[min(len(self), len(other))].text()}"
        return ""
