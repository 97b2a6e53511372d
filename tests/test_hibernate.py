"""Clause 4, a completed hibernate forgets the probe; Not Ready while it lasts; a wake starts a new probe."""

import pytest

from simulator.fake_vms import GuestSpec
from tests.provider_rig import FAST, annotations, calls, events, message, reason, status


@pytest.fixture
def ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    assert world.ready("web-0")
    return world


def test_the_pod_is_not_ready_from_the_request_on_although_its_guest_answers(ready):
    ready.host.cocoon.slow("snapshot save", 30.0, step="before")
    ready.annotate("web-0", hibernate="true")
    ready.run(10)
    assert (ready.ready("web-0"), reason(ready, "web-0")) == (False, "LifecycleHibernating")
    assert reason(ready, "web-0", "cocoonstack.io/ProbeReady") == "ProbeSucceeded"
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernating"


def test_a_hibernated_pod_is_pending_without_id_address_or_container_and_is_not_probed(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(2)
    found = annotations(ready, "web-0")
    assert found["lifecycle-state"] == "hibernated"
    assert not {"id", "ip"} & set(found)
    held = status(ready, "web-0")
    assert held["phase"] == "Pending"
    assert not {"podIP", "podIPs", "containerStatuses"} & set(held)
    assert ready.host.pids() == []
    probes = len(ready.probes("web-0"))
    ready.run(600)
    assert len(ready.probes("web-0")) == probes
    assert "Hibernated" in [event[0] for event in events(ready, "web-0")]


def test_the_snapshot_is_saved_before_the_vm_is_removed_and_the_lease_goes_last(ready):
    mac = ready.guest("web-0").mac
    ready.annotate("web-0", hibernate="true")
    ready.run(2)
    assert calls(ready.host.cocoon)[-2:] == ["snapshot save", "vm rm"]
    assert ready.leases.address(mac) == ""


def test_a_snapshot_that_fails_keeps_the_vm_and_says_so_until_it_succeeds(ready):
    ready.host.cocoon.fail("snapshot save", times=2, stderr="Error: no space left on device")
    ready.annotate("web-0", hibernate="true")
    ready.run(0.5)
    assert annotations(ready, "web-0")["lifecycle-state"] == "failed"
    assert message(ready, "web-0").startswith("hibernate: ")
    assert len(ready.host.pids()) == 1
    ready.run(60)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"


def test_a_failed_hibernate_that_is_no_longer_wanted_is_lifted(ready):
    ready.host.cocoon.fail("snapshot save", times=None)
    ready.annotate("web-0", hibernate="true")
    ready.run(3)
    assert not ready.ready("web-0")
    ready.annotate("web-0", hibernate=None)
    ready.run(3)
    assert annotations(ready, "web-0")["lifecycle-state"] == "ready"
    assert ready.ready("web-0")


def test_a_wake_is_a_new_vm_with_a_new_mac_and_never_takes_the_old_lease_for_its_own(ready):
    old_mac, old_ip = ready.guest("web-0").mac, ready.guest("web-0").ip
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.create_pod("squatter", guest=FAST)
    ready.run(2)
    ready.leases.lease(old_mac, old_ip)  # a row nobody took away
    ready.guest("squatter").renumber(old_ip)  # and somebody answers there
    ready.host.specs["vk-default-web-0"] = GuestSpec(boot_s=0.0, lease_s=0.0, resume_s=3.0)
    ready.annotate("web-0", hibernate=None)
    ready.run(2.9)
    assert not ready.ready("web-0")
    assert "podIP" not in status(ready, "web-0")
    ready.run(5)
    assert ready.ready("web-0")
    assert ready.guest("web-0").mac != old_mac
    assert annotations(ready, "web-0")["ip"] == ready.guest("web-0").ip != old_ip


def test_a_wake_without_an_address_is_reported_failed_after_45_seconds_and_lifted_later(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.host.specs["vk-default-web-0"] = GuestSpec(resume_s=100.0, lease_s=0.0)
    ready.annotate("web-0", hibernate=None)
    ready.run(46)
    assert annotations(ready, "web-0")["lifecycle-state-message"].startswith("wake vk-default-web-0: dhcp lease not")
    ready.run(60)
    assert ready.ready("web-0")


def test_a_wake_that_fails_is_tried_again(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.host.cocoon.fail("vm clone", times=2, stderr="Error: clone VM: no memory")
    ready.annotate("web-0", hibernate=None)
    ready.run(0.5)
    assert annotations(ready, "web-0")["lifecycle-state"] == "failed"
    ready.run(60)
    assert ready.ready("web-0")
    assert "Woken" in [event[0] for event in events(ready, "web-0")]


def test_exactly_one_probe_loop_lives_through_hibernate_wake_updates_and_restart(ready):
    for _ in range(3):
        ready.annotate("web-0", hibernate="true")
        ready.run(5)
        ready.annotate("web-0", hibernate=None)
        ready.run(10)
    for number in range(3):
        ready.annotate("web-0", note=str(number))
        ready.run(1)
    ready.stop()
    ready.start()
    ready.run(30)
    since = len(ready.probes("web-0"))
    ready.run(100)
    assert len(ready.probes("web-0")) - since == 20


def test_a_hibernated_pod_that_is_deleted_leaves_no_snapshot_unless_told_to(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.delete_pod("web-0")
    ready.run(5)
    assert ready.pod("web-0") is None
    assert ready.host.cocoon.count("snapshot rm") == 1


def test_a_kept_snapshot_wakes_the_pod_that_comes_after(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.annotate("web-0", hibernate="true")
    world.run(5)
    world.annotate("web-0", keep_snapshot_on_delete="true")
    world.run(1)
    world.delete_pod("web-0")
    world.run(5)
    world.create_pod("web-0", guest=FAST, annotations={"vm.cocoonstack.io/restore-from-hibernate": "true"})
    world.run(5)
    assert world.ready("web-0")
    assert world.host.cocoon.calls[-1]["argv"][-1] == "vk-default-web-0" or any(
        call["verb"] == "vm clone" and call["argv"][-1] == "vk-default-web-0" for call in world.host.cocoon.calls
    )
