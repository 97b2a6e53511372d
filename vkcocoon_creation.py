"""How a pod gets its VM: by the way its annotations ask for, or by adopting what an earlier attempt of ours left.

In the order in which they win: an unmanaged VM is only pointed at; a macOS guest is cocoon-macos' business; what was
hibernated here wakes; then a directory, a fork, an image to run, a snapshot to clone. What takes long and is nobody's
yet (an image, a fork) is made ready first and shared by all who want it; everything about the VM itself happens under
its lock.

Safe to repeat after every failure and every crash: a name that is taken is our own earlier attempt, unless another pod
holds it, and is adopted, never removed. A VM whose hibernated state is on this host is never made anew: that would be
somebody's loss, so a contradiction ends the creation instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from vkcocoon_macos import QemuKeeper, VncPorts
from vkcocoon_net import is_unicast_ipv4
from vkcocoon_ports import Workplace
from vkcocoon_setup import GuestSetup
from vkcocoon_snapshots import Snapshots
from vkcocoon_spec import EvidenceError, PodSpec, SpecError
from vkcocoon_status import ANNOTATION_ID, ANNOTATION_IP, ANNOTATION_VNC_PORT, Reason
from vkcocoon_tracking import TrackedPod
from vkcocoon_vms import MACOS_ID, VM, CloneSpec, CommandError, NameTaken, Snapshot, SnapshotNotFound, VMNotFound

__all__ = ["Creation"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Way:
    """How to make the VM, once everything it is made from is there; `verb` says for people how it came to be."""

    verb: str
    make: Callable[[], VM]


class Creation:
    """Brings up VMs. Raises SpecError and CommandError."""

    def __init__(
        self, work: Workplace, *, setup: GuestSetup, snapshots: Snapshots, qemu: QemuKeeper, vnc: VncPorts
    ) -> None:
        self._work = work
        self._pods = work.pods
        self._runtime = work.ports.runtime
        self._setup = setup
        self._snapshots = snapshots
        self._qemu = qemu
        self._vnc = vnc

    def bring_up(self, entry: TrackedPod) -> None:
        """The VM by the way the annotations ask for, bound to the pod, probed once, published."""
        self._check(entry)
        spec = entry.spec
        self._check_rival(entry)
        way = self._way(entry)
        with self._work.locks.held(spec.vm_name):
            self._check_rival(entry)
            vm = way.make()
        if not self._pods.holds(entry) or entry.deleting:
            return  # delete comes next for this pod and removes what was made, by its name
        self._setup.bind(entry, vm, way.verb)

    def pointed_at(self, entry: TrackedPod) -> VM:
        """The VM that an unmanaged pod points at; only memory."""
        self._check(entry)
        return self._unmanaged_vm(entry)

    def points_elsewhere(self, entry: TrackedPod) -> bool:
        """Was an unmanaged pod edited since, to stand for another VM or another address?"""
        if entry.spec.managed or entry.vm is None:
            return False
        return (entry.vm.id, entry.ip) != _pointer(entry)

    def woken(self, entry: TrackedPod) -> VM:
        """The VM that was hibernated here, cloned from its snapshot; the caller holds its lock."""
        entry.spec.check_cpu_class(self._work.settings.snapshot_cpu_class)
        return self._cloned(entry, self._wake_order(entry.spec))

    def was_hibernated(self, entry: TrackedPod) -> bool:
        """Is there a state of this VM to go on with? A pod that never had it must not ask for anything else."""
        spec, name = entry.spec, entry.spec.vm_name
        if name not in self._snapshots:
            return False
        try:
            found = self._snapshots.get(name)
        except SnapshotNotFound:
            return False
        if entry.fresh and not entry.committed:
            saved = f"the hibernated state of VM {name} is on this host"
            if source := spec.clone_from_dir or spec.fork_from:
                raise EvidenceError(f"{saved}, and the pod asks for {source!r}")
            if not self._same_image(spec, found):
                raise EvidenceError(f"{saved}, of image {found.image!r}, and the pod asks for {spec.image!r}")
            message = f"VM {name} was hibernated on this host and goes on from there"
            self._work.ports.event(entry.pod, "Warning", "HibernateSnapshotExists", message)
        return True

    def _check(self, entry: TrackedPod) -> None:
        entry.spec.check_name()
        entry.spec.check_cpu_class(self._work.settings.snapshot_cpu_class)

    def _check_holder(self, entry: TrackedPod, vm_name: str, vm_id: str) -> None:
        """A VM is one pod's, also that of one which is only pointed at it."""
        holder = self._pods.holder_of(vm_id)
        if holder is not None and holder is not entry:
            raise SpecError(f"VM {vm_name} belongs to pod {holder.key}; two pods cannot stand for one VM")

    def _commit(self, entry: TrackedPod, committed: bool = True) -> None:
        """From now on there may be a VM of it, also for the next life."""
        entry.committed = committed
        self._work.publication.keep(entry)

    def _check_rival(self, entry: TrackedPod) -> None:
        if entry.spec.managed and (rival := self._pods.rival(entry)) is not None:
            raise SpecError(f"VM {entry.spec.vm_name} belongs to pod {rival.key}; two pods cannot stand for one VM")

    # --- which way ------------------------------------------------------------------------------------------------

    def _way(self, entry: TrackedPod) -> _Way:
        spec = entry.spec
        if not spec.managed:
            return _Way("unmanaged", lambda: self._unmanaged_vm(entry))
        if spec.macos:
            return _Way("run" if entry.fresh else "adopt", lambda: self._macos_vm(entry))
        if entry.left_over and self._still_there(entry):
            return _Way("adopt" if entry.fresh else "restart", lambda: self._left_over(entry))
        return self._fresh_way(entry)

    def _fresh_way(self, entry: TrackedPod) -> _Way:
        spec = entry.spec
        if spec.restore or self.was_hibernated(entry):
            return self._clone_way(entry, self._wake_order(spec), "wake")
        mode = self._work.settings.restore_mode
        if directory := spec.clone_from_dir:
            return self._clone_way(entry, spec.clone_spec(from_dir=directory, restore_mode=mode))
        if spec.fork_from:
            if spec.fork_from == spec.vm_name:
                raise SpecError(f"VM {spec.vm_name} cannot be forked from itself")
            return self._clone_way(entry, spec.clone_spec(self._snapshots.fork(spec.fork_from), restore_mode=mode))
        if spec.run_mode:
            order = spec.run_spec()
            self._runtime.image_pull(order.image, force=spec.force_pull)
            return _Way("run", lambda: self._made(entry, lambda: self._runtime.run(order)))
        return self._clone_way(entry, spec.clone_spec(restore_mode=mode))

    def _clone_way(self, entry: TrackedPod, order: CloneSpec, verb: str = "clone") -> _Way:
        return _Way(verb, lambda: self._cloned(entry, order))

    def _wake_order(self, spec: PodSpec) -> CloneSpec:
        """From the state that was saved under the VM's own name. Windows was saved without its network card."""
        nics = 1 if spec.os == "windows" and not spec.firecracker else None
        return spec.clone_spec(spec.vm_name, restore_mode=self._work.settings.restore_mode, nics=nics)

    def _same_image(self, spec: PodSpec, found: Snapshot) -> bool:
        """A clone's state names what its snapshot was made from, which only that snapshot can tell."""
        if spec.run_mode:
            return spec.image == found.image
        try:
            base = self._runtime.snapshot_inspect(spec.clone_spec().snapshot)
        except SnapshotNotFound:
            return True  # nobody can tell any more, and what was saved is worth more than what cannot be made
        return (base.image, base.image_digest) == (found.image, found.image_digest)

    # --- making it ------------------------------------------------------------------------------------------------

    def _unmanaged_vm(self, entry: TrackedPod) -> VM:
        vm_id, ip = _pointer(entry)
        if not vm_id or not is_unicast_ipv4(ip):
            raise SpecError(
                f"an unmanaged pod needs {ANNOTATION_ID} and {ANNOTATION_IP} (a dotted IPv4 address); "
                f"it has {vm_id!r} and {ip!r}"
            )
        entry.ip = ip
        return VM(id=vm_id, name=entry.spec.vm_name, state="running")

    def _macos_vm(self, entry: TrackedPod) -> VM:
        name = entry.spec.vm_name
        if not entry.owns(vm_id := f"{MACOS_ID}{name}"):
            self._check_holder(entry, name, vm_id)
        order = entry.spec.macos_spec(-1)
        order = replace(order, vnc=self._vnc.claim(name, entry.spec.annotations.get(ANNOTATION_VNC_PORT, "")))
        try:
            vm, how = self._qemu.bring_up(order, ran=not entry.fresh, begins=lambda: self._commit(entry))
        except CommandError:
            if self._qemu.missing(name):  # on any doubt it may run, and listen there
                self._vnc.release(name)
            raise
        if how == "adopt" and vm.running:
            self._vnc.adopt(name, vm.vnc)
        elif how == "run" and not entry.fresh:
            self._replaced(entry)
        return vm

    def _cloned(self, entry: TrackedPod, order: CloneSpec) -> VM:
        if order.firecracker and order.snapshot:
            _check_backend(order, self._snapshots.get(order.snapshot))
        try:
            return self._made(entry, lambda: self._runtime.clone(order), wakes=order.snapshot == entry.spec.vm_name)
        except SnapshotNotFound as error:
            raise _explained(entry.spec, order, error) from error
        except CommandError as error:
            if order.snapshot and (error.returncode or 0) > 0:
                self._explain_backend(order)
            raise

    def _explain_backend(self, order: CloneSpec) -> None:
        """Was a clone refused because its snapshot is of the other hypervisor? The tool's words are hard to read."""
        try:
            _check_backend(order, self._runtime.snapshot_inspect(order.snapshot))
        except CommandError as error:
            log.info("snapshot could not be inspected", snapshot=order.snapshot, error=str(error))

    def _made(self, entry: TrackedPod, make: Callable[[], VM], *, wakes: bool = False) -> VM:
        """What ``make`` made, running.

        A name that is taken is our own earlier attempt, unless another pod holds it: adopted, never removed. Only of an
        attempt that died half-way the tool itself may clear the remains. One that is not adopted was not made by this
        attempt, either.
        """
        before = entry.committed
        self._commit(entry)
        try:
            vm = make()
        except NameTaken as error:
            record = self._runtime.inspect(entry.spec.vm_name)
            gone = record.state == "creating" and self._work.ports.clear_half_made(record) in ("collected", "not-found")
            if not gone:
                try:
                    return self._existing(entry, record, error)
                except (SpecError, CommandError):
                    self._commit(entry, before)
                    raise
            vm = make()
        if not entry.fresh and not wakes:
            self._replaced(entry)
        if vm.name != entry.spec.vm_name:  # whatever was said, it was not about this VM
            vm = self._runtime.inspect(entry.spec.vm_name)
        return self._running(vm)

    def _replaced(self, entry: TrackedPod) -> None:
        """The pod had a VM, which was lost while nobody watched, and has been given a new one in its place. While we
        watch, such a pod is evicted; of a loss that nobody saw, the pod may have been told long ago that it goes on."""
        log.warning("VM is gone, and the pod has a new one", pod=entry.key, vm=entry.spec.vm_name)
        message = (
            f"VM {entry.spec.vm_name} was lost while vk-cocoon was away; the pod has a new one, with nothing of it"
        )
        self._work.publication.restarted(entry, Reason.VM_GONE, message)

    def _still_there(self, entry: TrackedPod) -> bool:
        try:
            self._runtime.inspect(entry.spec.vm_name)
        except VMNotFound:
            entry.left_over = False
        return entry.left_over

    def _left_over(self, entry: TrackedPod) -> VM:
        """The VM of that name that did not run when we started: started in place, whatever it was once made from. One
        that ran before has died meanwhile, and that counts as it does while we watch (vkcocoon_watch)."""
        self._commit(entry)
        began = self._work.clock.monotonic()
        record = self._runtime.inspect(entry.spec.vm_name)
        died = not record.running and not entry.fresh
        try:
            vm = self._existing(entry, record, None)
        except CommandError:
            if died:
                self._work.ports.metrics.vm_restart("failed")
            raise
        entry.left_over = False
        if died:
            self._work.publication.started_again(entry, record, began)
        return vm

    def _existing(self, entry: TrackedPod, record: VM, error: CommandError | None) -> VM:
        self._check_holder(entry, record.name, record.id)
        if record.state == "creating":
            # Somebody is still making it: not adopted, tried again later.
            raise error or SpecError(f"VM {record.name} is being made by somebody else")
        return self._running(record)

    def _running(self, vm: VM) -> VM:
        """The record of a VM that runs: read once more when it came back before it did, started when it does not.
        Raises CommandError; what it leaves is adopted by the next attempt."""
        if vm.running and vm.pid > 0:
            return vm
        record = self._runtime.inspect(vm.id)
        if record.running:
            return record
        self._runtime.start(vm.id)
        return self._runtime.inspect(vm.id)


def _check_backend(order: CloneSpec, snapshot: Snapshot) -> None:
    wanted = "firecracker" if order.firecracker else "cloud-hypervisor"
    if snapshot.hypervisor and snapshot.hypervisor != wanted:
        raise SpecError(f"snapshot {order.snapshot} is of {snapshot.hypervisor}, and the pod asks for {wanted}")


def _explained(spec: PodSpec, order: CloneSpec, error: CommandError) -> CommandError | SpecError:
    """The tool's "snapshot not found" in words that say what to do."""
    if order.snapshot != spec.vm_name:
        return error
    return EvidenceError(
        f"the hibernated state of VM {spec.vm_name} is not on this host: without a registry a VM can only wake where "
        "it was hibernated"
    )


def _pointer(entry: TrackedPod) -> tuple[str, str]:
    """The id and the address that the annotations of an unmanaged pod name; "" for none."""
    annotations = entry.spec.annotations
    return annotations.get(ANNOTATION_ID, ""), annotations.get(ANNOTATION_IP, "")
