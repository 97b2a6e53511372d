"""The loop re-runs the probe: while not ready after 100 ms, growing by half up to a second; once ready every 5 s.

Decisions T1 (patience), T2 (fixed delay, no jitter), T3 (pace follows the debounced state), T4 (monotonic clock only).
"""

import pytest
from gevent.event import Event
from probe_rig import DOWN, UP, Rig, script

from vkcocoon_probes import Cadence, ProbeManager, SystemClock

FOREVER = float("inf")
RAMP = [0, 0.1, 0.25, 0.475, 0.8125, 1.31875, 2.078125, 3.078125]

# A guest that is silent until 3.0 s and again from 20 s to 40 s.
ORACLE_PROBES = [
    *RAMP,
    *[8.078125, 13.078125, 18.078125, 23.078125, 28.078125, 33.078125],
    *[33.178125, 33.328125, 33.553125, 33.890625, 34.396875, 35.15625],
    *[36.15625, 37.15625, 38.15625, 39.15625, 40.15625],
    *[45.15625, 50.15625, 55.15625, 60.15625],
]
ORACLE_TOLD = [(3.078125, True), (33.078125, False), (40.15625, True)]


def test_the_instants_of_a_guest_that_comes_goes_and_comes_back():
    rig = Rig()
    rig.start(rig.guest((3.0, 20.0), (40.0, FOREVER)))
    rig.clock.run(61)
    assert rig.instants() == ORACLE_PROBES
    assert rig.told == ORACLE_TOLD


@pytest.mark.parametrize("step_s", [-86_400.0, 3_600.0, -0.05])
def test_a_step_of_the_wall_clock_changes_nothing(step_s):
    rig = Rig()
    rig.start(rig.guest((3.0, 20.0), (40.0, FOREVER)))
    for instant in (0.05, 2.5, 10.0, 33.1, 41.0):
        rig.clock.at(instant, rig.clock.step_wall, step_s)
    rig.clock.run(61)
    assert rig.instants() == ORACLE_PROBES
    assert rig.told == ORACLE_TOLD


def test_many_short_runs_probe_at_the_instants_of_one_long_run():
    rig = Rig()
    rig.start(rig.guest((3.0, 20.0), (40.0, FOREVER)))
    for _ in range(6_100):
        rig.clock.run(0.01)
    assert rig.instants() == ORACLE_PROBES
    assert rig.told == ORACLE_TOLD


def test_the_pause_stays_a_second_however_long_the_guest_is_silent():
    rig = Rig()
    rig.start(rig.guest())
    rig.clock.run(600)
    assert rig.instants() == [*RAMP, *[4.078125 + n for n in range(596)]]
    assert rig.told == []


def test_a_guest_that_comes_up_after_ten_minutes_is_met_within_a_second():
    rig = Rig()
    rig.start(rig.guest((600.0, FOREVER)))
    rig.clock.run(602)
    assert rig.told == [(600.078125, True)]


@pytest.mark.parametrize(("up_at", "met_at"), [(0.05, 0.1), (0.1, 0.1), (0.11, 0.25), (0.30, 0.475)])
def test_a_guest_that_boots_fast_is_met_by_the_next_step_of_the_ramp(up_at, met_at):
    rig = Rig()
    rig.start(rig.guest((up_at, FOREVER)))
    rig.clock.run(1)
    assert rig.told == [(met_at, True)]


def test_a_ready_guest_is_probed_every_five_seconds_without_drift():
    rig = Rig()
    rig.start(rig.guest((0, FOREVER)))
    rig.clock.run(86_400)
    assert rig.instants() == [5.0 * n for n in range(17_281)]


def test_the_pause_stays_five_seconds_while_failures_are_counted():
    rig = Rig()
    rig.start(script("SFFSS"))
    rig.clock.run(21)
    assert rig.instants() == [0, 5, 10, 15, 20]


def test_the_ramp_begins_anew_after_each_flip_to_not_ready():
    rig = Rig()
    # Back 50 ms after the flip: met 100 ms after it, not 5 s.
    rig.start(rig.guest((0, 3), (15.05, 16), (40, FOREVER)))
    rig.clock.run(31)
    assert rig.told == [(15.0, False), (15.1, True), (30.1, False)]
    rig.clock.run(1)
    # Not 5 s, and not where the first ramp stopped either.
    assert rig.instants()[-4:] == [30.35, 30.575, 30.9125, 31.41875]


def test_the_pause_begins_when_the_probe_returned():
    rig = Rig()

    def takes_700_ms(deadline):
        rig.clock.sleep(0.7)
        return DOWN

    rig.start(takes_700_ms)
    rig.clock.run(4)
    assert rig.instants() == [0, 0.8, 1.65, 2.575, 3.6125]


def test_a_slow_callback_does_not_stretch_the_pause():
    rig = Rig()

    def slow():
        rig.told.append((rig.clock.elapsed(), rig.manager.get("pod").ready))
        rig.clock.sleep(3)

    rig.start(script("FSSS"), on_update=slow)
    rig.clock.run(11)
    assert rig.instants() == [0, 0.1, 5.1, 10.1]


def test_after_a_callback_longer_than_the_pause_the_next_probe_comes_at_once_and_no_flip_is_lost():
    rig = Rig()

    def hangs():
        rig.told.append((rig.clock.elapsed(), rig.manager.get("pod").ready))
        rig.clock.sleep(18)

    rig.start(rig.guest((0.1, 1)), on_update=hangs)
    rig.clock.run(60)
    assert rig.instants()[:6] == [0, 0.1, 18.1, 23.1, 28.1, 46.1]
    assert rig.told == [(0.1, True), (28.1, False)]


def test_a_guest_that_never_answers_does_not_disturb_its_neighbors():
    rig = Rig()
    rig.start(lambda deadline: rig.clock.sleep(60), key="hangs")
    for n in range(50):
        rig.start(rig.guest((3.0 + 2 * n, FOREVER)), key=str(n))
    rig.clock.run(3)  # the synchronous probe of the first one took 3 s
    alone = Rig()
    alone.start(alone.guest((0, FOREVER)))
    rig.clock.run(120)
    alone.clock.run(120)
    assert [instant - 3 for instant in rig.instants("0")] == alone.instants()
    assert all(rig.manager.get(str(n)).ready for n in range(50))


def test_an_echo_waits_as_long_as_the_pause_but_no_less_than_250_ms_until_the_pod_is_ready():
    rig = Rig()
    patiences = []

    def probe(deadline):
        patiences.append(
            (rig.clock.elapsed(), round(deadline.of_one_echo().remaining(), 6), round(deadline.remaining(), 6))
        )
        return UP if 3 <= rig.clock.elapsed() < 4 else DOWN

    rig.start(probe)
    rig.clock.run(19)
    assert patiences == [
        (0, 0.25, 3),
        (0.1, 0.25, 3),
        (0.25, 0.25, 3),
        (0.475, 0.25, 3),
        (0.8125, 0.3375, 3),
        (1.31875, 0.50625, 3),
        (2.078125, 0.759375, 3),
        (3.078125, 1, 3),
        # Ready, and still ready while failures are counted: the whole bound.
        (8.078125, 3, 3),
        (13.078125, 3, 3),
        (18.078125, 3, 3),
        (18.178125, 0.25, 3),
        (18.328125, 0.25, 3),
        (18.553125, 0.25, 3),
        (18.890625, 0.3375, 3),
    ]


def test_an_echo_of_a_ready_pod_may_use_the_whole_bound_however_fast_the_pace_is():
    rig = Rig(steady_pause=1)
    patiences = []
    rig.start(lambda deadline: patiences.append(deadline.of_one_echo().remaining()) or UP)
    rig.clock.run(2)
    assert patiences == [0.25, 3, 3]


def test_the_same_loop_runs_on_the_clocks_of_the_system():
    """Real time, so only the order is asserted: silent twice, then answering twice, then silent for good."""
    clock, flipped_down, told, outcomes = SystemClock(), Event(), [], iter("FFSS")
    manager = ProbeManager(clock, first_pause=0.001, max_pause=0.002, steady_pause=0.003)

    def on_update():
        told.append(manager.get("pod").ready)
        if not told[-1]:
            flipped_down.set()

    manager.start("pod", lambda deadline: UP if next(outcomes, "F") == "S" else DOWN, on_update)
    assert clock.wait(flipped_down, 30)
    manager.close()
    assert told == [True, False]
    assert "pod" not in manager


def test_the_ramp_is_kept_in_whole_microseconds():
    cadence = Cadence.growing(0.1, 1.5, 1.0, 5.0, 3)
    assert cadence.ramp_us == (100_000, 150_000, 225_000, 337_500, 506_250, 759_375, 1_000_000)
    assert cadence.steady_us == 5_000_000


def test_another_pace_can_be_asked_for():
    rig = Rig(first_pause=1, growth=2, max_pause=4, steady_pause=10, failure_threshold=1)
    rig.start(rig.guest((20, 35)))
    rig.clock.run(50)
    assert rig.instants() == [0, 1, 3, 7, 11, 15, 19, 23, 33, 43, 44, 46, 50]
    assert rig.told == [(23, True), (43, False)]


def test_a_constant_pause_and_a_tiny_first_one_are_paces_too():
    assert Cadence.growing(0.5, 1, 0.5, 5, 3).ramp_us == (500_000,)
    assert Cadence.growing(0.000001, 1.4, 0.000004, 5, 3).ramp_us == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"first_pause": 0},
        {"first_pause": -0.1},
        {"first_pause": 2},
        {"growth": 1},
        {"growth": 0.5},
        {"steady_pause": 0},
        {"failure_threshold": 0},
        {"timeout": 0},
        {"timeout": -3},
    ],
    ids=str,
)
def test_a_pace_that_cannot_work_is_refused(nonsense):
    with pytest.raises(ValueError):
        ProbeManager(Rig().clock, **nonsense)
