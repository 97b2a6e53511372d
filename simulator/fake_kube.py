"""A Kubernetes API server in memory, so that a kubelet can be tested against what the real one does.

One object store (``fake_kube_store``), two doors: in process (``FakeKube`` is a ``vkcocoon_kube.KubeApi``), where all
waiting is on the clock handed in and therefore virtual in a simulation, and over HTTP (``fake_kube_http``), for kubectl
and the official client. Both raise or print the same errors, take the same faults and see the same objects.

    kube = FakeKube(clock)
    kube.create("/api/v1/namespaces/default/pods", pod)
    kube.fail("PATCH */status", ApiError(500, "InternalError", "boom"), times=2)

``kube.admin`` is a second in-process door for the rest of the cluster: the person, scheduler or controller in a
scenario. No fault, delay or log touches it, so it can still edit a pod while the server is "down" for the kubelet.

There is no kubelet and no controller in here: a pod that is created stays Pending until somebody binds it and reports
its status, a pod that is deleted stays Terminating until somebody deletes it with grace 0. The few controllers a
playground needs are in ``fake_kube_controllers``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from simulator.fake_kube_faults import Failure, Gate, Hold, Match, Request
from simulator.fake_kube_resources import Target, bad_request, method_not_allowed, parse_path
from simulator.fake_kube_selectors import Selector, selector
from simulator.fake_kube_store import PLAIN, Change, DeleteOptions, Store, WriteOptions, revision_of
from simulator.fake_kube_watch import TornStream, WatchOptions, WatchStream
from vkcocoon_kube import READ_S, WATCH_READ_S, ApiError, Object, PatchKind
from vkcocoon_probes import Clock
from vkcocoon_status import copied

if TYPE_CHECKING:
    from simulator.fake_kube_http import HttpDoor

__all__ = ["Door", "Failure", "FakeKube", "Hold", "Request"]

# A playground may run for days; no test looks back that far.
_KEPT_REQUESTS = 50_000

T = TypeVar("T")
Record = Callable[[str, str, str, dict[str, Any]], None]


class Door:
    """The in-process door: the ``KubeApi`` protocol on a server. What it hands out is the caller's to keep."""

    def __init__(self, server: FakeKube, *, faultless: bool) -> None:
        self._server = server
        self._faultless = faultless

    def get(self, path: str) -> Object:
        store = self._server.store
        return self._perform(self._request("GET", path), lambda: store.get(addressed(parse_path(path), "get")))

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
        query = {
            "fieldSelector": field_selector,
            "labelSelector": label_selector,
            "limit": str(limit or ""),
            "continue": continue_,
            "resourceVersion": resource_version,
        }

        def act() -> Object:
            target = parse_path(path)
            selects = selector(target.resource, field_selector, label_selector)
            version = (resource_version, "")
            return self._server.list_page(target, selects, limit=limit, token=continue_, version=version)

        return self._perform(self._request("LIST", path, **query), act)

    def watch(
        self, path: str, *, resource_version: str, field_selector: str = "", timeout: float = 300.0
    ) -> Iterator[Object]:
        query = {
            "resourceVersion": resource_version,
            "fieldSelector": field_selector,
            "timeoutSeconds": f"{timeout:g}",
        }
        request = self._request("WATCH", path, **query)

        def act() -> Iterator[Object]:
            options = WatchOptions(
                revision=revision_of(resource_version),
                timeout=timeout,
                bookmark_interval=self._server.bookmark_interval,
                silence=self._server.client_watch_timeout,
            )
            stream = self._server.open_watch(
                request, parse_path(path), revision=options.revision, faultless=self._faultless
            )
            return self._read(stream, options)

        return self._perform(request, act, copies=False)

    def create(self, path: str, body: Object) -> Object:
        request = self._request("POST", path, copied(body))
        return self._perform(request, lambda: self._server.post(parse_path(path), copied(body)))

    def patch(self, path: str, body: Any, *, kind: PatchKind) -> Object:
        request, store = self._request("PATCH", path, copied(body), kind=kind), self._server.store
        return self._perform(request, lambda: store.patch(addressed(parse_path(path), "patch"), copied(body), kind))

    def replace(self, path: str, body: Object) -> Object:
        request, store = self._request("PUT", path, copied(body)), self._server.store
        return self._perform(request, lambda: store.update(addressed(parse_path(path), "update"), copied(body)))

    def delete(self, path: str, *, uid: str = "", grace_seconds: int | None = None) -> Object:
        grace = "" if grace_seconds is None else str(grace_seconds)
        request = self._request("DELETE", path, uid=uid, gracePeriodSeconds=grace)
        options = DeleteOptions(uid=uid, grace_seconds=grace_seconds)
        return self._perform(request, lambda: self._server.remove(parse_path(path), options))

    def _request(self, verb: str, path: str, body: Any = None, **options: str) -> Request:
        given = {name: value for name, value in options.items() if value}
        return Request(self._server.clock.monotonic(), verb, path, body, given)

    def _perform(self, request: Request, act: Callable[[], T], *, copies: bool = True) -> T:
        result = act() if self._faultless else self._server.perform(request, act, self._server.client_timeout)
        return copied(result) if copies else result

    def _read(self, stream: WatchStream, options: WatchOptions) -> Iterator[Object]:
        with self._server.reading(stream):
            try:
                for event in stream.events(options):
                    yield copied(event)
            except TornStream:
                raise ApiError(0, "ConnectionReset", f"{stream.request} was cut in the middle of an event") from None


class FakeKube(Door):
    """The server. Knobs are plain attributes; faults are methods that return a handle to count and undo them.

    ``rng`` seeds uids and small delays of every message; without it the delays are zero and the uids those of seed 0.
    ``record(actor, kind, key, fields)`` hears of every stored change and every refused request.

    ``requests`` holds what came through a door other than ``admin``. ``latency`` is how long a request takes, in
    seconds, half of it each way, or a function of the ``Request``. ``client_timeout`` and ``client_watch_timeout`` are
    how long a client at the in-process door waits for an answer, and for the next line of a watch. ``gone`` says
    how a watch from a forgotten version is refused: by an ERROR event, as real servers mostly do, or by HTTP 410.
    """

    def __init__(self, clock: Clock, *, rng: random.Random | None = None, record: Record | None = None) -> None:
        super().__init__(self, faultless=False)
        self.clock = clock
        self.gate = Gate(clock, rng)
        self.store = Store(clock, rng or random.Random(0))
        self.store.on_change.append(self._changed)
        self.requests: Requests = []
        self.client_timeout = READ_S
        self.client_watch_timeout = WATCH_READ_S
        self.bookmark_interval = 60.0
        self.gone: Literal["event", "http"] = "event"
        self.admin = Door(self, faultless=True)
        self.tokens: dict[str, dict[str, Any]] = {}
        self.allows: Callable[[Object], bool] = lambda spec: True
        self.answered: list[Callable[[Request, ApiError | None], None]] = []  # told of each answer but admin's
        self._record = record
        self._streams: Streams = []

    # Faults ----------------------------------------------------------------------------------------------------------

    @property
    def latency(self) -> float | Callable[[Request], float]:
        return self.gate.latency

    @latency.setter
    def latency(self, seconds: float | Callable[[Request], float]) -> None:
        self.gate.latency = seconds

    @property
    def watch_delay(self) -> float | Callable[[Request], float]:
        """How long events take to reach a watch, in seconds, or a function of the watch's ``Request``."""
        return self.gate.watch_delay

    @watch_delay.setter
    def watch_delay(self, seconds: float | Callable[[Request], float]) -> None:
        self.gate.watch_delay = seconds

    @property
    def down(self) -> bool:
        """True: no request is answered, and the watches that are open break."""
        return self.gate.down

    @down.setter
    def down(self, value: bool) -> None:
        self.gate.down = value
        if value:
            self.cut_watches(mid_line=True)

    def fail(self, match: Match, error: ApiError, times: int | None = 1, *, stored: bool = False) -> Failure:
        """Answer the next ``times`` matching requests with an error (None: all); status 0 is no answer at all.

        ``stored`` executes the request first: the client does not know that its write was made.
        """
        failure = Failure(match, error, times, stored)
        self.gate.failures.append(failure)
        return failure

    def hang(self, match: Match, *, stored: bool = False) -> Hold:
        """Keep matching requests without an answer until ``release``; matching open watches go silent.

        With ``stored`` the request is executed at once and only its answer is kept.
        """
        hold = Hold(match, stored)
        self.gate.holds.append(hold)
        for stream in self._exposed_streams():
            stream.wake.set()
        return hold

    def cut_watches(self, *, mid_line: bool = False) -> None:
        """End all open watches: as a server does at its timeout, or in the middle of a line."""
        for stream in self._exposed_streams():
            stream.cut(torn=mid_line)

    def inject(self, event: Object) -> None:
        """Send something of one's own to all open watches, between the real events: an ERROR, say."""
        for stream in self._exposed_streams():
            stream.inject(event)

    def freeze_cache(self, frozen: bool = True) -> None:
        """Let lists that accept any version (resourceVersion "0") answer with what is there now, until undone."""
        if frozen:
            self.store.freeze()
        else:
            self.store.thaw()

    def expire_history(self) -> None:
        """Forget the past: every version and continue token handed out so far is too old, for all but open watches."""
        self.store.expire_history()
        for stream in self._streams:
            stream.skip_to(self.store.revision)

    def serve(self, listener: Any = ("127.0.0.1", 0)) -> HttpDoor:
        """Open the HTTP door on an address or a listening socket; needs a clock of real time."""
        from simulator.fake_kube_http import HttpDoor

        return HttpDoor(self, listener)

    @property
    def open_watches(self) -> int:
        """How many watches somebody reads at the moment."""
        return len(self._streams)

    # For the doors ---------------------------------------------------------------------------------------------------

    def perform(self, request: Request, act: Callable[[], T], patience: float | None) -> T:
        """Take one request through log, faults and ``act``; ``patience`` is how long its client waits, in seconds."""
        self.requests.append(request)
        if len(self.requests) > 2 * _KEPT_REQUESTS:
            del self.requests[:_KEPT_REQUESTS]
        try:
            self.gate.arrive(request, patience)
            result = act()
            self.gate.answer(request, patience)
            for listener in self.answered:
                listener(request, None)
            return result
        except ApiError as error:
            for listener in self.answered:
                listener(request, error)
            if self._record is not None:
                self._record("kube", "refused", str(request), {"status": error.status, "reason": error.reason})
            raise

    def list_page(
        self, target: Target, selects: Selector, *, limit: int, token: str, version: tuple[str, str]
    ) -> Object:
        """One page of a list; ``version`` is its resourceVersion and resourceVersionMatch, "" when not given."""
        resource = target.resource
        if target.name or "list" not in resource.verbs:
            raise method_not_allowed(target)
        self.store.check_version(*version)
        page = self.store.list(target, selects, limit=limit, token=token, any_version=version[0] == "0")
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, **page}

    def post(self, target: Target, body: Object, options: WriteOptions = PLAIN) -> Object:
        """POST: create an object, bind or evict a pod, or answer a review."""
        if not isinstance(body, dict):
            raise bad_request("the body of the request was in an unknown format: it is no object")
        if target.subresource == "binding":
            self.store.bind(target.whole, str((body.get("target") or {}).get("name", "")))
            return _success(201)
        if target.subresource == "eviction":
            self.store.delete(target.whole, delete_options(body.get("deleteOptions")))
            return _success(201)
        if target.name or (target.resource.namespaced and not target.namespace):
            raise method_not_allowed(target)
        if target.resource.plural == "tokenreviews":
            return self._token_review(body)
        if target.resource.plural in ("subjectaccessreviews", "selfsubjectaccessreviews"):
            return {**body, "status": {"allowed": self.allows(body.get("spec", {}))}}
        return self.store.create(target, body, options)

    def remove(self, target: Target, options: DeleteOptions) -> Object:
        """DELETE: a pod answers with what is left of it, other objects with a Status once they are gone."""
        last = self.store.delete(addressed(target, "delete"), options)
        if target.resource.plural == "pods" or self.store.find(target) is not None:
            return last
        return _success(200) | {
            "details": {"name": target.name, "kind": target.resource.plural, "uid": last["metadata"]["uid"]}
        }

    def open_watch(
        self,
        request: Request,
        target: Target,
        *,
        revision: int | None,
        faultless: bool = False,
    ) -> WatchStream:
        """The stream ``request`` asks for, to be read inside ``reading``; raises 410 here when ``gone`` is "http"."""
        if "watch" not in target.resource.verbs:
            raise method_not_allowed(target)
        fields, labels = (request.options.get(name, "") for name in ("fieldSelector", "labelSelector"))
        if target.name:
            # The watch of one object is the old spelling of a field selector.
            fields = ",".join(filter(None, (fields, f"metadata.name={target.name}")))
        if revision is not None and self.gone == "http":
            self.store.check_revision(target.resource, revision)
        selects = selector(target.resource, fields, labels)
        gate = Gate(self.clock, None) if faultless else self.gate
        return WatchStream(self.store, gate, request=request, target=target, selects=selects)

    @contextmanager
    def reading(self, stream: WatchStream) -> Iterator[None]:
        """Keep the stream among the open ones for as long as somebody reads it."""
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.remove(stream)

    def _exposed_streams(self) -> Streams:
        return [stream for stream in self._streams if stream.gate is self.gate]

    def _token_review(self, body: Object) -> Object:
        user = self.tokens.get((body.get("spec") or {}).get("token", ""))
        status: Object = {"authenticated": False, "error": "invalid bearer token"}
        if user is not None:
            status = {"authenticated": True, "user": user}
        return {**body, "status": status}

    def _changed(self, target: Target, change: Change) -> None:
        for stream in self._streams:
            stream.notify(target)
        if self._record is not None:
            fields = {"resourceVersion": str(change.revision), "uid": change.last["metadata"]["uid"]}
            self._record("kube", change.type.lower(), target.label, fields)


Requests = list[Request]
Streams = list[WatchStream]


def delete_options(body: Any) -> DeleteOptions:
    """The options of a DELETE from their wire form."""
    body = body if isinstance(body, dict) else {}
    preconditions = body.get("preconditions") or {}
    return DeleteOptions(
        uid=preconditions.get("uid") or "",
        resource_version=preconditions.get("resourceVersion") or "",
        grace_seconds=body.get("gracePeriodSeconds"),
        dry_run=bool(body.get("dryRun")),
    )


def addressed(target: Target, verb: str) -> Target:
    """The target if ``verb`` can be asked of it: one object, or the part of one that can be read and written."""
    parts = ("", "status", "finalize") if verb != "delete" else ("",)
    if not target.name or target.subresource not in parts or verb not in target.resource.verbs:
        raise method_not_allowed(target)
    return target


def _success(code: int) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code}
