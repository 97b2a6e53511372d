"""The objects of the fake API server: revisions, preconditions, graceful deletion and the history watches read.

One store, whatever door a request came through. It never waits and never switches greenlets, so every operation is
atomic. Stored objects are never changed in place: a write replaces the object, which makes the history and the pages of
a list free snapshots. What it hands out is therefore shared, and the doors copy.

Every successful write takes the next number of one global revision; a write that changes nothing takes none and is seen
by nobody. All errors are ``Refusal``.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
import uuid
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from simulator import fake_kube_rules as rules
from simulator.chance import branch
from simulator.fake_kube_patch import PatchError, json_patch, merge_patch, strategic_merge
from simulator.fake_kube_resources import (
    RESOURCES,
    Refusal,
    Resource,
    Target,
    already_exists,
    bad_request,
    conflict,
    expired,
    forbidden,
    invalid,
    must_be_specified,
    not_found,
)
from simulator.fake_kube_schema import DecodeError, decode
from simulator.fake_kube_selectors import Selector
from vkcocoon_probes import Clock

__all__ = ["GRACEFUL", "PLAIN", "Change", "DeleteOptions", "PatchKind", "Store", "WriteOptions", "revision_of"]

Object = dict[str, Any]
Objects = list[Object]
ObjectsByKey = dict[tuple[str, str], Object]
PatchKind = Literal["strategic", "merge", "json", "apply"]

_NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")
# The letters Kubernetes draws generated names from: no vowels, so no words.
_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_INCONSISTENT = -1  # the revision of a token that takes whatever is there now
_TOO_OLD_TO_CONTINUE = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without"
    " the continue parameter, or use the continue token in this response to retrieve the remainder of the results."
    " Continuing with the provided token results in an inconsistent list - objects that were created, modified, or"
    " deleted between the time the first chunk was returned and now may show up in the list."
)
_KEPT_PAGES = 64


class Change(NamedTuple):
    """One write, as a watch sees it: ``old`` is None for a creation, ``new`` for a removal.

    ``last`` is the object with the revision of this change: the new one, or the last state of a removed one.
    """

    revision: int
    old: Object | None
    new: Object | None
    last: Object

    @property
    def type(self) -> str:
        return "ADDED" if self.old is None else "DELETED" if self.new is None else "MODIFIED"


Changes = list[Change]
Strings = list[str]
Listeners = list[Callable[[Target, Change], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """``field_validation``: unknown fields are dropped ("Ignore", "Warn") or refused ("Strict", 400).

    The paths of those dropped are added to ``unknown``, when the caller wants to know.
    """

    dry_run: bool = False
    field_validation: str = "Warn"
    unknown: Strings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOptions:
    uid: str = ""
    resource_version: str = ""
    grace_seconds: int | None = None
    dry_run: bool = False


PLAIN = WriteOptions()
GRACEFUL = DeleteOptions()


@dataclass(slots=True)
class _Collection:
    """The objects of one resource and what happened to them, oldest first; nothing at or before ``floor`` is known."""

    objects: ObjectsByKey = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    floor: int = 0


class Store:
    """Invariant: the newest revision is on exactly one object or one removal, and in exactly one history."""

    def __init__(self, clock: Clock, rng: random.Random, *, history_limit: int = 10_000) -> None:
        self.revision = 0
        self.history_limit = history_limit
        self.on_change: Listeners = []
        self._clock = clock
        self._rng = rng
        self._collections: dict[Resource, _Collection] = {resource: _Collection() for resource in RESOURCES}
        self._frozen: tuple[int, dict[Resource, ObjectsByKey]] | None = None
        self._pages: OrderedDict[tuple[Resource, str, int], Objects] = OrderedDict()
        for name in _NAMESPACES:
            self.create(_namespace(name), {"metadata": {"name": name}})

    # Reading ---------------------------------------------------------------------------------------------------------

    def get(self, target: Target) -> Object:
        try:
            return self._collections[target.resource].objects[target.key]
        except KeyError:
            raise not_found(target) from None

    def find(self, target: Target) -> Object | None:
        return self._collections[target.resource].objects.get(target.key)

    def list(
        self, target: Target, selects: Selector, *, limit: int = 0, token: str = "", any_version: bool = False
    ) -> Object:
        """One page: ``{"metadata": {...}, "items": [...]}``; later pages show the state of the first one.

        ``any_version`` takes what a lagging cache has.
        """
        revision, start, candidates = self._page(target, token, any_version)
        items = [obj for obj in candidates if (start is None or _key(obj) > start) and selects(obj)]
        metadata: Object = {"resourceVersion": str(revision)}
        if limit and len(items) > limit:
            metadata["continue"] = _encoded(revision, _key(items[limit - 1]))
            metadata["remainingItemCount"] = len(items) - limit
            items = items[:limit]
            self._keep_page(target, revision, candidates)
        return {"metadata": metadata, "items": items}

    def check_version(self, version: str, match: str) -> None:
        """Raise what a server answers to a list that asks for a version it does not have."""
        if version in ("", "0"):
            return
        wanted = revision_of(version) or 0
        if wanted > self.revision:
            cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            message = f"Timeout: Too large resource version: {wanted}, current: {self.revision}"
            raise Refusal(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})
        if match == "Exact" and wanted < self.revision:
            raise expired("The resourceVersion for the provided list is too old.")

    def freeze(self) -> None:
        """Keep what a cache that lags behind would answer to a list that takes any version, until ``thaw``."""
        self._frozen = self.revision, {resource: dict(kept.objects) for resource, kept in self._collections.items()}

    def thaw(self) -> None:
        self._frozen = None

    def _page(self, target: Target, token: str, any_version: bool) -> tuple[int, tuple[str, str] | None, Objects]:
        if token:
            revision, start = _decode_token(token)
            kept = self._pages.get((target.resource, target.namespace, revision))
            if kept is not None:
                return revision, start, kept
            if revision != _INCONSISTENT:
                raise expired(_TOO_OLD_TO_CONTINUE, _encoded(_INCONSISTENT, start))
        else:
            start = None
        revision, objects = self.revision, self._collections[target.resource].objects
        if any_version and self._frozen is not None:
            revision, objects = self._frozen[0], self._frozen[1][target.resource]
        wanted = [obj for key, obj in sorted(objects.items()) if target.namespace in ("", key[0])]
        return revision, start, wanted

    def _keep_page(self, target: Target, revision: int, candidates: Objects) -> None:
        self._pages[target.resource, target.namespace, revision] = candidates
        while len(self._pages) > _KEPT_PAGES:
            self._pages.popitem(last=False)

    # History ---------------------------------------------------------------------------------------------------------

    def check_revision(self, resource: Resource, revision: int) -> None:
        """Raise 410 when changes after ``revision`` are no longer known."""
        floor = self._collections[resource].floor
        if revision < floor:
            raise expired(f"too old resource version: {revision} ({floor})")

    def changes_after(self, resource: Resource, revision: int) -> Changes:
        """All changes after a revision, oldest first; raises 410 like ``check_revision``."""
        self.check_revision(resource, revision)
        history = self._collections[resource].history
        return history[bisect_right(history, revision, key=lambda change: change.revision) :]

    def expire_history(self) -> None:
        """Forget all changes and pages; the revision moves on, so that any version handed out so far is too old."""
        self.revision += 1
        self._pages.clear()
        for collection in self._collections.values():
            collection.history.clear()
            collection.floor = self.revision

    # Writing ---------------------------------------------------------------------------------------------------------

    def create(self, target: Target, body: Object, options: WriteOptions = PLAIN) -> Object:
        metadata = _metadata_of(body)
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        name = metadata.get("name") or self._generated_name(metadata.get("generateName", ""))
        if target.name and name != target.name:
            raise _name_mismatch(name, target.name)
        target = target.named(str(name or ""))
        if not target.name:
            raise invalid(
                target, "metadata.name", "Required value: name or generateName is required", "FieldValueRequired"
            )
        new = self._decoded(target, body, options)
        self._check_namespace(target, new)
        if self.find(target) is not None:
            raise already_exists(target)
        new["metadata"] = self._created(target, new["metadata"])
        rules.on_create(target, new)
        return self._commit(target, None, new, options)

    def update(self, target: Target, body: Object, options: WriteOptions = PLAIN) -> Object:
        """PUT. The body's resourceVersion and uid, where given, must be those of the stored object."""
        old = self.find(target)
        if old is None and target.resource.create_on_update and not target.subresource:
            metadata = {key: value for key, value in _metadata_of(body).items() if key != "resourceVersion"}
            return self.create(target, {**body, "metadata": metadata}, options)
        if old is None:
            raise not_found(target)
        # "0" used to mean "unset" in a PUT, and newer servers refuse it; nobody should send it, so it is refused here.
        version = _metadata_of(body).get("resourceVersion", "")
        if version == "0" or (not version and not target.resource.unconditional_update):
            raise must_be_specified(target)
        return self._write(target, old, self._decoded(target, body, options), options)

    def patch(self, target: Target, patch: Any, kind: PatchKind, options: WriteOptions = PLAIN) -> Object:
        """PATCH against the newest object; a resourceVersion or uid in the patch is a precondition."""
        old = self.find(target)
        if old is None:
            if kind == "apply" and not target.subresource and isinstance(patch, dict):
                return self.create(target, patch, options)
            raise not_found(target)
        try:
            patched = _patched(target, old, patch, kind)
        except PatchError as error:
            raise bad_request(str(error)) if error.malformed else _unprocessable(str(error)) from None
        if not isinstance(patched, dict):
            raise _unprocessable("the patched object is no object")
        try:
            new = self._decoded(target, patched, options)
        except Refusal as error:
            # What does not decode after patching is blamed on the patch.
            raise invalid(target, "patch", f"Invalid value: {error.message}") from None
        # In a patch the UID is no precondition of its own: it is a field that must not change.
        if (uid := new["metadata"].get("uid", old["metadata"]["uid"])) != old["metadata"]["uid"]:
            raise invalid(target, "metadata.uid", f'Invalid value: "{uid}": field is immutable')
        return self._write(target, old, new, options)

    def delete(self, target: Target, options: DeleteOptions = GRACEFUL) -> Object:
        """DELETE; the object as it is afterwards, or its last state when it is gone."""
        old = self.get(target)
        metadata = old["metadata"]
        if options.uid and options.uid != metadata["uid"]:
            raise conflict(
                target,
                f"the UID in the precondition ({options.uid}) does not match the UID in record ({metadata['uid']})."
                " The object might have been deleted and then recreated",
                kind=target.resource.kind,
            )
        if options.resource_version and options.resource_version != metadata["resourceVersion"]:
            raise conflict(
                target,
                f"the ResourceVersion in the precondition ({options.resource_version}) does not match the"
                f" ResourceVersion in record ({metadata['resourceVersion']}). The object might have been modified",
                kind=target.resource.kind,
            )
        grace = self._grace(target, old, options.grace_seconds)
        if grace is None:
            return old
        new = {**old, "metadata": self._deleting(metadata, grace)}
        if target.resource.plural == "namespaces":
            new["status"] = {**old["status"], "phase": "Terminating"}
        how = WriteOptions(dry_run=options.dry_run)
        if target.resource.plural == "pods" and _is_removable(new):
            # What can go gracefully is marked first, also when it goes at once, and watches see both.
            old = new = self._commit(target, old, new, how, marked_only=True)
        return self._commit(target, old, new, how)

    def bind(self, target: Target, node: str) -> None:
        """The scheduler's write: a pod gets its node, once."""
        old = self.get(target)
        if old["metadata"].get("deletionTimestamp"):
            raise conflict(
                target, f"pod {target.name} is being deleted, cannot be assigned to a host", kind="pods/binding"
            )
        if old["spec"].get("nodeName"):
            sentence = f'pod {target.name} is already assigned to node "{old["spec"]["nodeName"]}"'
            raise conflict(target, sentence, kind="pods/binding")
        condition = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        condition["lastTransitionTime"] = self._timestamp()
        conditions = [item for item in old["status"].get("conditions", []) if item["type"] != "PodScheduled"]
        status = {**old["status"], "conditions": [*conditions, condition]}
        self._commit(target, old, {**old, "spec": {**old["spec"], "nodeName": node}, "status": status}, PLAIN)

    # Steps of a write ------------------------------------------------------------------------------------------------

    def _decoded(self, target: Target, body: Object, options: WriteOptions) -> Object:
        resource = target.resource
        for name, wanted in (("kind", resource.kind), ("apiVersion", resource.api_version)):
            if body.get(name, wanted) != wanted:
                raise bad_request(
                    f"the {name} in the data ({body[name]}) does not match the expected {name} ({wanted})"
                )
        try:
            new, unknown = decode(resource.kind, body)
        except DecodeError as error:
            raise _cannot_handle(resource, str(error)) from None
        if options.unknown is not None:
            options.unknown.extend(unknown)
        if unknown and options.field_validation == "Strict":
            fields = ", ".join(f'unknown field "{path}"' for path in unknown)
            raise _cannot_handle(resource, f"strict decoding error: {fields}")
        new["apiVersion"], new["kind"] = resource.api_version, resource.kind
        return {key: new[key] for key in ("apiVersion", "kind", *new)}

    def _check_namespace(self, target: Target, new: Object) -> None:
        given = new["metadata"].get("namespace", target.namespace)
        if given != target.namespace:
            raise bad_request(
                f"the namespace of the provided object does not match the namespace sent on the request"
                f" ({given} != {target.namespace})"
            )
        if target.resource.namespaced:
            namespace = self.get(_namespace(target.namespace))
            if namespace["metadata"].get("deletionTimestamp"):
                sentence = (
                    f"unable to create new content in namespace {target.namespace} because it is being terminated"
                )
                raise forbidden(target, sentence)

    def _created(self, target: Target, metadata: Object) -> Object:
        drop = ("resourceVersion", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
        kept = {key: value for key, value in metadata.items() if key not in drop}
        kept["name"] = target.name
        if target.namespace:
            kept["namespace"] = target.namespace
        return {**kept, "uid": self._uid(target), "creationTimestamp": self._timestamp()}

    def _write(self, target: Target, old: Object, new: Object, options: WriteOptions) -> Object:
        """Preconditions, rules and generation of an update, then the commit."""
        before, after = old["metadata"], new["metadata"]
        if not after.get("name"):
            raise invalid(target, "metadata.name", "Required value: name must be provided", "FieldValueRequired")
        if after["name"] != target.name:
            raise _name_mismatch(after["name"], target.name)
        if after.get("namespace", target.namespace) != target.namespace:
            raise bad_request(
                f"the namespace of the object ({after['namespace']}) does not match the namespace on the URL"
                f" ({target.namespace})"
            )
        if after.get("uid", before["uid"]) != before["uid"]:
            sentence = f"Precondition failed: UID in precondition: {after['uid']}, UID in object meta: {before['uid']}"
            raise conflict(target, sentence)
        if after.get("resourceVersion", before["resourceVersion"]) != before["resourceVersion"]:
            raise conflict(
                target,
                "the object has been modified; please apply your changes to the latest version and try again",
            )
        for key in ("name", "namespace", "uid", "creationTimestamp", "generation", "resourceVersion"):
            _keep(after, before, key)
        for key in ("deletionTimestamp", "deletionGracePeriodSeconds", "generateName"):
            _keep(after, before, key)
        rules.on_update(target, old, new)
        if "generation" in before and new.get("spec") != old.get("spec"):
            after["generation"] = before["generation"] + 1
        return self._commit(target, old, new, options)

    def _grace(self, target: Target, old: Object, wanted: int | None) -> int | None:
        """The grace period this request puts in force, in seconds; None when it changes nothing."""
        deleting = "deletionTimestamp" in old["metadata"]
        if target.resource.plural != "pods":
            return None if deleting else 0
        if wanted is not None and wanted < 0:
            wanted = 1
        if deleting:
            current = old["metadata"].get("deletionGracePeriodSeconds") or 0
            return wanted if wanted is not None and wanted < current else None
        if not old["spec"].get("nodeName") or rules.is_terminal(old):
            return 0
        return old["spec"]["terminationGracePeriodSeconds"] if wanted is None else wanted

    def _deleting(self, metadata: Object, grace: int) -> Object:
        asked = self._clock.now()
        if "deletionTimestamp" in metadata:
            # A shorter period counts from the first request, not from this one.
            ends = datetime.fromisoformat(metadata["deletionTimestamp"])
            asked = ends - timedelta(seconds=metadata.get("deletionGracePeriodSeconds", 0))
        new = {**metadata, "deletionTimestamp": _text(asked + timedelta(seconds=grace))}
        new["deletionGracePeriodSeconds"] = grace
        if "generation" in metadata and "deletionTimestamp" not in metadata:
            new["generation"] = metadata["generation"] + 1
        return new

    def _commit(
        self, target: Target, old: Object | None, new: Object, options: WriteOptions, *, marked_only: bool = False
    ) -> Object:
        """Store, remove or do nothing, whichever ``new`` asks for; the only place where a revision is taken.

        ``marked_only`` stores what is about to be removed.
        """
        removed = _is_removable(new) and not marked_only
        if not removed and new == old:
            return new
        if options.dry_run:
            return new
        self.revision += 1
        last = {**new, "metadata": {**new["metadata"], "resourceVersion": str(self.revision)}}
        collection = self._collections[target.resource]
        if removed:
            collection.objects.pop(target.key, None)
        else:
            collection.objects[target.key] = last
        # An object that is created already finished would be a removal nobody saw added; nothing can create one.
        change = Change(self.revision, old, None if removed else last, last)
        collection.history.append(change)
        self._trim(collection)
        for listener in self.on_change:
            listener(target, change)
        return last

    def _trim(self, collection: _Collection) -> None:
        # In blocks, so that the cost of moving the list is spread.
        if len(collection.history) > 2 * self.history_limit:
            dropped = collection.history[: -self.history_limit]
            del collection.history[: -self.history_limit]
            collection.floor = dropped[-1].revision

    # Small parts -----------------------------------------------------------------------------------------------------

    def _uid(self, target: Target) -> str:
        return str(uuid.UUID(int=branch(self._rng, "uid", target.label).getrandbits(128), version=4))

    def _generated_name(self, prefix: str) -> str:
        return prefix + "".join(self._rng.choices(_NAME_LETTERS, k=5)) if prefix else ""

    def _timestamp(self) -> str:
        return _text(self._clock.now())


def revision_of(text: str) -> int | None:
    """The resourceVersion of a watch or a list: None for "" and "0", which mean "what there is now"."""
    if text in ("", "0"):
        return None
    if not text.isascii() or not text.isdigit():
        raise bad_request(f'Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax')
    return int(text)


def _namespace(name: str) -> Target:
    return Target(next(resource for resource in RESOURCES if resource.plural == "namespaces"), name=name)


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _key(obj: Object) -> tuple[str, str]:
    return (obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def _keep(new: Object, old: Object, key: str) -> None:
    if key in old:
        new[key] = old[key]
    else:
        new.pop(key, None)


def _metadata_of(body: Object) -> Object:
    if not isinstance(body, dict):
        raise bad_request("the body of the request was in an unknown format")
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise bad_request("json: cannot unmarshal metadata into Go struct field of type v1.ObjectMeta")
    return metadata


def _is_held(obj: Object) -> bool:
    """A namespace waits for its controller to empty it."""
    return bool(obj["kind"] == "Namespace" and obj["spec"].get("finalizers"))


def _is_removable(obj: Object) -> bool:
    metadata = obj["metadata"]
    finished = "deletionTimestamp" in metadata and not metadata.get("deletionGracePeriodSeconds")
    return finished and not metadata.get("finalizers") and not _is_held(obj)


def _patched(target: Target, old: Object, patch: Any, kind: PatchKind) -> Any:
    if kind == "json":
        return json_patch(old, patch)
    if not isinstance(patch, dict):
        raise PatchError("the patch is a JSON object", malformed=True)
    if kind == "merge":
        return merge_patch(old, patch)
    # A server-side apply without other owners is a strategic merge: both merge lists by the keys of the schema.
    return strategic_merge(target.resource.kind, old, patch)


def _name_mismatch(given: str, wanted: str) -> Refusal:
    return bad_request(f"the name of the object ({given}) does not match the name on the URL ({wanted})")


def _cannot_handle(resource: Resource, reason: str) -> Refusal:
    return bad_request(
        f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {reason}'
    )


def _unprocessable(message: str) -> Refusal:
    return Refusal(422, "Invalid", f"the server rejected our request due to an error in our request: {message}")


def _encoded(revision: int, start: tuple[str, str]) -> str:
    """A continue token: the list as it was then, from behind there on."""
    token = {"v": "meta.k8s.io/v1", "rv": revision, "start": list(start)}
    return base64.urlsafe_b64encode(json.dumps(token).encode()).decode().rstrip("=")


def _decode_token(text: str) -> tuple[int, tuple[str, str]]:
    try:
        token = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        namespace, name = token["start"]
        return int(token["rv"]), (str(namespace), str(name))
    except (binascii.Error, ValueError, KeyError, TypeError):
        raise bad_request("continue key is not valid") from None
