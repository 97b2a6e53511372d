"""The command lines of cocoon and cocoon-macos: what is asked, how answers are read, and what a failure proves.

Clause: only a tool that says so proves that a VM is gone; everything else is inconclusive (the first check of the
probe, "the tracked VM still exists"). L9 (NIC 0 decides static or DHCP), M2 (a started command is never cut short).
"""

import json

import gevent
import pytest
import structlog
from gevent.event import Event
from gevent.pool import Group

from simulator.clock import VirtualClock
from vkcocoon_probes import ProbeTimeout, spawn
from vkcocoon_vms import (
    VM,
    CloneSpec,
    CocoonCLI,
    CocoonMacosCLI,
    CommandError,
    Completed,
    MacosSpec,
    Nic,
    Process,
    RunSpec,
    Snapshot,
    SnapshotNotFound,
    VMEvent,
    VMNotFound,
)

ID = "MZ5XQ2TLK4V7RW3HYB6CJDNEAP"
OTHER_ID = "AB3CD4EF5GH6IJ7KL2MN3OP4QR"

RECORD = {
    "id": ID,
    "hypervisor": "cloud-hypervisor",
    "state": "running",
    "config": {"cpu": 2, "memory": 4294967296, "image": "registry.lab.example/devbox:7", "name": "vk-team-a-devbox-0"},
    "pid": 41877,
    "socket_path": f"/var/lib/cocoon/run/cloudhypervisor/{ID}/api.sock",
    "network_configs": [{"tap": "tapMZ5XQ2TL-0", "mac": "0a:58:c0:a8:07:1f", "num_queues": 4, "backend": "cni"}],
    "first_booted": True,
    "a_key_from_the_future": {"deep": [1, 2]},
}
MAC_RECORD = {
    "name": "mac-0",
    "vmid": "QR7TUV3WXY2ZAB4CDE5FGH6IJK",
    "memory": "8192",
    "vnc": 3,
    "disk": "/var/lib/cocoon-macos/vms/mac-0/disk.qcow2",
    "mac": "0a:58:ac:16:00:33",
    "tap": "tapQR7TUV3W-0",
    "pid": 55210,
    "state": "stopped",
}
MAC_QEMU = Process(55210, "S", ("/usr/bin/qemu-system-x86_64", "-pidfile", "/var/lib/cocoon-macos/vms/mac-0/qemu.pid"))
PASSWORD = "s3cr3t"


class ScriptedTool:
    """An Execute that answers by the beginning of the arguments, and remembers every call."""

    def __init__(self):
        self.calls = []
        self.answers = []

    def on(self, beginning, *answers):
        """The answers to commands that begin so: each once, the last one for ever."""
        self.answers.insert(0, (beginning.split(), list(answers)))

    def __call__(self, argv, limit):
        self.calls.append(list(argv[1:]))
        for beginning, answers in self.answers:
            if argv[1 : 1 + len(beginning)] == beginning:
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if isinstance(answer, Exception):
                    raise answer
                return answer(argv) if callable(answer) else answer
        return Completed(0, "", "")


def ok(document):
    return Completed(0, json.dumps(document, indent=2) + "\n", "")


def failed(stderr, returncode=1):
    return Completed(returncode, "", stderr)


@pytest.fixture
def tool():
    return ScriptedTool()


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def cli(tool, clock):
    return CocoonCLI("/usr/local/bin/cocoon", execute=tool, clock=clock)


@pytest.fixture
def mac_cli(tool, clock):
    return CocoonMacosCLI(
        "cocoon-macos", execute=tool, clock=clock, processes={55210: MAC_QEMU}.get, vnc_password=PASSWORD
    )


# --- records -------------------------------------------------------------------------------------------------------


def test_a_record_is_read_and_unknown_keys_are_ignored(tool, cli):
    tool.on("vm inspect", ok(RECORD))
    assert cli.inspect(ID) == VM(
        id=ID,
        name="vk-team-a-devbox-0",
        state="running",
        hypervisor="cloud-hypervisor",
        pid=41877,
        nics=(Nic(mac="0a:58:c0:a8:07:1f", tap="tapMZ5XQ2TL-0"),),
    )


@pytest.mark.parametrize("missing", ["hypervisor", "state", "config", "pid", "network_configs"])
def test_a_missing_key_costs_nothing_but_itself(tool, cli, missing):
    tool.on("vm inspect", ok({key: value for key, value in RECORD.items() if key != missing}))
    vm = cli.inspect(ID)
    assert vm.id == ID
    fields = {"config": "name", "network_configs": "nics"}
    assert getattr(vm, fields.get(missing, missing)) in ("", 0, ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pid", "41877"),
        ("pid", True),
        ("pid", 1.5),
        ("pid", None),
        ("state", 7),
        ("state", None),
        ("config", []),
        ("config", {"name": {"x": 1}}),
        ("network_configs", {}),
        ("network_configs", None),
        ("network_configs", "eth0"),
        ("hypervisor", ["qemu"]),
    ],
)
def test_a_value_of_the_wrong_type_counts_as_absent(tool, cli, key, value):
    tool.on("vm inspect", ok({**RECORD, key: value}))
    vm = cli.inspect(ID)
    fields = {"config": "name", "network_configs": "nics"}
    assert getattr(vm, fields.get(key, key)) in ("", 0, ())


@pytest.mark.parametrize("card", [None, 7, "tap", [], {"mac": 7, "tap": None}])
def test_a_network_card_that_cannot_be_read_keeps_its_place(tool, cli, card):
    second = {"tap": "tap-1", "mac": "0a:58:00:00:00:01"}
    tool.on("vm inspect", ok({**RECORD, "network_configs": [card, second]}))
    assert cli.inspect(ID).nics == (Nic(), Nic("0a:58:00:00:00:01", "tap-1"))


def test_text_that_could_forge_a_log_line_or_a_header_is_not_taken_over(tool, cli):
    tool.on("vm inspect", ok({**RECORD, "state": "running\nX-Evil: 1", "hypervisor": "a\ud800"}))
    vm = cli.inspect(ID)
    assert (vm.state, vm.hypervisor) == ("", "")


@pytest.mark.parametrize("network", [None, {}, {"ip": ""}, {"ip": None}, {"gateway": "10.22.0.1", "ip": ""}, "x"])
def test_a_card_without_an_address_of_its_own_is_dhcp_l9(tool, cli, network):
    card = RECORD["network_configs"][0] | ({"network": network} if network is not None else {})
    tool.on("vm inspect", ok({**RECORD, "network_configs": [card]}))
    assert cli.inspect(ID).static_ip == ""


def test_the_first_card_decides_static_or_dhcp_l9(tool, cli):
    static = {"mac": "0a:58:00:00:00:09", "network": {"ip": "10.22.0.9", "gateway": "10.22.0.1", "prefix": 16}}
    dhcp = {"mac": "0a:58:00:00:00:02"}
    tool.on("vm inspect", ok({**RECORD, "network_configs": [static, dhcp]}))
    vm = cli.inspect(ID)
    assert (vm.mac, vm.static_ip) == ("0a:58:00:00:00:09", "10.22.0.9")
    assert vm.nics[0] == Nic("0a:58:00:00:00:09", "", "10.22.0.9", "10.22.0.1", 16)
    tool.on("vm inspect", ok({**RECORD, "network_configs": [dhcp, static]}))
    vm = cli.inspect(ID)
    assert (vm.mac, vm.static_ip) == ("0a:58:00:00:00:02", "")


def test_a_vm_without_a_card_has_no_mac_and_no_address(tool, cli):
    tool.on("vm inspect", ok({**RECORD, "network_configs": []}))
    vm = cli.inspect(ID)
    assert (vm.mac, vm.static_ip) == ("", "")


@pytest.mark.parametrize("state", ["stopped (stale)", "creating", "created", "stopped", "error", "Running", "", "new"])
def test_only_the_exact_word_running_is_running(state):
    assert not VM(ID, "x", state=state).running
    assert VM(ID, "x", state="running").running


# --- list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stdout", ["", "\n", "[]\n", "null\n", "No VMs found.\n"])
def test_no_vms_in_any_spelling_is_an_empty_list(tool, cli, stdout):
    tool.on("vm list", Completed(0, stdout, ""))
    assert cli.list() == []
    assert tool.calls == [["vm", "list", "-o", "json"]]


def test_entries_without_an_id_are_dropped_and_the_order_is_kept(tool, cli):
    records = [{**RECORD, "id": OTHER_ID, "state": "creating"}, {**RECORD, "id": ""}, "x", {"config": {}}, RECORD]
    tool.on("vm list", ok(records))
    assert [(vm.id, vm.state) for vm in cli.list()] == [(OTHER_ID, "creating"), (ID, "running")]


@pytest.mark.parametrize("stdout", ["{}", "7", '"x"', "[", "[{}", "No VMs", "[]]", "[] []"])
def test_a_list_that_is_none_is_an_error_and_not_an_empty_list(tool, cli, stdout):
    tool.on("vm list", Completed(0, stdout, ""))
    with pytest.raises(CommandError):
        cli.list()


# --- what proves that a VM is gone ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stderr",
    [
        "Error: inspect: vm web-0: VM not found\n",
        "Error: inspect: vm web-0: vm not found",
        "time=x level=warn msg=slow\nError: inspect: vm web-0: VM NOT FOUND\n",
        "Error: No such VM: web-0\n",
        "Error: no such vm",
    ],
)
def test_the_tools_own_words_prove_that_a_vm_is_gone(tool, cli, stderr):
    tool.on("vm inspect", failed(stderr))
    with pytest.raises(VMNotFound) as caught:
        cli.inspect("web-0")
    assert caught.value.returncode == 1


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "Error: inspect: context deadline exceeded\n",
        "Error: inspect: open /var/lib/cocoon/db/vms.json: file not found\n",
        "Error: inspect: open /var/lib/cocoon/db/vms.lock: permission denied\n",
        'exec: "cocoon": executable file not found in $PATH\n',
        "sudo: cocoon: command not found\n",
        "Error: open /boot: no such vmlinux\n",
        "Error: image not found\n",
        "Error: conflist not found\n",
        'Error: inspect: ambiguous ref "abc": multiple matches\n',
        "Error: inspect: snapshot not found\n",
    ],
)
def test_any_other_failure_proves_nothing(tool, cli, stderr):
    tool.on("vm inspect", failed(stderr))
    with pytest.raises(CommandError) as caught:
        cli.inspect("web-0")
    assert not isinstance(caught.value, VMNotFound)


@pytest.mark.parametrize("returncode", [-9, -15])
def test_a_killed_tool_has_decided_nothing_whatever_it_printed(tool, cli, returncode):
    tool.on("vm inspect", failed("Error: inspect: vm web-0: VM not found\n", returncode))
    with pytest.raises(CommandError) as caught:
        cli.inspect("web-0")
    assert type(caught.value) is CommandError


@pytest.mark.parametrize("stdout", ["", "\n", "null", "[]", "7", '{"id":', "\x00", "[" * 100_000, "{}{}", "NaN"])
def test_an_answer_nobody_can_read_is_inconclusive(tool, cli, stdout):
    tool.on("vm inspect", Completed(0, stdout, ""))
    with pytest.raises(CommandError) as caught:
        cli.inspect("web-0")
    assert type(caught.value) is CommandError
    assert "unreadable answer" in str(caught.value)


def test_an_answer_about_another_vm_is_inconclusive(tool, cli):
    tool.on("vm inspect", ok(RECORD))
    with pytest.raises(CommandError) as caught:
        cli.inspect(ID[:5])  # the tool would take this for the beginning of an id
    assert type(caught.value) is CommandError
    assert cli.inspect("vk-team-a-devbox-0").id == ID


def test_a_document_too_big_to_parse_without_holding_everybody_up_is_refused(tool, cli):
    tool.on("vm list", Completed(0, "[" + " " * (8 * 2**20) + "]", ""))
    with pytest.raises(CommandError, match="too many"):
        cli.list()


@pytest.mark.parametrize("broken", [CommandError(["cocoon"], None, "", why="cannot be run: No such file")])
def test_a_missing_binary_proves_nothing_and_stops_nobody_from_asking_again(tool, cli, broken):
    tool.on("vm inspect", broken, ok(RECORD))
    with pytest.raises(CommandError) as caught:
        cli.inspect(ID)
    assert type(caught.value) is CommandError
    assert cli.inspect(ID).id == ID


@pytest.mark.parametrize("stderr", ["Error: inspect: snapshot not found\n", "no such snapshot: x"])
def test_a_missing_snapshot_is_told_apart_too(tool, cli, stderr):
    tool.on("snapshot inspect", failed(stderr))
    with pytest.raises(SnapshotNotFound):
        cli.snapshot_inspect("s")
    tool.on("vm clone", failed("Error: inspect snapshot s: snapshot not found\n"))
    with pytest.raises(SnapshotNotFound):
        cli.clone(CloneSpec(name="web-0", snapshot="s"))


# --- command lines -------------------------------------------------------------------------------------------------

EVERYTHING = {"network": "cocoon-dhcp", "no_direct_io": True, "cpu_weight": 200, "cpu_quota_us": 50000}


@pytest.mark.parametrize(
    ("act", "argv"),
    [
        (lambda cli: cli.run(RunSpec(name="web-0", image="img")), "vm run --output json --name web-0 img"),
        (
            lambda cli: cli.run(
                RunSpec(name="web-0", image="img", cpu=2, memory=2**30, storage="20G", windows=True, firecracker=True,
                        cpu_period_us=100000, **EVERYTHING)
            ),
            "vm run --output json --name web-0 --cpu 2 --cpu-weight 200 --cpu-quota-us 50000 --cpu-period-us 100000"
            " --memory 1073741824 --storage 20G --network cocoon-dhcp --windows --fc --no-direct-io img",
        ),
        (lambda cli: cli.clone(CloneSpec(name="web-0", snapshot="s:1")), "vm clone --output json --name web-0 s:1"),
        (
            lambda cli: cli.clone(
                CloneSpec(name="web-0", snapshot="s", restore_mode="mmap", nics=0, pull=True, cpu_period_us=100000,
                          **EVERYTHING)
            ),
            "vm clone --output json --name web-0 --network cocoon-dhcp --no-direct-io --pull --restore-mode mmap"
            " --nics 0 --cpu-weight 200 --cpu-quota-us 50000 --cpu-period-us 100000 s",
        ),
        (
            lambda cli: cli.clone(CloneSpec(name="web-0", from_dir="/srv/exports/base")),
            "vm clone --output json --name web-0 --pull --from-dir /srv/exports/base",
        ),
        (
            lambda cli: cli.clone(
                CloneSpec(name="web-0", snapshot="s", firecracker=True, restore_mode="mmap", nics=1)
            ),
            "vm clone --output json --name web-0 s",
        ),
    ],
)  # fmt: skip
def test_run_and_clone_pass_what_is_set_in_the_documented_order(tool, cli, act, argv):
    tool.on("vm", ok(RECORD))
    assert act(cli).id == ID
    assert tool.calls == [argv.split()]


@pytest.mark.parametrize(
    ("act", "argv"),
    [
        (lambda cli: cli.start(ID), f"vm start {ID}"),
        (lambda cli: cli.stop("web-0"), "vm stop web-0"),
        (lambda cli: cli.stop("web-0", force=True), "vm stop --force web-0"),
        (lambda cli: cli.remove(ID), f"vm rm --force {ID}"),
        (lambda cli: cli.snapshot_save("s", ID), f"snapshot save --name s {ID}"),
        (lambda cli: cli.snapshot_remove("s"), "snapshot rm s"),
        (lambda cli: cli.image_pull("img"), "image pull img"),
        (lambda cli: cli.image_pull("img", force=True), "image pull --force img"),
        (lambda cli: cli.exec(ID, ["ls", "-l"], env={"B": "2", "A": "1"}), f"vm exec -e A=1 -e B=2 {ID} -- ls -l"),
    ],
)
def test_every_other_command_is_passed_exactly(tool, cli, act, argv):
    act(cli)
    assert tool.calls == [argv.split()]


@pytest.mark.parametrize("name", ["", "-f", "--config=/tmp/evil", "--"])
def test_a_name_from_a_pod_cannot_become_a_flag(tool, cli, mac_cli, name):
    refused = [
        lambda: cli.run(RunSpec(name="web-0", image=name)),
        lambda: cli.clone(CloneSpec(name="web-0", snapshot=name)),
        lambda: cli.inspect(name),
        lambda: cli.remove(name),
        lambda: cli.snapshot_remove(name),
        lambda: cli.image_pull(name),
        lambda: mac_cli.run(MacosSpec(name="mac-0", image=name)),
        lambda: mac_cli.remove(name),
        lambda: mac_cli.start(name),
        lambda: mac_cli.ensure_image(name),
    ]
    for act in refused:
        with pytest.raises(CommandError, match="refused"):
            act()
    assert tool.calls == []


# --- creating ------------------------------------------------------------------------------------------------------


def test_a_clone_that_prints_no_pid_is_inspected_once(tool, cli):
    tool.on("vm clone", ok({**RECORD, "pid": 0}))
    tool.on("vm inspect", ok(RECORD))
    assert cli.clone(CloneSpec(name="web-0", snapshot="s")).pid == 41877
    assert tool.calls[1:] == [["vm", "inspect", ID]]


def test_a_run_that_prints_the_record_before_the_start_is_inspected_once(tool, cli):
    tool.on("vm run", ok({**RECORD, "state": "created", "pid": 0}))
    tool.on("vm inspect", ok(RECORD))
    assert cli.run(RunSpec(name="web-0", image="img")).running
    assert len(tool.calls) == 2


def test_a_fresh_vm_that_cannot_be_inspected_is_still_ours(tool, cli):
    tool.on("vm clone", ok({**RECORD, "pid": 0}))
    tool.on("vm inspect", failed("Error: inspect: database is locked\n"))
    vm = cli.clone(CloneSpec(name="web-0", snapshot="s"))
    assert (vm.id, vm.pid, vm.mac) == (ID, 0, "0a:58:c0:a8:07:1f")


@pytest.mark.parametrize("stdout", ["", "{}", "null", '{"id": ""}', "created!"])
def test_a_create_that_answers_nothing_usable_is_an_error(tool, cli, stdout):
    tool.on("vm run", Completed(0, stdout, ""))
    with pytest.raises(CommandError, match="unreadable"):
        cli.run(RunSpec(name="web-0", image="img"))


# --- removing ------------------------------------------------------------------------------------------------------


def test_removing_what_is_gone_is_success(tool, cli):
    tool.on("vm rm", failed(f"Error: vm {ID}: VM not found\n"))
    cli.remove(ID)
    assert len(tool.calls) == 1


def test_a_vm_whose_network_alone_could_not_be_cleaned_up_is_removed(tool, cli):
    tool.on("vm rm", failed("Error: vm(s) deleted but network cleanup failed: netns busy\n"))
    tool.on("vm inspect", failed(f"Error: inspect: vm {ID}: VM not found\n"))
    cli.remove(ID)


@pytest.mark.parametrize("inspect", [ok(RECORD), failed("Error: inspect: database is locked\n")])
def test_that_is_believed_only_when_the_record_is_gone(tool, cli, inspect):
    tool.on("vm rm", failed("Error: vm(s) deleted but network cleanup failed: netns busy\n"))
    tool.on("vm inspect", inspect)
    with pytest.raises(CommandError):
        cli.remove(ID)


def test_a_failed_removal_is_a_failure(tool, cli):
    tool.on("vm rm", failed("Error: rm: directory not empty\n"))
    with pytest.raises(CommandError, match="directory not empty"):
        cli.remove(ID)


# --- snapshots -----------------------------------------------------------------------------------------------------


def test_a_snapshot_record_is_read(tool, cli):
    record = {"id": OTHER_ID, "name": "s", "image": "img:7", "image_digest": "sha256:0f", "image_blob_ids": {"9b": {}}}
    tool.on("snapshot inspect", ok({**record, "hypervisor": "firecracker"}))
    assert cli.snapshot_inspect("s") == Snapshot(OTHER_ID, "s", "img:7", "sha256:0f", "firecracker")


@pytest.mark.parametrize(
    ("clash", "removed"),
    [
        ('Error: snapshot name "s" already exists\n', "s"),
        (f'Error: snapshot name "s" already in use by {OTHER_ID}\n', OTHER_ID),
        (f'Error: snapshot name "s" already in use, held by {OTHER_ID}\n', OTHER_ID),
    ],
)
def test_an_older_snapshot_of_the_name_makes_room(tool, cli, clash, removed):
    tool.on("snapshot save", failed(clash), Completed(0, "", ""))
    cli.snapshot_save("s", ID)
    save = ["snapshot", "save", "--name", "s", ID]
    assert tool.calls == [save, ["snapshot", "rm", removed], save]


def test_a_name_that_stays_taken_is_an_error_and_not_a_loop(tool, cli):
    tool.on("snapshot save", failed('Error: snapshot name "s" already exists\n'))
    with pytest.raises(CommandError, match="already exists"):
        cli.snapshot_save("s", ID)
    assert len(tool.calls) == 3


def test_a_snapshot_still_read_by_a_clone_is_asked_for_every_half_second(tool, cli, clock):
    leased = failed(f"Error: rm: snapshot {OTHER_ID} is in use by an active clone/restore/export\n")
    asked = []
    tool.on("snapshot rm", *[lambda argv: asked.append(clock.elapsed()) or leased] * 4, Completed(0, "", ""))
    clock.spawn("remove", cli.snapshot_remove, "s")
    clock.run(60)
    assert asked == [0.0, 0.5, 1.0, 1.5]
    assert len(tool.calls) == 5


def test_a_snapshot_that_stays_leased_is_given_up_after_thirty_seconds(tool, cli, clock):
    tool.on("snapshot rm", failed("Error: rm: snapshot X is in use by an active clone/restore/export\n"))

    def remove():
        with pytest.raises(CommandError, match="in use"):
            cli.snapshot_remove("s")
        return clock.elapsed()

    removing = clock.spawn("remove", remove)
    clock.run(60)
    assert removing.get() == 30.0


def test_removing_a_snapshot_that_is_gone_is_success_and_other_failures_are_not_repeated(tool, cli):
    tool.on("snapshot rm", failed('Error: rm: resolve "s": snapshot not found\n'))
    cli.snapshot_remove("s")
    tool.on("snapshot rm", failed("Error: rm: disk is read-only\n"))
    with pytest.raises(CommandError):
        cli.snapshot_remove("s")
    assert len(tool.calls) == 2


# --- stale creates, exec -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["collected", "busy", "not-creating", "not-found"])
def test_the_outcome_for_a_stale_create_is_passed_on(tool, cli, outcome):
    tool.on("vm reconcile-stale-create", ok({"id": ID, "outcome": outcome}))
    assert cli.reconcile_stale_create(ID) == outcome
    assert tool.calls == [["vm", "reconcile-stale-create", ID, "--output", "json"]]


@pytest.mark.parametrize("answer", [ok({"id": ID}), ok([]), failed('Error: unknown command "reconcile-stale-create"')])
def test_a_cocoon_that_does_not_know_stale_creates_is_an_error(tool, cli, answer):
    tool.on("vm reconcile-stale-create", answer)
    with pytest.raises(CommandError):
        cli.reconcile_stale_create(ID)


def test_the_exit_status_of_a_guests_command_is_an_answer(tool, cli):
    tool.on("vm exec", Completed(3, "out", "vm not found"))
    assert cli.exec(ID, ["false"]) == Completed(3, "out", "vm not found")


# --- macOS ---------------------------------------------------------------------------------------------------------


def test_a_macos_record_is_read_and_its_state_comes_from_the_process(tool, mac_cli):
    tool.on("vm inspect", ok(MAC_RECORD))
    assert mac_cli.inspect("mac-0") == VM(
        id="qemu-mac-0",
        name="mac-0",
        state="running",  # the record said otherwise
        hypervisor="qemu",
        pid=55210,
        nics=(Nic("0a:58:ac:16:00:33", "tapQR7TUV3W-0"),),
        vnc=3,
        disk="/var/lib/cocoon-macos/vms/mac-0/disk.qcow2",
    )
    tool.on("vm inspect", ok({**MAC_RECORD, "pid": 1, "state": "running"}))
    assert mac_cli.inspect("mac-0").state == "stopped"


def test_a_record_without_a_display_has_none(tool, mac_cli):
    tool.on("vm inspect", ok({key: value for key, value in MAC_RECORD.items() if key not in ("vnc", "mac", "state")}))
    vm = mac_cli.inspect("mac-0")
    assert (vm.vnc, vm.mac) == (-1, "")


@pytest.mark.parametrize(
    "stderr",
    [
        "read vm record: open /var/lib/cocoon-macos/vms/mac-0/vm.json: no such file or directory",
        'ERR command failed error="read vm record: open /srv/m/vms/mac-0/vm.json: no such file or directory"\n',
        '{"level":"error","error":"read vm record: open /x/vms/mac-0/vm.json: No such file or directory"}',
    ],
)
def test_only_the_missing_record_of_this_very_vm_proves_that_there_is_none(tool, mac_cli, stderr):
    tool.on("vm", failed(stderr))
    with pytest.raises(VMNotFound):
        mac_cli.inspect("mac-0")
    with pytest.raises(VMNotFound):
        mac_cli.start("mac-0")


@pytest.mark.parametrize(
    "answer",
    [
        failed("read vm record: open /var/lib/cocoon-macos/vms/mac-01/vm.json: no such file or directory"),
        failed("read vm record: open /var/lib/cocoon-macos/vms/x-mac-0/vm.json: no such file or directory"),
        failed("read vm record: open /var/lib/cocoon-macos/vms/mac-0/vm.json: permission denied"),
        failed("open /var/run/netns/cm-QR7T: no such file or directory"),
        failed("vm not found"),
        failed("read vm record: open /m/vms/mac-0/vm.json: no such file or directory", -15),
        Completed(0, "", ""),
        Completed(0, '{"name": ""}', ""),
        Completed(0, '{"name": "other"}', ""),
        Completed(0, '{"name":', ""),
        Completed(0, "[]", ""),
    ],
)
def test_every_other_answer_leaves_the_record_in_doubt(tool, mac_cli, answer):
    tool.on("vm inspect", answer)
    with pytest.raises(CommandError) as caught:
        mac_cli.inspect("mac-0")
    assert not isinstance(caught.value, VMNotFound)


@pytest.mark.parametrize(
    ("act", "argv"),
    [
        (
            lambda cli: cli.run(MacosSpec(name="mac-0", image="t:26", cpu=6, memory_mib=16384, storage=2**37, vnc=3)),
            "vm run --name mac-0 --cpus 6 --memory 16384 --vnc 3 --vnc-password s3cr3t --storage 137438953472"
            " --exit-on-reboot --random-smbios --net cni t:26",
        ),
        (
            lambda cli: cli.run(MacosSpec(name="mac-0", image="tahoe:26")),
            "vm run --name mac-0 --cpus 4 --memory 8192 --exit-on-reboot --random-smbios --net cni tahoe:26",
        ),
        (lambda cli: cli.start("mac-0", 3), "vm start --vnc 3 --vnc-password s3cr3t mac-0"),
        (lambda cli: cli.start("mac-0", 0), "vm start --vnc 0 --vnc-password s3cr3t mac-0"),
        (lambda cli: cli.start("mac-0"), "vm start mac-0"),
        (lambda cli: cli.remove("mac-0"), "vm rm mac-0"),
        (lambda cli: cli.inspect("mac-0"), "vm inspect mac-0"),
    ],
)
def test_macos_commands_are_passed_exactly(tool, mac_cli, act, argv):
    tool.on("vm inspect", ok(MAC_RECORD))
    act(mac_cli)
    assert tool.calls[0] == argv.split()


def test_without_a_password_there_is_no_vnc(tool, clock):
    cli = CocoonMacosCLI("cocoon-macos", execute=tool, clock=clock)
    cli.start("mac-0", 3)
    assert tool.calls == [["vm", "start", "mac-0"]]


def test_a_failed_macos_removal_is_never_taken_for_a_vm_that_is_gone(tool, mac_cli):
    tool.on("vm rm", failed("teardown: open /var/run/netns/cm-x: no such file or directory"))
    with pytest.raises(CommandError):
        mac_cli.remove("mac-0")


def test_an_image_is_pulled_only_when_it_is_missing_and_looked_for_again(tool, mac_cli):
    missing = failed('ERR command failed error="image not found: tahoe"')
    tool.on("image inspect", missing, ok({"name": "tahoe"}))
    mac_cli.ensure_image("tahoe")
    mac_cli.ensure_image("tahoe")
    assert [call[:2] for call in tool.calls] == [
        ["image", "inspect"],
        ["image", "pull"],
        ["image", "inspect"],
        ["image", "inspect"],
    ]
    tool.on("image inspect", missing)
    with pytest.raises(CommandError, match="still not there"):
        mac_cli.ensure_image("tahoe")


def test_an_image_that_cannot_be_asked_for_is_not_pulled(tool, mac_cli):
    tool.on("image inspect", failed("ERR database is locked"))
    with pytest.raises(CommandError, match="locked"):
        mac_cli.ensure_image("tahoe")
    assert tool.calls == [["image", "inspect", "tahoe"]]


# --- secrets -------------------------------------------------------------------------------------------------------


def test_the_vnc_password_appears_in_no_log_line_and_in_no_exception(tool, mac_cli):
    argv = ["cocoon-macos", "vm", "start", "--vnc", "3", "--vnc-password", PASSWORD, "mac-0"]
    failures = [
        failed(f"bad arguments: --vnc-password {PASSWORD}\n"),
        CommandError(argv, None, f"said {PASSWORD}", why="still running after 300 s"),
    ]
    for failure in failures:
        tool.on("vm start", failure)
        with structlog.testing.capture_logs() as lines, pytest.raises(CommandError) as caught:
            mac_cli.start("mac-0", 3)
        for text in (str(lines), str(caught.value), repr(caught.value), str(caught.value.argv), caught.value.stderr):
            assert PASSWORD not in text
        assert caught.value.argv[-3:] == ("--vnc-password", "***", "mac-0")
    assert "***" in str(lines)


@pytest.mark.parametrize("argv", [["c", "--vnc-password=abc", "x"], ["c", "--password", "abc"], ["c", "-e", "K=abc"]])
def test_secrets_are_masked_however_they_are_spelled(argv):
    assert "abc" not in str(CommandError(argv, 1, "said abc"))


def test_an_empty_password_masks_nothing():
    assert str(CommandError(["c", "--password", "", "vm"], 1, "no")) == "c --password  vm: exit 1: no"


# --- events --------------------------------------------------------------------------------------------------------


def event(kind, record):
    return json.dumps({"event": kind, "vm": record}, separators=(",", ":"))


def test_events_are_read_line_by_line_and_torn_ones_skipped(tool, clock):
    asked = []

    def stream(argv):
        asked.append(list(argv))
        yield event("ADDED", RECORD)
        yield event("MODIFIED", RECORD)[:40]
        yield ""
        yield "[]"
        yield '{"event": "ADDED"}'
        yield event("", RECORD)
        yield event("ADDED", {"config": {}})
        yield event("MODIFIED", {**RECORD, "state": "stopped (stale)"})
        yield event("DELETED", {"config": {"name": "web-1"}})
        yield "[" * 100_000

    cli = CocoonCLI("cocoon", execute=tool, stream=stream, clock=clock)
    events = list(cli.events())
    assert [(each.kind, each.vm.id, each.vm.name, each.vm.state) for each in events] == [
        ("ADDED", ID, "vk-team-a-devbox-0", "running"),
        ("MODIFIED", ID, "vk-team-a-devbox-0", "stopped (stale)"),
        ("DELETED", "", "web-1", ""),
    ]
    assert isinstance(events[0], VMEvent)
    assert asked == [["cocoon", "vm", "status", "--event", "--format", "json"]]


def test_a_stream_that_fails_says_so_and_each_subscription_is_its_own(tool, clock):
    def stream(argv):
        yield event("ADDED", RECORD)
        raise CommandError(argv, 1, "Error: status: broken\n")

    cli = CocoonCLI("cocoon", execute=tool, stream=stream, clock=clock)
    for _ in range(2):
        events = cli.events()
        assert next(events).kind == "ADDED"
        with pytest.raises(CommandError, match="broken"):
            next(events)


# --- many at once --------------------------------------------------------------------------------------------------


class SlowTool:
    """An Execute whose calls wait until they are let go, and that knows how many run at once."""

    def __init__(self):
        self.running = []
        self.most = 0
        self.ended = []
        self.go = Event()

    def __call__(self, argv, limit):
        command = " ".join(argv[1:3])
        self.running.append(command)
        self.most = max(self.most, len(self.running))
        try:
            self.go.wait()
            self.ended.append(command)
            return ok(RECORD)
        finally:
            self.running.remove(command)


@pytest.fixture
def greenlets():
    group = Group()
    yield group
    group.kill()


def test_no_more_than_the_allowed_number_of_commands_run_at_once(clock, greenlets):
    slow = SlowTool()
    cli = CocoonCLI("cocoon", execute=slow, max_processes=4, clock=clock)
    callers = [spawn(greenlets, "ask", cli.inspect, ID) for _ in range(20)]
    gevent.idle()
    assert len(slow.running) == 4
    slow.go.set()
    gevent.joinall(callers, raise_error=True)
    assert slow.most == 4 and len(slow.ended) == 20


def test_slow_changes_leave_places_for_those_who_ask(clock, greenlets):
    slow = SlowTool()
    cli = CocoonCLI("cocoon", execute=slow, max_processes=8, clock=clock)
    for number in range(20):
        spawn(greenlets, "start", cli.start, f"web-{number}")
    gevent.idle()
    assert slow.running == ["vm start"] * 6
    for _ in range(3):
        spawn(greenlets, "ask", cli.inspect, ID)
    gevent.idle()
    assert slow.running == ["vm start"] * 6 + ["vm inspect"] * 2


@pytest.mark.parametrize("places", [1, 2, 0])
def test_even_one_place_is_enough_for_everything(tool, clock, places):
    cli = CocoonCLI("cocoon", execute=tool, max_processes=places, clock=clock)
    tool.on("vm inspect", ok(RECORD))
    cli.start(ID)
    assert cli.inspect(ID).id == ID


def test_a_change_goes_on_when_whoever_waits_for_it_is_killed_m2(clock, greenlets):
    slow = SlowTool()
    cli = CocoonMacosCLI("cocoon-macos", execute=slow, max_processes=3, clock=clock)
    caller = spawn(greenlets, "start", cli.start, "mac-0")
    gevent.idle()
    caller.kill()
    assert slow.running == ["vm start"]
    second = spawn(greenlets, "start", cli.start, "mac-1")
    gevent.idle()
    assert slow.running == ["vm start"], "a command that goes on keeps its place"
    slow.go.set()
    second.get()
    assert slow.ended == ["vm start", "vm start"]


def test_a_change_goes_on_when_a_bound_interrupts_whoever_waits_for_it_m2(clock, greenlets):
    slow = SlowTool()
    cli = CocoonMacosCLI("cocoon-macos", execute=slow, clock=clock)

    def bounded():
        with pytest.raises(ProbeTimeout), clock.timeout(3.0):
            cli.start("mac-0")
        return clock.elapsed()

    caller = clock.spawn("probe", bounded)
    clock.run(10)
    assert caller.get() == 3.0
    assert slow.running == ["vm start"]
    slow.go.set()
    clock.run(0)
    assert slow.ended == ["vm start"]


def test_a_question_ends_with_whoever_asks(clock, greenlets):
    slow = SlowTool()
    cli = CocoonCLI("cocoon", execute=slow, clock=clock)
    caller = spawn(greenlets, "ask", cli.inspect, ID)
    gevent.idle()
    caller.kill()
    assert (slow.running, slow.ended) == ([], [])


def test_callers_who_want_the_same_image_share_one_pull(clock, greenlets):
    slow = SlowTool()
    cli = CocoonCLI("cocoon", execute=slow, clock=clock)
    callers = [spawn(greenlets, "pull", cli.image_pull, "img") for _ in range(5)]
    callers.append(spawn(greenlets, "pull", cli.image_pull, "img", True))
    callers.append(spawn(greenlets, "pull", cli.image_pull, "other"))
    gevent.idle()
    assert len(slow.running) == 3, "plain, forced and other are three different pulls"
    callers[0].kill()
    slow.go.set()
    gevent.joinall(callers, raise_error=True)
    assert len(slow.ended) == 3
    cli.image_pull("img")
    assert len(slow.ended) == 4, "what is over is not shared"


def test_those_who_share_a_pull_share_its_failure(tool, clock, greenlets):
    go = Event()
    tool.on("image pull", lambda argv: go.wait() and failed("Error: pull img: unauthorized\n"))
    cli = CocoonCLI("cocoon", execute=tool, clock=clock)

    def pull():
        with pytest.raises(CommandError, match="unauthorized"):
            cli.image_pull("img")

    callers = [spawn(greenlets, "pull", pull) for _ in range(3)]
    gevent.idle()
    go.set()
    gevent.joinall(callers, raise_error=True)
    assert len(tool.calls) == 1


def test_an_execute_that_breaks_in_its_own_way_reaches_the_caller(tool, cli):
    tool.on("vm start", ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.start(ID)
