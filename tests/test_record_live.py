"""From a real process to a scenario: `vk-cocoon run` records while a guest falls silent and comes back, and a
simulation of what it wrote down shows the same flips."""

import os
import signal
import socket
import stat

import pytest

from simulator.fake_guests import tell
from simulator.live_clusters import FakeCluster
from simulator.live_world import NODE_NAME, LiveWorld, Place
from simulator.replay import read, replay_of
from simulator.scenario import load
from simulator.stage import example_pod
from vkcocoon_kube import ApiError
from vkcocoon_probes import SystemClock

CLOCK = SystemClock()
VM = "vk-default-web-0"

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def until(holds, limit_s=45.0):
    end = CLOCK.monotonic() + limit_s
    while not holds():
        assert CLOCK.monotonic() < end, "never came true"
        CLOCK.sleep(0.05)


class RecordedWorld(LiveWorld):
    """Its daemon records."""

    @property
    def record(self):
        return self.place.home / "record"

    def environment(self):
        return super().environment() | {"VK_RECORD": str(self.record)}

    def ready(self, wanted):
        try:
            pod = self.cluster.api.get("/api/v1/namespaces/default/pods/web-0")
        except ApiError:
            return False
        conditions = (pod.get("status") or {}).get("conditions") or []
        return any(each["type"] == "Ready" and each["status"] == wanted for each in conditions)

    def tell(self, **order):
        until((self.place.home / "guests" / f"{VM}.sock").exists)
        tell(self.place.home, VM, order)

    def create_pod(self):
        # On loopback addresses the host's kernel answers echoes, so the guest is asked for a port.
        declared = {"vm.cocoonstack.io/probe-port": "8080"}
        pod = example_pod("web-0", node=NODE_NAME, annotations=declared)
        self.cluster.api.create("/api/v1/namespaces/default/pods", pod)


@pytest.fixture
def world(tmp_path):
    cluster = FakeCluster(CLOCK, socket.create_server(("127.0.0.1", 0)))
    made = RecordedWorld(Place(tmp_path, bridged=False), CLOCK, cluster, lambda *_: None)
    made.start()
    made.daemon.start()
    yield made
    made.close()


def replayed(made):
    return [flip[1:] for flip in made.seen(load(made.document).run(None))]


def test_a_guest_that_fell_silent_and_came_back_does_so_again_in_the_replay(world):
    world.create_pod()
    world.tell(open=8080)
    until(lambda: world.ready("True"))
    world.tell(close=8080)
    until(lambda: world.ready("False"))
    world.tell(open=8080)
    until(lambda: world.ready("True"))
    world.daemon.stop()
    assert world.daemon.failures == []
    made = replay_of(read(world.record))
    assert [flip[1:] for flip in made.flips] == [("default/web-0", value) for value in (True, False, True)]
    assert replayed(made) == [flip[1:] for flip in made.flips]
    assert [entry.text() for entry in load(made.document).run(None).of(actor="expect", kind="broken")] == []
    assert stat.S_IMODE(world.record.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in world.record.iterdir()} == {0o600}


def test_a_daemon_that_was_killed_goes_on_in_a_file_of_its_own(world):
    world.create_pod()
    world.tell(open=8080)
    until(lambda: world.ready("True"))
    CLOCK.sleep(2.0)  # what was written down in the last second is lost with a process that is killed
    os.kill(world.daemon.pid, signal.SIGKILL)
    until(lambda: len(list(world.record.glob("*.jsonl"))) == 2)
    world.tell(close=8080)
    until(lambda: world.ready("False"))
    world.daemon.stop()
    made = replay_of(read(world.record))
    assert [row["daemon"] for row in made.document["events"] if "daemon" in row] == ["kill"]
    assert [flip[1:] for flip in made.flips] == [("default/web-0", True), ("default/web-0", False)]
    assert replayed(made) == [flip[1:] for flip in made.flips]
