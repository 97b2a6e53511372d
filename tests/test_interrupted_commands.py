"""Commands that die, hang or fail at any step, and a daemon that is restarted beside them: nothing is lost or doubled.

A killed command leaves what it had made: a placeholder that holds the name, a VM nobody heard of, a snapshot without
its VM being gone. A pod must get through all of it by itself, with one VM, and never with a fresh VM in place of one
that was saved.
"""

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations, events, status

STEPS = ("before", "middle", "after")
MAC = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)


def records(world):
    return [(vm["config"]["name"], vm["state"]) for vm in (world.host.storage.read("cocoon/vms.json") or {}).values()]


def clones(world, of):
    """How many clones of that snapshot were tried."""
    return sum(call["verb"] == "vm clone" and call["argv"][-1] == of for call in world.host.cocoon.calls)


def spoil(tool, how, verb, step):
    if how == "killed":
        tool.kill(verb, step=step, times=2)
    elif how == "refused":
        tool.fail(verb, step=step, times=2)
    else:
        tool.hang(verb, step=step)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["killed", "refused", "hanging"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("mode", ["clone", "run"])
def test_a_creation_that_is_interrupted_ends_with_one_ready_vm(world, mode, step, how, restart):
    spoil(world.host.cocoon, how, f"vm {mode}", step)
    image = {"cocoonset.cocoonstack.io/mode": mode, "cocoonset.cocoonstack.io/image": "devbox-base:7"}
    world.create_pod("web-0", guest=FAST, annotations=image)
    world.run(0.5)
    if restart:
        world.stop()
        world.start()
    world.run(900)
    assert world.ready("web-0")
    assert records(world) == [("vk-default-web-0", "running")]
    assert len(world.host.pids()) == 1
    world.delete_pod("web-0")
    world.run(30)
    assert (world.pod("web-0"), records(world), world.host.pids()) == (None, [], [])


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["killed", "refused"])
@pytest.mark.parametrize("step", STEPS)
def test_a_macos_creation_that_is_interrupted_ends_with_one_ready_guest(world, step, how, restart):
    spoil(world.host.macos, how, "vm run", step)
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.run(0.5)
    if restart:
        world.stop()
        world.start()
    world.run(900)
    assert world.ready("mac-0")
    assert len(world.host.pids()) == 1
    world.delete_pod("mac-0")
    world.run(30)
    assert (world.pod("mac-0"), world.host.pids()) == (None, [])


def test_a_half_made_vm_that_an_old_tool_cannot_clear_is_left_alone_and_said(world):
    world.host.cocoon.old = True
    world.host.cocoon.kill("vm clone", step="middle")
    world.create_pod("web-0", guest=FAST)
    world.run(600)
    assert records(world) == [("vk-default-web-0", "creating")]
    assert "already exists" in annotations(world, "web-0")["lifecycle-state-message"]


def test_a_vm_that_somebody_is_still_making_is_waited_for(world):
    """The creation outlived an earlier daemon: it holds its lock, so it is no leftover."""
    hold = world.host.cocoon.hold("vm clone", step="middle")
    world.create_pod("web-0", guest=FAST)
    world.run(1)
    assert hold.reached.is_set()
    world.stop()
    world.start()
    world.run(30)
    assert records(world) == [("vk-default-web-0", "creating")]
    hold.release()
    world.run(60)
    assert world.ready("web-0")
    assert records(world) == [("vk-default-web-0", "running")]
    assert len(world.host.pids()) == 1


@pytest.fixture
def ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    assert world.ready("web-0")
    return world


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["killed", "refused"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("verb", ["snapshot save", "vm rm"])
def test_a_hibernate_that_is_interrupted_is_finished_and_wakes_as_what_was_saved(ready, verb, step, how, restart):
    spoil(ready.host.cocoon, how, verb, step)
    ready.annotate("web-0", hibernate="true")
    if restart:
        ready.run(0.5)
        ready.stop()
        ready.start()
    ready.run(900)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    assert status(ready, "web-0")["phase"] == "Pending"
    assert (records(ready), ready.host.pids()) == ([], [])
    ready.annotate("web-0", hibernate=None)
    ready.run(60)
    assert ready.ready("web-0")
    assert (clones(ready, "devbox-base:7"), clones(ready, "vk-default-web-0")) == (1, 1)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["killed", "refused"])
@pytest.mark.parametrize("step", STEPS)
def test_a_wake_that_is_interrupted_brings_back_what_was_saved(ready, step, how, restart):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    spoil(ready.host.cocoon, how, "vm clone", step)
    ready.annotate("web-0", hibernate=None)
    if restart:
        ready.run(0.5)
        ready.stop()
        ready.start()
    ready.run(900)
    assert ready.ready("web-0")
    assert records(ready) == [("vk-default-web-0", "running")]
    assert clones(ready, "devbox-base:7") == 1


@pytest.mark.parametrize("patient", [False, True], ids=["the command dies too", "the command goes on"])
def test_a_wake_that_a_restart_of_the_daemon_interrupts_brings_back_what_was_saved(ready, patient):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    hold = ready.host.cocoon.hold("vm clone", step="before" if patient else "middle")
    if not patient:
        ready.host.cocoon.kill("vm clone", step="middle")
    ready.annotate("web-0", hibernate=None)
    ready.run(1)
    assert hold.reached.is_set()
    ready.stop()
    ready.start()
    ready.run(5)
    hold.release()
    ready.run(600)
    assert ready.ready("web-0")
    assert records(ready) == [("vk-default-web-0", "running")]
    assert clones(ready, "devbox-base:7") == 1


def test_a_vm_that_was_never_saved_is_not_called_hibernated_when_it_is_lost(ready):
    """There is a snapshot of its name, but it is of an earlier time, and the loss must be seen."""
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    ready.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "vk-default-web-0"], 30.0)
    since = ready.clock.elapsed()
    ready.annotate("web-0", hibernate="true")
    ready.run(60)
    told = [entry for entry in ready.timeline.of(actor="kube", key="default/web-0") if entry.seconds >= since]
    assert "hibernated" not in [dict(entry.fields)["lifecycle"] for entry in told if entry.kind == "lifecycle"]
    assert "VMGone" in [event[0] for event in events(ready, "web-0")]
    assert ready.pod("web-0") is None


@pytest.mark.parametrize("how", ["killed", "refused"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_removal_that_is_interrupted_is_finished(world, os, step, how):
    world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
    world.run(10)
    spoil(world.host.macos if os == "macos" else world.host.cocoon, how, "vm rm", step)
    world.delete_pod("web-0")
    world.run(60)
    assert (world.pod("web-0"), records(world), world.host.pids()) == (None, [], [])


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["killed", "refused"])
@pytest.mark.parametrize("step", STEPS)
def test_a_wake_that_failed_and_is_no_longer_wanted_is_hibernated_again(ready, step, how, restart):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    spoil(ready.host.cocoon, how, "vm clone", step)
    ready.annotate("web-0", hibernate=None)
    ready.run(0.5)
    assert annotations(ready, "web-0")["lifecycle-state"] == "failed"
    if restart:
        ready.stop()
        ready.start()
    ready.annotate("web-0", hibernate="true")
    ready.run(30)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    assert (records(ready), ready.host.pids()) == ([], [])
    ready.annotate("web-0", hibernate=None)
    ready.run(30)
    assert ready.ready("web-0")
    assert clones(ready, "devbox-base:7") == 1


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_hibernate_that_failed_and_is_no_longer_wanted_leaves_the_pod_ready(ready, step, restart):
    """Whether its VM is gone already or not: then it comes back from what was saved."""
    ready.host.cocoon.kill("vm rm", step=step)
    ready.annotate("web-0", hibernate="true")
    ready.run(0.5)
    assert annotations(ready, "web-0")["lifecycle-state"] == "failed"
    ready.annotate("web-0", hibernate=None)
    if restart:
        ready.stop()
        ready.start()
    ready.run(60)
    assert ready.ready("web-0")
    assert records(ready) == [("vk-default-web-0", "running")]
    assert clones(ready, "devbox-base:7") == 1


def test_whoever_waits_for_a_command_ends_with_it(caplog):
    """As at the end of a process: not with an error of its own."""
    with World() as world:
        world.create_pod("mac-0", os="macos", guest=MAC)
        world.run(10)
        hold = world.host.macos.hold("vm start")
        world.guest("mac-0").crash()
        world.run(6)
        assert hold.reached.is_set()
    assert "greenlet died" not in caplog.text


def test_a_vm_that_was_saved_and_half_removed_is_started_again_when_it_is_to_stay(ready):
    """Its process is gone and its record is not; nobody but the one who saved it may tell that it is not to go."""
    ready.host.cocoon.fail("vm rm", step="middle")
    ready.annotate("web-0", hibernate="true")
    ready.run(0.2)
    assert annotations(ready, "web-0")["lifecycle-state"] == "failed"
    for pid in ready.host.pids():
        ready.host.end_process(pid)
    ready.annotate("web-0", hibernate=None)
    ready.run(60)
    assert ready.ready("web-0")
    assert records(ready) == [("vk-default-web-0", "running")]
