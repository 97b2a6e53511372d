"""How long the cluster waits for the truth, on a real API server, seen by an observer that is not the daemon.

What was measured is printed after the scenarios and kept in build/e2e/measured.jsonl.
"""

import os
import statistics

import pytest

from tests.e2e.api import CLOCK, condition, create_pod, is_gone, is_ready, pod_path, reason, uid_of
from tests.e2e.control_plane import until
from tests.e2e.crowd import Crowd

PODS_MEASURED, ROUNDS = 60, 3
CROWD = 1000
CHURNED = int(os.environ.get("E2E_CHURN", "1000"))
CHURN_AT_ONCE = 50

SPEED = pytest.mark.alone  # what is measured is the daemon, on a machine that has time


@pytest.fixture
def crowded(new_host, plane, namespace):
    """Makes a host that takes many pods, not started yet, and its crowd."""
    crowds = []

    def make(**settings):
        host = new_host()
        host.settings = {"VK_NODE_PODS": "2000", "VK_LOG_LEVEL": "info", **settings}
        crowds.append(Crowd(plane, host, namespace))
        return host, crowds[-1]

    yield make
    for crowd in crowds:
        crowd.close()


def against(aim, holds):
    """How a reading stands to its aim, in words: an aim is for a machine that has time, so a slow one fails nothing."""
    return f" (aim: {aim}; {'met' if holds else 'missed'} at a load of {os.getloadavg()[0]:.1f})"


def newest(pods, made):
    """The last state of each pod, by number."""
    last = {sight.uid: sight for sight in pods.sights}
    return {number: last[uid_of(pod)] for number, pod in made.items() if uid_of(pod) in last}


@SPEED
def test_P1_ready_is_seen_soon_after_the_first_successful_probe(crowded, pods, measured):
    """Best of three rounds: what is measured is the daemon, and a neighbor on the machine may spoil a round."""
    host, crowd = crowded()
    host.start()
    host.wait_until_ready()
    for turn in range(ROUNDS):
        latencies = sorted(latencies_of(crowd, pods, range(turn * PODS_MEASURED, (turn + 1) * PODS_MEASURED)))
        median, worst = statistics.median(latencies), latencies[int(len(latencies) * 0.99) - 1]
        met = median < 25 and worst < 100
        told = f"median {median:.1f} ms, p99 {worst:.1f} ms" + against("25 ms, 100 ms", met)
        measured("first successful probe to Ready seen", told)
        if met:
            break


def latencies_of(crowd, pods, numbers):
    """Milliseconds from the first dial that was accepted to Ready as the observer saw it, one pod after the other."""
    made = crowd.create(numbers)
    until(lambda: all(reason(s) == "PortClosed" for s in newest(pods, made).values()), 60, "all are published")
    CLOCK.sleep(3)
    for number in made:
        crowd.open(number)
        CLOCK.sleep(0.15)
    seen = {number: pods.first(is_ready, uid=uid_of(pod)).at for number, pod in made.items()}
    return [(seen[number] - crowd.met[number]) * 1000 for number in made]


@SPEED
def test_P23_250_adopted_pods_of_which_5_live_are_all_told_within_a_probe_bound_of_the_start(crowded, pods, measured):
    host, crowd = crowded()
    host.start()
    host.wait_until_ready()
    host.daemon.stop()
    crowd.silence()
    made = crowd.create(range(245), silent=True) | crowd.create(range(245, 250))
    for number in range(245, 250):
        crowd.open(number)
    extra = create_pod(crowd._plane.admin, host.pod("meanwhile", namespace=made[0]["metadata"]["namespace"]))
    host.daemon.start()
    began = host.daemon.started_at

    def told():
        states = newest(pods, made)
        return all(condition(sight.object) for sight in states.values()) and len(states) == 250

    until(told, 60, "all have a status")
    took = max(pods.first(lambda s: bool(condition(s.object)), uid=uid_of(pod)).at for pod in made.values()) - began
    live = max(pods.first(is_ready, uid=uid_of(made[number])).at for number in range(245, 250)) - began
    beside = pods.first(is_ready, 30, uid=uid_of(extra)).at - began
    all_told = f"5 Ready after {live:.1f} s, all told after {took:.1f} s of process start"
    measured("250 adopted, 5 alive", all_told + against("5 s and a probe's bound of 3 s", max(live, took) < 5 + 3))
    measured("a create among them", f"Ready after {beside:.1f} s of process start")
    assert sum(is_ready(sight) for sight in newest(pods, made).values()) == 5


@SPEED
def test_P28_a_thousand_guests_that_answer_at_once_are_all_seen_ready(crowded, pods, measured):
    """Best of two rounds, for the same reason."""
    host, crowd = crowded()
    host.start()
    host.wait_until_ready()
    made = crowd.create(range(CROWD))
    for _ in range(2):
        until(lambda: all(reason(s) == "PortClosed" for s in newest(pods, made).values()), 180, "all are closed")
        CLOCK.sleep(5)
        opened = CLOCK.monotonic()
        crowd.open_all()
        until(lambda: sum(is_ready(s) for s in newest(pods, made).values()) == CROWD, 60, "all are Ready")
        took = max(sight.at for sight in newest(pods, made).values()) - opened
        measured(f"{CROWD} flips at once", f"all seen after {took:.1f} s" + against("10 s", took < 10))
        if took < 10:
            break
        crowd.close()
    memory = host.daemon.memory() / 2**20
    measured(f"the daemon with {CROWD} Ready pods", f"{memory:.0f} MiB resident")


@pytest.mark.real("fewer pods are looked at in test_node.py")
def test_N14_250_ready_pods_at_rest_cost_no_writes(crowded, plane, pods, measured):
    host, crowd = crowded()
    host.start()
    host.wait_until_ready()
    crowd.open_all()
    made = crowd.create(range(250))
    until(lambda: sum(is_ready(s) for s in newest(pods, made).values()) == 250, 60, "all are Ready")
    CLOCK.sleep(5)
    node = f"/api/v1/nodes/{host.name}"
    lease = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{host.name}"
    began, before = CLOCK.monotonic(), plane.admin.get(node)["metadata"]["resourceVersion"]
    renewals = set()
    while CLOCK.monotonic() - began < 40:
        renewals.add(plane.admin.get(lease)["spec"]["renewTime"])
        CLOCK.sleep(0.5)
    ours = {uid_of(pod) for pod in made.values()}
    written = [sight for sight in pods.sights if sight.at > began and sight.uid in ours]
    measured("250 Ready pods for 40 s", f"{len(written)} pod writes, {len(renewals) - 1} renewals of the lease")
    assert written == []
    assert len(renewals) - 1 <= 5
    assert plane.admin.get(node)["metadata"]["resourceVersion"] == before


@SPEED
@pytest.mark.timeout(300 + CHURNED / 2)
def test_P28_memory_is_flat_over_pods_that_come_and_go(crowded, plane, pods, measured):
    host, crowd = crowded()
    host.start()
    host.wait_until_ready()
    crowd.open_all()

    def churn(count):
        for _ in range(count // CHURN_AT_ONCE):
            made = crowd.create(range(CHURN_AT_ONCE))
            for pod in made.values():
                pods.first(is_ready, 60, uid=uid_of(pod))
                plane.admin.delete(pod_path(pod))
            for pod in made.values():
                pods.first(is_gone, 60, uid=uid_of(pod))
            pods.sights.clear()

    churn(500)
    resident, began = [host.daemon.memory() / 2**20], CLOCK.monotonic()
    for _ in range(0, CHURNED, 1000):
        churn(min(CHURNED, 1000))
        resident.append(host.daemon.memory() / 2**20)
    rate = CHURNED / (CLOCK.monotonic() - began)
    each = ", ".join(f"{mib:.1f}" for mib in resident)
    what = f"{rate:.0f} a second; resident before, and after each 1,000: {each} MiB"
    measured(f"{CHURNED} pods made and deleted", what)
    assert resident[-1] - resident[0] < 8
