"""Taking VMs away: what shall outlive one first, then the VM, then its leases, then the snapshots nobody needs.

Gone is what we want, so a VM that is gone already is a success; anything else that fails keeps everything that could
still belong to a living VM. A state that shall be kept and cannot be saved keeps the VM. A lease that cannot be given
back costs the pool one entry for a day and never a deletion.

A VM that is no more cannot be asked for its MACs. So they stand on its pod, from the moment it has the VM until the
leases are given back: whoever finishes an interrupted removal finds them there, and believes them only when no VM has
them any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import suppress

import structlog

from vkcocoon_macos import QemuKeeper, VncPorts
from vkcocoon_net import LeaseReleaseError
from vkcocoon_ports import Workplace
from vkcocoon_probes import spawn
from vkcocoon_snapshots import Snapshots, fork_name, latest_name
from vkcocoon_spec import SpecError
from vkcocoon_tracking import TrackedPod, dhcp_macs
from vkcocoon_vms import VM, CommandError, VMNotFound

__all__ = ["Removal"]

log = structlog.get_logger()


class Removal:
    """Removes the VMs of pods. Raises CommandError while one may still exist."""

    def __init__(self, work: Workplace, *, snapshots: Snapshots, qemu: QemuKeeper, vnc: VncPorts) -> None:
        self._work = work
        self._runtime, self._macos = work.ports.runtime, work.ports.macos
        self._snapshots = snapshots
        self._qemu = qemu
        self._vnc = vnc

    def remove(self, entry: TrackedPod) -> None:
        """Everything of a pod that is being deleted; waits for whatever is going on with its VM. A pod that only
        named the VM of another leaves it alone, and what was saved of it too."""
        if not entry.spec.managed or not entry.spec.vm_name:
            return
        with self._work.locks.held(entry.spec.vm_name):
            if entry.vm is None and (rival := self._work.pods.rival(entry)) is not None:
                log.warning("the VM of that name stays: it is another pod's", pod=entry.key, holder=rival.key)
            elif entry.spec.macos:
                self._remove_macos(entry)
            else:
                self._remove_vm(entry)
                self._drop_snapshots(entry)

    def destroy(self, vm_id: str) -> None:
        """A VM with everything it has. One that is gone already is fine."""
        with suppress(VMNotFound):
            self._runtime.remove(vm_id)

    def destroy_made(self, entry: TrackedPod) -> None:
        """The VM that an attempt made and the pod was never bound to; the caller holds its lock."""
        with suppress(VMNotFound):
            vm = self._runtime.inspect(entry.spec.vm_name)
            self.destroy(vm.id)
            self.give_back(dhcp_macs(vm), vm.name)

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

    def give_back(self, macs: Iterable[str], vm_name: str) -> None:
        """Best effort: an address that stays leased costs the pool one entry for a day."""
        ports = self._work.ports
        for mac in sorted(macs):
            try:
                ports.release_lease(mac, self._work.settings.cocoon_net_control_socket)
                ports.metrics.lease_release("ok")
            except LeaseReleaseError as error:
                ports.metrics.lease_release("failed")
                log.warning("lease could not be released", vm=vm_name, mac=mac, error=str(error))

    def _in_use(self, macs: Set[str]) -> Set[str]:
        """Those of the MACs that a VM has; all of them when that cannot be found out. What a pod says is no proof."""
        try:
            records = list(self._runtime.list())
        except CommandError as error:
            log.info("leases are not given back before the VMs can be listed", error=str(error))
            return macs
        records += [entry.vm for entry in self._work.pods if entry.vm is not None and not entry.gone]
        return {mac for record in records for mac in dhcp_macs(record)}

    # --- microVMs -------------------------------------------------------------------------------------------------

    def _remove_vm(self, entry: TrackedPod) -> None:
        """Remove by the id we bound, else by the name only this pod can have; leases go after the VM, never before."""
        vm = None if entry.gone else entry.vm or self._by_name(entry)
        if vm is not None and self._work.pods.holder_of(vm.id) not in (None, entry):
            return
        if vm is not None:
            self._keep(entry, vm)
            self.destroy(vm.id)
        entry.vm = None
        self.release(entry, vm)

    def _by_name(self, entry: TrackedPod) -> VM | None:
        with suppress(VMNotFound, SpecError):
            entry.spec.check_name()
            return self._runtime.inspect(entry.spec.vm_name)
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
        if fork_name(name) in self._snapshots:  # waits for who is being cloned from it, which must hold up nobody
            spawn(self._work.group, f"drop the fork of {name}", self._drop_fork, name)

    def _drop_fork(self, vm_name: str) -> None:
        try:
            self._snapshots.drop(fork_name(vm_name))
        except CommandError as error:
            log.warning("snapshot could not be removed", snapshot=fork_name(vm_name), error=str(error))

    # --- macOS ----------------------------------------------------------------------------------------------------

    def _remove_macos(self, entry: TrackedPod) -> None:
        name, vm = entry.spec.vm_name, entry.vm
        if vm is None:
            with suppress(CommandError):
                vm = self._macos.inspect(name)  # only for its MAC; rm itself knows what is gone
        self._qemu.forget(f"qemu-{name}")
        with suppress(VMNotFound):
            self._macos.remove(name)
        self._vnc.release(name)
        entry.vm = None
        self.release(entry, vm)
