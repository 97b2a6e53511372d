"""A live world as a scenario sees it: the same doors as those of simulator.world, with processes and real time behind.

What happens acts on live guests through their sockets, on the fake programs through their knobs on disk, on cocoon-net
and the API server in this process, and on the daemon by signals. What is seen comes from four places: pods and Events
from a watch of the cluster, leases from cocoon-net, commands and guests from datagrams they send (simulator.telling),
and writes about pods from the fake API server's HTTP door. What happens inside the daemon, its probes above all, nobody
outside can see; simulator.live_limits says so.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent.socket
from gevent import subprocess
from gevent.event import Event
from gevent.pool import Group

from simulator.chance import Chance
from simulator.fake_cocoon import FakeCocoon
from simulator.fake_executables import HOME_VARIABLE, LiveHost
from simulator.fake_guests import GuestError, read_spec, tell
from simulator.fake_kube import Request
from simulator.fake_macos import FakeCocoonMacos
from simulator.fake_vms import GuestSpec
from simulator.invariants import ClusterRules, Rulebook
from simulator.live_clock import LiveClock
from simulator.stage import Stage
from simulator.telling import LONGEST, SOCKET
from simulator.timeline import Timeline
from vkcocoon_kube import ApiError, Object
from vkcocoon_net import normalize_mac
from vkcocoon_probes import spawn
from vkcocoon_record import pod_changes
from vkcocoon_window import NoAnswer, ask

if TYPE_CHECKING:
    from simulator.live_world import LiveWorld

__all__ = ["LiveGuest", "LiveStage"]


class LiveStage(Stage):
    """Everything around a scenario in a live world, which must have been started. Ends with `close`."""

    def __init__(self, world: LiveWorld, clock: LiveClock, seed: int | None) -> None:
        super().__init__()
        self.clock: LiveClock = clock
        self.seed, self.chance = seed, Chance(seed)
        self.timeline = Timeline(clock)
        self.node = world.node
        self.api = world.cluster.api
        self.leases = world.network.cocoon_net
        self.leases.on_change = self._lease_changed
        self.host = LiveTools(world.place.home)
        self.stopped = Event()
        self.ended = 0.0  # when the run was over
        self._world = world
        self._begun = False
        self._greenlets = Group()
        self._pods: dict[str, Object] = {}
        self._macs: dict[str, str] = {}  # MAC -> VM name
        self._rulebook = Rulebook(self._broken)
        if world.cluster.kube is not None:
            self.kube = world.cluster.kube  # what a scenario does to a real API server was refused before
            self.kube.answered.append(self._answered)
            ClusterRules(self.kube.store, self._rulebook)
        self._ear = gevent.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(str(world.place.home / SOCKET))
        spawn(self._greenlets, "what is told", self._listen)

    def begin(self) -> None:
        """From here on it is written down what happens; the daemon runs already."""
        self._begun = True
        self.timeline.record("daemon", "start", self.node)

    def record(self, actor: str, kind: str, key: str, fields: Mapping[str, Any] = {}) -> None:
        if self._begun:
            self.timeline.record(actor, kind, key, fields)

    def close(self) -> None:
        self.stopped.set()
        self.clock.close()
        self._greenlets.kill()
        self._ear.close()

    # The scenario's ways

    def run(self, seconds: float) -> None:
        """Wait until that instant, or until somebody ends it."""
        self.clock.wait(self.stopped, seconds - self.clock.elapsed())
        self.ended = self.clock.elapsed()

    def give_spec(self, vm_name: str, spec: GuestSpec) -> None:
        (self._world.place.home / "guests" / f"{vm_name}.json").write_text(json.dumps(asdict(spec)))

    def make_namespace(self, namespace: str) -> None:
        self._world.cluster.make_namespace(namespace)

    def guest_of(self, key: str) -> LiveGuest:
        """The guest of the pod ``namespace/name``. Raises LookupError when none runs."""
        return LiveGuest(self._world.place.home, self.vm_of(key), self.os_of(key))

    def vm_names(self) -> list[str]:
        records = self.host.cocoon.host.storage.read("cocoon/vms.json") or {}
        return sorted(record["config"]["name"] for record in records.values()) + self.host.macos.vm_names()

    # The daemon

    @property
    def daemon(self) -> object | None:
        """The daemon, while it runs."""
        return self._world.daemon if self._world.daemon.pid else None

    def start(self) -> None:
        self.record("daemon", "start", self.node)
        self._world.daemon.start()

    def stop(self) -> None:
        self.record("daemon", "stop", self.node)
        self._world.daemon.stop()

    def kill(self) -> None:
        self.record("daemon", "kill", self.node)
        self._world.daemon.kill()

    def owed(self) -> list[str] | None:
        try:
            document = ask(str(self._world.place.home / "status.sock"))
        except NoAnswer:
            return None
        return [f"{pod['namespace']}/{pod['name']}" for pod in document["pods"] if not pod["published"]]

    # What is seen

    def saw_pod(self, key: str, pod: Object | None) -> None:
        """The cluster holds it so now; None: no longer."""
        old = self._pods.pop(key, None)
        if pod is not None:
            if old is not None and old["metadata"].get("uid") != pod["metadata"].get("uid"):
                self.record("kube", "deleted", key)
                old = None
            self._pods[key] = pod
        for kind, fields in pod_changes(old, pod):
            self.record("kube", kind, key, fields)

    def saw_event(self, event: Object) -> None:
        about = event.get("involvedObject") or {}
        key = f"{about.get('namespace') or 'default'}/{about.get('name', '')}"
        fields = {"message": str(event.get("message", "")), "count": event.get("count") or 1}
        self.record("event", str(event.get("reason", "")), key, fields)

    def _pod_of(self, vm_name: str) -> str:
        """namespace/name of the pod that the VM is for; a VM of no pod is itself."""
        return next((key for key in self._announced if self.vm_of(key) == vm_name), vm_name)

    def _vm_with(self, mac: str) -> str:
        """The VM that was given a network card with this address after its power-on; a MAC of no VM is itself."""
        for record in (self.host.cocoon.host.storage.read("cocoon/vms.json") or {}).values():
            if any(normalize_mac(card["mac"]) == mac for card in record.get("network_configs", ())):
                return str(record["config"]["name"])
        return mac

    def _lease_changed(self, mac: str, ip: str) -> None:
        key = self._pod_of(self._macs.get(mac) or self._vm_with(mac))
        self.record("lease", "granted" if ip else "gone", key, {"ip": ip} if ip else {})

    def _listen(self) -> None:
        while True:
            actor, kind, vm, fields = json.loads(self._ear.recv(LONGEST))
            if "mac" in fields:
                self._macs[normalize_mac(fields["mac"])] = vm
            records = self.host.cocoon.host.storage.read("cocoon/vms.json") or {}
            name = records[vm]["config"]["name"] if vm in records else vm
            self.record(actor, kind, self._pod_of(name), fields)

    def _answered(self, request: Request, error: ApiError | None) -> None:
        """A request came through the HTTP door; of writes about a pod what became of it is in the log."""
        words = request.path.split("/")
        if words[5:6] != ["pods"] or request.verb not in ("PATCH", "PUT", "DELETE"):
            return
        parts = {"PUT": "replace", "DELETE": "delete"}
        part = parts.get(request.verb, "status" if words[-1] == "status" else "annotations")
        fields = {"refused": f"{error.status} {error.reason}"} if error else {}
        self.record("push", part, f"{words[4]}/{words[6]}", fields)

    def _broken(self, rule: str, key: str, text: str) -> None:
        self.record("invariant", "broken", key, {"rule": rule, "why": text})


# Guests ---------------------------------------------------------------------------------------------------------------


class LiveGuest:
    """A guest process, with the knobs of `simulator.fake_vms.Guest`. Raises LookupError when it is not there."""

    def __init__(self, home: Path, vm_name: str, os_name: str) -> None:
        self._home = home
        self._os = os_name
        self.name = vm_name

    def _tell(self, **order: Any) -> dict[str, Any]:
        try:
            return tell(self._home, self.name, order)
        except GuestError as error:
            raise LookupError(f"guest {self.name} says: {error}") from error
        except (OSError, ValueError) as error:
            raise LookupError(f"no guest of VM {self.name!r} runs ({error})") from error

    @property
    def mac(self) -> str:
        return str(self._tell(status=True)["mac"])

    @property
    def pid(self) -> int:
        return int(self._tell(status=True)["pid"])

    @property
    def spec(self) -> GuestSpec:
        return read_spec(self._home, self.name, self._os)

    @spec.setter
    def spec(self, spec: GuestSpec) -> None:
        (self._home / "guests" / f"{self.name}.json").write_text(json.dumps(asdict(spec)))

    @property
    def echo(self) -> bool:
        return bool(self._tell(status=True)["echo"])

    @echo.setter
    def echo(self, on: bool) -> None:
        self._tell(echo=on)

    @property
    def latency_s(self) -> float:
        return float(self._tell(status=True)["latency"])

    @latency_s.setter
    def latency_s(self, seconds: float) -> None:
        self._tell(latency=seconds)

    @property
    def loss(self) -> float:
        return float(self._tell(status=True)["loss"])

    @loss.setter
    def loss(self, share: float) -> None:
        self._tell(loss=share)

    def silent(self, silent: bool = True) -> None:
        self._tell(mute=silent)

    def open(self, port: int, says: str | None = None) -> None:
        self._tell(open=port, **({} if says is None else {"says": says}))

    def close(self, port: int) -> None:
        self._tell(close=port)

    def banner(self, text: str | None) -> None:
        self._tell(banner=text)

    def renumber(self, ip: str) -> None:
        self._tell(address=ip)

    def crash(self) -> None:
        self._tell(crash=True)

    def reboot(self) -> None:
        self._tell(crash=True) if self._os == "macos" else self._tell(reboot=True)


# Programs -------------------------------------------------------------------------------------------------------------


class LiveTools:
    """The fake programs with their knobs on disk; see `simulator.fake_vms.FakeHost`."""

    def __init__(self, home: Path) -> None:
        host = LiveHost(home)
        self.cocoon = _LiveCocoon(host)
        self.macos = _LiveCocoonMacos(host)


class _Program:
    """What a tool is besides its knobs: a file that can be missing, and be run."""

    host: LiveHost
    PROGRAM: str

    @property
    def missing(self) -> bool:
        return not self._path.exists()

    @missing.setter
    def missing(self, missing: bool) -> None:
        aside = self._path.with_suffix(".aside")
        with suppress(FileNotFoundError):
            (self._path if missing else aside).rename(aside if missing else self._path)

    @property
    def _path(self) -> Path:
        return self.host.home / "bin" / self.PROGRAM

    def execute(self, argv: Sequence[str], limit: float) -> None:
        """Somebody else runs it."""
        environment = {**os.environ, HOME_VARIABLE: str(self.host.home)}
        command = [str(self._path), *argv[1:]]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=environment, timeout=limit, capture_output=True, check=False)


class _LiveCocoon(_Program, FakeCocoon):
    host: LiveHost


class _LiveCocoonMacos(_Program, FakeCocoonMacos):
    host: LiveHost
