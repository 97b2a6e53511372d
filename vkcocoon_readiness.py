"""The probe half of Ready: what is asked of a guest on each tick, and which address it has.

    start            one agent of vkcocoon_probes per pod, asking `_guest_probe` or `_macos_probe`
    resolve          the address now: static as inspected, else the lease of the MAC, written back
    stop             when the pod is deleted, hibernated or replaced; only ever its own agent

Everything a probe changes is memory, and every result goes through `Publication.publish`. A dead QEMU is found here,
because nobody else can see it; restarting it is the keeper's business (vkcocoon_macos), outside of the probe's bound.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from vkcocoon_guests import Reach
from vkcocoon_macos import Owner, QemuKeeper, VncPorts
from vkcocoon_net import LeaseFile, LeaseFileError, is_unicast_ipv4
from vkcocoon_ports import Workplace
from vkcocoon_probes import Deadline, ProbeManager, ProbeResult
from vkcocoon_status import IntentState, Reason
from vkcocoon_tracking import TrackedPod
from vkcocoon_vms import VM

__all__ = ["Readiness"]

ADOPTION_PATIENCE = 1.0  # for a first readable lease file, while VMs are adopted
ADOPTION_LOOK = 0.05


class Readiness:
    """Starts and stops the probes of pods and knows where their guests are."""

    def __init__(self, work: Workplace, *, probes: ProbeManager, qemu: QemuKeeper, vnc: VncPorts) -> None:
        ports = work.ports
        self._work = work
        self._pods, self._publication = work.pods, work.publication
        self._probes = probes
        self._qemu = qemu
        self._vnc = vnc
        self._metrics = ports.metrics
        self._clock = work.clock
        self._leases = LeaseFile(work.settings.leases_path)
        self._reach = Reach(ports.pinger, ports.tcp_accepts, ports.ssh_banner)

    def start(self, entry: TrackedPod) -> None:
        """Probe the pod from now on, the first time before this returns (clause 2); not a pod that is going (P6)."""
        if entry.terminating:
            return
        probe = self._macos_probe if entry.spec.macos else self._guest_probe
        entry.agent = self._probes.start(entry.key, partial(probe, entry), partial(self._on_update, entry))

    def stop(self, entry: TrackedPod) -> None:
        """Only its own agent: while the first probe still runs there is none to name, and the name must be ours."""
        if entry.agent is not None:
            self._probes.forget(entry.key, entry.agent)
            entry.agent = None
        elif self._pods.current(entry):
            self._probes.forget(entry.key)

    def has_address(self, entry: TrackedPod) -> bool:
        """Can the pod's address be resolved now?"""
        with suppress(LeaseFileError):
            return bool(entry.vm and self.resolve(entry, entry.vm))
        return False

    def lease_trouble(self) -> str:
        """What is wrong with the lease file now; "" when it is a table."""
        return self._leases.trouble()

    def resolve(self, entry: TrackedPod, vm: VM) -> str:
        """The current address: static as inspected, else the lease of the MAC, re-read now; written back. A VM that was
        started again may have been given another static one.

        Raises LeaseFileError only while there never was a readable lease file (L5); "" means no lease (L7).
        """
        if ip := vm.static_ip:
            ip = ip if is_unicast_ipv4(ip) else ""
        elif entry.spec.managed:
            ip = self._leased(mac) if (mac := vm.mac) else ""
        else:
            return entry.ip
        if ip != entry.ip and not self.set_vm_ip(entry.key, vm.id, ip):
            return ""  # the pod has another VM by now
        return ip

    def _resolved(self, entry: TrackedPod, vm: VM) -> str:
        """As `resolve`. While its VM is adopted the pod is Ready for everybody: it does not blink for a lease file that
        is being written, or not yet there, as we start."""
        until = self._clock.monotonic() + (ADOPTION_PATIENCE if entry.adopting else 0.0)
        while True:
            try:
                return self.resolve(entry, vm)
            except LeaseFileError:
                if self._clock.monotonic() >= until:
                    raise
            self._clock.sleep(ADOPTION_LOOK)

    def _leased(self, mac: str) -> str:
        """The address of the lease, "" for none; counted."""
        now = self._clock.now()
        try:
            lease = self._leases.lookup(mac, now)
        except LeaseFileError:
            self._metrics.lease_lookup("unreadable")
            raise
        if lease is None:
            self._metrics.lease_lookup("conflict" if self._leases.conflict(mac, now) else "missing")
            return ""
        self._metrics.lease_lookup("found")
        return lease.ip

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

    def _on_update(self, entry: TrackedPod) -> None:
        if self._pods.holds(entry):
            self._publication.publish(entry)

    # --- what one probe does --------------------------------------------------------------------------------------

    def _guest_probe(self, entry: TrackedPod, deadline: Deadline) -> ProbeResult:
        """The three checks in their order: the VM is tracked, its address is current, it answers (clause 1)."""
        vm = entry.vm
        if vm is None or entry.gone:
            return ProbeResult(False, Reason.VM_GONE, entry.lost or f"the pod has no VM {entry.spec.vm_name}")
        return self._no_address(entry, vm) or self._reach.guest(entry.ip, entry.spec.annotations, deadline)

    def _macos_probe(self, entry: TrackedPod, deadline: Deadline) -> ProbeResult:
        """The same for macOS: the QEMU process first, and sshd's banner where no port is declared (clause 1, macOS)."""
        vm = entry.vm
        if vm is None or entry.gone:
            return ProbeResult(False, Reason.VM_GONE, entry.lost or f"the pod has no VM {entry.spec.vm_name}")
        if (dead := self._qemu.check(vm, self._owner(entry, vm))) is not None:
            return dead
        result = self._no_address(entry, vm) or self._reach.macos(entry.ip, entry.spec.annotations, deadline)
        if result.ready:
            self._qemu.succeeded(vm.id)
        return result

    def _no_address(self, entry: TrackedPod, vm: VM) -> ProbeResult | None:
        """None when the address is known and free to be published, else the failed probe that says what is missing."""
        try:
            ip = self._resolved(entry, vm)
        except LeaseFileError as error:
            return ProbeResult(False, Reason.LEASE_FILE_UNREADABLE, str(error))
        if not ip:
            if not vm.mac:
                return ProbeResult(False, Reason.WAITING_FOR_LEASE, f"VM {vm.name} has no network card")
            conflict = self._leases.conflict(vm.mac, self._clock.now())
            return ProbeResult(False, Reason.WAITING_FOR_LEASE, conflict or f"waiting for DHCP lease of {vm.mac}")
        if (holder := self._publication.holder(entry, ip)) is not None:
            return self._publication.conflict(ip, holder)
        return None

    # --- the QEMU of a macOS guest --------------------------------------------------------------------------------

    def _owner(self, entry: TrackedPod, vm: VM) -> Owner:
        return Owner(
            wanted=partial(self._restart_wanted, entry, vm.id),
            refresh=partial(self._refresh_macos, entry, vm.id),
            vnc=self._vnc.reserved(vm.name),
            failed=partial(self._metrics.qemu_restart, "failed"),
        )

    def _restart_wanted(self, entry: TrackedPod, vm_id: str) -> bool:
        """M3: neither a pod that is going nor one whose lifecycle failed is restarted; nor any while K11 forbids."""
        allowed = self._work.gate.is_set() and entry.intent.state is not IntentState.FAILED
        return allowed and self._pods.holds(entry, vm_id) and not entry.terminating

    def _refresh_macos(self, entry: TrackedPod, vm_id: str, record: VM, restarted: bool) -> None:
        if not self._pods.holds(entry, vm_id):
            return
        entry.has(record)
        self._vnc.adopt(record.name, record.vnc)
        if restarted:
            self._metrics.qemu_restart("ok")
            self._publication.restarted(entry, "GuestRestarted", f"qemu of {record.name} was gone and restarted")
        self._publication.publish(entry)
