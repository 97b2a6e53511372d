"""Clause 4, DeletePod: the probe is forgotten, the VM goes before its lease and before the pod object (K7)."""

import pytest

from simulator.fake_vms import GuestSpec
from tests.provider_rig import FAST, annotations, calls, reason, status, writes
from vkcocoon_kube import ApiError


def test_a_pod_is_not_ready_from_the_moment_its_deletion_begins_and_gone_when_its_vm_is(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.slow("vm rm", 20.0, step="before")
    world.delete_pod("web-0", grace_seconds=30)
    world.run(1)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "Terminating")
    probes = len(world.probes("web-0"))
    world.run(18)
    assert status(world, "web-0")["phase"] == "Running"
    world.run(2)
    assert world.pod("web-0") is None
    assert world.host.pids() == []
    assert len(world.probes("web-0")) == probes


def test_between_terminating_and_the_terminal_status_nothing_is_said(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.slow("vm rm", 20.0, step="before")
    since = len(writes(world, "web-0"))
    world.delete_pod("web-0", grace_seconds=30)
    world.run(1)
    world.guest("web-0").silent()
    world.run(25)
    told = [body["status"] for _, path, body in writes(world, "web-0")[since:] if path == "/status"]
    assert [status["phase"] for status in told] == ["Running", "Succeeded"]


def test_the_lease_is_released_after_the_vm_is_gone_and_the_object_after_both(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    mac = world.guest("web-0").mac
    seen = {}
    removed = world.host.end_process

    def watch(pid):
        seen["lease when the VM went"] = bool(world.leases.address(mac))
        removed(pid)

    world.host.end_process = watch
    world.delete_pod("web-0")
    world.run(5)
    assert world.leases.address(mac) == ""
    assert world.pod("web-0") is None
    assert seen in ({"lease when the VM went": True}, {})


@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_vm_that_cannot_be_removed_keeps_its_pod_and_its_lease_until_it_can(world, os):
    world.create_pod("web-0", os=os, guest=GuestSpec(os=os, boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(10)
    mac = world.guest("web-0").mac
    tool = world.host.macos if os == "macos" else world.host.cocoon
    tool.fail("vm rm", times=4, stderr="Error: device or resource busy")
    world.delete_pod("web-0")
    world.run(5)
    assert world.pod("web-0") is not None
    assert len(world.host.pids()) == 1
    assert world.leases.address(mac) != ""
    world.run(60)
    assert world.pod("web-0") is None
    assert world.host.pids() == []
    assert world.leases.address(mac) == ""


def test_a_lease_that_cannot_be_released_delays_nothing(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.leases.failing_releases = 10
    world.delete_pod("web-0")
    world.run(2)
    assert world.pod("web-0") is None
    assert world.host.pids() == []


def test_a_vm_that_is_already_gone_is_what_we_wanted(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "vk-default-web-0"], 30.0)
    world.delete_pod("web-0")
    world.run(2)
    assert world.pod("web-0") is None


def test_a_pod_that_is_deleted_while_it_is_created_leaves_nothing(world):
    world.host.cocoon.slow("vm clone", 10.0)
    world.create_pod("web-0", guest=FAST)
    world.run(2)
    world.delete_pod("web-0")
    world.run(30)
    assert world.pod("web-0") is None
    assert world.host.pids() == []
    assert world.probes("web-0") == []


def test_a_pod_that_never_got_a_vm_is_deleted_at_once(world):
    world.host.cocoon.fail("vm clone", times=None)
    world.create_pod("web-0")
    world.run(10)
    world.delete_pod("web-0")
    world.run(2)
    assert world.pod("web-0") is None


def test_a_pod_with_a_name_no_tool_would_take_can_still_be_deleted(world):
    world.create_pod("web-0", annotations={"vm.cocoonstack.io/name": "x" * 64})
    world.run(5)
    world.delete_pod("web-0")
    world.run(2)
    assert world.pod("web-0") is None


def test_a_forced_deletion_is_noticed_and_cleaned_up(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.delete_pod("web-0", grace_seconds=0)
    world.run(5)
    assert world.host.pids() == []


def test_a_namesake_gets_a_vm_of_its_own_after_the_old_one_is_gone(world):
    first = world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.slow("vm rm", 10.0, step="before")
    world.delete_pod("web-0", grace_seconds=0)
    second = world.create_pod("web-0", guest=FAST)
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    world.run(9)
    assert world.host.cocoon.count("vm clone") == 1
    world.run(10)
    assert world.host.cocoon.count("vm clone") == 2
    assert world.ready("web-0")
    assert len(world.host.pids()) == 1


def test_a_status_the_api_rejects_does_not_keep_the_pod(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.kube.fail("PATCH */web-0/status", ApiError(422, "Invalid", "no"), times=None)
    world.delete_pod("web-0")
    world.run(20)
    assert world.pod("web-0") is None


def test_an_outage_in_the_middle_of_a_deletion_ends_with_the_object_removed(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.delete_pod("web-0", grace_seconds=30)
    world.kube.down = True
    world.run(20)
    world.kube.down = False
    world.run(60)
    assert world.pod("web-0") is None
    assert world.host.pids() == []


def test_nothing_is_remembered_of_pods_that_are_gone(world):
    for round_ in range(5):
        for number in range(10):
            world.create_pod(f"web-{number}", os="macos" if number % 2 else "linux", guest=FAST)
        world.run(10)
        for number in range(10):
            world.delete_pod(f"web-{number}")
        world.run(10)
        assert world.daemon.provider.get_pods() == [], round_
    assert world.host.pids() == []
    assert len(world.daemon.provider._probes) == 0


def test_macos_is_removed_by_its_own_tool_and_never_restarted_on_the_way(world):
    world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(10)
    world.guest("mac-0").crash()
    world.delete_pod("mac-0")
    world.run(10)
    assert world.pod("mac-0") is None
    assert world.host.pids() == []
    assert calls(world.host.cocoon) == []


def test_a_restart_and_a_deletion_never_cross(world):
    """The restart is in the middle of its start when the deletion comes: the deletion waits and then removes it."""
    world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(10)
    world.host.macos.slow("vm start", 20.0, step="before")
    world.guest("mac-0").crash()
    world.run(6)
    assert world.host.macos.count("vm start") == 1
    world.delete_pod("mac-0", grace_seconds=60)
    world.run(5)
    assert world.host.macos.count("vm rm") == 0
    world.run(30)
    assert world.host.macos.count("vm rm") == 1
    assert world.pod("mac-0") is None
    assert world.host.pids() == []


def test_annotations_of_a_deleted_pod_are_not_touched_any_more(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    path = "/api/v1/namespaces/default/pods/web-0"
    world.kube.admin.patch(path, {"metadata": {"finalizers": ["example.com/wait"]}}, kind="merge")
    before = annotations(world, "web-0")
    world.delete_pod("web-0")
    world.run(30)
    assert status(world, "web-0")["phase"] == "Succeeded"
    assert annotations(world, "web-0") == before
    world.kube.admin.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
    world.run(5)
    assert world.pod("web-0") is None
