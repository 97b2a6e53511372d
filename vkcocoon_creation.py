"""How a pod gets its VM: by the way its annotations ask for, or by adopting what an earlier attempt of ours left.

Safe to repeat after every failure and every crash: a name that is taken is our own earlier attempt, unless another pod
holds it, and is adopted, never removed. Everything about one VM happens under its lock.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from vkcocoon_macos import QemuKeeper, VncPorts
from vkcocoon_net import is_unicast_ipv4
from vkcocoon_ports import Workplace
from vkcocoon_setup import ADDRESS_BUDGET, GuestSetup
from vkcocoon_spec import SpecError
from vkcocoon_status import ANNOTATION_ID, ANNOTATION_IP, ANNOTATION_VNC_PORT
from vkcocoon_tracking import TrackedPod
from vkcocoon_vms import VM, CommandError

__all__ = ["Creation"]

log = structlog.get_logger()


class Creation:
    """Brings up VMs. Raises SpecError and CommandError."""

    def __init__(self, work: Workplace, *, setup: GuestSetup, qemu: QemuKeeper, vnc: VncPorts) -> None:
        self._work = work
        self._pods = work.pods
        self._runtime = work.ports.runtime
        self._setup = setup
        self._qemu = qemu
        self._vnc = vnc

    def bring_up(self, entry: TrackedPod) -> None:
        """The VM by the way the annotations ask for, bound to the pod, probed once, published."""
        spec = entry.spec
        spec.check_name()
        with self._work.locks.held(spec.vm_name):
            if spec.managed and (rival := self._pods.rival(entry)) is not None:
                raise SpecError(f"VM {spec.vm_name} belongs to pod {rival.key}; two pods cannot stand for one VM")
            if not spec.managed:
                vm, budget = self._unmanaged_vm(entry), None
            elif spec.macos:
                vm, budget = self._macos_vm(entry), None
            elif spec.restore:
                vm, budget = self.cloned(entry, spec.vm_name), ADDRESS_BUDGET
            elif spec.run_mode:
                vm, budget = self._run(entry), None
            else:
                vm, budget = self.cloned(entry), ADDRESS_BUDGET
        if not self._pods.holds(entry) or entry.deleting:
            return  # delete comes next for this pod and removes what was made, by its name
        self._setup.bind(entry, vm, budget, "wake" if spec.restore else "clone")

    def cloned(self, entry: TrackedPod, snapshot: str = "") -> VM:
        """A clone of that snapshot, or of the one the pod's image names; the caller holds the VM's lock."""
        order = entry.spec.clone_spec(snapshot)
        return self._made(entry, lambda: self._runtime.clone(order))

    def _unmanaged_vm(self, entry: TrackedPod) -> VM:
        annotations = entry.spec.annotations
        vm_id, ip = annotations.get(ANNOTATION_ID, ""), annotations.get(ANNOTATION_IP, "")
        if not vm_id or not is_unicast_ipv4(ip):
            raise SpecError(
                f"an unmanaged pod needs {ANNOTATION_ID} and {ANNOTATION_IP} (a dotted IPv4 address); "
                f"it has {vm_id!r} and {ip!r}"
            )
        entry.ip = ip
        return VM(id=vm_id, name=entry.spec.vm_name, state="running")

    def _macos_vm(self, entry: TrackedPod) -> VM:
        name = entry.spec.vm_name
        entry.committed = True
        display = self._vnc.claim(name, entry.spec.annotations.get(ANNOTATION_VNC_PORT, ""))
        vm, alive = self._qemu.bring_up(entry.spec.macos_spec(display))
        if alive:
            self._vnc.adopt(name, vm.vnc)
        return vm

    def _run(self, entry: TrackedPod) -> VM:
        order = entry.spec.run_spec()
        self._runtime.image_pull(order.image, force=entry.spec.force_pull)
        return self._made(entry, lambda: self._runtime.run(order))

    def _made(self, entry: TrackedPod, make: Callable[[], VM]) -> VM:
        """What ``make`` made, read once more when it came back before it ran (pid and NICs are filled in only then).

        A name that is taken is our own earlier attempt, unless another pod holds it: adopted, never removed. Only of an
        attempt that died half-way the tool itself may clear the remains.
        """
        entry.committed = True
        try:
            vm = make()
        except CommandError as error:
            if "already exists" not in error.stderr.lower() or "name" not in error.stderr.lower():
                raise
            record = self._runtime.inspect(entry.spec.vm_name)
            if not (record.state == "creating" and self._cleared(record)):
                return self._existing(entry, record, error)
            vm = make()
        return vm if vm.running and vm.pid > 0 else self._runtime.inspect(vm.id)

    def _cleared(self, record: VM) -> bool:
        """Did the tool find that nobody is making this VM any more, and give its name back?"""
        try:
            outcome = self._runtime.reconcile_stale_create(record.id)
        except CommandError as error:  # one that is too old to know this cannot be asked
            log.info("half-made VM could not be cleared", vm=record.name, error=str(error))
            return False
        log.warning("half-made VM", vm=record.name, id=record.id, outcome=outcome)
        return outcome in ("collected", "not-found")

    def _existing(self, entry: TrackedPod, record: VM, error: CommandError) -> VM:
        holder = self._pods.holder_of(record.id)
        if holder is not None and holder is not entry:
            raise SpecError(f"VM {record.name} belongs to pod {holder.key}; two pods cannot stand for one VM")
        if record.state == "creating":
            raise error  # somebody is still making it: not adopted, tried again later
        if not record.running:
            self._runtime.start(record.id)
            record = self._runtime.inspect(record.id)
        return record
