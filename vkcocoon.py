"""The provider: pods on one side, virtual machines on the other, and the truth about them pushed to Kubernetes.

Kubernetes never asks. What this module does not hand to `notify` does not exist for the cluster, so every change of
what it knows ends in `Publication.publish`, the only place that builds a status.

Who runs here: the actor of a pod (vkcocoon_kube) calls create, update and delete, one at a time per pod. One probe
greenlet per pod (vkcocoon_probes) asks `_guest_probe` or `_macos_probe` on each tick. Background greenlets of a pod
(the wait for an address, a QEMU restart) belong to its `TrackedPod` and end with it.

Who owns what: `TrackedPod` (vkcocoon_tracking) is one incarnation of a pod, keyed by UID. After every call that may
switch greenlets, `PodTable.holds` is asked again: still this incarnation, still this VM? What waits takes its time from
the clock in `Ports`. Start reading at `Provider.create_pod`, then `_guest_probe`, then `Publication.publish`.
"""

from __future__ import annotations

import sys

_LOADED_TOO_EARLY = [name for name in ("kubernetes", "urllib3", "paramiko", "requests", "ssl") if name in sys.modules]

from gevent import monkey

if _LOADED_TOO_EARLY and not monkey.is_module_patched("socket"):
    raise ImportError(f"import vkcocoon before {', '.join(_LOADED_TOO_EARLY)}: it makes blocking calls cooperative")
monkey.patch_all()

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import structlog
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group

from vkcocoon_guests import Pinger, Reach
from vkcocoon_http import Metrics
from vkcocoon_kube import KubeApi, list_all
from vkcocoon_macos import Owner, QemuKeeper, VncPorts
from vkcocoon_net import (
    LeaseFile,
    LeaseFileError,
    LeaseReleaseError,
    is_unicast_ipv4,
    release_lease,
    ssh_banner,
    tcp_accepts,
)
from vkcocoon_probes import Clock, Deadline, Observer, ProbeAgent, ProbeManager, ProbeResult, spawn
from vkcocoon_settings import Settings
from vkcocoon_spec import PodSpec, SpecError
from vkcocoon_status import (
    ANNOTATION_ID,
    ANNOTATION_IP,
    ANNOTATION_VM_NAME,
    ANNOTATION_VNC_PORT,
    Intent,
    IntentState,
    NotOurs,
    Reason,
    copied,
    pod_key,
)
from vkcocoon_tracking import Notify, Pod, PodTable, Publication, Report, TrackedPod
from vkcocoon_vms import VM, CocoonCLI, CocoonMacosCLI, CommandError, SnapshotNotFound, VMNotFound

__all__ = ["Ports", "Provider", "__version__", "main"]
__version__ = "0.1.0"

ADDRESS_POLL = 0.2  # seconds between two looks for an address before the intent may be ready (T6)
ADDRESS_BUDGET = 45.0  # after a clone or a wake the wait is reported as failed then, and goes on (T6)
NO_ADDRESS = "dhcp lease not observed"
HIBERNATE_UNSUPPORTED = "HibernateUnsupported: a macOS guest cannot be hibernated"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ports:
    """What differs between a host and a simulation. The lease file is a real file in both."""

    clock: Clock
    runtime: CocoonCLI
    macos: CocoonMacosCLI
    kube: KubeApi
    pinger: Pinger
    tcp_accepts: Callable[[str, int, Deadline], None] = tcp_accepts
    ssh_banner: Callable[[str, Deadline], str] = ssh_banner
    release_lease: Callable[[str, str], None] = release_lease
    event: Report = lambda *_: None
    on_probe: Observer = lambda *_: None  # after each probe: agent, raw result, lateness and duration in seconds
    metrics: Metrics = field(default_factory=lambda: Metrics(__version__))


class Provider:
    """Makes pods into VMs and says what became of them.

    Pods go in and out as dicts in the API's spelling. Commands that fail raise `CommandError`, orders that cannot be
    met raise `SpecError`, pods that ask for no VM raise `NotOurs`; the caller tries again when it thinks right.
    """

    def __init__(self, settings: Settings, ports: Ports) -> None:
        self._settings = settings
        self._ports = ports
        self._clock = ports.clock
        self._leases = LeaseFile(settings.leases_path)
        self._probes = ProbeManager(ports.clock, observer=self._probed)
        self._pods = PodTable()
        self._publication = Publication(
            self._pods,
            ports.clock,
            probe_of=self._probe_of,
            host_ip=settings.node_ip,
            report=ports.event,
            metrics=ports.metrics,
        )
        self._reach = Reach(ports.pinger, ports.tcp_accepts, ports.ssh_banner)
        self._locks: WeakValueDictionary[str, BoundedSemaphore] = WeakValueDictionary()
        self._group = Group()
        self._stopping = Event()
        self._vnc = VncPorts(enabled=bool(settings.macos_vnc_password))
        self._qemu = QemuKeeper(ports.clock, ports.macos, lock=self._vm_lock, group=self._group)
        ports.metrics.pods_from(lambda: self._pods)
        ports.metrics.degraded(ports.pinger.degraded)

    # --- what Kubernetes asks for ---------------------------------------------------------------------------------

    def notify_pods(self, callback: Notify, *, acknowledged: bool = False) -> None:
        """Who gets every changed pod: `metadata` with our annotations (None = must be absent) and the whole status.
        The callback only takes it; it must not switch greenlets (P4). With ``acknowledged`` the caller promises to tell
        `observed` and `vanished` what the API holds, and an address is given to another pod only after that (L10)."""
        self._publication.notify = callback
        self._publication.acknowledged = acknowledged

    def observed(self, pod: Pod) -> None:
        """The API holds this pod as it is given here; memory only."""
        entry = self._pods.get(pod["metadata"]["uid"])
        if entry is not None and pod["metadata"].get("deletionTimestamp"):
            self._begin_deletion(entry, pod)
        self._publication.observed(pod)

    def vanished(self, uid: str) -> None:
        """The API holds this pod no longer; memory only."""
        self._publication.vanished(uid)

    def create_pod(self, pod: Pod) -> None:
        """Bring up the pod's VM, start its probe and publish the first result (clause 1 and 2 of the contract).

        Safe to repeat: a pod that already has its VM is only published again. Raises NotOurs, SpecError, CommandError.
        """
        entry = self._track(pod)
        if entry.vm is None and not entry.hibernated and not entry.terminating:
            if entry.intent.state is not IntentState.FAILED:  # a failed create stays visible until one succeeds
                entry.set_intent(IntentState.CREATING)
            if not self._may_be_alive(entry):
                self._publication.publish(entry)
            try:
                self._bring_up(entry)
            except (SpecError, CommandError) as error:
                self._fail(entry, "CreateBringUpFailed", f"create: {error}")
                raise
        self._apply_hibernate(entry)
        self._publication.publish(entry)

    def update_pod(self, pod: Pod) -> None:
        """Take the pod's new wishes: hibernate, wake, a newer generation; an unknown pod is created.

        Annotations that the probe reads (the probe port) take effect at its next tick (O2).
        """
        if pod["metadata"]["uid"] not in self._pods:
            return self.create_pod(pod)
        entry = self._track(pod)
        if entry.vm is None and not entry.hibernated:
            return self.create_pod(pod)
        self._apply_hibernate(entry)
        return self._publication.publish(entry)

    def delete_pod(self, pod: Pod) -> None:
        """Take the VM away. Returns when it is gone or was never ours; raises CommandError while it may still exist.

        Publishes Terminating once, then the terminal status (K7). A pod we do not track may still have left a VM of
        its name behind; that one goes too.
        """
        entry = self._pods.get(pod["metadata"]["uid"]) or TrackedPod.of(pod)
        self._begin_deletion(entry, pod)
        if entry.spec.managed and entry.spec.vm_name:
            with self._vm_lock(entry.spec.vm_name):
                self._remove_vm(entry)
        self._pods.drop(entry)
        self._publication.withdraw(entry)
        self._publication.terminal(entry)

    def _begin_deletion(self, entry: TrackedPod, pod: Pod) -> None:
        """Not Ready and no probe from the moment the deletion is known, whatever the pod's actor is busy with (P6)."""
        entry.update(pod)
        if not entry.deleting:
            if entry.uid in self._pods:
                self._publication.terminating(entry)
            entry.deleting = True
            self._stop_probe(entry)

    def get_pod(self, namespace: str, name: str) -> Pod | None:
        """A copy of the pod as we hold it, with our status; None when we do not."""
        entry = self._pods.find(f"{namespace}/{name}")
        if entry is None:
            return None
        pod = copied(entry.pod)
        if entry.status is not None:
            pod["status"] = copied(dict(entry.status))
        return pod

    def get_pod_status(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The status published last, or None for a pod we do not hold."""
        entry = self._pods.find(f"{namespace}/{name}")
        return None if entry is None else copied(dict(entry.status or {}))

    def get_pods(self) -> list[Pod]:
        """Copies of all pods we hold."""
        keys = [entry.key.partition("/") for entry in self._pods if self._pods.current(entry)]
        return [pod for namespace, _, name in keys if (pod := self.get_pod(namespace, name)) is not None]

    @property
    def held(self) -> PodTable:
        """What we hold, for those who show it to others; only to be read."""
        return self._pods

    def uids(self) -> Set[str]:
        """The UIDs of the pods we hold."""
        return self._pods.uids()

    def knows(self, uid: str) -> bool:
        """Do we hold this incarnation?"""
        return uid in self._pods

    def set_vm_ip(self, key: str, vm_id: str, ip: str) -> bool:
        """Write back the address of a pod's VM; refused (False) when the pod has another VM meanwhile.

        Only memory. A changed address of a pod that stays Ready is published at once (L8); a lost one leaves with the
        flip it causes (L7).
        """
        entry = self._pods.find(key)
        if entry is None or entry.vm is None or entry.vm.id != vm_id or entry.terminating:
            return False
        if entry.ip != ip:
            entry.ip = ip
            if ip and entry.ready:
                self._publication.publish(entry)
        return True

    def close(self) -> None:
        """End every probe and background greenlet. VMs keep running; nothing is published any more."""
        self._stopping.set()
        self._pods.close()
        self._probes.close()

    # --- tracking -------------------------------------------------------------------------------------------------

    def _track(self, pod: Pod) -> TrackedPod:
        """The entry of this incarnation with the newest pod in it. A namesake of another UID loses its claim (P3)."""
        fresh = TrackedPod.of(pod)
        if not fresh.spec.vm_name:
            raise NotOurs(f"annotation {ANNOTATION_VM_NAME} is missing: it names the VM this pod stands for")
        if (entry := self._pods.get(fresh.uid)) is not None:
            entry.update(pod)
            return entry
        if (former := self._pods.find(fresh.key)) is not None:
            log.warning("pod replaced by a namesake before its deletion was seen", pod=fresh.key, uid=former.uid)
            self._stop_probe(former)
            self._pods.drop(former)
            self._publication.withdraw(former)
        self._pods.add(fresh)
        return fresh

    @contextmanager
    def _vm_lock(self, vm_name: str) -> Iterator[None]:
        """Serializes the command lines of one VM: create, restart, hibernate, wake and delete never cross."""
        lock = self._locks.get(vm_name)
        if lock is None:
            lock = self._locks[vm_name] = BoundedSemaphore(1)
        with lock:
            yield

    # --- bringing a VM up -----------------------------------------------------------------------------------------

    def _may_be_alive(self, entry: TrackedPod) -> bool:
        """Was this pod published with a VM before? Then adoption speaks first, so that it does not blink Not Ready."""
        return bool((entry.pod["metadata"].get("annotations") or {}).get(ANNOTATION_ID))

    def _bring_up(self, entry: TrackedPod) -> None:
        """The VM by the way the annotations ask for, bound to the pod, probed once, published."""
        spec = entry.spec
        spec.check_name()
        with self._vm_lock(spec.vm_name):
            if not spec.managed:
                vm, budget = self._unmanaged_vm(entry), None
            elif spec.macos:
                vm, budget = self._macos_vm(entry), None
            elif spec.restore:
                vm, budget = self._cloned(entry, spec.vm_name), ADDRESS_BUDGET
            elif spec.run_mode:
                vm, budget = self._run(entry), None
            else:
                vm, budget = self._cloned(entry), ADDRESS_BUDGET
        if not self._pods.holds(entry) or entry.deleting:
            return  # delete comes next for this pod and removes what was made, by its name
        self._bind(entry, vm, budget, "wake" if spec.restore else "clone")

    def _bind(self, entry: TrackedPod, vm: VM, budget: float | None, verb: str) -> None:
        """The pod has its VM: first probe, address, publication, in this order (clause 2 of the contract)."""
        entry.vm, entry.gone, entry.hibernated = vm, False, False
        entry.ip = vm.static_ip or entry.ip
        if verb != "adopt" or not _failed_for_good(entry.intent):
            entry.set_intent(IntentState.CREATING)
        self._start_probe(entry)
        if not self._pods.holds(entry, vm.id):
            return
        self._await_address(entry, vm.id, budget, verb)
        self._publication.publish(entry)

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
        display = self._vnc.claim(name, entry.spec.annotations.get(ANNOTATION_VNC_PORT, ""))
        vm, alive = self._qemu.bring_up(entry.spec.macos_spec(display))
        if alive:
            self._vnc.adopt(name, vm.vnc)
        return vm

    def _run(self, entry: TrackedPod) -> VM:
        order = entry.spec.run_spec()
        self._ports.runtime.image_pull(order.image, force=entry.spec.force_pull)
        return self._made(entry, lambda: self._ports.runtime.run(order))

    def _cloned(self, entry: TrackedPod, snapshot: str = "") -> VM:
        order = entry.spec.clone_spec(snapshot)
        return self._made(entry, lambda: self._ports.runtime.clone(order))

    def _made(self, entry: TrackedPod, make: Callable[[], VM]) -> VM:
        """What ``make`` made, read once more when it came back before it ran (pid and NICs are filled in only then).

        A name that is taken is our own earlier attempt, unless another pod holds it: adopted, never removed.
        """
        try:
            vm = make()
        except CommandError as error:
            if "already exists" not in error.stderr.lower() or "name" not in error.stderr.lower():
                raise
            return self._existing(entry, error)
        return vm if vm.running and vm.pid > 0 else self._ports.runtime.inspect(vm.id)

    def _existing(self, entry: TrackedPod, error: CommandError) -> VM:
        record = self._ports.runtime.inspect(entry.spec.vm_name)
        holder = self._pods.holder_of(record.id)
        if holder is not None and holder is not entry:
            raise SpecError(f"VM {record.name} belongs to pod {holder.key}; two pods cannot stand for one VM")
        if record.state == "creating":
            raise error  # somebody is still making it, or it is a leftover: not adopted, tried again later
        if not record.running:
            self._ports.runtime.start(record.id)
            record = self._ports.runtime.inspect(record.id)
        return record

    # --- lifecycle intent -----------------------------------------------------------------------------------------

    def _fail(self, entry: TrackedPod, reason: str, message: str) -> None:
        if self._pods.holds(entry) and not entry.deleting:
            entry.set_intent(IntentState.FAILED, message)
            self._ports.event(entry.pod, "Warning", reason, message[:512])
            self._publication.publish(entry)

    def _await_address(self, entry: TrackedPod, vm_id: str, budget: float | None, verb: str) -> None:
        """Ready intent needs an address that resolves, not a successful probe; without one yet, wait for it (T6)."""
        if self._address_resolves(entry):
            entry.set_intent(IntentState.READY)
        elif not entry.terminating:
            spawn(self._group, f"address {entry.key}", self._wait_for_address, entry, vm_id, budget, verb)

    def _wait_for_address(self, entry: TrackedPod, vm_id: str, budget: float | None, verb: str) -> None:
        began, failure = self._clock.monotonic(), ""
        while not self._clock.wait(entry.stop, ADDRESS_POLL):
            if not self._pods.holds(entry, vm_id) or entry.terminating:
                return
            if entry.intent.state is not IntentState.CREATING and entry.intent.message != (failure or None):
                return  # hibernating, or failed by something else: not ours to lift
            if self._address_resolves(entry):
                if not entry.set_intent(IntentState.READY):
                    entry.lift_failure()
                return self._publication.publish(entry)
            if not failure and budget is not None and self._clock.monotonic() - began >= budget:
                reason = "WakeIPWaitTimeout" if verb == "wake" else "PostCloneIPWaitTimeout"
                failure = f"{verb} {entry.spec.vm_name}: {NO_ADDRESS} within {budget:.0f}s"
                self._fail(entry, reason, failure)

    def _address_resolves(self, entry: TrackedPod) -> bool:
        with suppress(LeaseFileError):
            return bool(entry.vm and self._resolve(entry, entry.vm))
        return False

    # --- hibernate and wake ---------------------------------------------------------------------------------------

    def _apply_hibernate(self, entry: TrackedPod) -> None:
        """Bring the VM to where the hibernate annotation wants it; unmanaged pods are the operator's own business."""
        wanted = entry.spec.hibernate
        if not entry.spec.managed or entry.terminating or not self._pods.holds(entry):
            return
        if entry.spec.macos:
            self._refuse_macos_hibernate(entry)
        elif wanted and entry.vm is not None:
            self._hibernate(entry)
        elif not wanted and entry.hibernated:
            self._wake(entry)
        elif not wanted:
            self._lift_hibernate_failure(entry)

    def _hibernate(self, entry: TrackedPod) -> None:
        """Save the VM under its own name, take it away, forget the probe: in this order, published at each step."""
        vm, name = entry.vm, entry.spec.vm_name
        assert vm is not None
        entry.set_intent(IntentState.HIBERNATING)
        self._publication.publish(entry)
        try:
            with self._vm_lock(name):
                self._ports.runtime.snapshot_save(name, vm.id)
                self._destroy(vm.id)
        except CommandError as error:
            self._fail(entry, "HibernateSnapshotFailed", f"hibernate: {error}")
            raise
        if not self._pods.holds(entry, vm.id):
            return
        self._release_leases(vm)
        entry.vm, entry.ip, entry.hibernated = None, "", True
        self._stop_probe(entry)
        entry.set_intent(IntentState.HIBERNATED)
        self._ports.event(entry.pod, "Normal", "Hibernated", f"hibernate: {name} saved on this host")

    def _wake(self, entry: TrackedPod) -> None:
        """Clone the VM back from its snapshot; the new one has a new MAC, so nothing of the old address is kept."""
        entry.set_intent(IntentState.CREATING)
        self._publication.publish(entry)
        entry.ip = ""
        try:
            with self._vm_lock(entry.spec.vm_name):
                vm = self._cloned(entry, entry.spec.vm_name)
        except (SpecError, CommandError) as error:
            self._fail(entry, "WakeCloneFailed", f"wake: {error}")
            raise
        if self._pods.holds(entry) and not entry.deleting:
            self._bind(entry, vm, ADDRESS_BUDGET, "wake")
            self._ports.event(entry.pod, "Normal", "Woken", f"wake: {entry.spec.vm_name} cloned from its snapshot")

    def _lift_hibernate_failure(self, entry: TrackedPod) -> None:
        """A failed hibernate that is no longer asked for is lifted when the VM turns out to run; others stay."""
        vm, failed = entry.vm, entry.intent
        if vm is None or failed.state is not IntentState.FAILED or not failed.message.startswith("hibernate: "):
            return
        if self._ports.runtime.inspect(vm.id).running and self._pods.holds(entry, vm.id) and entry.intent is failed:
            entry.set_intent(IntentState.CREATING)
            self._await_address(entry, vm.id, None, "hibernate")

    def _refuse_macos_hibernate(self, entry: TrackedPod) -> None:
        if entry.spec.hibernate and entry.intent.message != HIBERNATE_UNSUPPORTED:
            self._fail(entry, "HibernateUnsupported", HIBERNATE_UNSUPPORTED)
        elif not entry.spec.hibernate and entry.intent.message == HIBERNATE_UNSUPPORTED:
            entry.set_intent(IntentState.CREATING)
            if entry.vm is not None:
                self._await_address(entry, entry.vm.id, None, "run")

    # --- taking a VM away -----------------------------------------------------------------------------------------

    def _remove_vm(self, entry: TrackedPod) -> None:
        """Remove by the id we bound, else by the name only this pod can have; leases go after the VM, never before."""
        if entry.spec.macos:
            return self._remove_macos(entry)
        vm = entry.vm
        if vm is None:
            with suppress(VMNotFound, SpecError):
                entry.spec.check_name()
                vm = self._ports.runtime.inspect(entry.spec.vm_name)
        if vm is not None and self._pods.holder_of(vm.id) in (None, entry):
            self._destroy(vm.id)
            self._release_leases(vm)
            entry.vm = None
        if not entry.spec.keep_snapshot:
            self._drop_snapshot(entry.spec.vm_name)
        return None

    def _remove_macos(self, entry: TrackedPod) -> None:
        name, vm = entry.spec.vm_name, entry.vm
        if vm is None:
            with suppress(CommandError):
                vm = self._ports.macos.inspect(name)  # only for its MAC; rm itself knows what is gone
        self._qemu.forget(f"qemu-{name}")
        with suppress(VMNotFound):
            self._ports.macos.remove(name)
        self._vnc.release(name)
        if vm is not None:
            self._release_leases(vm)
        entry.vm = None

    def _destroy(self, vm_id: str) -> None:
        with suppress(VMNotFound):  # already gone is what we want
            self._ports.runtime.remove(vm_id)

    def _drop_snapshot(self, name: str) -> None:
        try:
            self._ports.runtime.snapshot_remove(name)
        except SnapshotNotFound:
            return
        except CommandError as error:
            log.warning("snapshot could not be removed", snapshot=name, error=str(error))

    def _release_leases(self, vm: VM) -> None:
        """Best effort: an address that stays leased costs the pool one entry for a day, never the delete."""
        for nic in vm.nics:
            if nic.ip or not nic.mac:
                continue
            try:
                self._ports.release_lease(nic.mac, self._settings.cocoon_net_control_socket)
                self._ports.metrics.lease_release("ok")
            except LeaseReleaseError as error:
                self._ports.metrics.lease_release("failed")
                log.warning("lease could not be released", vm=vm.name, mac=nic.mac, error=str(error))

    # --- the probe ------------------------------------------------------------------------------------------------

    def _start_probe(self, entry: TrackedPod) -> None:
        if entry.terminating:  # P6
            return
        probe = self._macos_probe if entry.spec.macos else self._guest_probe
        entry.agent = self._probes.start(entry.key, partial(probe, entry), partial(self._on_update, entry))

    def _stop_probe(self, entry: TrackedPod) -> None:
        """Only its own agent: while the first probe still runs there is none to name, and the name must be ours."""
        if entry.agent is not None:
            self._probes.forget(entry.key, entry.agent)
            entry.agent = None
        elif self._pods.current(entry):
            self._probes.forget(entry.key)

    def _probe_of(self, entry: TrackedPod) -> ProbeResult:
        """The debounced result of the pod's own agent; nothing while its first probe still runs."""
        return self._probes.get(entry.key) if entry.agent is not None else ProbeResult()

    def _probed(self, agent: ProbeAgent, result: ProbeResult, lateness_s: float, took_s: float) -> None:
        self._ports.metrics.observe_probe(agent, result, lateness_s, took_s)
        self._ports.on_probe(agent, result, lateness_s, took_s)

    def _on_update(self, entry: TrackedPod) -> None:
        if self._pods.holds(entry):
            self._publication.publish(entry)

    def _guest_probe(self, entry: TrackedPod, deadline: Deadline) -> ProbeResult:
        """The three checks in their order: the VM is tracked, its address is current, it answers (clause 1)."""
        vm = entry.vm
        if vm is None or entry.gone:
            return ProbeResult(False, Reason.VM_GONE, f"VM {entry.spec.vm_name} no longer exists")
        return self._no_address(entry, vm) or self._reach.guest(entry.ip, entry.spec.annotations, deadline)

    def _macos_probe(self, entry: TrackedPod, deadline: Deadline) -> ProbeResult:
        """The same for macOS: the QEMU process first, and sshd's banner where no port is declared (clause 1, macOS)."""
        vm = entry.vm
        if vm is None or entry.gone:
            return ProbeResult(False, Reason.VM_GONE, f"VM {entry.spec.vm_name} no longer exists")
        if (dead := self._qemu.check(vm, self._owner(entry, vm))) is not None:
            return dead
        result = self._no_address(entry, vm) or self._reach.macos(entry.ip, entry.spec.annotations, deadline)
        if result.ready:
            self._qemu.succeeded(vm.id)
        return result

    def _no_address(self, entry: TrackedPod, vm: VM) -> ProbeResult | None:
        """None when the address is known and free to be published, else the failed probe that says what is missing."""
        try:
            ip = self._resolve(entry, vm)
        except LeaseFileError as error:
            return ProbeResult(False, Reason.LEASE_FILE_UNREADABLE, str(error))
        if not ip:
            conflict = self._leases.conflict(vm.mac, self._clock.now()) if vm.mac else ""
            return ProbeResult(False, Reason.WAITING_FOR_LEASE, conflict or f"waiting for DHCP lease of {vm.mac}")
        if (holder := self._publication.holder(entry, ip)) is not None:
            return self._publication.conflict(ip, holder)
        return None

    def _resolve(self, entry: TrackedPod, vm: VM) -> str:
        """The current address: static as inspected, else the lease of the MAC, re-read now and written back.

        Raises LeaseFileError only while there never was a readable lease file (L5); "" means no lease (L7).
        """
        if vm.static_ip:
            return vm.static_ip if is_unicast_ipv4(vm.static_ip) else ""
        if not entry.spec.managed:
            return entry.ip
        lease = self._leases.lookup(vm.mac, self._clock.now()) if vm.mac else None
        ip = lease.ip if lease is not None else ""
        if ip != entry.ip and not self.set_vm_ip(entry.key, vm.id, ip):
            return ""  # the pod has another VM by now
        return ip

    def _owner(self, entry: TrackedPod, vm: VM) -> Owner:
        display = self._vnc.reserved(vm.name)
        return Owner(partial(self._restart_wanted, entry, vm.id), partial(self._refresh_macos, entry, vm.id), display)

    def _restart_wanted(self, entry: TrackedPod, vm_id: str) -> bool:
        """M3: neither a pod that is going nor one whose lifecycle failed is restarted."""
        return self._pods.holds(entry, vm_id) and not entry.terminating and entry.intent.state is not IntentState.FAILED

    def _refresh_macos(self, entry: TrackedPod, vm_id: str, record: VM, restarted: bool) -> None:
        if not self._pods.holds(entry, vm_id):
            return
        entry.vm = record
        self._vnc.adopt(record.name, record.vnc)
        if restarted:
            entry.restarts += 1
            self._ports.metrics.qemu_restart("ok")
            self._ports.event(entry.pod, "Warning", "GuestRestarted", f"qemu of {record.name} was gone and restarted")
        self._publication.publish(entry)

    # --- start-up: what already runs ------------------------------------------------------------------------------

    def reconcile_startup(self) -> None:
        """Adopt the VMs of the pods bound to this node, each probed before it is published, all side by side.

        Raises ApiError or CommandError when either list could not be read whole; nothing was touched then. A pod whose
        VM is missing, half made or stopped is left to `create_pod`, which the controller calls for it anyway.
        """
        selector = f"spec.nodeName={self._settings.node_name}"
        pods, _ = list_all(self._ports.kube, "/api/v1/pods", field_selector=selector)
        records = self._ports.runtime.list()
        adoptions = Group()
        for pod in pods:
            if PodSpec.of(pod).vm_name and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                spawn(adoptions, f"adopt {pod_key(pod)}", self._adopt, pod, records)
        adoptions.join()
        names = {PodSpec.of(pod).vm_name for pod in pods}
        bound = {entry.vm.id for entry in self._pods if entry.vm is not None}
        for record in records:
            if record.id not in bound and record.name not in names:
                self._orphan(record)

    def _adopt(self, pod: Pod, records: list[VM]) -> None:
        entry = self._track(pod)
        if not entry.spec.managed:
            return self.create_pod(pod)
        vm = self._live_macos(entry) if entry.spec.macos else _record_of(entry, records)
        if vm is not None and entry.terminating:
            entry.vm = vm  # deletion was asked for while we were away: no probe (P6), delete_pod comes next
        elif vm is not None:
            self._bind(entry, vm, None, "adopt")
        elif not self._adopt_hibernated(entry):
            self._pods.drop(entry)  # nothing of it runs: `create_pod` will be called for it
        return None

    def _live_macos(self, entry: TrackedPod) -> VM | None:
        """A macOS guest that runs is adopted; on any doubt `create_pod` decides, which never runs a second one."""
        try:
            record = self._ports.macos.inspect(entry.spec.vm_name)
        except CommandError:
            return None
        return record if self._ports.macos.alive(record) else None

    def _adopt_hibernated(self, entry: TrackedPod) -> bool:
        """A hibernated pod has no VM on purpose; an interrupted hibernate is done when its snapshot is there."""
        if entry.terminating or entry.intent.state not in (IntentState.HIBERNATED, IntentState.HIBERNATING):
            return False
        if entry.intent.state is IntentState.HIBERNATING:
            try:
                self._ports.runtime.snapshot_inspect(entry.spec.vm_name)
            except CommandError:
                return False
        entry.hibernated = True
        entry.set_intent(IntentState.HIBERNATED)
        self._publication.publish(entry)
        return True

    def _orphan(self, record: VM) -> None:
        """A VM that no pod asks for: somebody's work, so only the policy that says so removes it (D1)."""
        self._ports.metrics.orphan()
        policy = self._settings.orphan_policy
        log.warning("VM belongs to no pod", vm=record.name, id=record.id, state=record.state, policy=policy)
        if policy != "destroy" or record.state == "creating":
            return
        try:
            self._destroy(record.id)
            self._release_leases(record)
        except CommandError as error:
            log.warning("orphan VM could not be removed", vm=record.name, error=str(error))

    # --- VMs that vanish behind our back --------------------------------------------------------------------------

    def watch_vms(self) -> None:
        """Follow the runtime's event stream until `close`; it starts over for ever, with a pause that grows."""
        pause = 1.0
        while not self._stopping.is_set():
            try:
                for event in self._ports.runtime.events():
                    self._saw(event.kind, event.vm)
                    pause = 1.0
                self._clock.wait(self._stopping, 2.0)
            except CommandError as error:
                log.warning("VM events interrupted", error=str(error), retry_seconds=pause)
                self._clock.wait(self._stopping, pause)
                pause = min(pause * 2, 60.0)

    def _saw(self, kind: str, vm: VM) -> None:
        """An event only makes us look: the stream reports every VM as deleted when it could not read its list."""
        for entry in self._pods:
            if entry.vm is None or entry.vm.id != vm.id or not entry.spec.managed or entry.spec.macos:
                continue
            if kind == "DELETED" and entry.intent.state is not IntentState.HIBERNATING and not entry.deleting:
                spawn(self._group, f"confirm {vm.name}", self._confirm_gone, entry, vm.id)
            elif kind != "DELETED":
                entry.gone = False

    def _confirm_gone(self, entry: TrackedPod, vm_id: str) -> None:
        try:
            self._ports.runtime.inspect(vm_id)
        except VMNotFound:
            if self._pods.holds(entry, vm_id) and not entry.deleting:
                entry.gone = True
                log.warning("VM is gone", pod=entry.key, vm=vm_id)
        except CommandError as error:
            log.info("VM could not be inspected", pod=entry.key, vm=vm_id, error=str(error))


def main(settings: Settings) -> int:
    """Run the daemon on this host until SIGTERM or SIGINT; the exit code of the process."""
    from vkcocoon_daemon import serve

    return serve(settings)


def _failed_for_good(intent: Intent) -> bool:
    """A failure that adoption leaves alone: every one but a missing address, which may have come meanwhile."""
    return intent.state is IntentState.FAILED and NO_ADDRESS not in intent.message


def _record_of(entry: TrackedPod, records: list[VM]) -> VM | None:
    """The running VM of a pod: by the id we wrote, else by its name (our annotation may never have arrived)."""
    annotations = entry.pod["metadata"].get("annotations") or {}
    running = [record for record in records if record.running]
    for wanted, attribute in ((annotations.get(ANNOTATION_ID), "id"), (entry.spec.vm_name, "name")):
        for record in running:
            if wanted and getattr(record, attribute) == wanted:
                return record
    return None
