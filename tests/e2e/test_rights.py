"""The daemon's rights and credentials: it uses all of packaging/rbac.yaml, asks for nothing else, and rotates."""

import pytest
import yaml

from tests.e2e.api import CLOCK, STRATEGIC, create_pod, is_gone, is_not_ready, is_ready, pod_path, uid_of
from tests.e2e.control_plane import ACCOUNT, RBAC

REFUSALS_S = 65.0  # an event that happens again is counted in the API once a minute


def granted():
    """(group, resource, verb) of every rule in packaging/rbac.yaml."""
    documents = [each for each in yaml.safe_load_all(RBAC.read_text()) if each["kind"] in ("ClusterRole", "Role")]
    return {
        (group, resource, verb)
        for document in documents
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(requests):
    """The same of the requests in an audit log."""
    found = set()
    for request in requests:
        about = request.get("objectRef", {})
        resource = "/".join(filter(None, (about.get("resource", request["requestURI"]), about.get("subresource"))))
        found.add((about.get("apiGroup", ""), resource, request["verb"]))
    return found


@pytest.mark.real("rights are the real API server's")
def test_every_right_that_is_granted_is_used_and_none_is_missing(new_host, plane, pods, namespace):
    host = new_host()
    host.start()
    host.wait_until_ready()
    host.tools.cocoon.fail("vm run", name="vm-failing", times=None)
    create_pod(plane.admin, host.pod("failing", namespace=namespace))
    made = create_pod(plane.admin, host.pod("whole", namespace=namespace))
    pods.first(is_ready, uid=uid_of(made))
    plane.kubectl("--namespace", namespace, "logs", "whole")
    host.kubelet(token=plane.token("default", "default")).send("GET", "/metrics")
    node = f"/api/v1/nodes/{host.name}"
    unavailable = {"type": "NetworkUnavailable", "status": "True"}
    plane.admin.patch(node, {"spec": {"taints": None}})  # both are put back
    plane.admin.patch(f"{node}/status", {"status": {"conditions": [unavailable]}}, STRATEGIC)
    forced = create_pod(plane.admin, host.pod("forced", namespace=namespace))
    pods.first(is_ready, uid=uid_of(forced))
    plane.admin.delete(pod_path(forced), gracePeriodSeconds=0)  # looked for once more before its VM goes
    plane.admin.delete(pod_path(made))
    pods.first(is_gone, uid=uid_of(made))
    end = CLOCK.monotonic() + REFUSALS_S
    while not granted() <= used(plane.requests_of_the_daemons()) and CLOCK.monotonic() < end:
        CLOCK.sleep(2)
    requests = plane.requests_of_the_daemons()
    assert (granted() - used(requests), used(requests) - granted()) == (set(), set()), "granted in vain, or missing"


@pytest.mark.real("tokens are the real API server's")
def test_a_token_that_is_replaced_and_then_refused_is_read_again_without_a_restart(new_host, plane, pods, namespace):
    host = new_host()
    account, name = ACCOUNT
    secret = plane.admin.create(f"/api/v1/namespaces/{account}/secrets", {"metadata": {"name": f"bound-{host.name}"}})
    reference = {"apiVersion": "v1", "kind": "Secret", "name": secret["metadata"]["name"], "uid": uid_of(secret)}
    host.start(daemon=False)
    token = host.home / "token"
    token.write_text(plane.token(account, name, reference))
    host.daemon.start()
    host.wait_until_ready()
    made = create_pod(plane.admin, host.pod("rotated", namespace=namespace))
    up = pods.first(is_ready, uid=uid_of(made))
    pid = host.daemon.pid
    token.write_text(plane.token(account, name))
    plane.admin.delete(f"/api/v1/namespaces/{account}/secrets/{secret['metadata']['name']}")
    CLOCK.sleep(12)  # the API server keeps its opinion of a token for 10 s
    host.tell("vm-rotated", close=28080)
    pods.first(is_not_ready, 45, uid=uid_of(made), since=up.at)
    assert host.daemon.pid == pid and host.daemon.alive
    assert "reading them again" in host.daemon.log()


@pytest.mark.real("tokens are the real API server's")
def test_a_daemon_without_valid_credentials_waits_and_works_once_they_are_there(new_host, plane, pods, namespace):
    host = new_host()
    host.start(daemon=False)
    token = host.home / "token"
    valid = token.read_text()
    token.write_text("nonsense")
    host.daemon.start()
    host.daemon.wait_for_log("401 Unauthorized", 20)
    assert host.daemon.alive
    token.write_text(valid)
    made = create_pod(plane.admin, host.pod("patient", namespace=namespace))
    pods.first(is_ready, 60, uid=uid_of(made))
