"""VMs that stop or vanish behind our back: restarted in place, or their pods given up.

    run                  follows the runtime's event stream, for ever, with pauses that grow while it cannot
    _sweep_for_ever      compares what is there with what should be, after each interruption and once a minute
    look                 one greenlet per pod whose VM may have stopped: asks the runtime, acts, asks again

An event only makes us look. The stream reports every VM as deleted when it could not read its list, tells a crash up
to five seconds late, and says nothing of what happened while nobody listened. What the runtime answers is sorted into
three kinds: it says that there is no such VM (the pod is given up), it shows a VM in another state than running (it is
started, once in thirty seconds), or it proves nothing (it is asked again, for half an hour).

Giving up a pod is its deletion in the API, by UID: whoever owns it makes a new one, and its actor cleans up and says
why it ended. The VM goes first, so that the next pod finds the name free; what cannot be removed keeps its pod. All of
it happens under the VM's lock and never while the VM hibernates or its pod is deleted; macOS guests have their own
keeper (vkcocoon_macos), unmanaged VMs their own operator.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from gevent.event import Event

from vkcocoon_kube import ApiError
from vkcocoon_ports import Workplace
from vkcocoon_probes import spawn
from vkcocoon_publish import pod_path
from vkcocoon_readiness import Readiness
from vkcocoon_removal import Removal
from vkcocoon_snapshots import Snapshots
from vkcocoon_status import IntentState
from vkcocoon_tracking import Eviction, TrackedPod
from vkcocoon_vms import VM, CommandError, VMNotFound

__all__ = ["VMWatch"]

FIRST_RETRY, LAST_RETRY = 1.0, 60.0  # the stream cannot be started
RECONNECT_PAUSE = 2.0  # it ended by itself
SWEEP_PERIOD = 60.0
INSPECT_AGAIN = 0.2  # most failures of a look are gone by then
FIRST_RECHECK, LAST_RECHECK = 1.0, 30.0
PATIENCE = 1800.0  # seconds of answers that prove nothing, before a VM that does not answer either is given up
COOLDOWN = 30.0  # a VM that stops again within is not restarted any more
TELL_FIRST = 35.0  # how long an API that answers is waited for to show why: over the longest pause of a publisher
DELETE_AGAIN = 0.2

log = structlog.get_logger()


class VMWatch:
    """Looks after the VMs of the pods that are held."""

    def __init__(
        self,
        work: Workplace,
        *,
        removal: Removal,
        readiness: Readiness,
        snapshots: Snapshots,
        restarted: Callable[[TrackedPod], None],
        recover: Callable[[TrackedPod, VM], None],
    ) -> None:
        """``restarted`` is called when a VM was started in place, under its lock; it may raise CommandError.
        ``recover`` is run for a VM that is gone and was saved, without the lock."""
        self._work = work
        self._pods, self._publication = work.pods, work.publication
        self._runtime = work.ports.runtime
        self._metrics = work.ports.metrics
        self._removal = removal
        self._readiness = readiness
        self._snapshots = snapshots
        self._restarted_hook, self._recover = restarted, recover
        self._looking: dict[str, bool] = {}  # UID -> was there another reason to look meanwhile?
        self._answering: dict[str, float] = {}  # UID -> since when the API answers and does not show it as gone
        self._sweep_now = Event()
        self._stopping = Event()

    def run(self) -> None:
        """Follow the event stream until `close`."""
        clock, pause = self._work.clock, FIRST_RETRY
        spawn(self._work.group, "sweep VMs", self._sweep_for_ever)
        while not self._stopping.is_set():
            try:
                for event in self._runtime.events():
                    pause = FIRST_RETRY
                    self._saw(event.vm, event.kind)
                clock.wait(self._stopping, RECONNECT_PAUSE)
            except CommandError as error:
                log.warning("VM events interrupted", error=str(error), retry_seconds=pause)
                clock.wait(self._stopping, pause)
                pause = min(pause * 2, LAST_RETRY)
            self._sweep_now.set()  # what happened meanwhile is told by nobody

    def close(self) -> None:
        """Hear and sweep no more; who looks after a VM ends with its pod."""
        self._stopping.set()
        self._sweep_now.set()

    def look(self, entry: TrackedPod) -> None:
        """The pod's VM may have stopped. Memory only."""
        if entry.uid in self._looking:
            self._looking[entry.uid] = True
        elif entry.vm is not None and self._concerns(entry, entry.vm.id):
            self._looking[entry.uid] = False
            spawn(self._work.group, f"look after {entry.key}", self._look_after, entry, entry.vm.id)

    def _saw(self, vm: VM, kind: str) -> None:
        for entry in self._pods:
            same = entry.vm is not None and (entry.vm.id == vm.id or (not vm.id and entry.spec.vm_name == vm.name))
            if same and (kind == "DELETED" or not vm.running):
                self.look(entry)

    def _sweep_for_ever(self) -> None:
        while not self._stopping.is_set():
            self._work.clock.wait(self._sweep_now, SWEEP_PERIOD)
            self._sweep_now.clear()
            if not self._stopping.is_set():
                self._sweep()

    def _sweep(self) -> None:
        try:
            records = self._runtime.list()
        except CommandError as error:
            log.info("VMs could not be listed", error=str(error))
            return
        self._removal.remove_late(records)
        self._removal.settle_debts(records)
        running = {record.id for record in records if record.running}
        for entry in self._pods:
            if entry.vm is not None and entry.vm.id not in running:
                self.look(entry)

    # --- one VM ---------------------------------------------------------------------------------------------------

    def _concerns(self, entry: TrackedPod, vm_id: str) -> bool:
        """May we act on this VM for this pod? Asked again after every wait. One that was saved is hibernation's."""
        ours = entry.spec.managed and not entry.spec.macos and self._pods.holds(entry, vm_id)
        saved = entry.intent.state is IntentState.HIBERNATING or entry.saved == vm_id
        return ours and not entry.terminating and not saved

    def _look_after(self, entry: TrackedPod, vm_id: str) -> None:
        clock, pause = self._work.clock, FIRST_RECHECK
        began = clock.monotonic()
        try:
            while self._concerns(entry, vm_id):
                self._looking[entry.uid] = False
                if self._settled(entry, vm_id, clock.monotonic() - began):
                    if not self._looking[entry.uid]:
                        return
                    began, pause = clock.monotonic(), FIRST_RECHECK
                    continue
                if clock.wait(entry.stop, pause):
                    return
                pause = min(pause * 2, LAST_RECHECK)
        finally:
            del self._looking[entry.uid]
            self._answering.pop(entry.uid, None)

    def _settled(self, entry: TrackedPod, vm_id: str, waited: float) -> bool:
        """Look once and act on what is certain; False when there is nothing certain or it could not be done."""
        if not self._work.gate.is_set():
            return False
        with self._work.locks.held(entry.spec.vm_name):
            if not self._concerns(entry, vm_id):
                return True
            if entry.eviction is not None:
                return self._evict(entry, entry.eviction)
            try:
                record = self._inspected(vm_id)
            except VMNotFound:
                return self._gone(entry)
            except CommandError as error:
                return self._doubtful(entry, vm_id, waited, str(error))
            if not self._concerns(entry, vm_id):
                return True
            if record.running:
                entry.has(record)  # perhaps a new process, or a new network card
                return True
            return record.state != "creating" and self._restarted(entry, record)

    def _inspected(self, vm_id: str) -> VM:
        """The record, by a second look when the first proved nothing. Raises VMNotFound, CommandError."""
        try:
            return self._runtime.inspect(vm_id)
        except VMNotFound:
            raise
        except CommandError:
            self._work.clock.sleep(INSPECT_AGAIN)
        return self._runtime.inspect(vm_id)

    def _doubtful(self, entry: TrackedPod, vm_id: str, waited: float, why: str) -> bool:
        """Doubt destroys nothing for half an hour, and never a VM whose guest was not asked or still answers."""
        self._metrics.doubtful_look()
        log.info("looking at a VM proved nothing", pod=entry.key, vm=vm_id, error=why)
        if waited < PATIENCE or not self._publication.silent(entry):
            return False
        sentence = f"VM {entry.spec.vm_name} could not be inspected for {waited / 60:.0f} minutes and does not answer"
        return self._give_up(entry, "VMInspectTimeout", sentence)

    def _restarted(self, entry: TrackedPod, record: VM) -> bool:
        """Start it in place: same disks, same MACs. A VM that stops again at once, or cannot start, is given up."""
        now = self._work.clock.monotonic()
        last_id, last = entry.restarted
        if last_id == record.id and now - last < COOLDOWN:
            sentence = f"VM {record.name} is {record.state!r} again {now - last:.0f} s after it was restarted"
            return self._give_up(entry, "RestartCooldown", sentence)
        log.warning("VM has stopped", pod=entry.key, vm=record.id, state=record.state)
        try:
            self._runtime.start(record.id)
        except VMNotFound:
            return self._gone(entry)
        except CommandError as error:
            self._metrics.vm_restart("failed")
            if (error.returncode or 0) <= 0:  # it was not the tool that decided: it hangs, was killed, is not there
                return self._doubtful(entry, record.id, 0.0, str(error))
            return self._give_up(entry, "RestartFailed", f"VM {record.name} could not be restarted: {error}")
        self._publication.started_again(entry, record, now)
        return self._refreshed(entry, record.id)

    def _refreshed(self, entry: TrackedPod, vm_id: str) -> bool:
        """Its new process is in its record. What cannot be read now is looked at again."""
        try:
            record = self._runtime.inspect(vm_id)
        except CommandError as error:
            log.info("restarted VM could not be inspected", pod=entry.key, vm=vm_id, error=str(error))
            return False
        if not record.running:
            return False
        if self._concerns(entry, vm_id):
            entry.has(record)
            self._publication.publish(entry)
            try:
                self._restarted_hook(entry)
            except CommandError as error:
                log.info("what a restart calls for was not done", pod=entry.key, error=str(error))
        return True

    def _gone(self, entry: TrackedPod) -> bool:
        """A VM that was saved is not lost: whoever removed it meant to hibernate it."""
        try:
            saved = self._snapshots.exists(entry.spec.vm_name)
        except CommandError as error:
            log.info("whether a VM that is gone was saved is not known", pod=entry.key, error=str(error))
            return False
        if not saved or entry.vm is None:
            return self._lost(entry)
        spawn(self._work.group, f"recover {entry.key}", self._recover, entry, entry.vm)
        return True

    # --- giving up ------------------------------------------------------------------------------------------------

    def _give_up(self, entry: TrackedPod, reason: str, sentence: str) -> bool:
        """Remove the VM, then the pod. A VM that cannot be removed keeps its pod."""
        assert entry.vm is not None
        try:
            self._removal.destroy(entry.vm, entry.leases)
        except CommandError as error:
            log.warning("VM could not be removed", pod=entry.key, vm=entry.vm.id, error=str(error))
            return False
        return self._lost(entry, reason, sentence)

    def _lost(self, entry: TrackedPod, reason: str = "VMGone", sentence: str = "") -> bool:
        """The VM is certainly no more: its leases go back, and the pod goes."""
        assert entry.vm is not None
        self._removal.release(entry, entry.vm)
        entry.lost, entry.ip = sentence or f"VM {entry.spec.vm_name} no longer exists", ""
        log.warning("VM is gone", pod=entry.key, vm=entry.vm.id, reason=reason, why=entry.lost)
        self._readiness.stop(entry)
        self._publication.publish(entry)
        entry.eviction = Eviction(reason, entry.lost)
        return self._evict(entry, entry.eviction)

    def _evict(self, entry: TrackedPod, eviction: Eviction) -> bool:
        """Delete the pod, and nothing but this incarnation. False: the API would not, so everything stays as it is."""
        clock, kube = self._work.clock, self._work.ports.kube
        if not self._told(entry):
            return False
        for _ in range(2):
            if entry.terminating or not self._pods.holds(entry):
                return True
            try:
                kube.delete(pod_path(entry.pod), uid=entry.uid)
            except ApiError as error:
                if error.status == 409:  # the name is another pod's by now
                    return self._superseded(entry)
                if error.status != 404:
                    log.warning("pod could not be evicted", pod=entry.key, error=str(error))
                    clock.wait(entry.stop, DELETE_AGAIN)
                    continue
            self._metrics.eviction(eviction.reason)
            self._work.ports.event(entry.pod, "Warning", eviction.reason, eviction.message)
            return True
        return False

    def _told(self, entry: TrackedPod) -> bool:
        """Does the cluster see that the VM is gone? Who watches pods should learn why before they vanish."""
        if entry.seen_gone or not self._publication.acknowledged:
            return True
        try:
            pod = self._work.ports.kube.get(pod_path(entry.pod))
        except ApiError as error:
            self._answering.pop(entry.uid, None)
            return error.status == 404
        now = self._work.clock.monotonic()
        self._publication.observed(pod)
        return entry.seen_gone or now - self._answering.setdefault(entry.uid, now) >= TELL_FIRST

    def _superseded(self, entry: TrackedPod) -> bool:
        self._readiness.stop(entry)
        self._pods.drop(entry)
        self._publication.withdraw(entry)
        return True
