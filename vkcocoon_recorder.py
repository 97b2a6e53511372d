"""`vk-cocoon run --record DIR`: the event log of a real host, kept in a few files of bounded size.

One observer at the doors to the world: around the API, around the two command lines, after each probe, and where a
status is handed over. It writes down what vkcocoon_record says, so that a simulation can show the same to a daemon
again. Without `--record` none of it is there.

Nothing here may disturb probing. At the doors an entry only goes into memory; once a second one greenlet has them
written by a thread of gevent's pool, so a disk that hangs stops this greenlet and nobody else. What cannot be written
is dropped and counted, and said once in the log until it works again.

Files are named by when their process began and numbered, so their names are in order. Each begins with what the
daemon holds, so that the oldest may be removed without the others losing their meaning. They are readable by their
owner alone; which texts come this far is vkcocoon_record's business, and secrets are not among them.

Probes: one that says something else than the one before is written down, with its number; so is each that fails, up to
a hundred that say the same. Those in between are known by their number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import gevent
import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_commands import CommandError, Completed, Execute
from vkcocoon_ports import Ports
from vkcocoon_probes import Clock, Observer, ProbeAgent, ProbeResult, spawn
from vkcocoon_quantity import parse_quantity
from vkcocoon_record import Cluster, Entry, RecordedApi, command_fields, subject_of, wishes_of
from vkcocoon_settings import Settings
from vkcocoon_status import ANNOTATION_VM_NAME, condition_of, pod_key
from vkcocoon_tracking import Notify, Pod, PodTable
from vkcocoon_vms import VMEvent

__all__ = ["Recorder"]

FLUSH_S = 1.0
CLOSE_S = 2.0  # how long the end of the process waits for the disk
FILES = 8  # the share of one file in all that is kept: so much is lost when the oldest goes
MOST_PENDING = 50_000  # entries in memory while the disk hangs; about 10 MB
REPEATS = 100  # failed probes in a row that are written down although they say the same
SLOWER_US = 50_000  # an answer that takes so much more or less is another answer
ID = re.compile(r'"id":\s*"([^"]+)"')  # of a VM, in what made it prints
PREFIX, SUFFIX = "vk-cocoon-", ".jsonl"
NOTHING: Mapping[str, Any] = {}

log = structlog.get_logger()


class Told(Protocol):
    """What is recorded of: a vkcocoon.Provider."""

    @property
    def held(self) -> PodTable: ...
    def notify_pods(self, callback: Notify, *, acknowledged: bool = False) -> None: ...


@dataclass(slots=True)
class _Probed:
    """What is known of a pod's probes: how many there were, and the last that was written down."""

    number: int = 0
    said: tuple[bool, str, str] = (False, "", "")
    took_us: int = 0
    repeats: int = 0
    ip: str = ""


class Recorder:
    """`observe` gives the ports that record; `start` when everything is wired, `close` when everything has ended."""

    def __init__(
        self, settings: Settings, clock: Clock, *, version: str, aside: Callable[..., str] | None = None
    ) -> None:
        """``aside(function, arguments)`` calls where nobody else waits for it: in a thread, unless it is given."""
        self._clock = clock
        self._aside = aside or gevent.get_hub().threadpool.apply
        self._leases_path = settings.leases_path
        self._about = {"node": settings.node_name, "version": version, "orphan_policy": settings.orphan_policy}
        self._began_us = self._monotonic_us()
        self._files = _Files(settings.record, int(parse_quantity(settings.record_size)), clock)
        self._pending: list[Entry] = []
        self._lost = 0
        self._probes: dict[str, _Probed] = {}
        self._made: dict[str, str] = {}  # id of a new VM -> its pod, until the pod has it
        self._held: PodTable = PodTable()
        self._cluster = Cluster(self.record)
        self._observers: list[Observer] = []  # who else looks at probes
        self._stop = Event()
        self._written = Event()  # nothing is pending, and nothing more comes
        self._greenlets = Group()

    # The doors

    def observe(self, ports: Ports) -> Ports:
        """The same ports, recorded."""
        ports.runtime.observe(self._around("cocoon"))
        ports.macos.observe(self._around("cocoon-macos"))
        ports.runtime.on_event = self._told
        self._observers.append(ports.on_probe)
        kube = RecordedApi(ports.kube, self.record, self.now_us, self._cluster)
        return replace(ports, kube=kube, on_probe=self._probed)

    def start(self, provider: Told, notify: Notify) -> None:
        """Record from now on; ``notify`` is who gets what the provider hands over."""
        self._held = provider.held
        provider.notify_pods(lambda pod: self._handed_over(pod, notify), acknowledged=True)
        self._begin_file("begins")
        self.record("daemon", "start", self._about["node"], NOTHING)
        spawn(self._greenlets, "record", self._run)

    def close(self) -> None:
        """Everything has ended: what is pending is written, unless the disk hangs."""
        self.record("daemon", "stop", self._about["node"], NOTHING)
        self._stop.set()
        self._clock.wait(self._written, CLOSE_S)
        self._greenlets.kill(block=False)

    def record(self, actor: str, kind: str, key: str, fields: Mapping[str, Any]) -> None:
        """Add an event that happens now; memory only."""
        if len(self._pending) >= MOST_PENDING:
            self._lost += 1
            return
        self._pending.append(Entry(self.now_us(), actor, kind, key, tuple(fields.items())))

    def now_us(self) -> int:
        return self._monotonic_us() - self._began_us

    def _monotonic_us(self) -> int:
        return round(self._clock.monotonic() * 1_000_000)

    # What is seen

    def _probed(self, agent: ProbeAgent, result: ProbeResult, lateness_s: float, took_s: float) -> None:
        self._look_at_probe(agent, result, took_s)
        for observer in self._observers:
            observer(agent, result, lateness_s, took_s)

    def _look_at_probe(self, agent: ProbeAgent, result: ProbeResult, took_s: float) -> None:
        probed = self._probes.setdefault(agent.key, _Probed())
        probed.number += 1
        self._look_at_address(agent.key, probed)
        took_us, said = round(took_s * 1_000_000), (result.ready, str(result.reason), result.message)
        slower = result.ready and abs(took_us - probed.took_us) >= SLOWER_US
        if said != probed.said or slower:
            probed.said, probed.took_us, probed.repeats = said, took_us, 0
        elif result.ready or probed.repeats >= REPEATS:
            return
        else:
            probed.repeats += 1
        fields = {"reason": said[1], "message": said[2], "took_us": took_us, "n": probed.number}
        self.record("probe", "ok" if result.ready else "fails", agent.key, fields)

    def _look_at_address(self, key: str, probed: _Probed) -> None:
        """The lease that this probe saw, if it is another one."""
        entry = self._held.find(key)
        if entry is None or entry.vm is None or entry.vm.static_ip or not entry.spec.managed or entry.ip == probed.ip:
            return
        probed.ip = entry.ip
        fields: dict[str, Any] = {"ip": entry.ip} if entry.ip else {}
        try:
            fields["ago_us"] = max(0, round((self._wall_s() - os.stat(self._leases_path).st_mtime) * 1_000_000))
        except OSError:
            pass  # when the file was written only dates it better
        self.record("lease", "granted" if entry.ip else "gone", key, fields)

    def _told(self, event: VMEvent) -> None:
        self.record("vm", event.kind, self._pod_of(event.vm.name or event.vm.id), {"state": event.vm.state})

    def _handed_over(self, pod: Pod, notify: Notify) -> None:
        status = pod["status"]
        ready = condition_of(status, "Ready")
        fields = {"ready": ready.get("status", ""), "reason": str(ready.get("reason", "")), "phase": status["phase"]}
        self.record("daemon", "hands over", pod_key(pod), fields)
        notify(pod)

    def _around(self, tool: str) -> Callable[[Execute], Execute]:
        def around(execute: Execute) -> Execute:
            def run(argv: Sequence[str], limit: float) -> Completed:
                return self._command(tool, argv, lambda: execute(argv, limit))

            return run

        return around

    def _command(self, tool: str, argv: Sequence[str], call: Callable[[], Completed]) -> Completed:
        key, about = self._pod_of(subject_of(argv)), {"verb": " ".join(argv[1:3]), "tool": tool}
        began_us = self.now_us()
        outcome: Completed | Exception | None = None
        self.record("command", "begins", key, about)
        try:
            completed = call()
            # What it complained may hold what it was given.
            masked = CommandError(argv, completed.returncode, completed.stderr).stderr
            outcome = Completed(completed.returncode, "", masked)
            if about["verb"] in ("vm run", "vm clone") and (made := ID.search(completed.stdout)):
                self._made[made[1]] = key
            return completed
        except Exception as error:
            outcome = error
            raise
        finally:
            self.record("command", "ends", key, about | command_fields(outcome, self.now_us() - began_us))

    def _pod_of(self, subject: str) -> str:
        """The pod whose VM has that name or id; anything else is itself."""
        for entry in self._held:
            if subject and subject in (entry.spec.vm_name, entry.vm.id if entry.vm is not None else ""):
                return entry.key
        for pod in self._cluster:  # one that is not held yet
            if subject and (pod["metadata"].get("annotations") or {}).get(ANNOTATION_VM_NAME) == subject:
                return pod_key(pod)
        return self._made.get(subject, subject)

    # The files

    def _run(self) -> None:
        while not self._clock.wait(self._stop, FLUSH_S):
            self._flush()
            if self._files.full:
                self._files.next()
                self._begin_file("goes on")
        self._flush()
        self._written.set()

    def _flush(self) -> None:
        if lines := self._taken():
            self._said(self._aside(self._files.append, (lines,)))

    def _taken(self) -> list[str]:
        """What is pending, as lines, and no longer pending."""
        pending, self._pending = self._pending, []
        return [entry.line() + "\n" for entry in pending]

    def _said(self, problem: str) -> None:
        """Say once that nothing can be written, and once that it can again."""
        lost = self._files.lost_lines
        if problem and problem != self._files.told:
            log.warning("the event log cannot be written; nothing else depends on it", error=problem)
        elif self._files.told and not problem:
            log.info("the event log is written again", lost=lost)
        self._files.told = problem
        if not problem and (lost or self._lost):
            self.record("record", "lost", "", {"entries": lost + self._lost})
            self._files.lost_lines = self._lost = 0

    def _begin_file(self, kind: str) -> None:
        """A file begins with what is known, so that it can be understood without those before it."""
        wall = self._clock.now().isoformat(timespec="microseconds")
        self.record("record", kind, self._about["node"], self._about | {"wall": wall})
        keys = set()
        for entry in self._held:
            if not self._held.current(entry):
                continue
            keys.add(entry.key)
            probed = self._probes.get(entry.key, _Probed())
            fields = {
                "uid": entry.uid,
                "wishes": wishes_of(entry.pod),
                "ip": entry.ip,
                "ready": "True" if entry.ready else "False",
                "intent": str(entry.intent.state),
                "probe": "ok" if probed.said[0] else "fails",
                "reason": probed.said[1],
                "message": probed.said[2],
                "n": probed.number,
            }
            self.record("record", "holds", entry.key, fields)
        for key in self._probes.keys() - keys:
            del self._probes[key]
        self._made.clear()

    def _wall_s(self) -> float:
        return self._clock.now().timestamp()


class _Files:
    """The files of one process; `append` may run in a thread, one at a time."""

    def __init__(self, directory: str, limit: int, clock: Clock) -> None:
        self._directory = directory
        self._limit = limit
        self._stamp = clock.now().strftime("%Y%m%dT%H%M%SZ")
        self._number = 1
        self._descriptor = -1
        self._size = 0
        self.told = ""  # the problem that the log already has
        self.lost_lines = 0

    @property
    def full(self) -> bool:
        return self._size >= self._limit // FILES

    def next(self) -> None:
        """The next line begins another file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._size = -1, 0
        self._number += 1

    def append(self, lines: Sequence[str]) -> str:
        """Write them; what was in the way, "" when nothing was. What could not be written is counted as lost."""
        data = "".join(lines).encode()
        try:
            if self._descriptor < 0:
                self._open()
            if data:
                self._write(data)
        except OSError as error:
            self.lost_lines += len(lines)
            return f"{self._directory}: {error.strerror or error}"
        return ""

    def _open(self) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._make_room()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path = os.path.join(self._directory, f"{PREFIX}{self._stamp}-{self._number:05}{SUFFIX}")
            try:
                self._descriptor = os.open(path, flags, 0o600)
                return
            except FileExistsError:  # of a process that began in the same second
                self._number += 1

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # no half of a line in front of the next one
            raise
        self._size += len(data)

    def _make_room(self) -> None:
        """Remove the oldest until one more file fits."""
        found = sorted(self._old())
        kept = sum(size for _, size in found)
        for path, size in found:
            if kept + self._limit // FILES <= self._limit:
                break
            os.unlink(path)
            kept -= size

    def _old(self) -> Iterator[tuple[str, int]]:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if (
                    entry.name.startswith(PREFIX)
                    and entry.name.endswith(SUFFIX)
                    and entry.is_file(follow_symlinks=False)
                ):
                    yield entry.path, entry.stat(follow_symlinks=False).st_size
