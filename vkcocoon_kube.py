"""The conversation with the Kubernetes API: the client, the reflector and the pods of this node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

__all__ = ["ApiError", "KubeApi", "Object", "PatchKind"]

Object = dict[str, Any]
PatchKind = Literal["strategic", "merge", "json"]


class ApiError(Exception):
    """The API refused a request, or gave no answer (`status` 0: refused, reset, timed out, cut short).

    `reason` is the machine's word ("NotFound", "Conflict", "Expired"), `message` the sentence for
    people, `retry_after` the seconds the server asked for, None when it did not ask.
    """

    def __init__(self, status: int, reason: str = "", message: str = "", retry_after: float | None = None) -> None:
        super().__init__(status, reason, message, retry_after)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        head = f"{self.status} {self.reason}".strip() if self.status else (self.reason or "no answer")
        return f"{head}: {self.message}" if self.message else head


class KubeApi(Protocol):
    """The Kubernetes API in raw dicts; paths such as "/api/v1/namespaces/default/pods/web-0/status".

    Every method may switch greenlets and raises `ApiError` and nothing else for anything the
    server or the network does. Callers never change an object they were given.
    """

    def get(self, path: str) -> Object:
        """One object."""
        ...

    def list(
        self,
        path: str,
        *,
        field_selector: str = "",
        label_selector: str = "",
        limit: int = 0,
        continue_: str = "",
        resource_version: str = "",
    ) -> Object:
        """One page of a list: `items`, `metadata.resourceVersion`, `metadata.continue`."""
        ...

    def watch(
        self, path: str, *, resource_version: str, field_selector: str = "", timeout: float = 300.0
    ) -> Iterator[Object]:
        """Events `{"type", "object"}` after a version, BOOKMARK and ERROR among them.

        Ends when the server ends the stream cleanly (`timeout` seconds at the latest); a cut in the
        middle of a line, a silence longer than the read limit and an HTTP error raise `ApiError`.
        """
        ...

    def create(self, path: str, body: Object) -> Object:
        """POST to a collection."""
        ...

    def patch(self, path: str, body: Any, *, kind: PatchKind) -> Object:
        """PATCH an object or a subresource; `body` is a list for kind "json"."""
        ...

    def replace(self, path: str, body: Object) -> Object:
        """PUT; a `resourceVersion` in the body makes it conditional."""
        ...

    def delete(self, path: str, *, uid: str = "", grace_seconds: int | None = None) -> Object:
        """DELETE, with a UID precondition when `uid` is given."""
        ...
