"""Which pods there are, and what is not there: pages, paths, methods, and a clear no to exec, attach and port-forward
(H16)."""

import json

import pytest
from kubelet_rig import KubeletRig

from vkcocoon_probes import SystemClock


@pytest.fixture
def rig(tmp_path):
    rig = KubeletRig(tmp_path)
    rig.pod = rig.vm_pod(containers=["agent", "second"])
    yield rig.start()
    rig.close()


class TestPods:
    def test_pods_are_those_the_api_server_bound_to_this_node(self, rig):
        bound = [
            {"metadata": {"namespace": "a", "name": "n", "uid": "u", "annotations": {"k": "v"}}, "spec": {"x": 1}},
            {"metadata": {"namespace": "b", "name": "m", "uid": "w"}, "spec": {}, "status": {"phase": "Pending"}},
        ]
        rig.assigned = bound
        listed = rig.get_json("/pods")
        assert (listed["kind"], listed["apiVersion"], listed["metadata"]) == ("PodList", "v1", {})
        assert listed["items"] == [{**bound[0], "status": {}}, bound[1]]

    def test_their_status_is_the_one_we_know(self, rig):
        rig.pod.status = {"phase": "Running", "podIP": "10.88.0.5"}
        (pod,) = rig.get_json("/pods")["items"]
        assert pod["status"] == {"phase": "Running", "podIP": "10.88.0.5"}

    def test_a_status_is_not_given_to_a_namesake(self, rig):
        rig.pod.status = {"phase": "Running"}
        rig.assigned = [{**rig.pod.pod, "metadata": {"namespace": "default", "name": "web-0", "uid": "uid-2"}}]
        assert rig.get_json("/pods")["items"][0]["status"] == {"phase": "Pending"}

    def test_running_pods_are_those_with_a_vm_and_little_is_said_of_them(self, rig):
        rig.held.add("default/new-0", "uid-2")
        rig.held.add("default/gone-0", "uid-3", vm=rig.pod.vm, gone=True)
        (pod,) = rig.get_json("/runningpods/")["items"]
        assert pod["metadata"] == {"name": "web-0", "namespace": "default", "uid": "uid-1"}
        assert [each["name"] for each in pod["spec"]["containers"]] == ["agent", "second"]

    def test_no_pods_are_an_empty_list(self, rig):
        rig.held.pods.clear()
        assert rig.get_json("/pods")["items"] == []
        assert rig.get_json("/runningpods/")["items"] == []

    def test_letters_of_every_script_and_annotations_of_any_size(self, rig):
        rig.pod.annotations = {"äöü/日本": "x" * 100_000, "quote": '"\\\n\x7f'}
        assert rig.get_json("/pods")["items"][0]["metadata"]["annotations"] == rig.pod.annotations

    def test_a_long_list_gives_everybody_else_a_turn_between_pods(self, rig, monkeypatch):
        for number in range(300):
            rig.held.add(f"default/pod-{number}", f"uid-{number}")
        turns, sleep = [], SystemClock.sleep
        monkeypatch.setattr(SystemClock, "sleep", lambda clock, seconds: (turns.append(seconds), sleep(clock, seconds)))
        assert len(rig.get_json("/pods")["items"]) == 301
        assert turns.count(0) >= 300


class TestPaths:
    @pytest.mark.parametrize("path", ["/healthz", "/healthz/", "/pods", "/pods/", "/runningpods/", "/metrics/"])
    def test_a_slash_at_the_end_makes_no_difference(self, rig, path):
        assert rig.ask(path)[0] == 200

    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/nothing",
            "/pods/more",
            "/healthz/deep",
            "/metrics/nothing",
            "/stats",
            "/stats/x",
            "/logs/",
            "/configz",
            "/spec/",
            "/pods/../healthz",
            "/%2e%2e/healthz",
            "/PODS",
            "/containerlogs/default/web-0/agent",
        ],
    )
    def test_what_is_not_there_is_not_found(self, rig, path):
        assert rig.ask(path) == (404, "404 page not found\n")

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS", "BREW"])
    @pytest.mark.parametrize("path", ["/pods", "/metrics/resource", "/containerLogs/default/web-0/agent", "/healthz"])
    def test_reading_is_all_that_is_allowed(self, rig, method, path):
        with rig.asking(path, method=method) as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "GET")


class TestUnsupported:
    @pytest.mark.parametrize("method", ["GET", "POST"])
    @pytest.mark.parametrize(
        ("path", "what"),
        [
            ("/exec/default/web-0/agent?command=ls&output=1", "exec"),
            ("/exec/default/web-0/uid-1/agent?command=ls", "exec"),
            ("/run/default/web-0/agent", "exec"),
            ("/attach/default/web-0/agent?output=1", "attach"),
            ("/portForward/default/web-0", "port-forward"),
            ("/portForward/default/web-0/uid-1", "port-forward"),
        ],
    )
    def test_h16_a_clear_no(self, rig, method, path, what):
        assert rig.ask(path, method=method) == (
            501,
            f"{what} is not supported: the pods of this node are virtual machines\n",
        )

    def test_h16_a_clear_no_to_an_upgrade_too(self, rig):
        headers = ["Connection: Upgrade", "Upgrade: SPDY/3.1", "X-Stream-Protocol-Version: v4.channel.k8s.io"]
        with rig.asking("/exec/default/web-0/agent?command=ls", method="POST", headers=headers) as answer:
            assert answer.status == 501
            assert answer.text().startswith("exec is not supported")

    @pytest.mark.parametrize(
        "path",
        [
            "/exec/default/web-9/agent",
            "/exec/default/web-0/nobody",
            "/exec/default/web-0/uid-9/agent",
            "/attach/default/web-0",
            "/portForward/default/web-9",
            "/portForward/default/web-0/uid-9",
            "/portForward/default",
            "/exec",
        ],
    )
    def test_what_nobody_knows_is_not_found_first(self, rig, path):
        assert rig.ask(path, method="POST")[0] == 404

    def test_other_methods_are_not_even_considered(self, rig):
        assert rig.ask("/exec/default/web-0/agent", method="DELETE")[0] == 405

    def test_errors_are_text_and_not_kept_by_anybody(self, rig):
        with rig.asking("/nothing") as answer:
            assert answer.status == 404
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["connection"] == "close"

    def test_a_page_is_closed_after_one_answer_and_has_its_length(self, rig):
        with rig.asking("/pods") as answer:
            assert answer.status == 200
            assert answer.headers["connection"] == "close"
            assert len(json.dumps(json.loads(answer.body()))) > 0
            assert answer.connection.recv(1) == b""
