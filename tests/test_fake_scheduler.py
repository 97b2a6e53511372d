"""The playground's scheduler: binds what may run on the node, says why it does not, and looks again after a change."""

import pytest

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from simulator.fake_scheduler import Scheduler
from simulator.tour import manifest
from vkcocoon_kube import ApiError
from vkcocoon_status import condition_of

PODS = "/api/v1/namespaces/default/pods"
NODE_STATUS = "/api/v1/nodes/playground/status"
TAINT = {"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule"}


class Cluster:
    def __init__(self):
        self.clock = VirtualClock()
        self.kube = FakeKube(self.clock)
        self.scheduler = Scheduler(self.kube, self.clock)
        self.scheduler.start()

    def node(self, name="playground", *, ready="True", taints=(TAINT,), pool="default", **spec):
        body = {
            "metadata": {"name": name, "labels": {"cocoonstack.io/pool": pool}},
            "spec": {"taints": list(taints), **spec},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }
        self.kube.admin.create("/api/v1/nodes", body)

    def patch_node(self, kind, body, path="/api/v1/nodes/playground"):
        self.kube.admin.patch(path, body, kind=kind)

    def pod(self, **spec):
        body = manifest("linux")
        body["spec"].update(spec)
        self.kube.admin.create(PODS, body)

    def where(self, seconds=0.0):
        self.clock.run(seconds)
        return self.kube.admin.get(f"{PODS}/linux-0")["spec"].get("nodeName", "")

    def why(self):
        return condition_of(self.kube.admin.get(f"{PODS}/linux-0")["status"], "PodScheduled").get("message", "")


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    made.scheduler.close()
    made.clock.close()


def test_a_pod_gets_the_node_it_may_run_on_at_once(cluster):
    cluster.node()
    cluster.pod()
    assert cluster.where() == "playground"


def test_a_pod_that_was_there_before_the_node_gets_it_when_it_is_ready(cluster):
    cluster.pod()
    assert cluster.where(1.0) == ""
    assert cluster.why() == "0/0 nodes are available."
    cluster.node(ready="False")
    assert cluster.where(1.0) == ""
    assert cluster.why() == "0/1 nodes are available: 1 node(s) were not ready."
    cluster.patch_node("strategic", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, NODE_STATUS)
    assert cluster.where() == "playground"


@pytest.mark.parametrize(
    ("node", "pod", "why"),
    [
        ({"pool": "edge"}, {}, "1 node(s) didn't match Pod's node affinity/selector"),
        ({"unschedulable": True}, {}, "1 node(s) were unschedulable"),
        ({}, {"tolerations": []}, "1 node(s) had untolerated taint {virtual-kubelet.io/provider: cocoon}"),
        (
            {},
            {"tolerations": [{"key": TAINT["key"], "operator": "Equal", "value": "other"}]},
            "1 node(s) had untolerated taint {virtual-kubelet.io/provider: cocoon}",
        ),
        (
            {},
            {"tolerations": [{"key": TAINT["key"], "operator": "Exists", "effect": "NoExecute"}]},
            "1 node(s) had untolerated taint {virtual-kubelet.io/provider: cocoon}",
        ),
    ],
)
def test_what_keeps_a_pod_away_is_said_in_its_condition(cluster, node, pod, why):
    cluster.node(**node)
    cluster.pod(**pod)
    assert cluster.where(5.0) == ""
    assert cluster.why() == f"0/1 nodes are available: {why}."


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": TAINT["key"], "operator": "Exists"},
        {"key": TAINT["key"], "operator": "Equal", "value": "cocoon"},
        {"key": TAINT["key"], "value": "cocoon", "effect": "NoSchedule"},
    ],
)
def test_every_way_to_tolerate_the_taint_is_understood(cluster, toleration):
    cluster.node()
    cluster.pod(tolerations=[toleration])
    assert cluster.where() == "playground"


def test_a_taint_that_only_prefers_keeps_nobody_away(cluster):
    cluster.node(taints=[{**TAINT, "effect": "PreferNoSchedule"}])
    cluster.pod(tolerations=[])
    assert cluster.where() == "playground"


def test_the_same_obstacle_is_written_once(cluster):
    cluster.node(ready="False")
    cluster.pod()
    cluster.where(1.0)
    version = cluster.kube.admin.get(f"{PODS}/linux-0")["metadata"]["resourceVersion"]
    cluster.patch_node("merge", {"metadata": {"labels": {"another": "label"}}})
    cluster.where(5.0)
    assert cluster.kube.admin.get(f"{PODS}/linux-0")["metadata"]["resourceVersion"] == version


def test_a_bind_that_is_refused_is_tried_again_a_second_later(cluster):
    failure = cluster.kube.fail("POST */binding", ApiError(500, "InternalError", "boom"), times=1)
    cluster.node()
    cluster.pod()
    assert cluster.where(0.9) == ""
    assert failure.hits == 1
    assert cluster.where(0.1) == "playground"


def test_a_pod_that_has_a_node_is_left_alone(cluster):
    cluster.node()
    cluster.pod(nodeName="elsewhere")
    assert cluster.where(5.0) == "elsewhere"
    assert not [request for request in cluster.kube.requests if request.path.endswith("/binding")]
