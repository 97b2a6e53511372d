"""The first probe runs inside ``start``, so that the status published right after it carries the first decision.

Decision P2: ``start`` itself publishes nothing.
"""

from datetime import timedelta

import gevent
import pytest
from probe_rig import DOWN, UP, Gate, Rig, script

from vkcocoon_probes import ProbeResult, ProbeTimeout


def test_the_first_probe_runs_in_the_caller_and_its_result_is_there_when_start_returns():
    rig = Rig()
    probed_in = []

    def probe(deadline):
        probed_in.append(gevent.getcurrent())
        return UP

    rig.start(probe)
    assert probed_in == [gevent.getcurrent()]
    assert rig.manager.get("pod").ready
    assert rig.clock.elapsed() == 0


def test_a_first_success_is_not_called_back_and_the_next_probe_comes_after_five_seconds():
    rig = Rig()
    rig.start(script("S"))
    rig.clock.run(12)
    assert rig.told == []
    assert rig.instants() == [0, 5, 10]


def test_a_first_failure_is_not_called_back_but_can_be_read():
    rig = Rig()
    rig.start(script("F"))
    assert (rig.manager.get("pod").reason, rig.manager.get("pod").message) == ("Down", "silent")
    rig.clock.run(2)
    assert rig.told == []


def test_the_first_success_is_called_back_once_when_the_first_probe_had_failed():
    rig = Rig()
    rig.start(script("FFS"))
    rig.clock.run(20)
    assert rig.told == [(0.25, True)]


def test_the_result_carries_the_wall_time_of_the_end_of_its_probe():
    rig = Rig()
    begin = rig.clock.now()

    def probe(deadline):
        rig.clock.sleep(2)
        return ProbeResult(True, "Up", "answers", at=begin - timedelta(days=1))

    rig.start(probe)
    assert rig.manager.get("pod").at == begin + timedelta(seconds=2)


def test_a_slow_first_probe_holds_the_caller_and_the_pause_counts_from_its_return():
    rig = Rig()

    def probe(deadline):
        rig.clock.sleep(2)
        return DOWN

    rig.start(probe)
    assert rig.clock.elapsed() == 2
    rig.clock.run(0.2)
    assert rig.instants() == [0, 2.1]


def test_a_caller_that_does_not_yield_after_start_does_not_shift_the_second_probe():
    rig = Rig()

    def creates():
        rig.start(script("F"))
        rig.clock.sleep(0.04)
        rig.start(script("F"), key="other")

    rig.clock.spawn("creates", creates)
    rig.clock.run(0.2)
    assert rig.instants("pod") == [0, 0.1]
    assert rig.instants("other") == [0.04, 0.14]


def test_the_first_probe_has_the_same_bound_as_all_others():
    rig = Rig()
    rig.start(lambda deadline: rig.clock.sleep(60))
    assert rig.clock.elapsed() == 3
    assert rig.manager.get("pod").reason == "ProbeTimeout"
    rig.clock.run(0.1)
    assert rig.instants() == [0, 3.1]


def test_a_first_probe_that_raises_is_a_failed_probe_and_the_loop_goes_on():
    rig = Rig()
    outcomes = [ValueError("broken"), UP]

    def probe(deadline):
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    rig.start(probe)
    assert rig.manager.get("pod").reason == "ProbeError"
    rig.clock.run(1)
    assert rig.told == [(0.1, True)]


def test_a_restart_of_the_daemon_shows_no_answering_guest_as_not_ready():
    rig = Rig()
    for n in range(10):
        rig.start(script("S"), key=str(n))
        assert rig.manager.get(str(n)).ready
    rig.clock.run(60)
    assert rig.told == []


def test_starting_again_shows_nothing_of_the_former_agent_while_the_new_first_probe_runs():
    rig = Rig()
    rig.start(script("S"))
    gate = Gate(rig.clock, DOWN)
    rig.clock.spawn("create", rig.start, gate)
    rig.clock.run(0)
    assert gate.entered.is_set()
    assert rig.manager.get("pod") == ProbeResult()
    gate.release.set()
    rig.clock.run(0)
    assert rig.manager.get("pod").reason == "Down"


def test_a_caller_killed_during_the_first_probe_leaves_no_agent_behind():
    rig = Rig()
    gate = Gate(rig.clock)
    caller = rig.clock.spawn("create", rig.start, gate)
    rig.clock.run(0)
    caller.kill(block=False)
    rig.clock.run(10)
    assert "pod" not in rig.manager
    assert rig.greenlets() == 0
    assert rig.instants() == [0]


def test_a_caller_interrupted_by_its_own_bound_during_the_first_probe_leaves_no_agent_behind():
    rig = Rig()
    gate = Gate(rig.clock)
    with pytest.raises(ProbeTimeout), rig.clock.timeout(1):
        rig.start(gate)
    assert rig.clock.elapsed() == 1
    assert "pod" not in rig.manager
    assert rig.greenlets() == 0


def test_a_caller_killed_during_the_first_probe_does_not_take_its_successor_along():
    rig = Rig()
    gate = Gate(rig.clock)
    caller = rig.clock.spawn("create", rig.start, gate)
    rig.clock.run(0)
    successor = rig.start(script("S"))
    caller.kill(block=False)
    rig.clock.run(6)
    assert rig.manager.get("pod").ready
    assert not successor.stop.is_set()
    assert rig.instants() == [0, 0, 5]


def test_after_close_start_probes_nothing():
    rig = Rig()
    rig.manager.close()
    agent = rig.start(script("S"))
    rig.clock.run(10)
    assert rig.probes == []
    assert agent.stop.is_set()
    assert rig.manager.get("pod") == ProbeResult()
    assert rig.manager.forget("pod", agent) is False
