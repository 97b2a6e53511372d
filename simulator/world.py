"""A whole node in one process and in virtual time: the real daemon on fake VMs, leases, guests and Kubernetes.

    with World(seed=7) as world:
        world.create_pod("web-0", guest=GuestSpec(boot_s=1.0))
        world.run(30)
        assert world.ready("web-0")

What runs is `vkcocoon_daemon.Daemon` with its real provider, probes, publishers and parsers; only the ports are fakes.
Time passes in `run` and nowhere else. Whatever the cluster's other inhabitants do (a person, the operator, the
scheduler) goes through `kube.admin`, which no fault touches. Everything that happens is in `timeline`, about pods where
it is about one: `record(actor, kind, pod, fields)`. The rules of simulator.invariants are watched all the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from simulator.chance import Chance
from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from simulator.fake_kube_resources import Target
from simulator.fake_kube_store import Change
from simulator.fake_leases import NETWORK, FakeCocoonNet
from simulator.fake_vms import FakeHost, Guest, GuestSpec
from simulator.invariants import ClusterRules, Rulebook
from simulator.life import Life
from simulator.stage import NODE, Stage, example_pod
from simulator.timeline import Timeline
from vkcocoon_daemon import Daemon
from vkcocoon_net import normalize_mac
from vkcocoon_record import pod_changes
from vkcocoon_settings import Settings
from vkcocoon_status import ANNOTATION_VM_NAME

__all__ = ["World", "example_pod"]

JITTER_S = 0.002  # with a seed: the most that a call, a packet or a message takes by itself
NODE_IP = "192.0.2.10"


class World(Stage):
    """One node and everything around it. Without a seed nothing takes time that was not asked to.

    ``jitter_s`` is the most that a call, a packet or a message takes by itself (2 ms with a seed). ``degraded``: the
    daemon gets no raw socket. ``packets``: it pings with its own pinger on a simulated wire (simulator.wire). The
    rest are settings of the daemon.
    """

    clock: VirtualClock

    def __init__(
        self,
        seed: int | None = None,
        *,
        jitter_s: float | None = None,
        degraded: bool = False,
        packets: bool = False,
        network: str = NETWORK,
        **settings: Any,
    ) -> None:
        super().__init__()
        if jitter_s is None:
            jitter_s = 0.0 if seed is None else JITTER_S
        self.seed, self.degraded, self.packets = seed, degraded, packets
        self.chance = Chance(seed)
        self.clock = VirtualClock(seed)
        self.timeline = Timeline(self.clock)
        self.record = self.timeline.record  # type: ignore[method-assign]  # without a detour: it is called a lot
        self.rulebook = Rulebook(self._broken)
        self.timeline.backwards = lambda text: self.rulebook.broken("time goes forward", NODE, text)
        self._directory = tempfile.TemporaryDirectory(prefix="vk-cocoon-sim-")
        self.directory = self._directory.name
        lease_path = Path(self.directory) / "leases.json"
        self.leases = FakeCocoonNet(lease_path, self.clock, network=network, rng=self.chance.of("leases"))
        self.leases.on_change = self._lease_changed
        self.leases.start()
        self.host = FakeHost(
            self.clock, rng=self.chance.of("vms"), leases=self.leases, record=self._host_event, jitter_s=jitter_s
        )
        self.kube = FakeKube(self.clock, rng=self.chance.of("kube"))
        self.api = self.kube.admin
        self.kube.gate.jitter_s = jitter_s
        self.kube.store.on_change.append(self._stored)
        ClusterRules(self.kube.store, self.rulebook)
        defaults: dict[str, Any] = {"node_name": NODE, "node_ip": NODE_IP, "leases_path": str(lease_path)}
        defaults["state_dir"] = str(Path(self.directory) / "state")
        self.settings = Settings(**defaults | settings)
        self.life: Life | None = None
        self._starts = 0
        self._pods: dict[str, str] = {}  # VM name -> namespace/name of the pod it is for
        self._macs: dict[str, str] = {}  # MAC -> VM name
        self._vm_names: dict[str, str] = {}  # id -> name, of those that were asked about

    def __enter__(self) -> World:
        self.start()
        self.run(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- the daemon -----------------------------------------------------------------------------------------------

    @property
    def daemon(self) -> Daemon | None:
        """The daemon that runs at the moment."""
        return self.life.daemon if self.life is not None else None

    def start(self) -> None:
        """Start the daemon; it runs with the clock."""
        if self.life is not None:
            raise RuntimeError("the daemon runs already")
        self._starts += 1
        self.record("daemon", "start", NODE)
        self.life = Life(self, self._starts)
        self.life.start()

    def stop(self) -> None:
        """Stop the daemon as SIGTERM does; VMs, leases and Kubernetes go on."""
        if self.life is not None:
            self.record("daemon", "stop", NODE)
            self.life.stop()
            self.life = None

    def kill(self) -> None:
        """End the daemon as SIGKILL does: it says and writes nothing more."""
        if self.life is not None:
            self.record("daemon", "kill", NODE)
            self.life.kill()
            self.life = None

    def close(self) -> None:
        self.stop()
        self.leases.close()
        self.clock.close()
        self._directory.cleanup()

    def run(self, seconds: float) -> None:
        """Let exactly that much time pass."""
        self.clock.run(seconds)

    # --- guests and VMs -------------------------------------------------------------------------------------------

    def give_spec(self, vm_name: str, spec: GuestSpec) -> None:
        self.host.specs[vm_name] = spec

    def guest(self, name: str, *, namespace: str = "default") -> Guest:
        """The guest of a pod. Raises LookupError while its VM was never powered on."""
        return self.guest_of(f"{namespace}/{name}")

    def guest_of(self, key: str) -> Guest:
        """The guest of the pod ``namespace/name``. Raises LookupError while its VM was never powered on."""
        return self.host.guest(self.vm_of(key))

    def vm_names(self) -> list[str]:
        microvms = self.host.storage.read("cocoon/vms.json") or {}
        return sorted(record["config"]["name"] for record in microvms.values()) + self.host.macos.vm_names()

    def owed(self) -> list[str] | None:
        return None if self.daemon is None else self.daemon.pods.unpublished()

    # --- what is written down -------------------------------------------------------------------------------------

    def vm_name(self, ref: str) -> str:
        """The name of the VM with that id, also of one that is gone; anything else is given back as it is."""
        if ref not in self._vm_names:
            record = self.host.storage.read("cocoon/vms.json") or {}
            if ref not in record:
                return ref
            self._vm_names[ref] = str(record[ref]["config"]["name"])
        return self._vm_names[ref]

    def pod_of(self, vm_name: str) -> str:
        """namespace/name of the pod that the VM is for; a VM of no pod is itself."""
        return self._pods.get(vm_name, vm_name)

    def _broken(self, rule: str, key: str, text: str) -> None:
        self.record("invariant", "broken", key, {"rule": rule, "why": text})

    def _host_event(self, actor: str, kind: str, key: str, fields: Mapping[str, Any]) -> None:
        """What the host says of itself, about pods rather than VMs. Commands are in the log by their callers."""
        if actor in ("cocoon", "cocoon-macos"):
            return
        if kind == "power on":
            self._macs[normalize_mac(self.host.guest(key).mac)] = key
            if fields.get("qemus", 0) > 1:
                self.rulebook.broken("one QEMU a VM", self.pod_of(key), f"{fields['qemus']} of them run")
        self.record(actor, kind, self.pod_of(key), fields)

    def _lease_changed(self, mac: str, ip: str) -> None:
        name = self._macs.get(mac) or next((n for n in self._pods if self._has_mac(n, mac)), mac)
        self.record("lease", "granted" if ip else "gone", self.pod_of(name), {"ip": ip} if ip else {})

    def _has_mac(self, name: str, mac: str) -> bool:
        with suppress(KeyError):
            return normalize_mac(self.host.guest(name).mac) == mac
        return False

    def _stored(self, target: Target, change: Change) -> None:
        if target.resource.plural == "pods":
            self._pod_stored(target, change)
        elif target.resource.plural == "events" and change.new is not None:
            about = change.new["involvedObject"]
            key = f"{about.get('namespace') or target.namespace}/{about['name']}"
            message = str(change.new.get("message", "")).replace(self.directory, "")
            fields = {"message": message, "count": change.new.get("count", 1)}
            self.record("event", str(change.new["reason"]), key, fields)

    def _pod_stored(self, target: Target, change: Change) -> None:
        """What Kubernetes holds changed: the events that scenarios and expectations speak about."""
        key, new = f"{target.namespace}/{target.name}", change.new
        if change.old is None and new is not None:
            self._pods[(new["metadata"].get("annotations") or {}).get(ANNOTATION_VM_NAME, "")] = key
        for kind, fields in pod_changes(change.old, new):
            self.record("kube", kind, key, fields)
