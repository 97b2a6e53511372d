"""What systemd is told: ready, status, pulse and stop, and nothing when nobody listens."""

import os
import socket

import pytest

from simulator.clock import VirtualClock
from vkcocoon_systemd import STATUS_PERIOD, Systemd


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def channel(tmp_path):
    """The service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        yield end


def heard(channel) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(channel.recv(4096).decode())
        except BlockingIOError:
            return messages


def environment(channel, **more) -> dict[str, str]:
    return {"NOTIFY_SOCKET": channel.getsockname(), **more}


def systemd_of(clock, channel, *, started=lambda: True, environ=(), **answers) -> Systemd:
    return Systemd(clock, started=started, environ=environment(channel, **dict(environ)), **answers)


class TestMessages:
    def test_ready_is_said_once_when_started_and_says_how_it_goes(self, clock, channel):
        started = []
        systemd_of(clock, channel, started=lambda: bool(started), describe=lambda: "12 pods, 11 ready").start()
        clock.run(60.5)
        assert heard(channel) == []
        started.append(True)
        clock.run(0.5)
        assert heard(channel) == ["READY=1\nSTATUS=12 pods, 11 ready"]
        clock.run(60)
        assert not any("READY" in message for message in heard(channel))

    def test_stopping_is_said(self, clock, channel):
        systemd_of(clock, channel).stopping()
        assert heard(channel) == ["STOPPING=1"]

    def test_a_line_break_in_a_text_cannot_become_an_assignment(self, clock, channel):
        systemd_of(clock, channel, describe=lambda: "fine\nMAINPID=1").start()
        clock.run(0)
        assert heard(channel) == ["READY=1\nSTATUS=fine MAINPID=1"]

    def test_a_start_that_is_broken_off_never_says_ready(self, clock, channel):
        systemd = systemd_of(clock, channel, started=lambda: False)
        systemd.start()
        clock.run(3)
        clock.spawn("close", systemd.close)
        clock.run(10)
        assert heard(channel) == []

    def test_an_abstract_name_is_understood(self, clock):
        name = f"vk-cocoon-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.bind("\0" + name)
            end.setblocking(False)
            Systemd(clock, started=lambda: True, environ={"NOTIFY_SOCKET": f"@{name}"}).stopping()
            assert heard(end) == ["STOPPING=1"]

    @pytest.mark.parametrize("address", ["", "vsock:2:1", "/no/such/socket"])
    def test_without_a_listener_nothing_happens_and_nothing_fails(self, clock, address):
        systemd = Systemd(clock, started=lambda: True, environ={"NOTIFY_SOCKET": address})
        systemd.start()
        clock.run(30)
        systemd.stopping()

    def test_a_listener_that_does_not_read_holds_nobody_up(self, clock, channel):
        systemd = systemd_of(clock, channel)
        for _ in range(5000):
            systemd.stopping()
        assert 0 < len(heard(channel)) < 5000


class TestWatchdog:
    def pulses(self, clock, channel, seconds, **environ) -> list[float]:
        """Instants of the pulses within so many seconds."""
        instants = []

        def describe():
            instants.append(clock.elapsed())
            return ""

        systemd_of(clock, channel, describe=describe, environ=environ).start()
        clock.run(seconds)
        first, *rest = heard(channel)
        assert first == "READY=1\nSTATUS="
        assert instants.pop(0) == 0.0
        assert rest == ["WATCHDOG=1\nSTATUS="] * len(instants)
        return instants

    def test_it_is_sent_twice_as_often_as_it_must(self, clock, channel):
        assert self.pulses(clock, channel, 20, WATCHDOG_USEC="10000000") == [5.0, 10.0, 15.0, 20.0]

    def test_it_is_meant_for_the_process_whose_id_it_names(self, clock, channel):
        environ = {"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
        assert self.pulses(clock, channel, 10, **environ) == [5.0, 10.0]

    @pytest.mark.parametrize(
        "environ",
        [{}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "0"}],
    )
    def test_without_a_watchdog_of_ours_only_the_status_is_renewed(self, clock, channel, environ):
        assert self.pulses(clock, channel, 2 * STATUS_PERIOD, **environ) == [STATUS_PERIOD, 2 * STATUS_PERIOD]

    def test_a_process_that_is_not_well_sends_no_pulse_and_says_why(self, clock, channel):
        trouble = [""]
        systemd_of(
            clock,
            channel,
            alive=lambda: trouble[0],
            describe=lambda: "1 pod",
            environ={"WATCHDOG_USEC": "2000000"},
        ).start()
        clock.run(1)
        trouble[0] = "default/web-0 is 60 s overdue"
        clock.run(2)
        trouble[0] = ""
        clock.run(1)
        assert heard(channel) == [
            "READY=1\nSTATUS=1 pod",
            "WATCHDOG=1\nSTATUS=1 pod",
            "STATUS=default/web-0 is 60 s overdue",
            "STATUS=default/web-0 is 60 s overdue",
            "WATCHDOG=1\nSTATUS=1 pod",
        ]

    def test_after_close_there_is_no_pulse(self, clock, channel):
        systemd = systemd_of(clock, channel, environ={"WATCHDOG_USEC": "2000000"})
        systemd.start()
        clock.run(1)
        clock.spawn("close", systemd.close)
        clock.run(10)
        assert heard(channel) == ["READY=1\nSTATUS=", "WATCHDOG=1\nSTATUS="]

    def test_without_a_listener_no_greenlet_is_started(self, clock):
        systemd = Systemd(clock, started=lambda: True, environ={"WATCHDOG_USEC": "2000000"})
        systemd.start()
        assert len(systemd._group) == 0
