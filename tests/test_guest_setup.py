"""The set-up of guests that cannot know by themselves who they are after a clone (S2.1: reachable, and not ready).

Which need it, that it is told every 3 s for 180 s, what the pod says meanwhile, and that a restart goes on with it.
"""

import base64
import os
import subprocess

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations, events, message, reason, status
from tests.test_vm_watch import at
from vkcocoon_setup import LINUX_SCRIPT

VM = "vk-default-web-0"
FIRECRACKER = {"vm.cocoonstack.io/backend": "firecracker", "cocoonset.cocoonstack.io/image": "fc-base:1"}
STATIC = {"cocoonset.cocoonstack.io/network": "cocoon-static"}
MODE = "cocoonset.cocoonstack.io/mode"
AGENT = "Error: exec: dial agent: connection refused (cocoon-agent may still be starting; retry shortly)"


@pytest.fixture
def world():
    with World() as world:
        world.host.cocoon.add_snapshot("fc-base:1", hypervisor="firecracker")
        yield world
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []


def execs(world):
    """The instants at which something was told to a guest."""
    return [at(call) for call in world.host.cocoon.calls if call["verb"] == "vm exec"]


def told(world):
    """The environment and the command of the last thing that a guest was told."""
    argv = [call["argv"] for call in world.host.cocoon.calls if call["verb"] == "vm exec"][-1]
    split = argv.index("--")
    env = dict(argv[n + 1].split("=", 1) for n in range(split) if argv[n] == "-e")
    return env, argv[split + 1 :]


@pytest.mark.parametrize(
    ("os", "wishes", "told_how"),
    [
        ("linux", {}, None),
        ("linux", STATIC, "sh"),
        ("linux", FIRECRACKER, "sh"),
        ("linux", {**STATIC, MODE: "run"}, None),
        ("windows", {}, None),
        ("windows", {MODE: "clone", "cocoonset.cocoonstack.io/image": "win-base:1"}, None),
        ("windows", {**STATIC, MODE: "clone", "cocoonset.cocoonstack.io/image": "win-base:1"}, "powershell"),
        ("windows", STATIC, "powershell"),
    ],
)
def test_only_those_are_told_who_cannot_find_out_by_themselves(world, os, wishes, told_how):
    world.create_pod("web-0", os=os, guest=FAST, annotations=wishes)
    world.run(5)
    assert world.ready("web-0")
    assert len(execs(world)) == (told_how is not None)
    assert told_how is None or told(world)[1][0] == told_how
    assert annotations(world, "web-0").get("post-clone-state") == ("done" if told_how else None)
    assert ("PostCloneSucceeded" in [event[0] for event in events(world, "web-0")]) is (told_how is not None)


def test_a_static_guest_is_told_its_card_its_address_and_its_gateway(world):
    world.create_pod("web-0", guest=FAST, annotations=STATIC)
    world.run(5)
    env, command = told(world)
    record = world.host.cocoon.record(VM)["network_configs"][0]
    assert env == {"MAC": record["mac"], "IP": "10.22.0.2", "PREFIX": "24", "GATEWAY": "10.22.0.1"}
    assert command == ["sh", "-c", LINUX_SCRIPT]


def test_a_reachable_guest_is_not_ready_before_it_is_set_up(world):
    world.host.cocoon.fail("vm exec", stderr=AGENT, times=4)
    world.create_pod("web-0", guest=FAST, annotations=STATIC)
    world.run(11)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "LifecycleCreating")
    assert reason(world, "web-0", "cocoonstack.io/ProbeReady") == "ProbeSucceeded"
    found = annotations(world, "web-0")
    assert (found["post-clone-state"], found["post-clone-errors"], found["lifecycle-state"]) == (
        "running",
        AGENT,
        "creating",
    )
    world.run(2)
    assert world.ready("web-0")
    assert execs(world) == [0.25, 3.25, 6.25, 9.25, 12.25]  # the first probe comes first, and its guest was silent
    assert not {"post-clone-errors", "post-clone-hint"} & set(annotations(world, "web-0"))
    failures = [event for event in events(world, "web-0") if event[0] == "PostCloneExecAttemptFailed"]
    assert failures == [("PostCloneExecAttemptFailed", f"clone {VM}: {AGENT}")]  # once per kind of error


def test_after_180_seconds_it_is_a_failed_lifecycle_with_a_way_out_and_nothing_lifts_it(world):
    world.host.cocoon.fail("vm exec", stderr="sh: ip: not found", returncode=127, times=None)
    world.create_pod("web-0", guest=FAST, annotations=STATIC)
    world.run(177)
    assert annotations(world, "web-0")["post-clone-state"] == "running"
    world.run(5)
    found = annotations(world, "web-0")
    assert (found["post-clone-state"], found["post-clone-errors"]) == ("failed", "sh: ip: not found")
    assert message(world, "web-0") == (f"clone {VM}: the guest could not be set up within 180s: sh: ip: not found")
    hint = base64.b64decode(found["post-clone-hint"]).decode()
    assert "IP=10.22.0.2\n" in hint
    assert hint.endswith(LINUX_SCRIPT)
    assert "PostCloneExecExhausted" in [event[0] for event in events(world, "web-0")]
    assert (execs(world)[0], execs(world)[-1], len(execs(world))) == (0.25, 177.25, 60)
    world.host.cocoon.faults.clear()
    tried = len(execs(world))
    world.run(600)
    assert (world.ready("web-0"), len(execs(world))) == (False, tried)
    world.stop()
    world.start()
    world.run(60)
    assert (world.ready("web-0"), len(execs(world))) == (False, tried)


def test_a_guest_that_hangs_costs_nobody_else_a_look_at_their_vm(world):
    for number in range(12):
        world.host.cocoon.hang("vm exec", name=f"vk-default-hung-{number}", times=None)
        world.create_pod(f"hung-{number}", guest=FAST, annotations=STATIC)
    world.create_pod("web-0", guest=FAST)
    world.run(6)
    assert world.ready("web-0")
    world.guest("web-0").crash()
    world.run(10)
    assert world.host.cocoon.count("vm start") == 1


def test_the_wait_for_an_address_begins_when_the_guest_is_set_up(world):
    world.host.cocoon.fail("vm exec", stderr=AGENT, times=10)
    world.create_pod("web-0", guest=GuestSpec(boot_s=60.0, lease_s=0.0), annotations=FIRECRACKER)
    world.run(59)
    assert annotations(world, "web-0")["lifecycle-state"] == "creating"
    world.run(2)
    assert world.ready("web-0")


@pytest.mark.parametrize("state", ["running", None])
def test_a_restart_of_the_daemon_goes_on_with_it(world, state):
    world.host.cocoon.fail("vm exec", stderr=AGENT, times=2)
    world.create_pod("web-0", guest=FAST, annotations=FIRECRACKER)
    world.run(4)
    world.kill()
    if state is None:  # our last words did not arrive
        world.annotate("web-0", post_clone_state=None, post_clone_errors=None, lifecycle_state=None)
    before = len(execs(world))
    world.start()
    world.run(5)
    assert len(execs(world)) == before + 1
    assert world.ready("web-0")
    assert annotations(world, "web-0")["post-clone-state"] == "done"
    resumed = "ResumedAfterRestart" in [event[0] for event in events(world, "web-0")]
    assert resumed is (state == "running")


def test_what_was_done_is_not_done_again_by_a_restart_of_the_daemon(world):
    world.create_pod("web-0", guest=FAST, annotations=FIRECRACKER)
    world.run(5)
    world.stop()
    world.start()
    world.run(20)
    assert len(execs(world)) == 1
    assert annotations(world, "web-0")["post-clone-state"] == "done"


def test_a_static_guest_that_was_booted_again_is_told_again(world):
    world.create_pod("web-0", guest=FAST, annotations=STATIC)
    world.run(7)
    world.guest("web-0").crash()
    world.run(10)
    assert len(execs(world)) == 2
    assert world.ready("web-0")


def test_a_pod_that_is_deleted_meanwhile_is_told_nothing_more(world):
    world.host.cocoon.fail("vm exec", stderr=AGENT, times=None)
    world.create_pod("web-0", guest=FAST, annotations=STATIC)
    world.run(4)
    world.delete_pod("web-0")
    world.run(1)
    tried = len(execs(world))
    world.run(60)
    assert (world.pod("web-0"), len(execs(world))) == (None, tried)


def test_a_hibernate_ends_it_and_the_wake_begins_anew(world):
    world.host.cocoon.fail("vm exec", stderr=AGENT, times=2)
    world.create_pod("web-0", guest=FAST, annotations=FIRECRACKER)
    world.run(4)
    world.annotate("web-0", hibernate="true")
    world.run(10)
    assert annotations(world, "web-0")["lifecycle-state"] == "hibernated"
    assert "post-clone-state" not in annotations(world, "web-0")
    assert len(execs(world)) == 2
    world.annotate("web-0", hibernate=None)
    world.run(5)
    assert len(execs(world)) == 3
    assert world.ready("web-0")


def test_a_wake_of_what_was_once_run_is_a_clone(world):
    world.host.cocoon.golden = ("*",)
    wishes = {**FIRECRACKER, MODE: "run", "cocoonset.cocoonstack.io/image": "fc-image:1"}
    world.create_pod("web-0", guest=FAST, annotations=wishes)
    world.run(5)
    assert execs(world) == []
    world.annotate("web-0", hibernate="true")
    world.run(5)
    world.annotate("web-0", hibernate=None)
    world.run(5)
    assert len(execs(world)) == 1
    assert world.ready("web-0")


def test_a_windows_clone_without_an_address_is_told_once_to_ask_again(world):
    wishes = {MODE: "clone", "cocoonset.cocoonstack.io/image": "win-base:1"}
    world.create_pod("web-0", os="windows", guest=GuestSpec(os="windows", boot_s=600.0), annotations=wishes)
    world.run(100)
    assert execs(world) == [30.0]
    assert told(world) == ({}, ["ipconfig", "/renew"])
    assert "PostCloneIPWaitTimeout" in [event[0] for event in events(world, "web-0")]


def test_a_pod_without_a_network_card_is_not_told_anything(world):
    world.host.cocoon.add_snapshot("bare-base:1", hypervisor="firecracker", nics=0)
    bare = {**FIRECRACKER, "cocoonset.cocoonstack.io/image": "bare-base:1"}
    world.create_pod("web-0", guest=FAST, annotations=bare)
    world.run(5)
    assert execs(world) == []
    assert status(world, "web-0")["phase"] == "Running"


# --- the script itself, by a real shell -------------------------------------------------------------------------------


@pytest.fixture
def guest(tmp_path):
    """A guest's /sys/class/net and its `ip`, which writes down what it is asked."""
    (tmp_path / "bin").mkdir()
    for name in ("ip", "dhclient"):
        tool = tmp_path / "bin" / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/log"\n')
        tool.chmod(0o755)

    def card(name, mac, real=True):
        path = tmp_path / "net" / name
        path.mkdir(parents=True)
        (path / "address").write_text(mac + "\n")
        if real:
            (path / "device").mkdir()

    def run(**env):
        given = {"MAC": "0a:58:00:00:00:01", "IP": "", "PREFIX": "", "GATEWAY": "", "NET": str(tmp_path / "net"), **env}
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        command = ["sh", "-c", LINUX_SCRIPT]
        done = subprocess.run(command, env={**given, "PATH": path}, capture_output=True, timeout=20, check=False)
        log = tmp_path / "log"
        return done.returncode, log.read_text().splitlines() if log.exists() else []

    card("lo", "00:00:00:00:00:00", real=False)
    run.card = card
    return run


@pytest.mark.process
def test_a_card_that_is_there_by_its_mac_gets_the_address_and_the_route(guest):
    guest.card("eth0", "0a:58:00:00:00:09")
    guest.card("eth1", "0a:58:00:00:00:01")
    assert guest(IP="10.22.0.9", PREFIX="16", GATEWAY="10.22.0.1") == (
        0,
        [
            "ip link set dev eth1 up",
            "ip -4 address flush dev eth1",
            "ip address add 10.22.0.9/16 dev eth1",
            "ip route replace default via 10.22.0.1 dev eth1",
        ],
    )


@pytest.mark.process
def test_a_guest_that_still_has_the_card_of_its_source_gets_the_new_mac_and_asks_dhcp(guest):
    guest.card("eth0", "0a:58:00:00:00:09")
    code, log = guest()
    assert (code, log[:4]) == (
        0,
        [
            "ip link set dev eth0 down",
            "ip link set dev eth0 address 0a:58:00:00:00:01",
            "ip link set dev eth0 up",
            "ip -4 address flush dev eth0",
        ],
    )
    assert log[4:] in (["dhclient -1 eth0"], [])  # the machine this runs on may have networkctl


@pytest.mark.process
def test_a_guest_without_any_card_says_so_by_its_exit_status(guest):
    assert guest() == (1, [])
