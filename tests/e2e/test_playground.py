"""The playground on a cluster of somebody else (`--kubeconfig`): it registers, plays, judges, and leaves nothing.

The cluster is a process of its own on the host's loopback address, which nothing in the playground's namespaces can
reach by itself.
"""

import subprocess
import sys

import pytest

from tests.e2e.control_plane import until

pytestmark = pytest.mark.together  # every playground is the same node of the cluster

PLAYGROUND = [sys.executable, "-m", "vkcocoon_cli", "playground", "--no-table"]
PODS, NODES, NAMESPACES = "/api/v1/pods", "/api/v1/nodes", "/api/v1/namespaces"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/playground"
WITHIN_S = 150
SCENARIO = """
until: 12s
pods:
  - {name: play/web-0, guest: {boot: 500ms, lease: 200ms}}
events:
  - {id: move, when: {pod: play/web-0, sees: ready, later: 1s}, lease: {pod: play/web-0, ip: 10.88.0.200}}
expect:
  - {pod: play/web-0, ready: true, by: 10s}
  - {pod: play/web-0, count: "address 10.88.0.200", is: 1, from: move}
  - {pod: play/web-0, flips: 1}
  - {pod: play/web-0, count: begins vm clone, is: 1}
"""


@pytest.fixture
def admin_kubeconfig(plane):
    if plane.name == "real":
        return plane.kubeconfig("admin", ("system:masters",))
    return plane.directory / "admin.kubeconfig"


class Playground:
    """One run of the program; what it printed is in `text()` as it comes."""

    def __init__(self, directory, kubeconfig, scenario):
        (directory / "scenario.yaml").write_text(scenario)
        self._out = directory / "out"
        words = [str(directory / "scenario.yaml"), "--kubeconfig", str(kubeconfig), "--allowance", "15s"]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [*PLAYGROUND, *words], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def text(self):
        return self._out.read_text()

    def ended(self):
        """The exit code and everything that was printed."""
        until(lambda: self.process.poll() is not None, WITHIN_S, "the end of the playground")
        return self.process.returncode, self.text()


@pytest.fixture
def play(admin_kubeconfig, tmp_path):
    started = []

    def start(scenario):
        started.append(Playground(tmp_path, admin_kubeconfig, scenario))
        return started[-1]

    yield start
    for each in started:
        each.process.terminate()
        each.process.wait()


def names(plane, path):
    return [each["metadata"]["name"] for each in plane.admin.get(path)["items"]]


def test_a_scenario_is_played_on_another_cluster_and_nothing_is_left_there(plane, play):
    run = play(SCENARIO)
    until(lambda: "web-0" in names(plane, PODS), 60, "the pod on that cluster")
    (pod,) = (each for each in plane.admin.get(PODS)["items"] if each["metadata"]["name"] == "web-0")
    assert (pod["metadata"]["namespace"], pod["spec"]["nodeName"]) == ("play", "playground")
    assert "playground" in names(plane, NODES)
    code, text = run.ended()
    assert code == 0, text
    assert "5 expectations held, 0 broken\n" in text
    assert "web-0" not in names(plane, PODS)
    assert "playground" not in names(plane, NODES)
    assert plane.admin.find(LEASE) is None
    # Where nobody finishes what is left of a namespace, it stays on its way out.
    (namespace,) = [each for each in plane.admin.get(NAMESPACES)["items"] if each["metadata"]["name"] == "play"] or [{}]
    assert not namespace or "deletionTimestamp" in namespace["metadata"]


def test_an_interrupted_playground_takes_its_pods_and_its_node_away(plane, play):
    run = play(SCENARIO.replace("12s", "5m").replace("play/", "default/"))
    until(lambda: "as expected" in run.text(), 90, "the first expectation")
    run.process.terminate()
    code, text = run.ended()
    assert code == 0, text
    assert "the playground ended before the scenario did" in text
    assert "web-0" not in names(plane, PODS)
    assert "playground" not in names(plane, NODES)


def test_what_is_done_to_the_api_server_is_refused_and_nothing_is_touched(plane, play, tmp_path):
    code, text = play("pods: [{name: web-0}]\nevents: [{at: 1s, api_down: true}]\n").ended()
    why = "api_down cannot be live: a real API server does not do that for us"
    assert (code, text) == (2, f"vk-cocoon: {tmp_path}/scenario.yaml:2: {why}\n")
    assert "playground" not in names(plane, NODES)


def test_a_node_of_the_name_is_left_alone(plane, play):
    plane.admin.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "playground"}})
    try:
        code, text = play(SCENARIO).ended()
        assert code == 2
        assert text.endswith("there is a node 'playground' already; is another playground running there?\n")
        assert "playground" in names(plane, NODES)
    finally:
        plane.admin.send("DELETE", f"{NODES}/playground")
