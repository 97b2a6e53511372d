"""VMs that stop or vanish behind our back: the runtime's event stream, and what is made of an event.

An event only makes us look: the stream reports every VM as deleted when it could not read its list.
"""

from __future__ import annotations

import structlog
from gevent.event import Event

from vkcocoon_ports import Workplace
from vkcocoon_probes import spawn
from vkcocoon_status import IntentState
from vkcocoon_tracking import TrackedPod
from vkcocoon_vms import VM, CommandError, VMNotFound

__all__ = ["VMWatch"]

log = structlog.get_logger()


class VMWatch:
    """Follows the event stream for as long as it is not stopped."""

    def __init__(self, work: Workplace) -> None:
        self._work = work
        self._pods = work.pods
        self._runtime = work.ports.runtime
        self._stopping = Event()

    def run(self) -> None:
        """Follow the runtime's event stream until `close`; it starts over for ever, with a pause that grows."""
        clock, pause = self._work.clock, 1.0
        while not self._stopping.is_set():
            try:
                for event in self._runtime.events():
                    self._saw(event.kind, event.vm)
                    pause = 1.0
                clock.wait(self._stopping, 2.0)
            except CommandError as error:
                log.warning("VM events interrupted", error=str(error), retry_seconds=pause)
                clock.wait(self._stopping, pause)
                pause = min(pause * 2, 60.0)

    def close(self) -> None:
        self._stopping.set()

    def _saw(self, kind: str, vm: VM) -> None:
        for entry in self._pods:
            if entry.vm is None or entry.vm.id != vm.id or not entry.spec.managed or entry.spec.macos:
                continue
            if kind == "DELETED" and entry.intent.state is not IntentState.HIBERNATING and not entry.deleting:
                spawn(self._work.group, f"confirm {vm.name}", self._confirm_gone, entry, vm.id)
            elif kind != "DELETED":
                entry.gone = False

    def _confirm_gone(self, entry: TrackedPod, vm_id: str) -> None:
        try:
            self._runtime.inspect(vm_id)
        except VMNotFound:
            if self._pods.holds(entry, vm_id) and not entry.deleting:
                entry.gone = True
                log.warning("VM is gone", pod=entry.key, vm=vm_id)
        except CommandError as error:
            log.info("VM could not be inspected", pod=entry.key, vm=vm_id, error=str(error))
