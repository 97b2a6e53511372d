"""What VMs and the host use: CPU, memory and traffic, read from /proc and the VMs' cgroups, never from a command.

Metrics are asked for by several scrapers, every few seconds, for all pods at once, in a process that has probes to
send. So one sample serves everybody for `FRESH_S`; it is taken in slices of `SLICE` pods with a turn for everybody else
in between; and what does not change about a process (which one it is, when it started, its labels) is found out once.

Where numbers come from, for one VM:

    CPU      usage_usec of <cgroup parent>/vm-<id>.scope, which outlives no VM; else user and system time of its process
    memory   resident set of its process
    traffic  the row of its TAP in the network namespace of its process, from the guest's side: what the TAP sends is
             what the guest receives

A process is believed to be the VM's when its command line names the VM, and from then on as long as it was started at
the same instant: the pid in a record may be old, and the kernel gives pids away again. A VM whose numbers cannot be
read is left out, because a number that is wrong is worse than none.

Nothing here knows Kubernetes but for the names in `Subject`. Used by vkcocoon_kubelet; what it waits, it waits on the
clock handed in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from gevent.event import Event
from gevent.pool import Group

from vkcocoon_probes import Clock, spawn
from vkcocoon_vms import VM

__all__ = ["NodeUsage", "Sample", "Stats", "Subject", "Traffic", "Usage"]

FRESH_S = 2.0
SLICE = 25  # pods between two turns for everybody else: well under a millisecond of work
READ_BYTES = 65536  # more than any of the files here; a TAP's namespace has a handful of rows
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/<pid>/stat after the name in parentheses, which may itself contain blanks and parentheses.
USER_TICKS, SYSTEM_TICKS, START_TICKS, RESIDENT_PAGES = 11, 12, 19, 21


@dataclass(frozen=True, slots=True)
class Subject:
    """A pod and the VM in it, as it is when a sample begins."""

    uid: str
    namespace: str
    name: str
    container: str
    vm: VM


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes, packets' errors and drops of one interface since it exists, from the guest's side."""

    interface: str
    received: int = 0
    sent: int = 0
    receive_errors: int = 0
    send_errors: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """One VM at one instant. `cpu_s` only grows while the VM lives; `cpu_rate` is in cores, since the sample before,
    None for a first one."""

    subject: Subject
    at: datetime
    cpu_s: float
    memory: int
    started: datetime
    cpu_rate: float | None = None
    traffic: Traffic | None = None


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """The whole host; memory in bytes."""

    at: datetime
    cpu_s: float
    working_set: int
    used: int
    available: int
    started: datetime
    cpu_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """`node` is None when /proc cannot be read. `with_traffic`: whether it was asked for."""

    node: NodeUsage | None
    pods: tuple[Usage, ...]
    with_traffic: bool


@dataclass(frozen=True, slots=True)
class _Reading:
    """A CPU counter at an instant of the monotonic clock: a step of the wall clock must not bend a rate."""

    at: float
    cpu_s: float

    def rate_since(self, last: _Reading | None) -> float | None:
        """Cores used; None for the first reading, and when the counter began anew."""
        if last is None or self.at <= last.at or self.cpu_s < last.cpu_s:
            return None
        return (self.cpu_s - last.cpu_s) / (self.at - last.at)


@dataclass(slots=True)
class _Known:
    """What stays true of a VM's process for as long as it lives."""

    vm_id: str
    pid: int
    start_ticks: int
    started: datetime
    last: _Reading | None = None


class Stats:
    """Samples of the VMs that `subjects` names. `proc` and `cgroup` are where those file systems are mounted, `parent`
    the cgroup under which cocoon puts its VMs."""

    def __init__(
        self,
        clock: Clock,
        subjects: Callable[[], Iterable[Subject]],
        *,
        parent: str,
        proc: str = "/proc",
        cgroup: str = "/sys/fs/cgroup",
    ) -> None:
        self._clock = clock
        self._subjects = subjects
        self._proc = proc
        self._cgroup = f"{cgroup}/{parent}"
        self._known: dict[str, _Known] = {}
        self._boot: datetime | None = None
        self._last: Sample | None = None
        self._last_node: _Reading | None = None
        self._last_at = float("-inf")
        self._taking: dict[bool, _Taking] = {}
        self._group = Group()

    def sample(self, *, traffic: bool = False) -> Sample:
        """What is used now, at most `FRESH_S` ago. Those who ask at the same time share one sample, which is taken in a
        greenlet of its own and so outlives the impatient. Raises what taking it raised."""
        last = self._last
        if last is not None and self._clock.monotonic() - self._last_at < FRESH_S and last.with_traffic >= traffic:
            return last
        taking = self._taking.get(True) or self._taking.get(traffic)
        if taking is None:
            taking = self._taking[traffic] = _Taking()
            spawn(self._group, "take a sample", self._take, taking, traffic)
        self._clock.wait(taking.done, None)
        if taking.sample is None:
            raise taking.error or RuntimeError("the sample was not taken")
        return taking.sample

    def started(self, vm: VM) -> datetime | None:
        """When the VM's process started; None when it is not found."""
        known = self._find(vm)
        return known.started if known else None

    def close(self) -> None:
        self._group.kill(block=False)

    def _take(self, taking: _Taking, traffic: bool) -> None:
        try:
            taking.sample = self._last = self._taken(traffic)
            self._last_at = self._clock.monotonic()
        except Exception as error:  # noqa: BLE001  it belongs to those who wait
            taking.error = error
        finally:
            del self._taking[traffic]
            taking.done.set()

    def _taken(self, traffic: bool) -> Sample:
        node = self._node_usage()
        host_rows = _interfaces(self._read(f"{self._proc}/net/dev")) if traffic else {}
        usages = []
        subjects = list(self._subjects())
        for number, subject in enumerate(subjects, start=1):
            if (usage := self._usage(subject)) is not None:
                usages.append(replace(usage, traffic=self._traffic(subject, host_rows)) if traffic else usage)
            if number % SLICE == 0:
                self._clock.sleep(0)
        living = {subject.uid for subject in subjects}
        for uid in [uid for uid in self._known if uid not in living]:
            del self._known[uid]
        return Sample(node, tuple(usages), with_traffic=traffic)

    # One VM

    def _usage(self, subject: Subject) -> Usage | None:
        known = self._known.get(subject.uid)
        fields = self._stat(known.pid) if known is not None and known.vm_id == subject.vm.id else None
        if known is None or fields is None or int(fields[START_TICKS]) != known.start_ticks:
            known = self._find(subject.vm)
            fields = self._stat(known.pid) if known is not None else None
            if known is None or fields is None:
                self._known.pop(subject.uid, None)
                return None
            self._known[subject.uid] = known
        reading = _Reading(self._clock.monotonic(), self._cpu_s(subject.vm, fields))
        rate, known.last = reading.rate_since(known.last), reading
        memory = int(fields[RESIDENT_PAGES]) * PAGE
        return Usage(subject, self._clock.now(), reading.cpu_s, memory, known.started, rate)

    def _cpu_s(self, vm: VM, fields: list[bytes]) -> float:
        used = _keyed(self._read(f"{self._scope(vm)}/cpu.stat")).get(b"usage_usec")
        return used / 1e6 if used is not None else (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / TICKS

    def _scope(self, vm: VM) -> str:
        return f"{self._cgroup}/vm-{vm.id.replace('/', '_')}.scope"  # an id may come from an annotation

    def _traffic(self, subject: Subject, host_rows: dict[str, list[int]]) -> Traffic | None:
        """Of the first card. One in the host's own namespace has its row in the table that was read once for all: there
        are as many rows in it as VMs."""
        tap = subject.vm.nics[0].tap if subject.vm.nics else ""
        if not tap:
            return None
        row = host_rows.get(tap)
        if row is None:
            row = _interfaces(self._read(f"{self._proc}/{self._known[subject.uid].pid}/net/dev")).get(tap)
        if row is None:
            return None
        # Columns: 0 bytes and 2 errors that the TAP received, 8 and 10 that it sent.
        return Traffic(tap, received=row[8], sent=row[0], receive_errors=row[10], send_errors=row[2])

    def _find(self, vm: VM) -> _Known | None:
        """The VM's process: the one in its record, else one in its cgroup."""
        for pid in self._candidates(vm):
            fields = self._stat(pid)
            if fields is not None and fields[0] not in (b"Z", b"X") and self._names(pid, vm):
                ticks = int(fields[START_TICKS])
                return _Known(vm.id, pid, ticks, self._booted() + timedelta(seconds=ticks / TICKS))
        return None

    def _candidates(self, vm: VM) -> Iterator[int]:
        if vm.pid > 0:
            yield vm.pid
        for word in self._read(f"{self._scope(vm)}/cgroup.procs").split():
            if word.isdigit() and int(word) != vm.pid:
                yield int(word)

    def _names(self, pid: int, vm: VM) -> bool:
        """Whether the command line is about this VM: a path inside its directory."""
        word = vm.name if vm.is_macos else vm.id
        return bool(word) and f"/{word}/".encode() in self._read(f"{self._proc}/{pid}/cmdline")

    def _stat(self, pid: int) -> list[bytes] | None:
        fields = self._read(f"{self._proc}/{pid}/stat").rpartition(b") ")[2].split()
        return fields if len(fields) > RESIDENT_PAGES else None

    # The host

    def _node_usage(self) -> NodeUsage | None:
        times = self._read(f"{self._proc}/stat").partition(b"\n")[0].split()[1:]
        memory = _keyed(self._read(f"{self._proc}/meminfo").replace(b":", b""))
        if len(times) < 8 or b"MemTotal" not in memory or b"MemFree" not in memory:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, times[:8])  # guests are in user already
        total, used = memory[b"MemTotal"] * 1024, (memory[b"MemTotal"] - memory[b"MemFree"]) * 1024
        working_set = max(0, used - memory.get(b"Inactive(file)", 0) * 1024)
        reading = _Reading(self._clock.monotonic(), (user + nice + system + irq + softirq + steal) / TICKS)
        rate, self._last_node = reading.rate_since(self._last_node), reading
        memory_left = total - working_set
        return NodeUsage(self._clock.now(), reading.cpu_s, working_set, used, memory_left, self._booted(), rate)

    def _booted(self) -> datetime:
        """Read once: the kernel derives it from the wall clock, and would move it with every step of that."""
        if self._boot is None:
            seconds = _keyed(self._read(f"{self._proc}/stat")).get(b"btime", 0)
            self._boot = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
        return self._boot

    def _read(self, path: str) -> bytes:
        """The beginning of a small file, b"" when there is none, or none any more. Plain calls: this is the most
        frequent thing done here by far."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(descriptor, READ_BYTES)
        except OSError:  # it ended meanwhile
            return b""
        finally:
            os.close(descriptor)


class _Taking:
    """A sample that is being taken, for all who wait for it."""

    def __init__(self) -> None:
        self.done = Event()
        self.sample: Sample | None = None
        self.error: Exception | None = None


def _keyed(text: bytes) -> dict[bytes, int]:
    """Lines of a name and a number, what follows the number left out."""
    pairs = (line.split()[:2] for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _interfaces(text: bytes) -> dict[str, list[int]]:
    """The rows of a net/dev table by interface."""
    rows = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.rpartition(b":")
        columns = numbers.split()
        if len(columns) >= 16 and all(column.isdigit() for column in columns):
            rows[name.strip().decode("utf-8", "replace")] = [int(column) for column in columns]
    return rows
