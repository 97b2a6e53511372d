"""What the daemon knows, in one document: for `vk-cocoon status`, the status page and whoever reads JSON.

The keys of the document are a promise: within a minor version they only grow (tests/golden/status.json holds them). A
pod's `reason` and `message` are those of its published condition, of the Event and of the metrics, so that everybody
who looks anywhere reads the same word.

Everything here reads memory and never switches greenlets, so the document is one moment; the lease file is looked at
as a probe does. Times are seconds on the monotonic clock where they are distances, RFC 3339 where they are instants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkcocoon_guests import way_of
from vkcocoon_http import Check, asked
from vkcocoon_probes import FAILURE_THRESHOLD, Clock, ProbeAgent
from vkcocoon_spec import PodSpec
from vkcocoon_status import LIFECYCLE_READY, PROBE_READY, condition_of, format_time, pod_key
from vkcocoon_tracking import PodTable, TrackedPod

__all__ = ["Overview"]

HISTORY_S = 3600.0  # of flips
NOT_OURS = "NotOurs"
WAITING_FOR_ACTOR = "its turn has not come yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Where the document comes from."""

    node: str
    version: str
    clock: Clock
    held: PodTable  # pods the provider has
    assigned: Callable[[], Iterable[Mapping[str, Any]]]  # pods the API has bound to this node
    unpublished: Callable[[], Collection[str]]  # keys of pods whose newest state the API does not hold yet
    checks: Sequence[Check]
    degraded: bool
    began: float  # monotonic instant of the process's start

    def document(self) -> dict[str, Any]:
        """Everything, as plain JSON data."""
        owed = set(self.unpublished())
        answers = [(check, asked(check)) for check in self.checks]
        pods = [self._held_pod(entry, entry.key in owed) for entry in self.held]
        pods += [self._bound_pod(pod) for pod in self.assigned() if pod["metadata"]["uid"] not in self.held]
        return {
            "node": self.node,
            "version": self.version,
            "now": format_time(self.clock.now()),
            "uptime_seconds": round(self.clock.monotonic() - self.began, 3),
            "healthy": not any(trouble for check, trouble in answers if check.live),
            "ready": not any(trouble for _, trouble in answers),
            "pinger_degraded": self.degraded,
            "checks": [{"name": check.name, "live": check.live, "trouble": trouble} for check, trouble in answers],
            "pods": sorted(pods, key=lambda pod: (pod["namespace"], pod["name"], pod["uid"])),
        }

    def _held_pod(self, entry: TrackedPod, owed: bool) -> dict[str, Any]:
        status = entry.status or {}
        probe = condition_of(status, PROBE_READY)
        return {
            **_identity(entry.pod, entry.spec),
            "vm_id": entry.vm.id if entry.vm is not None else "",
            "ip": entry.published_ip,
            "ready": entry.ready,
            "reason": entry.reason,
            "message": entry.message,
            "lifecycle": str(entry.intent.state),
            "lifecycle_ready": condition_of(status, LIFECYCLE_READY).get("status") == "True",
            "probe_ready": probe.get("status") == "True",
            "probe_reason": probe.get("reason", ""),
            "since": condition_of(status, "Ready").get("lastTransitionTime"),
            "restarts": entry.restarts,
            "terminating": entry.terminating,
            "published": not owed,
            "last_probe": self._last_probe(entry.agent),
            "flips": self._flips(entry),
        }

    def _bound_pod(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """A pod that the API has bound to us and the provider does not have: not yet, no more, or not ours at all."""
        status, spec = pod.get("status") or {}, PodSpec.of(pod)
        ready = condition_of(status, "Ready")
        if not spec.vm_name:
            reason, message = NOT_OURS, "it names no VM: annotation vm.cocoonstack.io/name is missing"
        elif status.get("phase") in ("Succeeded", "Failed"):
            reason, message = str(status["phase"]), "it has ended"
        else:
            reason, message = ready.get("reason", ""), ready.get("message", "") or WAITING_FOR_ACTOR
        return {
            **_identity(pod, spec),
            "vm_id": "",
            "ip": "",
            "ready": False,
            "reason": reason,
            "message": message,
            "lifecycle": "",
            "lifecycle_ready": False,
            "probe_ready": False,
            "probe_reason": "",
            "since": ready.get("lastTransitionTime"),
            "restarts": 0,
            "terminating": bool(pod["metadata"].get("deletionTimestamp")),
            "published": True,
            "last_probe": None,
            "flips": [],
        }

    def _last_probe(self, agent: ProbeAgent | None) -> dict[str, Any] | None:
        """The newest raw result, which readers of the pod may not see yet; None when nobody probes."""
        if agent is None or agent.last.at is None:
            return None
        return {
            "at": format_time(agent.last.at),
            "ready": agent.last.ready,
            "reason": str(agent.last.reason),
            "message": agent.last.message,
            "took_seconds": round(agent.took, 6),
            "failures": agent.failures,
            "failure_threshold": FAILURE_THRESHOLD,
            "next_seconds": round(agent.due - self.clock.monotonic(), 3),
        }

    def _flips(self, entry: TrackedPod) -> list[dict[str, Any]]:
        """The changes of Ready within the last hour, and the state before them as the first of its kind."""
        now = self.clock.now()
        recent = [(at, ready) for at, ready in entry.flips if (now - at).total_seconds() <= HISTORY_S]
        return [{"at": format_time(at), "ready": ready} for at, ready in recent]


def _identity(pod: Mapping[str, Any], spec: PodSpec) -> dict[str, Any]:
    namespace, _, name = pod_key(pod).partition("/")
    return {
        "namespace": namespace,
        "name": name,
        "uid": pod["metadata"]["uid"],
        "created": pod["metadata"].get("creationTimestamp"),
        "os": spec.os,
        "vm": spec.vm_name,
        "probe": way_of(spec) if spec.vm_name else "",
    }
