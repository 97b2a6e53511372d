"""A bare accept on the declared probe port, and sshd's own words on port 22: clause 1.3 and the macOS paragraph, O3.

Real connections over loopback. Servers follow a script; a slow server waits for the test, not for time.
"""

import errno
import gc
import os
import time
from contextlib import suppress

import gevent
import pytest
from gevent import socket
from gevent.event import Event
from gevent.server import StreamServer
from network_rig import Left, Within

import vkcocoon_net
from vkcocoon_net import ssh_banner, tcp_accepts

HERE = "127.0.0.11"
BANNER = "SSH-2.0-OpenSSH_9.9"


def silent(connection):
    connection.recv(1)  # until the other side hangs up


class Server(StreamServer):
    """Serves each connection by `script(connection)`; `heard` is what the dialers sent, `open` who is still there."""

    def __init__(self, script=silent):
        super().__init__((HERE, 0), self._serve)
        self.script = script
        self.heard = b""
        self.dials = self.open = 0

    def _serve(self, connection, _):
        self.dials += 1
        self.open += 1
        with suppress(OSError):  # the dialer may be gone at any point
            self.script(connection)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1024):
                self.heard += piece
        connection.close()
        self.open -= 1


@pytest.fixture
def serve():
    servers = []

    def start(script=silent):
        servers.append(Server(script))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop(timeout=0)


def saying(*pieces):
    def script(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            gevent.idle()  # the reader gets its turn before the next piece

    return script


def banner_of(server, deadline=None):
    return ssh_banner(HERE, deadline or Within(20), server.server_port)


def closed_port():
    """A port that was free a moment ago and is kept from being handed out as somebody's own end."""
    holder = socket.socket()
    holder.bind((HERE, 0))
    return holder, holder.getsockname()[1]


# Accept ---------------------------------------------------------------------------------------------------------------


def test_a_port_that_accepts_is_enough_and_hears_nothing(serve):
    server = serve(silent)
    tcp_accepts(HERE, server.server_port, Within(20))
    gevent.idle()
    assert (server.dials, server.heard) == (1, b"")


def test_a_listener_that_never_accepts_by_itself_is_enough_too():
    """The kernel completes the handshake: a bare accept says no more than that, which is why macOS wants a banner."""
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.listen(1)
        tcp_accepts(HERE, listener.getsockname()[1], Within(20))


def test_a_closed_port_is_refused_at_once():
    holder, port = closed_port()
    with holder, pytest.raises(ConnectionRefusedError):
        tcp_accepts(HERE, port, Within(20))


@pytest.mark.parametrize("ip", ["", "localhost", "guest.local", "010.88.0.1", "::1", "0.0.0.0", "224.0.0.1", "10.88.0"])
def test_names_and_what_is_no_unicast_address_are_refused_without_asking_anybody(ip, monkeypatch):
    monkeypatch.setattr(vkcocoon_net.gevent.socket, "socket", lambda *_: pytest.fail("a socket was opened"))
    for dial in (lambda: tcp_accepts(ip, 22, Within(20)), lambda: ssh_banner(ip, Within(20))):
        with pytest.raises(OSError, match="is not a unicast IPv4 address"):
            dial()


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port):
    with pytest.raises(OSError, match=f"{port} is not a TCP port"):
        tcp_accepts(HERE, port, Within(20))


@pytest.mark.parametrize("seconds", [0, 0.0, -1, -0.0001])
def test_without_time_left_a_dial_fails_before_it_begins(serve, seconds):
    server = serve(saying(BANNER.encode() + b"\n"))
    for dial in (tcp_accepts, lambda ip, port, deadline: ssh_banner(ip, deadline, port)):
        with pytest.raises(TimeoutError):
            dial(HERE, server.server_port, Left(seconds))
    gevent.idle()
    assert server.dials == 0


def test_no_deadline_at_all_is_refused(serve):
    server = serve()
    for dial in (tcp_accepts, lambda ip, port, deadline: ssh_banner(ip, deadline, port)):
        with pytest.raises(AttributeError):
            dial(HERE, server.server_port, None)


# Banner ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces",
    [
        [b"SSH-2.0-OpenSSH_9.9\r\n"],
        [b"SSH-2.0-OpenSSH_9.9\n"],
        [bytes([byte]) for byte in b"SSH-2.0-OpenSSH_9.9\r\n"],
        [b"SS", b"H-2.0-OpenSSH_9.9\r", b"\n"],
        [b"Welcome.\r\nNo access without a badge.\r\n\r\nSSH-2.0-OpenSSH_9.9\r\n"],
        [b"line one\nline ", b"two\nSSH-2.0-Open", b"SSH_9.9\nkex follows"],
        [b"\x00\xff\xfe binary \r\n", b"SSH-2.0-OpenSSH_9.9\r\n"],
        [b"XSSH-2.0-no\r\n SSH-2.0-no\r\nssh-2.0-no\r\n", b"SSH-2.0-OpenSSH_9.9\r\n"],
        [b"x" * 8000 + b"\n", b"SSH-2.0-OpenSSH_9.9\r\n"],
        [b"SSH-2.0-OpenSSH_9.9"],  # and then the end: whoever hangs up has no line end to send any more
    ],
    ids=lambda pieces: repr(b"|".join(pieces))[2:40],
)
def test_the_banner_is_found_in_pieces_and_after_other_lines(serve, pieces):
    assert banner_of(serve(saying(*pieces))) == BANNER


def test_nothing_is_sent_and_one_connection_is_made(serve):
    server = serve(saying(BANNER.encode() + b"\r\n"))
    assert banner_of(server) == BANNER
    gevent.idle()
    assert (server.dials, server.heard) == (1, b"")


def test_a_banner_of_unprintable_bytes_stays_printable(serve):
    assert banner_of(serve(saying(b"SSH-2.0-\xff\n"))) == "SSH-2.0-\\xff"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"", "hung up without a word"),
        (b"Exceeded MaxStartups\r\n", "said 'Exceeded MaxStartups'"),
        (b"Not allowed at this time\r\n", "said 'Not allowed at this time'"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "said 'HTTP/1.1 400 Bad Request'"),
        (b"ssh-2.0-lower\r\n", "said 'ssh-2.0-lower'"),
        (b"XSSH-2.0-x\r\n", "said 'XSSH-2.0-x'"),
        (b" SSH-2.0-x\r\n", "said ' SSH-2.0-x'"),
        (b"SSH", "said 'SSH'"),
        (b"SSH 2.0\r\n", "said 'SSH 2.0'"),
        (b"\x1b[31mred\r\n", r"said '\x1b[31mred'"),
        (b"y" * 500 + b"\n", "said '" + "y" * 80 + "'"),
    ],
)
def test_who_says_something_else_and_hangs_up_is_no_sshd(serve, said, problem):
    with pytest.raises(ConnectionAbortedError) as caught:
        banner_of(serve(saying(said)))
    assert caught.value.strerror == problem


def test_a_talker_without_end_is_left_after_eight_kibibytes(serve):
    def chatter(connection):
        while True:
            connection.sendall(b"lorem ipsum\r\n" * 100)

    with pytest.raises(ConnectionAbortedError, match="lorem ipsum"):
        banner_of(serve(chatter))


def test_a_banner_behind_eight_kibibytes_of_other_lines_does_not_count(serve):
    with pytest.raises(ConnectionAbortedError):
        banner_of(serve(saying(b"x" * 8192 + b"\nSSH-2.0-OpenSSH_9.9\r\n")))


def test_a_reset_is_a_failure_with_its_own_name(serve):
    def reset(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    with pytest.raises(ConnectionResetError):
        banner_of(serve(reset))


def test_a_port_that_accepts_and_stays_silent_is_a_timeout_at_the_bound(serve):
    server = serve(silent)
    before = time.monotonic()  # noqa: TID251  the bound of a real socket
    with pytest.raises(TimeoutError):
        banner_of(server, Within(0.2))
    assert 0.2 <= time.monotonic() - before < 2  # noqa: TID251  the bound of a real socket


def test_each_read_gets_only_what_is_left_of_the_one_bound(serve):
    """A server that drips one byte whenever a per-read limit might run out would hold a probe for ever."""
    server = serve(saying(*[b"x"] * 5000))
    with pytest.raises(TimeoutError):
        banner_of(server, Left(20, 20, 20, 20, 0))


def test_who_trickles_is_not_woken_up_for_each_byte(serve, monkeypatch):
    """A guest that sends line ends one by one would otherwise have a third of a core."""
    asked, sent, breaths = Event(), Event(), []

    def trickle(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for _ in range(100):
                connection.sendall(b"\n")
            sent.set()
            asked.wait()
            asked.clear()

    def breath(seconds):
        breaths.append(seconds)
        sent.wait()
        sent.clear()
        asked.set()

    monkeypatch.setattr(gevent, "sleep", breath)
    with pytest.raises(ConnectionAbortedError, match="said ''"):
        banner_of(serve(trickle))
    assert 8192 // 200 <= len(breaths) <= 8192 // 50
    assert set(breaths) == {0.01}


def test_a_banner_that_comes_just_within_the_bound_counts(serve):
    word = Event()

    def late(connection):
        word.wait()
        connection.sendall(BANNER.encode() + b"\r\n")

    server = serve(late)
    asking = gevent.spawn(banner_of, server)  # noqa: TID251  the driver of a live test
    while not server.dials:
        gevent.idle()
    assert not asking.ready()
    word.set()
    assert asking.get(timeout=20) == BANNER


# What is left behind --------------------------------------------------------------------------------------------------


def open_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_many_dials_of_every_kind_leave_no_descriptor_open(serve):
    speaking, mute, rude = serve(saying(BANNER.encode() + b"\n")), serve(silent), serve(saying(b"go away\n"))
    holder, closed = closed_port()
    dials = [
        lambda: tcp_accepts(HERE, mute.server_port, Within(20)),
        lambda: tcp_accepts(HERE, closed, Within(20)),
        lambda: banner_of(speaking),
        lambda: banner_of(rude),
        lambda: banner_of(mute, Left(20, 0.001)),
        lambda: banner_of(mute, Left(20, 0)),
    ]
    with holder:
        before = open_descriptors()
        for _ in range(50):
            for dial in dials:
                try:
                    dial()
                except OSError as error:
                    assert error.errno not in (errno.EMFILE, errno.EADDRINUSE)
        while any(server.open for server in (speaking, mute, rude)):
            gevent.idle()
        assert open_descriptors() < before + 10  # not 300; earlier tests may still be letting go of some


def test_a_dial_that_is_killed_closes_its_connection(serve):
    hung_up = Event()

    def notice(connection):
        connection.recv(1)
        hung_up.set()

    server = serve(notice)
    asking = gevent.spawn(banner_of, server)  # noqa: TID251  the driver of a live test
    while not server.dials:
        gevent.idle()
    asking.kill()
    assert hung_up.wait(20)
