"""Faults of the fake API server: they hit an observed request, exactly as often as asked, and count it.

In process and in virtual time.
"""

import random

import pytest

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_kube import ApiError

PODS = "/api/v1/namespaces/default/pods"
WEB = f"{PODS}/web-0"
BOOM = ApiError(500, "InternalError", "boom")


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def kube(clock):
    return FakeKube(clock)


@pytest.fixture
def web(kube):
    return kube.admin.create(PODS, pod())


def pod(name="web-0"):
    return {"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "x"}]}}


def outcome(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ApiError as error:
        return error.status
    return "ok"


class Call:
    """One call in a greenlet of its own: when it ended, and how."""

    def __init__(self, clock, call, *args, **kwargs):
        self.ended = None

        def run():
            result = outcome(call, *args, **kwargs)
            self.ended = (clock.elapsed(), result)

        clock.spawn("call", run)


def test_a_failure_strikes_matching_requests_as_often_as_asked(kube, web):
    failure = kube.fail("PATCH */web-0/status", BOOM, times=2)
    outcomes = [outcome(kube.patch, f"{WEB}/status", {"status": {}}, kind="merge") for _ in range(3)]
    assert (outcomes, failure.hits) == ([500, 500, "ok"], 2)


def test_a_failure_leaves_other_requests_alone(kube, web):
    failure = kube.fail("PATCH */web-0/status", BOOM)
    assert outcome(kube.get, WEB) == outcome(kube.patch, WEB, {}, kind="merge") == "ok"
    assert failure.hits == 0


def test_a_failure_without_end_ends_when_it_is_cancelled(kube, web):
    failure = kube.fail("GET *", BOOM, times=None)
    assert [outcome(kube.get, WEB) for _ in range(5)] == [500] * 5
    failure.cancel()
    assert outcome(kube.get, WEB) == "ok"


def test_a_failure_can_look_into_the_request(kube, web):
    kube.fail(lambda request: request.verb == "PATCH" and "status" in request.body, BOOM)
    assert outcome(kube.patch, WEB, {"metadata": {}}, kind="merge") == "ok"
    assert outcome(kube.patch, WEB, {"status": {}}, kind="merge") == 500


@pytest.mark.parametrize("status", [0, 401, 403, 409, 410, 422, 429, 500, 503])
def test_every_status_can_be_had_and_keeps_its_words(kube, web, status):
    kube.fail("GET *", ApiError(status, "SomeReason", "some message", retry_after=3.0))
    with pytest.raises(ApiError) as caught:
        kube.get(WEB)
    error = caught.value
    assert (error.status, error.reason, error.message, error.retry_after) == (
        status,
        "SomeReason",
        "some message",
        3.0,
    )


def test_a_failed_write_is_not_stored_unless_it_is_to_be(kube):
    kube.fail(f"POST {PODS}", ApiError(0, "Timeout"))
    assert (outcome(kube.create, PODS, pod()), outcome(kube.get, WEB)) == (0, 404)
    kube.fail(f"POST {PODS}", ApiError(0, "Timeout"), stored=True)
    assert (outcome(kube.create, PODS, pod()), outcome(kube.get, WEB)) == (0, "ok")
    assert outcome(kube.create, PODS, pod()) == 409


def test_latency_is_what_a_request_takes_and_the_write_is_in_the_middle(clock, kube):
    kube.latency = 0.5
    call = Call(clock, kube.create, PODS, pod())
    clock.run(0.249999)
    assert outcome(kube.admin.get, WEB) == 404
    clock.run(0.000001)
    assert outcome(kube.admin.get, WEB) == "ok"
    assert call.ended is None
    clock.run(1)
    assert call.ended == (0.5, "ok")


def test_latency_can_depend_on_the_request(clock, kube, web):
    kube.latency = lambda request: 2.0 if request.verb == "PATCH" else 0.0
    slow, fast = Call(clock, kube.patch, WEB, {}, kind="merge"), Call(clock, kube.get, WEB)
    clock.run(3)
    assert (slow.ended, fast.ended) == ((2.0, "ok"), (0.0, "ok"))


def test_without_latency_and_seed_a_request_takes_no_time_and_switches_to_nobody(clock, kube):
    order = []
    clock.spawn("other", order.append, "other")
    kube.create(PODS, pod())
    order.append("request")
    clock.run(0)
    assert order == ["request", "other"]


def test_with_a_seed_every_request_takes_a_little(clock):
    kube = FakeKube(clock, rng=random.Random(3))
    call = Call(clock, kube.create, PODS, pod())
    clock.run(1)
    assert 0 < call.ended[0] < 0.004


def test_a_server_that_is_down_answers_nobody_and_keeps_what_it_has(clock, kube, web):
    kube.down = True
    assert outcome(kube.get, WEB) == outcome(kube.list, PODS) == outcome(kube.create, PODS, pod("b")) == 0
    assert outcome(kube.admin.get, WEB) == "ok"
    kube.down = False
    assert outcome(kube.get, WEB) == "ok"
    assert outcome(kube.get, f"{PODS}/b") == 404


def test_a_server_that_goes_down_takes_open_watches_and_answers_under_way_with_it(clock, kube):
    kube.latency = 1.0

    def watch():
        for _ in kube.watch("/api/v1/pods", resource_version=""):
            pass

    watching, creating = Call(clock, watch), Call(clock, kube.create, PODS, pod())
    clock.at(0.75, setattr, kube, "down", True)
    clock.at(2.0, setattr, kube, "down", False)
    clock.run(5)
    # The write was stored at 0.5 s, and its client never heard of it.
    assert (watching.ended, creating.ended) == ((1.0, 0), (1.0, 0))
    assert outcome(kube.admin.get, WEB) == "ok"


def test_a_held_request_goes_on_where_it_stopped(clock, kube, web):
    hold = kube.hang("PATCH *")
    call = Call(clock, kube.patch, WEB, {"metadata": {"labels": {"a": "b"}}}, kind="merge")
    clock.run(5)
    assert (hold.reached.is_set(), hold.hits, call.ended) == (True, 1, None)
    assert "labels" not in kube.get(WEB)["metadata"]
    clock.at(6, hold.release)
    clock.run(5)
    assert call.ended == (6.0, "ok")
    assert kube.get(WEB)["metadata"]["labels"] == {"a": "b"}


def test_a_held_answer_is_a_write_its_client_does_not_know_of(clock, kube, web):
    hold = kube.hang("PATCH *", stored=True)
    call = Call(clock, kube.patch, WEB, {"metadata": {"labels": {"a": "b"}}}, kind="merge")
    clock.run(1)
    assert kube.get(WEB)["metadata"]["labels"] == {"a": "b"}
    assert (call.ended, hold.hits) == (None, 1)
    hold.release()
    clock.run(0)
    assert call.ended == (1.0, "ok")


def test_a_client_does_not_wait_for_ever(clock, kube, web):
    kube.hang("GET *")
    kube.client_timeout = 20.0
    call = Call(clock, kube.get, WEB)
    clock.run(60)
    assert call.ended == (20.0, 0)


def test_a_request_that_makes_no_sense_is_lost_like_any_other(kube):
    kube.down = True
    assert outcome(kube.get, "/nope") == outcome(kube.list, PODS, field_selector="nope=1") == 0
    assert [request.path for request in kube.requests] == ["/nope", PODS]


def test_the_log_holds_what_was_asked_and_when(clock, kube, web):
    clock.run(2.5)
    kube.patch(f"{WEB}/status", {"status": {"phase": "Running"}}, kind="strategic")
    kube.list("/api/v1/pods", field_selector="spec.nodeName=n1", limit=500)
    kube.delete(WEB, uid=web["metadata"]["uid"], grace_seconds=0)
    patch, list_, delete = kube.requests
    assert (patch.at, patch.verb, patch.path) == (2.5, "PATCH", f"{WEB}/status")
    assert (patch.body, patch.options) == ({"status": {"phase": "Running"}}, {"kind": "strategic"})
    assert str(list_) == "LIST /api/v1/pods"
    assert list_.options == {"fieldSelector": "spec.nodeName=n1", "limit": "500"}
    assert delete.options == {"uid": web["metadata"]["uid"], "gracePeriodSeconds": "0"}


def test_the_log_has_refused_requests_and_none_of_the_administrator(kube, web):
    outcome(kube.get, f"{PODS}/nope")
    kube.fail("GET *", BOOM)
    outcome(kube.get, WEB)
    kube.admin.get(WEB)
    assert [str(request) for request in kube.requests] == [f"GET {PODS}/nope", f"GET {WEB}"]


def test_the_administrator_is_beyond_all_faults(clock, kube, web):
    kube.down, kube.latency = True, 5.0
    kube.fail("*", BOOM, times=None)
    kube.hang("*")
    seen = []
    clock.spawn("admin", lambda: seen.extend(kube.admin.watch("/api/v1/pods", resource_version="", timeout=10)))
    clock.run(0)
    kube.cut_watches()
    kube.admin.delete(WEB, grace_seconds=0)
    clock.run(10)
    assert [event["type"] for event in seen] == ["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


def test_changes_and_refusals_are_recorded(clock):
    told = []
    kube = FakeKube(clock, record=lambda actor, kind, key, fields: told.append((actor, kind, key, fields)))
    told.clear()
    uid = kube.create(PODS, pod())["metadata"]["uid"]
    kube.delete(WEB, grace_seconds=0)
    outcome(kube.get, WEB)
    assert told == [
        ("kube", "added", "pods/default/web-0", {"resourceVersion": "5", "uid": uid}),
        ("kube", "modified", "pods/default/web-0", {"resourceVersion": "6", "uid": uid}),
        ("kube", "deleted", "pods/default/web-0", {"resourceVersion": "7", "uid": uid}),
        ("kube", "refused", f"GET {WEB}", {"status": 404, "reason": "NotFound"}),
    ]
