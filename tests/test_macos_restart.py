"""macOS, last sentence of the clause: a dead QEMU is restarted in place, rate-limited, and never twice (T5, M2, M3)."""

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import cycle

import pytest
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group

from simulator.clock import VirtualClock
from vkcocoon_macos import Owner, QemuKeeper, VncPorts
from vkcocoon_status import Reason
from vkcocoon_vms import VM, CommandError, MacosSpec, Nic, VMNotFound

SPEC = MacosSpec(name="mac", image="tahoe")


class ScriptedTool:
    """cocoon-macos with one VM: a record, a process or none, and a log of what was called when."""

    def __init__(self, clock):
        self.clock = clock
        self.record = VM(
            id="qemu-mac", name="mac", state="running", hypervisor="qemu", pid=100, nics=(Nic(mac="0a:00:00:00:00:01"),)
        )
        self.living = {100}
        self.calls = []
        self.start_seconds = 0.0
        self.dies_after_start = False
        self.broken = ()

    def _call(self, verb, *args):
        self.calls.append((self.clock.elapsed(), verb, *args))
        if verb in self.broken:
            raise CommandError(["cocoon-macos", "vm", verb], 1, f"{verb} does not work today")

    def alive(self, vm):
        return vm.pid in self.living

    def inspect(self, name):
        self._call("inspect")
        if self.record is None:
            raise VMNotFound(["cocoon-macos", "vm", "inspect"], 1, "no such file or directory")
        return self.record

    def start(self, name, vnc=-1):
        self._call("start", vnc)
        self.clock.sleep(self.start_seconds)
        pid = self.record.pid + 1
        self.record = replace(self.record, pid=pid)
        if not self.dies_after_start:
            self.living = {pid}

    def run(self, spec):
        self._call("run")
        self.record = VM(id="qemu-mac", name="mac", hypervisor="qemu", pid=200)
        self.living = {200}
        return self.record

    def ensure_image(self, ref):
        self._call("ensure_image", ref)

    def times(self, verb):
        return [call[0] for call in self.calls if call[1] == verb]


class Pod:
    """The owner of the VM as the keeper sees it, ticking once a second like a probe that is not ready."""

    def __init__(self, clock, keeper, tool):
        self.clock, self.keeper = clock, keeper
        self.vm = tool.record
        self.is_wanted = True
        self.refreshed = []
        self.results = []
        self.stop = Event()

    def owner(self):
        return Owner(lambda: self.is_wanted, self.refresh, vnc=7)

    def refresh(self, record, started):
        self.vm = record
        self.refreshed.append((self.clock.elapsed(), record.pid, started))

    def tick(self):
        self.results.append(self.keeper.check(self.vm, self.owner()))
        return self.results[-1]

    def probe_every_second(self):
        while not self.clock.wait(self.stop, 1.0):
            self.tick()


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def tool(clock):
    return ScriptedTool(clock)


@pytest.fixture
def lock():
    return BoundedSemaphore(1)


@pytest.fixture
def keeper(clock, tool, lock):
    @contextmanager
    def held(name):
        with lock:
            yield

    return QemuKeeper(clock, tool, lock=held, group=Group())


@pytest.fixture
def pod(clock, keeper, tool):
    pod = Pod(clock, keeper, tool)
    yield pod
    pod.stop.set()


def test_a_live_process_is_no_reason_to_do_anything(tool, pod):
    assert pod.tick() is None
    assert tool.calls == []


def test_who_cannot_see_whether_the_process_lives_restarts_nothing(tool, pod, monkeypatch):
    def unseen(vm):
        raise CommandError((f"process {vm.pid}",), None, "", why="cannot be read: Too many open files")

    monkeypatch.setattr(tool, "alive", unseen)
    result = pod.tick()
    assert (result.ready, result.reason) == (False, Reason.PROBE_ERROR)
    assert result.message == "whether qemu of mac runs is not known: process 100: cannot be read: Too many open files"
    assert tool.calls == []


def test_the_message_of_a_dead_process_is_the_same_until_the_next_restart(clock, tool, pod, monkeypatch):
    """P7: equal states compare equal, also where the due time lies on the border of a second: two clocks are never read
    in one instant."""
    tool.broken = ("start",)
    tool.living.clear()
    exact, off = clock.now, cycle((-20, 0, 20))
    monkeypatch.setattr(clock, "now", lambda: exact() + timedelta(microseconds=next(off)))
    clock.spawn("probe", pod.probe_every_second)
    clock.run(10.5)
    messages = {result.message for result in pod.results if result.reason is Reason.QEMU_DEAD}
    assert len(messages) == 1, messages


def test_a_dead_process_is_restarted_at_once_with_its_display(clock, tool, pod):
    tool.living.clear()
    assert pod.tick().reason == Reason.QEMU_RESTARTING
    clock.run(0)
    assert tool.calls == [(0.0, "inspect"), (0.0, "start", 7), (0.0, "inspect")]
    assert pod.refreshed == [(0.0, 101, True)]
    assert pod.tick() is None


def test_a_crash_loop_is_restarted_after_10_20_40_80_160_and_then_every_300_seconds(clock, tool, pod):
    tool.living.clear()
    tool.dies_after_start = True
    clock.spawn("probe", pod.probe_every_second)
    clock.run(1300)
    assert tool.times("start") == [1.0, 11.0, 31.0, 71.0, 151.0, 311.0, 611.0, 911.0, 1211.0]


def test_a_failing_start_counts_as_an_attempt(clock, tool, pod):
    tool.living.clear()
    tool.broken = ("start",)
    clock.spawn("probe", pod.probe_every_second)
    clock.run(40)
    assert tool.times("start") == [1.0, 11.0, 31.0]


def test_between_attempts_the_message_says_when_the_next_one_may_come_and_does_not_change(clock, tool, pod):
    tool.living.clear()
    tool.broken = ("start",)
    pod.tick()
    clock.run(1)
    first = pod.tick()
    clock.run(5)
    assert (first.reason, pod.tick()) == (Reason.QEMU_DEAD, first)
    assert first.message == "qemu of mac is gone; next restart not before 2026-01-01T00:00:10Z"


def test_a_wall_clock_step_moves_no_restart(clock, tool, pod):
    tool.living.clear()
    tool.broken = ("start",)
    clock.spawn("probe", pod.probe_every_second)
    clock.at(2, clock.step_wall, 3600)
    clock.run(12)
    assert tool.times("start") == [1.0, 11.0]


def test_a_successful_probe_makes_the_next_death_the_first_again(clock, tool, pod, keeper):
    tool.living.clear()
    pod.tick()
    clock.run(2)
    keeper.succeeded("qemu-mac")
    tool.living.clear()
    pod.tick()
    clock.run(0)
    assert tool.times("start") == [0.0, 2.0]


def test_the_limit_counts_from_the_start_of_an_attempt_and_no_second_one_begins_meanwhile(clock, tool, pod):
    tool.living.clear()
    tool.start_seconds = 45.0
    tool.dies_after_start = True
    clock.spawn("probe", pod.probe_every_second)
    clock.run(46.5)
    assert tool.times("start") == [1.0, 46.0]
    assert {result.reason for result in pod.results[:45]} == {Reason.QEMU_RESTARTING}


def test_a_guest_that_runs_after_all_is_adopted_and_not_started(clock, tool, pod):
    """A start whose own inspect failed leaves a stale pid behind; the next round must find the live process."""
    pod.vm = replace(tool.record, pid=99)
    assert pod.tick().reason == Reason.QEMU_RESTARTING
    clock.run(0)
    assert tool.times("start") == []
    assert pod.refreshed == [(0.0, 100, False)]


@pytest.mark.parametrize("record_is", ["unreadable", "missing"])
def test_no_evidence_starts_nothing_and_runs_nothing(clock, tool, pod, record_is):
    tool.living.clear()
    if record_is == "missing":
        tool.record = None
    else:
        tool.broken = ("inspect",)
    pod.tick()
    clock.run(0)
    assert [call[1] for call in tool.calls] == ["inspect"]


def test_a_pod_that_is_going_or_failed_is_not_restarted(clock, tool, pod):
    tool.living.clear()
    pod.is_wanted = False
    result = pod.tick()
    clock.run(60)
    assert (result.reason, tool.calls) == (Reason.QEMU_DEAD, [])


def test_a_restart_that_waited_for_the_lock_asks_again_whether_it_is_wanted(clock, tool, pod, lock):
    tool.living.clear()
    lock.acquire()  # delete has it
    pod.tick()
    clock.run(3)
    pod.is_wanted = False
    lock.release()
    clock.run(0)
    assert tool.calls == []


def test_after_forget_a_waiting_restart_does_nothing_and_a_namesake_starts_afresh(clock, tool, pod, keeper, lock):
    tool.living.clear()
    lock.acquire()
    pod.tick()
    clock.run(1)
    keeper.forget("qemu-mac")
    lock.release()
    clock.run(0)
    assert tool.calls == []
    pod.tick()
    clock.run(0)
    assert tool.times("start") == [1.0]


def test_a_result_that_comes_after_forget_is_dropped(clock, tool, pod, keeper):
    tool.living.clear()
    tool.start_seconds = 5.0
    pod.tick()
    clock.run(1)
    keeper.forget("qemu-mac")
    clock.run(10)
    assert pod.refreshed == []


def test_a_record_without_a_mac_is_read_again_every_ten_seconds_until_it_has_one(clock, tool, pod):
    complete, tool.record = tool.record, replace(tool.record, nics=())
    pod.vm = tool.record
    clock.spawn("probe", pod.probe_every_second)
    clock.run(12)
    assert pod.results[0].reason == Reason.WAITING_FOR_LEASE
    assert tool.times("inspect") == [1.0, 11.0]
    tool.record = complete
    clock.run(10)
    assert (tool.times("inspect"), pod.vm.mac) == ([1.0, 11.0, 21.0], "0a:00:00:00:00:01")


@pytest.mark.parametrize(
    ("situation", "ran", "verbs", "done"),
    [
        ("alive", False, ["inspect"], "adopt"),
        ("alive", True, ["inspect"], "adopt"),
        ("dead", False, ["inspect", "start", "inspect"], "start"),
        ("dead", True, ["inspect"], "adopt"),
        ("missing", False, ["inspect", "ensure_image", "run"], "run"),
        ("missing", True, ["inspect", "ensure_image", "run"], "run"),
    ],
)
def test_bring_up_adopts_starts_or_runs_and_leaves_one_that_died_to_its_probe(
    keeper, tool, situation, ran, verbs, done
):
    if situation == "dead":
        tool.living.clear()
    if situation == "missing":
        tool.record = None
    _, how = keeper.bring_up(SPEC, ran=ran)
    assert ([call[1] for call in tool.calls], how) == (verbs, done)


def test_bring_up_never_runs_a_vm_because_an_inspect_failed(keeper, tool):
    tool.broken = ("inspect",)
    with pytest.raises(CommandError):
        keeper.bring_up(SPEC)
    assert [call[1] for call in tool.calls] == ["inspect"]


def test_displays_are_unique_stable_and_reusable():
    ports = VncPorts(enabled=True)
    assert [ports.claim("a"), ports.claim("b"), ports.claim("a")] == [0, 1, 0]
    ports.release("a")
    assert ports.claim("c") == 0
    assert ports.claim("d", preferred_port="5907") == 7
    assert ports.claim("e", preferred_port="5907") == 2


def test_a_wish_outside_the_range_or_unreadable_is_no_wish():
    ports = VncPorts(enabled=True)
    assert [ports.claim("a", "80"), ports.claim("b", "vnc"), ports.claim("c", "6000"), ports.claim("d", "٥٩٠٣")] == [
        0,
        1,
        2,
        3,
    ]


def test_a_live_guest_keeps_its_display_and_one_without_vnc_frees_it():
    ports = VncPorts(enabled=True)
    ports.adopt("a", 0)
    assert ports.claim("b") == 1
    ports.adopt("a", -1)
    assert ports.claim("c") == 0


def test_without_a_password_there_is_no_display():
    assert VncPorts(enabled=False).claim("a", "5903") == -1


def test_when_all_displays_are_taken_there_is_none():
    ports = VncPorts(enabled=True)
    assert [ports.claim(str(number)) for number in range(101)][-2:] == [99, -1]
