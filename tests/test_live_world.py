"""The live world's parts: the daemon as a supervised process, orders to guests by annotation, where a world stands."""

import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulator import guest_orders, live_world
from simulator.cluster_view import pod_row
from simulator.fake_executables import LiveHost
from simulator.fake_guests import GuestError
from simulator.fake_leases import FakeCocoonNet
from simulator.guest_orders import GuestOrders, parse_order
from simulator.live_clock import LiveClock
from simulator.live_clusters import Cluster
from simulator.live_stage import LiveStage
from simulator.live_world import DaemonProcess, LiveWorld, Place
from vkcocoon_probes import SystemClock

CLOCK = SystemClock()


def until(holds, limit_s=10.0):
    end = CLOCK.monotonic() + limit_s
    while not holds():
        assert CLOCK.monotonic() < end, "never came true"
        CLOCK.sleep(0.01)


def alive(pid):
    return Path(f"/proc/{pid}").exists()


# The daemon as a process ------------------------------------------------------------------------------------------


class Supervised:
    """A DaemonProcess around a Python script, which is given `run` as the daemon is."""

    def __init__(self, tmp_path, monkeypatch, script):
        self.log = tmp_path / "vk-cocoon.log"
        self.said = []
        (tmp_path / "daemon.py").write_text(script)
        monkeypatch.setattr(live_world, "_program", lambda: [sys.executable, str(tmp_path / "daemon.py")])
        monkeypatch.setattr(live_world, "RESTART_PAUSE_S", 0.05)
        self.daemon = DaemonProcess(
            lambda: {"PATH": os.environ["PATH"]}, self.log, CLOCK, lambda text, kind: self.said.append((kind, text))
        )
        self.daemon.start()

    def lines(self):
        return self.log.read_text().splitlines()


WELL_BEHAVED = """
import signal, sys, threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
print("up with", sys.argv[1:], flush=True)
while not asked.wait(0.05): pass
print("down", flush=True)
"""


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    started = []

    def start(script):
        started.append(Supervised(tmp_path, monkeypatch, script))
        return started[-1]

    yield start
    for each in started:
        each.daemon.stop()


@pytest.mark.process
def test_the_daemon_is_run_and_stopped_with_its_grace(supervised):
    world = supervised(WELL_BEHAVED)
    until(lambda: world.lines() == ["up with ['run']"])
    world.daemon.stop()
    assert world.lines() == ["up with ['run']", "down"]
    assert world.said == []


@pytest.mark.process
def test_a_daemon_that_is_killed_is_started_again(supervised):
    world = supervised(WELL_BEHAVED)
    until(lambda: len(world.lines()) == 1)
    first = world.daemon.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: len(world.lines()) == 2)
    assert world.daemon.pid != first
    assert world.said == [("bad", "vk-cocoon was ended by signal SIGKILL; starting it again, as its unit would")]
    assert not world.daemon.given_up.is_set()


@pytest.mark.process
def test_a_daemon_that_is_killed_on_purpose_stays_down_until_it_is_started(supervised):
    world = supervised(WELL_BEHAVED)
    until(lambda: len(world.lines()) == 1)
    first = world.daemon.pid
    world.daemon.kill()
    assert not alive(first)
    assert world.daemon.pid == 0
    CLOCK.sleep(0.2)
    assert len(world.lines()) == 1
    world.daemon.start()
    until(lambda: len(world.lines()) == 2)
    world.daemon.stop()
    assert world.lines()[-1] == "down"
    assert (world.said, world.daemon.failures) == ([], [])


@pytest.mark.process
def test_a_daemon_may_be_denied_raw_sockets(tmp_path, monkeypatch):
    tries = "import socket\ntry:\n    socket.socket(2, 3, 1); print('raw')\nexcept OSError: print('none')\n"
    (tmp_path / "daemon.py").write_text(tries + "raise SystemExit(1)")
    monkeypatch.setattr(live_world, "_program", lambda: [sys.executable, str(tmp_path / "daemon.py")])
    daemon = DaemonProcess(lambda: {}, tmp_path / "log", CLOCK, lambda text, kind: None)
    daemon.raw_socket = False
    daemon.start()
    assert daemon.given_up.wait(timeout=20)
    assert (tmp_path / "log").read_text() == "none\n"


@pytest.mark.process
def test_a_daemon_that_gives_up_by_itself_is_not_started_again_and_its_last_words_are_shown(supervised):
    world = supervised("print('VK_NODE_IP: not possible'); raise SystemExit(78)")
    assert world.daemon.given_up.wait(timeout=10)
    assert world.daemon.failures == ["vk-cocoon ended by itself with exit code 78"]
    assert world.said == [("bad", "FAILED: vk-cocoon ended by itself with exit code 78\n    VK_NODE_IP: not possible")]


@pytest.mark.process
def test_a_daemon_that_always_dies_is_given_up(supervised):
    world = supervised("import os; os.kill(os.getpid(), 9)")
    assert world.daemon.given_up.wait(timeout=20)
    assert world.daemon.failures == ["vk-cocoon ended by itself with signal SIGKILL, 5 times in a row"]
    assert not alive(world.daemon.pid)


@pytest.mark.process
def test_a_daemon_that_dies_after_a_good_while_each_time_is_never_given_up(supervised, monkeypatch):
    monkeypatch.setattr(live_world, "STABLE_S", 0.0)
    world = supervised("import os; print('up', flush=True); os.kill(os.getpid(), 9)")
    until(lambda: len(world.lines()) > live_world.MOST_DEATHS + 1)
    assert not world.daemon.given_up.is_set()


@pytest.mark.process
def test_a_daemon_that_ends_badly_when_asked_to_stop_is_told(supervised):
    world = supervised(
        "import signal, time, sys\nsignal.signal(15, lambda *_: sys.exit(3))\nprint('up', flush=True)\nsignal.pause()"
    )
    until(lambda: world.lines() == ["up"])
    world.daemon.stop()
    assert world.daemon.failures == ["vk-cocoon ended with exit code 3 when asked to stop"]


@pytest.mark.process
def test_a_daemon_that_is_asked_to_stop_before_it_said_a_word_may_die_of_that(supervised):
    world = supervised("import signal\nsignal.pause()")
    world.daemon.stop()
    assert (world.daemon.failures, world.said) == ([], [])


@pytest.mark.process
def test_a_daemon_that_is_up_must_not_die_of_being_asked(supervised):
    world = supervised("import signal\nprint('up', flush=True)\nsignal.pause()")
    until(lambda: world.lines() == ["up"])
    world.daemon.stop()
    assert world.daemon.failures == ["vk-cocoon ended with signal SIGTERM when asked to stop"]


@pytest.mark.process
def test_a_daemon_that_does_not_stop_is_killed_after_its_grace(supervised, monkeypatch):
    monkeypatch.setattr(live_world, "STOP_GRACE_S", 0.2)
    world = supervised(
        "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\nwhile True: signal.pause()"
    )
    until(lambda: world.lines() == ["up"])
    world.daemon.stop()
    assert world.daemon.failures == ["vk-cocoon did not stop within 0.2 s and was killed"]


# Where it stands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bridged", "gateway"), [(True, "10.88.0.1"), (False, "127.88.0.1")])
def test_a_place_has_one_network_and_its_first_address_is_the_hosts(bridged, gateway):
    place = Place(Path("/home"), bridged)
    assert place.gateway == gateway
    assert place.network.is_loopback is not bridged


@pytest.mark.parametrize("bridged", [True, False])
def test_the_daemons_environment_is_accepted_by_its_settings_and_stays_inside_the_home(bridged, monkeypatch):
    from vkcocoon_settings import Settings

    monkeypatch.setenv("VK_NODE_NAME", "production")
    monkeypatch.setenv("KUBECONFIG", "/root/.kube/config")
    world = LiveWorld(Place(Path("/run/playground"), bridged), CLOCK, Cluster(), lambda text, kind: None)
    settings = Settings.load(world.environment(), {})
    assert settings.node_name == "playground"
    assert Settings.strangers(world.environment()) == {}
    paths = (
        settings.kubeconfig,
        settings.leases_path,
        settings.cocoon_net_control_socket,
        settings.cocoon_bin,
        settings.cocoon_macos_bin,
        settings.cocoon_root_dir,
        settings.state_dir,
    )
    assert all(path.startswith("/run/playground") for path in paths)


# Orders by annotation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("silent", {"echo": False}),
        (" speaking ", {"echo": True}),
        ("crash", {"crash": True}),
        ("renew", {"renew": True}),
        ("open 3389", {"open": 3389}),
        ("close 22", {"close": 22}),
        ("banner SSH-2.0-Other x", {"banner": "SSH-2.0-Other x"}),
        ("no-banner", {"banner": None}),
    ],
)
def test_an_order_is_a_word_or_two(words, command):
    assert parse_order(words) == command


@pytest.mark.parametrize("words", ["", "dance", "open", "open ssh", "open -1", "silent 3", "banner"])
def test_what_is_no_order_is_answered_with_those_there_are(words):
    with pytest.raises(GuestError, match="there are silent, speaking, crash, renew, no-banner, open PORT"):
        parse_order(words)


def row(order="", name="linux-0"):
    annotations = {"vm.cocoonstack.io/name": f"vk-default-{name}", "playground/guest": order}
    return pod_row({"metadata": {"name": name, "namespace": "default", "annotations": annotations}})


class Guests:
    """Records what the guests are told."""

    def __init__(self, monkeypatch):
        self.told = []
        self.said = []
        monkeypatch.setattr(guest_orders, "tell", self.tell)
        self.orders = GuestOrders(Path("/nowhere"), lambda text, kind: self.said.append((kind, text)))

    def tell(self, home, vm, command):
        if command == {"close": 1}:
            raise FileNotFoundError(2, "No such file or directory")
        self.told.append((vm, command))
        return {"ip": "10.88.0.5", "echo": False, "ports": [], "banner": None}


@pytest.fixture
def guests(monkeypatch):
    return Guests(monkeypatch)


def test_an_order_is_carried_out_once_for_each_new_value(guests):
    guests.orders.changed(row(), row("silent"))
    guests.orders.changed(row("silent"), row("silent"))
    guests.orders.changed(row("silent"), row("speaking"))
    guests.orders.changed(row("speaking"), None)
    guests.orders.changed(None, row("crash", "mac-0"))
    until(lambda: len(guests.told) == 3)
    assert guests.told == [
        ("vk-default-linux-0", {"echo": False}),
        ("vk-default-linux-0", {"echo": True}),
        ("vk-default-mac-0", {"crash": True}),
    ]


def test_an_order_is_answered_on_the_screen_whether_it_worked_or_not(guests):
    for words in ("silent", "dance", "close 1"):
        guests.orders.changed(row(), row(words))
    until(lambda: len(guests.said) == 3)
    assert [kind for kind, _ in guests.said] == ["step", "bad", "bad"]
    assert guests.said[0][1] == "default/linux-0 was told 'silent': ip \"10.88.0.5\", echo false, ports [], banner null"
    assert "there are" in guests.said[1][1]
    assert "No such file" in guests.said[2][1]


# What is seen -----------------------------------------------------------------------------------------------------


def test_a_lease_of_a_card_that_a_vm_got_while_it_ran_is_told_under_its_name(tmp_path):
    cocoon_net = FakeCocoonNet(tmp_path / "leases.json", CLOCK, rng=random.Random(0), network="127.88.0.0/24")
    world = SimpleNamespace(
        node="n",
        place=Place(tmp_path, bridged=False),
        network=SimpleNamespace(cocoon_net=cocoon_net),
        cluster=SimpleNamespace(api=None, kube=None),
    )
    stage = LiveStage(world, LiveClock(lambda owner, error: None), None)
    try:
        stage.begin()
        with LiveHost(tmp_path).storage.edit("cocoon/vms.json", dict) as records:
            card = {"mac": "0A:58:00:00:00:02"}
            records["ID"] = {"id": "ID", "config": {"name": "vk-default-web-0"}, "network_configs": [card]}
        for mac in ("0a:58:00:00:00:02", "0a:58:00:00:00:03"):
            cocoon_net.request(mac)
        assert [entry.key for entry in stage.timeline.of(actor="lease")] == ["vk-default-web-0", "0a:58:00:00:00:03"]
    finally:
        stage.close()
