"""The fake `cocoon` and `cocoon-macos` as programs: state on disk, real time, guests as processes of their own.

    FAKE_COCOON_HOME=DIR python -m simulator.fake_executables cocoon vm list -o json

`install` writes the two programs a daemon is pointed at. Any number of calls may run at once: they exclude each other
by file locks, which the kernel takes away from a call that is killed, and every document is replaced whole, so what a
killed call leaves is a state in which some other moment could have left it. In the home directory:

    cocoon/*.json    records, snapshots, images, knobs, faults    cocoon/calls.log    every call, one JSON a line
    cocoon-macos/    the same, and vms/NAME/vm.json               run/, guests/       pid files; specs, sockets, logs

A VMM or QEMU is a live guest (simulator.fake_guests) under the hypervisor's name and command line, in a session of its
own: it survives the call that started it. Where a world stands in the home directory, simulator.guest_starter makes its
process. `LiveHost(home).cocoon` has the knobs, from any process.

Imports little, because each call pays for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from simulator.fake_cocoon import FakeCocoon
from simulator.fake_macos import FakeCocoonMacos
from simulator.fake_tools import Failed, Machine, Outcome, Refusal, Storage, Tool
from simulator.telling import ask, say

__all__ = ["HOME_VARIABLE", "DiskStorage", "LiveHost", "install", "main"]

HOME_VARIABLE = "FAKE_COCOON_HOME"
LOOK_EVERY_S = 0.1  # at files somebody else may have changed
POWER_ON_S = 30.0  # on a busy machine, with others before us
POWER_OFF_GRACE_S = 5.0  # from SIGTERM to SIGKILL, as the real tool
GUEST_MODULE = "simulator.fake_guests"


class Cancelled(BaseException):
    """SIGTERM or SIGINT: clean up and go."""


class DiskStorage:
    """Documents as files below a directory; see simulator.fake_tools.Storage."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def read(self, key: str) -> Any:
        try:
            return json.loads((self._home / key).read_bytes())
        except FileNotFoundError:
            return None

    @contextmanager
    def edit(self, key: str, default: Callable[[], Any]) -> Iterator[Any]:
        with self.lock(".edit.lock"):
            document = self.read(key)
            if document is None:
                document = default()
            yield document
            self._replace(self._home / key, json.dumps(document).encode())

    def delete(self, key: str) -> None:
        path = self._home / key
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def keys(self, directory: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._home / directory) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def version(self, directory: str) -> object:
        stamps = []
        for path in sorted((self._home / directory).glob("*.json")):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            stamps.append((path.name, status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(stamps)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        with self._locked(key, fcntl.LOCK_EX):
            yield

    @contextmanager
    def share(self, key: str) -> Iterator[None]:
        with self._locked(key, fcntl.LOCK_SH):
            yield

    def locked(self, key: str) -> bool:
        try:
            with self._locked(key, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
        except BlockingIOError:
            return True

    @contextmanager
    def _locked(self, key: str, how: int) -> Iterator[None]:
        path = self._home / key
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    def append(self, key: str, entry: Mapping[str, Any]) -> None:
        path = self._log(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(descriptor)

    def entries(self, key: str) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self._log(key).read_text().splitlines()]
        except FileNotFoundError:
            return []

    def _log(self, key: str) -> Path:
        return (self._home / key).with_suffix(".log")

    @staticmethod
    def _replace(path: Path, content: bytes) -> None:
        """Whole or not at all, whenever we are killed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


class LiveHost:
    """The real machine under the fake tools; see simulator.fake_tools.Host."""

    def __init__(self, home: str | os.PathLike[str]) -> None:
        self.home = Path(home)
        self.storage: Storage = DiskStorage(self.home)
        self.rng = Random()
        self.root = str(self.home)
        self.macos_root = str(self.home / FakeCocoonMacos.PROGRAM)

    @property
    def cocoon(self) -> FakeCocoon:
        return FakeCocoon(self)

    @property
    def macos(self) -> FakeCocoonMacos:
        return FakeCocoonMacos(self)

    def now(self) -> datetime:
        return datetime.now(UTC).astimezone()  # noqa: TID251  a program of its own, in real time

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: TID251  a program of its own, in real time

    def wait_for_change(self, directory: str, version: object, seconds: float) -> bool:
        until = time.monotonic() + seconds  # noqa: TID251  a program of its own, in real time
        while self.storage.version(directory) == version:
            left = until - time.monotonic()  # noqa: TID251  a program of its own, in real time
            if left <= 0:
                return False
            self.sleep(min(left, LOOK_EVERY_S))
        return True

    def stand_still(self) -> NoReturn:
        while True:
            signal.pause()

    def die(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def power_on(self, machine: Machine) -> int:
        argv = [machine.argv[0], *self._guest_words(machine)]
        log = self.home / "guests" / f"{machine.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        pid = self._forked(argv, log) or _started(argv, log)
        pid_file = _pid_file(machine)
        pid_file.parent.mkdir(parents=True, exist_ok=True)
        pid_file.write_text(f"{pid}\n")
        return pid

    def _forked(self, argv: Sequence[str], log: Path) -> int:
        """The process that simulator.guest_starter makes; 0 where there is none, or it cannot."""
        try:
            answer = ask(self.home / "power-on.sock", {"argv": argv, "log": str(log)}, POWER_ON_S)
        except (FileNotFoundError, ConnectionError, ValueError):
            return 0
        return int(answer.get("pid", 0))

    def power_off(self, pid: int) -> None:
        if self._is_guest(pid):
            argv = self.argv_of(pid)
            say(self.home, "host", "power off", argv[argv.index("--vm") + 1], pid=pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for _ in range(round(POWER_OFF_GRACE_S / LOOK_EVERY_S)):
                if not self._is_guest(pid):
                    return
                os.kill(pid, number)
                self.sleep(LOOK_EVERY_S)

    def plug(self, name: str, mac: str, static_ip: str) -> None:
        """Live guests have no addresses but those of DHCP. One that was only just powered on does not listen yet."""
        for _ in range(round(POWER_ON_S / LOOK_EVERY_S)):
            try:
                answer = ask(self.home / "guests" / f"{name}.sock", {"plug": mac})
            except (FileNotFoundError, ConnectionError):
                self.sleep(LOOK_EVERY_S)
                continue
            if "error" in answer:
                raise Refusal(f"net: {answer['error']}")
            return
        raise Refusal("net: the guest does not answer")

    def argv_of(self, pid: int) -> tuple[str, ...]:
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return ()
        return tuple(os.fsdecode(command).split("\0")[:-1]) if state != [b"Z"] else ()

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]

    def census(self) -> object:
        return object()  # nobody tells: equal to nothing

    def _guest_words(self, machine: Machine) -> list[str]:
        words = ["-m", GUEST_MODULE, "--home", self.root, "--vm", machine.name, "--mac", machine.mac]
        words += ["--resumed"] if machine.resumed else []
        return [*words, "--os", machine.os, "--", *machine.argv[1:]]

    def _is_guest(self, pid: int) -> bool:
        """One of ours, and not a stranger that was given the pid."""
        argv = self.argv_of(pid) if pid > 0 else ()
        return GUEST_MODULE in argv and self.root in argv


def _started(argv: Sequence[str], log: Path) -> int:
    """The guest in a Python of its own, which takes long to import what it needs."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            executable=sys.executable,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=_guest_environment(),
        )
    return process.pid


def _guest_environment() -> dict[str, str]:
    """A Python that is called qemu-system-x86_64 cannot tell from its name where its library is."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "PYTHONHOME": f"{sys.base_prefix}:{sys.base_exec_prefix}"}


def _pid_file(machine: Machine) -> Path:
    """Where the hypervisor's command line says it is, or beside its API socket."""
    argv = machine.argv
    if "-pidfile" in argv:
        return Path(argv[argv.index("-pidfile") + 1])
    short = "fc" if argv[0] == "firecracker" else "ch"
    return Path(argv[argv.index("--api-socket") + 1]).with_name(f"{short}.pid")


def install(directory: Path) -> None:
    """Writes the programs `cocoon` and `cocoon-macos` into a directory that exists."""
    package = shlex.quote(str(Path(__file__).resolve().parents[1]))
    python = shlex.quote(sys.executable)
    for program in (FakeCocoon.PROGRAM, FakeCocoonMacos.PROGRAM):
        script = directory / program
        script.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={package}${{PYTHONPATH:+:$PYTHONPATH}}\n"
            f'exec {python} -m simulator.fake_executables {program} "$@"\n'
        )
        script.chmod(0o755)


def main(arguments: Sequence[str]) -> int:
    """One call: the program's name, then its arguments. Returns the exit status."""
    home = os.environ.get(HOME_VARIABLE)
    if not home or not arguments or arguments[0] not in (FakeCocoon.PROGRAM, FakeCocoonMacos.PROGRAM):
        sys.stderr.write(f"usage: {HOME_VARIABLE}=DIRECTORY {__name__} cocoon|cocoon-macos ARGUMENTS...\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _cancel)
    host = LiveHost(home)
    program, *rest = arguments
    if program == FakeCocoon.PROGRAM and FakeCocoon.goes_on(rest):
        return _stream(host.cocoon, rest)
    return _run(host.cocoon if program == FakeCocoon.PROGRAM else host.macos, rest)


def _cancel(_number: int, _frame: object) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # nothing cancels the clean-up
    raise Cancelled


def _run(tool: Tool, arguments: Sequence[str]) -> int:
    home, subject = os.environ[HOME_VARIABLE], _subject(arguments)
    told = {"verb": " ".join(arguments[:2]), "tool": tool.PROGRAM}
    say(home, "command", "begins", subject, **told)
    ending = "killed"
    try:
        code = _show(tool.run(arguments))
        ending = str(code)
        return code
    except Cancelled:
        sys.stderr.write(tool.complain("context canceled"))
        return 1
    finally:
        say(home, "command", "ends", subject, exit=ending, **told)


def _subject(arguments: Sequence[str]) -> str:
    """The VM, snapshot or image a call is about: the name it gives, else its last operand."""
    if "--name" in arguments[:-1]:
        return arguments[arguments.index("--name") + 1]
    return "" if arguments[1:2] in (["list"], ["status"], []) else arguments[-1]


def _stream(tool: FakeCocoon, arguments: Sequence[str]) -> int:
    try:
        for line in tool.stream(arguments):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    except Cancelled:
        pass
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the interpreter's last flush fail
        return 1
    except Refusal as refusal:
        return _show(Outcome(1, "", tool.complain(str(refusal))))
    except Failed as failure:
        return _show(failure.outcome)
    return 0


def _show(outcome: Outcome) -> int:
    sys.stderr.write(outcome.stderr)
    sys.stdout.write(outcome.stdout)
    sys.stdout.flush()
    return outcome.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
