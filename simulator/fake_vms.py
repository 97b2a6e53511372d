"""VMs without a hypervisor: a host in one process and in virtual time, with guests that boot, get addresses and answer.

`FakeHost` is what the fake command lines run on here (see simulator.fake_tools): it keeps their state in memory, has a
table of processes, and powers guests on and off. A `Guest` follows its `GuestSpec` from power-on: it boots, asks for a
lease, comes up, opens ports; a test or a scenario interferes through its methods. The fake network (`pinger`,
`tcp_accepts`, `ssh_banner`) answers for guests that are up, with the errors of vkcocoon_net, at exact instants.

    host.cocoon.execute, host.macos.execute, host.stream     for CocoonCLI and CocoonMacosCLI
    host.processes                                           for CocoonMacosCLI
    host.pinger, host.tcp_accepts, host.ssh_banner           for the provider's probes

The same command lines as programs, with guests as processes: simulator.fake_executables, also reachable as
`python -m simulator.fake_vms cocoon ...` and through `install_executables`.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from gevent.event import Event

from simulator.chance import Chance, Draw
from simulator.clock import VirtualClock
from simulator.fake_cocoon import FakeCocoon
from simulator.fake_leases import FakeCocoonNet
from simulator.fake_macos import QEMU, FakeCocoonMacos
from simulator.fake_tools import Failed, Fault, Killed, Machine, Refusal, Step, Storage, Tool
from simulator.guest_spec import GuestSpec
from vkcocoon_commands import MAX_OUTPUT, CommandError, Completed
from vkcocoon_net import PingError, PingTimeout, Remaining, is_unicast_ipv4
from vkcocoon_probes import ProbeTimeout
from vkcocoon_vms import Process

__all__ = ["FakeHost", "Guest", "GuestSpec", "Hold", "install_executables"]

Record = Callable[[str, str, str, dict[str, Any]], None]

SSH_PORT = 22
FIRST_PID = 4001
RENEW_S = 43_200.0  # half of cocoon-net's lease time
ASK_AGAIN_S = 4.0  # a DHCP client nobody answered
OUTPUT_LIMIT_S = 30.0  # for what prints and ends


# ---------------------------------------------------------------------------------------------------------------------
# Guests
# ---------------------------------------------------------------------------------------------------------------------


class Guest:
    """One VM's inside, across its reboots and restarts. What a method changes holds until the next boot."""

    def __init__(self, host: FakeHost, machine: Machine, spec: GuestSpec) -> None:
        self._host = host
        self._machine = machine
        self.name = machine.name
        self._stop = Event()
        self._stop.set()
        self.spec = spec
        self.pid = 0  # 0 = powered off
        self.ip = ""  # the address it answers on; "" = not up
        self.echo = False  # answers echoes (once it is up)
        self.mute = False  # answers nothing at all: a hung guest
        self.boots = 0
        self.latency_s = spec.latency_s
        self.loss = spec.loss
        self.flood = spec.flood
        self._ports: dict[int, str | None] = {}  # port -> what it says to who connects; None = it is silent
        self._banner: str | None = None

    @property
    def mac(self) -> str:
        return self._machine.mac

    @property
    def ports(self) -> tuple[int, ...]:
        """What accepts connections."""
        return tuple(sorted(self._ports))

    # What a test does to it

    def silent(self, silent: bool = True) -> None:
        """Hang, or come back: echoes, connections and banners alike."""
        self._note("silent" if silent else "speaks")
        self.mute = silent

    def open(self, port: int, says: str | None = None) -> None:
        """Accept on `port`, and say that much to who connects (None: nothing)."""
        self._ports[port] = self._banner if port == SSH_PORT and says is None else says

    def close(self, port: int) -> None:
        """Refuse on `port`."""
        self._ports.pop(port, None)

    def banner(self, text: str | None) -> None:
        """What port 22 says from now on; None: it accepts and is silent. Lines are separated by newlines."""
        self._banner = text
        if SSH_PORT in self._ports:
            self._ports[SSH_PORT] = text

    def renumber(self, ip: str) -> None:
        """It takes another address, as after a renewal that brought a new one."""
        self._use(ip)

    def crash(self) -> None:
        """The hypervisor's process dies. Nobody is told."""
        self._note("crash")
        self._host.end_process(self.pid)

    def reboot(self) -> None:
        """From inside: a microVM boots again in its process; a macOS guest's QEMU exits, and stays down."""
        self._note("reboot")
        if self._machine.os == "macos":
            self._host.end_process(self.pid)
        else:
            self._down()
            self._boot(self.spec.boot_s)

    # What the host does to it

    def power_on(self, machine: Machine, pid: int) -> None:
        self._machine = machine
        self.pid = pid
        resume = self.spec.boot_s if self.spec.resume_s is None else self.spec.resume_s
        self._boot(resume if machine.resumed else self.spec.boot_s)

    def power_off(self) -> None:
        self.pid = 0
        self._down()

    def plug(self, mac: str, static_ip: str) -> None:
        """Its network card is another one, or gone ("" then); the address was that of the card."""
        if mac != self.mac and self.pid:
            self._machine = replace(self._machine, mac=mac, static_ip=static_ip)
            self._down()
            self._begin(0.0)

    # What it does by itself

    def _boot(self, seconds: float) -> None:
        self.boots += 1
        self.latency_s, self.loss, self.flood = self.spec.latency_s, self.spec.loss, self.spec.flood
        self._begin(seconds)

    def _begin(self, seconds: float) -> None:
        self._stop = Event()
        self._host.clock.spawn(f"guest {self.name}", self._live, self._stop, seconds)

    def _down(self) -> None:
        self._stop.set()
        self._use("")
        self._ports.clear()
        self.echo = False
        self.mute = False

    def _live(self, stop: Event, boot_s: float) -> None:
        wait = self._host.clock.wait
        if wait(stop, boot_s) or not self._get_address(stop):
            return
        self._come_up(stop)
        while not wait(stop, self._host.renew_s):
            if not self._machine.static_ip:
                self._use(self._host.leases.request(self.mac) or self.ip)

    def _get_address(self, stop: Event) -> bool:
        """False when the power went first."""
        if self._machine.static_ip:
            self._use(self._machine.static_ip)
            return True
        wait_s = self.spec.lease_s + self._host.jitter(f"{self.name}/lease")
        while not self._host.clock.wait(stop, wait_s):
            if not self.mac:  # no network card, no address, ever
                self._host.clock.wait(stop, None)
                return False
            if ip := self._host.leases.request(self.mac):
                self._use(ip)
                return True
            wait_s = ASK_AGAIN_S
        return False

    def _come_up(self, stop: Event) -> None:
        spec = self.spec
        self._ports.update(dict.fromkeys(spec.ports))
        if spec.ssh_after_s is not None:
            self._banner = None
            self._ports[SSH_PORT] = None
            self._later(stop, spec.ssh_after_s, lambda: self.banner(spec.ssh_banner))
        if spec.echo:
            self._later(stop, spec.echo_after_s, self._start_echo)

    def _later(self, stop: Event, seconds: float, act: Callable[[], None]) -> None:
        if seconds <= 0:
            act()
            return

        def wait() -> None:
            if not self._host.clock.wait(stop, seconds):
                act()

        self._host.clock.spawn(f"guest {self.name} later", wait)

    def _start_echo(self) -> None:
        self.echo = True

    def _use(self, ip: str) -> None:
        if ip != self.ip:
            self._note("address", ip=ip)
            self._host.move(self, self.ip, ip)
            self.ip = ip

    def _note(self, kind: str, **fields: Any) -> None:
        self._host.note("guest", kind, self.name, fields)

    def says_on(self, port: int) -> str | None:
        """What a connection to this open port hears. Raises ConnectionRefusedError when it is not open."""
        if port not in self._ports:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return self._ports[port]


# ---------------------------------------------------------------------------------------------------------------------
# State in memory
# ---------------------------------------------------------------------------------------------------------------------


class _Lock:
    """Exclusive or shared; whoever waits is woken in the order of the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._exclusive = False
        self._shares = 0
        self._freed = Event()

    @property
    def held(self) -> bool:
        return self._exclusive or self._shares > 0

    @contextmanager
    def hold(self, *, shared: bool) -> Iterator[None]:
        while self._exclusive or (self._shares and not shared):
            self._freed.clear()
            self._clock.wait(self._freed, None)
        self._shares += shared
        self._exclusive = not shared
        try:
            yield
        finally:
            self._shares -= shared
            self._exclusive = False
            self._freed.set()


class _Memory:
    """Documents, logs and locks of one host. Documents are handed out as they are, without copies."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._documents: dict[str, Any] = {}
        self._logs: dict[str, list[dict[str, Any]]] = {}
        self._locks: dict[str, _Lock] = {}
        self._versions: dict[str, int] = {}
        self.changed = Event()

    def read(self, key: str) -> Any:
        return self._documents.get(key)

    @contextmanager
    def edit(self, key: str, default: Callable[[], Any]) -> Iterator[Any]:
        yield self._documents.setdefault(key, default())
        self._changed(key)

    def delete(self, key: str) -> None:
        for each in [each for each in self._documents if each == key or each.startswith(f"{key}/")]:
            del self._documents[each]
            self._changed(each)

    def keys(self, directory: str) -> list[str]:
        below = (key.removeprefix(f"{directory}/") for key in self._documents if key.startswith(f"{directory}/"))
        return sorted({key.partition("/")[0] for key in below})

    def version(self, directory: str) -> object:
        return self._versions.get(directory, 0)

    def _changed(self, key: str) -> None:
        directory = key.rpartition("/")[0]
        self._versions[directory] = self._versions.get(directory, 0) + 1
        self.changed.set()
        self.changed = Event()

    def _lock(self, key: str) -> _Lock:
        return self._locks.setdefault(key, _Lock(self._clock))

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        with self._lock(key).hold(shared=False):
            yield

    @contextmanager
    def share(self, key: str) -> Iterator[None]:
        with self._lock(key).hold(shared=True):
            yield

    def locked(self, key: str) -> bool:
        return key in self._locks and self._locks[key].held

    def append(self, key: str, entry: Mapping[str, Any]) -> None:
        self._logs.setdefault(key, []).append(dict(entry))

    def entries(self, key: str) -> list[dict[str, Any]]:
        return self._logs.get(key, [])


# ---------------------------------------------------------------------------------------------------------------------
# The tools as functions
# ---------------------------------------------------------------------------------------------------------------------


class Hold:
    """Stops calls at a step until they are let through: forces the order of a race.

    `reached` is set when the first call has come to the step. A hold that was never reached has proved nothing: assert
    on `reached.is_set()`.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._open = Event()
        self.reached = Event()

    def pass_through(self) -> None:
        self.reached.set()
        self._clock.wait(self._open, None)

    def release(self) -> None:
        """Let through who waits, and everybody after."""
        self._open.set()


class _InProcess(Tool):
    """A tool that is called as a function: `execute` is a vkcocoon_vms.Execute."""

    host: FakeHost
    missing = False  # the binary is not there

    def execute(self, argv: Sequence[str], limit: float) -> Completed:
        """One call. Raises CommandError like the real runner, in virtual time."""
        verb = " ".join(argv[1:3])
        if self.missing:
            raise CommandError(argv, None, "", why=f"cannot be run: {os.strerror(errno.ENOENT)}")
        try:
            with self.host.clock.timeout(limit):
                outcome = self.run(argv[1:])
        except Killed:
            self.host.note(self.PROGRAM, verb, _subject(argv), {"exit": -9})
            return Completed(-9, "", "")
        except ProbeTimeout:
            self.host.note(self.PROGRAM, verb, _subject(argv), {"exit": "too long"})
            raise CommandError(argv, None, "", why=f"still running after {limit:g} s") from None
        self.host.note(self.PROGRAM, verb, _subject(argv), {"exit": outcome.returncode})
        if max(len(outcome.stdout), len(outcome.stderr)) > MAX_OUTPUT:
            raise CommandError(argv, None, "", why=f"printed more than {MAX_OUTPUT // 1024 // 1024} MiB")
        return Completed(outcome.returncode, outcome.stdout, outcome.stderr)

    def hold(self, verb: str, *, name: str = "*", times: int | None = 1, step: str = Step.BEFORE) -> Hold:
        """The next `times` calls stop at `step` until they are released."""
        hold = Hold(self.host.clock)
        self.faults.add(Fault(verb, name, times, step, gate=hold))
        return hold


class _Cocoon(_InProcess, FakeCocoon):
    """cocoon as a function."""


class _CocoonMacos(_InProcess, FakeCocoonMacos):
    """cocoon-macos as a function."""


def _subject(argv: Sequence[str]) -> str:
    """What a call is about, for the log: the name it gives, else its last operand."""
    if "--name" in argv[:-1]:
        return argv[argv.index("--name") + 1]
    if "--" in argv:  # what follows is for the guest
        return argv[argv.index("--") - 1]
    return "" if argv[2:3] in (["list"], ["status"]) else argv[-1]


# ---------------------------------------------------------------------------------------------------------------------
# The host and its network
# ---------------------------------------------------------------------------------------------------------------------


class FakePinger:
    """Echoes to the guests of a host; `degraded` makes it the pinger of a process without CAP_NET_RAW."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._errors: dict[str, list[str]] = {}
        self._closed = False
        self.degraded = False

    def ping(self, ip: str, deadline: Remaining) -> float:
        """The round trip in seconds. Raises PingTimeout at the deadline, PingError for everything else."""
        if not is_unicast_ipv4(ip):
            raise PingError(f"{ip!r} is not a unicast IPv4 address")
        if self._closed:
            raise PingError("the pinger was closed")
        if self.degraded:
            return 0.0
        if (left_s := deadline.remaining()) <= 0:
            raise PingTimeout(f"no time left to ping {ip}")
        if error := self.error_for(ip):
            raise PingError(error)
        guest = self._host.guest_at(ip)
        if guest is None or guest.mute or not guest.echo or not self._host.travel(guest, left_s):
            self._host.clock.sleep(deadline.remaining())
            raise PingTimeout(f"no reply from {ip}")
        return guest.latency_s

    def error_for(self, ip: str) -> str:
        """What the next echo to `ip` fails with, "" for nothing; counts it."""
        errors = self._errors.get(ip)
        return errors.pop(0) if errors else ""

    def fail(self, ip: str, message: str = "", times: int = 1) -> None:
        """The next echoes to `ip` fail at once, by default as unreachable."""
        self._errors.setdefault(ip, []).extend([message or f"destination host unreachable: {ip}"] * times)

    def close(self) -> None:
        self._closed = True


class FakeHost:
    """One host: tools, processes, guests and their network. `record` is told of everything that happens here.

    `specs` says how the guest of a VM name behaves from its next creation on. `jitter_s` is the most that a call of a
    tool takes by itself, drawn from `rng`; an answer of a guest, too, if `rng` is a Chance. Without it everything
    happens at exact instants.
    """

    root = "/var/lib/cocoon"
    macos_root = "/var/lib/cocoon-macos"

    def __init__(
        self, clock: VirtualClock, *, rng: Random, leases: FakeCocoonNet, record: Record | None = None,
        jitter_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.rng = rng
        self.leases = leases
        self._memory = _Memory(clock)
        self.storage: Storage = self._memory
        self.specs: dict[str, GuestSpec] = {}
        self.renew_s = RENEW_S
        self._record = record
        self._guests: dict[tuple[str, str], Guest] = {}  # VM name, id
        self._by_pid: dict[int, Guest] = {}
        self._by_ip: dict[str, list[Guest]] = {}
        self._table: dict[int, Process] = {}
        self._census = 0
        self._next_pid = itertools.count(FIRST_PID)
        self._jitter_s = jitter_s
        self._draws: dict[str, Draw] = {}
        self.pinger = FakePinger(self)
        self.cocoon = _Cocoon(self)
        self.macos = _CocoonMacos(self)
        for tool in (self.cocoon, self.macos):
            tool.most_latency_s = jitter_s

    # For tests

    def guest(self, vm_name: str) -> Guest:
        """The guest of that VM, the newest of the name. Raises KeyError while there was none."""
        found = [guest for (name, _), guest in self._guests.items() if name == vm_name]
        if not found:
            raise KeyError(f"no VM {vm_name!r} was ever powered on")
        return found[-1]

    def guest_at(self, ip: str) -> Guest | None:
        """Who answers at that address: the one that took it last."""
        guests = self._by_ip.get(ip)
        return guests[-1] if guests else None

    def processes(self, pid: int) -> Process | None:
        """The process of that pid, as vkcocoon_vms.read_process reads it."""
        return self._table.get(pid)

    def reuse_pid(self, pid: int, argv: tuple[str, ...] = ("sleep", "1000")) -> None:
        """The process dies and another program gets its pid."""
        self.end_process(pid)
        self._enter(Process(pid, "S", argv))

    def zombie(self, pid: int) -> None:
        """The process dies and nobody collects it."""
        self.end_process(pid)
        self._enter(Process(pid, "Z"))

    def plant_qemu(self, vm_name: str) -> int:
        """A second QEMU on the disk of that macOS VM, as a launch behind everybody's back leaves it; its pid."""
        return self._start_process(self.macos.command_line(vm_name))

    # The host under the tools (simulator.fake_tools.Host)

    def now(self) -> datetime:
        return self.clock.now()

    def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def wait_for_change(self, directory: str, version: object, seconds: float) -> bool:
        until = self.clock.monotonic() + seconds
        while self.storage.version(directory) == version:
            left = round(until - self.clock.monotonic(), 6)
            if left <= 0:
                return False
            self.clock.wait(self._memory.changed, left)
        return True

    def stand_still(self) -> NoReturn:
        while True:
            self.clock.wait(Event(), None)

    def die(self) -> NoReturn:
        raise Killed

    def power_on(self, machine: Machine) -> int:
        pid = self._start_process(machine.argv)
        guest = self._guests.get((machine.name, machine.vm_id))
        if guest is None:
            spec = self.specs.get(machine.name) or GuestSpec.for_os(machine.os)
            guest = self._guests[machine.name, machine.vm_id] = Guest(self, machine, spec)
        self._by_pid[pid] = guest
        self.note("host", "power on", machine.name, {"pid": pid, "qemus": self._qemus(machine)})
        guest.power_on(machine, pid)
        return pid

    def power_off(self, pid: int) -> None:
        if guest := self._by_pid.get(pid):
            self.note("host", "power off", guest.name, {"pid": pid})
        if guest or self.argv_of(pid)[:1] == (QEMU,):  # never a stranger that was given the pid
            self.end_process(pid)

    def plug(self, name: str, mac: str, static_ip: str) -> None:
        self.guest(name).plug(mac, static_ip)

    def argv_of(self, pid: int) -> tuple[str, ...]:
        process = self._table.get(pid)
        return process.argv if process and process.state != "Z" else ()

    def pids(self) -> list[int]:
        return list(self._table)

    def census(self) -> object:
        return self._census

    def end_process(self, pid: int) -> None:
        """The process is gone, and with it the guest that ran in it."""
        self._table.pop(pid, None)
        self._census += 1
        if guest := self._by_pid.pop(pid, None):
            guest.power_off()

    def _start_process(self, argv: tuple[str, ...]) -> int:
        pid = next(self._next_pid)
        self._enter(Process(pid, "S", argv))
        return pid

    def _enter(self, process: Process) -> None:
        self._table[process.pid] = process
        self._census += 1

    def _qemus(self, machine: Machine) -> int:
        return len(self.macos.qemus(machine.name)) if machine.argv[0] == QEMU else 0

    # The network (the errors of vkcocoon_net)

    def output(self, argv: Sequence[str]) -> Iterator[bytes]:
        """What cocoon prints, as it comes: a vkcocoon_vms.Output."""
        if not self.cocoon.goes_on(argv):
            completed = self.cocoon.execute(argv, OUTPUT_LIMIT_S)
            if completed.returncode:
                raise CommandError(argv, completed.returncode, completed.stderr)
            yield completed.stdout.encode()
            return
        for line in self.stream(argv):
            yield f"{line}\n".encode()

    def stream(self, argv: Sequence[str]) -> Iterator[str]:
        """The lines of a cocoon that goes on for ever: a vkcocoon_vms.Stream."""
        try:
            if self.cocoon.missing:
                raise CommandError(argv, None, "", why=f"cannot be run: {os.strerror(errno.ENOENT)}")
            yield from self.cocoon.stream(argv[1:])
        except Refusal as refusal:
            raise CommandError(argv, 1, self.cocoon.complain(str(refusal))) from None
        except Failed as failure:
            raise CommandError(argv, failure.outcome.returncode, failure.outcome.stderr) from None

    def tcp_accepts(self, ip: str, port: int, deadline: Remaining) -> None:
        """Returns when the guest at `ip` accepts. Raises OSError: refused at once, TimeoutError at the deadline."""
        self._connect(ip, port, deadline)

    def ssh_banner(self, ip: str, deadline: Remaining, port: int = SSH_PORT) -> str:
        """The line starting with SSH- of what `port` says. Raises OSError, as tcp_accepts; TimeoutError when it says
        nothing, ConnectionError when it says something else and hangs up."""
        text = self._connect(ip, port, deadline)
        if text is None:
            self.clock.sleep(deadline.remaining())
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        for line in text.splitlines():
            if line.startswith("SSH-"):
                return line
        said = f"said {text.splitlines()[0][:80]!r}" if text else "hung up without a word"
        raise ConnectionAbortedError(errno.ECONNABORTED, said)

    def _connect(self, ip: str, port: int, deadline: Remaining) -> str | None:
        if not is_unicast_ipv4(ip):
            raise OSError(errno.EADDRNOTAVAIL, f"{ip!r} is not a unicast IPv4 address")
        if not 1 <= port <= 65535:
            raise OSError(errno.EADDRNOTAVAIL, f"{port} is not a TCP port")
        if (left_s := deadline.remaining()) <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        guest = self.guest_at(ip)
        if guest is None or guest.mute or not self.travel(guest, left_s):
            self.clock.sleep(deadline.remaining())
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        return guest.says_on(port)

    def travel(self, guest: Guest, limit_s: float) -> bool:
        """One round trip to a guest; False when it takes longer. Always a switch of greenlets, as in life."""
        seconds = guest.latency_s + self.jitter(guest.name)
        if seconds > limit_s or self.lost(guest):
            return False
        self.clock.sleep(seconds)
        return True

    def lost(self, guest: Guest) -> bool:
        """Is what is asked of the guest at this instant lost on its way?"""
        if not guest.loss:
            return False
        chance = self.rng.unit("loss", guest.name, self.clock.now_us) if isinstance(self.rng, Chance) else 1.0
        return chance < guest.loss

    def jitter(self, about: str) -> float:
        """What something takes by itself at this instant, in seconds."""
        if not self._jitter_s or not isinstance(self.rng, Chance):
            return 0.0
        draw = self._draws.get(about)
        if draw is None:
            draw = self._draws[about] = self.rng.unit_of(about)
        return self._jitter_s * draw(self.clock.now_us)

    def move(self, guest: Guest, old: str, new: str) -> None:
        """A guest changes its address; "" = none."""
        if old:
            self._by_ip[old].remove(guest)
        if new:
            self._by_ip.setdefault(new, []).append(guest)

    def note(self, actor: str, kind: str, key: str, fields: dict[str, Any]) -> None:
        if self._record:
            self._record(actor, kind, key, fields)


def install_executables(directory: str | os.PathLike[str]) -> None:
    """Writes the programs `cocoon` and `cocoon-macos` into a directory; their state is in $FAKE_COCOON_HOME."""
    from simulator.fake_executables import install

    install(Path(directory))


if __name__ == "__main__":
    from simulator.fake_executables import main

    sys.exit(main(sys.argv[1:]))
