"""What an API client sees of the pods: followed through list and watch, told as one sentence a change.

The playground shows and judges nothing but this. What it knows of a pod comes from the pod object, and the instants are
the object's own or that of the watch event's arrival; the guests, the daemon and the tour are never asked. So a daemon
that publishes nothing leaves an empty table, as it would with kubectl.

`ClusterView` runs one greenlet for pods and one for events. `on_change` is called from them, with both states of the
pod, and must not wait, nor must `on_pod`, which gets each state as an object (None: gone); `wait_until` is for
everybody who waits for the cluster to look a certain way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gevent.event import Event
from gevent.pool import Group

from vkcocoon_kube import ApiError, KubeApi
from vkcocoon_probes import Clock, spawn
from vkcocoon_status import (
    ANNOTATION_ID,
    ANNOTATION_LIFECYCLE_STATE,
    ANNOTATION_VM_NAME,
    PROBE_READY,
    condition_of,
    pod_key,
)

__all__ = [
    "NODES",
    "ORDER_ANNOTATION",
    "PODS",
    "ClusterView",
    "PodRow",
    "describe_change",
    "describe_event",
    "follow",
    "pod_row",
]

PODS = "/api/v1/pods"
EVENTS = "/api/v1/events"
NODES = "/api/v1/nodes"
ORDER_ANNOTATION = "playground/guest"
OS_ANNOTATION = "cocoonset.cocoonstack.io/os"
RETRY_S = 0.5

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodRow:
    """One pod in the words of its own object.

    `since` is when Ready last changed its value; `order` is what the user wants its guest to do (guest_orders).
    """

    key: str
    uid: str
    vm_id: str
    vm_name: str
    order: str
    os: str
    ip: str
    phase: str
    ready: bool
    reason: str
    message: str
    since: datetime | None
    probe: bool
    lifecycle: str
    restarts: int
    terminating: bool


def pod_row(pod: Object) -> PodRow:
    metadata, status = pod["metadata"], pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    ready = condition_of(status, "Ready")
    changed = ready.get("lastTransitionTime")
    return PodRow(
        key=pod_key(pod),
        uid=metadata.get("uid", ""),
        vm_id=annotations.get(ANNOTATION_ID, ""),
        vm_name=annotations.get(ANNOTATION_VM_NAME, ""),
        order=annotations.get(ORDER_ANNOTATION, ""),
        os=annotations.get(OS_ANNOTATION, ""),
        ip=status.get("podIP", ""),
        phase=status.get("phase", ""),
        ready=ready.get("status") == "True",
        reason=ready.get("reason", ""),
        message=ready.get("message", ""),
        since=datetime.fromisoformat(changed) if changed else None,
        probe=condition_of(status, PROBE_READY).get("status") == "True",
        lifecycle=annotations.get(ANNOTATION_LIFECYCLE_STATE, ""),
        restarts=sum(container.get("restartCount", 0) for container in status.get("containerStatuses") or ()),
        terminating="deletionTimestamp" in metadata,
    )


def describe_change(before: PodRow | None, after: PodRow | None) -> str:
    """What changed, as kubectl's user would say it; "" when nothing of it shows."""
    if after is None:
        return "is gone" if before else ""
    if before is None:
        return f"is there, {after.phase or 'without a phase'}"
    said = []
    if after.ready != before.ready:
        said.append("Ready" if after.ready else "Not Ready")
    elif not after.ready and after.reason != before.reason:
        said.append("still Not Ready" if before.reason else "Not Ready")
    if said and after.reason:
        said[0] += f": {after.reason}" + (f" ({after.message})" if after.message and not after.ready else "")
    if after.phase != before.phase:
        said.append(f"phase {after.phase}")
    if after.ip != before.ip:
        said.append(f"address {after.ip}" if after.ip else f"address {before.ip} withdrawn")
    if after.lifecycle != before.lifecycle:
        said.append(f"lifecycle {after.lifecycle}" if after.lifecycle else "lifecycle withdrawn")
    if after.restarts != before.restarts:
        said.append(f"restarts {after.restarts}")
    if after.terminating and not before.terminating:
        said.append("being deleted")
    return ", ".join(said)


def describe_event(event: Object) -> str:
    """An Event object in one line."""
    about = event.get("involvedObject") or {}
    name = "/".join(part for part in (about.get("namespace", ""), about.get("name", "")) if part)
    times = event.get("count") or 1
    return f"{name} Event {event.get('reason', '')}: {event.get('message', '')}" + (f" (x{times})" if times > 1 else "")


def follow(api: KubeApi, clock: Clock, path: str) -> Iterator[tuple[str, Object]]:
    """A collection for ever: ("LIST", the whole list) at the start and after each loss, the watch's events between."""
    while True:
        try:
            yield from _list_and_watch(api, path)
        except ApiError:
            clock.sleep(RETRY_S)


def _list_and_watch(api: KubeApi, path: str) -> Iterator[tuple[str, Object]]:
    """One list and the watch after it, until the history it needs is lost."""
    page = api.list(path)
    yield "LIST", page
    version = page["metadata"]["resourceVersion"]
    while True:
        for event in api.watch(path, resource_version=version):
            if event["type"] == "ERROR":
                return
            version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                yield event["type"], event["object"]


class ClusterView:
    """The cluster as fresh as its watches: `pods` by key, `events` (Event objects) by UID, `nodes` with their state."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        *,
        on_change: Callable[[PodRow | None, PodRow | None], None] = lambda before, after: None,
        on_event: Callable[[Object], None] = lambda event: None,
        on_node: Callable[[str, str], None] = lambda name, text: None,
        on_pod: Callable[[str, Object | None], None] = lambda key, pod: None,
    ) -> None:
        self._api = api
        self._clock = clock
        self._on_change = on_change
        self._on_event = on_event
        self._on_node = on_node
        self._on_pod = on_pod
        self._greenlets = Group()
        self._changed = Event()
        self.pods: dict[str, PodRow] = {}
        self.events: dict[str, Object] = {}
        self.nodes: dict[str, str] = {}

    def start(self) -> None:
        spawn(self._greenlets, "view of the pods", self._follow, PODS, self._pod)
        spawn(self._greenlets, "view of the events", self._follow, EVENTS, self._event)
        spawn(self._greenlets, "view of the nodes", self._follow, NODES, self._node)

    def close(self) -> None:
        self._greenlets.kill()

    def rows(self) -> list[PodRow]:
        return [self.pods[key] for key in sorted(self.pods)]

    def wait_until(self, wanted: Callable[[], bool], limit_s: float) -> bool:
        """True as soon as `wanted` holds, asked after each change; False when the limit passes first."""
        end = self._clock.monotonic() + limit_s
        while not wanted():
            self._changed.clear()
            left = end - self._clock.monotonic()
            if left <= 0 or not self._clock.wait(self._changed, left):
                return wanted()
        return True

    def _follow(self, path: str, take: Callable[[str, Object], None]) -> None:
        for type_, item in follow(self._api, self._clock, path):
            take(type_, item)

    def _pod(self, type_: str, item: Object) -> None:
        if type_ == "LIST":
            seen = {pod_key(pod): pod for pod in item["items"]}
            for key in self.pods.keys() | seen.keys():
                self._put(key, seen.get(key))
        else:
            self._put(pod_key(item), None if type_ == "DELETED" else item)

    def _put(self, key: str, pod: Object | None) -> None:
        self._on_pod(key, pod)
        row = None if pod is None else pod_row(pod)
        before = self.pods.pop(key, None)
        if row:
            self.pods[key] = row
        if row != before:
            self._on_change(before, row)
            self._changed.set()

    def _event(self, type_: str, item: Object) -> None:
        for event in item["items"] if type_ == "LIST" else [item]:
            uid = event["metadata"]["uid"]
            if type_ == "DELETED":
                self.events.pop(uid, None)
            elif self.events.get(uid, {}).get("count") != event.get("count") or uid not in self.events:
                self.events[uid] = event
                self._on_event(event)
                self._changed.set()

    def _node(self, type_: str, item: Object) -> None:
        for node in item["items"] if type_ == "LIST" else [item]:
            name, before = node["metadata"]["name"], self.nodes.get(node["metadata"]["name"])
            if type_ == "DELETED":
                self.nodes.pop(name, None)
            else:
                self.nodes[name] = _node_state(node)
            if self.nodes.get(name) != before:
                self._on_node(name, self.nodes.get(name, "is gone"))
                self._changed.set()


def _node_state(node: Object) -> str:
    ready = condition_of(node.get("status") or {}, "Ready")
    return "Ready" if ready.get("status") == "True" else "Not Ready"
