"""Degraded mode: without a raw socket an address is taken for ready; ports and banners stay real (I2, I3)."""

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import PORT, annotations, reason


@pytest.fixture
def degraded():
    with World(degraded=True) as world:
        yield world
        assert world.timeline.of(actor="invariant") == []


def test_a_resolved_address_is_ready_although_nobody_answers(degraded):
    degraded.create_pod("web-0", guest=GuestSpec(boot_s=2.0, lease_s=0.0, echo=False))
    degraded.run(1.9)
    assert not degraded.ready("web-0")
    degraded.run(1.5)
    assert (degraded.ready("web-0"), reason(degraded, "web-0")) == (True, "PingSkipped")


def test_an_address_is_still_needed(degraded):
    degraded.create_pod("web-0", guest=GuestSpec(boot_s=0.0, lease_s=0.0))
    degraded.run(5)
    degraded.leases.release(degraded.guest("web-0").mac)
    degraded.run(16)
    assert (degraded.ready("web-0"), reason(degraded, "web-0")) == (False, "WaitingForLease")


def test_a_declared_port_gets_a_real_dial_and_macos_a_real_banner(degraded):
    degraded.create_pod("web-0", guest=GuestSpec(boot_s=0.0, lease_s=0.0), annotations={PORT: "80"})
    degraded.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=60.0))
    degraded.run(30)
    assert (reason(degraded, "web-0"), reason(degraded, "mac-0")) == ("PortClosed", "NoSSHBanner")
    assert annotations(degraded, "mac-0")["lifecycle-state"] == "ready"


def test_the_node_says_that_it_is_degraded_and_so_does_a_gauge(degraded):
    degraded.run(5)
    node = degraded.kube.admin.get("/api/v1/nodes/sim-node")
    [condition] = [c for c in node["status"]["conditions"] if c["type"] == "cocoonstack.io/PingerDegraded"]
    assert condition["status"] == "True"
    registry = degraded.daemon.ports.metrics.registry
    assert registry.get_sample_value("cocoon_vk_pinger_degraded") == 1.0


def test_a_healthy_pinger_says_so_too(world):
    world.run(5)
    node = world.kube.admin.get("/api/v1/nodes/sim-node")
    [condition] = [c for c in node["status"]["conditions"] if c["type"] == "cocoonstack.io/PingerDegraded"]
    assert condition["status"] == "False"
    assert world.daemon.ports.metrics.registry.get_sample_value("cocoon_vk_pinger_degraded") == 0.0
