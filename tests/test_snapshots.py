"""What is saved on this host: read strictly, named so that it fits, and made once for all who want it."""

import pytest
from gevent.pool import Group

from simulator.clock import VirtualClock
from vkcocoon_commands import Completed
from vkcocoon_snapshots import Flights, fork_name, latest_name
from vkcocoon_vms import CocoonCLI, CommandError, Snapshot


def listed(stdout):
    cli = CocoonCLI("cocoon", execute=lambda argv, limit: Completed(0, stdout, ""))
    return list(cli.snapshots())


@pytest.mark.parametrize("nothing", ["", "No snapshots found.\n", "[]", "null"])
def test_no_snapshots_are_none_in_every_spelling(nothing):
    assert listed(nothing) == []


def test_snapshots_are_read_and_what_is_none_is_left_out():
    text = '[{"id": "A", "name": "a", "image": "x", "hypervisor": "firecracker", "cpu": 2}, {"name": "b"}, 7]'
    assert listed(text) == [Snapshot("A", "a", "x", "", "firecracker")]


@pytest.mark.parametrize("garbage", ["{", '{"a": 1}', '"No"', "7", "No snapshots found for VM."])
def test_what_is_no_list_proves_nothing(garbage):
    with pytest.raises(CommandError, match="unreadable answer"):
        listed(garbage)


def test_the_names_of_derived_snapshots_fit_and_stay_apart():
    assert (fork_name("vk-a"), latest_name("vk-a")) == ("fork-vk-a", "latest-vk-a")
    longest = ["x" * 62 + letter for letter in "ab"]
    names = [name(vm) for name in (fork_name, latest_name) for vm in longest]
    assert len({*names}) == 4
    assert {len(name) for name in names} == {63}
    assert names == [name(vm) for name in (fork_name, latest_name) for vm in longest]


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


def test_who_comes_while_the_work_is_done_shares_it_and_who_comes_later_does_not(clock):
    flights, done, ended = Flights(clock, Group()), [], []

    def work():
        clock.sleep(10)
        done.append(clock.elapsed())

    def caller():
        flights.run("key", work)
        ended.append(clock.elapsed())

    for at in (0, 3, 10.5):
        clock.at(at, caller)
    clock.run(30)
    assert done == [10.0, 20.5]
    assert ended == [10.0, 10.0, 20.5]


def test_a_caller_that_is_killed_ends_nobody_elses_work(clock):
    flights, ended = Flights(clock, Group()), []
    first = clock.spawn("first", flights.run, "key", lambda: clock.sleep(10))
    clock.run(1)
    clock.spawn("second", lambda: (flights.run("key", lambda: None), ended.append(clock.elapsed())))
    clock.run(1)
    first.kill(block=False)
    clock.run(10)
    assert ended == [10.0]


def test_everybody_who_waits_learns_of_a_failure(clock):
    flights, said = Flights(clock, Group()), []

    def work():
        clock.sleep(1)
        raise CommandError(["cocoon"], 1, "no space")

    def caller():
        try:
            flights.run("key", work)
        except CommandError as error:
            said.append(error.stderr)

    for _ in range(3):
        clock.spawn("caller", caller)
    clock.run(5)
    assert said == ["no space"] * 3
