"""One echo per probe over one shared socket, or none at all in degraded mode: clause 1.3, decisions I1 to I3, L1.

Here the socket is a stand-in, so that every packet is the test's own and no privilege is needed; what the real kernel
does is in test_kernel_icmp.py.
"""

import errno
import logging
import os
import socket

import gevent
import pytest
from gevent.event import Event
from network_rig import HOST, Echo, Left, checksum, icmp, ip_packet

import vkcocoon_net
from vkcocoon_net import IcmpPinger, NopPinger, PingError, PingTimeout, open_pinger

GUEST, OTHER = "10.88.0.10", "10.88.0.11"
IDENTIFIER = 0xBEEF


LONG, NOW = Left(30.0), Left(30.0, 0.0)  # NOW: time to send and then no time to wait


class Wire:
    """Stands in for the raw socket: `answers(echo)` lists the packets that arrive after an echo was sent."""

    def __init__(self):
        self._host, self._world = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._host.setblocking(False)
        self.echoes = []
        self.answers = lambda echo: [echo.reply()]
        self.refuse = None
        self.closed = False

    def sendto(self, packet, address):
        if self.refuse:
            raise self.refuse
        self.echoes.append(Echo(address[0], packet))
        for answer in self.answers(self.echoes[-1]):
            self.deliver(answer)

    def deliver(self, packet):
        self._world.send(packet)

    def recv(self, size):
        return self._host.recv(size)

    def fileno(self):
        return self._host.fileno()

    def close(self):
        self.closed = True
        self._host.close()


@pytest.fixture
def wire():
    wire = Wire()
    yield wire
    wire.close()


@pytest.fixture
def pinger(wire):
    pinger = IcmpPinger(identifier=IDENTIFIER, open_socket=lambda identifier: wire)
    yield pinger
    pinger.close()


def alive(pinger, ip=GUEST, deadline=NOW):
    try:
        return pinger.ping(ip, Left(*deadline._seconds)) >= 0
    except PingTimeout:
        return False


# What is sent and what comes back -------------------------------------------------------------------------------------


def test_an_answered_echo_gives_its_round_trip_in_seconds(pinger, wire):
    assert 0 <= pinger.ping(GUEST, LONG) < 30
    assert [echo.ip for echo in wire.echoes] == [GUEST]


def test_an_echo_is_a_well_formed_request_with_marks_of_its_own(pinger, wire):
    for _ in range(3):
        pinger.ping(GUEST, LONG)
    for echo in wire.echoes:
        assert (echo.kind, echo.code, echo.identifier, checksum(echo.packet)) == (8, 0, IDENTIFIER, 0)
        assert len(echo.payload) == len(wire.echoes[0].payload)
    assert len({echo.sequence for echo in wire.echoes}) == 3
    assert len({echo.payload for echo in wire.echoes}) == 3


def test_one_ping_sends_one_echo(pinger, wire):
    wire.answers = lambda echo: []
    assert not alive(pinger)
    assert len(wire.echoes) == 1


def test_a_round_trip_of_zero_is_a_success(pinger, monkeypatch):
    monkeypatch.setattr(vkcocoon_net.time, "monotonic", lambda: 7.0)
    assert pinger.ping(GUEST, LONG) == 0.0


def test_no_answer_is_a_timeout_that_names_the_address(pinger, wire):
    wire.answers = lambda echo: []
    with pytest.raises(PingTimeout, match=f"^no reply from {GUEST}$"):
        pinger.ping(GUEST, Left(30.0, 0.001))


@pytest.mark.parametrize("identifier", [0, 1, 0xFFFF])
def test_every_identifier_matches_zero_too(wire, identifier):
    pinger = IcmpPinger(identifier=identifier, open_socket=lambda _: wire)
    assert alive(pinger)
    assert wire.echoes[0].identifier == identifier
    pinger.close()


def test_pingers_do_not_begin_alike():
    echoes = []
    for _ in range(8):
        wire = Wire()
        pinger = IcmpPinger(open_socket=lambda _, wire=wire: wire)
        pinger.ping(GUEST, LONG)
        pinger.close()
        echoes += wire.echoes
    assert len({echo.identifier for echo in echoes}) > 1
    assert len({echo.sequence for echo in echoes}) > 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda echo: echo.reply(OTHER),
        lambda echo: echo.reply(identifier=IDENTIFIER ^ 1),
        lambda echo: echo.reply(identifier=0),
        lambda echo: echo.reply(sequence=echo.sequence + 1),
        lambda echo: echo.reply(payload=echo.payload[:-1] + bytes([echo.payload[-1] ^ 1])),
        lambda echo: echo.reply(payload=echo.payload[:-2]),
        lambda echo: echo.reply(payload=b""),
        lambda echo: echo.reply(payload=echo.payload + b"more"),
        lambda echo: echo.reply(code=1),
        lambda echo: echo.reply(wrong=0x0100),
        lambda echo: echo.reply(kind=8),
        lambda echo: echo.reply(kind=13),
        lambda echo: echo.reply(options=b"\1" * 8)[:27],
        lambda echo: echo.reply()[:27],
        lambda echo: ip_packet(GUEST, b""),
        lambda echo: ip_packet(GUEST, b"\0\0\xff"),
    ],
)
def test_a_reply_that_misses_one_mark_or_is_malformed_is_nobodys(pinger, wire, answer):
    wire.answers = lambda echo: [answer(echo)]
    assert not alive(pinger)
    wire.answers = lambda echo: [answer(echo), echo.reply()]
    assert alive(pinger)


@pytest.mark.parametrize("options", [b"", b"\1" * 4, b"\1" * 40])
def test_the_length_of_the_ip_header_is_taken_from_the_packet(pinger, wire, options):
    wire.answers = lambda echo: [echo.reply(options=options)]
    assert alive(pinger)


def test_a_reply_that_comes_after_its_ping_gave_up_answers_no_later_one(pinger, wire):
    wire.answers = lambda echo: []
    assert not alive(pinger)
    late = wire.echoes[0].reply()
    wire.answers = lambda echo: [late, late]
    assert not alive(pinger)


def test_a_late_reply_does_not_count_even_when_its_sequence_has_come_round_again(pinger, wire):
    wire.answers = lambda echo: []
    assert not alive(pinger)
    first = wire.echoes[0]
    pinger._sequence -= 1  # as after 65 536 pings
    wire.answers = lambda echo: [first.reply()]
    assert not alive(pinger)
    assert wire.echoes[-1].sequence == first.sequence


def test_each_ping_in_flight_gets_its_own_answer_in_any_order(pinger, wire):
    wire.answers = lambda echo: []
    guests = [f"10.88.0.{number}" for number in range(2, 52)]
    pings = [gevent.spawn(alive, pinger, guest, LONG) for guest in guests]  # noqa: TID251  the driver of a live test
    gevent.idle()
    dead = {GUEST, OTHER}
    for echo in reversed(wire.echoes):
        if echo.ip not in dead:
            wire.deliver(echo.reply())
    gevent.joinall([ping for ping, guest in zip(pings, guests, strict=True) if guest not in dead], timeout=30)
    assert [ping.ready() for ping in pings] == [guest not in dead for guest in guests]
    for echo in wire.echoes:
        wire.deliver(echo.reply())
    assert all(ping.get(timeout=30) for ping in pings)


def test_two_pings_of_one_address_do_not_share_an_answer(pinger, wire):
    wire.answers = lambda echo: []
    pings = [gevent.spawn(alive, pinger, GUEST, LONG) for _ in range(2)]  # noqa: TID251  the driver of a live test
    gevent.idle()
    wire.deliver(wire.echoes[1].reply())
    assert pings[1].get(timeout=30)
    assert not pings[0].ready()
    wire.deliver(wire.echoes[0].reply())
    assert pings[0].get(timeout=30)


def test_an_answer_that_lies_in_the_buffer_counts_although_the_hub_was_too_late_to_read_it(pinger, wire):
    class AnswerComesAsTimeRunsOut:
        """What arrives between the send and the end of the wait, seen by nobody until then."""

        def __init__(self):
            self.calls = 0

        def remaining(self):
            self.calls += 1
            if self.calls == 2:
                wire.deliver(wire.echoes[-1].reply())
                return 0.0
            return 30.0

    wire.answers = lambda echo: []
    pinger._watcher.stop()  # on some event loops timers go before sockets
    assert pinger.ping(GUEST, AnswerComesAsTimeRunsOut()) >= 0


def test_a_sequence_that_is_still_in_flight_is_not_used_again(pinger, wire):
    wire.answers = lambda echo: []
    first = gevent.spawn(alive, pinger, GUEST, LONG)  # noqa: TID251  the driver of a live test
    gevent.idle()
    pinger._sequence -= 1  # as after 65 536 pings
    wire.answers = lambda echo: [echo.reply()]
    assert alive(pinger, GUEST)
    assert wire.echoes[1].sequence != wire.echoes[0].sequence
    wire.deliver(wire.echoes[0].reply())
    assert first.get(timeout=30)


def test_each_send_takes_in_what_has_arrived_for_others(pinger, wire):
    """Or the answers of a burst fill the buffer while everybody is still sending."""
    wire.answers = lambda echo: []
    first = gevent.spawn(alive, pinger, GUEST, LONG)  # noqa: TID251  the driver of a live test
    gevent.idle()
    wire.answers = lambda echo: [wire.echoes[0].reply()]
    assert not alive(pinger, OTHER)
    with pytest.raises(BlockingIOError):
        wire.recv(2048)
    assert first.get(timeout=30)


def test_a_flood_of_foreign_packets_cannot_hold_the_hub(pinger, wire):
    """A drain ends after a bounded number of packets, with others still waiting in the socket."""
    read = []

    def recv(size):
        read.append(size)
        return ip_packet(OTHER, icmp(3, 1, b"\0" * 4, b"noise"))

    wire.recv, wire.answers = recv, lambda echo: []
    assert not alive(pinger)
    assert 0 < len(read) < 5000


# ICMP errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        (3, 0, "destination network unreachable"),
        (3, 1, "destination host unreachable"),
        (3, 13, "communication administratively prohibited"),
        (11, 0, "ttl expired"),
        (3, 200, "ICMP error type 3 code 200"),
        (12, 0, "ICMP error type 12 code 0"),
    ],
)
def test_an_error_about_our_echo_fails_the_ping_at_once(pinger, wire, kind, code, text):
    wire.answers = lambda echo: [echo.error(kind, code)]
    with pytest.raises(PingError, match=f"^{text}: {GUEST}$") as caught:
        pinger.ping(GUEST, LONG)
    assert not isinstance(caught.value, PingTimeout)


@pytest.mark.parametrize("length", [28, 30, 40, None])
def test_an_error_may_quote_only_the_beginning_of_our_echo(pinger, wire, length):
    wire.answers = lambda echo: [echo.error(quoted=echo.quote(length=length), source="192.0.2.1")]
    with pytest.raises(PingError, match="unreachable"):
        pinger.ping(GUEST, LONG)


def test_an_error_padded_behind_the_quotation_is_understood(pinger, wire):
    wire.answers = lambda echo: [echo.error(quoted=echo.quote() + b"\0" * 90)]
    with pytest.raises(PingError, match="unreachable"):
        pinger.ping(GUEST, LONG)


@pytest.mark.parametrize(
    "quoted",
    [
        lambda echo: echo.quote(destination=OTHER),
        lambda echo: echo.quote(protocol=17),
        lambda echo: echo.quote(identifier=IDENTIFIER ^ 1),
        lambda echo: echo.quote(sequence=echo.sequence + 1),
        lambda echo: echo.quote(payload=b"vk-cocoon another"),
        lambda echo: echo.reply(),
        lambda echo: ip_packet(HOST, echo.reply()[20:], destination=echo.ip),
        lambda echo: echo.quote(length=27),
        lambda echo: echo.quote(length=4),
        lambda echo: b"",
        lambda echo: b"\x40" + echo.quote()[1:],
        lambda echo: b"\x40" + bytes(9),
        lambda echo: b"\x4f" + echo.quote()[1:],
    ],
)
def test_an_error_that_does_not_quote_our_echo_is_ignored(pinger, wire, quoted):
    wire.answers = lambda echo: [echo.error(quoted=quoted(echo))]
    assert not alive(pinger)
    wire.answers = lambda echo: [echo.error(quoted=quoted(echo)), echo.reply()]
    assert alive(pinger)


@pytest.mark.parametrize("kind", [4, 5])
def test_advice_is_no_error(pinger, wire, kind):
    wire.answers = lambda echo: [echo.error(kind)]
    assert not alive(pinger)


def test_a_damaged_error_is_ignored(pinger, wire):
    wire.answers = lambda echo: [echo.error()[:-1] + b"\xff"]
    assert not alive(pinger)


@pytest.mark.parametrize("order", [1, -1])
def test_whoever_replied_is_alive_whatever_a_router_says_about_the_same_echo(pinger, wire, order):
    wire.answers = lambda echo: [echo.error(), echo.reply()][::order]
    assert alive(pinger)


# Sends that fail ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [errno.EPERM, errno.EACCES, errno.ENOBUFS, errno.EAGAIN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL],
)
def test_a_send_the_kernel_refuses_is_one_failed_ping_that_names_why(pinger, wire, code):
    wire.refuse = OSError(code, os.strerror(code))
    for _ in range(3):
        with pytest.raises(PingError, match=f"^cannot send to {GUEST}: {os.strerror(code)}$"):
            pinger.ping(GUEST, LONG)
    wire.refuse = None
    assert alive(pinger)
    assert not pinger.degraded


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ip", ["", "guest.local", "10.88.0", "010.88.0.1", "::1", "0.0.0.0", "224.0.0.1", "255.255.255.255"]
)
def test_what_is_no_unicast_address_is_never_sent_to_in_either_mode(pinger, wire, ip):
    for mode in (pinger, NopPinger()):
        with pytest.raises(PingError, match="is not a unicast IPv4 address"):
            mode.ping(ip, LONG)
    assert wire.echoes == []


@pytest.mark.parametrize("seconds", [0, 0.0, -1, -0.001])
def test_without_time_left_the_ping_fails_before_anything_is_sent(pinger, wire, seconds):
    with pytest.raises(PingTimeout):
        pinger.ping(GUEST, Left(seconds))
    assert wire.echoes == []


def test_no_deadline_at_all_is_refused(pinger, wire):
    with pytest.raises(AttributeError):
        pinger.ping(GUEST, None)
    assert wire.echoes == []


def test_closing_fails_the_pings_in_flight_at_once_and_all_later_ones(pinger, wire):
    wire.answers = lambda echo: []

    def failure():
        with pytest.raises(PingError) as caught:
            pinger.ping(GUEST, LONG)
        return str(caught.value)

    pings = [gevent.spawn(failure) for _ in range(3)]  # noqa: TID251  the driver of a live test
    gevent.idle()
    pinger.close()
    pinger.close()
    assert wire.closed
    assert [ping.get(timeout=30) for ping in pings] == ["the pinger was closed"] * 3
    assert failure() == "the pinger was closed"


def test_a_ping_that_is_killed_or_bounded_from_outside_leaves_nothing_behind(pinger, wire):
    wire.answers = lambda echo: []
    ping = gevent.spawn(pinger.ping, GUEST, LONG)  # noqa: TID251  the driver of a live test
    gevent.idle()
    assert len(pinger._pending) == 1
    ping.kill()
    assert len(pinger._pending) == 0
    wire.deliver(wire.echoes[0].reply())
    wire.answers = lambda echo: [echo.reply()]
    assert alive(pinger)
    assert len(pinger._pending) == 0


def test_an_idle_pinger_does_not_keep_the_event_loop_alive():
    def idle():
        """In a loop of its own: what other tests have left in ours does not matter there."""
        ours, theirs = socket.socketpair()
        pinger = IcmpPinger(identifier=IDENTIFIER, open_socket=lambda identifier: ours)
        try:
            with pytest.raises(gevent.exceptions.LoopExit):
                Event().wait()
        finally:
            pinger.close()
            theirs.close()

    gevent.get_hub().threadpool.apply(idle)


# Degraded mode --------------------------------------------------------------------------------------------------------


def test_where_the_raw_socket_is_refused_the_pinger_does_nothing_and_says_so_once(monkeypatch, caplog):
    def refused(identifier):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(vkcocoon_net, "_open_raw_socket", refused)
    caplog.set_level(logging.INFO, logger="vkcocoon_net")
    pinger = open_pinger()
    assert isinstance(pinger, NopPinger)
    assert pinger.degraded
    assert [pinger.ping(GUEST, LONG) for _ in range(3)] == [0.0] * 3
    pinger.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("icmp pinger disabled: Operation not permitted; ")


def test_where_it_is_granted_the_pinger_is_the_real_one(monkeypatch, wire, caplog):
    monkeypatch.setattr(vkcocoon_net, "_open_raw_socket", lambda identifier: wire)
    pinger = open_pinger()
    assert isinstance(pinger, IcmpPinger)
    assert not pinger.degraded
    pinger.close()
    assert caplog.records == []
