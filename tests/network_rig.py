"""Deadlines, ICMP packets made by hand, and a piece of network made for one test.

The packet half knows nothing of ping3 or of our own code, so that a mistake there is not repeated here.

`@in_own_network` runs a test inside a fresh network namespace: this thread's as root, else by running the test once
more in a user namespace where it is root. Only where the kernel refuses both, it is skipped, and says so. Nothing that
happens in there reaches the host's network, and everything is gone afterwards.
"""

import ctypes
import functools
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import gevent
import pytest

HOST = "10.88.0.1"
ETH_P_IP = 0x0800
ROOT = Path(__file__).resolve().parent.parent

# Deadlines ------------------------------------------------------------------------------------------------------------


class Within:
    """A real deadline."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds  # noqa: TID251  real sockets need real time

    def remaining(self):
        return self._end - time.monotonic()  # noqa: TID251  real sockets need real time


class Left:
    """A deadline that says what it is told to."""

    def __init__(self, *seconds):
        self._seconds = list(seconds)

    def remaining(self):
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


# Packets --------------------------------------------------------------------------------------------------------------


def checksum(data):
    """RFC 1071."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def icmp(kind, code, rest, payload=b"", *, wrong=0):
    """An ICMP message; `wrong` spoils its checksum."""
    body = struct.pack("!BBH", kind, code, 0) + rest + payload
    body += b"\0" * (len(body) % 2)
    return body[:2] + struct.pack("!H", checksum(body) ^ wrong) + body[4:]


def ip_packet(source, payload, *, destination=HOST, options=b"", protocol=1):
    """An IPv4 packet."""
    size = 20 + len(options)
    head = struct.pack("!BBHHHBBH", 0x40 + size // 4, 0, size + len(payload), 0, 0, 64, protocol, 0)
    head += socket.inet_aton(source) + socket.inet_aton(destination) + options
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


class Echo:
    """An echo request that was sent to `ip`, taken apart; and the answers one can give to it."""

    def __init__(self, ip, packet):
        self.ip, self.packet = ip, packet
        self.kind, self.code, _, self.identifier, self.sequence = struct.unpack("!BBHHH", packet[:8])
        self.payload = packet[8:]

    def reply(self, source=None, *, identifier=None, sequence=None, payload=None, options=b"", kind=0, code=0, wrong=0):
        """The reply of the guest, or one that differs from it in what is given."""
        marks = (
            self.identifier if identifier is None else identifier,
            self.sequence if sequence is None else sequence & 0xFFFF,
        )
        payload = self.payload if payload is None else payload
        message = icmp(kind, code, struct.pack("!HH", *marks), payload, wrong=wrong)
        return ip_packet(source or self.ip, message, options=options)

    def error(self, kind=3, code=1, *, quoted=None, source=HOST):
        """An ICMP error about this echo, or about what is `quoted` instead."""
        return ip_packet(source, icmp(kind, code, b"\0" * 4, self.quote() if quoted is None else quoted))

    def quote(self, *, destination=None, protocol=1, length=None, **changes):
        """What a router quotes of this echo, or of one that differs from it in what is given."""
        original = self.reply(kind=8, **changes)[20:] if changes else self.packet
        return ip_packet(HOST, original, destination=destination or self.ip, protocol=protocol)[:length]


# Namespaces -----------------------------------------------------------------------------------------------------------

CLONE_NEWNET = 0x40000000
INSIDE = "VK_COCOON_TEST_INSIDE_USER_NAMESPACE"

libc = ctypes.CDLL(None, use_errno=True)


def in_own_network(test):
    """Run `test` in a network namespace of its own, where only `lo` exists and is up. Fixtures still run outside."""

    @pytest.mark.kernel
    @functools.wraps(test)
    def run(*args, **kwargs):
        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            if libc.unshare(CLONE_NEWNET) != 0:
                _run_as_root_of_a_user_namespace(os.strerror(ctypes.get_errno()))
                return
            try:
                ip("link set lo up")
                test(*args, **kwargs)
            finally:
                libc.setns(outside, CLONE_NEWNET)
        finally:
            os.close(outside)

    return run


def _run_as_root_of_a_user_namespace(refusal):
    assert INSIDE not in os.environ, f"root of a user namespace may not make a network namespace: {refusal}"
    enter = ["unshare", "--user", "--map-root-user", "--net", "--"]
    trial = subprocess.run([*enter, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"the kernel refuses a network namespace ({refusal}) and a user namespace ({trial.stderr.strip()})")
    test = os.environ["PYTEST_CURRENT_TEST"].rsplit(" (", 1)[0]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--timeout=50",
        test,
    ]
    done = subprocess.run(
        [*enter, *command], cwd=ROOT, env={**os.environ, INSIDE: "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"in a user namespace:\n{done.stdout}{done.stderr}", pytrace=False)


def ip(command):
    """iproute2, in the namespace of the caller."""
    try:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("the ip command of iproute2 is not installed")
    except subprocess.CalledProcessError as error:
        pytest.fail(f"ip {command}: {error.stderr.strip()}", pytrace=False)


def set_kernel(name, value):
    """A setting of this namespace, say `net/ipv4/icmp_echo_ignore_all`."""
    Path("/proc/sys", name).write_text(str(value))


def lay_silent_net(prefix="198.51.100"):
    """A subnet on which nobody ever answers, and nobody asks for hardware addresses either."""
    ip("link add silent0 type bridge")
    ip(f"addr add {prefix}.1/24 dev silent0")
    ip("link set silent0 arp off up")


def lay_net_without_neighbors(prefix="192.0.2"):
    """A subnet on which hardware addresses are asked for and nobody has one, as when guests are switched off."""
    ip("link add lonely0 type veth peer name lonely1")
    ip(f"addr add {prefix}.1/24 dev lonely0")
    ip("link set lonely0 up")
    ip("link set lonely1 up")


class Cable:
    """A link whose far end is the test: it gets each echo for 10.88.0.0/24 and lists what comes back for it.

    `answers(echo)` gives whole IP packets. The kernel between the two ends is the real one.
    """

    def __init__(self):
        ip("link add near0 type veth peer name far0")
        ip(f"addr add {HOST}/24 dev near0")
        ip("link set near0 arp off up")
        ip("link set far0 up")
        self.answers = lambda echo: [echo.reply()]
        self.echoes = []
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP))
        self._socket.bind(("far0", 0))
        self._near = b""
        self._reader = gevent.spawn(self._read)  # noqa: TID251  plays the guests in real time

    def deliver(self, packet):
        """Let one more IP packet arrive at the host."""
        far = b"\x02\0\0\0\0\x02"
        self._socket.send(self._near + far + struct.pack("!H", ETH_P_IP) + packet)

    def close(self):
        self._reader.kill()
        self._socket.close()

    def _read(self):
        while True:
            frame, address = self._socket.recvfrom(2048)
            packet = frame[14:]
            if address[2] == socket.PACKET_OUTGOING or packet[9] != socket.IPPROTO_ICMP or packet[20] != 8:
                continue
            self._near = frame[6:12]
            self.echoes.append(Echo(socket.inet_ntoa(packet[16:20]), packet[20:]))
            for answer in self.answers(self.echoes[-1]):
                self.deliver(answer)


@contextmanager
def flood(address, identifier):
    """Another program that pings `address` as fast as it can, with a chosen identifier and every sequence number."""
    program = """
import itertools, socket, struct, sys
address, identifier = sys.argv[1], int(sys.argv[2])
pinging = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
def request(sequence):
    body = struct.pack("!BBHHH8s", 8, 0, 0, identifier, sequence, b"flooding")
    total = sum(struct.unpack("!8H", body))
    total = (total & 0xFFFF) + (total >> 16)
    return body[:2] + struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + body[4:]
packets = [request(sequence) for sequence in range(65536)]
print("flooding", flush=True)
for packet in itertools.cycle(packets):
    pinging.sendto(packet, (address, 0))
"""
    flooding = subprocess.Popen([sys.executable, "-c", program, address, str(identifier)], stdout=subprocess.PIPE)
    try:
        assert flooding.stdout.readline() == b"flooding\n"
        yield
        assert flooding.poll() is None, "the flood ended by itself"
    finally:
        flooding.kill()
        flooding.wait()
        flooding.stdout.close()


# A firewall -----------------------------------------------------------------------------------------------------------


class Firewall:
    """A table of the kernel's packet filter that drops whatever this host sends, made without any program for it."""

    _BATCH_BEGIN, _BATCH_END, _NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN = 0x10, 0x11, 0xA00, 0xA02, 0xA03

    def __enter__(self):
        name = self._attribute(1, b"test\0")
        hook = self._attribute(1, struct.pack("!I", 3)) + self._attribute(2, struct.pack("!I", 0))  # output, priority 0
        chain = (
            name
            + self._attribute(3, b"output\0")
            + self._attribute(4 | 0x8000, hook)
            + self._attribute(5, struct.pack("!I", 0))  # policy: drop
            + self._attribute(7, b"filter\0")
        )
        try:
            self._commit((self._NEW_TABLE, name), (self._NEW_CHAIN, chain))
        except OSError as error:
            pytest.skip(f"this kernel has no packet filter (nf_tables) for a test to use: {error.strerror}")
        return self

    def __exit__(self, *_):
        self._commit((self._DELETE_TABLE, self._attribute(1, b"test\0")))

    @staticmethod
    def _attribute(kind, value):
        return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)

    @staticmethod
    def _message(kind, flags, family, resource, attributes=b""):
        body = struct.pack("!BBH", family, 0, resource) + attributes
        return struct.pack("=IHHII", 16 + len(body), kind, 1 | flags, 0, 0) + body

    def _commit(self, *requests):
        batch = self._message(self._BATCH_BEGIN, 0, 0, 10)
        for kind, attributes in requests:
            create = 0 if kind == self._DELETE_TABLE else 0x400
            batch += self._message(kind, 4 | create, socket.AF_INET, 0, attributes)
        batch += self._message(self._BATCH_END, 0, 0, 10)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as filters:
            filters.settimeout(5)
            filters.bind((0, 0))
            filters.send(batch)
            for _ in requests:
                answer = filters.recv(8192)
                code = struct.unpack_from("=i", answer, 16)[0]
                if code:
                    raise OSError(-code, os.strerror(-code))
