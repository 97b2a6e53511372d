"""The scheduler of the playground: gives a pod that has no node the one it may run on.

Of what kube-scheduler asks, it asks what an example manifest can get wrong: the node is Ready and open, carries the
labels of the nodeSelector, and the pod tolerates its taints. It knows no affinity, no priority, and no capacity: the
playground's hardware is imaginary. A pod that fits nowhere says so in its PodScheduled condition, in the words of the
real one, and is looked at again whenever a node or a pod changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gevent.event import Event
from gevent.pool import Group

from simulator.cluster_view import NODES, PODS, follow
from vkcocoon_kube import ApiError, KubeApi
from vkcocoon_probes import Clock, spawn
from vkcocoon_status import condition_of, format_time

__all__ = ["Scheduler"]

RETRY_S = 1.0  # after a bind that was refused

Object = dict[str, Any]


class Scheduler:
    """Two greenlets that follow nodes and pods, and one that binds."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._greenlets = Group()
        self._changed = Event()
        self._nodes: dict[str, Object] = {}
        self._pods: dict[str, Object] = {}

    def start(self) -> None:
        spawn(self._greenlets, "scheduler's nodes", self._keep, NODES, self._nodes)
        spawn(self._greenlets, "scheduler's pods", self._keep, PODS, self._pods)
        spawn(self._greenlets, "scheduler", self._run)

    def close(self) -> None:
        self._greenlets.kill()

    def _keep(self, path: str, objects: dict[str, Object]) -> None:
        for type_, item in follow(self._api, self._clock, path):
            if type_ == "LIST":
                objects.clear()
                objects.update((one["metadata"]["uid"], one) for one in item["items"])
            elif type_ == "DELETED":
                objects.pop(item["metadata"]["uid"], None)
            else:
                objects[item["metadata"]["uid"]] = item
            self._changed.set()

    def _run(self) -> None:
        while True:
            self._clock.wait(self._changed, None)
            self._changed.clear()
            for pod in list(self._pods.values()):
                if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]:
                    self._place(pod)

    def _place(self, pod: Object) -> None:
        obstacles = {node["metadata"]["name"]: _obstacle(pod, node) for node in self._nodes.values()}
        fitting = sorted(name for name, obstacle in obstacles.items() if not obstacle)
        try:
            if fitting:
                self._bind(pod, fitting[0])
            else:
                self._report(pod, obstacles.values())
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or somebody else was faster: the watch tells
                self._clock.sleep(RETRY_S)
                self._changed.set()

    def _bind(self, pod: Object, node: str) -> None:
        metadata = pod["metadata"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
        self._api.create(f"{_path(pod)}/binding", body)

    def _report(self, pod: Object, obstacles: Iterable[str]) -> None:
        counted = [f"{count} {text}" for text, count in _count(obstacles).items()]
        message = f"0/{len(self._nodes)} nodes are available" + (f": {', '.join(counted)}." if counted else ".")
        if condition_of(pod.get("status") or {}, "PodScheduled").get("message") == message:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": format_time(self._clock.now()),
        }
        self._api.patch(f"{_path(pod)}/status", {"status": {"conditions": [condition]}}, kind="strategic")


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _count(texts: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in sorted(texts):
        counts[text] = counts.get(text, 0) + 1
    return counts


def _obstacle(pod: Object, node: Object) -> str:
    """What keeps this pod from this node, in kube-scheduler's words; "" when nothing does."""
    spec, labels = pod["spec"], node["metadata"].get("labels") or {}
    if (node.get("spec") or {}).get("unschedulable"):
        return "node(s) were unschedulable"
    if condition_of(node.get("status") or {}, "Ready").get("status") != "True":
        return "node(s) were not ready"
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    for taint in (node.get("spec") or {}).get("taints") or ():
        tolerated = any(_tolerates(toleration, taint) for toleration in spec.get("tolerations") or ())
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not tolerated:
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint["key"]:
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
