"""Tables: the form in which a server answers ``kubectl get``, with the columns and words people know.

What kubectl prints under STATUS or READY is decided on the server, so this is where a pod status that is wrong in
subtle ways shows itself to a person. Pure functions of objects and the present time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from simulator.fake_kube_resources import Resource
from simulator.fake_kube_rules import is_terminal

__all__ = ["columns_of", "human_duration", "pod_status_word", "table"]

Object = dict[str, Any]
_NONE, _UNKNOWN = "<none>", "<unknown>"


@dataclass(frozen=True, slots=True)
class _Column:
    """``priority`` 1 is shown by ``-o wide`` only."""

    name: str
    cell: Callable[[Object, datetime], Any]
    type: str = "string"
    format: str = ""
    priority: int = 0

    def definition(self) -> Object:
        shown: Object = {"name": self.name, "type": self.type, "format": self.format, "description": ""}
        return {**shown, "priority": self.priority}


def table(resource: Resource, objects: Iterable[Object], now: datetime, *, include: str, metadata: Object) -> Object:
    """A meta.k8s.io/v1 Table; ``include`` is None, Metadata or Object, ``metadata`` that of the list."""
    columns = columns_of(resource)
    rows = [
        {"cells": [column.cell(obj, now) for column in columns], "object": _included(obj, include)} for obj in objects
    ]
    head = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    return {**head, "columnDefinitions": [column.definition() for column in columns], "rows": rows}


def columns_of(resource: Resource) -> tuple[_Column, ...]:
    return _COLUMNS.get(resource.plural, _DEFAULT)


def _included(obj: Object, include: str) -> Object | None:
    if include == "None":
        return None
    if include == "Object":
        return obj
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


# Words shared by all kinds -------------------------------------------------------------------------------------------


def human_duration(span: timedelta) -> str:
    """An age in at most two units, as kubectl says it: 119s, 5m30s, 3h, 2d4h, 1y10d."""
    seconds = int(span.total_seconds())
    if seconds < 0:
        return "<invalid>" if seconds < -1 else "0s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return _two(minutes, "m", seconds % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _two(days, "d", hours % 24, "h")
    if days < 730:
        return f"{days}d"
    return _two(days // 365, "y", days % 365, "d") if days < 8 * 365 else f"{days // 365}y"


def _two(big: int, big_unit: str, small: int, small_unit: str) -> str:
    return f"{big}{big_unit}{small}{small_unit}" if small else f"{big}{big_unit}"


def _since(text: str | None, now: datetime) -> str:
    return human_duration(now - datetime.fromisoformat(text)) if text else _UNKNOWN


def _age(obj: Object, now: datetime) -> str:
    return _since(obj["metadata"].get("creationTimestamp"), now)


def _at(*path: str, missing: str = _NONE) -> Callable[[Object, datetime], str]:
    def cell(obj: Object, now: datetime) -> str:
        value: Any = obj
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return str(value) if value else missing

    return cell


def _count(key: str) -> Callable[[Object, datetime], int]:
    return lambda obj, now: len(obj.get(key) or ())


_NAME = _Column("Name", _at("metadata", "name"), format="name")
_AGE = _Column("Age", _age)


# Pods ----------------------------------------------------------------------------------------------------------------


def _ready(pod: Object, now: datetime) -> str:
    # A container counts while it runs and says it is ready; one that ended cannot be.
    ready = [item for item in _statuses(pod) if item["ready"] and "running" in item["state"]]
    return f"{len(ready)}/{len(pod['spec'].get('containers') or ())}"


def _statuses(pod: Object) -> list[Object]:
    statuses: list[Object] = pod["status"].get("containerStatuses", [])
    return statuses


def _condition(pod: Object, type_: str) -> Object:
    conditions = pod["status"].get("conditions", [])
    return next((item for item in conditions if item["type"] == type_), {})


def pod_status_word(pod: Object, now: datetime | None = None) -> str:
    """What kubectl prints under STATUS."""
    status = pod["status"]
    if "deletionTimestamp" in pod["metadata"]:
        if status.get("reason") == "NodeLost":
            return "Unknown"
        if not is_terminal(pod):
            return "Terminating"
    word = status.get("reason") or status.get("phase", "")
    if _condition(pod, "PodScheduled").get("reason") == "SchedulingGated":
        word = "SchedulingGated"
    init = _init_word(pod)
    if init and _condition(pod, "Initialized").get("status") != "True":
        return init
    return _container_word(pod, word)


def _init_word(pod: Object) -> str:
    """The first init container that has not finished, or nothing."""
    total = len(pod["spec"].get("initContainers", ()))
    for index, item in enumerate(pod["status"].get("initContainerStatuses", ())):
        ended, waiting = item["state"].get("terminated"), item["state"].get("waiting", {}).get("reason", "")
        if ended is not None and ended["exitCode"] == 0:
            continue
        if ended is not None:
            return f"Init:{_end_word(ended)}"
        return f"Init:{waiting}" if waiting not in ("", "PodInitializing") else f"Init:{index}/{total}"
    return ""


def _end_word(ended: Object) -> str:
    if ended.get("reason"):
        return str(ended["reason"])
    return f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended['exitCode']}"


def _container_word(pod: Object, word: str) -> str:
    running = False
    # From last to first, so that the first container with something to say wins.
    for item in reversed(_statuses(pod)):
        state = item["state"]
        if state.get("waiting", {}).get("reason"):
            word = state["waiting"]["reason"]
        elif "terminated" in state:
            word = _end_word(state["terminated"])
        elif item["ready"] and "running" in state:
            running = True
    if word == "Completed" and running:
        return "Running" if _condition(pod, "Ready").get("status") == "True" else "NotReady"
    return word


def _restarts(pod: Object, now: datetime) -> str:
    statuses = _statuses(pod)
    count = sum(item["restartCount"] for item in statuses)
    ends = [item["lastState"].get("terminated", {}).get("finishedAt") for item in statuses]
    last = max((end for end in ends if end), default="")
    return f"{count} ({_since(last, now)} ago)" if count and last else str(count)


def _readiness_gates(pod: Object, now: datetime) -> str:
    gates = pod["spec"].get("readinessGates", ())
    met = [gate for gate in gates if _condition(pod, gate["conditionType"]).get("status") == "True"]
    return f"{len(met)}/{len(gates)}" if gates else _NONE


# Nodes ---------------------------------------------------------------------------------------------------------------


def _node_status(node: Object, now: datetime) -> str:
    status = _condition(node, "Ready").get("status")
    words = ["Unknown" if status is None else "Ready" if status == "True" else "NotReady"]
    if node["spec"].get("unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _roles(node: Object, now: datetime) -> str:
    prefix, labels = "node-role.kubernetes.io/", node["metadata"].get("labels", {})
    roles = {key.removeprefix(prefix) for key in labels if key.startswith(prefix)}
    roles |= {labels[key] for key in ("kubernetes.io/role",) if labels.get(key)}
    return ",".join(sorted(roles - {""})) or _NONE


def _address(type_: str) -> Callable[[Object, datetime], str]:
    def cell(node: Object, now: datetime) -> str:
        addresses = node["status"].get("addresses", ())
        return next((item["address"] for item in addresses if item["type"] == type_), _NONE)

    return cell


# Events and the rest -------------------------------------------------------------------------------------------------


def _last_seen(event: Object, now: datetime) -> str:
    series = event.get("series", {}).get("lastObservedTime")
    return _since(series or event.get("lastTimestamp") or event.get("eventTime"), now)


def _first_seen(event: Object, now: datetime) -> str:
    return _since(event.get("firstTimestamp") or event.get("eventTime"), now)


def _involved(event: Object, now: datetime) -> str:
    involved = event["involvedObject"]
    return f"{involved.get('kind', '').lower()}/{involved.get('name', '')}"


def _source(event: Object, now: datetime) -> str:
    source = event["source"]
    component = source.get("component") or event.get("reportingComponent", "")
    return f"{component}, {source['host']}" if source.get("host") else component


def _message(event: Object, now: datetime) -> str:
    return str(event.get("message", "")).strip()


_DEFAULT = (_NAME, _Column("Created At", _at("metadata", "creationTimestamp"), type="date"))

_COLUMNS: dict[str, tuple[_Column, ...]] = {
    "pods": (
        _NAME,
        _Column("Ready", _ready),
        _Column("Status", pod_status_word),
        _Column("Restarts", _restarts),
        _AGE,
        _Column("IP", _at("status", "podIP"), priority=1),
        _Column("Node", _at("spec", "nodeName"), priority=1),
        _Column("Nominated Node", _at("status", "nominatedNodeName"), priority=1),
        _Column("Readiness Gates", _readiness_gates, priority=1),
    ),
    "nodes": (
        _NAME,
        _Column("Status", _node_status),
        _Column("Roles", _roles),
        _AGE,
        _Column("Version", _at("status", "nodeInfo", "kubeletVersion", missing="")),
        _Column("Internal-IP", _address("InternalIP"), priority=1),
        _Column("External-IP", _address("ExternalIP"), priority=1),
        _Column("OS-Image", _at("status", "nodeInfo", "osImage", missing=_UNKNOWN), priority=1),
        _Column("Kernel-Version", _at("status", "nodeInfo", "kernelVersion", missing=_UNKNOWN), priority=1),
        _Column(
            "Container-Runtime", _at("status", "nodeInfo", "containerRuntimeVersion", missing=_UNKNOWN), priority=1
        ),
    ),
    "events": (
        _Column("Last Seen", _last_seen),
        _Column("Type", _at("type", missing="")),
        _Column("Reason", _at("reason", missing="")),
        _Column("Object", _involved),
        _Column("Subobject", _at("involvedObject", "fieldPath", missing=""), priority=1),
        _Column("Source", _source, priority=1),
        _Column("Message", _message),
        _Column("First Seen", _first_seen, priority=1),
        _Column("Count", _at("count", missing="1"), priority=1),
        _Column("Name", _at("metadata", "name"), priority=1, format="name"),
    ),
    "namespaces": (_NAME, _Column("Status", _at("status", "phase")), _AGE),
    "leases": (_NAME, _Column("Holder", _at("spec", "holderIdentity", missing="")), _AGE),
    "configmaps": (_NAME, _Column("Data", _count("data"), type="integer"), _AGE),
    "secrets": (_NAME, _Column("Type", _at("type")), _Column("Data", _count("data"), type="integer"), _AGE),
    "serviceaccounts": (_NAME, _Column("Secrets", _count("secrets"), type="integer"), _AGE),
}
