"""What the provider's rooms are given: ports to the world outside, and what they share among themselves.

`Ports` is what differs between a host and a simulation; the lease file is a real file in both. `Workplace` is what all
rooms of one provider work with: the pods, the one place that publishes them, and the locks. It holds no logic; who may
change what is said where it is kept (vkcocoon_tracking).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_debts import Claims
from vkcocoon_guests import Pinger
from vkcocoon_http import Metrics
from vkcocoon_kube import KubeApi
from vkcocoon_net import release_lease, ssh_banner, tcp_accepts
from vkcocoon_probes import Clock, Deadline, Observer
from vkcocoon_settings import Settings
from vkcocoon_tracking import PodTable, Publication, Report, VMLocks
from vkcocoon_vms import VM, CocoonCLI, CocoonMacosCLI, CommandError, VMNotFound

__all__ = ["EARLIER_LIFE", "Ports", "Workplace"]

EARLIER_LIFE = 1800.0  # seconds after the start, in which a command that was begun before it may still end

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ports:
    """The world outside."""

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
    metrics: Metrics = field(default_factory=lambda: Metrics("unversioned"))

    def clear_half_made(self, record: VM) -> str:
        """Have the tool clear a VM away whose maker died. What it found: `collected`, `not-found`, `busy` (somebody is
        making it), `not-creating` (it is made by now), or `error`: one that is too old for this cannot be asked."""
        try:
            outcome = self.runtime.reconcile_stale_create(record.id)
        except VMNotFound:
            outcome = "not-found"
        except CommandError as error:
            outcome = "error"
            log.info("half-made VM could not be cleared", vm=record.name, id=record.id, error=str(error))
        else:
            log.warning("half-made VM", vm=record.name, id=record.id, outcome=outcome)
        self.metrics.stale_create(outcome)
        return outcome


def _open_gate() -> Event:
    gate = Event()
    gate.set()
    return gate


@dataclass(slots=True)
class Workplace:
    """What the rooms of one provider share. `group` holds the background greenlets of pods; while `gate` is not set
    nothing is done to VMs except what the actor of a pod asks for (K11)."""

    settings: Settings
    ports: Ports
    pods: PodTable
    publication: Publication
    locks: VMLocks
    group: Group
    claims: Claims
    gate: Event = field(default_factory=_open_gate)

    @property
    def clock(self) -> Clock:
        return self.ports.clock
