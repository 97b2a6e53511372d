"""What a scenario acts on, be it simulated or live: the pods, the people who submit and change them, and what was seen.

`Stage` is the half that is the same in both. The other half comes from whoever derives from it: simulator.world (one
process, virtual time) and simulator.live_stage (processes and namespaces, real time). Happenings and expectations go
through a stage and nothing else, so that one table of each is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from simulator.chance import Chance
from simulator.fake_vms import GuestSpec
from simulator.timeline import Timeline
from vkcocoon_kube import ApiError, KubeApi, Object, PatchKind
from vkcocoon_status import ANNOTATION_VM_NAME, condition_of

__all__ = ["NODE", "PlanningClock", "Stage", "example_pod"]

NODE = "sim-node"

_OS_ANNOTATIONS: dict[str, dict[str, str]] = {
    "linux": {"cocoonset.cocoonstack.io/mode": "clone", "cocoonset.cocoonstack.io/image": "devbox-base:7"},
    "windows": {"cocoonset.cocoonstack.io/mode": "run", "cocoonset.cocoonstack.io/image": "win11-golden:2026-08"},
    "macos": {"cocoonset.cocoonstack.io/mode": "run", "cocoonset.cocoonstack.io/image": "registry.lab/mac/tahoe:26"},
}


def example_pod(
    name: str,
    *,
    namespace: str = "default",
    os: str = "linux",
    node: str = NODE,
    annotations: Mapping[str, str | None] = {},
    labels: Mapping[str, str] = {},
    resources: Mapping[str, str] = {},
) -> Object:
    """A pod as the operator would submit it, bound to ``node``; ``annotations`` win over the defaults, None takes one
    away. ``resources`` are requests and limits alike."""
    wanted = {
        "vm.cocoonstack.io/name": f"vk-{namespace}-{name}",
        "cocoonset.cocoonstack.io/managed": "true",
        "cocoonset.cocoonstack.io/os": os,
        **_OS_ANNOTATIONS.get(os, _OS_ANNOTATIONS["linux"]),
        **annotations,
    }
    container: Object = {"name": "agent", "image": "ghcr.io/cocoonstack/placeholder:latest"}
    if resources:
        container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": {key: value for key, value in wanted.items() if value is not None},
            **({"labels": dict(labels)} if labels else {}),
        },
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "tolerations": [{"key": "virtual-kubelet.io/provider", "operator": "Exists"}],
        },
    }


class PlanningClock(Protocol):
    """What a scenario needs of a clock: seconds since the start of the run, and things to do at their instants."""

    def elapsed(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    def at(self, seconds: float, function: Any, *args: Any, owner: str = "") -> object: ...


class Stage:
    """Made by the world it belongs to, which sets `timeline`; `api` is the door of the rest of the cluster."""

    clock: PlanningClock
    timeline: Timeline
    api: KubeApi
    seed: int | None
    chance: Chance
    node = NODE

    def __init__(self) -> None:
        self._announced: dict[str, Object] = {}  # namespace/name -> the pod as it is, or will be, submitted
        self._namespaces = {"default"}

    # What the two worlds do in ways of their own

    def run(self, seconds: float) -> None:
        """Let that much time pass."""
        raise NotImplementedError

    def record(self, actor: str, kind: str, key: str, fields: Mapping[str, Any] = {}) -> None:
        """Write down what happens now."""
        self.timeline.record(actor, kind, key, fields)

    def give_spec(self, vm_name: str, spec: GuestSpec) -> None:
        """Say how the guest of that VM behaves from its next creation on."""
        raise NotImplementedError

    def vm_names(self) -> list[str]:
        """The names of all VMs of which there is a record."""
        raise NotImplementedError

    def owed(self) -> list[str] | None:
        """What the daemon has to say and the API does not hold yet, by pod; None when no daemon runs."""
        raise NotImplementedError

    # People

    def create_pod(
        self,
        name: str,
        *,
        namespace: str = "default",
        os: str = "linux",
        guest: GuestSpec | None = None,
        **more: Any,
    ) -> Object:
        """Submit a pod bound to this node. ``guest`` says how its guest will behave, ``more`` is for `example_pod`."""
        pod = self.announce(name, namespace=namespace, os=os, **more)
        if guest is not None:
            self.give_spec(self.vm_of(f"{namespace}/{name}"), guest)
        if namespace not in self._namespaces:
            self._namespaces.add(namespace)
            self.make_namespace(namespace)
        return self.api.create(f"/api/v1/namespaces/{namespace}/pods", pod)

    def make_namespace(self, namespace: str) -> None:
        """It may be there already."""
        with suppress(ApiError):
            self.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})

    def announce(self, name: str, *, namespace: str = "default", os: str = "linux", **more: Any) -> Object:
        """Say that a pod will be created, so that faults can be laid out for its VM; returns the pod."""
        pod = example_pod(name, namespace=namespace, os=os, node=self.node, **more)
        self._announced[f"{namespace}/{name}"] = pod
        return pod

    def recreate_pod(self, name: str, *, namespace: str = "default") -> Object:
        """Remove the pod by force and submit it again under its name, as an impatient person does."""
        with suppress(ApiError):
            self.api.delete(_path(namespace, name), grace_seconds=0)
        return self.api.create(f"/api/v1/namespaces/{namespace}/pods", self._announced[f"{namespace}/{name}"])

    def delete_pod(self, name: str, *, namespace: str = "default", grace_seconds: int | None = None) -> None:
        self.api.delete(_path(namespace, name), grace_seconds=grace_seconds)

    def annotate(self, name: str, *, namespace: str = "default", **annotations: str | None) -> None:
        """Set (or with None remove) annotations of the ``vm.cocoonstack.io`` group."""
        patch = {f"vm.cocoonstack.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        self.api.patch(_path(namespace, name), {"metadata": {"annotations": patch}}, kind="merge")

    def change_pod(self, key: str, body: Object) -> None:
        """Merge something into a pod. Raises LookupError when it is not there."""
        self._merge(key, "", body)

    def change_status(self, key: str, body: Object) -> None:
        """Write into the status of a pod as somebody else, conditions by type. Raises LookupError."""
        self._merge(key, "/status", {"status": body})

    def _merge(self, key: str, part: str, body: Object) -> None:
        namespace, _, name = key.partition("/")
        try:
            kind: PatchKind = "strategic" if part else "merge"
            self.api.patch(_path(namespace, name) + part, body, kind=kind)
        except ApiError as error:
            raise LookupError(f"pod {key}: {error.message}") from error

    # What there is, and was seen

    def pod(self, name: str, *, namespace: str = "default") -> Object | None:
        """The pod as Kubernetes holds it; None when there is none."""
        try:
            return self.api.get(_path(namespace, name))
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

    def vm_of(self, key: str) -> str:
        """The name of the VM that the pod asks for. Raises LookupError for a pod nobody announced."""
        pod = self._announced.get(key)
        if pod is None:
            raise LookupError(f"pod {key} was never announced")
        return str(pod["metadata"]["annotations"].get(ANNOTATION_VM_NAME, ""))

    def announced(self) -> list[str]:
        """namespace/name of the pods that were announced."""
        return list(self._announced)

    def os_of(self, key: str) -> str:
        """The system that the pod asks for. Raises LookupError for a pod nobody announced."""
        self.vm_of(key)
        return str(self._announced[key]["metadata"]["annotations"].get("cocoonset.cocoonstack.io/os", "linux"))

    def flips(self, name: str, *, namespace: str = "default") -> list[tuple[float, bool]]:
        """When Kubernetes saw Ready change, and to what; the first entry is the first Ready condition."""
        entries = self.timeline.of(actor="kube", kind="ready", key=f"{namespace}/{name}")
        return [(entry.seconds, dict(entry.fields)["ready"] == "True") for entry in entries]

    def probes(self, name: str, *, namespace: str = "default") -> list[float]:
        """The instants at which probes of a pod ended."""
        return [entry.seconds for entry in self.timeline.of(actor="probe", key=f"{namespace}/{name}")]


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"
