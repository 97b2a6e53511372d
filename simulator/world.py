"""A whole node in one process and in virtual time: the real daemon on fake VMs, leases, guests and Kubernetes.

    with World(seed=7) as world:
        world.create_pod("web-0", guest=GuestSpec(boot_s=1.0))
        world.run(30)
        assert world.ready("web-0")

What runs is `vkcocoon_daemon.Daemon` with its real provider, probes, publishers and parsers; only the ports are fakes.
Time passes in `run` and nowhere else. Whatever the cluster's other inhabitants do (a person, the operator, the
scheduler) goes through `kube.admin`, which no fault touches. Randomness comes in one stream per purpose, all from the
seed, so that one fake drawing more does not shift the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from simulator.chance import Chance
from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from simulator.fake_kube_resources import Target
from simulator.fake_kube_store import Change
from simulator.fake_leases import FakeCocoonNet
from simulator.fake_vms import FakeHost, Guest, GuestSpec
from simulator.invariants import Invariants
from simulator.timeline import Timeline
from vkcocoon import Ports
from vkcocoon_daemon import Daemon
from vkcocoon_host import Host
from vkcocoon_kube import ApiError, Object
from vkcocoon_probes import ProbeAgent, ProbeResult
from vkcocoon_settings import Settings
from vkcocoon_status import condition_of
from vkcocoon_vms import CocoonCLI, CocoonMacosCLI

__all__ = ["World", "example_pod"]

NODE = "sim-node"
JITTER_S = 0.002  # with a seed: the most that a call, a packet or a message takes by itself
NODE_IP = "192.0.2.10"
HOST = Host(cpus=64, memory=256 * 2**30, storage=4 * 2**40, storage_available=3 * 2**40, address=NODE_IP)

_OS_ANNOTATIONS: dict[str, dict[str, str]] = {
    "linux": {"cocoonset.cocoonstack.io/mode": "clone", "cocoonset.cocoonstack.io/image": "devbox-base:7"},
    "windows": {"cocoonset.cocoonstack.io/mode": "run", "cocoonset.cocoonstack.io/image": "win11-golden:2026-08"},
    "macos": {"cocoonset.cocoonstack.io/mode": "run", "cocoonset.cocoonstack.io/image": "registry.lab/mac/tahoe:26"},
}


def example_pod(
    name: str, *, namespace: str = "default", os: str = "linux", node: str = NODE, annotations: Mapping[str, str] = {}
) -> Object:
    """A pod as the operator would submit it, bound to ``node``; ``annotations`` win over the defaults."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": {
                "vm.cocoonstack.io/name": f"vk-{namespace}-{name}",
                "cocoonset.cocoonstack.io/managed": "true",
                "cocoonset.cocoonstack.io/os": os,
                **_OS_ANNOTATIONS.get(os, _OS_ANNOTATIONS["linux"]),
                **annotations,
            },
        },
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "agent", "image": "ghcr.io/cocoonstack/placeholder:latest"}],
            "tolerations": [{"key": "virtual-kubelet.io/provider", "operator": "Exists"}],
        },
    }


class World:
    """One node and everything around it. Without a seed nothing takes time that was not asked to."""

    def __init__(self, seed: int | None = None, *, jitter_s: float | None = None, **settings: Any) -> None:
        if jitter_s is None:
            jitter_s = 0.0 if seed is None else JITTER_S
        self.seed = seed
        self.chance = Chance(seed)
        self.clock = VirtualClock(seed)
        self.timeline = Timeline(self.clock)
        self._directory = tempfile.TemporaryDirectory(prefix="vk-cocoon-sim-")
        lease_path = Path(self._directory.name) / "leases.json"
        self.leases = FakeCocoonNet(lease_path, self.clock, rng=self.chance.of("leases"))
        self.leases.start()
        self.host = FakeHost(
            self.clock, rng=self.chance.of("vms"), leases=self.leases, record=self.timeline.record, jitter_s=jitter_s
        )
        self.kube = FakeKube(self.clock, rng=self.chance.of("kube"))
        self.kube.gate.jitter_s = jitter_s
        self.kube.store.on_change.append(self._watch_pod)
        self.invariants = Invariants(self.kube.store, self._broken)
        defaults: dict[str, Any] = {"node_name": NODE, "node_ip": NODE_IP, "leases_path": str(lease_path)}
        self.settings = Settings(**defaults | settings)
        self.daemon: Daemon | None = None
        self._starts = 0

    def __enter__(self) -> World:
        self.start()
        self.run(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- the daemon -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemon; it runs with the clock."""
        self._starts += 1
        self.daemon = Daemon(self.settings, self._ports(), host=HOST, instance=f"sim/{self._starts}")
        self.timeline.record("daemon", "start", NODE)
        self.daemon.start()

    def stop(self) -> None:
        """Stop the daemon as SIGTERM does; VMs, leases and Kubernetes go on."""
        if self.daemon is not None:
            self.timeline.record("daemon", "stop", NODE)
            self.daemon.close()
            self.daemon = None

    def close(self) -> None:
        self.stop()
        self.leases.close()
        self.clock.close()
        self._directory.cleanup()

    def run(self, seconds: float) -> None:
        """Let exactly that much time pass."""
        self.clock.run(seconds)

    def _ports(self) -> Ports:
        return Ports(
            clock=self.clock,
            runtime=CocoonCLI(
                "cocoon",
                execute=self.host.cocoon.execute,
                stream=self.host.stream,
                output=self.host.output,
                clock=self.clock,
            ),
            macos=CocoonMacosCLI(
                "cocoon-macos",
                execute=self.host.macos.execute,
                processes=self.host.processes,
                vnc_password=self.settings.macos_vnc_password,
                clock=self.clock,
            ),
            kube=self.kube,
            pinger=self.host.pinger,
            tcp_accepts=self.host.tcp_accepts,
            ssh_banner=self.host.ssh_banner,
            release_lease=self.leases.release,
            on_probe=self._probed,
        )

    def _probed(self, agent: ProbeAgent, result: ProbeResult, lateness_s: float, took_s: float) -> None:
        self.timeline.record("probe", "ok" if result.ready else "fail", agent.key, {"reason": str(result.reason)})

    # --- the rest of the cluster ----------------------------------------------------------------------------------

    def create_pod(
        self,
        name: str,
        *,
        namespace: str = "default",
        os: str = "linux",
        guest: GuestSpec | None = None,
        annotations: Mapping[str, str] = {},
    ) -> Object:
        """Submit a pod bound to this node. ``guest`` says how its guest will behave."""
        pod = example_pod(name, namespace=namespace, os=os, annotations=annotations)
        if guest is not None:
            self.host.specs[pod["metadata"]["annotations"]["vm.cocoonstack.io/name"]] = guest
        return self.kube.admin.create(f"/api/v1/namespaces/{namespace}/pods", pod)

    def delete_pod(self, name: str, *, namespace: str = "default", grace_seconds: int | None = None) -> None:
        self.kube.admin.delete(_path(namespace, name), grace_seconds=grace_seconds)

    def annotate(self, name: str, *, namespace: str = "default", **annotations: str | None) -> None:
        """Set (or with None remove) annotations of the ``vm.cocoonstack.io`` group."""
        patch = {f"vm.cocoonstack.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        self.kube.admin.patch(_path(namespace, name), {"metadata": {"annotations": patch}}, kind="merge")

    def pod(self, name: str, *, namespace: str = "default") -> Object | None:
        """The pod as Kubernetes holds it; None when there is none."""
        try:
            return self.kube.admin.get(_path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def condition(self, name: str, type_: str = "Ready", *, namespace: str = "default") -> dict[str, Any]:
        """A condition of the pod as Kubernetes holds it."""
        pod = self.pod(name, namespace=namespace)
        return condition_of(pod.get("status") or {}, type_) if pod else {}

    def ready(self, name: str, *, namespace: str = "default") -> bool:
        """Does Kubernetes hold Ready=True for it?"""
        return self.condition(name, namespace=namespace).get("status") == "True"

    def guest(self, name: str, *, namespace: str = "default") -> Guest:
        """The guest of a pod."""
        return self.host.guest(f"vk-{namespace}-{name}")

    def flips(self, name: str, *, namespace: str = "default") -> list[tuple[float, bool]]:
        """When Kubernetes saw Ready change, and to what; the first entry is the first Ready condition."""
        entries = self.timeline.of(actor="kube", kind="ready", key=f"{namespace}/{name}")
        return [(entry.seconds, dict(entry.fields)["ready"] == "True") for entry in entries]

    def probes(self, name: str, *, namespace: str = "default") -> list[float]:
        """The instants at which probes of a pod ended."""
        return [entry.seconds for entry in self.timeline.of(actor="probe", key=f"{namespace}/{name}")]

    def _broken(self, rule: str, key: str, text: str) -> None:
        self.timeline.record("invariant", "broken", key, {"rule": rule, "why": text})

    def _watch_pod(self, target: Target, change: Change) -> None:
        """What Kubernetes holds changed: the events that scenarios and invariants speak about."""
        if target.resource.plural != "pods":
            return
        key, old, new = f"{target.namespace}/{target.name}", change.old or {}, change.new
        if new is None:
            self.timeline.record("kube", "pod deleted", key)
            return
        if change.old is None:
            self.timeline.record("kube", "pod created", key)
        for kind, value in _facets(new).items():
            if value != _facets(old).get(kind, ""):
                self.timeline.record("kube", kind, key, {kind: value, "reason": _reason(new)})


def _facets(pod: Object) -> dict[str, str]:
    """The parts of a pod whose changes are events."""
    status, metadata = pod.get("status") or {}, pod.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    return {
        "phase": status.get("phase", ""),
        "ready": condition_of(status, "Ready").get("status", ""),
        "reason": condition_of(status, "Ready").get("reason", ""),
        "address": status.get("podIP", ""),
        "lifecycle": annotations.get("vm.cocoonstack.io/lifecycle-state", ""),
        "terminating": "True" if metadata.get("deletionTimestamp") else "",
    }


def _reason(pod: Object) -> str:
    return str(condition_of(pod.get("status") or {}, "Ready").get("reason", ""))


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"
