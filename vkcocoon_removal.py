"""Taking VMs away: the VM first, then its leases, then its snapshot.

Gone is what we want, so a VM that is gone already is a success; anything else that fails keeps everything that could
still belong to a living VM. A lease that cannot be given back costs the pool one entry for a day and never a deletion.
"""

from __future__ import annotations

from contextlib import suppress

import structlog

from vkcocoon_macos import QemuKeeper, VncPorts
from vkcocoon_net import LeaseReleaseError
from vkcocoon_ports import Workplace
from vkcocoon_snapshots import Snapshots
from vkcocoon_spec import SpecError
from vkcocoon_tracking import TrackedPod
from vkcocoon_vms import VM, CommandError, VMNotFound

__all__ = ["Removal"]

log = structlog.get_logger()


class Removal:
    """Removes the VMs of pods. Raises CommandError while one may still exist."""

    def __init__(self, work: Workplace, *, snapshots: Snapshots, qemu: QemuKeeper, vnc: VncPorts) -> None:
        self._work = work
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

    def destroy(self, vm_id: str) -> None:
        with suppress(VMNotFound):  # already gone is what we want
            self._work.ports.runtime.remove(vm_id)

    def destroy_made(self, entry: TrackedPod) -> None:
        """The VM that an attempt made and the pod was never bound to; the caller holds its lock."""
        with suppress(VMNotFound):
            vm = self._work.ports.runtime.inspect(entry.spec.vm_name)
            self.destroy(vm.id)
            self.release_leases(vm)

    def release_leases(self, vm: VM) -> None:
        """Best effort: an address that stays leased costs the pool one entry for a day, never the delete."""
        ports = self._work.ports
        for nic in vm.nics:
            if nic.ip or not nic.mac:
                continue
            try:
                ports.release_lease(nic.mac, self._work.settings.cocoon_net_control_socket)
                ports.metrics.lease_release("ok")
            except LeaseReleaseError as error:
                ports.metrics.lease_release("failed")
                log.warning("lease could not be released", vm=vm.name, mac=nic.mac, error=str(error))

    def _remove_vm(self, entry: TrackedPod) -> None:
        """Remove by the id we bound, else by the name only this pod can have; leases go after the VM, never before."""
        vm = None if entry.gone else entry.vm
        if vm is None and not entry.gone:
            with suppress(VMNotFound, SpecError):
                entry.spec.check_name()
                vm = self._work.ports.runtime.inspect(entry.spec.vm_name)
        if vm is not None and self._work.pods.holder_of(vm.id) in (None, entry):
            self.destroy(vm.id)
            self.release_leases(vm)
            entry.vm = None
        if not entry.spec.keep_snapshot and self._work.pods.rival(entry) is None:
            self._drop_snapshot(entry.spec.vm_name)

    def _remove_macos(self, entry: TrackedPod) -> None:
        name, vm, macos = entry.spec.vm_name, entry.vm, self._work.ports.macos
        if vm is None:
            with suppress(CommandError):
                vm = macos.inspect(name)  # only for its MAC; rm itself knows what is gone
        self._qemu.forget(f"qemu-{name}")
        with suppress(VMNotFound):
            macos.remove(name)
        self._vnc.release(name)
        if vm is not None:
            self.release_leases(vm)
        entry.vm = None

    def _drop_snapshot(self, name: str) -> None:
        try:
            self._snapshots.drop(name)
        except CommandError as error:
            log.warning("snapshot could not be removed", snapshot=name, error=str(error))
