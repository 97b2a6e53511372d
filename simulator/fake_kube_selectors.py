"""Field and label selectors: text of a query parameter in, a predicate over objects out.

Built once per list or watch, asked for every object and for both sides of every change. Raises the 400 a server
answers for text it cannot read or a field it cannot select by.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from simulator.fake_kube_resources import Resource, bad_request

__all__ = ["Selector", "selector"]

Object = dict[str, Any]
Selector = Callable[[Object], bool]

_METADATA = ("metadata.name", "metadata.namespace")

# Beyond metadata.name and metadata.namespace, which every resource has.
_SELECTABLE: dict[str, tuple[str, ...]] = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
    "secrets": ("type",),
    "events": (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
}
_BOOLEAN_FIELDS = frozenset({"spec.hostNetwork", "spec.unschedulable"})

_FIELD_TERM = re.compile(r"([^=!]+?)\s*(==|=|!=)\s*(.*)")
_KEY = r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?"
_LABEL_TERM = re.compile(
    rf"\s*(?:(?P<absent>!\s*)?(?P<key>{_KEY})"
    r"(?:\s*(?P<op>==|=|!=)\s*(?P<value>[A-Za-z0-9._-]*)|\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*(?:,|$)"
)


def selector(resource: Resource, field_selector: str = "", label_selector: str = "") -> Selector:
    """A predicate that is true for the objects both selectors match."""
    fields = _parse_fields(resource, field_selector)
    labels = _parse_labels(label_selector)
    if not fields and not labels:
        return lambda obj: True
    return lambda obj: all(term(obj) for term in fields) and all(term(obj) for term in labels)


def _parse_fields(resource: Resource, text: str) -> list[Selector]:
    terms = []
    for part in filter(None, text.split(",")):
        match = _FIELD_TERM.fullmatch(part.strip())
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        path, operator, value = match.groups()
        if path not in (*_METADATA, *_SELECTABLE.get(resource.plural, ())):
            raise bad_request(f"field label not supported: {path}")
        terms.append(_field_term(path, operator != "!=", value))
    return terms


def _field_term(path: str, wanted: bool, value: str) -> Selector:
    return lambda obj: (_field_value(obj, path) == value) is wanted


def _field_value(obj: Object, path: str) -> str:
    if path == "source":
        return str(obj["source"].get("component", "") or obj.get("reportingComponent", ""))
    value: Any = obj
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    if path in _BOOLEAN_FIELDS:
        return "true" if value else "false"
    return str(value)


def _parse_labels(text: str) -> list[Selector]:
    terms = []
    position = 0
    while position < len(text):
        match = _LABEL_TERM.match(text, position)
        if match is None or match.end() == position:
            raise bad_request(f"unable to parse requirement: found '{text[position:]}'")
        terms.append(_label_term(match))
        position = match.end()
    return terms


def _label_term(match: re.Match[str]) -> Selector:
    key = match["key"]
    if match["absent"]:
        return lambda obj: key not in _labels(obj)
    if match["set"]:
        values = {value.strip() for value in match["values"].split(",")}
        wanted = match["set"] == "in"
    elif match["op"]:
        values = {match["value"]}
        wanted = match["op"] != "!="
    else:
        return lambda obj: key in _labels(obj)
    # An object without the key satisfies != and notin.
    return lambda obj: (_labels(obj).get(key) in values) is wanted


def _labels(obj: Object) -> dict[str, str]:
    labels: dict[str, str] = obj["metadata"].get("labels", {})
    return labels
