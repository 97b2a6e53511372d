"""When the process says that it is ill: lost probes at exact instants, and a watchdog that gets no pulse for them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gevent.event import Event

from simulator.fake_vms import GuestSpec
from simulator.life import Life
from simulator.world import World
from tests.probe_rig import DOWN, Rig
from vkcocoon_daemon import HUB_STUCK_S
from vkcocoon_http import Check
from vkcocoon_probes import ProbeResult
from vkcocoon_systemd import Systemd

ROOT = Path(__file__).parent.parent


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.clock.close()


class TestOverdue:
    def test_a_callback_that_never_returns_makes_its_probe_overdue_after_its_bound_and_three_pauses(self, rig):
        stuck = Event()
        rig.start(rig.guest((0.05, 1e9)), on_update=lambda: rig.clock.wait(stuck, None))
        rig.clock.run(0.1)  # the second probe succeeds, and its callback waits for ever; the next is due at 5.1
        rig.clock.run(5.0 + 3.0 + 15.0)
        assert rig.manager.overdue() == []
        rig.clock.run(0.000001)
        assert rig.manager.overdue() == [("pod", pytest.approx(18.000001))]

    def test_while_not_ready_it_is_noticed_as_much_sooner_as_it_is_probed_more_often(self, rig):
        stuck = Event()
        answers = iter([DOWN, ProbeResult(False, "New", "")])
        rig.start(lambda deadline: next(answers), on_update=lambda: rig.clock.wait(stuck, None))
        rig.clock.run(0.1)  # another reason: the callback waits; the next probe is due 0.15 s later
        rig.clock.run(0.15 + 3.0 + 3 * 0.15)
        assert rig.manager.overdue() == []
        rig.clock.run(0.000001)
        assert [key for key, _ in rig.manager.overdue()] == ["pod"]

    def test_a_guest_that_uses_up_every_probe_is_late_and_not_lost(self, rig):
        def silent(deadline):
            rig.clock.sleep(60)

        rig.clock.spawn("start", rig.start, silent)
        for _ in range(600):
            rig.clock.run(0.1)
            assert rig.manager.overdue() == []

    def test_a_probe_that_is_forgotten_is_not_missed(self, rig):
        stuck = Event()
        rig.start(rig.guest((0.05, 1e9)), on_update=lambda: rig.clock.wait(stuck, None))
        rig.clock.run(60)
        rig.manager.forget("pod")
        assert rig.manager.overdue() == []

    def test_a_thousand_quiet_pods_are_never_overdue(self, rig):
        for number in range(1000):
            rig.start(rig.guest((number / 100, 1e9)), key=f"pod-{number}")
        for _ in range(60):
            rig.clock.run(1)
            assert rig.manager.overdue() == []


@pytest.fixture
def world():
    with World() as world:
        world.leases.write()
        yield world


@pytest.fixture
def channel(tmp_path):
    """The service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        yield end


def heard(channel):
    messages = []
    while True:
        try:
            messages.append(channel.recv(4096).decode())
        except BlockingIOError:
            return messages


class Monitor:
    lag = 0.0


class TestWatchdog:
    @pytest.fixture
    def pulse(self, world, channel):
        """The pulses of each of some periods of 15 s, as the unit's watchdog asks for."""
        checks = world.daemon.checks(Monitor)
        systemd = Systemd(
            world.clock,
            started=world.daemon.started.is_set,
            alive=lambda: "; ".join(trouble for check in checks if check.live and (trouble := check.ask())),
            environ={"NOTIFY_SOCKET": channel.getsockname(), "WATCHDOG_USEC": "30000000"},
        )
        systemd.start()
        world.run(1)
        heard(channel)

        def run(seconds):
            world.run(seconds)
            return heard(channel)

        return run

    def test_it_gets_its_pulse_while_probes_come_back(self, world, pulse):
        world.create_pod("web-0", guest=GuestSpec(boot_s=0.0, lease_s=0.0))
        assert ["WATCHDOG=1" in message for message in pulse(30)] == [True] * 3

    def test_a_lost_probe_withholds_it_and_the_status_names_the_pod(self, world, pulse):
        world.create_pod("web-0", guest=GuestSpec(boot_s=0.0, lease_s=0.0))
        pulse(20)
        agent = world.daemon.provider.held.find("default/web-0").agent
        stuck = Event()
        agent.probe = lambda deadline: DOWN
        agent.on_update = lambda: world.clock.wait(stuck, None)
        pulse(30)  # three failures, a flip, and its callback does not return
        messages = pulse(30)
        assert not any("WATCHDOG" in message for message in messages)
        assert messages[-1].startswith("STATUS=overdue: default/web-0 by ")
        stuck.set()
        world.run(1)
        assert all("WATCHDOG=1" in message for message in pulse(30))

    def test_a_hub_that_is_late_withholds_it(self, world, pulse, monkeypatch):
        monkeypatch.setattr(Monitor, "lag", HUB_STUCK_S + 1)
        assert pulse(10) == ["STATUS=greenlets ran 3.0 s late"]

    def test_a_cluster_that_is_away_does_not(self, world, pulse):
        world.kube.down = True
        assert all("WATCHDOG=1" in message for message in pulse(600))


def made(world, number):
    """A daemon as the world would start it, not yet started."""
    return Life(world, number).daemon


class TestChecks:
    def test_only_what_a_restart_can_heal_is_live(self, world):
        assert [(check.name, check.live) for check in world.daemon.checks()] == [
            ("hub", True),
            ("probes", True),
            ("greenlets", True),
            ("api", False),
            ("node", False),
            ("start-up", False),
            ("leases", False),
        ]

    def test_many_lost_probes_are_one_sentence_with_the_worst_first(self, world):
        overdue = [(f"default/web-{number}", 20.0 + number) for number in range(5)]
        world.daemon.provider.overdue_probes = lambda: overdue
        (check,) = [check for check in world.daemon.checks() if check.name == "probes"]
        assert check.ask() == "overdue: default/web-4 by 24 s, default/web-3 by 23 s, default/web-2 by 22 s and 2 more"

    @pytest.mark.parametrize("part", ["start_lease", "register"])
    def test_a_start_that_dies_of_a_mistake_ends_the_process(self, world, part):
        world.stop()
        daemon, calls = made(world, 2), []
        setattr(daemon.node, part, lambda: 1 / 0)
        daemon.start(lambda: calls.append(daemon.broken))
        world.run(1)
        assert calls == ["the start has failed: ZeroDivisionError('division by zero')"]
        assert [check.ask() for check in daemon.checks() if check.live and check.ask()] == calls
        daemon.close()

    def test_so_does_the_watch_over_vms(self, world):
        world.stop()
        daemon, calls = made(world, 2), []
        daemon.provider.watch_vms = lambda: 1 / 0
        daemon.start(lambda: calls.append(daemon.broken))
        world.run(1)
        assert calls == ["the watch over VMs has failed: ZeroDivisionError('division by zero')"]
        daemon.close()

    def test_a_node_that_somebody_else_runs_too_is_not_ready(self, world):
        world.daemon.node.alone.clear()
        (check,) = [check for check in world.daemon.checks() if check.name == "node"]
        assert isinstance(check, Check)
        assert check.ask() == "another process runs this node; nothing is done to pods"


SIGNALED = """
from gevent import monkey; monkey.patch_all()
import logging, os, signal, sys
import gevent.pool
import vkcocoon_logs, vkcocoon_signals
from vkcocoon_probes import SystemClock, spawn
vkcocoon_signals.DEBUG_S = 0.5
vkcocoon_logs.configure("info", "json")
clock = SystemClock()
group = gevent.pool.Group()
spawn(group, "probe default/web-0", clock.sleep, 60)
signals = vkcocoon_signals.Signals(clock)
signals.start()
talk = logging.getLogger("vkcocoon.test")
def say(word):
    talk.debug(word)
    print(word, logging.getLogger().level, file=sys.stderr)
clock.sleep(0.05)
say("before")
os.kill(os.getpid(), signal.SIGUSR1); clock.sleep(0.3); say("during")
os.kill(os.getpid(), signal.SIGUSR1); clock.sleep(0.3); say("longer")
clock.sleep(0.4); say("after")
os.kill(os.getpid(), signal.SIGUSR2); clock.sleep(0.1)
os.kill(os.getpid(), signal.SIGUSR1); clock.sleep(0.1)
signals.close(); say("closed")
group.kill()
"""


@pytest.fixture(scope="module")
def lines():
    """What a process logs that is sent signals."""
    command = [sys.executable, "-c", SIGNALED]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=30)
    return ended.stderr.splitlines()


@pytest.mark.process
class TestSignals:
    def test_usr1_logs_everything_for_a_while_and_again_makes_it_longer(self, lines):
        levels = dict(line.split() for line in lines if len(line.split()) == 2)
        assert levels == {"before": "20", "during": "10", "longer": "10", "after": "20", "closed": "20"}
        text = "\n".join(lines)
        assert [word for word in ("before", "during", "longer", "after") if f'"event": "{word}"' in text] == [
            "during",
            "longer",
        ]

    def test_usr2_says_where_each_greenlet_stands(self, lines):
        (line,) = [line for line in lines if '"greenlet": "probe default/web-0"' in line]
        assert "vkcocoon_probes.py" in line
        assert "sleep" in line

    def test_the_default_is_ten_minutes(self):
        from vkcocoon_signals import DEBUG_S

        assert DEBUG_S == 600.0
