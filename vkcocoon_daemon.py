"""The daemon: the rooms wired together, started in the one order that is safe, and stopped without losing a word.

Start: the lease of a node that is already registered is renewed first, before anything that can take long (K10); then
it is settled which VM is whose, and each pod that has one is probed before it is published; beside these probes the
node is registered, so that the scheduler sees it only when it can take pods, and the pods bound to it are watched.
Lists that cannot be read are asked for again with a pause that grows: nothing is adopted, created or destroyed on half
a picture.

Stop: first nobody acts on pods any more, then the probes end, then what is still owed to the API gets a short while.
VMs are not touched: a restart of this process is invisible to the guests.

`Daemon` takes any `Ports`, so the simulator runs this very wiring; vkcocoon_service is the process of a real host.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon import Ports, Provider, __version__
from vkcocoon_events import EventRecorder
from vkcocoon_host import Host
from vkcocoon_http import Check, HubMonitor
from vkcocoon_kube import ApiError, Backoff, KubeApi
from vkcocoon_node import NodeController
from vkcocoon_overview import Overview
from vkcocoon_pods import PodController
from vkcocoon_probes import spawn
from vkcocoon_settings import Settings
from vkcocoon_startup import GRACE
from vkcocoon_vms import CommandError

__all__ = ["Daemon"]

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
STOP_S = 5.0  # for everything that still wants to be written
HUB_STUCK_S = 2.0  # a hub this late makes every probe of the node late
NAMED = 3  # pods in a sentence about many
LONGEST_ERROR = 200  # characters

log = structlog.get_logger()


class Daemon:
    """One node's worth of vk-cocoon on whatever ports it is given."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        *,
        lease_api: KubeApi | None = None,
        host: Host | None = None,
        instance: str = "",
    ) -> None:
        self._clock = ports.clock
        self._settings = settings
        self._began = ports.clock.monotonic()
        self._stop = Event()
        self._group = Group()
        self._gave_up: Callable[[], None] = lambda: None
        self._blocked = ""  # what the start waits for
        self.broken = ""  # which part has failed that nothing here mends
        self.started = Event()
        self.recorder = EventRecorder(ports.kube, ports.clock, node_name=settings.node_name)
        self.ports = replace(ports, event=self.recorder.event)
        self.node = NodeController(
            ports.kube,
            ports.clock,
            settings,
            lease_api=lease_api or ports.kube,
            recorder=self.recorder,
            degraded=ports.pinger.degraded,
            version=__version__,
            host=host,
            instance=instance,
        )
        self.provider = Provider(settings, self.ports)
        self.provider.act_while(self.node.alone)
        self.pods = PodController(
            ports.kube,
            ports.clock,
            self.provider,
            settings,
            recorder=self.recorder,
            gate=self.node.alone,
            tally=ports.metrics,
        )
        self.provider.notify_pods(self.pods.notify, acknowledged=True)

    def start(self, gave_up: Callable[[], None] = lambda: None) -> None:
        """Begin; returns at once. `started` is set when the node is registered and its pods are watched.

        ``gave_up`` is called when a part has failed that nothing here mends, see `broken`: the process must end then,
        for a node that lives and does nothing would still be said to be Ready.
        """
        self._gave_up = gave_up
        spawn(self._group, "start", self._vital, "start", self._run)

    def checks(self, monitor: HubMonitor | None = None) -> tuple[Check, ...]:
        """What /healthz, /readyz, the watchdog and the overview ask. The live ones speak of this process alone: an
        API server that is away is no reason to be restarted."""
        return (
            Check("hub", lambda: _late(monitor.lag if monitor is not None else 0.0), live=True),
            Check("probes", self._overdue, live=True),
            Check("greenlets", lambda: self.broken, live=True),
            Check("api", lambda: self.pods.trouble),
            Check("node", self._node_trouble),
            Check("start-up", self._start_trouble),
            Check("leases", self.provider.lease_trouble),
        )

    def overview(self, checks: tuple[Check, ...]) -> Overview:
        """What is known of everything, for whoever looks in."""
        return Overview(
            node=self._settings.node_name,
            version=__version__,
            clock=self._clock,
            held=self.provider.held,
            assigned=self.pods.pods,
            unpublished=self.pods.unpublished,
            checks=checks,
            degraded=self.ports.pinger.degraded,
            began=self._began,
        )

    def close(self, patience: float = STOP_S) -> None:
        """Stop acting, stop probing, tell the API what it is still owed for at most ``patience`` seconds; VMs keep
        running."""
        self._stop.set()
        self.pods.stop()
        self.provider.close()
        self.pods.close(patience)
        self.node.close()
        self.recorder.close()
        self._group.kill(block=False)

    def _run(self) -> None:
        self.recorder.start()
        self.node.start_lease()
        if not self._reconciled():
            return
        self.node.register()
        self.pods.start()
        spawn(self._group, "watch VMs", self._vital, "watch over VMs", self.provider.watch_vms)
        self._clock.wait(self.node.registered, None)
        self.started.set()

    def _vital(self, what: str, function: Callable[[], None]) -> None:
        """One without which the node would live and do nothing."""
        try:
            function()
        except Exception as error:
            self.broken = f"the {what} has failed: {error!r}"[:LONGEST_ERROR]
            self._gave_up()
            raise

    def _reconciled(self) -> bool:
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, rng=random.Random("startup"))
        while not self._stop.is_set():
            pause = backoff.next()
            try:
                self.provider.reconcile_startup()
                self._blocked = ""
                self.node.blocked("")
                return True
            except (ApiError, CommandError) as error:
                self._blocked = str(error)[:LONGEST_ERROR]
                log.warning("cannot see what runs; nothing is touched", error=str(error), retry_seconds=round(pause, 1))
            except Exception as error:  # a mistake over what was seen must not leave the node without hands
                self._blocked = repr(error)[:LONGEST_ERROR]
                log.exception("cannot make out what runs; trying again", retry_seconds=round(pause, 1))
            self._tell_blocked()
            self._clock.wait(self._stop, pause)
        return False

    def _tell_blocked(self) -> None:
        """A node that has shown its pods Not Ready says why, for as long as it can."""
        if self._clock.monotonic() - self._began >= GRACE:
            try:
                self.node.blocked(self._blocked)
            except ApiError as error:
                log.info("the node could not be told what the start waits for", error=str(error))

    def _start_trouble(self) -> str:
        return "" if self.started.is_set() else f"has not finished: {self._blocked or 'see the log'}"

    def _overdue(self) -> str:
        late = sorted(self.provider.overdue_probes(), key=lambda one: -one[1])
        if not late:
            return ""
        more = f" and {len(late) - NAMED} more" if len(late) > NAMED else ""
        return "overdue: " + ", ".join(f"{key} by {seconds:.0f} s" for key, seconds in late[:NAMED]) + more

    def _node_trouble(self) -> str:
        if not self.node.registered.is_set():
            return "is not registered yet"
        return "" if self.node.alone.is_set() else "another process runs this node; nothing is done to pods"


def _late(seconds: float) -> str:
    return f"greenlets ran {seconds:.1f} s late" if seconds > HUB_STUCK_S else ""
