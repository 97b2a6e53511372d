"""Who may use the kubelet API: what a real node asks of the cluster before it answers anybody (D3).

A client is known by a certificate of the configured authorities (the name is its CN, the groups its Os), else by a
bearer token that the API server vouches for (TokenReview). Nobody else is anybody. What it may do, the API server is
asked, too (SubjectAccessReview): every path stands for a part of this node, every method for a verb.

Answers are kept for a while, so that a scraper costs two questions in some minutes and an API server that is away does
not blind those it has let in before. Those who wait for the same answer share one question, and only a few questions
are asked at once: strangers with random tokens must not become a load on the API server. Refusals of tokens are kept
short, because a token may become valid.

Used by vkcocoon_kubelet in the greenlet of each request. Tokens are neither logged nor kept, only their digests.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import structlog
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from vkcocoon_kube import ApiError, KubeApi
from vkcocoon_probes import Clock, ProbeTimeout

__all__ = ["Access", "Denied", "User", "user_of_certificate"]

TOKEN_S = 120.0
REFUSED_TOKEN_S = 10.0
ALLOWED_S, FORBIDDEN_S = 300.0, 30.0
REVIEW_S = 10.0  # for one question to the API server
REVIEWS_AT_ONCE = 8
KEPT = 1024  # answers of one kind
LONGEST_TOKEN = 16 * 1024

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
# What the beginning of a path stands for; where there are two, either right is enough.
SUBRESOURCES = {
    "stats": ("stats",),
    "metrics": ("metrics",),
    "logs": ("log",),
    "checkpoint": ("checkpoint",),
    "statusz": ("statusz",),
    "flagz": ("configz",),
    "pods": ("pods", "proxy"),
    "runningpods": ("pods", "proxy"),
    "healthz": ("healthz", "proxy"),
    "configz": ("configz", "proxy"),
}

T = TypeVar("T")

log = structlog.get_logger()


class Denied(Exception):
    """The request is not answered: 401 for nobody, 403 for somebody who may not, 503 when nobody can say now."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class User:
    """Somebody, as the API server knows users."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


def user_of_certificate(certificate: Mapping[str, Any] | None) -> User | None:
    """Whom a verified certificate (as getpeercert() gives it) is about; None without one, or without a name in it."""
    pairs = [pair for relative in (certificate or {}).get("subject", ()) for pair in relative]
    name = next((value for key, value in pairs if key == "commonName"), "")
    groups = tuple(value for key, value in pairs if key == "organizationName")
    return User(name, groups=groups) if name else None


class Access:
    """Says no by raising Denied. `api` should have connections of its own; `node_name` is the node this is about."""

    def __init__(self, api: KubeApi, clock: Clock, node_name: str) -> None:
        self._api = api
        self._clock = clock
        self._node_name = node_name
        self._places = BoundedSemaphore(REVIEWS_AT_ONCE)
        self._users: _Answers[User | None] = _Answers(clock)
        self._rights: _Answers[bool] = _Answers(clock)
        self._complaint = ""

    def check(self, method: str, path: str, *, certificate: Mapping[str, Any] | None, authorization: str) -> User:
        """Who asks, if they may. `authorization` is the header of that name. May wait for the API server."""
        user = user_of_certificate(certificate) or self._user_of_token(_bearer(authorization))
        if user is None:
            raise Denied(HTTPStatus.UNAUTHORIZED, "Unauthorized")
        verb = VERBS.get(method, method.lower())
        parts = subresources(path)
        if not any(self._allowed(user, verb, part) for part in parts):
            raise Denied(
                HTTPStatus.FORBIDDEN,
                f"Forbidden (user={user.name}, verb={verb}, resource=nodes, subresource={' or '.join(parts)})",
            )
        return user

    def _user_of_token(self, token: str) -> User | None:
        if not token:
            return None
        digest = hashlib.sha256(token.encode()).digest()
        return self._users.get(
            digest, lambda: self._review_token(token), lambda user: TOKEN_S if user else REFUSED_TOKEN_S
        )

    def _review_token(self, token: str) -> User | None:
        status = self._review(TOKEN_REVIEWS, "authentication.k8s.io/v1", "TokenReview", {"token": token})
        user = status.get("user") or {}
        if not status.get("authenticated") or not user.get("username"):
            return None
        extra = tuple(sorted((key, tuple(values or ())) for key, values in (user.get("extra") or {}).items()))
        return User(user["username"], user.get("uid") or "", tuple(user.get("groups") or ()), extra)

    def _allowed(self, user: User, verb: str, subresource: str) -> bool:
        return self._rights.get(
            (user, verb, subresource),
            lambda: self._review_access(user, verb, subresource),
            lambda allowed: ALLOWED_S if allowed else FORBIDDEN_S,
        )

    def _review_access(self, user: User, verb: str, subresource: str) -> bool:
        spec: dict[str, Any] = {
            "user": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
            "resourceAttributes": {
                "verb": verb,
                "version": "v1",
                "resource": "nodes",
                "subresource": subresource,
                "name": self._node_name,
            },
        }
        status = self._review(ACCESS_REVIEWS, "authorization.k8s.io/v1", "SubjectAccessReview", spec)
        return bool(status.get("allowed")) and not status.get("denied")

    def _review(self, path: str, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._places, self._clock.timeout(REVIEW_S):
                review = self._api.create(path, {"apiVersion": version, "kind": kind, "spec": spec})
        except (ApiError, ProbeTimeout) as error:
            self._complain(f"{kind}: {error}")
            text = f"the API server could not be asked ({kind}): {error}"
            raise Denied(HTTPStatus.SERVICE_UNAVAILABLE, text) from error
        self._complain("")
        return dict(review.get("status") or {})

    def _complain(self, why: str) -> None:
        if why and not self._complaint:
            log.warning("the API server cannot be asked about clients of the kubelet API", error=why)
        self._complaint = why


def subresources(path: str) -> tuple[str, ...]:
    """The parts of the node a path stands for."""
    return SUBRESOURCES.get(path.strip("/").partition("/")[0], ("proxy",))


def _bearer(authorization: str) -> str:
    """The token of an Authorization header, "" when it has none that could be one."""
    found = re.fullmatch(r"bearer +([!-~]+) *", authorization, re.IGNORECASE | re.ASCII)
    return found[1] if found and len(found[1]) <= LONGEST_TOKEN else ""


class _Answers(Generic[T]):
    """Answers that are kept for a while. Who asks while an answer is on its way waits for that one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[Hashable, tuple[float, T]] = OrderedDict()
        self._asking: dict[Hashable, _Question] = {}

    def get(self, key: Hashable, ask: Callable[[], T], keep_s: Callable[[T], float]) -> T:
        """The answer to `key`, from `ask` when none is kept; `keep_s` says for how long. Raises what `ask` raises."""
        while True:
            if (kept := self._kept.get(key)) is not None and self._clock.monotonic() < kept[0]:
                return kept[1]
            question = self._asking.get(key)
            if question is None:
                return self._ask(key, ask, keep_s)
            self._clock.wait(question.over, None)
            if question.error is not None:
                raise question.error

    def _ask(self, key: Hashable, ask: Callable[[], T], keep_s: Callable[[T], float]) -> T:
        question = self._asking[key] = _Question()
        try:
            answer = ask()
        except Exception as error:
            question.error = error
            raise
        else:
            self._kept[key] = (self._clock.monotonic() + keep_s(answer), answer)
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return answer
        finally:
            # Also when we were interrupted: then the next one in line asks again.
            del self._asking[key]
            question.over.set()


class _Question:
    def __init__(self) -> None:
        self.over = Event()
        self.error: Exception | None = None
