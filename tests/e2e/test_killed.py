"""The real daemon is killed in the middle of a command, which goes on without it, and started again beside that.

tests/test_killed_anywhere.py walks every step of every story in virtual time; here a few of them are real: SIGKILL, a
command line that outlives who started it, guests that are processes.
"""

import json

import pytest

from tests.e2e.api import CLOCK, create_pod, is_gone, is_ready, is_up, pod_path, uid_of, vm_of
from tests.e2e.control_plane import until

SLOW_S = 4.0
STATE = "vm.cocoonstack.io/lifecycle-state"


@pytest.fixture
def host(new_host):
    host = new_host()
    host.start()
    host.wait_until_ready()
    return host


@pytest.fixture
def pod(host, plane, pods, namespace):
    """A Ready pod of that name; its last state."""

    def make(name):
        made = create_pod(plane.admin, host.pod(name, namespace=namespace))
        return pods.first(is_up, 60, uid=uid_of(made)).object

    return make


def interrupted(host, verb, act):
    """Do it, kill the daemon in the middle of that command, and start it again at once."""
    tool = host.tools.cocoon
    before = tool.count(verb)
    tool.slow(verb, SLOW_S)
    act()
    until(lambda: tool.count(verb) > before, 30, f"{verb} begins")
    CLOCK.sleep(0.5)
    host.daemon.kill()
    host.daemon.start()


def annotate(plane, pod, **annotations):
    patch = {f"vm.cocoonstack.io/{key}": value for key, value in annotations.items()}
    plane.admin.patch(pod_path(pod), {"metadata": {"annotations": patch}})


def lifecycle(sight):
    return (sight.object["metadata"].get("annotations") or {}).get(STATE)


def leased(host):
    return {row["mac"] for row in json.loads((host.home / "leases.json").read_text()) or ()}


def macs(host):
    records = json.loads(host.tools.cocoon.run(["vm", "list", "-o", "json"]).stdout or "null") or []
    return {nic["mac"] for record in records for nic in record.get("network_configs", ())}


def test_killed_while_a_vm_is_made(host, plane, pods, namespace):
    made = []
    interrupted(host, "vm run", lambda: made.append(create_pod(plane.admin, host.pod("born", namespace=namespace))))
    pods.first(is_ready, 90, uid=uid_of(made[0]))
    assert host.vms() == {"vm-born"}
    assert leased(host) == macs(host)


def test_killed_while_a_vm_is_removed(host, plane, pods, pod):
    doomed = pod("doomed")
    interrupted(host, "vm rm", lambda: plane.admin.delete(pod_path(doomed)))
    pods.first(is_gone, 90, uid=uid_of(doomed))
    assert host.vms() == set()
    until(lambda: leased(host) == set(), 10, "no lease is left")
    latest = host.tools.cocoon.run(["snapshot", "inspect", "latest-vm-doomed"])
    assert latest.returncode == 0


def test_killed_while_a_vm_is_saved_and_again_while_it_wakes(host, plane, pods, pod):
    sleeper = pod("sleeper")
    began = CLOCK.monotonic()
    interrupted(host, "snapshot save", lambda: annotate(plane, sleeper, hibernate="true"))
    pods.first(lambda sight: lifecycle(sight) == "hibernated", 90, uid=uid_of(sleeper), since=began)
    assert (host.vms(), leased(host)) == (set(), set())
    began = CLOCK.monotonic()
    interrupted(host, "vm clone", lambda: annotate(plane, sleeper, hibernate=None))
    pods.first(is_ready, 90, uid=uid_of(sleeper), since=began)
    assert host.vms() == {"vm-sleeper"}
    assert host.tools.cocoon.count("vm run", "vm-sleeper") == 1
    until(lambda: leased(host) == macs(host), 10, "only its lease is left")


def test_killed_while_a_vm_is_started_in_place(host, pods, pod):
    phoenix = pod("phoenix")
    interrupted(host, "vm start", lambda: host.tell("vm-phoenix", crash=True))
    until(lambda: host.tools.cocoon.record("vm-phoenix")["state"] == "running", 60, "the command goes on")
    host.wait_until_started()
    # Whether anybody saw it Not Ready meanwhile depends on how long the daemon was away.
    until(lambda: is_up(pods.about(uid=uid_of(phoenix))[-1]), 60, "the pod is Ready")
    assert vm_of(pods.about(uid=uid_of(phoenix))[-1].object) == vm_of(phoenix)
    assert host.vms() == {"vm-phoenix"}
    assert host.tools.cocoon.count("vm run", "vm-phoenix") == 1
