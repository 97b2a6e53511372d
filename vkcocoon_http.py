"""What the process serves: metrics for a scraper, health for a supervisor.

`Metrics` is a set of numbers with small methods; other rooms call them and know nothing of Prometheus. Every method
only changes memory and never switches greenlets, so a probe's observer may call it. Labels are bounded: no pod name
ever becomes one.

`MetricsServer` serves them, and the answers of `Check`s, on one address, within the bounds of vkcocoon_server. The
checks only read memory; an answer that waits for something would hang exactly when it is needed.

`HubMonitor` measures how late the greenlets of this process run, the one illness that makes all probes late at once.

The provider creates all three, and closes the latter two.
"""

import os
import platform
from bisect import bisect_left
from collections import Counter as CountOf
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import gevent.event
import gevent.pool
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from vkcocoon_probes import Clock, SystemClock, spawn
from vkcocoon_server import BoundedServer, CannotListen, Limits, listen, text_answer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

__all__ = ["CannotListen", "Check", "HubMonitor", "Metrics", "MetricsServer", "PodSample", "asked"]

log = structlog.get_logger()

PREFIX = "cocoon_vk"
PROBE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
LATENESS_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
# From a Linux clone, ready in a fraction of a second, to a cold macOS boot of many minutes.
READY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)

DELIVERY_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
PROBE_KINDS = ("icmp", "tcp", "ssh")
LOOKUPS = ("found", "missing", "conflict", "unreadable")
SYSTEMS = ("linux", "windows", "macos")

HUB_PERIOD = 1.0
# The shortest pause between two probes is 100 ms: twice that and the pace is no longer what was promised.
HUB_LAG_WARNING = 0.2
HUB_WARNING_PERIOD = 60.0


# Metrics ----------------------------------------------------------------------------------------------------------


class PodSample(Protocol):
    """What one pod contributes to the gauges when somebody scrapes."""

    @property
    def os(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def reason(self) -> str:
        """Why the pod is not ready; not read when it is."""
        ...

    @property
    def vm(self) -> object | None: ...


class ProbeOutcome(Protocol):
    @property
    def ready(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class _PodCollector:
    """Counts pods when asked, so that a pod that is gone can not linger in a gauge."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterable[PodSample]] = tuple

    def collect(self) -> Iterable[Metric]:
        # A copy first: rendering may switch.
        samples = [(_known_os(pod.os), pod.ready, pod.reason, pod.vm is not None) for pod in self.source()]
        pods = GaugeMetricFamily(f"{PREFIX}_pods", "Pods of this node.", labels=["os", "ready"])
        for (system, ready), number in sorted(CountOf(sample[:2] for sample in samples).items()):
            pods.add_metric([system, "true" if ready else "false"], number)
        waiting = GaugeMetricFamily(f"{PREFIX}_pods_waiting", "Pods that are not ready, by reason.", labels=["reason"])
        for reason, number in sorted(CountOf(reason for _, ready, reason, _ in samples if not ready).items()):
            waiting.add_metric([reason], number)
        vms = GaugeMetricFamily(f"{PREFIX}_vm_table_size", "VMs this process knows.")
        vms.add_metric([], sum(has_vm for *_, has_vm in samples))
        return pods, waiting, vms


class _LeaseFileCollector:
    """How old the lease file is, when asked; no number where there is no file."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        age = GaugeMetricFamily(f"{PREFIX}_lease_file_age_seconds", "How long ago the lease file was changed.")
        with suppress(OSError):
            age.add_metric([], max(0.0, self._clock.now().timestamp() - os.stat(self._path).st_mtime))
        return (age,)


class _DeathCollector:
    """Greenlets that died, counted by the process and not by us."""

    def __init__(self, source: Callable[[], int]) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        errors = CounterMetricFamily(f"{PREFIX}_greenlet_errors", "Greenlets that ended with an exception.")
        errors.add_metric([], self._source())
        return (errors,)


class _Tally:
    """The numbers of one histogram. The library's own takes a lock for each, which a probe would pay several times
    over; here every number changes between two switches of greenlets, so none is needed."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets as the exposition writes them, and the sum of all values."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class _ProbeCollector:
    """What probes looked up, found and took: counted thousands of times a second, rendered when asked."""

    def __init__(self) -> None:
        self._seconds = {(kind, ready): _Tally(PROBE_BUCKETS) for kind in PROBE_KINDS for ready in (True, False)}
        self._lateness = _Tally(LATENESS_BUCKETS)
        self._reasons: dict[str, int] = {}
        self.lookups = dict.fromkeys(LOOKUPS, 0)

    def count(self, kind: str, result: ProbeOutcome, lateness_s: float, took_s: float) -> None:
        self._seconds[kind, result.ready].add(took_s)
        self._lateness.add(lateness_s)
        self._reasons[result.reason] = self._reasons.get(result.reason, 0) + 1

    def collect(self) -> Iterable[Metric]:
        seconds = HistogramMetricFamily(
            f"{PREFIX}_probe_duration_seconds", "How long a probe took.", labels=["kind", "result"]
        )
        for (kind, ready), tally in self._seconds.items():
            seconds.add_metric([kind, "ready" if ready else "not_ready"], *tally.cumulative())
        lateness = HistogramMetricFamily(f"{PREFIX}_probe_lateness_seconds", "How much later than due a probe began.")
        lateness.add_metric([], *self._lateness.cumulative())
        probes = CounterMetricFamily(f"{PREFIX}_probes", "Probes, by what they found.", labels=["reason"])
        for reason, number in sorted(self._reasons.items()):
            probes.add_metric([str(reason)], number)
        lookups = CounterMetricFamily(f"{PREFIX}_lease_lookups", "Lookups in the DHCP lease file.", labels=["result"])
        for result, number in self.lookups.items():
            lookups.add_metric([result], number)
        return seconds, lateness, probes, lookups


def _known_os(text: str) -> str:
    """A pod may say anything; a label may not."""
    return text if text in SYSTEMS else "other"


class Metrics:
    """The numbers of one process, in a registry of their own."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        self._pods = _PodCollector()
        self.registry.register(self._pods)
        self._gauge("build_info", "What is running.", "version", "python").labels(
            version, platform.python_version()
        ).set(1)
        self._degraded = self._gauge("pinger_degraded", "1 while echoes cannot be sent: no CAP_NET_RAW.")
        self._probes = _ProbeCollector()
        self.registry.register(self._probes)
        self._flips = self._counter("probe_flips", "Changes of what pods are published as.", "to")
        self._time_to_ready = self._histogram(
            "time_to_ready_seconds", "From a pod's creation to its first Ready.", "os", buckets=READY_BUCKETS
        )
        self._lease_releases = self._counter("lease_release", "DHCP leases given back.", "result")
        self._status_writes = self._counter("status_writes", "Writes of a pod's status.", "result")
        self._qemu_restarts = self._counter("qemu_restarts", "Restarts of macOS guests found dead.", "result")
        self._vm_restarts = self._counter("vm_restarts", "Restarts in place of microVMs found stopped.", "result")
        self._evictions = self._counter("evictions", "Pods given up because of what became of their VM.", "reason")
        self._guest_setups = self._counter("postclone", "Set-ups of cloned guests.", "kind", "result")
        self._stale_creates = self._counter("stale_create_reconcile", "Half-made VMs found.", "outcome")
        self._doubtful_looks = self._counter("vm_inspect_transient_fail", "Looks at a VM that proved nothing.")
        self._pod_operations = self._counter("pod_lifecycle", "Pod operations.", "op", "result", "reason")
        self._orphans = self._counter("orphan_vm", "VMs no pod asked for, found at start.")
        self._deliveries = self._counter(
            "notify", "States of pods handed over to be published, by what became of them.", "result"
        )
        self._delivery_time = self._histogram(
            "notify_duration_seconds", "From a state handed over to the API holding it.", buckets=DELIVERY_BUCKETS
        )
        self._reconnects = self._counter("watch_reconnects", "Watches of the API server that ended.", "reason")
        self._hub_lag = self._histogram(
            "hub_lag_seconds", "How late a greenlet ran that only waited.", buckets=LATENESS_BUCKETS
        )

    def exposition(self) -> bytes:
        """All of it, as a scraper reads it."""
        return generate_latest(self.registry)

    def pods_from(self, source: Callable[[], Iterable[PodSample]]) -> None:
        """Where the pods are counted at each scrape; `source` must not switch greenlets."""
        self._pods.source = source

    def describe_pods(self) -> str:
        """How many pods there are and how many of them are ready, for a status line."""
        ready = [pod.ready for pod in self._pods.source()]
        return f"{len(ready)} pod{'' if len(ready) == 1 else 's'}, {sum(ready)} ready"

    def degraded(self, degraded: bool) -> None:
        """Whether the pinger is degraded (I3)."""
        self._degraded.set(degraded)

    def observe_probe(self, kind: str, result: ProbeOutcome, lateness_s: float, took_s: float) -> None:
        """One finished probe. `kind` is how the guest is asked: icmp, tcp or ssh."""
        self._probes.count(kind, result, max(0.0, lateness_s), took_s)

    def flip(self, ready: bool) -> None:
        """The debounced state of a pod's probe changed to `ready`."""
        self._flips.labels("ready" if ready else "not_ready").inc()

    def became_ready(self, guest_os: str, seconds: float) -> None:
        """A pod became Ready for the first time, `seconds` after its creation."""
        self._time_to_ready.labels(_known_os(guest_os)).observe(seconds)

    def lease_lookup(self, result: str) -> None:
        """`result`: found, missing, conflict or unreadable."""
        self._probes.lookups[result] += 1

    def leases_from(self, path: str, clock: Clock) -> None:
        """Which file's age is shown."""
        self.registry.register(_LeaseFileCollector(path, clock))

    def lease_release(self, result: str) -> None:
        """`result`: ok or failed."""
        self._lease_releases.labels(result).inc()

    def status_write(self, result: str) -> None:
        """`result`: ok, failed, gone (the pod no longer exists) or unchanged (the API held it already)."""
        self._status_writes.labels(result).inc()

    def qemu_restart(self, result: str) -> None:
        """`result`: ok or failed."""
        self._qemu_restarts.labels(result).inc()

    def vm_restart(self, result: str) -> None:
        """`result`: ok or failed."""
        self._vm_restarts.labels(result).inc()

    def eviction(self, reason: str) -> None:
        """A pod was deleted because its VM was lost; `reason` is the one its containers terminated with."""
        self._evictions.labels(reason).inc()

    def guest_setup(self, kind: str, result: str) -> None:
        """The set-up of a cloned guest ended: `kind` linux_static, linux_fc or windows, `result` ok or failed."""
        self._guest_setups.labels(kind, result).inc()

    def stale_create(self, outcome: str) -> None:
        """A half-made VM was found: collected, busy, not-creating, not-found or error."""
        self._stale_creates.labels(outcome).inc()

    def doubtful_look(self) -> None:
        """A VM was inspected and the answer proved nothing."""
        self._doubtful_looks.inc()

    def pod_operation(self, op: str, result: str, reason: str = "") -> None:
        """`op`: create, update or delete; `result`: ok, failed or skipped."""
        self._pod_operations.labels(op, result, reason).inc()

    def orphan(self) -> None:
        self._orphans.inc()

    def delivery(self, result: str, seconds: float) -> None:
        """A state of a pod was delivered, superseded by a newer one, or dropped with its pod, so long after it was
        handed over."""
        self._deliveries.labels(result).inc()
        if result == "delivered":
            self._delivery_time.observe(seconds)

    def watch_reconnect(self, reason: str) -> None:
        """A watch ended. `reason`: ended (by the server, as planned), expired (history gone) or error."""
        self._reconnects.labels(reason).inc()

    def greenlet_errors_from(self, source: Callable[[], int]) -> None:
        """Where the greenlets of the process that died are counted."""
        self.registry.register(_DeathCollector(source))

    def hub_lag(self, seconds: float) -> None:
        self._hub_lag.observe(max(0.0, seconds))

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", help, labels, registry=self.registry, buckets=buckets)


class HubMonitor:
    """Measures once a second how late it is woken up, and warns when that is late enough to disturb the probes."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._stop = gevent.event.Event()
        self._group = gevent.pool.Group()
        self._warned_at = float("-inf")
        self.lag = 0.0

    def start(self) -> None:
        spawn(self._group, "hub monitor", self._run)

    def close(self) -> None:
        self._stop.set()
        self._group.join()

    def _run(self) -> None:
        due = self._clock.monotonic() + HUB_PERIOD
        while not self._clock.wait(self._stop, HUB_PERIOD):
            now = self._clock.monotonic()
            self._measured(now - due, now)
            due = now + HUB_PERIOD

    def _measured(self, lag: float, now: float) -> None:
        self.lag = lag
        self._metrics.hub_lag(lag)
        if lag > HUB_LAG_WARNING and now - self._warned_at >= HUB_WARNING_PERIOD:
            self._warned_at = now
            log.warning("greenlets run late; something computes for long without waiting", lag_s=round(lag, 3))


# Server -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the health of the process. `ask` answers "" for well, else a sentence; it only reads memory.

    `live` checks decide /healthz (restart me when it fails); all of them together decide /readyz.
    """

    name: str
    ask: Callable[[], str]
    live: bool = False


class MetricsServer:
    """GET /metrics, /healthz, /readyz (`?verbose` lists each check), and nothing else.

    `start` raises CannotListen. `address` is where it really listens, once started.
    """

    def __init__(
        self,
        addr: tuple[str, int],
        metrics: Metrics,
        checks: Iterable[Check] = (),
        *,
        clock: Clock | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.address = addr
        self._checks = tuple(checks)
        self._exposition = make_wsgi_app(metrics.registry)
        self._clock = clock or SystemClock()
        self._limits = limits or Limits()
        self._server: BoundedServer | None = None

    def start(self) -> None:
        listener = listen(self.address, "VK_METRICS_ADDR")
        self.address = listener.getsockname()[:2]
        self._server = BoundedServer(listener, self._answer, clock=self._clock, limits=self._limits)
        self._server.start()
        log.info("serving metrics and health", host=self.address[0], port=self.address[1])

    def close(self) -> None:
        """Stops at once; who is just being answered is cut off."""
        if self._server:
            self._server.close_all()
            self._server = None

    def _answer(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ["QUERY_STRING"]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return text_answer(environ, start_response, HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
        if path == "/metrics":
            return self._scrape(environ, start_response)
        if path in ("/healthz", "/readyz"):
            return self._health(environ, start_response, only_live=path == "/healthz", verbose="verbose" in query)
        return text_answer(environ, start_response, HTTPStatus.NOT_FOUND, "try /metrics, /healthz or /readyz?verbose")

    def _scrape(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        try:
            page: Iterable[bytes] = self._exposition(environ, start_response)
        except Exception:  # protects the scraper from a half-answered request, and us from not hearing of it
            log.exception("the metrics could not be rendered")
            return text_answer(environ, start_response, HTTPStatus.INTERNAL_SERVER_ERROR, "see the log")
        return page

    def _health(
        self, environ: "WSGIEnvironment", start_response: "StartResponse", *, only_live: bool, verbose: bool
    ) -> Iterable[bytes]:
        answers = {check.name: asked(check) for check in self._checks if check.live or not only_live}
        failed = any(answers.values())
        # The first line for machines and the hurried, the rest for whoever wants to know why.
        lines = ["failed" if failed else "ok"]
        if verbose or failed:
            lines += [f"[{'-' if why else '+'}] {name} {why or 'ok'}" for name, why in answers.items()]
        status = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
        return text_answer(environ, start_response, status, "\n".join(lines))


def asked(check: Check) -> str:
    """The check's answer; one that raises has failed."""
    try:
        return check.ask()
    except Exception as error:  # protects the other checks' answers
        log.exception("a health check failed to answer", check=check.name)
        return f"cannot tell: {type(error).__name__}: {error}"
