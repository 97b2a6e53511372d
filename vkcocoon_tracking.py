"""The pods this host holds, and how what is known of them becomes public.

`TrackedPod` is one incarnation of a pod, keyed by UID: its VM, its addresses, its lifecycle intent, what was handed
over last. The object itself is the token of ownership: after every call that may switch greenlets its user asks
`PodTable.holds` again. Its fields change only between switches.

`Publication` is the one place where a status is built. It only changes memory and hands over: building, comparing,
reporting and notifying happen without a switch of greenlets, so a reader never sees half of a change (P4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any
from weakref import WeakValueDictionary

import structlog
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from vkcocoon_debts import Claim
from vkcocoon_guests import ReadyAddresses
from vkcocoon_http import Metrics
from vkcocoon_macos import VNC_BASE
from vkcocoon_net import normalize_mac
from vkcocoon_probes import Clock, ProbeAgent, ProbeResult
from vkcocoon_quantity import whole_number
from vkcocoon_spec import PodSpec
from vkcocoon_status import (
    ANNOTATION_ID,
    ANNOTATION_IP,
    ANNOTATION_LIFECYCLE_GENERATION,
    ANNOTATION_LIFECYCLE_MESSAGE,
    ANNOTATION_LIFECYCLE_STATE,
    ANNOTATION_MAC,
    ANNOTATION_SETUP_ERRORS,
    ANNOTATION_SETUP_HINT,
    ANNOTATION_SETUP_STATE,
    ANNOTATION_VNC_PORT,
    PROBE_READY,
    Intent,
    IntentState,
    Reason,
    build_pod_status,
    build_terminal_status,
    build_withheld_status,
    condition_of,
    copied,
    format_time,
    lifecycle_annotations,
    pod_key,
    restart_count,
    shows_ready,
    vm_id_of,
)
from vkcocoon_vms import VM

__all__ = [
    "Eviction",
    "Notify",
    "Pod",
    "PodTable",
    "Publication",
    "Report",
    "SetupState",
    "TrackedPod",
    "VMLocks",
    "dhcp_macs",
]

Pod = dict[str, Any]
Notify = Callable[[Pod], None]
Report = Callable[[Pod, str, str, str], None]  # pod, Normal or Warning, reason, message: an Event for people

# A pod cannot flip down sooner than 10 s after it flipped up, so this is more than an hour of them.
FLIPS = 720
# States that have an event of their own, or of which the next one tells more.
_TOLD_OTHERWISE = frozenset(
    {Reason.TERMINATING, Reason.LIFECYCLE_CREATING, Reason.LIFECYCLE_HIBERNATING, Reason.LIFECYCLE_HIBERNATED, ""}
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Eviction:
    """Why a pod is given up: one word for the operator, a sentence for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class SetupState:
    """How far the set-up of a cloned guest has come: "" (not needed), running, done or failed; what was said last; and
    for one that failed what a person can do, in base64."""

    state: str = ""
    hint: str = ""
    errors: str = ""


@dataclass(eq=False, slots=True)
class TrackedPod:
    """One incarnation of a pod and what we know of its VM."""

    pod: Pod
    spec: PodSpec
    intent: Intent = field(default_factory=Intent)
    vm: VM | None = None
    lost: str = ""  # how the VM was lost behind our back; "" = it was not
    eviction: Eviction | None = None  # decided; the pod is being given up
    restarted: tuple[str, float] = ("", 0.0)  # id of the VM that was restarted in place last, when it began
    ip: str = ""  # tracked address: a cache of the lease, or the static one
    published_ip: str = ""
    agent: ProbeAgent | None = None
    status: Mapping[str, Any] | None = None  # as handed over last
    annotations: Mapping[str, str | None] | None = None
    setup: SetupState = field(default_factory=SetupState)
    woken: bool = False  # the state its VM woke from is still there
    hibernated: bool = False  # its VM lives in a snapshot and is owed a wake
    leases: frozenset[str] = frozenset()  # MACs that may hold a DHCP lease of ours: of the VM, and of those before it
    saved: str = ""  # the id of the VM that was last saved whole
    kept: str = ""  # the id of the VM whose last state was saved for the time after its pod
    left_over: bool = False  # at start there was a VM of its name that did not run
    noted: str = ""  # the id that stood on the pod when we began to track it, when nothing better is known
    pointed: bool = False  # its VM is known only from what an unmanaged pod says of it
    inherited: bool = False  # an earlier life of ours began to make a VM for it
    committed: bool = False  # there may be a VM of it: which one that is can no longer be edited
    deleting: bool = False
    seen_gone: bool = False  # the API shows that its VM is gone
    restarts: int = 0
    fresh: bool = False  # this process brings it up, and it has not been Ready yet
    adoption: Event | None = None  # of a VM that ran when we started: set once its first probe came back
    flips: deque[tuple[datetime, bool]] = field(default_factory=lambda: deque(maxlen=FLIPS))  # when Ready became what
    stop: Event = field(default_factory=Event)  # set when it is forgotten; its background greenlets wait on it

    @classmethod
    def of(cls, pod: Pod) -> TrackedPod:
        """As an earlier run of ours left it in the API; a fresh pod begins as creating, and never restarted."""
        annotations = pod["metadata"].get("annotations") or {}
        restarts = restart_count(pod.get("status") or {})
        # A pod made from the YAML of another one brings an id along, but nothing that only a VM of its own makes.
        noted = vm_id_of(pod) if (pod.get("status") or {}).get("startTime") else ""
        spec = PodSpec.of(pod)
        setup = _seeded_setup(annotations) if spec.managed else SetupState()
        intent = _seeded_intent(annotations)
        return cls(pod, spec, intent, restarts=restarts, fresh=not noted, noted=noted, setup=setup)

    @property
    def key(self) -> str:
        return pod_key(self.pod)

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def gone(self) -> bool:
        """The VM that is noted here is certainly no more."""
        return bool(self.lost)

    @property
    def adopting(self) -> bool:
        """Its VM ran when we started, and its first probe is still under way."""
        return self.adoption is not None and not self.adoption.is_set()

    @property
    def terminating(self) -> bool:
        return self.deleting or bool(self.pod["metadata"].get("deletionTimestamp"))

    @property
    def ready(self) -> bool:
        """Handed over as Ready."""
        return self.status is not None and condition_of(self.status, "Ready").get("status") == "True"

    @property
    def os(self) -> str:
        return self.spec.os

    @property
    def reason(self) -> str:
        """Why it is not ready, in one word."""
        return _explanation(self.status or {})[1]

    @property
    def message(self) -> str:
        """The same in a sentence."""
        return _explanation(self.status or {})[2]

    @property
    def claim(self) -> Claim | None:
        """What there may be of it on this host, for the next life; None: nothing, and nothing was begun."""
        return Claim(self.spec.vm_name, self.os, self.leases) if self.committed else None

    def inherits(self, claim: Claim) -> None:
        """An earlier life of ours has left that; what stands on the pod, anybody may have edited meanwhile."""
        self.stays_with(claim.vm_name, claim.os)
        self.noted = ""
        self.committed = self.inherited = True
        self.leases |= claim.macs

    def owns(self, vm_id: str) -> bool:
        """May the VM of its name, which has this id, be its own? We began to make one for it, or wrote that id on it.
        That it names a VM proves nothing."""
        return self.committed or (bool(vm_id) and vm_id == self.noted)

    def stays_with(self, vm_name: str, os: str) -> None:
        """It has the VM of that name, which was edited while nobody watched: a living pod keeps its VM."""
        if (vm_name, os) != (self.spec.vm_name, self.os):
            asked = self.spec
            log.warning("a living pod keeps its VM", pod=self.key, vm=vm_name, asked=asked.vm_name, os=asked.os)
            self.spec, self.committed = self.spec.of_vm(vm_name, os), True

    def has(self, vm: VM) -> None:
        """Its VM as it is now; the leases of its network cards are ours from here on."""
        self.vm, self.leases = vm, self.leases | dhcp_macs(vm)

    def update(self, pod: Pod) -> None:
        """The newest pod of this incarnation; a newer generation is observed by whatever intent there is."""
        asked = PodSpec.of(pod)
        spec = asked.with_identity_of(self.spec) if self.committed else asked
        if (spec.vm_name, spec.os) != (asked.vm_name, asked.os):
            log.warning("a living pod keeps its VM", pod=self.key, vm=spec.vm_name, asked=asked.vm_name, os=asked.os)
        self.pod, self.spec = pod, spec
        if self.spec.generation > self.intent.generation:
            self.intent = replace(self.intent, generation=self.spec.generation)

    def set_intent(self, state: IntentState, message: str = "") -> bool:
        """The only writer of the intent's state. False when the present one does not allow it (Intent.allows)."""
        generation = max(self.spec.generation, self.intent.generation)
        if not self.intent.allows(state, generation):
            return False
        if self.intent.state is not state:
            log.info("lifecycle", pod=self.key, old=str(self.intent.state), new=str(state), message=message)
        self.intent = Intent(state, generation, message[:4096])
        return True

    def lift_failure(self) -> None:
        """Ready after a failure that has gone by itself; whoever calls has made sure that it is this very failure."""
        log.info("lifecycle failure lifted", pod=self.key, failure=self.intent.message)
        self.intent = Intent(IntentState.READY, max(self.spec.generation, self.intent.generation))


class PodTable:
    """Incarnations by UID, and which of them a name stands for now."""

    def __init__(self) -> None:
        self._pods: dict[str, TrackedPod] = {}
        self._uid_of: dict[str, str] = {}  # namespace/name -> UID
        self.closed = False

    def __iter__(self) -> Iterator[TrackedPod]:
        """A copy: whoever walks the table may switch greenlets or change it."""
        return iter(list(self._pods.values()))

    def __len__(self) -> int:
        return len(self._pods)

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    def uids(self) -> Set[str]:
        return self._pods.keys()

    def get(self, uid: str) -> TrackedPod | None:
        return self._pods.get(uid)

    def find(self, key: str) -> TrackedPod | None:
        """The current incarnation of ``namespace/name``."""
        return self._pods.get(self._uid_of.get(key, ""))

    def add(self, entry: TrackedPod) -> None:
        self._pods[entry.uid] = entry
        self._uid_of[entry.key] = entry.uid

    def drop(self, entry: TrackedPod) -> None:
        """Forget this incarnation, and only this one (P3)."""
        entry.stop.set()
        if self._pods.get(entry.uid) is entry:
            del self._pods[entry.uid]
        if self._uid_of.get(entry.key) == entry.uid:
            del self._uid_of[entry.key]

    def current(self, entry: TrackedPod) -> bool:
        """Is this incarnation the one its name stands for?"""
        return self._uid_of.get(entry.key) == entry.uid

    def holds(self, entry: TrackedPod, vm_id: str | None = None) -> bool:
        """Asked after every switch: still tracked, and (when given) still with that VM? Nothing is once closed."""
        if self.closed or self._pods.get(entry.uid) is not entry:
            return False
        return vm_id is None or (entry.vm is not None and entry.vm.id == vm_id)

    def holder_of(self, vm_id: str) -> TrackedPod | None:
        """The pod that is bound to this VM."""
        return next((entry for entry in self._pods.values() if entry.vm is not None and entry.vm.id == vm_id), None)

    def rival(self, entry: TrackedPod) -> TrackedPod | None:
        """The other pod that asked for a VM of this name first and is still here; a name is one VM, and one pod's."""
        for other in self._pods.values():
            if other is entry:
                return None
            if other.spec.managed and other.spec.vm_name == entry.spec.vm_name:
                return other
        return None

    def close(self) -> None:
        """From now on nothing is held: what is in flight ends without a trace."""
        self.closed = True
        for entry in self:
            entry.stop.set()


class VMLocks:
    """The command lines of one VM, one at a time: create, restart, hibernate, wake and delete never cross.

    By name, because a VM that is being made has no id yet. A lock nobody holds or waits for is forgotten.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, BoundedSemaphore] = WeakValueDictionary()

    @contextmanager
    def held(self, vm_name: str) -> Iterator[None]:
        lock = self._locks.get(vm_name)
        if lock is None:
            lock = self._locks[vm_name] = BoundedSemaphore(1)
        with lock:
            yield


class Publication:
    """Builds statuses and hands them over; keeps two managed pods from being Ready on one address (L10)."""

    def __init__(
        self,
        pods: PodTable,
        clock: Clock,
        *,
        probe_of: Callable[[TrackedPod], ProbeResult],
        host_ip: str,
        report: Report,
        metrics: Metrics,
    ) -> None:
        self._pods = pods
        self._clock = clock
        self._probe_of = probe_of
        self._host_ip = host_ip
        self._report_event = report
        self._metrics = metrics
        self._addresses: ReadyAddresses[TrackedPod] = ReadyAddresses()
        self._claimers: dict[str, TrackedPod] = {}  # UID -> who holds an address, forgotten pods among them
        self.notify: Notify = lambda pod: None
        self.keep: Callable[[TrackedPod], None] = lambda entry: None  # writes down what there may be of a pod
        self.acknowledged = False  # will `observed` be called with what the API holds?

    def fail(self, entry: TrackedPod, reason: str, message: str) -> None:
        """A lifecycle operation failed: the intent says so, an Event too, and the pod is published."""
        if self._pods.holds(entry) and not entry.deleting:
            entry.set_intent(IntentState.FAILED, message)
            self._report_event(entry.pod, "Warning", reason, message[:512])
            self.publish(entry)

    def restarted(self, entry: TrackedPod, reason: str, message: str) -> None:
        """Its guest had ended and begins anew: counted, and told in an Event."""
        entry.restarts += 1
        self._report_event(entry.pod, "Warning", reason, message[:512])

    def started_again(self, entry: TrackedPod, record: VM, began: float) -> None:
        """Its VM, which was as ``record`` says, was started in place at that monotonic instant."""
        entry.restarted = (record.id, began)
        self._metrics.vm_restart("ok")
        message = f"VM {record.name} was {record.state!r} and has been started again"
        self.restarted(entry, "GuestRestarted", message)

    def publish(self, entry: TrackedPod) -> None:
        """The pod as it is known now. Equal states are handed over once; one that is being adopted says nothing before
        it was probed, and one that is going nothing more."""
        if entry.adopting or entry.terminating or not self._pods.holds(entry):
            return
        probe = ProbeResult(False, Reason.VM_GONE, entry.lost) if entry.gone else self._probe_of(entry)
        entry.published_ip = self._address_to_publish(entry, probe)
        holder = self.holder(entry, entry.published_ip)
        if holder is not None and probe.ready:
            probe = self.conflict(entry.published_ip, holder)
        self.keep(entry)
        self._hand_over(entry, self._status(entry, probe), self._annotations(entry))
        self._claim(entry)

    def terminating(self, entry: TrackedPod) -> None:
        """Not Ready from the moment the deletion begins, once (K7)."""
        probe = ProbeResult(False, Reason.TERMINATING)
        self._hand_over(entry, self._status(entry, probe, terminating=True), {})

    def terminal(self, entry: TrackedPod) -> None:
        """The last word: the VM is gone, as it was asked for or because it was lost."""
        lost = {"phase": "Failed", **asdict(entry.eviction)} if entry.eviction else {}
        status = build_terminal_status(entry.pod, self._clock.now(), previous=entry.status, **lost)
        self._hand_over(entry, status, {})

    def withhold(self, pod: Pod, reason: str, message: str) -> None:
        """Nobody probes the guest of a pod that an earlier life of ours left Ready: so it is no more. Says nothing of a
        pod that this life has published, or is about to."""
        entry, before = self._pods.get(pod["metadata"]["uid"]), pod.get("status") or {}
        published = entry is not None and (entry.status is not None or entry.adopting or entry.terminating)
        if self._pods.closed or published or not shows_ready(before) or before.get("phase") in ("Succeeded", "Failed"):
            return
        status = build_withheld_status(before, self._clock.now(), reason, message)
        if entry is not None:
            self._hand_over(entry, status, {})
        else:
            log.info("not ready", pod=pod_key(pod), reason=reason, message=message)
            self._report_event(pod, "Warning", "Unhealthy", f"{reason}: {message}")
            self._notify(pod, status, {})

    def seed(self, entry: TrackedPod) -> None:
        """A pod that an earlier life of ours left Ready holds its address until the API shows it elsewhere (L10)."""
        status = entry.pod.get("status") or {}
        ip = str(status.get("podIP") or "")
        if self.acknowledged and ip and shows_ready(status) and not self.holder(entry, ip) and entry.spec.managed:
            self._addresses.claim(entry, ip)
            self._claimers[entry.uid] = entry

    def withdraw(self, entry: TrackedPod) -> None:
        """The pod is forgotten; its address is free once the API no longer shows it Ready there."""
        if not self.acknowledged:
            self._release(entry)

    def observed(self, pod: Pod) -> None:
        """The API holds this. Who has been seen to leave an address no longer keeps others from it."""
        uid, status = pod["metadata"]["uid"], pod.get("status") or {}
        seen_ready = condition_of(status, "Ready").get("status") == "True"
        if (tracked := self._pods.get(uid)) is not None:
            tracked.seen_gone = condition_of(status, PROBE_READY).get("reason") == Reason.VM_GONE
        if (entry := self._claimers.get(uid)) is not None:
            self._release(entry, seen=str(status.get("podIP", "")) if seen_ready else "")

    def vanished(self, uid: str) -> None:
        """The API no longer holds the pod."""
        if (entry := self._claimers.get(uid)) is not None:
            self._release(entry)

    def silent(self, entry: TrackedPod) -> bool:
        """Was the pod's guest asked, and has it not made a sound? No other failed probe says so: one without a lease or
        with a wrong port asked nobody, and whoever refuses a connection is alive."""
        return self._probe_of(entry).reason == Reason.PING_TIMEOUT

    def holder(self, entry: TrackedPod, ip: str) -> TrackedPod | None:
        """The other managed pod that is published Ready on this address, if any (L10)."""
        return self._addresses.other(entry, ip) if ip and entry.spec.managed else None

    def conflict(self, ip: str, holder: TrackedPod) -> ProbeResult:
        return ProbeResult(False, Reason.ADDRESS_CONFLICT, f"{ip} is the address of {holder.key}, which is Ready there")

    def _age(self, pod: Pod) -> float:
        """Seconds since the pod was created in the API, whose times have whole seconds."""
        created = datetime.fromisoformat(pod["metadata"].get("creationTimestamp") or format_time(self._clock.now()))
        return max(0.0, (self._clock.now() - created).total_seconds())

    def _claim(self, entry: TrackedPod) -> None:
        if entry.spec.managed and entry.ready:
            self._addresses.claim(entry, entry.published_ip)
            self._claimers[entry.uid] = entry
        if not self.acknowledged:
            self._release(entry)

    def _release(self, entry: TrackedPod, *, seen: str = "") -> None:
        """Free what the pod neither claims nor is ``seen`` Ready on; publish whoever was waiting for it."""
        claimed = entry.published_ip if entry.ready and self._pods.holds(entry) else ""
        if seen and seen != claimed:
            return  # an older state is still what the cluster sees
        freed = self._addresses.release(entry, keep=claimed)
        if not claimed:
            self._claimers.pop(entry.uid, None)
        for other in self._pods if freed else ():
            # One that was withheld, or is still shown on the address it had before: equal states are no news.
            if other is not entry and other.ip in freed:
                self.publish(other)

    def _status(self, entry: TrackedPod, probe: ProbeResult, *, terminating: bool = False) -> dict[str, Any]:
        return build_pod_status(
            entry.pod,
            entry.vm,
            probe,
            entry.intent,
            self._clock.now(),
            ip=entry.published_ip,
            host_ip=self._host_ip,
            restarts=entry.restarts,
            terminating=terminating,
            previous=entry.status,
        )

    def _address_to_publish(self, entry: TrackedPod, probe: ProbeResult) -> str:
        """The tracked address; while the debounced state is still ready, a lost or contested one stays as it was."""
        if entry.vm is None:
            return ""
        contested = not entry.ip or self.holder(entry, entry.ip) is not None
        return entry.published_ip if contested and probe.ready and entry.ready else entry.ip

    def _annotations(self, entry: TrackedPod) -> dict[str, str | None]:
        annotations = lifecycle_annotations(entry.intent)
        if entry.spec.managed:  # on an unmanaged pod id, ip and vnc-port are the operator's
            annotations[ANNOTATION_ID] = entry.vm.id if entry.vm is not None else None
            annotations[ANNOTATION_IP] = entry.published_ip or None
            setup = entry.setup if entry.vm is not None else SetupState()
            annotations[ANNOTATION_SETUP_STATE] = setup.state or None
            annotations[ANNOTATION_SETUP_HINT] = setup.hint or None
            annotations[ANNOTATION_SETUP_ERRORS] = setup.errors or None
            annotations[ANNOTATION_MAC] = _listed(entry.leases)
        if entry.spec.macos:
            display = entry.vm.vnc if entry.vm is not None else -1
            annotations[ANNOTATION_VNC_PORT] = str(VNC_BASE + display) if display >= 0 else None
        return annotations

    def _hand_over(self, entry: TrackedPod, status: dict[str, Any], annotations: dict[str, str | None]) -> None:
        if entry.status == status and entry.annotations == annotations:
            return
        before, entry.status, entry.annotations = entry.status, status, annotations
        self._report(entry, before or entry.pod.get("status") or {}, status)
        self._notify(entry.pod, status, annotations)

    def _notify(self, pod: Pod, status: dict[str, Any], annotations: dict[str, str | None]) -> None:
        metadata = pod["metadata"]
        identity = {name: metadata[name] for name in ("namespace", "name", "uid") if name in metadata}
        self.notify({"metadata": {**identity, "annotations": dict(annotations)}, "status": copied(status)})

    def _report(self, entry: TrackedPod, before: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Events for people: describe prints no reasons of conditions, so each change of what a pod waits for is one
        (K5). A lifecycle that is still creating is explained by what its probe waits for."""
        old, new = _explanation(before), _explanation(status)
        ready, reason, message = new
        if old != new and reason not in _TOLD_OTHERWISE:
            log.info("ready" if ready else "not ready", pod=entry.key, reason=reason, message=message)
            type_, event = ("Normal", "Healthy") if ready else ("Warning", "Unhealthy")
            self._report_event(entry.pod, type_, event, f"{reason}: {message}")
        if old[0] != ready:
            self._metrics.flip(ready)
            entry.flips.append((self._clock.now(), ready))
        if ready and entry.fresh:
            entry.fresh = False
            self._metrics.became_ready(entry.os, self._age(entry.pod))
        old_ip, new_ip = before.get("podIP"), status.get("podIP")
        if old_ip and new_ip and old_ip != new_ip:
            self._report_event(entry.pod, "Normal", "AddressChanged", f"address changed from {old_ip} to {new_ip}")


def _seeded_intent(annotations: Mapping[str, str]) -> Intent:
    state = annotations.get(ANNOTATION_LIFECYCLE_STATE, "")
    if state not in set(IntentState):
        return Intent()
    number = whole_number(annotations.get(ANNOTATION_LIFECYCLE_GENERATION, "")) or 0
    return Intent(IntentState(state), number, annotations.get(ANNOTATION_LIFECYCLE_MESSAGE, ""))


def dhcp_macs(vm: VM) -> frozenset[str]:
    """The MACs under which a VM may hold DHCP leases, in one spelling."""
    return frozenset(mac for nic in vm.nics if not nic.ip and (mac := normalize_mac(nic.mac)))


def _listed(macs: Set[str]) -> str | None:
    return ",".join(sorted(macs)) or None


def _seeded_setup(annotations: Mapping[str, str]) -> SetupState:
    state = annotations.get(ANNOTATION_SETUP_STATE, "")
    if state not in ("running", "done", "failed"):
        return SetupState()
    return SetupState(state, annotations.get(ANNOTATION_SETUP_HINT, ""), annotations.get(ANNOTATION_SETUP_ERRORS, ""))


def _explanation(status: Mapping[str, Any]) -> tuple[bool, str, str]:
    """Ready or not, and the reason and message that tell a person most."""
    ready, probe = condition_of(status, "Ready"), condition_of(status, PROBE_READY)
    says = probe if ready.get("reason") == Reason.LIFECYCLE_CREATING and probe.get("reason") else ready
    return ready.get("status") == "True", says.get("reason", ""), says.get("message", "")
