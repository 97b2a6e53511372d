"""How to look at a guest from its host: the lease file, one echo, one dial, one banner; and how to give a lease back.

Everything here answers a single question once. When to ask again, and what an answer means for a pod, is decided by
the callers: the provider's probes (`vkcocoon`, `vkcocoon_macos`) ask, `vkcocoon_probes` sets the pace. This is the room
of real sockets and real clocks; a bound comes in as a deadline, that is, anything with `remaining() -> float`.

Lifetime rules:

- A `LeaseFile` and a pinger are made once at start and shared by all probes. `LeaseFile` never switches greenlets, so
  its answer and the moment it was asked belong together. `IcmpPinger.ping`, the dials and `release_lease` do switch.
- Names are never resolved: an address is an IPv4 literal or an error (decision L1), so no probe waits for a DNS server.
- An answer is a value, a failure is an exception with a message for humans. Messages carry no counters, times or byte
  positions, so that the same failure always compares equal (decision P7).
"""

import array
import errno
import http.client
import json
import logging
import os
import re
import secrets
import socket as socket_names
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple, Protocol

import gevent
import gevent.socket
import ping3
import ping3.enums
from gevent.event import Event
from gevent.monkey import get_original

__all__ = [
    "IcmpPinger",
    "Lease",
    "LeaseFile",
    "LeaseFileError",
    "LeaseReleaseError",
    "NopPinger",
    "PingError",
    "PingTimeout",
    "Remaining",
    "is_unicast_ipv4",
    "normalize_mac",
    "open_pinger",
    "release_lease",
    "ssh_banner",
    "tcp_accepts",
]

logger = logging.getLogger(__name__)


class Remaining(Protocol):
    """The part of a deadline this module needs: the seconds left, at or below zero once it has passed."""

    def remaining(self) -> float: ...


# ----------------------------------------------------------------------------------------------------------------------
# Addresses
# ----------------------------------------------------------------------------------------------------------------------

# Big enough for every row of a large lease file: the same texts come back with each rewrite of it.
_CACHED_TEXTS = 65536

_NORMAL_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
_MAC_SPELLINGS = re.compile(
    r"[0-9a-f]{1,2}([:-])(?:[0-9a-f]{1,2}\1){4}[0-9a-f]{1,2}"  # 0a:58:ac:16:00:15, 0A-58-AC-16-00-15, a:58:ac:16:0:15
    r"|[0-9a-f]{4}\.[0-9a-f]{4}\.[0-9a-f]{4}"  # 0a58.ac16.0015
    r"|[0-9a-f]{12}"  # 0a58ac160015
)


@lru_cache(maxsize=_CACHED_TEXTS)
def is_unicast_ipv4(text: str) -> bool:
    """Whether `text` is a strict dotted quad that one host can own (decision L1).

    Loopback counts. Not counted: 0.0.0.0/8, multicast and all above it (224.0.0.0 to 255.255.255.255), leading zeros,
    blanks, short forms, names.
    """
    try:
        return 1 <= socket_names.inet_pton(socket_names.AF_INET, text)[0] <= 223
    except (OSError, ValueError):  # ValueError: a text with a zero byte
        return False


@lru_cache(maxsize=_CACHED_TEXTS)
def normalize_mac(text: str) -> str:
    """`text` as six lower-case octets with colons, "" when it is no MAC address (decision L2)."""
    if _NORMAL_MAC.fullmatch(text):
        return text
    text = text.strip().lower()
    found = _MAC_SPELLINGS.fullmatch(text)
    if not found:
        return ""
    separator = found[1]
    digits = "".join(octet.zfill(2) for octet in text.split(separator)) if separator else text.replace(".", "")
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2))


# ----------------------------------------------------------------------------------------------------------------------
# DHCP leases
# ----------------------------------------------------------------------------------------------------------------------

# A ctime moves in steps of the kernel's tick (10 ms at most), so a later write may leave a young one as it is (L6).
_YOUNG_NS = 50_000_000
_MOST_BYTES = 8 * 1024 * 1024  # a /16 full of leases; parsing more would hold every greenlet for over half a second
# A writer that truncates in place is caught half-way again and again; only a state that stays is news.
_TORN_REPEAT_S = 60.0

_EMPTY = "is empty"
_TORN = "is not one complete JSON document"

_RFC3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt]([0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?)(?:[Zz]|([+-][0-9]{2}:[0-9]{2}))"
)
_NO_END = datetime.max.replace(tzinfo=UTC)


class LeaseFileError(Exception):
    """There is no table of leases to answer from: no readable lease file was ever seen."""


class Lease(NamedTuple):
    """One DHCP lease: `mac` normalized, `ip` a unicast dotted quad, `expiry` aware (year 9999: it has no end)."""

    mac: str
    ip: str
    expiry: datetime


class LeaseFile:
    """The table cocoon-net writes, as it is at the moment it is asked.

    Each question looks at the file by name; the file is parsed once per change, for all who ask (decision L6).
    A content that cannot be a table leaves the last good one in force (decision L5).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._table: _Table | None = None
        self._content: bytes | None = None
        self._verdict = ""  # what is wrong with that content, "" when it is a table
        self._stamp: tuple[int, ...] | None = None
        self._settled = False  # an equal stamp proves an equal content
        self._problem = ""
        self._told = ""  # the problem last logged
        self._quiet_until = 0.0

    def lookup(self, mac: str, now: datetime) -> Lease | None:
        """The lease `mac` holds at `now` (aware), None when it holds none or another MAC owns its address (L3, L4).

        Raises LeaseFileError only while there never was a good table.
        """
        table = self._current()
        lease = table.leases.get(normalize_mac(mac))
        if lease is None or now >= lease.expiry or lease.mac in table.contested:
            return None
        return lease

    def conflict(self, mac: str, now: datetime) -> str:
        """Why a live row of `mac` does not count, as a sentence naming the other MAC and the address; else "" (L4)."""
        table = self._current()
        lease = table.leases.get(normalize_mac(mac))
        if lease is None or now >= lease.expiry:
            return ""
        return table.contested.get(lease.mac, "")

    def rows(self, now: datetime) -> list[Lease]:
        """The live row of each MAC in order of address, those that lose a conflict included."""
        live = (lease for lease in self._current().leases.values() if now < lease.expiry)
        return sorted(live, key=lambda lease: (socket_names.inet_aton(lease.ip), lease.mac))

    def trouble(self) -> str:
        """What is wrong with the file now, as a sentence; "" when it is a table."""
        try:
            self._current()
        except LeaseFileError as error:
            return str(error)
        return f"lease file {self._path} {self._problem}; the last good table stays" if self._problem else ""

    def _current(self) -> "_Table":
        try:
            if not (self._settled and _stamp(os.stat(self._path)) == self._stamp):
                self._read()
            if not self._verdict == self._problem == self._told:
                self._note(self._verdict)
        except OSError as error:
            self._note(f"cannot be read: {error.strerror}")
        if self._table is None:
            raise LeaseFileError(f"lease file {self._path} {self._problem}")
        return self._table

    def _read(self) -> None:
        """Read the file; parse it when its bytes are new.

        NB: whether the stamp may be trusted at later looks is decided by the age the ctime had BEFORE the bytes were
        read. Asking for the age at the later look instead would miss a second write within one step of the ctime.
        """
        # By descriptor: the layers of io would cost more than the reading, and a young file is read at every question.
        descriptor, status = _open_regular(self._path)
        try:
            # CLOCK_REALTIME is the clock the kernel takes the ctime from.
            age = time.clock_gettime_ns(time.CLOCK_REALTIME) - status.st_ctime_ns
            content = _read_to_the_end(descriptor, status.st_size, most=_MOST_BYTES + 1)
        finally:
            os.close(descriptor)
        self._stamp, self._settled = _stamp(status), age >= _YOUNG_NS
        if content == self._content:
            return
        self._content = content
        try:
            if len(content) > _MOST_BYTES:
                raise _NotATable(f"is longer than {_MOST_BYTES >> 20} MiB")
            self._table = _parse(content)
            self._verdict = ""
        except _NotATable as error:
            self._verdict = str(error)

    def _note(self, problem: str) -> None:
        """Say once that the file became unusable, and once that it is usable again (L5)."""
        self._problem = problem
        if problem == self._told:
            return
        if problem in (_EMPTY, _TORN):
            now = time.monotonic()  # noqa: TID251  limits our own log lines, nothing that is simulated
            if now < self._quiet_until:
                return
            self._quiet_until = now + _TORN_REPEAT_S
        self._told = problem
        if problem:
            effect = "the last good table stays" if self._table else "no DHCP guest has a known address"
            logger.warning("lease file %s %s; %s", self._path, problem, effect)
        else:
            logger.info("lease file %s is usable again", self._path)


class _NotATable(ValueError):
    """A content that holds no table of leases; the message completes the sentence "the lease file ..."."""


class _Table(NamedTuple):
    leases: dict[str, Lease]  # by MAC; of several rows the one that ends last
    contested: dict[str, str]  # MAC -> why its lease does not count


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open without waiting for a writer should the name be a pipe, and refuse everything but a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file")


def _read_to_the_end(descriptor: int, expected: int, *, most: int) -> bytes:
    """All there is up to ``most`` bytes, which may be more or less than was expected: the file may be changing."""
    parts, left = [], most
    while left and (part := os.read(descriptor, min(expected + 1, left))):
        parts.append(part)
        left -= len(part)
        expected = max(expected - len(part), 4096)
    return b"".join(parts)


def _parse(content: bytes) -> _Table:
    if not content:
        raise _NotATable(_EMPTY)
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError):
        raise _NotATable(_TORN) from None
    if rows is None:  # how the daemon writes "no leases"
        rows = []
    if not isinstance(rows, list):
        raise _NotATable("holds no JSON array")
    return _tabulate(rows)


def _tabulate(rows: list[object]) -> _Table:
    leases: dict[str, Lease] = {}
    for row in rows:
        lease = _lease(row)
        if lease is None:
            continue
        rival = leases.get(lease.mac)
        # Equal ends: decided by the address, so that the order of rows, which is random, decides nothing.
        if rival is None or (lease.expiry, lease.ip) > (rival.expiry, rival.ip):
            leases[lease.mac] = lease
    return _Table(leases, _contested(leases.values()))


def _lease(row: object) -> Lease | None:
    """A row as a lease, None when any part of it cannot be read: an odd row costs itself alone (L1, L2, L3)."""
    if not isinstance(row, dict):
        return None
    mac, ip, expiry = row.get("mac"), row.get("ip"), row.get("expiry")
    if not (isinstance(mac, str) and isinstance(ip, str) and isinstance(expiry, str)):
        return None
    mac, end = normalize_mac(mac), _end(expiry)
    return Lease(mac, ip, end) if mac and end and is_unicast_ipv4(ip) else None


def _end(text: str) -> datetime | None:
    """An RFC 3339 time as aware datetime, None when it is none. The zero date of year 1 means "no end" (L3)."""
    found = _RFC3339.fullmatch(text)
    if not found:
        return None
    day, clock, offset = found.groups()
    try:
        end = datetime.fromisoformat(f"{day}T{clock}{offset or '+00:00'}")
    except ValueError:
        return None
    return _NO_END if end.year == 1 else end


def _contested(leases: Iterable[Lease]) -> dict[str, str]:
    """Who shares an address without owning it: the lease that ends last owns it, of equal ones none does (L4)."""
    holders: dict[str, list[Lease]] = {}
    for lease in leases:
        holders.setdefault(lease.ip, []).append(lease)
    contested: dict[str, str] = {}
    for ip, sharing in holders.items():
        if len(sharing) == 1:
            continue
        sharing.sort(key=lambda lease: (lease.expiry, lease.mac), reverse=True)
        first, second = sharing[:2]
        for lease in sharing:
            if lease is not first:
                contested[lease.mac] = f"{ip} is leased to {first.mac} as well"
            elif first.expiry == second.expiry:
                contested[lease.mac] = f"{ip} is leased to {second.mac} as well"
    return contested


# ----------------------------------------------------------------------------------------------------------------------
# ICMP echo
# ----------------------------------------------------------------------------------------------------------------------

_ECHO_REPLY, _ECHO_REQUEST = 0, 8
_ERRORS = {3: ping3.enums.IcmpV4DestinationUnreachableCode, 11: ping3.enums.IcmpTimeExceededCode, 12: None}

# linux/icmp.h and asm-generic/socket.h; the socket module has no names for them.
_SOL_RAW, _ICMP_FILTER = 255, 1
_SO_ATTACH_FILTER, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 26, 32, 33

# Thousands of echoes at once fit. The send buffer counts as well: an echo to a guest that is off stays in it while ARP
# asks for three seconds, and once those fill it, the kernel refuses the echoes to living guests too.
_BUFFER_BYTES = 4 << 20
# One drain ends after so many packets, so that a flood of foreign errors cannot hold the hub.
_DRAIN_PACKETS = 512
_PACKET_BYTES = 2048
_CLOSED = "the pinger was closed"
_MARK = b"vk-cocoon "  # for those who read a packet trace


class PingError(Exception):
    """One echo failed; the message says how."""


class PingTimeout(PingError):
    """Nobody answered in time."""


def open_pinger() -> "IcmpPinger | NopPinger":
    """The pinger for this process's whole life: decided here, once, by opening a raw socket (decision I2).

    Both have `degraded`, `ping(ip, deadline) -> seconds` and `close()`.
    """
    try:
        return IcmpPinger()
    except OSError as error:
        logger.warning(
            "icmp pinger disabled: %s; a guest with an address counts as reachable unless its pod declares a "
            "probe-port. Grant CAP_NET_RAW to get real pings",
            error.strerror,
        )
        return NopPinger()


class NopPinger:
    """Stands in where raw sockets are refused: whoever has an address is taken to be reachable."""

    degraded = True

    def ping(self, ip: str, deadline: Remaining) -> float:
        _check_address(ip)
        return 0.0

    def close(self) -> None:
        pass


class _Echo:
    """One echo on its way. `address` and `payload` are what its reply must carry."""

    __slots__ = ("address", "arrived", "done", "error", "ip", "payload", "sequence")

    def __init__(self, ip: str, sequence: int) -> None:
        self.ip = ip
        self.address = socket_names.inet_aton(ip)
        self.sequence = sequence
        self.payload = _MARK + secrets.token_bytes(8)
        self.done = Event()
        self.arrived = 0.0
        self.error = ""

    def finish(self, error: str = "") -> None:
        """Note the verdict. A reply stands against any error about the same echo."""
        if error and self.done.is_set():
            return
        self.arrived = time.monotonic()  # noqa: TID251  a real packet arrives in real time
        self.error = error
        self.done.set()


class IcmpPinger:
    """All echoes of the process over one raw socket (decision I1).

    A raw socket receives what the whole host receives, so an answer is matched by everything we know of the question:
    address, identifier, sequence, nonce. Anything less lets a living guest answer for a dead one. OSError from the
    constructor: the socket was refused.
    """

    degraded = False

    def __init__(
        self, *, identifier: int | None = None, open_socket: Callable[[int], socket_names.socket] | None = None
    ) -> None:
        """`identifier` (0-65535) is random unless given: two daemons on one host must not share one.

        `open_socket(identifier)` gives a non-blocking socket that delivers whole IP packets; a raw one unless given.
        """
        self._identifier = secrets.randbelow(0x10000) if identifier is None else identifier
        self._sequence = secrets.randbelow(0x10000)
        self._pending: dict[int, _Echo] = {}
        self._closed = False
        self._socket = (open_socket or _open_raw_socket)(self._identifier)
        # No reference: an idle pinger does not keep the event loop alive.
        self._watcher = gevent.get_hub().loop.io(self._socket.fileno(), 1, ref=False)
        self._watcher.start(self._drain)

    def ping(self, ip: str, deadline: Remaining) -> float:
        """Send one echo and wait for its answer until the deadline; the round trip in seconds, 0.0 is a success too.

        Raises PingTimeout when nobody answered, PingError for everything else: a send the kernel refused, an ICMP error
        about our echo, no IPv4 unicast address, a closed pinger.
        """
        _check_address(ip)
        if self._closed:
            raise PingError(_CLOSED)
        if deadline.remaining() <= 0:
            raise PingTimeout(f"no time left to ping {ip}")
        echo = self._register(ip)
        try:
            sent = self._send(echo)
            self._drain(echo)  # in a burst the answers of those before us fill the buffer while we all send
            if not echo.done.is_set() and not echo.done.wait(deadline.remaining()):
                self._drain(echo)  # the hub may be late; what lies in the buffer has arrived
        finally:
            del self._pending[echo.sequence]
        if not echo.done.is_set():
            raise PingTimeout(f"no reply from {ip}")
        if echo.error:
            raise PingError(echo.error)
        return echo.arrived - sent

    def close(self) -> None:
        """Close the socket; echoes on their way fail at once."""
        if self._closed:
            return
        self._closed = True
        self._watcher.stop()
        self._watcher.close()
        self._socket.close()
        for echo in self._pending.values():
            echo.finish(_CLOSED)

    def _register(self, ip: str) -> _Echo:
        if len(self._pending) > 0xFFFF:
            raise PingError("too many echoes at once")
        while True:
            self._sequence = (self._sequence + 1) & 0xFFFF
            if self._sequence not in self._pending:
                break
        echo = self._pending[self._sequence] = _Echo(ip, self._sequence)
        return echo

    def _send(self, echo: _Echo) -> float:
        """Hand the echo to the kernel; the instant that happened. A refusal fails this echo and nothing else (I2)."""
        request = _echo_request(self._identifier, echo)
        started = time.monotonic()  # noqa: TID251  a real packet leaves in real time
        try:
            self._socket.sendto(request, (echo.ip, 0))
        except OSError as error:
            raise PingError(f"cannot send to {echo.ip}: {error.strerror}") from error
        return started

    def _drain(self, mine: _Echo | None = None) -> None:
        """Take what has arrived, up to the answer to `mine`, and wake those it answers.

        Runs in the hub too: it never switches and never raises.
        """
        receive, dispatch = self._socket.recv, self._dispatch
        try:
            for _ in range(_DRAIN_PACKETS):
                dispatch(receive(_PACKET_BYTES))
                if mine is not None and mine.done.is_set() and not mine.error:
                    return  # what else there is, the hub takes: the saved call is a tenth of an echo
        except OSError:  # BlockingIOError: nothing left. Any other says nothing about any echo.
            pass

    def _dispatch(self, packet: bytes) -> None:
        """Match one IP packet. The kernel vouches for the IP header, nobody for what follows it."""
        message = packet[(packet[0] & 0x0F) * 4 :]
        if len(message) < 8 or ping3.checksum(message) != 0:
            return
        header = ping3.read_icmp_header(message[:8])
        if header["type"] == _ECHO_REPLY:
            self._on_reply(packet[12:16], header, message[8:])
        elif header["type"] in _ERRORS:
            self._on_error(header, message[8:])

    def _on_reply(self, source: bytes, header: dict[str, int], payload: bytes) -> None:
        echo = self._pending.get(header["seq"])
        if (
            echo is not None
            and header["id"] == self._identifier
            and header["code"] == 0
            and source == echo.address
            and payload == echo.payload
        ):
            echo.finish()

    def _on_error(self, error: dict[str, int], quoted: bytes) -> None:
        """An error counts only when it quotes our echo: the whole IP header, and as much of the echo as it carries."""
        start = (quoted[0] & 0x0F) * 4 if quoted else 0
        original, payload = quoted[start : start + 8], quoted[start + 8 :]
        if start < 20 or len(original) < 8:
            return
        outer, header = ping3.read_ipv4_header(quoted[:20]), ping3.read_icmp_header(original)
        echo = self._pending.get(header["seq"])
        if (
            echo is not None
            and outer["protocol"] == socket_names.IPPROTO_ICMP
            and outer["dest_addr"] == echo.ip
            and header["type"] == _ECHO_REQUEST
            and header["id"] == self._identifier
            and echo.payload.startswith(payload[: len(echo.payload)])
        ):
            echo.finish(f"{_describe(error['type'], error['code'])}: {echo.ip}")


def _check_address(ip: str) -> None:
    if not is_unicast_ipv4(ip):
        raise PingError(f"{ip!r} is not a unicast IPv4 address")


def _open_raw_socket(identifier: int) -> socket_names.socket:
    """The operating system's own socket, patched or not: it is read from the hub, where nothing may wait."""
    sock: socket_names.socket = get_original("socket", "socket")(
        socket_names.AF_INET, socket_names.SOCK_RAW, socket_names.IPPROTO_ICMP
    )
    sock.setblocking(False)
    _enlarge(sock, _SO_RCVBUFFORCE, socket_names.SO_RCVBUF)
    _enlarge(sock, _SO_SNDBUFFORCE, socket_names.SO_SNDBUF)
    refused_types = 0xFFFFFFFF & ~sum(1 << kind for kind in (_ECHO_REPLY, *_ERRORS))
    sock.setsockopt(_SOL_RAW, _ICMP_FILTER, struct.pack("@I", refused_types))
    _refuse_foreign_replies(sock, identifier)
    return sock


def _enlarge(sock: socket_names.socket, forced: int, plain: int) -> None:
    try:
        sock.setsockopt(socket_names.SOL_SOCKET, forced, _BUFFER_BYTES)
    except OSError:  # without CAP_NET_ADMIN: as far as net.core.rmem_max and wmem_max allow
        sock.setsockopt(socket_names.SOL_SOCKET, plain, _BUFFER_BYTES)


def _refuse_foreign_replies(sock: socket_names.socket, identifier: int) -> None:
    """Let the kernel drop replies to other programs' echoes, which on a busy host are most of what arrives.

    A saving only, so a kernel that does not know socket filters may refuse it: `_dispatch` checks everything again.
    """
    program = [
        (0xB1, 0, 0, 0),  # X = length of the IP header
        (0x50, 0, 0, 0),  # A = ICMP type
        (0x15, 0, 2, _ECHO_REPLY),  # no reply: keep
        (0x48, 0, 0, 4),  # A = identifier
        (0x15, 0, 1, identifier),  # not ours: drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
        (0x06, 0, 0, 0),  # drop
    ]
    code = array.array("B", b"".join(struct.pack("@HBBI", *step) for step in program))
    with suppress(OSError):
        attached = struct.pack("@HP", len(program), code.buffer_info()[0])
        sock.setsockopt(socket_names.SOL_SOCKET, _SO_ATTACH_FILTER, attached)


def _echo_request(identifier: int, echo: _Echo) -> bytes:
    header = struct.pack(ping3.ICMP_HEADER_FORMAT, _ECHO_REQUEST, 0, 0, identifier, echo.sequence)
    # NB: ping3.checksum sums little-endian words, so its result goes out in that order.
    checksum = struct.pack("<H", ping3.checksum(header + echo.payload))
    return header[:2] + checksum + header[4:] + echo.payload


def _describe(kind: int, code: int) -> str:
    """An ICMP error in words, say "destination host unreachable"."""
    try:
        return str(_ERRORS[kind](code).name).replace("_", " ").lower()
    except (TypeError, ValueError):
        return f"ICMP error type {kind} code {code}"


# ----------------------------------------------------------------------------------------------------------------------
# Dials
# ----------------------------------------------------------------------------------------------------------------------

# An SSH server may greet before its banner (RFC 4253 section 4.2); this much of it is read (decision O3).
_BANNER_BYTES = 8192
_BREATH_S = 0.01


def tcp_accepts(ip: str, port: int, deadline: Remaining) -> None:
    """Return when a TCP connection to `ip` was accepted; it is closed at once and nothing is sent.

    Raises OSError: ConnectionRefusedError, TimeoutError at the deadline, or what else the kernel says.
    """
    with _dial(ip, port, deadline):
        pass


def ssh_banner(ip: str, deadline: Remaining, port: int = 22) -> str:
    """The line with which an SSH server introduces itself, without its line end, say "SSH-2.0-OpenSSH_9.9" (O3).

    Lines before it are skipped; nothing is sent. Raises OSError: as `tcp_accepts`, TimeoutError when no whole banner
    came before the deadline, ConnectionError when the other side spoke otherwise or hung up.
    """
    with _dial(ip, port, deadline) as connection:
        said: list[bytes] = []  # its lines; the last one is not complete
        left = _BANNER_BYTES
        while left:
            connection.settimeout(_time_left(deadline))
            piece = connection.recv(left)
            left -= len(piece)
            *whole, rest = ((said.pop() if said else b"") + piece).split(b"\n")
            said += [*whole, rest]
            for line in whole if piece else (*whole, rest):
                if line.startswith(b"SSH-"):
                    return line.rstrip(b"\r").decode("ascii", "backslashreplace")
            if not piece:
                break
            # Who trickles byte by byte is not worth waking up for each; what comes meanwhile is one piece.
            gevent.sleep(min(_BREATH_S, _time_left(deadline)))  # noqa: TID251  waits for a real socket
    raise ConnectionAbortedError(errno.ECONNABORTED, _no_banner(said))


@contextmanager
def _dial(ip: str, port: int, deadline: Remaining) -> Iterator[gevent.socket.socket]:
    if not is_unicast_ipv4(ip):
        raise OSError(errno.EADDRNOTAVAIL, f"{ip!r} is not a unicast IPv4 address")
    if not 1 <= port <= 65535:
        raise OSError(errno.EADDRNOTAVAIL, f"{port} is not a TCP port")
    with gevent.socket.socket(socket_names.AF_INET, socket_names.SOCK_STREAM) as connection:
        connection.settimeout(_time_left(deadline))
        connection.connect((ip, port))
        # A dial to a closed port of this very host can meet itself, when the kernel picks that port for our own end.
        if connection.getsockname() == (ip, port):
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        yield connection


def _time_left(deadline: Remaining) -> float:
    """Seconds for a socket timeout. Zero would mean "do not wait" to a socket, and a negative one is an error."""
    seconds = deadline.remaining()
    if seconds <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "timed out")
    return seconds


def _no_banner(said: Sequence[bytes]) -> str:
    """What came instead of a banner, its first line, cut short and harmless to print: it was chosen by the guest."""
    if not any(said) and len(said) <= 1:
        return "hung up without a word"
    line = said[0].rstrip(b"\r")[:80]
    return f"said {line.decode('ascii', 'backslashreplace')!r}"


# ----------------------------------------------------------------------------------------------------------------------
# Giving a lease back
# ----------------------------------------------------------------------------------------------------------------------

_RELEASE_S = 5.0
_ANSWER_BYTES = 1024


class LeaseReleaseError(Exception):
    """cocoon-net did not take a lease back; it ends by itself when it expires."""


def release_lease(mac: str, socket_path: str, *, limit: float = _RELEASE_S) -> None:
    """Ask cocoon-net to forget the lease of `mac`; releasing what is not leased succeeds too.

    `limit` seconds bound one request. An answer of 500 means "nothing has changed, ask again" and is asked again once.
    Raises LeaseReleaseError. Call it only after the VM is gone: a living guest would lose its address to another.
    """
    normal = normalize_mac(mac)
    if not normal:
        raise LeaseReleaseError(f"{mac!r} is not a MAC address")
    for _ in range(2):
        status, text = _request_release(normal, socket_path, limit)
        if status != http.client.INTERNAL_SERVER_ERROR:
            break
    if status != http.client.NO_CONTENT:
        raise LeaseReleaseError(f"cocoon-net answered {status} to the release of {normal}: {text}")


def _request_release(mac: str, socket_path: str, limit: float) -> tuple[int, str]:
    connection = _ControlConnection(socket_path)
    try:
        with gevent.Timeout(limit, TimeoutError(errno.ETIMEDOUT, "timed out")):  # noqa: TID251  bounds a real socket
            connection.request("DELETE", f"/v1/leases/{mac}")
            answer = connection.getresponse()
            return answer.status, answer.read(_ANSWER_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise LeaseReleaseError(f"cocoon-net control socket {socket_path}: {reason}") from error
    finally:
        connection.close()


class _ControlConnection(http.client.HTTPConnection):
    """HTTP over cocoon-net's unix socket."""

    def __init__(self, socket_path: str) -> None:
        super().__init__("cocoon-net")
        self._socket_path = socket_path

    def connect(self) -> None:
        self.sock = gevent.socket.socket(socket_names.AF_UNIX, socket_names.SOCK_STREAM)
        self.sock.connect(self._socket_path)
