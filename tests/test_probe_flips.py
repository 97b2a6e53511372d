"""Readiness flips up with one success and down with the third failure in a row, and each flip is called back once.

Decisions P1 (what readers see is debounced), P7 (while not ready a changed reason is told at once).
"""

import logging

import gevent
import pytest
from probe_rig import DOWN, UP, Rig, script

from vkcocoon_probes import Cadence, ProbeAgent, ProbeResult

CADENCE = Cadence.growing(0.1, 1.5, 1.0, 5.0, 3)
WAITING = ProbeResult(False, "WaitingForLease", "waiting for DHCP lease")

# Outcomes of the probes (S, F); below each: is it news (!), is the pod shown ready (R), the pause that follows in ms.
# The first result always is news, but start leaves the telling to its caller.
TRANSITIONS = {
    "never ready": """
        F F F F F F F F
        ! - - - - - - -
        - - - - - - - -
        100 150 225 337.5 506.25 759.375 1000 1000""",
    "ready at once": """
        S S
        ! -
        R R
        5000 5000""",
    "up with one success": """
        F F S S
        ! - ! -
        - - R R
        100 150 5000 5000""",
    "one failure is not shown": """
        S F S
        ! - -
        R R R
        5000 5000 5000""",
    "two failures are not shown": """
        S F F S
        ! - - -
        R R R R
        5000 5000 5000 5000""",
    "down with the third, and only once": """
        S F F F F F
        ! - - ! - -
        R R R - - -
        5000 5000 5000 100 150 225""",
    "a success starts the count anew": """
        S F F S F F S F F F
        ! - - - - - - - - !
        R R R R R R R R R -
        5000 5000 5000 5000 5000 5000 5000 5000 5000 100""",
    "down, up and down again": """
        S F F F S F F F
        ! - - ! ! - - !
        R R R - R R R -
        5000 5000 5000 100 5000 5000 5000 100""",
    "the ramp begins anew with each flip down": """
        F F F S F F F F F
        ! - - ! - - ! - -
        - - - R R R - - -
        100 150 225 5000 5000 5000 100 150 225""",
}


@pytest.mark.parametrize("table", TRANSITIONS.values(), ids=TRANSITIONS)
def test_every_transition_of_an_agent(table):
    outcomes, told, shown, pauses_ms = (line.split() for line in table.strip().splitlines())
    agent = ProbeAgent("pod", script("S"), lambda: None, CADENCE)
    seen = []
    for outcome in outcomes:
        changed = agent.observe(UP if outcome == "S" else DOWN)
        seen.append((changed, agent.ready, agent.pause_us / 1000))
    expected = zip(told, shown, pauses_ms, strict=True)
    assert seen == [(news == "!", ready == "R", float(pause)) for news, ready, pause in expected]


def test_before_the_first_result_an_agent_is_not_ready_and_has_the_first_pause():
    agent = ProbeAgent("pod", script("S"), lambda: None, CADENCE)
    assert (agent.ready, agent.result, agent.pause_us) == (False, ProbeResult(), 100_000)


def test_failures_are_counted_in_a_row_not_in_total():
    rig = Rig()
    rig.start(script("SFFSFFSFFS"))
    rig.clock.run(45)
    assert rig.told == []


def test_three_failures_are_one_flip_at_the_third_and_one_success_is_one_flip_back():
    rig = Rig()
    rig.start(script("SFFFS"))
    rig.clock.run(60)
    assert rig.told == [(15, False), (15.1, True)]


def test_readers_see_nothing_of_the_first_two_failures():
    rig = Rig()
    rig.start(script("SFFF"))
    first = rig.manager.get("pod")
    rig.clock.run(14.999999)
    assert rig.instants() == [0, 5, 10]
    assert rig.manager.get("pod") == first
    rig.clock.run(0.000001)
    assert rig.manager.get("pod").reason == "Down"


def test_a_success_after_failures_refreshes_what_readers_see():
    rig = Rig()
    rig.start(script("SFS"))
    rig.clock.run(10)
    assert (rig.manager.get("pod").at - rig.clock.now()).total_seconds() == 0


def test_a_callback_reads_the_state_it_is_called_for():
    rig = Rig()
    read = []
    rig.start(script("FSFFF"), on_update=lambda: read.append(rig.manager.get("pod").reason))
    rig.clock.run(16)
    assert read == ["Up", "Down"]


def test_a_flip_carries_the_reason_of_the_third_failure():
    rig = Rig()
    results = [UP, WAITING, WAITING, DOWN]
    rig.start(lambda deadline: results.pop(0))
    rig.clock.run(15)
    assert rig.manager.get("pod").reason == "Down"
    assert rig.told == [(15, False)]


def test_another_reason_while_not_ready_is_told_at_once_and_the_same_one_is_not():
    rig = Rig()
    results = [WAITING, WAITING, DOWN, DOWN, WAITING, DOWN]
    told = []
    rig.start(
        lambda deadline: results.pop(0) if len(results) > 1 else results[0],
        on_update=lambda: told.append((rig.clock.elapsed(), rig.manager.get("pod").reason)),
    )
    rig.clock.run(10)
    assert told == [(0.25, "Down"), (0.8125, "WaitingForLease"), (1.31875, "Down")]


def test_another_message_with_the_same_reason_is_told_too():
    rig = Rig()
    rig.start(lambda deadline: ProbeResult(False, "Down", "early" if rig.clock.elapsed() < 1 else "late"))
    rig.clock.run(10)
    assert rig.told == [(1.31875, False)]


def test_another_reason_within_the_first_two_failures_is_not_told():
    rig = Rig()
    results = [UP, WAITING, DOWN, UP]
    rig.start(lambda deadline: results.pop(0) if len(results) > 1 else results[0])
    rig.clock.run(60)
    assert rig.told == []


def test_another_message_while_ready_is_shown_but_not_told():
    rig = Rig()
    rig.start(lambda deadline: ProbeResult(True, "Up" if rig.clock.elapsed() < 5 else "PingSkipped"))
    rig.clock.run(5)
    assert rig.manager.get("pod").reason == "PingSkipped"
    assert rig.told == []


@pytest.mark.parametrize("error", [RuntimeError("API is down"), gevent.Timeout(1)])  # noqa: TID251  never started
def test_a_callback_that_raises_is_logged_and_the_loop_goes_on(error, caplog):
    rig = Rig()

    def fails():
        rig.told.append((rig.clock.elapsed(), rig.manager.get("pod").ready))
        raise error

    rig.start(rig.guest((0.1, 1), (20, 60)), on_update=fails)
    rig.clock.run(30)
    assert rig.told == [(0.1, True), (15.1, False), (20.178125, True)]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["on_update failed key=pod"] * 3


def test_an_observer_sees_every_raw_result_how_late_it_began_and_how_long_it_took():
    seen = []

    def observer(agent, result, lateness, took):
        seen.append((agent.key, result.ready, agent.ready, round(lateness, 6), round(took, 6)))

    rig = Rig(observer=observer)
    results = [UP, DOWN, DOWN, DOWN]

    def probe(deadline):
        rig.clock.sleep(0.5)
        return results.pop(0)

    rig.clock.run(100)
    rig.start(probe)
    rig.clock.run(16.5)
    assert seen == [
        ("pod", True, True, 0, 0.5),
        ("pod", False, True, 0, 0.5),
        ("pod", False, True, 0, 0.5),
        ("pod", False, False, 0, 0.5),
    ]


def test_an_observer_learns_that_a_slow_callback_made_a_probe_late():
    late = []
    rig = Rig(observer=lambda agent, result, lateness, took: late.append(round(lateness, 6)))
    rig.start(script("FSS"), on_update=lambda: rig.clock.sleep(7))
    rig.clock.run(8)
    assert late == [0, 0, 2]


def test_an_observer_that_raises_is_logged_and_changes_nothing(caplog):
    def observer(agent, result, lateness, took):
        raise KeyError("no such label")

    rig = Rig(observer=observer)
    rig.start(script("FS"))
    rig.clock.run(6)
    assert rig.instants() == [0, 0.1, 5.1]
    assert rig.told == [(0.1, True)]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["observer failed key=pod"] * 3


def test_the_log_tells_flips_and_nothing_per_tick(caplog):
    caplog.set_level(logging.INFO, "vkcocoon_probes")
    rig = Rig()
    rig.start(script("FFFSSFSFFFF"))
    rig.clock.run(120)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "probe says ready key=pod reason=Up message='answers'"),
        ("WARNING", "probe says not ready key=pod reason=Down message='silent'"),
    ]
