"""Decision K5: events say why a pod waits, are counted instead of repeated, bounded, and never hold anything up.

Virtual time, the fake API, exact instants.
"""

import gevent
import pytest
from kube_rig import Lowest, asked, pod

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_events import EventRecorder
from vkcocoon_kube import ApiError

EVENTS = "/api/v1/namespaces/default/events"
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
def recorder(kube, clock):
    recorder = EventRecorder(kube, clock, node_name="n1", rng=Lowest())
    recorder.start()
    clock.run(0)
    yield recorder
    recorder.close()


@pytest.fixture
def web(kube):
    return kube.admin.create("/api/v1/namespaces/default/pods", pod())


def held(kube):
    """(reason, message, count) of the events in the API."""
    items = kube.admin.list(EVENTS)["items"]
    return [(item["reason"], item["message"], item["count"]) for item in items]


@pytest.mark.parametrize("name", ["a" * 199 + "-" + "b" * 40, ("a" * 49 + ".") * 4 + "b" * 40])
def test_a_name_of_any_legal_length_and_spelling_has_events(kube, recorder, clock, name):
    made = kube.admin.create("/api/v1/namespaces/default/pods", pod(name))
    recorder.event(made, "Warning", "Unhealthy", "no echo")
    clock.run(0)
    assert held(kube) == [("Unhealthy", "no echo", 1)]


def test_an_event_says_about_whom_by_whom_and_when(kube, recorder, clock, web):
    clock.run(90)
    recorder.event(web, "Warning", "Unhealthy", "no echo from 10.88.0.5")
    clock.run(0)
    (event,) = kube.admin.list(EVENTS)["items"]
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "default",
        "name": "web-0",
        "uid": web["metadata"]["uid"],
    }
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "Unhealthy", "no echo from 10.88.0.5")
    assert event["source"] == {"component": "vk-cocoon", "host": "n1"} and event["count"] == 1
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-01-01T00:01:30Z"
    assert event["metadata"]["name"].startswith("web-0.")


def test_an_item_of_a_list_which_has_no_kind_is_known_by_its_namespace(kube, recorder, clock, web):
    del web["kind"], web["apiVersion"]
    recorder.event(web, "Normal", "Healthy", "x")
    recorder.event({"metadata": {"name": "n1", "uid": "u"}}, "Warning", "DuplicateNode", "x")
    clock.run(0)
    kinds = [item["involvedObject"]["kind"] for item in kube.admin.list(EVENTS)["items"]]
    assert sorted(kinds) == ["Node", "Pod"]


def test_an_event_is_only_remembered_by_the_caller(kube, recorder, clock, web):
    failures = []

    def from_the_hub():
        try:  # in the hub every switch is an error
            recorder.event(web, "Normal", "Healthy", "x")
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs into the assertion
            failures.append(error)

    gevent.get_hub().loop.run_callback(from_the_hub)
    clock.run(0)
    assert failures == [] and held(kube) == [("Healthy", "x", 1)]


def test_equal_events_are_counted_into_one_object_with_one_write_a_minute(kube, recorder, clock, web):
    for _ in range(180):
        recorder.event(web, "Warning", "Unhealthy", "no echo")
        clock.run(1)
    clock.run(60)
    assert held(kube) == [("Unhealthy", "no echo", 180)]
    assert [at for at, _ in asked(kube)] == [0.0, 60.0, 120.0, 180.0]


def test_of_different_messages_within_a_minute_the_newest_is_kept(kube, recorder, clock, web):
    for i in range(10):
        recorder.event(web, "Warning", "Unhealthy", f"reason {i}")
        clock.run(1)
    clock.run(60)
    assert sorted(held(kube)) == [("Unhealthy", "reason 0", 1), ("Unhealthy", "reason 9", 1)]


def test_each_reason_and_each_object_has_a_minute_of_its_own(kube, recorder, clock, web):
    other = kube.admin.create("/api/v1/namespaces/default/pods", pod("other"))
    for about in (web, other):
        for reason in ("Unhealthy", "GuestRestarted"):
            recorder.event(about, "Warning", reason, "x")
    clock.run(0)
    assert len(held(kube)) == 4


def test_a_namesake_is_another_object(kube, recorder, clock, web):
    recorder.event(web, "Warning", "Unhealthy", "x")
    recorder.event({**web, "metadata": {**web["metadata"], "uid": "second"}}, "Warning", "Unhealthy", "x")
    clock.run(0)
    assert [count for *_, count in held(kube)] == [1, 1]


def test_an_outage_is_sat_out_and_the_newest_is_written_after_it(kube, recorder, clock, web):
    kube.down = True
    recorder.event(web, "Warning", "Unhealthy", "x")
    clock.run(100)
    recorder.event(web, "Warning", "Unhealthy", "x")
    assert [at for at, _ in asked(kube)] == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0]
    kube.down = False
    clock.run(60)
    assert held(kube) == [("Unhealthy", "x", 2)]


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
def test_an_event_that_is_refused_is_dropped(kube, recorder, clock, web, status):
    kube.fail(f"POST {EVENTS}", ApiError(status, "Refused", "x"))
    recorder.event(web, "Warning", "Unhealthy", "x")
    recorder.event(web, "Normal", "Healthy", "y")
    clock.run(600)
    assert held(kube) == [("Healthy", "y", 1)] and len(asked(kube)) == 2


def test_an_event_that_has_expired_in_the_api_is_made_again(kube, recorder, clock, web):
    recorder.event(web, "Warning", "Unhealthy", "x")
    clock.run(120)
    (item,) = kube.admin.list(EVENTS)["items"]
    kube.admin.delete(f"{EVENTS}/{item['metadata']['name']}")
    recorder.event(web, "Warning", "Unhealthy", "x")
    clock.run(0)
    assert held(kube) == [("Unhealthy", "x", 2)]


def test_long_messages_and_names_fit_what_the_api_accepts(kube, recorder, clock):
    long = {"metadata": {"name": "x" * 253, "namespace": "default", "uid": "u"}}
    recorder.event(long, "Warning", "Unhealthy", "y" * 5000)
    clock.run(0)
    (item,) = kube.admin.list(EVENTS)["items"]
    assert len(item["metadata"]["name"]) <= 253 and len(item["message"]) == 1024


def test_one_slow_write_holds_up_no_caller(kube, recorder, clock, web):
    kube.hang(f"POST {EVENTS}")
    recorder.event(web, "Warning", "Unhealthy", "x")
    clock.run(1)
    recorder.event(web, "Warning", "GuestRestarted", "x")
    assert clock.elapsed() == 1.0


def test_what_is_remembered_is_bounded_and_quiet_things_are_forgotten(kube, recorder, clock):
    kube.down = True
    for i in range(20_000):
        recorder.event({"metadata": {"name": f"p{i}", "namespace": "default", "uid": f"u{i}"}}, "Normal", "R", "x")
    assert len(recorder._subjects) == 2000 and len(recorder._due) + len(recorder._later) <= 4001
    kube.down = False
    clock.run(700)
    recorder.event({"metadata": {"name": "last", "namespace": "default", "uid": "last"}}, "Normal", "R", "x")
    assert len(recorder._subjects) == 1
