"""Whether a pod fits on a node: the filters of a scheduler as one pure function.

Kept apart from the loop that uses it (``simulator.fake_kube_controllers``), because what fits has its own reasons to
change. Not modeled: affinity, topology spread, ports, volumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from simulator.fake_kube_rules import is_terminal
from vkcocoon_quantity import parse_quantity

__all__ = ["fits"]

Object = dict[str, Any]


def fits(pod: Object, node: Object, pods: Iterable[Object]) -> str:
    """Why the pod cannot go to the node, in the words of the scheduler; "" when it can. ``pods`` are those of all."""
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    for taint in _effective_taints(node):
        if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerates(pod, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    labels = node["metadata"].get("labels", {})
    if any(labels.get(key) != value for key, value in pod["spec"].get("nodeSelector", {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    return _lacking(pod, node, pods)


def _effective_taints(node: Object) -> list[Object]:
    taints: list[Object] = list(node["spec"].get("taints", []))
    ready: Object = next((item for item in node["status"].get("conditions", []) if item["type"] == "Ready"), {})
    if ready.get("status") != "True":
        # The controller that would taint it may be slower than we are, or switched off.
        taints.append({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"})
    return taints


def _tolerates(pod: Object, taint: Object) -> bool:
    for item in pod["spec"].get("tolerations", ()):
        key = item.get("key", taint["key"]) == taint["key"]
        effect = item.get("effect", taint["effect"]) == taint["effect"]
        exists = item.get("operator", "Equal") == "Exists"
        if key and effect and (exists or item.get("value", "") == taint.get("value", "")):
            return True
    return False


def _lacking(pod: Object, node: Object, pods: Iterable[Object]) -> str:
    allocatable = node["status"].get("allocatable", {})
    there = [
        other for other in pods if other["spec"].get("nodeName") == node["metadata"]["name"] and not is_terminal(other)
    ]
    if "pods" in allocatable and len(there) >= parse_quantity(allocatable["pods"]):
        return "Too many pods"
    for name, wanted in _requests(pod).items():
        used = sum((_requests(other).get(name, Decimal(0)) for other in there), Decimal(0))
        if used + wanted > parse_quantity(allocatable.get(name, "0")):
            return f"Insufficient {name}"
    return ""


def _requests(pod: Object) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for container in pod["spec"]["containers"]:
        resources = container["resources"]
        for name, text in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            total[name] = total.get(name, Decimal(0)) + parse_quantity(text)
    return {name: wanted for name, wanted in total.items() if wanted}
