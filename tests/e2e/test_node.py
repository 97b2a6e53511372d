"""The node and its lease: scenarios N1 and on, with the cluster at hand all the time (outages are in test_outages)."""

import re

import pytest

from tests.e2e.api import CLOCK, STRATEGIC, Refused, Watcher, condition, create_pod, is_not_ready, is_ready, uid_of
from tests.e2e.control_plane import SILENCE_S, until

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
NODES = "/api/v1/nodes"
TAINT = {"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule"}
RENEWAL_S = 25.0  # a renewal comes every 10 s
DOWN_S = SILENCE_S - 9.0  # so late that only a renewal before the first 10 s are over comes in time


def path(host):
    return f"{NODES}/{host.name}"


def lease_of(host, plane):
    return plane.admin.find(f"{LEASES}/{host.name}")


def ours(taints):
    """Without the taints that the node lifecycle controller puts and takes."""
    return [taint for taint in taints or [] if not taint["key"].startswith("node.kubernetes.io/")]


def test_N1_a_new_node_is_registered_with_everything_a_scheduler_needs(new_host, plane):
    host = new_host()
    host.settings = {"VK_NODE_POOL": "blue", "VK_PROVIDER_ID": "cocoon://rack1/7"}
    nodes = Watcher(plane.admin, NODES)
    host.start()
    first = nodes.first(lambda sight: True, 30, name=host.name)
    assert TAINT in first.object["spec"]["taints"], "tainted from the first instant"
    assert condition(first.object)["status"] == "True"
    host.wait_until_ready()
    node = plane.admin.get(path(host))
    assert node["spec"]["providerID"] == "cocoon://rack1/7"
    labels = node["metadata"]["labels"]
    assert labels["cocoonstack.io/pool"] == "blue"
    assert labels["kubernetes.io/hostname"] == host.name
    assert labels["kubernetes.io/os"] == "linux"
    status = node["status"]
    assert {"type": "InternalIP", "address": host.place.gateway} in status["addresses"]
    assert status["capacity"]["cpu"] == "512"
    assert status["allocatable"]["pods"] == status["capacity"]["pods"] == "256"
    assert status["allocatable"]["memory"] != status["capacity"]["memory"]
    assert status["nodeInfo"]["kubeletVersion"].startswith("v")
    assert status["daemonEndpoints"]["kubeletEndpoint"]["Port"] > 0
    said = {each["type"]: each["status"] for each in status["conditions"]}
    assert said["Ready"] == "True"
    assert {said[each] for each in ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")} == {"False"}
    nodes.close()


def test_N1_the_lease_belongs_to_the_node_and_grows_in_microseconds(host, plane):
    node = plane.admin.get(path(host))
    lease = until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")
    (owner,) = lease["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", host.name, uid_of(node))
    assert lease["spec"]["holderIdentity"] == host.name
    assert lease["spec"]["leaseDurationSeconds"] == 40
    times = [lease["spec"]["renewTime"]]
    began = CLOCK.monotonic()
    while len(times) < 3:
        now = lease_of(host, plane)["spec"]["renewTime"]
        if now != times[-1]:
            times.append(now)
        assert CLOCK.monotonic() - began < 2 * RENEWAL_S
        CLOCK.sleep(0.2)
    assert times == sorted(times)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time) for time in times)


def test_N2_what_others_wrote_on_a_node_that_is_there_already_survives(new_host, plane):
    host = new_host()
    foreign_taint = {"key": "example.com/rack", "value": "7", "effect": "PreferNoSchedule"}
    before = plane.admin.create(
        NODES,
        {
            "metadata": {
                "name": host.name,
                "labels": {"example.com/rack": "7"},
                "annotations": {"example.com/owner": "somebody"},
            },
            "spec": {"taints": [foreign_taint]},
            "status": {"conditions": [{"type": "example.com/Fan", "status": "True", "reason": "Turning"}]},
        },
    )
    host.start()
    host.wait_until_ready()
    node = plane.admin.get(path(host))
    assert uid_of(node) == uid_of(before)
    assert node["metadata"]["labels"]["example.com/rack"] == "7"
    assert node["metadata"]["annotations"]["example.com/owner"] == "somebody"
    assert sorted(taint["key"] for taint in ours(node["spec"]["taints"])) == [foreign_taint["key"], TAINT["key"]]
    assert condition(node, "example.com/Fan")["reason"] == "Turning"


def test_N3_a_label_of_ours_that_is_not_wanted_any_more_goes_and_foreign_ones_stay(new_host, plane):
    host = new_host()
    host.settings = {"VK_SNAPSHOT_CPU_CLASS": "icelake"}
    host.start()
    host.wait_until_ready()
    plane.admin.patch(path(host), {"metadata": {"labels": {"example.com/rack": "7"}}})
    assert plane.admin.get(path(host))["metadata"]["labels"]["cocoonstack.io/snapshot-cpu-class"] == "icelake"
    host.daemon.stop()
    host.settings = {}
    host.daemon.start()
    until(
        lambda: "cocoonstack.io/snapshot-cpu-class" not in plane.admin.get(path(host))["metadata"]["labels"],
        30,
        "the label goes",
    )
    assert plane.admin.get(path(host))["metadata"]["labels"]["example.com/rack"] == "7"


def test_N4_a_node_that_somebody_deleted_is_registered_again_and_owns_its_lease(new_host, plane):
    host = new_host()
    host.start()
    host.wait_until_ready()
    first = plane.admin.get(path(host))
    until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")
    plane.admin.delete(path(host))
    again = until(lambda: plane.admin.find(path(host)), 30, "the node is back")
    assert uid_of(again) != uid_of(first)
    assert TAINT in again["spec"]["taints"]

    def owned():
        lease = lease_of(host, plane)
        return lease is not None and lease["metadata"]["ownerReferences"][0]["uid"] == uid_of(again)

    until(owned, 2 * RENEWAL_S, "the lease is the new node's")


def test_N5_a_lease_that_somebody_deleted_comes_back(host, plane):
    until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")
    plane.admin.delete(f"{LEASES}/{host.name}")
    lease = until(lambda: lease_of(host, plane), RENEWAL_S, "the lease is back")
    assert lease["spec"]["holderIdentity"] == host.name


def test_N6_a_lease_that_somebody_edited_is_still_renewed(host, plane):
    lease = until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")
    plane.admin.patch(f"{LEASES}/{host.name}", {"metadata": {"labels": {"example.com/seen": "yes"}}})
    renewed = until(
        lambda: (now := lease_of(host, plane))["spec"]["renewTime"] > lease["spec"]["renewTime"] and now,
        2 * RENEWAL_S,
        "a renewal over the edit",
    )
    assert renewed["metadata"]["labels"] == {"example.com/seen": "yes"}


def test_N7_a_lease_that_was_held_by_another_name_is_taken_over(new_host, plane):
    host = new_host()
    plane.admin.create(NODES, {"metadata": {"name": host.name}})
    spec = {"holderIdentity": "somebody-else", "leaseDurationSeconds": 5, "renewTime": "2026-01-01T00:00:00.000000Z"}
    plane.admin.create(LEASES, {"metadata": {"name": host.name, "namespace": "kube-node-lease"}, "spec": spec})
    host.start()
    until(lambda: lease_of(host, plane)["spec"]["holderIdentity"] == host.name, 30, "the lease is ours")
    assert lease_of(host, plane)["spec"]["leaseDurationSeconds"] == 40


def test_N13_a_time_without_six_digits_is_no_renewal(host, plane):
    """What the lease must not look like: the reason why its time is written by hand."""
    until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")
    with pytest.raises(Refused) as refused:
        plane.admin.patch(f"{LEASES}/{host.name}", {"spec": {"renewTime": "2036-01-01T00:00:00Z"}})
    assert refused.value.status == 400 or refused.value.status == 422
    taken = {"spec": {"acquireTime": "2026-01-01T00:00:00.000000Z"}}
    assert plane.admin.patch(f"{LEASES}/{host.name}", taken)["spec"]["acquireTime"].endswith(".000000Z")


def test_N14_a_node_at_rest_writes_its_lease_and_nothing_else(new_host, plane):
    host = new_host()
    host.start()
    host.wait_until_ready()
    until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")
    CLOCK.sleep(3)
    node, lease = plane.admin.get(path(host)), lease_of(host, plane)
    CLOCK.sleep(31)
    later, renewed = plane.admin.get(path(host)), lease_of(host, plane)
    assert later["metadata"]["resourceVersion"] == node["metadata"]["resourceVersion"]
    assert renewed["spec"]["renewTime"] > lease["spec"]["renewTime"]


def test_N15_a_network_that_somebody_declared_unavailable_is_available_again(host, plane):
    taken = {"type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated"}
    plane.admin.patch(f"{path(host)}/status", {"status": {"conditions": [taken]}}, STRATEGIC)
    until(
        lambda: condition(plane.admin.get(path(host)), "NetworkUnavailable")["status"] == "False",
        30,
        "the condition is put back",
    )


def test_N16_a_node_that_others_keep_changing_is_kept_true_all_the_same(new_host, plane):
    host = new_host()
    host.start()
    host.wait_until_ready()
    plane.admin.patch(path(host), {"spec": {"taints": None}})
    for turn in range(60):
        plane.admin.patch(path(host), {"metadata": {"annotations": {"example.com/turn": str(turn)}}})
        CLOCK.sleep(0.2)
    node = until(
        lambda: TAINT in ((now := plane.admin.get(path(host)))["spec"].get("taints") or []) and now, 15, "our taint"
    )
    assert node["metadata"]["annotations"]["example.com/turn"] == "59"


def test_N17_two_processes_of_one_name_see_each_other_and_leave_the_pods_alone(new_host, plane, namespace):
    host, twin = new_host(), new_host()
    twin.name = host.name
    host.start()
    host.wait_until_ready()
    twin.start()
    for each in (host, twin):
        each.daemon.wait_for_log("another process uses this node's name", 60)
    until(lambda: condition(plane.admin.get(path(host))).get("reason") == "DuplicateNode", 30, "the node says so")
    create_pod(plane.admin, host.pod("nobodys", namespace=namespace))
    CLOCK.sleep(5)
    assert host.vms() | twin.vms() == set()
    twin.daemon.stop()
    until(lambda: condition(plane.admin.get(path(host)))["status"] == "True", 90, "one is alone again")
    until(lambda: host.vms() == {"vm-nobodys"}, 30, "and works again")


@pytest.mark.real("a node is found silent by the node lifecycle controller")
def test_N18_a_restart_within_the_grace_is_seen_by_nobody(new_host, plane):
    host = new_host()
    host.start()
    host.wait_until_ready()
    last = until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")["spec"]["renewTime"]
    until(lambda: lease_of(host, plane)["spec"]["renewTime"] > last, RENEWAL_S, "a renewal just now")
    nodes = Watcher(plane.admin, NODES)
    host.daemon.kill()
    CLOCK.sleep(DOWN_S)
    host.daemon.start()
    CLOCK.sleep(SILENCE_S - DOWN_S + 2)  # when the node would be found silent, had the start not renewed at once
    seen = nodes.about(host.name)
    assert seen and all(condition(sight.object)["status"] == "True" for sight in seen)
    nodes.close()


@pytest.mark.real("a node is found silent by the node lifecycle controller")
def test_P20_pods_of_a_node_that_was_silent_are_ready_again_once_it_speaks(new_host, plane, namespace, pods):
    host = new_host()
    host.start()
    host.wait_until_ready()
    made = create_pod(plane.admin, host.pod("patient", namespace=namespace))
    up = pods.first(is_ready, uid=uid_of(made))
    until(lambda: lease_of(host, plane), RENEWAL_S, "a lease")
    host.daemon.freeze()
    down = pods.first(is_not_ready, SILENCE_S + 60, uid=uid_of(made), since=up.at)
    assert condition(plane.admin.get(path(host)))["status"] == "Unknown"
    assert "vm-patient" in host.vms()
    thawed = CLOCK.monotonic()
    host.daemon.thaw()
    again = pods.first(is_ready, 30, uid=uid_of(made), since=down.at)
    assert again.at - thawed < 15
    host.wait_until_ready(30)
    taints = plane.admin.get(path(host))["spec"]["taints"]
    assert ours(taints) == [TAINT]
    assert host.tools.cocoon.count("vm run", "vm-patient") == 1
