"""Clause "necessary but not sufficient": Ready needs the lifecycle's consent, which waits for an address, not a probe.

The status is published before the ready annotation (K2, T6).
"""

import pytest

from simulator.fake_vms import GuestSpec
from tests.provider_rig import FAST, PORT, annotations, events, message, reason, status, writes
from vkcocoon_kube import ApiError


def test_ready_intent_does_not_wait_for_a_probe(world):
    world.create_pod("web-0", guest=GuestSpec(boot_s=1.0, lease_s=0.5, echo=False))
    world.run(10)
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "PingTimeout")


@pytest.mark.parametrize("os", ["linux", "windows", "macos"])
def test_on_every_managed_path_ready_intent_waits_for_an_address(world, os):
    world.create_pod("web-0", os=os, guest=GuestSpec(os=os, boot_s=20.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(19.9)
    assert annotations(world, "web-0")["lifecycle-state"] == "creating"
    assert "ip" not in annotations(world, "web-0")
    world.run(0.3)
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert annotations(world, "web-0")["ip"] == world.guest("web-0").ip


def test_the_wait_looks_every_200_milliseconds(world):
    world.create_pod("web-0", guest=GuestSpec(boot_s=10.05, lease_s=0.0, echo=False))
    world.run(12)
    ready = [entry for entry in world.timeline.of(kind="lifecycle") if dict(entry.fields)["lifecycle"] == "ready"]
    assert [entry.seconds for entry in ready] == [10.2]


def test_a_clone_without_an_address_is_reported_failed_after_45_seconds_and_lifted_when_it_comes(world):
    world.create_pod("web-0", guest=GuestSpec(boot_s=100.0, lease_s=0.0))
    world.run(44.9)
    assert annotations(world, "web-0")["lifecycle-state"] == "creating"
    world.run(0.1)
    found = annotations(world, "web-0")
    assert found["lifecycle-state"] == "failed"
    assert found["lifecycle-state-message"] == "clone vk-default-web-0: dhcp lease not observed within 45s"
    assert "PostCloneIPWaitTimeout" in [event[0] for event in events(world, "web-0")]
    world.run(60)
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert "lifecycle-state-message" not in annotations(world, "web-0")
    assert world.ready("web-0")


@pytest.mark.parametrize("os", ["windows", "macos"])
def test_a_fresh_run_and_a_macos_guest_wait_without_end_as_creating(world, os):
    world.create_pod("web-0", os=os, guest=GuestSpec(os=os, boot_s=600.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(590)
    assert annotations(world, "web-0")["lifecycle-state"] == "creating"
    world.run(20)
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"


def test_a_reachable_guest_is_not_ready_while_the_lifecycle_failed(world):
    """A failure of another kind is not lifted by a guest that answers."""
    world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(10)
    world.annotate("mac-0", hibernate="true")
    world.run(10)
    assert (world.ready("mac-0"), reason(world, "mac-0")) == (False, "LifecycleFailed")
    assert reason(world, "mac-0", "cocoonstack.io/ProbeReady") == "ProbeSucceeded"
    assert "HibernateUnsupported" in message(world, "mac-0")
    world.annotate("mac-0", hibernate=None)
    world.run(1)
    assert world.ready("mac-0")


def test_the_status_is_held_by_the_api_before_the_ready_annotation_is_sent(world):
    world.create_pod("web-0", guest=FAST, annotations={PORT: "80"})
    world.run(5)
    kinds = []
    for _, path, body in writes(world, "web-0"):
        lifecycle = (body["metadata"].get("annotations") or {}).get("vm.cocoonstack.io/lifecycle-state")
        ready = {c["type"]: c["status"] for c in (body.get("status") or {}).get("conditions", [])}
        if lifecycle == "ready" or ready.get("cocoonstack.io/LifecycleReady") == "True":
            kinds.append(path or "annotations")
    assert kinds == ["/status", "annotations"]


def test_the_status_before_the_ready_annotation_need_not_be_ready(world):
    world.create_pod("web-0", guest=GuestSpec(boot_s=0.0, lease_s=0.0, echo=False))
    world.run(5)
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert not world.ready("web-0")


def test_while_the_status_cannot_be_written_the_annotation_is_withheld(world):
    world.create_pod("web-0", guest=FAST)
    world.kube.fail("PATCH */status", ApiError(500, "InternalError", "later"), times=None)
    world.run(30)
    assert "lifecycle-state" not in annotations(world, "web-0")
    world.kube.gate.failures.clear()
    world.run(60)
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert world.ready("web-0")


def test_a_newer_generation_is_echoed_without_any_other_change(world):
    world.create_pod("web-0", guest=FAST, annotations={"cocoonset.cocoonstack.io/generation": "3"})
    world.run(5)
    assert annotations(world, "web-0")["lifecycle-observed-generation"] == "3"
    before = len(writes(world, "web-0"))
    patch = {"metadata": {"annotations": {"cocoonset.cocoonstack.io/generation": "4"}}}
    world.kube.admin.patch("/api/v1/namespaces/default/pods/web-0", patch, kind="merge")
    world.run(5)
    found = annotations(world, "web-0")
    assert (found["lifecycle-state"], found["lifecycle-observed-generation"]) == ("ready", "4")
    assert len(writes(world, "web-0")) == before + 1


def test_a_steady_pod_is_not_written(world):
    world.create_pod("web-0", guest=FAST)
    world.run(60)
    before = len(writes(world, "web-0"))
    world.run(3600)
    assert len(writes(world, "web-0")) == before
    assert status(world, "web-0")["phase"] == "Running"
