"""The simulated cocoon-macos keeps to the contract of the real one: one disk, one QEMU, and nobody who watches.

The restart of a dead QEMU (last sentence of the macOS clause; T5, M1, M2) is only as safe as the tool underneath, so
this one refuses, adopts, locks and forgets exactly like the real one.
"""

import json

import pytest
from host_rig import PASSWORD, Rig

from simulator.fake_tools import Step
from vkcocoon_vms import CommandError


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.clock.close()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("vm run --name m --exit tahoe", "unknown flag: --exit"),
        ("vm start --exit-on-reboot m", "unknown flag: --exit-on-reboot"),
        ("vm run --name m --cpus 3 tahoe", "--cpus must be a positive even number"),
        ("vm run --name m --memory 8G tahoe", "--memory must be a positive whole number of MiB"),
        ("vm run --name m --net cni --vnc 3 tahoe", "VNC with --net cni needs --vnc-password"),
        ("vm run --name m --vnc 3 --vnc-password 123456789 tahoe", "at most 8 characters"),
        ("vm run --name m --tap t0 tahoe", "--tap needs --net tap"),
        ("vm run --name m nothing", "image not found: nothing"),
        ("vm run --name " + "x" * 64 + " tahoe", "invalid VM name"),
        ("vm start m", "read vm record: open /var/lib/cocoon-macos/vms/m/vm.json: no such file or directory"),
        ("vm inspect m", "read vm record: open /var/lib/cocoon-macos/vms/m/vm.json: no such file or directory"),
        ("vm stop m", "read vm record: open /var/lib/cocoon-macos/vms/m/vm.json: no such file or directory"),
        ("vm clone m", 'unknown command "clone" for "cocoon-macos vm"'),
        ("image inspect nothing", "image not found: nothing"),
    ],
)
def test_cocoon_macos_refuses_what_the_real_one_refuses_in_its_words(rig, command, says):
    rig.macos.add_image("tahoe")
    done = rig.macos.execute(["cocoon-macos", *command.split()], 30)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr and not done.stderr.startswith("Error:")
    assert rig.macos.record("m") is None


# --- macOS ---------------------------------------------------------------------------------------------------------


def test_a_macos_vm_runs_in_a_qemu_that_can_be_recognized(rig):
    vm = rig.run_mac(vnc=3)
    assert (vm.id, vm.state, vm.vnc, vm.is_macos) == ("qemu-mac-0", "running", 3, True)
    argv = rig.host.processes(vm.pid).argv
    assert argv[0] == "qemu-system-x86_64" and "-no-reboot" in argv
    assert "/var/lib/cocoon-macos/vms/mac-0/qemu.pid" in argv
    assert any(vm.mac in argument for argument in argv)
    assert PASSWORD not in str(argv)


def test_a_second_run_is_refused_and_touches_nothing(rig):
    vm = rig.run_mac()
    with pytest.raises(CommandError, match="already exists; rm it first"):
        rig.run_mac()
    assert rig.mac_cli.inspect("mac-0") == vm
    assert rig.macos.qemus("mac-0") == [vm.pid]


def test_a_guest_that_reboots_ends_its_qemu_and_the_record_forgets_nothing(rig):
    vm = rig.run_mac(vnc=3)
    rig.clock.run(60)
    rig.host.guest("mac-0").reboot()
    rig.clock.run(600)
    after = rig.mac_cli.inspect("mac-0")
    assert (after.state, after.pid, after.vnc) == ("stopped", vm.pid, 3)
    rig.mac_cli.start("mac-0", 3)
    again = rig.mac_cli.inspect("mac-0")
    assert (again.state, again.mac, again.vnc) == ("running", vm.mac, 3)
    assert again.pid != vm.pid


def test_a_start_without_a_display_turns_vnc_off(rig):
    rig.run_mac(vnc=3)
    rig.host.guest("mac-0").crash()
    rig.mac_cli.start("mac-0")
    assert rig.mac_cli.inspect("mac-0").vnc == -1
    assert "-vnc" not in rig.host.processes(rig.mac_cli.inspect("mac-0").pid).argv


def test_starting_what_runs_prints_so_and_starts_nothing(rig):
    vm = rig.run_mac()
    done = rig.macos.execute(["cocoon-macos", "vm", "start", "mac-0"], 30)
    assert done.stdout == f"mac-0 (pid {vm.pid}, already running)\n"
    assert rig.macos.qemus("mac-0") == [vm.pid]


@pytest.mark.parametrize("lost", ["zero", "stale", "stranger", "zombie"])
def test_a_live_qemu_whose_pid_was_lost_is_adopted(rig, lost):
    vm = rig.run_mac()
    second = rig.host.plant_qemu("mac-0")
    match lost:
        case "zero":
            rig.host.end_process(vm.pid)
            rig.macos.set_record("mac-0", pid=0)
        case "stale":
            rig.host.guest("mac-0").crash()
        case "stranger":
            rig.host.reuse_pid(vm.pid)
        case "zombie":
            rig.host.zombie(vm.pid)
    assert not rig.mac_cli.alive(rig.mac_cli.inspect("mac-0"))
    rig.mac_cli.start("mac-0")
    assert rig.mac_cli.inspect("mac-0").pid == second
    assert rig.macos.qemus("mac-0") == [second]
    assert lost != "stranger" or rig.host.processes(vm.pid).argv == ("sleep", "1000")


def test_two_qemus_on_one_disk_are_refused_and_none_is_killed(rig):
    rig.run_mac()
    rig.host.guest("mac-0").crash()
    planted = [rig.host.plant_qemu("mac-0") for _ in range(2)]
    with pytest.raises(CommandError, match="multiple qemu processes use disk"):
        rig.mac_cli.start("mac-0")
    assert rig.macos.qemus("mac-0") == planted


def test_a_qemu_without_a_record_refuses_a_run(rig):
    vm = rig.run_mac()
    rig.host.storage.delete("cocoon-macos/vms/mac-0")
    with pytest.raises(CommandError, match="a live QEMU uses it"):
        rig.run_mac()
    rig.mac_cli.remove("mac-0")
    assert rig.host.processes(vm.pid) is None


def test_a_killed_launch_leaves_a_live_qemu_with_no_pid_in_its_record_and_start_adopts_it(rig):
    rig.macos.kill("vm run", step=Step.LATE)
    with pytest.raises(CommandError) as caught:
        rig.run_mac()
    assert caught.value.returncode == -9
    [pid] = rig.macos.qemus("mac-0")
    assert rig.mac_cli.inspect("mac-0").pid == 0
    rig.mac_cli.start("mac-0")
    assert (rig.mac_cli.inspect("mac-0").pid, rig.macos.qemus("mac-0")) == (pid, [pid])


def test_a_first_boot_that_fails_leaves_nothing(rig):
    rig.macos.fail("vm run", stderr="ERR no kvm", step=Step.LATE)
    with pytest.raises(CommandError, match="no kvm"):
        rig.run_mac()
    assert (rig.macos.record("mac-0"), rig.host.pids()) == (None, [])


def test_a_start_that_fails_keeps_the_record(rig):
    vm = rig.run_mac()
    rig.host.guest("mac-0").crash()
    rig.macos.fail("vm start", stderr="ERR no memory", step=Step.LATE)
    with pytest.raises(CommandError):
        rig.mac_cli.start("mac-0")
    assert (rig.mac_cli.inspect("mac-0").mac, rig.host.pids()) == (vm.mac, [])


def test_two_starts_at_once_make_one_qemu(rig):
    rig.run_mac()
    rig.host.guest("mac-0").crash()
    rig.macos.slow("vm start", 30, times=2)
    first, second = (rig.background(rig.mac_cli.start, "mac-0") for _ in range(2))
    rig.clock.run(100)
    assert (first, second) == ([None, 30.0], [None, 30.0])
    assert len(rig.macos.qemus("mac-0")) == 1


def test_a_removal_waits_for_a_start_in_flight_and_leaves_no_qemu(rig):
    rig.run_mac()
    rig.host.guest("mac-0").crash()
    hold = rig.macos.hold("vm start", step=Step.LATE)
    start = rig.background(rig.mac_cli.start, "mac-0")
    rig.clock.run(0)
    assert hold.reached.is_set() and len(rig.macos.qemus("mac-0")) == 1
    removal = rig.background(rig.mac_cli.remove, "mac-0")
    rig.clock.run(20)
    assert (start, removal) == ([], [])
    hold.release()
    rig.clock.run(0)
    assert (start, removal) == ([None, 20.0], [None, 20.0])
    assert (rig.macos.record("mac-0"), rig.host.pids()) == (None, [])


def test_a_removal_that_fails_in_the_network_keeps_the_record_without_its_qemu(rig):
    rig.run_mac()
    rig.macos.fail("vm rm", stderr="teardown: open /var/run/netns/cm-x: no such file or directory", step=Step.LATE)
    with pytest.raises(CommandError):
        rig.mac_cli.remove("mac-0")
    assert rig.macos.record("mac-0") and not rig.macos.qemus("mac-0")
    rig.mac_cli.remove("mac-0")
    rig.mac_cli.remove("mac-0")
    assert rig.macos.record("mac-0") is None


def test_a_display_in_use_fails_the_launch(rig):
    rig.run_mac("mac-0", vnc=3)
    with pytest.raises(CommandError, match="bind vnc port"):
        rig.run_mac("mac-1", vnc=3)
    rig.macos.busy_displays = (4,)
    with pytest.raises(CommandError, match=r"0\.0\.0\.0:5904"):
        rig.run_mac("mac-1", vnc=4)
    assert rig.run_mac("mac-1", vnc=5).running


def test_records_may_lack_a_mac_or_a_state(rig):
    rig.run_mac()
    rig.macos.hides_mac = ("mac-0",)
    rig.macos.shows_state = False
    shown = json.loads(rig.macos.execute(["cocoon-macos", "vm", "inspect", "mac-0"], 30).stdout)
    assert "mac" not in shown and "state" not in shown
    vm = rig.mac_cli.inspect("mac-0")
    assert (vm.mac, bool(vm.nics[0].tap), vm.state) == ("", True, "running")


def test_missing_firmware_fails_before_anything_is_made(rig):
    rig.macos.firmware_missing = True
    with pytest.raises(CommandError, match="firmware not found"):
        rig.run_mac()
    assert rig.macos.record("mac-0") is None


def test_stopping_clears_pid_and_display_and_keeps_the_identity(rig):
    vm = rig.run_mac(vnc=3)
    assert rig.macos.execute(["cocoon-macos", "vm", "stop", "mac-0"], 30).returncode == 0
    after = rig.mac_cli.inspect("mac-0")
    assert (after.pid, after.vnc, after.mac, rig.host.pids()) == (0, -1, vm.mac, [])
