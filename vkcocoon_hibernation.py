"""Hibernate and wake: a VM becomes a snapshot on this host, and a new VM is cloned from it.

Hibernating is detach (Windows only), save, remove, release, forget the probe, in this order and published at each step.
A step that fails is taken back as far as the guest noticed it, and has a word of its own; the VM stays until it is
saved. One that was saved and did not survive a failed removal is hibernated all the same, and one that did is saved
again. A woken VM is a new one with new MACs; nothing of the old address is kept.

Both are level-triggered: `apply` compares what the annotation wants with what there is, so an interrupted one is simply
owed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import structlog

from vkcocoon_creation import Creation
from vkcocoon_ports import Workplace
from vkcocoon_probes import spawn
from vkcocoon_readiness import Readiness
from vkcocoon_removal import Removal
from vkcocoon_setup import GuestSetup
from vkcocoon_snapshots import Snapshots
from vkcocoon_spec import SpecError
from vkcocoon_status import IntentState
from vkcocoon_tracking import SetupState, TrackedPod
from vkcocoon_vms import VM, CommandError, VMNotFound

__all__ = ["Hibernation"]

log = structlog.get_logger()

FIRST_RETRY, LAST_RETRY = 1.0, 300.0

HIBERNATE_UNSUPPORTED = "HibernateUnsupported: a macOS guest cannot be hibernated"


class Hibernation:
    """Brings pods to where their hibernate annotation wants them. Raises SpecError and CommandError."""

    def __init__(
        self,
        work: Workplace,
        *,
        creation: Creation,
        removal: Removal,
        setup: GuestSetup,
        readiness: Readiness,
        snapshots: Snapshots,
        look: Callable[[TrackedPod], None],
    ) -> None:
        """``look`` is called when a VM that was left alone for our sake may need looking after."""
        self._work = work
        self._pods, self._publication = work.pods, work.publication
        self._runtime = work.ports.runtime
        self._creation = creation
        self._removal = removal
        self._setup = setup
        self._readiness = readiness
        self._snapshots = snapshots
        self._look = look

    def apply(self, entry: TrackedPod) -> None:
        """Bring the VM to where the hibernate annotation wants it; unmanaged pods are the operator's own business."""
        wanted = entry.spec.hibernate
        if not entry.spec.managed or entry.terminating or entry.gone or not self._pods.holds(entry):
            return
        if entry.spec.macos:
            self._refuse_macos(entry)
        elif wanted and entry.vm is not None:
            self._hibernate(entry)
        elif wanted and entry.hibernated:
            self._give_up_wake(entry)
        elif wanted:
            return  # there is no VM yet
        else:
            self.lift_failure(entry)
            if entry.hibernated:
                self._wake(entry)
            self._restore_network(entry)

    def recognized(self, entry: TrackedPod) -> bool:
        """Is the pod, which has no VM and wants none, hibernated on this host? Waking it first would be for nothing."""
        spec = entry.spec
        if not (spec.managed and spec.hibernate) or spec.macos or entry.left_over:
            return False
        if not self._creation.was_hibernated(entry):
            return False
        try:
            self._runtime.inspect(spec.vm_name)
        except VMNotFound:
            entry.hibernated = entry.committed = True
            entry.set_intent(IntentState.HIBERNATING)
            entry.set_intent(IntentState.HIBERNATED)
            return True
        return False

    def _hibernate(self, entry: TrackedPod) -> None:
        """Save the VM under its own name, take it away, forget the probe: in this order, published at each step."""
        vm = entry.vm
        assert vm is not None
        entry.set_intent(IntentState.HIBERNATING)
        self._publication.publish(entry)
        with self._work.locks.held(entry.spec.vm_name):
            self._steps(entry, vm)
        self._removed(entry, vm)

    def _steps(self, entry: TrackedPod, vm: VM) -> None:
        """Each step has its own word when it fails, and what it did to the guest is taken back."""
        steps = (
            ("HibernateRemoveFailed", self._await_earlier_life),
            ("HibernateNetResizeFailed", self._detach),
            ("HibernateSnapshotFailed", self._save),
            ("HibernateRemoveFailed", self._remove),
        )
        for reason, step in steps:
            try:
                step(entry, vm)
            except CommandError as error:
                self._roll_back(entry, vm)
                self._publication.fail(entry, reason, f"hibernate: {error}")
                self._look(entry)
                raise

    def _await_earlier_life(self, entry: TrackedPod, vm: VM) -> None:
        """A state that is there already was saved by an earlier life of ours, whose removal may still be under way: a
        command outlives who began it. Saving again would make room for itself by dropping that state, and then find no
        VM. Starting a VM that runs changes nothing, and waits for whatever is being done to it."""
        if entry.spec.vm_name in self._snapshots and entry.saved != vm.id:
            try:
                self._runtime.start(vm.id)
            except VMNotFound:
                entry.saved = vm.id if self._snapshots.exists(entry.spec.vm_name) else ""

    def _detach(self, entry: TrackedPod, vm: VM) -> None:
        """Windows is saved without its network card, for it would go on with the old one's address after the wake."""
        if not _is_windows(entry, vm) or not vm.nics:
            return
        with suppress(CommandError):
            self._runtime.exec(vm.id, ["ipconfig", "/release"])
        try:
            self._runtime.nics(vm.id, 0)
        except CommandError:
            if entry.saved != vm.id or self._runs(vm.id):
                raise

    def _save(self, entry: TrackedPod, vm: VM) -> None:
        """Save a VM that runs. One that is gone, or does not run any more, was left by an attempt that saved it and
        never heard of the end of its removal."""
        try:
            self._snapshots.save(entry.spec.vm_name, vm.id)
        except CommandError:
            if entry.saved != vm.id or self._runs(vm.id):
                raise
        entry.saved = vm.id

    def _runs(self, vm_id: str) -> bool:
        try:
            return self._runtime.inspect(vm_id).running
        except VMNotFound:
            return False

    def _remove(self, entry: TrackedPod, vm: VM) -> None:
        self._removal.destroy(vm, entry.leases)

    def _roll_back(self, entry: TrackedPod, vm: VM) -> None:
        """The VM stays for now: a Windows guest gets a network card again, which is a new one with a new address."""
        if not _is_windows(entry, vm) or not vm.nics:
            return
        try:
            record = self._runtime.inspect(vm.id)
            if not record.nics:
                self._runtime.nics(vm.id, len(vm.nics))
                record = self._runtime.inspect(vm.id)
        except CommandError as error:
            log.warning("the network of a VM could not be restored", pod=entry.key, vm=vm.id, error=str(error))
            return
        if self._pods.holds(entry, vm.id):
            entry.has(record)
            entry.ip = record.static_ip
            spawn(self._work.group, f"renew {entry.key}", self._setup.renew, vm.id)

    def _restore_network(self, entry: TrackedPod) -> None:
        """A Windows guest that runs on without a network card: a hibernate took it, and was interrupted before it could
        be taken back."""
        vm = entry.vm
        if vm is None or not _is_windows(entry, vm) or vm.nics:
            return
        with self._work.locks.held(entry.spec.vm_name):
            record = self._runtime.inspect(vm.id)
            if record.running and not record.nics:
                self._runtime.nics(vm.id, 1)
                record = self._runtime.inspect(vm.id)
        if self._pods.holds(entry, vm.id) and record.nics:
            entry.has(record)
            log.warning("VM has a network card again", pod=entry.key, vm=vm.id)
            spawn(self._work.group, f"renew {entry.key}", self._setup.renew, vm.id)

    def _removed(self, entry: TrackedPod, vm: VM) -> None:
        """The VM is saved and gone."""
        if not self._pods.holds(entry, vm.id):
            return
        self._removal.release(entry, vm)
        entry.vm, entry.ip, entry.hibernated, entry.setup = None, "", True, SetupState()
        self._readiness.stop(entry)
        entry.set_intent(IntentState.HIBERNATED)
        self._work.ports.event(entry.pod, "Normal", "Hibernated", f"hibernate: {vm.name} saved on this host")

    def _wake(self, entry: TrackedPod) -> None:
        """Clone the VM back from its snapshot; the new one has a new MAC, so nothing of the old address is kept."""
        # Said in public before anything is done: after a restart in the middle only this tells a wake from a creation.
        entry.set_intent(IntentState.CREATING, f"wake: {entry.spec.vm_name} is cloned from its snapshot")
        self._publication.publish(entry)
        entry.ip = ""
        try:
            with self._work.locks.held(entry.spec.vm_name):
                vm = self._creation.woken(entry)
        except (SpecError, CommandError) as error:
            self._publication.fail(entry, "WakeCloneFailed", f"wake: {error}")
            raise
        if self._pods.holds(entry) and not entry.deleting:
            self._setup.bind(entry, vm, "wake")
            message = f"wake: {entry.spec.vm_name} cloned from its snapshot"
            self._work.ports.event(entry.pod, "Normal", "Woken", message)

    def _give_up_wake(self, entry: TrackedPod) -> None:
        """A wake that did not come to its end and is no longer asked for: what it made goes, what was saved is there.
        A hibernate that a restart interrupted ends in the same way."""
        if entry.intent.state is IntentState.HIBERNATED:
            return
        entry.set_intent(IntentState.HIBERNATING)
        with self._work.locks.held(entry.spec.vm_name):
            self._removal.destroy_made(entry)
        entry.set_intent(IntentState.HIBERNATED)

    def recover(self, entry: TrackedPod, vm: VM) -> None:
        """The pod's VM is gone and what was saved of it is here: a removal that an earlier life had begun has ended. It
        is hibernated, and woken when that is no longer wanted; tried until it is done."""
        clock, pause = self._work.clock, FIRST_RETRY
        with self._work.locks.held(entry.spec.vm_name):
            if not self._pods.holds(entry, vm.id) or entry.terminating or self._runs(vm.id):
                return
            log.warning("VM is gone, and what was saved of it is here", pod=entry.key, vm=vm.id)
            self._removed(entry, vm)
        self._publication.publish(entry)
        while entry.hibernated and not entry.spec.hibernate and self._pods.holds(entry) and not entry.terminating:
            try:
                self._wake(entry)
            except (SpecError, CommandError):  # published
                if clock.wait(entry.stop, pause):
                    return
                pause = min(pause * 2, LAST_RETRY)
        self._publication.publish(entry)

    def lift_failure(self, entry: TrackedPod) -> None:
        """A failed hibernate that is no longer asked for is lifted when the VM turns out to run; others stay. A VM that
        is gone although it failed was saved before: that is hibernated all the same."""
        vm, failed = entry.vm, entry.intent
        if vm is None or failed.state is not IntentState.FAILED or not failed.message.startswith("hibernate: "):
            return
        try:
            record = self._runtime.inspect(vm.id)
        except VMNotFound:
            if entry.saved != vm.id:
                raise
            self._removed(entry, vm)
            return
        running = record.running
        if running and self._pods.holds(entry, vm.id):
            entry.has(record)  # it may have lost its network card
        if not running and entry.saved == vm.id:
            # Nobody else restarts a VM that was saved: it may be on its way out.
            with self._work.locks.held(entry.spec.vm_name):
                self._runtime.start(vm.id)
            running = True
        if running and self._pods.holds(entry, vm.id) and entry.intent is failed:
            # It runs on: what was saved is of an earlier time.
            entry.saved, entry.woken = "", entry.spec.vm_name in self._snapshots
            entry.set_intent(IntentState.CREATING)
            self._setup.await_address(entry, vm.id, "hibernate")

    def _refuse_macos(self, entry: TrackedPod) -> None:
        if entry.spec.hibernate and entry.intent.message != HIBERNATE_UNSUPPORTED:
            self._publication.fail(entry, "HibernateUnsupported", HIBERNATE_UNSUPPORTED)
        elif not entry.spec.hibernate and entry.intent.message == HIBERNATE_UNSUPPORTED:
            entry.set_intent(IntentState.CREATING)
            if entry.vm is not None:
                self._setup.await_address(entry, entry.vm.id, "run")


def _is_windows(entry: TrackedPod, vm: VM) -> bool:
    return entry.spec.os == "windows" and vm.hypervisor != "firecracker"
