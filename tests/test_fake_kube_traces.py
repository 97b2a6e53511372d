"""The fake API server does what was recorded of a real one, request by request (tests/e2e/traces)."""

import pytest

from simulator.fake_kube import FakeKube
from tests.e2e import traces
from tests.e2e.api import Api
from vkcocoon_probes import SystemClock

pytestmark = pytest.mark.process


@pytest.fixture
def door():
    door = FakeKube(SystemClock()).serve(("127.0.0.1", 0))
    yield door
    door.close()


@pytest.mark.parametrize("name", traces.TRACES)
def test_the_fake_answers_as_the_real_server_did(door, name):
    api = Api(door.url)
    namespace = f"trace-{name.replace('_', '-')}"
    api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    assert traces.play(name, api, namespace, door.kube.expire_history) == traces.recorded(name)["steps"]
