"""macOS guests: bringing one up from its record, the restart of a dead QEMU, VNC ports.

A macOS guest is a QEMU process that nobody but us watches: ``cocoon-macos`` keeps a record and no daemon, and a guest
that reboots makes its QEMU exit. So whoever probes the guest is the only one to notice, and restarts the record in
place. Two rules stand above everything else here: never two QEMUs on one disk, and never ``vm rm`` on doubt. Both are
kept by starting only through ``vm start`` (which adopts what still runs), under a lock per VM that create, restart and
delete share, and by treating an inspect that failed as no evidence at all.

A restart runs in a greenlet of its own, because a cold start takes longer than any probe may; the probe only asks for
it and reports what it sees. Called by the provider; knows no pod and no Kubernetes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import structlog
from gevent.pool import Group

from vkcocoon_probes import Clock, ProbeResult, spawn
from vkcocoon_quantity import whole_number
from vkcocoon_status import Reason, format_time
from vkcocoon_vms import VM, CocoonMacosCLI, CommandError, MacosSpec, NameTaken, VMNotFound

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "VNC_BASE", "Owner", "QemuKeeper", "VncPorts"]

FIRST_PAUSE = 10.0  # seconds between the starts of two restarts (T5)
LONGEST_PAUSE = 300.0  # a guest that dies at once every time costs twelve starts an hour
REINSPECT_PAUSE = 10.0  # a record without a MAC is read again this often
VNC_BASE = 5900
VNC_DISPLAYS = 100

log = structlog.get_logger()


@dataclass(slots=True)
class _Guest:
    """What the keeper remembers of one VM; forgotten with the pod, so that a namesake starts afresh."""

    name: str
    pause: float = FIRST_PAUSE
    next_at: float = 0.0  # monotonic; 0 = never tried
    due: str = ""  # the same for people, worked out once: two clocks are never read in one instant (P7)
    inspect_at: float = 0.0
    working: bool = False
    forgotten: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """What the pod's owner lends the keeper for one VM. Both calls only change memory and never switch greenlets."""

    wanted: Callable[[], bool]  # still this pod, still this VM, not being deleted, not failed (M3)
    refresh: Callable[[VM, bool], None]  # the record as inspected; True = a new QEMU was started
    vnc: int = -1  # the display to give again: a start without it turns VNC off
    failed: Callable[[], None] = lambda: None  # a restart was tried in vain


class QemuKeeper:
    """Keeps the QEMU of every macOS guest alive: at most one restart in flight per VM, rate-limited per VM (T5)."""

    def __init__(
        self, clock: Clock, cli: CocoonMacosCLI, *, lock: Callable[[str], AbstractContextManager[object]], group: Group
    ) -> None:
        self._clock = clock
        self._cli = cli
        self._lock = lock
        self._group = group
        self._guests: dict[str, _Guest] = {}

    def bring_up(
        self, spec: MacosSpec, *, ran: bool = False, begins: Callable[[], None] = lambda: None
    ) -> tuple[VM, str]:
        """The VM of that name: adopted when there is a record of it, else run.

        A record without a process is started. But a guest that ``ran`` before has died: whoever probes it finds that,
        and restarts it as at any other time, counted and within its limits (T5, M3).

        ``begins`` is called before one is run. Returns the record and what was done: `adopt`, `start` or `run`. The
        caller holds the VM's lock. Raises CommandError; an inspect that fails otherwise than by "not found" ends here,
        because it proves nothing.
        """
        try:
            record = self._cli.inspect(spec.name)
        except VMNotFound:
            self._cli.ensure_image(spec.image)
            begins()
            try:
                return self._cli.run(spec), "run"
            except NameTaken:  # by a run that an earlier life of ours had begun
                record, ran = self._cli.inspect(spec.name), False
        if ran or self._cli.alive(record):
            return record, "adopt"
        self._cli.start(spec.name, spec.vnc)
        return self._cli.inspect(spec.name), "start"

    def missing(self, name: str) -> bool:
        """Does the tool itself say that there is no record of that VM? A look that fails says nothing."""
        try:
            self._cli.inspect(name)
        except VMNotFound:
            return True
        except CommandError:
            return False
        return False

    def check(self, vm: VM, owner: Owner) -> ProbeResult | None:
        """None while the process is alive and its MAC is known, else the failed probe; asks for the restart or the
        re-inspection that is due. Never blocks: called from the probe."""
        guest = self._guests.setdefault(vm.id, _Guest(vm.name))
        try:
            if not self._cli.alive(vm):
                return self._dead(guest, vm, owner)
        except CommandError as error:
            return ProbeResult(False, Reason.PROBE_ERROR, f"whether qemu of {vm.name} runs is not known: {error}")
        if vm.mac:
            return None
        if not guest.working and self._clock.monotonic() >= guest.inspect_at:
            guest.inspect_at = self._clock.monotonic() + REINSPECT_PAUSE
            self._work(guest, "inspect", self._reinspect, guest, owner)
        return ProbeResult(False, Reason.WAITING_FOR_LEASE, f"waiting for the record of {vm.name} to name its MAC")

    def succeeded(self, vm_id: str) -> None:
        """The guest's probe succeeded: the next death is the first one again (T5)."""
        if guest := self._guests.get(vm_id):
            guest.pause, guest.next_at = FIRST_PAUSE, 0.0

    def forget(self, vm_id: str) -> None:
        """The pod is going: no restart begins any more; one in flight holds the VM's lock, which delete waits for."""
        if guest := self._guests.pop(vm_id, None):
            guest.forgotten = True

    def _dead(self, guest: _Guest, vm: VM, owner: Owner) -> ProbeResult:
        now = self._clock.monotonic()
        if not guest.working and now >= guest.next_at and owner.wanted():
            guest.next_at = now + guest.pause
            guest.due = format_time(self._clock.now() + timedelta(seconds=guest.pause))
            guest.pause = min(guest.pause * 2, LONGEST_PAUSE)
            self._work(guest, "restart", self._restart, guest, owner)
        if guest.working:
            return ProbeResult(False, Reason.QEMU_RESTARTING, f"qemu of {vm.name} is gone; restarting it in place")
        if not owner.wanted():
            return ProbeResult(False, Reason.QEMU_DEAD, f"qemu of {vm.name} is gone; its lifecycle forbids a restart")
        return ProbeResult(False, Reason.QEMU_DEAD, f"qemu of {vm.name} is gone; next restart not before {guest.due}")

    def _work(self, guest: _Guest, verb: str, function: Callable[..., None], *args: object) -> None:
        guest.working = True
        spawn(self._group, f"{verb} {guest.name}", function, *args)

    def _restart(self, guest: _Guest, owner: Owner) -> None:
        """Adopt what still runs, else start the record (M2). What changed meanwhile is asked again after the lock."""
        try:
            with self._lock(guest.name):
                if guest.forgotten or not owner.wanted():
                    return
                record = self._cli.inspect(guest.name)
                started = not self._cli.alive(record)
                if started:
                    self._cli.start(guest.name, owner.vnc)
                    record = self._cli.inspect(guest.name)
                if not guest.forgotten:
                    owner.refresh(record, started)
        except CommandError as error:
            log.warning("macOS guest could not be restarted", vm=guest.name, error=str(error))
            owner.failed()
        finally:
            guest.working = False

    def _reinspect(self, guest: _Guest, owner: Owner) -> None:
        try:
            record = self._cli.inspect(guest.name)
            if record.mac and not guest.forgotten:
                owner.refresh(record, False)
        except CommandError as error:
            log.info("macOS record could not be read", vm=guest.name, error=str(error))
        finally:
            guest.working = False


class VncPorts:
    """Display numbers of this node, each given to one VM at a time; -1 when VNC is off or none is free."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._display: dict[str, int] = {}

    def claim(self, vm_name: str, preferred_port: str = "") -> int:
        """The display of that VM: the one it has, else the one of its published port when free, else the lowest."""
        if not self._enabled:
            return -1
        if vm_name not in self._display:
            taken = set(self._display.values())
            wish = (whole_number(preferred_port, digits=5) or 0) - VNC_BASE
            free = [wish, *range(VNC_DISPLAYS)] if 0 <= wish < VNC_DISPLAYS else [*range(VNC_DISPLAYS)]
            display = next((number for number in free if number not in taken), -1)
            if display < 0:
                return -1
            self._display[vm_name] = display
        return self._display[vm_name]

    def reserved(self, vm_name: str) -> int:
        """The display that VM has, -1 for none."""
        return self._display.get(vm_name, -1)

    def adopt(self, vm_name: str, display: int) -> None:
        """A live guest keeps the display it has; one without VNC frees its reservation."""
        if display < 0:
            self.release(vm_name)
        else:
            self._display[vm_name] = display

    def release(self, vm_name: str) -> None:
        self._display.pop(vm_name, None)
