"""What survives: an API that is away, mute or cut, and a daemon that is killed, with everything going on meanwhile."""

import pytest

from tests.e2e.api import (
    CLOCK,
    STRATEGIC,
    condition,
    create_pod,
    is_gone,
    is_not_ready,
    is_ready,
    is_up,
    pod_path,
    reason,
    uid_of,
    vm_of,
)
from tests.e2e.control_plane import until
from tests.e2e.host import PORT

NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


@pytest.fixture
def linked(new_host):
    """A registered host whose way to the API can be broken."""
    host = new_host(direct=False)
    host.start()
    host.wait_until_ready()
    return host


@pytest.fixture
def up(plane, pods, namespace):
    """Makes pods on a host and waits until all are Ready; their last states."""

    def make(host, *names, **changes):
        made = [create_pod(plane.admin, host.pod(name, namespace=namespace, **changes)) for name in names]
        return [pods.first(is_up, 30, uid=uid_of(pod)).object for pod in made]

    return make


def renewed(host, plane):
    lease = plane.admin.find(f"{LEASES}/{host.name}")
    return lease["spec"]["renewTime"] if lease else ""


# The API is away --------------------------------------------------------------------------------------------------


def test_N8_an_api_that_refuses_connections_costs_the_pods_nothing(linked, plane, pods, up):
    (pod,) = up(linked, "calm")
    until(lambda: renewed(linked, plane), 25, "a lease")
    CLOCK.sleep(2)
    began, before = CLOCK.monotonic(), renewed(linked, plane)
    linked.link.refuse()
    CLOCK.sleep(8)  # with the pause between two renewals still less than the node may be silent
    assert linked.tell("vm-calm", status=True)["ip"] == pod["status"]["podIP"]
    linked.link.restore()
    until(lambda: renewed(linked, plane) > before, 15, "the lease is renewed again")
    CLOCK.sleep(2)
    assert pods.about(uid=uid_of(pod), since=began) == [], "nothing has changed, so nothing is written"
    assert linked.tools.cocoon.count("vm run") == 1


def test_N9_an_api_that_takes_connections_and_never_answers_is_given_up_and_found_again(linked, plane, pods, up):
    (pod,) = up(linked, "held")
    until(lambda: renewed(linked, plane), 25, "a lease")
    linked.link.stall()
    linked.tell("vm-held", close=PORT)
    CLOCK.sleep(25)
    before = renewed(linked, plane)
    linked.link.reroute()  # what was sent into the silence is lost, and no end of a connection says so
    until(lambda: renewed(linked, plane) > before, 20, "the lease is renewed again")
    told = pods.first(is_not_ready, 45, uid=uid_of(pod), since=pods.about(uid=uid_of(pod))[-1].at)
    assert reason(told) == "PortClosed"


def test_P21_what_happened_while_nothing_could_be_written_is_written_once_and_is_the_newest(linked, plane, pods, up):
    (pod,) = up(linked, "noisy")
    CLOCK.sleep(1)
    began = CLOCK.monotonic()
    linked.link.refuse()
    linked.tell("vm-noisy", close=PORT)
    linked.daemon.wait_for_log("not ready", 30)
    until(lambda: "reason=PortClosed" in linked.daemon.log(), 30, "the probe noticed")
    linked.tell("vm-noisy", open=PORT)
    CLOCK.sleep(2)
    linked.tell("vm-noisy", close=PORT)
    CLOCK.sleep(17)
    restored = CLOCK.monotonic()
    assert all(reason(sight) == "ProbeSucceeded" for sight in pods.about(uid=uid_of(pod), since=began))
    linked.link.restore()
    pods.first(lambda sight: reason(sight) == "PortClosed", 40, uid=uid_of(pod), since=restored)
    CLOCK.sleep(2)
    assert len(pods.about(uid=uid_of(pod), since=restored)) == 1, "what was replaced meanwhile is never sent"


def test_P22_a_vm_that_ended_and_one_that_was_deleted_during_an_outage_are_told_afterwards(linked, plane, pods, up):
    calm, dying, unwanted = up(linked, "calm", "dying", "unwanted")
    linked.link.refuse()
    linked.tools.cocoon.run(["vm", "rm", "--force", vm_of(dying)])
    plane.admin.delete(pod_path(unwanted))
    CLOCK.sleep(20)
    assert "vm-unwanted" in linked.vms(), "nobody could tell us"
    linked.link.restore()
    lost = pods.first(lambda sight: reason(sight) == "VMGone", 45, uid=uid_of(dying))
    pods.first(is_gone, 45, uid=uid_of(unwanted))
    assert is_not_ready(lost)
    assert linked.vms() == {"vm-calm"}
    assert is_ready(pods.about(uid=uid_of(calm))[-1])
    assert all(is_ready(sight) for sight in pods.about(uid=uid_of(calm), since=lost.at))


def test_P14_a_delete_that_fell_into_a_gap_of_the_watch_is_made_up_for(linked, plane, pods, up):
    (pod,) = up(linked, "missed")
    linked.link.refuse()
    plane.admin.delete(pod_path(pod), gracePeriodSeconds=0)
    pods.first(is_gone, uid=uid_of(pod))
    CLOCK.sleep(3)
    assert linked.vms() == {"vm-missed"}
    linked.link.restore()
    until(lambda: linked.vms() == set(), 45, "the VM goes")


def test_P13_a_namesake_that_took_the_place_in_a_gap_of_the_watch_is_another_pod(linked, plane, pods, up, namespace):
    (old,) = up(linked, "swapped")
    linked.link.refuse()
    plane.admin.delete(pod_path(old), gracePeriodSeconds=0)
    new = create_pod(plane.admin, linked.pod("swapped", namespace=namespace))
    linked.link.restore()
    ready = pods.first(is_up, 60, uid=uid_of(new))
    ids = [vm_of(pod) for pod in (old, ready.object)]
    assert ids[0] != ids[1]
    verbs = [call["verb"] for call in linked.tools.cocoon.calls if "vm-swapped" in call["names"]]
    assert [verb for verb in verbs if verb in ("vm run", "vm rm")] == ["vm run", "vm rm", "vm run"]


@pytest.mark.alone
@pytest.mark.real("compacts etcd and restarts the API server")
def test_P13_a_namesake_is_found_by_a_new_list_when_the_history_is_gone(linked, plane, pods, up, namespace):
    (old,) = up(linked, "forgotten")
    linked.link.refuse()
    plane.admin.delete(pod_path(old), gracePeriodSeconds=0)
    new = create_pod(plane.admin, linked.pod("forgotten", namespace=namespace))
    plane.restart_api_server(meanwhile=plane.compact)
    linked.link.restore()
    until(lambda: is_ready_now(plane, new), 90, "the namesake is Ready")
    verbs = [call["verb"] for call in linked.tools.cocoon.calls if "vm-forgotten" in call["names"]]
    assert [verb for verb in verbs if verb in ("vm run", "vm rm")] == ["vm run", "vm rm", "vm run"]
    linked.daemon.wait_for_log("the watch cannot go on; listing again", 5)


@pytest.mark.alone
@pytest.mark.real("restarts the API server")
def test_N8_a_restart_of_the_api_server_is_seen_by_no_pod(new_host, plane, pods, up, namespace):
    host = new_host()
    host.start()
    host.wait_until_ready()
    (pod,) = up(host, "steady")
    until(lambda: renewed(host, plane), 25, "a lease")
    CLOCK.sleep(1)
    version = plane.admin.get(pod_path(pod))["metadata"]["resourceVersion"]
    plane.restart_api_server()
    before = renewed(host, plane)
    until(lambda: renewed(host, plane) > before, 30, "the lease is renewed again")
    assert plane.admin.get(pod_path(pod))["metadata"]["resourceVersion"] == version
    late = create_pod(plane.admin, host.pod("late", namespace=namespace))
    until(lambda: is_ready_now(plane, late), 60, "pods come up again")


def is_ready_now(plane, pod):
    found = plane.admin.find(pod_path(pod))
    return found is not None and condition(found).get("status") == "True"


# The daemon is away -----------------------------------------------------------------------------------------------


def test_P23_a_restart_takes_up_every_pod_where_it_is(new_host, plane, pods, up, namespace):
    host = new_host()
    host.start()
    host.wait_until_ready()
    running, ending, removed, lost = up(host, "running", "ending", "removed", "lost")
    CLOCK.sleep(1)
    host.daemon.kill()
    away = CLOCK.monotonic()
    plane.admin.delete(pod_path(ending))
    plane.admin.delete(pod_path(removed), gracePeriodSeconds=0)
    host.tools.cocoon.run(["vm", "rm", "--force", vm_of(lost)])
    fresh = create_pod(plane.admin, host.pod("fresh", namespace=namespace))
    CLOCK.sleep(1)
    host.daemon.start()
    pods.first(is_gone, 30, uid=uid_of(ending))
    pods.first(is_ready, 30, uid=uid_of(fresh))
    # Nobody asked us to remove this VM while we could hear it: it is reported and stays.
    host.daemon.wait_for_log("VM belongs to no pod", 10)
    assert "vm-removed" in host.vms()
    assert "vm-ending" not in host.vms()
    assert all(is_ready(sight) for sight in pods.about(uid=uid_of(running), since=away)), "adopted without a blink"
    assert host.tools.cocoon.count("vm run", "vm-running") == 1
    # A VM that is gone is made again for a pod that still wants it, and whoever looks at the pod is told.
    again = pods.first(
        lambda sight: is_up(sight) and vm_of(sight.object) != vm_of(lost), 30, uid=uid_of(lost), since=away
    )
    assert host.tools.cocoon.count("vm run", "vm-lost") == 2
    assert restarts(again) == 1
    events = f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name=lost,reason=VMGone"
    until(lambda: plane.admin.get(events)["items"], 15, "an event")


def test_P23_with_the_policy_destroy_a_vm_without_a_pod_goes_at_the_start(new_host, plane, pods, up):
    host = new_host()
    host.settings = {"VK_ORPHAN_POLICY": "destroy"}
    host.start()
    host.wait_until_ready()
    kept, removed = up(host, "kept", "removed")
    host.daemon.kill()
    plane.admin.delete(pod_path(removed), gracePeriodSeconds=0)
    host.daemon.start()
    until(lambda: host.vms() == {"vm-kept"}, 30, "the orphan goes")
    assert is_ready(pods.about(uid=uid_of(kept))[-1])


def test_a_start_without_an_api_destroys_nothing_and_works_once_it_is_there(new_host, plane, pods, up, namespace):
    host = new_host(direct=False)
    host.settings = {"VK_ORPHAN_POLICY": "destroy"}
    host.start()
    host.wait_until_ready()
    (pod,) = up(host, "survivor")
    host.daemon.kill()
    host.link.refuse()
    host.daemon.start()
    host.daemon.wait_for_log("cannot see what runs; nothing is touched", 20)
    CLOCK.sleep(3)
    assert host.vms() == {"vm-survivor"}
    host.link.restore()
    later = create_pod(plane.admin, host.pod("later", namespace=namespace))
    pods.first(is_ready, 60, uid=uid_of(later))
    assert host.tools.cocoon.count("vm run", "vm-survivor") == 1
    assert is_ready(pods.about(uid=uid_of(pod))[-1])


def test_P20_a_pod_that_was_declared_not_ready_while_we_were_down_is_ready_again(new_host, plane, pods, up):
    host = new_host()
    host.start()
    host.wait_until_ready()
    (pod,) = up(host, "declared")
    host.daemon.kill()
    taken = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    plane.admin.patch(f"{pod_path(pod)}/status", {"status": {"conditions": [taken]}}, STRATEGIC)
    down = CLOCK.monotonic()
    host.daemon.start()
    pods.first(is_ready, 20, uid=uid_of(pod), since=down)


def test_P32_the_count_of_restarts_survives_a_restart_of_the_daemon(new_host, plane, pods, up):
    host = new_host()
    host.start()
    host.wait_until_ready()
    host.guest("vm-mac", os="macos", boot_s=0.1, lease_s=0.1)
    mac = {"cocoonset.cocoonstack.io/os": "macos", "cocoonset.cocoonstack.io/image": "registry.example/macos:15"}
    (pod,) = up(host, "mac", **mac)
    for turn in (1, 2):
        before = CLOCK.monotonic()
        host.tell("vm-mac", crash=True)
        again = pods.first(
            lambda sight, turn=turn: restarts(sight) == turn and is_ready(sight), 60, uid=uid_of(pod), since=before
        )
        host.daemon.kill()
        host.daemon.start()
        host.wait_until_started()
        CLOCK.sleep(1)
        assert all(restarts(sight) == turn for sight in pods.about(uid=uid_of(pod), since=again.at))


def restarts(sight):
    return (sight.object["status"].get("containerStatuses") or [{}])[0].get("restartCount")
