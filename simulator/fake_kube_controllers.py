"""The few controllers without which a fake cluster is no place to live in: small, switchable, and never in the way.

    controllers = Controllers(kube, without=("node-lifecycle",))
    controllers.start()
    ...
    controllers.close()

Each is a level-based loop in a greenlet of its own: when something it cares about changed, and every so often, it looks
at everything and takes the steps that are due. They act through ``kube.admin``, as the rest of the cluster does, so no
fault meant for the kubelet stops them. A conflict is not an error: the next look sees what is there.

What each does, and leaves out, is in its docstring. There are no workload controllers: no ReplicaSet re-creates a pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from typing import Any, ClassVar

from gevent.event import Event
from gevent.pool import Group

from simulator.fake_kube import FakeKube
from simulator.fake_kube_resources import RESOURCES, Resource, Target
from simulator.fake_kube_rules import is_terminal
from simulator.fake_kube_scheduling import fits
from simulator.fake_kube_store import Change
from vkcocoon_kube import ApiError
from vkcocoon_probes import spawn

__all__ = ["Controllers"]

Object = dict[str, Any]

_UNREACHABLE = "node.kubernetes.io/unreachable"
_NOT_READY = "node.kubernetes.io/not-ready"


class Controllers:
    """Starts and stops them all. ``speed`` divides the waiting times of node failure; ``without`` names those to omit.

    Names: scheduler, node-lifecycle, pod-gc, garbage, namespaces, event-ttl.
    """

    def __init__(self, kube: FakeKube, *, speed: float = 1.0, without: Collection[str] = ()) -> None:
        kinds = (_Scheduler, _NodeLifecycle, _PodGC, _Garbage, _Namespaces, _EventTTL)
        unknown = set(without) - {kind.name for kind in kinds}
        if unknown:
            raise ValueError(f"no such controller: {', '.join(sorted(unknown))}")
        self._kube = kube
        self._controllers = [kind(kube, speed) for kind in kinds if kind.name not in without]
        self._group = Group()

    def start(self) -> None:
        self._kube.store.on_change.append(self._changed)
        for controller in self._controllers:
            spawn(self._group, f"controller {controller.name}", controller.run)

    def close(self) -> None:
        self._kube.store.on_change.remove(self._changed)
        for controller in self._controllers:
            controller.stop()
        self._group.join()

    def _changed(self, target: Target, change: Change) -> None:
        for controller in self._controllers:
            controller.notice(target)


class _Controller:
    """One loop. ``watches`` are the resources whose changes wake it, ``period_s`` the longest it sleeps."""

    name: ClassVar[str]
    watches: ClassVar[frozenset[str]]
    period_s: ClassVar[float] = 30.0

    def __init__(self, kube: FakeKube, speed: float) -> None:
        self.kube = kube
        self.clock = kube.clock
        self.speed = speed
        self._wake = Event()
        self._stopped = False

    def run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            self.look()
            self.clock.wait(self._wake, self.period_s / self.speed)

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def notice(self, target: Target) -> None:
        if target.resource.plural in self.watches:
            self._wake.set()

    def look(self) -> None:
        """Take every step that is due."""
        raise NotImplementedError

    def all(self, plural: str) -> list[Object]:
        """All objects of a resource, to read only."""
        target = Target(_resource(plural))
        items: list[Object] = self.kube.store.list(target, lambda obj: True)["items"]
        return items

    def timestamp(self) -> str:
        return self.clock.now().isoformat(timespec="seconds").replace("+00:00", "Z")


def _attempt() -> AbstractContextManager[None]:
    """For one step that somebody else may have made impossible meanwhile: the next look sees what is there."""
    return suppress(ApiError)


def _resource(plural: str) -> Resource:
    return next(resource for resource in RESOURCES if resource.plural == plural)


def _path(obj: Object, subresource: str = "") -> str:
    resource = next(item for item in RESOURCES if item.kind == obj["kind"])
    metadata = obj["metadata"]
    place = f"/namespaces/{metadata['namespace']}" if resource.namespaced else ""
    return f"{resource.prefix}{place}/{resource.plural}/{metadata['name']}{subresource and '/'}{subresource}"


def _condition(obj: Object, type_: str) -> Object:
    conditions = obj["status"].get("conditions", [])
    return next((item for item in conditions if item["type"] == type_), {})


# Scheduler -----------------------------------------------------------------------------------------------------------


class _Scheduler(_Controller):
    """Binds pods without a node to the fitting node with the fewest pods; says so, or why not, by an event.

    Fitting: ready, not cordoned, taints tolerated, nodeSelector and resources met. No affinity, no priorities.
    """

    name = "scheduler"
    watches = frozenset({"pods", "nodes"})

    def look(self) -> None:
        waiting = [pod for pod in self.all("pods") if _is_schedulable(pod)]
        for pod in waiting:
            with _attempt():
                self._place(pod)

    def _place(self, pod: Object) -> None:
        nodes, pods = self.all("nodes"), self.all("pods")
        load = Counter(other["spec"].get("nodeName", "") for other in pods if not is_terminal(other))
        verdicts = {node["metadata"]["name"]: fits(pod, node, pods) for node in nodes}
        fitting = [name for name, verdict in verdicts.items() if not verdict]
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        if not fitting:
            self._explain(pod, _why_nowhere(list(verdicts.values())))
            return
        node = min(fitting, key=lambda candidate: (load[candidate], candidate))
        self.kube.admin.create(_path(pod, "binding"), {"target": {"kind": "Node", "name": node}})
        self._event(pod, "Normal", "Scheduled", f"Successfully assigned {name} to {node}")

    def _explain(self, pod: Object, message: str) -> None:
        if _condition(pod, "PodScheduled").get("message") == message:
            return
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        condition["lastTransitionTime"] = self.timestamp()
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": [condition]}}
        self.kube.admin.patch(_path(pod, "status"), body, kind="strategic")
        self._event(pod, "Warning", "FailedScheduling", message)

    def _event(self, pod: Object, type_: str, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        about = {"kind": "Pod", "apiVersion": "v1", **{key: metadata[key] for key in ("namespace", "name", "uid")}}
        now = self.timestamp()
        body = {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": about,
            "type": type_,
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": "default-scheduler"},
        }
        self.kube.admin.create(f"/api/v1/namespaces/{metadata['namespace']}/events", body)


def _is_schedulable(pod: Object) -> bool:
    spec = pod["spec"]
    idle = spec.get("nodeName") or spec.get("schedulingGates") or "deletionTimestamp" in pod["metadata"]
    return not idle and spec["schedulerName"] == "default-scheduler" and not is_terminal(pod)


def _why_nowhere(verdicts: list[str]) -> str:
    if not verdicts:
        return "no nodes available to schedule pods"
    reasons = ", ".join(f"{count} {verdict}" for verdict, count in sorted(Counter(verdicts).items()))
    return f"0/{len(verdicts)} nodes are available: {reasons}."


# Nodes that fall silent ----------------------------------------------------------------------------------------------


class _NodeLifecycle(_Controller):
    """Notices a node that neither renews its lease nor posts status for 40 s, taints it, and evicts what will not stay.

    A node that is not Ready is tainted too; both taints go when it is Ready again. A pod that was marked not ready is
    never marked ready again from here: that is its kubelet's to do.
    """

    name = "node-lifecycle"
    watches = frozenset({"nodes"})
    period_s = 5.0
    grace_s = 40.0

    def __init__(self, kube: FakeKube, speed: float) -> None:
        super().__init__(kube, speed)
        self._beats: dict[str, tuple[Object, float]] = {}  # node uid -> its last signs of life, and when they changed
        self._tainted: dict[str, float] = {}  # node uid -> since when it has a NoExecute taint of ours

    def look(self) -> None:
        nodes = self.all("nodes")
        uids = {node["metadata"]["uid"] for node in nodes}
        self._beats = {uid: beat for uid, beat in self._beats.items() if uid in uids}
        self._tainted = {uid: since for uid, since in self._tainted.items() if uid in uids}
        for node in nodes:
            with _attempt():
                if self._is_silent(node):
                    self._report_silence(node)
            with _attempt():
                self._taint(node)
            self._evict(node)

    def _is_silent(self, node: Object) -> bool:
        uid, now = node["metadata"]["uid"], self.clock.monotonic()
        lease = self.kube.store.find(Target(_resource("leases"), "kube-node-lease", node["metadata"]["name"])) or {}
        signs = {"renewed": lease.get("spec", {}).get("renewTime")}
        signs |= {item["type"]: item["lastHeartbeatTime"] for item in node["status"].get("conditions", [])}
        if uid not in self._beats or self._beats[uid][0] != signs:
            self._beats[uid] = (signs, now)
        return now - self._beats[uid][1] > self.grace_s / self.speed

    def _report_silence(self, node: Object) -> None:
        if _condition(node, "Ready").get("status") == "Unknown":
            return
        types = dict.fromkeys(["Ready", *(item["type"] for item in node["status"].get("conditions", []))])
        word = {"status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status."}
        conditions = [{"type": type_, **word, "lastTransitionTime": self.timestamp()} for type_ in types]
        self.kube.admin.patch(_path(node, "status"), {"status": {"conditions": conditions}}, kind="strategic")
        for pod in self._pods_of(node):
            if _condition(pod, "Ready").get("status") == "True":
                ready = {"type": "Ready", "status": "False", "lastTransitionTime": self.timestamp()}
                with _attempt():
                    body = {"status": {"conditions": [ready]}}
                    self.kube.admin.patch(_path(pod, "status"), body, kind="strategic")

    def _taint(self, node: Object) -> None:
        node = self.kube.store.get(Target(_resource("nodes"), name=node["metadata"]["name"]))
        key = {"True": "", "False": _NOT_READY}.get(_condition(node, "Ready").get("status", "False"), _UNREACHABLE)
        present = node["spec"].get("taints", [])
        wanted = [item for item in present if item["key"] not in (_NOT_READY, _UNREACHABLE) or item["key"] == key]
        for effect in ("NoSchedule", "NoExecute") if key else ():
            if not any(item["key"] == key and item["effect"] == effect for item in wanted):
                wanted.append({"key": key, "effect": effect, "timeAdded": self.timestamp()})
        uid = node["metadata"]["uid"]
        if not key:
            self._tainted.pop(uid, None)
        else:
            self._tainted.setdefault(uid, self.clock.monotonic())
        if wanted != present:
            # The list is atomic: without its version the taint of somebody else could be lost.
            metadata = {"resourceVersion": node["metadata"]["resourceVersion"]}
            body = {"metadata": metadata, "spec": {"taints": wanted}}
            self.kube.admin.patch(_path(node), body, kind="strategic")

    def _evict(self, node: Object) -> None:
        since = self._tainted.get(node["metadata"]["uid"])
        if since is None:
            return
        passed = (self.clock.monotonic() - since) * self.speed
        for pod in self._pods_of(node):
            if "deletionTimestamp" not in pod["metadata"] and passed >= _patience(pod):
                with _attempt():
                    self.kube.admin.delete(_path(pod), uid=pod["metadata"]["uid"])

    def _pods_of(self, node: Object) -> list[Object]:
        name = node["metadata"]["name"]
        return [pod for pod in self.all("pods") if pod["spec"].get("nodeName") == name and not is_terminal(pod)]


def _patience(pod: Object) -> float:
    """Seconds a pod stays on a node that is gone or not ready."""
    seconds = 0.0
    for item in pod["spec"].get("tolerations", ()):
        covers = item.get("key", _UNREACHABLE) in (_UNREACHABLE, _NOT_READY)
        if covers and item.get("effect", "NoExecute") == "NoExecute":
            seconds = max(seconds, item.get("tolerationSeconds", float("inf")))
    return seconds


class _PodGC(_Controller):
    """Fails and removes the pods of a node whose object has been missing for 40 s."""

    name = "pod-gc"
    watches = frozenset({"nodes"})
    period_s = 20.0
    grace_s = 40.0

    def __init__(self, kube: FakeKube, speed: float) -> None:
        super().__init__(kube, speed)
        self._missing: dict[str, float] = {}  # node name -> since when

    def look(self) -> None:
        present = {node["metadata"]["name"] for node in self.all("nodes")}
        bound = [pod for pod in self.all("pods") if pod["spec"].get("nodeName", "") not in {"", *present}]
        now = self.clock.monotonic()
        self._missing = {
            name: self._missing.get(name, now) for name in sorted({pod["spec"]["nodeName"] for pod in bound})
        }
        for pod in bound:
            if now - self._missing[pod["spec"]["nodeName"]] >= self.grace_s / self.speed:
                with _attempt():
                    self._collect(pod)

    def _collect(self, pod: Object) -> None:
        if not is_terminal(pod):
            message = "PodGC: node no longer exists"
            target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": message}
            status = {"phase": "Failed", "conditions": [{**target, "lastTransitionTime": self.timestamp()}]}
            self.kube.admin.patch(_path(pod, "status"), {"status": status}, kind="strategic")
        self.kube.admin.delete(_path(pod), uid=pod["metadata"]["uid"], grace_seconds=0)


# Things nobody needs any more ----------------------------------------------------------------------------------------


class _Garbage(_Controller):
    """Deletes what has lost all its owners, node leases among it. Owners of kinds not served here count as alive."""

    name = "garbage"
    watches = frozenset({"nodes", "pods"})

    def look(self) -> None:
        served = {resource.kind for resource in RESOURCES}
        everything = list(self._everything())
        uids = {obj["metadata"]["uid"] for obj in everything}
        for obj in everything:
            owners = obj["metadata"].get("ownerReferences", [])
            if owners and all(owner["kind"] in served and owner["uid"] not in uids for owner in owners):
                with _attempt():
                    self.kube.admin.delete(_path(obj), uid=obj["metadata"]["uid"])

    def _everything(self) -> Iterator[Object]:
        for resource in RESOURCES:
            if "list" in resource.verbs:
                yield from self.all(resource.plural)


class _Namespaces(_Controller):
    """Empties a namespace that is being deleted, and lets go of it once its pods have ended."""

    name = "namespaces"
    watches = frozenset({"namespaces", "pods"})

    def look(self) -> None:
        for namespace in self.all("namespaces"):
            if "deletionTimestamp" in namespace["metadata"]:
                with _attempt():
                    self._empty(namespace)

    def _empty(self, namespace: Object) -> None:
        name = namespace["metadata"]["name"]
        for obj in self._content(name):
            if "deletionTimestamp" not in obj["metadata"]:
                self.kube.admin.delete(_path(obj), uid=obj["metadata"]["uid"])
        if not any(self._content(name)):
            self.kube.admin.replace(_path(namespace, "finalize"), {**namespace, "spec": {"finalizers": []}})

    def _content(self, name: str) -> Iterator[Object]:
        for resource in RESOURCES:
            if resource.namespaced:
                yield from (obj for obj in self.all(resource.plural) if obj["metadata"]["namespace"] == name)


class _EventTTL(_Controller):
    """Forgets events an hour after they were last seen."""

    name = "event-ttl"
    watches = frozenset()
    period_s = 60.0
    ttl = timedelta(hours=1)

    def look(self) -> None:
        for event in self.all("events"):
            seen = event.get("lastTimestamp") or event["metadata"]["creationTimestamp"]
            if self.clock.now() - datetime.fromisoformat(seen) >= self.ttl:
                with _attempt():
                    self.kube.admin.delete(_path(event))
