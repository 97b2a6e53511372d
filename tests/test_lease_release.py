"""Giving a DHCP lease back over cocoon-net's control socket, after its VM is gone.

The request and its answers as that daemon defines them; 500 is asked again once; every failure is one exception. The
daemon is `FakeCocoonNet` where it behaves, and a scripted listener where it does not.
"""

import gc
import os
import random
import time

import gevent
import pytest
from gevent import socket
from gevent.server import StreamServer

from simulator.clock import VirtualClock
from simulator.fake_leases import FakeCocoonNet
from vkcocoon_net import LeaseReleaseError, release_lease

MAC = "0a:58:ac:16:00:15"


@pytest.fixture
def control(tmp_path):
    return str(tmp_path / "control.sock")


@pytest.fixture
def daemon(tmp_path, control):
    daemon = FakeCocoonNet(tmp_path / "leases.json", VirtualClock(), rng=random.Random(7))
    daemon.serve(control)
    yield daemon
    daemon.close()


@pytest.fixture
def listen(control):
    """A listener that answers connection after connection from a script of bytes or functions; it notes requests."""
    servers = []

    def start(*answers):
        requests = []

        def serve(connection, _):
            request = b""
            while b"\r\n\r\n" not in request:
                piece = connection.recv(4096)
                if not piece:
                    return
                request += piece
            requests.append(request)
            answer = answers[min(len(requests), len(answers)) - 1]
            answer(connection) if callable(answer) else connection.sendall(answer)

        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(control)
        listener.listen(8)
        servers.append(StreamServer(listener, serve))
        servers[-1].start()
        return requests

    yield start
    for server in servers:
        server.stop(timeout=0)


def answer(status, text=""):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


def test_a_lease_is_gone_from_the_file_when_the_release_returns(daemon, control, tmp_path):
    daemon.lease(MAC, "172.22.0.21")
    release_lease(MAC, control)
    assert (tmp_path / "leases.json").read_bytes() == b"null"


def test_releasing_what_nobody_leased_succeeds_too(daemon, control):
    release_lease(MAC, control)
    release_lease(MAC, control)


@pytest.mark.parametrize("spelling", ["0A-58-AC-16-00-15", "0a58.ac16.0015", "a:58:AC:16:0:15", " 0a:58:ac:16:00:15 "])
def test_the_request_is_one_delete_of_the_normalized_mac_with_no_body(listen, control, spelling):
    requests = listen(NO_CONTENT)
    release_lease(spelling, control)
    line, *headers = requests[0].decode().split("\r\n")
    assert line == f"DELETE /v1/leases/{MAC} HTTP/1.1"
    assert "Host: cocoon-net" in headers
    assert requests[0].endswith(b"\r\n\r\n")
    assert len(requests) == 1


@pytest.mark.parametrize(
    "mac", ["", "eth0", "0a:58:ac:16:00", "../../etc/passwd", "0a:58:ac:16:00:15/..", "zz:58:ac:16:00:15"]
)
def test_what_is_no_mac_is_refused_without_a_request(listen, control, mac):
    requests = listen(NO_CONTENT)
    with pytest.raises(LeaseReleaseError, match="is not a MAC address"):
        release_lease(mac, control)
    assert requests == []


def test_a_500_is_asked_again_once_at_once(daemon, control):
    daemon.lease(MAC, "172.22.0.21")
    daemon.failing_releases = 1
    release_lease(MAC, control)
    assert daemon.address(MAC) == ""


def test_a_500_that_stays_is_an_error_after_two_requests(listen, control):
    requests = listen(answer("500 Internal Server Error", "lease release failed\n"))
    with pytest.raises(LeaseReleaseError) as caught:
        release_lease(MAC, control)
    assert str(caught.value) == f"cocoon-net answered 500 to the release of {MAC}: lease release failed"
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("400 Bad Request", "invalid MAC address\n"),
        ("404 Not Found", "404 page not found\n"),
        ("200 OK", ""),
        ("503 Busy", ""),
    ],
)
def test_any_other_answer_is_an_error_with_status_and_text_and_is_not_repeated(listen, control, status, text):
    requests = listen(answer(status, text))
    with pytest.raises(LeaseReleaseError, match=f"answered {status[:3]} .*: {text.strip()}$"):
        release_lease(MAC, control)
    assert len(requests) == 1


def test_a_500_followed_by_another_answer_is_judged_by_the_second(listen, control):
    requests = listen(answer("500 Internal Server Error"), answer("404 Not Found", "gone"))
    with pytest.raises(LeaseReleaseError, match="answered 404"):
        release_lease(MAC, control)
    assert len(requests) == 2


def test_a_socket_that_is_not_there_is_named(control):
    with pytest.raises(LeaseReleaseError, match=f"{control}: No such file or directory"):
        release_lease(MAC, control)


def test_a_socket_file_left_over_by_a_dead_daemon_is_refused(control):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(control)
    listener.close()
    with pytest.raises(LeaseReleaseError, match="Connection refused"):
        release_lease(MAC, control)


@pytest.mark.parametrize(
    "said",
    [b"", b"HTTP/1.1", b"SSH-2.0-OpenSSH_9.9\r\n", b"\xff" * 70000, b"HTTP/1.1 abc No\r\n\r\n"],
    ids=["nothing", "half a line", "another protocol", "binary", "no number"],
)
def test_an_answer_that_is_no_http_is_an_error_of_ours(listen, control, said):
    requests = listen(said)
    with pytest.raises(LeaseReleaseError, match=control):
        release_lease(MAC, control)
    assert len(requests) == 1


def test_a_daemon_that_accepts_and_never_answers_is_left_at_the_limit(listen, control):
    listen(lambda connection: connection.recv(1))
    before = time.monotonic()  # noqa: TID251  the limit of a real socket
    with pytest.raises(LeaseReleaseError, match="timed out"):
        release_lease(MAC, control, limit=0.2)
    assert 0.2 <= time.monotonic() - before < 2  # noqa: TID251  the limit of a real socket


def test_a_daemon_that_drips_its_answer_does_not_hold_us_beyond_the_limit(listen, control):
    def drip(connection):
        connection.sendall(b"HTTP/1.1 204 No Content\r\n")
        while True:
            connection.sendall(b"X-Drip: 1\r\n")
            gevent.sleep(0.05)  # noqa: TID251  shorter than the limit, so that no single read runs into it

    listen(drip)
    with pytest.raises(LeaseReleaseError):
        release_lease(MAC, control, limit=0.5)


def test_a_long_error_text_is_cut(listen, control):
    listen(answer("503 Busy", "x" * 100_000))
    with pytest.raises(LeaseReleaseError) as caught:
        release_lease(MAC, control)
    assert len(str(caught.value)) < 1200


def open_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_releases_leave_no_descriptor_open(daemon, control):
    release_lease(MAC, control)
    before = open_descriptors()
    daemon.failing_releases = 21
    for turn in range(40):
        try:
            release_lease(MAC, control if turn % 2 else control + ".gone")
        except LeaseReleaseError:
            pass
    gevent.idle()
    assert open_descriptors() < before + 10  # not 60; earlier tests may still be letting go of some
