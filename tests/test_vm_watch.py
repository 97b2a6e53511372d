"""VMs that stop or vanish behind our back: restarted in place, or their pods given up, and nothing on doubt.

The VM is gone only when the runtime says so in its own words; everything else is looked at again. What is given up is
this incarnation of the pod and no other (K1), and what cannot be removed keeps its pod (K7).
"""

import json
from datetime import datetime
from itertools import pairwise

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, PORT, annotations, calls, events, message, reason, status, writes
from vkcocoon_kube import ApiError

VM = "vk-default-web-0"
POD = "/api/v1/namespaces/default/pods/web-0"
LATER = ApiError(500, "InternalError", "later")


@pytest.fixture
def ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(7)
    assert world.ready("web-0")
    return world


def cocoon(world, *arguments):
    return world.host.cocoon.execute(["cocoon", *arguments], 30.0)


def at(call):
    """The instant at which a call began."""
    moment = datetime.fromisoformat(call["at"])
    return (moment - moment.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()


def times(world, verb):
    """The instants at which calls of that verb ended."""
    ends = world.timeline.of(actor="command", kind="ends")
    return [entry.seconds for entry in ends if dict(entry.fields)["verb"] == verb]


def deleted(name, vm_id=""):
    """The line of the event stream that tells of a removal."""
    return json.dumps({"event": "DELETED", "vm": {"id": vm_id, "config": {"name": name}}})


def last_words(world):
    """Phase, exit code, reason and message of the last status that was written."""
    told = [body["status"] for _, path, body in writes(world, "web-0") if path == "/status"][-1]
    ended = told["containerStatuses"][0]["state"]["terminated"]
    return told["phase"], ended["exitCode"], ended["reason"], ended["message"]


# --- restart in place -------------------------------------------------------------------------------------------------


def test_a_vm_that_stopped_is_started_in_place_when_the_stream_tells(ready):
    before = annotations(ready, "web-0")
    ready.guest("web-0").crash()
    ready.run(10)
    assert times(ready, "vm start") == [10.2]  # the stream looks every 5 s and lets changes settle for 0.2 s
    assert ready.host.cocoon.count("vm clone") == 1
    assert annotations(ready, "web-0") == before  # the same VM, MAC and address
    assert status(ready, "web-0")["containerStatuses"][0]["restartCount"] == 1
    told = f"VM {VM} was 'stopped (stale)' and has been started again"
    assert ("GuestRestarted", told) in events(ready, "web-0")
    ready.run(10)
    assert ready.ready("web-0")


@pytest.mark.parametrize("state", ["stopped", "error", "created"])
def test_every_state_but_running_and_creating_is_a_vm_that_stopped(ready, state):
    ready.host.end_process(ready.guest("web-0").pid)
    ready.host.cocoon.set_record(VM, state=state, pid=0)
    ready.run(6)
    assert ready.host.cocoon.count("vm start") == 1
    assert ready.host.cocoon.record(VM)["state"] == "running"


def test_a_vm_that_stops_again_within_30_seconds_is_given_up(ready):
    mac = ready.guest("web-0").mac
    ready.guest("web-0").crash()
    ready.run(13)
    assert times(ready, "vm start") == [10.2]
    ready.guest("web-0").crash()
    ready.run(15)
    assert ready.pod("web-0") is None
    assert times(ready, "vm start") == [10.2]
    assert ready.host.pids() == []
    assert ready.leases.address(mac) == ""
    assert last_words(ready) == (
        "Failed",
        1,
        "RestartCooldown",
        f"VM {VM} is 'stopped (stale)' again 10 s after it was restarted",
    )


def test_a_vm_that_stops_again_later_is_started_again(ready):
    ready.guest("web-0").crash()
    ready.run(40)
    ready.guest("web-0").crash()
    ready.run(20)
    assert len(times(ready, "vm start")) == 2
    assert ready.ready("web-0")
    assert status(ready, "web-0")["containerStatuses"][0]["restartCount"] == 2


def test_the_cooldown_counts_from_the_beginning_of_a_restart_that_took_long(ready):
    ready.host.cocoon.slow("vm start", 40.0)
    ready.guest("web-0").crash()
    ready.run(45)
    ready.guest("web-0").crash()
    ready.run(10)
    assert ready.host.cocoon.count("vm start") == 2
    assert ready.pod("web-0") is not None


def test_a_vm_that_the_tool_cannot_start_is_given_up(ready):
    ready.host.cocoon.fail("vm start", stderr="Error: start VM: no such disk", times=None)
    ready.guest("web-0").crash()
    ready.run(10)
    assert ready.pod("web-0") is None
    assert last_words(ready)[:3] == ("Failed", 1, "RestartFailed")
    assert "no such disk" in last_words(ready)[3]
    assert ready.host.cocoon.record(VM) is None


@pytest.mark.parametrize("how", ["hangs", "is killed"])
def test_a_start_whose_end_the_tool_did_not_decide_proves_nothing(ready, how):
    if how == "hangs":
        ready.host.cocoon.hang("vm start")
    else:
        ready.host.cocoon.kill("vm start")
    ready.guest("web-0").crash()
    ready.run(330)
    assert ready.host.cocoon.count("vm start") == 2
    assert ready.ready("web-0")
    assert ready.host.cocoon.count("vm rm") == 0


def test_a_binary_that_is_replaced_at_the_wrong_moment_costs_nobody_a_vm(ready):
    ready.guest("web-0").crash()
    ready.host.cocoon.missing = True
    ready.run(60)
    ready.host.cocoon.missing = False
    ready.run(40)
    assert ready.ready("web-0")
    assert ready.host.cocoon.count("vm rm") == 0


def test_a_restart_that_cannot_be_inspected_is_looked_at_again_and_not_made_twice(ready):
    ready.host.cocoon.hold("vm start").release()
    held = ready.host.cocoon.hold("vm start", step="after")
    ready.guest("web-0").crash()
    assert ready.clock.run_until(held.reached.is_set, 10)
    ready.host.cocoon.fail("vm inspect", times=5)
    held.release()
    ready.run(20)
    assert ready.host.cocoon.count("vm start") == 1
    assert ready.ready("web-0")


def test_while_the_restart_is_under_way_a_hibernate_waits(ready):
    ready.host.cocoon.slow("vm start", 10.0)
    ready.guest("web-0").crash()
    ready.run(5)
    ready.annotate("web-0", hibernate="true")
    ready.run(4)
    assert ready.host.cocoon.count("snapshot save") == 0
    ready.run(10)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"


# --- gone -------------------------------------------------------------------------------------------------------------


def test_a_vm_that_is_gone_takes_its_pod_with_it_and_the_cluster_sees_why(ready):
    mac = ready.guest("web-0").mac
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(5)
    assert ready.pod("web-0") is None
    assert ready.leases.address(mac) == ""
    told = [
        (entry.seconds, dict(entry.fields)["reason"])
        for entry in ready.timeline.of(kind="reason", key="default/web-0")
        if entry.seconds > 7
    ]
    assert told[0][1] == "VMGone"  # before the deletion begins
    assert last_words(ready) == ("Failed", 1, "VMGone", f"VM {VM} no longer exists")
    assert ready.host.cocoon.count("vm rm") == 1  # ours was not needed
    assert deletions(ready) == [uid_of(ready)] * 2  # the eviction, and the removal by the actor


def deletions(world):
    """The UID each deletion that was asked for was bound to."""
    return [
        request.options.get("uid")
        for request in world.kube.requests
        if request.verb == "DELETE" and request.path == POD
    ]


def uid_of(world):
    return writes(world, "web-0")[0][2]["metadata"]["uid"]


def test_a_pod_that_cannot_be_evicted_stays_as_it_is_until_the_api_takes_it(ready):
    ready.kube.fail("DELETE */pods/web-0", LATER, times=None)
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(3600)
    assert (status(ready, "web-0")["phase"], reason(ready, "web-0")) == ("Running", "VMGone")
    assert message(ready, "web-0") == f"VM {VM} no longer exists"
    attempts = len(deletions(ready))
    ready.run(60)
    assert len(deletions(ready)) - attempts == 4  # twice in a row, every 30 s
    ready.kube.gate.failures.clear()
    ready.run(35)
    assert ready.pod("web-0") is None
    assert last_words(ready)[2] == "VMGone"


def test_after_an_outage_too_the_cluster_sees_why_before_the_pod_goes(ready):
    ready.kube.down = True
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(600)
    ready.kube.down = False
    ready.run(70)
    assert ready.pod("web-0") is None
    told = [dict(entry.fields)["reason"] for entry in ready.timeline.of(kind="reason", key="default/web-0")]
    assert told[-2:] == ["VMGone", "Terminating"]


def test_a_status_the_api_never_takes_holds_up_the_eviction_for_35_seconds(ready):
    ready.kube.fail("PATCH */web-0/status", ApiError(422, "Invalid", "no"), times=None)
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(30)
    assert ready.pod("web-0") is not None
    ready.run(60)
    assert ready.pod("web-0") is None


def test_a_pod_that_is_no_more_counts_as_evicted(ready):
    ready.kube.fail("DELETE */pods/web-0", ApiError(404, "NotFound", "pods web-0 not found"), times=1)
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(5)
    assert len(deletions(ready)) == 1


def test_a_namesake_is_not_evicted_for_the_vm_of_its_predecessor(ready):
    """We hear late that the pod was replaced: only the precondition keeps its successor."""
    former = uid_of(ready)
    ready.kube.watch_delay = 90.0
    ready.recreate_pod("web-0")
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(70)
    assert len(deletions(ready)) == 1
    assert ready.pod("web-0")["metadata"]["uid"] != former
    assert not ready.daemon.provider.knows(former)
    assert len(ready.daemon.provider._probes) == 0


@pytest.mark.parametrize("words", ["Error: inspect: open /var/lib/cocoon: file not found", "Error: context deadline"])
def test_only_the_words_of_the_runtime_prove_that_a_vm_is_gone(ready, words):
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.host.cocoon.fail("vm inspect", stderr=words, times=8)
    ready.run(5)
    assert ready.pod("web-0") is not None
    ready.run(30)
    assert ready.pod("web-0") is None


def test_a_pod_whose_vm_is_gone_is_not_hibernated_meanwhile(ready):
    ready.kube.fail("DELETE */pods/web-0", LATER, times=None)
    cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(10)
    ready.annotate("web-0", hibernate="true")
    ready.run(10)
    assert ready.host.cocoon.count("snapshot save") == 0
    assert reason(ready, "web-0") == "VMGone"


# --- doubt ------------------------------------------------------------------------------------------------------------


def test_one_failed_look_is_followed_by_another_after_200_milliseconds(ready):
    ready.host.cocoon.fail("vm inspect", times=1)
    ready.guest("web-0").crash()
    ready.run(5)
    assert times(ready, "vm inspect")[1:] == [7.2, 7.4, 7.4]  # turning a knob of the tool wakes its stream
    assert times(ready, "vm start") == [7.4]


def test_looks_that_prove_nothing_are_repeated_with_pauses_from_1_to_30_seconds(ready):
    ready.host.cocoon.fail("vm inspect", times=None)
    ready.guest("web-0").crash()
    ready.run(140)
    firsts = times(ready, "vm inspect")[1::2]
    assert [round(b - a - 0.2, 6) for a, b in pairwise(firsts)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert ready.host.cocoon.count("vm start") == 0
    ready.host.cocoon.faults.clear()
    ready.run(60)
    assert ready.host.cocoon.count("vm start") == 1
    assert ready.ready("web-0")


def test_after_half_an_hour_of_doubt_a_silent_vm_is_given_up(ready):
    ready.host.cocoon.fail("vm inspect", times=None)
    ready.guest("web-0").crash()
    ready.run(1790)
    assert ready.pod("web-0") is not None
    ready.run(60)
    assert ready.pod("web-0") is None
    assert last_words(ready)[2] == "VMInspectTimeout"
    assert ready.host.cocoon.record(VM) is None


def test_doubt_never_costs_a_vm_whose_guest_answers(ready):
    ready.host.cocoon.fail("vm inspect", times=None)
    ready.host.cocoon.fail_listing()
    ready.run(2 * 3600)
    assert ready.ready("web-0")
    assert ready.host.cocoon.count("vm rm") == 0


def without_a_lease(world):
    world.leases.release(world.guest("web-0").mac)


def with_a_wrong_port(world):
    world.annotate("web-0", probe_port="ssh")


def with_a_closed_port(world):
    world.annotate("web-0", probe_port="81")


@pytest.mark.parametrize("unready", [without_a_lease, with_a_wrong_port, with_a_closed_port])
def test_doubt_never_costs_a_vm_whose_guest_was_not_asked_or_refuses(ready, unready):
    unready(ready)
    ready.host.cocoon.fail("vm inspect", times=None)
    ready.host.cocoon.fail_listing()
    ready.run(2 * 3600)
    assert not ready.ready("web-0")
    assert ready.pod("web-0") is not None
    assert ready.host.cocoon.count("vm rm") == 0


@pytest.mark.parametrize("answer", ["", "{", "[]", "null", '{"id": 7}', "running"])
def test_garbage_proves_nothing(ready, answer):
    ready.host.cocoon.garble("vm inspect", answer, times=None)
    ready.host.cocoon.fail_listing()
    ready.run(300)
    assert ready.ready("web-0")
    assert calls(ready.host.cocoon)[:2] == ["vm clone", "vm inspect"]
    assert set(calls(ready.host.cocoon)[2:]) == {"vm inspect"}


def test_a_vm_that_cannot_be_removed_keeps_its_pod(ready):
    ready.host.cocoon.fail("vm start", times=None)
    ready.host.cocoon.fail("vm rm", stderr="Error: device or resource busy", times=3)
    ready.guest("web-0").crash()
    ready.run(4)
    assert ready.pod("web-0") is not None
    assert deletions(ready) == []
    ready.run(60)
    assert ready.pod("web-0") is None
    assert ready.host.cocoon.record(VM) is None


# --- what is left alone -----------------------------------------------------------------------------------------------


def test_a_stream_that_reports_everything_as_deleted_costs_one_look_each(world):
    for number in range(20):
        world.create_pod(f"web-{number}", guest=FAST)
    world.run(7)
    before = world.host.cocoon.count("vm inspect")
    world.host.cocoon.fail_listing()
    world.run(5)
    assert world.host.cocoon.count("vm inspect") == before + 20
    world.run(60)
    assert all(world.ready(f"web-{number}") for number in range(20))
    assert not {"vm start", "vm rm"} & set(calls(world.host.cocoon))


def test_the_removal_that_belongs_to_a_hibernate_is_no_reason_to_do_anything(ready):
    ready.host.cocoon.slow("vm rm", 20.0, step="after")
    ready.annotate("web-0", hibernate="true")
    ready.run(60)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    assert ready.host.cocoon.count("vm start") == 0
    assert deletions(ready) == []


def test_a_vm_that_died_during_a_hibernate_is_seen_to_after_it_failed(ready):
    """The crash was told while nobody may act; the failure makes somebody look."""
    ready.host.cocoon.slow("snapshot save", 20.0, step="before")
    ready.annotate("web-0", hibernate="true")
    ready.run(1)
    ready.guest("web-0").crash()
    ready.run(15)
    assert ready.host.cocoon.count("vm start") == 0
    ready.run(60)
    assert ready.host.cocoon.count("vm start") == 1
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"


def test_a_vm_that_stops_while_its_pod_is_deleted_is_not_started(ready):
    ready.host.cocoon.slow("vm rm", 30.0, step="before")
    ready.delete_pod("web-0", grace_seconds=60)
    ready.run(1)
    ready.guest("web-0").crash()
    ready.run(60)
    assert ready.host.cocoon.count("vm start") == 0
    assert ready.pod("web-0") is None


def test_a_deletion_that_comes_during_a_restart_waits_for_it_and_removes_what_it_made(ready):
    held = ready.host.cocoon.hold("vm start", step="late")
    ready.guest("web-0").crash()
    assert ready.clock.run_until(held.reached.is_set, 10)
    ready.delete_pod("web-0", grace_seconds=60)
    ready.run(5)
    assert ready.host.cocoon.count("vm rm") == 0
    held.release()
    ready.run(5)
    assert ready.pod("web-0") is None
    assert ready.host.pids() == []


def test_an_event_about_the_name_of_a_macos_guest_or_an_unmanaged_vm_concerns_nobody(world):
    mac = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
    world.create_pod("mac-0", os="macos", guest=mac)
    world.create_pod("tool", guest=FAST)
    world.run(5)
    given = {
        "vm.cocoonstack.io/name": "vk-static",
        "vm.cocoonstack.io/id": "STATIC",
        "vm.cocoonstack.io/ip": "10.1.2.3",
    }
    world.create_pod("static", annotations={**given, "cocoonset.cocoonstack.io/managed": ""})
    world.run(5)
    made = calls(world.host.cocoon)
    for vm_id, name in (
        ("qemu-vk-default-mac-0", "vk-default-mac-0"),
        ("STATIC", "vk-static"),
        ("", "vk-default-mac-0"),
    ):
        world.host.cocoon.tear_line(deleted(name, vm_id))
    world.run(30)
    assert calls(world.host.cocoon) == made
    assert world.ready("mac-0")


def test_an_event_without_an_id_finds_its_vm_by_name(ready):
    ready.host.cocoon.tear_line(deleted(VM))
    before = ready.host.cocoon.count("vm inspect")
    ready.run(5)
    assert ready.host.cocoon.count("vm inspect") == before + 1
    assert ready.ready("web-0")


def test_nothing_is_done_to_vms_while_another_process_renews_our_nodes_lease():
    """K11."""
    with World() as world:
        world.create_pod("web-0", guest=FAST)
        world.run(7)
        world.daemon.node.alone.clear()
        world.guest("web-0").crash()
        world.run(3)
        assert world.host.cocoon.count("vm start") == 0
        world.daemon.node.alone.set()
        world.run(35)
        assert world.host.cocoon.count("vm start") == 1


# --- the stream -------------------------------------------------------------------------------------------------------


def test_a_torn_line_ends_nothing(ready):
    ready.host.cocoon.tear_line()
    ready.guest("web-0").crash()
    ready.run(10)
    assert ready.host.cocoon.count("vm start") == 1
    assert ready.host.cocoon.count("vm status") == 1


def test_a_stream_that_ends_is_opened_again_after_2_seconds(ready):
    ready.host.cocoon.end_stream()
    ready.run(20)
    assert [at(call) for call in ready.host.cocoon.calls if call["verb"] == "vm status"] == [0.0, 9.2]


def test_a_stream_that_cannot_be_opened_is_tried_with_pauses_from_1_to_60_seconds(ready):
    ready.host.cocoon.end_stream()
    ready.host.cocoon.fail("vm status", times=8)
    since = ready.host.cocoon.count("vm status")
    ready.run(200)
    instants = [at(call) for call in ready.host.cocoon.calls if call["verb"] == "vm status"][since:]
    assert [round(b - a, 6) for a, b in pairwise(instants)] == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("what", ["crashed", "was removed"])
def test_what_happened_while_nobody_listened_is_found_when_the_stream_is_back(ready, what):
    """A VM that was removed meanwhile is in no event at all."""
    ready.host.cocoon.end_stream()
    ready.host.cocoon.fail("vm status", times=3)
    ready.run(4)
    if what == "crashed":
        ready.guest("web-0").crash()
    else:
        cocoon(ready, "vm", "rm", "--force", VM)
    ready.run(15)
    assert (ready.host.cocoon.count("vm start"), ready.pod("web-0") is None) == (what == "crashed", what != "crashed")


def test_a_stream_that_says_nothing_any_more_is_made_up_for_once_a_minute(ready):
    ready.host.cocoon.event_interval_s = 10_000.0
    ready.host.cocoon.end_stream()
    ready.run(5)  # from here on the stream looks every 10 000 s
    ready.run(60)
    assert ready.ready("web-0")
    ready.guest("web-0").crash()
    ready.run(61)
    assert ready.host.cocoon.count("vm start") == 1


def test_a_list_that_cannot_be_read_is_no_list_of_nothing(ready):
    ready.host.cocoon.fail("vm list", times=None)
    ready.run(300)
    assert ready.ready("web-0")
    assert ready.host.cocoon.count("vm inspect") == 1


def test_what_is_told_while_somebody_looks_is_one_more_look(ready):
    held = ready.host.cocoon.hold("vm inspect")
    before = ready.host.cocoon.count("vm inspect")
    for _ in range(3):
        ready.host.cocoon.tear_line(deleted(VM))
        ready.run(1)
    assert held.reached.is_set()
    assert ready.host.cocoon.count("vm inspect") == before + 1
    held.release()
    ready.run(1)
    assert ready.host.cocoon.count("vm inspect") == before + 2
    assert ready.ready("web-0")


def test_a_pod_with_a_probe_port_is_restarted_just_the_same(world):
    world.create_pod("web-0", guest=GuestSpec(boot_s=0.0, lease_s=0.0, ports=(80,)), annotations={PORT: "80"})
    world.run(7)
    world.guest("web-0").crash()
    world.run(20)
    assert world.ready("web-0")
    assert status(world, "web-0")["containerStatuses"][0]["restartCount"] == 1
