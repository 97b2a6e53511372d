"""The daemon's own ICMP pinger on a simulated wire: real packets, real matching, virtual time.

Most simulations ask `FakePinger`, which knows whether a guest answers. That is enough for everything above the socket
and proves nothing about it. `WirePinger` is `vkcocoon_net.IcmpPinger` itself on a socket that leads to the guests of a
`FakeHost`: it builds its echoes and judges what comes back, and the wire may lose, delay, repeat and forge. A reply
that is late, from somebody else, or an answer to another question arrives like any other, and must not count.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from socket import inet_aton
from typing import Any

from gevent.event import Event

from simulator.clock import VirtualClock
from simulator.fake_vms import FakeHost
from vkcocoon_net import IcmpPinger

__all__ = ["WirePinger", "noise", "reply"]

IDENTIFIER = 0x1234  # of the daemon; one per host, so one is enough
ECHO_REQUEST, ECHO_REPLY = 8, 0
HOST_ADDRESS = "10.88.0.1"


class _ClockEvent(Event):
    """An event that is waited for on the virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:  # type: ignore[override]
        return self._clock.wait(self, timeout)


class WirePinger(IcmpPinger):
    """The real thing, waiting on the clock of the host."""

    def __init__(self, host: FakeHost) -> None:
        self._clock = host.clock
        self._wire = _Wire(host, self._drain)
        super().__init__(identifier=IDENTIFIER, open_socket=lambda identifier: self._wire)  # type: ignore[arg-type,return-value]

    def _register(self, ip: str) -> Any:
        echo = super()._register(ip)
        echo.done = _ClockEvent(self._clock)
        return echo


class _Wire:
    """What the pinger takes for its raw socket: one end of the cable to all guests."""

    def __init__(self, host: FakeHost, arrived: Any) -> None:
        self._host = host
        self._arrived = arrived
        self._packets: deque[bytes] = deque()
        self._never = os.eventfd(0, os.EFD_NONBLOCK)  # for the event loop to watch: in here nothing comes from outside

    def fileno(self) -> int:
        return self._never

    def close(self) -> None:
        os.close(self._never)

    def recv(self, size: int) -> bytes:
        if not self._packets:
            raise BlockingIOError
        return self._packets.popleft()[:size]

    def sendto(self, packet: bytes, address: tuple[str, int]) -> int:
        ip, host = address[0], self._host
        if host.pinger.error_for(ip):
            raise OSError(113, "No route to host")
        guest = host.guest_at(ip)
        if guest is not None and not guest.mute and guest.echo and not host.lost(guest):
            delay_s = guest.latency_s + host.jitter(guest.name)
            host.clock.at(host.clock.elapsed() + delay_s, self._deliver, ip, packet, guest.flood)
        return len(packet)

    def _deliver(self, ip: str, request: bytes, flood: bool) -> None:
        identifier, sequence = struct.unpack("!HH", request[4:8])
        answer = reply(ip, identifier, sequence, request[8:])
        self._packets += [*noise(ip, identifier, sequence, request[8:]), answer, answer] if flood else [answer]
        self._arrived()


def noise(ip: str, identifier: int, sequence: int, payload: bytes) -> list[bytes]:
    """What a busy or hostile network adds to an answer: packets that are right in all but one respect each."""
    return [
        reply(ip, identifier, sequence, payload[:-1] + bytes([payload[-1] ^ 1])),
        reply(ip, identifier, (sequence + 1) & 0xFFFF, payload),
        reply(ip, identifier ^ 1, sequence, payload),
        reply(_neighbor(ip), identifier, sequence, payload),
        reply(ip, identifier, sequence, payload)[:24],
    ]


def reply(source: str, identifier: int, sequence: int, payload: bytes) -> bytes:
    """An ICMPv4 echo reply as a raw socket delivers it, IP header and all."""
    header = struct.pack("!BBHHH", ECHO_REPLY, 0, 0, identifier, sequence)
    message = header[:2] + _checksum(header + payload) + header[4:] + payload
    ip_header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(message), 0, 0, 64, 1, 0)
    return ip_header + inet_aton(source) + inet_aton(HOST_ADDRESS) + message


def _checksum(message: bytes) -> bytes:
    """RFC 1071: the one's complement of the one's complement sum of the 16-bit words."""
    padded = message + bytes(len(message) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    total = (total >> 16) + (total & 0xFFFF)
    return struct.pack("!H", 0xFFFF & ~(total + (total >> 16)))


def _neighbor(ip: str) -> str:
    first, _, last = ip.rpartition(".")
    return f"{first}.{int(last) ^ 1}"
