"""The provider: pods on one side, virtual machines on the other, and the truth about them pushed to Kubernetes.

Kubernetes never asks. What this module does not hand to `notify` does not exist for the cluster, so every change of
what it knows ends in `Publication.publish`, the only place that builds a status.

Who runs here: the actor of a pod (vkcocoon_pods) calls create, update and delete, one at a time per pod. One probe
greenlet per pod (vkcocoon_probes) asks vkcocoon_readiness on each tick. Background greenlets of a pod (the wait for an
address, a QEMU restart) belong to its `TrackedPod` and end with it.

Who owns what: `TrackedPod` (vkcocoon_tracking) is one incarnation of a pod, keyed by UID. After every call that may
switch greenlets, `PodTable.holds` is asked again: still this incarnation, still this VM? What waits takes its time from
the clock in `Ports`. What is done to VMs has a room for each purpose: vkcocoon_creation, vkcocoon_setup,
vkcocoon_hibernation, vkcocoon_removal, vkcocoon_watch, vkcocoon_startup; docs/lifecycle.md has their steps. Start
reading at `Provider.create_pod`, then `Readiness._guest_probe`, then `Publication.publish`.
"""

from __future__ import annotations

import sys

_LOADED_TOO_EARLY = [name for name in ("kubernetes", "urllib3", "paramiko", "requests", "ssl") if name in sys.modules]

from gevent import monkey

if _LOADED_TOO_EARLY and not monkey.is_module_patched("socket"):
    raise ImportError(f"import vkcocoon before {', '.join(_LOADED_TOO_EARLY)}: it makes blocking calls cooperative")
monkey.patch_all()

from collections.abc import Set
from typing import Any

import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_creation import Creation
from vkcocoon_debts import Claims
from vkcocoon_guests import way_of
from vkcocoon_hibernation import Hibernation
from vkcocoon_macos import QemuKeeper, VncPorts
from vkcocoon_ports import Ports, Workplace
from vkcocoon_probes import ProbeAgent, ProbeManager, ProbeResult
from vkcocoon_readiness import Readiness
from vkcocoon_removal import Removal
from vkcocoon_settings import Settings
from vkcocoon_setup import GuestSetup
from vkcocoon_snapshots import Snapshots
from vkcocoon_spec import SpecError
from vkcocoon_startup import Startup
from vkcocoon_status import ANNOTATION_ID, ANNOTATION_VM_NAME, IntentState, NotOurs, Reason, copied
from vkcocoon_tracking import Notify, Pod, PodTable, Publication, TrackedPod, VMLocks
from vkcocoon_vms import VM, CommandError
from vkcocoon_watch import VMWatch

__all__ = ["Ports", "Provider", "__version__", "main"]
__version__ = "0.1.0"

log = structlog.get_logger()


class Provider:
    """Makes pods into VMs and says what became of them.

    Pods go in and out as dicts in the API's spelling. Commands that fail raise `CommandError`, orders that cannot be
    met raise `SpecError`, pods that ask for no VM raise `NotOurs`; the caller tries again when it thinks right.
    """

    def __init__(self, settings: Settings, ports: Ports) -> None:
        self._ports = ports
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
        claims = self._claims = Claims(settings.state_dir)
        self._publication.keep = lambda entry: claims.note(entry.uid, entry.claim) if entry.spec.managed else None
        work = self._work = Workplace(settings, ports, self._pods, self._publication, VMLocks(), Group(), claims)
        vnc = VncPorts(enabled=bool(settings.macos_vnc_password))
        qemu = QemuKeeper(ports.clock, ports.macos, lock=work.locks.held, group=work.group)
        self._readiness = Readiness(work, probes=self._probes, qemu=qemu, vnc=vnc)
        snapshots = Snapshots(work)
        setup = self._setup = GuestSetup(work, readiness=self._readiness, snapshots=snapshots)
        self._removal = Removal(work, snapshots=snapshots, qemu=qemu, vnc=vnc)
        self._creation = Creation(work, setup=setup, snapshots=snapshots, qemu=qemu, vnc=vnc)
        self._watch = VMWatch(
            work,
            removal=self._removal,
            readiness=self._readiness,
            snapshots=snapshots,
            restarted=self._restarted,
            recover=self._recover,
        )
        self._hibernation = Hibernation(
            work,
            creation=self._creation,
            removal=self._removal,
            setup=setup,
            readiness=self._readiness,
            snapshots=snapshots,
            look=self._watch.look,
        )
        self._startup = Startup(
            work,
            creation=self._creation,
            setup=setup,
            removal=self._removal,
            snapshots=snapshots,
            vnc=vnc,
            track=self._track,
        )
        ports.metrics.pods_from(lambda: self._pods)
        ports.metrics.leases_from(settings.leases_path, ports.clock)
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
        try:
            entry = self._settled(pod)
        except NotOurs as error:
            self._publication.withhold(pod, Reason.NOT_PROBED, f"the pod is not ours: {error}")
            raise
        if entry.vm is None and not entry.hibernated and not entry.terminating:
            if entry.intent.state is not IntentState.FAILED:  # a failed create stays visible until one succeeds
                entry.set_intent(IntentState.CREATING)
            if not self._may_be_alive(entry):
                self._publication.publish(entry)
            try:
                if not self._hibernation.recognized(entry):
                    self._creation.bring_up(entry)
            except (SpecError, CommandError) as error:
                reason = error.reason if isinstance(error, SpecError) else SpecError.reason
                self._publication.fail(entry, reason, f"create: {error}")
                raise
        self._hibernation.apply(entry)
        self._removal.release_earlier(entry)
        self._publication.publish(entry)

    def update_pod(self, pod: Pod) -> None:
        """Take the pod's new wishes: hibernate, wake, a newer generation; an unknown pod is created.

        Annotations that the probe reads (the probe port) take effect at its next tick (O2); an unmanaged pod that is
        pointed at another VM or address is probed there before it is published. Raises SpecError for one that is
        pointed at nothing: it stays with what it had.
        """
        if pod["metadata"]["uid"] not in self._pods:
            return self.create_pod(pod)
        entry = self._settled(pod)
        if entry.pointed and entry.spec.managed:
            self._startup.take_over(entry)
            entry = self._settled(pod)
        if entry.vm is None and not entry.hibernated:
            return self.create_pod(pod)
        if self._creation.points_elsewhere(entry):
            self._setup.bind(entry, self._creation.pointed_at(entry), "unmanaged")
        self._hibernation.apply(entry)
        self._removal.release_earlier(entry)
        return self._publication.publish(entry)

    def delete_pod(self, pod: Pod) -> None:
        """Take the VM away. Returns when it is gone or was never ours; raises CommandError while it may still exist.

        Publishes Terminating once, then the terminal status (K7). A pod we do not track may still have left a VM
        behind; that one goes too.
        """
        entry = self._pods.get(pod["metadata"]["uid"]) or self._incarnation(pod)
        self._begin_deletion(entry, pod)
        self._removal.remove(entry)
        self._pods.drop(entry)
        self._claims.note(entry.uid, None)
        self._publication.withdraw(entry)
        self._publication.terminal(entry)

    def _begin_deletion(self, entry: TrackedPod, pod: Pod) -> None:
        """Not Ready and no probe from the moment the deletion is known, whatever the pod's actor is busy with (P6)."""
        entry.update(pod)
        if not entry.deleting:
            if entry.uid in self._pods:
                self._publication.terminating(entry)
            entry.deleting = True
            if entry.adoption is not None:
                entry.adoption.set()
            self._readiness.stop(entry)

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
        """Write back the address of a pod's VM; refused (False) when the pod has another VM meanwhile. Memory only."""
        return self._readiness.set_vm_ip(key, vm_id, ip)

    def reconcile_startup(self) -> None:
        """Adopt the VMs of the pods bound to this node, each probed before it is published, all side by side.

        Returns when it is settled which VM is whose; the first probes go on, and hold up only their own pods. Raises
        ApiError or CommandError when either list could not be read whole; nothing was touched then.
        """
        self._startup.reconcile()

    def act_while(self, gate: Event) -> None:
        """From now on VMs that stop are restarted, or their pods given up, only while ``gate`` is set (K11)."""
        self._work.gate = gate

    def watch_vms(self) -> None:
        """Follow what happens to VMs behind our back, until `close`; those that were adopted are probed before."""
        self._startup.join()
        self._watch.run()

    def overdue_probes(self) -> list[tuple[str, float]]:
        """Pods whose probe should have come back long ago, and how many seconds ago it was due; memory only."""
        return self._probes.overdue()

    def lease_trouble(self) -> str:
        """What is wrong with the lease file now; "" when it is a table."""
        return self._readiness.lease_trouble()

    def close(self) -> None:
        """End every probe and background greenlet. VMs keep running; nothing is published any more."""
        self._watch.close()
        self._pods.close()
        self._probes.close()

    def _restarted(self, entry: TrackedPod) -> None:
        """Its VM was started in place; the caller holds the VM's lock. Raises CommandError."""
        if entry.vm is not None:
            self._setup.restarted(entry, entry.vm)
        if not entry.spec.hibernate:
            self._hibernation.lift_failure(entry)
        self._publication.publish(entry)

    def _recover(self, entry: TrackedPod, vm: VM) -> None:
        self._hibernation.recover(entry, vm)

    # --- tracking -------------------------------------------------------------------------------------------------

    def _settled(self, pod: Pod) -> TrackedPod:
        """The entry of the pod, once its first probe after our start came back, or its deletion began."""
        entry = self._track(pod)
        if entry.adoption is not None:
            self._ports.clock.wait(entry.adoption, None)
        return entry

    def _track(self, pod: Pod, vm_name: str = "") -> TrackedPod:
        """The entry of this incarnation with the newest pod in it. A namesake of another UID loses its claim (P3).
        ``vm_name``: of the VM that a pod which names none certainly has."""
        known = self._pods.get(pod["metadata"]["uid"])
        if known is not None:
            known.update(pod)
        fresh = known or self._incarnation(pod)
        if vm_name and not fresh.spec.vm_name:
            fresh.stays_with(vm_name, fresh.os)
        if not fresh.spec.vm_name:
            raise NotOurs(f"annotation {ANNOTATION_VM_NAME} is missing: it names the VM this pod stands for")
        if known is not None:
            return known
        if (former := self._pods.find(fresh.key)) is not None:
            log.warning("pod replaced by a namesake before its deletion was seen", pod=fresh.key, uid=former.uid)
            self._readiness.stop(former)
            self._pods.drop(former)
            self._publication.withdraw(former)
        self._pods.add(fresh)
        self._publication.seed(fresh)
        return fresh

    def _incarnation(self, pod: Pod) -> TrackedPod:
        """As the API has it, and as an earlier life of ours has left it on this host."""
        entry = TrackedPod.of(pod)
        if claim := self._claims.get(entry.uid):
            entry.inherits(claim)
        return entry

    def _may_be_alive(self, entry: TrackedPod) -> bool:
        """Was this pod published with a VM before? Then adoption speaks first, so that it does not blink Not Ready."""
        return bool((entry.pod["metadata"].get("annotations") or {}).get(ANNOTATION_ID))

    def _probe_of(self, entry: TrackedPod) -> ProbeResult:
        """The debounced result of the pod's own agent; nothing while its first probe still runs."""
        return self._probes.get(entry.key) if entry.agent is not None else ProbeResult()

    def _probed(self, agent: ProbeAgent, result: ProbeResult, lateness_s: float, took_s: float) -> None:
        entry = self._pods.find(agent.key)
        kind = way_of(entry.spec).partition(" ")[0] if entry is not None else "icmp"
        self._ports.metrics.observe_probe(kind, result, lateness_s, took_s)
        self._ports.on_probe(agent, result, lateness_s, took_s)


def main(settings: Settings) -> int:
    """Run the daemon on this host until SIGTERM or SIGINT; the exit code of the process."""
    from vkcocoon_service import serve

    return serve(settings)
