"""From an event log back to a scenario: what a daemon saw, turned into a world that shows it the same again.

    vk-cocoon simulate --from-log DIR|FILE

The log is one that `vk-cocoon run --record` wrote on a host, or the event log of a simulation. Only what a daemon can
know is used: its commands, its leases, the pods as the API showed them, the answers its probes got, and the requests
that failed. What people, guests and scenarios did is in the log of a simulation too, and is not looked at.

A guest of such a scenario does nothing by itself: it gets its address, answers and falls silent by events. Each event
hangs on the last thing that was seen of its pod (the end of a command, the nth probe), so that every probe finds what
the recorded one found, whatever its instant; what comes from outside (a pod's edit, a failing API) has its instant.
What cannot be told from a log is in docs/simulator.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from simulator import log_fields
from simulator.stage import example_pod
from simulator.values import time_text
from vkcocoon_record import Entry
from vkcocoon_status import ANNOTATION_PROBE_PORT

__all__ = ["Flip", "LogError", "Replay", "flips_of", "read", "replay_of"]

Flip = tuple[int, str, bool]  # microseconds, pod, what Ready became
Row = dict[str, Any]

ENDINGS = ("stop", "kill")  # of a life of the daemon
LIVES = ("start", *ENDINGS)
POWER_ON = ("vm run", "vm clone", "vm start")
FAULTS_OF = (
    *POWER_ON, "vm stop", "vm rm", "vm inspect", "vm list", "vm exec", "vm net", "snapshot save", "snapshot inspect",
    "snapshot rm", "image pull", "image inspect",
)  # fmt: skip
# Refusals that follow from how things stand, and will again: of a question or a removal, and of what makes something.
ABSENT = re.compile(r"not found|no such|does not exist|no record", re.IGNORECASE)
PRESENT = re.compile(r"already exists", re.IGNORECASE)
MAKES = ("vm run", "vm clone", "vm start", "snapshot save", "image pull")
NEVER = "1000h"  # a guest that does nothing by itself
QUICK_US = 20_000  # on a host, answers and commands that take less take no time at all
SLOW_US = 500_000  # a request that takes longer is slow
HANGS_US = 1_000_000  # and one that fails only after so long was not answered
CLOSE_US = 5_000  # instants of a host that are one
RETRY_US = 60_000_000  # whoever asks again does so within
MANY = 3  # kinds of requests that fail together: then all do
TOLD_LATE_US = 200_000  # what the tool itself needs to tell that a VM is gone
LEAD_US = 20_000_000  # before a log that begins with pods that are there already
UP_US = 2_000_000  # when their guests are up
AWAY_US = 1_000_000  # how long the daemon is away before the log begins
MOST_HEAD = 20_000  # entries among which a daemon that starts says so
DRIFT = 0.001  # a real probe is a little late each time, and the next one counts from there
TOLERANCE_S = 6.0  # of an expected flip: a pause of a ready pod, and some more
BANNER = "SSH-2.0-OpenSSH_9.9"
IP = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
PORT = re.compile(r"^tcp [0-9.]+:(\d+)")
SAID = re.compile(r"said '(.*)'$")


def flips_of(entries: Iterable[Entry]) -> list[Flip]:
    """The flips that Kubernetes saw, in order; the first status of a pod is none."""
    return [
        (entry.at_us, entry.key, fields["ready"] == "True")
        for entry in entries
        if entry.actor == "kube" and entry.kind == "ready" and (fields := dict(entry.fields)).get("was")
        if fields["ready"] in ("True", "False")
    ]


class LogError(Exception):
    """A log that cannot be read; the text is one line."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A scenario made from a log, and the flips that its run must show from ``begin_us`` on."""

    document: dict[str, Any]
    flips: list[Flip]
    begin_us: int

    def seen(self, entries: Iterable[Entry]) -> list[Flip]:
        """The flips of a run of it that answer those of the log."""
        return [flip for flip in flips_of(entries) if flip[0] >= self.begin_us]


def read(source: Path) -> list[Entry]:
    """The entries of a file, or of all files in a directory, with one time for all of them.

    Each of them says what is read of it later (simulator.log_fields). Raises LogError.

    Lives of a daemon follow each other by the wall clock. A last line that is cut short is what a killed daemon left.
    """
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise LogError(f"{source}: no file in it ends in .jsonl")
    entries: list[Entry] = []
    zero: datetime | None = None
    shift_us = 0
    for file in files:
        for entry in _lines(file):
            if (entry.actor, entry.kind) == ("record", "begins"):
                wall = datetime.fromisoformat(str(dict(entry.fields)["wall"]))
                zero = zero or wall
                last_us = entries[-1].at_us if entries else 0
                shift_us = max(last_us, round((wall - zero).total_seconds() * 1_000_000)) - entry.at_us
            entries.append(entry._replace(at_us=entry.at_us + shift_us))
    if not entries:
        raise LogError(f"{source}: nothing is in it")
    first_us = entries[0].at_us if entries[0].actor == "record" else 0
    return [entry._replace(at_us=entry.at_us - first_us) for entry in entries]


def _lines(file: Path) -> Iterator[Entry]:
    try:
        # Not splitlines: what a guest said may hold other separators of lines, and they stand there as they are.
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{file}: {getattr(error, 'strerror', '') or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = Entry.of_line(line)
        except ValueError as error:
            if number < len(lines):
                raise LogError(f"{file}:{number}: {error}") from error
            return
        try:
            log_fields.check(entry)
        except ValueError as error:
            raise LogError(f"{file}:{number}: {error}") from error
        yield entry


def replay_of(entries: Iterable[Entry], *, name: str = "") -> Replay:
    """A scenario whose run shows a daemon what the log says one saw."""
    return _Story(list(entries)).told(name)


@dataclass(slots=True)
class _Moment:
    """Something that was seen of a pod, and is seen again in every run: what an event can hang on."""

    us: int
    sees: str
    nth: int


@dataclass(slots=True)
class _Pod:
    """A pod, and its guest as the events so far have left it."""

    key: str
    static: bool
    macos: bool
    uid: str = ""
    exists: bool = True
    wanted: dict[str, str] = field(default_factory=dict)  # its annotations of our groups
    sighted_us: int = -CLOSE_US - 1  # when a later life of the daemon found it
    moments: list[_Moment] = field(default_factory=list)  # of this life of the daemon
    counts: Counter[str] = field(default_factory=Counter)
    asked_us: int = -1  # when somebody deleted it
    skipped: int = 0  # probes that the log's numbers count and a run's do not
    powered: bool = False
    removing: bool = False
    booting: bool = False  # a command that powers it on is under way
    leased: str = ""  # what the lease file says
    ip: str = ""  # what the guest has
    mute: bool = False
    echo: bool = False
    ports: dict[int, str | None] = field(default_factory=dict)
    latency_us: int = 0

    def power_on(self, *, fresh: bool) -> None:
        if fresh:
            self.leased = ""
        self.powered, self.removing = True, False
        self.power_changed()

    def power_changed(self) -> None:
        """What a guest forgets with its power."""
        self.ip, self.mute, self.echo, self.latency_us = "", False, False, 0
        self.ports = {}


class _Story:
    def __init__(self, entries: list[Entry]) -> None:
        self._before = _known_before(entries)
        self._begin_us = LEAD_US if self._before else 0
        self._entries = entries = [entry._replace(at_us=entry.at_us + self._begin_us) for entry in entries]
        self._pods: dict[str, _Pod] = {}
        self._pod_rows: list[Row] = []
        self._events: list[tuple[int, Row]] = []
        self._life = ""  # id of the event that began it; "" for the first
        self._life_us = 0
        self._away_us = 0  # when the life before it had ended
        self._lives = 0
        self._degraded = False
        self._calls: Counter[tuple[str, str]] = Counter()  # of commands, in this life
        self._ended: Counter[tuple[str, str]] = Counter()
        self._static = set(_static(entries))
        self._end_us = entries[-1].at_us if entries else 0
        self._host = any("n" in dict(entry.fields) for entry in entries if entry.actor == "probe")
        self._quick_us = QUICK_US if self._host else 1

    def told(self, name: str) -> Replay:
        if self._before:
            self._prelude()
        tellers = {
            "daemon": self._daemon,
            "kube": self._kube,
            "command": self._command,
            "lease": self._lease,
            "probe": self._probe,
            "vm": self._vm,
        }
        for place, entry in enumerate(self._entries):
            if tell := tellers.get(entry.actor):
                tell(place, entry, dict(entry.fields))
        self._lease_files()
        for at_us, row in _api_events(self._entries):
            self._at(at_us, row)
        document = {
            "version": 1,
            **({"name": name} if name else {}),
            "until": _time(self._end_us),
            **({"raw_socket": False} if self._degraded else {}),
            "pods": self._pod_rows,
            "events": [row for _, row in sorted(self._events, key=lambda each: each[0])],
            "expect": list(self._expectations()),
        }
        return Replay(document, flips_of(self._entries), self._begin_us - AWAY_US if self._begin_us else 0)

    def _prelude(self) -> None:
        """What was there before the log begins: it is brought up, and the daemon is started again for it."""
        self._lives, self._life, self._away_us = 1, "begin", self._begin_us - AWAY_US
        goes_on = not any(entry.actor == "daemon" and entry.kind == "start" for entry in self._entries[:MOST_HEAD])
        for key, fields in self._before.items():
            pod = self._pod(key, 0, fields.get("wishes") or {})
            pod.powered = True
            if fields.get("ip") and not pod.static:
                pod.leased = pod.ip = str(fields["ip"])
                self._at(UP_US, {"lease": {"pod": key, "ip": pod.leased}})
            if fields.get("probe") == "ok":
                for row in self._guest(pod, "ProbeSucceeded", str(fields.get("message") or _usual(pod)), 0):
                    self._at(UP_US, row)
            if goes_on:  # the probe with which the daemon begins here has none in the log that it answers
                pod.skipped = int(fields.get("n", 0)) - 1
                self._saw(pod, self._begin_us, "probe")
        lasts = {"for": _time(AWAY_US), "daemon": "stop"}
        self._events.append((self._away_us, {"id": self._life, "at": _time(self._away_us), **lasts}))

    # Events and what they hang on

    def _at(self, us: int, row: Row) -> None:
        self._events.append((us, {"at": _time(us), **row}))

    def _when(self, pod: _Pod, us: int, row: Row, *, before: int | None = None) -> None:
        """After the last thing seen of the pod at ``us`` (and not after ``before``), as much later as it was."""
        limit = us if before is None else min(us, before)
        moment = next((each for each in reversed(pod.moments) if each.us <= limit), None)
        if moment is None:
            self._at(max(self._away_us, limit), row)
            return
        later = {"later": _time(us - moment.us)} if us > moment.us else {}
        self._events.append((moment.us, {"when": self._seen(pod, moment) | later, **row}))

    def _last(self, pod: _Pod) -> int:
        """The instant of the last thing that was seen of it."""
        return pod.moments[-1].us if pod.moments else self._away_us

    def _seen(self, pod: _Pod, moment: _Moment) -> Row:
        since = {"since": self._life} if self._life else {}
        return {"pod": pod.key, "sees": moment.sees, "nth": moment.nth, **since}

    def _saw(self, pod: _Pod, us: int, sees: str) -> None:
        pod.counts[sees] += 1
        pod.moments.append(_Moment(us, sees, pod.counts[sees]))

    # The daemon

    def _daemon(self, place: int, entry: Entry, fields: Mapping[str, Any]) -> None:
        if entry.kind == "start":
            self._life_us = entry.at_us
            self._lives += 1
            first = not any(each.actor == "daemon" and each.kind in LIVES for each in self._entries[:place])
            if not first:
                self._restart(place, entry.at_us)
            self._calls.clear()
            self._ended.clear()
            for pod in self._pods.values():
                pod.moments.clear()
                pod.counts.clear()
                pod.skipped = 0
        elif entry.kind not in ENDINGS or any(
            each.actor == "daemon" and each.kind == "start" for each in self._entries[place + 1 :]
        ):
            return
        elif any(each.at_us > entry.at_us for each in self._entries[place + 1 :]):
            self._at(entry.at_us, {"daemon": entry.kind})

    def _restart(self, place: int, start_us: int) -> None:
        """One row for the end of a life and the beginning of the next."""
        lives = (each for each in reversed(self._entries[:place]) if each.actor == "daemon" and each.kind in LIVES)
        last = next(lives, None)
        before = (each for each in reversed(self._entries[:place]) if each.actor != "record")
        how, end_us = "kill", next(before).at_us  # when nothing says how it ended: it was alive then
        if last is not None and last.kind in ENDINGS:
            how, end_us = last.kind, last.at_us
        row: Row = {"for": _time(start_us - end_us), "daemon": how}
        moments = [(pod, pod.moments[-1]) for pod in self._pods.values() if pod.moments]
        for pod, moment in moments:
            if moment.us == end_us:  # of all that happened at that instant, this is what it followed
                row = {"when": self._seen(pod, moment), **row}
                break
        else:
            row = {"at": _time(end_us), **row}
        self._life, self._away_us = f"life{self._lives}", end_us
        self._events.append((end_us, {"id": self._life, **row}))
        if self._entries[0].actor == "record":  # only a daemon that looks anew can find a pod gone
            self._lost_while_away(place)

    def _lost_while_away(self, place: int) -> None:
        """Pods that this life never sees were removed before it began."""
        seen = set()
        for entry in self._entries[place + 1 :]:
            if entry.actor == "daemon" and entry.kind == "start":
                break
            if entry.actor == "kube":
                seen.add(entry.key)
        for pod in self._pods.values():
            if pod.exists and pod.key not in seen:
                pod.exists = False
                self._at(self._away_us, {"delete": {"pod": pod.key, "grace": "0s"}})

    # Pods

    def _kube(self, place: int, entry: Entry, fields: Mapping[str, Any]) -> None:
        pod = self._pods.get(entry.key)
        if entry.kind == "created":
            self._created(entry, fields)
        elif pod is None:
            return
        elif entry.kind == "annotations":
            pod.wanted = _merged(pod.wanted, fields["annotations"])
            self._at(entry.at_us, {"annotate": {"pod": pod.key, "keys": fields["annotations"]}})
        elif entry.kind == "terminating" and fields["terminating"] and not self._ours(place, entry, asks=True):
            grace = fields.get("grace")
            row: Row = {"pod": pod.key, **({"grace": f"{grace}s"} if isinstance(grace, int) else {})}
            self._at(self._away_us if entry.at_us <= pod.sighted_us + CLOSE_US else entry.at_us, {"delete": row})
            pod.asked_us = entry.at_us
        elif entry.kind == "deleted":
            pod.exists = False
            known = entry.at_us == pod.asked_us or self._ours(place, entry, asks=False)
            if not known and not self._created_again(place, entry):
                self._at(entry.at_us, {"delete": {"pod": pod.key, "grace": "0s"}})
        elif entry.kind == "ready" and fields.get("was") and self._foreign(place, entry, fields):
            self._at(entry.at_us, {"overwrite": {"pod": pod.key, "status": fields["ready"]}})

    def _created(self, entry: Entry, fields: Mapping[str, Any]) -> None:
        if self._before.pop(entry.key, None) is not None:
            self._pods[entry.key].uid = str(fields.get("uid", ""))
            return
        pod = self._pods.get(entry.key)
        if pod is not None and pod.uid and pod.uid == fields.get("uid"):
            return self._sighted(pod, entry, fields.get("wishes") or {})
        if pod is not None:
            pod.exists, pod.uid = True, str(fields.get("uid", ""))
            self._at(entry.at_us, {"recreate": entry.key})
            return None
        self._pod(entry.key, entry.at_us, fields.get("wishes") or {}).uid = str(fields.get("uid", ""))
        return None

    def _sighted(self, pod: _Pod, entry: Entry, wanted: Mapping[str, str]) -> None:
        """A life finds a pod that an earlier one knew; what was changed meanwhile was changed while it was away."""
        pod.sighted_us = entry.at_us
        changed: dict[str, str | None] = dict.fromkeys(each for each in pod.wanted if each not in wanted)
        changed |= {each: value for each, value in wanted.items() if pod.wanted.get(each) != value}
        if changed:
            pod.wanted = dict(wanted)
            self._at(self._away_us, {"annotate": {"pod": pod.key, "keys": changed}})

    def _pod(self, key: str, at_us: int, wanted: Mapping[str, str]) -> _Pod:
        os = wanted.get("cocoonset.cocoonstack.io/os", "linux")
        os = os if os in ("linux", "windows", "macos") else "linux"
        namespace, _, name = key.partition("/")
        usual = example_pod(name, namespace=namespace, os=os)["metadata"]["annotations"]
        given: dict[str, str | None] = {each: value for each, value in wanted.items() if usual.get(each) != value}
        given |= dict.fromkeys(each for each in usual if each not in wanted)
        pod = self._pods[key] = _Pod(key, static=key in self._static, macos=os == "macos")
        pod.wanted = dict(wanted)
        guest: Row = {"boot": "0s", "lease": "0s"} if pod.static else {"boot": NEVER}
        self._pod_rows.append({
            "name": key,
            "os": os,
            "at": _time(at_us),
            **({"annotations": given} if given else {}),
            "guest": guest | {"echo": False},
        })  # fmt: skip
        return pod

    def _ours(self, place: int, entry: Entry, *, asks: bool) -> bool:
        """Is this what a DELETE of ours did? ``asks``: one that begins a deletion, not one that ends it."""
        for other in self._near(place, "push", "delete", entry.key):
            fields = dict(other.fields)
            if ("grace" not in fields) is asks and "refused" not in fields and _covers(other, fields, entry.at_us):
                return True
        return False

    def _foreign(self, place: int, entry: Entry, fields: Mapping[str, Any]) -> bool:
        pushes = list(self._near(place, "push", "status", entry.key))
        return not any(
            dict(push.fields).get("ready") == fields["ready"] and _covers(push, dict(push.fields), entry.at_us)
            for push in pushes
        )

    def _near(self, place: int, actor: str, kind: str, key: str) -> Iterator[Entry]:
        """Entries of that sort within a minute."""
        at_us = self._entries[place].at_us
        for step in (-1, 1):
            at = place + step
            while 0 <= at < len(self._entries) and abs(self._entries[at].at_us - at_us) <= 60_000_000:
                if (each := self._entries[at]).actor == actor and each.kind == kind and each.key == key:
                    yield each
                at += step

    def _created_again(self, place: int, entry: Entry) -> bool:
        after = self._entries[place + 1 : place + 20]
        return any(each[:4] == (entry.at_us, "kube", "created", entry.key) for each in after)

    # Commands

    def _command(self, place: int, entry: Entry, fields: Mapping[str, Any]) -> None:
        pod, verb = self._pods.get(entry.key), str(fields["verb"])
        call = verb, entry.key if pod is not None else str(fields["tool"])
        if entry.kind == "begins":
            self._fault(place, entry, pod)
            self._calls[call] += 1
            if pod is not None and verb in POWER_ON:
                if verb == "vm start" and pod.macos and pod.powered:
                    self._crash(pod, self._last(pod))  # or it would not be started
                self._saw(pod, entry.at_us, f"begins {verb}")
                pod.booting = True
            if pod is not None and verb in ("vm rm", "vm stop"):
                pod.removing = True
            return
        self._ended[call] += 1
        if pod is None:
            return
        if verb in POWER_ON:
            self._saw(pod, entry.at_us, f"ends {verb}")
            pod.booting = False
            if fields["exit"] == "0" and not (verb == "vm start" and pod.powered):
                pod.power_on(fresh=verb != "vm start")
        elif verb in ("vm rm", "vm stop") and fields["exit"] == "0":
            pod.powered = False
            pod.power_changed()

    def _fault(self, place: int, entry: Entry, pod: _Pod | None) -> None:
        """What was odd about a call that begins here, laid out for the same call."""
        fields = dict(entry.fields)
        verb, key = str(fields["verb"]), entry.key
        if verb not in FAULTS_OF:
            return
        rest = self._entries[place + 1 :]
        end = next((each for each in rest if _is_end(each, entry)), None)
        how = _oddity(end, self._quick_us)
        if not how:
            return
        if "slow" in how and "step" not in how:
            until_us = end.at_us if end is not None else entry.at_us
            up = any(each.actor == "lease" and each.key == key and each.at_us < until_us for each in rest)
            how["step"] = "after" if verb in POWER_ON and up else "middle"
        about = {"pod": pod.key} if pod is not None else {}
        tool = {"tool": fields["tool"]} if pod is None and fields["tool"] != "cocoon" else {}
        row = {"command": {"verb": verb, **about, **tool, **how}}
        call = verb, key if pod is not None else str(fields["tool"])
        if not self._calls[call]:
            if verb != "vm list" or self._lives > 1:  # with that a daemon begins, and so does a run: before any event
                self._at(self._life_us, row)
        elif pod is None or self._calls[call] != self._ended[call]:  # or one of them is still under way
            self._at(entry.at_us - 1, row)
        else:
            since = {"since": self._life} if self._life else {}
            when = {**about, "sees": f"ends {verb}", "nth": self._ended[call], **since}
            self._events.append((entry.at_us, {"when": when, **row}))

    # VMs

    def _vm(self, place: int, entry: Entry, fields: Mapping[str, Any]) -> None:
        """What cocoon tells of a VM that nobody here has stopped."""
        pod = self._pods.get(entry.key)
        if pod is None or not pod.powered or pod.removing or pod.booting:
            return
        if entry.kind == "DELETED" and not self._seen_alive(place, entry):
            self._when(pod, entry.at_us - TOLD_LATE_US, {"remove_vm": pod.key})
            pod.powered = False
            pod.power_changed()
        elif entry.kind == "MODIFIED" and str(fields.get("state", "")).startswith("stopped"):
            self._crash(pod, entry.at_us - TOLD_LATE_US)

    def _crash(self, pod: _Pod, us: int) -> None:
        self._when(pod, us, {"crash": pod.key})
        pod.powered = False
        pod.power_changed()

    def _seen_alive(self, place: int, entry: Entry) -> bool:
        """Did the runtime, asked next, show it all the same? Its stream calls VMs deleted when it cannot read them."""
        for each in self._entries[place + 1 :]:
            fields = dict(each.fields)
            ends = each.actor == "command" and each.kind == "ends" and each.key == entry.key
            if ends and fields["verb"] == "vm inspect":
                return str(fields["exit"]) == "0"
        return True

    # Leases and answers

    def _lease(self, place: int, entry: Entry, fields: Mapping[str, Any]) -> None:
        pod = self._pods.get(entry.key)
        if pod is None or pod.static or self._gap(place, pod):
            return  # after a gap, the probe that saw it tells more than anything before
        if entry.kind == "granted":
            ip = str(fields["ip"])
            if ip != pod.leased:
                self._when(pod, self._granted_us(place, entry, pod), {"lease": {"pod": pod.key, "ip": ip}})
                pod.leased = pod.ip = ip
        elif pod.leased:
            if not pod.removing:
                self._when(pod, self._granted_us(place, entry, pod), {"lose_lease": pod.key})
            pod.leased = ""

    def _granted_us(self, place: int, entry: Entry, pod: _Pod) -> int:
        """When the lease was there: a host notes that with the probe that saw it, and how old its file was."""
        fields = dict(entry.fields)
        if "ago_us" not in fields:
            return entry.at_us
        since_us, last_us = entry.at_us - int(fields["ago_us"]), self._last(pod)
        probes = (each for each in self._entries[place + 1 :] if each.actor == "probe" and each.key == pod.key)
        began_us = next((each.at_us - int(dict(each.fields).get("took_us", 0)) for each in probes), entry.at_us)
        return since_us if last_us <= since_us < began_us else last_us

    def _gap(self, place: int, pod: _Pod) -> bool:
        """Were there probes between the last one that is in the log and the next one?"""
        for each in self._entries[place + 1 :]:
            if each.actor == "probe" and each.key == pod.key:
                number = dict(each.fields).get("n")
                return number is not None and number - pod.skipped > pod.counts["probe"] + 1
        return False

    def _probe(self, place: int, entry: Entry, fields: Mapping[str, Any]) -> None:
        pod = self._pods.get(entry.key)
        if pod is None:
            return
        took_us = int(fields.get("took_us", 0))
        number = int(fields["n"]) - pod.skipped if "n" in fields else pod.counts["probe"] + 1
        if number > pod.counts["probe"] + 1 and pod.counts["probe"]:
            # Those in between were like the last one; of their instants only the order is known.
            pod.counts["probe"] = number - 1
            pod.moments.append(_Moment(entry.at_us - took_us, "probe", number - 1))
        self._answer(pod, entry, fields, entry.at_us - took_us)
        pod.counts["probe"] = number
        pod.moments.append(_Moment(entry.at_us, "probe", number))

    def _answer(self, pod: _Pod, entry: Entry, fields: Mapping[str, Any], begin_us: int) -> None:
        """Bring the world into the state that gives this answer to a probe that begins then."""
        reason, message = str(fields["reason"]), str(fields.get("message", ""))

        def do(row: Row) -> None:
            moment = next((each for each in reversed(pod.moments) if each.us <= begin_us), None)
            self._when(pod, moment.us if moment else self._away_us, row)

        if reason == "PingSkipped":
            self._degraded = True
        elif reason == "WaitingForLease":
            if pod.leased:
                do({"lose_lease": pod.key})
                pod.leased = ""
        elif reason == "AddressConflict" and self._host and (taken := IP.search(message)):
            if taken[0] != pod.leased and not pod.static:
                pod.leased = pod.ip = taken[0]
                do({"lease": {"pod": pod.key, "ip": pod.leased}})
        elif reason in ("QEMUDead", "QEMURestarting"):
            if pod.powered and not pod.booting:
                self._crash(pod, self._last(pod))
        elif reason in ("ProbeSucceeded", "PingTimeout", "PingFailed", "PortClosed", "NoSSHBanner", "ProbeTimeout"):
            took_us = int(fields.get("took_us", 0))
            for row in self._guest(pod, reason, message, took_us):
                do(row)

    def _guest(self, pod: _Pod, reason: str, message: str, took_us: int) -> Iterator[Row]:
        """What has to happen to the guest, so that it answers like that."""
        found = IP.search(message)
        ip = found[0] if found else pod.leased
        if ip and ip != pod.leased and not pod.static:
            yield {"lease": {"pod": pod.key, "ip": ip}}
            pod.leased = pod.ip = ip
        if _hears_nothing(reason, message):
            if not pod.mute and self._answers(pod, reason):
                pod.mute = True
                yield {"silent": pod.key}
            return
        if ip and ip != pod.ip and not pod.static:
            yield {"lease": {"pod": pod.key, "ip": ip}}
            pod.ip = ip
        if pod.mute:
            pod.mute = False
            yield {"speaks": pod.key}
        latency_us = took_us if took_us >= self._quick_us else 0
        if reason != "PingFailed" and abs(latency_us - pod.latency_us) >= self._quick_us:
            pod.latency_us = latency_us
            yield {"latency": {"pod": pod.key, "value": _time(latency_us)}}
        yield from self._doors(pod, reason, message)

    def _answers(self, pod: _Pod, reason: str) -> bool:
        """Would the guest answer what was asked, as it is?"""
        if reason == "PingTimeout":
            return pod.echo
        return bool(pod.ip or pod.static)

    @staticmethod
    def _doors(pod: _Pod, reason: str, message: str) -> Iterator[Row]:
        """Echo, port or banner."""
        if reason == "PingFailed":
            yield {"unreachable": {"pod": pod.key, "text": message.removeprefix("icmp: ")}}
        elif port := PORT.match(message):
            number = int(port[1])
            if reason == "ProbeSucceeded" and number not in pod.ports:
                pod.ports[number] = None
                yield {"open": {"pod": pod.key, "port": number}}
            elif reason == "PortClosed" and number in pod.ports:
                del pod.ports[number]
                yield {"close": {"pod": pod.key, "port": number}}
        elif reason == "ProbeSucceeded" and message.startswith("icmp:"):
            if not pod.echo:
                pod.echo = True
                yield {"echo": pod.key}
        elif "refused" in message:
            if pod.ports.pop(22, None) is not None:
                yield {"close": {"pod": pod.key, "port": 22}}
        else:
            said = SAID.search(message)
            says = BANNER if reason == "ProbeSucceeded" else said[1] if said else ""
            if pod.ports.get(22) != says:
                pod.ports[22] = says
                yield {"open": {"pod": pod.key, "port": 22, "says": says}}

    def _lease_files(self) -> None:
        """A file that could not be read although there were leases: it was not there until somebody could."""
        granted_us = next((each.at_us for each in self._entries if each.actor == "lease"), None)
        unreadable = [each for each in self._entries if dict(each.fields).get("reason") == "LeaseFileUnreadable"]
        late = [each for each in unreadable if each.actor == "probe" and granted_us is not None]
        if late and late[-1].at_us > (granted_us or 0):
            self._at(0, {"lease_file": "missing"})
            self._at(late[-1].at_us + 1, {"lease_file": "rename"})

    # The end

    def _expectations(self) -> Iterator[Row]:
        flips = flips_of(self._entries)
        for us, key, ready in flips:
            seconds = us / 1_000_000
            tolerance = TOLERANCE_S + DRIFT * seconds
            window = {"after": time_text(max(0.0, seconds - tolerance)), "by": time_text(seconds + tolerance)}
            yield {"pod": key, "ready": ready, **window}
        for key, count in Counter(key for _, key, _ in flips).items():
            yield {"pod": key, "flips": count, **({"from": _time(self._begin_us)} if self._begin_us else {})}


def _known_before(entries: list[Entry]) -> dict[str, dict[str, Any]]:
    """The pods that were there when the log begins, and what is known of them."""
    held: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry.actor != "record":
            break
        if entry.kind == "holds":
            held[entry.key] = dict(entry.fields)
    if entries and entries[0].actor != "record":
        return {}  # a simulation begins with nothing
    lives = [place for place, entry in enumerate(entries) if entry.actor == "daemon" and entry.kind == "start"]
    first = entries[: lives[1]] if len(lives) > 1 else entries
    for entry in first if lives else ():
        if entry.actor == "kube" and entry.kind == "created":
            shown = {each.kind: dict(each.fields).get(each.kind) for each in first if _first_sight(each, entry)}
            if shown.get("phase") == "Running":
                answers = {"probe": "ok" if shown.get("ready") == "True" else "fails", "ip": shown.get("address", "")}
                held.setdefault(entry.key, dict(entry.fields) | answers)
    return held


def _first_sight(entry: Entry, created: Entry) -> bool:
    """Is this what was seen of a pod when it was first seen?"""
    near = 0 <= entry.at_us - created.at_us <= 1_000
    return entry.actor == "kube" and entry.key == created.key and near and dict(entry.fields).get("was") == ""


def _merged(old: Mapping[str, str], change: Mapping[str, str | None]) -> dict[str, str]:
    return {each: value for each, value in ({**old, **change}).items() if value is not None}


def _usual(pod: _Pod) -> str:
    """What a probe of such a guest says when it answers."""
    if (port := pod.wanted.get(ANNOTATION_PROBE_PORT, "")).isdecimal():
        return f"tcp {pod.ip}:{port} accepts"
    return f"sshd at {pod.ip}:22 speaks" if pod.macos else f"icmp: {pod.ip} replies"


def _static(entries: list[Entry]) -> Iterator[str]:
    """Pods whose first answer came from an address that no lease had given them."""
    leased: dict[str, str] = {}
    decided: set[str] = set()
    for entry in entries:
        if entry.actor == "lease":
            leased[entry.key] = str(dict(entry.fields).get("ip", ""))
        elif entry.actor == "probe" and (found := IP.search(str(dict(entry.fields).get("message", "")))):
            if entry.key not in decided and leased.get(entry.key) != found[0]:
                yield entry.key
            decided.add(entry.key)


def _is_end(entry: Entry, begin: Entry) -> bool:
    """Is this the end of the command that begins there?"""
    if entry.actor != "command" or entry.kind != "ends" or entry.key != begin.key:
        return False
    fields, began = dict(entry.fields), dict(begin.fields)
    same_us = abs(entry.at_us - int(fields["took_us"]) - begin.at_us)
    return fields["verb"] == began["verb"] and same_us <= CLOSE_US


def _oddity(end: Entry | None, quick_us: int) -> Row:
    """What a command did that it need not have done: parts of the event `command`."""
    if end is None:
        return {}
    fields = dict(end.fields)
    ending, error, took_us = str(fields["exit"]), str(fields.get("error", "")), int(fields["took_us"])
    if ending == "killed":
        return {}
    if ending == "failed" and "still running" in error:
        return {"hangs": True}
    how: Row = {}
    if ending.startswith("-"):
        how["killed"] = True
    elif ending != "0" and not (PRESENT if fields["verb"] in MAKES else ABSENT).search(error):
        how |= {"fails": error or f"exit {ending}", "step": "before"}
    if took_us >= quick_us:
        how["slow"] = _time(took_us)
    return how


# The API --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outage:
    """A request that failed, again and again in the same way; instants in microseconds."""

    request: str
    status: int
    begin_us: int
    end_us: int
    longest_us: int
    times: int = 1
    retry_after: float | None = None
    stored: bool = False


def _api_events(entries: list[Entry]) -> Iterator[tuple[int, Row]]:
    """Requests that failed, each so many times; or all of them for a while, when several did; and those that were
    slow."""
    group: list[_Outage] = []
    for outage in sorted(_outages(entries), key=lambda each: each.begin_us):
        if group and outage.begin_us > max(each.end_us for each in group):
            yield from _together(group)
            group = []
        group.append(outage)
    yield from _together(group)
    slow: list[tuple[int, int, str]] = []  # begin of the first, begin of the last, how long
    for entry in entries:
        fields = dict(entry.fields)
        took_us = int(fields.get("took_us", 0))
        if entry.actor == "push" and "refused" not in fields and took_us >= SLOW_US:
            begin_us, by = entry.at_us - took_us, _time(took_us)
            if slow and slow[-1][2] == by and begin_us <= slow[-1][1] + took_us:
                slow[-1] = (slow[-1][0], begin_us, by)
            else:
                slow.append((begin_us, begin_us, by))
    for first_us, last_us, by in slow:
        yield first_us, {"for": _time(last_us - first_us + 1), "api_slow": {"by": by, "requests": "PATCH *"}}


def _outages(entries: list[Entry]) -> list[_Outage]:
    found: list[_Outage] = []
    open_: dict[str, _Outage] = {}
    for place, entry in enumerate(entries):
        if entry.actor != "api":
            continue
        fields = dict(entry.fields)
        request, took_us = str(fields["request"]), int(fields["took_us"])
        if request.startswith("WATCH"):
            took_us = 0  # until it broke, all was well
        if entry.kind == "works":
            open_.pop(request, None)
            continue
        status = int(fields["status"])
        outage = open_.get(request)
        if outage is not None and outage.status == status and entry.at_us - outage.end_us <= RETRY_US:
            outage.times += 1
            outage.end_us, outage.longest_us = entry.at_us, max(outage.longest_us, took_us)
            continue
        outage = _Outage(request, status, entry.at_us - took_us, entry.at_us, took_us)
        outage.retry_after, outage.stored = fields.get("retry_after"), _stored(entries, place, entry, took_us)
        open_[request] = outage
        found.append(outage)
    return found


def _stored(entries: list[Entry], place: int, entry: Entry, took_us: int) -> bool:
    """Was the write made, and only its answer lost?"""
    if not entry.key or " /api" not in str(dict(entry.fields)["request"]):
        return False
    near = entries[max(0, place - 20) : place]
    return any(
        each.actor == "kube" and each.key == entry.key and entry.at_us - took_us <= each.at_us <= entry.at_us
        for each in near
        if each.kind in ("ready", "reason", "phase")
    )


def _together(group: list[_Outage]) -> Iterator[tuple[int, Row]]:
    if len({outage.request for outage in group}) >= MANY and len({outage.status for outage in group}) == 1:
        # What breaks a watch is there only after all that still went well at that instant.
        begin_us = min(outage.begin_us + outage.request.startswith("WATCH") for outage in group)
        end_us = max(outage.end_us for outage in group)
        row = _outage_row("*", group[0].status, max(outage.longest_us for outage in group))
        yield begin_us, {"for": _time(end_us - begin_us + 1), **row}
        return
    for outage in group:
        if outage.longest_us >= HANGS_US and outage.status == 0:
            lasts = {"for": _time(outage.end_us - outage.begin_us + 1)}
            yield outage.begin_us, {**lasts, **_outage_row(outage.request, 0, outage.longest_us)}
            continue
        fails: Row = {"status": outage.status, "requests": outage.request, "times": outage.times}
        fails |= {"retry_after": time_text(outage.retry_after)} if outage.retry_after is not None else {}
        fails |= {"stored": True} if outage.stored else {}
        yield outage.begin_us, {"api_fails": fails}


def _outage_row(requests: str, status: int, longest_us: int) -> Row:
    if status == 0 and longest_us >= HANGS_US:
        return {"api_hangs": {"requests": requests}}
    if status == 0 and requests == "*":
        return {"api_down": True}
    return {"api_fails": {"status": status, "requests": requests}}


def _covers(push: Entry, fields: Mapping[str, Any], at_us: int) -> bool:
    """Was this request under way at that instant?"""
    return push.at_us - int(fields.get("took_us", 0)) <= at_us <= push.at_us


def _hears_nothing(reason: str, message: str) -> bool:
    return reason in ("PingTimeout", "ProbeTimeout") or "timed out" in message or "No route" in message


def _time(us: int) -> str:
    return time_text(us / 1_000_000)
