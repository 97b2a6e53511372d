"""Annotations in every wrong form: what they ask for is done or refused in words, nothing else is touched, and when
they are put right the pod is where it should be. Whoever may edit a pod may write anything there."""

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations, message, status
from tests.test_last_state import macs

MAC = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
ODD = ("", " ", "True", "0", "-1", "9" * 40, "\u2603\u0663", "--force", "a\nb", "x" * 5000, "9" * 5000)

WISHES = (
    "cocoonset.cocoonstack.io/managed",
    "cocoonset.cocoonstack.io/mode",
    "cocoonset.cocoonstack.io/os",
    "cocoonset.cocoonstack.io/image",
    "cocoonset.cocoonstack.io/storage",
    "cocoonset.cocoonstack.io/network",
    "cocoonset.cocoonstack.io/snapshot-policy",
    "cocoonset.cocoonstack.io/force-pull",
    "cocoonset.cocoonstack.io/generation",
    "vm.cocoonstack.io/name",
    "vm.cocoonstack.io/backend",
    "vm.cocoonstack.io/no-direct-io",
    "vm.cocoonstack.io/probe-port",
    "vm.cocoonstack.io/conn-type",
    "vm.cocoonstack.io/fork-from",
    "vm.cocoonstack.io/clone-from-dir",
    "vm.cocoonstack.io/hibernate",
    "vm.cocoonstack.io/restore-from-hibernate",
    "vm.cocoonstack.io/keep-snapshot-on-delete",
)
OURS = (
    "vm.cocoonstack.io/id",
    "vm.cocoonstack.io/ip",
    "vm.cocoonstack.io/mac",
    "vm.cocoonstack.io/vnc-port",
    "vm.cocoonstack.io/lifecycle-state",
    "vm.cocoonstack.io/lifecycle-observed-generation",
    "vm.cocoonstack.io/lifecycle-state-message",
    "vm.cocoonstack.io/post-clone-state",
    "vm.cocoonstack.io/post-clone-hint",
    "vm.cocoonstack.io/post-clone-errors",
)


def guest(os):
    return MAC if os == "macos" else FAST


@pytest.fixture
def world():
    with World(macos_vnc_password="secret") as world:
        world.create_pod("neighbor", guest=FAST)
        world.run(5)
        yield world
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []
        assert len(world.flips("neighbor")) == 2  # Ready once, and never anything else


def edit(world, name, key, value):
    body = {"metadata": {"annotations": {key: value}}}
    world.kube.admin.patch(f"/api/v1/namespaces/default/pods/{name}", body, kind="merge")


def bystander(world):
    """What is there besides these pods."""
    assert world.ready("neighbor")
    assert (len(world.host.pids()), macs(world)) == (1, [world.guest("neighbor").mac])


@pytest.mark.parametrize("os", ["linux", "macos"])
@pytest.mark.parametrize("key", WISHES, ids=lambda key: key.partition("/")[2])
def test_a_wish_in_a_wrong_form_is_met_or_refused_in_words_and_put_right_by_an_edit(world, key, os):
    names = [f"web-{number}" for number in range(len(ODD))]
    right = {}
    for name, value in zip(names, ODD, strict=True):
        right[name] = world.announce(name, os=os)["metadata"]["annotations"].get(key)
        world.host.specs[f"vk-default-{name}"] = world.host.specs[value] = guest(os)
        world.create_pod(name, os=os, annotations={key: value})
    world.run(60)
    for name in names:
        if not world.ready(name) and status(world, name).get("conditions"):
            asleep = annotations(world, name).get("lifecycle-state") == "hibernated"
            assert asleep or any(message(world, name, each) for each in ("Ready", "cocoonstack.io/ProbeReady"))
    for name in names:
        if not world.ready(name):
            edit(world, name, key, right[name])
    world.run(400)
    assert [name for name in names if not world.ready(name)] == []
    for name in names:
        world.delete_pod(name, grace_seconds=30)
    world.run(60)
    assert [name for name in names if world.pod(name)] == []
    bystander(world)


@pytest.mark.parametrize("os", ["linux", "macos"])
@pytest.mark.parametrize("key", OURS, ids=lambda key: key.partition("/")[2])
def test_what_is_ours_is_believed_from_nobody_else_over_a_restart(world, key, os):
    names = [f"web-{number}" for number in range(len(ODD))]
    for name in names:
        world.create_pod(name, os=os, guest=guest(os))
    world.run(30)
    vms = {name: annotations(world, name)["id"] for name in names}
    made = len(world.host.pids())
    world.stop()
    for name, value in zip(names, ODD, strict=True):
        edit(world, name, key, value)
    world.start()
    world.run(120)
    assert {name: annotations(world, name)["id"] for name in names} == vms
    assert [name for name in names if not world.ready(name)] == []
    assert len(world.host.pids()) == made
    for name in names:
        world.delete_pod(name, grace_seconds=30)
    world.run(60)
    assert [name for name in names if world.pod(name)] == []
    bystander(world)
