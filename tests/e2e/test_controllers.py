"""The node among the cluster's own controllers and kubectl: scheduler, ReplicaSet, DaemonSet, PodGC, eviction, wait."""

import json
import re

import pytest

from tests.e2e import programs
from tests.e2e.api import CLOCK, condition, create_pod, is_gone, is_ready, pod_path, reason, uid_of, vm_of
from tests.e2e.control_plane import SILENCE_S, until

NODES = "/api/v1/nodes"
REPLICASETS = "/apis/apps/v1/namespaces/{}/replicasets"
NEEDS_CONTROLLERS = pytest.mark.real("needs the controller manager and the scheduler")


def template(host, name, **changes):
    """A pod of this host as a template: every replica has a VM of its own name, from the pod's own."""
    pod = host.pod(name, bound=False, **changes)
    pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1", "memory": "1Gi"}}
    return {"metadata": {"annotations": pod["metadata"]["annotations"], "labels": {"app": name}}, "spec": pod["spec"]}


def pods_of(plane, namespace, app):
    return plane.admin.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=app={app}")["items"]


# The scheduler ----------------------------------------------------------------------------------------------------


@NEEDS_CONTROLLERS
def test_P33_the_scheduler_places_a_pod_that_tolerates_us_and_none_that_does_not(host, namespace, plane, pods, ran):
    made = create_pod(plane.admin, host.pod("placed", namespace=namespace, bound=False))
    ready = pods.first(is_ready, 30, uid=uid_of(made))
    assert ready.object["spec"]["nodeName"] == host.name
    assert condition(ready.object, "PodScheduled")["status"] == "True"
    ran.note("kube-scheduler", "bound a pod to the node")
    wish = host.pod("intolerant", namespace=namespace, bound=False)
    del wish["spec"]["tolerations"]
    other = create_pod(plane.admin, wish)
    refused = pods.first(lambda sight: reason(sight, "PodScheduled") == "Unschedulable", 30, uid=uid_of(other))
    assert "untolerated taint" in condition(refused.object, "PodScheduled")["message"]


@NEEDS_CONTROLLERS
def test_P33_the_scheduler_counts_what_the_node_offers(new_host, namespace, plane, pods):
    host = new_host()
    host.settings = {"VK_NODE_CPU": "4", "VK_RESERVE_PERCENT": "25"}
    host.start()
    host.wait_until_ready()
    wishes = []
    for name in ("first", "second"):
        wish = host.pod(name, namespace=namespace, bound=False)
        wish["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2", "memory": "1Gi"}}
        wishes.append(wish)
    first = create_pod(plane.admin, wishes[0])
    pods.first(is_ready, 30, uid=uid_of(first))
    second = create_pod(plane.admin, wishes[1])
    full = pods.first(lambda sight: reason(sight, "PodScheduled") == "Unschedulable", 30, uid=uid_of(second))
    assert "Insufficient cpu" in condition(full.object, "PodScheduled")["message"]
    plane.admin.delete(pod_path(first))
    pods.first(is_ready, 60, uid=uid_of(second))


# Controllers that own pods ----------------------------------------------------------------------------------------


@NEEDS_CONTROLLERS
def test_P12_a_replica_that_is_deleted_is_replaced_and_becomes_ready(host, namespace, plane, pods, ran):
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "web"}}, "template": template(host, "web")}
    body = {"metadata": {"name": "web"}, "spec": spec}
    plane.admin.create(REPLICASETS.format(namespace), body)
    first = until(lambda: pods_of(plane, namespace, "web"), 30, "a replica")[0]
    pods.first(is_ready, 30, uid=uid_of(first))
    ran.note("kube-controller-manager", "made the pod of a ReplicaSet")
    path = f"{REPLICASETS.format(namespace)}/web"
    until(lambda: plane.admin.get(path)["status"].get("readyReplicas") == 1, 15, "the ReplicaSet sees it Ready")
    plane.admin.delete(pod_path(first))

    def replaced():
        others = [pod for pod in pods_of(plane, namespace, "web") if uid_of(pod) != uid_of(first)]
        return others[0] if others else None

    second = until(replaced, 30, "another replica")
    pods.first(is_ready, 60, uid=uid_of(second))
    pods.first(is_gone, 30, uid=uid_of(first))
    until(lambda: plane.admin.get(path)["status"].get("readyReplicas") == 1, 15, "the ReplicaSet sees it Ready")
    plane.kubectl("--namespace", namespace, "delete", "replicaset", "web", "--wait=true")
    until(lambda: not pods_of(plane, namespace, "web"), 30, "its pod goes with it")


@NEEDS_CONTROLLERS
def test_a_pod_of_a_daemon_set_that_tolerates_everything_is_not_ours_and_does_no_harm(host, namespace, plane):
    spec = {
        "selector": {"matchLabels": {"app": "agent"}},
        "template": {
            "metadata": {"labels": {"app": "agent"}},
            "spec": {
                "tolerations": [{"operator": "Exists"}],
                "nodeSelector": {"kubernetes.io/hostname": host.name},
                "containers": [{"name": "agent", "image": "registry.example/agent:1"}],
            },
        },
    }
    plane.admin.create(
        f"/apis/apps/v1/namespaces/{namespace}/daemonsets", {"metadata": {"name": "agent"}, "spec": spec}
    )
    pod = until(lambda: pods_of(plane, namespace, "agent"), 30, "its pod")[0]
    name = pod["metadata"]["name"]
    events = f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name={name},reason=NotOurs"
    until(lambda: plane.admin.get(events)["items"], 20, "an event")
    assert plane.admin.get(pod_path(pod))["status"]["phase"] == "Pending"
    assert plane.kubectl("--namespace", namespace, "delete", "daemonset", "agent", "--timeout=30s")
    until(lambda: not pods_of(plane, namespace, "agent"), 30, "it can be removed")


@NEEDS_CONTROLLERS
def test_P12_a_stateful_set_gets_its_name_back_only_after_the_vm_is_gone(host, namespace, plane, pods):
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
    spec = {
        "replicas": 1,
        "serviceName": "",
        "selector": {"matchLabels": {"app": "db"}},
        "template": template(host, "db"),
    }
    plane.admin.create(path, {"metadata": {"name": "db"}, "spec": spec})
    first = until(lambda: pods_of(plane, namespace, "db"), 30, "its pod")[0]
    pods.first(is_ready, 30, uid=uid_of(first))
    host.tools.cocoon.slow("vm rm", 3.0, name="vm-db")
    plane.admin.delete(pod_path(first))
    gone = pods.first(is_gone, 30, uid=uid_of(first))
    second = pods.first(is_ready, 60, name="db-0", since=gone.at)
    assert second.uid != uid_of(first)
    verbs = [call["verb"] for call in host.tools.cocoon.calls if "vm-db" in call["names"]]
    assert [verb for verb in verbs if verb in ("vm run", "vm rm")] == ["vm run", "vm rm", "vm run"]


@NEEDS_CONTROLLERS
def test_P30_pods_collected_with_a_vanished_node_are_torn_down_once_we_are_back(new_host, namespace, plane, pods):
    host = new_host()
    host.start()
    host.wait_until_ready()
    made = create_pod(plane.admin, host.pod("collected", namespace=namespace))
    up = pods.first(is_ready, uid=uid_of(made))
    host.daemon.freeze()
    plane.admin.delete(f"{NODES}/{host.name}")
    # The collector looks every 20 s, and wants the node missing for 40 s.
    gone = pods.first(is_gone, 120, uid=uid_of(made))
    failed = [
        sight for sight in pods.about(uid=uid_of(made), since=up.at) if sight.object["status"]["phase"] == "Failed"
    ]
    assert failed and condition(failed[0].object, "DisruptionTarget")["reason"] == "DeletionByPodGC"
    assert "vm-collected" in host.vms()
    host.daemon.thaw()
    until(lambda: host.vms() == set(), 60, "the VM goes")
    host.wait_until_ready(60)
    assert pods.about(uid=uid_of(made))[-1].at == gone.at


@NEEDS_CONTROLLERS
def test_P30_a_pod_that_was_declared_failed_is_not_revived(new_host, namespace, plane, pods):
    host = new_host()
    host.start()
    host.wait_until_ready()
    wish = host.pod("condemned", namespace=namespace)
    wish["metadata"]["finalizers"] = ["example.com/keep"]
    made = create_pod(plane.admin, wish)
    pods.first(is_ready, uid=uid_of(made))
    plane.admin.patch(f"{pod_path(made)}/status", {"status": {"phase": "Failed"}})
    CLOCK.sleep(7)
    assert plane.admin.get(pod_path(made))["status"]["phase"] == "Failed"
    host.daemon.kill()
    host.daemon.start()
    CLOCK.sleep(5)
    assert plane.admin.get(pod_path(made))["status"]["phase"] == "Failed"
    plane.admin.delete(pod_path(made))
    until(lambda: host.vms() == set(), 30, "the VM goes")
    plane.admin.patch(pod_path(made), {"metadata": {"finalizers": None}})
    pods.first(is_gone, uid=uid_of(made))


@NEEDS_CONTROLLERS
def test_P34_a_namespace_that_is_deleted_takes_its_pods_and_their_vms_along(new_host, plane, pods):
    host = new_host()
    host.start()
    host.wait_until_ready()
    namespace = f"doomed-{host.name}"
    plane.admin.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    made = [create_pod(plane.admin, host.pod(name, namespace=namespace)) for name in ("one", "two")]
    for pod in made:
        pods.first(is_ready, 30, uid=uid_of(pod))
    plane.kubectl("delete", "namespace", namespace, "--timeout=60s")
    assert host.vms() == set()


# Eviction ---------------------------------------------------------------------------------------------------------


@NEEDS_CONTROLLERS
def test_P29_kubectl_drain_empties_the_node_and_ends_when_the_vms_are_gone(new_host, namespace, plane, pods):
    host = new_host()
    host.start()
    host.wait_until_ready()
    made = [create_pod(plane.admin, host.pod(name, namespace=namespace)) for name in ("one", "two")]
    for pod in made:
        pods.first(is_ready, 30, uid=uid_of(pod))
    host.tools.cocoon.slow("vm rm", 2.0, name="vm-two")
    plane.kubectl("drain", host.name, "--force", "--timeout=60s")
    assert host.vms() == set()
    assert plane.admin.get(f"{NODES}/{host.name}")["spec"]["unschedulable"] is True
    plane.kubectl("uncordon", host.name)


def test_P29_an_evicted_pod_goes_as_a_deleted_one_does(host, namespace, plane, pods):
    made = create_pod(plane.admin, host.pod("evicted", namespace=namespace))
    pods.first(is_ready, uid=uid_of(made))
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "evicted", "namespace": namespace}}
    assert plane.admin.send("POST", f"{pod_path(made)}/eviction", eviction).status == 201
    pods.first(is_gone, uid=uid_of(made))
    assert "vm-evicted" not in host.vms()


@NEEDS_CONTROLLERS
def test_P20_pods_of_a_node_that_stayed_silent_are_removed_once_it_is_back_and_not_restarted(
    new_host, namespace, plane, pods
):
    host = new_host()
    host.start()
    host.wait_until_ready()
    wish = host.pod("abandoned", namespace=namespace)
    wish["spec"]["tolerations"] += [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3}
        for why in ("unreachable", "not-ready")
    ]
    made = create_pod(plane.admin, wish)
    up = pods.first(is_ready, uid=uid_of(made))
    host.daemon.freeze()
    pods.first(lambda sight: "deletionTimestamp" in sight.object["metadata"], SILENCE_S + 60, uid=uid_of(made))
    assert "vm-abandoned" in host.vms()
    thawed = CLOCK.monotonic()
    host.daemon.thaw()
    pods.first(is_gone, 30, uid=uid_of(made))
    assert host.vms() == set()
    assert host.tools.cocoon.count("vm run", "vm-abandoned") == 1
    assert not any(is_ready(sight) for sight in pods.about(uid=uid_of(made), since=thawed))
    assert up.at < thawed


# kubectl ----------------------------------------------------------------------------------------------------------


def test_kubectl_get_says_what_is_so(host, namespace, plane, pods):
    host.guest("vm-shown", ports=())
    made = create_pod(plane.admin, host.pod("shown", namespace=namespace))
    pods.first(lambda sight: reason(sight) == "PortClosed", uid=uid_of(made))
    shown = plane.kubectl("--namespace", namespace, "get", "pod", "shown", "--output=wide", "--no-headers").split()
    address = host.tell("vm-shown", status=True)["ip"]
    assert shown[:4] == ["shown", "0/1", "Running", "0"]
    assert shown[5:7] == [address, host.name]
    node = plane.kubectl("get", "node", host.name, "--no-headers").split()
    assert node[:3] == [host.name, "Ready", "agent,cocoon-vm"]


def test_kubectl_describe_says_why_a_pod_that_never_was_ready_is_not(host, namespace, plane):
    host.guest("vm-silent", lease_s=3600)
    create_pod(plane.admin, host.pod("silent", namespace=namespace))
    until(
        lambda: "waiting for DHCP lease" in plane.kubectl("--namespace", namespace, "describe", "pod", "silent"),
        30,
        "describe tells the reason",
        pause=0.5,
    )
    described = plane.kubectl("--namespace", namespace, "describe", "pod", "silent")
    assert re.search(r"Warning +\w+ .*vk-cocoon +.*waiting for DHCP lease", described)
    shown = programs.ROOT / "build" / "e2e" / "describe.txt"  # for the README
    shown.parent.mkdir(parents=True, exist_ok=True)
    shown.write_text(described)


def test_kubectl_wait_ends_with_the_probe(host, namespace, plane):
    create_pod(plane.admin, host.pod("awaited", namespace=namespace))
    words = ["--namespace", namespace, "wait", "pod/awaited"]
    assert "condition met" in plane.kubectl(*words, "--for=condition=Ready", "--timeout=30s")
    plane.kubectl("--namespace", namespace, "delete", "pod", "awaited", "--wait=false")
    plane.kubectl(*words, "--for=delete", "--timeout=30s")
    assert "vm-awaited" not in host.vms()


def test_kubectl_delete_waits_for_the_vm_and_not_for_the_grace(host, namespace, plane, pods):
    made = create_pod(plane.admin, host.pod("erased", namespace=namespace, grace=300))
    pods.first(is_ready, uid=uid_of(made))
    plane.kubectl("--namespace", namespace, "delete", "pod", "erased", "--timeout=30s")
    assert "vm-erased" not in host.vms()


@NEEDS_CONTROLLERS
def test_P25_a_pod_survives_apply_and_an_ephemeral_container(host, namespace, plane, pods):
    wish = host.pod("applied", namespace=namespace)
    plane.kubectl("apply", "--server-side", "-f", "-", input_=json.dumps(wish))
    ready = pods.first(is_ready, 30, name="applied")
    wish["metadata"]["labels"] = {"tier": "back"}
    plane.kubectl("apply", "--server-side", "-f", "-", input_=json.dumps(wish))
    debug = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "registry.example/debug:1"}]}}
    plane.admin.ask(
        "PATCH", f"{pod_path(wish)}/ephemeralcontainers", debug, content_type="application/strategic-merge-patch+json"
    )
    CLOCK.sleep(3)
    after = plane.admin.get(pod_path(wish))
    assert condition(after)["status"] == "True"
    assert after["metadata"]["labels"] == {"tier": "back"}
    assert vm_of(after)
    assert uid_of(after) == ready.uid
    assert host.tools.cocoon.count("vm run", "vm-applied") == 1
