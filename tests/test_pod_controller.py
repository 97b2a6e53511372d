"""Decisions K1, K6-K9: what the API wants, done by the provider, one pod UID at a time.

The provider here is a script: it takes as long as it is told, fails when it is told, and writes down what it was asked.
Virtual time, the fake API, exact instants. Scenarios that need guests, volumes or a lifecycle are the provider's tests.
"""

import copy

import pytest
from gevent.event import Event
from kube_rig import Lowest, Settings, asked, condition, news, path_of, pod, status

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_events import EventRecorder
from vkcocoon_kube import ApiError
from vkcocoon_pods import PodController
from vkcocoon_status import NotOurs

PODS = "/api/v1/namespaces/default/pods"
BOOM = ApiError(500, "InternalError", "boom")


class ScriptedProvider:
    """Does what PodController asks, slowly or not at all if told so; remembers pods by UID."""

    def __init__(self, clock):
        self.clock = clock
        self.notify = None
        self.pods = {}
        self.calls = []  # (instant, operation, name, uid's serial)
        self.took = {}  # operation -> seconds
        self.failures = {}  # operation -> how many more times it fails
        self.refuse = ""
        self.delete_status = status(False, phase="Succeeded")

    def create_pod(self, given):
        self._work("create", given)
        if self.refuse:
            raise NotOurs(self.refuse)
        self.pods[given["metadata"]["uid"]] = given
        self.notify(news(given, status(), id="v1", lifecycle_state="ready"))

    def update_pod(self, given):
        self._work("update", given)
        self.pods[given["metadata"]["uid"]] = given

    def delete_pod(self, given):
        known = given["metadata"]["uid"] in self.pods
        if known:
            self.notify(news(given, status(False, reason="Terminating"), id="v1"))
        self._work("delete", given)
        self.pods.pop(given["metadata"]["uid"], None)
        if known:
            self.notify(news(given, self.delete_status, id="v1"))

    def get_pod(self, namespace, name):
        return next((copy.deepcopy(pod) for pod in self.pods.values() if pod["metadata"]["name"] == name), None)

    def observed(self, pod):
        pass

    def vanished(self, uid):
        pass

    def uids(self):
        return {pod["metadata"]["uid"] for pod in self.get_pods()}

    def get_pods(self):
        return [copy.deepcopy(pod) for pod in self.pods.values()]

    def knows(self, uid):
        return uid in self.pods

    def _work(self, operation, given):
        self.calls.append((self.clock.elapsed(), operation, given["metadata"]["name"], given["metadata"]["uid"]))
        if seconds := self.took.get(operation):
            self.clock.sleep(seconds)
        if self.failures.get(operation):
            self.failures[operation] -= 1
            raise RuntimeError(f"{operation} does not work")


class Rig:
    def __init__(self, clock):
        self.clock = clock
        self.kube = FakeKube(clock)
        self.provider = ScriptedProvider(clock)
        self.recorder = EventRecorder(self.kube, clock, node_name="n1", rng=Lowest())
        self.gate = Event()
        self.gate.set()
        self.controller = None
        self.restart()

    def restart(self):
        """A new controller over the same provider, as after a restart of the daemon with everything adopted."""
        if self.controller is not None:
            self.controller.close()
        self.controller = PodController(
            self.kube,
            self.clock,
            self.provider,
            Settings(),
            recorder=self.recorder,
            gate=self.gate,
            rng=Lowest(),
        )
        self.provider.notify = self.controller.notify

    def start(self):
        self.recorder.start()
        self.controller.start()
        self.clock.run(0)

    def create(self, name="web-0", **changes):
        made = self.kube.admin.create(PODS, pod(name, **changes))
        self.clock.run(0)
        return made

    def edit(self, body, name="web-0"):
        self.kube.admin.patch(path_of(name), body, kind="merge")
        self.clock.run(0)

    def delete(self, name="web-0", grace=30):
        self.kube.admin.delete(path_of(name), grace_seconds=grace)
        self.clock.run(0)

    def held(self, name="web-0"):
        try:
            return self.kube.admin.get(path_of(name))
        except ApiError as error:
            assert error.status == 404
            return None

    def calls(self, operation=""):
        return [(at, verb) for at, verb, _, _ in self.provider.calls if operation in ("", verb)]

    def events(self):
        items = self.kube.admin.list("/api/v1/namespaces/default/events")["items"]
        return {(item["reason"], item["message"]): item["count"] for item in items}

    def leftovers(self):
        controller = self.controller
        return len(controller._pods), len(controller._lines), len(controller._publishers), len(controller._group)

    def close(self):
        self.controller.close()
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


NOTHING_LEFT = (0, 0, 0, 1)  # only the greenlet that looks again


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
