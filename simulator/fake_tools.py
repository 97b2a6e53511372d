"""What the fake `cocoon` and the fake `cocoon-macos` are made of: strict arguments, faults, and the host they run on.

One implementation of each tool runs in two places. In a simulation it is a function: state in memory, virtual time,
guests in process. As an executable it is a program: state on disk under locks, real time, guests as processes. What
differs is the `Host`; simulator.fake_vms and simulator.fake_executables have one each.

The fakes refuse what the real tools refuse (an unknown flag above all), and they fail in the real tools' words: a fake
that is more forgiving than the real thing proves nothing. A `Fault` makes a call slow, stuck, killed or wrong, at a
step of the work rather than after some time, so that a race is hit every time or the test fails.

Standard library only, and not even all of that: every call of an executable pays for what is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import lru_cache
from random import Random
from typing import Any, Generic, NoReturn, Protocol, TypeVar, overload

from simulator.chance import branch

__all__ = [
    "Call",
    "Failed",
    "Fault",
    "Faults",
    "Gate",
    "Host",
    "Killed",
    "Knob",
    "Machine",
    "Outcome",
    "Parsed",
    "Refusal",
    "Step",
    "Storage",
    "Tool",
    "Verb",
    "parse",
    "pretty",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended; negative `returncode`: by that signal."""

    returncode: int
    stdout: str = ""
    stderr: str = ""


class Refusal(Exception):
    """The tool says no: exit 1 and this sentence on stderr."""


class Killed(BaseException):
    """The tool died of SIGKILL on the spot: nothing may clean up after this."""


def pretty(document: object) -> str:
    """JSON as both tools print results: two spaces, and a newline at the end."""
    return _indented(json.dumps(document))


@lru_cache(maxsize=32)
def _indented(compact: str) -> str:
    # The library indents in Python, far slower than everything else, and a list of VMs is asked for again and again.
    return json.dumps(json.loads(compact), indent=2) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Arguments, as strict as the real parsers
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verb:
    """One command: its words, its flags (name without dashes -> bool, int, str or list) and its operands.

    `most` None means any number of operands. `shorts` maps one-letter flags to their long names.
    """

    name: str
    flags: Mapping[str, type]
    least: int = 1
    most: int | None = 1
    shorts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parsed:
    verb: Verb
    flags: Mapping[str, Any]
    operands: Sequence[str]

    def __getitem__(self, flag: str) -> Any:
        """The value given, else the zero of the flag's type."""
        return self.flags.get(flag, self.verb.flags[flag]())


def parse(program: str, verbs: Mapping[str, Verb], shared: Mapping[str, type], arguments: Sequence[str]) -> Parsed:
    """Reads a command line. `shared` are the flags every verb has. Raises Refusal in the words of the real parsers."""
    words, rest = _split_words(program, verbs, shared, arguments)
    verb = verbs[words]
    known = {**shared, **verb.flags}
    given: dict[str, Any] = {}
    operands: list[str] = []
    tokens = list(rest)
    while tokens:
        token = tokens.pop(0)
        if token == "--":
            operands += tokens
            break
        if token.startswith("-") and token != "-":
            name, kind, text = _flag(token, known, verb.shorts)
            _store(given, name, kind, _argument(token, kind, text, tokens))
        else:
            operands.append(token)
    _check_count(verb, len(operands))
    return Parsed(Verb(verb.name, known, verb.least, verb.most, verb.shorts), given, operands)


def _split_words(
    program: str, verbs: Mapping[str, Verb], shared: Mapping[str, type], arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """The words of the verb, and everything else. Shared flags may stand before them."""
    words: list[str] = []
    ahead: list[str] = []
    tokens = list(arguments)
    while tokens and " ".join(words) not in verbs:
        token = tokens.pop(0)
        if token.startswith("-"):
            ahead.append(token)
            name, _, value = token.lstrip("-").partition("=")
            if shared.get(name) is not bool and not value and tokens:
                ahead.append(tokens.pop(0))
            continue
        words.append(token)
        if not any(name.split()[: len(words)] == words for name in verbs):
            where = " ".join([program, *words[:-1]])
            raise Refusal(f'unknown command "{token}" for "{where}"')
    if " ".join(words) not in verbs:
        raise Refusal(f'a command is missing after "{" ".join([program, *words])}"')
    return " ".join(words), ahead + tokens


def _flag(token: str, known: Mapping[str, type], shorts: Mapping[str, str]) -> tuple[str, type, str | None]:
    name, equals, value = token.removeprefix("--").partition("=")
    text = value if equals else None
    if not token.startswith("--"):
        short, glued = token[1], token[2:]
        if short not in shorts:
            raise Refusal(f"unknown shorthand flag: '{short}' in {token}")
        name, text = shorts[short], glued.removeprefix("=") or None
    if name not in known:
        raise Refusal(f"unknown flag: --{name}")
    return name, known[name], text


def _argument(token: str, kind: type, text: str | None, tokens: list[str]) -> str:
    if text is not None:
        return text
    if kind is bool:
        return "true"
    if not tokens:
        raise Refusal(f"flag needs an argument: {token}")
    return tokens.pop(0)


def _store(given: dict[str, Any], name: str, kind: type, text: str) -> None:
    if kind is list:
        given.setdefault(name, []).append(text)
    elif kind is bool:
        if text not in ("true", "false"):
            raise Refusal(f'invalid argument "{text}" for "--{name}" flag: strconv.ParseBool: invalid syntax')
        given[name] = text == "true"
    elif kind is int:
        try:
            given[name] = int(text)
        except ValueError:
            raise Refusal(f'invalid argument "{text}" for "--{name}" flag: strconv.ParseInt: invalid syntax') from None
    else:
        given[name] = text


def _check_count(verb: Verb, count: int) -> None:
    if verb.most is None:
        if count < verb.least:
            raise Refusal(f"requires at least {verb.least} arg(s), only received {count}")
    elif not verb.least <= count <= verb.most:
        wanted = f"{verb.least}" if verb.least == verb.most else f"between {verb.least} and {verb.most}"
        raise Refusal(f"accepts {wanted} arg(s), received {count}")


# ---------------------------------------------------------------------------------------------------------------------
# The host under the tools
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """One VM to be powered on. `argv` is the hypervisor's command line, by which others recognize its process.

    `resumed`: a clone that continues from memory instead of booting. `static_ip` "" = the guest asks DHCP.
    """

    name: str
    vm_id: str
    mac: str
    os: str
    argv: tuple[str, ...]
    static_ip: str = ""
    resumed: bool = False


class Storage(Protocol):
    """JSON documents by key, and locks by key that end with their holder."""

    def read(self, key: str) -> Any:
        """The document, None when there is none. Not to be changed."""

    def edit(self, key: str, default: Callable[[], Any]) -> AbstractContextManager[Any]:
        """The document to be changed, alone and without any wait; saved whole at the end, or not at all."""

    def delete(self, key: str) -> None:
        """Forget the document, or the directory with everything in it; neither being there is fine."""

    def keys(self, directory: str) -> list[str]:
        """The names directly below `directory`, sorted."""

    def version(self, directory: str) -> object:
        """Another value whenever a document directly below `directory` was edited or deleted."""

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Exclusive; waits."""

    def share(self, key: str) -> AbstractContextManager[None]:
        """Held together with others that share; waits for an exclusive holder."""

    def locked(self, key: str) -> bool:
        """Whether somebody holds this lock, either way."""

    def append(self, key: str, entry: Mapping[str, Any]) -> None:
        """Adds to a log."""

    def entries(self, key: str) -> list[dict[str, Any]]:
        """The log, oldest first."""


class Host(Protocol):
    """What a fake tool needs of the machine it runs on. Paths are texts: in a simulation they name nothing."""

    storage: Storage
    rng: Random
    root: str  # of cocoon, say /var/lib/cocoon
    macos_root: str  # of cocoon-macos

    def now(self) -> datetime: ...
    def sleep(self, seconds: float) -> None: ...
    def wait_for_change(self, directory: str, version: object, seconds: float) -> bool:
        """Until that version of the documents in `directory` is not the newest (True), or `seconds` have passed."""

    def stand_still(self) -> NoReturn:
        """Wait for ever."""

    def die(self) -> NoReturn:
        """Be killed, as by SIGKILL."""

    def power_on(self, machine: Machine) -> int:
        """Start the hypervisor's process, detached; its pid."""

    def power_off(self, pid: int) -> None:
        """End that process, and return when it has ended. No such process is fine."""

    def plug(self, name: str, mac: str, static_ip: str) -> None:
        """The network card of the running VM of that name is another one now, or gone (both "")."""

    def argv_of(self, pid: int) -> tuple[str, ...]:
        """The command line of a living process; () when it is dead, a zombie or not there."""

    def pids(self) -> list[int]:
        """Every process there is."""

    def census(self) -> object:
        """Equal to an earlier answer only if no process was born or has died since."""


# ---------------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------------


class Gate(Protocol):
    """A place where a call stops until it is let through; only in a simulation."""

    def pass_through(self) -> None: ...


class Step:
    """Where in a call a fault strikes. Calls that make nothing know only BEFORE and AFTER."""

    BEFORE = "before"  # nothing has happened yet
    MIDDLE = "middle"  # the name is taken, nothing runs: what a killed create leaves behind
    LATE = "late"  # it runs, or is captured, and the record does not say so yet
    AFTER = "after"  # everything is done and recorded, only the answer is missing


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next `times` calls (None: with all) of `verb` about `name`; "*" matches any.

    In this order, at `step`: wait `delay_s`, stop at `gate`, stand still (`hang`), die of SIGKILL (`kill`), fail with
    `returncode` and `stderr`. `stdout` replaces what the call would have printed.
    """

    verb: str = "*"
    name: str = "*"
    times: int | None = 1
    step: str = Step.BEFORE
    delay_s: float = 0.0
    hang: bool = False
    kill: bool = False
    returncode: int = 0
    stderr: str = ""
    stdout: str | None = None
    gate: Gate | None = None

    def concerns(self, verb: str, names: Sequence[str]) -> bool:
        return self.times != 0 and self.verb in ("*", verb) and (self.name == "*" or self.name in names)


class Faults:
    """The faults ahead of one tool, kept where the tool keeps its state, so that they reach an executable too."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key

    def add(self, fault: Fault) -> None:
        entry = {each.name: getattr(fault, each.name) for each in fields(fault)}
        if entry["gate"] is None:
            del entry["gate"]
        with self._storage.edit(self._key, list) as entries:
            entries.append(entry)

    def clear(self) -> None:
        with self._storage.edit(self._key, list) as entries:
            entries.clear()

    def take(self, verb: str, names: Sequence[str]) -> list[Fault]:
        """The faults that strike this call; each counts it."""
        entries = self._storage.read(self._key) or []
        if not any(Fault(**entry).concerns(verb, names) for entry in entries):
            return []
        struck = []
        with self._storage.edit(self._key, list) as entries:
            for entry in entries:
                if Fault(**entry).concerns(verb, names):
                    struck.append(Fault(**entry))
                    entry["times"] = None if entry["times"] is None else entry["times"] - 1
            entries[:] = [entry for entry in entries if entry["times"] != 0]
        return struck


class Failed(Exception):
    """A fault ends the call here, with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.stderr)
        self.outcome = outcome


class Knob(Generic[T]):
    """An attribute of a fake tool that changes how it behaves; kept with its state."""

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, tool: None, _owner: type) -> Knob[T]: ...
    @overload
    def __get__(self, tool: Tool, _owner: type) -> T: ...
    def __get__(self, tool: Tool | None, _owner: type) -> Knob[T] | T:
        if tool is None:
            return self
        value: T = (tool.host.storage.read(tool.key("knobs")) or {}).get(self._name, self._default)
        return value

    def __set__(self, tool: Tool, value: T) -> None:
        with tool.host.storage.edit(tool.key("knobs"), dict) as knobs:
            knobs[self._name] = value


# ---------------------------------------------------------------------------------------------------------------------
# A tool
# ---------------------------------------------------------------------------------------------------------------------


class Tool:
    """A fake command line: `run` is one call of it. The rest are the knobs a test or a person turns."""

    PROGRAM = ""
    SHARED_FLAGS: Mapping[str, type] = {}
    VERBS: Mapping[str, Verb] = {}

    # Seconds every call takes at least, drawn anew from the seed: what moves callers against each other.
    least_latency_s = Knob(0.0002)
    most_latency_s = Knob(0.002)

    def __init__(self, host: Host) -> None:
        self.host = host
        self.faults = Faults(host.storage, self.key("faults"))

    # Knobs

    def fail(
        self, verb: str, *, name: str = "*", stderr: str = "Error: injected failure", times: int | None = 1,
        step: str = Step.BEFORE, returncode: int = 1,
    ) -> None:  # fmt: skip
        """The next `times` calls fail at `step`, and clean up as the real tool does; after `after`, all is done."""
        self.faults.add(Fault(verb, name, times, step, stderr=stderr, returncode=returncode))

    def slow(
        self, verb: str, seconds: float, *, name: str = "*", times: int | None = 1, step: str = Step.MIDDLE
    ) -> None:
        """The next `times` calls take that much longer; in the middle, where a create holds its name and its lock."""
        self.faults.add(Fault(verb, name, times, step, delay_s=seconds))

    def hang(self, verb: str, *, name: str = "*", times: int | None = 1, step: str = Step.BEFORE) -> None:
        """The next `times` calls never end by themselves."""
        self.faults.add(Fault(verb, name, times, step, hang=True))

    def kill(self, verb: str, *, name: str = "*", times: int | None = 1, step: str = Step.MIDDLE) -> None:
        """The next `times` calls die of SIGKILL at `step`, leaving what they had made."""
        self.faults.add(Fault(verb, name, times, step, kill=True))

    def garble(self, verb: str, stdout: str, *, name: str = "*", times: int | None = 1) -> None:
        """The next `times` calls do their work and print this instead."""
        self.faults.add(Fault(verb, name, times, Step.AFTER, stdout=stdout))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Every call that has begun, oldest first: `at` (ISO text), `verb`, `names`, `argv` without the binary."""
        return self.host.storage.entries(self.key("calls"))

    def count(self, verb: str, name: str = "*") -> int:
        """How many calls of `verb` about `name` have begun."""
        return sum(call["verb"] == verb and (name == "*" or name in call["names"]) for call in self.calls)

    # One call

    def run(self, arguments: Sequence[str]) -> Outcome:
        """One call, from its arguments to its end. Raises Killed, and whatever the host interrupts it with."""
        try:
            parsed, call = self.begin(arguments)
            call.reach(Step.BEFORE)
            outcome = self.perform(parsed, call)
            call.reach(Step.AFTER)
            return call.garbled(outcome)
        except Failed as failure:
            return failure.outcome
        except Refusal as refusal:
            return Outcome(1, "", self.complain(str(refusal)))

    def begin(self, arguments: Sequence[str]) -> tuple[Parsed, Call]:
        """Reads the arguments, notes the call and takes the faults ahead of it. Raises Refusal."""
        parsed = parse(self.PROGRAM, self.VERBS, self.SHARED_FLAGS, arguments)
        names = self.names(parsed)
        self._note(parsed.verb.name, names, arguments)
        call = Call(self, self.faults.take(parsed.verb.name, names))
        self._spend_latency(parsed.verb.name, *names[:1])
        return parsed, call

    def perform(self, parsed: Parsed, call: Call) -> Outcome:
        """The work of one verb. Raises Refusal."""
        raise NotImplementedError

    def names(self, parsed: Parsed) -> list[str]:
        """What a call is about, in every spelling a fault may use."""
        raise NotImplementedError

    def complain(self, sentence: str) -> str:
        """A refusal as it appears on stderr."""
        raise NotImplementedError

    def key(self, name: str) -> str:
        """Where in the storage something of this tool is."""
        return f"{self.PROGRAM}/{name}.json"

    def _note(self, verb: str, names: Sequence[str], arguments: Sequence[str]) -> None:
        entry = {"at": self.host.now().isoformat(), "verb": verb, "names": list(names), "argv": list(arguments)}
        self.host.storage.append(self.key("calls"), entry)

    def _spend_latency(self, *subject: str) -> None:
        most = self.most_latency_s
        if most > 0:
            rng = branch(self.host.rng, "latency", *subject)
            self.host.sleep(rng.uniform(min(self.least_latency_s, most), most))


class Call:
    """One call on its way through its steps."""

    def __init__(self, tool: Tool, faults: Sequence[Fault]) -> None:
        self._host = tool.host
        self._faults = faults

    def reach(self, step: str) -> None:
        """The work has come to `step`: whatever should happen there happens now."""
        for fault in self._faults:
            if fault.step != step:
                continue
            if fault.delay_s:
                self._host.sleep(fault.delay_s)
            if fault.gate:
                fault.gate.pass_through()
            if fault.hang:
                self._host.stand_still()
            if fault.kill:
                self._host.die()
            if fault.returncode:
                raise Failed(Outcome(fault.returncode, fault.stdout or "", fault.stderr + "\n"))

    def garbled(self, outcome: Outcome) -> Outcome:
        """What the call would have printed, or what a fault has it print."""
        stdout = next((fault.stdout for fault in self._faults if fault.stdout is not None), outcome.stdout)
        return Outcome(outcome.returncode, stdout, outcome.stderr)
