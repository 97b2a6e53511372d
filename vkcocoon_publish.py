"""Who writes pod statuses: one publisher per pod UID.

The problem: nobody polls us. What the API does not hold, does not exist for the cluster, and what it holds wrongly
stays wrong until we write again. So a status is treated as state, not as a message: it is owed until the API holds it,
through any outage, and again when somebody changes what is ours.

    Publishers.notify(pod)    memory only, never switches: this UID now wants this status and these annotations
    Publishers.observe(pod)   what the API holds for a UID, as the reflector saw it; a difference is owed
    publisher greenlet        compare, PATCH the status, then PATCH the annotations; ends when nothing is owed

Rules, all of them per pod UID: one writer, so nothing older lands after something newer; the newest state wins and
what it replaced is never sent; the annotations of a state follow only when the API holds its status; every write
carries the UID, so a namesake is never written to; nothing is written when nothing differs; a terminal pod stays as it
is (K1, K2, K3, K6). A publisher's failures delay its own pod only: at most `WRITERS` requests run at once, each bounded
by the client, and pauses are spent outside of that limit.

`vkcocoon_pods` owns the `Publishers` and calls them; the provider reaches `notify` through it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group

from vkcocoon_kube import ApiError, Backoff, KubeApi, Object, Tally, Uncounted, uid_of, version_of
from vkcocoon_probes import Clock, spawn
from vkcocoon_quantity import whole_number
from vkcocoon_status import OWNED_CONDITIONS, OWNED_STATUS_FIELDS, condition_of, pod_key

__all__ = ["Publishers", "agrees", "pod_path", "status_patch"]

log = structlog.get_logger()

WRITERS = 16  # requests of all publishers at once
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0  # the API is away, or refuses for a reason that may pass
FIRST_REJECTED_S, LAST_REJECTED_S = 30.0, 300.0  # the API says that this status can never be accepted
CHANGED_RETRY_S = 1.0  # a new state does not wait out the pause of an older one, but this long
REPAIR_S = 5.0  # between two repairs of the same pod
BURST, PER_SECOND = 10, 1.0  # a storm of changes of one pod: so many writes, then one a second
REJECTED = frozenset({400, 413, 422})
TERMINAL = frozenset({"Succeeded", "Failed"})
ADDRESS_LISTS = frozenset({"podIPs", "hostIPs"})


def pod_path(pod: Object) -> str:
    """The path of a pod (or of anything that names one)."""
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


# --- what differs -------------------------------------------------------------------------------------------------


def agrees(wanted: Object, held: Object) -> bool:
    """Does the status the API holds say what we want in everything that is ours?

    Fields and conditions of others do not count, times are equal when they are the same second, and what the API
    fills in (empty texts, zeros, empty lists) equals what was left out.
    """
    fields = (name for name in OWNED_STATUS_FIELDS if name != "conditions")
    if not all(_same(wanted.get(name), held.get(name)) for name in fields if _counts(name, wanted)):
        return False
    for type_ in OWNED_CONDITIONS:
        ours, theirs = condition_of(wanted, type_), condition_of(held, type_)
        if bool(ours) != bool(theirs) or not _same(ours, theirs):
            return False
    return True


def status_patch(wanted: Object, held: Object) -> Object:
    """The strategic merge that makes the held status say what we want: all that is ours, null for what must vanish.

    Lists of addresses are replaced whole, since their merge key is the address itself; a condition of ours that is no
    longer wanted is deleted by its type; everybody else's conditions are not mentioned and stay (K3).
    """
    patch: Object = {}
    for name in OWNED_STATUS_FIELDS:
        if name != "conditions" and _counts(name, wanted) and (wanted.get(name) or held.get(name)):
            value = wanted.get(name) or None
            patch[name] = [{"$patch": "replace"}, *value] if value and name in ADDRESS_LISTS else value
    surplus = (type_ for type_ in OWNED_CONDITIONS if condition_of(held, type_) and not condition_of(wanted, type_))
    conditions = [*(wanted.get("conditions") or ()), *({"type": type_, "$patch": "delete"} for type_ in surplus)]
    if conditions:
        patch["conditions"] = conditions
    return patch


def _counts(name: str, wanted: Object) -> bool:
    """A start time is given once and never taken back."""
    return name != "startTime" or bool(wanted.get(name))


def _same(wanted: Any, held: Any) -> bool:
    if wanted == held or (not wanted and not held):
        return True
    if isinstance(wanted, dict):
        return isinstance(held, dict) and all(_same(value, held.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(held, list) and len(wanted) == len(held) and all(map(_same, wanted, held))
    return isinstance(wanted, str) and isinstance(held, str) and _same_second(wanted, held)


def _same_second(one: str, other: str) -> bool:
    try:
        first, second = datetime.fromisoformat(one), datetime.fromisoformat(other)
        return first.replace(microsecond=0) == second.replace(microsecond=0)
    except (TypeError, ValueError):
        return False


def _owned(status: Object) -> Object:
    part = {name: status.get(name) for name in OWNED_STATUS_FIELDS if name != "conditions"}
    return {**part, "conditions": [condition_of(status, type_) for type_ in OWNED_CONDITIONS]}


def _newer(candidate: Object, known: Object) -> bool:
    """May the candidate replace what we know? A reflector can be behind the answer to our own write."""
    one, other = (whole_number(version_of(pod), digits=20) for pod in (candidate, known))
    return one is None or other is None or one >= other


# --- one pod ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    status: Object
    annotations: dict[str, str | None]  # ours; None = must not be there

    @property
    def phase(self) -> str:
        return str(self.status.get("phase") or "")


class _Allowance:
    """So many at once, then so many a second."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._counted_at = 0.0

    def wait_s(self, now: float) -> float:
        self._count(now)
        return 0.0 if self._left >= 1 else (1 - self._left) / PER_SECOND

    def take(self, now: float) -> None:
        self._count(now)
        self._left = max(0.0, self._left - 1)

    def _count(self, now: float) -> None:
        self._left = min(float(BURST), self._left + (now - self._counted_at) * PER_SECOND)
        self._counted_at = now


@dataclass(frozen=True, slots=True)
class _Desk:
    """What all publishers share."""

    api: KubeApi
    clock: Clock
    cached: Callable[[str], Object | None]
    slots: BoundedSemaphore
    gate: Event
    rng: random.Random
    tally: Tally


class _Publisher:
    """What one pod UID wants the API to hold, what the API holds, and the difference that is owed."""

    def __init__(self, desk: _Desk, pod: Object) -> None:
        self.running = False
        self.ended = False  # the API said that the UID is no longer there: nothing is written ever again
        self.absent = False  # the reflector does not see it: nothing is written until it does again
        self.owned_annotations: frozenset[str] = frozenset()  # those we have ever written
        self.uid = uid_of(pod)
        self.key = pod_key(pod)
        self._path = pod_path(pod)
        self._desk = desk
        self._held = desk.cached(self.uid)
        self._wanted: _Wanted | None = None
        self._handed_at: float | None = None  # since when the API is owed the newest state; None: it was held once
        self._had_status = False  # the API has held this status once: a difference is somebody else's
        self._had_annotations = False
        self._accepted: tuple[Object, Object] | None = None  # a status we sent, what the API made of it
        self._compared: tuple[_Wanted, Object, bool] | None = None  # the last comparison; neither side ever changes
        self._kick = Event()
        self._waiting: list[Event] = []  # who wants an attempt now
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, rng=desk.rng)
        self._rejections = Backoff(FIRST_REJECTED_S, LAST_REJECTED_S, rng=desk.rng)
        self._allowance = _Allowance()
        self._not_before = 0.0
        self._tried_at = 0.0
        self._repaired_at: float | None = None
        self._complaint = ""

    @property
    def _listed(self) -> bool:
        """Does the reflector see the pod? Then one answer that it is gone proves nothing."""
        return self._desk.cached(self.uid) is not None

    @property
    def terminal(self) -> bool:
        return self._wanted is not None and self._wanted.phase in TERMINAL

    def want(self, wanted: _Wanted) -> None:
        before = self._wanted
        if before == wanted:
            return
        if before is not None and before.phase in TERMINAL and before.phase != wanted.phase:
            log.warning("a terminal pod is not revived", pod=self.key, phase=before.phase, refused=wanted.phase)
            return
        self._settle("superseded")
        self._handed_at = self._desk.clock.monotonic()
        self._wanted = wanted
        self.owned_annotations |= wanted.annotations.keys()
        if before is None or before.status != wanted.status:
            self._had_status = False
        if before is None or before.annotations != wanted.annotations:
            self._had_annotations = False
        self._not_before = min(self._not_before, self._tried_at + CHANGED_RETRY_S)
        self._kick.set()

    def observe(self, pod: Object) -> None:
        self.absent = False
        if self._held is None or _newer(pod, self._held):
            self._held = pod
        self._kick.set()

    def listed(self, pod: Object | None) -> None:
        """A complete list shows the pod like this, or not at all. Where it contradicts what we know it is looked at
        again: a list can be behind the answer to our own write, and versions go back when the API's storage does."""
        if pod is None or (self._held is not None and not _newer(pod, self._held)):
            self.doubt()

    def doubt(self) -> None:
        """What the API holds is uncertain: the next attempt begins with a look."""
        self._held = None

    def owes(self) -> bool:
        """Is there anything to write? Also notes what the API has held once."""
        wanted, held = self._wanted, self._held
        if self.ended or self.absent or wanted is None:
            return False
        if held is None:
            return True
        phase = (held.get("status") or {}).get("phase")
        if phase in TERMINAL and phase != wanted.phase:
            self._complain(f"the API says {phase}, which is final; {wanted.phase} is not written")
            return False
        self._had_status = self._had_status or self._status_held(wanted, held)
        self._had_annotations = self._had_annotations or _annotations_held(wanted, held)
        if self._status_held(wanted, held) and _annotations_held(wanted, held):
            self._settle("delivered")
            return False
        return True

    def hurry(self) -> Event:
        """An event that is set after an attempt that begins now or later, whatever comes of it."""
        attempted = Event()
        self._waiting.append(attempted)
        self._kick.set()
        return attempted

    def _settle(self, result: str) -> None:
        """What became of the newest state that was handed over; counted once for each."""
        if self._handed_at is not None:
            self._desk.tally.delivery(result, self._desk.clock.monotonic() - self._handed_at)
            self._handed_at = None

    def end(self, why: str) -> None:
        self._settle("dropped")
        if not self.ended:
            log.debug("nothing more is published", pod=self.key, uid=self.uid, why=why)
        self.ended = True
        self._kick.set()

    def run(self) -> None:
        """Write until nothing is owed."""
        clock = self._desk.clock
        try:
            while self.owes():
                clock.wait(self._desk.gate, None)
                self._kick.clear()
                if not self._waiting and (pause := self._pause()) > 0:
                    clock.wait(self._kick, pause)
                else:
                    self._attempt()
        finally:
            # In this order and without a switch after the last look at what is owed: who comes later starts us again.
            self.running = False
            self._release(self._waiting)

    def _pause(self) -> float:
        now = self._desk.clock.monotonic()
        until = self._not_before
        if self._is_repair() and self._repaired_at is not None:
            until = max(until, self._repaired_at + REPAIR_S)
        return max(until - now, self._allowance.wait_s(now))

    def _is_repair(self) -> bool:
        wanted, held = self._wanted, self._held
        if wanted is None or held is None:
            return False
        return self._had_annotations if self._status_held(wanted, held) else self._had_status

    def _attempt(self) -> None:
        with self._desk.slots:
            if not self.owes():  # waiting for the slot took time
                return
            waiting, self._waiting = self._waiting, []
            now = self._tried_at = self._desk.clock.monotonic()
            if self._is_repair():
                self._repaired_at = now
                log.info("what others changed is put back", pod=self.key)
            self._allowance.take(now)
            try:
                self._write()
            except ApiError as error:
                self._failed(error)
            else:
                self._succeeded()
            finally:
                self._release(waiting)

    def _write(self) -> None:
        """Status, then annotations: the order a reader of `lifecycle-state=ready` relies on (K2)."""
        if self._held is None:
            self._read()
        wanted, held = self._wanted, self._held
        if not self.owes() or wanted is None or held is None:
            return
        if not self._status_held(wanted, held):
            held = self._write_status(wanted, held)
        # A newer state goes first with its own status, and what somebody undid meanwhile is not held.
        if self.ended or self.absent or wanted is not self._wanted or not self._status_held(wanted, held):
            return
        if not _annotations_held(wanted, held):
            body = {"metadata": {"uid": self.uid, "annotations": wanted.annotations}}
            self._learn(self._desk.api.patch(self._path, body, kind="merge"))
            self._had_annotations = self._had_annotations or wanted is self._wanted

    def _write_status(self, wanted: _Wanted, held: Object) -> Object:
        patch = status_patch(wanted.status, held.get("status") or {})
        body = {"metadata": {"uid": self.uid}, "status": patch}
        answer = self._desk.api.patch(f"{self._path}/status", body, kind="strategic")
        held = self._learn(answer)
        self._desk.tally.status_write("ok")
        self._accepted, self._compared = (wanted.status, _owned(answer.get("status") or {})), None
        self._had_status = self._had_status or wanted is self._wanted
        return held

    def _read(self) -> None:
        pod = self._desk.api.get(self._path)
        if uid_of(pod) and uid_of(pod) != self.uid and not self._listed:
            self.end("another pod has the name")
        else:
            self._learn(pod)

    def _learn(self, answer: Object) -> Object:
        """Take an answer of the API for what it holds, unless the reflector has seen something newer since.

        Raises ApiError for one that is not this pod: nobody knows what the API holds then.
        """
        if uid_of(answer) != self.uid:
            self._held = None
            raise ApiError(0, "NoSuchAnswer", "the answer is not the pod that was asked for")
        if self._held is None or _newer(answer, self._held):
            self._held = answer
        return self._held

    def _status_held(self, wanted: _Wanted, held: Object) -> bool:
        """What the API made of our own words counts as our words: it is not written again and again."""
        known = self._compared
        if known is None or known[0] is not wanted or known[1] is not held:
            status = held.get("status") or {}
            same = agrees(wanted.status, status) or self._accepted == (wanted.status, _owned(status))
            known = self._compared = (wanted, held, same)
        return known[2]

    def _succeeded(self) -> None:
        self._backoff.reset()
        self._rejections.reset()
        self._not_before = 0.0
        self._complaint = ""

    def _failed(self, error: ApiError) -> None:
        self._desk.tally.status_write("gone" if error.status == 404 else "failed")
        if error.status == 404 and self._held is None and not self._listed:
            self.end("the API no longer has the pod")
            return
        namesake = _is_about_uid(error)
        if error.status in (404, 409) or namesake:
            self._held = None  # gone, another pod has the name by now, or it is a mistake: look before writing again
        pauses = self._rejections if error.status in REJECTED and not namesake else self._backoff
        self._not_before = self._desk.clock.monotonic() + pauses.next(error.retry_after)
        self._complain(f"the API did not take the status: {error}")

    def _complain(self, text: str) -> None:
        if text != self._complaint:  # once per change, not once per attempt
            log.warning(text, pod=self.key, uid=self.uid)
        self._complaint = text

    def _release(self, waiting: list[Event]) -> None:
        for event in waiting:
            event.set()
        waiting.clear()


def _is_about_uid(error: ApiError) -> bool:
    """Was the UID in a patch another pod's? Not a conflict to the API, but an invalid change of a field."""
    return error.status == 422 and "metadata.uid" in error.message


def _annotations_held(wanted: _Wanted, held: Object) -> bool:
    have = (held.get("metadata") or {}).get("annotations") or {}
    return all(have.get(name) == value for name, value in wanted.annotations.items())


# --- all pods -----------------------------------------------------------------------------------------------------


def _nothing_cached(uid: str) -> Object | None:
    return None


class Publishers:
    """The publishers of all pods: at most one per UID, kept as long as the API may hold the pod.

    `cached` gives what the reflector knows of a UID, None for nothing (then the publisher reads the API first);
    while `gate` is not set nothing is written (K11).
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        *,
        cached: Callable[[str], Object | None] = _nothing_cached,
        gate: Event | None = None,
        rng: random.Random | None = None,
        tally: Tally | None = None,
    ) -> None:
        if gate is None:
            gate = Event()
            gate.set()
        slots, rng = BoundedSemaphore(WRITERS), rng or random.Random(0)
        self._desk = _Desk(api, clock, cached, slots, gate, rng, tally or Uncounted())
        self._by_uid: dict[str, _Publisher] = {}
        self._group = Group()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_uid)

    def notify(self, pod: Object) -> None:
        """This pod now wants this status and these annotations; memory only, never switches (P4).

        `pod` is the caller's gift: metadata.{namespace,name,uid,annotations} and status, with only the annotations
        that are ours (None = must be absent). It is kept as it is.
        """
        uid = uid_of(pod)
        if self._closed:
            return
        publisher = self._by_uid.get(uid)
        if publisher is None:
            publisher = self._by_uid[uid] = _Publisher(self._desk, pod)
        publisher.want(_Wanted(pod["status"], dict(pod["metadata"].get("annotations") or {})))
        if not publisher.owes() and not publisher.ended and not publisher.absent:
            self._desk.tally.status_write("unchanged")
        self._start(publisher)

    def observe(self, pod: Object) -> None:
        """The API holds this; memory only."""
        if publisher := self._by_uid.get(uid_of(pod)):
            publisher.observe(pod)
            self._start(publisher)

    def gone(self, uid: str) -> None:
        """The API no longer holds the UID: nothing is written for it until `observe` says otherwise."""
        if publisher := self._by_uid.get(uid):
            publisher.absent = True

    def forget(self, uid: str) -> None:
        """Nobody will ask about the UID again."""
        if publisher := self._by_uid.pop(uid, None):
            publisher.end("the pod is gone")

    def recheck(self, listed: Mapping[str, Object] | None = None) -> None:
        """Start everybody who owes something; with a complete list (by UID), look after those it contradicts."""
        for uid, publisher in list(self._by_uid.items()):
            if listed is not None:
                publisher.listed(listed.get(uid))
            self._start(publisher)

    def is_terminal(self, uid: str) -> bool:
        """Is the newest status of the UID a terminal one, whether the API holds it yet or not?"""
        publisher = self._by_uid.get(uid)
        return publisher is not None and publisher.terminal

    def owned_annotations(self, uid: str) -> frozenset[str]:
        """The annotations of the pod that we write, so that their echo is not taken for somebody's change."""
        publisher = self._by_uid.get(uid)
        return publisher.owned_annotations if publisher is not None else frozenset()

    def flush(self, uid: str, patience: float) -> None:
        """Give what the UID owes one attempt now, and wait for its end, at most `patience` seconds."""
        publisher = self._by_uid.get(uid)
        if publisher is None or not publisher.owes():
            return
        attempted = publisher.hurry()
        self._start(publisher)
        self._desk.clock.wait(attempted, patience)

    def owing(self) -> list[str]:
        """The keys of the pods whose state the API does not hold (status page, metrics)."""
        return sorted(publisher.key for publisher in self._by_uid.values() if publisher.owes())

    def drain(self, patience: float) -> None:
        """Try once, now, all that is owed, and wait until each try has ended; `patience` seconds at most."""
        attempts = [publisher.hurry() for publisher in self._by_uid.values() if publisher.owes()]
        self.recheck()
        end = self._desk.clock.monotonic() + patience
        for attempted in attempts:
            self._desk.clock.wait(attempted, end - self._desk.clock.monotonic())

    def close(self) -> None:
        self._closed = True
        self._group.kill(block=False)

    def _start(self, publisher: _Publisher) -> None:
        if not self._closed and not publisher.running and publisher.owes():
            publisher.running = True
            spawn(self._group, f"publisher {publisher.key}", self._serve, publisher)

    def _serve(self, publisher: _Publisher) -> None:
        publisher.run()
        if publisher.ended and self._by_uid.get(publisher.uid) is publisher:
            del self._by_uid[publisher.uid]
