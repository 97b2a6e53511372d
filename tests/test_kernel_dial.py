"""Dials on a real kernel: clause 1.3 and the macOS paragraph, where routing, firewalls and dead guests decide.

Each dial ends within its bound with the kernel's own reason, and closes what it opened.
"""

import os
import socket
import time
from contextlib import ExitStack

import gevent
import pytest
from network_rig import Firewall, Within, in_own_network, ip, lay_net_without_neighbors, lay_silent_net, set_kernel

from vkcocoon_net import ssh_banner, tcp_accepts

HERE = "127.0.0.11"


def accepts(address, port, seconds):
    tcp_accepts(address, port, Within(seconds))


def speaks(address, port, seconds):
    ssh_banner(address, Within(seconds), port)


@pytest.fixture(params=[accepts, speaks])
def dial(request):
    return request.param


@in_own_network
def test_a_dial_to_a_dead_guest_ends_at_its_bound(dial):
    lay_silent_net()
    before = time.monotonic()  # noqa: TID251  the bound of a real dial
    with pytest.raises(TimeoutError):
        dial("198.51.100.55", 3389, 0.5)
    assert 0.5 <= time.monotonic() - before < 1.0  # noqa: TID251  the bound of a real dial


@in_own_network
def test_two_hundred_dead_guests_are_dialed_side_by_side_within_one_bound(dial):
    lay_silent_net()
    before = time.monotonic()  # noqa: TID251  the bound of real dials

    def failure(number):
        with pytest.raises(TimeoutError):
            dial(f"198.51.100.{number}", 3389, 0.5)

    gevent.joinall([gevent.spawn(failure, number) for number in range(2, 202)], raise_error=True)  # noqa: TID251  a driver
    assert time.monotonic() - before < 2  # noqa: TID251  the bound of real dials


@in_own_network
def test_whatever_routing_does_is_an_error_of_the_system_at_once(dial):
    ip("link add dev0 type bridge")
    ip("link set dev0 up")
    for kind in ("blackhole", "prohibit", "unreachable"):
        ip(f"route add {kind} 198.51.100.{len(kind)}")
    for kind, problem in (
        ("blackhole", "Invalid argument"),
        ("prohibit", "Permission denied"),
        ("unreachable", "No route to host"),
        ("none", "Network is unreachable"),
    ):
        with pytest.raises(OSError, match=problem):
            dial(f"198.51.100.{len(kind)}", 3389, 20)


@in_own_network
def test_a_guest_without_a_hardware_address_is_unreachable_as_soon_as_the_kernel_knows(dial):
    lay_net_without_neighbors()
    set_kernel("net/ipv4/neigh/lonely0/retrans_time_ms", 50)
    with pytest.raises(OSError, match="No route to host"):
        dial("192.0.2.5", 3389, 20)


@in_own_network
def test_a_firewall_that_drops_what_we_send_is_an_error_or_the_bound(dial):
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.listen()
        accepts(HERE, listener.getsockname()[1], 20)
        with Firewall(), pytest.raises(OSError):
            dial(HERE, listener.getsockname()[1], 0.3)
        accepts(HERE, listener.getsockname()[1], 20)


@in_own_network
def test_a_listener_whose_queue_is_full_does_not_accept_within_the_bound():
    with ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket())
        listener.bind((HERE, 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = open_sockets.enter_context(socket.create_connection((HERE, port)))
        assert waiting.getpeername() == (HERE, port)
        with pytest.raises(TimeoutError):
            accepts(HERE, port, 0.3)
        listener.accept()[0].close()
        accepts(HERE, port, 20)


@in_own_network
def test_a_dial_that_meets_itself_is_a_closed_port(dial):
    """The kernel may choose the very port we dial for our own end; TCP then connects the socket to itself."""
    set_kernel("net/ipv4/ip_local_port_range", "40000 40000")
    with pytest.raises(ConnectionRefusedError):
        dial("127.0.0.1", 40000, 20)


@in_own_network
def test_only_the_address_of_the_guest_is_dialed_whoever_else_has_that_port(dial):
    with socket.socket() as forwarder:
        forwarder.bind((HERE, 0))
        forwarder.listen()
        with pytest.raises(ConnectionRefusedError):
            dial("127.0.0.12", forwarder.getsockname()[1], 20)


@in_own_network
def test_many_dials_to_dead_refused_and_mute_guests_leave_no_descriptor_open(dial):
    lay_silent_net()
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as mute:
        mute.bind((HERE, 0))
        mute.listen(64)
        targets = [("198.51.100.55", 3389), (HERE, 1), mute.getsockname()]

        def dial_each():
            for address, port in targets:
                try:
                    dial(address, port, 0.05)
                except OSError:
                    pass

        for _ in range(4):
            gevent.joinall([gevent.spawn(dial_each) for _ in range(50)], raise_error=True)  # noqa: TID251  the driver
    assert len(os.listdir("/proc/self/fd")) < before + 10  # not 600


@in_own_network
def test_a_dial_that_is_killed_while_it_connects_closes_its_socket(dial):
    lay_silent_net()
    before = len(os.listdir("/proc/self/fd"))
    dials = [gevent.spawn(dial, "198.51.100.55", 3389, 20) for _ in range(100)]  # noqa: TID251  the driver
    gevent.idle()
    assert len(os.listdir("/proc/self/fd")) > before + 50  # earlier tests may still be letting go of some
    gevent.killall(dials)
    assert len(os.listdir("/proc/self/fd")) < before + 10


@in_own_network
def test_dials_at_the_pace_of_a_dense_node_never_run_out_of_ports():
    """Our end closes first and lingers for a minute, but each guest is its own address with its own range of ports."""
    set_kernel("net/ipv4/ip_local_port_range", "40000 40099")
    with ExitStack() as listeners:
        for number in range(2, 22):
            listener = listeners.enter_context(socket.socket())
            listener.bind((f"127.0.3.{number}", 2222))
            listener.listen(128)
        for _ in range(50):
            for number in range(2, 22):
                accepts(f"127.0.3.{number}", 2222, 20)
