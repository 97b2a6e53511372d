"""Running other people's programs: one command to its end, or one stream of lines until somebody has heard enough.

A command can hang, be missing, print without end, die of a signal, or leave a helper behind that keeps its output open
for ever. None of that may hold our hub, eat our memory or be mistaken for an answer, so everything here is bounded in
time and size and ends in `Completed` or in CommandError.

There are two kinds of commands, and they must end differently. One that only asks ends with whoever waits for it. One
that changes something may not be cut short, because a half-launched QEMU or a killed clone costs somebody a disk: it
outlives the caller, an impatient probe and even the end of this process. That is why it writes into memory files (a
pipe whose reader died would kill it at its next word), and why only the tool itself is ever signaled (a VMM it has
just started may still be in its process group).

Nothing that is secret on a command line is ever seen in an exception or a log line; nothing that is ours in the
environment is seen by the command. Called by vkcocoon_vms from many greenlets; knows no tool and no VM.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

from gevent import Greenlet, get_hub, subprocess
from gevent.event import Event
from gevent.monkey import get_original
from gevent.os import make_nonblocking, nb_read
from gevent.pool import Group

from vkcocoon_probes import Clock, SystemClock, spawn
from vkcocoon_status import ProviderFailure

__all__ = ["CommandError", "CommandRunner", "CommandStream", "Completed", "Execute", "Output", "Stream", "masked"]

MAX_OUTPUT = 32 * 1024 * 1024  # more than any honest answer
SLACK = 4 * 1024 * 1024  # a write that does not fit is refused in big pieces, so it must not fit well beyond the limit
MAX_LINE = 1024 * 1024  # of a stream
CHUNK = 65536
STDERR_TAIL = 65536  # what an exception keeps; the reason stands at the end

ASK_GRACE_S = 5.0  # from SIGTERM to SIGKILL
CHANGE_GRACE_S = 90.0  # the tool's own clean-up, which nothing can cancel, and the release of its locks
DRAIN_S = 1.0  # after the exit; a helper that inherited the pipe may keep it open for ever
SIZE_CHECK_S = 1.0  # how long a flood goes unnoticed; it fills nothing meanwhile

# systemd would take the tool's notifications for ours, and a guest has no business with our secrets.
PRIVATE_VARIABLES = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}
    | {"COCOON_MACOS_VNC_PASSWORD"}
)
SECRET_FLAGS = frozenset({"--vnc-password", "--password", "-e"})  # -e NAME=VALUE hides the value
MASK = "***"


# gevent's own close waits for the hub to wake up; a write end kept open by an idle hub is an end of file nobody sees.
_close: Callable[[int], None] = get_original("os", "close")


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ran to its end. `returncode` is negative for a death by signal."""

    returncode: int
    stdout: str
    stderr: str


class CommandError(ProviderFailure):
    """A command that could not be run, was over its limit, failed, or gave an answer nobody can read.

    `returncode` is None when there is none. Secrets are masked in `argv`, in `stderr` (the end of it) and in the text.
    """

    def __init__(self, argv: Sequence[str], returncode: int | None, stderr: str, *, why: str = "") -> None:
        self.argv = masked(argv)
        self.returncode = returncode
        self.stderr = _without(_secrets(argv), stderr[-STDERR_TAIL:])
        self.why = why
        super().__init__(self._describe())

    def _describe(self) -> str:
        command = " ".join([os.path.basename(self.argv[0]), *self.argv[1:]])
        failed = "" if self.returncode is None else f"exit {self.returncode}"
        last = (self.stderr.strip().splitlines() or [""])[-1]
        return ": ".join(part for part in (command, self.why or failed, last) if part)


# argv and a limit in seconds -> what it printed; raises CommandError when it cannot be run, is over its limit, or
# prints more than MAX_OUTPUT. A non-zero exit is an answer, not an error.
Execute = Callable[[Sequence[str], float], Completed]
# argv -> the lines it prints; ends when the command does, raises CommandError when that was a failure.
Stream = Callable[[Sequence[str]], Iterator[str]]
# The same for what it prints, byte for byte and as it comes.
Output = Callable[[Sequence[str]], Iterator[bytes]]


def masked(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line as it may be shown."""
    secrets = _secrets(argv)
    return tuple(_without(secrets, argument) for argument in argv)


def _secrets(argv: Sequence[str]) -> list[str]:
    """The values that follow, or are glued to, a flag that carries a secret."""
    found = [value for flag, value in pairwise(argv) if flag in SECRET_FLAGS]
    found += [value for flag, _, value in (argument.partition("=") for argument in argv) if flag in SECRET_FLAGS]
    return [secret for value in found if (secret := value.partition("=")[2] or value)]


def _without(secrets: Sequence[str], text: str) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------------------


_libc = ctypes.CDLL(None)  # loaded here: a child between fork and exec should load nothing
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Spawned:
    """A child of posix_spawn, with as much of a Popen as is needed here.

    A fork copies the page tables of this process and runs Python in the copy, all while nobody here is served: with
    hundreds of creates that made every probe wait. This starts a tool in a tenth of the time.
    """

    def __init__(self, argv: Sequence[str], stdout: int, stderr: int, environment: Mapping[str, str]) -> None:
        """Raises OSError, ValueError."""
        _keep_descriptors_to_ourselves()
        self.returncode: int | None = None
        self._watchers: list[Callable[[], None]] = []
        loop = get_hub().loop
        loop.install_sigchld()
        self.pid = os.posix_spawnp(
            argv[0],
            list(argv),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them, and a tool should not
        )
        # No switch since it was started: its end cannot have been collected before somebody watches for it.
        self._child = loop.child(self.pid, ref=False)  # who waits for it has a limit of its own
        self._child.start(self._ended)

    def rawlink(self, callback: Callable[[_Spawned], None]) -> None:
        """Call back in the hub when it has ended and been collected."""
        self._watchers.append(lambda: callback(self))

    def _ended(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(self._child.rstatus)
        self._child.stop()
        self._child.close()
        for watcher in self._watchers:
            watcher()


@cache
def _keep_descriptors_to_ourselves() -> None:
    """Descriptors that somebody left us at our own start; those we open are never inherited."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the one that listed them
                os.set_inheritable(int(name), False)


class _Process:
    """One started process in a session of its own. `exited` is set when it has ended and been collected."""

    def __init__(self, argv: Sequence[str], stdout: int, stderr: int, *, ends_with_us: bool = False) -> None:
        """Raises CommandError when it cannot be started. With ``ends_with_us`` the kernel ends it when this process is
        gone, however it went: nobody would read on."""
        environment = {name: value for name, value in os.environ.items() if name not in PRIVATE_VARIABLES}
        self.exited = Event()
        self._popen: Any
        try:
            if ends_with_us:
                self._popen = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            else:
                self._popen = _Spawned(argv, stdout, stderr, environment)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in an argument
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise CommandError(argv, None, "", why=f"cannot be run: {why}") from error
        self._popen.rawlink(lambda _popen: self.exited.set())

    @property
    def running(self) -> bool:
        return not self.exited.is_set()

    @property
    def returncode(self) -> int:
        return -1 if self._popen.returncode is None else self._popen.returncode

    def terminate(self, clock: Clock, grace: float, group: bool = True) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds, to the process alone or to its group; waits for the end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number, group)
            if clock.wait(self.exited, grace):  # after SIGKILL too: uninterruptible sleep may last
                return

    def _signal(self, number: int, group: bool) -> None:
        if self._popen.returncode is not None:  # collected: the pid may be somebody else's by now
            return
        try:
            os.killpg(self._popen.pid, number) if group else os.kill(self._popen.pid, number)
        except ProcessLookupError:
            pass


class _Output(Protocol):
    """Where one stream of a command goes. `end` is what the command writes to."""

    end: int
    drained: Event

    @property
    def size(self) -> int: ...
    def begin(self) -> None:
        """The command has been started."""

    def text(self) -> str: ...
    def close(self) -> None: ...


class _Pipe:
    """A pipe drained in a greenlet, so that its writer never blocks. More than MAX_OUTPUT is counted, not kept."""

    def __init__(self, clock: Clock, group: Group) -> None:
        self._clock = clock
        self._group = group
        self._kept = bytearray()
        self._reader: Greenlet[..., None] | None = None
        self._source, self.end = os.pipe()
        self.size = 0
        self.drained = Event()

    def begin(self) -> None:
        _close(self.end)
        make_nonblocking(self._source)
        self._reader = spawn(self._group, "read the output of a command", self._drain)
        # Not at the end of the reader's own function: one that is killed before it ever ran would leave it open.
        self._reader.rawlink(lambda _reader: _close(self._source))

    def _drain(self) -> None:
        while chunk := nb_read(self._source, CHUNK):
            self._keep(chunk)
            self._clock.sleep(0)  # a writer faster than us would otherwise hold the hub
        self.drained.set()

    def _keep(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size <= MAX_OUTPUT:
            self._kept += chunk
        else:
            self._kept.clear()

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        if self._reader is None:
            _close(self._source)
            _close(self.end)
        else:  # the source is closed when its reader has ended, which may still be waiting on it
            self._reader.kill(block=False)


class _Tail(_Pipe):
    """A pipe of which only the end is kept."""

    def _keep(self, chunk: bytes) -> None:
        self._kept += chunk
        del self._kept[:-STDERR_TAIL]


class _MemoryFile:
    """Output of a command that may outlive us; see the module. It cannot grow: who floods it is refused its writes,
    also when that is a helper which nobody will ever end."""

    def __init__(self) -> None:
        self.end = os.memfd_create("command output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.end, MAX_OUTPUT + SLACK)
        fcntl(self.end, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
        self.drained = Event()
        self.drained.set()

    @property
    def size(self) -> int:
        return os.lseek(self.end, 0, os.SEEK_CUR)  # the command writes through the same open file

    def begin(self) -> None:
        pass

    def text(self) -> str:
        return os.pread(self.end, min(self.size, MAX_OUTPUT), 0).decode("utf-8", "replace")

    def close(self) -> None:
        _close(self.end)


# ---------------------------------------------------------------------------------------------------------------------
# One command
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Command:
    argv: Sequence[str]
    process: _Process
    stdout: _Output
    stderr: _Output

    @property
    def outputs(self) -> tuple[_Output, _Output]:
        return self.stdout, self.stderr

    @property
    def overflowed(self) -> bool:
        return any(output.size > MAX_OUTPUT for output in self.outputs)

    def close(self) -> None:
        for output in self.outputs:
            output.close()


class CommandRunner:
    """Runs one command to its end within a limit. An instance is an `Execute`; one serves many greenlets.

    With `outlives` the command goes on when its caller is interrupted, and only its own limit ends it.
    """

    def __init__(self, clock: Clock | None = None, *, outlives: bool = False, grace: float | None = None) -> None:
        self._clock = clock or SystemClock()
        self._outlives = outlives
        self._grace = grace if grace is not None else CHANGE_GRACE_S if outlives else ASK_GRACE_S
        self._plumbing = Group()

    def __call__(self, argv: Sequence[str], limit: float) -> Completed:
        command = self._start(argv)
        try:
            self._await(command, limit)
            return Completed(command.process.returncode, command.stdout.text(), command.stderr.text())
        finally:
            if command.process.running:  # interrupted: no waiting in here
                spawn(self._plumbing, f"collect {os.path.basename(argv[0])}", self._collect, command, limit)
            else:
                command.close()

    def _start(self, argv: Sequence[str]) -> _Command:
        outputs = (self._output(), self._output())
        try:
            process = _Process(argv, outputs[0].end, outputs[1].end)
        except BaseException:
            for output in outputs:
                output.close()
            raise
        for output in outputs:
            output.begin()
        return _Command(argv, process, *outputs)

    def _output(self) -> _Output:
        return _MemoryFile() if self._outlives else _Pipe(self._clock, self._plumbing)

    def _await(self, command: _Command, limit: float) -> None:
        until = self._clock.monotonic() + limit
        while command.process.running and not command.overflowed:
            left = until - self._clock.monotonic()
            if left <= 0:
                self._terminate(command)
                raise CommandError(command.argv, None, command.stderr.text(), why=f"still running after {limit:g} s")
            self._clock.wait(command.process.exited, min(left, SIZE_CHECK_S))
        if command.overflowed:
            self._terminate(command)
            raise CommandError(command.argv, None, "", why=f"printed more than {MAX_OUTPUT // 1024 // 1024} MiB")
        until = self._clock.monotonic() + DRAIN_S
        for output in command.outputs:
            self._clock.wait(output.drained, until - self._clock.monotonic())

    def _terminate(self, command: _Command) -> None:
        command.process.terminate(self._clock, self._grace, not self._outlives)

    def _collect(self, command: _Command, limit: float) -> None:
        if not (self._outlives and self._clock.wait(command.process.exited, limit)):
            self._terminate(command)
        command.close()


class CommandStream:
    """Reads a command that runs until somebody has heard enough. An instance is a `Stream` of its lines; `output` is an
    `Output`. Leaving the iteration, by closing it or by being killed in it, ends the command.
    """

    def __init__(self, clock: Clock | None = None, *, grace: float = ASK_GRACE_S) -> None:
        self._clock = clock or SystemClock()
        self._grace = grace
        self._plumbing = Group()

    def __call__(self, argv: Sequence[str]) -> Generator[str, None, None]:
        """The lines it prints. Lines longer than MAX_LINE are dropped whole."""
        pending = bytearray()
        skipping = False  # inside a line that is too long
        with closing(self.output(argv)) as pieces:
            for piece in pieces:
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    if not skipping and len(line) <= MAX_LINE:
                        yield line.decode("utf-8", "replace")
                    skipping = False
                if len(pending) > MAX_LINE:
                    pending, skipping = bytearray(), True
        if pending and not skipping:
            yield pending.decode("utf-8", "replace")

    def output(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        """What it prints, as it comes."""
        stderr = _Tail(self._clock, self._plumbing)
        source, end = os.pipe()
        process = None
        try:
            try:
                process = _Process(argv, end, stderr.end, ends_with_us=True)
            finally:
                _close(end)
            stderr.begin()
            make_nonblocking(source)
            while piece := nb_read(source, CHUNK):
                yield piece
                self._clock.sleep(0)  # a writer faster than us would otherwise hold the hub
            if not self._clock.wait(process.exited, self._grace):
                raise CommandError(argv, None, stderr.text(), why="closed its output and did not end")
            if process.returncode:
                self._clock.wait(stderr.drained, DRAIN_S)
                raise CommandError(argv, process.returncode, stderr.text())
        finally:
            _close(source)
            stderr.close()
            if process is not None and process.running:
                spawn(self._plumbing, "end a stream", process.terminate, self._clock, self._grace)
