"""A sample of what VMs use, in the two forms that others read: /metrics/resource and /stats/summary.

The first is what metrics-server scrapes, and with it `kubectl top` and autoscalers. It looks for names and labels byte
by byte, takes the rate of the CPU counters by the time that stands behind each value, finds a container by the name in
the pod's spec, and drops a pod of which one number is missing or zero. The second is the older form, for whoever still
asks for it. A VM is one container to both: the first one of its pod.

Pure functions that yield a page in parts, each little enough work that somebody else may run in between.
Used by vkcocoon_kubelet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from vkcocoon_stats import NodeUsage, Sample, Usage
from vkcocoon_status import format_time

__all__ = ["resource_metrics", "summary"]

PART = 100  # pods in one part of a page
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def resource_metrics(sample: Sample) -> Iterator[bytes]:
    """The text of /metrics/resource, family by family."""
    if sample.node is not None:
        at = _milliseconds(sample.node.at)
        yield _head("node_cpu_usage_seconds_total", "counter", "CPU time used by the node in seconds")
        yield f"node_cpu_usage_seconds_total {sample.node.cpu_s!r} {at}\n".encode()
        yield _head("node_memory_working_set_bytes", "gauge", "Working set of the node in bytes")
        yield f"node_memory_working_set_bytes {sample.node.working_set} {at}\n".encode()
    rows = [_Row(usage) for usage in sample.pods]
    for name, kind, text, value in FAMILIES if rows else ():
        yield _head(name, kind, text)
        for part in _parts(rows):
            yield "".join([f"{name}{value(row)}\n" for row in part]).encode()
    yield _head("resource_scrape_error", "gauge", "1 if the numbers could not be read, 0 otherwise")
    yield f"resource_scrape_error {int(sample.node is None)}\n".encode()


class _Row:
    """One VM's texts."""

    __slots__ = ("at", "container", "cpu", "memory", "pod", "started")

    def __init__(self, usage: Usage) -> None:
        subject = usage.subject
        pod = f'namespace="{_escaped(subject.namespace)}",pod="{_escaped(subject.name)}"'
        self.container = f'{{container="{_escaped(subject.container)}",{pod}}}'
        self.pod = f"{{{pod}}}"
        self.cpu = repr(usage.cpu_s)
        self.memory = usage.memory
        self.started = repr((usage.started - EPOCH).total_seconds())
        self.at = _milliseconds(usage.at)


FAMILIES: tuple[tuple[str, str, str, Callable[[_Row], str]], ...] = (
    (
        "container_cpu_usage_seconds_total",
        "counter",
        "CPU time used by the container in seconds",
        lambda row: f"{row.container} {row.cpu} {row.at}",
    ),
    (
        "container_memory_working_set_bytes",
        "gauge",
        "Working set of the container in bytes",
        lambda row: f"{row.container} {row.memory} {row.at}",
    ),
    (
        "container_start_time_seconds",
        "gauge",
        "Start time of the container in seconds of the epoch",
        lambda row: f"{row.container} {row.started}",  # true ever since: a time behind it would make it look stale
    ),
    (
        "pod_cpu_usage_seconds_total",
        "counter",
        "CPU time used by the pod in seconds",
        lambda row: f"{row.pod} {row.cpu} {row.at}",
    ),
    (
        "pod_memory_working_set_bytes",
        "gauge",
        "Working set of the pod in bytes",
        lambda row: f"{row.pod} {row.memory} {row.at}",
    ),
)


def _head(name: str, kind: str, text: str) -> bytes:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _milliseconds(moment: datetime) -> int:
    return round((moment - EPOCH).total_seconds() * 1000)


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), PART):
        yield items[begin : begin + PART]


def summary(sample: Sample, node_name: str) -> Iterator[bytes]:
    """The JSON of /stats/summary."""
    yield b'{"node":' + _json({"nodeName": node_name, **(_node(sample.node) if sample.node else {})}) + b',"pods":['
    separator = b""
    for part in _parts(sample.pods):
        yield separator + b",".join(_json(_pod(usage)) for usage in part)
        separator = b","
    yield b"]}\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _node(node: NodeUsage) -> dict[str, Any]:
    at = format_time(node.at)
    return {
        "startTime": format_time(node.started),
        "cpu": _cpu_stats(at, node.cpu_s, node.cpu_rate),
        "memory": {
            "time": at,
            "availableBytes": node.available,
            "usageBytes": node.used,
            "workingSetBytes": node.working_set,
        },
    }


def _pod(usage: Usage) -> dict[str, Any]:
    subject, at, started = usage.subject, format_time(usage.at), format_time(usage.started)
    cpu = _cpu_stats(at, usage.cpu_s, usage.cpu_rate)
    memory = {"time": at, "usageBytes": usage.memory, "workingSetBytes": usage.memory, "rssBytes": usage.memory}
    pod: dict[str, Any] = {
        "podRef": {"name": subject.name, "namespace": subject.namespace, "uid": subject.uid},
        "startTime": started,
        "containers": [{"name": subject.container, "startTime": started, "cpu": cpu, "memory": memory}],
        "cpu": cpu,
        "memory": memory,
    }
    if usage.traffic is not None:
        traffic: dict[str, Any] = {
            "name": usage.traffic.interface,
            "rxBytes": usage.traffic.received,
            "rxErrors": usage.traffic.receive_errors,
            "txBytes": usage.traffic.sent,
            "txErrors": usage.traffic.send_errors,
        }
        pod["network"] = {"time": at, **traffic, "interfaces": [traffic]}
    return pod


def _cpu_stats(at: str, cpu_s: float, rate: float | None) -> dict[str, Any]:
    stats = {"time": at, "usageCoreNanoSeconds": round(cpu_s * 1e9)}
    return stats if rate is None else {**stats, "usageNanoCores": round(rate * 1e9)}
