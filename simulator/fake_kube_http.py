"""The HTTP door of the fake API server: what kubectl and the official client talk to.

    door = FakeKube(SystemClock()).serve(("127.0.0.1", 0))
    Path("config").write_text(door.kubeconfig())
    ...
    door.close()

It translates between HTTP and the server and decides nothing: routes, media types, query parameters, Status bodies,
tables. Logs come from the node itself (simulator.fake_kube_proxy). One greenlet per connection, as gevent.pywsgi makes
them. A watch sends its headers at once and then one line per event; a client that closes its end is noticed at once, so
no reader is left behind. There is no authentication: serve it on loopback.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl
from wsgiref.types import StartResponse, WSGIEnvironment

import gevent
import yaml
from gevent.pool import Pool
from gevent.pywsgi import WSGIHandler, WSGIServer

from simulator.fake_kube import FakeKube, addressed, delete_options
from simulator.fake_kube_discovery import document
from simulator.fake_kube_faults import Request
from simulator.fake_kube_proxy import NodeLog, location_of_log
from simulator.fake_kube_resources import Refusal, Target, bad_request, method_not_allowed, parse_path, status_of
from simulator.fake_kube_selectors import selector
from simulator.fake_kube_store import PatchKind, WriteOptions, revision_of
from simulator.fake_kube_table import table
from simulator.fake_kube_watch import TornStream, WatchOptions, WatchStream
from vkcocoon_kube import ApiError, Object

__all__ = ["HttpDoor"]

T = TypeVar("T")

_log = logging.getLogger("simulator.fake_kube")

# A real server ends a watch without a timeout of its own after half an hour to an hour.
_DEFAULT_WATCH_S = 1800.0
_MAX_BODY = 3 * 1024 * 1024

_PATCH_KINDS: dict[str, PatchKind] = {
    "application/strategic-merge-patch+json": "strategic",
    "application/merge-patch+json": "merge",
    "application/json-patch+json": "json",
    "application/apply-patch+yaml": "apply",
}
_REFUSED = frozenset({"attach", "exec", "portforward"})


class _Aborted(Exception):
    """The connection was broken on purpose; nothing more may be written to it."""


class _Handler(WSGIHandler):
    """pywsgi's handler, with a way to break the connection and none to print a traceback about that."""

    def get_environ(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environ()
        environ["simulator.socket"] = self.socket
        return environ

    def handle_error(self, type_: Any, value: Any, traceback: Any) -> None:
        if isinstance(value, _Aborted):
            self.close_connection = True
        else:
            super().handle_error(type_, value, traceback)


class HttpDoor:
    """A listening server; ``url`` is where. ``chunk_bytes`` cuts watch lines into pieces of that size, 0 does not."""

    def __init__(self, kube: FakeKube, listener: Any) -> None:
        self.kube = kube
        self.chunk_bytes = 0
        self._pool = Pool()
        self._server = WSGIServer(
            listener, self._application, spawn=self._pool, handler_class=_Handler, log=None, error_log=_log
        )
        self._server.start()
        host, port, *_ = self._server.socket.getsockname()
        self.address = (str(host), int(port))

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def kubeconfig(self) -> str:
        """A kubeconfig that points kubectl or a client here."""
        name = "simulator"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "users": [{"name": name, "user": {}}],
        }
        return str(yaml.safe_dump(config, sort_keys=False))

    def close(self) -> None:
        """Stop listening and break all connections."""
        self._server.stop(timeout=0)

    # One request -----------------------------------------------------------------------------------------------------

    def _application(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        try:
            call = _Call.read(environ)
            answer = _Router(self.kube, call).answer()
            if isinstance(answer, _Watch):
                self._stream(answer, environ, start_response)
                return []
            if isinstance(answer, NodeLog):
                self._pass_on(answer, environ, start_response)
                return []
        except ApiError as error:
            answer = _error_answer(error, environ)
        body = answer.encoded()
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(body))), *answer.headers]
        start_response(f"{answer.status} {http.client.responses.get(answer.status, 'Status')}", headers)
        return [body]

    def _stream(self, watch: _Watch, environ: WSGIEnvironment, start_response: StartResponse) -> None:
        write = start_response("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-cache, private")])
        write(b"")  # The headers now, not with the first event: clients wait for them.
        try:
            with _hanging_up(environ, watch.stream.abandon), self.kube.reading(watch.stream):
                for event in watch.stream.events(watch.options):
                    self._send_line(write, watch.encoded(event))
        except TornStream:
            write(b'{"type":"MODIFIED","object":{"kind":')
            _abort(environ)

    def _pass_on(self, log: NodeLog, environ: WSGIEnvironment, start_response: StartResponse) -> None:
        write = start_response("200 OK", [("Content-Type", "text/plain")])
        write(b"")
        try:
            with _hanging_up(environ, log.abandon):
                for piece in log.pieces():
                    write(piece)
        except OSError:  # of either side; what was cut must not look like an end
            _abort(environ)

    def _send_line(self, write: Callable[[bytes], object], line: bytes) -> None:
        size = self.chunk_bytes or len(line)
        for start in range(0, len(line), size):
            write(line[start : start + size])


@contextmanager
def _hanging_up(environ: WSGIEnvironment, abandon: Callable[[], None]) -> Iterator[None]:
    """Calls `abandon` when the client is gone. Readable means closed: it sends nothing while it reads."""
    watcher = gevent.get_hub().loop.io(environ["simulator.socket"].fileno(), 1)
    watcher.start(abandon)
    try:
        yield
    finally:
        watcher.stop()
        watcher.close()


def _abort(environ: WSGIEnvironment) -> NoReturn:
    with suppress(OSError):  # The other end may have been faster.
        environ["simulator.socket"].shutdown(socket.SHUT_RDWR)
    raise _Aborted


def _error_answer(error: ApiError, environ: WSGIEnvironment) -> _Answer:
    if error.status == 0:
        _abort(environ)
    headers = () if error.retry_after is None else (("Retry-After", f"{error.retry_after:g}"),)
    return _Answer(status_of(error), error.status, headers)


# Requests and answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    body: Object | str
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def content_type(self) -> str:
        return "text/plain; charset=utf-8" if isinstance(self.body, str) else "application/json"

    def encoded(self) -> bytes:
        return self.body.encode() if isinstance(self.body, str) else _encoded(self.body)


@dataclass(frozen=True, slots=True)
class _Watch:
    """A watch that was let in; ``as_table`` turns an object into what the client asked to see."""

    stream: WatchStream
    options: WatchOptions
    as_table: Callable[[Object], Object] | None

    def encoded(self, event: Object) -> bytes:
        obj = event["object"]
        if self.as_table is not None and event["type"] != "ERROR":
            obj = self.as_table(obj)
        return _encoded({"type": event["type"], "object": obj})


def _encoded(body: Object) -> bytes:
    # The line break ends an event of a watch, and a document for a person with curl.
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class _Call:
    """One HTTP request, read and taken apart."""

    method: str
    path: str
    query: dict[str, str]
    accept: str
    content_type: str
    raw: bytes

    @classmethod
    def read(cls, environ: WSGIEnvironment) -> _Call:
        # A request to upgrade the connection has no body, and reading one would wait for ever.
        has_body = int(environ.get("CONTENT_LENGTH") or 0) or "HTTP_TRANSFER_ENCODING" in environ
        raw = environ["wsgi.input"].read(_MAX_BODY + 1) if has_body else b""
        if len(raw) > _MAX_BODY:
            raise Refusal(413, "RequestEntityTooLarge", f"Request entity too large: limit is {_MAX_BODY}")
        return cls(
            method=environ["REQUEST_METHOD"],
            path=environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace"),
            query=dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)),
            accept=environ.get("HTTP_ACCEPT", ""),
            content_type=environ.get("CONTENT_TYPE", "").partition(";")[0].strip(),
            raw=raw,
        )

    def body(self) -> Any:
        """The decoded body, None when there is none; clients send JSON with and without saying so."""
        if not self.raw:
            return None
        if "protobuf" in self.content_type:
            # Only some "kubectl create KIND" commands insist on it; the same object from a file is sent as JSON.
            raise _unsupported("application/json, application/yaml (not protobuf: use kubectl create -f FILE)")
        try:
            if self.content_type.endswith("yaml"):
                return yaml.safe_load(self.raw)
            return json.loads(self.raw)
        except (ValueError, yaml.YAMLError) as error:
            raise bad_request(f"the object provided is unrecognized: {error}") from None

    def number(self, name: str) -> float | None:
        text = self.query.get(name, "")
        if not text:
            return None
        if not text.isascii() or not text.removeprefix("-").isdigit():
            raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax ({name})')
        return int(text)

    def flag(self, name: str) -> bool:
        return self.query.get(name, "") in ("true", "1")

    @property
    def wants_table(self) -> bool:
        return "as=Table" in self.accept.partition(",")[0]


def _unsupported(accepted: str) -> Refusal:
    message = f"the body of the request was in an unknown format - accepted media types include: {accepted}"
    return Refusal(415, "UnsupportedMediaType", message)


# Routes --------------------------------------------------------------------------------------------------------------


class _Router:
    """Finds what a call asks for, and asks the server."""

    def __init__(self, kube: FakeKube, call: _Call) -> None:
        self._kube = kube
        self._call = call

    def answer(self) -> _Answer | _Watch | NodeLog:
        call = self._call
        if call.method == "GET" and call.path in ("/healthz", "/livez", "/readyz"):
            return self._perform("GET", lambda: _Answer("ok"))
        if call.method == "GET" and (page := document(call.path)) is not None:
            return self._perform("GET", lambda: _Answer(page))
        try:
            target = parse_path(call.path)
        except ApiError as error:
            return self._perform(call.method, partial(_refuse, error))
        route = {
            "GET": self._read,
            "POST": self._create,
            "PUT": self._replace,
            "PATCH": self._patch,
            "DELETE": self._delete,
        }.get(call.method)
        if route is None:
            return self._perform(call.method, partial(_refuse, method_not_allowed(target)))
        return route(target)

    def _perform(self, verb: str, act: Callable[[], T], body: Any = None, **options: str) -> T:
        call = self._call
        request = Request(self._kube.clock.monotonic(), verb, call.path, body, {**call.query, **options})
        return self._kube.perform(request, act, None)

    # Reading ---------------------------------------------------------------------------------------------------------

    def _read(self, target: Target) -> _Answer | _Watch | NodeLog:
        if target.subresource == "log":
            return self._log(target)
        if target.subresource in _REFUSED:
            return self._perform("GET", self._refuse_proxy)
        if self._call.flag("watch"):
            return self._watch(target)
        if target.name:
            return self._perform("GET", lambda: self._shown(target, self._kube.store.get(addressed(target, "get"))))
        return self._perform("LIST", lambda: self._list(target))

    def _refuse_proxy(self) -> _Answer:
        sentence = "this API server passes on logs only: exec, attach and port-forward are not supported"
        raise Refusal(501, "NotImplemented", sentence)

    def _log(self, target: Target) -> _Answer | NodeLog:
        where = self._perform("GET", lambda: location_of_log(self._kube, target, self._call.query))
        return NodeLog(self._kube, *where) if where is not None else _Answer("")

    def _list(self, target: Target) -> _Answer:
        call, query = self._call, self._call.query
        page = self._kube.list_page(
            target,
            selector(target.resource, query.get("fieldSelector", ""), query.get("labelSelector", "")),
            limit=int(call.number("limit") or 0),
            token=query.get("continue", ""),
            version=(query.get("resourceVersion", ""), query.get("resourceVersionMatch", "")),
        )
        if not call.wants_table:
            return _Answer(page)
        return _Answer(self._table(target, page["items"], page["metadata"]))

    def _shown(self, target: Target, obj: Object) -> _Answer:
        if not self._call.wants_table:
            return _Answer(obj)
        return _Answer(self._table(target, [obj], {"resourceVersion": obj["metadata"]["resourceVersion"]}))

    def _table(self, target: Target, objects: list[Object], metadata: Object) -> Object:
        include = self._call.query.get("includeObject", "Metadata")
        return table(target.resource, objects, self._kube.clock.now(), include=include, metadata=metadata)

    def _watch(self, target: Target) -> _Watch:
        call, query = self._call, self._call.query
        if call.flag("sendInitialEvents"):
            # Clients that would like the list as part of the watch fall back to listing.
            raise Refusal(422, "Invalid", "ListOptions is invalid: sendInitialEvents: Forbidden: is not supported")
        revision = revision_of(query.get("resourceVersion", ""))
        options = WatchOptions(
            revision=revision,
            timeout=float(call.number("timeoutSeconds") or _DEFAULT_WATCH_S),
            bookmarks=call.flag("allowWatchBookmarks"),
            bookmark_interval=self._kube.bookmark_interval,
        )

        def open_stream(request: Request) -> WatchStream:
            return self._kube.open_watch(request, target, revision=revision)

        request = Request(self._kube.clock.monotonic(), "WATCH", call.path, None, query)
        stream = self._kube.perform(request, lambda: open_stream(request), None)
        return _Watch(stream, options, self._row_of(target) if call.wants_table else None)

    def _row_of(self, target: Target) -> Callable[[Object], Object]:
        def row(obj: Object) -> Object:
            metadata = {"resourceVersion": obj["metadata"]["resourceVersion"]}
            # A bookmark has no name, and no row.
            return self._table(target, [obj] if "name" in obj["metadata"] else [], metadata)

        return row

    # Writing ---------------------------------------------------------------------------------------------------------

    def _options(self) -> tuple[WriteOptions, list[str]]:
        unknown: list[str] = []
        validation = self._call.query.get("fieldValidation", "Warn")
        dry_run = bool(self._call.query.get("dryRun"))
        return WriteOptions(dry_run=dry_run, field_validation=validation, unknown=unknown), unknown

    def _written(self, body: Object, unknown: list[str], status: int = 200) -> _Answer:
        if self._call.query.get("fieldValidation", "Warn") != "Warn":
            unknown = []
        warnings = tuple(("Warning", f'299 - "unknown field \\"{path}\\""') for path in unknown)
        return _Answer(body, status, warnings)

    def _create(self, target: Target) -> _Answer:
        if target.subresource in _REFUSED:
            return self._perform("POST", self._refuse_proxy)
        body = self._call.body()
        options, unknown = self._options()
        return self._perform("POST", lambda: self._written(self._kube.post(target, body, options), unknown, 201), body)

    def _replace(self, target: Target) -> _Answer:
        target, body = addressed(target, "update"), self._call.body()
        options, unknown = self._options()

        def act() -> _Answer:
            status = 200 if self._kube.store.find(target) else 201
            return self._written(self._kube.store.update(target, body, options), unknown, status)

        return self._perform("PUT", act, body)

    def _patch(self, target: Target) -> _Answer:
        target = addressed(target, "patch")
        kind = _PATCH_KINDS.get(self._call.content_type)
        if kind is None:
            raise _unsupported(", ".join(_PATCH_KINDS))
        body = self._call.body()
        options, unknown = self._options()

        def act() -> _Answer:
            status = 200 if self._kube.store.find(target) else 201
            return self._written(self._kube.store.patch(target, body, kind, options), unknown, status)

        return self._perform("PATCH", act, body, kind=kind)

    def _delete(self, target: Target) -> _Answer:
        body = self._call.body()
        options = delete_options({**_query_options(self._call), **(body if isinstance(body, dict) else {})})
        if target.name:
            addressed(target, "delete")
            return self._perform("DELETE", lambda: _Answer(self._kube.remove(target, options)), body)
        return self._perform("DELETECOLLECTION", lambda: self._delete_all(target), body)

    def _delete_all(self, target: Target) -> _Answer:
        page = self._list(target).body
        assert isinstance(page, dict)
        options = delete_options(_query_options(self._call))
        for obj in page["items"]:
            namespace = obj["metadata"].get("namespace", "")
            self._kube.store.delete(Target(target.resource, namespace, obj["metadata"]["name"]), options)
        return _Answer(page)


def _refuse(error: ApiError) -> NoReturn:
    raise error


def _query_options(call: _Call) -> Object:
    grace = call.number("gracePeriodSeconds")
    options: Object = {} if grace is None else {"gracePeriodSeconds": int(grace)}
    return options | ({"dryRun": ["All"]} if call.query.get("dryRun") else {})
