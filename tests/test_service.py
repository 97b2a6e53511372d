"""The process of a real host: its doors, its signals, what is in its way at the start, and how fast it is (D4).

Each test runs `vk-cocoon run` beside a fake cluster and fake command lines, with guests on loopback addresses.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.live_clusters import FakeCluster
from simulator.live_world import NODE_NAME, LiveWorld, Place
from simulator.world import example_pod
from vkcocoon_kube import ApiError
from vkcocoon_probes import SystemClock

ROOT = Path(__file__).parent.parent
CLOCK = SystemClock()
NODE = f"/api/v1/nodes/{NODE_NAME}"

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def until(holds, limit_s=30.0):
    """What `holds` returns once it is true."""
    end = CLOCK.monotonic() + limit_s
    while not (found := holds()):
        assert CLOCK.monotonic() < end, "never came true"
        CLOCK.sleep(0.02)
    return found


class Site:
    """A host with a cluster around it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        cluster = FakeCluster(CLOCK, socket.create_server(("127.0.0.1", 0)))
        self.world = LiveWorld(Place(home, bridged=False), CLOCK, cluster, lambda *_: None)
        self.env_file = home / "vk-cocoon.env"

    def start(self):
        self.began = CLOCK.monotonic()
        self.world.start()
        self.world.daemon.start()
        self.env_file.write_text(
            "".join(f"{name}={value}\n" for name, value in self.world.environment().items() if name.isupper())
        )
        return self

    def node_ready(self):
        try:
            node = self.world.cluster.api.get(NODE)
        except ApiError:
            return False
        conditions = (node.get("status") or {}).get("conditions") or []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def log(self):
        path = self.home / "vk-cocoon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def address(self, what):
        """Where the daemon that runs now serves `what`."""
        found = re.findall(rf"{what} .*host=(\S+) port=(\d+)", self.log())
        return found[-1][0], int(found[-1][1])

    def get(self, what, path):
        connection = http.client.HTTPConnection(*self.address(what), timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def command(self, *words):
        environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environ |= {"PYTHONPATH": str(ROOT), "FAKE_COCOON_HOME": str(self.home)}
        command = [sys.executable, "-m", "vkcocoon_cli", *words, "--env-file", str(self.env_file)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)

    def pod(self, name):
        return self.world.cluster.api.get(f"/api/v1/namespaces/default/pods/{name}")


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.world.close()


METRICS, PAGE = "serving metrics and health", "serving the status page"


class TestDoors:
    def test_a_pod_is_told_of_in_the_same_words_at_every_door(self, site):
        site.start()
        until(site.node_ready)
        closed = {"vm.cocoonstack.io/probe-port": "9"}
        pod = example_pod("web-0", node=NODE_NAME, annotations=closed)
        site.world.cluster.api.create("/api/v1/namespaces/default/pods", pod)

        def waits():
            conditions = (site.pod("web-0").get("status") or {}).get("conditions") or []
            return any(one["type"] == "Ready" and one["reason"] == "PortClosed" for one in conditions)

        until(waits)
        (told,) = json.loads(site.command("status", "-o", "json").stdout)["pods"]
        assert (told["name"], told["reason"]) == ("web-0", "PortClosed")
        assert "PortClosed" in site.command("status").stdout
        assert "PortClosed" in site.get(PAGE, "/")[1]
        assert 'cocoon_vk_pods_waiting{reason="PortClosed"} 1.0' in site.get(METRICS, "/metrics")[1]
        byhand = site.command("probe", "default/web-0", "-o", "json")
        assert (byhand.returncode, json.loads(byhand.stdout)["stages"][-1]["reason"]) == (1, "PortClosed")
        assert told["ip"] in site.command("leases").stdout

    def test_health_lists_each_check(self, site):
        site.start()
        until(site.node_ready)
        until(lambda: site.get(METRICS, "/readyz")[0] == 200)
        assert site.get(METRICS, "/healthz?verbose") == (200, "ok\n[+] hub ok\n[+] probes ok\n[+] greenlets ok\n")
        names = re.findall(r"^\[\+\] (\S+) ok$", site.get(METRICS, "/readyz?verbose")[1], re.MULTILINE)
        assert names == ["hub", "probes", "greenlets", "api", "node", "start-up", "leases"]

    def test_a_signal_is_answered_in_the_log(self, site):
        site.start()
        until(site.node_ready)
        os.kill(site.world.daemon.pid, signal.SIGUSR2)
        until(lambda: "all greenlets follow" in site.log())
        os.kill(site.world.daemon.pid, signal.SIGUSR1)
        until(lambda: "logging everything" in site.log())
        assert site.get(METRICS, "/healthz")[0] == 200


def waited_s(pid):
    """How long the process could have run and had no CPU to run on: other people's time."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


class TestSpeed:
    def test_an_empty_node_is_ready_within_3_s_and_gone_within_10(self, site):
        """On a busy machine, what is spent waiting for it does not count; `python -m tests.bench startup` counts it."""
        before = waited_s("self")
        site.start()
        until(site.node_ready)
        took = CLOCK.monotonic() - site.began
        assert took - waited_s(site.world.daemon.pid) - (waited_s("self") - before) < 3.0
        began = CLOCK.monotonic()
        site.world.daemon.stop()
        assert CLOCK.monotonic() - began < 10.0
        assert site.world.daemon.failures == []
        assert not (site.home / "status.sock").exists()


class TestInTheWay:
    def test_a_socket_left_by_a_killed_daemon_is_replaced_by_its_successor(self, site):
        site.start()
        until(site.node_ready)
        first = site.world.daemon.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: site.world.daemon.pid != first)
        told = until(lambda: site.command("status", "-o", "json").stdout)
        assert json.loads(told)["node"] == NODE_NAME

    def test_a_status_port_and_a_socket_that_cannot_be_had_are_warnings_and_nothing_else(self, site):
        (site.home / "status.sock").write_text("somebody's file")
        with socket.create_server(("127.0.0.1", 0)) as other:
            told = dict(site.world.environment(), VK_STATUS_ADDR=f"127.0.0.1:{other.getsockname()[1]}")
            site.world.daemon._environment = lambda: told
            site.start()
            until(site.node_ready)
        assert site.log().count("the status cannot be looked at there; everything else works") == 2
        assert "there is a file that is no socket" in site.log()
        assert "Address already in use" in site.log()
        assert (site.home / "status.sock").read_text() == "somebody's file"

    def test_the_page_can_be_switched_off(self, site):
        told = dict(site.world.environment(), VK_STATUS_ADDR="off")
        site.world.daemon._environment = lambda: told
        site.start()
        until(site.node_ready)
        assert PAGE not in site.log()

    def test_slow_and_oversized_clients_do_not_hold_up_the_others(self, site):
        site.start()
        until(site.node_ready)
        for what in (METRICS, PAGE):
            silent = [socket.create_connection(site.address(what)) for _ in range(20)]
            flood = socket.create_connection(site.address(what))
            flood.sendall(b"GET /" + b"x" * 100_000)
            assert site.get(what, "/status.json" if what == PAGE else "/healthz")[0] == 200
            for connection in (*silent, flood):
                connection.close()
