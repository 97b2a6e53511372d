"""The simulated cocoon keeps to the contract of the real one: strict arguments, odd records, faults at known steps.

A simulator more forgiving than reality proves nothing, so here it is held to what cocoon does: it refuses what that
refuses, in its words; it forgets to tell of a crash; it answers late, wrongly or never when asked to. All in virtual
time, to the microsecond.
"""

import json

import pytest
from host_rig import Rig

from simulator.fake_tools import Step
from vkcocoon_vms import CloneSpec, CommandError, VMNotFound


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.clock.close()


# --- strict arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "a command is missing"),
        ("vm", 'a command is missing after "cocoon vm"'),
        ("vm frobnicate", 'unknown command "frobnicate" for "cocoon vm"'),
        ("pod list", 'unknown command "pod" for "cocoon"'),
        ("vm list --json", "unknown flag: --json"),
        ("vm list -x", "unknown shorthand flag: 'x' in -x"),
        ("vm list web-0", "accepts 0 arg(s), received 1"),
        ("vm inspect", "accepts 1 arg(s), received 0"),
        ("vm inspect a b", "accepts 1 arg(s), received 2"),
        ("vm inspect --output json a", "unknown flag: --output"),
        ("vm start", "requires at least 1 arg(s), only received 0"),
        ("vm run --name", "flag needs an argument: --name"),
        ("vm run --cpu two img", 'invalid argument "two" for "--cpu" flag'),
        ("vm run --windows=maybe img", 'invalid argument "maybe" for "--windows" flag'),
        ("vm clone --cpu 2 devbox-base:7", "unknown flag: --cpu"),
        ("vm clone --memory 1G devbox-base:7", "unknown flag: --memory"),
        ("vm clone --on-demand devbox-base:7", "unknown flag: --on-demand"),
        ("vm clone", "exactly one of SNAPSHOT and --from-dir"),
        ("vm clone --from-dir /nowhere devbox-base:7", "exactly one of SNAPSHOT and --from-dir"),
        ("vm clone --from-dir /nowhere", "load envelope: open /nowhere/snapshot.json: no such file or directory"),
        ("vm clone --restore-mode fast devbox-base:7", "unknown restore mode"),
        ("vm clone nothing", "inspect snapshot nothing: snapshot not found"),
        ("vm run missing", 'image "missing" not resolved: not found in any backend'),
        ("vm run --memory 100M img", "--memory must be at least 512M"),
        ("vm run --memory much img", '--memory: invalid size "much"'),
        ("vm run --storage 1G img", "--storage must be at least 10240M"),
        ("vm run --cpu 65 img", "exceeds the 64 CPUs"),
        ("vm run --cpu 0 img", "--cpu must be at least 1"),
        ("vm run --fc --windows img", "--fc does not support --windows"),
        ("vm run --windows img", "--windows needs a cloud image"),
        ("vm run --fc win11-golden", "--fc does not support cloud images"),
        ("vm run --network none img", 'conflist "none" not found (available: cocoon-dhcp, cocoon-static)'),
        ("vm run --network cocoon-dhcp --bridge cni0 img", "exclude each other"),
        ("vm run --name -x img", "invalid VM name"),
        ("vm run --name " + "x" * 64 + " img", "invalid VM name"),
        ("vm rm web-9", "vm web-9: VM not found"),
        ("vm logs web-9", "logs: vm web-9: VM not found"),
        ("vm exec web-9 -- ls", "exec: vm web-9: VM not found"),
        ("vm status", "only the event stream"),
        ("snapshot save --name s web-9", "find VM web-9: vm web-9: VM not found"),
        ("snapshot inspect s", "inspect: snapshot not found"),
        ("snapshot rm s", 'rm: resolve "s": snapshot not found'),
        ("image inspect x", 'inspect: image "x": not found in any backend'),
    ],
)
def test_cocoon_refuses_what_the_real_one_refuses_in_its_words(rig, command, says):
    rig.cocoon.add_image("img")
    done = rig.cocoon.execute(["cocoon", *command.split()], 30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ") and says in done.stderr
    assert rig.cli.list() == []


def test_flags_are_understood_in_every_spelling(rig):
    rig.cocoon.add_image("img")
    for command in (
        "--root-dir /x vm run --name=a --cpu=2 -o json img",
        "vm --log-level=debug run img --name b -o=json",
        "vm run -ojson --no-direct-io --name c -- img",
    ):
        done = rig.cocoon.execute(["cocoon", *command.split()], 30)
        assert done.returncode == 0, done.stderr
    assert [vm.name for vm in rig.cli.list()] == ["a", "b", "c"]


# --- records and states --------------------------------------------------------------------------------------------


def test_a_run_and_a_clone_go_through_their_states(rig):
    vm = rig.run_vm(cpu=2, memory=2**30, storage="20G")
    record = rig.cocoon.record("web-0")
    assert (vm.state, record["last_transition_reason"], record["transition_generation"]) == ("running", "boot", 2)
    assert record["config"]["storage"] == 20 * 2**30
    printed = json.loads(rig.cocoon.execute(["cocoon", "vm", "clone", "--name", "c", "devbox-base:7"], 30).stdout)
    assert (printed["state"], printed["pid"], "socket_path" in printed) == ("running", 0, False)
    assert rig.cli.inspect("c").pid > 0
    rig.cocoon.run_hides_start = True
    printed = json.loads(rig.cocoon.execute(["cocoon", "vm", "run", "--name", "d", "img"], 30).stdout)
    assert (printed["state"], printed["pid"]) == ("created", 0)


def test_every_clone_has_a_mac_and_an_id_of_its_own_and_a_restart_keeps_them(rig):
    vms = [rig.clone_vm(f"web-{number}") for number in range(50)]
    assert len({vm.mac for vm in vms}) == len({vm.id for vm in vms}) == 50
    rig.cli.stop(vms[0].id)
    rig.cli.start(vms[0].id)
    again = rig.cli.inspect("web-0")
    assert (again.mac, again.id) == (vms[0].mac, vms[0].id)
    assert again.pid != vms[0].pid


def test_a_name_that_is_taken_is_refused_with_the_id_of_its_holder(rig):
    vm = rig.clone_vm()
    with pytest.raises(CommandError, match=rf'vm name "web-0" already exists \(id: {vm.id}\)'):
        rig.clone_vm()
    assert len(rig.cli.list()) == 1


def test_a_ref_is_an_id_a_name_or_the_beginning_of_an_id(rig):
    vm = rig.clone_vm()
    inspect = lambda ref: rig.cocoon.execute(["cocoon", "vm", "inspect", ref], 30)  # noqa: E731
    assert {inspect(ref).returncode for ref in (vm.id, "web-0", vm.id[:3])} == {0}
    assert "VM not found" in inspect(vm.id[:2]).stderr
    rig.cocoon.host.storage.read("cocoon/vms.json")[vm.id[:25] + "X"] = {**rig.cocoon.record(vm.id), "id": "x"}
    assert "ambiguous ref" in inspect(vm.id[:10]).stderr


def test_a_static_network_gives_addresses_and_dhcp_gives_none(rig):
    first, second = rig.clone_vm("a", network="cocoon-static"), rig.clone_vm("b", network="cocoon-static")
    assert (first.static_ip, second.static_ip) == ("10.22.0.2", "10.22.0.3")
    assert "network" not in rig.cocoon.record(rig.clone_vm("c").id)["network_configs"][0]
    rig.cocoon.empty_network = True
    rig.clone_vm("d")
    assert rig.cocoon.record("d")["network_configs"][0]["network"] == {}


def test_a_crash_is_told_to_nobody_and_shows_as_stale(rig):
    vm = rig.clone_vm()
    rig.host.guest("web-0").crash()
    assert rig.cli.inspect(vm.id).state == "stopped (stale)"
    assert rig.cocoon.record(vm.id)["state"] == "running"
    assert rig.cli.list()[0].state == "stopped (stale)"
    rig.cocoon.list_hides_stale = True
    assert rig.cli.list()[0].state == "running"
    rig.cli.start(vm.id)
    assert rig.cli.inspect(vm.id).running


def test_starting_what_runs_changes_nothing(rig):
    vm = rig.clone_vm()
    rig.cli.start(vm.id)
    assert rig.cli.inspect(vm.id) == rig.cli.inspect("web-0")
    assert rig.host.guest("web-0").boots == 1


def test_a_running_vm_is_removed_only_by_force_and_leaves_no_process(rig):
    vm = rig.clone_vm()
    pid = rig.cli.inspect(vm.id).pid
    done = rig.cocoon.execute(["cocoon", "vm", "rm", vm.id], 30)
    assert "running (force required)" in done.stderr
    assert rig.host.processes(pid)
    rig.cli.remove(vm.id)
    assert rig.host.processes(pid) is None
    with pytest.raises(VMNotFound):
        rig.cli.inspect(vm.id)


def test_an_empty_list_has_two_spellings(rig):
    assert rig.cocoon.execute(["cocoon", "vm", "list", "-o", "json"], 30).stdout == "[]\n"
    rig.cocoon.empty_sentence = True
    assert rig.cocoon.execute(["cocoon", "vm", "list", "-o", "json"], 30).stdout == "No VMs found.\n"
    assert rig.cli.list() == []


def test_an_old_cocoon_knows_fewer_verbs(rig):
    vm = rig.clone_vm()
    rig.cocoon.old = True
    with pytest.raises(CommandError, match="unknown command"):
        rig.cli.reconcile_stale_create(vm.id)


def test_a_network_card_added_later_has_a_new_mac_and_the_last_goes_first(rig):
    vm = rig.clone_vm()
    net = lambda count: rig.cocoon.execute(["cocoon", "vm", "net", "--nics", str(count), vm.id], 30)  # noqa: E731
    assert net(2).returncode == 0
    macs = [nic.mac for nic in rig.cli.inspect(vm.id).nics]
    assert macs[0] == vm.mac and len(set(macs)) == 2
    net(0)
    net(1)
    assert rig.cli.inspect(vm.id).mac not in macs


# --- faults --------------------------------------------------------------------------------------------------------


def test_a_fault_strikes_one_vm_so_many_times_and_then_never_again(rig):
    rig.clone_vm("a")
    rig.clone_vm("b")
    rig.cocoon.fail("vm inspect", name="a", stderr="Error: inspect: database is locked", times=2)
    for _ in range(2):
        assert rig.cli.inspect("b")
        with pytest.raises(CommandError, match="database is locked"):
            rig.cli.inspect("a")
    assert rig.cli.inspect("a")


def test_a_fault_for_a_name_also_strikes_who_asks_by_id(rig):
    vm = rig.clone_vm("a")
    rig.cocoon.fail("vm inspect", name="a")
    with pytest.raises(CommandError):
        rig.cli.inspect(vm.id)


def test_a_fault_without_a_count_strikes_for_ever_until_it_is_lifted(rig):
    rig.clone_vm()
    rig.cocoon.fail("vm inspect", times=None)
    for _ in range(5):
        with pytest.raises(CommandError):
            rig.cli.inspect("web-0")
    rig.cocoon.faults.clear()
    assert rig.cli.inspect("web-0")


def test_a_slow_call_takes_exactly_that_long(rig):
    rig.cocoon.slow("vm clone", 7.25)
    vm, took = rig.during(rig.clone_vm)
    assert (vm.running, took) == (True, 7.25)


@pytest.mark.parametrize(
    ("verb", "limit"), [("vm inspect", 30.0), ("vm list", 30.0), ("vm start", 300.0), ("snapshot save", 900.0)]
)
def test_a_call_that_hangs_is_ended_at_its_limit(rig, verb, limit):
    vm = rig.clone_vm()
    rig.cocoon.hang(verb)
    calls = {
        "vm inspect": (rig.cli.inspect, vm.id),
        "vm list": (rig.cli.list,),
        "vm start": (rig.cli.start, vm.id),
        "snapshot save": (rig.cli.snapshot_save, "s", vm.id),
    }
    error, took = rig.during(*calls[verb])
    assert (error.why, error.returncode, took) == (f"still running after {limit:g} s", None, limit)


def test_a_create_over_its_limit_gives_its_name_back(rig):
    rig.cocoon.slow("vm clone", 301)
    error, took = rig.during(rig.clone_vm)
    assert (type(error), took) == (CommandError, 300)
    assert rig.cli.list() == []
    assert rig.clone_vm().running


@pytest.mark.parametrize("verb", ["vm run", "vm clone"])
def test_a_create_that_fails_half_way_gives_its_name_back(rig, verb):
    create = rig.run_vm if verb == "vm run" else rig.clone_vm
    rig.cocoon.fail(verb, stderr="Error: no space left", step=Step.MIDDLE)
    with pytest.raises(CommandError, match="no space left"):
        create()
    assert rig.cli.list() == []
    assert create().running


def test_a_run_whose_start_fails_leaves_the_record_in_error(rig):
    rig.cocoon.fail("vm run", stderr="Error: start VM x: no memory", step=Step.LATE)
    with pytest.raises(CommandError):
        rig.run_vm()
    vm = rig.cli.inspect("web-0")
    assert (vm.state, vm.pid, rig.host.pids()) == ("error", 0, [])
    rig.cli.start(vm.id)
    assert rig.cli.inspect("web-0").running


def test_a_killed_create_leaves_a_placeholder_that_holds_the_name_and_no_lock(rig):
    rig.cocoon.kill("vm clone")
    with pytest.raises(CommandError) as caught:
        rig.clone_vm()
    assert caught.value.returncode == -9
    [skeleton] = rig.cli.list()
    assert (skeleton.name, skeleton.state, skeleton.nics) == ("web-0", "creating", ())
    with pytest.raises(CommandError, match="already exists"):
        rig.clone_vm()
    assert rig.cli.reconcile_stale_create(skeleton.id) == "collected"
    assert rig.cli.reconcile_stale_create(skeleton.id) == "not-found"
    assert rig.cli.reconcile_stale_create(rig.clone_vm().id) == "not-creating"


def test_a_create_in_flight_is_busy_and_a_removal_waits_for_it(rig):
    hold = rig.cocoon.hold("vm clone", step=Step.MIDDLE)
    clone = rig.background(rig.clone_vm)
    rig.clock.run(1)
    assert hold.reached.is_set()
    [skeleton] = rig.cli.list()
    assert rig.cli.reconcile_stale_create(skeleton.id) == "busy"
    removal = rig.background(rig.cli.remove, skeleton.id)
    rig.clock.run(9)
    assert (clone, removal) == ([], [])
    hold.release()
    rig.clock.run(0)
    assert (clone[0].id, clone[1]) == (skeleton.id, 10.0)
    assert removal == [None, 10.0]
    assert rig.cli.list() == []


def test_a_failed_removal_keeps_the_record_and_an_untidy_one_does_not(rig):
    vm = rig.clone_vm()
    rig.cocoon.fail("vm rm", stderr="Error: rm: device busy")
    with pytest.raises(CommandError):
        rig.cli.remove(vm.id)
    assert rig.cli.inspect(vm.id).running
    rig.cocoon.fail("vm rm", stderr="Error: vm(s) deleted but network cleanup failed: busy", step=Step.AFTER)
    rig.cli.remove(vm.id)
    assert rig.cli.list() == []


@pytest.mark.parametrize("stdout", ["", "{", "null", "<html>", '{"id": 7}'])
def test_a_garbled_answer_proves_nothing_and_passes(rig, stdout):
    rig.clone_vm()
    rig.cocoon.garble("vm inspect", stdout)
    with pytest.raises(CommandError) as caught:
        rig.cli.inspect("web-0")
    assert not isinstance(caught.value, VMNotFound)
    assert rig.cli.inspect("web-0").running


def test_a_flood_is_an_error(rig):
    rig.cocoon.garble("vm list", "x" * (33 * 2**20))
    with pytest.raises(CommandError, match="printed more than 32 MiB"):
        rig.cli.list()


def test_a_missing_binary_is_no_answer(rig):
    rig.clone_vm()
    rig.cocoon.missing = True
    with pytest.raises(CommandError, match="cannot be run: No such file or directory") as caught:
        rig.cli.inspect("web-0")
    assert caught.value.returncode is None
    with pytest.raises(CommandError, match="cannot be run"):
        next(rig.cli.events())
    rig.cocoon.missing = False
    assert rig.cli.inspect("web-0").running


def test_calls_are_counted_by_verb_and_name(rig):
    vm = rig.clone_vm()
    rig.cli.inspect("web-0")
    assert (rig.cocoon.count("vm clone"), rig.cocoon.count("vm inspect", vm.id)) == (1, 2)
    assert rig.cocoon.calls[0]["argv"] == ["vm", "clone", "--output", "json", "--name", "web-0", "devbox-base:7"]


def test_with_jitter_the_same_seed_is_the_same_history(tmp_path):
    def history(seed, directory):
        directory.mkdir()
        rig = Rig(directory, seed=seed, jitter_s=0.002)
        results = [rig.background(rig.clone_vm, f"web-{number}") for number in range(20)]
        rig.clock.run(30)
        rig.clock.close()
        assert all(result[0].running for result in results)
        return rig.log

    first, again, other = history(1, tmp_path / "a"), history(1, tmp_path / "b"), history(2, tmp_path / "c")
    assert first == again
    assert first != other


# --- snapshots -----------------------------------------------------------------------------------------------------


def test_hibernate_and_wake_on_local_snapshots(rig):
    vm = rig.run_vm(cpu=4, memory=2**31)
    rig.cli.snapshot_save("vk-web-0", vm.id)
    snapshot = rig.cli.snapshot_inspect("vk-web-0")
    assert (snapshot.name, snapshot.image, snapshot.hypervisor) == ("vk-web-0", "img", "cloud-hypervisor")
    assert snapshot.image_digest == rig.cocoon.record(vm.id)["config"]["image_digest"]
    rig.cli.remove(vm.id)
    woken = rig.cli.clone(CloneSpec(name="web-0", snapshot="vk-web-0"))
    assert woken.running and woken.id != vm.id and woken.mac != vm.mac
    assert rig.cocoon.record("web-0")["config"]["cpu"] == 4
    rig.cli.snapshot_remove("vk-web-0")
    with pytest.raises(CommandError, match="snapshot not found"):
        rig.cli.snapshot_inspect("vk-web-0")


def test_only_a_running_vm_is_saved_and_a_name_is_saved_over(rig):
    vm = rig.clone_vm()
    rig.cli.snapshot_save("s", vm.id)
    first = rig.cli.snapshot_inspect("s").id
    rig.cli.snapshot_save("s", vm.id)
    assert rig.cli.snapshot_inspect("s").id != first
    rig.host.guest("web-0").crash()
    with pytest.raises(CommandError, match="VM not running"):
        rig.cli.snapshot_save("t", vm.id)


def test_a_killed_save_leaves_a_name_that_is_freed_by_its_id(rig):
    vm = rig.clone_vm()
    rig.cocoon.kill("snapshot save")
    with pytest.raises(CommandError):
        rig.cli.snapshot_save("s", vm.id)
    with pytest.raises(CommandError, match="snapshot not found"):
        rig.cli.snapshot_inspect("s")
    clash = rig.cocoon.execute(["cocoon", "snapshot", "save", "--name", "s", vm.id], 30)
    assert 'snapshot name "s" already in use by ' in clash.stderr
    rig.cli.snapshot_save("s", vm.id)
    assert rig.cli.snapshot_inspect("s").name == "s"


def test_a_snapshot_is_leased_while_a_clone_reads_from_it(rig):
    vm = rig.run_vm("source")
    rig.cli.snapshot_save("s", vm.id)
    rig.cocoon.slow("vm clone", 2.2)
    clone = rig.background(rig.cli.clone, CloneSpec(name="web-0", snapshot="s"))
    rig.clock.run(0)
    result, took = rig.during(rig.cli.snapshot_remove, "s")
    assert (result, took) == (None, 2.5)
    assert clone[0].running


def test_a_clone_from_a_directory_reads_its_envelope(rig, tmp_path):
    config = {"cpu": 2, "memory": 2**30, "storage": 2**34, "image": "x", "hypervisor": "firecracker"}
    (tmp_path / "snapshot.json").write_text(json.dumps({"version": 1, "config": config}))
    vm = rig.cli.clone(CloneSpec(name="web-0", from_dir=str(tmp_path), firecracker=True))
    assert vm.hypervisor == "firecracker"
    refused = rig.cocoon.execute(["cocoon", "vm", "clone", "--nics", "1", "--from-dir", str(tmp_path)], 30)
    assert "need cloud-hypervisor" in refused.stderr


# --- events --------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch(rig):
    """Subscribes, and returns the growing list of (instant, kind, name, state)."""

    def subscribe():
        seen = []

        def listen():
            for each in rig.cli.events():
                seen.append((rig.clock.elapsed(), each.kind, each.vm.name, each.vm.state))
            seen.append((rig.clock.elapsed(), "end", "", ""))

        rig.clock.spawn("listen", listen)
        rig.clock.run(0)
        return seen

    return subscribe


def test_a_subscription_begins_with_what_is_there_and_tells_changes_after_a_moment(rig, watch):
    rig.clone_vm("a")
    seen = watch()
    assert seen == [(0.0, "ADDED", "a", "running")]
    rig.clock.run(1)
    vm = rig.clone_vm("b")
    rig.clock.run(1)
    rig.cli.remove(vm.id)
    rig.clock.run(10)
    assert seen[1:] == [(1.2, "ADDED", "b", "running"), (2.2, "DELETED", "b", "running")]


def test_a_crash_is_noticed_at_the_next_tick_only(rig, watch):
    rig.clone_vm("a")
    seen = watch()
    rig.clock.run(7)
    rig.host.guest("a").crash()
    rig.clock.run(2.9)
    assert len(seen) == 1
    rig.clock.run(1)
    assert seen[1:] == [(10.0, "MODIFIED", "a", "stopped (stale)")]


def test_a_crash_that_was_repaired_between_two_looks_leaves_no_trace(rig, watch):
    rig.clone_vm("a")
    seen = watch()
    rig.host.guest("a").crash()
    rig.cli.start("a")
    rig.clock.run(30)
    assert len(seen) == 1


def test_a_failed_look_deletes_everybody_and_the_next_brings_them_back(rig, watch):
    rig.clone_vm("a")
    rig.clone_vm("b")
    seen = watch()
    rig.clock.run(1)
    rig.cocoon.fail_listing()
    rig.clock.run(5)
    assert sorted(each[1:3] for each in seen[2:4]) == [("DELETED", "a"), ("DELETED", "b")]
    assert {each[3] for each in seen[2:4]} == {"running"}
    rig.clock.run(5)
    assert sorted(each[1:3] for each in seen[4:]) == [("ADDED", "a"), ("ADDED", "b")]


def test_a_torn_line_and_an_end_of_the_stream(rig, watch):
    rig.clone_vm("a")
    seen = watch()
    rig.cocoon.tear_line()
    rig.clock.run(1)
    assert len(seen) == 1
    rig.cocoon.end_stream()
    rig.clock.run(1)
    assert [each[1] for each in seen] == ["ADDED", "end"]


def test_the_optional_daemon_stores_a_crash_as_stopped(rig, watch):
    rig.cocoon.daemon = True
    rig.clone_vm("a")
    seen = watch()
    rig.host.guest("a").crash()
    rig.clock.run(10)
    assert seen[1][1:] == ("MODIFIED", "a", "stopped")
    assert rig.cocoon.record("a")["last_transition_reason"] == "unexpected-exit"


def test_a_stream_can_fail_to_start(rig):
    rig.cocoon.fail("vm status", stderr="Error: status: store is locked")
    error, took = rig.during(lambda: list(rig.cli.events()))
    assert isinstance(error, CommandError) and "store is locked" in error.stderr
    assert took == 0


# --- the log -------------------------------------------------------------------------------------------------------


def test_everything_that_happens_is_recorded_with_its_instant(rig):
    vm = rig.clone_vm()
    rig.clock.run(2)
    rig.host.guest("web-0").crash()
    assert [(at, actor, kind, key) for at, actor, kind, key, _ in rig.log] == [
        (0.0, "host", "power on", "web-0"),
        (0.0, "cocoon", "vm clone", "web-0"),
        (0.0, "cocoon", "vm inspect", vm.id),
        (1.5, "guest", "address", "web-0"),
        (2.0, "guest", "crash", "web-0"),
        (2.0, "guest", "address", "web-0"),
    ]


# --- what calls in flight hold -------------------------------------------------------------------------------------


def test_a_lock_held_by_somebody_makes_a_placeholder_busy_and_lets_others_wait(rig):
    vm = rig.clone_vm()
    rig.cocoon.set_record(vm.id, state="creating")

    def hold():
        with rig.cocoon.hold_lock(vm.id):
            rig.clock.sleep(12)

    rig.clock.spawn("hold", hold)
    rig.clock.run(0)
    assert rig.cli.reconcile_stale_create(vm.id) == "busy"
    assert rig.during(rig.cli.remove, vm.id) == (None, 12)


def test_a_snapshot_leased_by_somebody_can_be_read_and_not_removed(rig):
    def lease():
        with rig.cocoon.lease_snapshot("devbox-base:7"):
            rig.clock.sleep(100)

    rig.clock.spawn("lease", lease)
    rig.clock.run(0)
    assert rig.clone_vm().running
    error, took = rig.during(rig.cli.snapshot_remove, "devbox-base:7")
    assert "is in use by an active clone" in error.stderr and took == 30


def test_a_guest_command_answers_as_it_was_told_once_its_agent_is_up(rig):
    vm = rig.clone_vm()
    rig.cocoon.fail("vm exec", stderr="Error: exec: dial agent: refused (cocoon-agent may still be starting)", times=2)
    rig.cocoon.exec_replies = {"cat /etc/hostname": [0, "web-0\n"], "false": [1, ""]}
    answers = [rig.cli.exec(vm.id, ["cat", "/etc/hostname"]) for _ in range(3)]
    assert [answer.returncode for answer in answers] == [1, 1, 0]
    assert answers[2].stdout == "web-0\n"
    assert rig.cli.exec(vm.id, ["false"]).returncode == 1
    rig.host.guest("web-0").crash()
    assert "VM not running" in rig.cli.exec(vm.id, ["false"]).stderr
