"""What the probing costs, measured: `python -m tests.bench [NAME ...]` prints Markdown tables for docs/benchmarks.md.

Each single measurement runs in a process of its own, so that none inherits the memory, the timers or the warm caches of
another; tables show the median over several such processes. These are readings, not tests: nothing here fails because a
machine is slow. Traffic goes to 127/8 only, whose addresses all answer echo; without CAP_NET_RAW the rows that need an
echo say so.
"""

from __future__ import annotations

import array
import gc
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SPREAD_S = 5.0  # starts are spread evenly over one steady pause
AT_A_TIME = 8  # guests on their way
LOOK_S = 0.05  # between two looks whether a guest is up
WINDOW_S = 10.0  # two steady probes of every pod
TURNS = 5  # of what is compared with something else in one process

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# One measurement each, in the child process
# ---------------------------------------------------------------------------------------------------------------------


def make_cooperative() -> None:
    """Before any other import of a measurement, as in the daemon."""
    import vkcocoon  # noqa: F401


@contextmanager
def probed_pods(pods: int, observer: Callable[..., None] | None = None) -> Iterator[Any]:
    """That many pods in steady state, each with an address of 127/8, a row in one lease file and the guest probe.

    What a probe does is what the provider's does: the lease by MAC, read from the file as of now, then one echo.
    """
    make_cooperative()
    from vkcocoon_guests import Reach
    from vkcocoon_net import LeaseFile, open_pinger, ssh_banner, tcp_accepts
    from vkcocoon_probes import Deadline, ProbeManager, ProbeResult, SystemClock

    clock = SystemClock()
    with tempfile.TemporaryDirectory() as directory:
        leases = LeaseFile(write_leases(Path(directory) / "leases.json", pods))
        pinger = open_pinger()
        reach = Reach(pinger, tcp_accepts, ssh_banner)
        manager = ProbeManager(clock, observer=observer)

        def start(index: int) -> None:
            mac, annotations = mac_of(index), {}

            def probe(deadline: Deadline) -> ProbeResult:
                lease = leases.lookup(mac, clock.now())
                return reach.guest(lease.ip, annotations, deadline) if lease else ProbeResult()

            manager.start(f"default/pod-{index}", probe, lambda: None)

        begin = clock.monotonic()
        for index in range(pods):
            clock.sleep(begin + SPREAD_S * index / pods - clock.monotonic())
            start(index)
        clock.sleep(begin + 2 * SPREAD_S - clock.monotonic())
        try:
            yield clock
        finally:
            manager.close()
            pinger.close()


def write_leases(path: Path, pods: int) -> Path:
    rows = [{"mac": mac_of(n), "ip": ip_of(n), "expiry": "2099-01-01T00:00:00Z"} for n in range(pods)]
    path.write_text(json.dumps(rows, indent=2))
    return path


def mac_of(index: int) -> str:
    return ":".join(f"{byte:02x}" for byte in (0x02 << 40 | index).to_bytes(6, "big"))


def ip_of(index: int) -> str:
    return f"127.{64 + index // 62_500}.{index // 250 % 250}.{index % 250 + 1}"


def degraded() -> bool:
    from vkcocoon_net import open_pinger

    pinger = open_pinger()
    pinger.close()
    return pinger.degraded


def measure_lateness(pods: int) -> Row:
    """How late ticks begin, on one core, while every pod is probed with a real echo."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    late: list[float] = []
    measuring = False

    def observer(agent: object, result: object, lateness: float, took: float) -> None:
        if measuring:
            late.append(lateness)

    with probed_pods(pods, observer) as clock:
        measuring = True
        clock.sleep(WINDOW_S)
        measuring = False
    cuts = statistics.quantiles(late, n=100)
    return {
        "probes": len(late),
        "p50": cuts[49] * 1e3,
        "p99": cuts[98] * 1e3,
        "max": max(late) * 1e3,
        "degraded": degraded(),
    }


def measure_cpu(pods: int) -> Row:
    """CPU time of the whole process, user and system, for each steady probe."""
    probes = failed = 0

    def observer(agent: object, result: Any, lateness: float, took: float) -> None:
        nonlocal probes, failed
        probes += 1
        failed += not result.ready

    with probed_pods(pods, observer) as clock:
        probes = failed = 0
        before = time.process_time()
        clock.sleep(WINDOW_S)
        spent, counted, lost = time.process_time() - before, probes, failed
    return {"us": spent / counted * 1e6, "probes": counted, "failed": lost, "degraded": degraded()}


def measure_loop(pods: int) -> Row:
    """The same without anything to probe: what the manager and its timers alone cost."""
    make_cooperative()
    from vkcocoon_probes import ProbeManager, SystemClock

    clock, result = SystemClock(), ready_result()
    count = 0

    def probe(deadline: object) -> Any:
        nonlocal count
        count += 1
        return result

    manager = ProbeManager(clock)
    begin = clock.monotonic()
    for index in range(pods):
        clock.sleep(begin + SPREAD_S * index / pods - clock.monotonic())
        manager.start(f"default/pod-{index}", probe, lambda: None)
    clock.sleep(begin + 2 * SPREAD_S - clock.monotonic())
    count, before = 0, time.process_time()
    clock.sleep(WINDOW_S)
    spent = time.process_time() - before
    row = {"us": spent / count * 1e6, "probes": count}
    manager.close()
    return row


def measure_wake(pods: int) -> Row:
    """The same without any of our code: a greenlet that sleeps and is woken as often as those pods would be probed."""
    import gevent

    pause = SPREAD_S / pods
    gevent.sleep(1.0)  # noqa: TID251  the yardstick is gevent itself
    count, before, end = 0, time.process_time(), time.perf_counter() + WINDOW_S
    while time.perf_counter() < end:
        gevent.sleep(pause)  # noqa: TID251  the yardstick is gevent itself
        count += 1
    return {"us": (time.process_time() - before) / count * 1e6, "probes": count}


def ready_result() -> Any:
    from vkcocoon_probes import ProbeResult

    return ProbeResult(True, "ProbeSucceeded", "answers")


def measure_memory(pods: int) -> Row:
    """Resident memory of the process, over that before the first agent, once every agent has waited and probed."""
    make_cooperative()
    from vkcocoon_probes import ProbeManager, SystemClock

    clock, result = SystemClock(), ready_result()
    manager = ProbeManager(clock, steady_pause=1.0)
    manager.start("warm-up", lambda deadline: result, lambda: None)
    clock.sleep(1.5)
    gc.collect()
    before = resident_bytes()
    for index in range(pods):
        # Closures of its own for each pod, as the provider has them.
        manager.start(f"default/pod-{index}", lambda deadline, index=index: result, lambda index=index: None)
    clock.sleep(2.5)
    gc.collect()
    row = {"kib": (resident_bytes() - before) / pods / 1024}
    manager.close()
    return row


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


TOOL = """\
#!/bin/sh
# As much of cocoon as a plain clone needs: half a second of work, then a record without a pid.
verb=$2 name= pid=0
while [ $# -gt 1 ]; do [ "$1" = --name ] && name=$2; shift; done
case $verb in
  clone) sleep 0.5 ;;
  inspect) name=vm-${1#ID}; pid=4242 ;;
  *) exit 1 ;;
esac
number=${name#vm-}
mac=$(printf '02:00:00:00:%02x:%02x' $((number / 256)) $((number % 256)))
printf '{"id": "ID%s", "hypervisor": "cloud-hypervisor", "state": "running", ' "$number"
printf '"config": {"name": "%s"}, "pid": %s, "network_configs": [{"mac": "%s"}]}' "$name" "$pid" "$mac"
"""


@contextmanager
def providing(pods: int, observer: Callable[..., None]) -> Iterator[Any]:
    """The provider with that many pods whose guests have addresses of 127/8, each steadily probed, and its clock. The
    lease file has as many rows again; `cocoon` is a tool of shell."""
    make_cooperative()
    import logging

    import structlog

    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    from simulator.clock import VirtualClock
    from simulator.fake_kube import FakeKube
    from vkcocoon import Ports, Provider
    from vkcocoon_net import open_pinger
    from vkcocoon_probes import SystemClock
    from vkcocoon_settings import Settings
    from vkcocoon_vms import CocoonCLI, CocoonMacosCLI

    clock = SystemClock()
    with tempfile.TemporaryDirectory() as directory:
        tool = Path(directory) / "cocoon"
        tool.write_text(TOOL)
        tool.chmod(0o755)
        leases = write_leases(Path(directory) / "leases.json", 2 * pods)
        pinger, unused = open_pinger(), VirtualClock()
        ports = Ports(
            clock=clock,
            runtime=CocoonCLI(str(tool)),
            macos=CocoonMacosCLI(str(tool)),
            kube=FakeKube(unused),
            pinger=pinger,
            on_probe=observer,
        )
        settings = Settings(leases_path=str(leases), state_dir=directory, node_ip="127.0.0.1")
        provider, begin = Provider(settings, ports), clock.monotonic()
        for number in range(pods):
            clock.sleep(begin + SPREAD_S * number / pods - clock.monotonic())
            provider.create_pod(bench_pod(number, {"vm.cocoonstack.io/id": "x", "vm.cocoonstack.io/ip": ip_of(number)}))
        clock.sleep(SPREAD_S)
        try:
            yield provider, ports
        finally:
            provider.close()
            pinger.close()
            unused.close()


def measure_creates(pods: int) -> Row:
    """That many pods created at once beside as many that are probed, by real processes of a tool of shell."""
    late, measuring, most = [], False, 0

    def observer(agent: Any, result: object, lateness: float, took: float) -> None:
        if measuring:
            late.append(lateness)

    with providing(pods, observer) as (provider, ports):
        from gevent.pool import Group

        from vkcocoon_probes import spawn

        clock = ports.clock
        group, measuring, begin = Group(), True, clock.monotonic()
        cloned = {"cocoonset.cocoonstack.io/managed": "true", "cocoonset.cocoonstack.io/image": "base"}
        for number in range(pods, 2 * pods):
            spawn(group, f"create {number}", provider.create_pod, bench_pod(number, cloned))
        while group:
            most = max(most, len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
            clock.sleep(0.02)
        seconds, measuring = clock.monotonic() - begin, False
        statuses = [provider.get_pod_status("default", f"pod-{number}") or {} for number in range(pods, 2 * pods)]
        ready = sum(status["conditions"][1]["status"] == "True" for status in statuses)
    cuts = statistics.quantiles(late, n=100)
    row = {"seconds": seconds, "processes": most, "ready": ready, "probes": len(late), "degraded": degraded()}
    return row | {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3, "max": max(late) * 1e3}


def measure_record(pods: int) -> Row:
    """CPU time per steady probe of one provider, in turns without and with a recorder that looks on.

    In turns, because a machine that others use is quicker in one minute than in the next.
    """
    probes = 0
    look: Callable[..., None] = lambda *_: None  # noqa: E731

    def observer(*probe: object) -> None:
        nonlocal probes
        probes += 1
        look(*probe)

    def window(clock: Any) -> float:
        nonlocal probes
        probes, before = 0, time.process_time()
        clock.sleep(SPREAD_S)
        return (time.process_time() - before) / probes * 1e6

    without, recorded, entries = [], [], 0
    with providing(pods, observer) as (provider, ports), tempfile.TemporaryDirectory() as directory:
        from dataclasses import replace

        from vkcocoon_recorder import Recorder
        from vkcocoon_settings import Settings

        settings = Settings(record=directory, leases_path=str(Path(directory) / "none"), node_name="bench")
        for _ in range(TURNS):
            without.append(window(ports.clock))
            recorder = Recorder(settings, ports.clock, version="bench")
            look = recorder.observe(replace(ports, on_probe=lambda *_: None)).on_probe
            recorder.start(provider, lambda pod: None)
            ports.clock.sleep(SPREAD_S)  # its file begins with all there is, and with the first probe of each
            recorded.append(window(ports.clock))
            look = lambda *_: None  # noqa: E731
            recorder.close()
        entries = sum(len(path.read_text().splitlines()) for path in Path(directory).iterdir()) // TURNS
    return {
        "without_us": statistics.median(without),
        "with_us": statistics.median(recorded),
        "ratio": statistics.median(after / before for before, after in zip(without, recorded, strict=True)),
        "entries": entries,
        "degraded": degraded(),
    }


def bench_pod(number: int, annotations: dict[str, str]) -> Any:
    name = {"vm.cocoonstack.io/name": f"vm-{number}", **annotations}
    metadata = {"name": f"pod-{number}", "namespace": "default", "uid": str(number), "annotations": name}
    return {"metadata": metadata, "spec": {"containers": [{"name": "agent"}]}}


def measure_virtual_loop(pods: int) -> Row:
    """One simulated hour of the probe manager alone, on the virtual clock."""
    make_cooperative()
    from simulator.clock import VirtualClock
    from vkcocoon_probes import ProbeManager

    clock, result = VirtualClock(), ready_result()
    probes = 0

    def observer(*_: object) -> None:
        nonlocal probes
        probes += 1

    manager = ProbeManager(clock, observer=observer)
    begin = time.perf_counter()
    for index in range(pods):
        manager.start(f"default/pod-{index}", lambda deadline: result, lambda: None)
    clock.run(3600)
    row = {"seconds": time.perf_counter() - begin, "probes": probes}
    manager.close()
    return row


def measure_virtual_daemon(pods: int) -> Row:
    """One simulated hour of the whole daemon on fakes: pods created, booted, published and probed.

    Processor time, as nothing in it waits: a machine that others use as well says less by its clock on the wall.
    """
    make_cooperative()
    import logging

    import structlog

    from simulator.world import World

    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    begin, used = time.perf_counter(), time.process_time()
    with World(seed=1, network="10.88.0.0/22") as world:
        for index in range(pods):
            world.create_pod(f"pod-{index}")
        world.run(3600)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - used
        ready = sum(world.ready(f"pod-{index}") for index in range(pods))
        probes = len(world.timeline.of(actor="probe"))
    return {"seconds": seconds, "cpu_s": cpu, "probes": probes, "ready": ready}


THREE_PODS = """\
until: 2m
pods:
  - {name: web-0}
  - {name: win-0, os: windows}
  - {name: mac-0, os: macos}
expect:
  - {pod: web-0, ready: true, by: 30s}
"""


def measure_runs(runs: int) -> Row:
    """As many seeds of a scenario of three pods and two minutes, by the command that people type, on all cores."""
    with tempfile.TemporaryDirectory() as directory:
        scenario = Path(directory) / "three.yaml"
        scenario.write_text(THREE_PODS)
        row = measure_startup(*installed(), "simulate", str(scenario), "--runs", str(runs))
    return {"seconds": row["ms"] / 1e3, "cpu_s": row["cpu_ms"] / 1e3}


def installed() -> list[str]:
    """The program of this environment."""
    script = shutil.which("vk-cocoon", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, "-c", "from vkcocoon_cli import main; main()"]


def measure_scrape(pods: int) -> Row:
    """What a scrape of the kubelet API costs with that many VMs, whose files look as those of /proc and cgroups do."""
    make_cooperative()
    sys.path.insert(0, str(ROOT / "tests"))  # as pytest imports the rigs
    from kubelet_rig import HostFiles

    from vkcocoon_exposition import resource_metrics
    from vkcocoon_probes import SystemClock
    from vkcocoon_stats import FRESH_S, Subject
    from vkcocoon_vms import VM

    clock, subjects, spent = SystemClock(), [], []
    with tempfile.TemporaryDirectory() as directory:
        files = HostFiles(Path(directory))
        for number in range(pods):
            vm = VM(f"{number:026}", f"vk-{number}", "running", "cloud-hypervisor", 10_000 + number)
            subjects.append(Subject(f"uid-{number}", "default", f"pod-{number}", "agent", vm))
            files.process(vm.pid, vm.id)
            files.scope(vm.id, usage_us=1_000_000 + number, pids=(vm.pid,))
        stats = files.stats(clock, lambda: subjects)
        stats.sample()  # found for the first time, which is dearer
        for _ in range(5):
            clock.sleep(FRESH_S)
            began = time.process_time()
            page = b"".join(resource_metrics(stats.sample()))
            spent.append((time.process_time() - began) * 1e3)
    return {"ms": statistics.median(spent), "vms": page.count(b"container_cpu_usage_seconds_total{")}


def measure_startup(*command: str) -> Row:
    """Wall and CPU time of a whole process, started and waited for."""
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return {"ms": (time.perf_counter() - begin) * 1e3, "cpu_ms": cpu * 1e3}


def measure_daemon(*command: str) -> Row:
    """From the start of the daemon to its node being Ready in a fake cluster, and from SIGTERM to its end; no pods."""
    make_cooperative()
    import socket

    from simulator import live_world
    from vkcocoon_kube import ApiError
    from vkcocoon_probes import SystemClock
    from vkcocoon_status import condition_of

    clock = SystemClock()
    live_world._program = lambda: list(command)
    with tempfile.TemporaryDirectory() as home:
        world = live_world.LiveWorld(live_world.Place(Path(home), bridged=False), clock, lambda *_: None)
        told = world.environment() | {"SHIV_ROOT": os.environ.get("SHIV_ROOT", str(Path.home() / ".shiv"))}
        world.daemon._environment = lambda: told

        def ready() -> bool:
            try:
                node = world.kube.admin.get(f"/api/v1/nodes/{live_world.NODE_NAME}")
            except ApiError:
                return False
            return condition_of(node.get("status") or {}, "Ready").get("status") == "True"

        try:
            world.start(socket.create_server(("127.0.0.1", 0)), daemon=False)
            begin = clock.monotonic()
            world.daemon.start()
            while not ready():
                if clock.monotonic() - begin > 60:
                    raise SystemExit(f"the node did not become Ready\n{world.daemon.log_tail()}")
                clock.sleep(0.01)
            up = clock.monotonic() - begin
            begin = clock.monotonic()
            world.daemon.stop()
            return {"ready_s": up, "stop_s": clock.monotonic() - begin}
        finally:
            world.close()


def measure_guests(guests: int) -> Row:
    """That many live guests, each a process in a network namespace of its own: from nothing to an echo of each."""
    from simulator import namespaces

    kind = namespaces.available()[0]
    if not kind:
        return {"seconds": 0.0, "refused": True}
    home = namespaces.free_directory()
    words = [sys.executable, "-m", "tests.bench", "--child", json.dumps(["power_guests_on", [home, guests]])]
    environ = namespaces.environment(**{namespaces.MARK: f"bench{os.getpid()}"})
    command = namespaces.watcher_command(kind, home, words)
    child = subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return {**json.loads(child.stdout.splitlines()[-1]), "refused": False}


def power_guests_on(home: str, guests: int) -> Row:
    """What `measure_guests` runs in the namespaces."""
    from gevent import monkey

    monkey.patch_all()
    from gevent.pool import Pool

    from simulator.fake_executables import LiveHost
    from simulator.fake_tools import Machine
    from simulator.live_world import GuestNetwork, Place
    from vkcocoon_net import PingError, open_pinger
    from vkcocoon_probes import Deadline, SystemClock, spawn

    clock, place = SystemClock(), Place(Path(home), bridged=True)
    network, host, pinger, group = GuestNetwork(place, clock), LiveHost(home), open_pinger(), Pool(AT_A_TIME)
    begin, spec = clock.monotonic(), json.dumps({"boot_s": 0.0, "lease_s": 0.0})
    network.start()

    def bring_up(number: int) -> None:
        name, mac = f"vm-{number}", mac_of(number)
        (Path(home) / "guests" / f"{name}.json").write_text(spec)
        argv = ("cloud-hypervisor", "--api-socket", f"{home}/run/{name}/api.sock")
        host.power_on(Machine(name=name, vm_id=name, mac=mac, os="linux", argv=argv))
        while True:
            try:
                pinger.ping(network.cocoon_net.address(mac), Deadline(clock, LOOK_S))
                return
            except PingError:
                clock.sleep(LOOK_S)

    for number in range(guests):
        spawn(group, f"guest {number}", bring_up, number)  # waits for its turn
    group.join()
    return {"seconds": clock.monotonic() - begin}


# ---------------------------------------------------------------------------------------------------------------------
# Tables, in the parent process
# ---------------------------------------------------------------------------------------------------------------------


def medians(function: Callable[..., Row], *arguments: Any, times: int) -> Row:
    """The median of each figure over that many child processes."""
    rows = [in_child(function, arguments) for _ in range(times)]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def in_child(function: Callable[..., Row], arguments: tuple[Any, ...]) -> Row:
    call = json.dumps([function.__name__, arguments])
    child = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--child", call], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(child.stdout.splitlines()[-1]))


def table(*rows: tuple[str, ...]) -> str:
    """The first row is the head; all columns but the first are numbers."""
    head, *body = rows
    lines = [head, ("---", *["--:"] * (len(head) - 1)), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def what(row: Row) -> str:
    return "no echo: raw socket refused" if row.get("degraded") else "lease check and echo"


def lateness() -> str:
    rows = [("pods", "probe", "probes", "p50 ms", "p99 ms", "worst ms")]
    for pods in (1_000, 10_000):
        row = medians(measure_lateness, pods, times=3)
        figures = (f"{row[name]:.2f}" for name in ("p50", "p99", "max"))
        rows.append((f"{pods:,}", what(row), f"{row['probes']:,.0f}", *figures))
    return "How late a steady probe begins. One core; starts spread evenly over 5 s; 10 s measured.\n\n" + table(*rows)


def cpu() -> str:
    rows = [("pods and lease rows", "probe", "probes", "failed", "CPU µs per probe")]
    for pods in (100, 1_000, 4_000):
        row = medians(measure_cpu, pods, times=3)
        rows.append((f"{pods:,}", what(row), f"{row['probes']:,.0f}", f"{row['failed']:.0f}", f"{row['us']:.1f}"))
    for function, probe in ((measure_loop, "nothing: the loop alone"), (measure_wake, "nothing: a bare gevent.sleep")):
        for pods in (100, 1_000, 4_000):
            row = medians(function, pods, times=3)
            rows.append((f"{pods:,}", probe, f"{row['probes']:,.0f}", "", f"{row['us']:.1f}"))
    return (
        "CPU time of the process, user and system, per steady probe (every 5 s; echoes to 127/8, so the kernel's "
        "answering is in it too). 10 s measured. The fewer wake-ups a second, the more each costs: an idle core has to "
        "be woken and its caches are cold. The last rows say what that alone comes to.\n\n" + table(*rows)
    )


def memory() -> str:
    rows = [("agents", "KiB per agent")]
    for pods in (1_000, 10_000):
        rows.append((f"{pods:,}", f"{medians(measure_memory, pods, times=3)['kib']:.1f}"))
    return "Resident memory per agent with its greenlet, over the process without agents.\n\n" + table(*rows)


def creates() -> str:
    rows = [
        ("created at once", "ready", "took s", "processes at once", "probes meanwhile", "p50 ms", "p99 ms", "worst ms")
    ]
    for pods in (64, 256):
        row = medians(measure_creates, pods, times=3)
        counts = (f"{row['ready']:.0f}", f"{row['seconds']:.1f}", f"{row['processes']:.0f}", f"{row['probes']:,.0f}")
        rows.append((f"{pods}", *counts, *(f"{row[name]:.2f}" for name in ("p50", "p99", "max"))))
    return (
        "Pods created at once by the provider beside as many that are ready and probed every 5 s, with real processes "
        "of a `cocoon` that takes half a second to clone: two per create, at most 8 at a time, of which 6 may change "
        "something. How late the probes of all of them began meanwhile.\n\n" + table(*rows)
    )


def record() -> str:
    rows = [("pods", "probe", "CPU µs per probe", "the same, recorded", "ratio", "entries written")]
    for pods in (100, 1_000):
        row = in_child(measure_record, (pods,))  # which measures in turns by itself
        figures = (f"{row['without_us']:.0f}", f"{row['with_us']:.0f}", f"{row['ratio']:.2f}", f"{row['entries']:.0f}")
        rows.append((f"{pods:,}", what(row), *figures))
    return (
        "`vk-cocoon run --record`: CPU time of the process per steady probe of the provider, in turns of 5 s without "
        "and with a recorder. An entry is written for what is another answer than the one before.\n\n" + table(*rows)
    )


def virtual() -> str:
    rows = [("what", "pods", "probes", "ready at the end", "wall s", "CPU s")]
    loop = medians(measure_virtual_loop, 256, times=3)
    rows.append(("the probe manager alone", "256", f"{loop['probes']:,.0f}", "256", f"{loop['seconds']:.2f}", ""))
    whole = medians(measure_virtual_daemon, 256, times=3)
    figures = (f"{whole['probes']:,.0f}", f"{whole['ready']:.0f}", f"{whole['seconds']:.2f}", f"{whole['cpu_s']:.2f}")
    rows.append(("the whole daemon on fakes", "256", *figures))
    return "One simulated hour in virtual time.\n\n" + table(*rows)


def runs() -> str:
    row = medians(measure_runs, 2_000, times=1)
    rows = [("runs", "wall s", "CPU s"), ("2,000", f"{row['seconds']:.1f}", f"{row['cpu_s']:.1f}")]
    return "`vk-cocoon simulate --runs 2000` of a scenario of three pods and two minutes, on all cores.\n\n" + table(
        *rows
    )


def scrape() -> str:
    rows = [("VMs", "CPU ms")]
    for pods in (100, 1_000):
        row = medians(measure_scrape, pods, times=3)
        rows.append((f"{row['vms']:,.0f}", f"{row['ms']:.1f}"))
    return "One scrape of `/metrics/resource`, from reading the files of each VM to the page.\n\n" + table(*rows)


def startup() -> str:
    """Commands from this environment and, when `make dist` has built it, from the single file after its first start."""
    rows = [("command", "wall ms", "of it CPU", "aim")]

    def row(name: str, aim: str, *command: str) -> tuple[str, ...]:
        # Without a child in between: what is measured is a process already.
        taken = [measure_startup(*command) for _ in range(11)]
        return name, *(f"{statistics.median(one[figure] for one in taken):.0f}" for figure in ("ms", "cpu_ms")), aim

    for arguments, aim in ((["--help"], "200"), (["version"], "–"), (["run", "--help"], "–")):
        rows.append(row(f"`vk-cocoon {' '.join(arguments)}`", aim, *installed(), *arguments))
    single = [
        str(path) for path in sorted((ROOT / "dist").glob(f"*-cp{''.join(map(str, sys.version_info[:2]))}-*.pyz"))
    ]
    for path in single:
        measure_startup(path, "--version")  # unpacks it
        rows.append(row("the single file, `--help`", "500", path, "--help"))
    lives = [("daemon without pods", "s to node Ready", "aim", "s from SIGTERM to the end", "aim ")]
    for name, command in [("this environment", installed()), *(("the single file", [path]) for path in single)]:
        life = medians(measure_daemon, *command, times=5)
        lives.append((name, f"{life['ready_s']:.2f}", "3", f"{life['stop_s']:.2f}", "10"))
    missing = "" if single else "\n\nWithout the single file, which `make dist` builds."
    text = "Whole processes, median of 11; daemons beside a fake cluster in this machine, median of 5."
    return f"{text}\n\n{table(*rows)}\n\n{table(*lives)}{missing}"


def guests() -> str:
    rows = [("guests", "all answer after, s")]
    for count in (50, 200):
        row = medians(measure_guests, count, times=1)
        rows.append((f"{count}", "namespaces are refused" if row["refused"] else f"{row['seconds']:.1f}"))
    return (
        "Guests of the playground, each a process in a network namespace of its own, without a boot, eight on their "
        "way at a time as the daemon makes them: from the start of their network, and of the process that forks them, "
        "until each has answered an echo.\n\n" + table(*rows)
    )


BENCHES = {
    "lateness": lateness,
    "creates": creates,
    "cpu": cpu,
    "memory": memory,
    "record": record,
    "virtual": virtual,
    "runs": runs,
    "scrape": scrape,
    "startup": startup,
    "guests": guests,
}


def machine() -> str:
    """What the figures depend on and a reader can compare with."""
    from importlib.metadata import version

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    load = f"load average {os.getloadavg()[0]:.1f} before"
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores usable; Linux {platform.release()}; "
        f"Python {platform.python_version()}, gevent {version('gevent')}; {load}; "
        f"a random read of 64 MiB takes {random_read_ns():.0f} ns, an empty call {empty_call_ns():.0f} ns"
    )


def random_read_ns() -> float:
    """How fast memory is at the moment: on a machine shared with others it varies more than anything else."""
    cells = array.array("q", range(1 << 23))
    place, begin = 1, time.perf_counter()
    for _ in range(200_000):
        place = (place * 1_103_515_245 + 12_345 + cells[place] // (1 << 40)) & 0x7FFFFF  # the next depends on this one
    return (time.perf_counter() - begin) / 200_000 * 1e9


def empty_call_ns() -> float:
    """How fast this interpreter is here, in a loop that fits into the first cache."""
    return min(timeit.repeat("f()", "def f(): pass", number=100_000, repeat=5)) / 100_000 * 1e9


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--child"]:
        name, values = json.loads(arguments[1])
        sys.stdout.write(json.dumps(globals()[name](*values)) + "\n")
        return 0
    if unknown := sorted(set(arguments) - set(BENCHES)):
        sys.stderr.write(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHES)}\n")
        return 2
    sys.stdout.write(f"Command: `{' '.join(['python -m tests.bench', *arguments])}`\n\nMachine: {machine()}\n")
    for name in arguments or BENCHES:
        sys.stdout.write(f"\n## {name}\n\n{BENCHES[name]()}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
