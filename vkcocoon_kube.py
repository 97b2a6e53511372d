"""The door to the Kubernetes API: what can be asked (`KubeApi`), the real client, and the reflector.

Everything of ours that talks to Kubernetes (`vkcocoon_pods`, `vkcocoon_publish`, `vkcocoon_node`) does so through a
`KubeApi` handed in, in raw dicts, and sees one kind of failure: `ApiError`. There are two doors: `HttpKubeApi` here,
over the official client, and the in-process one of the simulator. Only this module imports the `kubernetes` package,
and only when an `HttpKubeApi` is made: models are never used, because they drop fields they do not know.

`Reflector` keeps the objects of one collection that match a selector, keyed by UID, through every way in which a
watch can fail: a clean end, a cut in the middle of a line, silence on a half-open connection, a version that is too
old (as an HTTP answer and as an ERROR event), an API that is away. A delete that nobody told us about, and a
namesake that took an object's place in a gap, are found by comparing UIDs at the next list.

Lifetimes: an `HttpKubeApi` lives as long as the process; whoever must not wait behind others takes `.separate()`.
A reflector owns one greenlet from `start` to `close`; its handlers run in it and must not switch.
"""

from __future__ import annotations

import http.client
import json
import os
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

import structlog
from gevent.event import Event
from gevent.pool import Group
from gevent.queue import LifoQueue

from vkcocoon_probes import Clock, ProbeTimeout, SystemClock, spawn

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

__all__ = [
    "ApiError",
    "Backoff",
    "Handler",
    "HttpKubeApi",
    "KubeApi",
    "KubeconfigError",
    "Object",
    "PatchKind",
    "Reflector",
    "Tally",
    "Uncounted",
    "list_all",
    "uid_of",
    "version_of",
]

log = structlog.get_logger()

Object = dict[str, Any]
PatchKind = Literal["strategic", "merge", "json"]

CONNECT_S = 5.0
READ_S = 20.0  # longest silence inside one answer
CALL_S = 30.0  # longest call altogether: name resolution and answers that drip included
WATCH_READ_S = 100.0  # a little more than the reflector's own patience, which is the one that decides
POOL_SIZE = 32  # more than all writers at once: a pool that is too small throws connections away
NO_KUBECONFIG = "no kubeconfig is set, ~/.kube/config is not there, and no service account of a pod can be used"
BODY_SHOWN = 500  # characters of an answer that is not a Status object, in an error message

PAGE = 500
SILENCE_S = 90.0  # bookmarks come about every minute: a watch silent for longer is dead
WATCH_S = (240.0, 480.0)  # we ask the server to end a watch after a random time within
SETTLED_S = 10.0  # longer than it takes to find out that there is nobody to watch
RELIST_S = 1800.0  # list again now and then, whatever the watch says
FIRST_RETRY_S, LAST_RETRY_S = 0.8, 30.0
# A watch refused with one of these is tried again from the same version; everything else needs a new list.
SAME_VERSION = frozenset({0, 401, 403, 429, 500, 502, 503})


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


class KubeconfigError(Exception):
    """There is no usable kubeconfig and no service account."""


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


class Tally(Protocol):
    """Who counts what goes between us and the API (vkcocoon_http.Metrics does); memory only."""

    def status_write(self, result: str) -> None: ...
    def watch_reconnect(self, reason: str) -> None: ...
    def pod_operation(self, op: str, result: str, reason: str = "") -> None: ...
    def delivery(self, result: str, seconds: float) -> None: ...


class Uncounted:
    """A `Tally` of nothing."""

    def status_write(self, result: str) -> None:
        pass

    def watch_reconnect(self, reason: str) -> None:
        pass

    def pod_operation(self, op: str, result: str, reason: str = "") -> None:
        pass

    def delivery(self, result: str, seconds: float) -> None:
        pass


class Backoff:
    """Pauses that grow: `first` doubling to `last` seconds, each lengthened by up to `jitter` of itself."""

    def __init__(self, first: float, last: float, *, rng: random.Random | None = None, jitter: float = 0.2) -> None:
        self._first = first
        self._last = last
        self._rng = rng
        self._jitter = jitter
        self._next = first

    def next(self, retry_after: float | None = None) -> float:
        """Seconds to wait now; never less than the server asked for, as long as that is sane."""
        pause = self._next
        self._next = min(self._last, self._next * 2)
        if self._rng is not None:
            pause += self._rng.uniform(0, self._jitter * pause)
        return max(pause, min(retry_after or 0.0, 300.0))

    def reset(self) -> None:
        self._next = self._first


def uid_of(obj: Object) -> str:
    return str((obj.get("metadata") or {}).get("uid") or "")


def version_of(obj: Object) -> str:
    return str((obj.get("metadata") or {}).get("resourceVersion") or "")


# --- the real client ----------------------------------------------------------------------------------------------

_PATCH_TYPES: dict[PatchKind, str] = {
    "strategic": "application/strategic-merge-patch+json",
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
}


class HttpKubeApi:
    """`KubeApi` over the official client's transport: raw dicts, a bound on every call, no silent retries.

    `kubeconfig` is a path, or several with colons between ("" = ~/.kube/config if there is one, else the service
    account of the pod we run in).
    Credentials are read again when the API answers 401 or TLS fails, since tokens and certificates rotate.
    Raises `KubeconfigError` when there is nothing to load.
    """

    def __init__(
        self, kubeconfig: str = "", *, user_agent: str = "vk-cocoon", read_s: float = READ_S, call_s: float = CALL_S
    ) -> None:
        self._kubeconfig = kubeconfig
        self._user_agent = user_agent
        self._read_s = read_s
        self._call_s = call_s
        self._clock = SystemClock()
        self._client = self._load()
        self.answered_at: datetime | None = None  # the server's clock at its last answer, whole seconds

    def separate(self) -> HttpKubeApi:
        """The same API over connections of its own, for callers that must not wait behind others."""
        return HttpKubeApi(self._kubeconfig, user_agent=self._user_agent, read_s=self._read_s, call_s=self._call_s)

    def close(self) -> None:
        self._client.rest_client.close()

    def get(self, path: str) -> Object:
        return self._call("GET", path)

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
            "limit": limit,
            "continue": continue_,
            "resourceVersion": resource_version,
        }
        return self._call("GET", path, query=query)

    def create(self, path: str, body: Object) -> Object:
        return self._call("POST", path, body=body)

    def patch(self, path: str, body: Any, *, kind: PatchKind) -> Object:
        return self._call("PATCH", path, body=body, content_type=_PATCH_TYPES[kind])

    def replace(self, path: str, body: Object) -> Object:
        return self._call("PUT", path, body=body)

    def delete(self, path: str, *, uid: str = "", grace_seconds: int | None = None) -> Object:
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        return self._call("DELETE", path, body=options)

    def watch(
        self, path: str, *, resource_version: str, field_selector: str = "", timeout: float = 300.0
    ) -> Iterator[Object]:
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "fieldSelector": field_selector,
            "timeoutSeconds": int(timeout),
        }
        with self._failures():
            response = self._open("GET", path, query=query, read_s=WATCH_READ_S)
            # Closed, not returned to the pool: an unread rest of the stream would be the next caller's answer.
            with closing(response):
                yield from _json_lines(response.stream(1 << 16, decode_content=True))

    def _call(self, verb: str, path: str, *, query: Object | None = None, body: Any = None, **how: Any) -> Object:
        with self._failures(), self._clock.timeout(self._call_s):
            response = self._open(verb, path, query=query, body=body, **how)
            try:
                answer = json.loads(response.data)
            finally:
                response.release_conn()
        if not isinstance(answer, dict):
            raise ApiError(0, "BadAnswer", f"{verb} {path} was answered with {type(answer).__name__}, not an object")
        return answer

    def _open(self, verb: str, path: str, **request: Any) -> Any:
        """The raw response of a request that was accepted; new credentials are tried once."""
        client = self._client
        try:
            return self._send(client, verb, path, **request)
        except ApiError as error:
            if error.status != 401 and error.reason != "TLS":
                raise
            self._reload(client, error)
            return self._send(self._client, verb, path, **request)

    def _send(
        self,
        client: ApiClient,
        verb: str,
        path: str,
        *,
        query: Object | None = None,
        body: Any = None,
        content_type: str = "application/json",
        read_s: float = 0.0,
    ) -> Any:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        given = [(name, str(value)) for name, value in (query or {}).items() if value]
        request = client.param_serialize(
            verb, path, query_params=given, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        response = self._transport(client, request, read_s or self._read_s)
        if not 200 <= response.status <= 299:
            raise _refusal(response)
        self.answered_at = _date(response.headers.get("Date", ""))
        return response

    def _transport(self, client: ApiClient, request: Any, read_s: float) -> Any:
        from kubernetes.client import ApiException

        try:
            verb, url, headers, body, _ = request
            return client.call_api(verb, url, headers, body, _request_timeout=(CONNECT_S, read_s)).response
        except ApiException as error:  # the client turns TLS errors alone into its own exception
            raise ApiError(0, "TLS", str(error.reason)) from error

    def _load(self) -> ApiClient:
        from kubernetes import config as untyped
        from kubernetes.client import ApiClient, Configuration

        config: Any = untyped
        files = self._kubeconfig or _default_kubeconfig()

        settings = Configuration()
        settings.retries = False  # ours are visible and know what they repeat
        settings.connection_pool_maxsize = POOL_SIZE
        try:
            if files:
                config.load_kube_config(files, client_configuration=settings)
            else:
                config.load_incluster_config(client_configuration=settings)
        except Exception as error:  # the loader raises what its parsers and plugins raise
            raise KubeconfigError(f"{files}: {error}" if files else f"{NO_KUBECONFIG} ({error})") from error
        client = ApiClient(settings)
        client.user_agent = self._user_agent
        _use_cooperative_queues(client.rest_client.pool_manager)
        return client

    def _reload(self, used: ApiClient, error: ApiError) -> None:
        """Read the credentials again, unless another greenlet has done so since `used` was taken."""
        if self._client is not used:
            return
        log.warning("the API does not accept our credentials; reading them again", error=str(error))
        try:
            self._client = self._load()
        except KubeconfigError as problem:
            raise ApiError(401, "Unauthorized", str(problem)) from problem

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Whatever the network or the transport does becomes an `ApiError`."""
        import urllib3

        try:
            yield
        except ProbeTimeout as error:
            raise ApiError(0, "Timeout", f"no complete answer within {self._call_s:g} s") from error
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            raise ApiError(0, type(error).__name__, str(error)) from error
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or deeper than anything is
            raise ApiError(0, "BadAnswer", f"the answer cannot be read: {error}") from error


def _use_cooperative_queues(pools: Any) -> None:
    """Keep connections in gevent's queue, which has no lock.

    The standard one can be entered again by the finalizer of another pool, from the garbage collector, while the same
    greenlet holds its lock, and then waits for itself (urllib3#3289, gevent#1957).
    """
    pools.pool_classes_by_scheme = {
        scheme: type(pool.__name__, (pool,), {"QueueCls": LifoQueue})
        for scheme, pool in pools.pool_classes_by_scheme.items()
    }


def _date(header: str) -> datetime | None:
    try:
        return parsedate_to_datetime(header)
    except ValueError:
        return None


def _default_kubeconfig() -> str:
    path = os.path.expanduser("~/.kube/config")
    return path if os.path.exists(path) else ""


def _refusal(response: Any) -> ApiError:
    """The error in an answer that is not 2xx: a Status object, or whatever a proxy in between says."""
    text = response.data.decode("utf-8", "replace")
    response.release_conn()
    try:
        status = json.loads(text)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        return ApiError(response.status, str(response.reason or ""), text[:BODY_SHOWN], _retry_after(response, {}))
    return ApiError(
        response.status,
        str(status.get("reason") or response.reason or ""),
        str(status.get("message") or ""),
        _retry_after(response, status),
    )


def _retry_after(response: Any, status: Object) -> float | None:
    details = status.get("details")
    asked = response.headers.get("Retry-After") or (isinstance(details, dict) and details.get("retryAfterSeconds"))
    text = str(asked or "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


def _json_lines(chunks: Iterator[bytes]) -> Iterator[Object]:
    """The objects of a stream of lines. Lines are cut as bytes: a chunk may end inside a character."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        for line in lines:
            if line.strip():
                yield json.loads(line)
    if rest.strip():
        raise ApiError(0, "Truncated", "the stream ended in the middle of a line")


# --- the reflector ------------------------------------------------------------------------------------------------


class Handler(Protocol):
    """Who is told about changes; called from the reflector's greenlet, must not switch, must not raise."""

    def changed(self, obj: Object) -> None:
        """An object appeared or is different from the last time."""
        ...

    def gone(self, obj: Object) -> None:
        """An object (its last state) is no longer there, or no longer selected."""
        ...

    def listed(self) -> None:
        """A complete list has been compared: `objects` is what the API holds."""
        ...


def list_all(api: KubeApi, path: str, *, field_selector: str = "") -> tuple[list[Object], str]:
    """Every object of a collection and the version of the list, read in pages.

    Raises ApiError when any page is missing: half a list is no list, because what is absent from it would be deleted.
    """
    items: list[Object] = []
    continue_ = ""
    while True:
        page = api.list(path, field_selector=field_selector, limit=PAGE, continue_=continue_)
        items += page.get("items") or ()
        metadata = page.get("metadata") or {}
        continue_ = metadata.get("continue") or ""
        if not continue_:
            return items, str(metadata.get("resourceVersion") or "")


class _TooOld(Exception):
    """Watching on from this version is impossible: list again."""


class Reflector:
    """The objects of a collection as the API holds them, keyed by UID in `objects`.

    A namesake with another UID is another object: the old one is reported gone before the new one appears, also
    when both changes happened while nobody watched.
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        path: str,
        handler: Handler,
        *,
        field_selector: str = "",
        rng: random.Random | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.objects: dict[str, Object] = {}
        self.synced = Event()  # set by the first complete list
        self._api = api
        self._clock = clock
        self._path = path
        self._handler = handler
        self._tally = tally or Uncounted()
        self._selector = field_selector
        self._rng = rng or random.Random(path + field_selector)
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, rng=self._rng)
        self._names: dict[tuple[str, str], str] = {}
        self._stop = Event()
        self._group = Group()
        self._trouble = "nothing has been read from the API yet"
        self._watching_since: float | None = None
        self._reachable = True
        self._listed_at = 0.0

    def start(self) -> None:
        spawn(self._group, f"reflector {self._path}", self._run)

    def close(self) -> None:
        self._stop.set()
        self._group.kill(block=False)

    @property
    def trouble(self) -> str:
        """Why the objects cannot be followed now; "" when they can. A watch says nothing while nothing changes, so one
        that has been open for a while without an error counts as an answer."""
        since = self._watching_since
        open_for = self._clock.monotonic() - since if since is not None and self.synced.is_set() else 0.0
        return "" if open_for >= SETTLED_S else self._trouble

    def _run(self) -> None:
        version = ""
        while not self._stop.is_set():
            try:
                if not version or self._clock.monotonic() - self._listed_at >= RELIST_S:
                    version = self._list()
                version = self._watch(version)
            except _TooOld as reason:
                log.info("the watch cannot go on; listing again", path=self._path, reason=str(reason))
                version = ""
                self._pause_if_spinning()
            except ApiError as error:
                if error.status not in SAME_VERSION:
                    version = ""
                self._away(error)
            except Exception:  # a mistake over one object must not leave the node without eyes
                log.exception("the reflector failed; listing again", path=self._path)
                version = ""
                self._pause(self._backoff.next())

    def _list(self) -> str:
        """Read all pages, then compare; nothing is believed before the last page is there."""
        items, version = list_all(self._api, self._path, field_selector=self._selector)
        self._replace(items)
        self._listed_at = self._clock.monotonic()
        self._answered()
        self.synced.set()
        self._handler.listed()
        return version

    def _replace(self, items: list[Object]) -> None:
        found = {uid_of(item): item for item in items if uid_of(item)}
        for uid in [uid for uid in self.objects if uid not in found]:
            self._remove(self.objects[uid])
        for item in found.values():
            self._store(item)

    def _watch(self, version: str) -> str:
        """Follow one watch to its end; the version to go on from."""
        began = self._clock.monotonic()
        stream = self._api.watch(
            self._path,
            resource_version=version,
            field_selector=self._selector,
            timeout=float(round(self._rng.uniform(*WATCH_S))),
        )
        self._watching_since = began
        try:
            while (event := self._next(stream)) is not None:
                version = self._take(event) or version
        except ApiError as error:
            self._tally.watch_reconnect("expired" if error.status == 410 else "error")
            if error.status in SAME_VERSION:
                self._away(error)
                return version
            raise _TooOld(str(error)) from error
        finally:
            self._watching_since = None
            if hasattr(stream, "close"):
                stream.close()
        self._tally.watch_reconnect("ended")
        if self._clock.monotonic() - began < FIRST_RETRY_S:
            self._pause(self._backoff.next())  # a server that hangs up at once must not make us spin
        return version

    def _next(self, stream: Iterator[Object]) -> Object | None:
        """The next event, None at the end; silence is a dead connection (nothing else would tell us)."""
        try:
            with self._clock.timeout(SILENCE_S):
                return next(stream, None)
        except ProbeTimeout as error:
            raise ApiError(0, "Silent", f"the watch said nothing for {SILENCE_S:g} s") from error

    def _take(self, event: Object) -> str:
        """Apply one event; the version it brings, "" for none."""
        kind, obj = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise ApiError(int(obj.get("code") or 500), str(obj.get("reason") or ""), str(obj.get("message") or ""))
        self._answered()
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            if not uid_of(obj):
                log.warning("an event without a UID", path=self._path, type=kind)
            elif kind == "DELETED":
                self._remove(obj)
            else:
                self._store(obj)
        return version_of(obj)

    def _error(self, status: Object) -> ApiError:
        return ApiError(
            int(status.get("code") or 500), str(status.get("reason") or ""), str(status.get("message") or "")
        )

    def _store(self, obj: Object) -> None:
        uid, name = uid_of(obj), _name_of(obj)
        other = self._names.get(name)
        if other is not None and other != uid and other in self.objects:
            self._remove(self.objects[other])
        known = self.objects.get(uid)
        self.objects[uid] = obj
        self._names[name] = uid
        if known is None or version_of(known) != version_of(obj):
            self._handler.changed(obj)

    def _remove(self, obj: Object) -> None:
        uid, name = uid_of(obj), _name_of(obj)
        if self._names.get(name) == uid:
            del self._names[name]
        if self.objects.pop(uid, None) is not None:
            self._handler.gone(obj)

    def _answered(self) -> None:
        self._backoff.reset()
        if not self._reachable:
            log.info("the API answers again", path=self._path)
        self._reachable = True
        self._trouble = ""

    def _away(self, error: ApiError) -> None:
        if self._reachable:
            log.warning("the API does not answer as it should; trying again", path=self._path, error=str(error))
        self._reachable = False
        self._trouble = f"the API does not answer as it should: {error}"
        self._pause(self._backoff.next(error.retry_after))

    def _pause_if_spinning(self) -> None:
        """A list is followed by a watch that is too old at once, again and again: do not hammer the API."""
        if self._clock.monotonic() - self._listed_at < FIRST_RETRY_S:
            self._pause(self._backoff.next())

    def _pause(self, seconds: float) -> None:
        self._clock.wait(self._stop, seconds)


def _name_of(obj: Object) -> tuple[str, str]:
    metadata = obj.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")
