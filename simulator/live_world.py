"""The live world: what runs inside the playground's namespaces, around the one real daemon.

`LiveWorld.start` lays a bridge, opens the doors of a fake cocoon-net (lease file, control socket, DHCP for the guests),
puts fake `cocoon` and `cocoon-macos` command lines where the daemon is told to find them, and opens the way to the API
server (simulator.live_clusters). `LiveWorld.daemon` is `vk-cocoon run` as a process of its own, configured by nothing
but its environment. Once it is started it is alone: it runs the command lines, they start guests as processes, the
guests answer or do not.

Everything lives in one home directory, which goes away with the namespace. Files and sockets in it:

    bin/cocoon, bin/cocoon-macos    the command lines        dhcp.sock     where a guest asks for its address
    leases.json, cocoon-net.sock    cocoon-net's             power.sock    what keeps the guests alive
    kubeconfig                      for daemon and kubectl   network.json  the bridge's name, if there is one
    status.sock                     for vk-cocoon status          power-on.sock   where a guest's process is had
    guests/                         GuestSpecs and control sockets of the live guests
    vk-cocoon.log                   the daemon's log

The API server listens twice on one port number: inside for the daemon, and on the host's loopback, on a socket that was
opened there before the namespace was entered. So one kubeconfig is right on both sides.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent.socket
from gevent import subprocess
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group, Pool
from gevent.server import StreamServer

from simulator import fake_vms, namespaces
from simulator.fake_leases import FakeCocoonNet
from simulator.live_clusters import Cluster
from vkcocoon_probes import Clock, spawn

__all__ = ["NODE_NAME", "GuestNetwork", "LiveWorld", "Place"]

NODE_NAME = "playground"
BRIDGE = "cni0"
LEASE_S = 86400.0  # cocoon-net's fixed lease time
LONGEST_REQUEST = 4096
RESTART_PAUSE_S = 1.0  # RestartSec= of the packaged unit
MOST_DEATHS = 5  # soon after a start, in a row: then something is wrong with the daemon and not with its luck
STABLE_S = 10.0
STOP_GRACE_S = 8.0
LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Place:
    """Where a world stands: with a bridge of its own, or on the host's loopback addresses."""

    home: Path
    bridged: bool

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network("10.88.0.0/24" if self.bridged else "127.88.0.0/24")

    @property
    def gateway(self) -> str:
        return str(self.network[1])


class GuestNetwork:
    """What guests need around them: a bridge, addresses by DHCP from a fake cocoon-net, processes, and power."""

    def __init__(self, place: Place, clock: Clock) -> None:
        self.place = place
        self._servers: list[StreamServer] = []
        leases, network = place.home / "leases.json", str(place.network)
        self.cocoon_net = FakeCocoonNet(leases, clock, rng=random.Random(), network=network, lease_seconds=int(LEASE_S))
        self.starter: subprocess.Popen[bytes] | None = None  # simulator.guest_starter, while the network stands
        self._one_order = BoundedSemaphore()

    def start(self) -> None:
        home = self.place.home
        if self.place.bridged:
            namespaces.open_network(BRIDGE, self.place.gateway, self.place.network.prefixlen)
            (home / "network.json").write_text(json.dumps({"bridge": BRIDGE}))
        (home / "guests").mkdir()
        self.cocoon_net.write()
        self.cocoon_net.serve(home / "cocoon-net.sock")
        self.cocoon_net.start()
        self._serve("dhcp.sock", self._lease)
        self._serve("power.sock", self._power)
        self.starter = self._start_starter()
        self._serve("power-on.sock", self._power_on)

    def close(self) -> None:
        """Every guest loses its power."""
        for server in self._servers:
            server.stop(timeout=0)
        if self.starter is not None:
            assert self.starter.stdin
            assert self.starter.stdout
            self.starter.kill()  # it may never have got as far as reading that nothing more comes
            self.starter.wait()
            self.starter.stdin.close()
            self.starter.stdout.close()
        self.cocoon_net.close()

    def _serve(self, name: str, handler: Callable[[gevent.socket.socket, Any], None]) -> None:
        listener = gevent.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.place.home / name))
        listener.listen(64)
        # A pool of its own, so that stopping the server ends what it serves, too.
        server = StreamServer(listener, handler, spawn=Pool())
        server.start()
        self._servers.append(server)

    def _lease(self, connection: gevent.socket.socket, _: object) -> None:
        """DHCP without the packets: one JSON object a line, answered unless the pool is used up."""
        with connection, connection.makefile("r") as lines:
            while line := lines.readline(LONGEST_REQUEST):
                ip = self.cocoon_net.request(json.loads(line)["mac"])
                if not ip:
                    return
                place = self.place
                answer = {"ip": ip, "prefix": place.network.prefixlen, "gateway": place.gateway, "lease_s": LEASE_S}
                with contextlib.suppress(OSError):  # it did not wait, and will ask again
                    connection.sendall(json.dumps(answer).encode() + b"\n")

    def _start_starter(self) -> subprocess.Popen[bytes]:
        with (self.place.home / "guest-starter.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "simulator.guest_starter"],
                env=namespaces.environment(**{namespaces.MARK: os.environ.get(namespaces.MARK, "")}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _power_on(self, connection: gevent.socket.socket, _: object) -> None:
        """One order to simulator.guest_starter, whose answers come in the order of its orders."""
        assert self.starter
        orders, answers = self.starter.stdin, self.starter.stdout
        assert orders
        assert answers
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
            order = lines.readline()
            with self._one_order:
                orders.write(order)
                orders.flush()
                answer = answers.readline()
            connection.sendall(answer)

    @staticmethod
    def _power(connection: gevent.socket.socket, _: object) -> None:
        """Hold the other end of a guest's power cord until it is gone."""
        with contextlib.suppress(OSError):
            connection.recv(1)


class LiveWorld:
    """Start it once, close it once. `daemon` is the only thing in it that may end by itself."""

    node = NODE_NAME

    def __init__(self, place: Place, clock: Clock, cluster: Cluster, say: Callable[[str, str], None]) -> None:
        self.place = place
        self.network = GuestNetwork(place, clock)
        self._kubelet_port = _free_port()  # on loopback the usual one is the host's, and may be a real kubelet's
        self.cluster = cluster
        self.settings: dict[str, str] = {}  # further variables of the daemon
        self._say = say
        self.daemon = DaemonProcess(self.environment, place.home / "vk-cocoon.log", clock, say)

    def start(self) -> None:
        """Bring everything up but the daemon."""
        home = self.place.home
        self.network.start()
        (home / "bin").mkdir()
        fake_vms.install_executables(home / "bin")
        self.cluster.start(home, bridged=self.place.bridged)
        self.cluster.claim(self.node)

    def close(self) -> None:
        """Take our pods away, stop the daemon as its unit would, then take the guests' power."""
        for line in self.cluster.tidy(self.node):
            self._say(line, "bad")
        self.daemon.stop()
        self.cluster.close(self.node)
        self.network.close()

    def environment(self) -> dict[str, str]:
        """All the daemon is told: nothing of the user's, nothing outside the home."""
        home = self.place.home
        return namespaces.environment(
            **{namespaces.MARK: os.environ.get(namespaces.MARK, "")},
            HOME=str(home),
            KUBECONFIG=str(home / "kubeconfig"),
            FAKE_COCOON_HOME=str(home),
            VK_NODE_NAME=NODE_NAME,
            VK_NODE_IP=self.place.gateway,
            VK_LEASES_PATH=str(home / "leases.json"),
            VK_COCOON_NET_CONTROL_SOCKET=str(home / "cocoon-net.sock"),
            VK_COCOON_BIN=str(home / "bin/cocoon"),
            VK_COCOON_MACOS_BIN=str(home / "bin/cocoon-macos"),
            COCOON_ROOT_DIR=str(home),
            VK_STATE_DIR=str(home / "state"),
            VK_NODE_CPU="64",
            VK_NODE_MEM="256Gi",
            VK_NODE_STORAGE="4Ti",
            VK_METRICS_ADDR="127.0.0.1:0",
            VK_STATUS_SOCKET=str(home / "status.sock"),
            VK_STATUS_ADDR="127.0.0.1:0",
            VK_KUBELET_PORT=str(self._kubelet_port),
            VK_LOG_FORMAT="text",
            **self.settings,
        )


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


class DaemonProcess:
    """`vk-cocoon run`, started and started again as its unit would; `given_up` is set when that makes no sense."""

    def __init__(
        self, environment: Callable[[], dict[str, str]], log: Path, clock: Clock, say: Callable[[str, str], None]
    ) -> None:
        self._environment = environment
        self._log = log
        self._clock = clock
        self._say = say
        self._greenlets = Group()
        self._process: subprocess.Popen[bytes] | None = None  # None: it is not meant to run
        self._launched_at = 0  # how long the log was
        self.raw_socket = True  # whether it may have one
        self.given_up = Event()
        self.failures: list[str] = []  # what a daemon must do and this one did not

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> None:
        self._process = self._launch()
        spawn(self._greenlets, "daemon", self._keep, self._process)

    def stop(self) -> None:
        """SIGTERM and its grace, then SIGKILL; says so when it did not end well."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout=STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._fail(f"vk-cocoon did not stop within {STOP_GRACE_S:g} s and was killed")
            process.kill()
            return
        # Until it says its first word it may not be listening for signals yet, and no unit would mind.
        if code and not (code == -signal.SIGTERM and self._log.stat().st_size == self._launched_at):
            self._fail(f"vk-cocoon ended with {_ending(code)} when asked to stop")

    def kill(self) -> None:
        """SIGKILL, and no new start."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def log_tail(self) -> str:
        """Its last words, indented."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])

    def _launch(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self._launched_at = log.tell()
            return subprocess.Popen(
                [*_program(), "run"],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=namespaces.die_with_parent if self.raw_socket else namespaces.without_raw_sockets,
            )

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        deaths = 0
        while True:
            began = self._clock.monotonic()
            code = process.wait()
            if self._process is not process:
                return
            deaths = 1 if self._clock.monotonic() - began > STABLE_S else deaths + 1
            if code >= 0 or deaths == MOST_DEATHS:
                often = f", {deaths} times in a row" if deaths > 1 else ""
                self._fail(f"vk-cocoon ended by itself with {_ending(code)}{often}")
                break
            self._say(f"vk-cocoon was ended by {_ending(code)}; starting it again, as its unit would", "bad")
            self._clock.sleep(RESTART_PAUSE_S)
            if self._process is not process:
                return
            self._process = process = self._launch()
        self.given_up.set()

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        self._say(f"FAILED: {text}\n{self.log_tail()}", "bad")


def _program() -> list[str]:
    """The daemon's command: the installed one of this interpreter, else the module, as in a single-file build."""
    installed = shutil.which("vk-cocoon", path=str(Path(sys.executable).parent))
    return [installed] if installed else [sys.executable, "-m", "vkcocoon_cli"]


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
