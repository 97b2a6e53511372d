"""Pods on a terminal: a live table where there is one, one plain line a change where there is none.

`open_display` decides: the table needs a terminal and rich; otherwise the same words come as lines, which a log, a pipe
and `grep` can use. NO_COLOR is respected. Neither of the two reads a clock or the cluster by itself: whoever owns the
loop calls `show` when something changed and as often as ages should move (the table is driven, not refreshed by a
thread of its own).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TextIO

from simulator.cluster_view import PodRow

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Display", "PlainLines", "age", "open_display"]

NARROW = 100  # columns; below, what matters least makes room for the reason
LESS_IMPORTANT = ("OS", "RESTARTS")
STYLES: Mapping[str, str] = {"step": "bold cyan", "good": "green", "bad": "bold red", "event": "yellow", "note": "dim"}


class Display(Protocol):
    def say(self, text: str, kind: str = "") -> None:
        """Tell something that happened. `kind`: step, good, bad, event, note, or "" for a change of a pod."""

    def show(self, rows: Sequence[PodRow], now: datetime, title: str) -> None:
        """These are the pods now."""

    def close(self) -> None:
        """Leave the terminal as a program should: the last table stays, the cursor is back."""


def open_display(stream: TextIO, *, table: bool = True, footer: str = "") -> Display:
    """A live table on `stream` where that is possible and wanted, else plain lines. `footer` stays below the table."""
    if table and stream.isatty() and os.environ.get("TERM") != "dumb":
        try:
            return LiveTable(stream, footer)
        except ImportError:
            pass
    return PlainLines(stream)


class PlainLines:
    """Every line at once, no table."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, text: str, kind: str = "") -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show(self, rows: Sequence[PodRow], now: datetime, title: str) -> None:
        pass

    def close(self) -> None:
        pass


class LiveTable:
    """rich's Live, driven: the pods stay at the bottom, what happens scrolls by above them."""

    def __init__(self, stream: TextIO, footer: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._footer = footer
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def say(self, text: str, kind: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=STYLES.get(kind, "")), soft_wrap=True)

    def show(self, rows: Sequence[PodRow], now: datetime, title: str) -> None:
        narrow = self._console.width < NARROW
        self._live.update(_table(rows, now, title, self._footer, narrow=narrow), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _table(rows: Sequence[PodRow], now: datetime, title: str, footer: str, *, narrow: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"\n{title}", caption=footer, box=None, expand=True, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.title_style = "bold"
    for name in ("POD", "OS", "IP", "PROBE", "LIFECYCLE", "READY", "SINCE", "RESTARTS"):
        if not (narrow and name in LESS_IMPORTANT):
            table.add_column(name, justify="right" if name in ("SINCE", "RESTARTS") else "left", no_wrap=True)
    table.add_column("REASON", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        ready = Text(_truth(row.ready), style="bold green" if row.ready else "bold red")
        cells: list[str | Text] = [
            row.key,
            row.ip or "-",
            _truth(row.probe),
            row.lifecycle or "-",
            ready,
            age(row.since, now),
        ]
        if not narrow:
            cells.insert(1, row.os)
            cells.append(str(row.restarts))
        table.add_row(*cells, _reason(row))
    return table


def _truth(value: bool) -> str:
    return "True" if value else "False"


def _reason(row: PodRow) -> str:
    reason = "Terminating" if row.terminating else row.reason or row.phase
    return reason if row.ready or not row.message else f"{reason}: {row.message}"


def age(since: datetime | None, now: datetime) -> str:
    """How long ago, as kubectl writes it: 7s, 3m12s, 5h; "-" when it never was."""
    if since is None:
        return "-"
    seconds = max(0, int((now - since).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    return f"{minutes}m" if minutes < 180 else f"{minutes // 60}h"
