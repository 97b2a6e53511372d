"""One guest looked at by hand, stage by stage, as its probe would look at it: what `vk-cocoon probe` shows.

The stages are the probe's checks in their order: the pod, its VM, its address, its answer. Each takes its time and
says what it found with the reason the pod's condition would have. A stage that fails is the last one, because the
probe goes no further either.

Nothing here talks to the daemon or changes anything: the pod is read from the API, the VM from its command line, the
lease from the file, and an echo is sent from a socket of our own. The command line calls this; `Tools` is what it
lends, so that a test can lend something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vkcocoon_guests import Reach
from vkcocoon_net import LeaseFile, LeaseFileError, is_unicast_ipv4
from vkcocoon_probes import Clock, Deadline, ProbeResult, ProbeTimeout
from vkcocoon_spec import PodSpec
from vkcocoon_status import ANNOTATION_ID, ANNOTATION_IP, ANNOTATION_PROBE_PORT, Reason, pod_key
from vkcocoon_terminal import Mark
from vkcocoon_vms import VM, CocoonCLI, CocoonMacosCLI, CommandError, VMNotFound

__all__ = ["BOUND_S", "Stage", "Tools", "examine_address", "examine_pod"]

BOUND_S = 3.0  # for the guest's answer, as in the daemon (T1)


@dataclass(frozen=True, slots=True)
class Stage:
    """What one check found. `seconds` is how long it took; `reason` is "" where the check is none of the probe's."""

    name: str
    mark: Mark
    text: str
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    clock: Clock
    runtime: CocoonCLI
    macos: CocoonMacosCLI
    leases: LeaseFile
    reach: Reach


class _Failed(Exception):
    """The stage has failed: reason and text."""


def examine_pod(pod: Mapping[str, Any], tools: Tools) -> Iterator[Stage]:
    """The stages of a pod as the API holds it, each yielded when it has ended."""
    spec = PodSpec.of(pod)
    vm: VM | None = None
    ip = ""

    def find_vm() -> str:
        nonlocal vm
        vm = _vm_of(spec, tools)
        return f"{vm.name} runs, pid {vm.pid}" if vm.pid else f"{vm.name} is the VM of {pod_key(pod)}"

    def find_address() -> str:
        nonlocal ip
        assert vm is not None
        ip, origin = _address_of(spec, vm, tools)
        return f"{ip} {origin}"

    for name, check in (("vm", find_vm), ("address", find_address)):
        stage = _timed(name, check, tools.clock)
        yield stage
        if stage.mark is not Mark.OK:
            return
    way = tools.reach.macos if spec.macos else tools.reach.guest
    yield _answer(lambda deadline: way(ip, spec.annotations, deadline), tools.clock)


def examine_address(ip: str, tools: Tools, *, port: int | None = None, banner: bool = False) -> Iterator[Stage]:
    """Only the answer of a guest: `port` is dialed, or sshd's banner awaited, or an echo sent."""
    annotations = {} if port is None else {ANNOTATION_PROBE_PORT: str(port)}
    way = tools.reach.macos if banner else tools.reach.guest
    yield _answer(lambda deadline: way(ip, annotations, deadline), tools.clock)


def _vm_of(spec: PodSpec, tools: Tools) -> VM:
    if not spec.vm_name:
        raise _Failed("NotOurs", "the pod names no VM: annotation vm.cocoonstack.io/name is missing")
    if not spec.managed:
        return VM(id=spec.annotations.get(ANNOTATION_ID, ""), name=spec.vm_name)
    try:
        if spec.macos:
            record = tools.macos.inspect(spec.vm_name)
            if not tools.macos.alive(record):
                raise _Failed(Reason.QEMU_DEAD, f"qemu of {record.name} is gone (its record says pid {record.pid})")
            return record
        return _record(spec, tools.runtime)
    except VMNotFound as error:
        raise _Failed(Reason.VM_GONE, f"VM {spec.vm_name} does not exist") from error
    except CommandError as error:
        raise _Failed(Reason.PROBE_ERROR, str(error)) from error


def _record(spec: PodSpec, runtime: CocoonCLI) -> VM:
    """By the id that was published, else by name: the same VM, unless somebody put another one in its place."""
    vm_id = spec.annotations.get(ANNOTATION_ID, "")
    try:
        return runtime.inspect(vm_id or spec.vm_name)
    except VMNotFound:
        if not vm_id:
            raise
        return runtime.inspect(spec.vm_name)


def _address_of(spec: PodSpec, vm: VM, tools: Tools) -> tuple[str, str]:
    """The address, and where it comes from."""
    fixed = vm.static_ip if spec.managed else spec.annotations.get(ANNOTATION_IP, "")
    if fixed or not spec.managed:
        if not is_unicast_ipv4(fixed):
            raise _Failed(Reason.WAITING_FOR_LEASE, f"{fixed!r} is no address a guest can have")
        return fixed, "is static" if spec.managed else f"is given by {ANNOTATION_IP}"
    now = tools.clock.now()
    try:
        lease = tools.leases.lookup(vm.mac, now) if vm.mac else None
        conflict = tools.leases.conflict(vm.mac, now) if vm.mac else ""
    except LeaseFileError as error:
        raise _Failed(Reason.LEASE_FILE_UNREADABLE, str(error)) from error
    if lease is None:
        raise _Failed(
            Reason.WAITING_FOR_LEASE, conflict or f"the lease file has no lease in force for {vm.mac or 'it'}"
        )
    until = "for ever" if lease.expiry.year == 9999 else f"until {lease.expiry:%Y-%m-%d %H:%M:%S} UTC"
    return lease.ip, f"is leased to {lease.mac} {until}"


def _timed(name: str, check: Callable[[], str], clock: Clock) -> Stage:
    began = clock.monotonic()
    try:
        text, mark, reason = check(), Mark.OK, ""
    except _Failed as failure:
        reason, text = (str(part) for part in failure.args)
        mark = Mark.FAILED
    return Stage(name, mark, text, clock.monotonic() - began, reason)


def _answer(ask: Callable[[Deadline], ProbeResult], clock: Clock) -> Stage:
    began = clock.monotonic()
    try:
        with clock.timeout(BOUND_S):
            result = ask(Deadline(clock, BOUND_S))
    except ProbeTimeout as error:
        result = ProbeResult(False, Reason.PROBE_TIMEOUT, str(error))
    # Skipped is ready for the daemon, but nobody was asked, and whoever probes by hand wanted to know.
    skipped = result.reason == Reason.PING_SKIPPED
    mark = Mark.WARNING if skipped else Mark.OK if result.ready else Mark.FAILED
    return Stage("answer", mark, result.message, clock.monotonic() - began, str(result.reason))
