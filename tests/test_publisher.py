"""Decisions K1, K2, K3, K6: a status is state, owed until the API holds it.

Annotations follow their status; the newest state wins; nothing is written when nothing differs; nothing is ever written
to another UID. All instants are exact, in virtual time against the fake API.
"""

import copy
import itertools

import gevent
import pytest
from kube_rig import T0, Desk, Lowest, asked, condition, news, path_of, pod, status

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_kube import ApiError
from vkcocoon_publish import Publishers, agrees, status_patch

STATUS = f"PATCH {path_of()}/status"
POD = f"PATCH {path_of()}"
BOOM = ApiError(500, "InternalError", "boom")


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def desk(clock):
    desk = Desk(clock)
    desk.reflector.start()
    clock.run(0)
    yield desk
    desk.close()


def foreign_status(desk, body, name="web-0"):
    desk.kube.admin.patch(f"{path_of(name)}/status", {"status": body}, kind="strategic")


# --- delivery -----------------------------------------------------------------------------------------------------


def test_the_status_is_written_and_then_the_annotations(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status(), id="v1", lifecycle_state="ready"))
    clock.run(0)
    assert asked(desk.kube) == [(0.0, STATUS), (0.0, POD)]
    held = desk.held()
    assert condition(held)["status"] == "True" and held["status"]["podIP"] == "10.88.0.5"
    assert held["metadata"]["annotations"]["vm.cocoonstack.io/lifecycle-state"] == "ready"


def test_every_write_names_the_uid_and_touches_nothing_else(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status(), id="v1"))
    clock.run(0)
    first, second = (request.body for request in desk.kube.requests if request.verb == "PATCH")
    assert first["metadata"] == {"uid": made["metadata"]["uid"]} and set(first) == {"metadata", "status"}
    assert second == {"metadata": {"uid": made["metadata"]["uid"], "annotations": {"vm.cocoonstack.io/id": "v1"}}}


def test_nothing_is_written_when_the_api_holds_it_already(desk, clock):
    made = desk.pod()
    foreign_status(desk, status(since="2026-01-01T00:00:00Z"))
    clock.run(0)
    desk.publishers.notify(news(made, status(since="2026-01-01T01:00:00.25+01:00")))
    clock.run(600)
    assert asked(desk.kube) == []


def test_the_same_state_notified_again_costs_nothing(desk, clock):
    made = desk.pod()
    for _ in range(50):
        desk.publishers.notify(news(made, status(), id="v1"))
        clock.run(12)
    assert len(asked(desk.kube)) == 2


def test_a_pod_the_reflector_has_not_seen_is_read_first(clock):
    kube = FakeKube(clock)
    publishers = Publishers(kube, clock, rng=Lowest())
    made = kube.admin.create("/api/v1/namespaces/default/pods", pod())
    publishers.notify(news(made, status()))
    clock.run(0)
    assert asked(kube, "GET", "PATCH") == [(0.0, f"GET {path_of()}"), (0.0, STATUS)]


def test_notify_never_switches_greenlets(desk, clock):
    made = desk.pod()
    failures = []

    def from_the_hub():
        try:  # in the hub every switch is an error
            desk.publishers.notify(news(made, status()))
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs into the assertion
            failures.append(error)

    gevent.get_hub().loop.run_callback(from_the_hub)
    clock.run(0)
    assert failures == [] and condition(desk.held())["status"] == "True"


# --- newest wins --------------------------------------------------------------------------------------------------


def test_what_changes_during_a_slow_write_collapses_into_the_newest_state(desk, clock):
    made = desk.pod()
    desk.kube.latency = 10.0
    desk.publishers.notify(news(made, status(True)))
    clock.run(1)
    for ready in (False, True, False):
        desk.publishers.notify(news(made, status(ready)))
        clock.run(1)
    clock.run(60)
    assert asked(desk.kube) == [(0.0, STATUS), (10.0, STATUS)]
    assert condition(desk.held())["status"] == "False"


def test_a_newer_status_goes_before_the_annotations_of_the_older_one(desk, clock):
    made = desk.pod()
    desk.kube.latency = 2.0
    desk.publishers.notify(news(made, status(False), lifecycle_state="creating"))
    clock.run(1)
    desk.publishers.notify(news(made, status(True), lifecycle_state="ready"))
    clock.run(60)
    assert asked(desk.kube) == [(0.0, STATUS), (2.0, STATUS), (4.0, POD)]
    assert desk.held()["metadata"]["annotations"]["vm.cocoonstack.io/lifecycle-state"] == "ready"


def test_a_storm_of_changes_costs_a_burst_and_then_one_write_a_second(desk, clock):
    made = desk.pod()
    for i in range(10_000):
        desk.publishers.notify(news(made, status(i % 2 == 0)))
        clock.run(0.001)
    desk.publishers.notify(news(made, status(True, ip="10.88.0.99")))
    clock.run(5)
    assert len(asked(desk.kube)) <= 21
    assert desk.held()["status"]["podIP"] == "10.88.0.99"


# --- outages and refusals -----------------------------------------------------------------------------------------


def test_an_outage_is_sat_out_with_growing_pauses_and_the_newest_state_delivered(desk, clock):
    made = desk.pod()
    desk.kube.down = True
    desk.publishers.notify(news(made, status(False)))
    clock.run(600)
    tries = [at for at, _ in asked(desk.kube, "PATCH")]
    assert tries[:8] == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5]
    assert all(later - earlier == 30.0 for earlier, later in itertools.pairwise(tries[7:]))
    desk.publishers.notify(news(made, status(phase="Succeeded", ready=False)))
    desk.kube.down = False
    clock.run(1)
    assert desk.held()["status"]["phase"] == "Succeeded"


def test_the_annotation_waits_until_the_api_holds_the_status(desk, clock):
    made = desk.pod()
    refusal = desk.kube.fail(STATUS, BOOM, times=3)
    desk.publishers.notify(news(made, status(), lifecycle_state="ready"))
    clock.run(60)
    assert refusal.hits == 3
    assert asked(desk.kube) == [(0.0, STATUS), (0.5, STATUS), (1.5, STATUS), (3.5, STATUS), (3.5, POD)]


def test_an_annotation_that_fails_is_tried_again_without_a_second_status(desk, clock):
    made = desk.pod()
    desk.kube.fail(POD, BOOM, times=2)
    desk.publishers.notify(news(made, status(), id="v1"))
    clock.run(60)
    assert asked(desk.kube) == [(0.0, STATUS), (0.0, POD), (0.5, POD), (1.5, POD)]


def test_the_server_is_given_the_time_it_asks_for(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, ApiError(429, "TooManyRequests", "slow down", retry_after=7.0))
    desk.publishers.notify(news(made, status()))
    clock.run(60)
    assert asked(desk.kube) == [(0.0, STATUS), (7.0, STATUS)]


def test_a_rejected_status_is_tried_again_only_after_long_pauses(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, ApiError(422, "Invalid", "no"), times=None)
    desk.publishers.notify(news(made, status(), lifecycle_state="ready"))
    clock.run(1000)
    assert [at for at, _ in asked(desk.kube)] == [0.0, 30.0, 90.0, 210.0, 450.0, 750.0]
    assert "vm.cocoonstack.io/lifecycle-state" not in desk.held()["metadata"]["annotations"]


def test_a_rejected_state_that_is_notified_again_does_not_shorten_its_pause(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, ApiError(422, "Invalid", "no"), times=None)
    for _ in range(100):
        desk.publishers.notify(news(made, status()))
        clock.run(1)
    assert [at for at, _ in asked(desk.kube)] == [0.0, 30.0, 90.0]


def test_a_state_that_replaces_a_rejected_one_does_not_wait_for_its_pause(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, ApiError(422, "Invalid", "no"))
    desk.publishers.notify(news(made, status(False)))
    clock.run(5)
    desk.publishers.notify(news(made, status(True)))
    clock.run(0)
    assert [at for at, _ in asked(desk.kube)] == [0.0, 5.0]
    assert condition(desk.held())["status"] == "True"


def test_a_storm_of_rejected_states_is_held_to_one_try_a_second(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, ApiError(422, "Invalid", "no"), times=None)
    for i in range(1000):
        desk.publishers.notify(news(made, status(i % 2 == 0)))
        clock.run(0.01)
    assert [at for at, _ in asked(desk.kube)] == [float(second) for second in range(11)]


def test_a_write_that_was_stored_although_its_answer_was_lost_is_not_repeated(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, ApiError(0, "ConnectionReset", "lost"), stored=True)
    desk.publishers.notify(news(made, status()))
    clock.run(60)
    assert asked(desk.kube) == [(0.0, STATUS)]


# --- other pods ---------------------------------------------------------------------------------------------------


def test_a_pod_that_is_gone_ends_its_publisher(desk, clock):
    made = desk.pod()
    desk.overlook(made)
    desk.kube.admin.delete(path_of(), grace_seconds=0)
    desk.publishers.notify(news(made, status()))
    clock.run(60)
    assert asked(desk.kube, "PATCH", "GET") == [(0.0, f"GET {path_of()}")] and len(desk.publishers) == 0


@pytest.mark.parametrize("where", ["PATCH */web-0/status", "PATCH */web-0", "GET */web-0"])
def test_a_pod_that_is_listed_and_not_found_is_looked_for(desk, clock, where):
    made = desk.pod()
    desk.kube.fail("PATCH */web-0/status", ApiError(409, "Conflict", "so it is read"), times=1)
    desk.kube.fail(where, ApiError(404, "NotFound", "no"), times=3)
    desk.publishers.notify(news(made, status(), id="v1"))
    clock.run(60)
    held = desk.held()
    assert (condition(held)["status"], held["metadata"]["annotations"]["vm.cocoonstack.io/id"]) == ("True", "v1")
    assert desk.publishers.owing() == []


class Lying:
    """An API whose first answers to patches and reads of a pod are something else."""

    def __init__(self, kube, answer, verb, times=2):
        self._kube, self._answer, self._verb, self._times = kube, answer, verb, times

    def __getattr__(self, name):
        return getattr(self._kube, name)

    def _lies(self, verb):
        self._times -= verb == self._verb
        return verb == self._verb and self._times >= 0

    def get(self, path):
        return self._answer if self._lies("get") else self._kube.get(path)

    def patch(self, path, body, *, kind):
        return self._answer if self._lies("patch") else self._kube.patch(path, body, kind=kind)


@pytest.mark.parametrize("verb", ["get", "patch"])
@pytest.mark.parametrize(
    "answer",
    [{}, {"metadata": []}, {"status": None, "metadata": {"resourceVersion": "9" * 9}}, {"metadata": {"uid": "x"}}],
    ids=["nothing", "a list", "no UID", "another UID"],
)
def test_an_answer_that_is_not_the_pod_is_not_believed(clock, verb, answer):
    desk = Desk(clock, lambda kube: Lying(kube, answer, verb))
    desk.reflector.start()
    made = desk.pod()
    desk.kube.fail("PATCH */web-0/status", ApiError(409, "Conflict", "so it is read"), times=1)
    desk.publishers.notify(news(made, status(), id="v1"))
    clock.run(60)
    held = desk.held()
    assert (condition(held)["status"], held["metadata"]["annotations"]["vm.cocoonstack.io/id"]) == ("True", "v1")
    desk.close()


def test_a_pod_that_is_listed_and_cannot_be_found_is_asked_for_until_the_list_says_so_too(desk, clock):
    made = desk.pod()
    desk.reflector.close()
    clock.run(0)
    desk.kube.admin.delete(path_of(), grace_seconds=0)
    desk.publishers.notify(news(made, status()))
    clock.run(600)
    assert asked(desk.kube) == [(0.0, STATUS)]  # what is not there is read again, not written to
    assert 20 <= len(asked(desk.kube, "GET")) <= 40
    desk.publishers.gone(made["metadata"]["uid"])
    clock.run(60)
    count = len(asked(desk.kube, "GET"))
    clock.run(600)
    assert len(asked(desk.kube, "GET")) == count


def test_a_namesake_is_never_written_to(desk, clock):
    made = desk.pod()
    desk.reflector.close()
    clock.run(0)
    desk.kube.admin.delete(path_of(), grace_seconds=0)
    clock.spawn("the list notices", lambda: (clock.sleep(0.2), desk.overlook(made)))
    namesake = desk.kube.admin.create("/api/v1/namespaces/default/pods", pod())
    desk.publishers.notify(news(made, status(), id="v1"))
    clock.run(600)
    assert desk.held() == namesake
    assert asked(desk.kube, "PATCH", "GET") == [(0.0, STATUS), (0.5, f"GET {path_of()}")]
    assert len(desk.publishers) == 0


def test_one_hanging_write_does_not_delay_another_pod(desk, clock):
    slow, quick = desk.pod("slow"), desk.pod("quick")
    desk.kube.hang("PATCH */pods/slow/status")
    desk.publishers.notify(news(slow, status()))
    clock.run(1)
    desk.publishers.notify(news(quick, status()))
    clock.run(0)
    assert condition(desk.held("quick"))["status"] == "True"


def test_two_hundred_flips_are_written_sixteen_at_a_time(desk, clock):
    pods = [desk.pod(f"web-{i}") for i in range(200)]
    desk.kube.latency = 0.05
    for made in pods:
        desk.publishers.notify(news(made, status()))
    clock.run(60)
    starts = [at for at, _ in asked(desk.kube)]
    assert len(starts) == 200 and max(starts) == 0.6  # 13 rounds of 16
    assert max(starts.count(at) for at in set(starts)) == 16


def test_a_pod_that_goes_while_its_write_waits_for_its_turn_is_not_written_to(desk, clock):
    pods = [desk.pod(f"web-{i}") for i in range(17)]
    desk.kube.latency = 2.0
    for made in pods:
        desk.publishers.notify(news(made, status()))
    clock.run(1)
    desk.kube.admin.delete(path_of("web-16"), grace_seconds=0)
    clock.run(10)
    assert len(asked(desk.kube)) == 16


def test_what_the_reflector_does_not_see_is_not_written_to_until_it_does_again(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status(False)))
    clock.run(1)
    desk.publishers.gone(made["metadata"]["uid"])
    desk.publishers.notify(news(made, status(True)))
    clock.run(60)
    assert asked(desk.kube) == [(0.0, STATUS)]
    desk.publishers.observe(desk.held())
    clock.run(0)
    assert condition(desk.held())["status"] == "True"


def test_a_pod_that_was_never_listed_is_looked_after_when_a_list_lacks_it(clock):
    kube = FakeKube(clock)
    publishers = Publishers(kube, clock, rng=Lowest())
    made = kube.admin.create("/api/v1/namespaces/default/pods", pod())
    publishers.notify(news(made, status()))
    clock.run(1)
    publishers.recheck(listed={})
    clock.run(1)
    assert len(publishers) == 1 and len(asked(kube)) == 1  # it is there after all
    kube.admin.delete(path_of(), grace_seconds=0)
    publishers.recheck(listed={})
    clock.run(1)
    assert len(publishers) == 0 and len(asked(kube)) == 1


def test_a_complete_list_is_believed_when_versions_went_back(desk, clock):
    """As after the API's storage was restored from a backup."""
    made = desk.pod()
    desk.publishers.notify(news(made, status(False)))
    clock.run(1)
    desk.reflector.close()
    restored = copy.deepcopy(desk.held())
    restored["metadata"]["resourceVersion"] = "1"
    restored["status"] |= status(True)
    [objects] = [kept.objects for what, kept in desk.kube.store._collections.items() if what.plural == "pods"]
    objects["default", "web-0"] = restored
    desk.publishers.observe(restored)
    clock.run(60)
    assert len(asked(desk.kube)) == 1  # a watch can be behind, so one event proves nothing
    desk.publishers.recheck({made["metadata"]["uid"]: restored})
    clock.run(0)
    assert condition(desk.held())["status"] == "False"


# --- what is ours, what is not ------------------------------------------------------------------------------------


def test_conditions_labels_and_annotations_of_others_survive(desk, clock):
    made = desk.pod(labels={"app": "web"})
    gate = {"type": "example.com/gate", "status": "True"}
    foreign_status(desk, {"conditions": [gate]})
    desk.kube.admin.patch(path_of(), {"metadata": {"annotations": {"note": "mine"}}}, kind="merge")
    for ready in (True, False, True):
        desk.publishers.notify(news(made, status(ready), id="v1"))
        clock.run(1)
    held = desk.held()
    assert gate.items() <= condition(held, "example.com/gate").items()
    assert held["metadata"]["annotations"]["note"] == "mine" and held["metadata"]["labels"] == {"app": "web"}


def test_addresses_are_replaced_whole_and_vanish_when_there_are_none(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status(ip="10.88.0.5"), ip="10.88.0.5"))
    clock.run(0)
    desk.publishers.notify(news(made, status(ip="10.88.0.6"), ip="10.88.0.6"))
    clock.run(0)
    assert desk.held()["status"]["podIPs"] == [{"ip": "10.88.0.6"}]
    desk.publishers.notify(news(made, status(False, ip=""), ip=None))
    clock.run(0)
    held = desk.held()
    assert not held["status"].get("podIP") and not held["status"].get("podIPs")
    assert "vm.cocoonstack.io/ip" not in held["metadata"]["annotations"]


def test_a_hibernated_pod_loses_its_containers_and_keeps_its_start_time(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status()))
    clock.run(0)
    desk.publishers.notify(news(made, {"phase": "Pending", "conditions": status(False)["conditions"]}))
    clock.run(0)
    held = desk.held()["status"]
    assert held["phase"] == "Pending" and not held.get("containerStatuses") and held["startTime"] == T0


def test_a_condition_of_ours_that_is_no_longer_wanted_is_deleted_by_its_type():
    held = {"conditions": [{"type": "Ready", "status": "True"}, {"type": "example.com/gate", "status": "True"}]}
    assert status_patch({"phase": "Pending"}, held) == {
        "phase": "Pending",
        "conditions": [{"type": "Ready", "$patch": "delete"}],
    }
    assert not agrees({"phase": "Pending"}, {**held, "phase": "Pending"})


def test_what_the_server_fills_in_is_no_difference():
    wanted = status()
    filled = {**status(), "qosClass": "BestEffort", "reason": "", "hostIPs": []}
    filled["containerStatuses"] = [{**filled["containerStatuses"][0], "lastState": {}, "started": True}]
    assert agrees(wanted, filled)


@pytest.mark.parametrize("field", ["phase", "podIP", "podIPs", "containerStatuses"])
def test_each_field_of_ours_counts(field):
    other = status(False, phase="Pending", ip="10.88.0.77")
    assert not agrees(status(), {**status(), field: other[field]})


def test_what_the_api_makes_of_our_words_is_not_written_again_and_again(clock):
    class Normalizing(FakeKube):
        """An admission webhook that shortens every message."""

        def patch(self, path, body, *, kind):
            body = copy.deepcopy(body)
            for item in body.get("status", {}).get("conditions", ()):
                item["message"] = item["message"][:4]
            return super().patch(path, body, kind=kind)

    kube = Normalizing(clock)
    publishers = Publishers(kube, clock, rng=Lowest())
    made = kube.admin.create("/api/v1/namespaces/default/pods", pod())
    wanted = status()
    wanted["conditions"] = [{**item, "message": "a long message"} for item in wanted["conditions"]]
    publishers.notify(news(made, wanted, id="v1"))
    for _ in range(10):
        publishers.observe(kube.admin.get(path_of()))
        publishers.recheck()
        clock.run(30)
    assert len(asked(kube)) == 2


# --- repair -------------------------------------------------------------------------------------------------------


def test_a_foreign_change_of_what_is_ours_is_put_back_at_once(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status()))
    clock.run(100)
    foreign_status(desk, {"conditions": [{"type": "Ready", "status": "False"}]})
    clock.run(0)
    assert asked(desk.kube) == [(0.0, STATUS), (100.0, STATUS)]
    assert condition(desk.held())["status"] == "True"


def test_a_second_writer_of_ready_is_answered_at_most_once_in_five_seconds(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status()))
    clock.run(0)
    for second in range(1, 61):
        clock.run(second - clock.elapsed())
        foreign_status(desk, {"conditions": [{"type": "Ready", "status": "False"}]})
    clock.run(10)
    repairs = [at for at, _ in asked(desk.kube)][1:]
    assert repairs == [float(at) for at in range(1, 62, 5)]
    assert condition(desk.held())["status"] == "True"


def test_a_change_of_our_own_does_not_wait_for_the_repair(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status()))
    clock.run(10)
    for _ in range(2):  # the first is put back at once, the second would have to wait until 15
        foreign_status(desk, {"conditions": [{"type": "Ready", "status": "False"}]})
        clock.run(1)
    desk.publishers.notify(news(made, status(ip="10.88.0.6")))
    clock.run(0)
    assert [at for at, _ in asked(desk.kube)] == [0.0, 10.0, 12.0]


def test_an_owned_annotation_that_somebody_edits_is_put_back(desk, clock):
    made = desk.pod()
    desk.publishers.notify(news(made, status(), id="v1", lifecycle_state_message=None))
    clock.run(10)
    edited = {"vm.cocoonstack.io/id": "v2", "vm.cocoonstack.io/lifecycle-state-message": "hello"}
    desk.kube.admin.patch(path_of(), {"metadata": {"annotations": edited}}, kind="merge")
    clock.run(0)
    assert asked(desk.kube)[2:] == [(10.0, POD)]
    annotations = desk.held()["metadata"]["annotations"]
    assert annotations["vm.cocoonstack.io/id"] == "v1"
    assert "vm.cocoonstack.io/lifecycle-state-message" not in annotations


def test_a_reflector_that_is_behind_our_own_write_is_not_believed(desk, clock):
    made = desk.pod()
    desk.reflector.close()
    desk.publishers.notify(news(made, status()))
    clock.run(10)
    desk.publishers.observe(made)  # as it was before our write
    clock.run(60)
    assert asked(desk.kube) == [(0.0, STATUS)]


# --- terminal -----------------------------------------------------------------------------------------------------


def test_a_pod_that_is_terminal_in_the_api_is_not_revived(desk, clock):
    made = desk.pod()
    foreign_status(desk, {"phase": "Failed", "reason": "Evicted"})
    clock.run(0)
    desk.publishers.notify(news(made, status(), lifecycle_state="ready"))
    clock.run(600)
    assert asked(desk.kube) == [] and desk.publishers.owing() == []


def test_a_terminal_state_is_not_followed_by_a_living_one(desk, clock):
    made = desk.pod()
    desk.kube.down = True
    desk.publishers.notify(news(made, status(False, phase="Succeeded")))
    clock.run(1)
    desk.publishers.notify(news(made, status()))
    desk.kube.down = False
    clock.run(60)
    assert desk.held()["status"]["phase"] == "Succeeded" and desk.publishers.is_terminal(made["metadata"]["uid"])


# --- flush, gate, bookkeeping -------------------------------------------------------------------------------------


def flushed_at(desk, clock, uid, patience=10.0):
    done = []
    clock.spawn("flush", lambda: (desk.publishers.flush(uid, patience), done.append(clock.elapsed())))
    return done


def test_flush_makes_an_attempt_now_and_returns_with_its_end(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, BOOM, times=5)
    desk.publishers.notify(news(made, status()))
    clock.run(10)  # tried at 0, 0.5, 1.5, 3.5 and 7.5; the next would be at 15.5
    done = flushed_at(desk, clock, made["metadata"]["uid"])
    clock.run(0)
    assert done == [10.0] and asked(desk.kube)[-1] == (10.0, STATUS)
    assert condition(desk.held())["status"] == "True"


def test_flush_ends_with_a_failed_attempt_too(desk, clock):
    made = desk.pod()
    desk.kube.fail(STATUS, ApiError(422, "Invalid", "no"), times=None)
    desk.publishers.notify(news(made, status()))
    done = flushed_at(desk, clock, made["metadata"]["uid"])
    clock.run(0)
    assert done == [0.0]


def test_flush_waits_for_an_attempt_with_the_newest_state_not_for_an_older_one(desk, clock):
    made = desk.pod()
    desk.kube.latency = 2.0
    desk.publishers.notify(news(made, status()))
    clock.run(1)
    desk.publishers.notify(news(made, status(False, phase="Succeeded")))
    done = flushed_at(desk, clock, made["metadata"]["uid"])
    clock.run(30)
    assert done == [4.0]


def test_flush_does_not_wait_longer_than_its_patience(desk, clock):
    made = desk.pod()
    desk.kube.hang(STATUS)
    desk.publishers.notify(news(made, status()))
    done = flushed_at(desk, clock, made["metadata"]["uid"])
    clock.run(30)
    assert done == [10.0]


def test_flush_of_what_owes_nothing_returns_at_once(desk, clock):
    made = desk.pod()
    desk.publishers.flush(made["metadata"]["uid"], 10.0)
    desk.publishers.notify(news(made, status()))
    clock.run(1)
    desk.publishers.flush(made["metadata"]["uid"], 10.0)
    assert clock.elapsed() == 1.0


def test_drain_tries_everything_that_is_owed_once_and_ends_with_the_last(desk, clock):
    pods = [desk.pod(f"web-{i}") for i in range(40)]
    desk.kube.latency = 0.5
    desk.kube.fail("PATCH */web-7/status", BOOM, times=None)
    for made in pods:
        desk.publishers.notify(news(made, status()))
    desk.publishers.drain(5.0)
    assert clock.elapsed() == 1.5  # three rounds of sixteen
    assert desk.publishers.owing() == ["default/web-7"]


def test_drain_does_not_wait_longer_than_its_patience(desk, clock):
    pods = [desk.pod(f"web-{i}") for i in range(3)]
    desk.kube.hang("PATCH *")
    for made in pods:
        desk.publishers.notify(news(made, status()))
    desk.publishers.drain(5.0)
    assert clock.elapsed() == 5.0


def test_nothing_is_written_while_the_gate_is_closed(clock):
    kube, gate = FakeKube(clock), gevent.event.Event()
    publishers = Publishers(kube, clock, gate=gate, rng=Lowest())
    made = kube.admin.create("/api/v1/namespaces/default/pods", pod())
    publishers.notify(news(made, status(False)))
    publishers.notify(news(made, status(True)))
    clock.run(100)
    assert asked(kube, "GET", "PATCH") == []
    gate.set()
    clock.run(0)
    assert condition(kube.admin.get(path_of()))["status"] == "True"


def test_nothing_is_remembered_of_a_thousand_pods_that_are_gone(desk, clock):
    for i in range(1000):
        made = desk.pod(f"web-{i}")
        desk.publishers.notify(news(made, status()))
        clock.run(0)
        desk.kube.admin.delete(path_of(f"web-{i}"), grace_seconds=0)
        clock.run(0)
    assert len(desk.publishers) == 0
