"""What the fake API server says about itself: versions, discovery and the OpenAPI document.

kubectl asks before it acts: which resources there are, how they are called, which verbs they take, and whether the
server validates fields itself. All of it is derived from the tables of resources and of the schema.
"""

from __future__ import annotations

from typing import Any

from simulator.fake_kube_resources import RESOURCES, Resource
from simulator.fake_kube_schema import SCHEMA, Field

__all__ = ["document"]

Object = dict[str, Any]

_VERSION = {"major": "1", "minor": "32", "gitVersion": "v1.32.0+simulator", "platform": "linux/amd64"}
_SCALAR_SCHEMAS: dict[str, Object] = {
    "string": {"type": "string"},
    "int": {"type": "integer", "format": "int64"},
    "bool": {"type": "boolean"},
    "time": {"type": "string", "format": "date-time"},
    "microtime": {"type": "string", "format": "date-time"},
    "quantity": {"type": "string"},
    "intstr": {"type": "string", "format": "int-or-string"},
    "map": {"type": "object", "additionalProperties": {"type": "string"}},
    "quantities": {"type": "object", "additionalProperties": {"type": "string"}},
    "any": {"x-kubernetes-preserve-unknown-fields": True},
}


def document(path: str) -> Object | None:
    """The answer to a GET of a path that is about the server, None when the path is not."""
    parts = tuple(path.strip("/").split("/"))
    if path == "/version":
        return dict(_VERSION)
    if parts == ("api",):
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ("apis",):
        groups = [_group(name, version) for name, version in sorted(_groups()) if name]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if parts == ("openapi", "v3"):
        return {
            "paths": {_gv_path(*pair): {"serverRelativeURL": f"/openapi/v3/{_gv_path(*pair)}"} for pair in _groups()}
        }
    if parts[:2] == ("openapi", "v3"):
        return _if_served(parts[2:], _openapi)
    if len(parts) == 2 and parts[0] == "apis":
        return next((_group(name, version) for name, version in _groups() if name == parts[1]), None)
    return _if_served(parts, _resource_list)


def _groups() -> set[tuple[str, str]]:
    return {(resource.group, resource.version) for resource in RESOURCES}


def _gv_path(group: str, version: str) -> str:
    return f"apis/{group}/{version}" if group else f"api/{version}"


def _gv_text(group: str, version: str) -> str:
    return f"{group}/{version}" if group else version


def _if_served(parts: tuple[str, ...], build: Any) -> Object | None:
    for group, version in _groups():
        if "/".join(parts) == _gv_path(group, version):
            answer: Object = build(group, version)
            return answer
    return None


# Discovery -----------------------------------------------------------------------------------------------------------


def _group(name: str, version: str) -> Object:
    spelled = {"groupVersion": f"{name}/{version}", "version": version}
    head = {"kind": "APIGroup", "apiVersion": "v1", "name": name}
    return {**head, "versions": [spelled], "preferredVersion": spelled}


def _resource_list(group: str, version: str) -> Object:
    resources: list[Object] = []
    for resource in RESOURCES:
        if (resource.group, resource.version) == (group, version):
            resources.append(_resource_entry(resource))
            resources += [_subresource_entry(resource, name) for name in resource.subresources]
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": _gv_text(group, version)}
    return {**head, "resources": resources}


def _resource_entry(resource: Resource) -> Object:
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    return entry


def _subresource_entry(resource: Resource, name: str) -> Object:
    entry: Object = {"name": f"{resource.plural}/{name}", "singularName": "", "namespaced": resource.namespaced}
    if name == "eviction":
        # kubectl drain evicts only when it finds exactly this.
        return {**entry, "group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]}
    if name == "binding":
        return {**entry, "kind": "Binding", "verbs": ["create"]}
    verbs = ["get", "patch", "update"] if name in ("status", "finalize") else ["create", "get"]
    return {**entry, "kind": resource.kind, "verbs": ["get"] if name == "log" else verbs}


# OpenAPI -------------------------------------------------------------------------------------------------------------


def _openapi(group: str, version: str) -> Object:
    served = [resource for resource in RESOURCES if (resource.group, resource.version) == (group, version)]
    paths: Object = {}
    for resource in served:
        paths |= _paths(resource)
    kinds = {resource.kind: resource for resource in served}
    schemas = {_schema_name(name): _schema(name, kinds.get(name)) for name in SCHEMA}
    head = {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": _VERSION["gitVersion"]}}
    return {**head, "paths": paths, "components": {"schemas": schemas}}


def _schema_name(type_name: str) -> str:
    return f"io.k8s.api.simulator.v1.{type_name}"


def _reference(type_name: str) -> Object:
    return {"$ref": f"#/components/schemas/{_schema_name(type_name)}"}


def _gvk(resource: Resource) -> Object:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _paths(resource: Resource) -> Object:
    collection = f"{resource.prefix}/namespaces/{{namespace}}" if resource.namespaced else resource.prefix
    operation = {
        "parameters": [{"name": name, "in": "query", "schema": {"type": "string"}} for name in _WRITE_PARAMETERS],
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": _reference(resource.kind)}}}
        },
        "x-kubernetes-group-version-kind": _gvk(resource),
    }
    return {
        f"{collection}/{resource.plural}": {"post": {**operation, "x-kubernetes-action": "post"}},
        f"{collection}/{resource.plural}/{{name}}": {
            "put": {**operation, "x-kubernetes-action": "put"},
            "patch": {**operation, "x-kubernetes-action": "patch"},
        },
    }


# That fieldValidation is among them tells kubectl to leave validation to the server.
_WRITE_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")


def _schema(type_name: str, served: Resource | None) -> Object:
    properties = {name: _property(field) for name, field in SCHEMA[type_name].items()}
    schema: Object = {"type": "object", "properties": properties}
    if served is not None:
        schema["x-kubernetes-group-version-kind"] = [_gvk(served)]
    return schema


def _property(field: Field) -> Object:
    item = _SCALAR_SCHEMAS.get(field.type)
    item = {"allOf": [_reference(field.type)], "default": {}} if item is None else dict(item)
    if not field.is_list:
        return item
    listed: Object = {"type": "array", "items": item}
    if field.merge_key == "*":
        return {**listed, "x-kubernetes-list-type": "set", "x-kubernetes-patch-strategy": "merge"}
    if field.merge_key:
        keys: Object = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field.merge_key]}
        patch: Object = {"x-kubernetes-patch-strategy": "merge", "x-kubernetes-patch-merge-key": field.merge_key}
        return {**listed, **keys, **patch}
    return {**listed, "x-kubernetes-list-type": "atomic"}
