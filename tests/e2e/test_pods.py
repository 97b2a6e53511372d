"""Pods through their lives, as users and controllers see them: the P scenarios that a healthy cluster can show."""

import pytest

from tests.e2e.api import (
    CLOCK,
    JSON,
    STRATEGIC,
    condition,
    create_pod,
    is_gone,
    is_not_ready,
    is_ready,
    is_up,
    pod_path,
    reason,
    uid_of,
    vm_of,
)
from tests.e2e.control_plane import until
from tests.e2e.host import PORT

READY_STATE = "vm.cocoonstack.io/lifecycle-state"


@pytest.fixture
def ready_pod(host, namespace, plane, pods):
    """Makes a pod and waits until it is Ready and says which VM it has; its last state."""

    def make(name, **changes):
        made = create_pod(plane.admin, host.pod(name, namespace=namespace, **changes))
        return pods.first(is_up, uid=uid_of(made)).object

    return make


# Coming up --------------------------------------------------------------------------------------------------------


def test_P1_a_created_pod_runs_and_becomes_ready(host, namespace, plane, pods):
    made = create_pod(plane.admin, host.pod("web", namespace=namespace))
    ready = pods.first(is_ready, uid=uid_of(made))
    status = ready.object["status"]
    assert status["phase"] == "Running"
    assert status["podIP"] == host.tell("vm-web", status=True)["ip"]
    assert status["podIPs"] == [{"ip": status["podIP"]}]
    assert status["hostIP"] == host.place.gateway
    assert {each["type"] for each in status["conditions"] if each["status"] == "True"} >= {
        "Initialized",
        "Ready",
        "ContainersReady",
        "cocoonstack.io/ProbeReady",
        "cocoonstack.io/LifecycleReady",
    }
    (container,) = status["containerStatuses"]
    assert container["name"] == "agent"
    assert container["ready"] and container["started"] and "running" in container["state"]
    # The annotation follows the status it speaks of, never the other way round.
    said = pods.first(
        lambda sight: sight.object["metadata"]["annotations"].get(READY_STATE) == "ready", uid=uid_of(made)
    )
    assert condition(said.object, "cocoonstack.io/LifecycleReady")["status"] == "True"
    phases = [sight.object["status"]["phase"] for sight in pods.about(uid=uid_of(made))]
    assert sorted(phases, key=["Pending", "Running"].index) == phases


def test_P2_a_create_that_fails_at_first_is_tried_again_and_its_reason_disappears(host, namespace, plane, pods):
    host.tools.cocoon.fail("vm run", name="vm-late", times=3, stderr="Error: no space left on device")
    made = create_pod(plane.admin, host.pod("late", namespace=namespace))
    failed = pods.first(lambda sight: reason(sight) == "LifecycleFailed", uid=uid_of(made))
    assert "no space left on device" in condition(failed.object)["message"]
    waiting = failed.object["status"]["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == "LifecycleFailed"
    ready = pods.first(is_ready, 30, uid=uid_of(made))
    assert "no space" not in str(ready.object["status"])
    assert host.tools.cocoon.count("vm run", "vm-late") == 4


def test_P3_a_create_that_always_fails_says_why_at_a_bounded_rate_and_heals_without_an_edit(
    host, namespace, plane, pods
):
    host.tools.cocoon.fail("vm run", name="vm-never", times=None, stderr="Error: KVM is not there")
    made = create_pod(plane.admin, host.pod("never", namespace=namespace))
    pods.first(lambda sight: reason(sight) == "LifecycleFailed", uid=uid_of(made))
    CLOCK.sleep(6)
    assert 2 <= host.tools.cocoon.count("vm run", "vm-never") <= 4  # at 0, 1, 3 and 7 s
    events = plane.admin.get(f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name=never")["items"]
    told = [event for event in events if "KVM is not there" in event["message"]]
    assert told
    assert len(pods.about(uid=uid_of(made))) <= 8
    host.tools.cocoon.faults.clear()
    pods.first(is_ready, 30, uid=uid_of(made))


def test_P4_a_pod_that_must_not_be_restarted_survives_a_create_that_failed(host, namespace, plane, pods):
    host.tools.cocoon.fail("vm run", name="vm-once", times=1)
    wish = host.pod("once", namespace=namespace)
    wish["spec"]["restartPolicy"] = "Never"
    made = create_pod(plane.admin, wish)
    pods.first(is_ready, 30, uid=uid_of(made))
    assert "Failed" not in {sight.object["status"]["phase"] for sight in pods.about(uid=uid_of(made))}


def test_P33_a_pod_that_is_bound_later_appears_and_comes_up(host, namespace, plane, pods):
    wish = host.pod("bound", namespace=namespace, bound=False)
    wish["spec"]["schedulerName"] = "by-hand"
    made = create_pod(plane.admin, wish)
    CLOCK.sleep(1)
    assert host.tools.cocoon.count("vm run", "vm-bound") == 0
    target = {"apiVersion": "v1", "kind": "Node", "name": host.name}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "bound"}, "target": target}
    plane.admin.create(f"{pod_path(made)}/binding", binding)
    ready = pods.first(is_ready, uid=uid_of(made))
    assert condition(ready.object, "PodScheduled")["status"] == "True"  # the scheduler's condition stays


# Going away -------------------------------------------------------------------------------------------------------


def test_P5_a_deleted_pod_is_gone_as_soon_as_its_vm_is(host, plane, pods, ready_pod):
    pod = ready_pod("quick")
    asked = CLOCK.monotonic()
    plane.admin.delete(pod_path(pod))
    gone = pods.first(is_gone, uid=uid_of(pod))
    assert gone.at - asked < 10, "grace is 30 s, and none of it is spent"
    assert "vm-quick" not in host.vms()
    last = gone.object
    assert last["status"]["phase"] == "Succeeded"
    assert "terminated" in last["status"]["containerStatuses"][0]["state"]
    steps = [(sight.object["status"]["phase"], reason(sight)) for sight in pods.about(uid=uid_of(pod), since=asked)]
    # Deletion asked for; Not Ready because of it; ended; gone. Each once.
    assert [step for n, step in enumerate(steps) if step not in steps[:n]] == [
        ("Running", "ProbeSucceeded"),
        ("Running", "Terminating"),
        ("Succeeded", "Terminating"),
    ]


def test_P6_a_pod_stays_until_its_vm_is_gone_however_long_that_takes(host, plane, pods, ready_pod):
    pod = ready_pod("slow", grace=1)
    host.tools.cocoon.slow("vm rm", 5.0, name="vm-slow")
    asked = CLOCK.monotonic()
    plane.admin.delete(pod_path(pod))
    pods.first(lambda sight: reason(sight) == "Terminating", uid=uid_of(pod))
    gone = pods.first(is_gone, uid=uid_of(pod))
    assert gone.at - asked > 5.0
    assert "vm-slow" not in host.vms()


def test_P7_a_teardown_that_fails_is_tried_again_and_the_pod_waits_for_it(host, namespace, plane, pods, ready_pod):
    pod = ready_pod("stuck")
    host.tools.cocoon.fail("vm rm", name="vm-stuck", times=2, stderr="Error: device or resource busy")
    plane.admin.delete(pod_path(pod))
    until(lambda: host.tools.cocoon.count("vm rm", "vm-stuck") >= 2, 15, "a second attempt")
    assert plane.admin.find(pod_path(pod)) is not None
    assert "vm-stuck" in host.vms()
    pods.first(is_gone, 20, uid=uid_of(pod))
    assert "vm-stuck" not in host.vms()
    until(lambda: _events(plane, namespace, "stuck", "ProviderDeleteFailed"), 10, "an event about the failure")


def test_P8_a_pod_that_is_deleted_while_it_is_created_leaves_nothing(host, namespace, plane, pods):
    host.tools.cocoon.slow("vm run", 3.0, name="vm-brief")
    made = create_pod(plane.admin, host.pod("brief", namespace=namespace))
    until(lambda: host.tools.cocoon.count("vm run", "vm-brief"), 15, "the create begins")
    plane.admin.delete(pod_path(made))
    pods.first(is_gone, 20, uid=uid_of(made))
    assert "vm-brief" not in host.vms()
    assert not any(is_ready(sight) for sight in pods.about(uid=uid_of(made)))


def test_P9_a_pod_deleted_by_force_is_torn_down_after_it_vanished(host, plane, pods, ready_pod):
    pod = ready_pod("forced")
    plane.admin.delete(pod_path(pod), gracePeriodSeconds=0)
    pods.first(is_gone, uid=uid_of(pod))
    until(lambda: "vm-forced" not in host.vms(), 15, "the VM goes")
    assert pods.about(uid=uid_of(pod))[-1].type == "DELETED", "nothing brings it back"


def test_P10_a_second_delete_with_a_shorter_grace_is_heard_and_does_not_overtake_the_vm(host, plane, pods, ready_pod):
    pod = ready_pod("impatient", grace=300)
    host.tools.cocoon.slow("vm rm", 4.0, name="vm-impatient")
    plane.admin.delete(pod_path(pod))
    first = pods.first(lambda sight: "deletionTimestamp" in sight.object["metadata"], uid=uid_of(pod))
    plane.admin.delete(pod_path(pod), gracePeriodSeconds=1)
    second = pods.first(lambda sight: sight.object["metadata"].get("deletionGracePeriodSeconds") == 1, uid=uid_of(pod))
    assert second.object["metadata"]["deletionTimestamp"] < first.object["metadata"]["deletionTimestamp"]
    CLOCK.sleep(1.5)
    assert plane.admin.find(pod_path(pod)) is not None
    pods.first(is_gone, uid=uid_of(pod))
    assert "vm-impatient" not in host.vms()
    assert host.tools.cocoon.count("vm rm", "vm-impatient") == 1


def test_P11_a_finalizer_keeps_the_object_and_not_the_vm(host, plane, pods, ready_pod):
    pod = ready_pod("kept")
    plane.admin.patch(pod_path(pod), {"metadata": {"finalizers": ["example.com/keep"]}})
    plane.admin.delete(pod_path(pod))
    until(lambda: "vm-kept" not in host.vms(), 15, "the VM goes")
    ended = pods.first(lambda sight: sight.object["metadata"].get("deletionGracePeriodSeconds") == 0, uid=uid_of(pod))
    assert ended.object["status"]["phase"] == "Succeeded"
    asked = CLOCK.monotonic()
    CLOCK.sleep(3)
    assert len(pods.about(uid=uid_of(pod), since=asked)) == 0, "nothing more is written"
    assert host.tools.cocoon.count("vm run", "vm-kept") == 1
    plane.admin.patch(pod_path(pod), {"metadata": {"finalizers": None}})
    pods.first(is_gone, uid=uid_of(pod))


def test_P12_a_namesake_is_created_after_the_first_one_is_torn_down(host, namespace, plane, pods, ready_pod):
    old = ready_pod("again")
    plane.admin.delete(pod_path(old), gracePeriodSeconds=0)
    new = create_pod(plane.admin, host.pod("again", namespace=namespace))
    assert uid_of(new) != uid_of(old)
    ready = pods.first(is_up, 30, uid=uid_of(new))
    calls = [call["verb"] for call in host.tools.cocoon.calls if "vm-again" in call["names"]]
    assert [verb for verb in calls if verb in ("vm run", "vm rm")] == ["vm run", "vm rm", "vm run"]
    ids = [vm_of(pod) for pod in (old, ready.object)]
    assert ids[0] != ids[1]


def test_P12_a_namesake_waits_for_the_graceful_end_of_the_first_one(host, namespace, plane, pods, ready_pod):
    old = ready_pod("next")
    host.tools.cocoon.slow("vm rm", 3.0, name="vm-next")
    plane.admin.delete(pod_path(old))
    collection = f"/api/v1/namespaces/{namespace}/pods"
    taken = plane.admin.send("POST", collection, host.pod("next", namespace=namespace))
    assert (taken.status, taken.json["reason"]) == (409, "AlreadyExists")

    def made():
        answer = plane.admin.send("POST", collection, host.pod("next", namespace=namespace))
        return answer.json if answer.status == 201 else None

    new = until(made, 20, "the name is free")
    pods.first(is_ready, 30, uid=uid_of(new))
    assert is_gone(pods.about(uid=uid_of(old))[-1])


# Living -----------------------------------------------------------------------------------------------------------


def test_P19_what_others_write_on_a_pod_while_we_publish_is_not_reverted(host, plane, pods, ready_pod):
    pod = ready_pod("busy")
    for turn in range(6):
        host.tell("vm-busy", **({"close": PORT} if turn % 2 else {"open": PORT}))
        plane.admin.patch(
            pod_path(pod),
            {"metadata": {"labels": {f"turn-{turn}": "x"}, "annotations": {"example.com/turn": str(turn)}}},
        )
        foreign = {"type": "example.com/Gate", "status": "True", "reason": f"Turn{turn}", "message": ""}
        plane.admin.patch(f"{pod_path(pod)}/status", {"status": {"conditions": [foreign]}}, STRATEGIC)
        CLOCK.sleep(0.3)
    host.tell("vm-busy", open=PORT)
    CLOCK.sleep(2)
    after = plane.admin.get(pod_path(pod))
    assert after["metadata"]["labels"] == {f"turn-{turn}": "x" for turn in range(6)}
    assert after["metadata"]["annotations"]["example.com/turn"] == "5"
    assert condition(after, "example.com/Gate")["reason"] == "Turn5"
    assert after["metadata"]["annotations"][READY_STATE] == "ready"


def test_P20_a_ready_that_somebody_else_took_away_is_given_back(host, plane, pods, ready_pod):
    pod = ready_pod("robbed")
    # The very write of the node lifecycle controller.
    taken = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    plane.admin.patch(f"{pod_path(pod)}/status", {"status": {"conditions": [taken]}}, STRATEGIC)
    robbed = pods.first(is_not_ready, uid=uid_of(pod), since=up_at(pods, pod))
    back = pods.first(is_ready, uid=uid_of(pod), since=robbed.at)
    assert back.at - robbed.at < 5
    assert reason(back) == "ProbeSucceeded"


def test_P24_an_edited_pod_keeps_running_and_its_probe_port_moves(host, plane, pods, ready_pod):
    pod = ready_pod("edited")
    vm = vm_of(pod)
    plane.admin.patch(pod_path(pod), {"metadata": {"labels": {"tier": "front"}}})
    image = [{"op": "replace", "path": "/spec/containers/0/image", "value": "registry.example/placeholder:2"}]
    plane.admin.patch(pod_path(pod), image, JSON)
    plane.admin.patch(pod_path(pod), {"spec": {"activeDeadlineSeconds": 86400}}, STRATEGIC)
    pods.first(lambda sight: image_of(sight) == "registry.example/placeholder:2", 60, uid=uid_of(pod))
    plane.admin.patch(pod_path(pod), {"metadata": {"annotations": {"vm.cocoonstack.io/probe-port": "28081"}}})
    closed = pods.first(is_not_ready, 40, uid=uid_of(pod), since=up_at(pods, pod))
    assert reason(closed) == "PortClosed"
    host.tell("vm-edited", open=28081)
    ready = pods.first(is_ready, uid=uid_of(pod), since=closed.at)
    assert vm_of(ready.object) == vm
    assert host.tools.cocoon.count("vm run", "vm-edited") == 1


def test_P26_an_environment_from_a_config_map_that_is_not_there_holds_nothing_up(host, namespace, plane, pods):
    wish = host.pod("configured", namespace=namespace)
    wish["spec"]["containers"][0]["envFrom"] = [{"configMapRef": {"name": "nowhere"}}, {"secretRef": {"name": "none"}}]
    pods.first(is_ready, 30, uid=uid_of(create_pod(plane.admin, wish)))


def test_P27_an_init_container_holds_nothing_up_and_is_said_to_be_done(host, namespace, plane, pods):
    wish = host.pod("begun", namespace=namespace)
    wish["spec"]["initContainers"] = [{"name": "first", "image": "registry.example/placeholder:1"}]
    ready = pods.first(is_ready, 30, uid=uid_of(create_pod(plane.admin, wish)))
    assert condition(ready.object, "Initialized")["status"] == "True"


def test_P31_a_guest_that_goes_and_comes_back_costs_two_writes(host, plane, pods, ready_pod):
    pod = ready_pod("flapping")
    CLOCK.sleep(1)
    before = len(pods.about(uid=uid_of(pod)))
    host.tell("vm-flapping", close=PORT)
    down = pods.first(is_not_ready, 40, uid=uid_of(pod), since=up_at(pods, pod))
    host.tell("vm-flapping", open=PORT)
    up = pods.first(is_ready, uid=uid_of(pod), since=down.at)
    CLOCK.sleep(1)
    assert len(pods.about(uid=uid_of(pod))) == before + 2
    times = [condition(obj)["lastTransitionTime"] for obj in (pod, down.object, up.object)]
    assert times == sorted(times) and times[0] < times[1]
    for still in ("Initialized", "cocoonstack.io/LifecycleReady"):
        assert condition(up.object, still) == condition(pod, still)


def test_P35_a_vm_that_vanished_behind_our_back_is_said_to_be_gone_and_its_pod_is_evicted(host, pods, ready_pod):
    pod = ready_pod("lost")
    host.tools.cocoon.run(["vm", "rm", "--force", vm_of(pod)])
    lost = pods.first(is_not_ready, 40, uid=uid_of(pod), since=up_at(pods, pod))
    assert reason(lost) == "VMGone"
    pods.first(is_gone, uid=uid_of(pod))


def test_a_pod_that_is_not_ours_stays_pending_and_is_told_why_once(host, namespace, plane):
    wish = host.pod("stranger", namespace=namespace, **{"vm.cocoonstack.io/name": None})
    made = create_pod(plane.admin, wish)
    until(lambda: _events(plane, namespace, "stranger", "NotOurs"), 15, "an event")
    CLOCK.sleep(3)
    (event,) = _events(plane, namespace, "stranger", "NotOurs")
    assert event["count"] == 1
    assert "vm.cocoonstack.io/name" in event["message"]
    assert plane.admin.get(pod_path(made))["status"]["phase"] == "Pending"
    plane.admin.delete(pod_path(made))
    until(lambda: plane.admin.find(pod_path(made)) is None, 15, "it can be deleted all the same")


def image_of(sight):
    return (sight.object["status"].get("containerStatuses") or [{}])[0].get("image")


def up_at(pods, pod):
    """When the pod was seen Ready for the first time."""
    return next(sight.at for sight in pods.about(uid=uid_of(pod)) if is_ready(sight))


def _events(plane, namespace, name, reason_):
    selector = f"fieldSelector=involvedObject.name={name}"
    events = plane.admin.get(f"/api/v1/namespaces/{namespace}/events?{selector}")["items"]
    return [event for event in events if event["reason"] == reason_]
