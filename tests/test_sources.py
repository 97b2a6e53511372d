"""The ways a VM comes up, in the order in which they win, and what each refuses: a state that was hibernated here, a
directory, a fork, an image to run, a snapshot to clone; each with the flags that its annotations ask for."""

import json

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations, calls, events, message, reason

VM = "vk-default-web-0"
MODE = "cocoonset.cocoonstack.io/mode"
IMAGE = "cocoonset.cocoonstack.io/image"
BACKEND = "vm.cocoonstack.io/backend"
FORK = "vm.cocoonstack.io/fork-from"
DIRECTORY = "vm.cocoonstack.io/clone-from-dir"
RESTORE = "vm.cocoonstack.io/restore-from-hibernate"


def argv(world, verb, name="*"):
    """The arguments of the last call of that verb about that name."""
    found = [call["argv"] for call in world.host.cocoon.calls if call["verb"] == verb and name in ("*", *call["names"])]
    return found[-1]


def clones_of(world, source):
    return sum(call["verb"] == "vm clone" and call["argv"][-1] == source for call in world.host.cocoon.calls)


def mark(world, name, memory):
    """Give a VM a trait that its snapshots and their clones inherit: which state is it?"""
    config = world.host.cocoon.record(f"vk-default-{name}")["config"]
    world.host.cocoon.set_record(f"vk-default-{name}", config={**config, "memory": memory})


def trait(world, name):
    return world.host.cocoon.record(f"vk-default-{name}")["config"]["memory"]


# --- flags ------------------------------------------------------------------------------------------------------------


def test_a_clone_says_where_its_memory_comes_from_and_costs_two_commands(world):
    world.create_pod("web-0", guest=FAST)
    world.run(2)
    assert calls(world.host.cocoon) == ["vm clone", "vm inspect"]
    assert argv(world, "vm clone")[2:] == [
        *("--output", "json", "--name", VM, "--restore-mode", "mmap", "devbox-base:7"),
    ]


def test_a_start_costs_one_look_at_the_vms_and_one_at_the_snapshots_however_many_pods_there_are(world):
    for number in range(5):
        world.create_pod(f"web-{number}", guest=FAST)
    world.run(5)
    world.stop()
    before = len(world.host.cocoon.calls)
    world.start()
    world.run(20)
    assert [call["verb"] for call in world.host.cocoon.calls[before:]] == ["vm list", "snapshot list", "vm status"]


def test_a_clone_takes_network_direct_io_backend_and_cpu_policy_from_the_pod(world):
    world.host.cocoon.add_snapshot("devbox-base:7", hypervisor="firecracker")
    wishes = {
        BACKEND: "firecracker",
        "vm.cocoonstack.io/no-direct-io": "true",
        "cocoonset.cocoonstack.io/network": "cocoon-static",
    }
    pod = world.kube.admin.create("/api/v1/namespaces/default/pods", with_cpu(world, wishes))
    world.run(2)
    found = argv(world, "vm clone")
    assert found[2:] == [
        *("--output", "json", "--name", VM, "--network", "cocoon-static", "--no-direct-io"),
        *("--cpu-weight", "20", "--cpu-quota-us", "150000", "--cpu-period-us", "100000", "devbox-base:7"),
    ]
    assert pod["metadata"]["name"] == "web-0"


def with_cpu(world, wishes):
    from simulator.world import example_pod

    pod = example_pod("web-0", annotations=wishes)
    pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "500m"}, "limits": {"cpu": "1500m"}}
    return pod


def test_a_windows_clone_gets_its_memory_by_copy(world):
    world.create_pod("web-0", os="windows", guest=FAST, annotations={MODE: "clone", IMAGE: "win-base:1"})
    world.run(2)
    assert "--restore-mode copy" in " ".join(argv(world, "vm clone"))


def test_force_pull_goes_past_the_cache(world):
    pull = {"cocoonset.cocoonstack.io/force-pull": "true"}
    world.create_pod("web-0", os="windows", guest=FAST, annotations=pull)
    world.run(2)
    assert argv(world, "image pull") == ["image", "pull", "--force", "win11-golden:2026-08"]


def test_many_who_want_one_image_share_one_pull_and_how_it_ends(world):
    world.host.cocoon.slow("image pull", 60.0)
    world.host.cocoon.fail("image pull", step="after", stderr="Error: pull: manifest unknown")
    for number in range(10):
        world.create_pod(f"win-{number}", os="windows", guest=FAST, annotations={IMAGE: "registry/win:1"})
    world.run(59)
    assert (world.host.cocoon.count("image pull"), world.host.cocoon.count("vm run")) == (1, 0)
    world.run(1.5)
    assert all("manifest unknown" in message(world, f"win-{number}") for number in range(10))
    world.run(10)
    assert world.host.cocoon.count("image pull") == 2
    assert all(world.ready(f"win-{number}") for number in range(10))


# --- hypervisors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "has"), [("firecracker", "cloud-hypervisor"), ("", "firecracker")])
def test_a_snapshot_of_the_other_hypervisor_is_refused_in_words_and_nothing_is_made(world, wanted, has):
    world.host.cocoon.add_snapshot("devbox-base:7", hypervisor=has)
    world.create_pod("web-0", guest=FAST, annotations={BACKEND: wanted} if wanted else {})
    world.run(5)
    assert f"snapshot devbox-base:7 is of {has}, and the pod asks for {wanted or 'cloud-hypervisor'}" in message(
        world, "web-0"
    )
    assert world.host.pids() == []


@pytest.mark.parametrize("source", ["fork", "hibernated"])
def test_a_fork_or_a_saved_state_of_the_other_hypervisor_is_refused_in_words_and_kept(world, source):
    world.create_pod("main", guest=FAST)
    world.run(5)
    name = "vk-default-main"
    if source == "hibernated":
        world.annotate("main", hibernate="true", keep_snapshot_on_delete="true")
        world.run(5)
        world.delete_pod("main")
        world.run(5)
        assert (world.pod("main"), world.host.pids()) == (None, [])
        wishes = {BACKEND: "firecracker", RESTORE: "true", "vm.cocoonstack.io/name": name}
    else:
        wishes = {BACKEND: "firecracker", FORK: name}
    world.create_pod("web-0", guest=FAST, annotations=wishes)
    world.run(60)
    snapshot = f"fork-{name}" if source == "fork" else name
    words = f"snapshot {snapshot} is of cloud-hypervisor, and the pod asks for firecracker"
    assert words in annotations(world, "web-0")["lifecycle-state-message"]
    assert len(world.host.pids()) == (1 if source == "fork" else 0)
    assert snapshot in [record["name"] for record in world.host.storage.read("cocoon/snapshots.json").values()]


def test_a_snapshot_that_is_not_there_is_named(world):
    world.create_pod("web-0", guest=FAST, annotations={IMAGE: "nowhere:1"})
    world.run(5)
    assert "inspect snapshot nowhere:1: snapshot not found" in message(world, "web-0")


# --- records that say less --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["run", "clone"])
def test_a_record_that_comes_back_from_before_the_start_is_read_again(world, mode):
    world.host.cocoon.run_hides_start = world.host.cocoon.clone_hides_pid = True
    world.create_pod("web-0", guest=FAST, annotations={MODE: mode})
    world.run(5)
    assert world.ready("web-0")
    assert world.host.cocoon.count("vm start") == 0
    assert world.daemon.provider.held.find("default/web-0").vm.pid > 0


def test_a_vm_whose_start_failed_is_started_and_not_made_again(world):
    """The tool leaves it in state error."""
    world.host.cocoon.fail("vm run", step="late", stderr="Error: start VM: no such device")
    world.create_pod("web-0", os="windows", guest=FAST)
    world.run(10)
    assert world.ready("web-0")
    assert (world.host.cocoon.count("vm run"), world.host.cocoon.count("vm start")) == (2, 1)
    assert len(world.host.pids()) == 1


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def main(world):
    world.create_pod("main", guest=FAST)
    world.run(2)
    mark(world, "main", 3 * 2**30)
    return world


def test_a_fork_begins_with_the_state_of_the_vm_it_is_of(main):
    main.create_pod("web-0", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(5)
    assert main.ready("web-0")
    assert trait(main, "web-0") == 3 * 2**30
    assert clones_of(main, "fork-vk-default-main") == 1
    assert clones_of(main, "devbox-base:7") == 1


def test_many_forks_of_one_vm_cost_one_snapshot(main):
    main.host.cocoon.slow("snapshot save", 30.0)
    for number in range(10):
        main.create_pod(f"web-{number}", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(60)
    assert all(main.ready(f"web-{number}") for number in range(10))
    assert main.host.cocoon.count("snapshot save") == 1
    main.create_pod("late", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(5)
    assert main.host.cocoon.count("snapshot save") == 1


def test_a_snapshot_that_fails_fails_all_who_wait_for_it_and_is_tried_again(main):
    main.host.cocoon.slow("snapshot save", 10.0)
    main.host.cocoon.fail("snapshot save", step="middle", stderr="Error: no space left on device", times=1)
    for number in range(5):
        main.create_pod(f"web-{number}", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(10.5)
    assert all("no space left" in message(main, f"web-{number}") for number in range(5))
    main.run(30)
    assert all(main.ready(f"web-{number}") for number in range(5))
    assert main.host.cocoon.count("snapshot save") == 2


def test_a_fork_is_never_of_an_earlier_vm_of_that_name(main):
    """The first was deleted; its namesake has another state."""
    main.create_pod("web-0", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(5)
    main.delete_pod("main")
    main.run(5)
    main.create_pod("main", guest=FAST)
    main.run(5)
    mark(main, "main", 5 * 2**30)
    main.create_pod("web-1", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(5)
    assert (trait(main, "web-0"), trait(main, "web-1")) == (3 * 2**30, 5 * 2**30)


def test_a_fork_of_a_vm_that_is_no_pods_is_of_the_one_there_is_now(world):
    """Nobody tells us when somebody else's VM is made anew."""
    for number, memory in enumerate((3 * 2**30, 5 * 2**30)):
        world.host.specs["theirs"] = FAST
        world.host.cocoon.execute(["cocoon", "vm", "clone", "--name", "theirs", "devbox-base:7"], 30.0)
        world.run(1)
        record = world.host.cocoon.record("theirs")
        world.host.cocoon.set_record("theirs", config={**record["config"], "memory": memory})
        world.create_pod(f"web-{number}", guest=FAST, annotations={FORK: "theirs"})
        world.run(5)
        assert trait(world, f"web-{number}") == memory
        world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "theirs"], 30.0)
        world.run(1)


def test_a_fork_of_an_earlier_life_of_the_daemon_is_not_trusted(main):
    main.create_pod("web-0", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(5)
    main.stop()
    main.start()
    main.run(5)
    mark(main, "main", 5 * 2**30)
    main.create_pod("web-1", guest=FAST, annotations={FORK: "vk-default-main"})
    main.run(5)
    assert trait(main, "web-1") == 5 * 2**30


def test_a_fork_of_a_vm_with_a_long_name_gets_a_name_that_fits(world):
    long = "vk-default-" + "x" * 52
    assert len(long) == 63
    world.create_pod("main", guest=FAST, annotations={"vm.cocoonstack.io/name": long})
    world.run(2)
    world.create_pod("web-0", guest=FAST, annotations={FORK: long})
    world.run(5)
    assert world.ready("web-0")
    assert len(argv(world, "vm clone", VM)[-1]) == 63


@pytest.mark.parametrize(("source", "words"), [("vk-default-nobody", "VM not found"), (VM, "forked from itself")])
def test_a_fork_needs_a_vm_that_is_another(main, source, words):
    main.create_pod("web-0", guest=FAST, annotations={FORK: source})
    main.run(5)
    assert words in message(main, "web-0")
    assert clones_of(main, "devbox-base:7") == 1


def test_two_that_want_to_be_forks_of_each_other_hold_up_nobody(world):
    for one, other in ((0, 1), (1, 0)):
        world.create_pod(f"web-{one}", annotations={FORK: f"vk-default-web-{other}"})
    world.create_pod("quick", guest=FAST)
    world.run(30)
    assert world.ready("quick")
    assert all("VM not found" in message(world, f"web-{number}") for number in range(2))


# --- directories ------------------------------------------------------------------------------------------------------


def test_an_exported_directory_is_cloned_and_its_layers_are_pulled(world, tmp_path):
    config = {
        "cpu": 2,
        "memory": 2**31,
        "storage": 2**34,
        "image": "x",
        "image_digest": "sha256:1",
        "image_type": "oci",
    }
    envelope = {"version": 1, "config": {**config, "hypervisor": "cloud-hypervisor", "nics": 1}}
    (tmp_path / "snapshot.json").write_text(json.dumps(envelope))
    world.create_pod("web-0", guest=FAST, annotations={DIRECTORY: str(tmp_path), IMAGE: ""})
    world.run(5)
    assert world.ready("web-0")
    assert argv(world, "vm clone")[-3:] == ["mmap", "--from-dir", str(tmp_path)]
    assert "--pull" in argv(world, "vm clone")


@pytest.mark.parametrize(
    "wrong",
    [{DIRECTORY: "export"}, {DIRECTORY: "/a/../b"}, {DIRECTORY: "/a", MODE: "run"}, {DIRECTORY: "/a", FORK: "b"}],
)
def test_a_directory_that_is_none_or_contradicts_another_source_costs_no_command(world, wrong):
    world.create_pod("web-0", annotations=wrong)
    world.run(5)
    assert DIRECTORY in message(world, "web-0")
    assert calls(world.host.cocoon) == []


# --- what was hibernated here -----------------------------------------------------------------------------------------


def left_behind(world, **wishes):
    """A VM is hibernated, its pod is deleted with its state kept, and a namesake comes without being marked."""
    world.create_pod("web-0", guest=FAST)
    world.run(2)
    mark(world, "web-0", 7 * 2**30)
    world.annotate("web-0", hibernate="true", keep_snapshot_on_delete="true")
    world.run(3)
    world.delete_pod("web-0")
    world.run(3)
    world.create_pod("web-0", guest=FAST, annotations=wishes)
    world.run(5)


def test_a_state_that_was_hibernated_here_goes_on_although_the_new_pod_does_not_say_so(world):
    left_behind(world)
    assert world.ready("web-0")
    assert trait(world, "web-0") == 7 * 2**30
    told = [event for event in events(world, "web-0") if event[0] == "HibernateSnapshotExists"]
    assert told == [("HibernateSnapshotExists", f"VM {VM} was hibernated on this host and goes on from there")]


@pytest.mark.parametrize(
    ("wish", "words"),
    [({FORK: "vk-default-main"}, "asks for 'vk-default-main'"), ({IMAGE: "other-base:1"}, "asks for 'other-base:1'")],
)
def test_a_new_pod_that_asks_for_something_else_is_refused_and_the_state_kept(world, wish, words):
    left_behind(world, **wish)
    assert reason(world, "web-0") == "LifecycleFailed"
    assert words in message(world, "web-0")
    assert "HibernateEvidenceFailed" in [event[0] for event in events(world, "web-0")]
    assert world.host.pids() == []
    assert world.host.cocoon.execute(["cocoon", "snapshot", "inspect", VM], 30.0).returncode == 0


def test_marked_as_a_restore_it_goes_on_whatever_else_the_pod_asks_for(world):
    left_behind(world, **{FORK: "vk-default-main", RESTORE: "true"})
    assert trait(world, "web-0") == 7 * 2**30


def test_a_new_pod_that_wants_to_be_hibernated_is_so_without_being_woken_first(world):
    left_behind(world, **{"vm.cocoonstack.io/hibernate": "true"})
    assert annotations(world, "web-0")["lifecycle-state"] == "hibernated"
    assert world.host.cocoon.count("vm clone") == 1
    world.annotate("web-0", hibernate=None)
    world.run(5)
    assert trait(world, "web-0") == 7 * 2**30


def test_a_restore_without_a_state_on_this_host_fails_closed(world):
    world.create_pod("web-0", guest=FAST, annotations={RESTORE: "true"})
    world.run(5)
    assert "not on this host" in message(world, "web-0")
    assert "HibernateEvidenceFailed" in [event[0] for event in events(world, "web-0")]
    assert clones_of(world, "devbox-base:7") == 0


def test_a_list_of_snapshots_that_cannot_be_read_starts_nothing():
    """Fresh VMs in place of hibernated ones would be made from what is not known."""
    with World() as world:
        world.stop()
        world.host.cocoon.fail("snapshot list", times=3)
        world.create_pod("web-0", guest=FAST)
        world.start()
        world.run(2)
        assert calls(world.host.cocoon) == []
        world.run(30)
        assert world.ready("web-0")


# --- classes of CPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "ready"), [("lab-a", True), ("lab-b", False), ("", False)])
def test_a_pod_for_a_class_of_cpus_comes_up_only_there(ours, ready):
    from simulator.world import example_pod

    with World(snapshot_cpu_class=ours) as world:
        pod = example_pod("web-0")
        pod["spec"]["nodeSelector"] = {"cocoonstack.io/snapshot-cpu-class": "lab-a"}
        world.kube.admin.create("/api/v1/namespaces/default/pods", pod)
        world.run(5)
        assert world.ready("web-0") is ready
        assert (world.host.cocoon.count("vm clone") == 1) is ready
        if not ready:
            assert "cocoonstack.io/snapshot-cpu-class='lab-a'" in message(world, "web-0")


# --- what an earlier life left ----------------------------------------------------------------------------------------


def test_a_vm_that_stopped_while_we_were_away_is_started_and_not_made_anew(world):
    """Not even its image is asked for: the registry may be away."""
    world.create_pod("web-0", os="windows", guest=FAST)
    world.run(5)
    world.stop()
    world.guest("web-0").crash()
    world.host.cocoon.fail("image pull", times=None)
    world.start()
    world.run(20)
    assert world.ready("web-0")
    assert (world.host.cocoon.count("vm run"), world.host.cocoon.count("vm start")) == (1, 1)


def test_a_vm_that_vanished_after_we_looked_is_made_anew(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.stop()
    world.guest("web-0").crash()
    held = world.host.cocoon.hold("vm inspect")
    world.start()
    world.run(1)
    assert held.reached.is_set()
    world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", VM], 30.0)
    held.release()
    world.run(20)
    assert world.ready("web-0")
    assert world.host.cocoon.count("vm clone") == 2


def half_made(world, name="vk-default-nobody"):
    """What a killed clone of a VM that no pod asks for leaves."""
    world.host.cocoon.kill("vm clone", step="middle")
    world.host.cocoon.execute(["cocoon", "vm", "clone", "--name", name, "devbox-base:7"], 30.0)
    assert world.host.cocoon.record(name)["state"] == "creating"


@pytest.mark.parametrize("policy", ["alert", "keep", "destroy"])
def test_a_half_made_vm_that_no_pod_asks_for_is_cleared_by_its_own_tool(policy):
    with World(orphan_policy=policy) as world:
        world.stop()
        half_made(world)
        world.start()
        world.run(5)
        assert world.host.cocoon.record("vk-default-nobody") is None
        assert world.host.cocoon.count("vm rm") == 0


def test_a_vm_that_somebody_is_making_is_asked_about_until_it_is_made_and_then_an_orphan():
    with World(orphan_policy="destroy") as world:
        world.stop()
        held = world.host.cocoon.hold("vm clone", step="middle")
        world.clock.spawn(
            "somebody",
            world.host.cocoon.execute,
            ["cocoon", "vm", "clone", "--name", "vk-default-nobody", "devbox-base:7"],
            300.0,
        )
        world.run(1)
        assert held.reached.is_set()
        world.start()
        world.run(20)
        assert world.host.cocoon.count("vm reconcile-stale-create") == 5  # after 0, 1, 3, 7 and 15 seconds
        assert world.host.cocoon.count("vm rm") == 0
        held.release()
        world.run(20)
        assert world.host.cocoon.record("vk-default-nobody") is None


def test_a_half_made_vm_becomes_the_creations_of_a_pod_that_comes_for_it(world):
    world.stop()
    half_made(world, VM)
    world.host.cocoon.fail("vm reconcile-stale-create", times=2)
    world.start()
    world.run(0.5)
    world.create_pod("web-0", guest=FAST)
    world.run(30)
    assert world.ready("web-0")
    assert len(world.host.pids()) == 1


def test_a_half_made_vm_that_an_old_tool_cannot_clear_is_asked_about_for_half_an_hour(world):
    world.stop()
    half_made(world)
    world.host.cocoon.old = True
    world.start()
    world.run(2000)
    asked = world.host.cocoon.count("vm reconcile-stale-create")
    world.run(3600)
    assert world.host.cocoon.count("vm reconcile-stale-create") == asked
    assert world.host.cocoon.record("vk-default-nobody")["state"] == "creating"


def test_two_macos_guests_never_share_a_display_over_a_restart():
    """The adopted one has its display before anybody else asks for one."""
    mac = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
    with World(macos_vnc_password="secret") as world:
        world.create_pod("mac-0", os="macos", guest=mac)
        world.run(10)
        world.stop()
        world.start()
        world.create_pod("mac-1", os="macos", guest=mac)
        world.run(30)
        assert [annotations(world, f"mac-{n}")["vnc-port"] for n in range(2)] == ["5900", "5901"]
        assert world.ready("mac-1")
