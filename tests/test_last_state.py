"""What outlives a pod, and what must not: the last state its policy keeps, the snapshots and leases nobody needs."""

import pytest

from simulator.world import World, example_pod
from tests.provider_rig import FAST, annotations, calls, events
from tests.test_sources import argv, mark, trait

VM = "vk-default-web-0"
LATEST = f"latest-{VM}"
FORK = "vm.cocoonstack.io/fork-from"
POLICY = "cocoonset.cocoonstack.io/snapshot-policy"


def snapshots(world):
    """The names of the snapshots that somebody made."""
    every = (world.host.storage.read("cocoon/snapshots.json") or {}).values()
    return sorted(each["name"] for each in every if not each["name"].startswith("devbox"))


def macs(world):
    """The MACs that have a lease."""
    from vkcocoon_net import LeaseFile

    return sorted(row.mac for row in LeaseFile(world.settings.leases_path).rows(world.clock.now()))


@pytest.fixture
def ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    return world


# --- the snapshot policy ----------------------------------------------------------------------------------------------


def test_unless_told_otherwise_the_last_state_of_a_running_vm_stays_on_the_host(ready):
    mark(ready, "web-0", 7 * 2**30)
    ready.delete_pod("web-0")
    ready.run(5)
    assert ready.pod("web-0") is None
    assert calls(ready.host.cocoon)[2:] == ["vm inspect", "snapshot save", "vm rm"]
    assert argv(ready, "snapshot save")[2:4] == ["--name", LATEST]
    assert snapshots(ready) == [LATEST]


def test_the_last_state_is_what_others_can_begin_with_and_no_namesake_is_made_to(ready):
    mark(ready, "web-0", 7 * 2**30)
    ready.delete_pod("web-0")
    ready.run(5)
    ready.create_pod("web-0", guest=FAST)
    ready.create_pod("heir", guest=FAST, annotations={"cocoonset.cocoonstack.io/image": LATEST})
    ready.run(5)
    assert (trait(ready, "heir"), trait(ready, "web-0") == 7 * 2**30) == (7 * 2**30, False)


def test_the_next_deletion_of_that_name_replaces_the_last_state(ready):
    for memory in (5 * 2**30, 7 * 2**30):
        mark(ready, "web-0", memory)
        ready.delete_pod("web-0")
        ready.run(5)
        ready.create_pod("web-0", guest=FAST)
        ready.run(5)
    assert snapshots(ready) == [LATEST]
    ready.create_pod("heir", guest=FAST, annotations={"cocoonset.cocoonstack.io/image": LATEST})
    ready.run(5)
    assert trait(ready, "heir") == 7 * 2**30


@pytest.mark.parametrize(
    ("policy", "main", "kept"), [("never", True, 0), ("main-only", True, 1), ("main-only", False, 0)]
)
def test_the_policy_of_the_set_says_whose_state_stays(world, policy, main, kept):
    pod = example_pod("web-0", annotations={POLICY: policy})
    pod["metadata"]["ownerReferences"] = [{"kind": "CocoonSet", "name": "web" if main else "other", "uid": "1"}]
    pod["metadata"]["ownerReferences"][0]["apiVersion"] = "cocoonset.cocoonstack.io/v1"
    world.host.specs[VM] = FAST
    world.kube.admin.create("/api/v1/namespaces/default/pods", pod)
    world.run(5)
    world.delete_pod("web-0")
    world.run(5)
    assert world.pod("web-0") is None
    assert len(snapshots(world)) == kept
    assert world.host.cocoon.count("snapshot save") == kept


def test_a_vm_that_does_not_run_has_no_state_to_keep(ready):
    ready.guest("web-0").crash()
    ready.delete_pod("web-0")
    ready.run(5)
    assert ready.pod("web-0") is None
    assert snapshots(ready) == []


@pytest.mark.parametrize(
    ("verb", "stderr"),
    [("snapshot save", "Error: no space left on device"), ("vm inspect", "Error: context deadline exceeded")],
)
def test_a_state_that_cannot_be_saved_keeps_the_vm_until_it_can(ready, verb, stderr):
    mac = ready.guest("web-0").mac
    ready.host.cocoon.fail(verb, stderr=stderr, times=4)
    ready.delete_pod("web-0", grace_seconds=1)
    ready.run(5)
    assert ready.pod("web-0") is not None
    assert len(ready.host.pids()) == 1
    assert ready.leases.address(mac) != ""
    assert any(reason == "ProviderDeleteFailed" and stderr[7:] in text for reason, text in events(ready, "web-0"))
    ready.run(60)
    assert ready.pod("web-0") is None
    assert snapshots(ready) == [LATEST]


def test_a_vm_that_cannot_be_removed_is_saved_once(ready):
    ready.host.cocoon.fail("vm rm", times=5)
    ready.delete_pod("web-0")
    ready.run(120)
    assert ready.pod("web-0") is None
    assert ready.host.cocoon.count("snapshot save") == 1


def test_without_a_policy_there_is_a_way_out_of_a_full_disk(ready):
    """An edit of the policy counts, also while the deletion fails."""
    ready.host.cocoon.fail("snapshot save", stderr="Error: no space left on device", times=None)
    ready.delete_pod("web-0", grace_seconds=1)
    ready.run(30)
    assert ready.pod("web-0") is not None
    patch = {"metadata": {"annotations": {POLICY: "never"}}}
    ready.kube.admin.patch("/api/v1/namespaces/default/pods/web-0", patch, kind="merge")
    ready.run(5)
    assert ready.pod("web-0") is None


# --- what is dropped --------------------------------------------------------------------------------------------------


def test_what_was_saved_of_a_hibernated_vm_goes_with_its_pod(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    assert snapshots(ready) == [VM]
    ready.delete_pod("web-0")
    ready.run(5)
    assert (ready.pod("web-0"), snapshots(ready)) == (None, [])


def test_what_was_saved_stays_when_the_pod_says_so_even_at_the_last_moment(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.host.cocoon.fail("vm inspect", times=3)
    ready.delete_pod("web-0", grace_seconds=1)
    ready.annotate("web-0", keep_snapshot_on_delete="true")
    ready.run(30)
    assert (ready.pod("web-0"), snapshots(ready)) == (None, [VM])


def test_a_state_that_cannot_be_dropped_holds_up_the_deletion_for_a_namesake_would_wake_in_it(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.host.cocoon.fail("snapshot rm", stderr="Error: input/output error", times=3)
    ready.delete_pod("web-0", grace_seconds=1)
    ready.run(3)
    assert ready.pod("web-0") is not None
    ready.run(30)
    assert (ready.pod("web-0"), snapshots(ready)) == (None, [])


def test_a_fork_goes_with_its_vm_and_who_reads_from_it_holds_up_nobody(world):
    world.create_pod("web-0", guest=FAST, annotations={POLICY: "never"})
    world.run(2)
    world.host.cocoon.slow("vm clone", 10.0, name="vk-default-child")
    world.create_pod("child", guest=FAST, annotations={FORK: VM, POLICY: "never"})
    world.run(5)
    assert snapshots(world) == [f"fork-{VM}"]
    world.delete_pod("web-0")
    world.run(2)
    assert world.pod("web-0") is None
    world.run(20)
    assert world.ready("child")
    assert snapshots(world) == []


@pytest.fixture
def forked(world):
    world.create_pod("web-0", guest=FAST, annotations={POLICY: "never"})
    world.run(2)
    world.create_pod("child", guest=FAST, annotations={FORK: VM, POLICY: "never"})
    world.run(5)
    assert snapshots(world) == [f"fork-{VM}"]
    return world


def test_a_fork_that_cannot_be_dropped_keeps_the_pod_so_that_a_restart_does_not_forget_it(forked):
    forked.host.cocoon.fail("snapshot rm", stderr="Error: input/output error", times=3)
    forked.delete_pod("web-0", grace_seconds=30)
    forked.run(0.5)
    assert forked.pod("web-0") is not None
    assert any("input/output" in text for told, text in events(forked, "web-0") if told == "ProviderDeleteFailed")
    forked.kill()
    forked.start()
    forked.run(60)
    assert (forked.pod("web-0"), snapshots(forked)) == (None, [])


def test_a_fork_that_can_never_be_dropped_holds_up_a_deletion_for_some_minutes_and_is_named(forked):
    forked.host.cocoon.fail("snapshot rm", stderr="Error: input/output error", times=None)
    forked.delete_pod("web-0", grace_seconds=30)
    forked.run(590)
    assert forked.pod("web-0") is not None
    forked.run(600)
    assert forked.pod("web-0") is None
    told = [text for word, text in events(forked, "web-0") if word == "SnapshotLeft"]
    assert len(told) == 1
    assert told[0].startswith(f"snapshot fork-{VM} stays on the host: cocoon snapshot rm")


def test_a_fork_that_is_in_use_is_dropped_when_it_is_not_however_often_that_fails(world):
    world.create_pod("web-0", guest=FAST, annotations={POLICY: "never"})
    world.run(2)
    world.host.cocoon.slow("vm clone", 100.0, name="vk-default-child", step="late")
    world.create_pod("child", guest=FAST, annotations={FORK: VM, POLICY: "never"})
    world.run(5)
    world.delete_pod("web-0", grace_seconds=30)
    world.run(2)
    assert (world.pod("web-0"), snapshots(world)) == (None, [f"fork-{VM}"])
    world.run(90)
    world.host.cocoon.fail("snapshot rm", stderr="Error: input/output error", times=3)
    world.run(120)
    assert snapshots(world) == []


def test_a_fork_that_a_namesake_has_saved_meanwhile_is_not_dropped_for_its_predecessor(world):
    world.create_pod("web-0", guest=FAST, annotations={POLICY: "never"})
    world.run(2)
    world.host.cocoon.slow("vm clone", 50.0, name="vk-default-child", step="late")
    world.create_pod("child", guest=FAST, annotations={FORK: VM, POLICY: "never"})
    world.run(5)
    world.delete_pod("web-0", grace_seconds=30)
    world.run(2)
    world.create_pod("web-0", guest=FAST, annotations={POLICY: "never"})
    world.run(5)
    world.host.cocoon.fail("snapshot rm", name=f"fork-{VM}", stderr="Error: input/output error", times=4)
    world.run(46)
    world.create_pod("sister", guest=FAST, annotations={FORK: VM, POLICY: "never"})
    world.run(120)
    assert world.ready("sister")
    assert snapshots(world) == [f"fork-{VM}"]


def test_a_deletion_that_has_nothing_to_drop_runs_no_command_for_it(world):
    world.create_pod("web-0", guest=FAST, annotations={POLICY: "never"})
    world.run(5)
    world.delete_pod("web-0")
    world.run(5)
    assert calls(world.host.cocoon) == ["vm clone", "vm inspect", "vm rm"]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_pod_names_the_macs_whose_leases_are_its_own_until_they_are_given_back(ready):
    assert annotations(ready, "web-0")["mac"] == ready.guest("web-0").mac
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    assert "mac" not in annotations(ready, "web-0")
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    assert annotations(ready, "web-0")["mac"] == ready.guest("web-0").mac


def test_the_leases_of_all_cards_with_dhcp_go_back_and_that_of_a_static_one_never(ready):
    record = ready.host.cocoon.record(VM)
    card, network = record["network_configs"][0], {"ip": "10.22.0.9", "prefix": 24}
    others = [{**card, "mac": "0A:58:00:00:00:01"}, {**card, "mac": "0a:58:00:00:00:02", "network": network}]
    others.append({**card, "mac": "0a:58:00:00:00:03", "network": {}})
    ready.host.cocoon.set_record(VM, network_configs=[card, *others])
    for number in range(1, 4):
        ready.leases.lease(f"0a:58:00:00:00:0{number}", f"10.88.0.20{number}")
    ready.stop()
    ready.start()
    ready.run(5)
    ready.delete_pod("web-0")
    ready.run(5)
    assert macs(ready) == ["0a:58:00:00:00:02"]


def test_the_leases_of_a_vm_that_vanished_while_we_were_away_go_back(ready):
    mac = ready.guest("web-0").mac
    ready.stop()
    ready.host.cocoon.execute(["cocoon", "vm", "rm", "--force", VM], 30.0)
    ready.start()
    ready.run(10)
    assert ready.ready("web-0")
    assert macs(ready) == [ready.guest("web-0").mac] != [mac]
    assert annotations(ready, "web-0")["mac"] == ready.guest("web-0").mac


def test_a_deletion_that_was_interrupted_after_the_removal_gives_back_the_lease(ready):
    ready.host.cocoon.slow("vm rm", 0.5, step="after")
    ready.delete_pod("web-0", grace_seconds=30)
    ready.run(0.2)
    ready.kill()
    ready.run(5)
    assert macs(ready) != []
    ready.start()
    ready.run(10)
    assert (ready.pod("web-0"), macs(ready)) == (None, [])


def test_what_a_pod_says_of_macs_takes_no_lease_from_a_vm_that_lives(ready):
    """An annotation is no proof: anybody who may edit the pod can write it."""
    ready.create_pod("victim", guest=FAST)
    ready.create_pod("mac-0", os="macos")
    ready.run(40)
    victims = {ready.guest(name).mac for name in ("victim", "mac-0")}
    ready.stop()
    ready.annotate("web-0", mac=",".join(sorted(victims)) + ",garbage,")
    ready.start()
    ready.run(5)
    ready.delete_pod("web-0")
    ready.run(5)
    assert victims <= set(macs(ready))


def test_what_a_pod_says_of_macs_takes_no_lease_from_a_mac_that_belongs_to_no_pod(ready):
    ready.create_pod("mac-0", os="macos")
    ready.run(40)
    victim = ready.guest("mac-0").mac
    ready.stop()
    ready.delete_pod("mac-0", grace_seconds=0)
    ready.annotate("web-0", mac=victim)
    ready.start()
    ready.run(5)
    ready.delete_pod("web-0")
    ready.run(5)
    assert macs(ready) == [victim]


def test_while_the_vms_cannot_be_listed_the_leases_of_earlier_ones_wait(ready):
    mac = ready.guest("web-0").mac
    ready.stop()
    ready.host.cocoon.execute(["cocoon", "vm", "rm", "--force", VM], 30.0)
    ready.start()
    ready.host.cocoon.slow("vm clone", 5.0)
    ready.run(1)
    ready.host.cocoon.fail("vm list", times=None)
    ready.run(10)
    assert ready.ready("web-0")
    assert mac in macs(ready)
    assert mac in annotations(ready, "web-0")["mac"].split(",")
    ready.host.cocoon.faults.clear()
    ready.annotate("web-0", note="anything")
    ready.run(5)
    assert mac not in macs(ready)
    assert annotations(ready, "web-0")["mac"] == ready.guest("web-0").mac


def test_an_orphan_that_is_destroyed_gives_back_its_lease():
    with World(orphan_policy="destroy") as world:
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        world.stop()
        world.delete_pod("web-0", grace_seconds=0)
        world.start()
        world.run(30)
        assert (world.host.pids(), macs(world)) == ([], [])
