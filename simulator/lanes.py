"""What happened in a run, sorted into lanes: for each pod what was leased, asked, decided, told and done, side by side.

`Picture.of` reads a timeline into lanes of spans and marks, without any idea of how they will be drawn;
simulator.report draws them as a page, `text` as characters for a terminal. An empty lane is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.values import time_text
from vkcocoon_record import Entry

__all__ = ["Lane", "Mark", "Picture", "Section", "Span", "Verdict", "text"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that was one way from an instant to another, in seconds. ``tone`` is how it is meant: good, bad, ..."""

    begin: float
    end: float
    label: str
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at an instant."""

    at: float
    label: str
    tone: str = "plain"


@dataclass(slots=True)
class Lane:
    """One row: its name, and what is in it."""

    name: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.spans or self.marks)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An expectation and what became of it; the stretch of time it is about, if it is about one."""

    text: str
    kind: str  # met, broken, not reached
    why: str = ""
    pod: str = ""
    begin: float | None = None
    end: float | None = None


@dataclass(slots=True)
class Section:
    """The lanes of a pod, or of everything else (``name`` "")."""

    name: str
    lanes: list[Lane] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(slots=True)
class Picture:
    """A run, ready to be drawn."""

    end: float
    sections: list[Section]
    verdicts: list[Verdict]

    @classmethod
    def of(cls, entries: Iterable[Entry], end: float) -> Picture:
        entries = [entry for entry in entries if entry.seconds <= end or entry.actor == "expect"]
        verdicts = [_verdict(entry) for entry in entries if entry.actor == "expect"]
        pods = {entry.key for entry in entries if entry.actor == "kube" and entry.kind == "created"}
        sections = [Section("", _lanes_of_the_rest(entries, end, pods))]
        for pod in sorted(pods):
            own = [entry for entry in entries if entry.key == pod]
            mine = [verdict for verdict in verdicts if verdict.pod == pod]
            sections.append(Section(pod, [lane for lane in _lanes_of_a_pod(own, end) if lane], mine))
        return cls(end, [section for section in sections if section.lanes], verdicts)


def _verdict(entry: Entry) -> Verdict:
    fields = dict(entry.fields)
    return Verdict(
        entry.key,
        entry.kind,
        str(fields.get("why", "")),
        str(fields.get("pod", "")),
        fields.get("from"),
        fields.get("to"),
    )


# The lanes ------------------------------------------------------------------------------------------------------------

LIFECYCLE_TONES = {"ready": "good", "failed": "bad", "creating": "wait"}
RESULT_TONES = {"ok": "good", "fails": "bad"}


def _lanes_of_a_pod(entries: Sequence[Entry], end: float) -> Iterator[Lane]:
    yield Lane("happens", marks=[_happening(entry) for entry in entries if entry.actor in ("scenario", "guest")])
    yield Lane("lease", _spans(_values(entries, "lease", ("granted", "gone"), "ip"), end, lambda ip: "plain"))
    yield Lane("address", _spans(_values(entries, "kube", ("address",), "address"), end, lambda ip: "plain"))
    yield Lane("probes", marks=list(_probes(entries)))
    yield Lane("probe", _spans(_values(entries, "kube", ("probe",), "probe"), end, _truth))
    yield Lane(
        "intent",
        _spans(_values(entries, "kube", ("lifecycle",), "lifecycle"), end, lambda s: LIFECYCLE_TONES.get(s, "off")),
    )
    yield Lane("Ready", list(_ready(entries, end)))
    yield Lane("pushes", marks=list(_pushes(entries)))
    yield Lane("commands", list(_commands(entries, end)))
    yield Lane("broken", marks=[_broken(entry) for entry in entries if entry.actor == "invariant"])


def _lanes_of_the_rest(entries: Sequence[Entry], end: float, pods: set[str]) -> list[Lane]:
    life = [entry for entry in entries if entry.actor == "daemon" and entry.kind in ("start", "stop", "kill")]
    # The stop at the end of every run is none of the story.
    runs = [(entry.seconds, "runs" if entry.kind == "start" else "") for entry in life if entry.seconds < end]
    others = [entry for entry in entries if entry.key not in pods]
    lanes = [
        Lane("daemon", _spans(runs, end, lambda value: "good")),
        Lane("happens", marks=[_happening(entry) for entry in others if entry.actor == "scenario"]),
        Lane("commands", list(_commands(others, end))),
        Lane("broken", marks=[_broken(entry) for entry in others if entry.actor == "invariant"]),
    ]
    return [lane for lane in lanes if lane]


def _values(entries: Iterable[Entry], actor: str, kinds: tuple[str, ...], name: str) -> list[tuple[float, str]]:
    """The values that something was given, with their instants; "" is none."""
    chosen = [entry for entry in entries if entry.actor == actor and entry.kind in kinds]
    return [(entry.seconds, str(dict(entry.fields).get(name, ""))) for entry in chosen]


def _spans(values: Sequence[tuple[float, str]], end: float, tone: Any) -> list[Span]:
    spans: list[Span] = []
    if not values:
        return spans
    for (begin, value), (until, _) in zip(values, [*values[1:], (end, "")], strict=True):
        if value:
            spans.append(Span(begin, until, value, tone(value)))
    return spans


def _truth(value: str) -> str:
    return "good" if value == "True" else "bad"


def _ready(entries: Sequence[Entry], end: float) -> Iterator[Span]:
    """Ready with its reason; the reason may change while Ready does not."""
    values: list[tuple[float, str]] = []
    ready = ""
    for entry in entries:
        if entry.actor != "kube" or entry.kind not in ("ready", "reason", "deleted"):
            continue
        fields = dict(entry.fields)
        if entry.kind == "deleted":
            values.append((entry.seconds, ""))
            continue
        ready = str(fields.get("ready", ready))
        value = f"{ready} {fields.get('reason', '')}".strip()
        if values and values[-1][0] == entry.seconds:
            values.pop()
        values.append((entry.seconds, value if ready else ""))
    yield from _spans(values, end, lambda value: "good" if value.startswith("True") else "bad")


def _probes(entries: Iterable[Entry]) -> Iterator[Mark]:
    for entry in entries:
        if entry.actor == "probe":
            fields = dict(entry.fields)
            took = f" after {time_text(fields['took_us'] / 1e6)}" if fields.get("took_us") else ""
            yield Mark(entry.seconds, f"{fields.get('reason', '')}{took}", RESULT_TONES.get(entry.kind, "plain"))


def _pushes(entries: Iterable[Entry]) -> Iterator[Mark]:
    for entry in entries:
        if entry.actor == "push":
            refused = dict(entry.fields).get("refused")
            yield Mark(entry.seconds, f"{entry.kind}{f': {refused}' if refused else ''}", "bad" if refused else "good")


def _commands(entries: Iterable[Entry], end: float) -> Iterator[Span]:
    """Commands from their begin to their end; one that only asks and takes no time is a thin line."""
    begun: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        if entry.actor != "command":
            continue
        fields = dict(entry.fields)
        verb = str(fields["verb"])
        if entry.kind == "begins":
            begun.setdefault((entry.key, verb), []).append(entry.seconds)
        elif starts := begun.get((entry.key, verb)):
            failed = fields.get("exit") != "0"
            label = f"{verb}, exit {fields.get('exit')}" if failed else verb
            yield Span(starts.pop(0), entry.seconds, label, "bad" if failed else "plain")
    for (_, verb), starts in begun.items():
        yield from (Span(start, end, f"{verb}, not over", "wait") for start in starts)


def _happening(entry: Entry) -> Mark:
    fields = dict(entry.fields)
    shown = fields.get("what") or fields.get("ip") or ""
    return Mark(entry.seconds, f"{entry.kind} {shown}".strip(), "event" if entry.actor == "scenario" else "plain")


def _broken(entry: Entry) -> Mark:
    fields = dict(entry.fields)
    return Mark(entry.seconds, f"{fields['rule']}: {fields['why']}", "bad")


# For a terminal -------------------------------------------------------------------------------------------------------

SPAN_CHARACTERS = {"good": "=", "bad": "x", "wait": "-", "off": "~", "plain": "-", "event": "-"}
MARK_CHARACTERS = {"good": "o", "bad": "x", "event": "!", "plain": "."}
SIGNS = {"met": "met   ", "broken": "BROKEN", "not reached": "not reached"}  # of a verdict, in front of its text
WEIGHT = {"x": 3, "!": 2, "o": 1, ".": 0}  # which of two marks in one place is shown
NAME_WIDTH = 10


def text(picture: Picture, columns: int = 100) -> str:
    """The lanes as characters: ``=`` good, ``x`` bad, others in between; ``o`` and ``x`` for single results."""
    width = max(20, columns - NAME_WIDTH - 3)
    lines = [f"{'':{NAME_WIDTH}}  {_scale(picture.end, width)}"]
    for section in picture.sections:
        lines.append(section.name or "the daemon and everything else")
        lines += [f"  {lane.name:{NAME_WIDTH}}{_row(lane, picture.end, width)}" for lane in section.lanes]
        timed = [verdict for verdict in section.verdicts if verdict.end is not None]
        lines += [f"  {'':{NAME_WIDTH}}{_verdict_row(verdict, picture.end, width)}" for verdict in timed]
    lines += [f"{SIGNS[verdict.kind]} {verdict.text}" for verdict in picture.verdicts]
    return "\n".join(lines) + "\n"


def _scale(end: float, width: int) -> str:
    """Instants above the lanes, at a distance that leaves room for each."""
    cells, step = [" "] * (width + 8), nice_step(end, width / 12)
    at = 0.0
    while at <= end:
        place = _place(at, end, width)
        label = time_text(at)
        cells[place : place + len(label)] = label
        at += step
    return "".join(cells).rstrip()


def nice_step(end: float, most: float) -> float:
    """A round distance between instants, so that there are at most so many."""
    steps = (0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200)
    return next((step for step in steps if end / step <= most), 86400)


def _row(lane: Lane, end: float, width: int) -> str:
    cells = [" "] * width
    for span in lane.spans:
        first, last = _place(span.begin, end, width), _place(span.end, end, width)
        for place in range(first, max(last, first + 1)):
            cells[place] = SPAN_CHARACTERS.get(span.tone, "-")
        label = span.label.split()[-1] if lane.name == "Ready" else span.label
        if last - first >= len(label) + 4:
            cells[first + 1 : first + 1 + len(label)] = label
    for mark in lane.marks:
        place, sign = _place(mark.at, end, width), MARK_CHARACTERS.get(mark.tone, ".")
        if cells[place] == " " or WEIGHT[sign] > WEIGHT.get(cells[place], -1):
            cells[place] = sign
    return "".join(cells).rstrip()


def _verdict_row(verdict: Verdict, end: float, width: int) -> str:
    first, last = _place(verdict.begin or 0.0, end, width), _place(verdict.end or 0.0, end, width)
    return f"{' ' * first}[{'_' * max(0, last - first - 1)}] {SIGNS[verdict.kind].strip()}"


def _place(at: float, end: float, width: int) -> int:
    return min(width - 1, max(0, round(at / end * (width - 1)))) if end else 0
