"""What the tests of the fake API server's HTTP door share: the server, the door, a pod, and how a running one looks."""

import pytest

from simulator.fake_kube import FakeKube
from vkcocoon_probes import SystemClock

PODS = "/api/v1/namespaces/default/pods"
WEB = f"{PODS}/web-0"
T0 = "2026-01-01T00:00:00Z"


@pytest.fixture
def kube():
    return FakeKube(SystemClock())


@pytest.fixture
def door(kube):
    door = kube.serve()
    yield door
    door.close()


def pod(name="web-0", **metadata):
    spec = {"nodeName": "n1", "containers": [{"name": "agent", "image": "acme/vm:24.04"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}


def running(ready=True):
    word = "True" if ready else "False"
    container = {"name": "agent", "image": "acme/vm:24.04", "imageID": "", "ready": ready, "restartCount": 0}
    return {
        "phase": "Running",
        "podIP": "10.88.0.5",
        "conditions": [{"type": "Ready", "status": word, "lastTransitionTime": T0}],
        "containerStatuses": [{**container, "state": {"running": {"startedAt": T0}}}],
    }


def reached(hold):
    """Whether a request was held within reasonable real time."""
    return SystemClock().wait(hold.reached, 10)
