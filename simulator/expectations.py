"""What must come of a scenario, checked against the timeline when the run is over.

`EXPECTATIONS` is the table of kinds; the key that names the kind tells them apart. Instants are times of the scenario,
or the id of an event and mean the moment it happened. An expectation never looks at the daemon, only at what
Kubernetes held and at what can be seen (simulator.observations).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simulator.document import Kind, Parameter, unknown
from simulator.observations import SIGHT, Observation, observation
from simulator.values import COUNT, FLAG, POD, TEXT, TIME, seconds_of, split, time_text
from vkcocoon_record import Entry

if TYPE_CHECKING:
    from simulator.stage import Stage

__all__ = ["EXPECTATIONS", "FACETS", "NOTE", "WHEN", "Expectation", "Run", "Sort", "Verdict", "written"]

FACETS = ("ready", "reason", "phase", "address", "lifecycle", "probe", "intent", "terminating", "exists")
LAST_EVENTS = 6  # shown with an expectation that was not met


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over: the world, when it ended, and when the events with an id happened.

    ``planned`` is when it was meant to end. A run that was ended earlier leaves open what more time could have changed.
    ``allowance`` is for real time, where things come a little late or early: an expectation also holds if it does with
    an edge of its stretch of time moved by so much. ``moved`` says by how much the two edges are moved right now.
    """

    world: Stage
    end: float
    happened: Mapping[str, float]
    planned: float
    allowance: float = 0.0
    moved: tuple[float, float] = (0.0, 0.0)

    def stretch(self, begin: float, end: float) -> tuple[float, float]:
        """From when to when, with the edges where they are at the moment. Raises LookupError when nothing is left."""
        begin, end = max(0.0, begin + self.moved[0]), end + self.moved[1]
        if end < begin:
            raise LookupError("no time is left of it")
        return begin, end

    @property
    def cut(self) -> bool:
        return self.end < self.planned

    def instant(self, when: float | str) -> float:
        """Raises LookupError for an event that did not happen."""
        if isinstance(when, float):
            return when
        if when not in self.happened:
            raise LookupError(f"the event {when!r} did not happen")
        return self.happened[when]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``why`` it is broken, "" when it is not; the stretch of time it is about, in seconds.

    ``final``: more of that time would change nothing, because what was wanted, or must not be, has been seen.
    """

    why: str = ""
    begin: float | None = None
    end: float | None = None
    final: bool = False

    def kind(self, run: Run) -> str:
        """met, broken or not reached, as the log has it."""
        if run.cut and not self.final and (self.end is None or self.end > run.end):
            return "not reached"
        return "broken" if self.why else "met"


Check = Callable[[Run, Mapping[str, Any]], Verdict]


@dataclass(frozen=True, slots=True)
class Expectation:
    """A kind of expectation with its values: as it was written, and how it is judged."""

    text: str
    pod: str | None
    values: Mapping[str, Any]
    check: Check
    line: int | None = None  # of the file

    def judge(self, run: Run) -> Verdict:
        verdict = self._judged(run)
        if not run.allowance or verdict.kind(run) != "broken":
            return verdict
        shifts = (0.0, run.allowance, -run.allowance)
        moved = (self._judged(replace(run, moved=edges)) for edges in itertools.product(shifts, shifts))
        return next((each for each in moved if not each.why), verdict)

    def _judged(self, run: Run) -> Verdict:
        try:
            return self.check(run, self.values)
        except LookupError as error:
            return Verdict(str(error.args[0]))


@dataclass(frozen=True, slots=True)
class Sort:
    """A row of the table: the key that names the kind, what else it takes, what it says."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    check: Check
    lacks: Callable[[Mapping[str, Any]], str] = lambda values: ""  # what is wrong with the values together


# The kinds ------------------------------------------------------------------------------------------------------------


def _became_ready(run: Run, values: Mapping[str, Any]) -> Verdict:
    pod, wanted = values["pod"], values["ready"]
    after = 0.0 if values["after"] is None else run.instant(values["after"])
    if values["at"] is not None:
        begin = end = run.instant(values["at"])
    else:
        begin, end = after, run.instant(values["by"]) if values["by"] is not None else after + values["within"]
    begin, end = run.stretch(begin, end)
    flips = run.world.flips(**split(pod))
    if any(begin <= at <= end and value is wanted for at, value in flips):
        return Verdict("", begin, end, final=True)
    instants = [f"{at:.6f}" for at, value in flips if value is wanted]
    return Verdict(f"became {wanted} at {', '.join(instants) or 'no time'}{_story(run, pod, end)}", begin, end)


def _shows(run: Run, values: Mapping[str, Any]) -> Verdict:
    pod = values["pod"]
    if values["at"] is not None:
        begin, end = run.stretch(run.instant(values["at"]), run.instant(values["at"]))
    else:
        begin, end = _window(run, values)
    for facet, wanted in values["shows"].items():
        for at, value in _history(run.world, pod, facet, begin, end):
            if value != wanted:
                why = f"{facet} was {value or 'nothing'} at {at:.6f}{_story(run, pod, at)}"
                return Verdict(why, begin, end, final=at <= run.end)
    return Verdict("", begin, end)


def _never(run: Run, values: Mapping[str, Any]) -> Verdict:
    begin, end = _window(run, values)
    seen = _sightings(run, values["never"], values["pod"], begin, end)
    why = f"seen at {seen[0].seconds:.6f}: {seen[0].text().strip()}" if seen else ""
    return Verdict(why, begin, end, final=bool(seen))


def _counted(run: Run, values: Mapping[str, Any]) -> Verdict:
    begin, end = _window(run, values)
    seen = _sightings(run, values["count"], values["pod"], begin, end)
    least = values["is"] if values["is"] is not None else values["at_least"]
    most = values["is"] if values["is"] is not None else values["at_most"]
    enough, few = least is None or len(seen) >= least, most is None or len(seen) <= most
    why = "" if enough and few else f"{len(seen)} times, {_instants(seen)}"
    return Verdict(why, begin, end, final=not few or (enough and most is None))


def _flips(run: Run, values: Mapping[str, Any]) -> Verdict:
    begin, end = _window(run, values)
    seen = _sightings(run, observation("flip"), values["pod"], begin, end)
    why = "" if len(seen) == values["flips"] else f"{len(seen)} flips, {_instants(seen)}"
    return Verdict(why, begin, end, final=len(seen) > values["flips"])


def _order(run: Run, values: Mapping[str, Any]) -> Verdict:
    """Each is seen at least once, the first time after the first time of the one before it."""
    begin, end = _window(run, values)
    window = _entries(run, begin, end)
    last, place = "", -1
    for sight in values["order"]:
        found = next((n for n, entry in enumerate(window) if sight.sees(entry, values["pod"])), None)
        if found is None:
            return Verdict(f"{sight.text!r} was never seen", begin, end)
        if found < place:
            why = f"{sight.text!r} was first seen at {window[found].seconds:.6f}, before {last!r}"
            return Verdict(why, begin, end, final=True)
        last, place = sight.text, found
    return Verdict("", begin, end, final=True)


def _settled(run: Run, values: Mapping[str, Any]) -> Verdict:
    owed = run.world.owed()
    if owed is None:
        return Verdict("the daemon does not run")
    return Verdict(f"not yet told to the API: {', '.join(owed)}" if owed else "", run.planned, run.planned)


def _vms(run: Run, values: Mapping[str, Any]) -> Verdict:
    names = run.world.vm_names()
    if values["pod"] is not None:
        names = [name for name in names if name == run.world.vm_of(values["pod"])]
    fine = len(names) == values["vms"]
    return Verdict("" if fine else f"there are {len(names)}: {', '.join(names) or 'none'}", run.planned, run.planned)


# What they are made of ------------------------------------------------------------------------------------------------


def _window(run: Run, values: Mapping[str, Any]) -> tuple[float, float]:
    begin = 0.0 if values["from"] is None else run.instant(values["from"])
    end = run.planned if values["to"] is None else run.instant(values["to"])
    first, last = run.stretch(begin, end)
    return (begin if values["from"] is None else first), (end if values["to"] is None else last)


def _entries(run: Run, begin: float, end: float) -> list[Entry]:
    return [entry for entry in run.world.timeline if begin <= entry.seconds <= end]


def _sightings(run: Run, sight: Observation, pod: str | None, begin: float, end: float) -> list[Entry]:
    return [entry for entry in _entries(run, begin, end) if sight.sees(entry, pod)]


def _instants(entries: list[Entry]) -> str:
    shown = [f"{entry.seconds:.6f}" for entry in entries[:8]]
    return f"at {', '.join(shown)}{', ...' if len(entries) > 8 else ''}" if shown else "at no time"


def _history(world: Stage, pod: str, facet: str, begin: float, end: float) -> list[tuple[float, str]]:
    """The values of a facet from `begin` to `end`: the one it had then, and each it was given later."""
    if facet == "exists":
        entries = [e for e in world.timeline.of(actor="kube", key=pod) if e.kind in ("created", "deleted")]
        values = [(entry.seconds, "True" if entry.kind == "created" else "False") for entry in entries]
        first = "False"
    else:
        entries = world.timeline.of(actor="kube", kind=facet, key=pod)
        values = [(entry.seconds, str(dict(entry.fields)[facet])) for entry in entries]
        first = ""
    place = bisect_right(values, begin, key=lambda value: value[0])
    before = values[place - 1][1] if place else first
    return [(begin, before), *(value for value in values[place:] if value[0] <= end)]


def _story(run: Run, pod: str, until: float) -> str:
    """The last things that happened to the pod, for whoever wonders."""
    entries = [
        entry
        for entry in run.world.timeline
        if entry.seconds <= until and entry.key == pod and entry.actor != "push" and entry.kind != "hands over"
    ]
    lines = [f"\n           {entry.text().strip()}" for entry in entries[-LAST_EVENTS:]]
    return "; last events:" + "".join(lines) if lines else ""


# The table ------------------------------------------------------------------------------------------------------------


def _given(values: Mapping[str, Any], *keys: str) -> int:
    return sum(values[key] is not None for key in keys)


def _read_when(given: Any) -> float | str:
    try:
        return seconds_of(given)
    except ValueError:
        if not isinstance(given, str) or not given.isidentifier():
            raise
        return given


def _read_shows(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{given!r} is no mapping")
    for facet in given:
        if facet not in FACETS:
            raise ValueError(unknown("part of what Kubernetes shows", facet, FACETS))
    return {facet: "" if value is None else str(value) for facet, value in given.items()}


def _read_order(given: Any) -> tuple[Observation, ...]:
    if not isinstance(given, list) or len(given) < 2:
        raise ValueError("order is a list of at least two observations")
    return tuple(observation(each) for each in given)


WHEN = Kind("instant", "a time, or the id of an event", _read_when)
_SHOWS = Kind("mapping", f"some of {', '.join(FACETS)}; `null` is nothing", _read_shows)
_ORDER = Kind("observations", "a list of observations", _read_order)

_POD = Parameter("pod", POD, "the pod", needed=True)
_ANY_POD = Parameter("pod", POD, "only about this pod")
_WINDOW = (
    Parameter("from", WHEN, "the beginning, if it is not that of the run"),
    Parameter("to", WHEN, "the end, if it is not that of the run"),
)
NOTE = Parameter("note", TEXT, "for people")

_ROWS = (
    Sort(
        "ready",
        "Kubernetes comes to hold this value of Ready.",
        (
            _POD,
            Parameter("ready", FLAG, "which", needed=True),
            Parameter("at", WHEN, "at exactly this instant"),
            Parameter("by", WHEN, "by then"),
            Parameter("after", WHEN, "not before this"),
            Parameter("within", TIME, "so soon after `after`"),
        ),
        _became_ready,
        lambda values: "" if _given(values, "at", "by", "within") == 1 else "ready needs one of at, by and within",
    ),
    Sort(
        "shows",
        "Kubernetes shows these values, at an instant or all the time.",
        (
            _POD,
            Parameter("shows", _SHOWS, "what", needed=True),
            Parameter("at", WHEN, "at this instant"),
            *_WINDOW,
        ),
        _shows,
        lambda values: "shows has at, or from and to" if _given(values, "at") and _given(values, "from", "to") else "",
    ),
    Sort(
        "never",
        "Something is not seen.",
        (_ANY_POD, Parameter("never", SIGHT, "what", needed=True), *_WINDOW),
        _never,
    ),
    Sort(
        "count",
        "Something is seen so many times.",
        (
            _ANY_POD,
            Parameter("count", SIGHT, "what", needed=True),
            Parameter("is", COUNT, "exactly so often"),
            Parameter("at_least", COUNT, "so often or more"),
            Parameter("at_most", COUNT, "so often or less"),
            *_WINDOW,
        ),
        _counted,
        lambda values: "" if _given(values, "is", "at_least", "at_most") else "count needs is, at_least or at_most",
    ),
    Sort(
        "flips",
        "Ready changes so many times; short for counting `flip`.",
        (_POD, Parameter("flips", COUNT, "how many", needed=True), *_WINDOW),
        _flips,
    ),
    Sort(
        "order",
        "Things are first seen in this order.",
        (_ANY_POD, Parameter("order", _ORDER, "what", needed=True), *_WINDOW),
        _order,
    ),
    Sort(
        "settled",
        "At the end the API holds everything the daemon has to say.",
        (Parameter("settled", FLAG, "`true`", needed=True),),
        _settled,
    ),
    Sort(
        "vms",
        "At the end there are so many VMs, of this pod or of all.",
        (_ANY_POD, Parameter("vms", COUNT, "how many", needed=True)),
        _vms,
    ),
)

EXPECTATIONS = {row.name: row for row in _ROWS}


def written(row: Mapping[str, Any]) -> str:
    """An expectation on one line, as its report begins."""
    return " ".join(f"{key}={_shown(value)}" for key, value in row.items() if key != "note")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {each}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return time_text(value) if isinstance(value, float) else str(value)
