"""The fake command lines as programs: processes that run, state on disk, locks that the kernel takes from the dead.

What the playground and the end-to-end tests stand on: the real adapters run the real scripts, calls run at once, any of
them may be killed at any moment, and a guest outlives the call that started it (M2).
"""

import os
import random
import signal
import subprocess

import gevent
import pytest
from gevent.pool import Group

from simulator.fake_executables import HOME_VARIABLE, LiveHost
from simulator.fake_tools import Step
from simulator.fake_vms import install_executables
from vkcocoon_commands import CommandRunner
from vkcocoon_probes import SystemClock, spawn
from vkcocoon_vms import (
    CloneSpec,
    CocoonCLI,
    CocoonMacosCLI,
    CommandError,
    MacosSpec,
    RunSpec,
    VMNotFound,
    read_process,
)

pytestmark = pytest.mark.process

SOON = 20.0  # seconds that a few starts of Python may take on a busy machine


class Station:
    """A home directory, the two programs, the adapters on them, and the knobs from outside."""

    def __init__(self, directory):
        self.clock = SystemClock()
        self.home, self.bin = directory / "home", directory / "bin"
        self.home.mkdir()
        self.bin.mkdir()
        install_executables(self.bin)
        self.host = LiveHost(self.home)
        self.cocoon, self.macos = self.host.cocoon, self.host.macos
        self.cli = CocoonCLI(str(self.bin / "cocoon"))
        self.mac_cli = CocoonMacosCLI(str(self.bin / "cocoon-macos"), vnc_password="pa55word")
        self.greenlets = Group()
        self.processes = []

    def popen(self, program, *arguments):
        process = subprocess.Popen([self.bin / program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process

    def clone(self, name="web-0"):
        return self.cli.clone(CloneSpec(name=name, snapshot="devbox-base:7"))

    def run_mac(self, name="mac-0"):
        self.macos.add_image("tahoe")
        return self.mac_cli.run(MacosSpec(name=name, image="tahoe", vnc=3))

    def plant_qemu(self, name):
        """A second QEMU on the disk of that VM, started behind everybody's back."""
        script = 'exec -a "$0" sh -c "read line" "$@"'
        argv = self.macos.command_line(name)
        process = subprocess.Popen(["bash", "-c", script, *argv], stdin=subprocess.PIPE)
        self.processes.append(process)
        self.until(lambda: process.pid in self.macos.qemus(name))
        return process.pid

    def until(self, holds):
        end = self.clock.monotonic() + SOON
        while not holds():
            assert self.clock.monotonic() < end, "never came true"
            self.clock.sleep(0.02)

    def close(self):
        self.greenlets.kill()
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.host.pids():
            self.host.power_off(pid)  # touches nothing but guests of this home


@pytest.fixture
def station(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    station = Station(tmp_path)
    yield station
    station.close()


def is_running(pid):
    found = read_process(pid)
    return found is not None and found.state != "Z"


# --- programs ------------------------------------------------------------------------------------------------------


def test_a_vm_lives_in_a_process_that_outlives_the_call_and_ends_with_the_vm(station):
    assert station.cli.list() == []
    station.cli.image_pull("img")
    vm = station.cli.run(RunSpec(name="web-0", image="img", cpu=2, network="cocoon-dhcp"))
    assert vm.running and vm.mac
    process = read_process(vm.pid)
    assert process.argv[0] == "cloud-hypervisor"
    assert f"{station.home}/run/cloudhypervisor/{vm.id}/api.sock" in process.argv
    assert (station.home / f"run/cloudhypervisor/{vm.id}/ch.pid").read_text() == f"{vm.pid}\n"
    assert os.getsid(vm.pid) == vm.pid, "a session of its own"
    assert station.cli.inspect("web-0") == vm == station.cli.list()[0]
    station.cli.remove(vm.id)
    assert not is_running(vm.pid)
    with pytest.raises(VMNotFound):
        station.cli.inspect("web-0")
    assert not (station.home / f"run/cloudhypervisor/{vm.id}").exists()


def test_they_are_as_strict_as_programs_too(station):
    for arguments in (["vm", "list", "--json"], ["vm", "inspect"], ["vm", "run", "nothing"]):
        done = CommandRunner()([str(station.bin / "cocoon"), *arguments], SOON)
        assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("Error: ")


def test_without_a_home_they_do_nothing(station, monkeypatch):
    monkeypatch.delenv(HOME_VARIABLE)
    done = CommandRunner()([str(station.bin / "cocoon"), "vm", "list"], SOON)
    assert done.returncode == 2 and "usage: FAKE_COCOON_HOME=DIRECTORY" in done.stderr


def test_a_dead_vmm_shows_as_stale_and_starts_again_with_its_mac(station):
    vm = station.cli.inspect(station.clone().id)
    os.kill(vm.pid, signal.SIGKILL)
    station.until(lambda: not is_running(vm.pid))
    assert station.cli.inspect(vm.id).state == "stopped (stale)"
    station.cli.start(vm.id)
    again = station.cli.inspect(vm.id)
    assert again.running and again.mac == vm.mac and again.pid != vm.pid


def test_hibernate_and_wake_on_disk(station):
    vm = station.clone()
    station.cli.snapshot_save("vk-web-0", vm.id)
    station.cli.remove(vm.id)
    woken = station.cli.clone(CloneSpec(name="web-0", snapshot="vk-web-0"))
    assert woken.running and woken.mac != vm.mac
    station.cli.snapshot_remove("vk-web-0")


def test_a_stranger_at_the_recorded_pid_is_never_ended(station):
    vm = station.clone()
    stranger = subprocess.Popen(["sleep", "1000"])
    station.processes.append(stranger)
    station.cocoon.set_record(vm.id, pid=stranger.pid)
    station.cli.remove(vm.id)
    assert is_running(stranger.pid)


# --- many at once --------------------------------------------------------------------------------------------------


def test_calls_at_once_lose_nothing_of_each_other(station):
    names = [f"web-{number}" for number in range(8)]
    calls = [spawn(station.greenlets, name, station.clone, name) for name in names]
    gevent.joinall(calls, raise_error=True)
    vms = station.cli.list()
    assert sorted(vm.name for vm in vms) == names
    assert len({vm.id for vm in vms}) == len({vm.mac for vm in vms}) == len({vm.pid for vm in vms}) == 8


def test_of_calls_at_once_for_one_name_exactly_one_wins(station):
    def try_clone():
        try:
            return station.clone().id
        except CommandError as error:
            return error.stderr

    calls = [spawn(station.greenlets, "clone", try_clone) for _ in range(5)]
    gevent.joinall(calls)
    [vm] = station.cli.list()
    outcomes = [call.value for call in calls]
    assert outcomes.count(vm.id) == 1
    assert sum("already exists" in outcome for outcome in outcomes) == 4


def test_two_starts_at_once_make_one_qemu(station):
    vm = station.run_mac()
    os.kill(vm.pid, signal.SIGKILL)
    station.until(lambda: not station.mac_cli.alive(vm))
    station.macos.slow("vm start", 0.5, times=2)
    calls = [spawn(station.greenlets, "start", station.mac_cli.start, "mac-0") for _ in range(2)]
    gevent.joinall(calls, raise_error=True)
    assert len(station.macos.qemus("mac-0")) == 1


# --- killed at any moment ------------------------------------------------------------------------------------------


def test_a_clone_killed_in_the_middle_leaves_a_placeholder_without_a_lock(station):
    station.cocoon.slow("vm clone", 1000)
    clone = station.popen("cocoon", "vm", "clone", "--name", "web-0", "devbox-base:7")
    station.until(station.cli.list)
    [skeleton] = station.cli.list()
    assert (skeleton.name, skeleton.state) == ("web-0", "creating")
    assert station.cli.reconcile_stale_create(skeleton.id) == "busy"
    clone.kill()
    clone.wait()
    assert station.cli.list() == [skeleton]
    with pytest.raises(CommandError, match="already exists"):
        station.clone()
    assert station.cli.reconcile_stale_create(skeleton.id) == "collected"
    assert station.cli.inspect(station.clone().id).running


def test_a_clone_asked_to_end_cleans_up_and_fails(station):
    station.cocoon.slow("vm clone", 1000)
    clone = station.popen("cocoon", "vm", "clone", "--name", "web-0", "devbox-base:7")
    station.until(station.cli.list)
    clone.terminate()
    _, stderr = clone.communicate(timeout=SOON)
    assert (clone.returncode, stderr) == (1, b"Error: context canceled\n")
    assert station.cli.list() == []


def test_whenever_calls_are_killed_the_store_stays_whole(station):
    rng = random.Random(20)
    for number in range(20):
        verb = rng.choice(
            [["vm", "clone", "--name", f"web-{number}", "devbox-base:7"], ["vm", "rm", "--force", f"web-{number - 1}"]]
        )
        call = station.popen("cocoon", *verb)
        station.clock.sleep(rng.uniform(0.03, 0.12))
        call.kill()
        call.wait()
    for vm in station.cli.list():  # readable, and every record can be dealt with
        assert vm.state in ("creating", "running", "stopped (stale)")
        if vm.state == "creating":
            assert station.cli.reconcile_stale_create(vm.id) == "collected"
        else:
            station.cli.remove(vm.id)
    assert station.cli.list() == []
    assert station.cli.inspect(station.clone("last").id).running


# --- macOS ---------------------------------------------------------------------------------------------------------


def test_a_qemu_is_recognized_dies_and_is_started_again_in_place(station):
    vm = station.run_mac()
    assert vm.running and station.mac_cli.alive(vm)
    assert read_process(vm.pid).argv[0] == "qemu-system-x86_64"
    assert (station.home / "cocoon-macos/vms/mac-0/qemu.pid").read_text() == f"{vm.pid}\n"
    os.kill(vm.pid, signal.SIGTERM)
    station.until(lambda: not station.mac_cli.alive(vm))
    assert station.mac_cli.inspect("mac-0").state == "stopped"
    station.mac_cli.start("mac-0", 3)
    again = station.mac_cli.inspect("mac-0")
    assert again.running and again.mac == vm.mac and again.vnc == 3
    station.mac_cli.remove("mac-0")
    assert not is_running(again.pid)
    assert not (station.home / "cocoon-macos/vms/mac-0").exists()
    with pytest.raises(VMNotFound):
        station.mac_cli.inspect("mac-0")


def test_a_live_qemu_whose_pid_was_lost_is_adopted(station):
    vm = station.run_mac()
    station.macos.set_record("mac-0", pid=0)
    assert not station.mac_cli.inspect("mac-0").running
    station.mac_cli.start("mac-0")
    assert station.mac_cli.inspect("mac-0").pid == vm.pid
    assert station.macos.qemus("mac-0") == [vm.pid]


def test_a_launch_killed_between_qemu_and_record_is_adopted_by_the_next_start(station):
    station.macos.kill("vm run", step=Step.LATE)
    with pytest.raises(CommandError) as caught:
        station.run_mac()
    assert caught.value.returncode == -9
    [pid] = station.macos.qemus("mac-0")
    assert station.mac_cli.inspect("mac-0").pid == 0
    station.mac_cli.start("mac-0")
    assert station.mac_cli.inspect("mac-0").pid == pid


def test_two_qemus_on_one_disk_are_refused_and_none_is_ended(station):
    vm = station.run_mac()
    first = station.plant_qemu("mac-0")
    os.kill(vm.pid, signal.SIGKILL)
    station.until(lambda: not is_running(vm.pid))
    second = station.plant_qemu("mac-0")
    with pytest.raises(CommandError, match="multiple qemu processes use disk"):
        station.mac_cli.start("mac-0")
    assert sorted(station.macos.qemus("mac-0")) == sorted([first, second])


def test_a_launch_asked_to_end_leaves_neither_record_nor_qemu(station):
    station.macos.add_image("tahoe")
    station.macos.slow("vm run", 1000, step=Step.LATE)
    launch = station.popen("cocoon-macos", "vm", "run", "--name", "mac-0", "--net", "cni", "tahoe")
    station.until(lambda: station.macos.qemus("mac-0"))
    launch.terminate()
    assert launch.wait(SOON) == 1
    assert station.macos.qemus("mac-0") == []
    assert station.macos.record("mac-0") is None


# --- faults and events ---------------------------------------------------------------------------------------------


def test_faults_set_from_outside_reach_the_programs(station):
    station.clone()
    station.cocoon.fail("vm inspect", stderr="Error: inspect: database is locked", times=2)
    for _ in range(2):
        with pytest.raises(CommandError, match="database is locked"):
            station.cli.inspect("web-0")
    station.cocoon.garble("vm inspect", '{"id": "MZ5X')
    with pytest.raises(CommandError, match="unreadable"):
        station.cli.inspect("web-0")
    assert station.cli.inspect("web-0").running
    station.cocoon.hang("vm list")
    with pytest.raises(CommandError, match="still running"):
        CommandRunner()([str(station.bin / "cocoon"), "vm", "list"], 1.0)
    assert station.cocoon.count("vm inspect", "web-0") == 5


def test_the_event_stream_tells_what_comes_what_crashes_and_what_goes(station):
    station.cocoon.event_interval_s = 0.3
    first = station.cli.inspect(station.clone("a").id)
    seen = []

    def listen():
        for event in station.cli.events():
            seen.append((event.kind, event.vm.name, event.vm.state))

    listener = spawn(station.greenlets, "listen", listen)
    station.until(lambda: seen == [("ADDED", "a", "running")])
    station.clone("b")
    station.until(lambda: ("ADDED", "b", "running") in seen or ("MODIFIED", "b", "running") in seen)
    os.kill(first.pid, signal.SIGKILL)
    station.until(lambda: ("MODIFIED", "a", "stopped (stale)") in seen)
    station.cli.remove("a")
    station.until(lambda: [each[:2] for each in seen].count(("DELETED", "a")) == 1)
    listener.kill()


def test_a_stream_asked_to_end_ends_well(station):
    stream = station.popen("cocoon", "vm", "status", "--event", "--format", "json")
    station.until(lambda: station.cocoon.count("vm status"))
    stream.terminate()
    stdout, stderr = stream.communicate(timeout=SOON)
    assert (stream.returncode, stdout, stderr) == (0, b"", b"")


def test_a_stream_whose_reader_is_gone_ends(station):
    station.cocoon.event_interval_s = 0.1
    stream = station.popen("cocoon", "vm", "status", "--event", "--format", "json")
    station.until(lambda: station.cocoon.count("vm status"))
    stream.stdout.close()
    station.clone()
    assert stream.wait(SOON) == 1
