"""What a pod's status says: the vocabulary of reasons, the lifecycle intent, and the status itself.

Everything here is pure: no input or output, no clock, no logger. The provider hands in what it knows (the pod, its
VM, the debounced probe result, the lifecycle intent, the time) and gets the complete status that Kubernetes should
hold. Kubernetes sees nothing else, so the one sentence this module serves is: Ready is the AND of a good probe and a
ready intent, and whoever reads the status can see which half is missing.

Imported by everybody, imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol, TypeVar

__all__ = [
    "ANNOTATION_GENERATION",
    "ANNOTATION_HIBERNATE",
    "ANNOTATION_ID",
    "ANNOTATION_IP",
    "ANNOTATION_LIFECYCLE_GENERATION",
    "ANNOTATION_LIFECYCLE_MESSAGE",
    "ANNOTATION_LIFECYCLE_STATE",
    "ANNOTATION_MAC",
    "ANNOTATION_PROBE_PORT",
    "ANNOTATION_SETUP_ERRORS",
    "ANNOTATION_SETUP_HINT",
    "ANNOTATION_SETUP_STATE",
    "ANNOTATION_VM_NAME",
    "ANNOTATION_VNC_PORT",
    "LIFECYCLE_READY",
    "MEANING",
    "OWNED_ANNOTATIONS",
    "OWNED_CONDITIONS",
    "OWNED_STATUS_FIELDS",
    "PROBE_READY",
    "Intent",
    "IntentState",
    "NotOurs",
    "Probe",
    "ProviderFailure",
    "Reason",
    "VMFacts",
    "build_pod_status",
    "build_terminal_status",
    "condition_of",
    "copied",
    "format_time",
    "lifecycle_annotations",
    "pod_key",
    "restart_count",
]

ANNOTATION_VM_NAME = "vm.cocoonstack.io/name"
ANNOTATION_PROBE_PORT = "vm.cocoonstack.io/probe-port"
ANNOTATION_HIBERNATE = "vm.cocoonstack.io/hibernate"
ANNOTATION_GENERATION = "cocoonset.cocoonstack.io/generation"

ANNOTATION_ID = "vm.cocoonstack.io/id"
ANNOTATION_IP = "vm.cocoonstack.io/ip"
ANNOTATION_VNC_PORT = "vm.cocoonstack.io/vnc-port"
ANNOTATION_MAC = "vm.cocoonstack.io/mac"  # whose DHCP leases are ours to give back, with commas between them
ANNOTATION_SETUP_STATE = "vm.cocoonstack.io/post-clone-state"
ANNOTATION_SETUP_HINT = "vm.cocoonstack.io/post-clone-hint"
ANNOTATION_SETUP_ERRORS = "vm.cocoonstack.io/post-clone-errors"
ANNOTATION_LIFECYCLE_STATE = "vm.cocoonstack.io/lifecycle-state"
ANNOTATION_LIFECYCLE_GENERATION = "vm.cocoonstack.io/lifecycle-observed-generation"
ANNOTATION_LIFECYCLE_MESSAGE = "vm.cocoonstack.io/lifecycle-state-message"

# What we write on a pod and nobody else does; everything else on it is read-only for us.
OWNED_ANNOTATIONS = (
    ANNOTATION_ID,
    ANNOTATION_IP,
    ANNOTATION_VNC_PORT,
    ANNOTATION_MAC,
    ANNOTATION_SETUP_STATE,
    ANNOTATION_SETUP_HINT,
    ANNOTATION_SETUP_ERRORS,
    ANNOTATION_LIFECYCLE_STATE,
    ANNOTATION_LIFECYCLE_GENERATION,
    ANNOTATION_LIFECYCLE_MESSAGE,
)
PROBE_READY = "cocoonstack.io/ProbeReady"
LIFECYCLE_READY = "cocoonstack.io/LifecycleReady"
OWNED_CONDITIONS = ("Initialized", "Ready", "ContainersReady", PROBE_READY, LIFECYCLE_READY)
OWNED_STATUS_FIELDS = (
    "phase",
    "startTime",
    "hostIP",
    "hostIPs",
    "podIP",
    "podIPs",
    "conditions",
    "containerStatuses",
)

MESSAGE_LIMIT = 4096  # characters of one message; the lifecycle contract cuts there


class Reason(StrEnum):
    """Why a pod is (not) ready: one vocabulary for conditions, events, logs, metrics and docs/not-ready.md."""

    PROBE_SUCCEEDED = "ProbeSucceeded"
    PING_SKIPPED = "PingSkipped"
    VM_GONE = "VMGone"
    WAITING_FOR_LEASE = "WaitingForLease"
    LEASE_FILE_UNREADABLE = "LeaseFileUnreadable"
    ADDRESS_CONFLICT = "AddressConflict"
    PING_TIMEOUT = "PingTimeout"
    PING_FAILED = "PingFailed"
    PORT_CLOSED = "PortClosed"
    INVALID_PROBE_PORT = "InvalidProbePort"
    NO_SSH_BANNER = "NoSSHBanner"
    QEMU_DEAD = "QEMUDead"
    QEMU_RESTARTING = "QEMURestarting"
    NOT_PROBED = "NotProbed"
    PROBE_TIMEOUT = "ProbeTimeout"
    PROBE_ERROR = "ProbeError"
    LIFECYCLE_READY = "LifecycleReady"
    LIFECYCLE_CREATING = "LifecycleCreating"
    LIFECYCLE_HIBERNATING = "LifecycleHibernating"
    LIFECYCLE_HIBERNATED = "LifecycleHibernated"
    LIFECYCLE_FAILED = "LifecycleFailed"
    TERMINATING = "Terminating"


MEANING: dict[Reason, str] = {
    Reason.PROBE_SUCCEEDED: "The guest answered.",
    Reason.PING_SKIPPED: "Degraded mode: the guest has an address and counts as ready unasked.",
    Reason.VM_GONE: "The VM no longer exists.",
    Reason.WAITING_FOR_LEASE: "No DHCP lease is in force for the VM's MAC.",
    Reason.LEASE_FILE_UNREADABLE: "No readable lease file has been seen since the start.",
    Reason.ADDRESS_CONFLICT: "Another managed pod is published Ready on the same address.",
    Reason.PING_TIMEOUT: "The echo was not answered in time.",
    Reason.PING_FAILED: "The echo was answered with an error, or could not be sent.",
    Reason.PORT_CLOSED: "The declared probe port did not accept a connection.",
    Reason.INVALID_PROBE_PORT: "The annotation of the probe port is no port.",
    Reason.NO_SSH_BANNER: "Port 22 of a macOS guest did not send the banner of an SSH server.",
    Reason.QEMU_DEAD: "The QEMU process of a macOS guest is gone, and no restart is under way.",
    Reason.QEMU_RESTARTING: "The QEMU process of a macOS guest is gone and is being started again.",
    Reason.NOT_PROBED: "Nobody probes the guest: vk-cocoon has not come that far since its start, or disowns the pod.",
    Reason.PROBE_TIMEOUT: "The probe used up its 3 s without an answer.",
    Reason.PROBE_ERROR: "The probe itself failed, which is a mistake of vk-cocoon's or of the host's.",
    Reason.LIFECYCLE_READY: "The lifecycle wants the pod ready.",
    Reason.LIFECYCLE_CREATING: "The VM is being brought up, or has no address yet.",
    Reason.LIFECYCLE_HIBERNATING: "The VM is being hibernated.",
    Reason.LIFECYCLE_HIBERNATED: "The VM is hibernated.",
    Reason.LIFECYCLE_FAILED: "The last operation on the VM failed.",
    Reason.TERMINATING: "The pod is being deleted.",
}


class ProviderFailure(Exception):
    """Something outside of us failed or was asked for wrongly: told by its text, tried again, no mistake of ours."""


class NotOurs(Exception):
    """The pod is bound to this node but asks for no VM; the message names what is missing (K9)."""


class IntentState(StrEnum):
    """The lifecycle states of the annotation contract, in the order of a pod's life."""

    CREATING = "creating"
    READY = "ready"
    HIBERNATING = "hibernating"
    HIBERNATED = "hibernated"
    FAILED = "failed"


_LIFECYCLE_REASON = {
    IntentState.CREATING: Reason.LIFECYCLE_CREATING,
    IntentState.READY: Reason.LIFECYCLE_READY,
    IntentState.HIBERNATING: Reason.LIFECYCLE_HIBERNATING,
    IntentState.HIBERNATED: Reason.LIFECYCLE_HIBERNATED,
    IntentState.FAILED: Reason.LIFECYCLE_FAILED,
}
_LIFECYCLE_TEXT = {
    IntentState.CREATING: "the VM is being brought up or waits for its address",
    IntentState.READY: "",
    IntentState.HIBERNATING: "the VM is being hibernated",
    IntentState.HIBERNATED: "the VM is hibernated",
    IntentState.FAILED: "the last lifecycle operation failed",
}


@dataclass(frozen=True, slots=True)
class Intent:
    """What the lifecycle wants the pod to be: one half of Ready. Replaced, never changed."""

    state: IntentState = IntentState.CREATING
    generation: int = 0
    message: str = ""

    @property
    def ready(self) -> bool:
        return self.state is IntentState.READY

    @property
    def reason(self) -> Reason:
        return _LIFECYCLE_REASON[self.state]

    @property
    def text(self) -> str:
        return self.message or _LIFECYCLE_TEXT[self.state]

    def allows(self, state: IntentState, generation: int) -> bool:
        """May this intent be followed by ``state``? An older generation never; after a failure only a new attempt
        or a newer generation (a late success of the failed attempt must not hide it)."""
        if generation < self.generation:
            return False
        if self.state is IntentState.FAILED and generation == self.generation:
            return state in (IntentState.FAILED, IntentState.CREATING, IntentState.HIBERNATING)
        return True


class Probe(Protocol):
    """The part of a probe result that a status shows (vkcocoon_probes.ProbeResult has it)."""

    @property
    def ready(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def message(self) -> str: ...


class VMFacts(Protocol):
    """The part of a VM record that a status shows (vkcocoon_vms.VM has it)."""

    @property
    def id(self) -> str: ...


Json = TypeVar("Json")


def copied(value: Json) -> Json:
    """A copy of plain JSON data that shares nothing mutable with it; several times faster than copy.deepcopy."""
    # Most items are scalars: they are told here, not in a call of their own.
    if isinstance(value, dict):
        return {key: copied(item) if isinstance(item, (dict, list)) else item for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list):
        return [copied(item) if isinstance(item, (dict, list)) else item for item in value]  # type: ignore[return-value]
    return value


def pod_key(pod: Mapping[str, Any]) -> str:
    """``namespace/name`` of a pod dict."""
    metadata = pod["metadata"]
    return f"{metadata.get('namespace', 'default')}/{metadata['name']}"


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as the API server stores times (`2026-01-01T00:00:00Z`)."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition_of(status: Mapping[str, Any], type_: str) -> dict[str, Any]:
    """The condition of that type in a status, or an empty dict."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == type_:
            return dict(condition)
    return {}


def lifecycle_annotations(intent: Intent) -> dict[str, str | None]:
    """The annotation triple, always written together; the message is absent (None) when there is none."""
    return {
        ANNOTATION_LIFECYCLE_STATE: intent.state.value,
        ANNOTATION_LIFECYCLE_GENERATION: str(intent.generation),
        ANNOTATION_LIFECYCLE_MESSAGE: intent.message or None,
    }


def build_pod_status(
    pod: Mapping[str, Any],
    vm: VMFacts | None,
    probe: Probe,
    intent: Intent,
    now: datetime,
    *,
    ip: str = "",
    host_ip: str = "",
    restarts: int = 0,
    terminating: bool = False,
    previous: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The complete pod status that we own, as a dict in the API's spelling.

    ``probe`` is the debounced result, ``ip`` the address to publish ("" for none), ``previous`` the status published
    last: times move only where a value moved (K4). Without a VM the pod is Pending and has no address; a hibernated
    one has no container statuses either, because the operator takes any running container for a live VM.
    """
    before = previous or pod.get("status") or {}
    stamp = format_time(now)
    ready = vm is not None and probe.ready and intent.ready and not terminating
    status: dict[str, Any] = {"phase": "Running" if vm is not None else "Pending"}
    if started := before.get("startTime") or (stamp if vm is not None else None):
        status["startTime"] = started
    if host_ip:
        status["hostIP"], status["hostIPs"] = host_ip, [{"ip": host_ip}]
    if vm is not None and ip:
        status["podIP"], status["podIPs"] = ip, [{"ip": ip}]
    status["conditions"] = _conditions(probe, intent, ready, terminating, has_vm=vm is not None)
    _keep_transition_times(status["conditions"], before, stamp)
    if intent.state is not IntentState.HIBERNATED or vm is not None:
        state = _container_state(intent, before, stamp, has_vm=vm is not None)
        status["containerStatuses"] = _container_statuses(pod, before, state, ready, restarts)
        if vm is not None:
            for container in status["containerStatuses"]:
                container["containerID"] = f"cocoon://{vm.id}"
    return status


def shows_ready(status: Mapping[str, Any]) -> bool:
    """Does a status in the API say Ready, and is it one of ours?"""
    return bool(condition_of(status, PROBE_READY)) and condition_of(status, "Ready").get("status") == "True"


def build_withheld_status(before: Mapping[str, Any], now: datetime, reason: str, message: str) -> dict[str, Any]:
    """The status that the API holds, not Ready any more: what else is in it, nobody has looked at."""
    status = {name: copied(before[name]) for name in OWNED_STATUS_FIELDS if name in before}
    for type_ in ("Ready", "ContainersReady", PROBE_READY):
        changed = _condition(type_, False, reason, message)
        status["conditions"] = [changed if each["type"] == type_ else each for each in status["conditions"]]
    status["conditions"] = [each for each in status["conditions"] if each["type"] in OWNED_CONDITIONS]
    _keep_transition_times(status["conditions"], before, format_time(now))
    for container in status.get("containerStatuses") or ():
        container["ready"] = False
    return status


def build_terminal_status(
    pod: Mapping[str, Any],
    now: datetime,
    *,
    previous: Mapping[str, Any] | None = None,
    phase: str = "Succeeded",
    reason: str = "Completed",
    message: str = "",
) -> dict[str, Any]:
    """The last status of a pod: terminal phase, nothing ready, every container terminated."""
    before = previous or pod.get("status") or {}
    stamp = format_time(now)
    exit_code = 0 if phase == "Succeeded" else 1
    status: dict[str, Any] = {"phase": phase}
    for field in ("startTime", "hostIP", "hostIPs", "podIP", "podIPs"):
        if field in before:
            status[field] = before[field]
    status["conditions"] = [
        _condition("Initialized", True),
        _condition("Ready", False, Reason.TERMINATING, message or "the VM is gone"),
        _condition("ContainersReady", False, Reason.TERMINATING, message or "the VM is gone"),
        _condition(PROBE_READY, False, Reason.TERMINATING, ""),
        _condition(LIFECYCLE_READY, False, Reason.TERMINATING, ""),
    ]
    _keep_transition_times(status["conditions"], before, stamp)
    started = _started_at(before) or before.get("startTime") or stamp
    ended = {"exitCode": exit_code, "reason": reason, "startedAt": started, "finishedAt": stamp}
    if message:
        ended["message"] = message[:MESSAGE_LIMIT]
    status["containerStatuses"] = _container_statuses(pod, before, {"terminated": ended}, False, restart_count(before))
    return status


# --- conditions ---------------------------------------------------------------------------------------------------


def _conditions(probe: Probe, intent: Intent, ready: bool, terminating: bool, *, has_vm: bool) -> list[dict[str, Any]]:
    """Ready and the two halves it is made of (K5); its reason is the lifecycle's until the intent is ready."""
    if terminating:
        reason, message = str(Reason.TERMINATING), "the pod is being deleted"
    elif not intent.ready:
        reason, message = str(intent.reason), intent.text
    elif not has_vm:
        reason, message = str(Reason.VM_GONE), "the pod has no VM"
    else:
        reason, message = probe.reason, probe.message
    return [
        _condition("Initialized", True),
        _condition("Ready", ready, reason, message),
        _condition("ContainersReady", ready, reason, message),
        _condition(PROBE_READY, probe.ready, probe.reason, probe.message),
        _condition(LIFECYCLE_READY, intent.ready, intent.reason, intent.text),
    ]


def _condition(type_: str, true: bool, reason: str = "", message: str = "") -> dict[str, Any]:
    """Reason and message are always there, empty or not: a merge by type would leave a stale text otherwise."""
    return {
        "type": type_,
        "status": "True" if true else "False",
        "reason": str(reason),
        "message": message[:MESSAGE_LIMIT],
    }


def _keep_transition_times(conditions: list[dict[str, Any]], before: Mapping[str, Any], stamp: str) -> None:
    for condition in conditions:
        old = condition_of(before, condition["type"])
        same = old.get("status") == condition["status"] and old.get("lastTransitionTime")
        condition["lastTransitionTime"] = old["lastTransitionTime"] if same else stamp


# --- containers ---------------------------------------------------------------------------------------------------


def _container_state(intent: Intent, before: Mapping[str, Any], stamp: str, *, has_vm: bool) -> dict[str, Any]:
    if has_vm:
        return {"running": {"startedAt": _started_at(before) or stamp}}
    if intent.state is IntentState.FAILED:
        return {"waiting": {"reason": str(Reason.LIFECYCLE_FAILED), "message": intent.text[:MESSAGE_LIMIT]}}
    return {"waiting": {"reason": "ContainerCreating"}}  # the word kubectl users know


def _container_statuses(
    pod: Mapping[str, Any], before: Mapping[str, Any], state: dict[str, Any], ready: bool, restarts: int
) -> list[dict[str, Any]]:
    """One status per container of the spec: the API replaces the list whole, and kubectl counts n/m from it."""
    count = max(restarts, restart_count(before))
    return [
        {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": "",
            "ready": ready,
            "started": "running" in state,
            "restartCount": count,
            "state": state,
        }
        for container in (pod.get("spec") or {}).get("containers") or ()
    ]


def _started_at(before: Mapping[str, Any]) -> str | None:
    for container in before.get("containerStatuses") or ():
        running = (container.get("state") or {}).get("running") or {}
        if running.get("startedAt"):
            return str(running["startedAt"])
    return None


def vm_id_of(pod: Mapping[str, Any]) -> str:
    """The id of the VM that we wrote on a pod: in its annotation, else in the status of its containers; "" for none."""
    if found := (pod["metadata"].get("annotations") or {}).get(ANNOTATION_ID):
        return str(found)
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        scheme, _, found = str(container.get("containerID") or "").partition("://")
        if scheme == "cocoon" and found:
            return found
    return ""


def restart_count(before: Mapping[str, Any]) -> int:
    """How often the guest was restarted, by a status; it never goes down, also over a restart of the daemon."""
    return max(
        (int(container.get("restartCount") or 0) for container in before.get("containerStatuses") or ()), default=0
    )
