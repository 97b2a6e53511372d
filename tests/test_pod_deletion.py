"""Decisions K1, K7 and K8: first the VM goes, then the object; a namesake waits; what is gone is confirmed first.

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


# --- deletion -----------------------------------------------------------------------------------------------------


def test_p5_a_deleted_pod_is_gone_as_soon_as_its_vm_is(rig, clock):
    rig.provider.took["delete"] = 1.0
    rig.start()
    rig.create()
    clock.run(10)
    rig.delete(grace=30)
    assert condition(rig.held())["reason"] == "Terminating"
    clock.run(1)
    assert rig.held() is None
    assert asked(rig.kube, "DELETE") == [(11.0, f"DELETE {path_of()}")]
    assert rig.leftovers() == NOTHING_LEFT


def test_k7_the_terminal_status_is_written_before_the_object_is_removed(rig, clock):
    rig.start()
    made = rig.create()
    clock.run(10)
    seen = len(rig.kube.requests)
    rig.delete()
    wrote = [request for request in rig.kube.requests[seen:] if request.verb in ("PATCH", "DELETE")]
    assert [request.verb for request in wrote] == ["PATCH", "DELETE"]
    assert wrote[0].body["status"]["phase"] == "Succeeded"
    assert wrote[1].options == {"uid": made["metadata"]["uid"], "gracePeriodSeconds": "0"}


def test_p6_a_pod_whose_teardown_outlasts_its_grace_period_stays_until_the_vm_is_gone(rig, clock):
    rig.provider.took["delete"] = 120.0
    rig.start()
    rig.create()
    rig.delete(grace=5)
    clock.run(119)
    assert rig.held() is not None
    clock.run(1)
    assert rig.held() is None


def test_p7_a_teardown_that_fails_is_tried_again_and_the_object_stays_meanwhile(rig, clock):
    rig.provider.failures["delete"] = 3
    rig.start()
    rig.create()
    rig.delete()
    clock.run(6)
    assert rig.held() is not None
    clock.run(1)
    assert [at for at, _ in rig.calls("delete")] == [0.0, 1.0, 3.0, 7.0]
    assert rig.held() is None


def test_p8_a_pod_that_is_deleted_while_it_is_created_leaves_nothing_behind(rig, clock):
    rig.provider.took["create"] = 5.0
    rig.start()
    rig.create()
    clock.run(2)
    rig.delete()
    clock.run(20)
    assert rig.calls() == [(0.0, "create"), (5.0, "delete")]
    assert rig.held() is None and rig.provider.pods == {} and rig.leftovers() == NOTHING_LEFT


def test_a_pod_that_is_deleted_between_two_tries_of_its_create_is_torn_down_at_once(rig, clock):
    rig.provider.failures["create"] = 10_000
    rig.start()
    rig.create()
    clock.run(300)
    rig.delete()
    assert rig.calls("delete") == [(300.0, "delete")] and rig.held() is None


def test_p9_a_forced_deletion_tears_the_vm_down(rig, clock):
    rig.start()
    made = rig.create()
    clock.run(5)
    rig.delete(grace=0)
    clock.run(60)
    assert rig.calls() == [(0.0, "create"), (5.0, "delete")]
    assert rig.leftovers() == NOTHING_LEFT
    # Confirmed by a fresh read, and nothing written to a pod that is gone.
    assert [verb for at, verb in asked(rig.kube, "GET", "PATCH", "DELETE") if at >= 5.0] == [f"GET {path_of()}"]
    assert made["metadata"]["uid"] not in rig.provider.pods


def test_p9_nothing_is_written_to_a_pod_that_is_gone_however_long_its_teardown_takes(rig, clock):
    rig.provider.took["delete"] = 60.0
    rig.start()
    rig.create()
    clock.run(5)
    rig.delete(grace=0)
    clock.run(100)
    assert [what for at, what in asked(rig.kube, "PATCH") if at >= 5.0] == []


def test_a_forced_deletion_that_cannot_be_confirmed_destroys_nothing_until_it_can(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.kube.fail(f"GET {path_of()}", BOOM, times=3)
    rig.delete(grace=0)
    clock.run(60)
    assert rig.calls("delete") == [(12.0, "delete")]


def test_p10_a_second_deletion_with_a_shorter_grace_changes_nothing(rig, clock):
    rig.provider.took["delete"] = 10.0
    rig.start()
    rig.create()
    rig.delete(grace=600)
    clock.run(2)
    rig.delete(grace=1)
    clock.run(60)
    assert rig.calls("delete") == [(0.0, "delete")] and rig.held() is None


def test_p11_a_finalizer_keeps_the_object_but_is_not_asked_again_and_again(rig, clock):
    rig.start()
    rig.create(finalizers=["example.com/keep"])
    rig.delete()
    clock.run(600)
    assert rig.calls("delete") == [(0.0, "delete")]
    assert len(asked(rig.kube, "DELETE")) == 1
    assert rig.held()["status"]["phase"] == "Succeeded"
    rig.edit({"metadata": {"finalizers": None}})
    clock.run(1)
    assert rig.held() is None and rig.leftovers() == NOTHING_LEFT


def test_p29_an_evicted_pod_is_a_deleted_pod(rig, clock):
    rig.start()
    rig.create()
    rig.kube.admin.create(f"{path_of()}/eviction", {"metadata": {"name": "web-0"}})
    clock.run(1)
    assert rig.held() is None and rig.calls("delete") == [(0.0, "delete")]


def test_p30_a_pod_that_podgc_failed_and_removed_is_torn_down_and_not_revived(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.kube.admin.patch(f"{path_of()}/status", {"status": {"phase": "Failed"}}, kind="strategic")
    clock.run(60)
    assert rig.held()["status"]["phase"] == "Failed"
    rig.delete(grace=0)
    assert rig.calls() == [(0.0, "create"), (65.0, "delete")]


def test_a_status_that_the_api_rejects_does_not_hold_up_the_deletion(rig, clock):
    rig.start()
    rig.create()
    rig.kube.fail("PATCH */status", ApiError(422, "Invalid", "no"), times=None)
    clock.run(5)
    rig.delete()
    clock.run(0)
    assert rig.calls("delete") == [(5.0, "delete")] and rig.held() is None


def test_an_api_that_hangs_on_the_last_status_delays_the_removal_by_ten_seconds(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.kube.hang("PATCH */status")
    rig.delete()
    clock.run(9.9)
    assert rig.held() is not None
    clock.run(0.1)
    assert rig.held() is None


def test_p34_all_pods_of_a_namespace_can_go_at_once(rig, clock):
    rig.provider.took["delete"] = 2.0
    rig.start()
    for i in range(50):
        rig.create(f"web-{i}")
    for i in range(50):
        rig.delete(f"web-{i}")
    clock.run(5)
    assert rig.kube.admin.list(PODS)["items"] == [] and rig.leftovers() == NOTHING_LEFT


@pytest.mark.parametrize("status_code", [404, 409])
def test_an_object_that_is_gone_already_when_we_remove_it_is_no_failure(rig, clock, status_code):
    rig.start()
    rig.create()
    clock.run(5)
    rig.kube.fail("DELETE *", ApiError(status_code, "x", "y"))
    rig.delete()
    clock.run(10)
    assert [at for at, _ in asked(rig.kube, "DELETE")] == [5.0]
    clock.run(60)  # it was there after all: seen at the next look
    assert rig.held() is None


# --- names and UIDs -----------------------------------------------------------------------------------------------


def operations(rig, *pods):
    """(operation, which of the pods) in order."""
    order = {made["metadata"]["uid"]: i for i, made in enumerate(pods)}
    return [(verb, order[uid]) for _, verb, _, uid in rig.provider.calls]


def test_p12_a_namesake_is_created_only_after_the_old_pod_is_torn_down(rig, clock):
    rig.provider.took["delete"] = 8.0
    rig.start()
    first = rig.create()
    rig.delete(grace=0)
    clock.run(1)
    second = rig.create()
    clock.run(60)
    assert operations(rig, first, second) == [("create", 0), ("delete", 0), ("create", 1)]
    assert [at for at, _ in rig.calls()] == [0.0, 0.0, 8.0]
    assert rig.held()["metadata"]["uid"] == second["metadata"]["uid"]
    assert condition(rig.held())["status"] == "True"


def test_p12_a_namesake_of_a_pod_that_is_still_being_created_waits(rig, clock):
    rig.provider.took["create"] = 5.0
    rig.start()
    first = rig.create()
    clock.run(1)
    rig.delete(grace=0)
    second = rig.create()
    clock.run(60)
    assert operations(rig, first, second) == [("create", 0), ("delete", 0), ("create", 1)]


def test_p13_a_namesake_that_came_while_nobody_watched_is_another_pod(rig, clock):
    rig.start()
    first = rig.create()
    clock.run(5)
    rig.kube.down = True
    rig.delete(grace=0)
    second = rig.create()
    rig.kube.expire_history()
    rig.kube.down = False
    clock.run(60)
    assert operations(rig, first, second) == [("create", 0), ("delete", 0), ("create", 1)]
    assert condition(rig.held())["status"] == "True"


def test_p14_a_deletion_that_nobody_saw_is_found_at_the_next_list(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.kube.down = True
    rig.delete(grace=0)
    rig.kube.expire_history()
    rig.kube.down = False
    clock.run(60)
    assert len(rig.calls("delete")) == 1 and rig.leftovers() == NOTHING_LEFT


def test_p16_news_of_a_pod_that_is_gone_are_not_written(rig, clock):
    rig.start()
    made = rig.create()
    rig.delete(grace=0)
    clock.run(5)
    rig.provider.notify(news(made, status()))
    clock.run(60)
    assert [verb for at, verb in asked(rig.kube, "PATCH") if at >= 5] == []
    assert rig.leftovers() == NOTHING_LEFT


def test_p17_news_of_an_old_uid_do_not_reach_its_namesake(rig, clock):
    rig.start()
    first = rig.create()
    rig.delete()
    second = rig.create()
    clock.run(5)
    before = rig.held()
    rig.provider.notify(news(first, status(False), id="old"))
    clock.run(60)
    assert rig.held() == before and rig.held()["metadata"]["uid"] == second["metadata"]["uid"]


@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_a_namesake_the_provider_kept_from_an_earlier_life_is_torn_down_first(rig, clock, latency):
    rig.kube.latency = latency
    old = rig.create()
    rig.provider.pods[old["metadata"]["uid"]] = old
    rig.kube.admin.delete(path_of(), grace_seconds=0)
    new = rig.create()
    rig.start()
    clock.run(60)
    assert operations(rig, old, new) == [("delete", 0), ("create", 1)]


def test_a_pod_that_is_there_after_all_is_kept(rig, clock):
    rig.start()
    made = rig.create()
    clock.run(5)
    rig.controller._reflector._remove(rig.held())  # the watch said it was gone; the fresh read says otherwise
    clock.run(1)
    assert rig.calls("delete") == []
    rig.provider.notify(news(made, status(ip="10.88.0.77"), id="v1"))
    clock.run(0)
    assert rig.held()["status"]["podIP"] == "10.88.0.77"


def test_the_real_end_of_a_pod_that_was_taken_for_gone_before_is_found(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.controller._reflector._remove(rig.held())
    clock.run(1)
    rig.delete(grace=0)
    clock.run(60)
    assert len(rig.calls("delete")) == 1 and rig.leftovers() == NOTHING_LEFT


def test_being_told_twice_that_a_pod_is_gone_is_being_told_once(rig, clock):
    rig.provider.took["delete"] = 10.0
    rig.start()
    made = rig.create()
    rig.delete(grace=0)
    clock.run(5)
    rig.controller.gone(made)
    clock.run(60)
    assert len(rig.calls("delete")) == 1 and rig.leftovers() == NOTHING_LEFT
