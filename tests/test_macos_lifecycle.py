"""macOS guests as pods: adopted, started or run; never two QEMUs on one disk, never a display that is somebody else's.

What a restart of a dead QEMU does by itself is in test_macos_restart.py (T5, M1 to M3).
"""

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import annotations, calls, events, message, reason

MAC = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
VM = "vk-default-mac-0"


@pytest.fixture
def world():
    with World(macos_vnc_password="secret") as world:
        yield world
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []


@pytest.fixture
def ready(world):
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.run(10)
    assert world.ready("mac-0")
    return world


def test_a_pod_that_is_created_twice_runs_one_guest(ready):
    ready.daemon.provider.create_pod(ready.daemon.provider.get_pod("default", "mac-0"))
    assert ready.host.macos.count("vm run") == 1
    assert len(ready.host.macos.qemus(VM)) == 1


def test_a_record_whose_guest_died_while_we_were_away_is_started_with_its_display(ready):
    port = annotations(ready, "mac-0")["vnc-port"]
    ready.stop()
    ready.guest("mac-0").crash()
    ready.start()
    ready.run(20)
    assert ready.ready("mac-0")
    assert (ready.host.macos.count("vm run"), ready.host.macos.count("vm start")) == (1, 1)
    assert annotations(ready, "mac-0")["vnc-port"] == port
    assert ready.host.macos.record(VM)["vnc"] == int(port) - 5900


def test_a_guest_whose_pid_was_lost_is_adopted_by_its_tool_and_not_doubled(ready):
    """M1: no pid is dead; the tool finds the process by its command line."""
    ready.host.macos.set_record(VM, pid=0)
    ready.stop()
    ready.start()
    ready.run(20)
    assert ready.ready("mac-0")
    assert len(ready.host.macos.qemus(VM)) == 1


@pytest.mark.parametrize("fault", ["fails", "hangs", "garbage"])
def test_a_record_in_doubt_is_never_run_and_never_removed(ready, fault):
    ready.stop()
    if fault == "fails":
        ready.host.macos.fail("vm inspect", stderr="permission denied", times=8)
    elif fault == "hangs":
        ready.host.macos.hang("vm inspect", times=2)
    else:
        ready.host.macos.garble("vm inspect", "{", times=8)
    ready.start()
    ready.run(300)
    assert ready.ready("mac-0")
    assert (ready.host.macos.count("vm run"), ready.host.macos.count("vm rm")) == (1, 0)
    assert len(ready.host.macos.qemus(VM)) == 1


def test_two_qemus_on_one_disk_are_left_to_a_person(ready):
    ready.host.plant_qemu(VM)
    ready.host.end_process(ready.host.macos.record(VM)["pid"])
    ready.host.plant_qemu(VM)
    ready.run(60)
    assert not ready.ready("mac-0")
    assert len(ready.host.macos.qemus(VM)) == 2
    assert ready.host.macos.count("vm rm") == 0


def test_a_create_that_failed_for_certain_gives_its_display_back(world):
    """A hundred displays for a hundred guests: those that cannot be made must not hold one."""
    world.host.macos.fail("image pull", stderr="manifest unknown", times=None)
    for number in range(100):
        world.create_pod(f"lost-{number}", os="macos", annotations={"cocoonset.cocoonstack.io/image": "nowhere"})
    world.run(3)
    world.host.macos.add_image("registry.lab/mac/tahoe:26")
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.run(20)
    assert 5900 <= int(annotations(world, "mac-0")["vnc-port"]) <= 5999


def test_a_create_that_failed_in_doubt_keeps_its_display(world):
    """The launch may have gone through: whoever listens on that port must stay the only one."""
    world.host.macos.fail("vm run", step="after", stderr="signal: killed")
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.create_pod("mac-1", os="macos", guest=MAC)
    world.run(30)
    ports = {annotations(world, f"mac-{number}")["vnc-port"] for number in range(2)}
    assert ports == {"5900", "5901"}
    assert world.ready("mac-0") and world.ready("mac-1")


def test_without_an_address_no_old_one_is_shown(ready):
    ready.stop()
    ready.leases.release(ready.guest("mac-0").mac)
    ready.start()
    ready.run(20)
    assert "ip" not in annotations(ready, "mac-0")
    assert reason(ready, "mac-0", "cocoonstack.io/ProbeReady") == "WaitingForLease"


def test_a_removal_that_says_no_such_file_is_a_failure_like_any_other(ready):
    """Those words may come from a teardown that left the guest in place."""
    ready.host.macos.fail("vm rm", stderr="teardown: no such file or directory", times=3)
    ready.delete_pod("mac-0", grace_seconds=1)
    ready.run(3)
    assert ready.pod("mac-0") is not None
    assert len(ready.host.macos.qemus(VM)) == 1
    ready.run(30)
    assert (ready.pod("mac-0"), ready.host.pids()) == (None, [])


def test_its_lease_goes_back_although_its_record_cannot_be_read_any_more(ready):
    mac = ready.guest("mac-0").mac
    ready.stop()
    ready.host.macos.fail("vm inspect", times=None)
    ready.delete_pod("mac-0", grace_seconds=30)
    ready.start()
    ready.run(10)
    assert ready.pod("mac-0") is None
    assert ready.leases.address(mac) == ""


def test_hibernate_is_refused_and_only_that_refusal_is_lifted(ready):
    ready.annotate("mac-0", hibernate="true")
    ready.run(3)
    assert message(ready, "mac-0").startswith("HibernateUnsupported")
    ready.annotate("mac-0", hibernate=None)
    ready.run(3)
    assert ready.ready("mac-0")
    assert calls(ready.host.cocoon) == []


def test_a_run_that_outlived_its_daemon_is_adopted_by_the_next_attempt_and_is_no_failure(world):
    """Its record appears between our look and our own run, which the tool then refuses."""
    world.create_pod("other", os="macos", guest=MAC)
    world.run(10)
    world.host.macos.slow("vm run", 3.0, step="before")
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.run(1)
    world.kill()
    world.host.macos.slow("vm run", 5.0, step="before")
    world.start()
    world.run(30)
    assert world.host.macos.count("vm run") == 3
    assert world.ready("mac-0")
    assert len(world.host.macos.qemus(VM)) == 1
    assert "CreateBringUpFailed" not in [word for word, _ in events(world, "mac-0")]
    assert {annotations(world, name)["vnc-port"] for name in ("mac-0", "other")} == {"5900", "5901"}


def delete_while_a_run_outlives_the_daemon(world):
    """The run has left no trace yet when the next daemon has taken the pod away."""
    world.host.macos.slow("vm run", 30.0, step="before")
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.run(1)
    world.kill()
    world.delete_pod("mac-0", grace_seconds=30)
    world.start()
    world.run(20)


def test_a_run_that_leaves_no_trace_before_its_pod_is_gone_makes_nothing_that_stays(world):
    delete_while_a_run_outlives_the_daemon(world)
    assert (world.pod("mac-0"), world.vm_names()) == (None, [])
    world.run(20)
    mac = world.host.macos.record(VM)["mac"]
    assert world.leases.address(mac) != ""
    world.run(60)
    assert (world.vm_names(), world.host.pids(), world.leases.address(mac)) == ([], [], "")


def test_a_run_that_ends_late_for_a_pod_that_is_wanted_again_is_that_pods(world):
    delete_while_a_run_outlives_the_daemon(world)
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.run(100)
    assert world.ready("mac-0")
    assert len(world.host.macos.qemus(VM)) == 1
    assert world.host.macos.count("vm rm") == 1
