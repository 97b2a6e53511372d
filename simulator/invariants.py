"""What must hold at every instant of every run, whatever the scenario does.

Each rule looks at one change that Kubernetes has just accepted and says what is wrong with it, or nothing. They see
only what the cluster sees, so a rule that is broken is a lie that some controller may already have believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simulator.fake_kube_resources import Target
from simulator.fake_kube_store import Change, Store
from vkcocoon_kube import Object
from vkcocoon_net import is_unicast_ipv4
from vkcocoon_status import ANNOTATION_LIFECYCLE_STATE, LIFECYCLE_READY, PROBE_READY, condition_of

__all__ = ["Invariants"]

MANAGED = "cocoonset.cocoonstack.io/managed"


class Invariants:
    """Watches a store; ``broken(rule, key, text)`` is called at the instant a rule is broken."""

    def __init__(self, store: Store, broken: Callable[[str, str, str], None]) -> None:
        self._broken = broken
        self._ready: dict[str, tuple[str, bool]] = {}  # key -> address it is Ready on, managed
        store.on_change.append(self._check)

    def _check(self, target: Target, change: Change) -> None:
        if target.resource.plural != "pods":
            return
        key = f"{target.namespace}/{target.name}"
        pod = change.new
        if pod is None:
            self._ready.pop(key, None)
            return
        for rule, text in self._problems(key, change.old or {}, pod):
            self._broken(rule, key, text)

    def _problems(self, key: str, old: Object, pod: Object) -> Iterable[tuple[str, str]]:
        status = pod.get("status") or {}
        ready = _true(status, "Ready")
        ip = str(status.get("podIP", ""))
        managed = (pod["metadata"].get("annotations") or {}).get(MANAGED) == "true"
        self._ready.pop(key, None)
        if ready:
            yield from self._ready_problems(key, status, ip, managed)
            self._ready[key] = (ip, managed)
        if old and _lifecycle(pod) == "ready" != _lifecycle(old) and not _true(status, LIFECYCLE_READY):
            yield "status before annotation", "the ready annotation is visible before a status with ready intent"

    def _ready_problems(self, key: str, status: Object, ip: str, managed: bool) -> Iterable[tuple[str, str]]:
        if not (_true(status, PROBE_READY) and _true(status, LIFECYCLE_READY)):
            yield "ready means both halves", "Ready without a ready probe and a ready lifecycle"
        if not is_unicast_ipv4(ip):
            yield "ready means an address", f"Ready with podIP {ip!r}"
        if status.get("phase") != "Running":
            yield "ready means running", f"Ready in phase {status.get('phase')}"
        for other, (address, other_managed) in self._ready.items():
            if address == ip and managed and other_managed:
                yield "one ready pod an address", f"Ready on {ip}, where {other} is Ready too"


def _true(status: Object, type_: str) -> bool:
    return condition_of(status, type_).get("status") == "True"


def _lifecycle(pod: Object) -> str:
    return str(((pod.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION_LIFECYCLE_STATE, ""))
