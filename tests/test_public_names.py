"""The public surface: names and call shapes that other people's tests and scenarios rely on."""

import inspect

import pytest

import simulator
import vkcocoon
import vkcocoon_net
import vkcocoon_probes
import vkcocoon_status
import vkcocoon_vms


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", ["VirtualClock", "World", "run_scenario", "Timeline"])
def test_the_simulator_offers_its_names_at_the_top(name):
    assert getattr(simulator, name).__name__ == name


def test_the_simulator_offers_nothing_else_by_accident():
    with pytest.raises(AttributeError, match="has no attribute 'Wrold'"):
        simulator.Wrold  # noqa: B018


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (vkcocoon_probes.ProbeManager.start, ["key", "probe", "on_update"]),
        (vkcocoon_probes.ProbeManager.forget, ["key", "owner"]),
        (vkcocoon_probes.ProbeManager.get, ["key"]),
        (vkcocoon_probes.ProbeManager.close, []),
        (vkcocoon_net.LeaseFile, ["path"]),
        (vkcocoon_net.LeaseFile.lookup, ["mac", "now"]),
        (vkcocoon_net.IcmpPinger.ping, ["ip", "deadline"]),
        (vkcocoon_net.NopPinger.ping, ["ip", "deadline"]),
        (vkcocoon_net.tcp_accepts, ["ip", "port", "deadline"]),
        (vkcocoon_net.ssh_banner, ["ip", "deadline", "port"]),
        (vkcocoon_net.release_lease, ["mac", "socket_path", "limit"]),
        (vkcocoon.Provider, ["settings", "ports"]),
        (vkcocoon.Provider.create_pod, ["pod"]),
        (vkcocoon.Provider.update_pod, ["pod"]),
        (vkcocoon.Provider.delete_pod, ["pod"]),
        (vkcocoon.Provider.get_pod, ["namespace", "name"]),
        (vkcocoon.Provider.get_pod_status, ["namespace", "name"]),
        (vkcocoon.Provider.get_pods, []),
        (vkcocoon.Provider.set_vm_ip, ["key", "vm_id", "ip"]),
        (vkcocoon.Provider.reconcile_startup, []),
        (vkcocoon.Provider.close, []),
        (simulator.run_scenario, ["source", "seed"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_public_call_takes_what_it_promised(function, shape):
    assert parameters(function) == shape


def test_the_pace_of_a_manager_can_be_chosen_by_name():
    chosen = inspect.signature(vkcocoon_probes.ProbeManager).parameters
    defaults = {name: parameter.default for name, parameter in chosen.items() if name not in ("clock", "observer")}
    assert defaults == {
        "timeout": 3.0,
        "first_pause": 0.1,
        "growth": 1.5,
        "max_pause": 1.0,
        "steady_pause": 5.0,
        "failure_threshold": 3,
    }


def test_a_result_and_a_deadline_are_made_as_promised():
    clock = simulator.VirtualClock()
    assert vkcocoon_probes.ProbeResult() == vkcocoon_probes.ProbeResult(ready=False, reason="", message="", at=None)
    deadline = vkcocoon_probes.Deadline(clock, 3.0)
    assert (deadline.remaining(), deadline.expired) == (3.0, False)
    clock.run(3)
    assert (deadline.remaining(), deadline.expired) == (0.0, True)


def test_errors_have_the_families_that_callers_catch():
    assert issubclass(vkcocoon_vms.VMNotFound, vkcocoon_vms.CommandError)
    assert issubclass(vkcocoon_probes.ProbeTimeout, Exception)
    error = vkcocoon_vms.CommandError(["cocoon", "vm", "list"], 1, "Error: no")
    assert (tuple(error.argv), error.returncode, error.stderr) == (("cocoon", "vm", "list"), 1, "Error: no")


def test_every_reason_of_the_vocabulary_is_there():
    assert {str(reason) for reason in vkcocoon_status.Reason} >= {
        "ProbeSucceeded", "PingSkipped", "VMGone", "WaitingForLease", "LeaseFileUnreadable", "AddressConflict",
        "PingTimeout", "PingFailed", "PortClosed", "InvalidProbePort", "NoSSHBanner", "QEMUDead", "QEMURestarting",
        "ProbeTimeout", "ProbeError", "LifecycleCreating", "LifecycleHibernating", "LifecycleHibernated",
        "LifecycleFailed", "Terminating",
    }  # fmt: skip
