"""The intent half of Ready: from a VM that runs to a pod that may be ready.

`bind` makes a VM a pod's own: its first probe, the wait for its address, its publication, in this order. A ready
intent needs an address that resolves, not a successful probe (T6); the wait for it is a greenlet of the pod's entry
and ends with it.
"""

from __future__ import annotations

from vkcocoon_ports import Workplace
from vkcocoon_probes import spawn
from vkcocoon_readiness import Readiness
from vkcocoon_status import Intent, IntentState
from vkcocoon_tracking import TrackedPod
from vkcocoon_vms import VM

__all__ = ["GuestSetup"]

ADDRESS_POLL = 0.2  # seconds between two looks for an address before the intent may be ready (T6)
ADDRESS_BUDGET = {"clone": 45.0, "wake": 45.0}  # then the wait is reported as failed, and goes on (T6)
NO_ADDRESS = "dhcp lease not observed"


class GuestSetup:
    """Binds VMs to pods and lets their intent become ready."""

    def __init__(self, work: Workplace, readiness: Readiness) -> None:
        self._work = work
        self._pods, self._publication = work.pods, work.publication
        self._readiness = readiness

    def bind(self, entry: TrackedPod, vm: VM, verb: str) -> None:
        """The pod has its VM: first probe, address, publication, in this order (clause 2 of the contract)."""
        entry.has(vm)
        entry.lost, entry.hibernated, entry.committed = "", False, True
        entry.ip = vm.static_ip or entry.ip
        if verb != "adopt" or not _failed_for_good(entry.intent):
            entry.set_intent(IntentState.CREATING)
        self._readiness.start(entry)
        if not self._pods.holds(entry, vm.id):
            return
        self.await_address(entry, vm.id, verb)
        self._publication.publish(entry)

    def await_address(self, entry: TrackedPod, vm_id: str, verb: str) -> None:
        """Ready intent needs an address that resolves, not a successful probe; without one yet, wait for it (T6)."""
        if self._readiness.has_address(entry):
            entry.set_intent(IntentState.READY)
        elif not entry.terminating:
            spawn(self._work.group, f"address {entry.key}", self._wait_for_address, entry, vm_id, verb)

    def _wait_for_address(self, entry: TrackedPod, vm_id: str, verb: str) -> None:
        clock, budget = self._work.clock, ADDRESS_BUDGET.get(verb)
        began, failure = clock.monotonic(), ""
        while not clock.wait(entry.stop, ADDRESS_POLL):
            if not self._pods.holds(entry, vm_id) or entry.terminating:
                return
            if entry.intent.state is not IntentState.CREATING and entry.intent.message != (failure or None):
                return  # hibernating, or failed by something else: not ours to lift
            if self._readiness.has_address(entry):
                if not entry.set_intent(IntentState.READY):
                    entry.lift_failure()
                return self._publication.publish(entry)
            if not failure and budget is not None and clock.monotonic() - began >= budget:
                reason = "WakeIPWaitTimeout" if verb == "wake" else "PostCloneIPWaitTimeout"
                failure = f"{verb} {entry.spec.vm_name}: {NO_ADDRESS} within {budget:.0f}s"
                self._publication.fail(entry, reason, failure)


def _failed_for_good(intent: Intent) -> bool:
    """A failure that adoption leaves alone: every one but those that a VM that runs and has an address disproves."""
    disproved = intent.message.startswith(("create: ", "wake: ")) or NO_ADDRESS in intent.message
    return intent.state is IntentState.FAILED and not disproved
