"""How a guest is asked whether it answers: its declared port, sshd's banner, or one echo; and who is Ready where.

`Reach` turns what vkcocoon_net can do into probe results with the reasons people read. `ReadyAddresses` remembers
which managed pod is published Ready on which address, because two of them on one address would both be believed (L10).
Neither knows Kubernetes or a command line; the provider composes them into the probe of a pod.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vkcocoon_net import PingError, PingTimeout
from vkcocoon_probes import Deadline, ProbeResult
from vkcocoon_spec import PodSpec, SpecError, probe_port
from vkcocoon_status import ANNOTATION_PROBE_PORT, Reason

__all__ = ["SSH_PORT", "Pinger", "Reach", "ReadyAddresses", "way_of"]

SSH_PORT = 22

Holder = TypeVar("Holder", bound=Hashable)


class Pinger(Protocol):
    """One echo, or none in degraded mode (vkcocoon_net.IcmpPinger, NopPinger)."""

    @property
    def degraded(self) -> bool: ...
    def ping(self, ip: str, deadline: Deadline) -> float: ...


def way_of(spec: PodSpec) -> str:
    """How the guest of such a pod is asked, in a word for people: `icmp`, `tcp :3389`, `ssh :22`."""
    if declared := spec.annotations.get(ANNOTATION_PROBE_PORT, "").strip():
        return f"tcp :{declared}"
    return f"ssh :{SSH_PORT}" if spec.macos else "icmp"


@dataclass(frozen=True, slots=True)
class Reach:
    """The last of a probe's checks: does the guest at this address answer? Never raises for what a guest can do."""

    pinger: Pinger
    tcp_accepts: Callable[[str, int, Deadline], None]
    ssh_banner: Callable[[str, Deadline], str]

    def guest(self, ip: str, annotations: Mapping[str, str], deadline: Deadline) -> ProbeResult:
        """Linux and Windows: the declared probe port, else one ICMPv4 echo."""
        return self._declared(ip, annotations, deadline) or self._echo(ip, deadline)

    def macos(self, ip: str, annotations: Mapping[str, str], deadline: Deadline) -> ProbeResult:
        """macOS: a bare accept on the declared probe port, else sshd's banner on port 22."""
        return self._declared(ip, annotations, deadline) or self._banner(ip, deadline)

    def _declared(self, ip: str, annotations: Mapping[str, str], deadline: Deadline) -> ProbeResult | None:
        """None when no port is declared; a port that is none never falls back to another way of asking (O1)."""
        try:
            port = probe_port(annotations)
        except SpecError as error:
            return ProbeResult(False, Reason.INVALID_PROBE_PORT, str(error))
        if port is None:
            return None
        try:
            self.tcp_accepts(ip, port, deadline)
        except OSError as error:
            return ProbeResult(False, Reason.PORT_CLOSED, f"tcp {ip}:{port}: {error.strerror or error}")
        return ProbeResult(True, Reason.PROBE_SUCCEEDED, f"tcp {ip}:{port} accepts")

    def _banner(self, ip: str, deadline: Deadline) -> ProbeResult:
        try:
            self.ssh_banner(ip, deadline)
        except OSError as error:
            return ProbeResult(
                False, Reason.NO_SSH_BANNER, f"no ssh banner at {ip}:{SSH_PORT}: {error.strerror or error}"
            )
        return ProbeResult(True, Reason.PROBE_SUCCEEDED, f"sshd at {ip}:{SSH_PORT} speaks")

    def _echo(self, ip: str, deadline: Deadline) -> ProbeResult:
        """One echo; while not ready it waits only for the deadline's patience, so that the next one comes soon (T1)."""
        if self.pinger.degraded:
            return ProbeResult(True, Reason.PING_SKIPPED, f"no raw ICMP socket: {ip} is taken for ready unasked")
        try:
            self.pinger.ping(ip, deadline.of_one_echo())
        except PingTimeout:
            return ProbeResult(False, Reason.PING_TIMEOUT, f"icmp: no reply from {ip}")
        except PingError as error:
            return ProbeResult(False, Reason.PING_FAILED, f"icmp: {error}")
        return ProbeResult(True, Reason.PROBE_SUCCEEDED, f"icmp: {ip} replies")


class ReadyAddresses(Generic[Holder]):
    """Address -> the one holder that is, or may still be seen, Ready there.

    A claim is made when Ready is handed over and ends when `release` is called, which is not before the cluster has
    seen the holder leave: until then two pods would be Ready on one address for whoever looks.
    """

    def __init__(self) -> None:
        self._holder_on: dict[str, Holder] = {}
        self._addresses_of: dict[Holder, set[str]] = {}

    def other(self, holder: Holder, ip: str) -> Holder | None:
        """Somebody else who is Ready on ``ip``, or None."""
        found = self._holder_on.get(ip)
        return None if found is holder else found

    def claim(self, holder: Holder, ip: str) -> None:
        """``holder`` is handed over as Ready on ``ip``, which nobody else holds."""
        self._holder_on[ip] = holder
        self._addresses_of.setdefault(holder, set()).add(ip)

    def release(self, holder: Holder, *, keep: str = "") -> set[str]:
        """``holder`` is no longer seen Ready anywhere but on ``keep``; returns the addresses that became free."""
        held = self._addresses_of.pop(holder, set())
        if keep in held:
            self._addresses_of[holder] = {keep}
        freed = held - {keep}
        for ip in freed:
            del self._holder_on[ip]
        return freed
