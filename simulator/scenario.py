"""Scenario files: pods, what happens to them and when, and what must come of it; run in virtual time.

    version: 1
    until: 60s
    pods:
      - {name: default/web-0, os: linux, guest: {boot: 1s..3s, lease: 500ms}}
    events:
      - {id: hang, at: 20s, for: 20s, silent: default/web-0}
    expect:
      - {pod: default/web-0, ready: true, by: 5s}
      - {pod: default/web-0, ready: false, after: hang, within: 24s}

The language is the tables of simulator.happenings, simulator.expectations and simulator.observations, and what stands
here: the keys of a scenario, of a pod, of its guest, and when an event happens. docs/scenarios.md is made from them.

Instants count from the start and are exact to the microsecond. Whatever is not known is refused with file, line and a
suggestion. An event whose moment never comes, or that finds no guest to happen to, is a broken expectation: a fault
that missed its window has proved nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from simulator.document import Document, Parameter, ScenarioError, unknown
from simulator.expectations import EXPECTATIONS, NOTE, Expectation, Run, Verdict, written
from simulator.fake_vms import GuestSpec
from simulator.happenings import HAPPENINGS, Happening
from simulator.observations import SIGHT, Observation
from simulator.stage import Stage
from simulator.timeline import Timeline
from simulator.values import (
    COUNT,
    FLAG,
    LENGTH,
    MAP,
    NTH,
    NUMBER,
    PARTS,
    POD,
    PORTS,
    SHARE,
    TEXT,
    TIME,
    Drawn,
    drawn,
    split,
    word,
)
from simulator.world import World
from vkcocoon_record import Entry
from vkcocoon_settings import SETTINGS, SettingError

__all__ = [
    "EVENT",
    "GUEST",
    "PODS",
    "RESOURCES",
    "SCENARIO",
    "WHEN_SEEN",
    "Event",
    "Performance",
    "PodPlan",
    "Scenario",
    "ScenarioError",
    "load",
    "run_scenario",
]

# The keys -------------------------------------------------------------------------------------------------------------

SCENARIO = (
    Parameter("version", NUMBER, "of the language: 1", default=1),
    Parameter("name", TEXT, "what it is about; the file's name if not given"),
    Parameter("seed", COUNT, "the seed to run it with when none is given on the command line"),
    Parameter("until", LENGTH, "when it ends", default=60.0),
    Parameter("jitter", TIME, "with a seed: the most that a call, packet or message takes by itself; 2ms if not given"),
    Parameter(
        "wire",
        word("wire", ("simple", "packets")),
        "`packets`: echoes are real packets to the daemon's own pinger",
        default="simple",
    ),
    Parameter("raw_socket", FLAG, "`false`: the daemon gets none and runs degraded", default=True),
    Parameter("settings", MAP, "settings of the daemon, such as `orphan_policy: destroy`"),
)

PODS = (
    Parameter("name", POD, "namespace and name", needed=True),
    Parameter("os", word("os", ("linux", "windows", "macos")), "its system", default="linux"),
    Parameter("at", drawn(TIME), "when it is created"),
    Parameter(
        "annotations",
        MAP,
        "annotations besides those its system needs; null takes one of those away. A number or true becomes text",
    ),
    Parameter("labels", MAP, "labels"),
    Parameter("resources", MAP, "`cpu`, `memory`: requests and limits of its container"),
)
RESOURCES = ("cpu", "memory")

GUEST = (
    Parameter("boot", drawn(TIME), "from power-on until it asks for its address"),
    Parameter("resume", drawn(TIME), "the same for a clone, if it is another time"),
    Parameter("lease", drawn(TIME), "from asking to having it"),
    Parameter("echo", drawn(FLAG), "whether it answers echoes once it is up"),
    Parameter("echo_after", drawn(TIME), "from the address to the first answer"),
    Parameter("ports", PORTS, "what accepts from the address on"),
    Parameter("ssh_after", drawn(TIME), "port 22 accepts from the address on and speaks that much later"),
    Parameter("ssh_banner", TEXT, "what sshd says, lines as they come"),
    Parameter("latency", drawn(TIME), "how long an answer takes"),
    Parameter("loss", drawn(SHARE), "how many questions are lost"),
    Parameter("flood", FLAG, "each echo also brings replies that are wrong in one respect each"),
)
# The field of GuestSpec that a key is about, where it has another name.
GUEST_FIELDS = {
    **{key: f"{key}_s" for key in ("boot", "resume", "lease", "echo_after", "ssh_after", "latency")},
}

EVENT = (
    Parameter("at", drawn(TIME), "the instant it happens"),
    Parameter("when", PARTS, "instead of at: it happens when something is seen, see below"),
    Parameter("for", drawn(TIME), "how long it lasts; without it, until the end"),
    Parameter("every", LENGTH, "it happens again, so often after the first time"),
    Parameter("times", COUNT, "how many times in all; without it, until the end"),
    Parameter("id", TEXT, "a name that expectations can refer to"),
    NOTE,
)
WHEN_SEEN = (
    Parameter("sees", SIGHT, "what is seen", needed=True),
    Parameter("pod", POD, "about which pod; about any if not given"),
    Parameter("nth", NTH, "which time counts", default=1),
    Parameter("since", TEXT, "count only from the event with this id on"),
    Parameter("later", drawn(TIME), "how much later it happens"),
)

SETTING_ROWS = {row.name: row for row in SETTINGS}


# A scenario that was read ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trigger:
    """The moment something is seen for the nth time since an event (None: since the start), or a little later."""

    sight: Observation
    pod: str | None
    nth: int
    since: str | None
    later: Drawn


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens: at an instant or on a trigger, for a while, once or again and again."""

    text: str
    happening: Happening
    values: Mapping[str, Any]
    at: Drawn | None = None
    trigger: Trigger | None = None
    lasts: Drawn | None = None
    every: float | None = None
    times: int | None = None
    id: str = ""
    line: int | None = None  # of the file

    @property
    def pod(self) -> str | None:
        return self.values.get("pod")

    @property
    def detail(self) -> str:
        """What it takes besides the pod, as the log shows it."""
        given = {key: value for key, value in self.values.items() if key != "pod" and value not in (None, False)}
        return _written(given if len(given) > 1 else next(iter(given.values()), None))


@dataclass(frozen=True, slots=True)
class PodPlan:
    """A pod and its guest, draws not yet made."""

    name: str
    os: str
    at: Drawn | None
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    guest: Mapping[str, Any] = field(default_factory=dict)  # fields of a GuestSpec, or draws of them
    line: int | None = None  # of the file


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario that was read and understood; ``document`` is what it was read from."""

    name: str
    until: float
    document: Mapping[str, Any]
    seed: int | None = None
    pods: tuple[PodPlan, ...] = ()
    events: tuple[Event, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # of the World
    cut: float | None = None  # ended then, before its time
    file: str = ""
    setting_lines: Mapping[str, int | None] = field(default_factory=dict)  # of the file

    @property
    def end(self) -> float:
        return self.until if self.cut is None else min(self.cut, self.until)

    def run(self, seed: int | None) -> Timeline:
        """Run it; the verdicts are the last entries of the timeline."""
        with World(seed, **self.options) as world:
            return Performance(self, world).perform()


def run_scenario(source: str | Path | Mapping[str, Any], seed: int | None = None) -> Timeline:
    """Run a scenario (a file, or its contents as a dict) and return what happened.

    The verdicts are the last entries: actor ``expect``, kind ``met``, ``broken`` or ``not reached``; a broken invariant
    is an entry ``invariant`` / ``broken`` at its instant. Raises ScenarioError when the scenario cannot be understood.
    """
    scenario = load(source)
    return scenario.run(scenario.seed if seed is None else seed)


def load(source: str | Path | Mapping[str, Any]) -> Scenario:
    """Read a scenario; raises ScenarioError."""
    return _Reader(Document.of(source)).scenario()


# Running --------------------------------------------------------------------------------------------------------------


class Performance:
    """One run of a scenario on a stage that stands; ``allowance``: see `simulator.expectations.Run`."""

    def __init__(self, scenario: Scenario, world: Stage, allowance: float = 0.0) -> None:
        self._scenario = scenario
        self._world = world
        self._allowance = allowance
        self._happened: dict[str, float] = {}
        self._missed: dict[str, str] = {}  # text of an event -> why it did not come off
        self._waiting: list[tuple[Event, list[int]]] = []  # triggers that were not seen yet, and how often they were

    def perform(self) -> Timeline:
        """To its end; the verdicts are the last entries of the timeline."""
        world, scenario = self._world, self._scenario
        for pod in scenario.pods:
            world.announce(**split(pod.name), os=pod.os, annotations=pod.annotations)
            at = pod.at.draw(self._rng("pod", pod.name, "at")) if pod.at is not None else 0.0
            world.clock.at(at, self._create, pod, owner=f"create {pod.name}")
        for event in scenario.events:
            if event.trigger is not None:
                self._waiting.append((event, [0]))
            else:
                self._schedule(event)
        if self._waiting:
            world.timeline.listeners.append(self._look)
        world.run(scenario.end + self._allowance)
        self._judge()
        return world.timeline

    def _rng(self, *about: str) -> Random | None:
        return None if self._world.seed is None else self._world.chance.of(*about)

    # pods

    def _create(self, pod: PodPlan) -> None:
        world = self._world
        world.record("scenario", "create", pod.name)
        fields = {
            name: value.draw(self._rng("guest", pod.name, name)) if isinstance(value, Drawn) else value
            for name, value in pod.guest.items()
        }
        namespace, _, name = pod.name.partition("/")
        world.create_pod(
            name,
            namespace=namespace,
            os=pod.os,
            guest=replace(GuestSpec.for_os(pod.os), **fields),
            annotations=pod.annotations,
            labels=pod.labels,
            resources=pod.resources,
        )

    # events

    def _schedule(self, event: Event) -> None:
        assert event.at is not None
        first = event.at.draw(self._rng("event", event.text, "at"))
        count = 0
        while count < self._most(event) and (at := first + count * (event.every or 0.0)) <= self._scenario.end:
            self._world.clock.at(at, self._happen, event, owner=event.text)
            count += 1

    @staticmethod
    def _most(event: Event) -> float:
        """How often an event happens at most."""
        if event.times is not None:
            return event.times
        return 1 if event.every is None else math.inf

    def _look(self, entry: Entry) -> None:
        """A listener of the timeline: is this what an event waits for?"""
        for waiting in list(self._waiting):
            event, seen = waiting
            trigger = event.trigger
            if trigger is None or not trigger.sight.sees(entry, trigger.pod):
                continue
            if trigger.since is not None and trigger.since not in self._happened:
                continue
            seen[0] += 1
            if seen[0] == trigger.nth:
                self._waiting.remove(waiting)
                later = trigger.later.draw(self._rng("event", event.text, "later"))
                self._world.clock.at(self._world.clock.elapsed() + later, self._happen, event, owner=event.text)

    def _happen(self, event: Event) -> None:
        world = self._world
        fields = {"what": event.detail, **({"id": event.id} if event.id else {})}
        world.record("scenario", event.happening.name, event.pod or "", fields)
        if event.id:
            self._happened.setdefault(event.id, world.clock.elapsed())
        try:
            undo = event.happening.act(world, **event.values)
        except LookupError as error:
            self._missed[event.text] = f"at {world.clock.elapsed():.6f}: {error.args[0]}"
            return
        if event.lasts is not None and undo is not None:
            seconds = event.lasts.draw(self._rng("event", event.text, "for"))
            world.clock.sleep(seconds)
            world.record("scenario", f"end of {event.happening.name}", event.pod or "", {"what": event.detail})
            undo()

    # the end

    def met(self) -> list[Expectation]:
        """Those that are met for good by now."""
        run = self._run()
        verdicts = [(each, each.judge(run)) for each in self._scenario.expectations]
        return [each for each, verdict in verdicts if verdict.final and verdict.kind(run) == "met"]

    def _run(self) -> Run:
        ended, planned = min(self._world.clock.elapsed(), self._scenario.end), self._scenario.until
        return Run(self._world, ended, self._happened, planned, self._allowance)

    def _judge(self) -> None:
        world = self._world
        run = self._run()
        for event, _ in self._waiting:
            why = f"{event.trigger.sight.text!r} was not seen" if event.trigger else ""
            _record(run, None, f"the event happens: {event.text}", Verdict(why))
        for text, why in self._missed.items():
            _record(run, None, f"the event happens: {text}", Verdict(why, final=True))
        for expectation in self._scenario.expectations:
            _record(run, expectation.pod, expectation.text, expectation.judge(run))
        broken = world.timeline.of(actor="invariant")
        why = f"{len(broken)} broken, first: {broken[0].text().strip()}" if broken else ""
        _record(run, None, "no invariant is broken", Verdict(why, final=True))


def _record(run: Run, pod: str | None, text: str, verdict: Verdict) -> None:
    kind = verdict.kind(run)
    fields: dict[str, Any] = {"why": verdict.why} if kind == "broken" else {}
    fields |= {"pod": pod} if pod is not None else {}
    fields |= {"from": verdict.begin, "to": verdict.end} if verdict.begin is not None else {}
    run.world.record("expect", kind, text, fields)


# Reading --------------------------------------------------------------------------------------------------------------


class _Reader:
    """Turns a document into a Scenario; every refusal names file and line."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._pods: list[str] = []
        self._ids: list[str] = []

    def scenario(self) -> Scenario:
        document = self._document
        root = document.mapping(document.root, "a scenario")
        lists = ("pods", "events", "expect")
        document.known(root, (*(parameter.name for parameter in SCENARIO), *lists), "key")
        plain = {key: value for key, value in root.items() if key not in lists}
        given = document.read(plain, SCENARIO, "a scenario", root)
        if given["version"] != 1:
            raise document.wrong(root, f"version {given['version']!r} is not known; this is version 1", "version")
        self._pods = []
        pods = tuple(self._pod(row) for row in document.rows(root, "pods"))
        events = tuple(self._event(row) for row in document.rows(root, "events"))
        return Scenario(
            name=given["name"] or Path(document.file).stem,
            until=given["until"],
            document=root,
            file=document.file,
            seed=given["seed"],
            pods=pods,
            events=events,
            expectations=tuple(self._expectation(row) for row in document.rows(root, "expect")),
            options=self._options(root, given),
            setting_lines={key: document.line(root.get("settings"), key) for key in given["settings"] or {}},
        )

    def _options(self, root: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        written, place = given["settings"] or {}, root.get("settings")
        self._document.known(written, SETTING_ROWS, "setting", place)
        settings: dict[str, Any] = {}
        for name, text in written.items():
            try:
                settings[name] = SETTING_ROWS[name].read(text, name)
            except SettingError as error:
                raise self._document.wrong(place, f"settings: {error}", name) from error
        options: dict[str, Any] = {
            "degraded": not given["raw_socket"],
            "packets": given["wire"] == "packets",
            **settings,
        }
        if given["jitter"] is not None:
            options["jitter_s"] = given["jitter"]
        return options

    def _pod(self, row: Any) -> PodPlan:
        document = self._document
        row = document.mapping(row, "a pod")
        document.known(row, (*(parameter.name for parameter in PODS), "guest"), "key of a pod")
        plain = {key: value for key, value in row.items() if key != "guest"}
        values = document.read(plain, PODS, "a pod", row)
        if values["name"] in self._pods:
            raise document.wrong(row, f"pod {values['name']!r} stands twice")
        self._pods.append(values["name"])
        resources = values.pop("resources") or {}
        document.known(resources, RESOURCES, "resource", row.get("resources"))
        return PodPlan(
            line=document.line(row),
            guest=self._guest(row, {} if row.get("guest") is None else row["guest"]),
            resources=resources,
            annotations=values.pop("annotations") or {},
            labels=values.pop("labels") or {},
            **values,
        )

    def _guest(self, row: Any, given: Any) -> dict[str, Any]:
        document = self._document
        given = document.mapping(given, "guest", at=row)
        document.known(given, [parameter.name for parameter in GUEST], "key of a guest", row)
        return {
            GUEST_FIELDS.get(parameter.name, parameter.name): document.value(given, parameter.name, parameter.kind, row)
            for parameter in GUEST
            if parameter.name in given
        }

    def _event(self, row: Any) -> Event:
        document = self._document
        row = document.mapping(row, "an event")
        schedule = [parameter.name for parameter in EVENT]
        document.known(row, (*schedule, *HAPPENINGS), "event")
        named = [key for key in row if key not in schedule]
        if len(named) != 1:
            raise document.wrong(row, "an event is exactly one thing that happens")
        happening = HAPPENINGS[named[0]]
        timing = document.read({key: row[key] for key in row if key in schedule}, EVENT, "an event", row)
        if (timing["at"] is None) == (timing["when"] is None):
            raise document.wrong(row, "an event has an instant (at) or a trigger (when)")
        if timing["for"] is not None and not happening.lasts:
            raise document.wrong(row, f"{happening.name} is over at once; it cannot have a duration (for)")
        values = self._values(row, happening)
        if timing["id"]:
            if not timing["id"].isidentifier() or timing["id"] in self._ids:
                raise document.wrong(row, f"{timing['id']!r} is no id, or stands twice; an id is one word")
            self._ids.append(timing["id"])
        return Event(
            text=f"{happening.name} {_written(row[happening.name])}".strip(),
            happening=happening,
            values=values,
            at=timing["at"],
            trigger=self._trigger(row) if "when" in row else None,
            lasts=timing["for"],
            every=timing["every"],
            times=timing["times"],
            id=timing["id"] or "",
            line=document.line(row),
        )

    def _values(self, row: Mapping[str, Any], happening: Happening) -> dict[str, Any]:
        """What a happening takes; a single value is that of its first part."""
        given = row[happening.name]
        if given is True or given is None:
            given = {}
        elif not isinstance(given, Mapping):
            if not happening.parameters:
                raise self._document.wrong(row, f"{happening.name} takes nothing: write {happening.name}: true")
            given = {happening.parameters[0].name: given}
        values = self._document.read(given, happening.parameters, happening.name, row)
        self._check_pod(row, values.get("pod"))
        return values

    def _trigger(self, row: Mapping[str, Any]) -> Trigger:
        given = self._document.mapping(row["when"], "when", at=row)
        values = self._document.read(given, WHEN_SEEN, "when", row)
        self._check_pod(row, values["pod"])
        if values["since"] is not None and values["since"] not in self._ids:
            raise self._document.wrong(row, f"since: {unknown('id of an earlier event', values['since'], self._ids)}")
        later = values["later"] or Drawn(((1.0, 0.0, None),))
        return Trigger(values["sees"], values["pod"], values["nth"], values["since"], later)

    def _expectation(self, row: Any) -> Expectation:
        document = self._document
        row = document.mapping(row, "an expectation")
        every = {parameter.name for sort in EXPECTATIONS.values() for parameter in sort.parameters} | {NOTE.name}
        document.known(row, sorted(every), "key of an expectation")
        kinds = [key for key in row if key in EXPECTATIONS]
        if len(kinds) != 1:
            raise document.wrong(row, f"an expectation has exactly one of {', '.join(EXPECTATIONS)}")
        sort = EXPECTATIONS[kinds[0]]
        values = document.read(row, (*sort.parameters, NOTE), sort.name)
        if lacks := sort.lacks(values):
            raise document.wrong(row, lacks)
        self._check_pod(row, values.get("pod"))
        for name, value in values.items():
            if name in ("at", "by", "after", "from", "to") and isinstance(value, str) and value not in self._ids:
                raise document.wrong(row, f"{name}: {unknown('id of an event', value, self._ids)}")
        return Expectation(written(row), values.get("pod"), values, sort.check, document.line(row))

    def _check_pod(self, row: Any, pod: str | None) -> None:
        if pod is not None and pod not in self._pods:
            raise self._document.wrong(row, unknown("pod", pod, self._pods))


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={each}" for key, each in value.items())
    return "" if value is True or value is None else str(value)
