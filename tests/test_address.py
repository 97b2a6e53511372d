"""Clause 1, second check: the lease is re-read on every tick and written back; a static card keeps its address.

L5 to L10: what a lost, moved, contested or unreadable lease does to what is published.
"""

import os

import pytest

from simulator.fake_vms import GuestSpec
from tests.provider_rig import FAST, PORT, annotations, events, message, reason, status, writes
from vkcocoon_kube import ApiError

SILENT_PORT = GuestSpec(boot_s=0.0, lease_s=0.0, ports=(80,))


@pytest.fixture
def ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    assert world.ready("web-0")
    return world


def move(world, name, ip):
    world.leases.lease(world.guest(name).mac, ip)
    world.guest(name).renumber(ip)


def published(world, name, since):
    """(instant, podIP) of the status writes that named an address, or took it away, since then."""
    return [
        (at, body["status"]["podIP"])
        for at, path, body in writes(world, name)
        if path == "/status" and at >= since and "podIP" in body["status"]
    ]


def test_an_address_that_moves_is_published_at_the_next_tick_without_a_flip(ready):
    ticks = ready.probes("web-0")
    move(ready, "web-0", "10.88.0.200")
    ready.run(5)
    assert published(ready, "web-0", 5.0) == [(ticks[-1] + 5.0, "10.88.0.200")]
    assert annotations(ready, "web-0")["ip"] == "10.88.0.200"
    assert len(ready.flips("web-0")) == 2
    assert ("AddressChanged", f"address changed from {_first(ready)} to 10.88.0.200") in events(ready, "web-0")


def _first(world):
    return next(dict(e.fields)["ip"] for e in world.timeline.of(actor="guest", kind="address"))


def test_a_lost_lease_leaves_the_published_address_until_the_flip_it_causes(ready):
    ready.leases.release(ready.guest("web-0").mac)
    ready.run(9.9)
    assert ready.ready("web-0")
    assert "podIP" in status(ready, "web-0")
    ready.run(5.1)
    assert (ready.ready("web-0"), reason(ready, "web-0")) == (False, "WaitingForLease")
    assert "podIP" not in status(ready, "web-0")
    assert "ip" not in annotations(ready, "web-0")


@pytest.mark.parametrize("trouble", ["torn", "missing", "object", "empty"])
def test_a_lease_file_that_cannot_be_read_changes_nothing_for_a_ready_pod(ready, trouble):
    if trouble == "missing":
        os.remove(ready.settings.leases_path)
    else:
        ready.leases.write(trouble)
    ready.run(120)
    assert ready.ready("web-0")
    assert published(ready, "web-0", 5.0) == []


def test_a_lease_file_that_never_was_readable_is_told_as_such_and_used_when_it_comes(world):
    world.leases.path = os.devnull
    world.create_pod("web-0", guest=GuestSpec(boot_s=30.0, lease_s=0.0))
    world.run(20)
    assert reason(world, "web-0", "cocoonstack.io/ProbeReady") == "LeaseFileUnreadable"
    world.run(20)
    assert world.ready("web-0")


def test_null_means_no_leases_and_is_no_error(world):
    world.leases.write()
    with open(world.settings.leases_path) as file:
        assert file.read() == "null"
    world.create_pod("web-0", guest=GuestSpec(boot_s=30.0, lease_s=0.0))
    world.run(10)
    assert reason(world, "web-0", "cocoonstack.io/ProbeReady") == "WaitingForLease"


def test_a_lease_that_expires_in_the_file_ends_although_nothing_is_written(ready):
    ready.host.renew_s = 10 * 86400.0
    soon = ready.clock.now().timestamp() + 60
    from datetime import UTC, datetime

    ready.leases.lease(ready.guest("web-0").mac, ready.guest("web-0").ip, datetime.fromtimestamp(soon, UTC))
    ready.run(59)
    assert ready.ready("web-0")
    ready.run(16)
    assert reason(ready, "web-0") == "WaitingForLease"


def test_a_wall_clock_step_expires_leases_but_moves_no_probe(ready):
    before = ready.probes("web-0")[-1]
    ready.clock.step_wall(2 * 86400)
    ready.run(20)
    assert [at - before for at in ready.probes("web-0") if at > before][:3] == [5.0, 10.0, 15.0]
    assert reason(ready, "web-0") == "WaitingForLease"


def test_a_static_card_keeps_its_inspected_address_whatever_the_lease_file_says(world):
    world.create_pod("web-0", guest=FAST, annotations={"cocoonset.cocoonstack.io/network": "cocoon-static"})
    world.run(5)
    address = annotations(world, "web-0")["ip"]
    assert address.startswith("10.22.0.")
    world.leases.lease(world.guest("web-0").mac, "10.88.0.77")
    world.run(30)
    assert annotations(world, "web-0")["ip"] == address
    assert world.ready("web-0")


def test_an_address_goes_from_one_pod_to_another_without_both_being_ready_on_it(world):
    """The row of the second pod ends later, so the address is its; it waits until the cluster has seen the first leave.
    (The fixture asserts at every instant that no two are Ready on one address.)"""
    world.create_pod("first", guest=FAST)
    world.create_pod("second", guest=FAST)
    world.run(5)
    shared = world.guest("first").ip
    end = world.clock.now().replace(year=2099)
    world.leases.lease(world.guest("second").mac, shared, end)
    world.guest("second").renumber(shared)
    world.run(6)
    assert (world.ready("first"), status(world, "first")["podIP"]) == (True, shared)
    assert status(world, "second")["podIP"] != shared
    world.run(14)
    assert (world.ready("first"), reason(world, "first")) == (False, "WaitingForLease")
    assert world.guest("second").mac in message(world, "first")
    world.run(5)
    assert (world.ready("second"), status(world, "second")["podIP"]) == (True, shared)


def test_while_it_waits_the_second_pod_says_whose_the_address_is(world):
    world.create_pod("first", guest=FAST)
    world.run(5)
    shared = world.guest("first").ip
    world.create_pod("second", guest=GuestSpec(boot_s=10.0))
    world.run(1)
    world.leases.lease(world.guest("second").mac, shared, world.clock.now().replace(year=2099))
    world.run(2)
    assert (world.ready("second"), reason(world, "second")) == (False, "AddressConflict")
    assert message(world, "second") == f"{shared} is the address of default/first, which is Ready there"


def test_a_vm_that_was_started_again_is_probed_on_its_new_static_address_and_not_on_the_former_one(world):
    world.create_pod("web-0", guest=FAST, annotations={"cocoonset.cocoonstack.io/network": "cocoon-static"})
    world.run(5)
    former = status(world, "web-0")["podIP"]
    world.guest("web-0").crash()
    with world.host.storage.edit("cocoon/vms.json", dict) as records:
        (record,) = records.values()
        record["network_configs"][0]["network"]["ip"] = "10.22.0.77"
    world.run(10)
    world.guest("web-0").renumber(former)  # whoever answers on the former address is not believed
    world.run(30)
    assert (world.ready("web-0"), status(world, "web-0")["podIP"]) == (False, "10.22.0.77")
    world.guest("web-0").renumber("10.22.0.77")
    world.run(2)
    assert (world.ready("web-0"), annotations(world, "web-0")["ip"]) == (True, "10.22.0.77")


def test_an_unmanaged_pod_may_share_an_address(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.create_pod(
        "tool",
        annotations={
            "cocoonset.cocoonstack.io/managed": "",
            "vm.cocoonstack.io/id": "X",
            "vm.cocoonstack.io/ip": world.guest("web-0").ip,
        },
    )
    world.run(5)
    assert (world.ready("web-0"), world.ready("tool")) == (True, True)


def test_set_vm_ip_is_refused_for_another_vm_and_for_an_unknown_pod(ready):
    provider = ready.daemon.provider
    assert not provider.set_vm_ip("default/web-0", "SOMEBODY-ELSE", "10.88.0.9")
    assert not provider.set_vm_ip("default/none", "X", "10.88.0.9")
    assert provider.get_pod_status("default", "web-0")["podIP"] == ready.guest("web-0").ip


def test_an_edited_probe_port_takes_effect_at_the_next_tick(ready):
    ready.annotate("web-0", probe_port="8080")
    ready.run(16)
    assert (ready.ready("web-0"), reason(ready, "web-0")) == (False, "PortClosed")
    ready.guest("web-0").open(8080)
    ready.run(1.1)
    assert ready.ready("web-0")
    ready.guest("web-0").close(8080)
    ready.annotate("web-0", probe_port=None)
    ready.run(30)
    assert ready.ready("web-0")


@pytest.mark.parametrize("value", ["0", "65536", "ssh", " "])
def test_a_probe_port_that_is_none_is_never_ready_although_the_guest_answers(world, value):
    world.create_pod("web-0", guest=FAST, annotations={PORT: value})
    world.run(30)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "InvalidProbePort")
    assert repr(value) in message(world, "web-0")
    assert world.timeline.of(actor="guest", kind="echo") == []


def test_a_vm_that_vanished_is_not_ready_although_its_address_answers(ready):
    """An orphan process keeps the address alive; the first check comes first, also while the pod cannot be evicted."""
    ready.kube.fail("DELETE */pods/web-0", ApiError(500, "InternalError", "later"), times=None)
    ip = ready.guest("web-0").ip
    ready.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "vk-default-web-0"], 30.0)
    ready.create_pod("squatter", guest=FAST)
    ready.run(1)
    ready.guest("squatter").renumber(ip)
    ready.run(30)
    assert (ready.ready("web-0"), reason(ready, "web-0")) == (False, "VMGone")


def test_a_deleted_event_alone_proves_nothing(ready):
    """The stream reports every VM as deleted when it could not read its list."""
    ready.host.cocoon.fail("events list", times=1)
    ready.run(60)
    assert ready.ready("web-0")
    assert len(ready.flips("web-0")) == 2


@pytest.mark.parametrize(("system", "bound"), [("linux", 1.25), ("macos", 4.0)])
def test_what_the_last_probe_said_of_a_lease_that_came_since_stands_for_one_probe_only(world, system, bound):
    """P1 and S4.5: what is published of the probe is what a probe has said, and the address is as it is now."""
    world.create_pod("neighbor", guest=FAST)  # so that there is a lease file
    world.run(2)
    guest = GuestSpec(os=system, boot_s=3.0, lease_s=0.0, echo=False, ssh_after_s=30.0)
    world.create_pod("web-0", os=system, guest=guest)
    shown = []
    for _ in range(400):
        world.run(0.05)
        if status(world, "web-0").get("podIP"):
            shown.append(reason(world, "web-0", "cocoonstack.io/ProbeReady"))
    stale = [word for word in shown if word == "WaitingForLease"]
    assert len(stale) * 0.05 <= bound
    assert shown[len(stale) :] == [{"linux": "PingTimeout", "macos": "NoSSHBanner"}[system]] * (len(shown) - len(stale))
    assert len(shown) > 300
