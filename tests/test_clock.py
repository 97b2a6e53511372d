"""Time is a thing one holds: what both clocks promise, and what the virtual one adds.

Decision T4: pace and bounds are monotonic, wall time is separate. Nothing virtual here asserts on real time.
"""

import logging
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import gevent
import pytest
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group

from simulator.clock import VirtualClock
from vkcocoon_probes import Deadline, ProbeTimeout, SystemClock, microseconds, spawn


@pytest.fixture(params=[SystemClock, VirtualClock], ids=["system", "virtual"])
def clock(request):
    return request.param()


@pytest.fixture
def virtual():
    return VirtualClock()


@pytest.fixture
def group():
    group = Group()
    yield group
    group.kill()


# Both clocks. Their timers are a few milliseconds here, and only the order of things is asserted.


def test_a_wait_that_nobody_ends_is_false_and_takes_its_time(clock):
    deadline = Deadline(clock, 0.005)
    assert clock.wait(Event(), 0.01) is False
    assert deadline.expired


def test_a_wait_for_an_event_that_is_set_does_not_wait(clock):
    event = Event()
    event.set()
    before = clock.monotonic()
    assert clock.wait(event, None) is True
    assert clock.wait(event, 3600) is True
    assert clock.monotonic() - before < 3600


def test_a_wait_is_ended_by_another_greenlet_that_sets_the_event(clock, group):
    event = Event()

    def sets():
        clock.sleep(0.001)
        event.set()

    spawn(group, "sets", sets)
    assert clock.wait(event, 3600) is True
    assert clock.wait(event, 0) is True


def test_a_wait_for_ever_is_ended_by_the_event(clock, group):
    event = Event()

    def sets():
        clock.sleep(0.001)
        event.set()

    spawn(group, "sets", sets)
    assert clock.wait(event, None) is True


def test_an_event_set_and_cleared_while_somebody_waits_counts_as_set(clock, group):
    event = Event()

    def pulses():
        event.set()
        event.clear()

    spawn(group, "pulses", pulses)
    assert clock.wait(event, 3600) is True
    # Again from a greenlet: the main one waits in a way of its own in virtual time.
    waits = spawn(group, "waits", clock.wait, event, 3600)
    spawn(group, "pulses", pulses)
    clock.sleep(0.001)
    assert waits.value is True


def test_an_event_set_at_the_instant_of_the_timeout_is_never_denied(clock):
    event = Event()
    # A timer of the loop itself comes due together with the wait and sets the event before anybody hears of it.
    timer = gevent.get_hub().loop.timer(0.005)
    timer.start(event.set)
    seen = clock.wait(event, 0.005)
    assert seen == event.is_set()
    timer.stop()
    timer.close()


def test_waiting_leaves_nothing_behind_on_the_event(clock, group):
    event = Event()
    clock.wait(event, 0.001)
    spawn(group, "waits", clock.wait, event, 0.001)
    killed = spawn(group, "is killed", clock.wait, event, 3600)
    clock.sleep(0.005)
    killed.kill()
    assert event.linkcount() == 0


@pytest.mark.parametrize("nothing", [0, -1, -0.001])
def test_no_time_at_all_gives_everybody_else_one_turn(clock, group, nothing):
    turns = []
    spawn(group, "other", turns.append, "wait")
    assert clock.wait(Event(), nothing) is False
    spawn(group, "other", turns.append, "sleep")
    clock.sleep(nothing)
    assert turns == ["wait", "sleep"]


def test_an_event_set_by_the_time_the_wait_returns_counts(clock, group):
    event = Event()
    spawn(group, "sets", event.set)
    assert clock.wait(event, 0) is True


def test_whoever_gives_way_again_and_again_does_not_hold_up_those_whose_instant_has_come(group):
    clock, woken = SystemClock(), []
    spawn(group, "sleeper", lambda: woken.append(clock.sleep(0.001)))
    clock.sleep(0)
    deadline = Deadline(clock, 0.01)
    while not deadline.expired:
        pass  # work
    for _ in range(2):
        clock.sleep(0)
    assert woken


def test_a_bound_turns_into_probe_timeout_at_its_exit(clock):
    with pytest.raises(ProbeTimeout, match=r"^took longer than 0\.005 s$"), clock.timeout(0.005):
        clock.sleep(3600)


def test_a_bound_does_not_disturb_a_block_that_is_done_in_time(clock):
    with clock.timeout(0.005):
        pass
    clock.sleep(0.05)


def test_a_bound_interrupts_a_block_that_swallows_exceptions(clock):
    swallowed = []
    with pytest.raises(ProbeTimeout), clock.timeout(0.005):
        try:
            clock.sleep(3600)
        except (Exception, gevent.Timeout) as error:  # noqa: BLE001, TID251  as a library would
            swallowed.append(error)
    assert swallowed == []


def test_a_block_that_swallows_the_interrupt_is_late_all_the_same(clock):
    reached = []
    with pytest.raises(ProbeTimeout), clock.timeout(0.005):
        try:
            clock.sleep(3600)
        except BaseException:  # noqa: BLE001  the worst a library can do
            reached.append("went on")
    assert reached == ["went on"]


def test_a_bound_interrupts_a_wait_that_is_not_on_the_clock(clock, group):
    lock = BoundedSemaphore(1)
    lock.acquire()
    ended = Event()

    def waits():
        with pytest.raises(ProbeTimeout), clock.timeout(0.005):
            lock.acquire()
        ended.set()

    spawn(group, "waits", waits)
    assert clock.wait(ended, 3600) is True


@pytest.mark.parametrize("nothing", [0, -1])
def test_a_bound_without_time_fails_before_the_block_begins(clock, nothing):
    began = []
    with pytest.raises(ProbeTimeout, match="no time left"), clock.timeout(nothing):
        began.append("block")
    assert began == []


def test_a_bound_of_none_is_refused(clock):
    with pytest.raises(TypeError), clock.timeout(None):
        pass


def test_what_the_block_raises_in_time_passes_through(clock):
    with pytest.raises(ValueError), clock.timeout(3600):
        raise ValueError


def test_an_error_of_the_clean_up_does_not_hide_that_time_was_over(clock):
    with pytest.raises(ProbeTimeout) as raised, clock.timeout(0.005):
        try:
            clock.sleep(3600)
        finally:
            raise OSError("close failed")
    assert isinstance(raised.value.__cause__, OSError)


def test_a_kill_passes_through_a_bound(clock, group):
    ended = []

    def bounded():
        try:
            with clock.timeout(3600):
                clock.sleep(3600)
        except BaseException as error:
            ended.append(type(error))
            raise

    greenlet = spawn(group, "bounded", bounded)
    clock.sleep(0.001)
    greenlet.kill()
    assert ended == [gevent.GreenletExit]


def test_of_two_nested_bounds_the_nearer_one_ends_its_own_block(clock):
    reached = []
    with clock.timeout(3600):
        with pytest.raises(ProbeTimeout, match=r"0\.005"), clock.timeout(0.005):
            clock.sleep(3600)
        reached.append("outer block goes on")
    with pytest.raises(ProbeTimeout, match=r"0\.005"), clock.timeout(0.005):
        with clock.timeout(3600):
            clock.sleep(3600)
        reached.append("not reached")
    assert reached == ["outer block goes on"]


def test_a_dial_that_uses_its_whole_deadline_beats_the_bound(clock):
    """Although its timer is set a moment after that of the bound."""

    def reason():
        try:
            with clock.timeout(0.005):
                clock.wait(Event(), Deadline(clock, 0.005).remaining())
                return "its own"
        except ProbeTimeout:
            return "the bound's"

    # Several goes, for a machine that stops us for longer than the slack between two lines.
    assert "its own" in [reason() for _ in range(5)]


def test_wall_time_is_aware_and_utc(clock):
    assert clock.now().utcoffset() == timedelta(0)


def test_time_never_goes_backwards(clock):
    readings = []
    for _ in range(5):
        readings.append(clock.monotonic())
        clock.sleep(0.001)
    assert readings == sorted(set(readings))


def test_microseconds_are_whole_and_nearest():
    seconds = (0.1 * 1.5, 0.3375, 3.078125, 1e-7)
    assert [microseconds(s) for s in seconds] == [150_000, 337_500, 3_078_125, 0]


# Spawning


def test_a_spawned_greenlet_has_its_name_and_belongs_to_its_group(group, virtual):
    greenlet = spawn(group, "probe default/web-0", virtual.sleep, 1)
    assert greenlet.name == "probe default/web-0"
    assert list(group) == [greenlet]
    virtual.run(1)
    assert not group


def test_a_death_by_exception_is_logged_with_the_name_and_a_kill_is_not(group, virtual, caplog):
    spawn(group, "dies", int, "no number")
    killed = spawn(group, "killed", virtual.sleep, 1)
    virtual.run(0)
    killed.kill(block=False)
    virtual.run(2)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, "greenlet died greenlet='dies'")
    ]
    assert caplog.records[0].exc_info[0] is ValueError


# The virtual clock: instants


def test_time_stands_still_until_somebody_runs_it(virtual):
    woken = []
    virtual.spawn("sleeper", lambda: (virtual.sleep(0.5), woken.append(virtual.elapsed())))
    gevent.idle()
    assert (virtual.now_us, woken) == (0, [])
    virtual.run(0.499999)
    assert (virtual.now_us, woken) == (499_999, [])
    virtual.run(0.000001)
    assert woken == [0.5]


def test_run_ends_exactly_at_its_end_even_when_nothing_happens(virtual):
    virtual.run(0.1)
    virtual.run(0.2)
    assert (virtual.now_us, virtual.monotonic(), virtual.elapsed()) == (300_000, 0.3, 0.3)


def test_a_timer_at_the_last_instant_of_a_run_still_fires(virtual):
    fired = []
    virtual.at(2, fired.append, "last")
    virtual.run(2)
    assert fired == ["last"]


def test_a_run_of_zero_lets_happen_what_happens_now(virtual):
    done = []
    virtual.spawn("now", done.append, 1)
    virtual.at(0, done.append, 2)
    virtual.run(0)
    assert done == [1, 2]


def test_everything_an_instant_brings_about_happens_before_the_clock_moves(virtual):
    """A chain of a thousand greenlets, each woken by the one before, all at one instant."""
    events = [Event() for _ in range(1001)]
    instants = []

    def link(n):
        virtual.wait(events[n], None)
        instants.append(virtual.now_us)
        events[n + 1].set()

    for n in range(1000):
        virtual.spawn(f"link {n}", link, n)
    virtual.at(1, events[0].set)
    virtual.at(1.000001, instants.append, "next instant")
    virtual.run(2)
    assert instants == [*[1_000_000] * 1000, "next instant"]


def test_ten_thousand_greenlets_made_runnable_at_once_all_run_before_the_clock_moves(virtual):
    """More than one pass of gevent's callback queue takes."""
    start = Event()
    ran = []

    def runner():
        virtual.wait(start, None)
        for _ in range(3):
            virtual.sleep(0)
        ran.append(virtual.now_us)

    for n in range(10_000):
        virtual.spawn(f"runner {n}", runner)
    virtual.at(1, start.set)
    virtual.at(1.000001, ran.append, "next instant")
    virtual.run(2)
    assert ran == [*[1_000_000] * 10_000, "next instant"]


def test_a_positive_wait_takes_at_least_a_microsecond(virtual):
    virtual.spawn("sleeper", virtual.sleep, 1e-9)
    virtual.run_until(lambda: False, 0.000001)
    assert virtual.now_us == 1
    virtual.sleep(1e-9)
    assert virtual.now_us == 2


def test_somebody_who_waits_for_zero_seconds_in_a_loop_is_found_out(virtual):
    def spins():
        while True:
            virtual.sleep(0)

    virtual.run(1.5)
    greenlet = virtual.spawn("spins", spins)
    with pytest.raises(RuntimeError, match=r"time stands still at 1\.5 s"):
        virtual.run(1)
    greenlet.kill()


# The virtual clock: order


def test_timers_fire_in_due_order_whatever_the_order_they_were_set_in(virtual):
    order = []
    for instant in (3, 1, 2, 1.5):
        virtual.at(instant, order.append, instant)
    virtual.run(3)
    assert order == [1, 1.5, 2, 3]


def test_timers_of_one_instant_fire_in_the_order_they_were_set(virtual):
    order = []

    def sleeper(name, seconds):
        virtual.sleep(seconds)
        order.append(name)

    virtual.at(2, order.append, "a")
    virtual.spawn("b", sleeper, "b", 2)
    virtual.run(0)
    virtual.at(2, order.append, "c")
    virtual.run(1)
    virtual.at(2, order.append, "d")
    virtual.run(1)
    assert order == ["a", "b", "c", "d"]


def order_of_fifty(seed):
    clock = VirtualClock(seed)
    order = []
    for n in range(50):
        clock.at(1, order.append, n)
    clock.at(0.5, order.append, "early")
    clock.run(1)
    return order


def test_a_seed_draws_the_order_of_one_instant_and_draws_the_same_again():
    first = order_of_fifty(7)
    assert first[0] == "early"
    assert sorted(first[1:]) == list(range(50)) != first[1:]
    assert order_of_fifty(7) == first
    assert order_of_fifty(8) != first
    assert order_of_fifty(None) == ["early", *range(50)]


def test_a_timer_set_for_now_waits_for_those_already_due(virtual):
    order = []

    def first():
        order.append("first")
        virtual.sleep(0)
        order.append("first again")

    virtual.at(1, first)
    virtual.at(1, order.append, "second")
    virtual.run(1)
    assert order == ["first", "second", "first again"]


def test_a_timer_canceled_by_another_of_the_same_instant_does_not_fire(virtual):
    ended = []
    event = Event()

    def waits():
        ended.append(virtual.wait(event, 1))

    virtual.at(1, event.set)
    virtual.spawn("waits", waits)
    virtual.run(5)
    assert ended == [True]


@pytest.mark.parametrize("seed", range(20))
def test_an_event_set_at_the_very_instant_of_the_timeout_is_seen_or_not_but_never_missed(seed):
    clock = VirtualClock(seed)
    event = Event()
    seen = []
    clock.spawn("waits", lambda: seen.append((clock.wait(event, 1), event.is_set())))
    clock.at(1, event.set)
    clock.run(5)
    assert seen in ([(True, True)], [(False, False)])


def test_a_bound_fires_after_every_wait_of_its_instant(virtual):
    seen = []
    event = Event()

    def bounded():
        with virtual.timeout(1):
            seen.append(virtual.wait(event, None))

    def sets():
        virtual.sleep(0)
        virtual.sleep(0)
        event.set()

    virtual.spawn("bounded", bounded)
    virtual.run(0)
    virtual.at(1, sets)
    virtual.run(2)
    assert seen == [True]


def test_the_outer_one_of_two_bounds_for_one_instant_goes_first(virtual):
    ended = []

    def bounded():
        try:
            with virtual.timeout(1):
                try:
                    with virtual.timeout(1):
                        virtual.sleep(5)
                except ProbeTimeout:
                    ended.append("inner")
        except ProbeTimeout:
            ended.append("outer")

    virtual.spawn("bounded", bounded)
    virtual.run(5)
    assert ended == ["outer"]


def test_one_long_run_and_many_short_ones_are_the_same():
    def trace(step, steps):
        clock = VirtualClock(3)
        seen = []

        def ticker(n):
            while True:
                clock.sleep(0.07 * (n + 1))
                seen.append((clock.now_us, n))

        for n in range(5):
            clock.spawn(f"ticker {n}", ticker, n)
        for _ in range(steps):
            clock.run(step)
        clock.close()
        return seen

    assert trace(60, 1) == trace(0.01, 6000)


PROGRAM = """
from gevent import monkey; monkey.patch_all()
import hashlib
from simulator.clock import VirtualClock
from vkcocoon_probes import ProbeManager, ProbeResult
clock = VirtualClock(11)
manager = ProbeManager(clock)
log = []
for n in range(50):
    key = f"pod-{n}"
    def probe(deadline, n=n):
        log.append((clock.now_us, n))
        clock.sleep(0.001 * (n % 7))
        return ProbeResult(clock.now_us % 97 != n)
    clock.at(0, manager.start, key, probe, lambda key=key: log.append((clock.now_us, key)))
clock.run(120)
print(len(log), hashlib.sha256(repr(log).encode()).hexdigest())
"""


@pytest.mark.process
def test_a_seed_gives_the_same_trace_in_every_process():
    def run(hash_seed):
        return subprocess.check_output(
            [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONHASHSEED": hash_seed}, text=True
        )

    assert run("1") == run("2")


# The virtual clock: killing and failing


def test_a_kill_ends_a_wait_at_once_and_its_timer_never_fires(virtual):
    ended = []

    def waits():
        try:
            virtual.wait(Event(), 10)
        finally:
            ended.append(virtual.elapsed())

    greenlet = virtual.spawn("waits", waits)
    virtual.at(3, greenlet.kill)
    virtual.run(20)
    assert ended == [3]


def test_what_a_greenlet_dies_of_is_raised_by_run_at_that_instant(virtual):
    def dies():
        raise ValueError("broken")

    virtual.at(3, dies)
    with pytest.raises(ValueError, match="broken"):
        virtual.run(20)
    assert virtual.elapsed() == 3
    virtual.run(1)
    assert virtual.elapsed() == 4


def test_all_deaths_of_one_instant_are_named(virtual):
    virtual.at(1, int, "a")
    virtual.at(1, float, "b")
    with pytest.raises(ValueError, match="'a'") as raised:
        virtual.run(1)
    assert len(raised.value.__notes__) == 1
    assert "'b'" in raised.value.__notes__[0]


def test_a_killed_greenlet_is_no_failure(virtual):
    virtual.spawn("killed", virtual.sleep, 5).kill(block=False)
    virtual.run(10)


def test_close_kills_what_waits_and_drops_all_timers(virtual):
    ended = []

    def waits():
        try:
            virtual.sleep(10)
        finally:
            ended.append(virtual.elapsed())

    virtual.spawn("waits", waits)
    virtual.at(5, ended.append, "later")
    virtual.run(1)
    virtual.close()
    virtual.run(20)
    assert ended == [1]


def test_an_instant_that_is_over_is_refused(virtual):
    virtual.run(5)
    with pytest.raises(ValueError, match="4 s is over"):
        virtual.at(4, print)


# The virtual clock: driving


def test_run_until_stops_at_the_first_instant_that_satisfies(virtual):
    seen = []
    for second in range(1, 10):
        virtual.at(second, seen.append, second)
    assert virtual.run_until(lambda: len(seen) == 4, 60) is True
    assert virtual.elapsed() == 4
    assert virtual.run_until(lambda: len(seen) == 4, 60) is True
    assert virtual.elapsed() == 4


def test_run_until_gives_up_at_its_limit(virtual):
    assert virtual.run_until(lambda: False, 2.5) is False
    assert virtual.elapsed() == 2.5


def test_run_until_raises_what_its_predicate_raises(virtual):
    with pytest.raises(ZeroDivisionError):
        virtual.run_until(lambda: 1 / 0, 5)
    virtual.run(1)
    assert virtual.elapsed() == 1


def test_the_main_greenlet_makes_time_pass_by_waiting(virtual):
    event = Event()
    virtual.at(2, event.set)
    assert virtual.wait(event, 10) is True
    assert virtual.elapsed() == 2
    assert virtual.wait(Event(), 1) is False
    virtual.sleep(0.5)
    assert virtual.elapsed() == 3.5


def test_a_wait_of_the_main_greenlet_leaves_failures_to_the_next_run(virtual):
    virtual.at(1, int, "no number")
    virtual.sleep(5)
    assert virtual.elapsed() == 5
    with pytest.raises(ValueError):
        virtual.run(0)


def test_a_bound_of_the_main_greenlet_works_too(virtual):
    with pytest.raises(ProbeTimeout), virtual.timeout(2):
        virtual.sleep(5)
    assert virtual.elapsed() == 2
    virtual.run(10)
    assert virtual.elapsed() == 12


def test_waiting_for_what_can_never_come_is_an_error_and_no_hang(virtual):
    with pytest.raises(RuntimeError, match="waiting for ever"):
        virtual.wait(Event(), None)


def test_the_timer_of_a_wait_that_ended_early_is_no_event_to_come(virtual):
    event = Event()

    def ends_early():
        virtual.wait(event, 1000)
        with virtual.timeout(1000):
            virtual.sleep(1)

    virtual.spawn("ends early", ends_early)
    virtual.at(1, event.set)
    with pytest.raises(RuntimeError, match="waiting for ever"):
        virtual.wait(Event(), None)
    assert virtual.elapsed() == 2


def test_a_greenlet_within_the_world_cannot_drive_it(virtual):
    virtual.spawn("drives", virtual.run, 1)
    with pytest.raises(RuntimeError, match="already being driven"):
        virtual.run(5)


@pytest.mark.process
def test_libuv_is_refused():
    result = subprocess.run(
        [sys.executable, "-c", "from simulator.clock import VirtualClock; VirtualClock()"],
        env=os.environ | {"GEVENT_LOOP": "libuv"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("unset GEVENT_LOOP")


# Wall time


def test_wall_time_runs_with_the_clock_from_its_start():
    clock = VirtualClock(start=datetime(2030, 5, 1, 12, tzinfo=UTC))
    clock.run(90.5)
    assert clock.now() == datetime(2030, 5, 1, 12, 1, 30, 500_000, tzinfo=UTC)
    assert VirtualClock().now() == datetime(2026, 1, 1, tzinfo=UTC)


def test_a_step_moves_wall_time_and_no_timer(virtual):
    woken = []
    virtual.spawn("sleeper", lambda: (virtual.sleep(10), woken.append(virtual.monotonic())))
    virtual.run(5)
    virtual.step_wall(-3600)
    assert virtual.now() == datetime(2025, 12, 31, 23, 0, 5, tzinfo=UTC)
    assert virtual.monotonic() == 5
    virtual.run(10)
    assert woken == [10]


def test_a_start_without_a_time_zone_is_refused():
    with pytest.raises(ValueError, match="time zone"):
        VirtualClock(start=datetime(2026, 1, 1))  # noqa: DTZ001  that is the point
