"""The node object and its lease: how the cluster knows that this host is there, what it has, and that we still live.

Two greenlets, neither waiting for the other nor for any pod:

    lease greenlet   renews the node's lease every `RENEW_S`, over connections of its own
    node greenlet    looks at the node every `BEAT_S`; writes what differs, and a sign of life every `REPORT_S`

Order at a start (K10): `start_lease` renews the lease of a node that is registered already from the first second, so
that a slow start is no failed node; `register` comes after everything running has been adopted, and only then is a new
node made. A node that somebody deletes is made again, and the lease gets its new owner.

The node is patched, never put: labels, taints, annotations, conditions and capacities of others survive. We never
delete it either; a kubelet that stops is not a node that leaves.

Two processes with one node name would take each other's pods apart (K11). Each sees the other renew the lease; at the
second time it says so, is no longer ready, and clears `alone`, which stops all work on pods until the other is silent
for as long as a lease lasts.
"""

from __future__ import annotations

import copy
import os
import random
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Protocol

import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_events import EventRecorder
from vkcocoon_host import Host, read_host
from vkcocoon_kube import ApiError, Backoff, KubeApi, Object, uid_of, version_of
from vkcocoon_probes import Clock, ProbeTimeout, spawn
from vkcocoon_quantity import parse_quantity
from vkcocoon_status import condition_of, format_time

__all__ = ["NodeController", "NodeLease", "NodeSettings"]

log = structlog.get_logger()

LEASE_S = 40
RENEW_S = 10.0
RENEWAL_LIMIT_S = 5.0  # for one renewal, all its requests together: the next one must not be late
FIRST_RENEWAL_RETRY_S, LAST_RENEWAL_RETRY_S = 1.0, 5.0
BEAT_S = 10.0
REPORT_S = 300.0  # the lease is the sign of life; a status that says the same again is written this rarely
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 10.0
FOREIGN_RENEWALS = 2  # one can be the last word of our predecessor

TAINT = {"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule"}
POOL = "cocoonstack.io/pool"
CPU_CLASS = "cocoonstack.io/snapshot-cpu-class"
INSTANCE = "cocoonstack.io/vk-instance"
PINGER_DEGRADED = "cocoonstack.io/PingerDegraded"
STARTUP_BLOCKED = "cocoonstack.io/StartupBlocked"
CONDITION_FIELDS = ("status", "reason", "message")
BYTES = ("memory", "ephemeral-storage", "hugepages-2Mi", "hugepages-1Gi")


class NodeSettings(Protocol):
    """The settings a node is made of; texts are "" when unset, amounts are Kubernetes quantities."""

    @property
    def node_name(self) -> str: ...
    @property
    def node_pool(self) -> str: ...
    @property
    def node_ip(self) -> str: ...
    @property
    def provider_id(self) -> str: ...
    @property
    def snapshot_cpu_class(self) -> str: ...
    @property
    def kubelet_port(self) -> int: ...
    @property
    def reserve_percent(self) -> int: ...
    @property
    def node_cpu(self) -> str: ...
    @property
    def node_mem(self) -> str: ...
    @property
    def node_storage(self) -> str: ...
    @property
    def node_hugepages(self) -> str: ...
    @property
    def node_pods(self) -> int: ...
    @property
    def cocoon_root_dir(self) -> str: ...


# --- the lease ----------------------------------------------------------------------------------------------------


class NodeLease:
    """The Lease object of the node, renewed for ever by one greenlet.

    The owner of a lease is its node, by UID: without a node there is no lease. `renewTime` only ever grows, whatever
    the wall clock does, because whoever watches it compares it with the last one seen.
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        node_name: str,
        *,
        on_missing_node: Callable[[], None],
        on_alone: Callable[[bool], None],
        rng: random.Random,
    ) -> None:
        self._api = api
        self._clock = clock
        self._name = node_name
        self._on_missing_node = on_missing_node
        self._on_alone = on_alone
        self._collection = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        self._path = f"{self._collection}/{node_name}"
        self._owner = ""  # UID of the node
        self._held: Object | None = None  # as the API last showed it
        # The times that were ours: the last one accepted, and those tried since, any of which may have been stored.
        self._written: deque[datetime] = deque(maxlen=64)
        self._last: datetime | None = None
        self._foreign = 0
        self._foreign_at = 0.0
        self._backoff = Backoff(FIRST_RENEWAL_RETRY_S, LAST_RENEWAL_RETRY_S, rng=rng)
        self._wake = Event()
        self._complaint = ""

    def own(self, uid: str) -> None:
        """The node is there and has this UID; memory only."""
        if uid != self._owner:
            self._owner = uid
            self._wake.set()

    def run(self) -> None:
        """Renew for ever."""
        while True:
            self._wake.clear()
            began = self._clock.monotonic()
            pause = RENEW_S
            try:
                with self._clock.timeout(RENEWAL_LIMIT_S):
                    self._renew()
            except (ApiError, ProbeTimeout) as error:
                pause = self._backoff.next()
                self._complain(f"the node's lease was not renewed: {error}")
            except Exception:  # one renewal that failed must not be the last
                log.exception("the node's lease was not renewed")
            else:
                self._backoff.reset()
                self._complaint = ""
            self._clock.wait(self._wake, max(0.0, began + pause - self._clock.monotonic()))

    def _renew(self) -> None:
        if not self._owner and not self._find_owner():
            return
        if self._held is None:
            self._read()
        try:
            self._write()
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            self._read()
            if self._held is None:  # collected together with its owner, perhaps
                self._owner = ""
                if not self._find_owner():
                    return
            self._write()
        self._look_around()

    def _find_owner(self) -> bool:
        try:
            self._owner = uid_of(self._api.get(f"/api/v1/nodes/{self._name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            self._on_missing_node()
        return bool(self._owner)

    def _read(self) -> None:
        try:
            self._held = self._api.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            self._held = None
            return
        renewed = _parse_time((self._held.get("spec") or {}).get("renewTime"))
        if renewed is not None and self._written and renewed not in self._written:
            self._note_foreign_renewal()
        if renewed is not None and (self._last is None or renewed > self._last):
            self._last = renewed

    def _write(self) -> None:
        moment = self._clock.now()
        if self._last is not None and moment <= self._last:
            moment = self._last + timedelta(microseconds=1)
        self._written.append(moment)
        body = self._body(moment)
        if self._held is None:
            self._held = self._api.create(self._collection, body)
        else:
            self._held = self._api.replace(self._path, body)
        self._last = moment
        self._written = deque([moment], maxlen=self._written.maxlen)

    def _body(self, moment: datetime) -> Object:
        new: Object = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": "kube-node-lease"},
        }
        body = copy.deepcopy(self._held or new)
        body["metadata"]["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Node", "name": self._name, "uid": self._owner}
        ]
        # Written by hand: the API takes exactly six digits, and libraries leave them out when they are zero.
        body["spec"] = {
            **(body.get("spec") or {}),
            "holderIdentity": self._name,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        return body

    def _note_foreign_renewal(self) -> None:
        now = self._clock.monotonic()
        if now - self._foreign_at >= LEASE_S:
            self._foreign = 0
        self._foreign += 1
        self._foreign_at = now
        log.warning("somebody else renewed this node's lease", node=self._name, times=self._foreign)
        if self._foreign >= FOREIGN_RENEWALS:
            self._on_alone(False)

    def _look_around(self) -> None:
        if self._foreign and self._clock.monotonic() - self._foreign_at >= LEASE_S:
            self._foreign = 0
            self._on_alone(True)

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.warning(text, node=self._name)
        self._complaint = text


def _parse_time(text: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


# --- the node -----------------------------------------------------------------------------------------------------


class NodeController:
    """Registers this host as a node and keeps the node saying what is so.

    `alone` is set unless another process with our node name is at work (K11); `registered` is set once the API has the
    node. `degraded` is whether echoes are skipped for want of a raw socket (I3). `lease_api` has connections of its
    own.
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        settings: NodeSettings,
        *,
        lease_api: KubeApi,
        recorder: EventRecorder,
        degraded: bool,
        version: str = "0",
        host: Host | None = None,
        instance: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self.registered = Event()
        self.alone = Event()
        self.alone.set()
        self._api = api
        self._clock = clock
        self._settings = settings
        self._recorder = recorder
        self._degraded = degraded
        self._blocked = ""  # why vk-cocoon cannot see what runs on this host
        self._version = version
        self._host = host or read_host(settings.cocoon_root_dir)
        # Which process this is, for people: a node name that two hosts share is found by it.
        self._instance = instance or f"{os.uname().nodename}/{os.getpid()}/{format_time(clock.now())}"
        self._path = f"/api/v1/nodes/{settings.node_name}"
        self._uid = ""
        self._signed = False  # our instance is written on this node
        self._other = ""  # the instance that was written over ours
        self._reported_at: float | None = None
        rng = rng or random.Random(settings.node_name)
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, rng=rng)
        self._wake = Event()
        self._complaint = ""
        self._group = Group()
        self._lease = NodeLease(
            lease_api,
            clock,
            settings.node_name,
            on_missing_node=self._wake.set,
            on_alone=self._set_alone,
            rng=rng,
        )

    def start_lease(self) -> None:
        """Renew the lease of the node, if it is registered already; returns at once (K10)."""
        spawn(self._group, f"lease {self._settings.node_name}", self._lease.run)

    def register(self) -> None:
        """Make the node, or take over the one that is there, and keep it; returns at once, see `registered`."""
        spawn(self._group, f"node {self._settings.node_name}", self._run)

    def blocked(self, why: str) -> None:
        """Say on a node that is registered already what the start waits for, "" for nothing any more; raises ApiError.

        It is a condition of its own, and Ready stays as it is: a node that is not Ready has its pods evicted, and with
        them VMs go that run and that nobody asked to delete.
        """
        if why == self._blocked:
            return
        self._blocked = why
        if not self.registered.is_set() and why:
            try:
                node = self._api.get(self._path)
            except ApiError as error:
                if error.status != 404:
                    raise
                return
            self._uid = uid_of(node)
            self._report(node)
        self._wake.set()

    def close(self) -> None:
        """Stop; the node stays, and is not said to be down: a restart is nobody's business."""
        self._group.kill(block=False)

    def _run(self) -> None:
        while True:
            self._wake.clear()
            pause = BEAT_S
            try:
                self._beat()
            except ApiError as error:
                pause = self._backoff.next(error.retry_after)
                self._complain(error)
            except Exception:  # one beat that failed must not be the last
                log.exception("the node was not looked after")
            else:
                self._backoff.reset()
                self._complaint = ""
            self._clock.wait(self._wake, pause)

    def _beat(self) -> None:
        try:
            node = self._api.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            node = self._create()
        self._note(node)
        node = self._tend(node)
        self._report(node)

    def _create(self) -> Object:
        """POST with taints and status at once, so that nothing is scheduled in between."""
        if self._uid:
            log.warning("the node was deleted; it is registered again", node=self._settings.node_name)
        node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self._settings.node_name,
                "labels": {key: value for key, value in self._labels().items() if value is not None},
                "annotations": {INSTANCE: self._instance},
            },
            "spec": {"taints": [TAINT]},
            "status": self._status({}),
        }
        if self._settings.provider_id:
            node["spec"]["providerID"] = self._settings.provider_id
        made = self._api.create("/api/v1/nodes", node)
        self._signed = True
        self._reported_at = self._clock.monotonic()
        if self._uid:
            self._recorder.event(made, "Warning", "NodeRegisteredAgain", "the node object had been deleted")
        return made

    def _note(self, node: Object) -> None:
        """What this copy of the node tells us."""
        self._uid = uid_of(node)
        self._lease.own(self._uid)
        self.registered.set()
        written = ((node.get("metadata") or {}).get("annotations") or {}).get(INSTANCE) or ""
        self._other = written if self._signed and written != self._instance else ""

    def _tend(self, node: Object) -> Object:
        """Patch what is ours outside of the status, if anything differs; the node as it is then."""
        metadata, spec = node.get("metadata") or {}, node.get("spec") or {}
        patch: Object = {}
        wanted = self._labels()
        labels = {key: value for key, value in wanted.items() if (metadata.get("labels") or {}).get(key) != value}
        if labels:
            patch["metadata"] = {"labels": labels}
        if not self._signed:
            patch.setdefault("metadata", {})["annotations"] = {INSTANCE: self._instance}
        if taints := self._missing_taint(spec.get("taints") or []):
            patch.setdefault("spec", {})["taints"] = taints
            # A list is replaced whole: only if it is still the one that was read.
            patch.setdefault("metadata", {})["resourceVersion"] = version_of(node)
        if self._settings.provider_id and not spec.get("providerID"):
            patch.setdefault("spec", {})["providerID"] = self._settings.provider_id
        if not patch:
            return node
        patch.setdefault("metadata", {})["uid"] = self._uid
        answer = self._api.patch(self._path, patch, kind="merge")
        self._signed = True
        return answer

    def _missing_taint(self, taints: list[Object]) -> list[Object]:
        """All taints with ours, or nothing when there is one of its key: an operator may have chosen another effect."""
        return [] if any(taint.get("key") == TAINT["key"] for taint in taints) else [*taints, TAINT]

    def _report(self, node: Object) -> None:
        """Patch the status when it differs, and now and then when it does not."""
        held = node.get("status") or {}
        wanted = self._status(held)
        now = self._clock.monotonic()
        if _node_agrees(wanted, held) and self._reported_at is not None and now - self._reported_at < REPORT_S:
            return
        wanted["addresses"] = [{"$patch": "replace"}, *wanted["addresses"]]
        body = {"metadata": {"uid": self._uid}, "status": wanted}
        self._api.patch(f"{self._path}/status", body, kind="strategic")
        self._reported_at = now

    def _set_alone(self, alone: bool) -> None:
        if alone == self.alone.is_set():
            return
        if alone:
            self.alone.set()
            log.warning("no other process uses this node's name any more", node=self._settings.node_name)
        else:
            self.alone.clear()
            log.error("another process uses this node's name; pods are left alone", node=self._settings.node_name)
            about = {"metadata": {"name": self._settings.node_name, "uid": self._uid}}
            self._recorder.event(about, "Warning", "DuplicateNode", self._duplicate())
        self._wake.set()

    def _duplicate(self) -> str:
        other = f" ({self._other})" if self._other else ""
        return f"another process{other} renews the lease of this node; this one is {self._instance}"

    def _complain(self, error: ApiError) -> None:
        text = str(error)
        if text != self._complaint:
            log.warning("the node cannot be kept up to date", node=self._settings.node_name, error=text)
        self._complaint = text

    # --- what the node says ---------------------------------------------------------------------------------------

    def _labels(self) -> dict[str, str | None]:
        """Labels that are ours; None must not be there."""
        settings = self._settings
        return {
            "type": "virtual-kubelet",
            "kubernetes.io/role": "agent",
            "kubernetes.io/hostname": settings.node_name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": self._host.architecture,
            "node-role.kubernetes.io/cocoon-vm": "",
            POOL: settings.node_pool,
            CPU_CLASS: settings.snapshot_cpu_class or None,
        }

    def _status(self, held: Object) -> Object:
        settings, host = self._settings, self._host
        capacity, allocatable = _resources(settings, host)
        address = settings.node_ip or host.address
        addresses = [{"type": "InternalIP", "address": address}] if address else []
        return {
            "capacity": capacity,
            "allocatable": allocatable,
            "addresses": [*addresses, {"type": "Hostname", "address": settings.node_name}],
            "conditions": self._conditions(held),
            "daemonEndpoints": {"kubeletEndpoint": {"Port": settings.kubelet_port}},
            "nodeInfo": {
                "architecture": host.architecture,
                "bootID": host.boot_id,
                "containerRuntimeVersion": "cocoon://",
                "kernelVersion": host.kernel,
                "kubeProxyVersion": "",
                "kubeletVersion": f"v{self._version}",
                "machineID": host.machine_id,
                "operatingSystem": "linux",
                "osImage": host.os_image,
                "systemUUID": host.system_uuid,
            },
        }

    def _conditions(self, held: Object) -> list[Object]:
        ready = (True, "KubeletReady", "vk-cocoon takes pods")
        if not self.alone.is_set():
            ready = (False, "DuplicateNode", self._duplicate())
        pinger = (False, "RawSocketOpen", "guests are probed by echo")
        if self._degraded:
            pinger = (True, "RawSocketDenied", "no raw socket: an address counts as reachable (CAP_NET_RAW is missing)")
        start = (False, "StartupWent", "vk-cocoon has seen what runs on this host")
        if self._blocked:
            start = (True, "CannotSeeWhatRuns", self._blocked)
        said: dict[str, tuple[bool, str, str]] = {
            "Ready": ready,
            "MemoryPressure": (False, "KubeletHasSufficientMemory", "memory is not watched"),
            "DiskPressure": (False, "KubeletHasNoDiskPressure", "disks are not watched"),
            "PIDPressure": (False, "KubeletHasSufficientPID", "process ids are not watched"),
            "NetworkUnavailable": (False, "RouteCreated", "guests have the host's network"),
            PINGER_DEGRADED: pinger,
            STARTUP_BLOCKED: start,
        }
        stamp = format_time(self._clock.now())
        return [_node_condition(type_, *words, held=held, stamp=stamp) for type_, words in said.items()]


def _node_condition(type_: str, true: bool, reason: str, message: str, *, held: Object, stamp: str) -> Object:
    status = "True" if true else "False"
    before = condition_of(held, type_)
    same = before.get("status") == status and before.get("lastTransitionTime")
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": before["lastTransitionTime"] if same else stamp,
    }


def _node_agrees(wanted: Object, held: Object) -> bool:
    """Does the node's status say what we want, the heartbeat apart?"""
    for condition in wanted["conditions"]:
        before = condition_of(held, condition["type"])
        if any(before.get(name, "") != condition[name] for name in CONDITION_FIELDS):
            return False
    amounts = all(
        _equal_amounts(wanted[group], held.get(group) or {}, wanted[group]) for group in ("capacity", "allocatable")
    )
    facts = held.get("nodeInfo") or {}
    return (
        amounts
        and wanted["addresses"] == held.get("addresses")
        and wanted["daemonEndpoints"] == held.get("daemonEndpoints")
        and all(facts.get(name, "") == value for name, value in wanted["nodeInfo"].items())
    )


def _equal_amounts(wanted: Object, held: Object, names: Iterable[str]) -> bool:
    """The API writes amounts in its own way: 16777216Ki comes back as 16Gi."""
    return all(_amount(wanted[name]) == _amount(str(held.get(name, ""))) for name in names)


# --- what the node has --------------------------------------------------------------------------------------------


def _resources(settings: NodeSettings, host: Host) -> tuple[dict[str, str], dict[str, str]]:
    """Capacity and allocatable: what was set, else what was found; a share is kept back, not of pods and huge pages.

    Of storage that was not set, only what is free can be given away.
    """
    hugepages = dict(host.hugepages)
    if settings.node_hugepages:
        hugepages["hugepages-2Mi"] = int(parse_quantity(settings.node_hugepages))
    capacity = {
        "cpu": parse_quantity(settings.node_cpu) if settings.node_cpu else Decimal(host.cpus),
        "memory": parse_quantity(settings.node_mem) if settings.node_mem else Decimal(host.memory),
        "ephemeral-storage": parse_quantity(settings.node_storage) if settings.node_storage else Decimal(host.storage),
    }
    available = {**capacity}
    if not settings.node_storage:
        available["ephemeral-storage"] = Decimal(host.storage_available)
    share = Decimal(100 - settings.reserve_percent) / 100
    whole = {
        "pods": str(settings.node_pods),
        **{name: _written(name, Decimal(size)) for name, size in hugepages.items()},
    }
    return (
        {**{name: _written(name, amount) for name, amount in capacity.items()}, **whole},
        {**{name: _written(name, amount * share) for name, amount in available.items()}, **whole},
    )


def _written(name: str, amount: Decimal) -> str:
    """Bytes as whole KiB, CPUs as millis when they are not whole."""
    if name in BYTES:
        return f"{int(amount) // 1024}Ki"
    return str(int(amount)) if amount == int(amount) else f"{int(amount * 1000)}m"


def _amount(quantity: str) -> Decimal:
    """What a Kubernetes quantity is worth; NaN (equal to nothing) for what is none."""
    try:
        return parse_quantity(quantity)
    except ValueError:
        return Decimal("NaN")
