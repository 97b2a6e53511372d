"""Logs through the fake API server, as `kubectl logs` asks for them: from its HTTP door over the node's real TLS port
to the simulated `cocoon vm logs` and back."""

import http.client
import json

import pytest
from kubelet_rig import NODE, KubeletRig

from simulator.fake_kube_proxy import TOKEN

POD = "/api/v1/namespaces/default/pods/web-0"
VM = "vk-default-web-0"

pytestmark = pytest.mark.process


@pytest.fixture
def rig(tmp_path):
    rig = KubeletRig(tmp_path)
    rig.pod = rig.vm_pod()
    rig.start()
    rig.door = rig.kube.serve()
    status = {
        "addresses": [{"type": "Hostname", "address": NODE}, {"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": rig.address[1]}},
    }
    rig.kube.admin.create("/api/v1/nodes", {"metadata": {"name": NODE}, "status": status})
    submit(rig, "web-0")
    yield rig
    rig.door.close()
    rig.close()


def submit(rig, name, *containers, node=NODE):
    spec = {"containers": [{"name": each, "image": "x"} for each in containers or ("agent",)]}
    if node:
        spec["nodeName"] = node
    rig.kube.admin.create("/api/v1/namespaces/default/pods", {"metadata": {"name": name}, "spec": spec})


def asked(rig, path):
    connection = http.client.HTTPConnection(*rig.door.address, timeout=20)
    connection.request("GET", path)
    return connection, connection.getresponse()


def refused(rig, path):
    answer = asked(rig, path)[1]
    said = json.loads(answer.read())
    assert (said["kind"], said["code"]) == ("Status", answer.status)
    return answer.status, said["message"]


def test_the_log_comes_with_the_options_that_were_asked_for(rig):
    rig.cocoon.add_log(VM, "one", "two")
    answer = asked(rig, f"{POD}/log?tailLines=1&container=agent&pretty=true")[1]
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain")
    assert answer.read().decode().endswith(" -- two\n")
    assert "one" in asked(rig, f"{POD}/log")[1].read().decode()


def test_the_kubelet_is_shown_a_token_that_it_asks_us_about(rig):
    asked(rig, f"{POD}/log")[1].read()
    reviews = [r.body["spec"] for r in rig.kube.requests if r.path.endswith("/tokenreviews")]
    assert [review["token"] for review in reviews] == [TOKEN]


def test_who_follows_gets_what_is_added_and_whoever_hangs_up_ends_the_source(rig):
    ended, logs = [], rig.logs

    def watched(ref, **options):
        try:
            yield from logs(ref, **options)
        finally:
            ended.append(ref)

    rig.logs = watched
    rig.let_time_pass()
    connection, answer = asked(rig, f"{POD}/log?follow=true&tailLines=0")
    assert answer.status == 200, "the head comes before the first line"
    rig.cocoon.add_log(VM, "new")
    assert answer.readline().decode().endswith(" -- new\n")
    assert ended == []
    connection.sock.close()
    answer.close()
    rig.until(lambda: len(ended) == 1)


def test_what_the_kubelet_refuses_is_said_in_its_words(rig):
    rig.held.pods.clear()
    assert refused(rig, f"{POD}/log") == (404, 'pod "default/web-0" not found')


def test_a_log_that_breaks_off_does_not_look_whole(rig):
    def breaks(ref, **options):
        yield b"x" * 10
        raise OSError("gone")

    rig.logs = breaks
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        asked(rig, f"{POD}/log")[1].read()


def test_a_node_that_does_not_listen_is_named(rig):
    rig.kubelet.close()
    status, message = refused(rig, f"{POD}/log")
    assert status == 500
    assert f"https://127.0.0.1:{rig.address[1]}/containerLogs/default/web-0/agent" in message


def test_a_pod_has_the_containers_it_has(rig):
    submit(rig, "two", "left", "right")
    path = POD.replace("web-0", "two")
    assert refused(rig, f"{path}/log")[0] == 400
    assert "[left right]" in refused(rig, f"{path}/log")[1]
    assert refused(rig, f"{POD}/log?container=other") == (400, "container other is not valid for pod web-0")


def test_a_pod_on_no_node_has_no_log_yet(rig):
    submit(rig, "waits", node="")
    answer = asked(rig, POD.replace("web-0", "waits") + "/log")[1]
    assert (answer.status, answer.read()) == (200, b"")
