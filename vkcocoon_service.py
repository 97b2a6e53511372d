"""The process of a real host: the daemon, what it serves, and what it hears from its unit.

`serve` makes the real ports and the daemon on them, opens the doors (metrics and health, kubelet API, status socket,
status page), and waits for a signal. What others look at (health, overview, watchdog) only reads memory; a door that
nobody but people use (socket, page) is opened if it can be and is one warning if not, because a node must not stay
down for it.

SIGTERM and SIGINT stop in order, a second one at once. SIGUSR1 and SIGUSR2 are questions (vkcocoon_signals).
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace

import gevent
import structlog
from gevent.event import Event

from vkcocoon import Ports, __version__
from vkcocoon_daemon import Daemon
from vkcocoon_host import is_own_address, node_address
from vkcocoon_http import HubMonitor, Metrics, MetricsServer
from vkcocoon_kube import HttpKubeApi
from vkcocoon_kubelet import Kubelet
from vkcocoon_net import open_pinger
from vkcocoon_overview import Overview
from vkcocoon_probes import Clock, SystemClock, deaths
from vkcocoon_recorder import Recorder
from vkcocoon_server import CannotListen
from vkcocoon_settings import Settings
from vkcocoon_signals import Signals
from vkcocoon_systemd import Systemd
from vkcocoon_vms import CocoonCLI, CocoonMacosCLI
from vkcocoon_window import StatusPage, StatusSocket

__all__ = ["real_ports", "serve"]

log = structlog.get_logger()


def real_ports(settings: Settings) -> Ports:
    """The ports of a real host."""
    metrics = Metrics(__version__)
    metrics.greenlet_errors_from(deaths)
    return Ports(
        clock=SystemClock(),
        runtime=CocoonCLI(settings.cocoon_bin, max_processes=settings.cocoon_processes),
        macos=CocoonMacosCLI(settings.cocoon_macos_bin, vnc_password=settings.macos_vnc_password),
        kube=HttpKubeApi(settings.kubeconfig, user_agent=f"vk-cocoon/{__version__}"),
        pinger=open_pinger(),
        metrics=metrics,
    )


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit code of the process. A second signal ends it at once.

    Raises CannotListen when metrics or the kubelet API cannot be served: without them nobody watches this node; and
    RuntimeError when a part of the daemon has failed that only another process can replace.
    """
    settings = replace(settings, node_ip=settings.node_ip or node_address())
    ports = real_ports(settings)
    kube = ports.kube
    recorder = Recorder(settings, ports.clock, version=__version__) if settings.record else None
    if recorder is not None:
        ports = recorder.observe(ports)
    daemon = Daemon(settings, ports, lease_api=kube.separate() if isinstance(kube, HttpKubeApi) else None)
    monitor = HubMonitor(ports.clock, ports.metrics)
    checks = daemon.checks(monitor)
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
    systemd = Systemd(
        ports.clock,
        started=daemon.started.is_set,
        alive=lambda: "; ".join(answer for check in checks if check.live and (answer := check.ask())),
        describe=ports.metrics.describe_pods,
    )
    asked = Event()
    # Handlers only set an event: they run in the hub, where nothing may block.
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, asked.set)
    if not is_own_address(settings.node_ip):
        log.warning(
            "VK_NODE_IP is no address of this host: is it where the API server finds it?", address=settings.node_ip
        )
    log.info("starting", version=__version__, node=settings.node_name, address=settings.node_ip)
    with ExitStack() as opened:
        for room in (server, kubelet, monitor, Signals(ports.clock)):
            room.start()
            opened.callback(room.close)
        _open_windows(settings, daemon.overview(checks), ports.clock, opened)
        systemd.start()
        if recorder is not None:
            opened.callback(recorder.close)
            recorder.start(daemon.provider, daemon.pods.notify)
        daemon.start(asked.set)
        asked.wait()
        log.info("stopping")
        systemd.stopping()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        daemon.close()
        systemd.close()
    if daemon.broken:
        raise RuntimeError(daemon.broken)
    return 0


def _open_windows(settings: Settings, overview: Overview, clock: Clock, opened: ExitStack) -> None:
    """The status socket and the page, as far as they can be had."""
    windows: list[StatusSocket | StatusPage] = [StatusSocket(settings.status_socket, overview.document, clock=clock)]
    if settings.status_addr is not None:
        windows.append(StatusPage(settings.status_addr, overview.document, clock=clock))
    for window in windows:
        try:
            window.start()
        except CannotListen as error:
            log.warning("the status cannot be looked at there; everything else works", error=str(error))
        else:
            opened.callback(window.close)
