"""Status: Ready is probe AND lifecycle intent, both halves visible; times move only with values (K4, K5, K7)."""

from datetime import UTC, datetime

import pytest

from vkcocoon_probes import ProbeResult
from vkcocoon_status import (
    Intent,
    IntentState,
    Reason,
    build_pod_status,
    build_terminal_status,
    condition_of,
    format_time,
    lifecycle_annotations,
)
from vkcocoon_vms import VM

T0 = datetime(2026, 1, 1, tzinfo=UTC)
T1 = datetime(2026, 1, 1, 0, 0, 5, 250000, tzinfo=UTC)
POD = {
    "metadata": {"name": "web-0", "namespace": "default", "uid": "u1"},
    "spec": {"containers": [{"name": "agent", "image": "placeholder"}]},
}
MACHINE = VM(id="ID", name="vk-default-web-0", state="running")
GOOD = ProbeResult(True, Reason.PROBE_SUCCEEDED, "icmp: 10.88.0.5 replies")
BAD = ProbeResult(False, Reason.PING_TIMEOUT, "icmp: no reply from 10.88.0.5")
READY = Intent(IntentState.READY)


def ready_of(status):
    return condition_of(status, "Ready")


def test_a_ready_pod_says_everything_kubectl_and_controllers_read():
    status = build_pod_status(POD, MACHINE, GOOD, READY, T0, ip="10.88.0.5", host_ip="192.0.2.10")
    at = "2026-01-01T00:00:00Z"
    assert status == {
        "phase": "Running",
        "startTime": at,
        "hostIP": "192.0.2.10",
        "hostIPs": [{"ip": "192.0.2.10"}],
        "podIP": "10.88.0.5",
        "podIPs": [{"ip": "10.88.0.5"}],
        "conditions": [
            {"type": "Initialized", "status": "True", "reason": "", "message": "", "lastTransitionTime": at},
            {
                "type": "Ready",
                "status": "True",
                "reason": "ProbeSucceeded",
                "message": "icmp: 10.88.0.5 replies",
                "lastTransitionTime": at,
            },
            {
                "type": "ContainersReady",
                "status": "True",
                "reason": "ProbeSucceeded",
                "message": "icmp: 10.88.0.5 replies",
                "lastTransitionTime": at,
            },
            {
                "type": "cocoonstack.io/ProbeReady",
                "status": "True",
                "reason": "ProbeSucceeded",
                "message": "icmp: 10.88.0.5 replies",
                "lastTransitionTime": at,
            },
            {
                "type": "cocoonstack.io/LifecycleReady",
                "status": "True",
                "reason": "LifecycleReady",
                "message": "",
                "lastTransitionTime": at,
            },
        ],
        "containerStatuses": [
            {
                "name": "agent",
                "image": "placeholder",
                "imageID": "",
                "containerID": "cocoon://ID",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": at}},
            }
        ],
    }


@pytest.mark.parametrize("state", list(IntentState))
@pytest.mark.parametrize("probe", [GOOD, BAD], ids=["probe good", "probe bad"])
@pytest.mark.parametrize("vm", [MACHINE, None], ids=["vm", "no vm"])
def test_ready_is_the_and_of_probe_and_intent_and_needs_a_vm(state, probe, vm):
    status = build_pod_status(POD, vm, probe, Intent(state), T0, ip="10.88.0.5")
    expected = vm is not None and probe.ready and state is IntentState.READY
    assert (ready_of(status)["status"] == "True") is expected
    assert (condition_of(status, "ContainersReady")["status"] == "True") is expected
    assert all(container["ready"] is expected for container in status.get("containerStatuses", []))


@pytest.mark.parametrize(
    ("probe", "intent", "reason"),
    [
        (BAD, READY, "PingTimeout"),
        (GOOD, Intent(IntentState.CREATING), "LifecycleCreating"),
        (BAD, Intent(IntentState.CREATING), "LifecycleCreating"),
        (GOOD, Intent(IntentState.HIBERNATING), "LifecycleHibernating"),
        (GOOD, Intent(IntentState.FAILED, 0, "clone: no such snapshot"), "LifecycleFailed"),
    ],
)
def test_the_reason_of_ready_is_the_lifecycles_until_the_intent_is_ready(probe, intent, reason):
    status = build_pod_status(POD, MACHINE, probe, intent, T0)
    assert ready_of(status)["reason"] == reason
    assert condition_of(status, "cocoonstack.io/ProbeReady")["reason"] == probe.reason


def test_a_transition_time_moves_only_when_its_own_value_does():
    first = build_pod_status(POD, MACHINE, BAD, READY, T0, ip="10.88.0.5")
    second = build_pod_status(POD, MACHINE, GOOD, READY, T1, ip="10.88.0.5", previous=first)
    times = {condition["type"]: condition["lastTransitionTime"] for condition in second["conditions"]}
    assert times == {
        "Initialized": "2026-01-01T00:00:00Z",
        "Ready": "2026-01-01T00:00:05Z",
        "ContainersReady": "2026-01-01T00:00:05Z",
        "cocoonstack.io/ProbeReady": "2026-01-01T00:00:05Z",
        "cocoonstack.io/LifecycleReady": "2026-01-01T00:00:00Z",
    }
    assert second["startTime"] == "2026-01-01T00:00:00Z"
    assert second["containerStatuses"][0]["state"]["running"]["startedAt"] == "2026-01-01T00:00:00Z"


def test_an_unchanged_state_builds_an_equal_status_at_any_later_time():
    first = build_pod_status(POD, MACHINE, GOOD, READY, T0, ip="10.88.0.5", host_ip="192.0.2.10")
    assert (
        build_pod_status(POD, MACHINE, GOOD, READY, T1, ip="10.88.0.5", host_ip="192.0.2.10", previous=first) == first
    )


def test_after_a_restart_times_continue_from_what_the_api_holds():
    before = build_pod_status(POD, MACHINE, GOOD, READY, T0, ip="10.88.0.5", restarts=3)
    pod = POD | {"status": before}
    assert build_pod_status(pod, MACHINE, GOOD, READY, T1, ip="10.88.0.5") == before


def test_a_hibernated_pod_is_pending_without_address_and_without_any_container():
    status = build_pod_status(POD, None, ProbeResult(), Intent(IntentState.HIBERNATED), T0, ip="10.88.0.5")
    assert status["phase"] == "Pending"
    assert not {"podIP", "podIPs", "containerStatuses"} & set(status)


@pytest.mark.parametrize(
    ("intent", "waiting"),
    [
        (Intent(IntentState.CREATING), {"reason": "ContainerCreating"}),
        (Intent(IntentState.FAILED, 0, "no image"), {"reason": "LifecycleFailed", "message": "no image"}),
    ],
)
def test_without_a_vm_containers_wait_and_say_why(intent, waiting):
    status = build_pod_status(POD, None, ProbeResult(), intent, T0)
    assert status["phase"] == "Pending"
    assert status["containerStatuses"][0]["state"] == {"waiting": waiting}
    assert "startTime" not in status


def test_a_pod_that_is_going_is_not_ready_whatever_its_guest_does():
    status = build_pod_status(POD, MACHINE, GOOD, READY, T0, ip="10.88.0.5", terminating=True)
    assert (ready_of(status)["status"], ready_of(status)["reason"]) == ("False", "Terminating")


def test_the_terminal_status_has_nothing_ready_and_every_container_terminated():
    before = build_pod_status(POD, MACHINE, GOOD, READY, T0, ip="10.88.0.5", restarts=2)
    status = build_terminal_status(POD, T1, previous=before)
    assert status["phase"] == "Succeeded"
    assert {condition["type"]: condition["status"] for condition in status["conditions"]} == {
        "Initialized": "True",
        "Ready": "False",
        "ContainersReady": "False",
        "cocoonstack.io/ProbeReady": "False",
        "cocoonstack.io/LifecycleReady": "False",
    }
    assert status["containerStatuses"][0]["state"] == {
        "terminated": {
            "exitCode": 0,
            "reason": "Completed",
            "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2026-01-01T00:00:05Z",
        }
    }
    assert status["containerStatuses"][0]["restartCount"] == 2


def test_restart_counts_never_go_down():
    before = build_pod_status(POD, MACHINE, GOOD, READY, T0, restarts=4)
    after = build_pod_status(POD, MACHINE, GOOD, READY, T1, restarts=1, previous=before)
    assert after["containerStatuses"][0]["restartCount"] == 4


def test_every_container_of_the_spec_has_a_status():
    pod = POD | {"spec": {"containers": [{"name": "a"}, {"name": "b", "image": "x"}]}}
    status = build_pod_status(pod, MACHINE, GOOD, READY, T0)
    assert [container["name"] for container in status["containerStatuses"]] == ["a", "b"]


def test_long_messages_are_cut_where_the_lifecycle_contract_cuts():
    status = build_pod_status(POD, MACHINE, ProbeResult(False, Reason.PROBE_ERROR, "x" * 9000), READY, T0)
    assert len(ready_of(status)["message"]) == 4096


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        (Intent(IntentState.FAILED, 3), (IntentState.READY, 3), False),
        (Intent(IntentState.FAILED, 3), (IntentState.HIBERNATED, 3), False),
        (Intent(IntentState.FAILED, 3), (IntentState.CREATING, 3), True),
        (Intent(IntentState.FAILED, 3), (IntentState.HIBERNATING, 3), True),
        (Intent(IntentState.FAILED, 3), (IntentState.READY, 4), True),
        (Intent(IntentState.READY, 3), (IntentState.CREATING, 2), False),
        (Intent(IntentState.READY, 3), (IntentState.HIBERNATING, 3), True),
    ],
)
def test_a_failure_stays_until_a_new_attempt_and_older_generations_are_dropped(old, new, allowed):
    assert old.allows(*new) is allowed


def test_the_lifecycle_triple_is_written_whole_and_an_empty_message_is_absent():
    assert lifecycle_annotations(Intent(IntentState.HIBERNATED, 5)) == {
        "vm.cocoonstack.io/lifecycle-state": "hibernated",
        "vm.cocoonstack.io/lifecycle-observed-generation": "5",
        "vm.cocoonstack.io/lifecycle-state-message": None,
    }


def test_times_are_utc_with_whole_seconds():
    assert format_time(T1) == "2026-01-01T00:00:05Z"
