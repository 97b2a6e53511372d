"""What must hold at every instant of every run, whatever a scenario does; no expectation has to ask for it.

`RULES` is the list, and the page about the simulator prints it. Three observers feed it, each seeing what the others
cannot: `ClusterRules` looks at every change that Kubernetes has accepted, so a rule broken there is a lie that some
controller may already have believed; `simulator.witness` sits inside the daemon, where a late result is stored or a
forgotten pod is called back although nobody outside can see it yet; `simulator.life` watches the commands and processes
of the host. All of them report to one `Rulebook`, which says each broken rule once per pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from simulator.fake_kube_resources import Target
from simulator.fake_kube_store import Change, Store
from vkcocoon_kube import Object
from vkcocoon_net import is_unicast_ipv4
from vkcocoon_status import ANNOTATION_LIFECYCLE_STATE, LIFECYCLE_READY, OWNED_CONDITIONS, PROBE_READY, condition_of

__all__ = ["RULES", "ClusterRules", "Rulebook", "transition_problems"]

RULES = {
    # The cluster's view
    "ready means both halves": "A pod that is published Ready has a ready probe and a ready lifecycle (S2).",
    "ready means an address": "A pod that is published Ready has a valid IPv4 address (L1).",
    "ready means running": "A pod that is published Ready is in the phase Running.",
    "one ready pod an address": "No two managed pods are published Ready on one address (L10).",
    "status before annotation": "The annotation `lifecycle-state=ready` comes after a status with ready intent (S2.2).",
    "terminal stays terminal": "A pod that is Succeeded or Failed never has another phase again (K6).",
    # Inside the daemon
    "nothing after forget": "Once a probe is forgotten, nothing of it begins, is stored or is called back (P4).",
    "stopped by its owner": "Forgetting a probe on behalf of an owner stops only that owner's probe (P3).",
    "one probe at a time": "A pod has at most one probe in flight.",
    "three strikes": "What readers see is debounced: up by one success, down by three failures in a row (P1, S4.4).",
    "the pace of the contract": "Each pause is the one the debounced state asks for, to the microsecond (T2, T3).",
    "bounded probes": "No probe takes longer than its bound of 3 s (T1).",
    "said as probed": "What is handed over to be published is what the pod's own probe says (P1, S4.5).",
    "transitions tell the truth": "lastTransitionTime of a condition of ours stays while its status stays (K4).",
    "last words are last": "After Terminating only the terminal status is handed over, and nothing after that (K7).",
    # The host
    "one QEMU a VM": "No VM has two QEMUs on its disk (M1, M2).",
    "changes do not cross": "At most one command that changes a VM is under way for it (M2).",
    # The simulator itself
    "time goes forward": "Virtual time never goes backwards.",
}

MANAGED = "cocoonset.cocoonstack.io/managed"
TERMINAL = ("Succeeded", "Failed")


class Rulebook:
    """Takes broken rules from everybody; ``report(rule, key, text)`` is called the first time one is broken for a key,
    at that instant."""

    def __init__(self, report: Callable[[str, str, str], None]) -> None:
        self._report = report
        self._told: set[tuple[str, str]] = set()

    def broken(self, rule: str, key: str, text: str) -> None:
        if rule not in RULES:
            raise KeyError(rule)
        if (rule, key) not in self._told:
            self._told.add((rule, key))
            self._report(rule, key, text)


class ClusterRules:
    """Watches the pods of a store."""

    def __init__(self, store: Store, rulebook: Rulebook) -> None:
        self._rulebook = rulebook
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
            self._rulebook.broken(rule, key, text)

    def _problems(self, key: str, old: Object, pod: Object) -> Iterable[tuple[str, str]]:
        status, before = pod.get("status") or {}, old.get("status") or {}
        self._ready.pop(key, None)
        if _true(status, "Ready"):
            yield from self._ready_problems(key, pod, status)
        # A pod that was created with the annotation, from a copied manifest, is nobody's word about this one.
        if old and _lifecycle(pod) == "ready" != _lifecycle(old) and not _true(status, LIFECYCLE_READY):
            yield "status before annotation", "the ready annotation is visible before a status with ready intent"
        if before.get("phase") in TERMINAL and status.get("phase") != before["phase"]:
            yield "terminal stays terminal", f"{before['phase']} became {status.get('phase')}"

    def _ready_problems(self, key: str, pod: Object, status: Object) -> Iterable[tuple[str, str]]:
        ip = str(status.get("podIP", ""))
        managed = (pod["metadata"].get("annotations") or {}).get(MANAGED) == "true"
        if not (_true(status, PROBE_READY) and _true(status, LIFECYCLE_READY)):
            yield "ready means both halves", "Ready without a ready probe and a ready lifecycle"
        if not is_unicast_ipv4(ip):
            yield "ready means an address", f"Ready with podIP {ip!r}"
        if status.get("phase") != "Running":
            yield "ready means running", f"Ready in phase {status.get('phase')}"
        for other, (address, other_managed) in self._ready.items():
            if address == ip and managed and other_managed:
                yield "one ready pod an address", f"Ready on {ip}, where {other} is Ready too"
        self._ready[key] = (ip, managed)


def transition_problems(before: Mapping[str, Any], status: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Of two statuses handed over one after the other. What the cluster holds skips states when it is slow: there a
    time may have moved with a change and back that was never written."""
    for type_ in OWNED_CONDITIONS:
        old, new = condition_of(before, type_), condition_of(status, type_)
        if not (old and new):
            continue
        moved = old.get("lastTransitionTime") != new.get("lastTransitionTime")
        if old.get("status") == new.get("status") and moved:
            yield "transitions tell the truth", f"{type_} stayed {new['status']} and its transition time moved"


def _true(status: Object, type_: str) -> bool:
    return condition_of(status, type_).get("status") == "True"


def _lifecycle(pod: Object) -> str:
    return str(((pod.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION_LIFECYCLE_STATE, ""))
