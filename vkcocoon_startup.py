"""What already runs when we start: adopted, each VM probed before its pod is published, all side by side.

First it is settled which VM is whose, which takes two lists. From then on new pods can be created; the first probes,
which dead guests draw out to a probe's whole bound, run beside, and hold up nobody but their own pods.

Nothing is touched before both lists, of pods and of VMs, were read whole. A pod whose VM is missing, half made or
stopped is left to `create_pod`, which the controller calls for it anyway; what is owed to an adopted one (a hibernate,
a wake, the set-up of its guest) is done by `update_pod`, which is called once for each. A VM that no pod asks for is
somebody's work, and only the policy that says so removes it (D1).
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from gevent.pool import Group

from vkcocoon_creation import Creation
from vkcocoon_kube import list_all
from vkcocoon_macos import VncPorts
from vkcocoon_ports import Workplace
from vkcocoon_probes import spawn
from vkcocoon_removal import Removal
from vkcocoon_setup import GuestSetup, hibernating
from vkcocoon_snapshots import Snapshots, fork_name
from vkcocoon_spec import PodSpec, SpecError
from vkcocoon_status import (
    ANNOTATION_LIFECYCLE_STATE,
    ANNOTATION_VM_NAME,
    ANNOTATION_VNC_PORT,
    Intent,
    IntentState,
    Reason,
    pod_key,
    vm_id_of,
)
from vkcocoon_tracking import Pod, TrackedPod, dhcp_macs
from vkcocoon_vms import MACOS_ID, VM, CommandError, VMNotFound

__all__ = ["GRACE", "Startup"]

FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # between two questions about a half-made VM
PATIENCE = 1800.0  # no creation takes that long
GRACE = 15.0  # for a first look at guests that the API shows Ready: as long as one that died may be shown so

log = structlog.get_logger()


class Startup:
    """Reconciles once, at start. `track` is the provider's."""

    def __init__(
        self,
        work: Workplace,
        *,
        creation: Creation,
        setup: GuestSetup,
        removal: Removal,
        snapshots: Snapshots,
        vnc: VncPorts,
        track: Callable[[Pod, str], TrackedPod],
    ) -> None:
        self._work = work
        self._pods, self._publication = work.pods, work.publication
        self._runtime, self._macos = work.ports.runtime, work.ports.macos
        self._creation = creation
        self._setup = setup
        self._removal = removal
        self._snapshots = snapshots
        self._vnc = vnc
        self._track = track
        self._adoptions = Group()
        self._listed: list[Pod] = []
        self._reconciled = False

    def reconcile(self) -> None:
        """Give the pods bound to this node their VMs, and begin to probe them; may be called again.

        Raises ApiError or CommandError when a list could not be read whole; nothing was touched then. Guests that are
        in no list of cocoon's, those of macOS, are adopted all the same.
        """
        selector = f"spec.nodeName={self._work.settings.node_name}"
        pods, _ = list_all(self._work.ports.kube, "/api/v1/pods", field_selector=selector)
        first, self._listed = not self._listed, pods
        if first and pods:
            spawn(self._work.group, "pods that nobody probes", self._withhold_what_nobody_probes)
        waiting = sorted(pods, key=_claim)
        named = self._taken([pod for pod in waiting if self._says_which(pod)], [])
        self._settle_all([entry for entry in named if _certainly_macos(entry)], [])
        records = self._runtime.list()
        self._snapshots.load()
        self._work.claims.keep({pod["metadata"]["uid"] for pod in pods})
        nameless = self._taken([pod for pod in waiting if not self._says_which(pod)], records)
        self._settle_all([entry for entry in named + nameless if entry.spec.managed], records)
        for entry in named + nameless:
            if not entry.spec.managed and not _ended(entry.pod) and entry.vm is None:
                self._settle_unmanaged(entry)  # after those who have a VM of their own
        self._reconciled = True
        names = set(map(_asked, pods)) | {entry.spec.vm_name for entry in self._pods}
        ids = {entry.vm.id for entry in self._pods if entry.vm is not None} | set(map(vm_id_of, pods))
        for record in records:
            if record.id in ids or record.name in names:
                continue  # half-made, it is cleared or waited for by the creation that wants its name
            if record.state == "creating":
                spawn(self._work.group, f"half-made VM {record.name}", self._clear, record)
            else:
                self._orphan(record)
        spawn(self._work.group, "leases that are owed", self._removal.settle_debts, records)
        spawn(self._work.group, "macOS orphans", self._macos_orphans, names | ids)
        self._drop_forks(pods, names | {record.name for record in records})

    def take_over(self, entry: TrackedPod) -> None:
        """An unmanaged pod is managed from now on: which VM it has, and of which tool, is found out as at a start, for
        what it says of it has neither a network card nor a process. Raises CommandError; then it stays as it was."""
        records = self._runtime.list()
        if entry.vm is None or not entry.pointed:
            return
        entry.committed = self._work.claims.get(entry.uid) is not None
        entry.noted = "" if entry.committed else entry.vm.id
        entry.vm, entry.pointed = None, False
        self._settle(entry, records)

    def _says_which(self, pod: Pod) -> bool:
        """Does the pod say which VM it asks for, or did an earlier life of ours write it down?"""
        return bool(_asked(pod) or self._work.claims.get(pod["metadata"]["uid"]))

    def _taken(self, pods: list[Pod], records: list[VM]) -> list[TrackedPod]:
        """The entries of these pods; one that does not say which VM is its has the one whose id we wrote, if there is
        one. What is wrong with one pod is that pod's: `create_pod` is called for it and tells of it."""
        entries = []
        for pod in pods:
            try:
                name = "" if self._says_which(pod) or _ended(pod) else _name_of(TrackedPod.of(pod).noted, records)
                if name or self._says_which(pod):
                    entries.append(self._track(pod, name))
            except Exception as error:
                log.exception("pod could not be taken over", pod=pod_key(pod))
                self._publication.withhold(pod, Reason.NOT_PROBED, f"the pod could not be taken over: {error!r}")
        return entries

    def _settle_all(self, entries: list[TrackedPod], records: list[VM]) -> None:
        settling = Group()
        for entry in entries:
            if entry.vm is None:
                spawn(settling, f"find the VM of {entry.key}", self._settle, entry, records)
        settling.join()

    def _withhold_what_nobody_probes(self) -> None:
        """The API shows what an earlier life of ours has seen. Some time is given for a look; then it is not so."""
        self._work.clock.sleep(GRACE)
        message = f"vk-cocoon has been started, and could not probe the guest within {GRACE:.0f} s"
        for pod in self._listed:
            entry = self._pods.get(pod["metadata"]["uid"])
            # What we do not hold after the reconcile was refused, or is gone by now.
            if entry is not None or not self._reconciled:
                self._publication.withhold(entry.pod if entry is not None else pod, Reason.NOT_PROBED, message)

    def _drop_forks(self, pods: list[Pod], alive: set[str]) -> None:
        """A fork of a VM that is no more: whoever deleted it was killed while others were cloned from it."""
        sources = {PodSpec.of(pod).fork_from: pod for pod in pods}
        for name in sources.keys() - alive:
            if name and fork_name(name) in self._snapshots:
                self._removal.drop_fork_later(sources[name], name)

    def join(self) -> None:
        """Until everything that was adopted has been probed and published."""
        self._adoptions.join()

    def _settle(self, entry: TrackedPod, records: list[VM]) -> None:
        """What is not adopted stays tracked, so that its VM name stays its own until `create_pod` is called for it."""
        self._identify(entry, records)
        if self._pods.rival(entry) is not None:
            return
        if _ended(entry.pod):
            self._settle_ended(entry, records)
        else:
            self._settle_own(entry, records)

    def _settle_ended(self, entry: TrackedPod, records: list[VM]) -> None:
        """It is not brought up again (K6), but what it has left is its own until it is deleted, and goes with it."""
        name = entry.spec.vm_name
        found = entry.spec.macos or name in self._snapshots or any(record.name == name for record in records)
        if not (found and (entry.committed or entry.noted)):
            self._pods.drop(entry)

    def _settle_unmanaged(self, entry: TrackedPod) -> None:
        try:
            vm = self._creation.pointed_at(entry)
        except SpecError as error:
            log.info("pod could not be adopted", pod=entry.key, error=str(error))
        else:
            self._setup.adopt(entry, vm, "unmanaged", self._adoptions)

    def _settle_own(self, entry: TrackedPod, records: list[VM]) -> None:
        try:
            vm = self._found_macos(entry) if entry.spec.macos else _record_of(entry, records)
        except CommandError:
            return  # it may run
        holder = self._pods.holder_of(vm.id) if vm is not None else None
        if holder is not None:
            log.warning("VM is another pod's", pod=entry.key, holder=holder.key)
        elif vm is not None and entry.terminating:
            entry.has(vm)  # deletion was asked for while we were away: no probe (P6), delete_pod comes next
        elif vm is not None:
            self._setup.adopt(entry, vm, "adopt", self._adoptions)
        elif any(
            record.name == entry.spec.vm_name and record.state != "creating" and entry.owns(record.id)
            for record in records
        ):
            # One that was saved and stopped in its removal may have lost its disk: what is left of it goes.
            # One that was ready again meanwhile has a newer state than what was saved, if it starts.
            removing = hibernating(entry.intent) and not entry.intent.ready
            removed_half = removing and entry.spec.vm_name in self._snapshots
            entry.left_over = not removed_half
            if removed_half:
                self._adopt_hibernated(entry)
        elif not entry.spec.macos:
            self._adopt_hibernated(entry)
        if vm is None and not entry.terminating:
            message = f"VM {entry.spec.vm_name} does not run; it was found so at a start of vk-cocoon"
            reason = Reason.QEMU_DEAD if entry.spec.macos else Reason.VM_GONE
            self._publication.withhold(entry.pod, reason, message)

    def _identify(self, entry: TrackedPod, records: list[VM]) -> None:
        """Whatever its name and os annotations say by now, the pod has the VM whose id we wrote, and of the tool that
        gave it; that of a macOS guest says its name."""
        vm_id = entry.noted
        if name := _name_of(vm_id, records):
            os = "macos" if vm_id.startswith(MACOS_ID) else "linux" if entry.spec.macos else entry.os
            entry.stays_with(name, os)

    def _found_macos(self, entry: TrackedPod) -> VM | None:
        """A macOS guest that runs is adopted, and one that ran before: whoever probes it finds it dead, and restarts
        it. On any doubt (CommandError) `create_pod` decides, which never runs a second one."""
        try:
            record = self._macos.inspect(entry.spec.vm_name)
        except VMNotFound:
            return None
        if not entry.owns(record.id):
            return None
        if self._macos.alive(record):
            self._vnc.adopt(record.name, record.vnc)
        elif entry.fresh:
            return None
        else:
            self._vnc.claim(record.name, entry.spec.annotations.get(ANNOTATION_VNC_PORT, ""))
        return record

    def _adopt_hibernated(self, entry: TrackedPod) -> None:
        """A hibernated pod has no VM on purpose. One that was interrupted on its way there or back, or failed, is
        hibernated when it has no VM and its snapshot is there: a fresh VM in its place would be somebody's loss."""
        interrupted = _between(entry.intent)
        if not (interrupted or entry.intent.state is IntentState.HIBERNATED):
            return
        if interrupted and entry.spec.vm_name not in self._snapshots:
            return
        entry.committed = True
        if entry.terminating:
            return
        entry.hibernated = True
        # The rest of what was interrupted is done by its actor, which is handed every pod once.
        entry.set_intent(IntentState.HIBERNATING if interrupted else IntentState.HIBERNATED)
        self._publication.publish(entry)

    def _clear(self, record: VM) -> None:
        """A VM that was being made when we started and that no pod asks for: a leftover goes, one that is being made is
        waited for, and what becomes of it is an orphan."""
        clock, pause = self._work.clock, FIRST_PAUSE
        until = clock.monotonic() + PATIENCE
        while clock.monotonic() < until and not self._wanted(record.name):
            if self._cleared(record):
                return
            clock.sleep(pause)
            pause = min(pause * 2, LAST_PAUSE)

    def _cleared(self, record: VM) -> bool:
        """False while somebody may still be making it."""
        outcome = self._work.ports.clear_half_made(record)
        if outcome != "not-creating" or self._wanted(record.name):
            return outcome not in ("busy", "error")
        try:
            self._orphan(self._runtime.inspect(record.id))
        except VMNotFound:
            return True
        except CommandError as error:
            log.info("VM that is made by now could not be inspected", vm=record.name, error=str(error))
            return False
        return True

    def _wanted(self, name: str) -> bool:
        """Does a pod name it by now? Then it is its creation's."""
        return any(entry.spec.vm_name == name for entry in self._pods)

    def _macos_orphans(self, known: set[str]) -> None:
        """The same for macOS guests, by a tool of its own that nobody else waits for."""
        try:
            records = self._macos.list()
        except CommandError as error:
            log.warning("macOS guests could not be listed: one may belong to no pod", error=str(error))
            return
        for record in records:
            with self._work.locks.held(record.name):  # after whatever creates or deletes it
                if not known & {record.name, record.id} and not self._wanted(record.name):
                    self._orphan(record)

    def _orphan(self, record: VM) -> None:
        """A VM that no pod asks for: somebody's work, so only the policy that says so removes it (D1)."""
        self._work.ports.metrics.orphan()
        policy = self._work.settings.orphan_policy
        log.warning("VM belongs to no pod", vm=record.name, id=record.id, state=record.state, policy=policy)
        if policy != "destroy":
            return
        try:
            self._removal.destroy(record)
            self._removal.give_back(dhcp_macs(record), record.name)
        except CommandError as error:
            log.warning("orphan VM could not be removed", vm=record.name, error=str(error))


def _between(intent: Intent) -> bool:
    """Was it on its way between a VM and its snapshot?"""
    return intent.state is IntentState.HIBERNATING or (
        intent.state in (IntentState.CREATING, IntentState.FAILED)
        and intent.message.startswith(("hibernate: ", "wake: "))
    )


def _ended(pod: Pod) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _asked(pod: Pod) -> str:
    """The name of the VM that it asks for."""
    return str((pod["metadata"].get("annotations") or {}).get(ANNOTATION_VM_NAME) or "").strip()


def _certainly_macos(entry: TrackedPod) -> bool:
    """Whatever its annotations say by now."""
    return entry.noted.startswith(MACOS_ID) or (entry.spec.macos and not entry.noted)


def _name_of(vm_id: str, records: list[VM]) -> str:
    """The name of the VM with that id; that of a macOS guest says it."""
    if vm_id.startswith(MACOS_ID):
        return vm_id.removeprefix(MACOS_ID)
    return next((record.name for record in records if vm_id and record.id == vm_id), "")


def _claim(pod: Pod) -> tuple[bool, str, str]:
    """Of several pods that name one VM, first the one that had it, then the oldest."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    hibernated = annotations.get(ANNOTATION_LIFECYCLE_STATE) in (IntentState.HIBERNATED, IntentState.HIBERNATING)
    return not (hibernated or vm_id_of(pod)), metadata.get("creationTimestamp", ""), metadata["uid"]


def _record_of(entry: TrackedPod, records: list[VM]) -> VM | None:
    """The running VM of a pod: by the id we wrote, else by its name when we began to make one (our annotation may never
    have arrived)."""
    running = [record for record in records if record.running]
    named = [record for record in running if record.id == entry.noted]
    named += [record for record in running if record.name == entry.spec.vm_name and entry.committed]
    return next(iter(named), None)
