"""Tries what `make dist` built as somebody would who only has the artefacts: outside the checkout, one after the other.

    python packaging/try_dist.py DIST [SECOND-BUILD]

For the wheel (in a new environment, with the locked dependencies), the single file, and the deb (unpacked): version,
help, doctor, a scenario; then the daemon of that very artefact runs beside a fake cluster and brings up a pod, is asked
for its status, and stops; then its own playground runs for some seconds. The single file also refuses another Python
and a full disk in one line, and is installed by typing what docs/installation.md and the README say, in a throw-away
root. There too dpkg installs, upgrades, removes and purges the deb beside a running guest. With a second build, the two
must be equal to the byte.

Only the fake cluster and its guests come from the checkout; the daemon's environment does not know where that is.
"""

from gevent import monkey

monkey.patch_all()

import hashlib
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from build_dist import MINOR, artefacts
from throwaway import ThrowAwayRoot

from simulator import live_world
from simulator.live_clusters import FakeCluster
from simulator.live_world import NODE_NAME, LiveWorld, Place
from simulator.world import example_pod
from vkcocoon_envfile import parse
from vkcocoon_kube import ApiError
from vkcocoon_probes import SystemClock
from vkcocoon_status import condition_of

ROOT = Path(__file__).resolve().parent.parent
CLOCK = SystemClock()
HELP_S, SINGLE_HELP_S = 0.2, 0.5  # once everything has been read from the disk
WALKED_NODE = "rack1-host7"  # as docs/installation.md calls it
PODS = "/api/v1/namespaces/default/pods"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE_NAME}"
SETTLE_S = 12.0  # the new daemon has adopted the pod, and asked its guest twice


def main(arguments: list[str]) -> None:
    dist = Path(arguments[0]).resolve()
    with tempfile.TemporaryDirectory(prefix="vk-cocoon-dist-") as name:
        work = Path(name)
        check_sums(dist)
        if len(arguments) > 1:
            compare(dist, Path(arguments[1]).resolve())
        for path in artefacts(dist):
            program, limit = install(path, work / path.suffix.strip("."))
            say(f"trying {path.name}")
            try_commands(program, limit)
            try_daemon(program, work / f"{path.suffix}-world")
            try_playground(program)
            if path.suffix == ".pyz":
                try_in_the_way(path, work)
                walk(dist, work)
            if path.suffix == ".deb":
                try_life_of_deb(path, work)
    say("all artefacts work")


def say(text: str) -> None:
    sys.stderr.write(f"dist: {text}\n")


def check(holds: object, what: str) -> None:
    if not holds:
        raise SystemExit(f"dist: FAILED: {what}")


class Program:
    """An installed vk-cocoon: its file, and an environment that knows nothing but it."""

    def __init__(self, path: Path, home: Path) -> None:
        self.path = path
        self.environ = {
            "PATH": os.defpath + ":" + os.environ["PATH"],
            "HOME": str(home),
            "SHIV_ROOT": str(home / "unpacked"),
        }

    def run(self, *words: str, code: int = 0) -> str:
        ended = subprocess.run(
            [self.path, *words], env=self.environ, cwd="/", capture_output=True, text=True, check=False, timeout=300
        )
        shown = f"{self.path.name} {' '.join(words)}: {ended.returncode}\n{ended.stdout}{ended.stderr}"
        check(ended.returncode == code, shown)
        return ended.stdout


def install(path: Path, place: Path) -> tuple[Program, float]:
    """The program of an artefact, and how long its help may take."""
    place.mkdir()
    if path.suffix == ".whl":
        subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
        pip = [place / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        lock = ROOT / "packaging" / "runtime.lock"
        subprocess.run([*pip, "--require-hashes", "--no-deps", "-r", lock], check=True, cwd="/")
        subprocess.run([*pip, "--no-deps", path], check=True, cwd="/")
        return Program(place / "venv/bin/vk-cocoon", place), HELP_S
    if path.suffix == ".deb":
        subprocess.run(["dpkg-deb", "--extract", path, place], check=True)
        check_deb(path, place)
        return Program(place / "usr/bin/vk-cocoon", place), SINGLE_HELP_S
    return Program(path, place), SINGLE_HELP_S


def check_sums(dist: Path) -> None:
    for line in (dist / "SHA256SUMS").read_text().splitlines():
        wanted, name = line.split()
        check(hashlib.sha256((dist / name).read_bytes()).hexdigest() == wanted, f"the sum of {name}")


def compare(one: Path, other: Path) -> None:
    sums = [(folder / "SHA256SUMS").read_text() for folder in (one, other)]
    check(sums[0] == sums[1], f"two builds differ:\n{sums[0]}{sums[1]}")
    say("two builds are equal to the byte")


def check_deb(path: Path, place: Path) -> None:
    field = subprocess.run(["dpkg-deb", "--field", path, "Depends"], check=True, capture_output=True, text=True).stdout
    check(field.startswith(f"python3 (>= {MINOR}), python3 (<< 3."), field)
    unit = place / "lib/systemd/system/vk-cocoon.service"
    check("ExecStart=/usr/bin/vk-cocoon run" in unit.read_text(), "the unit starts the packaged program")
    if shutil.which("systemd-analyze"):
        text = unit.read_text().replace("/usr/bin/vk-cocoon", str(place / "usr/bin/vk-cocoon"))
        unit.write_text(text)
        ended = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
        about_us = [line for line in ended.stderr.splitlines() if "vk-cocoon" in line]
        check(ended.returncode == 0 and not about_us, f"systemd-analyze verify:\n{ended.stderr}")


def try_commands(program: Program, limit: float) -> None:
    check(program.run("--version").startswith("vk-cocoon "), "the version")
    wall, cpu = map(min, zip(*(_timed(program, "--help") for _ in range(5)), strict=True))
    # On a busy machine the rest of the time is other people's; `python -m tests.bench startup` measures on a quiet one.
    check(cpu < limit, f"help took {wall:.2f} s, {cpu:.2f} s of it CPU")
    say(f"    help in {wall * 1000:.0f} ms, {cpu * 1000:.0f} ms of it CPU")
    found = json.loads(program.run("version", "-o", "json"))
    check(found["python"].startswith(MINOR), f"it runs on {found['python']}")
    check("met    no invariant is broken" in program.run("simulate", "oracle"), "a scenario")
    check("complete" in program.run("completion", "bash"), "completion")
    ended = subprocess.run(
        [program.path, "doctor", "--pre", "-o", "json"], env=program.environ, cwd="/", capture_output=True, check=False
    )
    check(ended.returncode in (0, 1) and json.loads(ended.stdout)["sections"][0]["name"] == "host", "doctor --pre")


def _timed(program: Program, *words: str) -> tuple[float, float]:
    """Seconds until it ended, and of CPU."""
    began, used = CLOCK.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    program.run(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return CLOCK.monotonic() - began, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


@contextmanager
def world_of(program: Program, home: Path, *, running: bool = True) -> Iterator[LiveWorld]:
    """A fake cluster and fake command lines around the daemon of that program, which is started unless told not to."""
    home.mkdir()
    cluster = FakeCluster(CLOCK, socket.create_server(("127.0.0.1", 0)))
    world = LiveWorld(Place(home, bridged=False), CLOCK, cluster, lambda *_: None)
    told = {**world.environment(), "SHIV_ROOT": program.environ["SHIV_ROOT"]}
    del told["PYTHONPATH"]
    world.daemon._environment = lambda: told
    (home / "env").write_text("".join(f"{name}={value}\n" for name, value in told.items()))
    usual, live_world._program = live_world._program, lambda: [str(program.path)]
    try:
        world.start()
        if running:
            world.daemon.start()
        yield world
    finally:
        world.close()
        live_world._program = usual


def try_daemon(program: Program, home: Path) -> None:
    began = CLOCK.monotonic()
    with world_of(program, home) as world:
        until(lambda: _ready(world, f"/api/v1/nodes/{NODE_NAME}"), world, "the node is Ready")
        say(f"    node Ready after {CLOCK.monotonic() - began:.1f} s")
        world.cluster.api.create(PODS, example_pod("web-0", node=NODE_NAME))
        until(lambda: _ready(world, f"{PODS}/web-0"), world, "a pod is Ready")
        told = json.loads(program.run("status", "-o", "json", "--env-file", str(home / "env")))
        check([pod["ready"] for pod in told["pods"]] == [True], f"status says {told['pods']}")
        world.daemon.stop()
        check(not world.daemon.failures, f"the daemon did not stop well: {world.daemon.failures}")
    say("    its daemon brought up a pod and stopped")


def _ready(world: LiveWorld, path: str) -> bool:
    try:
        found: dict[str, Any] = world.cluster.api.get(path)
    except ApiError:
        return False
    return condition_of(found.get("status") or {}, "Ready").get("status") == "True"


def until(holds: Any, world: LiveWorld, what: str) -> None:
    end = CLOCK.monotonic() + 120
    while not holds():
        check(CLOCK.monotonic() < end, f"{what} never came true\n{world.daemon.log_tail()}")
        CLOCK.sleep(0.05)


def try_playground(program: Program) -> None:
    program.run("playground", "--for", "15s", "--no-table", "--no-tour")
    say("    its playground ran")


def try_life_of_deb(path: Path, work: Path) -> None:
    """Installed, upgraded, removed and purged by dpkg, its daemon running beside a pod: the guest must not notice."""
    if os.geteuid() != 0:
        say("    not installed by dpkg, which takes root")
        return
    with ThrowAwayRoot(work / "throwaway") as root:
        dpkg(root, "--install", path)
        asked = ["daemon-reload", "enable --quiet vk-cocoon.service", "start --no-block vk-cocoon.service"]
        check(root.asked_of_systemd() == asked, "an installation enables and starts the unit")
        launcher = work / "installed"
        launcher.write_text(f'#!/bin/sh\nexec {" ".join(root.argv("/usr/bin/vk-cocoon"))} "$@"\n')
        launcher.chmod(0o755)
        program = Program(launcher, work)
        program.environ["SHIV_ROOT"] = "/var/cache/vk-cocoon"
        with world_of(program, work / "deb-world") as world:
            root.write("/etc/cocoon/vk-cocoon.env", (work / "deb-world/env").read_text(), 0o600)
            until(lambda: _ready(world, f"/api/v1/nodes/{NODE_NAME}"), world, "the node is Ready")
            world.cluster.api.create(PODS, example_pod("web-0", node=NODE_NAME))
            until(lambda: _ready(world, f"{PODS}/web-0"), world, "a pod is Ready")
            guest, ready = guests(world), ready_condition(world)
            check(guest, "the guest is a process")

            newer = later_version(path, work)
            dpkg(root, "--install", newer)
            asked = [word for word in root.asked_of_systemd() if word != "daemon-reload"]
            check(asked == ["try-restart --no-block vk-cocoon.service"], f"an upgrade restarts the unit: {asked}")
            check(os.path.exists(f"/proc/{world.daemon.pid}"), "the old daemon runs while it is replaced")
            restart(world)
            check(guests(world) == guest, "the guest went on through the upgrade")
            check(ready_condition(world) == ready, f"the pod's Ready did not move: {ready} {ready_condition(world)}")

            root.write("/run/vk-cocoon.pid", str(world.daemon.pid), 0o600)
            world.daemon._stopping = True  # it is to end, and that is no failure
            dpkg(root, "--remove", "vk-cocoon")
            asked = [word for word in root.asked_of_systemd() if not word.startswith("is-enabled")]
            check(asked == ["disable --quiet --now vk-cocoon.service", "daemon-reload"], "a removal stops the unit")
            check(not os.path.exists(f"/proc/{world.daemon.pid}"), "the daemon has ended")
            check(guests(world) == guest, "the guest outlives the package")
            check(not root.has("/usr/bin/vk-cocoon") and root.has("/var/cache/vk-cocoon"), "only the cache is left")
            dpkg(root, "--install", newer)
            asked = ["daemon-reload", "enable --quiet vk-cocoon.service", "start --no-block vk-cocoon.service"]
            check(root.asked_of_systemd() == asked, "installed again, it is enabled and started again")
            dpkg(root, "--purge", "vk-cocoon")
            check(not root.has("/var/cache/vk-cocoon"), "a purge takes the cache, too")
            check(root.has("/etc/cocoon/vk-cocoon.env"), "settings are the administrator's")
            check(guests(world) == guest and ready_condition(world) == ready, "the guest still runs, and is Ready")
    say("    dpkg installed, upgraded, removed and purged it, and the guest did not notice")


def dpkg(root: ThrowAwayRoot, action: str, what: Path | str) -> None:
    ended = root.run("dpkg", action, str(what))
    check(ended.returncode == 0, f"dpkg {action}: {ended.stdout}{ended.stderr}")


def later_version(path: Path, work: Path) -> Path:
    """The same package with a higher version."""
    tree, target = work / "later", work / "later.deb"
    subprocess.run(["dpkg-deb", "--raw-extract", path, tree], check=True)
    control = tree / "DEBIAN" / "control"
    control.write_text(re.sub(r"^(Version: .*)$", r"\1+1", control.read_text(), flags=re.MULTILINE))
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, target], check=True, capture_output=True
    )
    return target


def guests(world: LiveWorld) -> dict[str, str]:
    """The processes of the VMs, each with the instant of its start, which no other process of that number has."""
    found = {}
    for file in world.place.home.rglob("*.pid"):
        pid = file.read_text().strip()
        if os.path.exists(f"/proc/{pid}/stat"):
            found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return found


def ready_condition(world: LiveWorld) -> dict[str, Any]:
    return dict(condition_of(world.cluster.api.get(f"{PODS}/web-0")["status"], "Ready"))


def restart(world: LiveWorld) -> None:
    """As systemd restarts the unit; returns once the new daemon has started up."""
    log = world.place.home / "vk-cocoon.log"
    before = log.stat().st_size
    world.daemon.stop()
    world.daemon._stopping = False
    world.daemon.start()
    renewed = world.cluster.api.get(LEASE)["spec"]["renewTime"]
    until(lambda: world.cluster.api.get(LEASE)["spec"]["renewTime"] > renewed, world, "the node's lease is renewed")
    until(lambda: b"serving the status page" in log.read_bytes()[before:], world, "the new daemon runs")
    CLOCK.sleep(SETTLE_S)


def try_in_the_way(path: Path, work: Path) -> None:
    """Another Python, a full disk, a cache nobody may write: one line each."""
    for other in ("python3.12", "python3.13", "python3.10"):
        if other != f"python{MINOR}" and shutil.which(other):
            ended = subprocess.run([other, path, "--version"], capture_output=True, text=True, check=False, cwd="/")
            if "not found" not in ended.stderr:  # a shim of a version manager
                _one_line(ended, f"this file is for Python {MINOR}")
    # A file as the place for the cache stands for everything that cannot be written.
    blocked = work / "blocked"
    blocked.write_text("")
    environ = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(blocked / "x")}
    ended = subprocess.run([path, "--version"], env=environ, capture_output=True, text=True, check=False, cwd="/")
    _one_line(ended, "cannot unpack into")
    script = f"mount -t tmpfs -o size=4m none {work} && SHIV_ROOT={work}/x exec {path} --version"
    refused = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], check=False).returncode
    if not refused:
        argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
        _one_line(subprocess.run(argv, capture_output=True, text=True, check=False), "No space left on device")
    say("    another Python and a full disk are refused in one line")


def walk(dist: Path, work: Path) -> None:
    """Everything docs/installation.md and the part of the README for hosts type, as root of a throw-away host.

    What is not tried here is kubectl: tests/e2e does what its two lines do against a real control plane. There is no
    systemd either; once `systemctl enable --now` was typed, the daemon is started with what unit and env-file say.
    """
    if os.geteuid() != 0:
        say("    the pages are not walked, which takes root")
        return
    here, home = work / "here", work / "walk"
    shutil.copytree(dist, here)
    for name in ("rbac.yaml", "vk-cocoon.env.example", "vk-cocoon.service"):
        shutil.copy(ROOT / "packaging" / name, here)
    with ThrowAwayRoot(work / "walked") as root:
        launcher = work / "started"
        launcher.write_text(f'#!/bin/sh\nexec {" ".join(root.argv("/usr/local/bin/vk-cocoon"))} "$@"\n')
        launcher.chmod(0o755)
        with world_of(Program(launcher, work), home, running=False) as world:
            root.write("/etc/cocoon/kubeconfig", (home / "kubeconfig").read_text(), 0o600)
            for line in typed(ROOT / "docs" / "installation.md"):
                step(line, root, world, here)
            world.cluster.api.create(PODS, example_pod("web-0", node=WALKED_NODE))
            until(lambda: _ready(world, f"{PODS}/web-0"), world, "a pod is Ready")
            lines = [
                line.partition("#")[0].strip() for line in typed(ROOT / "README.md") if line.startswith("vk-cocoon ")
            ]
            check(lines[-2:] == ["vk-cocoon probe web-0", "vk-cocoon leases"], f"the README types {lines}")
            for line in lines:
                step(line, root, world, here)
            world.daemon.stop()
            check(not world.daemon.failures, f"the daemon did not stop well: {world.daemon.failures}")
    say("    the installation page and the README are right")


def step(line: str, root: ThrowAwayRoot, world: LiveWorld, here: Path) -> None:
    """Type one line; what it promises must be true afterwards."""
    if re.match(r"[A-Z_]+=", line):
        edited = "/etc/cocoon/vk-cocoon.env"
        check(root.run("stat", "-c%a", edited).stdout == "600\n", "the env-file is for its owner only")
        root.run("sh", "-c", f"echo '{line}' >>{edited}")
        return
    if line.startswith("kubectl "):
        return
    if line == "vk-cocoon config":  # the lines of this stage: the rest of the host is simulated
        simulated = (world.place.home / "env").read_text()
        given = [one for one in simulated.splitlines() if not one.startswith(("KUBECONFIG=", "VK_NODE_NAME="))]
        root.run("sh", "-c", "cat >>/etc/cocoon/vk-cocoon.env", text="\n".join(given) + "\n")
    # The one variable more is for the simulated cocoon.
    ended = root.run("sh", "-c", f"cd {here} && export FAKE_COCOON_HOME={world.place.home} && {line}")
    # The doctor is right that this is no cocoon host: it has no VMs' CPU, no systemd, and no certificate authority.
    check(ended.returncode == 0 or line.startswith("vk-cocoon doctor"), f"{line}: {ended.stdout}{ended.stderr}")
    if line.startswith("systemctl enable --now"):
        check("daemon-reload" in root.asked_of_systemd(), "the unit is known to systemd")
        verified = root.run("systemd-analyze", "verify", "/etc/systemd/system/vk-cocoon.service")
        check(verified.returncode == 0 and "vk-cocoon" not in verified.stderr, verified.stderr)
        told = parse(root.run("cat", "/etc/cocoon/vk-cocoon.env").stdout, "the env-file")
        world.daemon._environment = lambda: told | {"PATH": os.defpath, "SHIV_ROOT": "/var/cache/vk-cocoon"}
        world.daemon.start()
        until(lambda: _ready(world, f"/api/v1/nodes/{WALKED_NODE}"), world, "the node is Ready")
    elif line.startswith("vk-cocoon doctor"):
        check("Python " in ended.stdout and not ended.stderr, ended.stdout + ended.stderr)
    elif line == "vk-cocoon status":
        check(f"node {WALKED_NODE}:" in ended.stderr, ended.stderr)


def typed(page: Path) -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def _one_line(ended: "subprocess.CompletedProcess[str]", words: str) -> None:
    fine = ended.returncode == 1 and len(ended.stderr.splitlines()) == 1 and words in ended.stderr
    check(fine, f"{ended.returncode}: {ended.stdout}{ended.stderr}")


if __name__ == "__main__":
    main(sys.argv[1:])
