"""Decisions K10, K11 and I3, and scenarios N1-N18: the node says what is so, and its lease never stops growing.

Virtual time, the fake API, exact instants. N10 and N11 (a ping of the provider) do not exist here: a process that
cannot take pods any more does not run its greenlets either.
"""

import contextlib
import re
from datetime import datetime
from itertools import pairwise

import pytest
from kube_rig import Lowest, Settings, asked, condition

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_events import EventRecorder
from vkcocoon_host import Host
from vkcocoon_kube import ApiError
from vkcocoon_node import NodeController

NODES = "/api/v1/nodes"
NODE = f"{NODES}/n1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE = f"{LEASES}/n1"
BOOM = ApiError(500, "InternalError", "boom")
HOST = Host(
    cpus=8,
    memory=32 * 2**30,
    storage=1000 * 2**30,
    storage_available=500 * 2**30,
    hugepages={"hugepages-2Mi": 2**30},
    address="192.0.2.50",
    kernel="6.1.0",
    os_image="Debian",
)


class Rig:
    def __init__(self, clock):
        self.clock = clock
        self.kube = FakeKube(clock)
        self.recorder = EventRecorder(self.kube, clock, node_name="n1", rng=Lowest())
        self.recorder.start()
        self.controllers = []
        self.node = self.process()

    def process(self, instance="first", degraded=False, **settings):
        controller = NodeController(
            self.kube,
            self.clock,
            Settings(**settings),
            lease_api=self.kube,
            recorder=self.recorder,
            degraded=degraded,
            version="0.1.0",
            host=HOST,
            instance=instance,
            rng=Lowest(),
        )
        self.controllers.append(controller)
        return controller

    def start(self, controller=None):
        controller = controller or self.node
        controller.start_lease()
        controller.register()
        self.clock.run(0)

    def held(self):
        return self.kube.admin.get(NODE)

    def lease(self):
        return self.kube.admin.get(LEASE)

    def renewals(self):
        """(instant, renewTime) of every accepted write of the lease."""
        return [
            (request.at, request.body["spec"]["renewTime"])
            for request in self.kube.requests
            if request.verb in ("POST", "PUT") and "/leases" in request.path
        ]

    def event_reasons(self):
        return {event["reason"] for event in self.kube.admin.list("/api/v1/namespaces/default/events")["items"]}

    def close(self):
        for controller in self.controllers:
            controller.close()
        self.recorder.close()


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def rig(clock):
    rig = Rig(clock)
    yield rig
    rig.close()


def made_before(rig, **changes):
    """A node that was there before us, with things of other people on it."""
    return rig.kube.admin.create(
        NODES,
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": "n1",
                "labels": {"rack": "7", "cocoonstack.io/snapshot-cpu-class": "old"},
                "annotations": {"note": "mine"},
            },
            "spec": {"taints": [{"key": "dedicated", "value": "x", "effect": "NoExecute"}]},
            "status": {"conditions": [{"type": "KernelDeadlock", "status": "False", "reason": "npd", "message": "m"}]},
            **changes,
        },
    )


# --- registration -------------------------------------------------------------------------------------------------


def test_n1_a_fresh_node_is_looked_for_and_then_made_whole_in_one_request(rig):
    rig.start()
    assert [what for _, what in asked(rig.kube, "GET", "POST", "PATCH") if "/nodes" in what][:3] == [
        f"GET {NODE}",
        f"GET {NODE}",
        f"POST {NODES}",
    ]
    node = rig.held()
    assert node["spec"]["taints"] == [{"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule"}]
    assert node["metadata"]["labels"] == {
        "type": "virtual-kubelet",
        "kubernetes.io/role": "agent",
        "kubernetes.io/hostname": "n1",
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "node-role.kubernetes.io/cocoon-vm": "",
        "cocoonstack.io/pool": "default",
    }
    assert condition(node)["status"] == "True" and condition(node)["reason"] == "KubeletReady"
    assert node["status"]["daemonEndpoints"] == {"kubeletEndpoint": {"Port": 10250}}
    assert node["status"]["addresses"] == [
        {"type": "InternalIP", "address": "192.0.2.7"},
        {"type": "Hostname", "address": "n1"},
    ]
    assert node["status"]["nodeInfo"]["kubeletVersion"] == "v0.1.0"
    assert rig.node.registered.is_set()


def test_all_conditions_a_scheduler_looks_at_are_there(rig):
    rig.start()
    said = {item["type"]: item["status"] for item in rig.held()["status"]["conditions"]}
    assert said == {
        "Ready": "True",
        "MemoryPressure": "False",
        "DiskPressure": "False",
        "PIDPressure": "False",
        "NetworkUnavailable": "False",
        "cocoonstack.io/PingerDegraded": "False",
        "cocoonstack.io/StartupBlocked": "False",
    }


def test_i3_a_degraded_pinger_is_a_condition_of_its_own(rig):
    degraded = rig.process(degraded=True)
    rig.start(degraded)
    shown = condition(rig.held(), "cocoonstack.io/PingerDegraded")
    assert shown["status"] == "True" and "CAP_NET_RAW" in shown["message"]
    assert condition(rig.held())["status"] == "True"


def test_n2_what_others_put_on_a_node_that_is_there_survives(rig, clock):
    made_before(rig)
    rig.start()
    clock.run(600)
    node = rig.held()
    assert node["metadata"]["labels"]["rack"] == "7" and node["metadata"]["annotations"]["note"] == "mine"
    assert {"key": "dedicated", "value": "x", "effect": "NoExecute"} in node["spec"]["taints"]
    assert [taint["key"] for taint in node["spec"]["taints"]] == ["dedicated", "virtual-kubelet.io/provider"]
    assert condition(node, "KernelDeadlock")["reason"] == "npd"
    assert "POST /api/v1/nodes" not in [what for _, what in asked(rig.kube)]


def test_n3_a_label_of_ours_that_is_no_longer_wanted_disappears(rig):
    made_before(rig)
    rig.start()
    assert "cocoonstack.io/snapshot-cpu-class" not in rig.held()["metadata"]["labels"]


def test_the_cpu_class_and_the_provider_id_are_set_on_a_node_that_is_there(rig):
    made_before(rig)
    rig.start(rig.process(snapshot_cpu_class="skylake", provider_id="cocoon://rack1/7"))
    assert rig.held()["metadata"]["labels"]["cocoonstack.io/snapshot-cpu-class"] == "skylake"
    assert rig.held()["spec"]["providerID"] == "cocoon://rack1/7"


def test_a_provider_id_that_somebody_else_chose_stays(rig):
    made_before(rig, spec={"providerID": "cloud://7"})
    rig.start(rig.process(provider_id="cocoon://rack1/7"))
    assert rig.held()["spec"]["providerID"] == "cloud://7"


def test_a_taint_of_our_key_with_another_effect_is_the_operators_choice(rig):
    taint = {"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoExecute"}
    made_before(rig, spec={"taints": [taint]})
    rig.start()
    assert rig.held()["spec"]["taints"] == [taint]


def test_a_taint_somebody_adds_at_the_same_moment_is_not_lost(rig, clock):
    made_before(rig)
    hold = rig.kube.hang(f"PATCH {NODE}")
    rig.start()
    more = {"key": "other", "value": "", "effect": "NoSchedule"}
    rig.kube.admin.patch(NODE, {"spec": {"taints": [*rig.held()["spec"]["taints"], more]}}, kind="merge")
    hold.release()
    clock.run(5)
    assert [taint["key"] for taint in rig.held()["spec"]["taints"]] == [
        "dedicated",
        "other",
        "virtual-kubelet.io/provider",
    ]


def test_a_cordon_stays(rig, clock):
    rig.start()
    rig.kube.admin.patch(NODE, {"spec": {"unschedulable": True}}, kind="merge")
    clock.run(600)
    assert rig.held()["spec"]["unschedulable"] is True


# --- what the node has --------------------------------------------------------------------------------------------


def test_a_fifth_is_kept_back_but_not_of_pods_and_huge_pages(rig):
    rig.start()
    status = rig.held()["status"]
    assert status["capacity"] == {
        "cpu": "8",
        "memory": "33554432Ki",
        "ephemeral-storage": "1048576000Ki",
        "hugepages-2Mi": "1048576Ki",
        "pods": "256",
    }
    assert status["allocatable"] == {
        "cpu": "6400m",
        "memory": "26843545Ki",
        "ephemeral-storage": "419430400Ki",
        "hugepages-2Mi": "1048576Ki",
        "pods": "256",
    }


def test_amounts_that_were_set_win_over_what_was_found(rig):
    given = {"node_cpu": "15500m", "node_mem": "64Gi", "node_storage": "2T", "node_hugepages": "4Gi", "node_pods": 7}
    rig.start(rig.process(reserve_percent=0, **given))
    assert rig.held()["status"]["allocatable"] == {
        "cpu": "15500m",
        "memory": "67108864Ki",
        "ephemeral-storage": "1953125000Ki",
        "hugepages-2Mi": "4194304Ki",
        "pods": "7",
    }


def test_extended_resources_of_others_stay(rig, clock):
    rig.start()
    rig.kube.admin.patch(f"{NODE}/status", {"status": {"capacity": {"example.com/gpu": "2"}}}, kind="strategic")
    clock.run(600)
    assert rig.held()["status"]["capacity"]["example.com/gpu"] == "2"


def test_amounts_that_the_api_spells_in_its_own_way_are_not_written_again(rig, clock):
    rig.start()
    canonical = {"memory": "32Gi", "ephemeral-storage": "1000Gi", "hugepages-2Mi": "1Gi"}
    rig.kube.admin.patch(f"{NODE}/status", {"status": {"capacity": canonical}}, kind="strategic")
    clock.run(299)
    assert [what for _, what in asked(rig.kube, "PATCH")] == []


# --- the status over time -----------------------------------------------------------------------------------------


def test_a_node_that_is_well_is_written_every_five_minutes_only(rig, clock):
    rig.start()
    clock.run(1000)
    assert asked(rig.kube, "PATCH") == [(at, f"PATCH {NODE}/status") for at in (300.0, 600.0, 900.0)]


def test_transition_times_stay_and_heartbeats_move(rig, clock):
    rig.start()
    clock.run(300)
    shown = condition(rig.held())
    assert shown["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    assert shown["lastHeartbeatTime"] == "2026-01-01T00:05:00Z"


@pytest.mark.parametrize(
    "foreign",
    [
        {"type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated"},
        {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"},
        {"type": "Ready", "status": "False", "reason": "Whim"},
    ],
)
def test_n15_what_others_make_of_our_conditions_is_put_back_within_ten_seconds(rig, clock, foreign):
    rig.start()
    clock.run(25)
    rig.kube.admin.patch(f"{NODE}/status", {"status": {"conditions": [foreign]}}, kind="strategic")
    clock.run(5)
    shown = condition(rig.held(), foreign["type"])
    assert shown["status"] == ("True" if foreign["type"] == "Ready" else "False")
    assert shown["lastTransitionTime"] == "2026-01-01T00:00:30Z"


def test_n4_a_node_that_is_deleted_is_made_again_and_its_lease_gets_the_new_owner(rig, clock):
    rig.start()
    first = rig.held()["metadata"]["uid"]
    clock.run(33)
    rig.kube.admin.delete(NODE)
    clock.run(8)
    second = rig.held()["metadata"]["uid"]
    assert second != first
    assert [owner["uid"] for owner in rig.lease()["metadata"]["ownerReferences"]] == [second]
    events = rig.kube.admin.list("/api/v1/namespaces/default/events")["items"]
    assert [event["reason"] for event in events] == ["NodeRegisteredAgain"]


def test_n8_an_outage_of_two_minutes_is_over_for_the_node_ten_seconds_later(rig, clock):
    rig.start()
    clock.run(5)
    rig.kube.down = True
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    rig.kube.admin.patch(f"{NODE}/status", {"status": {"conditions": [unknown]}}, kind="strategic")
    clock.run(120)
    before = rig.lease()["spec"]["renewTime"]
    rig.kube.down = False
    clock.run(10)
    assert condition(rig.held())["status"] == "True" and rig.lease()["spec"]["renewTime"] > before


def test_n9_an_api_that_never_answers_does_not_stop_the_renewals_for_longer_than_it_lasts(rig, clock):
    rig.start()
    clock.run(5)
    hold = rig.kube.hang("* */leases/*")
    clock.run(60)
    hold.release()
    clock.run(10)
    last = datetime.fromisoformat(rig.lease()["spec"]["renewTime"])
    assert (clock.now() - last).total_seconds() <= 10


def test_a_renewal_that_is_never_answered_is_given_up_in_time_for_the_next(rig, clock):
    rig.start()
    clock.run(5)
    rig.kube.hang(lambda request: "/leases" in request.path and request.at == 10.0)
    clock.run(30)
    assert [at for at, _ in rig.renewals()] == [0.0, 10.0, 15.0, 25.0, 35.0]


@pytest.mark.parametrize("status", [404, 409])
def test_n4_a_lease_that_is_collected_with_its_node_is_not_made_again_for_the_dead_owner(rig, clock, status):
    made_before(rig)
    rig.node.start_lease()
    clock.run(33)
    rig.kube.admin.delete(NODE)
    with contextlib.suppress(ApiError):
        rig.kube.admin.delete(LEASE)
    rig.kube.fail(f"PUT {LEASE}", ApiError(status, "x", "y"))
    clock.run(60)
    assert len([what for _, what in asked(rig.kube, "POST") if "/leases" in what]) == 1


def test_renewals_are_ten_seconds_apart_however_long_each_takes(rig, clock):
    rig.kube.latency = 1.0
    rig.start()
    clock.run(55)
    instants = [at for at, _ in rig.renewals()][1:]
    assert len(instants) == 5 and {later - earlier for earlier, later in pairwise(instants)} == {10.0}


def test_a_node_that_hangs_does_not_hold_up_its_lease(rig, clock):
    rig.start()
    rig.kube.hang(f"* {NODE}*")
    clock.run(100)
    assert [at for at, _ in rig.renewals()] == [i * 10.0 for i in range(11)]


def test_n16_conflicts_on_the_status_are_sat_out(rig, clock):
    made_before(rig)
    refusals = rig.kube.fail(f"PATCH {NODE}/status", ApiError(409, "Conflict", "x"), times=5)
    rig.start()
    clock.run(60)
    assert refusals.hits == 5 and condition(rig.held())["status"] == "True"


def test_registration_is_tried_until_it_works(rig, clock):
    rig.kube.fail(f"POST {NODES}", ApiError(403, "Forbidden", "not yet"), times=4)
    rig.start()
    assert not rig.node.registered.is_set()
    clock.run(60)
    assert rig.node.registered.is_set()


def test_a_node_that_was_stored_although_the_answer_was_lost_is_taken_over(rig, clock):
    rig.kube.fail(f"POST {NODES}", ApiError(0, "ConnectionReset", "lost"), stored=True)
    rig.start()
    clock.run(60)
    assert rig.node.registered.is_set() and len(asked(rig.kube, "POST")) <= 3


def test_close_leaves_the_node_as_it_is(rig, clock):
    rig.start()
    clock.run(5)
    before, requests = rig.held(), len(rig.kube.requests)
    rig.node.close()
    clock.run(600)
    assert rig.held() == before and len(rig.kube.requests) == requests


# --- the lease ----------------------------------------------------------------------------------------------------


def test_the_lease_is_owned_by_its_node_and_renewed_every_ten_seconds_of_forty(rig, clock):
    rig.start()
    clock.run(60)
    lease = rig.lease()
    assert lease["spec"]["holderIdentity"] == "n1" and lease["spec"]["leaseDurationSeconds"] == 40
    (owner,) = lease["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": rig.held()["metadata"]["uid"]}
    assert [at for at, _ in rig.renewals()] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def test_n13_renew_times_have_exactly_six_digits_also_on_the_full_second(rig, clock):
    rig.start()
    clock.run(0.25)
    clock.run(100)
    times = [text for _, text in rig.renewals()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", text) for text in times)
    assert times[0] == "2026-01-01T00:00:00.000000Z"


def test_n12_renew_times_grow_also_when_the_clock_is_set_back_an_hour(rig, clock):
    rig.start()
    clock.run(35)
    clock.step_wall(-3600)
    clock.run(100)
    clock.step_wall(7200)
    clock.run(100)
    times = [text for _, text in rig.renewals()]
    assert len(times) == 24 and all(later > earlier for earlier, later in pairwise(times))
    assert times[4] == "2026-01-01T00:00:30.000001Z"


def test_a_renew_time_from_the_future_is_grown_from(rig, clock):
    made_before(rig)
    spec = {"holderIdentity": "n1", "leaseDurationSeconds": 40, "renewTime": "2026-06-01T00:00:00.000000Z"}
    rig.kube.admin.create(LEASES, {"kind": "Lease", "metadata": {"name": "n1"}, "spec": spec})
    rig.start()
    assert rig.lease()["spec"]["renewTime"] == "2026-06-01T00:00:00.000001Z"


def test_k10_the_lease_of_a_registered_node_is_renewed_before_we_register(rig, clock):
    made_before(rig)
    rig.node.start_lease()
    clock.run(35)
    assert [at for at, _ in rig.renewals()] == [0.0, 10.0, 20.0, 30.0]
    assert condition(rig.held(), "Ready") == {}  # nothing else was touched


def test_k10_without_a_node_there_is_no_lease_and_no_node_before_we_register(rig, clock):
    rig.node.start_lease()
    clock.run(35)
    assert asked(rig.kube) == []
    rig.node.register()
    clock.run(0)
    assert [what for _, what in asked(rig.kube)] == [f"POST {NODES}", f"POST {LEASES}"]


def test_n18_over_a_restart_the_node_is_never_not_ready(rig, clock):
    rig.start()
    clock.run(100)
    states = []
    rig.kube.store.on_change.append(
        lambda target, change: states.append(condition(change.last)["status"]) if change.last["kind"] == "Node" else 0
    )
    rig.node.close()
    clock.run(20)
    rig.start(rig.process("second"))
    clock.run(400)
    assert set(states) == {"True"}
    gaps = [b - a for (a, _), (b, _) in pairwise(rig.renewals())]
    assert max(gaps) <= 20.0


def test_n5_a_lease_that_is_deleted_is_made_again(rig, clock):
    rig.start()
    clock.run(5)
    rig.kube.admin.delete(LEASE)
    clock.run(5)
    assert rig.lease()["spec"]["holderIdentity"] == "n1"


def test_n6_a_lease_that_somebody_edits_is_renewed_all_the_same_and_alarms_nobody(rig, clock):
    rig.start()
    for i in range(10):
        clock.run(10)
        rig.kube.admin.patch(LEASE, {"metadata": {"labels": {"round": str(i)}}}, kind="merge")
    clock.run(10)
    assert rig.lease()["metadata"]["labels"] == {"round": "9"}
    last = datetime.fromisoformat(rig.lease()["spec"]["renewTime"])
    assert last == clock.now() and rig.node.alone.is_set()


def test_n7_a_lease_held_by_another_name_is_taken_over(rig, clock):
    made_before(rig)
    spec = {"holderIdentity": "somebody", "leaseDurationSeconds": 15, "renewTime": "2025-06-01T00:00:00.000000Z"}
    rig.kube.admin.create(LEASES, {"kind": "Lease", "metadata": {"name": "n1"}, "spec": spec})
    rig.start()
    assert rig.lease()["spec"]["holderIdentity"] == "n1" and rig.lease()["spec"]["leaseDurationSeconds"] == 40
    assert rig.node.alone.is_set()


def test_a_renewal_that_was_stored_although_its_answer_was_lost_is_not_taken_for_somebody_elses(rig, clock):
    rig.start()
    for _ in range(6):
        clock.run(10)
        rig.kube.fail(f"PUT {LEASE}", ApiError(0, "ConnectionReset", "lost"), stored=True)
    clock.run(60)
    assert rig.node.alone.is_set() and rig.event_reasons() == set()


def test_a_renewal_that_fails_is_tried_again_soon(rig, clock):
    rig.start()
    clock.run(5)
    rig.kube.fail(f"PUT {LEASE}", BOOM, times=3)
    clock.run(20)
    assert [at for at, _ in rig.renewals()] == [0.0, 10.0, 11.0, 13.0, 17.0]


def test_n14_a_thousand_beats_leave_the_objects_as_large_as_they_were(rig, clock):
    rig.start()
    clock.run(600)
    node, lease = len(str(rig.held())), len(str(rig.lease()))
    clock.run(10_000)
    assert len(str(rig.held())) - node <= 2 and len(str(rig.lease())) - lease <= 2  # resourceVersions


# --- two processes, one name --------------------------------------------------------------------------------------


def test_n17_two_processes_with_one_node_name_both_stop_work_on_pods_and_say_so(rig, clock):
    rig.start()
    clock.run(5)
    second = rig.process("second")
    rig.start(second)
    clock.run(35)
    assert not rig.node.alone.is_set() and not second.alone.is_set()
    shown = condition(rig.held())
    assert shown["status"] == "False" and shown["reason"] == "DuplicateNode"
    events = rig.kube.admin.list("/api/v1/namespaces/default/events")["items"]
    assert "DuplicateNode" in {event["reason"] for event in events}
    assert rig.held()["metadata"]["annotations"]["cocoonstack.io/vk-instance"] == "second"
    assert any("second" in event["message"] for event in events)


def test_n17_the_one_that_is_left_goes_on_when_the_other_has_been_silent_for_a_lease(rig, clock):
    rig.start()
    clock.run(5)
    second = rig.process("second")
    rig.start(second)
    clock.run(60)
    second.close()
    clock.run(60)
    assert rig.node.alone.is_set() and condition(rig.held())["status"] == "True"
    assert datetime.fromisoformat(rig.lease()["spec"]["renewTime"]) >= clock.now().replace(second=0)


def test_n17_the_last_words_of_a_predecessor_alarm_nobody(rig, clock):
    made_before(rig)
    old = rig.process("old")
    rig.start(old)
    clock.run(15)
    rig.start(rig.node)
    clock.run(6)
    old.close()
    clock.run(100)
    assert rig.event_reasons() == set() and condition(rig.held())["status"] == "True"
