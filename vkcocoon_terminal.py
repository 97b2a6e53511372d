"""How the commands talk to a person: aligned columns, marks, colors, durations.

Only text goes in and comes out; nothing here knows a pod or a setting, reads a clock or loads anything heavy, so the
commands that must answer at once can use it. What came from outside (a guest's name, an API's message) is made
printable here, because on a terminal it could move the cursor otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TextIO

__all__ = ["DASH", "Mark", "Paint", "ago", "columns", "milliseconds", "printable"]

DASH = "–"  # where there is nothing to say, so that every column has a word


class Mark(StrEnum):
    """How one line of a list of checks went."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


_SIGNS = {Mark.OK: "√", Mark.WARNING: "‼", Mark.FAILED: "×"}
_COLORS = {Mark.OK: "32", Mark.WARNING: "33", Mark.FAILED: "31"}


class Paint:
    """Colors, or none: `choice` is auto, always or never; auto is a terminal without NO_COLOR."""

    def __init__(self, choice: str, stream: TextIO, environ: Mapping[str, str]) -> None:
        automatic = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self.on = choice == "always" or (choice == "auto" and automatic)

    def mark(self, mark: Mark) -> str:
        """The sign of a mark."""
        return self.colored(_SIGNS[mark], mark)

    def colored(self, text: str, mark: Mark) -> str:
        """Text in the color of a mark."""
        return f"\x1b[{_COLORS[mark]}m{text}\x1b[0m" if self.on else text


def printable(text: str) -> str:
    """The text in one line, with control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table: columns as wide as their longest cell, two blanks between them, nothing at a line's end."""
    lines = [list(header), *([printable(cell) or DASH for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def ago(seconds: float) -> str:
    """A length of time as kubectl writes ages: 12s, 5m3s, 2h10m, 3d4h."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h" if hours else f"{days}d"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f}ms"
