"""Decisions K2, K6 and K8: restarts, outages, lost VMs and the meddling of others, and what must be so afterwards.

The provider is a script (`pod_rig`). Virtual time, the fake API, exact instants.
"""

import pytest
from kube_rig import asked, condition, news, path_of, status
from pod_rig import BOOM, NOTHING_LEFT, PODS, Rig

from simulator.clock import VirtualClock
from vkcocoon_kube import ApiError


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


# --- restarts and outages -----------------------------------------------------------------------------------------


def test_p23_what_runs_is_adopted_without_a_write_and_handed_over_once_for_what_it_may_be_owed(rig, clock):
    made = rig.create()
    rig.provider.pods[made["metadata"]["uid"]] = made
    rig.start()
    clock.run(600)
    assert rig.calls() == [(0.0, "update")] and asked(rig.kube) == []


def test_p23_an_adopted_pod_that_was_edited_meanwhile_is_updated(rig, clock):
    made = rig.create()
    rig.provider.pods[made["metadata"]["uid"]] = made
    rig.edit({"metadata": {"labels": {"new": "yes"}}})
    rig.start()
    assert rig.calls() == [(0.0, "update")]


def test_p23_a_pod_that_was_terminating_already_is_torn_down_once(rig, clock):
    made = rig.create()
    rig.provider.pods[made["metadata"]["uid"]] = made
    rig.delete()
    rig.start()
    clock.run(60)
    assert rig.calls() == [(0.0, "delete")] and rig.held() is None


def test_p23_a_terminating_pod_the_provider_does_not_know_is_removed(rig, clock):
    rig.create()
    rig.delete()
    rig.start()
    clock.run(1)
    assert rig.held() is None


def test_p23_a_pod_the_api_no_longer_has_is_torn_down(rig, clock):
    made = rig.create()
    rig.provider.pods[made["metadata"]["uid"]] = made
    rig.kube.admin.delete(path_of(), grace_seconds=0)
    rig.start()
    clock.run(1)
    assert rig.calls() == [(0.0, "delete")] and rig.leftovers() == NOTHING_LEFT


def test_p23_nothing_is_torn_down_while_the_list_fails(rig, clock):
    made = rig.create()
    rig.provider.pods[made["metadata"]["uid"]] = made
    rig.kube.admin.delete(path_of(), grace_seconds=0)
    rig.kube.fail(f"LIST {PODS[:8]}pods", BOOM, times=None)
    rig.start()
    clock.run(3600)
    assert rig.calls() == [] and not rig.controller.synced.is_set()


def test_p23_a_finished_pod_is_not_started_again(rig, clock):
    rig.create()
    rig.kube.admin.patch(f"{path_of()}/status", {"status": {"phase": "Succeeded"}}, kind="strategic")
    rig.start()
    clock.run(600)
    assert rig.calls() == [] and asked(rig.kube) == []


def test_p15_news_from_before_the_first_list_are_published(rig, clock):
    made = rig.create()
    rig.provider.pods[made["metadata"]["uid"]] = made
    rig.provider.notify(news(made, status(), id="v1", lifecycle_state="ready"))
    clock.run(0)
    rig.start()
    clock.run(60)
    assert condition(rig.held())["status"] == "True"


def test_p22_an_outage_leaves_workloads_alone_and_terminal_states_arrive_after_it(rig, clock):
    rig.start()
    made = rig.create()
    clock.run(5)
    rig.kube.down = True
    clock.run(300)
    rig.provider.pods.clear()
    rig.provider.notify(news(made, status(False, phase="Failed")))
    clock.run(300)
    rig.kube.down = False
    clock.run(30)
    assert rig.held()["status"]["phase"] == "Failed"
    assert rig.calls() == [(0.0, "create")]  # and it is not quietly created again


def test_a_vm_that_was_lost_is_not_created_again_before_its_terminal_status_arrives(rig, clock):
    rig.start()
    made = rig.create()
    clock.run(5)
    rig.kube.fail("PATCH */status", BOOM, times=None)
    rig.provider.pods.clear()
    rig.provider.notify(news(made, status(False, phase="Failed")))
    rig.edit({"metadata": {"labels": {"look": "again"}}})
    clock.run(120)
    assert rig.calls() == [(0.0, "create")]


def test_p20_ready_that_the_node_controller_took_away_is_put_back(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    lost = {"conditions": [{"type": "Ready", "status": "False"}]}
    rig.kube.admin.patch(f"{path_of()}/status", {"status": lost}, kind="strategic")
    clock.run(0)
    assert condition(rig.held())["status"] == "True"


def test_p20_also_when_it_was_taken_away_during_an_outage(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.kube.down = True
    lost = {"conditions": [{"type": "Ready", "status": "False"}]}
    rig.kube.admin.patch(f"{path_of()}/status", {"status": lost}, kind="strategic")
    clock.run(60)
    rig.kube.down = False
    clock.run(30)
    assert condition(rig.held())["status"] == "True"


def test_p21_refusals_of_every_kind_are_sat_out(rig, clock):
    rig.start()
    for error in (ApiError(409, "Conflict", "x"), BOOM, ApiError(0, "Timeout", "x"), ApiError(403, "Forbidden", "x")):
        rig.kube.fail("PATCH */status", error)
    rig.create()
    clock.run(60)
    held = rig.held()
    assert condition(held)["status"] == "True"
    assert held["metadata"]["annotations"]["vm.cocoonstack.io/lifecycle-state"] == "ready"


def test_p18_a_notify_storm_ends_in_its_last_state_with_few_writes(rig, clock):
    rig.start()
    made = rig.create()
    for i in range(1000):
        rig.provider.notify(news(made, status(i % 2 == 0, ip="10.88.0.8"), id="v1"))
        clock.run(0.001)
    clock.run(10)
    assert len(asked(rig.kube, "PATCH")) <= 15
    assert condition(rig.held())["status"] == "False"


def test_p35_a_pod_the_provider_forgot_is_brought_up_again_only_if_it_is_not_terminal(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.provider.pods.clear()
    clock.run(60)
    assert [at for at, _ in rig.calls()] == [0.0, 24.0]


def test_a_success_forgets_the_failures_before_it(rig, clock):
    rig.provider.failures["create"] = 4
    rig.start()
    rig.create()
    clock.run(20)  # tried at 0, 1, 3, 7 and 15
    rig.provider.pods.clear()
    rig.provider.failures["create"] = 1
    clock.run(20)  # looked after at 24
    assert [at for at, _ in rig.calls()][-3:] == [15.0, 24.0, 25.0]


def test_a_provider_that_gives_back_something_else_than_it_was_given_is_not_updated_for_ever(rig, clock):
    rig.start()
    made = rig.create()
    rig.provider.pods[made["metadata"]["uid"]]["metadata"]["labels"] = {"its": "own"}
    clock.run(600)
    assert rig.calls() == [(0.0, "create")]
