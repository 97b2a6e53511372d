"""What the fake API server serves: the resources, the paths that name them, and the errors that speak about them.

A path is parsed once, at the door, into a ``Target``; everything behind the doors works with targets. Errors are the
project's own ``ApiError`` with the details a Status object needs, so the in-process door raises exactly what the HTTP
door prints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vkcocoon_kube import ApiError

__all__ = [
    "RESOURCES",
    "Refusal",
    "Resource",
    "Target",
    "already_exists",
    "bad_request",
    "conflict",
    "expired",
    "forbidden",
    "invalid",
    "method_not_allowed",
    "must_be_specified",
    "not_found",
    "parse_path",
    "status_of",
]

Object = dict[str, Any]

_ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object and how it is spelled in paths, in discovery and on kubectl's command line."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()  # those that only reach parts of the object, such as status
    verbs: tuple[str, ...] = _ALL_VERBS
    unconditional_update: bool = True  # a PUT may leave out the resourceVersion
    create_on_update: bool = False  # a PUT to a name that is not there creates it

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def qualified(self) -> str:
        """The resource as error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_POD_SUBRESOURCES = ("attach", "binding", "eviction", "exec", "log", "portforward", "status")

RESOURCES: tuple[Resource, ...] = (
    Resource("configmaps", "ConfigMap", short_names=("cm",)),
    Resource("endpoints", "Endpoints", short_names=("ep",), create_on_update=True),
    Resource("events", "Event", short_names=("ev",), create_on_update=True),
    Resource("namespaces", "Namespace", namespaced=False, short_names=("ns",), subresources=("finalize", "status")),
    Resource("nodes", "Node", namespaced=False, short_names=("no",), subresources=("status",)),
    Resource("pods", "Pod", short_names=("po",), categories=("all",), subresources=_POD_SUBRESOURCES),
    Resource("secrets", "Secret"),
    Resource("serviceaccounts", "ServiceAccount", short_names=("sa",)),
    Resource("services", "Service", short_names=("svc",), categories=("all",), subresources=("status",)),
    Resource("leases", "Lease", "coordination.k8s.io", unconditional_update=False, create_on_update=True),
    Resource("tokenreviews", "TokenReview", "authentication.k8s.io", namespaced=False, verbs=("create",)),
    Resource(
        "subjectaccessreviews", "SubjectAccessReview", "authorization.k8s.io", namespaced=False, verbs=("create",)
    ),
    Resource(
        "selfsubjectaccessreviews",
        "SelfSubjectAccessReview",
        "authorization.k8s.io",
        namespaced=False,
        verbs=("create",),
    ),
)

_BY_PATH = {(resource.group, resource.version, resource.plural): resource for resource in RESOURCES}


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names: a collection when ``name`` is empty; every namespace when ``namespace`` is."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)

    @property
    def label(self) -> str:
        """``pods/default/web-0``, for logs."""
        return "/".join(part for part in (self.resource.plural, self.namespace, self.name) if part)

    @property
    def whole(self) -> Target:
        """The object a subresource belongs to."""
        return replace(self, subresource="")

    def named(self, name: str) -> Target:
        return replace(self, name=name)


def parse_path(path: str) -> Target:
    """The target of a request path without its query; raises the 404 a server answers for a path it does not serve."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise _unknown_path()
    namespace = ""
    # /namespaces/NAME and its subresources are about the namespace itself; with a resource behind, about its content.
    if rest[0] == "namespaces" and len(rest) >= 3 and (group, version, rest[2]) in _BY_PATH:
        namespace, rest = rest[1], rest[2:]
    resource = _BY_PATH.get((group, version, rest[0]))
    if resource is None or len(rest) > 3 or not all(rest) or (namespace and not resource.namespaced):
        raise _unknown_path()
    name, subresource = (*rest[1:], "", "")[:2]
    if (resource.namespaced and name and not namespace) or (subresource and subresource not in resource.subresources):
        raise _unknown_path()
    return Target(resource, namespace, name, subresource)


# Errors --------------------------------------------------------------------------------------------------------------


class Refusal(ApiError):
    """An ``ApiError`` of the fake server itself, with the ``details`` and ``metadata`` of its Status object."""

    def __init__(self, status: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(status, reason, message)
        self.details: Object = details or {}
        self.metadata: Object = {}


def status_of(error: ApiError) -> Object:
    """The Status object a server sends for an error."""
    details = dict(getattr(error, "details", {}))
    if error.retry_after is not None:
        details["retryAfterSeconds"] = int(error.retry_after)
    metadata = getattr(error, "metadata", {})
    status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": metadata, "status": "Failure"}
    status |= {"message": error.message, "reason": error.reason}
    if details:
        status["details"] = details
    return {**status, "code": error.status}


def _unknown_path() -> Refusal:
    return Refusal(404, "NotFound", "the server could not find the requested resource")


def _details(target: Target, **more: Any) -> Object:
    details: Object = {"name": target.name, "group": target.resource.group, "kind": target.resource.plural, **more}
    return {key: value for key, value in details.items() if value}


def not_found(target: Target) -> Refusal:
    return Refusal(404, "NotFound", f'{target.resource.qualified} "{target.name}" not found', _details(target))


def already_exists(target: Target) -> Refusal:
    message = f'{target.resource.qualified} "{target.name}" already exists'
    return Refusal(409, "AlreadyExists", message, _details(target))


def conflict(target: Target, sentence: str, *, kind: str = "") -> Refusal:
    """409; ``kind`` is what the original calls the object where it does not say its resource."""
    message = f'Operation cannot be fulfilled on {kind or target.resource.qualified} "{target.name}": {sentence}'
    return Refusal(409, "Conflict", message, {**_details(target), **({"kind": kind} if kind else {})})


def forbidden(target: Target, sentence: str) -> Refusal:
    message = f'{target.resource.qualified} "{target.name}" is forbidden: {sentence}'
    return Refusal(403, "Forbidden", message, _details(target))


def invalid(target: Target, field: str, sentence: str, reason: str = "FieldValueInvalid") -> Refusal:
    """422; ``sentence`` already says Invalid value, Forbidden, Required value..., as the original does."""
    kind = f"{target.resource.kind}.{target.resource.group}" if target.resource.group else target.resource.kind
    causes = [{"reason": reason, "message": sentence, "field": field}]
    details = {**_details(target), "kind": target.resource.kind, "causes": causes}
    return Refusal(422, "Invalid", f'{kind} "{target.name}" is invalid: {field}: {sentence}', details)


def must_be_specified(target: Target) -> Refusal:
    """422 for a PUT without a resourceVersion; comes from the storage, which knows resources and no kinds."""
    field, sentence = "metadata.resourceVersion", "Invalid value: 0: must be specified for an update"
    details = _details(target, causes=[{"reason": "FieldValueInvalid", "message": sentence, "field": field}])
    return Refusal(
        422, "Invalid", f'{target.resource.qualified} "{target.name}" is invalid: {field}: {sentence}', details
    )


def bad_request(message: str) -> Refusal:
    return Refusal(400, "BadRequest", message)


def expired(message: str, go_on: str = "") -> Refusal:
    """410; ``go_on`` is a token for whoever would rather go on with what is there now."""
    refusal = Refusal(410, "Expired", message)
    refusal.metadata = {"continue": go_on} if go_on else {}
    return refusal


def method_not_allowed(target: Target) -> Refusal:
    message = "the server does not allow this method on the requested resource"
    return Refusal(405, "MethodNotAllowed", message, _details(target))
