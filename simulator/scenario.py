"""Scenario files: pods, what happens to them and when, and what must come of it; run in virtual time.

    version: 1
    until: 60s
    pods:
      - {name: default/web-0, os: linux, guest: {boot: 1s, lease: 500ms}}
    events:
      - {at: 20s, silent: default/web-0}
      - {at: 40s, speaks: default/web-0}
    expect:
      - {pod: default/web-0, ready: true, by: 3s}

Instants count from the start and are exact to the microsecond. Whatever is not known (a key, a verb, a unit) is refused
with file, line and a suggestion, because a misspelled expectation that is skipped would be a test that cannot fail.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import yaml

from simulator.fake_vms import GuestSpec
from simulator.timeline import Entry, Timeline
from simulator.world import World

__all__ = ["Expectation", "Scenario", "ScenarioError", "load", "main", "run_scenario", "seconds_of"]

_UNITS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(us|ms|s|m|h))", re.ASCII)
_POD = re.compile(r"[a-z0-9-]+/[a-z0-9][a-z0-9.-]*")


class ScenarioError(Exception):
    """A scenario that cannot be run; the text is one line with file, line and the way out."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One thing that must have come true: as it was written, and what says how it is broken ("" = it is not)."""

    text: str
    check: Callable[[World], str]


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens at an instant (seconds)."""

    at: float
    text: str
    act: Callable[[World], object]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario that was read and understood."""

    name: str
    until: float
    seed: int | None = None
    steps: tuple[Step, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def run_scenario(source: str | Path | Mapping[str, Any], seed: int | None = None) -> Timeline:
    """Run a scenario (a file, or its contents as a dict) and return what happened.

    The verdicts are the last entries: actor ``expect``, kind ``met`` or ``broken``; a broken invariant is an entry
    ``invariant`` / ``broken`` at its instant. Raises ScenarioError when the scenario cannot be understood.
    """
    return _run(load(source), seed)


def load(source: str | Path | Mapping[str, Any]) -> Scenario:
    """Read a scenario; raises ScenarioError."""
    return _Reader(source).scenario()


def main(
    scenario: str,
    *,
    seed: int | None = None,
    until: float | None = None,
    events: str | None = None,
    check: bool = False,
    table: bool = False,
) -> int:
    """The `simulate` command: 0 when everything held, 1 when something did not, 2 when the file is wrong."""
    try:
        plan = load(scenario)
    except ScenarioError as error:
        click.echo(f"vk-cocoon: {error}", err=True)
        return 2
    if until is not None:
        plan = replace(plan, until=until)
    seed = plan.seed if seed is None else seed
    timeline = _run(plan, seed)
    if events == "-":
        click.echo("\n".join(entry.line() for entry in timeline))
    elif events:
        Path(events).write_text("".join(entry.line() + "\n" for entry in timeline))
    _show(plan, seed, timeline, err=events == "-")
    broken = timeline.of(kind="broken")
    if check:
        difference = timeline.first_difference(_run(plan, seed))
        click.echo(f"second run: {'the same' if not difference else 'differs:'}", err=events == "-")
        if difference:
            click.echo(difference, err=True)
            return 1
    if broken:
        again = f"vk-cocoon simulate {scenario}" + (f" --seed {seed}" if seed is not None else "")
        click.echo(f"reproduce:  {again}", err=events == "-")
    return 1 if broken else 0


def seconds_of(text: Any) -> float:
    """``1m30.5s``, ``500ms``, ``0s`` as seconds, exact to the microsecond. Raises ValueError."""
    parts = _DURATION.findall(str(text))
    if not parts or "".join(number + unit for number, unit in parts) != str(text):
        raise ValueError(f"{text!r} is no time such as 500ms, 3.078125s or 1m30s")
    return float(sum(Decimal(number) * _UNITS[unit] for number, unit in parts))


def _run(plan: Scenario, seed: int | None) -> Timeline:
    with World(seed, **plan.settings) as world:
        for step in plan.steps:
            world.clock.at(step.at, _perform, world, step)
        world.run(plan.until)
        for expectation in plan.expectations:
            wrong = expectation.check(world)
            fields = {"why": wrong} if wrong else {}
            world.timeline.record("expect", "broken" if wrong else "met", expectation.text, fields)
        return world.timeline


def _perform(world: World, step: Step) -> None:
    world.timeline.record("scenario", "event", step.text)
    step.act(world)


_TOLD = {("daemon", kind) for kind in ("start", "stop", "kill")} | {
    ("kube", kind) for kind in ("created", "deleted", "phase", "ready", "reason", "address", "lifecycle", "terminating")
}


def _show(plan: Scenario, seed: int | None, timeline: Timeline, *, err: bool) -> None:
    """The run for a person: what the cluster saw and what was done to it, then the verdicts."""
    click.echo(f"{plan.name}: {plan.until:g} s of virtual time, seed {'none' if seed is None else seed}", err=err)
    for entry in timeline:
        if (entry.actor, entry.kind) in _TOLD or entry.actor in ("scenario", "invariant"):
            click.echo(entry.text(), err=err)
    for entry in timeline.of(actor="expect"):
        mark = click.style("met   ", fg="green") if entry.kind == "met" else click.style("BROKEN", fg="red")
        why = f": {dict(entry.fields)['why']}" if entry.fields else ""
        click.echo(f"{mark} {entry.key}{why}", err=err)
    click.echo(f"digest:     {timeline.digest()}", err=err)


# --- reading ------------------------------------------------------------------------------------------------------


class _Lines(yaml.SafeLoader):
    """Remembers the line of each mapping, and refuses a key that stands twice."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.line_of: dict[int, int] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key!r} stands twice", problem_mark=node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=True)
        self.line_of[id(mapping)] = node.start_mark.line + 1
        return mapping

    def construct_yaml_map(self, node: Any) -> Any:
        yield self.construct_mapping(node, deep=True)


_Lines.add_constructor("tag:yaml.org,2002:map", _Lines.construct_yaml_map)


class _Reader:
    """Turns one document into a Scenario; every refusal names file and line."""

    def __init__(self, source: str | Path | Mapping[str, Any]) -> None:
        self._file, self._line_of = "scenario", dict[int, int]()
        if isinstance(source, Mapping):
            self._root: Any = source
        else:
            self._file = str(source)
            self._root = self._parsed(Path(source))

    def scenario(self) -> Scenario:
        root = self._mapping(self._root, "a scenario")
        self._known(root, ("version", "name", "seed", "until", "settings", "pods", "events", "expect"), "key")
        if root.get("version", 1) != 1:
            raise self._wrong(root, f"version {root['version']!r} is not known; this is version 1")
        pods = [self._pod(row) for row in self._rows(root, "pods")]
        names = [name for name, _ in pods]
        return Scenario(
            name=str(root.get("name") or Path(self._file).stem),
            until=self._seconds(root, "until", default="60s"),
            seed=root.get("seed"),
            steps=(*(step for _, step in pods), *(self._event(row, names) for row in self._rows(root, "events"))),
            expectations=(
                *(self._expectation(row, names) for row in self._rows(root, "expect")),
                Expectation("no invariant is broken", _invariants_held),
            ),
            settings=dict(root.get("settings") or {}),
        )

    def _parsed(self, path: Path) -> Any:
        try:
            loader = _Lines(path.read_text())
            document = loader.get_single_data()
        except OSError as error:
            raise ScenarioError(f"{path}: {error.strerror or error}") from error
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ScenarioError(f"{path}:{line}: {error.problem}") from error
        except yaml.YAMLError as error:
            raise ScenarioError(f"{path}: {error}") from error
        self._line_of = loader.line_of
        return document

    def _pod(self, row: Any) -> tuple[str, Step]:
        row = self._mapping(row, "a pod")
        self._known(row, ("name", "os", "at", "annotations", "guest"), "key of a pod")
        name = self._pod_name(row, row.get("name"))
        namespace, _, short = name.partition("/")
        guest = self._guest(row, row.get("guest") or {})
        os, annotations = str(row.get("os", "linux")), dict(row.get("annotations") or {})

        def create(world: World) -> None:
            world.create_pod(short, namespace=namespace, os=os, guest=guest, annotations=annotations)

        return name, Step(self._seconds(row, "at", default="0s"), f"create {name}", create)

    def _guest(self, row: Any, given: Any) -> GuestSpec:
        given = self._mapping(given, "guest", at=row)
        times = {"boot": "boot_s", "lease": "lease_s", "echo_after": "echo_after_s", "ssh_after": "ssh_after_s"}
        times["latency"] = "latency_s"
        self._known(given, (*times, "echo", "ports", "ssh_banner"), "key of a guest", at=row)
        fields: dict[str, Any] = {times[key]: self._seconds(given, key, at=row) for key in given if key in times}
        fields |= {key: given[key] for key in ("echo", "ssh_banner") if key in given}
        if "ports" in given:
            fields["ports"] = tuple(given["ports"])
        return GuestSpec(os=str(row.get("os", "linux")), **fields)

    def _event(self, row: Any, pods: list[str]) -> Step:
        row = self._mapping(row, "an event")
        self._known(row, ("at", *_VERBS), "event")
        verbs = [key for key in row if key != "at"]
        if len(verbs) != 1 or "at" not in row:
            raise self._wrong(row, "an event has an instant (at) and exactly one thing that happens")
        verb = _VERBS[verbs[0]]
        arguments = row[verbs[0]] if isinstance(row[verbs[0]], Mapping) else {verb.takes[0]: row[verbs[0]]}
        self._known(arguments, verb.takes, f"part of {verbs[0]}", at=row)
        if missing := [part for part in verb.takes if part not in arguments]:
            raise self._wrong(row, f"{verbs[0]} needs {', '.join(missing)}")
        if "pod" in arguments:
            self._pod_name(row, arguments["pod"], pods)
        for part, allowed in verb.words.items():
            if arguments[part] not in allowed:
                raise self._wrong(row, _unknown(f"{part} of {verbs[0]}", str(arguments[part]), allowed))
        text = " ".join([verbs[0], *(str(value) for value in arguments.values())])
        return Step(self._seconds(row, "at"), text, lambda world: verb.act(world, **arguments))

    def _expectation(self, row: Any, pods: list[str]) -> Expectation:
        row = self._mapping(row, "an expectation")
        self._known(row, ("pod", "ready", "never", "at", "by", "after", "flips", "reason"), "key of an expectation")
        pod = self._pod_name(row, row.get("pod"), pods)
        kinds = [key for key in ("ready", "never", "flips", "reason") if key in row]
        if len(kinds) != 1:
            raise self._wrong(row, "an expectation has exactly one of ready, never, flips, reason")
        times = {key: self._seconds(row, key) for key in ("at", "by", "after") if key in row}
        text = " ".join(f"{key}={value}" for key, value in row.items())
        if kinds == ["never"]:
            if row["never"] != "ready":
                raise self._wrong(row, _unknown("state", str(row["never"]), ("ready",)))
            return Expectation(text, lambda world: _never_ready(world, pod))
        if kinds == ["flips"]:
            return Expectation(text, lambda world: _flip_count(world, pod, int(row["flips"])))
        if kinds == ["reason"]:
            if "at" not in times:
                raise self._wrong(row, "reason needs the instant (at) it is expected to hold")
            return Expectation(text, lambda world: _reason_at(world, pod, str(row["reason"]), times["at"]))
        if not isinstance(row["ready"], bool) or len({"at", "by"} & set(times)) != 1:
            raise self._wrong(row, "ready is true or false and needs either at (the exact instant) or by")
        return Expectation(text, lambda world: _became(world, pod, row["ready"], times))

    # pieces

    def _mapping(self, value: Any, what: str, at: Any = None) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self._wrong(at, f"{what} must be a mapping, not {value!r}")
        return value

    def _rows(self, root: Mapping[str, Any], key: str) -> Iterable[Any]:
        rows = root.get(key) or ()
        if not isinstance(rows, list | tuple):
            raise self._wrong(root, f"{key} must be a list")
        return rows

    def _known(self, given: Mapping[str, Any], allowed: Iterable[str], what: str, at: Any = None) -> None:
        for key in given:
            if key not in allowed:
                raise self._wrong(given if id(given) in self._line_of else at, _unknown(what, str(key), allowed))

    def _pod_name(self, row: Any, name: Any, known: list[str] | None = None) -> str:
        text = str(name) if name else ""
        text = text if "/" in text or not text else f"default/{text}"
        if not _POD.fullmatch(text):
            raise self._wrong(row, f"{name!r} is no pod name such as default/web-0")
        if known is not None and text not in known:
            raise self._wrong(row, _unknown("pod", text, known))
        return text

    def _seconds(self, row: Mapping[str, Any], key: str, *, default: str = "", at: Any = None) -> float:
        try:
            return seconds_of(row.get(key, default))
        except ValueError as error:
            raise self._wrong(row if id(row) in self._line_of else at, f"{key}: {error}") from error

    def _wrong(self, where: Any, text: str) -> ScenarioError:
        line = self._line_of.get(id(where))
        return ScenarioError(f"{self._file}{f':{line}' if line else ''}: {text}")


def _unknown(what: str, given: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(allowed), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(allowed)}"
    return f"unknown {what} {given!r}{hint}"


# --- what can happen ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verb:
    """One kind of event: what it takes (the first part may stand alone), which words a part may be, what it does."""

    takes: tuple[str, ...]
    act: Callable[..., object]
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _split(pod: str) -> dict[str, str]:
    namespace, slash, name = pod.partition("/")
    return {"namespace": namespace, "name": name} if slash else {"namespace": "default", "name": pod}


def _mac(world: World, pod: str) -> str:
    return world.guest(**_split(pod)).mac


def _lease(world: World, pod: str, ip: str) -> None:
    """The guest gets another address: in the lease file and on its own card."""
    world.leases.lease(_mac(world, pod), ip)
    world.guest(**_split(pod)).renumber(ip)


def _lease_file(world: World, how: str) -> None:
    if how == "missing":
        world.leases.forget_file()
    else:
        world.leases.write(how)  # type: ignore[arg-type]


def _kube(world: World, how: str) -> None:
    if how in ("down", "up"):
        world.kube.down = how == "down"
    elif how == "cut watches":
        world.kube.cut_watches(mid_line=True)
    else:
        world.kube.expire_history()


def _daemon(world: World, how: str) -> None:
    if how in ("stop", "restart"):
        world.stop()
    if how in ("start", "restart"):
        world.start()


_VERBS: Mapping[str, Verb] = {
    "silent": Verb(("pod",), lambda world, pod: world.guest(**_split(pod)).silent(True)),
    "speaks": Verb(("pod",), lambda world, pod: world.guest(**_split(pod)).silent(False)),
    "crash": Verb(("pod",), lambda world, pod: world.guest(**_split(pod)).crash()),
    "open": Verb(("pod", "port"), lambda world, pod, port: world.guest(**_split(pod)).open(port)),
    "close": Verb(("pod", "port"), lambda world, pod, port: world.guest(**_split(pod)).close(port)),
    "banner": Verb(("pod", "text"), lambda world, pod, text: world.guest(**_split(pod)).banner(text)),
    "lease": Verb(("pod", "ip"), _lease),
    "lose_lease": Verb(("pod",), lambda world, pod: world.leases.release(_mac(world, pod))),
    "delete": Verb(("pod",), lambda world, pod: world.delete_pod(**_split(pod))),
    "hibernate": Verb(("pod",), lambda world, pod: world.annotate(**_split(pod), hibernate="true")),
    "wake": Verb(("pod",), lambda world, pod: world.annotate(**_split(pod), hibernate=None)),
    "probe_port": Verb(("pod", "port"), lambda world, pod, port: world.annotate(**_split(pod), probe_port=str(port))),
    "lease_file": Verb(("how",), _lease_file, {"how": ("rename", "in_place", "torn", "empty", "object", "missing")}),
    "kube": Verb(("how",), _kube, {"how": ("down", "up", "cut watches", "expire history")}),
    "daemon": Verb(("how",), _daemon, {"how": ("stop", "start", "restart")}),
    "wall_clock": Verb(("step",), lambda world, step: world.clock.step_wall(_signed(step))),
}


def _signed(text: Any) -> float:
    sign, rest = (-1, str(text)[1:]) if str(text).startswith("-") else (1, str(text))
    return sign * seconds_of(rest)


# --- what must come of it -----------------------------------------------------------------------------------------


def _became(world: World, pod: str, ready: bool, times: Mapping[str, float]) -> str:
    flips = [(at, value) for at, value in world.flips(**_split(pod)) if value is ready]
    instants = ", ".join(f"{at:.6f}" for at, _ in flips) or "never"
    if "at" in times:
        return "" if (times["at"], ready) in flips else f"became {ready} at {instants}"
    after = times.get("after", 0.0)
    return "" if any(after <= at <= times["by"] for at, _ in flips) else f"became {ready} at {instants}"


def _never_ready(world: World, pod: str) -> str:
    ready = [at for at, value in world.flips(**_split(pod)) if value]
    return f"was Ready at {ready[0]:.6f}" if ready else ""


def _flip_count(world: World, pod: str, wanted: int) -> str:
    flips = [at for at, _ in world.flips(**_split(pod))][1:]  # the first Ready condition is no change
    return (
        "" if len(flips) == wanted else f"{len(flips)} flips, at {', '.join(f'{at:.6f}' for at in flips) or 'no time'}"
    )


def _reason_at(world: World, pod: str, reason: str, at: float) -> str:
    seen: list[Entry] = [
        entry for entry in world.timeline.of(actor="kube", kind="reason", key=pod) if entry.seconds <= at
    ]
    found = dict(seen[-1].fields)["reason"] if seen else "none"
    return "" if found == reason else f"the reason was {found}"


def _invariants_held(world: World) -> str:
    broken = world.timeline.of(actor="invariant")
    return f"{len(broken)} broken, first: {broken[0].text().strip()}" if broken else ""
