"""kubectl against the fake API server, as its user sees it. A real process over loopback, and real time."""

import json
import os
import shutil
import subprocess

import pytest
import yaml

from tests import door_rig
from tests.door_rig import PODS, T0, WEB, pod, reached, running
from vkcocoon_kube import ApiError

pytestmark = pytest.mark.process
kube, door = door_rig.kube, door_rig.door  # fixtures


@pytest.fixture
def kubectl(door, tmp_path):
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    config = tmp_path / "config"
    config.write_text(door.kubeconfig())
    # A home of its own: kubectl caches discovery there, by address.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(config)}

    def run(*arguments, ok=True, stdin=""):
        done = subprocess.run(
            [program, *arguments], input=stdin, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return (done.stdout if ok else done.stderr).rstrip()

    run.start = lambda *arguments: subprocess.Popen(
        [program, *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )
    return run


@pytest.fixture
def web(kube):
    kube.create(PODS, pod(labels={"app": "web"}))
    return kube.patch(f"{WEB}/status", {"status": running()}, kind="strategic")


@pytest.fixture
def node(kube):
    status = {
        "capacity": {"cpu": "8", "memory": "32Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": T0}],
        "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
        "nodeInfo": {"kubeletVersion": "v1.32.0-cocoon"},
    }
    return kube.create("/api/v1/nodes", {"metadata": {"name": "n1"}, "status": status})


def columns(line):
    return line.split()


def test_kubectl_get_in_all_shapes(kubectl, web):
    head, row = kubectl("get", "pods", "-A").splitlines()
    assert columns(head) == ["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert columns(row)[:5] == ["default", "web-0", "1/1", "Running", "0"]
    head, row = kubectl("get", "po", "-o", "wide").splitlines()
    assert columns(head)[5:9] == ["IP", "NODE", "NOMINATED", "NODE"]
    assert columns(row)[5:7] == ["10.88.0.5", "n1"]
    assert json.loads(kubectl("get", "pod", "web-0", "-o", "json"))["metadata"]["uid"] == web["metadata"]["uid"]
    assert yaml.safe_load(kubectl("get", "pod", "web-0", "-o", "yaml"))["status"]["podIP"] == "10.88.0.5"
    assert kubectl("get", "pods", "-l", "app in (web,x)", "-o", "name") == "pod/web-0"
    assert kubectl("get", "pods", "--field-selector", "spec.nodeName=n2", "-o", "name") == ""
    assert kubectl("get", "pod", "nope", ok=False) == 'Error from server (NotFound): pods "nope" not found'


def test_kubectl_get_w_follows_a_flip(kubectl, kube, web):
    watching = kube.hang("WATCH *")
    process = kubectl.start("get", "pods", "-w")
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert reached(watching)
        watching.release()
        kube.patch(f"{WEB}/status", {"status": running(ready=False)}, kind="strategic")
        lines.append(process.stdout.readline())
        kube.delete(WEB)
        lines.append(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
    assert [columns(line)[1:3] for line in lines] == [
        ["READY", "STATUS"],
        ["1/1", "Running"],
        ["0/1", "Running"],
        ["0/1", "Terminating"],
    ]


def test_kubectl_nodes_and_cordon(kubectl, kube, node):
    head, row = kubectl("get", "nodes").splitlines()
    assert columns(head) == ["NAME", "STATUS", "ROLES", "AGE", "VERSION"]
    assert (columns(row)[1], columns(row)[4]) == ("Ready", "v1.32.0-cocoon")
    assert kubectl("cordon", "n1") == "node/n1 cordoned"
    assert columns(kubectl("get", "nodes").splitlines()[1])[1] == "Ready,SchedulingDisabled"
    assert kubectl("uncordon", "n1") == "node/n1 uncordoned"
    assert kubectl("taint", "node", "n1", "a=b:NoSchedule") == "node/n1 tainted"
    assert kube.get("/api/v1/nodes/n1")["spec"]["taints"] == [{"key": "a", "value": "b", "effect": "NoSchedule"}]


def test_kubectl_describe(kubectl, kube, web, node):
    about = {"kind": "Pod", "namespace": "default", "name": "web-0", "uid": web["metadata"]["uid"]}
    body = {"metadata": {"name": "e1"}, "involvedObject": about, "reason": "Healthy", "message": "the guest answers"}
    body |= {
        "type": "Normal",
        "count": 1,
        "firstTimestamp": T0,
        "lastTimestamp": T0,
        "source": {"component": "vk-cocoon"},
    }
    kube.create("/api/v1/namespaces/default/events", body)
    told = kubectl("describe", "pod", "web-0")
    assert "Conditions: Type Status Ready True" in " ".join(told.split())
    assert "the guest answers" in told
    assert "10.88.0.5" in told
    told = kubectl("describe", "node", "n1")
    assert "KubeletReady" in told
    assert "web-0" in told.partition("Non-terminated Pods")[2]
    head, row = kubectl("get", "events").splitlines()
    assert columns(head) == ["LAST", "SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    assert columns(row)[1:4] == ["Normal", "Healthy", "pod/web-0"]


def test_kubectl_wait_sees_the_condition_come(kubectl, kube):
    kube.create(PODS, pod())
    watching = kube.hang("WATCH *")
    process = kubectl.start("wait", "--for=condition=Ready", "pod/web-0", "--timeout=20s")
    assert reached(watching)  # It has looked, and the condition was not there.
    watching.release()
    kube.patch(f"{WEB}/status", {"status": running()}, kind="strategic")
    assert process.communicate(timeout=20)[0] == "pod/web-0 condition met\n"
    assert "timed out" in kubectl("wait", "--for=condition=Gate", "pod/web-0", "--timeout=1s", ok=False)


def test_kubectl_create_validates(kubectl, kube):
    assert kubectl("create", "-f", "-", stdin=yaml.safe_dump(pod())) == "pod/web-0 created"
    told = kubectl("create", "-f", "-", stdin=yaml.safe_dump(pod()), ok=False)
    assert "(AlreadyExists)" in told
    wrong = {**pod("other"), "spec": {**pod()["spec"], "nodename": "n1"}}
    told = kubectl("create", "-f", "-", stdin=yaml.safe_dump(wrong), ok=False)
    assert 'unknown field "spec.nodename"' in told
    created = [request for request in kube.requests if request.verb == "POST"]
    assert created[0].options["fieldValidation"] == "Strict"


def test_kubectl_apply_creates_changes_and_knows_when_nothing_changed(kubectl, kube):
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1", "b": "2"}}
    assert kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body)) == "configmap/c created"
    assert kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body)) == "configmap/c unchanged"
    del body["data"]["b"]
    assert kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body)) == "configmap/c configured"
    assert kube.get("/api/v1/namespaces/default/configmaps/c")["data"] == {"a": "1"}
    assert kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(pod())) == (
        "pod/web-0 serverside-applied"
    )


def test_kubectl_annotates_labels_and_patches(kubectl, kube, web):
    kubectl("annotate", "pod", "web-0", "vm.cocoonstack.io/probe-port=3389")
    kubectl("label", "pod", "web-0", "tier=front")
    kubectl("patch", "pod", "web-0", "-p", '{"metadata":{"labels":{"x":"y"}}}')
    kubectl("patch", "pod", "web-0", "--type=json", "-p", '[{"op":"remove","path":"/metadata/labels/app"}]')
    kubectl("patch", "pod", "web-0", "--subresource=status", "-p", '{"status":{"message":"by hand"}}')
    seen = kube.get(WEB)
    assert seen["metadata"]["annotations"] == {"vm.cocoonstack.io/probe-port": "3389"}
    assert seen["metadata"]["labels"] == {"tier": "front", "x": "y"}
    assert seen["status"]["message"] == "by hand"
    told = kubectl("patch", "pod", "web-0", "-p", '{"spec":{"nodeName":"n2"}}', ok=False)
    assert "pod updates may not change fields other than" in told


def test_kubectl_delete_waits_for_the_end(kubectl, kube, web):
    watching = kube.hang("WATCH *")
    process = kubectl.start("delete", "pod", "web-0")
    assert reached(watching)
    watching.release()
    assert kube.get(WEB)["metadata"]["deletionGracePeriodSeconds"] == 30
    assert process.poll() is None
    kube.delete(WEB, grace_seconds=0)
    assert process.communicate(timeout=20)[0] == 'pod "web-0" deleted\n'


def test_kubectl_force_deletes_at_once(kubectl, kube, web):
    assert kubectl("delete", "pod", "web-0", "--grace-period=0", "--force") == 'pod "web-0" force deleted'
    assert kubectl("get", "pods", "-o", "name") == ""


def test_kubectl_drain_evicts(kubectl, kube, node, web):
    evicting = kube.hang("POST */eviction", stored=True)
    process = kubectl.start("drain", "n1", "--force", "--timeout=20s")
    assert reached(evicting)
    assert "deletionTimestamp" in kube.get(WEB)["metadata"]
    evicting.release()
    kube.delete(WEB, grace_seconds=0)
    assert process.communicate(timeout=20)[0].endswith("node/n1 drained\n")
    assert [request.verb for request in kube.requests if request.path.endswith("/eviction")] == ["POST"]


@pytest.mark.parametrize(
    "arguments",
    [("exec", "web-0", "--", "ls"), ("attach", "web-0"), ("port-forward", "web-0", "0:80")],
)
def test_kubectl_says_what_is_not_available(kubectl, web, arguments):
    assert "this API server passes on logs only" in kubectl(*arguments, ok=False)


def test_kubectl_shows_the_error_of_a_fault(kubectl, kube, web):
    kube.fail("LIST */pods", ApiError(403, "Forbidden", "not today"))
    assert kubectl("get", "pods", ok=False) == "Error from server (Forbidden): not today"


def test_kubectl_finds_its_way_around(kubectl, web):
    assert "leases" in kubectl("api-resources")
    assert "Server Version: v1." in kubectl("version")
    assert "podIP <string>" in kubectl("explain", "pod.status.podIP")
    assert "FIELD: conditions <[]PodCondition>" in kubectl("explain", "pod.status.conditions")
