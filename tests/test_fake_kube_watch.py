"""What a watch of the fake API server shows, when, and how it ends. Virtual time, exact instants."""

import random

import pytest

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_kube import ApiError

PODS = "/api/v1/namespaces/default/pods"
ALL_PODS = "/api/v1/pods"
WEB = f"{PODS}/web-0"


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def kube(clock):
    return FakeKube(clock)


def pod(name="web-0", node="n1", **metadata):
    spec = {"containers": [{"name": "agent", "image": "x"}]}
    return {"metadata": {"name": name, **metadata}, "spec": {**spec, **({"nodeName": node} if node else {})}}


class Reader:
    """Reads one watch to its end and notes (instant, type, name or what else there is)."""

    def __init__(self, clock, kube, path=ALL_PODS, *, resource_version="", **options):
        self.seen = []
        self.raw = []
        self.end = None
        self.clock = clock
        clock.spawn("reader", self._read, kube, path, {"resource_version": resource_version, **options})
        clock.run(0)

    def _read(self, kube, path, options):
        try:
            for event in kube.watch(path, **options):
                self.raw.append(event)
                self.seen.append((self.clock.elapsed(), event["type"], self._what(event["object"])))
            self.end = (self.clock.elapsed(), "closed")
        except ApiError as error:
            self.end = (self.clock.elapsed(), error.status, error.reason)

    @staticmethod
    def _what(obj):
        return obj["metadata"].get("name", "") or str(obj.get("code", "") or obj["metadata"]["resourceVersion"])

    @property
    def events(self):
        return [(type_, what) for _, type_, what in self.seen]


def now(kube):
    return kube.list(PODS)["metadata"]["resourceVersion"]


# What is shown -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "0"])
def test_without_a_version_everything_there_is_comes_first(clock, kube, version):
    kube.create(PODS, pod("a"))
    kube.create(PODS, pod("b"))
    reader = Reader(clock, kube, resource_version=version)
    kube.create(PODS, pod("c"))
    clock.run(0)
    assert reader.events == [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "c")]


def test_with_a_version_only_what_came_after_it_comes_in_order(clock, kube):
    kube.create(PODS, pod("a"))
    version = now(kube)
    kube.create(PODS, pod("b"))
    kube.patch(f"{PODS}/a", {"metadata": {"labels": {"x": "y"}}}, kind="merge")
    kube.delete(f"{PODS}/b", grace_seconds=0)
    reader = Reader(clock, kube, resource_version=version)
    assert reader.events == [("ADDED", "b"), ("MODIFIED", "a"), ("MODIFIED", "b"), ("DELETED", "b")]


def test_a_change_is_seen_at_the_instant_it_is_made(clock, kube):
    reader = Reader(clock, kube)
    clock.at(12.5, kube.create, PODS, pod())
    clock.run(20)
    assert reader.seen == [(12.5, "ADDED", "web-0")]


def test_each_event_carries_the_object_as_it_was_then(clock, kube):
    kube.create(PODS, pod())
    version = now(kube)
    for value in "abc":
        kube.patch(WEB, {"metadata": {"labels": {"x": value}}}, kind="merge")
    reader = Reader(clock, kube, resource_version=version)
    assert [event["object"]["metadata"]["labels"]["x"] for event in reader.raw] == ["a", "b", "c"]


def test_a_deleted_event_has_the_last_state_and_the_version_of_the_deletion(clock, kube):
    kube.create(PODS, pod())
    reader = Reader(clock, kube, resource_version=now(kube))
    kube.patch(WEB, {"metadata": {"labels": {"x": "last"}}}, kind="merge")
    kube.delete(WEB, grace_seconds=0)
    clock.run(0)
    metadata = reader.raw[-1]["object"]["metadata"]
    assert (metadata["labels"], metadata["resourceVersion"]) == ({"x": "last"}, now(kube))


def test_a_write_that_changes_nothing_is_not_seen(clock, kube):
    kube.create(PODS, pod())
    reader = Reader(clock, kube, resource_version=now(kube))
    kube.patch(WEB, {"metadata": {"labels": {}}}, kind="merge")
    clock.run(1)
    assert reader.events == []


def test_graceful_deletion_is_a_modification_first(clock, kube):
    kube.create(PODS, pod())
    reader = Reader(clock, kube, resource_version=now(kube))
    kube.delete(WEB)
    kube.delete(WEB, grace_seconds=0)
    clock.run(0)
    assert reader.events == [("MODIFIED", "web-0"), ("MODIFIED", "web-0"), ("DELETED", "web-0")]


def test_a_binding_is_an_addition_for_the_watcher_of_the_node(clock, kube):
    kube.create(PODS, pod(node=""))
    reader = Reader(clock, kube, field_selector="spec.nodeName=n1")
    kube.create(f"{WEB}/binding", {"target": {"name": "n1"}})
    kube.create(PODS, pod("other", node="n2"))
    clock.run(0)
    assert reader.events == [("ADDED", "web-0")]


def test_an_object_that_stops_to_match_is_deleted_with_its_old_content(clock, kube):
    kube.create(PODS, pod())
    reader = Reader(clock, kube, field_selector="status.phase=Pending")
    kube.patch(f"{WEB}/status", {"status": {"phase": "Running"}}, kind="strategic")
    clock.run(0)
    assert reader.events == [("ADDED", "web-0"), ("DELETED", "web-0")]
    gone = reader.raw[-1]["object"]
    assert (gone["status"]["phase"], gone["metadata"]["resourceVersion"]) == ("Pending", now(kube))


def test_a_watch_of_one_namespace_sees_only_it(clock, kube):
    reader = Reader(clock, kube, path=PODS)
    kube.create("/api/v1/namespaces/kube-system/pods", pod("other"))
    kube.create(PODS, pod())
    clock.run(0)
    assert reader.events == [("ADDED", "web-0")]


def test_a_watch_of_one_object_sees_only_it(clock, kube):
    reader = Reader(clock, kube, path=WEB)
    kube.create(PODS, pod("other"))
    kube.create(PODS, pod())
    clock.run(0)
    assert reader.events == [("ADDED", "web-0")]


def test_a_reader_that_is_slow_misses_nothing(clock, kube):
    seen = []

    def read():
        for event in kube.watch(ALL_PODS, resource_version=""):
            seen.append(event["object"]["metadata"]["name"])
            clock.sleep(5)

    clock.spawn("slow reader", read)
    clock.run(0)
    for name in "abcd":
        kube.create(PODS, pod(name))
    clock.run(20)
    assert seen == ["a", "b", "c", "d"]


def test_what_a_reader_changes_is_its_own(clock, kube):
    kube.create(PODS, pod())
    for event in kube.watch(ALL_PODS, resource_version="", timeout=1):
        event["object"].clear()
    assert kube.get(WEB)["spec"]


# How it ends ---------------------------------------------------------------------------------------------------------


def test_bookmarks_come_every_minute_and_before_the_end(clock, kube):
    kube.create(PODS, pod())
    reader = Reader(clock, kube, resource_version=now(kube), timeout=150)
    clock.at(100, kube.create, "/api/v1/nodes", {"metadata": {"name": "n1"}})
    clock.run(200)
    assert reader.seen == [(60.0, "BOOKMARK", "5"), (120.0, "BOOKMARK", "6"), (150.0, "BOOKMARK", "6")]
    assert reader.end == (150.0, "closed")
    assert reader.raw[0]["object"] == {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}}


def test_a_watch_from_a_bookmark_goes_on_where_it_was(clock, kube):
    first = Reader(clock, kube, timeout=30)
    kube.create(PODS, pod("a"))
    clock.run(30)
    kube.create(PODS, pod("b"))
    second = Reader(clock, kube, resource_version=first.seen[-1][2])
    assert (first.events[0], second.events) == (("ADDED", "a"), [("ADDED", "b")])


def test_a_version_too_old_is_an_error_event_and_the_end(clock, kube):
    kube.create(PODS, pod())
    version = now(kube)
    kube.expire_history()
    reader = Reader(clock, kube, resource_version=version)
    (event,) = reader.raw
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert event["object"]["message"] == "too old resource version: 5 (6)"
    assert reader.end == (0.0, "closed")


def test_or_an_http_error(clock, kube):
    kube.create(PODS, pod())
    version = now(kube)
    kube.expire_history()
    kube.gone = "http"
    assert Reader(clock, kube, resource_version=version).end == (0.0, 410, "Expired")


def test_a_watch_that_has_seen_everything_survives_the_loss_of_history(clock, kube):
    reader = Reader(clock, kube)
    kube.expire_history()
    kube.create(PODS, pod())
    clock.run(0)
    assert reader.events == [("ADDED", "web-0")]


def test_a_watch_that_has_not_is_told(clock, kube):
    kube.watch_delay = 5.0
    reader = Reader(clock, kube)
    kube.create(PODS, pod())
    clock.run(1)  # It holds what it was about to deliver; the next is lost to it.
    kube.create(PODS, pod("lost"))
    kube.expire_history()
    clock.run(10)
    assert reader.events == [("ADDED", "web-0"), ("ERROR", "410")]


def test_history_is_bounded_and_the_bound_is_honest(clock, kube):
    kube.store.history_limit = 10
    kube.create(PODS, pod())
    version = now(kube)
    for index in range(40):
        kube.patch(WEB, {"metadata": {"labels": {"n": str(index)}}}, kind="merge")
    assert Reader(clock, kube, resource_version=version).events == [("ERROR", "410")]
    late = Reader(clock, kube, resource_version=str(int(now(kube)) - 10))
    assert len(late.events) == 10


def test_a_version_of_the_future_waits_for_it(clock, kube):
    reader = Reader(clock, kube, resource_version="7")
    kube.create(PODS, pod("a"))  # 5
    kube.create(PODS, pod("b"))  # 6
    kube.create(PODS, pod("c"))  # 7
    kube.create(PODS, pod("d"))  # 8
    clock.run(0)
    assert reader.events == [("ADDED", "d")]


@pytest.mark.parametrize("version", ["None", "-1", "1.5"])
def test_a_version_that_is_none_is_refused_at_once(kube, version):
    with pytest.raises(ApiError) as caught:
        kube.watch(ALL_PODS, resource_version=version)
    assert caught.value.status == 400


def test_a_cut_is_clean_or_in_the_middle_of_a_line(clock, kube):
    clean = Reader(clock, kube)
    clock.at(3, kube.cut_watches)
    clock.run(3)
    torn = Reader(clock, kube)
    clock.at(5, lambda: kube.cut_watches(mid_line=True))
    clock.run(2)
    assert (clean.end, torn.end) == ((3.0, "closed"), (5.0, 0, "ConnectionReset"))


def test_a_silent_connection_ends_when_its_client_has_had_enough(clock, kube):
    reader = Reader(clock, kube)
    clock.at(7, kube.create, PODS, pod("a"))
    clock.at(10, kube.hang, "WATCH *")
    clock.at(20, kube.create, PODS, pod("b"))
    clock.run(300)
    # Its patience counts from the last thing it heard, at 7 s.
    assert (reader.seen, reader.end) == ([(7.0, "ADDED", "a")], (107.0, 0, "Timeout"))


def test_a_silent_connection_that_wakes_up_has_lost_nothing(clock, kube):
    reader = Reader(clock, kube)
    hold = kube.hang("WATCH *")
    clock.at(20, kube.create, PODS, pod("b"))
    clock.at(30, hold.release)
    clock.run(40)
    assert reader.seen == [(30.0, "ADDED", "b")]
    assert hold.hits == 1


def test_a_cut_does_not_reach_a_silent_connection_before_it_wakes_up(clock, kube):
    reader = Reader(clock, kube)
    hold = kube.hang("WATCH *")
    clock.run(1)
    kube.cut_watches()
    clock.run(10)
    assert reader.end is None
    hold.release()
    clock.run(0)
    assert reader.end == (11.0, "closed")


def test_a_silent_connection_sends_no_bookmark_and_does_not_end(clock, kube):
    kube.client_watch_timeout = 1000.0
    reader = Reader(clock, kube, timeout=100)
    clock.at(30, kube.hang, "WATCH *")
    clock.run(500)
    assert (reader.seen, reader.end) == ([], None)


def test_a_watch_ends_at_its_time_though_something_always_happens(clock, kube):
    ends = []

    def read():
        for event in kube.watch(ALL_PODS, resource_version="", timeout=10):
            ends.append((clock.elapsed(), event["type"]))
            kube.admin.patch(WEB, {"metadata": {"labels": {"n": str(len(ends))}}}, kind="merge")
            clock.sleep(1)

    kube.create(PODS, pod())
    clock.spawn("reader", read)
    clock.run(100)
    assert ends[-1] == (10.0, "BOOKMARK")


def test_delays_and_injected_events_reach_open_watches(clock, kube):
    reader = Reader(clock, kube)
    kube.watch_delay = 0.25
    kube.create(PODS, pod("a"))
    clock.run(1)
    kube.inject({"type": "ERROR", "object": {"kind": "Status", "code": 500, "metadata": {}}})
    clock.run(1)
    assert reader.seen == [(0.25, "ADDED", "a"), (1.0, "ERROR", "500")]
    assert reader.end is None


def test_a_seed_moves_watchers_against_each_other_the_same_way_each_time(clock):
    def instants(seed):
        world = VirtualClock()
        kube = FakeKube(world, rng=random.Random(seed))
        readers = [Reader(world, kube, resource_version="0") for _ in range(5)]
        kube.admin.create(PODS, pod())
        world.run(1)
        world.close()
        return [reader.seen[0][0] for reader in readers]

    assert instants(1) == instants(1) != instants(2)
    assert len(set(instants(1))) == 5


def test_nothing_is_left_of_a_watch_that_was_closed(clock, kube):
    stream = kube.watch(ALL_PODS, resource_version="")
    kube.create(PODS, pod())
    next(stream)
    stream.close()
    kube.create(PODS, pod("b"))
    with pytest.raises(StopIteration):
        next(stream)
    assert kube.open_watches == 0
