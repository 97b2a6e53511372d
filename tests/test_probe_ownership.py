"""``forget`` ends the probing of one pod and ``close`` that of all; nothing is stored or called back afterwards.

Decisions P3 (only the registered agent acts, an old incarnation cannot stop its successor), P4 (outcomes in flight are
dropped), P5 (what a callback may do). Every race here has a forced order: a gate holds the probe while the other side
acts.
"""

import gc
import weakref

import gevent
import pytest
from probe_rig import DOWN, UP, Gate, Rig, script

from vkcocoon_probes import ProbeResult

NOTHING = ProbeResult()


# Forget, replace and close during the synchronous first probe


def test_forget_during_the_first_probe_drops_its_result_and_starts_no_loop():
    rig = Rig()
    gate = Gate(rig.clock)
    creating = rig.clock.spawn("create", rig.start, gate)
    rig.clock.run(1)
    assert rig.manager.forget("pod") is True
    gate.release.set()
    rig.clock.run(60)
    assert creating.successful()
    assert (gate.left, rig.instants(), rig.told) == (1, [0], [])
    assert rig.manager.get("pod") == NOTHING
    assert (len(rig.manager), rig.greenlets()) == (0, 0)


def test_forget_from_inside_the_first_probe_drops_its_result():
    rig = Rig()

    def probe(deadline):
        rig.manager.forget("pod")
        return UP

    rig.start(probe)
    assert rig.greenlets() == 0
    rig.clock.run(60)
    assert rig.instants() == [0]
    assert rig.manager.get("pod") == NOTHING


def test_a_second_start_during_the_first_probe_wins_whichever_probe_returns_first():
    for first_returns_first in (True, False):
        rig = Rig()
        old, new = Gate(rig.clock, DOWN), Gate(rig.clock, UP)
        rig.clock.spawn("old", rig.start, old)
        rig.clock.run(0)
        rig.clock.spawn("new", rig.start, new)
        rig.clock.run(0)
        assert old.entered.is_set() and new.entered.is_set()
        for gate in (old, new) if first_returns_first else (new, old):
            gate.release.set()
            rig.clock.run(0)
        assert rig.manager.get("pod").ready
        assert rig.greenlets() == 1
        rig.clock.run(12)
        assert (old.left, new.left) == (1, 3)
        assert rig.told == []


def test_start_from_inside_the_first_probe_replaces_its_own_agent():
    rig = Rig()

    def probe(deadline):
        rig.start(script("S"))
        return DOWN

    old = rig.start(probe)
    assert rig.manager.get("pod").ready
    assert old.stop.is_set()
    rig.clock.run(6)
    assert rig.instants() == [0, 0, 5]


def test_close_during_the_first_probe_drops_its_result_and_starts_no_loop():
    rig = Rig()
    gate = Gate(rig.clock)
    rig.clock.spawn("create", rig.start, gate)
    rig.clock.run(1)
    rig.manager.close()
    gate.release.set()
    rig.clock.run(60)
    assert rig.instants() == [0]
    assert rig.manager.get("pod") == NOTHING
    assert rig.greenlets() == 0


# The same during a later probe


def held_third_failure():
    """A ready pod whose third failure in a row is in flight, at 15 s."""
    rig = Rig()
    gate = Gate(rig.clock, DOWN)

    def probe(deadline):
        return UP if rig.clock.elapsed() == 0 else DOWN if rig.clock.elapsed() < 15 else gate(deadline)

    agent = rig.start(probe)
    rig.clock.run(15)
    assert gate.entered.is_set()
    return rig, gate, agent


def test_forget_during_a_probe_drops_its_result():
    rig, gate, _ = held_third_failure()
    assert rig.manager.forget("pod") is True
    assert rig.manager.get("pod") == NOTHING
    gate.release.set()
    rig.clock.run(60)
    assert gate.left == 1
    assert rig.told == []
    assert rig.manager.get("pod") == NOTHING
    assert rig.instants() == [0, 5, 10, 15]
    assert rig.greenlets() == 0


def test_a_replaced_agent_whose_probe_returns_late_does_not_write_over_its_successor():
    rig, gate, old = held_third_failure()
    new = rig.start(script("S"))
    assert rig.manager.get("pod").ready
    gate.release.set()
    rig.clock.run(1)
    assert gate.left == 1
    assert rig.manager.get("pod").ready
    assert old.stop.is_set() and not new.stop.is_set()
    assert rig.told == []
    assert rig.greenlets() == 1


def test_close_during_the_third_failure_does_not_flip():
    rig, gate, _ = held_third_failure()
    rig.clock.spawn("close", rig.manager.close)
    rig.clock.run(0)
    gate.release.set()
    rig.clock.run(60)
    assert gate.left == 1
    assert rig.told == []
    assert rig.manager.get("pod") == NOTHING
    assert rig.greenlets() == 0


def test_a_probe_that_outlives_forget_is_still_cut_by_its_bound():
    rig, _, _ = held_third_failure()
    rig.manager.forget("pod")
    rig.clock.run(2.999999)
    assert rig.greenlets() == 1
    rig.clock.run(0.000001)
    assert rig.greenlets() == 0


def test_an_observer_hears_nothing_of_a_probe_that_lost_its_key():
    heard = []
    rig = Rig(observer=lambda agent, result, lateness, took: heard.append(rig.clock.elapsed()))
    gate = Gate(rig.clock)
    rig.start(lambda deadline: UP if rig.clock.elapsed() == 0 else gate(deadline))
    rig.clock.run(5)
    rig.manager.forget("pod")
    gate.release.set()
    rig.clock.run(1)
    assert gate.left == 1
    assert heard == [0]


# Forget between two probes


def test_forget_leaves_nothing_of_the_key():
    rig = Rig()
    rig.start(script("S"))
    rig.clock.run(7)
    assert rig.manager.forget("pod") is True
    assert rig.manager.get("pod") == NOTHING
    assert "pod" not in rig.manager
    rig.clock.run(60)
    assert rig.instants() == [0, 5]
    assert rig.greenlets() == 0


def test_forget_at_the_instant_of_a_probe_lets_only_an_earlier_one_happen():
    rig = Rig()
    rig.clock.at(5, rig.manager.forget, "pod")  # set before the agent's own timer
    rig.start(script("S"))
    rig.clock.run(60)
    assert rig.instants() == [0]


@pytest.mark.parametrize("seed", range(20))
def test_forget_at_the_instant_of_a_probe_is_final_whatever_the_seed(seed):
    rig = Rig(seed=seed)
    rig.start(script("F"))
    rig.clock.at(0.1, rig.manager.forget, "pod")
    rig.clock.run(60)
    assert rig.instants() in ([0], [0, 0.1])
    assert rig.told == []
    assert rig.greenlets() == 0


def test_forget_of_an_unknown_key_does_nothing():
    assert Rig().manager.forget("pod") is False


def test_forget_twice_stops_once():
    rig = Rig()
    rig.start(script("S"))
    assert (rig.manager.forget("pod"), rig.manager.forget("pod")) == (True, False)


def test_an_old_incarnation_cannot_stop_its_successor():
    rig = Rig()
    old = rig.start(script("S"))
    new = rig.start(script("S"))
    assert rig.manager.forget("pod", old) is False
    rig.clock.run(6)
    assert rig.instants() == [0, 0, 5]
    assert rig.manager.forget("pod", new) is True
    assert rig.manager.get("pod") == NOTHING


def test_starting_again_within_a_millisecond_leaves_only_the_second_loop():
    rig = Rig()
    seen = []
    rig.start(lambda deadline: seen.append("first") or DOWN)
    rig.clock.run(0.001)
    rig.start(lambda deadline: seen.append("second") or UP)
    rig.clock.run(60)
    assert seen == ["first", *["second"] * 13]
    assert rig.greenlets() == 1


def test_forgetting_one_key_leaves_the_others_alone():
    rig = Rig()
    rig.start(script("S"), key="a")
    rig.start(script("S"), key="b")
    rig.manager.forget("a")
    rig.clock.run(11)
    assert (rig.instants("a"), rig.instants("b")) == ([0], [0, 5, 10])


def test_a_thousand_starts_and_forgets_without_yielding_leave_no_greenlet_and_no_probe():
    rig = Rig()
    for _ in range(1000):
        rig.start(script("F"))
        assert rig.manager.forget("pod") is True
    rig.clock.run(60)
    assert rig.instants() == [0] * 1000
    assert rig.told == []
    assert (len(rig.manager), rig.greenlets()) == (0, 0)


def test_a_thousand_replacements_without_yielding_leave_one_greenlet():
    rig = Rig()
    for _ in range(1000):
        rig.start(script("F"))
    rig.clock.run(0.1)
    assert rig.instants() == [*[0] * 1000, 0.1]
    assert (len(rig.manager), rig.greenlets()) == (1, 1)


def test_an_agent_killed_before_it_ever_ran_leaves_no_key_and_no_probe():
    rig = Rig()
    rig.start(script("S"))
    (greenlet,) = rig.manager._group
    greenlet.kill(block=False)
    rig.clock.run(60)
    assert rig.instants() == [0]
    assert rig.manager.get("pod") == NOTHING
    assert (len(rig.manager), rig.greenlets()) == (0, 0)


def test_an_agent_killed_while_it_waits_leaves_no_key_and_no_probe():
    rig = Rig()
    rig.start(script("S"))
    rig.clock.run(7)
    (greenlet,) = rig.manager._group
    greenlet.kill(block=False)
    rig.clock.run(60)
    assert rig.instants() == [0, 5]
    assert rig.manager.get("pod") == NOTHING
    assert rig.greenlets() == 0


def test_a_killed_agent_that_was_replaced_does_not_take_its_successor_along():
    rig = Rig()
    rig.start(script("S"))
    (greenlet,) = rig.manager._group
    rig.start(script("S"))
    greenlet.kill(block=False)
    rig.clock.run(6)
    assert rig.instants() == [0, 0, 5]
    assert rig.manager.get("pod").ready


# What a callback may do


def test_a_callback_may_forget_its_own_key():
    rig = Rig()
    rig.start(script("FS"), on_update=lambda: rig.told.append(rig.manager.forget("pod")))
    rig.clock.run(60)
    assert rig.told == [True]
    assert rig.instants() == [0, 0.1]
    assert rig.manager.get("pod") == NOTHING
    assert rig.greenlets() == 0


def test_a_callback_may_start_its_own_key_again():
    rig = Rig()
    rig.start(script("FS"), on_update=lambda: rig.start(script("FFS")))
    rig.clock.run(3)
    # Old agent at 0 and 0.1, where its callback starts the new one.
    assert rig.instants() == [0, 0.1, 0.1, 0.2, 0.35]
    assert rig.told == [(0.35, True)]
    assert rig.greenlets() == 1


def test_a_callback_may_close_the_manager():
    rig = Rig()
    rig.start(script("S"), key="other")
    rig.start(script("FS"), on_update=rig.manager.close)
    rig.clock.run(0.1)
    assert (len(rig.manager), rig.greenlets()) == (0, 0)
    rig.clock.run(60)
    assert rig.probes == [(0, "other"), (0, "pod"), (0.1, "pod")]


def test_a_callback_may_forget_another_key_whose_probe_is_in_flight():
    rig = Rig()
    gate = Gate(rig.clock, UP)
    rig.clock.spawn("create", rig.start, gate, "other")
    rig.start(script("FS"), on_update=lambda: rig.told.append(rig.manager.forget("other")))
    rig.clock.run(1)
    gate.release.set()
    rig.clock.run(10)
    assert rig.told == [True]
    assert rig.manager.get("other") == NOTHING
    assert rig.instants("other") == [0]


def test_an_observer_that_forgets_the_key_prevents_the_callback():
    rig = Rig(observer=lambda agent, result, lateness, took: result.ready and rig.manager.forget(agent.key))
    rig.start(script("FS"))
    rig.clock.run(60)
    assert rig.instants() == [0, 0.1]
    assert rig.told == []
    assert rig.greenlets() == 0


def test_an_observer_that_forgets_the_key_during_start_leaves_no_loop():
    rig = Rig(observer=lambda agent, result, lateness, took: rig.manager.forget(agent.key))
    rig.start(script("S"))
    rig.clock.run(60)
    assert rig.instants() == [0]
    assert rig.greenlets() == 0


# Close


def test_close_forgets_everything_and_leaves_no_greenlet():
    rig = Rig()
    for n in range(100):
        rig.start(script("SF"[n % 2]), key=str(n))
    rig.clock.run(8)
    before = len(rig.probes)
    rig.manager.close()
    assert rig.clock.elapsed() == 8
    assert (len(rig.manager), rig.greenlets()) == (0, 0)
    assert all(rig.manager.get(str(n)) == NOTHING for n in range(100))
    rig.clock.run(60)
    assert len(rig.probes) == before
    assert rig.told == []


def test_close_with_pods_in_all_phases_takes_no_longer_than_its_grace():
    rig = Rig()
    gate = Gate(rig.clock)
    for n in range(50):
        rig.start(script("S"), key=f"steady {n}")
        rig.start(script("F"), key=f"ramp {n}")
        rig.start(lambda deadline: UP if rig.clock.elapsed() == 0 else gate(deadline), key=f"in flight {n}")
        rig.clock.spawn("create", rig.start, gate, f"first probe {n}")
    rig.clock.run(5)
    for n in range(50):
        rig.start(script("S"), key=f"never ran {n}")
    rig.manager.close()
    assert rig.clock.elapsed() == 6
    assert (len(rig.manager), rig.greenlets()) == (0, 0)
    probes = len(rig.probes)
    rig.clock.run(60)
    assert len(rig.probes) == probes
    assert rig.told == []


def test_close_lets_a_short_probe_end_by_itself():
    rig = Rig()
    ended = []

    def probe(deadline):
        rig.clock.sleep(0.5)
        ended.append(rig.clock.elapsed())
        return UP

    rig.start(probe)
    rig.clock.run(5)
    rig.manager.close()
    assert rig.clock.elapsed() == 6
    assert ended == [0.5, 6]
    assert rig.greenlets() == 0


def test_close_gives_up_loudly_on_a_probe_that_survives_being_killed(caplog):
    rig = Rig()

    swallowed = []

    def undying(deadline):
        while 0 < rig.clock.elapsed() < 100:
            try:
                rig.clock.sleep(100)
            except BaseException as error:  # noqa: BLE001  the worst a library can do
                swallowed.append(error)
        return UP

    rig.start(undying)
    rig.clock.run(5)
    rig.manager.close()
    assert rig.clock.elapsed() == 7
    assert [record.getMessage() for record in caplog.records] == [
        "probes survived being killed greenlets=['probe pod']"
    ]
    rig.clock.run(200)
    assert rig.greenlets() == 0


def test_close_twice_is_close():
    rig = Rig()
    rig.start(script("S"))
    rig.manager.close()
    rig.manager.close()
    assert rig.greenlets() == 0


def test_close_of_an_unused_manager_does_not_wait():
    rig = Rig()
    rig.manager.close()
    assert rig.clock.elapsed() == 0


def test_a_probe_may_close_the_manager():
    rig = Rig()

    def probe(deadline):
        if rig.clock.elapsed() > 0:
            rig.manager.close()
        return UP

    rig.start(probe)
    rig.clock.run(60)
    assert rig.instants() == [0, 5]
    assert rig.greenlets() == 0


def test_the_greenlet_of_an_agent_is_named_after_its_key():
    rig = Rig()
    rig.start(script("S"), key="default/web-0")
    (greenlet,) = rig.manager._group
    assert greenlet.name == "probe default/web-0"
    assert isinstance(greenlet, gevent.Greenlet)


def test_no_cycle_keeps_a_forgotten_agent_alive():
    class Probe:
        def __call__(self, deadline):
            return DOWN

    rig = Rig()
    probe = Probe()
    alive = weakref.ref(probe)
    rig.manager.start("pod", probe, lambda: None)
    rig.clock.run(1)
    rig.manager.forget("pod")
    gc.collect()
    gc.disable()
    try:
        rig.clock.run(2)
        del probe
        assert alive() is None
    finally:
        gc.enable()
