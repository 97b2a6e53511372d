"""What K2 compares with: what the API holds is known, however a watch ends (cut, torn, expired, silent).

Virtual time, the fake API and, where the fake is too well behaved, a scripted door. Instants are exact.
"""

import pytest
from kube_rig import Lowest, asked, path_of, pod

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_kube import ApiError, Reflector

PODS = "/api/v1/pods"
CREATE = "/api/v1/namespaces/default/pods"
LIST, WATCH = f"LIST {PODS}", f"WATCH {PODS}"


class Diary:
    """A handler that writes down what it is told."""

    def __init__(self, clock):
        self.clock = clock
        self.told = []

    def changed(self, obj):
        self.told.append((self.clock.elapsed(), "changed", obj["metadata"]["name"]))

    def gone(self, obj):
        self.told.append((self.clock.elapsed(), "gone", obj["metadata"]["name"]))

    def listed(self):
        self.told.append((self.clock.elapsed(), "listed"))

    def words(self):
        return [entry[1:] for entry in self.told]


class Scripted:
    """A door whose watches and lists are written down in advance; the last one repeats."""

    def __init__(self, clock, *, lists, watches):
        self.clock = clock
        self.lists = lists
        self.watches = watches
        self.requests = []

    def list(self, path, **query):
        self.requests.append((self.clock.elapsed(), "LIST"))
        page = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(page, ApiError):
            raise page
        return page

    def watch(self, path, *, resource_version, **query):
        self.requests.append((self.clock.elapsed(), f"WATCH {resource_version}"))
        script = self.watches.pop(0) if len(self.watches) > 1 else self.watches[0]
        for step in script:
            if isinstance(step, ApiError):
                raise step
            if isinstance(step, float):
                self.clock.sleep(step)
            else:
                yield step


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def kube(clock):
    return FakeKube(clock)


@pytest.fixture
def diary(clock):
    return Diary(clock)


@pytest.fixture
def reflect(clock, diary):
    """Start a reflector over a door; it is closed at the end."""
    started = []

    def start(api):
        reflector = Reflector(api, clock, PODS, diary, field_selector="spec.nodeName=n1", rng=Lowest())
        started.append(reflector)
        reflector.start()
        clock.run(0)
        return reflector

    yield start
    for reflector in started:
        reflector.close()


def names(reflector):
    return sorted(obj["metadata"]["name"] for obj in reflector.objects.values())


def listing(*objects, version="10", continue_=""):
    return {"items": list(objects), "metadata": {"resourceVersion": version, "continue": continue_}}


def seen(name="a", uid="u1", version="11"):
    return {"metadata": {"namespace": "default", "name": name, "uid": uid, "resourceVersion": version}}


def event(type_, obj):
    return {"type": type_, "object": obj}


# --- the ordinary course ------------------------------------------------------------------------------------------


def test_what_is_there_is_listed_and_what_happens_is_watched(kube, clock, diary, reflect):
    kube.admin.create(CREATE, pod("a"))
    reflector = reflect(kube)
    assert reflector.synced.is_set() and names(reflector) == ["a"]
    clock.run(5)
    kube.admin.create(CREATE, pod("b"))
    clock.run(1)
    kube.admin.delete(path_of("a"), grace_seconds=0)
    clock.run(0)
    assert names(reflector) == ["b"]
    assert diary.told == [
        (0.0, "changed", "a"),
        (0.0, "listed"),
        (5.0, "changed", "b"),
        (6.0, "changed", "a"),  # marked as deleted, then gone
        (6.0, "gone", "a"),
    ]


def test_long_lists_come_in_pages_and_are_believed_only_when_complete(kube, clock, diary, reflect):
    for i in range(1200):
        kube.admin.create(CREATE, pod(f"web-{i}"))
    kube.fail(lambda request: request.verb == "LIST" and "continue" in request.options, ApiError(500, "x", "y"))
    reflector = reflect(kube)
    assert reflector.objects == {} and diary.told == []
    clock.run(0.8)
    assert len(reflector.objects) == 1200
    assert [at for at, _ in asked(kube, "LIST")] == [0.0, 0.0, 0.8, 0.8, 0.8]


def test_a_continue_token_that_expired_starts_the_list_again(clock, diary, reflect):
    expired = ApiError(410, "Expired", "the provided continue parameter is too old")
    door = Scripted(
        clock,
        lists=[listing(seen("a"), continue_="more"), expired, listing(seen("a"), seen("b", "u2"))],
        watches=[[300.0]],
    )
    reflector = reflect(door)
    clock.run(1)
    assert names(reflector) == ["a", "b"]


def test_a_watch_that_ends_cleanly_goes_on_from_its_last_version_without_a_list(kube, clock, reflect):
    reflector = reflect(kube)
    clock.run(1000)  # the server ends watches after the 240 s it is asked for
    assert [at for at, _ in asked(kube, "LIST")] == [0.0]
    assert [at for at, _ in asked(kube, "WATCH")] == [0.0, 240.0, 480.0, 720.0, 960.0]
    kube.admin.create(CREATE, pod("a"))
    clock.run(0)
    assert names(reflector) == ["a"]


def test_bookmarks_carry_the_version_forward(clock, diary, reflect):
    bookmark = event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "50"}})
    door = Scripted(clock, lists=[listing()], watches=[[60.0, bookmark, 60.0], [300.0]])
    reflector = reflect(door)
    clock.run(200)
    assert door.requests == [(0.0, "LIST"), (0.0, "WATCH 10"), (120.0, "WATCH 50")]
    assert reflector.objects == {} and diary.words() == [("listed",)]


def test_a_server_that_hangs_up_at_once_does_not_make_us_spin(clock, reflect):
    door = Scripted(clock, lists=[listing()], watches=[[]])
    reflect(door)
    clock.run(100)
    instants = [at for at, what in door.requests if what.startswith("WATCH")]
    assert instants[:7] == [0.0, 0.8, 2.4, 5.6, 12.0, 24.8, 50.4]


def test_the_list_is_repeated_every_half_hour_whatever_the_watch_says(kube, clock, reflect):
    reflect(kube)
    clock.run(4000)
    assert [at for at, _ in asked(kube, "LIST")] == [0.0, 1920.0, 3840.0]


# --- how watches die ----------------------------------------------------------------------------------------------


def test_a_cut_in_the_middle_of_a_line_loses_nothing(kube, clock, reflect):
    reflector = reflect(kube)
    clock.run(5)
    kube.cut_watches(mid_line=True)
    kube.admin.create(CREATE, pod("a"))
    clock.run(0.8)
    assert names(reflector) == ["a"]
    assert len(asked(kube, "LIST")) == 1


def test_a_silent_watch_is_given_up_after_ninety_seconds(kube, clock, reflect):
    reflector = reflect(kube)
    hold = kube.hang(WATCH)
    clock.run(5)
    kube.admin.create(CREATE, pod("a"))
    clock.run(80)
    assert names(reflector) == []
    clock.run(6)  # the connection that was silent is still dead; the next one is not
    hold.release()
    clock.run(90)
    assert names(reflector) == ["a"]


def test_silence_is_noticed_also_when_the_door_does_not_notice_it(clock, diary, reflect):
    door = Scripted(clock, lists=[listing()], watches=[[10_000.0], [event("ADDED", seen()), 10_000.0]])
    reflector = reflect(door)
    clock.run(89.9)
    assert [what for _, what in door.requests] == ["LIST", "WATCH 10"]
    clock.run(1)
    assert door.requests[-1] == (90.8, "WATCH 10") and names(reflector) == ["a"]


@pytest.mark.parametrize("how", ["event", "http"])
def test_a_version_that_is_too_old_leads_to_a_new_list_and_missed_deletions_are_found(kube, clock, diary, reflect, how):
    kube.gone = how
    kube.admin.create(CREATE, pod("stays"))
    kube.admin.create(CREATE, pod("goes"))
    reflector = reflect(kube)
    clock.run(5)
    kube.down = True
    kube.admin.delete(path_of("goes"), grace_seconds=0)
    kube.admin.create(CREATE, pod("comes"))
    kube.expire_history()
    kube.down = False
    clock.run(5)
    assert names(reflector) == ["comes", "stays"]
    assert diary.words()[-3:] == [("gone", "goes"), ("changed", "comes"), ("listed",)]


def test_the_version_that_is_too_old_is_not_asked_for_again(clock, reflect):
    too_old = event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "metadata": {}})
    door = Scripted(clock, lists=[listing(version="10"), listing(version="77")], watches=[[5.0, too_old], [300.0]])
    reflect(door)
    clock.run(10)
    assert door.requests == [(0.0, "LIST"), (0.0, "WATCH 10"), (5.0, "LIST"), (5.0, "WATCH 77")]


def test_lists_that_are_too_old_at_once_are_not_repeated_without_pause(clock, reflect):
    door = Scripted(clock, lists=[listing()], watches=[[ApiError(410, "Expired", "too old")]])
    reflect(door)
    clock.run(8)
    assert [round(at, 6) for at, what in door.requests if what == "LIST"] == [round(i * 0.8, 6) for i in range(11)]


def test_an_error_event_is_no_pod_and_is_tried_again_from_the_same_version(clock, diary, reflect):
    failed = event("ERROR", {"kind": "Status", "code": 500, "metadata": {}})
    door = Scripted(clock, lists=[listing()], watches=[[5.0, failed], [event("ADDED", seen()), 300.0]])
    reflector = reflect(door)
    clock.run(10)
    assert door.requests == [(0.0, "LIST"), (0.0, "WATCH 10"), (5.8, "WATCH 10")]
    assert names(reflector) == ["a"]


def test_events_without_uid_or_of_unknown_type_are_passed_over(clock, diary, reflect):
    odd = [event("ADDED", {"metadata": {"name": "x"}}), event("HELLO", seen("y")), {"type": "ADDED"}, {}]
    door = Scripted(clock, lists=[listing()], watches=[[*odd, event("ADDED", seen("a")), 300.0]])
    reflector = reflect(door)
    assert names(reflector) == ["a"] and door.requests == [(0.0, "LIST"), (0.0, "WATCH 10")]


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503, 0])
def test_a_refused_watch_keeps_its_version(clock, reflect, status):
    door = Scripted(clock, lists=[listing()], watches=[[5.0, ApiError(status, "x", "y")], [300.0]])
    reflect(door)
    clock.run(10)
    assert door.requests == [(0.0, "LIST"), (0.0, "WATCH 10"), (5.8, "WATCH 10")]


def test_a_version_from_the_future_leads_to_a_new_list(clock, reflect):
    """An API that was restored from a backup."""
    door = Scripted(clock, lists=[listing()], watches=[[5.0, ApiError(504, "Timeout", "Too large")], [300.0]])
    reflect(door)
    clock.run(10)
    assert [what for _, what in door.requests] == ["LIST", "WATCH 10", "LIST", "WATCH 10"]


def test_an_api_that_is_away_is_asked_at_growing_intervals(kube, clock, reflect):
    kube.down = True
    reflector = reflect(kube)
    clock.run(150)
    assert [at for at, _ in asked(kube, "LIST")] == [0.0, 0.8, 2.4, 5.6, 12.0, 24.8, 50.4, 80.4, 110.4, 140.4]
    assert not reflector.synced.is_set()
    kube.down = False
    clock.run(30)
    assert reflector.synced.is_set()


def test_the_server_is_given_the_time_it_asks_for(kube, clock, reflect):
    kube.fail(LIST, ApiError(429, "TooManyRequests", "slow down", retry_after=20.0))
    reflect(kube)
    clock.run(60)
    assert [at for at, _ in asked(kube, "LIST")] == [0.0, 20.0]


# --- names and UIDs -----------------------------------------------------------------------------------------------


def test_a_namesake_in_a_gap_is_a_removal_and_then_an_arrival(kube, clock, diary, reflect):
    kube.admin.create(CREATE, pod("a"))
    reflector = reflect(kube)
    clock.run(5)
    kube.down = True
    kube.admin.delete(path_of("a"), grace_seconds=0)
    second = kube.admin.create(CREATE, pod("a"))
    kube.expire_history()
    kube.down = False
    clock.run(5)
    assert diary.words() == [("changed", "a"), ("listed",), ("gone", "a"), ("changed", "a"), ("listed",)]
    assert list(reflector.objects) == [second["metadata"]["uid"]]


def test_a_namesake_without_the_removal_of_the_old_one_removes_the_old_one(clock, diary, reflect):
    door = Scripted(
        clock, lists=[listing(seen("a", "u1"))], watches=[[event("MODIFIED", seen("a", "u2", "12")), 300.0]]
    )
    reflector = reflect(door)
    assert diary.words() == [("changed", "a"), ("listed",), ("gone", "a"), ("changed", "a")]
    assert list(reflector.objects) == ["u2"]


def test_a_late_removal_of_the_old_namesake_does_not_remove_the_new_one(clock, diary, reflect):
    script = [event("ADDED", seen("a", "u2", "12")), event("DELETED", seen("a", "u1", "13")), 300.0]
    door = Scripted(clock, lists=[listing(seen("a", "u1"))], watches=[script])
    reflector = reflect(door)
    assert list(reflector.objects) == ["u2"]


def test_the_new_namesake_is_known_by_its_name_after_the_late_removal_of_the_old_one(clock, diary, reflect):
    script = [
        event("ADDED", seen("a", "u2", "12")),
        event("DELETED", seen("a", "u1", "13")),
        event("ADDED", seen("a", "u3", "14")),
        300.0,
    ]
    reflector = reflect(Scripted(clock, lists=[listing(seen("a", "u1"))], watches=[script]))
    assert list(reflector.objects) == ["u3"]


def test_a_list_that_brings_nothing_new_tells_nothing_new(clock, diary, reflect):
    door = Scripted(clock, lists=[listing(seen("a"))], watches=[[5.0, ApiError(410, "Expired", "x")], [300.0]])
    reflect(door)
    clock.run(10)
    assert diary.words() == [("changed", "a"), ("listed",), ("listed",)]


def test_a_handler_that_raises_does_not_end_the_watching(clock, diary, reflect):
    door = Scripted(clock, lists=[listing()], watches=[[event("ADDED", seen("a")), 300.0]])
    broken, diary.changed = diary.changed, lambda obj: 1 / 0
    reflector = reflect(door)
    diary.changed = broken
    clock.run(1)
    assert names(reflector) == ["a"] and [what for _, what in door.requests].count("LIST") == 2


def test_after_close_nothing_is_asked(kube, clock, reflect):
    reflector = reflect(kube)
    clock.run(5)
    reflector.close()
    clock.run(0)
    before = len(kube.requests)
    kube.down = True
    clock.run(1000)
    assert len(kube.requests) == before
