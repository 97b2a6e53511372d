"""One probe has one hard bound of 3 s for everything it does, and whatever it raises is one failed probe.

Decisions T1 (the bound), P5 (what a closure may raise).
"""

import gevent
import pytest
from probe_rig import DOWN, UP, Rig, script

from simulator.clock import VirtualClock
from vkcocoon_probes import Deadline, ProbeResult, ProbeTimeout


def test_a_probe_that_ignores_its_deadline_is_cut_after_three_seconds():
    rig = Rig()
    rig.start(lambda deadline: rig.clock.sleep(1000))
    rig.clock.run(4)
    assert rig.instants() == [0, 3.1, 6.25]
    result = rig.manager.get("pod")
    assert (result.ready, result.reason, result.message) == (False, "ProbeTimeout", "took longer than 3 s")


def test_a_library_that_swallows_exceptions_around_its_wait_does_not_escape_the_bound():
    rig = Rig()
    swallowed = []

    def stubborn(deadline):
        while True:
            try:
                rig.clock.sleep(1000)
            except Exception as error:  # noqa: BLE001  as libraries do
                swallowed.append(error)

    rig.start(stubborn)
    assert rig.clock.elapsed() == 3
    assert rig.manager.get("pod").reason == "ProbeTimeout"
    assert swallowed == []


def test_a_probe_that_swallows_even_the_interrupt_is_late_whatever_it_returns():
    rig = Rig()

    def deaf(deadline):
        try:
            rig.clock.sleep(1000)
        except BaseException:  # noqa: BLE001  the worst a library can do
            rig.clock.sleep(1)
        return UP

    rig.start(deaf)
    assert rig.clock.elapsed() == 4
    assert rig.manager.get("pod").reason == "ProbeTimeout"


def test_a_probe_whose_clean_up_fails_after_the_bound_has_timed_out_all_the_same():
    rig = Rig()

    def messy(deadline):
        try:
            rig.clock.sleep(1000)
        finally:
            raise OSError("close failed")

    rig.start(messy)
    assert rig.manager.get("pod").reason == "ProbeTimeout"


def test_a_dial_that_uses_its_whole_deadline_fails_with_its_own_reason():
    # The wait and the bound end at one instant; the wait goes first, else the reason would depend on luck.
    rig = Rig()

    def dial(deadline):
        rig.clock.sleep(deadline.remaining())
        return ProbeResult(False, "PortClosed", "no answer")

    rig.start(dial)
    assert rig.clock.elapsed() == 3
    assert rig.manager.get("pod").reason == "PortClosed"


@pytest.mark.parametrize("seed", range(10))
def test_that_holds_when_the_dial_waits_for_another_greenlet_and_whatever_the_seed(seed):
    rig = Rig(seed=seed)
    done = gevent.event.Event()

    def dial(deadline):
        rig.clock.wait(done, None)
        return ProbeResult(False, "PortClosed", "no answer")

    rig.clock.at(3, done.set)
    rig.start(dial)
    assert rig.clock.elapsed() == 3
    assert rig.manager.get("pod").reason == "PortClosed"


def test_a_guest_that_stops_answering_is_not_ready_within_24_seconds():
    rig = Rig()
    silent_from = 0.000001

    def echo(deadline):
        if rig.clock.elapsed() < silent_from:
            return UP
        rig.clock.sleep(deadline.of_one_echo().remaining())
        return DOWN

    rig.start(echo)
    rig.clock.run(30)
    assert rig.told == [(3 * (5 + 3), False)]


RAISED = {
    "an exception": (ValueError("broken"), "ProbeError", "the probe raised ValueError"),
    "an operating system error": (OSError(24, "Too many open files"), "ProbeError", "the probe raised OSError"),
    "gevent's timeout": (gevent.Timeout(0.5), "ProbeError", "the probe raised Timeout"),  # noqa: TID251  never started
    "a bound of its own": (ProbeTimeout("took longer than 1 s"), "ProbeTimeout", "took longer than 1 s"),
}


@pytest.mark.parametrize(("error", "reason", "message"), RAISED.values(), ids=RAISED)
def test_what_a_probe_raises_is_one_failed_probe(error, reason, message):
    rig = Rig()
    raising = [False, True, True, False, True, True, True]

    def probe(deadline):
        if raising.pop(0):
            raise error
        return UP

    rig.start(probe)
    rig.clock.run(30)
    assert rig.told == [(30, False)]
    assert (rig.manager.get("pod").reason, rig.manager.get("pod").message) == (reason, message)


@pytest.mark.parametrize("nothing", [None, True, "ready"])
def test_a_probe_that_returns_no_result_is_a_failed_probe(nothing):
    rig = Rig()
    rig.start(lambda deadline: nothing)
    assert rig.manager.get("pod").reason == "ProbeError"
    rig.clock.run(0.3)
    assert rig.instants() == [0, 0.1, 0.25]


def test_an_error_is_logged_once_with_its_traceback_until_the_probe_returned_again(caplog):
    rig = Rig()
    outcomes = [ValueError("a"), ValueError("b"), KeyError("c"), KeyError("d"), DOWN, KeyError("e")]

    def probe(deadline):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    rig.start(probe)
    rig.clock.run(1.4)
    assert outcomes == []
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged == ["a", "'c'", "'e'"]


def test_a_kill_during_a_probe_ends_the_agent():
    rig = Rig()

    def probe(deadline):
        if rig.clock.elapsed() > 0:
            raise gevent.GreenletExit
        return UP

    rig.start(probe)
    rig.clock.run(60)
    assert rig.instants() == [0, 5]
    assert "pod" not in rig.manager
    assert rig.manager.get("pod") == ProbeResult()
    assert rig.greenlets() == 0
    assert rig.told == []


@pytest.mark.parametrize("order_to_exit", [SystemExit, KeyboardInterrupt])
def test_an_order_to_exit_ends_the_agent_and_reaches_the_main_greenlet(order_to_exit):
    rig = Rig()

    def probe(deadline):
        if rig.clock.elapsed() > 0:
            raise order_to_exit
        return UP

    rig.start(probe)
    with pytest.raises(order_to_exit):
        rig.clock.run(60)
    rig.clock.run(60)
    assert rig.instants() == [0, 5]
    assert "pod" not in rig.manager


def test_another_bound_can_be_asked_for():
    rig = Rig(timeout=0.5)
    rig.start(lambda deadline: rig.clock.sleep(1000))
    assert rig.clock.elapsed() == 0.5
    assert rig.manager.get("pod").message == "took longer than 0.5 s"


# Deadline


def test_a_deadline_counts_down_to_zero_and_no_further():
    clock = VirtualClock()
    deadline = Deadline(clock, 3)
    seen = []
    for _ in range(4):
        seen.append((deadline.remaining(), deadline.expired))
        clock.run(1.5)
    assert seen == [(3, False), (1.5, False), (0, True), (0, True)]


@pytest.mark.parametrize("seconds", [0, -1, -0.0000001])
def test_a_deadline_without_time_is_expired_from_the_start(seconds):
    deadline = Deadline(VirtualClock(), seconds)
    assert (deadline.remaining(), deadline.expired, deadline.of_one_echo().remaining()) == (0, True, 0)


def test_a_deadline_of_none_is_refused():
    with pytest.raises(TypeError):
        Deadline(VirtualClock(), None)


def test_a_loop_that_waits_for_the_remainder_ends_exactly_at_the_deadline():
    clock = VirtualClock()
    clock.run(0.1)
    deadline = Deadline(clock, 0.2)
    waits = 0
    while not deadline.expired:
        clock.sleep(deadline.remaining() / 3)
        waits += 1
    assert clock.now_us == 300_000
    assert waits < 50


def test_patience_is_a_part_of_the_deadline_and_ends_with_it():
    clock = VirtualClock()
    deadline = Deadline(clock, 3, patience=0.25)
    assert deadline.of_one_echo().remaining() == 0.25
    clock.run(2.875)
    assert deadline.of_one_echo().remaining() == 0.125
    clock.run(1)
    assert deadline.of_one_echo().remaining() == 0


def test_a_nearer_deadline_is_never_later_and_keeps_the_patience():
    clock = VirtualClock()
    deadline = Deadline(clock, 3, patience=0.25)
    clock.run(1)
    assert deadline.at_most(0.5).remaining() == 0.5
    assert deadline.at_most(10).remaining() == 2
    assert deadline.at_most(-1).expired
    assert deadline.at_most(10).of_one_echo().remaining() == 0.25
    assert deadline.remaining() == 2


def test_the_deadline_of_a_probe_is_its_bound():
    rig = Rig()
    seen = []

    def probe(deadline):
        seen.append(deadline.remaining())
        rig.clock.sleep(1)
        seen.append(deadline.remaining())
        return UP

    rig.start(probe)
    assert seen == [3, 2]


def test_script_answers_are_what_these_tests_think_they_are():
    assert [script("SF")(None).ready, script("F")(None).ready] == [True, False]
