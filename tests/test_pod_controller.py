"""Decisions K1, K6, K8, K9, K11: pods are created and updated by the provider, one pod UID at a time.

The provider here is a script: it takes as long as it is told, fails when it is told, and writes down what it was asked.
Virtual time, the fake API, exact instants. Scenarios that need guests, volumes or a lifecycle are the provider's tests.
"""

import copy

import pytest
from kube_rig import asked, condition, news, path_of, pod, status
from pod_rig import NOTHING_LEFT, PODS, Rig

from simulator.clock import VirtualClock


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


# --- creation -----------------------------------------------------------------------------------------------------


def test_p1_a_new_pod_is_created_once_and_its_status_published(rig, clock):
    rig.start()
    rig.create()
    clock.run(600)
    assert rig.calls() == [(0.0, "create")]
    assert condition(rig.held())["status"] == "True"
    assert len(asked(rig.kube, "PATCH")) == 2
    assert ("ProviderCreateSuccess", "the pod was brought up") in rig.events()


def test_p2_a_create_that_fails_is_tried_again_until_it_works(rig, clock):
    rig.provider.failures["create"] = 3
    rig.start()
    rig.create()
    clock.run(60)
    assert rig.calls() == [(0.0, "create"), (1.0, "create"), (3.0, "create"), (7.0, "create")]
    assert condition(rig.held())["status"] == "True"
    assert rig.events()["ProviderCreateFailed", "create does not work"] >= 1


def test_p3_a_create_that_never_works_backs_off_to_five_minutes_and_heals_without_an_edit(rig, clock):
    rig.provider.failures["create"] = 10_000
    rig.start()
    rig.create()
    clock.run(3600)
    instants = [at for at, _ in rig.calls("create")]
    assert instants[:10] == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0, 255.0, 511.0]
    assert instants[10:13] == [811.0, 1111.0, 1411.0]
    assert len([1 for at, path in asked(rig.kube, "POST", "PATCH") if "events" in path]) <= 20
    rig.provider.failures["create"] = 0
    clock.run(300)
    assert condition(rig.held())["status"] == "True"


def test_a_failed_status_that_comes_back_from_the_api_does_not_shorten_the_pause(rig, clock):
    rig.provider.failures["create"] = 10_000
    rig.start()
    made = rig.create()
    for _ in range(20):
        clock.run(1)
        rig.provider.notify(news(made, status(False, phase="Pending", ip=f"10.88.0.{_}"), lifecycle_state="failed"))
    clock.run(0)
    assert [at for at, _ in rig.calls("create")] == [0.0, 1.0, 3.0, 7.0, 15.0]


def test_retries_start_over_when_the_pod_changes(rig, clock):
    rig.provider.failures["create"] = 10_000
    rig.start()
    rig.create()
    clock.run(100)  # the next try would be at 127
    rig.edit({"metadata": {"labels": {"fixed": "yes"}}})
    clock.run(10)
    assert [at for at, _ in rig.calls("create")][-4:] == [100.0, 101.0, 103.0, 107.0]


def test_a_create_that_failed_is_a_create_again_even_if_it_left_something_behind(rig, clock):
    rig.start()
    original = rig.provider.create_pod

    def half(given):
        if not rig.provider.calls:
            rig.provider.pods[given["metadata"]["uid"]] = given
            rig.provider.failures["create"] = 1
        original(given)

    rig.provider.create_pod = half
    rig.create()
    clock.run(10)
    assert rig.calls() == [(0.0, "create"), (1.0, "create")]


def test_k9_a_pod_that_is_not_ours_gets_one_event_and_is_not_tried_again_until_it_changes(rig, clock):
    rig.provider.refuse = "annotation vm.cocoonstack.io/name is missing"
    rig.start()
    rig.create()
    clock.run(3600)
    assert rig.calls() == [(0.0, "create")]
    assert rig.events() == {("NotOurs", "annotation vm.cocoonstack.io/name is missing"): 1}
    assert rig.held()["status"]["phase"] == "Pending" and asked(rig.kube, "PATCH") == []
    rig.provider.refuse = ""
    rig.edit({"metadata": {"annotations": {"vm.cocoonstack.io/name": "vk-now"}}})
    assert rig.calls() == [(0.0, "create"), (3600.0, "create")]
    assert condition(rig.held())["status"] == "True"


def test_k9_a_pod_that_is_not_ours_is_removed_when_it_is_deleted(rig, clock):
    rig.provider.refuse = "annotation vm.cocoonstack.io/name is missing"
    rig.start()
    rig.create()
    rig.delete()
    clock.run(1)
    assert rig.held() is None and rig.leftovers() == NOTHING_LEFT


def test_p28_five_hundred_pods_at_once_are_all_created_and_published(rig, clock):
    rig.provider.took["create"] = 1.0
    rig.kube.latency = 0.01
    rig.start()
    for i in range(500):
        rig.kube.admin.create(PODS, pod(f"web-{i}"))
    clock.run(10)
    assert len(rig.calls("create")) == 500
    assert all(condition(item)["status"] == "True" for item in rig.kube.admin.list(PODS)["items"])


def test_p28_nothing_is_remembered_after_churn(rig, clock):
    rig.start()
    for i in range(300):
        rig.create(f"web-{i % 7}")
        rig.delete(f"web-{i % 7}")
        clock.run(0)
    assert rig.leftovers() == NOTHING_LEFT and rig.provider.pods == {}


def test_p33_a_pod_that_is_bound_later_is_created_when_it_is_bound(rig, clock):
    rig.start()
    unbound = pod()
    del unbound["spec"]["nodeName"]
    rig.kube.admin.create(PODS, unbound)
    clock.run(60)
    assert rig.calls() == []
    rig.kube.admin.create(f"{path_of()}/binding", {"target": {"kind": "Node", "name": "n1"}})
    clock.run(0)
    assert rig.calls() == [(60.0, "create")]


def test_the_pods_of_other_nodes_are_nobodys_business(rig, clock):
    rig.start()
    other = pod()
    other["spec"]["nodeName"] = "n2"
    rig.kube.admin.create(PODS, other)
    clock.run(60)
    assert rig.calls() == []


# --- update -------------------------------------------------------------------------------------------------------


def test_p24_an_edit_is_handed_to_the_provider_once(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.edit({"metadata": {"annotations": {"vm.cocoonstack.io/probe-port": "22"}}})
    clock.run(600)
    assert rig.calls() == [(0.0, "create"), (5.0, "update")]
    (seen,) = rig.provider.pods.values()
    assert seen["metadata"]["annotations"]["vm.cocoonstack.io/probe-port"] == "22"


def test_our_own_status_and_annotations_are_no_update(rig, clock):
    rig.start()
    made = rig.create()
    for i in range(5):
        rig.provider.notify(news(made, status(ip=f"10.88.0.{i + 10}"), id="v1", ip=f"10.88.0.{i + 10}"))
        clock.run(60)
    assert rig.calls() == [(0.0, "create")]


def test_p19_what_users_edit_while_we_publish_is_not_reverted(rig, clock):
    rig.kube.latency = 1.0
    rig.start()
    clock.run(5)
    made = rig.create()
    for i in range(5):
        rig.edit({"metadata": {"labels": {"round": str(i)}, "annotations": {"note": str(i)}}})
        rig.provider.notify(news(made, status(i % 2 == 0), id="v1"))
        clock.run(0.7)
    clock.run(60)
    metadata = rig.held()["metadata"]
    assert metadata["labels"]["round"] == "4" and metadata["annotations"]["note"] == "4"


def test_an_update_that_fails_is_tried_again_with_the_newest_pod(rig, clock):
    rig.start()
    rig.create()
    rig.provider.failures["update"] = 2
    rig.edit({"metadata": {"labels": {"a": "1"}}})
    clock.run(0.5)
    rig.edit({"metadata": {"labels": {"a": "2"}}})
    clock.run(60)
    assert rig.calls() == [(0.0, "create"), (0.0, "update"), (0.5, "update"), (1.5, "update")]
    (seen,) = rig.provider.pods.values()
    assert seen["metadata"]["labels"] == {"a": "2"}


# --- the shape of it ----------------------------------------------------------------------------------------------


def test_operations_of_one_pod_never_overlap_and_pods_do_not_wait_for_each_other(rig, clock):
    rig.provider.took = {"create": 5.0, "update": 5.0, "delete": 5.0}
    rig.start()
    rig.create("a")
    rig.create("b")
    clock.run(1)
    rig.edit({"metadata": {"labels": {"x": "1"}}}, "a")
    clock.run(6)
    rig.delete("a")
    clock.run(60)
    per_pod = [(at, verb) for at, verb, name, _ in rig.provider.calls if name == "a"]
    assert per_pod == [(0.0, "create"), (5.0, "update"), (10.0, "delete")]
    assert (0.0, "create", "b") in [call[:3] for call in rig.provider.calls]


def test_actors_end_when_idle(rig, clock):
    rig.start()
    for i in range(20):
        rig.create(f"web-{i}")
    clock.run(1)
    assert len(rig.controller._group) == 1


def test_the_provider_may_change_what_it_was_given(rig, clock):
    rig.start()
    original = rig.provider.create_pod

    def vandal(given):
        original(copy.deepcopy(given))
        given["metadata"]["labels"] = {"scribbled": "on"}
        given["spec"].clear()

    rig.provider.create_pod = vandal
    rig.create()
    clock.run(120)
    assert rig.calls() == [(0.0, "create")]


def test_k11_nothing_is_done_while_the_gate_is_closed(rig, clock):
    rig.start()
    rig.gate.clear()
    rig.create()
    clock.run(100)
    assert rig.calls() == [] and asked(rig.kube) == []
    rig.gate.set()
    clock.run(0)
    assert rig.calls() == [(100.0, "create")]


def test_a_provider_whose_listing_fails_does_not_end_the_looking(rig, clock):
    rig.start()
    working, rig.provider.get_pods = rig.provider.get_pods, lambda: 1 / 0
    clock.run(100)
    rig.provider.get_pods = working
    made = rig.create()
    clock.run(5)
    rig.provider.pods.clear()
    clock.run(60)
    assert [verb for _, verb in rig.calls()] == ["create", "create"]
    assert made["metadata"]["uid"] in rig.provider.pods


def test_after_stop_no_pod_is_acted_on_but_news_are_still_published(rig, clock):
    rig.start()
    made = rig.create()
    clock.run(5)
    rig.controller.stop()
    clock.run(0)
    rig.create("other")
    rig.delete()
    rig.provider.notify(news(made, status(False), id="v1"))
    clock.run(60)
    assert rig.calls() == [(0.0, "create")] and condition(rig.held())["status"] == "False"


def test_close_gives_what_is_owed_a_last_try(rig, clock):
    rig.start()
    made = rig.create()
    clock.run(5)
    rig.kube.latency = 1.0
    rig.provider.notify(news(made, status(False), id="v1"))
    rig.controller.close(patience=5.0)
    assert clock.elapsed() == 6.0 and condition(rig.held())["status"] == "False"


def test_after_close_nothing_more_is_done(rig, clock):
    rig.start()
    rig.create()
    clock.run(5)
    rig.controller.close()
    clock.run(0)
    before = len(rig.kube.requests)
    rig.create("other")
    rig.provider.notify(news(rig.held(), status(False)))
    clock.run(600)
    assert len(rig.kube.requests) == before and rig.calls() == [(0.0, "create")]
