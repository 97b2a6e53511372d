"""What the API server and others get from the node itself: logs, metrics, and a clear no for the rest."""

import json

import pytest
from gevent.pool import Group

from tests.e2e.api import CLOCK, create_pod, is_gone, is_ready, pod_path, uid_of
from tests.e2e.control_plane import until
from vkcocoon_probes import spawn

THROUGH = pytest.mark.real("the API server is the way to the node")


@pytest.fixture
def logged(host, plane, pods, namespace):
    """A pod whose VM has three lines in its log."""
    made = create_pod(plane.admin, host.pod("logged", namespace=namespace))
    pods.first(is_ready, uid=uid_of(made))
    return made


@THROUGH
def test_kubectl_logs_shows_the_vms_log_with_its_options(host, plane, namespace, logged):
    whole = plane.kubectl("--namespace", namespace, "logs", "logged").splitlines()
    assert whole
    assert plane.kubectl("--namespace", namespace, "logs", "logged", "--tail=1").splitlines() == whole[-1:]
    assert len(plane.kubectl("--namespace", namespace, "logs", "logged", "--limit-bytes=10")) == 10
    assert "not found" in plane.kubectl("--namespace", namespace, "logs", "logged", "-c", "other", fails=True)


@THROUGH
def test_kubectl_logs_of_a_follower_ends_with_the_pod(host, plane, namespace, logged, pods):
    words = ["--namespace", namespace, "logs", "logged", "--follow"]
    following = spawn(Group(), "a person at another terminal", plane.kubectl, *words)
    CLOCK.sleep(2)  # until it is connected
    plane.admin.delete(pod_path(logged))
    pods.first(is_gone, 30, uid=uid_of(logged))
    assert following.get(timeout=30)


@THROUGH
def test_exec_attach_and_port_forward_are_refused_in_words(plane, namespace, logged):
    refused = plane.kubectl("--namespace", namespace, "exec", "logged", "--", "true", fails=True)
    assert "not supported" in refused or "not implemented" in refused.lower()


@THROUGH
def test_metrics_come_through_the_api_server_in_the_form_metrics_server_reads(host, plane, namespace, logged):
    page = plane.kubectl("get", "--raw", f"/api/v1/nodes/{host.name}/proxy/metrics/resource")
    assert f'namespace="{namespace}",pod="logged"' in page
    for family in ("node_cpu_usage_seconds_total", "container_memory_working_set_bytes"):
        assert f"# TYPE {family} " in page
    summary = json.loads(plane.kubectl("get", "--raw", f"/api/v1/nodes/{host.name}/proxy/stats/summary"))
    assert summary["node"]["nodeName"] == host.name
    assert ("logged", namespace) in {(pod["podRef"]["name"], pod["podRef"]["namespace"]) for pod in summary["pods"]}


@THROUGH
def test_the_node_answers_nobody_that_the_cluster_does_not_know_or_does_not_allow(host, plane, namespace):
    assert host.kubelet().send("GET", "/metrics/resource").status == 401
    assert host.kubelet("nonsense").send("GET", "/metrics/resource").status == 401
    token = plane.token("default", "default")
    assert host.kubelet(token).send("GET", "/metrics/resource").status == 403
    role = {
        "metadata": {"name": "scraper"},
        "rules": [{"apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"]}],
    }
    plane.admin.create("/apis/rbac.authorization.k8s.io/v1/clusterroles", role)
    plane.admin.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "scraper"}})
    binding = {
        "metadata": {"name": "scraper"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "scraper"},
        "subjects": [{"kind": "ServiceAccount", "name": "scraper", "namespace": namespace}],
    }
    plane.admin.create("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
    allowed = host.kubelet(plane.token(namespace, "scraper"))
    until(lambda: allowed.send("GET", "/metrics/resource").status == 200, 45, "a right that was given is seen")
    assert allowed.send("GET", "/pods").status == 403
