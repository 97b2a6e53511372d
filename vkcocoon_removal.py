"""Taking VMs away: what shall outlive one first, then the VM, then its leases, then the snapshots nobody needs.

Gone is what we want, so a VM that is gone already is a success; anything else that fails keeps everything that could
still belong to a living VM. A state that shall be kept and cannot be saved keeps the VM. A lease that cannot be given
back costs the pool one entry for a day and never a deletion.

That a pod names a VM proves nothing: somebody may have made it by hand. A VM is a pod's when it was bound to it, when
its id stands on the pod, or when we began to make one of that name for it.

A VM that is no more cannot be asked for its MACs. So they are written into files (vkcocoon_debts): with its pod, from
the moment it has the VM until the leases are given back, for the case that somebody else removes the VM; and by the id
of the VM before we remove it, for the case that we are killed and nobody is left to tell. Either is believed only when
no VM has those MACs any more. What the pod says of its MACs is for people, and anybody may have written it.

A command of an earlier life may still be making a VM that nobody wants any more, and of which there is no trace yet.
Names of such VMs are expected for a while; what comes under one of them goes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress

import structlog

from vkcocoon_debts import LeaseDebts
from vkcocoon_macos import QemuKeeper, VncPorts
from vkcocoon_net import LeaseReleaseError
from vkcocoon_ports import EARLIER_LIFE, Workplace
from vkcocoon_probes import spawn
from vkcocoon_snapshots import Snapshots, fork_name, latest_name
from vkcocoon_spec import SpecError
from vkcocoon_tracking import Pod, TrackedPod, dhcp_macs
from vkcocoon_vms import MACOS_ID, POWER_S, VM, CommandError, SnapshotInUse, VMNotFound

__all__ = ["Removal"]

FORK_PATIENCE = 600.0  # seconds that a fork which cannot be dropped holds up a deletion, for it costs only space
FORK_IN_USE = 3600.0  # no clone reads that long
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0
BUSY_PAUSE = 1.0  # between two looks at a VM that somebody is making

log = structlog.get_logger()


class Removal:
    """Removes the VMs of pods. Raises CommandError while one may still exist."""

    def __init__(self, work: Workplace, *, snapshots: Snapshots, qemu: QemuKeeper, vnc: VncPorts) -> None:
        self._work = work
        self._runtime, self._macos = work.ports.runtime, work.ports.macos
        self._snapshots = snapshots
        self._qemu = qemu
        self._vnc = vnc
        self._debts = LeaseDebts(work.settings.state_dir)
        self._began = work.clock.monotonic()
        self._expected: dict[str, bool] = {}  # names of VMs that may still be being made, for nobody; True: macOS
        self._fork_failed: dict[str, float] = {}  # fork -> since when it cannot be dropped

    def remove(self, entry: TrackedPod) -> None:
        """Everything of a pod that is being deleted; waits for whatever is going on with its VM. A pod that only
        named the VM of another leaves it alone, and what was saved of it too."""
        if not entry.spec.managed or not entry.spec.vm_name:
            return
        with self._work.locks.held(entry.spec.vm_name):
            if entry.vm is None and not entry.committed and not entry.noted:
                log.info("nothing was ever begun for the pod", pod=entry.key)
            elif entry.vm is None and (rival := self._work.pods.rival(entry)) is not None:
                log.warning("the VM of that name stays: it is another pod's", pod=entry.key, holder=rival.key)
            elif entry.spec.macos:
                self._remove_macos(entry)
            else:
                self._remove_vm(entry)
                self._drop_snapshots(entry)

    def destroy(self, vm: VM, earlier: Set[str] = frozenset()) -> None:
        """A VM with everything it has. One that is gone already is fine. Its leases are the caller's to give back;
        ``earlier`` are the MACs of those that are owed with them."""
        self._debts.note(vm.id, dhcp_macs(vm) | earlier)
        with suppress(VMNotFound):
            self._macos.remove(vm.name) if vm.is_macos else self._runtime.remove(vm.id)

    def destroy_made(self, entry: TrackedPod) -> None:
        """The VM that an attempt made and the pod was never bound to; the caller holds its lock."""
        if (vm := self._by_name(entry)) is None:
            self._expect(entry)
            return
        self.destroy(vm, entry.leases)
        self.release(entry, vm)

    def remove_late(self, records: Sequence[VM]) -> None:
        """Remove those VMs that were made for nobody, by a command of an earlier life. ``records``: all microVMs."""
        if self._work.clock.monotonic() - self._began >= EARLIER_LIFE:
            self._expected.clear()
        for record in [*records, *self._late_macos()]:
            if record.name in self._expected and record.state != "creating":
                with self._work.locks.held(record.name):
                    self._remove_late(record)

    def _late_macos(self) -> Sequence[VM]:
        """All macOS guests, when one is expected; their tool waits for whoever makes one before it removes it."""
        try:
            return self._macos.list() if any(self._expected.values()) else ()
        except CommandError as error:
            log.info("macOS guests could not be listed", error=str(error))
            return ()

    def _remove_late(self, record: VM) -> None:
        namesakes = [entry for entry in self._work.pods if entry.spec.vm_name == record.name]
        self._expected.pop(record.name, None)
        if not all(entry.hibernated and entry.spec.hibernate for entry in namesakes):
            return  # somebody wants it by now
        log.warning("a command of an earlier life made a VM for nobody", vm=record.name, id=record.id)
        try:
            self.destroy(record)
        except CommandError as error:
            self._expected[record.name] = record.is_macos
            log.warning("it could not be removed", vm=record.name, error=str(error))
            return
        self.give_back(dhcp_macs(record), record.name)

    def _expect(self, entry: TrackedPod) -> None:
        """There is no VM of its name; if a command that an earlier life began is making one, it is for nobody."""
        if entry.inherited and self._work.clock.monotonic() - self._began < EARLIER_LIFE:
            self._expected[entry.spec.vm_name] = entry.spec.macos

    # --- leases ---------------------------------------------------------------------------------------------------

    def release(self, entry: TrackedPod, vm: VM | None) -> None:
        """Give back the leases of ``vm``, which is certainly no more, and those the pod had before it."""
        if vm is not None:
            self.give_back(dhcp_macs(vm), vm.name)
            entry.leases -= dhcp_macs(vm)
        self.release_earlier(entry)

    def release_earlier(self, entry: TrackedPod) -> None:
        """Give back what the pod's earlier VMs left, when a removal was interrupted or nobody was there to see it."""
        current = dhcp_macs(entry.vm) if entry.vm is not None else frozenset()
        if earlier := entry.leases - current:
            done = earlier - self._in_use(earlier)
            self.give_back(done, entry.spec.vm_name)
            entry.leases -= done

    def settle_debts(self, records: Sequence[VM]) -> None:
        """Give back the leases of VMs whose removal nobody saw to its end. ``records``: all microVMs."""
        listed = {record.id for record in records}
        for vm_id, macs in self._debts.owed().items():
            if vm_id not in listed and self._is_no_more(vm_id, macs) and (done := macs - self._in_use(macs)):
                log.warning("a removal that was interrupted left leases behind", vm=vm_id, macs=sorted(done))
                self.give_back(done, vm_id)

    def _is_no_more(self, vm_id: str, macs: Set[str]) -> bool:
        """Does the tool itself say so? The id of a macOS guest is that of its namesakes, too: those have other MACs."""
        name = vm_id.removeprefix(MACOS_ID)
        try:
            record = self._macos.inspect(name) if name != vm_id else self._runtime.inspect(vm_id)
        except VMNotFound:
            return True
        except CommandError:
            return False
        return bool(dhcp_macs(record)) and not dhcp_macs(record) & macs

    def give_back(self, macs: Set[str], vm_name: str) -> None:
        """Best effort: an address that stays leased costs the pool one entry for a day."""
        ports = self._work.ports
        for mac in sorted(macs):
            try:
                ports.release_lease(mac, self._work.settings.cocoon_net_control_socket)
                ports.metrics.lease_release("ok")
            except LeaseReleaseError as error:
                ports.metrics.lease_release("failed")
                log.warning("lease could not be released", vm=vm_name, mac=mac, error=str(error))
        self._debts.settled(macs)

    def _in_use(self, macs: Set[str]) -> Set[str]:
        """Those of the MACs that a VM has; all of them when that cannot be found out. What a pod says is no proof."""
        try:
            records = [*self._runtime.list(), *self._macos.list()]
        except CommandError as error:
            log.info("leases are not given back before the VMs can be listed", error=str(error))
            return macs
        records += [entry.vm for entry in self._work.pods if entry.vm is not None and not entry.gone]
        return {mac for record in records for mac in dhcp_macs(record)}

    # --- microVMs -------------------------------------------------------------------------------------------------

    def _remove_vm(self, entry: TrackedPod) -> None:
        """Remove by the id we bound, else the one of its name that is its own; leases go after the VM, never before."""
        vm = None if entry.gone else entry.vm or self._by_name(entry)
        if vm is not None and self._work.pods.holder_of(vm.id) not in (None, entry):
            return
        if vm is not None:
            self._keep(entry, vm)
            self.destroy(vm, entry.leases)
        elif not entry.gone:
            self._expect(entry)
        entry.vm = None
        self.release(entry, vm)

    def _by_name(self, entry: TrackedPod) -> VM | None:
        """The VM of the pod's name, if it is its own. One that is being made shows no MAC yet, and its guest may take a
        lease before it can be removed: it is waited for."""
        clock = self._work.clock
        until = clock.monotonic() + POWER_S
        with suppress(VMNotFound, SpecError):
            entry.spec.check_name()
            while (record := self._runtime.inspect(entry.spec.vm_name)).state == "creating" and entry.owns(record.id):
                if clock.monotonic() >= until or (outcome := self._work.ports.clear_half_made(record)) == "error":
                    break  # its `vm rm` waits for whoever makes the VM
                if outcome == "busy":
                    clock.sleep(BUSY_PAUSE)
            return record if entry.owns(record.id) else None
        return None

    def _keep(self, entry: TrackedPod, vm: VM) -> None:
        """What the policy wants to outlive the pod: the last state of a VM that runs, once per deletion."""
        if not entry.spec.saved_at_deletion or entry.kept == vm.id:
            return
        try:
            if not self._runtime.inspect(vm.id).running:
                return
            self._snapshots.save(latest_name(entry.spec.vm_name), vm.id)
        except VMNotFound:
            return
        entry.kept = vm.id

    def _drop_snapshots(self, entry: TrackedPod) -> None:
        """At once, so that the next pod of the name does not take what is left for its own; unless it shall."""
        name = entry.spec.vm_name
        if self._work.pods.rival(entry) is not None:
            return
        if not entry.spec.keep_snapshot:
            self._snapshots.drop(name)
        self._drop_fork(entry)

    def _drop_fork(self, entry: TrackedPod) -> None:
        """The pod stays until its fork is dropped, for nothing else would remind anybody of it: at most for a while,
        and not for those who are being cloned from it at the moment."""
        name, now = entry.spec.vm_name, self._work.clock.monotonic()
        fork = fork_name(name)
        try:
            self._snapshots.drop(fork, patience=0.0)
        except SnapshotInUse:
            self.drop_fork_later(entry.pod, name)
        except CommandError as error:
            if now - self._fork_failed.setdefault(fork, now) < FORK_PATIENCE:
                raise
            self._left(entry.pod, fork, error)
        self._fork_failed.pop(fork, None)

    def drop_fork_later(self, pod: Pod, vm_name: str) -> None:
        """Drop the fork of a VM that is no more, when nobody is cloned from it any more. Events are about ``pod``."""
        spawn(self._work.group, f"drop the fork of {vm_name}", self._drop_fork_later, pod, vm_name)

    def _drop_fork_later(self, pod: Pod, vm_name: str) -> None:
        clock, pause, source = self._work.clock, FIRST_PAUSE, self._snapshots.fork_source(vm_name)
        until = clock.monotonic() + FORK_IN_USE
        while self._snapshots.fork_source(vm_name) == source:  # else a namesake has saved another in its place
            try:
                return self._snapshots.drop(fork_name(vm_name))
            except CommandError as error:
                log.info("fork could not be dropped yet", snapshot=fork_name(vm_name), error=str(error))
                if clock.monotonic() >= until:
                    return self._left(pod, fork_name(vm_name), error)
            clock.sleep(pause)
            pause = min(pause * 2, LAST_PAUSE)

    def _left(self, pod: Pod, snapshot: str, error: CommandError) -> None:
        log.warning("snapshot could not be removed", snapshot=snapshot, error=str(error))
        message = f"snapshot {snapshot} stays on the host: {error}; remove it with cocoon snapshot rm {snapshot}"
        self._work.ports.event(pod, "Warning", "SnapshotLeft", message[:512])

    # --- macOS ----------------------------------------------------------------------------------------------------

    def _remove_macos(self, entry: TrackedPod) -> None:
        name, vm = entry.spec.vm_name, entry.vm
        vm_id = f"{MACOS_ID}{name}"
        if not entry.owns(vm_id) or self._work.pods.holder_of(vm_id) not in (None, entry):
            return
        if vm is None:
            try:
                vm = self._macos.inspect(name)  # for its MAC; rm itself knows what is gone
            except VMNotFound:
                self._expect(entry)
            except CommandError as error:
                log.info("macOS record could not be read", vm=name, error=str(error))
        self._qemu.forget(vm_id)
        self.destroy(vm or VM(vm_id, name, hypervisor="qemu"), entry.leases)
        self._vnc.release(name)
        entry.vm = None
        self.release(entry, vm)
