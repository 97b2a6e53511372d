"""The playground's tour judges a daemon by the cluster alone: a good one passes, each way of being wrong is told."""

import json
from pathlib import Path

import pytest

from simulator import tour as module
from simulator.clock import VirtualClock
from simulator.cluster_view import ClusterView
from simulator.fake_kube import FakeKube
from simulator.live_world import Place
from simulator.tour import Tour, manifest

PODS = "/api/v1/namespaces/default/pods"


class Stage:
    """A tour on an API server, with a daemon that is told by the test what to publish, and guests that do nothing."""

    def __init__(self, home: Path, monkeypatch, *, bridged=True):
        self.clock = VirtualClock()
        self.kube = FakeKube(self.clock)
        self.view = ClusterView(self.kube.admin, self.clock)
        self.told = []
        self.said = []
        self.orders = []
        self.answers = {}
        self.pid = 100
        self.banner = "SSH-2.0-OpenSSH_9.9"
        (home / "guests").mkdir()
        self.home = home
        place = Place(home, bridged)
        self.tour = Tour(
            self.view, self.kube.admin, self.clock, place, lambda text, kind: self.said.append((kind, text))
        )
        monkeypatch.setattr(module, "tell", self.tell)
        self.view.start()
        node = {"metadata": {"name": "playground"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        self.kube.admin.create("/api/v1/nodes", node)

    def tell(self, home, vm, order):
        self.orders.append((self.clock.elapsed(), vm, order))
        for part, (delay, status) in self.answers.get(vm, {}).items():
            if json.dumps(order) == part:
                self.clock.at(self.clock.elapsed() + delay, status)
        if "crash" in order:
            self.pid += 1
        return {"pid": self.pid, "mac": "0a:58:0a:58:00:21", "banner": self.banner}

    def publish(self, name, ready, reason, ip="10.88.0.5"):
        condition = {"type": "Ready", "status": "True" if ready else "False", "reason": reason}
        self.kube.admin.patch(
            f"{PODS}/{name}/status", {"status": {"conditions": [condition], "podIP": ip}}, kind="strategic"
        )

    def at(self, seconds, *status, **more):
        self.clock.at(seconds, lambda: self.publish(*status, **more))

    def after(self, vm, order, delay, *status, **more):
        self.answers.setdefault(vm, {})[json.dumps(order)] = (delay, lambda: self.publish(*status, **more))

    def event(self, name, reason):
        uid = self.kube.admin.get(f"{PODS}/{name}")["metadata"]["uid"]
        about = {"kind": "Pod", "namespace": "default", "name": name, "uid": uid}
        body = {
            "metadata": {"name": f"{name}.{reason.lower()}"},
            "involvedObject": about,
            "reason": reason,
            "message": "again",
        }
        self.kube.admin.create("/api/v1/namespaces/default/events", body)

    def run(self, seconds=90.0):
        self.clock.spawn("tour", self.tour.run)
        self.clock.run(seconds)
        return {each.text: each.held for each in self.tour.expectations}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.tour.stop()
    made.view.close()
    made.clock.close()


def a_good_daemon(stage):
    stage.at(1.5, "linux-0", True, "ProbeSucceeded")
    stage.after("vk-default-linux-0", {"echo": False}, 24.0, "linux-0", False, "PingTimeout")
    stage.after("vk-default-linux-0", {"echo": True}, 0.9, "linux-0", True, "ProbeSucceeded")
    stage.at(4.0, "windows-0", True, "ProbeSucceeded", ip="10.88.0.6")
    stage.at(4.2, "macos-0", False, "NoSSHBanner", ip="10.88.0.7")
    stage.at(9.0, "macos-0", True, "ProbeSucceeded", ip="10.88.0.7")
    stage.clock.at(14.0, stage.event, "macos-0", "GuestRestarted")
    stage.at(30.0, "macos-0", False, "NoSSHBanner", ip="10.88.0.7")
    stage.at(38.0, "macos-0", True, "ProbeSucceeded", ip="10.88.0.7")


def test_a_good_daemon_passes_in_less_than_a_minute(stage):
    a_good_daemon(stage)
    held = stage.run(60.0)
    assert stage.tour.over
    assert not stage.tour.failed
    assert list(held.values()) == [True] * 11
    assert [kind for kind, _ in stage.said].count("bad") == 0


def test_the_tour_does_what_it_says_at_the_instants_that_follow_from_the_cluster(stage):
    a_good_daemon(stage)
    stage.run(60.0)
    assert stage.orders == [
        (2.5, "vk-default-linux-0", {"echo": False}),
        (9.0, "vk-default-macos-0", {"status": True}),
        (11.0, "vk-default-macos-0", {"status": True}),
        (11.0, "vk-default-macos-0", {"crash": True}),
        (27.5, "vk-default-linux-0", {"echo": True}),
        (38.0, "vk-default-macos-0", {"status": True}),
    ]


def test_a_tour_that_is_stopped_is_not_over_and_what_was_waited_for_stays_undecided(stage):
    stage.at(1.5, "linux-0", True, "ProbeSucceeded")
    stage.clock.spawn("tour", stage.tour.run)
    stage.clock.run(3.0)
    stage.tour.stop()
    stage.clock.run(1.0)
    assert not stage.tour.over
    assert not stage.tour.failed
    held = {each.text: each.held for each in stage.tour.expectations}
    assert held["linux-0 becomes Ready"] is True
    assert held["linux-0 becomes Not Ready: PingTimeout"] is None


def test_a_daemon_that_publishes_nothing_fails_each_story_at_its_bound(stage):
    held = stage.run()
    assert stage.tour.over
    assert held.pop("the node is Ready") is True
    assert set(held.values()) == {False}
    assert sorted(held) == [
        "linux-0 becomes Ready",
        "macos-0 becomes Ready",
        "windows-0 becomes Ready by its probe-port",
    ]


def test_no_pod_is_created_on_a_node_that_never_comes(stage):
    stage.kube.admin.delete("/api/v1/nodes/playground")
    assert stage.run() == {"the node is Ready": False}
    assert stage.kube.admin.list(PODS)["items"] == []
    assert stage.tour.over


def test_a_mac_that_is_ready_before_its_sshd_speaks_fails(stage):
    stage.banner = None
    stage.at(4.2, "macos-0", True, "ProbeSucceeded")
    held = stage.run()
    assert held["macos-0 becomes Ready"] is True
    assert held["macos-0 was not Ready before its sshd spoke"] is False


def test_a_silence_nobody_notices_fails(stage):
    stage.at(1.5, "linux-0", True, "ProbeSucceeded")
    held = stage.run()
    assert held["linux-0 becomes Not Ready: PingTimeout"] is False
    assert "linux-0 is Ready again" not in held


def test_a_silence_explained_wrongly_fails(stage):
    stage.at(1.5, "linux-0", True, "ProbeSucceeded")
    stage.after("vk-default-linux-0", {"echo": False}, 20.0, "linux-0", False, "VMGone")
    assert stage.run()["linux-0 becomes Not Ready: PingTimeout"] is False


def test_a_guest_that_comes_back_under_another_address_was_not_restarted_in_place(stage):
    a_good_daemon(stage)
    stage.at(38.0, "macos-0", True, "ProbeSucceeded", ip="10.88.0.99")
    assert stage.run()["macos-0 is the same pod, VM and address as before"] is False


def test_an_event_about_another_pod_is_no_restart(stage):
    stage.at(4.2, "macos-0", False, "NoSSHBanner")
    stage.at(9.0, "macos-0", True, "ProbeSucceeded")
    stage.clock.at(14.0, stage.event, "windows-0", "GuestRestarted")
    assert stage.run()["macos-0 is restarted, and an Event says so"] is False


def test_a_story_that_breaks_counts_as_failed(stage, monkeypatch):
    def broken(home, vm, order):
        raise OSError("no such guest")

    stage.at(1.5, "linux-0", True, "ProbeSucceeded")
    monkeypatch.setattr(module, "tell", broken)
    stage.run()
    assert stage.tour.failed
    assert ("bad", "FAILED: the story of linux goes on (OSError: no such guest)") in stage.said


def test_the_guests_are_described_before_their_pods_exist(stage):
    stage.run(0.0)
    written = {path.stem: json.loads(path.read_text()) for path in (stage.home / "guests").glob("*.json")}
    assert written["vk-default-windows-0"]["ports"] == [3389]
    assert written["vk-default-macos-0"]["ssh_after_s"] == 6.0


def test_without_namespaces_every_pod_has_a_probe_port_and_silence_is_a_closed_port(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch, bridged=False)
    stage.at(1.5, "linux-0", True, "ProbeSucceeded")
    stage.run(10.0)
    ports = {
        pod["metadata"]["name"]: pod["metadata"]["annotations"]["vm.cocoonstack.io/probe-port"]
        for pod in stage.kube.admin.list(PODS)["items"]
    }
    assert ports == {"linux-0": "28022", "windows-0": "23389", "macos-0": "22022"}
    assert stage.orders == [(2.5, "vk-default-linux-0", {"close": 28022})]
    stage.tour.stop()
    stage.view.close()
    stage.clock.close()


@pytest.mark.parametrize("name", ["linux", "windows", "macos"])
def test_an_example_asks_for_a_managed_vm_of_its_system_on_any_node_of_the_default_pool(name):
    pod = manifest(name)
    annotations = pod["metadata"]["annotations"]
    assert annotations["cocoonset.cocoonstack.io/os"] == name
    assert annotations["cocoonset.cocoonstack.io/managed"] == "true"
    assert annotations["vm.cocoonstack.io/name"] == f"vk-default-{name}-0"
    assert pod["spec"]["nodeSelector"] == {"cocoonstack.io/pool": "default"}
    assert {"key": "virtual-kubelet.io/provider", "operator": "Exists"} in pod["spec"]["tolerations"]


@pytest.mark.parametrize("name", ["linux", "windows", "macos"])
def test_an_example_is_accepted_by_the_daemons_own_reading(name):
    from vkcocoon_spec import PodSpec, probe_port

    pod = manifest(name)
    spec = PodSpec.of(pod)
    spec.check_name()
    assert spec.managed
    assert spec.os == name
    assert (spec.macos_spec(-1) if name == "macos" else spec.run_spec()).name == f"vk-default-{name}-0"
    assert probe_port(spec.annotations) == (3389 if name == "windows" else None)
