"""What was recorded of a real API server, compared with the servers at hand: where they differ, the fake is wrong."""

import os

import pytest

from tests.e2e import programs, traces


def names():
    """One of them restarts the control plane."""
    return [
        pytest.param(name, marks=pytest.mark.alone) if name == "history_forgotten" else name for name in traces.TRACES
    ]


@pytest.mark.parametrize("name", names())
def test_the_server_does_what_was_recorded(plane, namespace, name):
    played = traces.play(name, plane.admin, namespace, plane.forget_history)
    if os.environ.get("E2E_RECORD") and plane.name == "real":
        traces.record(name, programs.version(), played)
    assert played == traces.recorded(name)["steps"]
