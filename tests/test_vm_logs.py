"""The log of a VM's hypervisor, as `cocoon vm logs` prints it: byte for byte, from its last lines on, and followed.

To the tool, no last lines are all lines; a follower that wants nothing of the past gets what is new all the same.
"""

import os

import gevent
import pytest
from gevent.pool import Group
from host_rig import Rig

from simulator.fake_tools import Step
from vkcocoon_commands import CommandStream
from vkcocoon_probes import SystemClock, spawn
from vkcocoon_vms import CocoonCLI, CommandError, VMNotFound

BOOTED = "booted web-0 in process 4001"


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    rig.cli = CocoonCLI("cocoon", execute=rig.cocoon.execute, output=rig.host.output, clock=rig.clock)
    rig.vm = rig.clone_vm()
    yield rig
    rig.clock.close()


def texts(printed: bytes) -> list[str]:
    """What the lines say, without their times."""
    return [line.partition(" -- ")[2] for line in printed.decode().splitlines()]


def follow(rig, **options):
    """Starts to follow; the list grows with time."""
    seen = []

    def read():
        for piece in rig.cli.logs(rig.vm.id, follow=True, **options):
            seen.extend(texts(piece))

    rig.clock.spawn("follower", read)
    rig.clock.run(0)
    return seen


def test_without_a_number_all_of_it_is_printed(rig):
    rig.cocoon.add_log("web-0", "one", "two")
    assert texts(b"".join(rig.cli.logs(rig.vm.id))) == [BOOTED, "one", "two"]
    assert rig.cocoon.calls[-1]["argv"] == ["vm", "logs", rig.vm.id]


@pytest.mark.parametrize(("tail", "left"), [(1, ["two"]), (2, ["one", "two"]), (99, [BOOTED, "one", "two"])])
def test_only_the_last_lines_are_printed_when_so_many_are_asked_for(rig, tail, left):
    rig.cocoon.add_log("web-0", "one", "two")
    assert texts(b"".join(rig.cli.logs(rig.vm.id, tail=tail))) == left
    assert rig.cocoon.calls[-1]["argv"] == ["vm", "logs", "--tail", str(tail), rig.vm.id]


def test_no_last_lines_are_nothing_and_no_command(rig):
    before = rig.cocoon.count("vm logs")
    assert list(rig.cli.logs(rig.vm.id, tail=0)) == []
    assert rig.cocoon.count("vm logs") == before


def test_a_follower_gets_what_there_is_and_what_is_added(rig):
    seen = follow(rig)
    assert seen == [BOOTED]
    rig.cocoon.add_log("web-0", "one")
    rig.cocoon.add_log("web-0", "two")
    rig.clock.run(0.2)
    assert seen == [BOOTED, "one", "two"]


def test_a_follower_who_wants_nothing_of_the_past_gets_only_what_is_added(rig):
    rig.cocoon.add_log("web-0", "old")
    seen = follow(rig, tail=0)
    rig.clock.run(60)
    assert seen == []
    rig.cocoon.add_log("web-0", "new")
    rig.clock.run(0.2)
    assert seen == ["new"]


def test_what_is_added_while_it_finds_out_what_is_past_is_not_lost(rig):
    looked = rig.cocoon.hold("vm logs", step=Step.AFTER)
    seen = follow(rig, tail=0)
    assert looked.reached.is_set()
    rig.cocoon.add_log("web-0", "between")
    looked.release()
    rig.clock.run(0)
    assert seen == ["between"]


def test_a_restart_begins_the_log_anew_and_followers_stay(rig):
    seen = follow(rig, tail=0)
    rig.cli.stop(rig.vm.id)
    rig.clock.run(1)
    rig.cli.start(rig.vm.id)
    rig.clock.run(0.2)
    assert seen == ["booted web-0 in process 4002"]


@pytest.mark.parametrize("options", [{}, {"tail": 5}, {"follow": True}, {"follow": True, "tail": 0}])
def test_a_vm_that_does_not_exist_is_told_apart_from_every_other_failure(rig, options):
    with pytest.raises(VMNotFound):
        list(rig.cli.logs("web-9", **options))
    rig.cocoon.fail("vm logs", stderr="Error: logs: store is locked")
    with pytest.raises(CommandError) as caught:
        list(rig.cli.logs(rig.vm.id, **options))
    assert not isinstance(caught.value, VMNotFound)


def test_an_old_cocoon_has_no_logs_and_says_so(rig):
    rig.cocoon.old = True
    for options in ({}, {"follow": True}):
        with pytest.raises(CommandError, match='unknown command "logs"'):
            list(rig.cli.logs(rig.vm.id, **options))


@pytest.mark.parametrize("options", [{}, {"tail": 0}, {"follow": True, "tail": 0}])
def test_a_name_cannot_become_a_flag(rig, options):
    with pytest.raises(CommandError, match="refused"):
        rig.cli.logs("--config=/tmp/evil", **options)


class Printed:
    """An Output that prints given pieces, whatever is asked; the first call is for the last line."""

    def __init__(self, last, pieces):
        self.answers = [[last] if last else [], pieces]

    def __call__(self, argv):
        return iter(self.answers.pop(0))


@pytest.mark.parametrize(
    ("last", "pieces", "new"),
    [
        (b"a\n", [b"a\n", b"b\n"], b"b\n"),
        (b"a\n", [b"a\nb\n"], b"b\n"),
        (b"a\n", [b"a", b"\n", b"b\n"], b"b\n"),
        (b"abc", [b"ab", b"cdef\n"], b"def\n"),  # it was still being written
        (b"a\n", [b"b\n", b"c\n"], b"b\nc\n"),  # no longer the last line
        (b"abc\n", [b"ab", b"d\n"], b"abd\n"),
        (b"", [b"a\n"], b"a\n"),
        (b"a\n", [b"a\n"], b""),
        (b"a\n", [], b""),
    ],
)
def test_exactly_the_last_line_is_left_out_however_it_comes(last, pieces, new):
    cli = CocoonCLI("cocoon", output=Printed(last, pieces))
    assert b"".join(cli.logs("web-0", follow=True, tail=0)) == new


@pytest.mark.process
def test_the_bytes_of_a_real_command_come_unchanged_and_as_they_are_printed(tmp_path):
    go = tmp_path / "go"
    script = r'printf "\377\0a\r\n"; while [ ! -e "$0" ]; do sleep 0.02; done; head -c 300000 /dev/zero; printf end'
    pieces = CommandStream().output(["sh", "-c", script, str(go)])
    assert next(pieces) == b"\377\0a\r\n"
    go.touch()
    assert b"".join(pieces) == bytes(300000) + b"end"


@pytest.mark.process
def test_killing_who_follows_ends_the_command(tmp_path):
    clock, greenlets, heard = SystemClock(), Group(), []

    def read():
        for piece in CommandStream(clock, grace=0.2).output(["sh", "-c", "echo $$; sleep 60"]):
            heard.append(int(piece))

    reader = spawn(greenlets, "read", read)
    while not heard:
        clock.sleep(0.01)
    gevent.kill(reader)
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(heard[0], 0)
            clock.sleep(0.01)
