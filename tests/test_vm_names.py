"""Which VM is a pod's: a VM name belongs to the pod that asked for it first, and to nobody else while that one lives.

People make these mistakes with a copied manifest, so whoever is wrong must be told, and whoever is right must notice
nothing: not a second pod that names his VM, not its deletion, not a restart of the daemon in between.
"""

import pytest

from simulator.fake_vms import GuestSpec
from tests.provider_rig import FAST, annotations, events, message, reason

NAME = "vm.cocoonstack.io/name"
SHARED = {NAME: "shared"}
MAC = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
TOLD = "create: VM shared belongs to pod default/owner; two pods cannot stand for one VM"


def snapshots(world):
    return [record["name"] for record in (world.host.storage.read("cocoon/snapshots.json") or {}).values()]


def vm_names(world):
    return [record["config"]["name"] for record in (world.host.storage.read("cocoon/vms.json") or {}).values()]


def edit(world, name, **given):
    path = f"/api/v1/namespaces/default/pods/{name}"
    world.kube.admin.patch(path, {"metadata": {"annotations": given}}, kind="merge")


@pytest.fixture(params=["linux", "macos"])
def owner(world, request):
    """The pod whose VM it is, Ready."""
    world.os = request.param
    world.host.specs["shared"] = MAC if world.os == "macos" else FAST
    world.create_pod("owner", os=world.os, annotations=SHARED)
    world.run(20)
    assert world.ready("owner")
    return world


def test_a_second_pod_of_that_name_is_told_whose_it_is_and_can_go_without_harm(owner):
    owner.create_pod("copy", os=owner.os, annotations=SHARED)
    owner.run(20)
    assert (owner.ready("copy"), message(owner, "copy")) == (False, TOLD)
    owner.delete_pod("copy")
    owner.run(60)
    assert owner.pod("copy") is None
    assert len(owner.host.pids()) == 1
    assert [ready for _, ready in owner.flips("owner")] == [False, True]


@pytest.mark.parametrize("first", ["owner", "copy"])
def test_over_a_restart_too_whichever_pod_is_listed_first(owner, first):
    """A copied manifest carries even the id; then the older pod is the owner."""
    owner.run(2)
    copied = annotations(owner, "owner") if first == "copy" else {}
    name = "a-copy" if first == "copy" else "z-copy"
    owner.create_pod(name, os=owner.os, annotations=SHARED | {f"vm.cocoonstack.io/{k}": v for k, v in copied.items()})
    owner.run(5)
    owner.stop()
    owner.start()
    owner.run(20)
    assert (owner.ready("owner"), owner.ready(name)) == (True, False)
    assert message(owner, name) == TOLD
    owner.delete_pod(name)
    owner.run(60)
    assert len(owner.host.pids()) == 1
    assert [ready for _, ready in owner.flips("owner")] == [False, True]


def test_the_second_pod_gets_a_vm_of_its_own_when_the_owner_is_gone(owner):
    owner.create_pod("copy", os=owner.os, annotations=SHARED)
    owner.run(5)
    owner.delete_pod("owner")
    owner.run(120)
    assert owner.pod("owner") is None
    assert owner.ready("copy")
    assert len(owner.host.pids()) == 1


def test_what_was_saved_of_a_hibernated_vm_survives_the_second_pod(world):
    world.host.specs["shared"] = FAST
    world.create_pod("owner", annotations=SHARED)
    world.run(5)
    world.annotate("owner", hibernate="true")
    world.run(5)
    world.create_pod("copy", annotations=SHARED)
    world.run(5)
    assert message(world, "copy") == TOLD
    world.stop()
    world.start()
    world.run(5)
    world.delete_pod("copy")
    world.run(30)
    assert "shared" in snapshots(world)
    world.annotate("owner", hibernate=None)
    world.run(30)
    assert world.ready("owner")


def test_a_stopped_vm_stays_its_pods_own_over_a_restart(world):
    """It is not adopted, because it does not run; its name must not be free for others until it is brought up."""
    world.host.specs["shared"] = FAST
    world.create_pod("owner", annotations=SHARED)
    world.run(5)
    vm_id = annotations(world, "owner")["id"]
    world.create_pod("a-copy", annotations=SHARED)
    world.run(5)
    world.stop()
    world.host.guest("shared").crash()
    world.start()
    world.run(60)
    assert world.ready("owner")
    assert annotations(world, "owner")["id"] == vm_id
    assert message(world, "a-copy") == TOLD
    world.delete_pod("a-copy")
    world.run(30)
    assert world.ready("owner")


@pytest.mark.parametrize(
    "given",
    [{NAME: "another"}, {NAME: None}, {"cocoonset.cocoonstack.io/os": "macos"}],
    ids=["renamed", "without a name", "of another tool"],
)
@pytest.mark.parametrize("hibernated", [False, True])
def test_which_vm_a_living_pod_has_cannot_be_edited(world, given, hibernated):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    if hibernated:
        world.annotate("web-0", hibernate="true")
        world.run(5)
    edit(world, "web-0", **given)
    world.run(30)
    assert world.ready("web-0") is not hibernated
    assert world.host.cocoon.count("vm clone") == 1
    world.delete_pod("web-0")
    world.run(30)
    assert world.pod("web-0") is None
    assert (vm_names(world), world.host.pids()) == ([], [])
    assert "vk-default-web-0" not in snapshots(world)


def test_a_name_that_could_not_be_taken_may_be_corrected(world):
    world.create_pod("web-0", guest=FAST, annotations={NAME: "no name at all"})
    world.run(5)
    assert reason(world, "web-0") == "LifecycleFailed"
    edit(world, "web-0", **{NAME: "web"})
    world.run(5)
    assert world.ready("web-0")
    assert vm_names(world) == ["web"]


def test_a_pod_that_loses_its_name_before_it_had_a_vm_is_no_longer_ours_and_told_once(world):
    world.create_pod("web-0", annotations={NAME: "no name at all"})
    world.run(5)
    edit(world, "web-0", **{NAME: None})
    world.run(600)
    assert [found for found, _ in events(world, "web-0")].count("NotOurs") == 1
    world.delete_pod("web-0")
    world.run(5)
    assert world.pod("web-0") is None


def test_an_unmanaged_pod_that_cannot_be_served_is_told_so_again_after_a_restart(world, caplog):
    world.create_pod("web-0", annotations={"cocoonset.cocoonstack.io/managed": "false"})
    world.run(5)
    world.stop()
    world.start()
    world.run(30)
    assert message(world, "web-0").startswith("create: an unmanaged pod needs vm.cocoonstack.io/id")
    assert "greenlet died" not in caplog.text


# --- a VM that somebody made by hand ----------------------------------------------------------------------------------


def by_hand(world, os, name="precious"):
    world.host.specs[name] = MAC if os == "macos" else FAST
    if os == "macos":
        image = "registry.example.com/macos:15"
        world.host.macos.execute(["cocoon-macos", "image", "pull", image], 30.0)
        completed = world.host.macos.execute(["cocoon-macos", "vm", "run", "--name", name, "--net", "cni", image], 60.0)
    else:
        completed = world.host.cocoon.execute(["cocoon", "vm", "clone", "--name", name, "devbox-base:7"], 60.0)
    assert completed.returncode == 0, completed.stderr
    world.run(5)


REFUSED = {
    "linux": {"cocoonset.cocoonstack.io/mode": "run", "cocoonset.cocoonstack.io/image": ""},
    "macos": {"cocoonset.cocoonstack.io/storage": "lots"},
}


@pytest.mark.parametrize("life", ["one", "another", "deleted in between"])
@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_vm_made_by_hand_survives_a_pod_that_names_it_and_never_had_one(world, os, life):
    by_hand(world, os)
    world.create_pod("tenant", os=os, annotations={NAME: "precious", **REFUSED[os]})
    world.run(20)
    assert message(world, "tenant").startswith("create: annotation")
    if life != "one":
        world.stop()
        if life == "deleted in between":
            world.delete_pod("tenant", grace_seconds=30)
        world.start()
        world.run(20)
    if life != "deleted in between":
        assert not world.ready("tenant")
        world.delete_pod("tenant", grace_seconds=30)
    world.run(60)
    assert (world.pod("tenant"), len(world.host.pids())) == (None, 1)
    assert world.leases.address(world.host.guest("precious").mac)
    assert "latest-precious" not in snapshots(world)


@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_vm_made_by_hand_after_such_a_pod_is_gone_is_not_taken_for_a_late_one(world, os):
    world.create_pod("tenant", os=os, annotations={NAME: "precious", **REFUSED[os]})
    world.run(10)
    world.delete_pod("tenant")
    world.run(10)
    by_hand(world, os)
    world.run(200)
    assert len(world.host.pids()) == 1


@pytest.mark.parametrize("first", ["tenant", "pointer"])
@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_vm_that_an_unmanaged_pod_stands_for_is_taken_over_and_removed_by_nobody(world, os, first):
    by_hand(world, os)
    vm_id = "qemu-precious" if os == "macos" else world.host.cocoon.record("precious")["id"]
    points = {"cocoonset.cocoonstack.io/managed": "false", "vm.cocoonstack.io/id": vm_id}
    points["vm.cocoonstack.io/ip"] = world.leases.address(world.host.guest("precious").mac)
    world.create_pod("pointer", annotations={NAME: "precious", **points})
    world.run(20)
    world.create_pod("tenant", os=os, annotations={NAME: "precious"})
    world.run(20)
    told = "create: VM precious belongs to pod default/pointer; two pods cannot stand for one VM"
    assert (world.ready("pointer"), message(world, "tenant")) == (True, told)
    world.stop()
    world.start()
    world.run(20)
    assert (world.ready("pointer"), message(world, "tenant")) == (True, told)
    for name in (first, *{"tenant", "pointer"} - {first}):
        world.delete_pod(name)
        world.run(10)
    assert (world.pod("tenant"), world.pod("pointer"), len(world.host.pids())) == (None, None, 1)


@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_pod_keeps_its_vm_over_a_restart_when_an_unmanaged_one_points_at_it(owner, os):
    vm_id, ip = (annotations(owner, "owner")[key] for key in ("id", "ip"))
    points = {"cocoonset.cocoonstack.io/managed": "false", "vm.cocoonstack.io/id": vm_id, "vm.cocoonstack.io/ip": ip}
    owner.create_pod("a-pointer", annotations=SHARED | points)
    owner.run(10)
    owner.stop()
    owner.start()
    owner.run(20)
    assert (owner.ready("owner"), owner.ready("a-pointer")) == (True, True)
    owner.delete_pod("owner")
    owner.run(20)
    assert (owner.pod("owner"), owner.host.pids()) == (None, [])


def test_what_was_saved_of_a_vm_survives_a_pod_that_contradicts_it(world):
    world.create_pod("owner", guest=FAST, annotations=SHARED)
    world.run(5)
    world.annotate("owner", hibernate="true", keep_snapshot_on_delete="true")
    world.run(10)
    world.delete_pod("owner")
    world.run(10)
    assert "shared" in snapshots(world)
    world.create_pod("tenant", annotations=SHARED | {"vm.cocoonstack.io/clone-from-dir": "/srv/other"})
    world.run(10)
    assert "is on this host" in message(world, "tenant")
    world.delete_pod("tenant")
    world.run(10)
    assert (world.pod("tenant"), "shared" in snapshots(world)) == (None, True)
