"""A client of the API that shares no code with the product: raw requests, and a watcher that notes when it saw what.

`Api` sends one request and shows the whole answer, so it can also record what a server does. `Watcher` follows one
collection in a greenlet and keeps every event with the instant of its arrival; it is the independent observer that
latencies are measured with.
"""

import contextlib
import http.client
import json
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from gevent.event import Event
from gevent.pool import Group

from vkcocoon_probes import SystemClock, spawn

CLOCK = SystemClock()
ANSWER_S = 60.0
IDLE_S = 10.0  # a connection that was idle for longer is not used again
STRATEGIC, MERGE, JSON = (f"application/{kind}+json" for kind in ("strategic-merge-patch", "merge-patch", "json-patch"))


class Refused(Exception):
    """The server answered with something else than 2xx."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__(f"{answer.status}: {answer.body[:500]!r}")
        self.status = answer.status
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    """One user's way to one server; connections are kept and used again."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None, *, token: str = "") -> None:
        self.url = url
        self._tls = tls
        self._token = token
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []  # since when
        os.register_at_fork(after_in_child=self._idle.clear)

    def send(
        self,
        verb: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Answer:
        """One request, whatever the answer; raises OSError or HTTPException when there is none."""
        for fresh in (False, True):
            connection = self._connection(fresh)
            try:
                response = self._sent(connection, verb, path, body, content_type, accept)
                answer = Answer(response.status, dict(response.getheaders()), response.read())
            except (OSError, http.client.HTTPException):
                connection.close()
                if fresh or verb == "POST":
                    raise
                continue  # the server had closed what lay idle
            if response.will_close:
                connection.close()
            else:
                self._idle.append((CLOCK.monotonic(), connection))
            return answer
        raise AssertionError("unreachable")

    def ask(self, verb: str, path: str, body: Any = None, **how: Any) -> Any:
        """The answer's object; raises Refused."""
        answer = self.send(verb, path, body, **how)
        if not 200 <= answer.status <= 299:
            raise Refused(answer)
        return answer.json

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def find(self, path: str) -> Any:
        """The object, None when there is none."""
        answer = self.send("GET", path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise Refused(answer)
        return answer.json

    def create(self, path: str, body: Any) -> Any:
        return self.ask("POST", path, body)

    def patch(self, path: str, body: Any, kind: str = MERGE) -> Any:
        return self.ask("PATCH", path, body, content_type=kind)

    def delete(self, path: str, **options: Any) -> Any:
        return self.ask("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})

    def watch(self, path: str, **query: Any):
        """Events as the server sends them, until it ends the stream; raises Refused."""
        words = urlencode({"watch": "true", **{key: value for key, value in query.items() if value != ""}})
        connection = self._connection(True)
        with contextlib.closing(connection):
            response = self._sent(connection, "GET", f"{path}?{words}", None, "", "application/json")
            if response.status != 200:
                raise Refused(Answer(response.status, dict(response.getheaders()), response.read()))
            while line := response.readline():
                yield json.loads(line)

    def _connection(self, fresh: bool) -> http.client.HTTPConnection:
        while self._idle and not fresh:
            since, connection = self._idle.pop()
            if CLOCK.monotonic() - since < IDLE_S:
                return connection
            connection.close()
        parts = urlsplit(self.url)
        if self._tls is not None:
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=ANSWER_S, context=self._tls)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_S)

    def _sent(self, connection, verb, path, body, content_type, accept) -> http.client.HTTPResponse:
        headers = {"Accept": accept, "User-Agent": "e2e"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if connection.sock is None:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.request(verb, path, body=data, headers=headers)
        return connection.getresponse()


@dataclass(frozen=True, slots=True)
class Sight:
    """One event as it arrived: `at` on the monotonic clock."""

    at: float
    type: str
    object: dict[str, Any]

    @property
    def name(self) -> str:
        return self.object["metadata"].get("name", "")

    @property
    def uid(self) -> str:
        return self.object["metadata"].get("uid", "")


class Watcher:
    """Follows one collection from now on; `sights` grows. Lists first, so what is there already is seen, too."""

    def __init__(self, api: Api, path: str, *, field_selector: str = "") -> None:
        self.sights: list[Sight] = []
        self._api = api
        self._path = path
        self._selector = field_selector
        self._news = Event()
        self._group = Group()
        self._version = self._list()
        spawn(self._group, f"watcher {path}", self._follow)

    def close(self) -> None:
        self._group.kill()

    def about(self, name: str = "", uid: str = "", since: float = 0.0) -> list[Sight]:
        return [
            sight
            for sight in list(self.sights)
            if sight.at >= since and name in ("", sight.name) and uid in ("", sight.uid)
        ]

    def first(self, holds, within: float = 15.0, *, name: str = "", uid: str = "", since: float = 0.0) -> Sight:
        """The first event for which `holds(event)`; waits for it, `within` seconds."""
        end = CLOCK.monotonic() + within
        looked = 0
        while True:
            self._news.clear()
            while looked < len(self.sights):
                sight = self.sights[looked]
                looked += 1
                if sight.at >= since and name in ("", sight.name) and uid in ("", sight.uid) and holds(sight):
                    return sight
            left = end - CLOCK.monotonic()
            if left <= 0:
                raise AssertionError(self._disappointment(within, name, uid))
            CLOCK.wait(self._news, left)

    def _disappointment(self, within: float, name: str, uid: str) -> str:
        seen = self.about(name, uid)
        shown = {}
        if seen:
            metadata = {key: value for key, value in seen[-1].object["metadata"].items() if key != "managedFields"}
            shown = {"type": seen[-1].type, "metadata": metadata, "status": seen[-1].object.get("status")}
        last = json.dumps(shown, indent=1)[:6000]
        return f"not seen within {within:g} s among {len(seen)} events of {name or uid or 'all'}; last: {last}"

    def _list(self) -> str:
        query = urlencode({"fieldSelector": self._selector}) if self._selector else ""
        answer = self._api.get(f"{self._path}?{query}")
        kind = answer["kind"].removesuffix("List")
        for item in answer.get("items") or ():
            self._note({"type": "ADDED", "object": {"kind": kind, **item}})
        return answer["metadata"]["resourceVersion"]

    def _follow(self) -> None:
        while True:
            try:
                stream = self._api.watch(
                    self._path,
                    resourceVersion=self._version,
                    fieldSelector=self._selector,
                    allowWatchBookmarks="true",
                )
                for event in stream:
                    if event["type"] == "ERROR":
                        self._version = self._list()
                        break
                    self._version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._note(event)
            except Refused as refusal:
                if refusal.status == 410:
                    self._version = self._list()
            except (OSError, http.client.HTTPException, ValueError):
                pass  # the server may be restarting: that is what some scenarios are about
            CLOCK.sleep(0.05)

    def _note(self, event: dict[str, Any]) -> None:
        self.sights.append(Sight(CLOCK.monotonic(), event["type"], event["object"]))
        self._news.set()


def pod_path(pod: dict[str, Any]) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def create_pod(api: Api, pod: dict[str, Any]) -> dict[str, Any]:
    """The pod as the API made it."""
    return api.create(f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods", pod)


def uid_of(obj: dict[str, Any]) -> str:
    return obj["metadata"]["uid"]


def vm_of(pod: dict[str, Any]) -> str:
    """The id of the VM that the pod says it has, "" for none."""
    return (pod["metadata"].get("annotations") or {}).get("vm.cocoonstack.io/id", "")


def condition(obj: dict[str, Any], type_: str = "Ready") -> dict[str, Any]:
    """The condition of that type, {} for none."""
    found = (each for each in obj.get("status", {}).get("conditions") or () if each["type"] == type_)
    return next(found, {})


def reason(sight: Sight, type_: str = "Ready") -> str:
    return condition(sight.object, type_).get("reason", "")


def is_ready(sight: Sight) -> bool:
    return sight.type != "DELETED" and condition(sight.object).get("status") == "True"


def is_up(sight: Sight) -> bool:
    """Ready, and the pod says which VM that is: annotations follow the status they speak of."""
    return is_ready(sight) and vm_of(sight.object) != ""


def is_not_ready(sight: Sight) -> bool:
    return sight.type != "DELETED" and condition(sight.object).get("status") == "False"


def is_gone(sight: Sight) -> bool:
    return sight.type == "DELETED"
