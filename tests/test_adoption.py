"""Startup reconcile calls start too: what runs is adopted, probed before it is published, and nothing is destroyed on
doubt (K6, K10, D1; clause 1)."""

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations, calls, events, reason, status
from tests.test_last_state import macs, snapshots
from tests.test_metrics import value
from tests.test_vm_watch import at
from vkcocoon_debts import CLAIMS_FILE
from vkcocoon_kube import ApiError
from vkcocoon_setup import ADDRESS_POLL
from vkcocoon_snapshots import Snapshots
from vkcocoon_startup import GRACE
from vkcocoon_status import condition_of
from vkcocoon_tracking import TrackedPod


def restart(world, away=10.0):
    """Stop the daemon, let time pass, start it again; returns how many requests were made before."""
    world.stop()
    world.run(away)
    before = len(world.kube.requests)
    world.start()
    return before


def ready_states(world, name, since):
    """Every Ready that was written to the API after so many requests."""
    return [
        condition["status"]
        for request in world.kube.requests[since:]
        if request.verb == "PATCH" and f"/pods/{name}/status" in request.path
        for condition in request.body["status"].get("conditions", [])
        if condition["type"] == "Ready"
    ]


@pytest.mark.parametrize("os", ["linux", "windows", "macos"])
def test_a_healthy_guest_does_not_blink_over_a_restart_and_no_command_touches_it(world, os):
    world.create_pod("web-0", os=os, guest=GuestSpec(os=os, boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(20)
    assert world.ready("web-0")
    made = calls(world.host.cocoon)
    since = restart(world)
    world.run(60)
    assert ready_states(world, "web-0", since) == []
    assert len(world.flips("web-0")) == 2
    assert calls(world.host.cocoon) == made
    assert world.host.macos.count("vm start") == 0
    assert world.host.macos.count("vm run") == (os == "macos")


@pytest.mark.parametrize("trouble", ["missing", "torn", "empty"])
@pytest.mark.parametrize("seconds", [0.2, 1.5])
def test_a_lease_file_that_is_being_written_as_we_start_makes_no_pod_blink(world, trouble, seconds):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.stop()
    since = len(world.kube.requests)
    world.leases.write(trouble)
    world.start()
    world.run(seconds)
    world.leases.write()
    world.run(10)
    assert list(dict.fromkeys(ready_states(world, "web-0", since))) == ([] if seconds < 1.0 else ["False", "True"])
    assert world.ready("web-0")


def test_a_guest_that_misses_the_first_echo_after_a_restart_is_ready_again_with_the_next(world):
    """S4.2: the first probe decides; a new process knows of no answers before it. docs/installation.md says so."""
    world.create_pod("web-0", guest=FAST)
    world.run(20)
    assert world.ready("web-0")
    world.stop()
    world.guest("web-0").silent()
    since = len(world.kube.requests)
    world.start()
    world.run(0.3)  # the echo has at most 250 ms (T1)
    world.guest("web-0").silent(False)
    world.run(5)
    assert ready_states(world, "web-0", since) == ["False", "True"]
    (lost, _), (back, _) = world.flips("web-0")[-2:]
    assert back - lost < 1.0


def test_a_guest_that_died_while_we_were_away_is_told_as_it_is(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.stop()
    world.guest("web-0").silent()
    world.run(10)
    world.start()
    world.run(5)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "PingTimeout")


SILENT = GuestSpec(boot_s=0.0, lease_s=0.0, ports=(8080,))  # once told to be: a dial then takes the whole bound
BOUND = 3.0


def silent_at_start(world, count, **more):
    """Restart among so many guests that have become silent; returns the instant of the start."""
    for number in range(count):
        annotations = {"vm.cocoonstack.io/probe-port": "8080", **more}
        world.create_pod(f"dead-{number}", guest=SILENT, annotations=annotations)
    world.run(10)
    assert all(world.ready(f"dead-{number}") for number in range(count))
    world.stop()
    for number in range(count):
        world.guest(f"dead-{number}").silent()
    world.start()
    return world.clock.elapsed()


def pointing_at(world, name):
    """Annotations of an unmanaged pod whose guest is that of another one."""
    return {
        "cocoonset.cocoonstack.io/managed": None,
        "vm.cocoonstack.io/name": "theirs",
        "vm.cocoonstack.io/id": "their-id",
        "vm.cocoonstack.io/ip": annotations(world, name)["ip"],
        "vm.cocoonstack.io/probe-port": "8080",
    }


def test_first_probes_run_side_by_side(world):
    """Twenty dead guests cost the patience of one, not of twenty."""
    world.create_pod("alive", guest=FAST)
    began = silent_at_start(world, 20)
    world.run(0)
    assert world.probes("alive")[-1] == began
    world.run(60)
    probed = [next(at - began for at in world.probes(f"dead-{number}") if at > began) for number in range(20)]
    assert probed == [pytest.approx(BOUND)] * 20


def test_a_create_does_not_wait_for_the_first_probes_of_what_is_adopted(world):
    began = silent_at_start(world, 20)
    world.create_pod("early", guest=FAST)
    world.run(1)
    world.create_pod("late", guest=FAST)
    world.run(1)
    assert world.daemon.started.is_set()
    assert world.flips("early")[-1] == (pytest.approx(began + ADDRESS_POLL), True)
    assert world.flips("late")[-1] == (pytest.approx(began + 1 + ADDRESS_POLL), True)


def test_what_is_adopted_is_not_published_before_it_was_probed(world):
    began = silent_at_start(world, 1)
    since = len(world.kube.requests)
    world.annotate("dead-0", note="seen")  # its actor has something to look at
    world.run(BOUND - 0.001)
    assert ready_states(world, "dead-0", since) == []
    world.run(0.001)
    assert world.flips("dead-0")[-1] == (pytest.approx(began + BOUND), False)


def test_an_address_that_becomes_free_publishes_nobody_who_was_not_probed_yet():
    with World(degraded=True) as world:
        world.create_pod("leaves", guest=SILENT)  # taken for ready unasked
        world.run(5)
        world.create_pod("dead-u", annotations=pointing_at(world, "leaves"))
        world.run(5)
        assert world.ready("dead-u")
        world.stop()
        world.guest("leaves").silent()
        world.start()
        began = world.clock.elapsed()
        world.run(1)
        world.delete_pod("leaves")
        world.run(BOUND)
        assert world.pod("leaves") is None
        assert world.flips("dead-u")[-1] == (pytest.approx(began + BOUND), False)


def test_what_a_pod_is_asked_for_while_it_is_adopted_waits_for_its_own_probe(world):
    silent_at_start(world, 1)
    world.run(1)
    world.annotate("dead-0", hibernate="true")
    world.run(1)
    assert world.host.cocoon.count("snapshot save") == 0
    world.run(5)
    assert annotations(world, "dead-0")["lifecycle-state"] == "hibernated"
    assert world.probes("dead-0")[-1] <= world.clock.elapsed() - 3


def test_a_deletion_waits_for_no_first_probe(world):
    began = silent_at_start(world, 1)
    world.run(1)
    world.delete_pod("dead-0")
    world.run(1)
    assert world.pod("dead-0") is None
    assert world.host.pids() == []
    world.run(30)
    assert [at for at in world.probes("dead-0") if at > began] == []


def test_an_unmanaged_pod_is_adopted_in_the_same_way(world):
    world.create_pod("elsewhere", guest=SILENT)
    world.run(5)
    world.create_pod("dead-u", annotations=pointing_at(world, "elsewhere"))
    world.run(5)
    assert world.ready("dead-u")
    world.stop()
    world.guest("elsewhere").silent()
    world.start()
    began = world.clock.elapsed()
    world.create_pod("early", guest=FAST)
    world.run(BOUND)
    assert world.flips("early")[-1] == (pytest.approx(began + ADDRESS_POLL), True)
    assert world.flips("dead-u")[-1] == (pytest.approx(began + BOUND), False)


def test_a_vm_whose_annotation_never_arrived_is_adopted_by_name(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.stop()
    patch = {"metadata": {"annotations": {"vm.cocoonstack.io/id": None, "vm.cocoonstack.io/lifecycle-state": None}}}
    world.kube.admin.patch("/api/v1/namespaces/default/pods/web-0", patch, kind="merge")
    world.start()
    world.run(5)
    assert world.host.cocoon.count("vm clone") == 1
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert annotations(world, "web-0")["id"] == world.daemon.ports.runtime.inspect("vk-default-web-0").id


def test_a_pod_whose_vm_is_gone_is_brought_up_again(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.stop()
    assert world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "vk-default-web-0"], 30.0).returncode == 0
    world.start()
    world.run(10)
    assert world.host.cocoon.count("vm clone") == 2
    assert world.ready("web-0")


# --- what died while nobody watched -----------------------------------------------------------------------------------

MAC = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
METRIC = {"linux": "vm_restarts_total", "macos": "qemu_restarts_total"}


def restarts(world, name="web-0"):
    return status(world, name)["containerStatuses"][0]["restartCount"]


def words(world, name="web-0"):
    return [word for word, _ in events(world, name)]


def died_while_away(world, os):
    world.create_pod("web-0", os=os, guest=replace(MAC, ssh_after_s=5.0) if os == "macos" else FAST)
    world.run(20)
    assert (world.ready("web-0"), restarts(world)) == (True, 0)
    world.stop()
    world.guest("web-0").crash()
    world.run(60)
    world.start()


@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_guest_that_died_while_we_were_away_is_restarted_counted_and_told_as_at_any_other_time(world, os):
    died_while_away(world, os)
    world.run(20)
    assert world.ready("web-0")
    assert (restarts(world), words(world).count("GuestRestarted")) == (1, 1)
    assert value(world, METRIC[os], result="ok") == 1
    tool = world.host.macos if os == "macos" else world.host.cocoon
    assert (tool.count("vm start"), len(world.host.pids())) == (1, 1)


def test_a_qemu_that_dies_again_after_a_start_waits_like_any_other(world):
    """T5: 10 s, then 20 s after the start of the attempt before."""
    died_while_away(world, "macos")
    for _ in range(500):
        if world.host.pids():
            world.guest("web-0").crash()
        world.run(0.1)
    starts = [at(call) for call in world.host.macos.calls if call["verb"] == "vm start"]
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert pauses == [pytest.approx(10.0, abs=1.1), pytest.approx(20.0, abs=1.1)]


def test_a_dead_qemu_of_a_failed_lifecycle_is_not_started_by_a_start_either(world):
    """M3: as while we watch, until the failure is lifted."""
    world.create_pod("web-0", os="macos", guest=MAC)
    world.run(10)
    world.annotate("web-0", hibernate="true")
    world.run(5)
    world.stop()
    world.guest("web-0").crash()
    world.start()
    world.run(60)
    assert (world.host.pids(), world.host.macos.count("vm start")) == ([], 0)
    assert reason(world, "web-0", "cocoonstack.io/ProbeReady") == "QEMUDead"
    world.annotate("web-0", hibernate=None)
    world.run(20)
    assert (world.ready("web-0"), len(world.host.pids())) == (True, 1)


def test_a_vm_that_stops_again_at_once_after_a_start_is_given_up(world):
    died_while_away(world, "linux")
    world.run(10)
    world.guest("web-0").crash()
    world.run(10)
    assert world.pod("web-0") is None
    assert "RestartCooldown" in words(world)


def test_a_vm_that_cannot_be_started_at_a_start_is_tried_again_and_counted_once(world):
    died_while_away(world, "linux")
    world.host.cocoon.fail("vm start", times=2)
    world.run(60)
    assert world.ready("web-0")
    assert (restarts(world), words(world).count("GuestRestarted")) == (1, 1)
    assert (value(world, METRIC["linux"], result="failed"), value(world, METRIC["linux"], result="ok")) == (2, 1)


def test_a_static_guest_that_is_booted_again_at_a_start_is_told_its_address_again(world):
    world.create_pod("web-0", guest=FAST, annotations={"cocoonset.cocoonstack.io/network": "cocoon-static"})
    world.run(10)
    assert (world.ready("web-0"), world.host.cocoon.count("vm exec")) == (True, 1)
    world.stop()
    world.guest("web-0").crash()
    world.start()
    world.run(10)
    assert (world.ready("web-0"), world.host.cocoon.count("vm exec")) == (True, 2)
    assert annotations(world, "web-0")["post-clone-state"] == "done"


@pytest.mark.parametrize("os", ["linux", "windows", "macos"])
def test_a_pod_whose_vm_was_lost_while_we_were_away_says_so_once(world, os):
    """Go provider: the pod is left to its creation. Nobody who watches pods would learn that its disk is a new one."""
    tool, program = (world.host.macos, "cocoon-macos") if os == "macos" else (world.host.cocoon, "cocoon")
    world.create_pod("web-0", os=os, guest=GuestSpec(os=os, boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(20)
    world.stop()
    force = [] if os == "macos" else ["--force"]
    assert tool.execute([program, "vm", "rm", *force, "vk-default-web-0"], 30.0).returncode == 0
    tool.fail("vm run", times=2)
    tool.fail("vm clone", times=2)
    with capture_logs() as logs:
        world.start()
        world.run(60)
    assert (world.ready("web-0"), restarts(world)) == (True, 1)
    told = [text for word, text in events(world, "web-0") if word == "VMGone"]
    assert told == ["VM vk-default-web-0 was lost while vk-cocoon was away; the pod has a new one, with nothing of it"]
    assert [log["event"] for log in logs].count("VM is gone, and the pod has a new one") == 1
    restart(world)
    world.run(20)
    assert (restarts(world), words(world).count("VMGone")) == (1, 1)


def test_a_hibernated_vm_was_not_lost(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.annotate("web-0", hibernate="true")
    world.run(5)
    world.stop()
    world.annotate("web-0", hibernate=None)
    world.start()
    world.run(10)
    assert (world.ready("web-0"), restarts(world)) == (True, 0)
    assert not {"VMGone", "GuestRestarted"} & set(words(world))


def test_a_pod_that_brings_the_id_of_another_vm_along_has_lost_none(world):
    """As a pod does that somebody made from the YAML of another one."""
    world.create_pod("web-0", guest=FAST, annotations={"vm.cocoonstack.io/id": "of-the-pod-it-was-copied-from"})
    world.run(10)
    assert world.ready("web-0")
    assert "VMGone" not in dict(events(world, "web-0"))
    assert status(world, "web-0")["containerStatuses"][0]["restartCount"] == 0


def test_restarts_are_counted_on_over_a_restart_of_the_daemon(world):
    world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(10)
    counts = []
    for _ in range(2):
        world.guest("mac-0").crash()
        world.run(60)
        counts.append(status(world, "mac-0")["containerStatuses"][0]["restartCount"])
        restart(world)
        world.run(10)
        counts.append(status(world, "mac-0")["containerStatuses"][0]["restartCount"])
    assert counts == [1, 1, 2, 2]


def test_the_failure_of_an_earlier_run_stays_until_it_is_lifted(world):
    world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0))
    world.run(10)
    world.annotate("mac-0", hibernate="true")
    world.run(5)
    restart(world)
    world.run(20)
    assert annotations(world, "mac-0")["lifecycle-state"] == "failed"
    assert not world.ready("mac-0")


def test_a_failed_wait_for_an_address_is_no_failure_once_the_address_is_there(world):
    world.create_pod("web-0", guest=GuestSpec(boot_s=60.0, lease_s=0.0))
    world.run(50)
    assert annotations(world, "web-0")["lifecycle-state"] == "failed"
    restart(world, away=20)
    world.run(5)
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert world.ready("web-0")


def test_a_hibernated_pod_stays_hibernated_over_a_restart_and_wakes_after_it(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.annotate("web-0", hibernate="true")
    world.run(5)
    restart(world)
    world.run(60)
    assert annotations(world, "web-0")["lifecycle-state"] == "hibernated"
    assert world.host.cocoon.count("vm clone") == 1
    world.annotate("web-0", hibernate=None)
    world.run(10)
    assert world.ready("web-0")


def test_a_pod_that_is_being_deleted_gets_no_probe_and_is_deleted(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.stop()
    probes = len(world.probes("web-0"))
    world.delete_pod("web-0")
    world.run(5)
    world.start()
    world.run(5)
    assert world.pod("web-0") is None
    assert world.host.pids() == []
    assert len(world.probes("web-0")) == probes


def test_a_pod_that_was_deleted_while_we_were_away_leaves_an_orphan_that_is_kept(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.stop()
    world.delete_pod("web-0", grace_seconds=0)
    world.start()
    world.run(120)
    assert len(world.host.pids()) == 1


@pytest.mark.parametrize("os", ["linux", "macos"])
@pytest.mark.parametrize(("policy", "left"), [("alert", 1), ("keep", 1), ("destroy", 0)])
def test_what_becomes_of_an_orphan_is_the_operators_choice(policy, left, os, caplog):
    with World(orphan_policy=policy) as world:
        world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
        world.create_pod("mine", os=os, guest=MAC if os == "macos" else FAST)
        world.run(20)
        world.stop()
        world.delete_pod("web-0", grace_seconds=0)
        world.start()
        world.run(30)
        assert len(world.host.pids()) == 1 + left
        assert len(macs(world)) == 1 + left
        assert world.daemon.ports.metrics._orphans._value.get() == 1
        assert world.ready("mine")
        assert len(world.flips("mine")) == 2


def test_macos_guests_that_cannot_be_listed_hold_up_nobody_and_cost_none():
    with World(orphan_policy="destroy") as world:
        world.create_pod("mac-0", os="macos", guest=MAC)
        world.run(20)
        world.stop()
        world.delete_pod("mac-0", grace_seconds=0)
        world.host.macos.hang("vm list")
        world.start()
        world.run(5)
        assert world.daemon.started.is_set()
        world.run(300)
        assert len(world.host.pids()) == 1


@pytest.mark.parametrize("os", ["linux", "macos"])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_pod_that_was_renamed_while_we_were_away_keeps_its_vm(os, stopped):
    """Also where the policy takes the VMs of nobody."""
    with World(orphan_policy="destroy") as world:
        world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
        world.run(20)
        vm_id = annotations(world, "web-0")["id"]
        world.stop()
        renamed = {"metadata": {"annotations": {"vm.cocoonstack.io/name": "another"}}}
        world.kube.admin.patch("/api/v1/namespaces/default/pods/web-0", renamed, kind="merge")
        if stopped:
            world.guest("web-0").crash()
        world.start()
        world.run(60)
        assert annotations(world, "web-0")["id"] == vm_id
        assert (world.ready("web-0"), world.vm_names()) == (True, ["vk-default-web-0"])
        world.delete_pod("web-0")
        world.run(30)
        assert (world.pod("web-0"), world.vm_names(), macs(world)) == (None, [], [])


MANAGED = "cocoonset.cocoonstack.io/managed"


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_pod_that_is_managed_again_is_probed_where_its_guest_is_now(world, os, restart):
    """As after a wrong `kubectl apply` and its repair, with a restart of the daemon in between."""
    path = "/api/v1/namespaces/default/pods/web-0"
    world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
    world.run(20)
    vm_id = annotations(world, "web-0")["id"]
    if restart:
        world.kill()
    world.kube.admin.patch(path, {"metadata": {"annotations": {MANAGED: None}}}, kind="merge")
    if restart:
        world.start()
    world.run(20)
    assert world.ready("web-0")
    flips = len(world.flips("web-0"))
    world.kube.admin.patch(path, {"metadata": {"annotations": {MANAGED: "true"}}}, kind="merge")
    world.run(20)
    assert len(world.flips("web-0")) == flips
    world.leases.lease(world.guest("web-0").mac, "10.88.0.222")
    world.guest("web-0").renumber("10.88.0.222")
    world.run(60)
    assert (world.ready("web-0"), status(world, "web-0")["podIP"]) == (True, "10.88.0.222")
    assert (annotations(world, "web-0")["id"], len(world.host.pids())) == (vm_id, 1)
    if os == "macos":
        world.guest("web-0").crash()
        world.run(60)
        assert (world.ready("web-0"), len(world.host.pids())) == (True, 1)
    world.delete_pod("web-0")
    world.run(30)
    assert (world.pod("web-0"), world.host.pids(), macs(world)) == (None, [], [])


def test_an_unmanaged_pod_that_becomes_managed_has_the_vm_of_its_id_and_no_other_of_its_name(world):
    path = "/api/v1/namespaces/default/pods/web-0"
    for name in ("theirs", "web"):
        world.host.specs[name] = FAST
        world.host.cocoon.execute(["cocoon", "vm", "clone", "--name", name, "devbox-base:7"], 60.0)
    world.run(5)
    guest, vm_id = world.host.guest("theirs"), world.host.cocoon.record("theirs")["id"]
    points = {MANAGED: None, "vm.cocoonstack.io/name": "web", "vm.cocoonstack.io/id": vm_id}
    world.create_pod("web-0", annotations=points | {"vm.cocoonstack.io/ip": world.leases.address(guest.mac)})
    world.run(10)
    assert world.ready("web-0")
    world.kube.admin.patch(path, {"metadata": {"annotations": {MANAGED: "true"}}}, kind="merge")
    world.run(20)
    assert (world.ready("web-0"), annotations(world, "web-0")["mac"]) == (True, guest.mac)
    world.delete_pod("web-0")
    world.run(20)
    assert (world.pod("web-0"), world.vm_names()) == (None, ["web"])


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize(("os", "other"), [("linux", "macos"), ("macos", "linux"), ("macos", "windows")])
def test_a_pod_whose_os_was_edited_while_we_were_away_keeps_its_vm(world, os, other, remembered):
    world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
    world.run(20)
    vm_id = annotations(world, "web-0")["id"]
    world.kill()
    edited = {"metadata": {"annotations": {"cocoonset.cocoonstack.io/os": other}}}
    world.kube.admin.patch("/api/v1/namespaces/default/pods/web-0", edited, kind="merge")
    if not remembered:
        (Path(world.settings.state_dir) / CLAIMS_FILE).unlink()
    world.start()
    world.run(60)
    assert (annotations(world, "web-0")["id"], world.ready("web-0"), len(world.host.pids())) == (vm_id, True, 1)
    world.delete_pod("web-0")
    world.run(30)
    assert (world.pod("web-0"), world.vm_names(), macs(world)) == (None, [], [])


@pytest.mark.parametrize(
    ("os", "hibernated", "remembered"),
    [
        ("linux", False, True),
        ("linux", False, False),
        ("linux", True, True),
        ("macos", False, True),
        ("macos", False, False),
    ],
)
def test_what_a_pod_leaves_that_ended_before_we_started_goes_when_it_is_deleted(world, os, hibernated, remembered):
    """As the garbage collector of the cluster does it: Failed first, then deleted by force. Until then nothing is done
    to its VM (K6)."""
    world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
    world.run(20)
    if hibernated:
        world.annotate("web-0", hibernate="true")
        world.run(10)
    world.stop()
    probes = len(world.probes("web-0"))
    path = "/api/v1/namespaces/default/pods/web-0/status"
    world.kube.admin.patch(path, {"status": {"phase": "Failed", "reason": "Evicted", "conditions": []}}, kind="merge")
    if not remembered:
        (Path(world.settings.state_dir) / CLAIMS_FILE).unlink()
    world.start()
    world.run(200)
    assert (status(world, "web-0")["phase"], len(world.host.pids())) == ("Failed", 0 if hibernated else 1)
    assert len(world.probes("web-0")) == probes
    world.delete_pod("web-0", grace_seconds=0)
    world.run(60)
    assert (world.pod("web-0"), world.vm_names(), macs(world)) == (None, [], [])
    assert "vk-default-web-0" not in snapshots(world)


@pytest.mark.parametrize("broken", ["pods", "vms"])
def test_a_list_that_cannot_be_read_destroys_and_creates_nothing_and_is_asked_for_again(broken):
    with World(orphan_policy="destroy") as world:
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        world.stop()
        if broken == "pods":
            world.kube.fail("LIST /api/v1/pods", ApiError(500, "InternalError", "later"), times=3)
        else:
            world.host.cocoon.fail("vm list", times=3)
        made = calls(world.host.cocoon)
        world.start()
        world.run(1)
        assert calls(world.host.cocoon) == made
        world.run(60)
        assert calls(world.host.cocoon) == made
        assert world.ready("web-0")
        assert len(world.flips("web-0")) == 2


# --- what cannot be probed, or is not ours ----------------------------------------------------------------------------

POD = "/api/v1/namespaces/default/pods/web-0"


def blocked(world):
    node = world.kube.admin.get("/api/v1/nodes/sim-node")
    return condition_of(node["status"], "cocoonstack.io/StartupBlocked").get("status")


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "hangs"])
def test_a_start_that_cannot_see_what_runs_leaves_no_pod_ready_and_says_so(world, fails):
    world.create_pod("web-0", guest=FAST)
    world.create_pod("mac-0", os="macos", guest=MAC)
    world.run(20)
    vm_id = annotations(world, "web-0")["id"]
    world.stop()
    tool = world.host.cocoon
    hold = None if fails else tool.hold("vm list", times=None)
    if fails:
        tool.fail("vm list", stderr="locked", times=7)
    world.start()
    world.run(GRACE - 0.001)
    assert (world.ready("web-0"), blocked(world)) == (True, "False")
    world.run(0.002)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "NotProbed")
    assert (status(world, "web-0")["phase"], annotations(world, "web-0")["id"]) == ("Running", vm_id)
    world.run(60)
    assert blocked(world) == "True"
    assert world.ready("mac-0")  # another tool's, and probed
    world.guest("mac-0").crash()
    world.run(30)
    assert (world.ready("mac-0"), restarts(world, "mac-0")) == (True, 1)
    if hold is not None:
        hold.release()
    world.run(120)
    assert (world.ready("web-0"), blocked(world), world.host.cocoon.count("vm start")) == (True, "False", 0)


@pytest.mark.parametrize("lost", [False, True], ids=["stopped", "removed"])
def test_a_pod_whose_vm_certainly_does_not_run_is_not_ready_from_the_start(world, lost):
    world.create_pod("web-0", guest=FAST)
    world.run(20)
    vm_id = annotations(world, "web-0")["id"]
    world.stop()
    world.guest("web-0").crash()
    if lost:
        assert world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "vk-default-web-0"], 30.0).returncode == 0
    hold = world.host.cocoon.hold("vm clone" if lost else "vm start", times=None)
    world.start()
    world.run(0.001)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "VMGone")
    assert annotations(world, "web-0")["id"] == vm_id  # a kill must not make a new pod of it
    hold.release()
    world.run(30)
    assert (world.ready("web-0"), restarts(world)) == (True, 1)


@pytest.mark.parametrize("refused", [False, True], ids=["free API", "refusing API"])
def test_an_address_that_changed_hands_while_we_were_away_is_given_only_once_the_first_has_left_it(world, refused):
    """L10 holds over a restart: what the API shows Ready there is a claim."""
    for name in ("a", "b"):
        world.create_pod(name, guest=FAST)
    world.run(10)
    ip = status(world, "a")["podIP"]
    world.kill()
    ours, theirs = world.guest("a"), world.guest("b")
    ours.silent()
    ours.renumber("10.88.0.99")
    world.leases.release(ours.mac)
    world.leases.lease(theirs.mac, ip)
    theirs.renumber(ip)
    if refused:
        world.kube.fail("PATCH */pods/a/status", ApiError(500, "InternalError", "webhook"), times=20)
    world.start()
    world.run(20)
    if refused:
        assert (world.ready("b"), reason(world, "b")) == (False, "AddressConflict")
    world.run(900)
    assert (world.ready("a"), world.ready("b"), status(world, "b")["podIP"]) == (False, True, ip)


@pytest.mark.parametrize("gone", [("name",), ("name", "id")], ids="+".join)
@pytest.mark.parametrize("os", ["linux", "macos"])
@pytest.mark.parametrize("noted", [True, False], ids=["state kept", "state lost"])
def test_a_pod_whose_name_was_removed_while_we_were_away_keeps_its_vm(os, gone, noted):
    with World(orphan_policy="destroy") as world:
        world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
        world.run(20)
        vm_id = annotations(world, "web-0")["id"]
        world.stop()
        removed = {f"vm.cocoonstack.io/{key}": None for key in gone}
        world.kube.admin.patch(POD, {"metadata": {"annotations": removed}}, kind="merge")
        if not noted:
            shutil.rmtree(world.settings.state_dir)
        world.start()
        world.run(30)
        assert (world.ready("web-0"), annotations(world, "web-0")["id"]) == (True, vm_id)
        world.guest("web-0").silent()
        world.run(60)
        assert not world.ready("web-0")
        world.delete_pod("web-0")
        world.run(30)
        assert (world.pod("web-0"), world.vm_names(), macs(world)) == (None, [], [])


def test_a_pod_that_is_not_ours_any_more_is_not_left_ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(20)
    world.stop()
    world.kube.admin.patch(POD, {"metadata": {"annotations": {"vm.cocoonstack.io/name": None}}}, kind="merge")
    assert world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", "vk-default-web-0"], 30.0).returncode == 0
    shutil.rmtree(world.settings.state_dir)  # where it is written down which VM was made for it
    world.start()
    world.run(1)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "NotProbed")


def test_one_pod_that_cannot_be_taken_over_costs_itself_alone(world, monkeypatch):
    for name in ("web-0", "web-1"):
        world.create_pod(name, guest=FAST)
    world.run(20)
    world.stop()
    known, mistakes = TrackedPod.of, iter(range(2))

    def of(pod):
        if pod["metadata"]["name"] == "web-0" and next(mistakes, None) is not None:
            raise ArithmeticError("odd")
        return known(pod)

    monkeypatch.setattr(TrackedPod, "of", of)
    world.start()
    world.run(0.5)
    assert (world.ready("web-1"), len(world.flips("web-1"))) == (True, 2)
    assert (world.ready("web-0"), reason(world, "web-0")) == (False, "NotProbed")
    world.run(30)
    assert world.ready("web-0")
    assert ("ProviderCreateFailed", "odd") in events(world, "web-0")
    assert world.host.cocoon.count("vm clone") == 3  # the last was refused: its name is taken, and the VM adopted


def test_a_mistake_over_what_was_seen_at_a_start_is_tried_again(world, monkeypatch):
    world.create_pod("web-0", guest=FAST)
    world.run(20)
    world.stop()
    known, mistakes = Snapshots.load, iter(range(2))
    monkeypatch.setattr(Snapshots, "load", lambda self: 1 / 0 if next(mistakes, None) is not None else known(self))
    world.start()
    world.run(10)
    assert (world.ready("web-0"), len(world.flips("web-0")), world.daemon.started.is_set()) == (True, 2, True)


def test_the_lease_of_a_known_node_is_renewed_while_start_up_still_waits(world):
    world.create_pod("web-0", guest=FAST)
    world.run(30)
    world.stop()
    world.run(60)
    world.host.cocoon.fail("vm list", times=8)
    since = len(world.kube.requests)
    world.start()
    world.run(25)
    assert not world.daemon.started.is_set()
    renewals = [
        request for request in world.kube.requests[since:] if "/leases/" in request.path and request.verb == "PUT"
    ]
    assert len(renewals) >= 2


def test_an_unfinished_hibernate_is_finished_after_a_restart(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.slow("snapshot save", 30.0, step="before")
    world.annotate("web-0", hibernate="true")
    world.run(10)
    assert annotations(world, "web-0")["lifecycle-state"] == "hibernating"
    restart(world, away=60)
    world.run(60)
    assert annotations(world, "web-0")["lifecycle-state"] == "hibernated"
    assert status(world, "web-0")["phase"] == "Pending"
    assert world.host.pids() == []
