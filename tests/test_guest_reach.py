"""Clause 1, third check: the declared port instead of an echo, else one echo; for macOS a bare accept or sshd's banner.

Also degraded mode: only the echo is replaced, ports and banners stay real (O1, I3, T1).
"""

import pytest

from simulator.clock import VirtualClock
from vkcocoon_guests import Reach, ReadyAddresses
from vkcocoon_net import PingError, PingTimeout
from vkcocoon_probes import Deadline
from vkcocoon_status import Reason

IP = "10.88.0.5"
PORT = "vm.cocoonstack.io/probe-port"


class Network:
    """Answers as told and remembers what was asked."""

    def __init__(self, degraded=False, error=None):
        self.degraded = degraded
        self.error = error
        self.asked = []

    def _answer(self, *asked):
        self.asked.append(asked)
        if self.error:
            raise self.error

    def ping(self, ip, deadline):
        self._answer("ping", ip, round(deadline.remaining(), 6))
        return 0.0

    def tcp(self, ip, port, deadline):
        self._answer("tcp", ip, port)

    def banner(self, ip, deadline):
        self._answer("banner", ip)
        return "SSH-2.0-x"

    def reach(self):
        return Reach(self, self.tcp, self.banner)


@pytest.fixture
def deadline():
    return Deadline(VirtualClock(), 3.0, patience=0.25)


def test_without_a_declared_port_a_guest_gets_one_echo_that_waits_only_for_the_patience(deadline):
    network = Network()
    result = network.reach().guest(IP, {}, deadline)
    assert network.asked == [("ping", IP, 0.25)]
    assert (result.ready, result.reason, result.message) == (True, Reason.PROBE_SUCCEEDED, f"icmp: {IP} replies")


def test_a_round_trip_of_zero_is_a_success(deadline):
    assert Network().reach().guest(IP, {}, deadline).ready


def test_with_a_declared_port_no_echo_is_sent(deadline):
    network = Network()
    assert network.reach().guest(IP, {PORT: " 3389 "}, deadline).ready
    assert network.asked == [("tcp", IP, 3389)]


def test_macos_without_a_port_must_show_a_banner_and_with_one_only_accept(deadline):
    network = Network()
    assert network.reach().macos(IP, {}, deadline).ready
    assert network.reach().macos(IP, {PORT: "5900"}, deadline).ready
    assert network.asked == [("banner", IP), ("tcp", IP, 5900)]


@pytest.mark.parametrize("text", ["0", "65536", "-1", "ssh", "8_0", "٣٠"])
@pytest.mark.parametrize("kind", ["guest", "macos"])
def test_a_port_that_is_none_asks_nobody_and_names_the_value(deadline, kind, text):
    network = Network(degraded=True)
    result = getattr(network.reach(), kind)(IP, {PORT: text}, deadline)
    assert (result.ready, result.reason, network.asked) == (False, Reason.INVALID_PROBE_PORT, [])
    assert repr(text) in result.message


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (PingTimeout("no reply"), Reason.PING_TIMEOUT, f"icmp: no reply from {IP}"),
        (PingError("send: Network is unreachable"), Reason.PING_FAILED, "icmp: send: Network is unreachable"),
    ],
)
def test_every_shape_of_a_lost_echo_is_one_failed_probe(deadline, error, reason, message):
    result = Network(error=error).reach().guest(IP, {}, deadline)
    assert (result.ready, result.reason, result.message) == (False, reason, message)


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), TimeoutError("timed out")])
def test_a_port_that_does_not_accept_and_a_missing_banner_are_failed_probes(deadline, error):
    network = Network(error=error)
    text = error.strerror or "timed out"
    closed = network.reach().guest(IP, {PORT: "80"}, deadline)
    assert (closed.ready, closed.reason, closed.message) == (False, Reason.PORT_CLOSED, f"tcp {IP}:80: {text}")
    silent = network.reach().macos(IP, {}, deadline)
    assert (silent.ready, silent.reason, silent.message) == (
        False,
        Reason.NO_SSH_BANNER,
        f"no ssh banner at {IP}:22: {text}",
    )


def test_degraded_mode_replaces_only_the_echo(deadline):
    network = Network(degraded=True)
    assert network.reach().guest(IP, {}, deadline).reason == Reason.PING_SKIPPED
    assert network.asked == []
    network.error = ConnectionRefusedError(111, "Connection refused")
    assert not network.reach().guest(IP, {PORT: "80"}, deadline).ready
    assert not network.reach().macos(IP, {}, deadline).ready


def test_messages_carry_no_round_trip_time_so_that_equal_states_compare_equal(deadline):
    reach = Network().reach()
    assert reach.guest(IP, {}, deadline) == reach.guest(IP, {}, deadline)


def test_an_address_has_one_holder_until_it_is_released():
    addresses = ReadyAddresses()
    addresses.claim("a", IP)
    assert (addresses.other("b", IP), addresses.other("a", IP)) == ("a", None)
    addresses.claim("a", "10.88.0.6")
    assert addresses.other("b", IP) == "a"
    assert addresses.release("a", keep="10.88.0.6") == {IP}
    assert (addresses.other("b", IP), addresses.other("b", "10.88.0.6")) == (None, "a")
    assert addresses.release("a") == {"10.88.0.6"}
    assert addresses.release("a") == set()
