"""The two command lines that own the VMs of this host: `cocoon` (microVMs) and `cocoon-macos` (macOS under QEMU).

They are separate programs of several ages, whose only answers are an exit status, a JSON document and a sentence on
stderr. This room says what to ask and what the answers prove:

- Only a tool that ran, failed by its own decision and said so in its own words proves that a VM is gone (VMNotFound). A
  time limit, a signal, a missing binary, garbage on stdout: a plain CommandError, which proves nothing.
- A command that changes something runs in a greenlet of its own: interrupting whoever waits for it (a probe's bound, a
  deleted pod, a shutdown) interrupts the waiting and never the command.
- At most `max_processes` commands run at once, and changes never take the last two places: a queue of slow clones must
  not keep anybody from asking whether a VM still lives.
- Records are read leniently (unknown keys, missing keys, wrong types) and answers strictly (the VM that was asked
  about, whole JSON or nothing).

Called by the provider and the macOS room from many greenlets. Knows no pod and no Kubernetes. The seam for tests and
simulations is `Execute` (and `Stream`): given a function of that form, no process is started at all.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import structlog
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group

from vkcocoon_commands import CommandError, CommandRunner, CommandStream, Completed, Execute, Output, Stream, masked
from vkcocoon_probes import Clock, SystemClock, spawn

__all__ = [
    "MACOS_ID",
    "VM",
    "CloneSpec",
    "CocoonCLI",
    "CocoonMacosCLI",
    "CommandError",
    "Completed",
    "Execute",
    "MacosSpec",
    "NameTaken",
    "Nic",
    "Output",
    "Process",
    "RunSpec",
    "Snapshot",
    "SnapshotInUse",
    "SnapshotNotFound",
    "Stream",
    "VMEvent",
    "VMNotFound",
    "read_process",
]

MAX_DOCUMENT = 8 * 1024 * 1024  # about 5 000 VM records; parsing more would hold every greenlet for over 100 ms
MACOS_ID = "qemu-"  # and its name: the id of a macOS guest, which its tool has none for

ASK_S = 30.0  # inspect, list: a read of the tool's own database
POWER_S = 300.0  # start, stop, rm; rm waits for a create of the same VM that is still running
CREATE_S = 300.0  # run, clone, and QEMU launches
SAVE_S = 900.0  # a snapshot writes the guest's memory: about 2 s per GiB
PULL_S = 1800.0
RELEASE_S = 30.0  # how long to wait for a snapshot that a clone still reads from
RELEASE_PAUSE_S = 0.5

T = TypeVar("T")

log = structlog.get_logger()


class VMNotFound(CommandError):
    """The tool ran, and said that there is no such VM (or, for macOS, no record of it)."""


class NameTaken(CommandError):
    """The tool ran, and said that there is a VM of that name already."""


class SnapshotNotFound(CommandError):
    """The tool ran, and said that there is no such snapshot."""


class SnapshotInUse(CommandError):
    """The tool ran, and said that somebody still reads from this snapshot."""


# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nic:
    """One network card as the tool recorded it. An empty `ip` means DHCP, whatever else is known (L9)."""

    mac: str = ""
    tap: str = ""
    ip: str = ""
    gateway: str = ""
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class VM:
    """One VM as its tool described it. For a macOS guest `id` is MACOS_ID and its name, `hypervisor` is `qemu`, `state`
    is computed from its process, and `vnc` is the display number, -1 = off."""

    id: str
    name: str
    state: str = ""
    hypervisor: str = ""
    pid: int = 0
    nics: tuple[Nic, ...] = ()
    vnc: int = -1
    disk: str = ""

    @property
    def mac(self) -> str:
        return self.nics[0].mac if self.nics else ""

    @property
    def static_ip(self) -> str:
        """The address of NIC 0 when the tool assigned one; "" when it comes by DHCP."""
        return self.nics[0].ip if self.nics else ""

    @property
    def running(self) -> bool:
        """Exactly `running`: `stopped (stale)`, `creating` and whatever comes next are not."""
        return self.state == "running"

    @property
    def is_macos(self) -> bool:
        return self.hypervisor == "qemu"


@dataclass(frozen=True, slots=True)
class Snapshot:
    id: str
    name: str
    image: str = ""
    image_digest: str = ""
    hypervisor: str = ""


@dataclass(frozen=True, slots=True)
class VMEvent:
    """One line of the event stream. `kind` is ADDED, MODIFIED or DELETED. A DELETED alone proves nothing: the tool
    sends one for every VM when it could not read its list."""

    kind: str
    vm: VM


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Arguments of `vm run`. Sizes in bytes; zero and empty mean the tool's default and are not passed."""

    name: str
    image: str
    cpu: int = 0
    memory: int = 0
    storage: str = ""
    network: str = ""
    windows: bool = False
    firecracker: bool = False
    no_direct_io: bool = False
    cpu_weight: int = 0
    cpu_quota_us: int = 0
    cpu_period_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneSpec:
    """Arguments of `vm clone`: exactly one of `snapshot` and `from_dir`. `nics` None keeps the snapshot's number."""

    name: str
    snapshot: str = ""
    from_dir: str = ""
    network: str = ""
    no_direct_io: bool = False
    restore_mode: str = ""
    firecracker: bool = False
    pull: bool = False
    nics: int | None = None
    cpu_weight: int = 0
    cpu_quota_us: int = 0
    cpu_period_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MacosSpec:
    """Arguments of `cocoon-macos vm run`. `memory_mib` in MiB, `storage` in bytes (0 = the image's), `cpu` even."""

    name: str
    image: str
    cpu: int = 4
    memory_mib: int = 8192
    storage: int = 0
    vnc: int = -1


# ---------------------------------------------------------------------------------------------------------------------
# Command lines
# ---------------------------------------------------------------------------------------------------------------------


class _Job(Generic[T]):
    """Work that goes on in a greenlet of its own, whatever happens to those who wait for it."""

    def __init__(self, clock: Clock, group: Group, name: str, work: Callable[[], T]) -> None:
        self._clock = clock
        self._done = Event()
        self._value: list[T] = []
        self._error: BaseException | None = None
        spawn(group, name, self._run, work)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._value.append(work())
        except BaseException as error:  # it belongs to those who wait; who waits for one that is killed ends with it
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._done.set()

    def result(self) -> T:
        """What the work returned or raised, once it has."""
        self._clock.wait(self._done, None)
        if self._error is not None:
            raise self._error
        return self._value[0]


class _CommandLine:
    """What both tools share: places for processes, the two kinds of commands, and the reading of failures."""

    # What the tool says about what it has and has not, and what that proves. Searched in stderr, whatever the case.
    SAYINGS: Sequence[tuple[re.Pattern[str], type[CommandError]]] = ()

    def __init__(self, binary: str, execute: Execute | None, max_processes: int, clock: Clock | None) -> None:
        self._binary = binary
        self._clock = clock or SystemClock()
        self._run_question: Execute = execute or CommandRunner(self._clock)
        self._run_change: Execute = execute or CommandRunner(self._clock, outlives=True)
        self._places = BoundedSemaphore(max(1, max_processes))
        self._places_for_changes = BoundedSemaphore(max(1, max_processes - 2))
        self._jobs = Group()
        self._pulls: dict[tuple[str, ...], _Job[None]] = {}

    def observe(self, around: Callable[[Execute], Execute]) -> None:
        """From now on every command goes through what ``around`` makes of its runner."""
        self._run_question, self._run_change = around(self._run_question), around(self._run_change)

    def _ask(self, *arguments: str) -> Completed:
        """Runs a command that only asks. Raises CommandError or what SAYINGS says."""
        return self._succeeded(arguments, self._question(arguments, ASK_S))

    def _question(self, arguments: Sequence[str], limit: float) -> Completed:
        with self._places:
            return self._timed(self._run_question, arguments, limit)

    def _change(self, *arguments: str, limit: float) -> Completed:
        """Runs a command that changes something, to its end. Raises CommandError or what SAYINGS says."""

        def command() -> Completed:
            with self._places_for_changes, self._places:
                return self._timed(self._run_change, arguments, limit)

        return self._succeeded(arguments, self._job(" ".join(arguments[:2]), command).result())

    def _job(self, name: str, work: Callable[[], T]) -> _Job[T]:
        return _Job(self._clock, self._jobs, f"{os.path.basename(self._binary)} {name}", work)

    def _timed(self, execute: Execute, arguments: Sequence[str], limit: float) -> Completed:
        argv = self._argv(arguments)
        began = self._clock.monotonic()
        try:
            completed = execute(argv, limit)
        except CommandError as error:
            log.warning("command did not end by itself", command=masked(argv), after=self._since(began), why=error.why)
            raise
        log.debug("command ended", command=masked(argv), after=self._since(began), returncode=completed.returncode)
        return completed

    def _since(self, began: float) -> float:
        return round(self._clock.monotonic() - began, 3)

    def _argv(self, arguments: Sequence[str]) -> list[str]:
        return [self._binary, *arguments]

    def _succeeded(self, arguments: Sequence[str], completed: Completed) -> Completed:
        if completed.returncode == 0:
            return completed
        raise self._explained(CommandError(self._argv(arguments), completed.returncode, completed.stderr))

    def _explained(self, error: CommandError) -> CommandError:
        """The same error as what SAYINGS makes of it."""
        # One that was killed has decided nothing, whatever it managed to print.
        kinds = self.SAYINGS if (error.returncode or 0) > 0 else ()
        kind = next((kind for pattern, kind in kinds if pattern.search(error.stderr)), None)
        return kind(error.argv, error.returncode, error.stderr) if kind else error

    def _operand(self, text: str) -> str:
        """A name that comes from a pod must not turn into a flag."""
        if not text or text.startswith("-"):
            raise CommandError([self._binary], None, "", why=f"refused: {text!r} is not a name")
        return text

    def _document(self, arguments: Sequence[str], completed: Completed) -> Any:
        """The JSON a command printed. Raises CommandError for anything that is not exactly one document."""
        text = completed.stdout
        if len(text) > MAX_DOCUMENT:
            self._unreadable(arguments, f"{len(text)} characters are too many")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._unreadable(arguments, f"{error}: {text[:60]!r}" if text.strip() else "empty")

    def _unreadable(self, arguments: Sequence[str], what: str) -> NoReturn:
        raise CommandError(self._argv(arguments), 0, "", why=f"unreadable answer: {what}")

    def _pull(self, arguments: Sequence[str]) -> None:
        self._change(*arguments, limit=PULL_S)

    def _pull_once(self, key: tuple[str, ...], pull: Callable[[], None]) -> None:
        """Callers that want the same thing at the same time share one pull and how it ends."""

        def work() -> None:
            try:
                pull()
            finally:
                del self._pulls[key]

        if key not in self._pulls:
            self._pulls[key] = self._job(" ".join(key), work)
        self._pulls[key].result()


class CocoonCLI(_CommandLine):
    """The `cocoon` command line. Every method may raise CommandError; those about one VM or snapshot raise VMNotFound
    or SnapshotNotFound when the tool says that it does not exist, those that make a VM raise NameTaken when it says
    that there is one of that name. `ref` is a full id or an exact name."""

    SAYINGS = (
        (re.compile(r"\b(vm not found|no such vm)\b", re.IGNORECASE), VMNotFound),
        (re.compile(r"(?=.*name).*already exists", re.IGNORECASE | re.DOTALL), NameTaken),
        (re.compile(r"\b(snapshot not found|no such snapshot)\b", re.IGNORECASE), SnapshotNotFound),
    )
    NAME_TAKEN = re.compile(r"snapshot name .*already (exists|in use)", re.IGNORECASE)
    HOLDER = re.compile(r"(?:already in use|held) by ([A-Z2-7]{26})\b")
    LEASED = re.compile(r"is in use by an active", re.IGNORECASE)
    GONE_BUT_UNTIDY = re.compile(r"vm\(s\) deleted but network cleanup failed", re.IGNORECASE)

    def __init__(
        self,
        binary: str,
        *,
        execute: Execute | None = None,
        stream: Stream | None = None,
        output: Output | None = None,
        max_processes: int = 8,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(binary, execute, max_processes, clock)
        commands = CommandStream(self._clock)
        self.on_event: Callable[[VMEvent], None] = lambda event: None  # told of each; must not switch greenlets
        self._stream = stream or commands
        self._output = output or commands.output

    def run(self, spec: RunSpec) -> VM:
        """Creates and starts a VM from an image that is already pulled."""
        return self._created(spec.name, *_run_arguments(spec), self._operand(spec.image))

    def clone(self, spec: CloneSpec) -> VM:
        """Creates and starts a VM from a snapshot, with fresh MAC addresses."""
        source = ["--from-dir", spec.from_dir] if spec.from_dir else [self._operand(spec.snapshot)]
        return self._created(spec.name, *_clone_arguments(spec), *source)

    def start(self, ref: str) -> None:
        """Boots a stopped, stale or failed VM in place: same disks, same MAC. Already running is success."""
        self._change("vm", "start", self._operand(ref), limit=POWER_S)

    def stop(self, ref: str, force: bool = False) -> None:
        self._change("vm", "stop", *_flag("--force", force), self._operand(ref), limit=POWER_S)

    def remove(self, ref: str) -> None:
        """Stops and deletes a VM. One that is already gone is success."""
        try:
            self._change("vm", "rm", "--force", self._operand(ref), limit=POWER_S)
        except VMNotFound:
            pass
        except CommandError as error:
            if not self.GONE_BUT_UNTIDY.search(error.stderr) or self._exists(ref):
                raise
            log.warning("VM removed, its network was not", vm=ref, error=str(error))

    def inspect(self, ref: str) -> VM:
        """The VM of exactly that id or name. The tool itself also matches the beginning of an id; we do not."""
        arguments = ("vm", "inspect", self._operand(ref))
        vm = _parse_vm(self._document(arguments, self._ask(*arguments)))
        if vm is None or ref not in (vm.id, vm.name):
            self._unreadable(arguments, "not a record of that VM")
        return vm

    def list(self) -> list[VM]:
        """All VMs, oldest first, half-made ones (`creating`) included. Empty in any of the tool's spellings."""
        arguments = ("vm", "list", "-o", "json")
        completed = self._ask(*arguments)
        if completed.stdout.strip() in ("", "No VMs found."):
            return []
        document = self._document(arguments, completed)
        if not isinstance(document, list) and document is not None:
            self._unreadable(arguments, "not a list")
        return [vm for vm in map(_parse_vm, document or ()) if vm]

    def snapshot_save(self, name: str, ref: str) -> None:
        """Snapshots a running VM under `name`; an older (or half-made) snapshot of that name makes room."""
        arguments = ("snapshot", "save", "--name", name, self._operand(ref))
        try:
            self._change(*arguments, limit=SAVE_S)
        except CommandError as error:
            if not self.NAME_TAKEN.search(error.stderr):
                raise
            holder = self.HOLDER.search(error.stderr)
            self.snapshot_remove(holder[1] if holder else name)
            self._change(*arguments, limit=SAVE_S)

    def snapshot_inspect(self, name: str) -> Snapshot:
        arguments = ("snapshot", "inspect", self._operand(name))
        snapshot = _parse_snapshot(self._document(arguments, self._ask(*arguments)))
        if snapshot is None:
            self._unreadable(arguments, "not a record of a snapshot")
        return snapshot

    def snapshots(self) -> Sequence[Snapshot]:
        """All finished snapshots. Empty in any of the tool's spellings."""
        arguments = ("snapshot", "list", "-o", "json")
        completed = self._ask(*arguments)
        if completed.stdout.strip() in ("", "No snapshots found."):
            return []
        document = self._document(arguments, completed)
        if not isinstance(document, list) and document is not None:
            self._unreadable(arguments, "not a list")
        return [snapshot for snapshot in map(_parse_snapshot, document or ()) if snapshot]

    def snapshot_remove(self, name: str, patience: float = RELEASE_S) -> None:
        """Deletes a snapshot; already gone is success. Waits for a clone that still reads from it, up to ``patience``
        seconds; then raises SnapshotInUse."""
        until = self._clock.monotonic() + patience
        while True:
            try:
                self._change("snapshot", "rm", self._operand(name), limit=POWER_S)
                return
            except SnapshotNotFound:
                return
            except CommandError as error:
                if not self.LEASED.search(error.stderr):
                    raise
                if self._clock.monotonic() >= until:
                    raise SnapshotInUse(error.argv, error.returncode, error.stderr) from error
            self._clock.sleep(RELEASE_PAUSE_S)

    def image_pull(self, ref: str, force: bool = False) -> None:
        """Makes an image local; idempotent. Callers that want the same image at the same time share one pull."""
        arguments = ("image", "pull", *_flag("--force", force), self._operand(ref))
        self._pull_once(arguments, lambda: self._pull(arguments))

    def events(self) -> Iterator[VMEvent]:
        """One subscription: an ADDED for every VM there is, in no order, then what changes. Ends when the command
        ends; torn, overlong and nameless lines are skipped. Raises CommandError when it cannot start or fails."""
        for line in self._stream(self._argv(("vm", "status", "--event", "--format", "json"))):
            if event := _parse_event(line):
                self.on_event(event)
                yield event

    def nics(self, ref: str, number: int) -> None:
        """Hot-plugs or removes network cards at the tail; one that is added has a new MAC."""
        self._change("vm", "net", "--nics", str(number), self._operand(ref), limit=POWER_S)

    def reconcile_stale_create(self, ref: str) -> str:
        """What became of a record left in `creating`: collected, busy, not-creating or not-found."""
        arguments = ("vm", "reconcile-stale-create", self._operand(ref), "--output", "json")
        document = self._document(arguments, self._change(*arguments, limit=POWER_S))
        outcome = _text(document.get("outcome")) if isinstance(document, dict) else ""
        if not outcome:
            self._unreadable(arguments, "no outcome")
        return outcome

    def logs(self, ref: str, *, follow: bool = False, tail: int | None = None) -> Iterator[bytes]:
        """The VMM's own log since its last start (the guest's is not available), in pieces as they come: the last
        `tail` lines, None for all of them, and with `follow` whatever is added, without end. Leaving the iteration ends
        the command. Not counted among the processes: who watches logs must not keep VMs from starting."""
        ref = self._operand(ref)
        if tail == 0:
            return self._new_logs(ref) if follow else iter(())
        return self._logs(ref, follow, tail or 0)

    def _logs(self, ref: str, follow: bool, tail: int) -> Iterator[bytes]:
        arguments = ("vm", "logs", *_flag("-f", follow), *_option("--tail", tail), ref)
        try:
            yield from self._output(self._argv(arguments))
        except CommandError as error:
            raise self._explained(error) from None

    def _new_logs(self, ref: str) -> Iterator[bytes]:
        """To the tool, no last lines are all lines. So what there is of the last line is left out of what follows it;
        when it is no longer the last one by then, nothing is left out."""
        last = b"".join(self._logs(ref, False, 1))
        head, beginning = b"", True
        for piece in self._logs(ref, True, 1):
            if beginning:
                head += piece
                if len(head) < len(last) and last.startswith(head):
                    continue
                piece, beginning = head.removeprefix(last), False
            if piece:
                yield piece

    def exec(
        self, ref: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, limit: float = ASK_S
    ) -> Completed:
        """Runs a command inside the guest, without stdin. Its exit status is in the result; failures of the tool
        itself also look like exit 1, with `Error: exec:` on stderr."""
        variables = [part for name in sorted(env or {}) for part in ("-e", f"{name}={(env or {})[name]}")]
        return self._question(("vm", "exec", *variables, self._operand(ref), "--", *command), limit)

    def _created(self, name: str, *arguments: str) -> VM:
        completed = self._change(*arguments, limit=CREATE_S)
        vm = _parse_vm(self._document(arguments, completed))
        if vm is None:
            self._unreadable(arguments, "not a record of a VM")
        if vm.running and vm.pid:
            return vm
        try:  # the tool prints what it knew before the start when it could not read the record again
            return self.inspect(vm.id)
        except CommandError as error:
            log.warning("fresh VM could not be inspected", vm=name, id=vm.id, error=str(error))
            return vm

    def _exists(self, ref: str) -> bool:
        try:
            self.inspect(ref)
        except VMNotFound:
            return False
        return True


class CocoonMacosCLI(_CommandLine):
    """The `cocoon-macos` command line: one record and one QEMU per VM name, no daemon, no events.

    VNC is given again at every start and only together with a password; without `vnc_password` it is off.
    """

    SAYINGS = ((re.compile(r"\bvm .*already exists", re.IGNORECASE), NameTaken),)
    IMAGE_MISSING = re.compile(r"\bimage not found\b", re.IGNORECASE)

    def __init__(
        self,
        binary: str,
        *,
        execute: Execute | None = None,
        processes: Callable[[int], Process | None] | None = None,
        vnc_password: str = "",
        max_processes: int = 8,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(binary, execute, max_processes, clock)
        self._processes = processes or read_process
        self._vnc_password = vnc_password
        self._simulated = execute is not None

    def list(self) -> list[VM]:
        """All VMs, also those that do not run; none where the tool is not installed."""
        if not self._simulated and shutil.which(self._binary) is None:
            return []
        arguments = ("vm", "list", "-o", "json")
        completed = self._ask(*arguments)
        if not completed.stdout.strip():
            return []
        document = self._document(arguments, completed)
        if not isinstance(document, list) and document is not None:
            self._unreadable(arguments, "not a list")
        records = [_mapping(record) for record in document or ()]
        return [self._shown(record) for record in records if _text(record.get("name"))]

    def inspect(self, name: str) -> VM:
        """The record of that name; `state` says what its process says, not what the record remembers. VMNotFound only
        when the tool names this very record file as missing."""
        arguments = ("vm", "inspect", self._operand(name))
        with self._saying_gone(name):
            completed = self._ask(*arguments)
        document = self._document(arguments, completed)
        if not isinstance(document, dict) or _text(document.get("name")) != name:
            self._unreadable(arguments, "not the record of that VM")
        return self._shown(document)

    def run(self, spec: MacosSpec) -> VM:
        """Makes a record and launches QEMU; refused by the tool while a record of that name exists (NameTaken)."""
        storage = ("--storage", str(spec.storage)) if spec.storage else ()
        arguments = ["vm", "run", "--name", spec.name, "--cpus", str(spec.cpu), "--memory", str(spec.memory_mib)]
        arguments += [*self._vnc(spec.vnc), *storage, "--exit-on-reboot", "--random-smbios", "--net", "cni"]
        self._change(*arguments, self._operand(spec.image), limit=CREATE_S)
        return self.inspect(spec.name)

    def start(self, name: str, vnc: int = -1) -> None:
        """Boots the existing record in place, or adopts its QEMU when that still runs."""
        with self._saying_gone(name):
            self._change("vm", "start", *self._vnc(vnc), self._operand(name), limit=CREATE_S)

    def remove(self, name: str) -> None:
        """Ends the QEMU and deletes record and disk. The tool calls an absent VM success; every failure is one: its
        "no such file" may as well come from a network teardown that left the guest in place."""
        self._change("vm", "rm", self._operand(name), limit=POWER_S)

    def ensure_image(self, ref: str) -> None:
        """Makes an image local. Callers that want the same image at the same time share one pull."""
        arguments = ("image", "pull", self._operand(ref))

        def pull() -> None:
            if self._has_image(ref):
                return
            self._pull(arguments)
            if not self._has_image(ref):
                raise CommandError(self._argv(arguments), 0, "", why="pulled, and still not there")

        self._pull_once(arguments, pull)

    def _shown(self, record: Mapping[str, Any]) -> VM:
        return _parse_macos(record, "running" if self.alive(_parse_macos(record)) else "stopped")

    def alive(self, vm: VM) -> bool:
        """Whether the recorded pid is this VM's QEMU, and running (M1). Raises CommandError when nobody can tell: who
        has no descriptor left to look with must not take the guest for dead."""
        try:
            process = self._processes(vm.pid) if vm.pid > 0 else None
        except OSError as error:
            raise CommandError((f"process {vm.pid}",), None, "", why=f"cannot be read: {error.strerror}") from error
        return process is not None and _is_qemu_of(process, vm)

    @contextmanager
    def _saying_gone(self, name: str) -> Iterator[None]:
        """Tells "there is no record of this VM" apart from every other failure: the tool must have failed by itself
        because the record file of exactly this VM does not exist."""
        try:
            yield
        except CommandError as error:
            record = rf"/{re.escape(name)}/vm\.json\W{{1,3}}no such file or directory"
            if (error.returncode or 0) > 0 and re.search(record, error.stderr, re.IGNORECASE):
                raise VMNotFound(error.argv, error.returncode, error.stderr) from error
            raise

    def _has_image(self, ref: str) -> bool:
        try:
            self._ask("image", "inspect", ref)
        except CommandError as error:
            if error.returncode == 1 and self.IMAGE_MISSING.search(error.stderr):
                return False
            raise
        return True

    def _vnc(self, display: int) -> tuple[str, ...]:
        if display < 0 or not self._vnc_password:
            return ()
        return ("--vnc", str(display), "--vnc-password", self._vnc_password)


def _flag(name: str, given: bool) -> tuple[str, ...]:
    return (name,) if given else ()


def _run_arguments(spec: RunSpec) -> list[str]:
    arguments = ["vm", "run", "--output", "json", *_option("--name", spec.name), *_option("--cpu", spec.cpu)]
    arguments += [*_cpu_policy(spec), *_option("--memory", spec.memory), *_option("--storage", spec.storage)]
    arguments += [*_option("--network", spec.network), *_flag("--windows", spec.windows)]
    return [*arguments, *_flag("--fc", spec.firecracker), *_flag("--no-direct-io", spec.no_direct_io)]


def _clone_arguments(spec: CloneSpec) -> list[str]:
    arguments = ["vm", "clone", "--output", "json", *_option("--name", spec.name), *_option("--network", spec.network)]
    # An exported directory may rest on layers this host has never seen.
    arguments += [*_flag("--no-direct-io", spec.no_direct_io), *_flag("--pull", spec.pull or bool(spec.from_dir))]
    if not spec.firecracker:  # it can neither choose how memory comes back nor how many NICs there are
        arguments += _option("--restore-mode", spec.restore_mode)
        arguments += ["--nics", str(spec.nics)] if spec.nics is not None else []
    return [*arguments, *_cpu_policy(spec)]


def _cpu_policy(spec: RunSpec | CloneSpec) -> list[str]:
    policy = (("--cpu-weight", spec.cpu_weight), ("--cpu-quota-us", spec.cpu_quota_us))
    return [part for name, value in (*policy, ("--cpu-period-us", spec.cpu_period_us)) for part in _option(name, value)]


def _option(name: str, value: str | int) -> list[str]:
    return [name, str(value)] if value else []


# ---------------------------------------------------------------------------------------------------------------------
# Reading records
# ---------------------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """A string that can go on into headers, log lines and file names; anything else is as good as absent."""
    return value if isinstance(value, str) and value.isprintable() else ""


def _integer(value: Any, default: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_vm(record: Any) -> VM | None:
    """None for what is no record of a VM: not an object, or without an id."""
    record = _mapping(record)
    if not (identifier := _text(record.get("id"))):
        return None
    cards = record.get("network_configs")
    return VM(
        id=identifier,
        name=_text(_mapping(record.get("config")).get("name")),
        state=_text(record.get("state")),
        hypervisor=_text(record.get("hypervisor")),
        pid=_integer(record.get("pid")),
        nics=tuple(_parse_nic(_mapping(card)) for card in cards) if isinstance(cards, list) else (),
    )


def _parse_snapshot(record: Any) -> Snapshot | None:
    """None for what is no record of a snapshot."""
    record = _mapping(record)
    if not (identifier := _text(record.get("id"))):
        return None
    image, digest = _text(record.get("image")), _text(record.get("image_digest"))
    return Snapshot(identifier, _text(record.get("name")), image, digest, _text(record.get("hypervisor")))


def _parse_nic(card: Mapping[str, Any]) -> Nic:
    network = _mapping(card.get("network"))
    address, gateway = _text(network.get("ip")), _text(network.get("gateway"))
    return Nic(_text(card.get("mac")), _text(card.get("tap")), address, gateway, _integer(network.get("prefix")))


def _parse_event(line: str) -> VMEvent | None:
    try:
        event = _mapping(json.loads(line))
    except (ValueError, RecursionError):
        if line.strip():
            log.debug("event line is not JSON", line=line[:200])
        return None
    record = _mapping(event.get("vm"))
    name = _text(_mapping(record.get("config")).get("name"))
    vm = _parse_vm(record) or (VM("", name, _text(record.get("state"))) if name else None)
    kind = _text(event.get("event"))
    return VMEvent(kind, vm) if vm and kind else None


def _parse_macos(record: Mapping[str, Any], state: str = "") -> VM:
    name, mac, tap = (_text(record.get(key)) for key in ("name", "mac", "tap"))
    return VM(
        id=f"{MACOS_ID}{name}",
        name=name,
        state=state,
        hypervisor="qemu",
        pid=_integer(record.get("pid")),
        nics=(Nic(mac, tap),) if mac or tap else (),
        vnc=_integer(record.get("vnc"), -1),
        disk=_text(record.get("disk")),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Process identity
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc shows it. `state` is its one letter; `argv` is empty for a zombie."""

    pid: int
    state: str
    argv: tuple[str, ...] = ()


def read_process(pid: int) -> Process | None:
    """The process of that pid, or None when there is none. Raises OSError when that cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return None
        raise
    # The name in parentheses is the process's own choice, spaces and parentheses included.
    state = stat.rpartition(b")")[2].split()[:1]
    arguments = command.removesuffix(b"\0").split(b"\0") if command else []
    return Process(pid, os.fsdecode(b"".join(state)), tuple(os.fsdecode(argument) for argument in arguments))


def _is_qemu_of(process: Process, vm: VM) -> bool:
    """Not a zombie, a qemu-system-*, and its command line names a path inside this VM's directory. The slash behind
    the directory keeps `foo` apart from `foo-clone`; what stands before it must not be part of a longer path."""
    if process.state in ("Z", "X", "x") or not process.argv:
        return False
    if not os.path.basename(process.argv[0]).startswith("qemu-system-"):
        return False
    # A record without a disk still says where it lives: the layout below the state directory never changed.
    anywhere, here = rf"/vms/{re.escape(vm.name)}/", rf"(?<![\w./-]){re.escape(os.path.dirname(vm.disk))}/"
    directory = here if vm.disk else anywhere
    return any(re.search(directory, argument) for argument in process.argv[1:])
