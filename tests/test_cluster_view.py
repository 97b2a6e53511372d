"""What the playground shows: taken from API objects alone, one sentence a change, a table only where there is one."""

import io
import os
import pty
import re
from datetime import UTC, datetime, timedelta

import pytest

from simulator.clock import VirtualClock
from simulator.cluster_view import ClusterView, describe_change, describe_event, pod_row
from simulator.fake_kube import FakeKube
from simulator.table import PlainLines, age, open_display
from vkcocoon_kube import ApiError

PODS = "/api/v1/namespaces/default/pods"
NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def pod(
    name="linux-0", *, ready="", reason="", message="", ip="", lifecycle="", phase="Running", restarts=0, **metadata
):
    annotations = {"cocoonset.cocoonstack.io/os": "linux", "vm.cocoonstack.io/id": "vm-7"}
    if lifecycle:
        annotations["vm.cocoonstack.io/lifecycle-state"] = lifecycle
    conditions = []
    if ready:
        since = "2026-01-01T12:00:00Z"
        conditions = [
            {"type": "Ready", "status": ready, "reason": reason, "message": message, "lastTransitionTime": since},
            {"type": "cocoonstack.io/ProbeReady", "status": ready, "lastTransitionTime": since},
        ]
    return {
        "metadata": {"name": name, "namespace": "default", "uid": "u1", "annotations": annotations, **metadata},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": conditions,
            "containerStatuses": [{"name": "agent", "restartCount": restarts}],
        },
    }


READY = pod_row(pod(ready="True", reason="ProbeSucceeded", ip="10.88.0.5", lifecycle="ready"))
BARE = pod_row(pod(phase="Pending"))


# Rows and sentences -----------------------------------------------------------------------------------------------


def test_a_row_is_made_of_the_pods_own_words():
    assert (READY.key, READY.os, READY.ip, READY.vm_id) == ("default/linux-0", "linux", "10.88.0.5", "vm-7")
    assert (READY.ready, READY.probe, READY.reason, READY.lifecycle) == (True, True, "ProbeSucceeded", "ready")
    assert READY.since == NOON


def test_a_pod_nobody_reported_on_is_not_ready_and_says_nothing():
    assert (BARE.ready, BARE.probe, BARE.reason, BARE.since, BARE.ip) == (False, False, "", None, "")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, pod(phase="Pending"), "is there, Pending"),
        (pod(phase="Pending"), None, "is gone"),
        (
            pod(phase="Pending"),
            pod(ready="False", reason="LifecycleCreating"),
            "Not Ready: LifecycleCreating, phase Running",
        ),
        (
            pod(ready="False", reason="WaitingForLease"),
            pod(ready="False", reason="PingTimeout", message="no echo from 10.88.0.5", ip="10.88.0.5"),
            "still Not Ready: PingTimeout (no echo from 10.88.0.5), address 10.88.0.5",
        ),
        (
            pod(ready="False", reason="PingTimeout", ip="10.88.0.5"),
            pod(ready="True", reason="ProbeSucceeded", message="echo", ip="10.88.0.5", lifecycle="ready"),
            "Ready: ProbeSucceeded, lifecycle ready",
        ),
        (
            pod(ready="True", reason="ProbeSucceeded", ip="10.88.0.5"),
            pod(ready="False", reason="WaitingForLease", message="waiting for DHCP lease"),
            "Not Ready: WaitingForLease (waiting for DHCP lease), address 10.88.0.5 withdrawn",
        ),
        (pod(ready="True", restarts=0), pod(ready="True", restarts=1), "restarts 1"),
        (pod(ready="True"), pod(ready="True", deletionTimestamp="2026-01-01T12:00:01Z"), "being deleted"),
        (pod(ready="True"), pod(ready="True", labels={"a": "b"}), ""),
    ],
)
def test_a_change_is_told_in_one_sentence(before, after, said):
    assert describe_change(before and pod_row(before), after and pod_row(after)) == said


def test_an_event_is_told_with_what_it_is_about_and_how_often():
    event = {
        "involvedObject": {"namespace": "default", "name": "mac-0"},
        "reason": "GuestRestarted",
        "message": "again",
    }
    assert describe_event(event) == "default/mac-0 Event GuestRestarted: again"
    assert describe_event({**event, "count": 3}) == "default/mac-0 Event GuestRestarted: again (x3)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (192, "3m12s"), (600, "10m"), (10799, "179m"), (10800, "3h"), (-5, "0s")],
)
def test_ages_are_written_as_kubectl_writes_them(seconds, text):
    assert age(NOON, NOON + timedelta(seconds=seconds)) == text


def test_what_never_was_has_no_age():
    assert age(None, NOON) == "-"


# Following the API ------------------------------------------------------------------------------------------------


class Cluster:
    """A FakeKube with a view on it, in virtual time."""

    def __init__(self):
        self.clock = VirtualClock()
        self.kube = FakeKube(self.clock)
        self.seen = []
        self.view = ClusterView(
            self.kube,
            self.clock,
            on_change=lambda before, after: self.seen.append((self.clock.elapsed(), describe_change(before, after))),
            on_event=lambda event: self.seen.append((self.clock.elapsed(), describe_event(event))),
            on_node=lambda name, text: self.seen.append((self.clock.elapsed(), f"{name} {text}")),
        )
        self.view.start()

    def create(self, name="linux-0"):
        container = {"name": "agent", "image": "placeholder"}
        body = {"metadata": {"name": name}, "spec": {"containers": [container], "nodeName": "playground"}}
        return self.kube.admin.create(PODS, body)

    def report(self, status, name="linux-0"):
        self.kube.admin.patch(f"{PODS}/{name}/status", {"status": status}, kind="strategic")


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    made.view.close()
    made.clock.close()


def test_changes_are_seen_at_the_instant_they_are_stored(cluster):
    ready = {"conditions": [{"type": "Ready", "status": "True", "reason": "ProbeSucceeded"}], "podIP": "10.88.0.5"}
    cluster.clock.at(1.0, cluster.create)
    cluster.clock.at(2.5, cluster.report, ready)
    cluster.clock.at(4.0, cluster.kube.admin.delete, f"{PODS}/linux-0")
    cluster.clock.at(5.0, lambda: cluster.kube.admin.delete(f"{PODS}/linux-0", grace_seconds=0))
    cluster.clock.run(6.0)
    assert cluster.seen == [
        (1.0, "is there, Pending"),
        (2.5, "Ready: ProbeSucceeded, address 10.88.0.5"),
        (4.0, "being deleted"),
        (5.0, "is gone"),
    ]


def test_what_was_there_before_the_view_is_seen_at_its_start(cluster):
    cluster.create()
    cluster.clock.run(0.0)
    assert cluster.seen == [(0.0, "is there, Pending")]


def test_a_pod_that_vanished_while_nobody_watched_is_told_gone(cluster):
    cluster.create()
    cluster.clock.run(1.0)
    cluster.kube.down = True
    cluster.clock.run(1.0)
    cluster.kube.admin.delete(f"{PODS}/linux-0", grace_seconds=0)
    cluster.kube.expire_history()
    cluster.kube.down = False
    cluster.clock.run(1.0)
    assert cluster.seen == [(0.0, "is there, Pending"), (2.5, "is gone")]
    assert cluster.view.rows() == []


def test_lost_history_and_cut_watches_lose_no_change_and_tell_none_twice(cluster):
    cluster.create()
    cluster.clock.run(1.0)
    cluster.kube.cut_watches(mid_line=True)
    cluster.kube.expire_history()
    cluster.create("linux-1")
    cluster.clock.run(1.0)
    assert [text for _, text in cluster.seen] == ["is there, Pending"] * 2


def test_a_refused_list_is_tried_again(cluster):
    cluster.kube.fail("LIST /api/v1/pods", ApiError(500, "InternalError", "boom"), times=2)
    cluster.create()
    cluster.clock.run(2.0)
    assert cluster.seen == [(1.0, "is there, Pending")]


def test_nodes_and_events_are_seen(cluster):
    cluster.kube.admin.create("/api/v1/nodes", {"metadata": {"name": "n1"}})
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster.clock.at(
        1.0, lambda: cluster.kube.admin.patch("/api/v1/nodes/n1/status", {"status": status}, kind="strategic")
    )
    about = {"kind": "Pod", "namespace": "default", "name": "mac-0", "uid": "u"}
    event = {
        "metadata": {"name": "e1"},
        "involvedObject": about,
        "reason": "Healthy",
        "message": "ok",
        "type": "Normal",
    }
    cluster.clock.at(2.0, cluster.kube.admin.create, "/api/v1/namespaces/default/events", event)
    cluster.clock.run(3.0)
    assert cluster.seen == [(0.0, "n1 Not Ready"), (1.0, "n1 Ready"), (2.0, "default/mac-0 Event Healthy: ok")]
    assert cluster.view.nodes == {"n1": "Ready"}


def test_waiting_for_the_cluster_ends_with_the_change_or_with_the_limit(cluster):
    waits = []

    def wait(limit):
        waits.append(
            (cluster.view.wait_until(lambda: "default/linux-0" in cluster.view.pods, limit), cluster.clock.elapsed())
        )

    cluster.clock.at(3.0, cluster.create)
    cluster.clock.spawn("too short", wait, 2.0)
    cluster.clock.spawn("long enough", wait, 5.0)
    cluster.clock.run(10.0)
    assert waits == [(False, 2.0), (True, 3.0)]


# Displays ---------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_plain_lines_at_once():
    out = io.StringIO()
    display = open_display(out)
    assert isinstance(display, PlainLines)
    display.say("linux-0 Ready", "good")
    display.show([READY], NOON, "node n1 Ready")
    assert out.getvalue() == "linux-0 Ready\n"


class Terminal:
    """A pseudo-terminal: what a program writes to `stream` can be read back."""

    def __init__(self):
        self.ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w")

    def text(self):
        self.stream.close()
        written = b""
        try:
            while chunk := os.read(self.ours, 65536):
                written += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(self.ours)
        return written.decode()


def drawn(**environment):
    terminal = Terminal()
    display = open_display(terminal.stream, footer="Ctrl-C ends it")
    display.say("linux-0 was created", "step")
    display.show([READY], NOON + timedelta(seconds=7), "node n1 Ready")
    display.close()
    return terminal.text()


@pytest.fixture
def wide_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")


def test_a_terminal_gets_a_table_with_the_reason_and_its_age(wide_terminal):
    text = drawn()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"POD +OS +IP +PROBE +LIFECYCLE +READY +SINCE +RESTARTS +REASON", shown)
    assert re.search(r"default/linux-0 +linux +10\.88\.0\.5 +True +ready +True +7s +0 +ProbeSucceeded", shown)
    assert "node n1 Ready" in shown
    assert shown.index("linux-0 was created") < shown.index("POD") < shown.index("Ctrl-C ends it")
    assert "\x1b[1;32m" in text or "\x1b[1;38" in text or "\x1b[32m" in text


def test_a_narrow_terminal_keeps_room_for_the_reason(wide_terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn())
    assert re.search(r"default/linux-0 +10\.88\.0\.5 +True +ready +True +7s +ProbeSucceeded", shown)


def test_no_color_means_no_color(wide_terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", drawn())


@pytest.mark.parametrize("why", ["dumb terminal", "no rich", "not wanted"])
def test_without_a_table_a_terminal_gets_lines_too(wide_terminal, monkeypatch, why):
    if why == "dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    elif why == "no rich":
        monkeypatch.setitem(__import__("sys").modules, "rich.live", None)
    terminal = Terminal()
    display = open_display(terminal.stream, table=why != "not wanted")
    display.say("linux-0 Ready")
    assert terminal.text() == "linux-0 Ready\r\n"
