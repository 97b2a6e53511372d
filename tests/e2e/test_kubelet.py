"""What the API server and others get from the node itself: logs, metrics, and a clear no for the rest."""

import pytest
from gevent.pool import Group

from tests.e2e.api import CLOCK, create_pod, is_gone, is_ready, pod_path, uid_of
from tests.e2e.control_plane import until
from vkcocoon_probes import spawn

RIGHTS = pytest.mark.real("who may what is the real API server's")


@pytest.fixture
def logged(host, plane, pods, namespace):
    """A pod whose VM has a log; the VM's name is its own in every scenario."""
    made = create_pod(
        plane.admin, host.pod("logged", namespace=namespace, **{"vm.cocoonstack.io/name": f"vm-{namespace}"})
    )
    pods.first(is_ready, uid=uid_of(made))
    return made


def test_H1_kubectl_logs_shows_the_vms_log_with_its_options(host, plane, namespace, logged):
    whole = plane.kubectl("--namespace", namespace, "logs", "logged").splitlines()
    assert whole
    assert plane.kubectl("--namespace", namespace, "logs", "logged", "--tail=1").splitlines() == whole[-1:]
    assert len(plane.kubectl("--namespace", namespace, "logs", "logged", "--limit-bytes=10")) == 10
    assert "other" in plane.kubectl("--namespace", namespace, "logs", "logged", "-c", "other", fails=True)


def test_H3_kubectl_logs_of_a_follower_ends_with_the_pod(host, plane, namespace, logged, pods):
    words = ["--namespace", namespace, "logs", "logged", "--follow"]
    following = spawn(Group(), "a person at another terminal", plane.kubectl, *words)
    CLOCK.sleep(2)  # until it is connected
    plane.admin.delete(pod_path(logged))
    pods.first(is_gone, 30, uid=uid_of(logged))
    assert following.get(timeout=30)


@pytest.mark.real("the fake API server refuses these by itself")
def test_H16_exec_attach_and_port_forward_are_refused_in_words(plane, namespace, logged):
    for words in (("exec", "logged", "--", "true"), ("attach", "logged"), ("port-forward", "logged", "0:80")):
        refused = plane.kubectl("--namespace", namespace, *words, fails=True)
        assert f"{words[0]} is not supported: the pods of this node are virtual machines" in refused


@RIGHTS
def test_H14_metrics_server_finds_the_vms_in_the_form_it_reads(host, plane, namespace, logged):
    """Asked directly, as metrics-server does: the API server is no way to a loopback address but for logs."""
    scraper = host.kubelet(scraper_token(plane, namespace, "nodes/metrics", "nodes/stats"))
    page = until(lambda: (got := scraper.send("GET", "/metrics/resource")).status == 200 and got, 45, "it is let in")
    text = page.body.decode()
    assert f'namespace="{namespace}",pod="logged"' in text
    for family in ("node_cpu_usage_seconds_total", "container_memory_working_set_bytes"):
        assert f"# TYPE {family} " in text
    summary = scraper.get("/stats/summary")
    assert summary["node"]["nodeName"] == host.name
    assert ("logged", namespace) in {(pod["podRef"]["name"], pod["podRef"]["namespace"]) for pod in summary["pods"]}


@RIGHTS
def test_H13_the_node_answers_nobody_that_the_cluster_does_not_know_or_does_not_allow(host, plane, namespace):
    assert host.kubelet().send("GET", "/metrics/resource").status == 401
    assert host.kubelet("nonsense").send("GET", "/metrics/resource").status == 401
    stranger = host.kubelet(plane.token("default", "default"))
    assert stranger.send("GET", "/metrics/resource").status == 403
    scraper = host.kubelet(scraper_token(plane, namespace, "nodes/metrics"))
    until(lambda: scraper.send("GET", "/metrics/resource").status == 200, 45, "a right that was given is seen")
    assert scraper.send("GET", "/pods").status == 403


def scraper_token(plane, namespace, *resources):
    """The token of a new account that may get these parts of nodes."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    name = f"scraper-{namespace}"
    rules = [{"apiGroups": [""], "resources": list(resources), "verbs": ["get"]}]
    plane.admin.create(f"{rbac}/clusterroles", {"metadata": {"name": name}, "rules": rules})
    plane.admin.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "scraper"}})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "scraper", "namespace": namespace}],
    }
    plane.admin.create(f"{rbac}/clusterrolebindings", binding)
    return plane.token(namespace, "scraper")
