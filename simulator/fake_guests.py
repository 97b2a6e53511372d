"""One live guest: a process that is, for whoever looks from outside, a machine on the bridge.

    python -m simulator.fake_guests --home HOME --vm NAME --mac MAC --os OS -- WORDS...

The fake command lines start it, detached, as the VMM or QEMU process of one VM; its end is the end of the machine.
WORDS mean nothing to us: they make the command line look like the hypervisor's to whoever identifies the process by it.

What it does from power-on, after the times in its GuestSpec (HOME/guests/NAME.json, else the default of its OS): leave
for a network namespace of its own with a cable to the bridge; boot; ask HOME/dhcp.sock for the address of its MAC;
answer echoes (the kernel does, we only hold the switch), accept on ports, and speak SSH.

HOME/network.json names the bridge. Without it there are no namespaces: the guest then only listens on the loopback
address it gets from DHCP, and no echo switch exists, because the host's own kernel answers for all of 127.0.0.0/8.

HOME/guests/NAME.sock takes one JSON object a line and answers each with the guest's status, or with {"error": ...}:

    {"echo": false}  {"open": 3389, "says": "hello"}  {"close": 22}  {"banner": "SSH-2.0-x" | null}  {"mute": true}
    {"latency": 0.2}  {"loss": 0.5}  {"renew": true}  {"address": "10.88.0.9"}  {"plug": "0a:58:..." | ""}
    {"reboot": true}  {"crash": true}  {"status": true}

Mute is a hang: nothing leaves the guest any more. Latency and loss are those of echoes (and latency of the banner); the
kernel cannot be told to be slow, so echoes are then answered by the guest itself. Plug is another network card in place
of the one before, with the address it names, or none.

HOME/power.sock is its power cord: whoever holds the other end keeps it alive, and with it the guest dies. That is how
nothing is left of a world whose host process was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gevent
import gevent.socket
from gevent.event import Event
from gevent.pool import Group, Pool
from gevent.server import StreamServer

from simulator.guest_spec import GuestSpec
from simulator.namespaces import MARK, lay_cable, leave_network
from simulator.telling import LONGEST, ask, say
from vkcocoon_probes import Clock, SystemClock, spawn

__all__ = ["Address", "Guest", "GuestError", "main", "read_spec", "tell"]

log = logging.getLogger("simulator.guest")

ASK_AGAIN_S = 0.5  # between two DHCP requests that nobody answered
LONELY_S = 120.0  # without power cord and DHCP; then there is nobody to be a guest for
SSH_PORT = 22
ICMP_ECHO = 8
COMMANDS = (
    "echo", "mute", "open", "close", "banner", "latency", "loss", "renew", "address", "plug", "reboot",
    "crash", "status",
)  # fmt: skip


class GuestError(Exception):
    """A command the guest cannot carry out; the message is its answer."""


@dataclass(frozen=True, slots=True)
class Address:
    """What DHCP gave; `lease_s` is how long it holds."""

    ip: str
    prefix: int
    gateway: str
    lease_s: float


# Networks ---------------------------------------------------------------------------------------------------------


class Network(Protocol):
    """Where the guest's packets go."""

    def use(self, address: Address) -> None:
        """Have this address instead of the one before."""

    def echo(self, on: bool) -> None:
        """Let the kernel answer echoes or not. Raises GuestError where that is not ours to decide."""

    def mute(self, on: bool) -> None:
        """Let nothing out any more, or everything again. Raises GuestError where that cannot be."""

    def down(self) -> None:
        """Have no address, and answer nothing."""

    def plug(self, mac: str) -> None:
        """Have another network card, without an address, or none ("")."""


class OwnNetwork:
    """A network namespace with a cable to the bridge. The whole process lives in it from here on."""

    def __init__(self, bridge: str, mac: str) -> None:
        self._bridge = socket.if_nametoindex(bridge)
        self._outside, self._links = leave_network()
        self._link = 0  # the index of the card; 0 = there is none
        self._muted = ""  # the gateway, to which nothing is sent
        self._address: Address | None = None
        self._switch("conf/all/rp_filter", False)  # or a mute guest would not answer for its address either
        self.plug(mac)

    def plug(self, mac: str) -> None:
        self.down()
        if self._link:
            self._links.remove_link("eth0")
            self._link = 0
        if not mac:
            return
        # Named by the process: the link of a machine that just died may still be there for a moment.
        lay_cable(self._outside, self._bridge, f"tap{os.getpid()}", mac)
        self._link = socket.if_nametoindex("eth0")
        self._switch("conf/eth0/rp_filter", False)
        # Announce a new address, so that nobody keeps sending to the machine that had it before.
        self._switch("conf/eth0/arp_notify", True)

    def use(self, address: Address) -> None:
        if self._address:
            self._links.remove_address(self._link, self._address.ip, self._address.prefix)
        self._links.add_address(self._link, address.ip, address.prefix)
        self._links.set_up("eth0")
        self._links.add_default_route(address.gateway)
        self._address = address

    def down(self) -> None:
        self.mute(False)
        self.echo(False)
        if self._address:
            self._links.remove_address(self._link, self._address.ip, self._address.prefix)
            self._address = None

    def echo(self, on: bool) -> None:
        self._switch("icmp_echo_ignore_all", not on)

    def mute(self, on: bool) -> None:
        if on and not self._muted and self._address:
            self._links.add_blackhole(self._address.gateway)
            self._muted = self._address.gateway
        elif self._muted and not on:
            self._links.remove_blackhole(self._muted)
            self._muted = ""

    @staticmethod
    def _switch(name: str, on: bool) -> None:
        Path("/proc/sys/net/ipv4", name).write_text("1" if on else "0")


class Loopback:
    """No namespaces: addresses of 127.0.0.0/8, all of which the host's kernel answers for already."""

    def use(self, address: Address) -> None:
        if not address.ip.startswith("127."):
            raise GuestError(f"{address.ip} is not a loopback address, and there is no bridge")

    def echo(self, on: bool) -> None:
        if not on:
            raise GuestError("echoes to a loopback address are the host's; close a port instead")

    def mute(self, on: bool) -> None:
        if on:
            raise GuestError("a guest on a loopback address cannot hang: the host answers for it; close a port instead")

    def down(self) -> None:
        pass

    def plug(self, mac: str) -> None:
        pass  # whose address it is decides DHCP alone


def open_network(home: Path, mac: str) -> Network:
    with contextlib.suppress(FileNotFoundError):
        return OwnNetwork(json.loads((home / "network.json").read_text())["bridge"], mac)
    return Loopback()


# The guest --------------------------------------------------------------------------------------------------------


class Guest:
    """One machine from power-on to its end. `run` returns never; `command` is what the control socket calls."""

    def __init__(
        self, *, home: Path, name: str, mac: str, os_name: str, network: Network, resumed: bool = False
    ) -> None:
        self.name = name
        self._home = home
        self._mac = mac
        self._os = os_name
        self._network = network
        self._clock: Clock = SystemClock()
        self._power_on = self._clock.monotonic()
        self._powered = False
        self._resumed = resumed
        self._rng = random.Random()
        self._greenlets = Group()
        self._life = Group()  # what ends with a reboot
        self._spec = read_spec(home, name, os_name)
        self._address: Address | None = None
        self._given = ""  # an address to use in place of the one that DHCP gives next
        self._echo = self._spec.echo
        self._awake = False  # answers echoes, if it does
        self._mute = False
        self._latency_s, self._loss = self._spec.latency_s, self._spec.loss
        self._wanted_ports = set(self._spec.ports)
        self._says: dict[int, str] = {}  # port -> what it says to who connects
        self._listeners: dict[int, StreamServer] = {}
        self._sshd: Any = None  # simulator.fake_sshd.Sshd once somebody needs it: paramiko is slow to import
        self._banner: str | None = self._spec.ssh_banner

    def run(self) -> None:
        """Boot, get an address, come up; then keep the lease for ever."""
        spawn(self._greenlets, "power cord", self._hold_power_cord)
        self._serve_commands()
        if isinstance(self._network, OwnNetwork):
            spawn(self._greenlets, "echoes", self._answer_echoes)
        say(self._home, "host", "power on", self.name, pid=os.getpid(), mac=self._mac)
        spec = self._spec
        boot_s = spec.resume_s if self._resumed and spec.resume_s is not None else spec.boot_s
        spawn(self._life, "life", self._live, boot_s)
        Event().wait()

    def _live(self, boot_s: float) -> None:
        """From a boot to the next one: come up, then keep the lease."""
        spec = self._spec
        if spec.ssh_after_s is not None:
            self._wanted_ports.add(SSH_PORT)
            self._speak(None)
        self._clock.sleep(boot_s + spec.lease_s)
        if not self._mac:
            return  # no network card, no address, ever
        self._renew()
        spawn(self._life, "echo", self._after, spec.echo_after_s, self._wake)
        if spec.ssh_after_s is not None:
            spawn(self._life, "sshd", self._after, spec.ssh_after_s, self._start_sshd)
        while True:
            assert self._address
            self._clock.sleep(self._address.lease_s / 2)
            self._renew()

    def _reboot(self) -> None:
        """From inside: everything is as at the first boot, but for the address, which is asked for again."""
        spec = self._spec = read_spec(self._home, self.name, self._os)
        self._latency_s, self._loss = spec.latency_s, spec.loss
        self._go_down()
        spawn(self._life, "life", self._live, spec.boot_s)

    def _plug(self, mac: str) -> None:
        """Its network card is another one, or gone (""); the address was that of the card."""
        if mac == self._mac:
            return
        self._go_down()
        self._mac = mac
        self._network.plug(mac)
        spawn(self._life, "life", self._live, 0.0)

    def _go_down(self) -> None:
        """Out of reach, and what was done to it since it came up is forgotten."""
        self._life.kill()
        self._close_listeners()
        self._wanted_ports, self._says = set(self._spec.ports), {}
        self._echo, self._awake, self._mute = self._spec.echo, False, False
        self._network.down()
        if self._address:
            say(self._home, "guest", "address", self.name, ip="")
        self._address = None

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._clock.sleep(seconds)
        action()

    def _wake(self) -> None:
        self._awake = True
        self._switch_echoes()

    def _switch_echoes(self) -> None:
        """The kernel answers at once or not at all; what is slow or lossy we answer ourselves."""
        self._network.echo(self._echo and self._awake and not (self._latency_s or self._loss))

    def _answer_echoes(self) -> None:
        with gevent.socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as wire:
            while True:
                packet, (sender, _) = wire.recvfrom(65536)
                header = (packet[0] & 0x0F) * 4
                if packet[header] != ICMP_ECHO or not (self._echo and self._awake and (self._latency_s or self._loss)):
                    continue
                if self._rng.random() >= self._loss:
                    spawn(
                        self._life, "echo", self._after, self._latency_s, partial(_reply, wire, packet[header:], sender)
                    )

    def _start_sshd(self) -> None:
        self._speak(self._spec.ssh_banner)

    # Address and ports

    def _renew(self) -> None:
        if not self._mac:
            raise GuestError("there is no network card")
        address = self._ask_for_address()
        given, self._given = self._given, ""
        self._take(replace(address, ip=given) if given else address)

    def _take(self, address: Address) -> None:
        if self._address and address.ip == self._address.ip:
            self._address = address
            return
        muted, self._mute = self._mute, False
        self._network.mute(False)
        self._close_listeners()
        self._network.use(address)
        self._address = address
        for port in sorted(self._wanted_ports):
            try:
                self._listen(port)
            except GuestError as error:
                log.warning("%s cannot open %s", self.name, error)
        if muted:
            self._hang(True)
        say(self._home, "guest", "address", self.name, ip=address.ip)

    def _close_listeners(self) -> None:
        for port in list(self._listeners):
            self._listeners.pop(port).stop(timeout=0)

    def _renumber(self, ip: str) -> None:
        """Use another address, whatever DHCP says."""
        if self._address is None:
            self._given = ip  # once it is up
        else:
            self._take(replace(self._address, ip=ip))

    def _hang(self, on: bool) -> None:
        self._network.mute(on)
        self._mute = on

    def _ask_for_address(self) -> Address:
        """Ask until somebody answers, as DHCP clients do."""
        while True:
            try:
                answer = ask(self._home / "dhcp.sock", {"mac": self._mac})
                return Address(answer["ip"], answer["prefix"], answer["gateway"], answer.get("lease_s", 86400.0))
            except (OSError, ValueError, KeyError):
                if not self._powered and self._clock.monotonic() - self._power_on > LONELY_S:
                    os._exit(0)  # left behind by a world that went away while we were being started
                self._clock.sleep(ASK_AGAIN_S)

    def _listen(self, port: int) -> None:
        assert self._address
        handler = (
            self._shell_of_ssh if port == SSH_PORT and port not in self._says else partial(_hold, self._says.get(port))
        )
        # A pool of its own, so that stopping the server breaks its connections, as killing a service does.
        server = StreamServer((self._address.ip, port), handler, spawn=Pool())
        try:
            server.start()
        except OSError as error:
            raise GuestError(f"port {port}: {error.strerror}") from error
        self._listeners[port] = server

    def _shell_of_ssh(self, connection: gevent.socket.socket, address: object) -> None:
        self._clock.sleep(self._latency_s)
        self._shell().serve(connection, address)

    def _shell(self) -> Any:
        if self._sshd is None:
            from simulator.fake_sshd import Sshd

            self._sshd = Sshd(self._banner, self._about)
        return self._sshd

    def _speak(self, banner: str | None) -> None:
        self._banner = banner
        if self._sshd:
            self._sshd.banner = banner

    def _about(self) -> str:
        return f"{self.name}: {self._os} guest of the vk-cocoon playground, up {self.status()['up_s']} s"

    # Commands

    def status(self) -> dict[str, Any]:
        return {
            "vm": self.name,
            "os": self._os,
            "mac": self._mac,
            "pid": os.getpid(),
            "up_s": round(self._clock.monotonic() - self._power_on, 1),
            "ip": self._address.ip if self._address else "",
            "echo": self._echo,
            "mute": self._mute,
            "latency": self._latency_s,
            "loss": self._loss,
            "ports": sorted(self._listeners),
            "banner": self._banner if SSH_PORT in self._listeners else None,
        }

    def command(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one order and return the status after it. Raises GuestError."""
        for word, value in order.items():
            match word:
                case "echo":
                    if not value:
                        self._network.echo(False)  # says so where that is not ours
                    self._echo, self._awake = bool(value), self._awake or bool(value)
                    self._switch_echoes()
                case "mute":
                    self._hang(bool(value))
                case "latency" | "loss":
                    self._change_line(word, float(value))
                case "open":
                    says = order.get("says")
                    self._open(_port(value), None if says is None else str(says))
                case "says":
                    pass  # belongs to open
                case "address":
                    self._renumber(str(value))
                case "plug":
                    self._plug(str(value))
                case "reboot":
                    self._reboot()
                case "close":
                    self._close(_port(value))
                case "banner":
                    self._speak(None if value is None else str(value))
                case "renew":
                    self._renew()
                case "crash" | "status":
                    pass
                case _:
                    raise GuestError(f"{word!r} is no command: {', '.join(COMMANDS)}")
        return self.status()

    def _change_line(self, what: str, value: float) -> None:
        if isinstance(self._network, Loopback):
            raise GuestError("echoes to a loopback address are the host's, and as quick as that")
        if what == "latency":
            self._latency_s = value
        else:
            self._loss = value
        self._switch_echoes()

    def _open(self, port: int, says: str | None = None) -> None:
        if says is not None and self._says.get(port) != says:
            self._close(port)
            self._says[port] = says
        if self._address and port not in self._listeners:
            self._listen(port)
        self._wanted_ports.add(port)

    def _close(self, port: int) -> None:
        """Refuse new connections and break the open ones."""
        self._wanted_ports.discard(port)
        self._says.pop(port, None)
        if server := self._listeners.pop(port, None):
            server.stop(timeout=0)

    # Sockets in the home directory

    def _serve_commands(self) -> None:
        path = self._home / "guests" / f"{self.name}.sock"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left by the process before us
        listener = gevent.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(8)
        StreamServer(listener, self._take_commands).start()

    def _take_commands(self, connection: gevent.socket.socket, _: object) -> None:
        with connection, connection.makefile("r") as lines:
            while line := lines.readline(LONGEST):
                answer, crash = self._answer(line)
                connection.sendall(json.dumps(answer).encode() + b"\n")
                if crash:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _answer(self, line: str) -> tuple[dict[str, Any], bool]:
        try:
            order = json.loads(line)
            if not isinstance(order, dict):
                raise GuestError("one JSON object a line")
            return self.command(order), bool(order.get("crash"))
        except (ValueError, GuestError, OSError) as error:
            return {"error": str(error)}, False

    def _hold_power_cord(self) -> None:
        cord = gevent.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            cord.connect(str(self._home / "power.sock"))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not os.environ.get(MARK):
                return  # started by hand, without a host
            os._exit(0)
        self._powered = True
        cord.recv(1)
        os._exit(0)


def _hold(says: str | None, connection: gevent.socket.socket, _: object) -> None:
    """A service that accepts, and says something or nothing."""
    with contextlib.suppress(OSError):
        if says is not None:
            connection.sendall(says.encode() + b"\r\n")
        while connection.recv(4096):
            pass


def _reply(wire: gevent.socket.socket, request: bytes, sender: str) -> None:
    """An echo reply is the request with another type, and its checksum."""
    body = b"\0\0\0\0" + request[4:]
    words = sum(struct.unpack(f"!{(len(body) + 1) // 2}H", body + b"\0" * (len(body) % 2)))
    words = (words & 0xFFFF) + (words >> 16)
    words = (words & 0xFFFF) + (words >> 16)
    with contextlib.suppress(OSError):
        wire.sendto(body[:2] + struct.pack("!H", ~words & 0xFFFF) + body[4:], (sender, 0))


def _port(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
        raise GuestError(f"{value!r} is no port")
    return value


def read_spec(home: Path, name: str, os_name: str) -> GuestSpec:
    """The GuestSpec of one VM: HOME/guests/NAME.json, else the default of its OS."""
    try:
        fields = json.loads((home / "guests" / f"{name}.json").read_text())
    except FileNotFoundError:
        return GuestSpec.for_os(os_name)
    return GuestSpec(**{**fields, "ports": tuple(fields.get("ports", ()))})


# For those outside ------------------------------------------------------------------------------------------------


def tell(home: Path, name: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """Give one live guest an order; returns its status after it. Raises GuestError, OSError when it is not there."""
    if "/" in name:  # it may come from a pod's annotation, and must not lead to anybody else's socket
        raise GuestError(f"{name!r} is no name of a VM")
    answer = ask(home / "guests" / f"{name}.sock", order)
    if "error" in answer:
        raise GuestError(answer["error"])
    return answer


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m simulator.fake_guests", description="Be one live guest.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--vm", required=True)
    parser.add_argument("--mac", required=True)
    parser.add_argument("--os", required=True)
    parser.add_argument("--resumed", action="store_true", help="it goes on from memory instead of booting")
    parser.add_argument("words", nargs="*", help="ignored")
    options = parser.parse_args(arguments)
    network = open_network(options.home, options.mac)
    Guest(
        home=options.home,
        name=options.vm,
        mac=options.mac,
        os_name=options.os,
        network=network,
        resumed=options.resumed,
    ).run()


if __name__ == "__main__":
    from gevent import monkey

    monkey.patch_all()  # for paramiko, which is imported later
    main(sys.argv[1:])
