"""Leases that are owed back when the daemon is killed in the middle of a removal: what is written down, what of it is
believed later, and that nothing depends on it (the stories of a kill are in test_killed_anywhere.py)."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST
from tests.test_last_state import macs
from vkcocoon_debts import CLAIMS_FILE, FILE, Claim, Claims, LeaseDebts

MAC, OTHER = "0a:58:00:00:00:01", "0a:58:00:00:00:02"
MACOS = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)


def warnings(logs):
    return [entry["event"] for entry in logs if entry["log_level"] == "warning" and "owed" in entry["event"]]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_what_is_noted_is_there_for_the_next_life_until_it_is_settled(tmp_path):
    state = str(tmp_path / "state")
    debts = LeaseDebts(state)
    debts.note("A", {MAC})
    debts.note("A", {OTHER})
    debts.note("B", set())
    assert LeaseDebts(state).owed() == {"A": {MAC, OTHER}}
    debts.settled({MAC})
    assert LeaseDebts(state).owed() == {"A": {OTHER}}
    debts.settled({OTHER})
    assert LeaseDebts(state).owed() == {}
    assert [path.name for path in Path(state).iterdir()] == [FILE]


def test_a_directory_in_which_nothing_was_kept_yet_is_nothing_to_speak_of(tmp_path):
    with capture_logs() as logs:
        assert LeaseDebts(str(tmp_path / "none")).owed() == {}
    assert (logs, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    "content",
    [b"", b'{"A": ["0a:58', b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b'{"A": "0a:58:00:00:00:01"}', b'{"A": [7]}'],
    ids=["empty", "torn", "not text", "a list", "null", "deep", "no list of MACs", "no MACs"],
)
def test_a_file_that_cannot_be_read_is_said_once_and_replaced_by_the_next_note(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with capture_logs() as logs:
        debts = LeaseDebts(str(tmp_path))
    assert (debts.owed(), warnings(logs)) == ({}, ["leases that are owed cannot be read"])
    debts.note("B", {MAC})
    assert LeaseDebts(str(tmp_path)).owed() == {"B": {MAC}}


def test_one_entry_that_makes_no_sense_costs_only_itself(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"A": [MAC.upper()], "B": {}, "C": ["garbage", OTHER]}))
    with capture_logs() as logs:
        assert LeaseDebts(str(tmp_path)).owed() == {"A": {MAC}}
    assert "B, C" in logs[0]["error"]


def test_a_place_that_cannot_be_written_is_said_once_until_it_can(tmp_path):
    (tmp_path / "state").write_text("somebody's file")
    with capture_logs() as logs:
        debts = LeaseDebts(str(tmp_path / "state"))
        debts.note("A", {MAC})
        debts.note("B", {OTHER})
    assert warnings(logs)[1:] == ["leases that are owed cannot be written down"]
    (tmp_path / "state").unlink()
    debts.note("A", {MAC})
    assert LeaseDebts(str(tmp_path / "state")).owed() == {"A": {MAC}, "B": {OTHER}}
    (tmp_path / "state" / FILE).unlink()
    (tmp_path / "state" / FILE).mkdir()
    with capture_logs() as logs:
        debts.settled({MAC})
        debts.settled({OTHER})
    assert warnings(logs) == ["leases that are owed cannot be written down"]


# --- what is believed of it -------------------------------------------------------------------------------------------


def owe(world, **debts):
    """What an earlier life may have left."""
    path = Path(world.settings.state_dir) / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(debts))


def owed(world):
    return LeaseDebts(world.settings.state_dir).owed()


def test_a_removal_writes_down_what_it_owes_and_crosses_it_out(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    assert owed(world) == {}
    mac, vm_id = world.guest("web-0").mac, world.daemon.ports.runtime.inspect("vk-default-web-0").id
    world.host.cocoon.slow("vm rm", 5.0, step="middle")
    world.delete_pod("web-0")
    world.run(3)
    assert owed(world) == {vm_id: {mac}}
    world.run(5)
    assert (owed(world), macs(world)) == ({}, [])


@pytest.mark.parametrize("os", ["linux", "macos"])
def test_the_lease_of_a_vm_that_lives_is_given_back_by_no_debt(world, os):
    world.create_pod("web-0", os=os, guest=MACOS if os == "macos" else FAST)
    world.run(10)
    mac, vm_id = world.guest("web-0").mac, world.pod("web-0")["metadata"]["annotations"]["vm.cocoonstack.io/id"]
    world.kill()
    owe(world, GONE=[mac], **{vm_id: [mac]})
    world.start()
    world.run(200)
    assert (world.ready("web-0"), macs(world)) == (True, [mac])
    world.delete_pod("web-0")
    world.run(100)
    assert (macs(world), owed(world)) == ([], {})


def test_a_debt_of_a_macos_guest_is_settled_although_its_namesake_lives(world):
    world.create_pod("web-0", os="macos", guest=MACOS)
    world.run(10)
    world.kill()
    world.leases.lease(MAC, "10.88.0.201")
    owe(world, **{"qemu-vk-default-web-0": [MAC]})
    world.start()
    world.run(10)
    assert (owed(world), macs(world)) == ({}, [world.guest("web-0").mac])


@pytest.mark.parametrize("tool", ["cocoon", "macos"])
@pytest.mark.parametrize("verb", ["vm list", "vm inspect"])
def test_while_nothing_is_certain_a_debt_waits_and_is_settled_later(world, tool, verb):
    world.leases.lease(MAC, "10.88.0.201")
    vm_id = "qemu-gone" if tool == "macos" else "GONE"
    world.kill()
    owe(world, **{vm_id: [MAC]})
    getattr(world.host, tool).fail(verb, times=None)
    world.start()
    world.run(130)
    assert (macs(world), owed(world)) == ([MAC], {vm_id: {MAC}})
    getattr(world.host, tool).faults.clear()
    world.run(130)
    assert (macs(world), owed(world)) == ([], {})


def test_a_removal_that_outlived_its_daemon_is_settled_when_it_has_ended(world):
    """Nobody is left to ask for it: its pod is gone, and what it removes is a VM of nobody."""
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.slow("vm rm", 20.0, step="middle")
    world.delete_pod("web-0", grace_seconds=0)
    world.run(1)
    world.kill()
    world.start()
    world.run(15)
    assert macs(world) == [world.guest("web-0").mac]
    world.run(70)
    assert (macs(world), owed(world), world.host.pids()) == ([], {}, [])


def test_a_deletion_does_not_depend_on_what_can_be_written_down(tmp_path):
    (tmp_path / "state").write_text("somebody's file")
    with World(state_dir=str(tmp_path / "state")) as world:
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        world.delete_pod("web-0")
        world.run(5)
        assert (world.pod("web-0"), world.host.pids(), macs(world)) == (None, [], [])


# --- what stands on a pod ---------------------------------------------------------------------------------------------

STANDS = "vm.cocoonstack.io/mac"


@pytest.mark.parametrize("when", ["from the beginning", "while we were away", "while its vm was lost"])
def test_a_lease_of_somebody_else_is_not_given_back_because_a_pod_names_its_mac(world, when):
    world.leases.lease(MAC, "10.88.0.201")
    world.create_pod("web-0", guest=FAST, annotations={STANDS: MAC} if when == "from the beginning" else {})
    world.run(10)
    own = world.guest("web-0").mac
    world.kill()
    path = "/api/v1/namespaces/default/pods/web-0"
    world.kube.admin.patch(path, {"metadata": {"annotations": {STANDS: f"{MAC},{own}"}}}, kind="merge")
    if when == "while its vm was lost":
        world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "vk-default-web-0"], 30.0)
    world.start()
    world.run(20)
    assert macs(world) == sorted([MAC, world.guest("web-0").mac])
    assert world.pod("web-0")["metadata"]["annotations"][STANDS] == world.guest("web-0").mac
    world.delete_pod("web-0")
    world.run(10)
    assert (world.pod("web-0"), macs(world)) == (None, [MAC])


# --- whose VMs are ----------------------------------------------------------------------------------------------------


def test_what_was_begun_for_a_pod_is_there_for_the_next_life_until_the_pod_is_gone(tmp_path):
    claims, claim = Claims(str(tmp_path)), Claim("web", "windows", frozenset({MAC}))
    claims.note("u", claim)
    claims.note("v", Claim("db", "linux"))
    again = Claims(str(tmp_path))
    assert (again.get("u"), again.get("v"), again.get("w")) == (claim, Claim("db", "linux"), None)
    again.keep({"v", "w"})
    assert Claims(str(tmp_path)).get("u") is None
    again.note("v", None)
    assert json.loads((tmp_path / CLAIMS_FILE).read_text()) == {}


def test_a_claim_that_makes_no_sense_costs_only_itself(tmp_path):
    good = {"vm": "web", "os": "linux", "macs": [MAC]}
    wrong = [7, {}, good | {"vm": ""}, good | {"os": None}, good | {"macs": ["x"]}, good | {"macs": None}]
    document = {"good": good} | {f"wrong-{number}": entry for number, entry in enumerate(wrong)}
    (tmp_path / CLAIMS_FILE).write_text(json.dumps(document))
    with capture_logs() as logs:
        claims = Claims(str(tmp_path))
    assert claims.get("good") == Claim("web", "linux", frozenset({MAC}))
    assert [claims.get(f"wrong-{number}") for number in range(len(wrong))] == [None] * len(wrong)
    assert [entry["event"] for entry in logs] == ["VMs of pods cannot be read"]


def test_a_pod_is_claimed_from_before_its_vm_is_made_until_it_is_gone(world):
    def claimed():
        return {entry["vm"]: entry["macs"] for entry in json.loads(path.read_text()).values()}

    path = Path(world.settings.state_dir) / CLAIMS_FILE
    world.host.cocoon.slow("vm clone", 5.0, step="before")
    world.create_pod("web-0", guest=FAST)
    world.run(1)
    assert claimed() == {"vk-default-web-0": []}
    world.run(10)
    assert claimed() == {"vk-default-web-0": [world.guest("web-0").mac]}
    world.delete_pod("web-0")
    world.run(10)
    assert claimed() == {}
