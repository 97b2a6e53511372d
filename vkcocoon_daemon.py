"""The daemon: the rooms wired together, started in the one order that is safe, and stopped without losing a word.

Start: the lease of a node that is already registered is renewed first, before anything that can take long (K10); then
what runs is adopted, each pod probed before it is published; then the node is registered, so that the scheduler sees
it only when it can take pods; then the pods bound to it are watched. Lists that cannot be read are asked for again
with a pause that grows: nothing is adopted, created or destroyed on half a picture.

Stop: first nobody acts on pods any more, then the probes end, then what is still owed to the API gets a short while.
VMs are not touched: a restart of this process is invisible to the guests.

`Daemon` takes any `Ports`, so the simulator runs this very wiring; `serve` is the process of a real host.
"""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import gevent
import structlog
from gevent.event import Event
from gevent.pool import Group

from vkcocoon import Ports, Provider, __version__
from vkcocoon_events import EventRecorder
from vkcocoon_host import Host, node_address
from vkcocoon_http import Check, HubMonitor, Metrics, MetricsServer
from vkcocoon_kube import ApiError, Backoff, HttpKubeApi, KubeApi
from vkcocoon_kubelet import Kubelet
from vkcocoon_net import open_pinger
from vkcocoon_node import NodeController
from vkcocoon_pods import PodController
from vkcocoon_probes import SystemClock, spawn
from vkcocoon_settings import Settings
from vkcocoon_systemd import Systemd
from vkcocoon_vms import CocoonCLI, CocoonMacosCLI, CommandError

__all__ = ["Daemon", "real_ports", "serve"]

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
STOP_S = 5.0  # for everything that still wants to be written

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
        self._stop = Event()
        self._group = Group()
        self.started = Event()
        self.recorder = EventRecorder(ports.kube, ports.clock, node_name=settings.node_name)
        self.ports = replace(ports, event=self.recorder.event)
        self.provider = Provider(settings, self.ports)
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
        self.pods = PodController(
            ports.kube, ports.clock, self.provider, settings, recorder=self.recorder, gate=self.node.alone
        )
        self.provider.notify_pods(self.pods.notify, acknowledged=True)

    def start(self) -> None:
        """Begin; returns at once. `started` is set when the node is registered and its pods are watched."""
        spawn(self._group, "start", self._run)

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
        spawn(self._group, "watch VMs", self.provider.watch_vms)
        self._clock.wait(self.node.registered, None)
        self.started.set()

    def _reconciled(self) -> bool:
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, rng=random.Random("startup"))
        while not self._stop.is_set():
            try:
                self.provider.reconcile_startup()
                return True
            except (ApiError, CommandError) as error:
                pause = backoff.next()
                log.warning("cannot see what runs; nothing is touched", error=str(error), retry_seconds=round(pause, 1))
                self._clock.wait(self._stop, pause)
        return False


def real_ports(settings: Settings) -> Ports:
    """The ports of a real host."""
    return Ports(
        clock=SystemClock(),
        runtime=CocoonCLI(settings.cocoon_bin, max_processes=settings.cocoon_processes),
        macos=CocoonMacosCLI(settings.cocoon_macos_bin, vnc_password=settings.macos_vnc_password),
        kube=HttpKubeApi(settings.kubeconfig, user_agent=f"vk-cocoon/{__version__}"),
        pinger=open_pinger(),
        metrics=Metrics(__version__),
    )


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit code of the process. A second signal ends it at once."""
    settings = replace(settings, node_ip=settings.node_ip or node_address())
    ports = real_ports(settings)
    kube = ports.kube
    daemon = Daemon(settings, ports, lease_api=kube.separate() if isinstance(kube, HttpKubeApi) else None)
    checks = [Check("started", lambda: "" if daemon.started.is_set() else "start-up has not finished")]
    server = MetricsServer(settings.metrics_addr, ports.metrics, checks, clock=ports.clock)
    kubelet = Kubelet(
        settings,
        ports.clock,
        held=daemon.provider.held,
        assigned=daemon.pods.pods,
        logs=ports.runtime.logs,
        reviews=kube.separate() if isinstance(kube, HttpKubeApi) else kube,
        exposition=ports.metrics.exposition,
    )
    monitor = HubMonitor(ports.clock, ports.metrics)
    systemd = Systemd(ports.clock, started=daemon.started.is_set, describe=ports.metrics.describe_pods)
    asked = Event()
    # Handlers only set an event: they run in the hub, where nothing may block.
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, asked.set)
    log.info("starting", version=__version__, node=settings.node_name, address=settings.node_ip)
    server.start()
    kubelet.start()
    monitor.start()
    systemd.start()
    daemon.start()
    asked.wait()
    log.info("stopping")
    systemd.stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    daemon.close()
    systemd.close()
    monitor.close()
    kubelet.close()
    server.close()
    return 0
