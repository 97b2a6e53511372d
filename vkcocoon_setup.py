"""The intent half of Ready: from a VM that runs to a pod that may be ready.

    bind            the VM is the pod's: first probe, set-up or address, publication, in this order
    adopt           the same beside whoever calls, for one that runs when we start
    set-up          what a guest cannot know by itself after a clone, told to it over `cocoon vm exec` until it took it
    address         a ready intent needs one that resolves, not a successful probe (T6)

A clone goes on where its snapshot stood. Most of them find their new network card and ask DHCP; three kinds do not:
one with a static address believes in the old one, one on Firecracker still uses the MAC of its source, and Windows
reads no address that it was not given. They are reachable before they are themselves, so their pods are not ready.

Both waits are greenlets of the pod's entry and end with it. Their state stands on the pod, so that a restart of the
daemon goes on with what is owed. The saved state a VM woke from is dropped before its pod is ready: from then on there
is a newer one.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group

from vkcocoon_ports import EARLIER_LIFE, Workplace
from vkcocoon_probes import spawn
from vkcocoon_readiness import Readiness
from vkcocoon_snapshots import Snapshots
from vkcocoon_status import Intent, IntentState
from vkcocoon_tracking import SetupState, TrackedPod
from vkcocoon_vms import VM, CommandError, VMNotFound

__all__ = ["GuestSetup", "hibernating"]

ADDRESS_POLL = 0.2  # seconds between two looks for an address before the intent may be ready (T6)
ADDRESS_BUDGET = {"clone": 45.0, "wake": 45.0}  # then the wait is reported as failed, and goes on (T6)
FOUND = ("adopt", "restart")  # how a pod comes to a VM that was made before: it ran, or was started again
RENEW_AFTER = 30.0  # a Windows clone that has no address by then is told to ask again
INTERRUPTED = "hibernate: an attempt that was interrupted may still be under way"
NO_ADDRESS = "dhcp lease not observed"
DROP_AGAIN = 60.0

SETUP_PAUSE = 3.0  # the agent inside a guest starts when it starts
SETUP_BUDGET = 180.0
EXEC_LIMIT = 30.0
GUESTS_AT_ONCE = 4  # commands in guests that hang must leave room for those that ask about VMs
LONGEST_ERRORS = 4096

# One guest's network card, found by its MAC; where the guest still has another one, the first real card gets it.
LINUX_SCRIPT = """\
set -eu
net=${NET:-/sys/class/net}
dev=
for path in "$net"/*; do
  if [ "$(cat "$path/address")" = "$MAC" ]; then dev=${path##*/}; fi
done
if [ -z "$dev" ]; then
  for path in "$net"/*; do
    if [ -e "$path/device" ]; then dev=${path##*/}; break; fi
  done
  if [ -z "$dev" ]; then echo "no network card to give the MAC $MAC to" >&2; exit 1; fi
  ip link set dev "$dev" down
  ip link set dev "$dev" address "$MAC"
fi
ip link set dev "$dev" up
if [ -n "$IP" ]; then
  ip -4 address flush dev "$dev"
  ip address add "$IP/$PREFIX" dev "$dev"
  if [ -n "$GATEWAY" ]; then ip route replace default via "$GATEWAY" dev "$dev"; fi
else
  ip -4 address flush dev "$dev"
  networkctl renew "$dev" 2>/dev/null || dhclient -1 "$dev" 2>/dev/null || udhcpc -n -q -i "$dev" 2>/dev/null \\
    || dhcpcd -n "$dev" 2>/dev/null || nmcli device reapply "$dev"
fi
"""
WINDOWS_SCRIPT = """\
$ErrorActionPreference = 'Stop'
$card = Get-NetAdapter | Where-Object { $_.MacAddress -replace '-', ':' -eq $env:MAC }
if (-not $card) { throw "no network card has the MAC $env:MAC" }
$given = @{ InterfaceIndex = $card.ifIndex; IPAddress = $env:IP; PrefixLength = [int]$env:PREFIX }
if ($env:GATEWAY) { $given.DefaultGateway = $env:GATEWAY }
Get-NetIPAddress -InterfaceIndex $card.ifIndex -AddressFamily IPv4 -ErrorAction SilentlyContinue |
  Remove-NetIPAddress -Confirm:$false
Get-NetRoute -InterfaceIndex $card.ifIndex -DestinationPrefix '0.0.0.0/0' -ErrorAction SilentlyContinue |
  Remove-NetRoute -Confirm:$false
New-NetIPAddress @given | Out-Null
"""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Task:
    """What a guest is told: `kind` for people and metrics, the command and its environment."""

    kind: str
    command: Sequence[str]
    env: Mapping[str, str]

    @property
    def hint(self) -> str:
        """The same for a person inside the guest, as text that survives an annotation."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        if self.kind == "windows":
            lines = [f"$env:{name} = '{value}'" for name, value in self.env.items()]
        return base64.b64encode("\n".join([*lines, self.command[-1]]).encode()).decode()


class GuestSetup:
    """Binds VMs to pods and lets their intent become ready."""

    def __init__(self, work: Workplace, *, readiness: Readiness, snapshots: Snapshots) -> None:
        self._work = work
        self._pods, self._publication = work.pods, work.publication
        self._runtime, self._metrics = work.ports.runtime, work.ports.metrics
        self._readiness = readiness
        self._snapshots = snapshots
        self._guests = BoundedSemaphore(GUESTS_AT_ONCE)
        self._began = work.clock.monotonic()

    def bind(self, entry: TrackedPod, vm: VM, verb: str) -> None:
        """The pod has its VM: first probe, set-up or address, publication, in this order (clause 2 of the contract)."""
        self._bring_in(entry, vm, verb, self._take(entry, vm, verb))

    def adopt(self, entry: TrackedPod, vm: VM, verb: str, beside: Group) -> None:
        """The same for a VM that runs already. It is the pod's when this returns, and the rest is done in a greenlet of
        ``beside``: until the first probe came back the pod is neither published nor acted upon. Memory only."""
        entry.adoption = Event()
        spawn(beside, f"adopt {entry.key}", self._bring_in, entry, vm, verb, self._take(entry, vm, verb))

    def _take(self, entry: TrackedPod, vm: VM, verb: str) -> _Task | None:
        """From now on the VM is the pod's. What its guest is owed."""
        task, entry.woken = self._task(entry, vm, verb), self._has_woken(entry, verb)
        # The next life must know it as well: what was saved may turn up, or be what the VM is removed for.
        message = INTERRUPTED if verb in FOUND and hibernating(entry.intent) else ""
        entry.has(vm)
        entry.lost, entry.hibernated, entry.committed, entry.pointed = "", False, True, verb == "unmanaged"
        entry.ip = vm.static_ip or entry.ip
        if verb not in FOUND:
            entry.setup = SetupState()
        if verb not in FOUND or not _failed_for_good(entry.intent):
            entry.set_intent(IntentState.CREATING, message)
        return task

    def _bring_in(self, entry: TrackedPod, vm: VM, verb: str, task: _Task | None) -> None:
        try:
            self._readiness.start(entry)
        finally:
            if entry.adoption is not None:
                entry.adoption.set()
        if not self._pods.holds(entry, vm.id):
            return
        self._go_on(entry, vm, verb, task)
        self._publication.publish(entry)

    def restarted(self, entry: TrackedPod, vm: VM) -> None:
        """The VM was booted again: what was only told to it while it ran is to be told again."""
        if entry.setup.state in ("running", "done") and vm.static_ip and entry.intent.state is not IntentState.FAILED:
            entry.set_intent(IntentState.CREATING)
            self._go_on(entry, vm, "restart", _task_for(_kind(entry.spec.os, vm, cloned=True), vm))
            self._publication.publish(entry)

    def await_address(self, entry: TrackedPod, vm_id: str, verb: str) -> None:
        """Ready intent needs an address that resolves, not a successful probe; without one yet, wait for it (T6)."""
        if not entry.woken and self._readiness.has_address(entry):
            entry.set_intent(IntentState.READY)
        elif not entry.terminating:
            spawn(self._work.group, f"address {entry.key}", self._wait_for_address, entry, vm_id, verb)

    def _go_on(self, entry: TrackedPod, vm: VM, verb: str, task: _Task | None) -> None:
        if task is None or entry.terminating:
            self.await_address(entry, vm.id, verb)
        elif entry.intent.state is IntentState.CREATING:
            entry.setup = SetupState("running")
            spawn(self._work.group, f"set up {entry.key}", self._set_up, entry, vm, verb, task)

    def _has_woken(self, entry: TrackedPod, verb: str) -> bool:
        """Is there a saved state of this VM that it has left behind? A wake that was interrupted is one, too, and a
        hibernate that was and is no longer wanted."""
        interrupted = hibernating(entry.intent)
        if verb not in FOUND or not entry.spec.managed or (entry.intent.state is IntentState.READY and not interrupted):
            return verb == "wake"
        if interrupted:
            self._snapshots.suspect(entry.spec.vm_name)
        return not entry.spec.hibernate and entry.spec.vm_name in self._snapshots

    # --- set-up ---------------------------------------------------------------------------------------------------

    def _task(self, entry: TrackedPod, vm: VM, verb: str) -> _Task | None:
        """What the guest is owed: one that was made before only what an earlier life of ours did not finish, and one
        that was booted again what it forgot by that."""
        if not entry.spec.managed or entry.spec.macos:
            return None
        cloned = verb in ("clone", "wake")
        if verb in FOUND:
            unfinished = entry.setup.state == "running" or (not entry.setup.state and not entry.intent.ready)
            forgotten = verb == "restart" and entry.setup.state == "done" and bool(vm.static_ip)
            if not unfinished and not forgotten:
                return None
            cloned = not entry.spec.run_mode or entry.spec.vm_name in self._snapshots or bool(entry.setup.state)
            if entry.setup.state == "running":
                self._work.ports.event(entry.pod, "Normal", "ResumedAfterRestart", "the set-up of the guest goes on")
        return _task_for(_kind(entry.spec.os, vm, cloned=cloned), vm)

    def _set_up(self, entry: TrackedPod, vm: VM, verb: str, task: _Task) -> None:
        clock, said = self._work.clock, ""
        until = clock.monotonic() + SETUP_BUDGET
        while self._is_creating(entry, vm.id):
            error = self._attempt(vm, task, until - clock.monotonic())
            if not self._is_creating(entry, vm.id):
                return
            if not error:
                return self._succeeded(entry, vm, verb, task)
            if clock.monotonic() + SETUP_PAUSE >= until:
                return self._exhausted(entry, vm, verb, task, error)
            if error != said:
                said, entry.setup = error, SetupState("running", errors=error[-LONGEST_ERRORS:])
                self._work.ports.event(entry.pod, "Warning", "PostCloneExecAttemptFailed", f"{verb} {vm.name}: {error}")
                self._publication.publish(entry)
            clock.wait(entry.stop, SETUP_PAUSE)

    def _is_creating(self, entry: TrackedPod, vm_id: str) -> bool:
        """Asked after every wait: is this still ours to finish? A hibernate, a deletion or another VM ends it."""
        ours = self._pods.holds(entry, vm_id) and not entry.terminating and not entry.gone
        return ours and entry.intent.state is IntentState.CREATING

    def _attempt(self, vm: VM, task: _Task, left: float) -> str:
        """Tell the guest once; "" when it took it, else what was said instead."""
        try:
            with self._guests:
                limit = min(EXEC_LIMIT, max(left, 1.0))
                completed = self._runtime.exec(vm.id, task.command, env=task.env, limit=limit)
        except CommandError as error:
            return str(error)
        if completed.returncode == 0:
            return ""
        lines = (completed.stderr.strip() or completed.stdout.strip()).splitlines()
        return lines[-1] if lines else f"exit {completed.returncode}"

    def _succeeded(self, entry: TrackedPod, vm: VM, verb: str, task: _Task) -> None:
        self._metrics.guest_setup(task.kind, "ok")
        entry.setup = SetupState("done")
        self._work.ports.event(entry.pod, "Normal", "PostCloneSucceeded", f"{verb} {vm.name}: the guest is set up")
        self.await_address(entry, vm.id, verb)
        self._publication.publish(entry)

    def _exhausted(self, entry: TrackedPod, vm: VM, verb: str, task: _Task, error: str) -> None:
        """Nobody but a new attempt lifts this: a guest that answers is not yet itself."""
        self._metrics.guest_setup(task.kind, "failed")
        entry.setup = SetupState("failed", hint=task.hint, errors=error[-LONGEST_ERRORS:])
        message = f"{verb} {vm.name}: the guest could not be set up within {SETUP_BUDGET:.0f}s: {error}"
        self._publication.fail(entry, "PostCloneExecExhausted", message)

    # --- address --------------------------------------------------------------------------------------------------

    def _wait_for_address(self, entry: TrackedPod, vm_id: str, verb: str) -> None:
        clock, budget = self._work.clock, ADDRESS_BUDGET.get(verb)
        began, failure, nudged = clock.monotonic(), "", False
        while self._pods.holds(entry, vm_id) and not entry.terminating and not entry.gone:
            if not self._awaits(entry, vm_id, failure):
                return  # hibernating, or failed by something else: not ours to lift
            if self._readiness.has_address(entry):
                return self._arrived(entry, vm_id, verb, failure)
            waited = clock.monotonic() - began
            if not nudged and budget is not None and waited >= RENEW_AFTER and entry.spec.os == "windows":
                nudged = True
                spawn(self._work.group, f"renew {entry.key}", self.renew, vm_id)
            if not failure and budget is not None and waited >= budget:
                reason = "WakeIPWaitTimeout" if verb == "wake" else "PostCloneIPWaitTimeout"
                failure = f"{verb} {entry.spec.vm_name}: {NO_ADDRESS} within {budget:.0f}s"
                self._publication.fail(entry, reason, failure)
            if clock.wait(entry.stop, ADDRESS_POLL):
                return

    def _arrived(self, entry: TrackedPod, vm_id: str, verb: str, failure: str) -> None:
        if entry.woken:
            with self._work.locks.held(entry.spec.vm_name):
                # A hibernate that has begun meanwhile may just have saved under this name.
                if not self._awaits(entry, vm_id, failure) or not self._left_behind(entry, vm_id, verb):
                    return
            if not self._awaits(entry, vm_id, failure):
                return
        message = INTERRUPTED if hibernating(entry.intent) and entry.spec.vm_name in self._snapshots else ""
        if not entry.set_intent(IntentState.READY, message):
            entry.lift_failure()
        self._publication.publish(entry)

    def _awaits(self, entry: TrackedPod, vm_id: str, failure: str) -> bool:
        """Is the pod still where the wait for its address left it?"""
        waiting = entry.intent.state is IntentState.CREATING or entry.intent.message == (failure or None)
        return self._pods.holds(entry, vm_id) and waiting and not entry.terminating and not entry.gone

    def _left_behind(self, entry: TrackedPod, vm_id: str, verb: str) -> bool:
        """Drop the state a VM woke from; that of an adopted one only when nothing an earlier life began is going on
        with it any more, for it may be what the VM is being removed for. False: the VM is gone.

        A removal that has not got to the VM yet cannot be waited for: the state stays for as long as there may be one.
        """
        try:
            if verb in FOUND:
                self._runtime.start(vm_id)  # changes nothing of a VM that runs, and waits for its turn
            if verb in FOUND and hibernating(entry.intent):
                spawn(self._work.group, f"drop the state of {entry.key}", self._drop_outlived, entry, vm_id)
            else:
                self._snapshots.drop(entry.spec.vm_name)
        except VMNotFound:
            return False  # whoever watches the VMs finds it gone, and the state there
        except CommandError as error:
            log.warning("the state a VM woke from could not be dropped", pod=entry.key, error=str(error))
        entry.woken = False
        return True

    def _drop_outlived(self, entry: TrackedPod, vm_id: str) -> None:
        """Drop what was saved of a VM that an earlier life was about to remove, when no command of it can be left. A
        hibernate that comes meanwhile replaces it, and ends this wait."""
        clock, pause = self._work.clock, self._began + EARLIER_LIFE - self._work.clock.monotonic()
        while not clock.wait(entry.stop, max(pause, DROP_AGAIN)):
            pause = DROP_AGAIN
            with self._work.locks.held(entry.spec.vm_name):
                if not self._pods.holds(entry, vm_id) or entry.terminating or not hibernating(entry.intent):
                    return
                if entry.intent.state is IntentState.READY and self._outlived(entry, vm_id):
                    break
        if self._pods.holds(entry, vm_id) and entry.intent.ready:
            entry.set_intent(IntentState.READY)
            self._publication.publish(entry)

    def _outlived(self, entry: TrackedPod, vm_id: str) -> bool:
        try:
            self._runtime.start(vm_id)  # a VM that is gone by now was removed for the sake of this state
            self._snapshots.drop(entry.spec.vm_name)
        except CommandError as error:
            log.warning("what was saved of a VM that runs stays for now", pod=entry.key, error=str(error))
            return False
        return True

    def renew(self, vm_id: str) -> None:
        """Tell a Windows guest to ask DHCP again. Best effort."""
        with suppress(CommandError):
            self._runtime.exec(vm_id, ["ipconfig", "/renew"], limit=EXEC_LIMIT)


def hibernating(intent: Intent) -> bool:
    """May a command of a hibernate that an earlier life began be under way? Its VM, found running, is creating, then
    ready."""
    found = intent.state in (IntentState.CREATING, IntentState.READY) and intent.message == INTERRUPTED
    return found or intent.state is IntentState.HIBERNATING


def _kind(os: str, vm: VM, *, cloned: bool) -> str:
    """Which set-up a guest needs; "" for none."""
    if os == "windows":
        return "windows" if vm.static_ip else ""
    if not cloned:
        return ""  # it boots, and is told by what it boots with
    if vm.hypervisor == "firecracker":
        return "linux_fc"
    return "linux_static" if vm.static_ip else ""


def _task_for(kind: str, vm: VM) -> _Task | None:
    if not kind or not vm.nics:
        return None
    nic = vm.nics[0]
    prefix = str(nic.prefix or 24) if nic.ip else ""
    env = {"MAC": nic.mac.lower(), "IP": nic.ip, "PREFIX": prefix, "GATEWAY": nic.gateway}
    # They come from the tool's record and go to a shell.
    env = {name: re.sub(r"[^0-9a-f.:]", "", value) for name, value in env.items()}
    if kind == "windows":
        command = ["powershell", "-NoProfile", "-NonInteractive", "-Command", WINDOWS_SCRIPT]
    else:
        command = ["sh", "-c", LINUX_SCRIPT]
    return _Task(kind, command, env)


def _failed_for_good(intent: Intent) -> bool:
    """A failure that adoption leaves alone: every one but those that a VM that runs and has an address disproves."""
    disproved = intent.message.startswith(("create: ", "wake: ")) or NO_ADDRESS in intent.message
    return intent.state is IntentState.FAILED and not disproved
