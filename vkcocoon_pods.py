"""The pods of this node: what the API wants, what the provider has, and one actor per pod UID that makes them agree.

    Reflector                 tells what the API holds; never waits for anybody
    PodController             keeps one record per UID, starts its actor when there may be something to do
    actor greenlet of a UID   create_pod, update_pod or delete_pod of the provider, one at a time; ends when idle
    Publishers                write what the provider notifies (`vkcocoon_publish`)

Level, not edge: an actor looks at the newest object and at what the provider knows, decides, acts, and looks again.
A change that comes while it acts is not lost and not queued; it is simply what the actor sees next. Every
`RECHECK_S` all pods are looked at again, so that whatever was missed heals by itself. Retries never end; they back off
to five minutes and start over when the pod changes (K8).

Identity is the UID (K1). Two pods of one name are two records in a line: the later one is not created before the
teardown of the earlier one has ended. A pod that vanished from the API is torn down only after a fresh read has
confirmed it, and a pod object is removed from the API only after `delete_pod` has returned (K7).

Lifetimes: a record lives while the API or the provider has the pod; an actor's greenlet is never joined or killed
but at `close`. Everything the reflector calls here changes memory only.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Set
from typing import Protocol

import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_events import EventRecorder
from vkcocoon_kube import ApiError, Backoff, KubeApi, Object, Reflector, Tally, Uncounted, uid_of
from vkcocoon_probes import Clock, spawn
from vkcocoon_publish import TERMINAL, Publishers, pod_path
from vkcocoon_status import NotOurs, ProviderFailure, pod_key

__all__ = ["PodController", "PodProvider", "PodSettings"]

log = structlog.get_logger()

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 300.0  # K8
RECHECK_S = (24.0, 36.0)  # a random time within: nodes must not ask in step
LAST_WORDS_S = 10.0  # how long the removal of a pod waits for the attempt to write its terminal status
# What makes a pod another task for the provider; its status, and the rest of its metadata, do not.
SPEC_FIELDS = (
    "containers",
    "initContainers",
    "ephemeralContainers",
    "activeDeadlineSeconds",
    "tolerations",
    "nodeSelector",
)


class PodProvider(Protocol):
    """What the controller needs of the provider. Every pod handed in is the provider's own copy."""

    def create_pod(self, pod: Object) -> None:
        """Bring the pod up; raises NotOurs for a pod that asks for no VM, anything else to be tried again."""
        ...

    def update_pod(self, pod: Object) -> None:
        """The pod has changed; may be called for a pod that has not."""
        ...

    def delete_pod(self, pod: Object) -> None:
        """Return when the VM is gone or was never ours; may be called again, and for unknown pods."""
        ...

    def get_pod(self, namespace: str, name: str) -> Object | None: ...

    def get_pods(self) -> list[Object]: ...

    def observed(self, pod: Object) -> None:
        """The API holds this; memory only."""
        ...

    def vanished(self, uid: str) -> None:
        """The API holds it no longer; memory only."""
        ...

    def uids(self) -> Set[str]:
        """The UIDs of the pods it holds; cheap."""
        ...

    def knows(self, uid: str) -> bool:
        """Is there anything (a VM, a claim, work under way) for this UID?"""
        ...


class PodSettings(Protocol):
    @property
    def node_name(self) -> str: ...


class _Pod:
    """What the controller knows of one UID. `pod` None: the API no longer has it; `last` is how it was seen last."""

    def __init__(self, pod: Object, *, present: bool) -> None:
        self.uid = uid_of(pod)
        self.key = pod_key(pod)
        self.pod = pod if present else None
        self.last = pod
        self.handed: Object | None = None  # what the provider was given last, by create or update
        self.not_ours: Object | None = None  # the pod that create_pod refused for good (K9)
        self.update_failed = False
        self.create_failed = False
        self.torn_down = False  # delete_pod has returned
        self.removed = False  # our DELETE was accepted
        self.finished = False  # no longer in the controller's tables
        self.running = False
        self.wake = Event()
        self.backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)

    @property
    def deleting(self) -> bool:
        return bool(self.last["metadata"].get("deletionTimestamp"))

    @property
    def terminal(self) -> bool:
        return (self.last.get("status") or {}).get("phase") in TERMINAL


class PodController:
    """Runs the pods that are bound to this node. `notify` is what the provider's notify_pods is given.

    While `gate` is not set neither the provider nor the API is asked to do anything (K11).
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        provider: PodProvider,
        settings: PodSettings,
        *,
        recorder: EventRecorder,
        gate: Event | None = None,
        rng: random.Random | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._api = api
        self._clock = clock
        self._provider = provider
        self._tally = tally = tally or Uncounted()
        self._recorder = recorder
        self._gate = gate if gate is not None else _open_gate()
        # Nodes differ in their names, and must not act in step; one node's run can be repeated.
        self._rng = rng or random.Random(settings.node_name)
        selector = f"spec.nodeName={settings.node_name}"
        self._reflector = Reflector(
            api, clock, "/api/v1/pods", self, field_selector=selector, rng=self._rng, tally=tally
        )
        cached = self._reflector.objects.get
        self._publishers = Publishers(api, clock, cached=cached, gate=self._gate, rng=self._rng, tally=tally)
        self._pods: dict[str, _Pod] = {}
        self._lines: dict[str, list[str]] = {}  # namespace/name -> UIDs in order of arrival
        self._group = Group()
        self._look = Event()  # look after all pods now
        self._closed = False

    # --- for the daemon -------------------------------------------------------------------------------------------

    @property
    def synced(self) -> Event:
        """Set once the API's pods have been listed completely."""
        return self._reflector.synced

    @property
    def trouble(self) -> str:
        """Why the API's pods cannot be followed at the moment; "" when they can."""
        return self._reflector.trouble

    def notify(self, pod: Object) -> None:
        """The provider's news of a pod, to be published; memory only, never switches (P4)."""
        self._publishers.notify(pod)

    def start(self) -> None:
        self._reflector.start()
        spawn(self._group, "pod recheck", self._recheck_for_ever)

    def stop(self) -> None:
        """Act on pods no more; what the provider still notifies is published. VMs stay as they are."""
        self._closed = True
        self._reflector.close()
        self._group.kill(block=False)

    def close(self, patience: float = 0.0) -> None:
        """Stop altogether, after at most `patience` seconds for what the API does not hold yet.

        What is lost by that is worked out again at the next start.
        """
        self.stop()
        if patience > 0:
            self._publishers.drain(patience)
        self._publishers.close()

    def pods(self) -> list[Object]:
        """The node's pods as the API holds them (not to be changed)."""
        return list(self._reflector.objects.values())

    def unpublished(self) -> list[str]:
        """Keys of the pods whose newest state the API does not hold yet."""
        return self._publishers.owing()

    # --- the reflector's handler ----------------------------------------------------------------------------------

    def changed(self, obj: Object) -> None:
        record = self._pods.get(uid_of(obj))
        # Our own status and annotations come back as changes, too: they must not end the pause after a failure.
        news = record is None or record.pod is None or self._differs(record.pod, obj)
        if record is None:
            record = self._enlist(_Pod(obj, present=True))
        record.pod = record.last = obj
        self._publishers.observe(obj)
        self._provider.observed(obj)
        if news:
            self._poke(record)

    def gone(self, obj: Object) -> None:
        uid = uid_of(obj)
        self._publishers.gone(uid)
        self._provider.vanished(uid)
        if record := self._pods.get(uid):
            record.pod, record.last = None, obj
            self._poke(record)

    def listed(self) -> None:
        self._publishers.recheck(self._reflector.objects)
        self._look.set()

    # --- who acts when --------------------------------------------------------------------------------------------

    def _recheck_for_ever(self) -> None:
        while True:
            self._clock.wait(self._look, self._rng.uniform(*RECHECK_S))
            self._look.clear()
            try:
                self._recheck()
            except Exception:  # one look that failed must not end the looking
                log.exception("looking after all pods failed")

    def _recheck(self) -> None:
        if not self.synced.is_set():
            return
        if not self._provider.uids() <= self._pods.keys():
            # Somebody deleted it while nobody watched.
            for pod in self._provider.get_pods():
                if uid_of(pod) not in self._pods:
                    self._put_first(_Pod(pod, present=False))
        for record in list(self._pods.values()):
            if record.uid not in self._reflector.objects:
                record.pod = None
            if not self._settled(record):
                self._start(record)
        self._publishers.recheck()

    def _settled(self, record: _Pod) -> bool:
        """Would an actor look and leave again? So it is with most pods most of the time: not worth a greenlet each."""
        pod = record.pod
        if pod is None or record.deleting or record.create_failed or record.update_failed:
            return False
        return record.handed is pod and self._provider.knows(record.uid)

    def _enlist(self, record: _Pod) -> _Pod:
        self._pods[record.uid] = record
        self._lines.setdefault(record.key, []).append(record.uid)
        return record

    def _finish(self, record: _Pod) -> None:
        """Forget a pod that neither the API nor the provider has any more, and let its namesake begin."""
        record.finished = True
        # Said again: the provider may have learned of the pod, or published it, after the reflector saw it go.
        self._provider.vanished(record.uid)
        del self._pods[record.uid]
        self._publishers.forget(record.uid)
        line = self._lines[record.key]
        line.remove(record.uid)
        if line:
            self._start(self._pods[line[0]])
        else:
            del self._lines[record.key]

    def _poke(self, record: _Pod) -> None:
        record.backoff.reset()
        record.wake.set()
        self._start(record)

    def _start(self, record: _Pod) -> None:
        if not record.running and not self._closed:
            record.running = True
            spawn(self._group, f"pod {record.key}", self._act, record)

    def _act(self, record: _Pod) -> None:
        """The actor: sync until there is nothing to do, pausing after a failure."""
        try:
            while not record.finished:
                self._clock.wait(self._gate, None)
                record.wake.clear()
                if not self._tried(record):
                    self._clock.wait(record.wake, record.backoff.next())
                elif not record.wake.is_set():
                    break
        finally:
            # No switch lies between the last look at `wake` and this line: who comes later starts a new actor.
            record.running = False

    def _tried(self, record: _Pod) -> bool:
        try:
            self._sync(record)
        except Exception as error:  # one pod's failure is tried again, and must not end its actor
            expected = isinstance(error, (ApiError, _Failed))
            log.warning(
                "the pod needs another try", pod=record.key, uid=record.uid, error=str(error), exc_info=not expected
            )
            return False
        record.backoff.reset()
        return True

    # --- one pod --------------------------------------------------------------------------------------------------

    def _sync(self, record: _Pod) -> None:
        if record.pod is None:
            self._clear_away(record)
        elif record.deleting:
            self._delete(record)
        elif record.terminal or self._publishers.is_terminal(record.uid):
            log.debug("a terminal pod is left alone", pod=record.key)  # K6
        elif self._lines[record.key][0] == record.uid:
            self._bring_up(record, record.pod)

    def _bring_up(self, record: _Pod, pod: Object) -> None:
        provider, metadata = self._provider, pod["metadata"]
        if record.create_failed or not provider.knows(record.uid):
            other = provider.get_pod(metadata["namespace"], metadata["name"])
            if other is not None and uid_of(other) not in (record.uid, *self._pods):
                self._put_first(_Pod(other, present=False))
            elif record.not_ours is None or self._differs(record.not_ours, pod):
                self._create(record, pod)
            return
        # A pod that was adopted at start is handed over once as it is: work it was owed then is still owed.
        if record.handed is None or record.update_failed or self._differs(record.handed, pod):
            # Noted before the attempt: after a failed one, going back to the pod it had before is a change, too.
            record.handed, record.update_failed = pod, True
            try:
                self._ask(record, "Update", provider.update_pod, pod)
            except NotOurs as reason:
                self._refused(record, pod, reason)
            record.update_failed = False
        else:
            record.handed = pod  # the same task: from now on it is known without comparing

    def _put_first(self, record: _Pod) -> None:
        """A pod that only the provider still has is from an earlier life: its teardown comes before its namesakes."""
        self._enlist(record)
        line = self._lines[record.key]
        line.insert(0, line.pop())
        self._start(record)

    def _create(self, record: _Pod, pod: Object) -> None:
        record.create_failed = True  # until the contrary is known: a failed create may leave something behind
        try:
            self._ask(record, "Create", self._provider.create_pod, pod)
        except NotOurs as reason:
            record.create_failed = False
            self._refused(record, pod, reason)
            return
        record.create_failed = False
        record.handed = pod
        self._recorder.event(pod, "Normal", "ProviderCreateSuccess", "the pod was brought up")

    def _refused(self, record: _Pod, pod: Object, reason: NotOurs) -> None:
        record.not_ours = pod
        log.info("the pod is not ours", pod=record.key, why=str(reason))
        self._recorder.event(pod, "Warning", "NotOurs", str(reason))

    def _delete(self, record: _Pod) -> None:
        """VM first, then the last status, then the object: K7."""
        if not record.torn_down:
            self._ask(record, "Delete", self._provider.delete_pod, record.last)
            record.torn_down = True
            self._recorder.event(record.last, "Normal", "ProviderDeleteSuccess", "the pod was torn down")
        if not record.removed or not record.last["metadata"].get("finalizers"):
            self._remove(record)

    def _remove(self, record: _Pod) -> None:
        # One attempt each time: a status the API rejects, or cannot take now, does not hold up the removal for ever.
        self._publishers.flush(record.uid, LAST_WORDS_S)
        if record.pod is None:
            return
        try:
            self._api.delete(pod_path(record.last), uid=record.uid, grace_seconds=0)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or the name is another pod's by now
                raise
        record.removed = True

    def _clear_away(self, record: _Pod) -> None:
        """The API no longer has the pod: tear down what the provider has of it, once that is certain."""
        touched = record.create_failed or record.handed is not None
        if not record.torn_down and (touched or self._provider.knows(record.uid)):
            if found := self._still_there(record):
                self.changed(found)
                return
            self._ask(record, "Delete", self._provider.delete_pod, record.last)
        if record.pod is None:
            self._finish(record)

    def _still_there(self, record: _Pod) -> Object | None:
        """The pod by a fresh read: a cache may be wrong, and what is destroyed does not come back."""
        try:
            found = self._api.get(pod_path(record.last))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found if uid_of(found) == record.uid else None

    def _ask(self, record: _Pod, verb: str, operation: Callable[[Object], None], pod: Object) -> None:
        op = verb.lower()
        try:
            operation(copy.deepcopy(pod))
            self._tally.pod_operation(op, "ok")
        except NotOurs:
            self._tally.pod_operation(op, "skipped", "NotOurs")
            raise
        except Exception as error:  # the provider's failure of one pod: reported here, tried again by the actor
            ours = not isinstance(error, ProviderFailure)
            self._tally.pod_operation(op, "failed", type(error).__name__)
            log.warning(
                "the provider failed",
                pod=record.key,
                uid=record.uid,
                operation=op,
                error=str(error),
                exc_info=ours,
            )
            self._recorder.event(pod, "Warning", f"Provider{verb}Failed", str(error) or type(error).__name__)
            raise _Failed(f"{op}: {error}") from error

    # --- what counts as a change ----------------------------------------------------------------------------------

    def _differs(self, old: Object, new: Object) -> bool:
        version = new["metadata"].get("resourceVersion")
        if version and version == old["metadata"].get("resourceVersion"):
            return False  # most of what a list brings
        ours = self._publishers.owned_annotations(uid_of(new))
        return _task(old, ours) != _task(new, ours)


class _Failed(Exception):
    """The provider could not do what the pod needs; already logged."""


def _open_gate() -> Event:
    gate = Event()
    gate.set()
    return gate


def _task(pod: Object, ours: frozenset[str]) -> Object:
    """The part of a pod that the provider acts on; the echo of our own annotations is none of it."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    return {
        **{name: spec.get(name) for name in SPEC_FIELDS},
        "labels": metadata.get("labels") or {},
        "annotations": {k: v for k, v in (metadata.get("annotations") or {}).items() if k not in ours},
        "deletion": (metadata.get("deletionTimestamp"), metadata.get("deletionGracePeriodSeconds")),
        "finalizers": metadata.get("finalizers") or [],
    }
