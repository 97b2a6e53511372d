"""The event log: what one entry looks like, and what is written down of a daemon's dealings with the world.

An entry is a line of JSON: microseconds since the start, who, what, about which object (a pod, where it is about one),
and a few fields. A simulation and a real host write the same form, so whatever reads one reads the other: lanes,
reports, and the way back from a log to a scenario (simulator.replay).

What is here has no state of its own that matters: it turns what passes a door into entries. The simulator puts these
doors before its fakes; on a host vkcocoon_recorder puts them before the real ports and keeps the files. Secrets do
not come this far: of a pod only annotations of our groups, of a command line only its verb and object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from vkcocoon_commands import Completed
from vkcocoon_kube import ApiError, KubeApi, Object, PatchKind
from vkcocoon_quantity import whole_number
from vkcocoon_status import (
    ANNOTATION_LIFECYCLE_STATE,
    LIFECYCLE_READY,
    OWNED_ANNOTATIONS,
    PROBE_READY,
    condition_of,
    pod_key,
)

__all__ = [
    "Cluster",
    "Entry",
    "Record",
    "RecordedApi",
    "command_fields",
    "pod_changes",
    "subject_of",
    "wishes_of",
]

OUR_GROUPS = ("vm.cocoonstack.io/", "cocoonset.cocoonstack.io/")
LONGEST_TEXT = 300  # of what a command or a server said: the reason, not the story

UNTOLD = ("was", "uid", "wishes")  # what lines for people do without

NOTHING: Mapping[str, Any] = MappingProxyType({})
Record = Callable[[str, str, str, Mapping[str, Any]], None]  # actor, kind, key, fields; must not switch greenlets


class Entry(NamedTuple):
    """One event. ``at_us`` are microseconds since the start of the run."""

    at_us: int
    actor: str
    kind: str
    key: str
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def seconds(self) -> float:
        return self.at_us / 1_000_000

    def line(self) -> str:
        """The JSON line of this entry; in a simulation its bytes are what the digest is made of."""
        head = {"us": self.at_us, "actor": self.actor, "kind": self.kind, "key": self.key}
        if clash := head.keys() & dict(self.fields).keys():
            raise ValueError(f"a field must not be called {', '.join(sorted(clash))}")
        return json.dumps(head | dict(self.fields), sort_keys=False, ensure_ascii=False, default=str)

    @classmethod
    def of_line(cls, line: str) -> Entry:
        """The entry that `line` wrote. Raises ValueError for anything else."""
        try:
            document = json.loads(line)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(document, dict):
            raise ValueError("an entry is a JSON object")
        try:
            us, actor, kind, key = (document.pop(name) for name in ("us", "actor", "kind", "key"))
        except KeyError as missing:
            raise ValueError(f"an entry has {missing}") from None
        if not isinstance(us, int):
            raise ValueError(f"{us!r} is no number of microseconds")
        return cls(us, str(actor), str(kind), str(key), tuple(document.items()))

    def text(self) -> str:
        """For people: ``   3.078125  kube     ready        default/web-0  True``."""
        shown = [(name, value) for name, value in self.fields if name not in UNTOLD and value not in ("", None)]
        fields = " ".join(str(value) if name == "what" else f"{name}={value}" for name, value in shown)
        return f"{self.seconds:12.6f}  {self.actor:<8} {self.kind:<14} {self.key:<24} {fields}".rstrip()


# Pods -----------------------------------------------------------------------------------------------------------------


def wishes_of(pod: Object) -> dict[str, str]:
    """The annotations of our groups that others write: what a pod asks of us."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    return {
        name: str(value)
        for name, value in sorted(annotations.items())
        if name.startswith(OUR_GROUPS) and name not in OWNED_ANNOTATIONS
    }


def pod_changes(old: Object | None, new: Object | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """What changed between two states of a pod as Kubernetes holds it, as kinds of entries with their fields."""
    if new is None:
        yield "deleted", {}
        return
    wishes = wishes_of(new)
    if old is None:
        yield "created", {"uid": str((new.get("metadata") or {}).get("uid", "")), "wishes": wishes}
    elif changed := _difference(wishes_of(old), wishes):
        yield "annotations", {"annotations": changed}
    before, after = _facets(old or {}), _facets(new)
    for kind, value in after.items():
        if value != before[kind]:
            fields = {kind: value, "was": before[kind], "reason": after["reason"]}
            if kind == "terminating":
                fields["grace"] = (new.get("metadata") or {}).get("deletionGracePeriodSeconds", "")
            yield kind, fields


def _facets(pod: Object) -> dict[str, str]:
    """The parts of a pod whose changes are events."""
    status, metadata = pod.get("status") or {}, pod.get("metadata") or {}
    ready = condition_of(status, "Ready")
    return {
        "phase": str(status.get("phase", "")),
        "ready": str(ready.get("status", "")),
        "reason": str(ready.get("reason", "")),
        "probe": str(condition_of(status, PROBE_READY).get("status", "")),
        "intent": str(condition_of(status, LIFECYCLE_READY).get("status", "")),
        "address": str(status.get("podIP", "")),
        "lifecycle": str((metadata.get("annotations") or {}).get(ANNOTATION_LIFECYCLE_STATE, "")),
        "terminating": "True" if metadata.get("deletionTimestamp") else "",
    }


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str | None]:
    """What to merge into ``old`` to get ``new``; None takes away."""
    gone: dict[str, str | None] = dict.fromkeys(name for name in old if name not in new)
    return gone | {name: value for name, value in new.items() if old.get(name) != value}


class Cluster:
    """The pods as the API was seen to hold them, by whoever looked; each change becomes entries of the actor kube."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._pods: dict[str, Object] = {}

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._pods.values()))

    def saw(self, pod: Object) -> None:
        """The API holds it so. An answer may be older than one that came before it."""
        key, old = pod_key(pod), self._pods.get(pod_key(pod))
        if old is not None and old["metadata"].get("uid") != pod["metadata"].get("uid"):
            self.gone(key)
            old = None
        if old is not None and _version(pod) < _version(old):
            return
        self._pods[key] = pod
        for kind, fields in pod_changes(old, pod):
            self._record("kube", kind, key, fields)

    def gone(self, key: str) -> None:
        """The API holds it no longer."""
        if self._pods.pop(key, None) is not None:
            self._record("kube", "deleted", key, NOTHING)

    def only(self, keys: set[str]) -> None:
        """A whole list was read, and these were in it."""
        for key in self._pods.keys() - keys:
            self.gone(key)


def _version(pod: Object) -> int:
    return whole_number(str(pod["metadata"].get("resourceVersion") or ""), digits=20) or 0


# Commands -------------------------------------------------------------------------------------------------------------


def subject_of(argv: Sequence[str]) -> str:
    """The VM, snapshot or image a command is about: the name it gives, else its last operand."""
    if "--name" in argv[:-1]:
        return argv[argv.index("--name") + 1]
    ours = argv[: argv.index("--")] if "--" in argv else argv  # what comes after it is for the guest alone
    return "" if ours[2:3] in (["list"], ["status"]) else ours[-1]


def command_fields(outcome: Completed | BaseException | None, took_us: int) -> dict[str, Any]:
    """How a command ended: its exit status, ``failed`` (it gave none) or ``killed`` (with us); what it complained."""
    fields: dict[str, Any] = {"exit": "killed", "took_us": took_us}
    if isinstance(outcome, Completed):
        fields["exit"] = str(outcome.returncode)
        if outcome.returncode:
            fields["error"] = _last_line(outcome.stderr)
    elif isinstance(outcome, Exception):
        fields |= {"exit": "failed", "error": _last_line(str(getattr(outcome, "why", "")) or type(outcome).__name__)}
    return fields


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:LONGEST_TEXT]


# The API --------------------------------------------------------------------------------------------------------------

Call = Callable[[], Object]


class RecordedApi:
    """A `vkcocoon_kube.KubeApi` that writes down what it was asked to write about pods, and which requests fail.

    ``cluster`` is told of every pod that an answer shows, where nobody knows better what the API holds.
    """

    def __init__(
        self, kube: KubeApi, record: Record, now_us: Callable[[], int], cluster: Cluster | None = None
    ) -> None:
        self._kube = kube
        self._record = record
        self._now_us = now_us
        self._cluster = cluster
        self._failing: set[str] = set()
        self._listed: set[str] = set()

    def get(self, path: str) -> Object:
        found = self._asked(f"GET {path}", path, lambda: self._kube.get(path))
        self._shows(path, found)
        return found

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
        page = self._asked(
            f"LIST {path}",
            path,
            lambda: self._kube.list(
                path,
                field_selector=field_selector,
                label_selector=label_selector,
                limit=limit,
                continue_=continue_,
                resource_version=resource_version,
            ),
        )
        if self._cluster is not None and path.endswith("/pods"):
            self._saw_page(page, first=not continue_)
        return page

    def watch(
        self, path: str, *, resource_version: str, field_selector: str = "", timeout: float = 300.0
    ) -> Iterator[Object]:
        request = f"WATCH {path}"
        began_us = self._now_us()
        try:
            events = self._kube.watch(
                path, resource_version=resource_version, field_selector=field_selector, timeout=timeout
            )
        except ApiError as error:
            self._failed(request, path, error, began_us)
            raise
        return self._watched(request, path, events)

    def create(self, path: str, body: Object) -> Object:
        if self._cluster is not None and path.endswith("/events"):
            about = body.get("involvedObject") or {}
            key = f"{about.get('namespace')}/{about.get('name')}" if about.get("namespace") else str(about.get("name"))
            self._record("event", str(body.get("reason", "")), key, {"message": str(body.get("message", ""))})
        return self._asked(f"POST {path}", path, lambda: self._kube.create(path, body))

    def patch(self, path: str, body: Any, *, kind: PatchKind) -> Object:
        part, said = "annotations", {}
        if path.endswith("/status"):
            part = "status"
            ready = condition_of(body.get("status") or {}, "Ready") if isinstance(body, dict) else {}
            said = {"ready": str(ready["status"])} if ready.get("status") else {}
        return self._written(f"PATCH {path}", path, part, said, lambda: self._kube.patch(path, body, kind=kind))

    def replace(self, path: str, body: Object) -> Object:
        return self._written(f"PUT {path}", path, "replace", {}, lambda: self._kube.replace(path, body))

    def delete(self, path: str, *, uid: str = "", grace_seconds: int | None = None) -> Object:
        said = {} if grace_seconds is None else {"grace": grace_seconds}
        call = lambda: self._kube.delete(path, uid=uid, grace_seconds=grace_seconds)  # noqa: E731
        return self._written(f"DELETE {path}", path, "delete", said, call)

    # What is written down

    def _asked(self, request: str, path: str, call: Call) -> Object:
        began_us = self._now_us()
        try:
            answer = call()
        except ApiError as error:
            self._failed(request, path, error, began_us)
            raise
        self._succeeded(request, path, began_us)
        return answer

    def _succeeded(self, request: str, path: str, began_us: int) -> None:
        if request in self._failing:
            self._failing.discard(request)
            self._record("api", "works", _pod_of(path), {"request": request, "took_us": self._now_us() - began_us})

    def _failed(self, request: str, path: str, error: ApiError, began_us: int) -> None:
        if error.status == 404:
            return  # an answer like any other
        self._failing.add(request)
        fields = {"request": request, "status": error.status, "reason": error.reason or "NoAnswer"}
        if error.retry_after is not None:
            fields["retry_after"] = error.retry_after
        self._record("api", "fails", _pod_of(path), fields | {"took_us": self._now_us() - began_us})

    def _written(self, request: str, path: str, part: str, said: Mapping[str, Any], call: Call) -> Object:
        """A write; one about a pod is in the log, with what became of it."""
        key, fields, began_us = _pod_of(path), dict(said), self._now_us()
        try:
            answer = self._asked(request, path, call)
            if part != "delete":
                self._shows(path, answer)
            return answer
        except ApiError as error:
            fields["refused"] = f"{error.status} {error.reason}"
            raise
        finally:
            if key:
                fields["took_us"] = self._now_us() - began_us
                self._record("push", part, key, fields)

    def _shows(self, path: str, found: Object) -> None:
        if self._cluster is not None and _pod_of(path) and (found.get("metadata") or {}).get("uid"):
            self._cluster.saw(found)

    def _saw_page(self, page: Object, *, first: bool) -> None:
        assert self._cluster is not None
        if first:
            self._listed = set()
        for pod in page.get("items") or ():
            self._listed.add(pod_key(pod))
            self._cluster.saw(pod)
        if not (page.get("metadata") or {}).get("continue"):
            self._cluster.only(self._listed)

    def _watched(self, request: str, path: str, events: Iterator[Object]) -> Iterator[Object]:
        began_us = self._now_us()
        try:
            for event in events:
                self._succeeded(request, path, began_us)
                if self._cluster is not None and path.endswith("/pods"):
                    self._saw_event(event)
                yield event
        except ApiError as error:
            self._failed(request, path, error, began_us)
            raise

    def _saw_event(self, event: Object) -> None:
        assert self._cluster is not None
        if event.get("type") in ("ADDED", "MODIFIED"):
            self._cluster.saw(event["object"])
        elif event.get("type") == "DELETED":
            self._cluster.gone(pod_key(event["object"]))


def _pod_of(path: str) -> str:
    """namespace/name of the pod that a path is about, "" for none."""
    words = path.split("/")
    return f"{words[4]}/{words[6]}" if words[5:6] == ["pods"] and len(words) > 6 else ""
