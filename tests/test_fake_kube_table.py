"""The tables of the fake API server say about pods and nodes what users of kubectl know."""

from datetime import datetime, timedelta

import pytest

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from simulator.fake_kube_resources import RESOURCES
from simulator.fake_kube_table import human_duration, pod_status_word, table

PODS = "/api/v1/namespaces/default/pods"
WEB = f"{PODS}/web-0"
T0 = "2026-01-01T00:00:00Z"


@pytest.fixture
def kube():
    return FakeKube(VirtualClock())


def pod(**spec):
    containers = [{"name": "agent", "image": "x"}]
    return {"metadata": {"name": "web-0"}, "spec": {"nodeName": "n1", "containers": containers, **spec}}


def resource(plural):
    return next(item for item in RESOURCES if item.plural == plural)


def cells(kube, path, plural, now="2026-01-01T01:00:00+00:00"):
    page = table(
        resource(plural), kube.list(path)["items"], datetime.fromisoformat(now), include="Metadata", metadata={}
    )
    names = [column["name"] for column in page["columnDefinitions"]]
    return [dict(zip(names, row["cells"], strict=True)) for row in page["rows"]]


STATES = {
    "Pending": {},
    "ContainerCreating": {"phase": "Pending", "state": {"waiting": {"reason": "ContainerCreating"}}},
    "Running": {"phase": "Running", "ready": True, "state": {"running": {}}},
    "Hibernated": {"phase": "Pending", "state": {"waiting": {"reason": "Hibernated"}}},
    "Evicted": {"phase": "Failed", "reason": "Evicted"},
    "Completed": {"phase": "Succeeded", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
    "ExitCode:3": {"phase": "Failed", "state": {"terminated": {"exitCode": 3}}},
    "Signal:9": {"phase": "Failed", "state": {"terminated": {"exitCode": 137, "signal": 9}}},
}


@pytest.mark.parametrize("word", STATES)
def test_status_says_what_kubectl_users_know(kube, word):
    wanted = STATES[word]
    kube.create(PODS, pod())
    status = {key: value for key, value in wanted.items() if key in ("phase", "reason")}
    if "state" in wanted:
        item = {"name": "agent", "image": "x", "imageID": "", "restartCount": 0, "ready": wanted.get("ready", False)}
        status["containerStatuses"] = [{**item, "state": wanted["state"]}]
    shown = kube.patch(f"{WEB}/status", {"status": status}, kind="strategic")
    assert pod_status_word(shown) == word


def container(state, *, ready=False, name="agent", **more):
    return {"name": name, "image": "x", "imageID": "", "ready": ready, "restartCount": 0, "state": state, **more}


def with_containers(kube, *statuses, **status):
    if not kube.list(PODS)["items"]:
        kube.create(PODS, pod())
    body = {"status": {"phase": "Running", "containerStatuses": list(statuses), **status}}
    return kube.patch(f"{WEB}/status", body, kind="merge")


def test_a_container_that_ended_is_not_counted_as_ready(kube):
    with_containers(kube, container({"terminated": {"exitCode": 0}}, ready=True))
    assert cells(kube, PODS, "pods")[0]["Ready"] == "0/1"
    with_containers(kube, container({"running": {}}, ready=False))
    assert cells(kube, PODS, "pods")[0]["Ready"] == "0/1"
    with_containers(kube, container({"running": {}}, ready=True))
    assert cells(kube, PODS, "pods")[0]["Ready"] == "1/1"


def test_one_container_of_two_that_completed_does_not_complete_the_pod(kube):
    done = container({"terminated": {"exitCode": 0, "reason": "Completed"}}, name="job")
    still = container({"running": {}}, ready=True)
    shown = with_containers(kube, done, still, conditions=[{"type": "Ready", "status": "True"}])
    assert pod_status_word(shown) == "Running"
    shown = with_containers(kube, done, still, conditions=[{"type": "Ready", "status": "False"}])
    assert pod_status_word(shown) == "NotReady"


def test_restarts_without_a_known_end_are_a_plain_number(kube):
    with_containers(kube, container({"running": {}}, restartCount=3))
    assert cells(kube, PODS, "pods")[0]["Restarts"] == "3"


def test_events_say_when_about_what_and_by_whom(kube):
    about = {"kind": "Pod", "namespace": "default", "name": "web-0", "fieldPath": "spec"}
    old, new = "2026-01-01T00:30:00Z", "2026-01-01T00:59:00Z"
    events = "/api/v1/namespaces/default/events"
    body = {"involvedObject": about, "reason": "Unhealthy", "message": "no echo\n", "type": "Warning", "count": 4}
    seen = {"firstTimestamp": old, "lastTimestamp": new, "source": {"component": "vk-cocoon", "host": "n1"}}
    kube.create(events, {"metadata": {"name": "a"}, **body, **seen})
    kube.create(events, {"metadata": {"name": "b"}, **body, "eventTime": "2026-01-01T00:30:00.000000Z", "count": 0})
    first, second = cells(kube, events, "events")
    assert first == {
        "Last Seen": "60s",
        "Type": "Warning",
        "Reason": "Unhealthy",
        "Object": "pod/web-0",
        "Subobject": "spec",
        "Source": "vk-cocoon, n1",
        "Message": "no echo",
        "First Seen": "30m",
        "Count": "4",
        "Name": "a",
    }
    assert (second["Last Seen"], second["First Seen"], second["Count"], second["Source"]) == ("30m", "30m", "1", "")


def test_a_pod_that_is_going_is_terminating_until_it_has_ended(kube):
    kube.create(PODS, pod())
    assert pod_status_word(kube.delete(WEB)) == "Terminating"
    shown = kube.patch(f"{WEB}/status", {"status": {"phase": "Succeeded"}}, kind="strategic")
    assert pod_status_word(shown) == "Succeeded"


def test_init_containers_come_first(kube):
    init = [{"name": "one", "image": "x"}, {"name": "two", "image": "x"}]
    kube.create(PODS, pod(initContainers=init))

    def word(*states):
        items = [
            {"name": name, "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
            for name, state in zip(("one", "two"), states, strict=False)
        ]
        body = {"status": {"initContainerStatuses": items}}
        return pod_status_word(kube.patch(f"{WEB}/status", body, kind="strategic"))

    done = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    assert word({"running": {}}) == "Init:0/2"
    assert word(done, {"waiting": {"reason": "PodInitializing"}}) == "Init:1/2"
    assert word(done, {"waiting": {"reason": "ErrImagePull"}}) == "Init:ErrImagePull"
    assert word({"terminated": {"exitCode": 2, "reason": "Error"}}) == "Init:Error"
    assert word(done, done) == "Pending"


def test_restarts_say_how_long_ago(kube):
    kube.create(PODS, pod())
    item = {"name": "agent", "image": "x", "imageID": "", "ready": True, "state": {"running": {}}}
    ended = {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T00:58:00Z"}}
    body = {"status": {"phase": "Running", "containerStatuses": [{**item, "restartCount": 2, "lastState": ended}]}}
    kube.patch(f"{WEB}/status", body, kind="strategic")
    assert cells(kube, PODS, "pods")[0]["Restarts"] == "2 (2m ago)"


def test_readiness_gates_are_counted(kube):
    kube.create(PODS, pod(readinessGates=[{"conditionType": "a"}, {"conditionType": "b"}]))
    body = {"status": {"conditions": [{"type": "a", "status": "True"}]}}
    kube.patch(f"{WEB}/status", body, kind="strategic")
    assert cells(kube, PODS, "pods")[0]["Readiness Gates"] == "1/2"


@pytest.mark.parametrize(
    ("conditions", "unschedulable", "word"),
    [
        ([], False, "Unknown"),
        ([{"type": "Ready", "status": "True"}], False, "Ready"),
        ([{"type": "Ready", "status": "Unknown"}], False, "NotReady"),
        ([{"type": "Ready", "status": "True"}], True, "Ready,SchedulingDisabled"),
    ],
)
def test_node_status(kube, conditions, unschedulable, word):
    body = {"spec": {"unschedulable": unschedulable}, "status": {"conditions": conditions}}
    kube.create("/api/v1/nodes", {"metadata": {"name": "n1"}, **body})
    assert cells(kube, "/api/v1/nodes", "nodes")[0]["Status"] == word


def test_node_roles_and_addresses(kube):
    labels = {"node-role.kubernetes.io/agent": "", "kubernetes.io/role": "vm"}
    status = {"addresses": [{"type": "Hostname", "address": "h"}, {"type": "InternalIP", "address": "192.0.2.1"}]}
    kube.create("/api/v1/nodes", {"metadata": {"name": "n1", "labels": labels}, "status": status})
    (row,) = cells(kube, "/api/v1/nodes", "nodes")
    assert (row["Roles"], row["Internal-IP"], row["External-IP"]) == ("agent,vm", "192.0.2.1", "<none>")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "<invalid>"),
        (-1, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (330, "5m30s"),
        (600, "10m"),
        (630, "10m"),
        (10799, "179m"),
        (10800, "3h"),
        (12000, "3h20m"),
        (28800, "8h"),
        (172799, "47h"),
        (172800, "2d"),
        (187200, "2d4h"),
        (691200, "8d"),
        (63071999, "729d"),
        (63072000, "2y"),
        (64800000, "2y20d"),
        (315360000, "10y"),
    ],
)
def test_ages(seconds, text):
    assert human_duration(timedelta(seconds=seconds)) == text
