"""The controllers around the fake API server: what they do, when, and what they leave alone. Virtual time."""

import pytest

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from simulator.fake_kube_controllers import Controllers
from simulator.fake_kube_scheduling import fits
from vkcocoon_kube import ApiError

PODS = "/api/v1/namespaces/default/pods"
WEB = f"{PODS}/web-0"
NODES = "/api/v1/nodes"
N1 = f"{NODES}/n1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
EVENTS = "/api/v1/namespaces/default/events"
T0 = "2026-01-01T00:00:00Z"
COCOON = {"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule"}


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def kube(clock):
    return FakeKube(clock)


@pytest.fixture
def controllers(kube, clock):
    controllers = Controllers(kube)
    controllers.start()
    clock.run(0)
    yield controllers
    controllers.close()


def pod(name="web-0", *, requests=None, **spec):
    container = {"name": "agent", "image": "x", "resources": {"requests": requests or {}}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def node(name="n1", *, ready="True", labels=None, **spec):
    conditions = [{"type": "Ready", "status": ready, "lastHeartbeatTime": T0}] if ready else []
    status = {"conditions": conditions, "capacity": {"cpu": "4", "memory": "8Gi", "pods": "3"}}
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec, "status": status}


def events(kube):
    return [(item["reason"], item["message"]) for item in kube.list(EVENTS)["items"]]


def exists(kube, path):
    try:
        kube.admin.get(path)
    except ApiError as error:
        assert error.status == 404
        return False
    return True


def taints(kube):
    return [(item["key"], item["effect"]) for item in kube.admin.get(N1)["spec"].get("taints", [])]


# Scheduler -----------------------------------------------------------------------------------------------------------


def test_a_pod_is_bound_as_soon_as_it_can_be(kube, clock, controllers):
    kube.create(NODES, node(taints=[COCOON]))
    kube.create(PODS, pod(tolerations=[{"key": COCOON["key"], "operator": "Exists"}]))
    clock.run(0)
    assert kube.get(WEB)["spec"]["nodeName"] == "n1"
    assert events(kube) == [("Scheduled", "Successfully assigned default/web-0 to n1")]


def test_a_pod_that_fits_nowhere_waits_and_says_why_once(kube, clock, controllers):
    kube.create(NODES, node(taints=[COCOON]))
    kube.create(PODS, pod())
    clock.run(120)
    message = "0/1 nodes are available: 1 node(s) had untolerated taint {virtual-kubelet.io/provider: cocoon}."
    assert events(kube) == [("FailedScheduling", message)]
    (condition,) = kube.get(WEB)["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("PodScheduled", "False", "Unschedulable")
    clock.at(130, kube.admin.create, NODES, node("n2"))
    clock.run(10)
    assert kube.get(WEB)["spec"]["nodeName"] == "n2"
    (condition,) = kube.get(WEB)["status"]["conditions"]
    assert (condition["status"], condition["lastTransitionTime"]) == ("True", "2026-01-01T00:02:10Z")


def test_without_a_node_there_is_nowhere_to_go(kube, clock, controllers):
    kube.create(PODS, pod())
    clock.run(0)
    assert events(kube) == [("FailedScheduling", "no nodes available to schedule pods")]


def test_pods_are_spread_and_bound_pods_left_alone(kube, clock, controllers):
    for name in ("n1", "n2"):
        kube.create(NODES, node(name))
    for index in range(4):
        kube.create(PODS, pod(f"p{index}"))
    kube.create(PODS, pod("mine", nodeName="n1"))
    kube.create(PODS, pod("other", schedulerName="somebody-else"))
    clock.run(0)
    placed = {item["metadata"]["name"]: item["spec"].get("nodeName") for item in kube.list(PODS)["items"]}
    # One is on n1 already, so n2 comes first.
    assert placed == {"p0": "n2", "p1": "n1", "p2": "n2", "p3": "n1", "mine": "n1", "other": None}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"unschedulable": True}, "node(s) were unschedulable"),
        ({"taints": [COCOON]}, "node(s) had untolerated taint {virtual-kubelet.io/provider: cocoon}"),
        ({"taints": [{**COCOON, "effect": "PreferNoSchedule"}]}, ""),
        ({"ready": "False"}, "node(s) had untolerated taint {node.kubernetes.io/not-ready: }"),
        ({"ready": ""}, "node(s) had untolerated taint {node.kubernetes.io/not-ready: }"),
    ],
)
def test_which_nodes_take_pods(kube, changes, why):
    kube.create(NODES, node(**changes))
    kube.create(PODS, pod())
    assert fits(kube.get(WEB), kube.get(N1), []) == why


@pytest.mark.parametrize(
    ("toleration", "fine"),
    [
        ({"key": COCOON["key"], "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": COCOON["key"], "value": "cocoon"}, True),
        ({"key": COCOON["key"], "value": "other"}, False),
        ({"key": COCOON["key"], "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_which_tolerations_count(kube, toleration, fine):
    kube.create(NODES, node(taints=[COCOON]))
    kube.create(PODS, pod(tolerations=[toleration]))
    assert (fits(kube.get(WEB), kube.get(N1), []) == "") is fine


def test_a_node_selector_and_resources_count(kube):
    kube.create(NODES, node(labels={"pool": "edge"}))
    small = kube.create(PODS, pod("small", requests={"cpu": "1500m", "memory": "1Gi"}, nodeName="n1"))
    ended = kube.create(PODS, pod("ended", requests={"cpu": "4"}, nodeName="n1"))
    ended = kube.patch(f"{PODS}/ended/status", {"status": {"phase": "Succeeded"}}, kind="merge")
    n1, there = kube.get(N1), [small, ended]

    def verdict(name, **changes):
        return fits(kube.create(PODS, pod(name, **changes)), n1, there)

    assert verdict("a", requests={"cpu": "2500m"}) == ""
    assert verdict("b", requests={"cpu": "2501m"}) == "Insufficient cpu"
    assert verdict("c", requests={"memory": "7169Mi"}) == "Insufficient memory"
    assert verdict("d", nodeSelector={"pool": "edge"}) == ""
    assert verdict("e", nodeSelector={"pool": "core"}) == "node(s) didn't match Pod's node affinity/selector"
    assert fits(kube.get(f"{PODS}/a"), n1, [small] * 3) == "Too many pods"


# Nodes that fall silent ----------------------------------------------------------------------------------------------


@pytest.fixture
def bound(kube):
    """A ready pod on a ready node that has a lease."""
    uid = kube.create(NODES, node())["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": uid}
    kube.create(LEASES, {"metadata": {"name": "n1", "ownerReferences": [owner]}, "spec": {"holderIdentity": "n1"}})
    kube.create(PODS, pod(nodeName="n1"))
    ready = {"type": "Ready", "status": "True", "reason": "ProbeSucceeded", "lastTransitionTime": T0}
    return kube.patch(f"{WEB}/status", {"status": {"phase": "Running", "conditions": [ready]}}, kind="strategic")


def renew(kube, clock):
    text = clock.now().isoformat(timespec="microseconds").replace("+00:00", "Z")
    kube.admin.patch(f"{LEASES}/n1", {"spec": {"renewTime": text}}, kind="merge")


def test_a_silent_node_is_unknown_after_its_grace_and_its_pods_are_not_ready(kube, clock, bound, controllers):
    clock.run(40)
    assert kube.get(N1)["status"]["conditions"][0]["status"] == "True"
    clock.run(5)
    (condition,) = kube.get(N1)["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("Unknown", "NodeStatusUnknown")
    assert condition["lastTransitionTime"] == "2026-01-01T00:00:45Z"
    assert taints(kube) == [
        ("node.kubernetes.io/unreachable", "NoSchedule"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
    ]
    (ready,) = kube.get(WEB)["status"]["conditions"]
    assert (ready["status"], ready["reason"]) == ("False", "ProbeSucceeded")


@pytest.mark.parametrize("sign", ["lease", "status"])
def test_a_node_that_shows_signs_of_life_is_left_alone(kube, clock, bound, controllers, sign):
    for _ in range(6):
        clock.run(30)
        if sign == "lease":
            renew(kube, clock)
        else:
            beat = {"type": "Ready", "status": "True", "lastHeartbeatTime": clock.now().isoformat()}
            kube.patch(f"{N1}/status", {"status": {"conditions": [beat]}}, kind="strategic")
    assert kube.get(N1)["status"]["conditions"][0]["status"] == "True"
    assert taints(kube) == []


def test_a_pod_leaves_a_silent_node_when_its_toleration_ends(kube, clock, bound, controllers):
    clock.run(45 + 295)
    assert "deletionTimestamp" not in kube.get(WEB)["metadata"]
    clock.run(5)
    assert kube.get(WEB)["metadata"]["deletionTimestamp"] == "2026-01-01T00:06:15Z"
    clock.run(3600)
    assert exists(kube, WEB)  # Only its kubelet can say that it ended.


def test_a_pod_that_tolerates_without_end_stays(kube, clock, controllers):
    kube.create(NODES, node())
    forever = [{"operator": "Exists", "effect": "NoExecute"}]
    kube.create(PODS, pod(nodeName="n1", tolerations=forever))
    clock.run(3600)
    assert "deletionTimestamp" not in kube.get(WEB)["metadata"]


def test_a_node_that_is_back_loses_our_taints_and_nothing_else(kube, clock, bound, controllers):
    kube.patch(N1, {"spec": {"taints": [COCOON]}}, kind="merge")
    clock.run(60)
    assert len(taints(kube)) == 3
    renew(kube, clock)
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    kube.patch(f"{N1}/status", {"status": {"conditions": [ready]}}, kind="strategic")
    clock.run(0)
    assert taints(kube) == [(COCOON["key"], COCOON["effect"])]
    assert kube.get(WEB)["status"]["conditions"][0]["status"] == "False"


def test_a_node_that_is_not_ready_is_tainted_as_such(kube, clock, controllers):
    kube.create(NODES, node(ready="False"))
    clock.run(0)
    assert taints(kube) == [
        ("node.kubernetes.io/not-ready", "NoSchedule"),
        ("node.kubernetes.io/not-ready", "NoExecute"),
    ]


def test_speed_divides_the_waiting(kube, clock, bound):
    controllers = Controllers(kube, speed=10)
    controllers.start()
    clock.run(4.5)
    assert kube.get(N1)["status"]["conditions"][0]["status"] == "Unknown"
    clock.run(30)
    assert "deletionTimestamp" in kube.get(WEB)["metadata"]
    controllers.close()


# Things nobody needs any more ----------------------------------------------------------------------------------------


def test_the_lease_of_a_deleted_node_goes_with_it(kube, clock, bound, controllers):
    kube.delete(N1)
    clock.run(0)
    assert not exists(kube, f"{LEASES}/n1")


def test_pods_of_a_node_that_is_gone_are_failed_and_removed(kube, clock, bound, controllers):
    seen = []
    clock.spawn("watcher", lambda: seen.extend(kube.admin.watch(PODS, resource_version="", timeout=100)))
    clock.at(10, kube.admin.delete, N1)
    clock.run(49)
    assert exists(kube, WEB)
    clock.run(51)
    assert not exists(kube, WEB)
    added, modified, marked, deleted = (event for event in seen if event["type"] != "BOOKMARK")
    types = [event["type"] for event in (added, modified, marked, deleted)]
    assert types == ["ADDED", "MODIFIED", "MODIFIED", "DELETED"]
    failed = modified["object"]
    (disruption,) = (item for item in failed["status"]["conditions"] if item["type"] == "DisruptionTarget")
    assert (failed["status"]["phase"], disruption["reason"]) == ("Failed", "DeletionByPodGC")


def test_an_owner_of_a_kind_not_served_here_is_alive(kube, clock, controllers):
    owner = {"apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "name": "set", "uid": "u"}
    body = pod()
    body["metadata"]["ownerReferences"] = [owner]
    kube.create(PODS, body)
    clock.run(60)
    assert exists(kube, WEB)


def test_a_namespace_goes_when_its_pods_have_ended(kube, clock, controllers):
    kube.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    kube.create("/api/v1/namespaces/team/configmaps", {"metadata": {"name": "c"}})
    kube.create("/api/v1/namespaces/team/pods", pod(nodeName="n1"))
    kube.create(NODES, node())
    kube.delete("/api/v1/namespaces/team")
    clock.run(0)
    assert not exists(kube, "/api/v1/namespaces/team/configmaps/c")
    path = "/api/v1/namespaces/team/pods/web-0"
    assert kube.get(path)["metadata"]["deletionGracePeriodSeconds"] == 30
    assert kube.get("/api/v1/namespaces/team")["status"]["phase"] == "Terminating"
    kube.delete(path, grace_seconds=0)
    clock.run(0)
    assert not exists(kube, "/api/v1/namespaces/team")


def test_events_are_forgotten_an_hour_after_they_were_last_seen(kube, clock, controllers):
    about = {"kind": "Node", "name": "n1"}
    for name in ("once", "again"):
        kube.create(EVENTS, {"metadata": {"name": name}, "involvedObject": about, "lastTimestamp": T0})
    again = {"lastTimestamp": "2026-01-01T00:30:00Z"}
    clock.at(1800, lambda: kube.admin.patch(f"{EVENTS}/again", again, kind="merge"))
    clock.run(3599)
    assert exists(kube, f"{EVENTS}/once")
    clock.run(1)
    assert (exists(kube, f"{EVENTS}/once"), exists(kube, f"{EVENTS}/again")) == (False, True)


# Switches ------------------------------------------------------------------------------------------------------------


def test_each_can_be_left_out(kube, clock):
    controllers = Controllers(kube, without=("scheduler",))
    controllers.start()
    kube.create(NODES, node())
    kube.create(PODS, pod())
    clock.run(60)
    assert "nodeName" not in kube.get(WEB)["spec"]
    controllers.close()
    with pytest.raises(ValueError, match="no such controller: schedular"):
        Controllers(kube, without=("schedular",))


def test_nothing_of_them_is_left_when_closed(kube, clock, bound):
    controllers = Controllers(kube)
    controllers.start()
    clock.run(1)
    controllers.close()
    clock.run(3600)
    assert kube.get(N1)["status"]["conditions"][0]["status"] == "True"


def test_faults_meant_for_the_kubelet_do_not_stop_them(kube, clock, controllers):
    kube.down = True
    kube.admin.create(NODES, node())
    kube.admin.create(PODS, pod())
    clock.run(0)
    assert kube.admin.get(WEB)["spec"]["nodeName"] == "n1"
