"""The pinger on a real kernel: clause 1.3, the degraded mode, decisions I1 and I2.

A dead guest stays dead whoever else answers, a living one is not lost in a burst, whatever routing and firewalls do is
one failed ping, and only the start decides between the real pinger and none.
"""

import logging
import os
import re
import socket
import struct
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import gevent
import ping3
import pytest
from network_rig import (
    ROOT,
    Cable,
    Firewall,
    Within,
    flood,
    icmp,
    in_own_network,
    ip,
    lay_net_without_neighbors,
    lay_silent_net,
    set_kernel,
)

from vkcocoon_net import IcmpPinger, PingError, PingTimeout, open_pinger

SO_SNDBUFFORCE = 32
LIVING, DEAD = "127.0.0.11", "198.51.100.55"


def alive(pinger, address, seconds=10.0):
    try:
        return pinger.ping(address, Within(seconds)) >= 0
    except PingTimeout:
        return False


def at_once(function, *argument_lists):
    """Call `function` with each list of arguments, all at the same time; their results in that order."""
    calls = [gevent.spawn(function, *arguments) for arguments in argument_lists]  # noqa: TID251  the driver of the test
    gevent.joinall(calls, raise_error=True)
    return [call.value for call in calls]


def raw_sockets():
    return len(Path("/proc/thread-self/net/raw").read_text().splitlines()) - 1


def datagram_icmp_sockets():
    return len(Path("/proc/thread-self/net/icmp").read_text().splitlines()) - 1


# Dead among living ----------------------------------------------------------------------------------------------------


@in_own_network
def test_dead_guests_stay_dead_while_living_ones_answer_beside_them():
    lay_silent_net()
    with closing(IcmpPinger()) as pinger:
        dead = [(pinger, f"198.51.100.{number}", 0.5) for number in range(2, 102)]
        living = [(pinger, f"127.0.0.{number}") for number in range(2, 102)]
        pairs = [guest for pair in zip(dead, living, strict=True) for guest in pair]
        assert at_once(alive, *pairs) == [False, True] * 100


@in_own_network
def test_ping3_itself_takes_dead_guests_for_living_ones_and_ours_does_not():
    """The experiment behind the rule that `ping3.ping` is never called. When it fails, ping3 has learned to look."""
    lay_silent_net()
    dead = [f"198.51.100.{number}" for number in range(2, 52)]

    def ping_a_living_guest_all_the_time(ping):
        while True:
            ping(LIVING)
            gevent.sleep(0.001)  # noqa: TID251  real packets need real time

    def dead_ones_reported_alive(ping):
        noise = gevent.spawn(ping_a_living_guest_all_the_time, ping)  # noqa: TID251  the driver of the test
        reports = at_once(lambda address: ping(address) not in (None, False), *([address] for address in dead))
        noise.kill()
        return sum(reports)

    assert dead_ones_reported_alive(lambda address: ping3.ping(address, timeout=1)) > 0  # noqa: TID251  its fault is shown
    with closing(IcmpPinger()) as pinger:
        assert dead_ones_reported_alive(lambda address: alive(pinger, address, 1.0) or None) == 0


@in_own_network
def test_a_flood_of_echoes_with_our_own_identifier_brings_no_dead_guest_to_life():
    lay_silent_net()
    with closing(IcmpPinger(identifier=77)) as pinger, flood(LIVING, 77):
        for _ in range(3):
            assert at_once(alive, *((pinger, f"198.51.100.{n}", 0.3) for n in range(2, 52))) == [False] * 50
        assert at_once(alive, *((pinger, f"127.0.0.{n}") for n in range(2, 52))) == [True] * 50


@in_own_network
def test_the_bound_holds_while_another_program_floods_the_host():
    lay_silent_net()
    with closing(IcmpPinger()) as pinger, flood(LIVING, 4711):
        for _ in range(5):
            before = time.monotonic()  # noqa: TID251  the bound of a real ping
            assert not alive(pinger, DEAD, 0.5)
            assert 0.5 <= time.monotonic() - before < 1.0  # noqa: TID251  the bound of a real ping
            assert alive(pinger, LIVING)


@in_own_network
def test_replies_to_other_programs_are_dropped_by_the_kernel_and_never_wake_us(monkeypatch):
    seen = []
    with closing(IcmpPinger(identifier=78)) as pinger:
        monkeypatch.setattr(pinger, "_dispatch", lambda packet: seen.append(packet[24:26]))
        with closing(IcmpPinger(identifier=79)) as other:
            assert all(at_once(alive, *((other, LIVING) for _ in range(100))))
        with closing(IcmpPinger(identifier=78)) as twin:
            assert alive(twin, LIVING)
        gevent.idle()
        pinger._drain()
    assert seen == [b"\0\x4e"]


@in_own_network
def test_two_pingers_with_one_identifier_do_not_believe_each_others_replies():
    lay_silent_net()
    with closing(IcmpPinger(identifier=1)) as one, closing(IcmpPinger(identifier=1)) as two:
        two._sequence = one._sequence
        assert at_once(alive, (one, DEAD, 0.3), (two, LIVING)) == [False, True]


@in_own_network
@pytest.mark.parametrize("identifier", [0, 0xFFFF])
def test_the_extreme_identifiers_work(identifier):
    with closing(IcmpPinger(identifier=identifier)) as pinger:
        assert alive(pinger, LIVING)


@in_own_network
def test_a_guest_that_stops_answering_is_dead_and_one_that_starts_again_is_alive():
    with closing(IcmpPinger()) as pinger:
        for silent in (0, 1, 0, 1):
            set_kernel("net/ipv4/icmp_echo_ignore_all", silent)
            assert alive(pinger, LIVING, 0.2 if silent else 10) is not bool(silent)


# Bursts ---------------------------------------------------------------------------------------------------------------


@in_own_network
@pytest.mark.parametrize("buffer", [None, 65536])
def test_of_a_thousand_pings_at_once_none_is_lost_even_in_a_small_receive_buffer(buffer):
    guests = [f"127.0.{number // 250}.{number % 250 + 1}" for number in range(1000)]
    with closing(open_pinger()) as pinger:
        assert not pinger.degraded
        if buffer:
            pinger._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        for _ in range(3):
            assert at_once(alive, *((pinger, guest) for guest in guests)) == [True] * 1000


@in_own_network
def test_two_thousand_replies_that_come_while_the_hub_is_busy_are_kept(monkeypatch):
    kept = []
    with closing(IcmpPinger(identifier=78)) as pinger:
        try:
            pinger._socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4 << 20)  # may we? The other one is the test
        except PermissionError:
            pytest.skip("only the host's root may have more than net.core.rmem_max, which may be small")
        monkeypatch.setattr(pinger, "_dispatch", kept.append)
        for sequence in range(2000):  # nobody else gets a turn
            pinger._socket.sendto(icmp(8, 0, struct.pack("!HH", 78, sequence)), (LIVING, 0))
        for _ in range(10):
            pinger._drain()
    assert len(kept) == 2000


@in_own_network
def test_pings_share_one_raw_socket_and_never_use_a_datagram_one():
    lay_silent_net()
    with closing(IcmpPinger()) as pinger:
        pings = [gevent.spawn(alive, pinger, f"198.51.100.{n}", 0.5) for n in range(2, 202)]  # noqa: TID251  the driver
        gevent.idle()
        assert (raw_sockets(), datagram_icmp_sockets()) == (1, 0)
        gevent.joinall(pings)
    assert raw_sockets() == 0


@in_own_network
def test_hundreds_of_switched_off_guests_do_not_use_up_the_send_buffer_of_the_living():
    """An echo stays in the socket's send buffer while ARP asks for its neighbor, three seconds for one that is off."""
    lay_net_without_neighbors()
    with closing(IcmpPinger()) as pinger:
        dead = [gevent.spawn(alive, pinger, f"192.0.2.{2 + n % 250}", 2.0) for n in range(750)]  # noqa: TID251  the driver
        gevent.idle()
        assert at_once(alive, *((pinger, f"127.0.0.{n}") for n in range(2, 52))) == [True] * 50
        gevent.killall(dead)


@in_own_network
def test_a_send_buffer_that_is_full_after_all_is_one_failed_ping():
    lay_net_without_neighbors()
    set_kernel("net/ipv4/neigh/lonely0/retrans_time_ms", 100)  # ARP gives up, and the buffer is free, after 0.3 s
    with closing(IcmpPinger()) as pinger:
        pinger._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least the kernel gives
        dead = [gevent.spawn(alive, pinger, f"192.0.2.{n}") for n in range(2, 102)]  # noqa: TID251  the driver
        gevent.idle()
        with pytest.raises(PingError, match=f"^cannot send to {LIVING}: No buffer space available$"):
            pinger.ping(LIVING, Within(10))
        gevent.joinall(dead)
        assert alive(pinger, LIVING)


@in_own_network
def test_an_echo_of_a_large_burst_costs_about_as_much_as_one_of_a_small_burst():
    """What an echo costs in all, `python -m tests.bench cpu` says."""
    with closing(IcmpPinger()) as pinger:

        def cost(burst):
            before = time.process_time()
            assert all(at_once(alive, *((pinger, f"127.0.1.{n % 250 + 1}") for n in range(burst))))
            return (time.process_time() - before) / burst

        small, large = (min(cost(burst) for _ in range(3)) for burst in (200, 2000))
    assert large < 3 * small


# What the network does ------------------------------------------------------------------------------------------------


@in_own_network
def test_whatever_routing_does_to_an_echo_is_one_failed_ping_and_never_changes_the_mode():
    ip("link add dev0 type bridge")
    ip("link set dev0 up")
    for kind in ("blackhole", "prohibit", "unreachable", "throw"):
        ip(f"route add {kind} 198.51.100.{len(kind)}")
    with closing(open_pinger()) as pinger:
        for _ in range(3):
            for kind, problem in (
                ("blackhole", "Invalid argument"),
                ("prohibit", "Permission denied"),
                ("unreachable", "No route to host"),
                ("throw", "Network is unreachable"),
                ("no route at all", "Network is unreachable"),
            ):
                address = f"198.51.100.{len(kind)}"
                with pytest.raises(PingError, match=f"^cannot send to {address}: {problem}$"):
                    pinger.ping(address, Within(10))
            assert alive(pinger, LIVING)
            assert not pinger.degraded


@in_own_network
def test_the_broadcast_address_of_a_guest_network_is_one_failed_ping():
    lay_silent_net()
    with closing(IcmpPinger()) as pinger:
        with pytest.raises(PingError, match="Permission denied"):
            pinger.ping("198.51.100.255", Within(10))
        assert alive(pinger, LIVING)


@in_own_network
def test_a_firewall_that_drops_our_echoes_is_a_failed_ping_until_it_lets_them_through():
    with closing(open_pinger()) as pinger:
        assert alive(pinger, LIVING)
        with Firewall():
            for _ in range(3):
                with pytest.raises(PingError, match=f"^cannot send to {LIVING}: Operation not permitted$"):
                    pinger.ping(LIVING, Within(10))
        assert alive(pinger, LIVING)
        assert not pinger.degraded


@in_own_network
def test_an_error_that_a_router_sends_about_our_echo_ends_the_ping_at_once():
    with closing(Cable()) as cable, closing(IcmpPinger()) as pinger:
        cable.answers = lambda echo: [echo.error(11, 0, source="10.88.0.99")]
        with pytest.raises(PingError, match=r"^ttl expired: 10\.88\.0\.5$"):
            pinger.ping("10.88.0.5", Within(20))


@in_own_network
def test_only_the_true_reply_of_the_guest_that_was_asked_counts():
    with closing(Cable()) as cable, closing(IcmpPinger()) as pinger:
        foreign = {
            "another guest": lambda echo: echo.reply("10.88.0.6"),
            "another identifier": lambda echo: echo.reply(identifier=echo.identifier ^ 1),
            "another sequence": lambda echo: echo.reply(sequence=echo.sequence + 1),
            "another nonce": lambda echo: echo.reply(payload=b"vk-cocoon another"),
            "a wrong checksum": lambda echo: echo.reply(wrong=1),
            "another code": lambda echo: echo.reply(code=9),
            "no payload": lambda echo: echo.reply(payload=b""),
            "three bytes": lambda echo: echo.reply()[:2] + b"\0\x17" + echo.reply()[4:23],
            "an error about nobody": lambda echo: echo.error(quoted=b"\x45\0\0\0"),
            "an error about another": lambda echo: echo.error(quoted=echo.quote(destination="10.88.0.6")),
            "our own request": lambda echo: echo.reply(kind=8),
        }
        for name, answer in foreign.items():
            cable.answers = lambda echo, answer=answer: [answer(echo)]
            assert not alive(pinger, "10.88.0.5", 0.1), name
        cable.answers = lambda echo: [*(answer(echo) for answer in foreign.values()), echo.reply()]
        assert alive(pinger, "10.88.0.5")
        cable.answers = lambda echo: [echo.reply(options=b"\1\1\1\0")]
        assert alive(pinger, "10.88.0.5")


@in_own_network
def test_a_reply_after_the_bound_counts_neither_for_its_ping_nor_for_the_next():
    with closing(Cable()) as cable, closing(IcmpPinger()) as pinger:
        cable.answers = lambda echo: []
        assert not alive(pinger, "10.88.0.5", 0.1)
        cable.answers = lambda echo: [cable.echoes[0].reply()]
        assert not alive(pinger, "10.88.0.5", 0.1)
        cable.answers = lambda echo: [echo.reply(), echo.reply(), echo.reply()]
        assert alive(pinger, "10.88.0.5")
        cable.answers = lambda echo: []
        assert not alive(pinger, "10.88.0.5", 0.1)


@in_own_network
def test_a_host_unreachable_that_the_kernel_itself_reports_ends_the_ping_before_its_bound():
    lay_net_without_neighbors()
    set_kernel("net/ipv4/neigh/lonely0/retrans_time_ms", 50)
    unreachable = pytest.raises(PingError, match=r"^destination host unreachable: 192\.0\.2\.5$")
    with closing(IcmpPinger()) as pinger, unreachable:
        pinger.ping("192.0.2.5", Within(20))


# The one decision at the start ----------------------------------------------------------------------------------------

WITHOUT_RAW_SOCKETS = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_NET_RAW = 24, 13
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_NET_RAW, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

PING_A_DEAD_GUEST = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from vkcocoon_net import PingError, open_pinger
class Long:
    def remaining(self):
        return 30.0
pinger = open_pinger()
print(type(pinger).__name__, pinger.degraded)
for address in ("198.51.100.55", "198.51.100.56", "guest.local"):
    try:
        print(address, pinger.ping(address, Long()))
    except PingError as error:
        print(error)
print(open("/proc/self/net/raw").read().count("\\n"), open("/proc/self/net/icmp").read().count("\\n"))
pinger.close()
"""


@in_own_network
def test_without_the_right_to_raw_sockets_the_process_is_degraded_says_so_once_and_uses_no_other_kind():
    lay_silent_net()
    set_kernel("net/ipv4/ping_group_range", "0 0")  # a datagram ICMP socket would be granted
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAW_SOCKETS, "-c", PING_A_DEAD_GUEST],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "NopPinger True",
        "198.51.100.55 0.0",
        "198.51.100.56 0.0",
        "'guest.local' is not a unicast IPv4 address",
        "1 1",  # the tables' headings: no socket of either kind
    ]
    (warning,) = done.stderr.splitlines()
    assert re.match(r"WARNING icmp pinger disabled: Operation not permitted; .*CAP_NET_RAW", warning)


@in_own_network
def test_with_the_right_the_pinger_is_real_and_nothing_is_said(caplog):
    caplog.set_level(logging.DEBUG, logger="vkcocoon_net")
    before = len(os.listdir("/proc/self/fd"))
    pinger = open_pinger()
    assert isinstance(pinger, IcmpPinger)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    pinger.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert caplog.records == []
