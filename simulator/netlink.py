"""Links, addresses and routes of the live simulator, straight from the kernel's rtnetlink.

A live guest needs one veth pair with one end in its own network namespace and the other on the playground's bridge.
Asking the kernel ourselves costs six messages, needs no installed program, and works from two namespaces at once: a
netlink socket keeps acting on the namespace it was opened in, so a guest opens one before it leaves the bridge's
namespace and one after.

Every call returns when the kernel has acknowledged it and raises OSError, naming what was asked, when it refuses.
Nothing needs to be undone at the end: links vanish with the namespace that holds either end.
"""

import os
import socket
import struct
from collections.abc import Iterable

__all__ = ["Netlink"]

_RTM_NEWLINK, _RTM_DELLINK, _RTM_NEWADDR, _RTM_DELADDR, _RTM_NEWROUTE, _RTM_DELROUTE = 16, 17, 20, 21, 24, 25
_NLMSG_ERROR = 2
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
_CREATE = _NLM_F_CREATE | _NLM_F_EXCL
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 10, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_GATEWAY = 1, 5
_RT_TABLE_MAIN, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, _RTN_UNICAST, _RTN_BLACKHOLE = 254, 3, 0, 1, 6
_IFF_UP = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
_LINK = struct.Struct("=BxHiII")  # family, device type, index, flags, mask of the flags that count
_ADDRESS = struct.Struct("=BBBBi")  # family, prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, prefixes, tos, table, protocol, scope, type, flags


class Netlink:
    """One rtnetlink socket, acting for its whole life on the network namespace it was opened in."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def add_bridge(self, name: str) -> None:
        """A bridge, already up."""
        info = _attribute(_IFLA_INFO_KIND, b"bridge")
        body = _link(up=True) + _text(_IFLA_IFNAME, name) + _attribute(_IFLA_LINKINFO, info)
        self._ask(f"add bridge {name}", _RTM_NEWLINK, _CREATE, body)

    def add_veth(self, name: str, *, master: int, peer: str, peer_mac: str, peer_namespace: int) -> None:
        """A cable with its two ends in two namespaces.

        `name` is up and plugged into the bridge with index `master`. The other end is called `peer`, has the address
        `peer_mac`, is down, and lies in the network namespace behind the file descriptor `peer_namespace`.
        """
        other = b"".join(
            (
                _link(),
                _text(_IFLA_IFNAME, peer),
                _attribute(_IFLA_ADDRESS, bytes.fromhex(peer_mac.replace(":", ""))),
                _attribute(_IFLA_NET_NS_FD, struct.pack("=I", peer_namespace)),
            )
        )
        data = _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, other))
        info = _attribute(_IFLA_LINKINFO, _attribute(_IFLA_INFO_KIND, b"veth") + data)
        body = _link(up=True) + _text(_IFLA_IFNAME, name) + _attribute(_IFLA_MASTER, struct.pack("=I", master)) + info
        self._ask(f"add veth {name}", _RTM_NEWLINK, _CREATE, body)

    def set_up(self, name: str) -> None:
        """Like `ip link set NAME up`."""
        self._ask(f"set {name} up", _RTM_NEWLINK, 0, _link(up=True) + _text(_IFLA_IFNAME, name))

    def remove_link(self, name: str) -> None:
        """Of a cable the other end goes, too."""
        self._ask(f"remove {name}", _RTM_DELLINK, 0, _link() + _text(_IFLA_IFNAME, name))

    def add_address(self, index: int, address: str, prefix: int) -> None:
        """Give the link with this index an IPv4 address."""
        self._ask(f"add address {address}/{prefix}", _RTM_NEWADDR, _CREATE, _address(index, address, prefix))

    def remove_address(self, index: int, address: str, prefix: int) -> None:
        """Take it away again; routes that need it go with it."""
        self._ask(f"remove address {address}/{prefix}", _RTM_DELADDR, 0, _address(index, address, prefix))

    def add_default_route(self, gateway: str) -> None:
        body = _ROUTE.pack(
            socket.AF_INET, 0, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, _RTN_UNICAST, 0
        ) + _attribute(_RTA_GATEWAY, socket.inet_aton(gateway))
        self._ask(f"add default route via {gateway}", _RTM_NEWROUTE, _CREATE, body)

    def add_blackhole(self, address: str) -> None:
        """Whatever is sent to that address is lost without a word: no error, no answer."""
        self._ask(f"add blackhole {address}", _RTM_NEWROUTE, _CREATE, _blackhole(address))

    def remove_blackhole(self, address: str) -> None:
        self._ask(f"remove blackhole {address}", _RTM_DELROUTE, 0, _blackhole(address))

    def _ask(self, what: str, kind: int, flags: int, body: bytes) -> None:
        self._sequence += 1
        flags |= _NLM_F_REQUEST | _NLM_F_ACK
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, self._sequence, 0) + body)
        for code in self._errors(self._socket.recv(65536)):
            if code:
                raise OSError(-code, f"{what}: {os.strerror(-code)}")
            return
        raise OSError(f"{what}: the kernel gave no acknowledgment")

    def _errors(self, answer: bytes) -> Iterable[int]:
        """The error numbers (0 = acknowledged, else negative) the kernel gave to our last request."""
        offset = 0
        while offset + _HEADER.size <= len(answer):
            length, kind, _, sequence, _ = _HEADER.unpack_from(answer, offset)
            if kind == _NLMSG_ERROR and sequence == self._sequence:
                yield struct.unpack_from("=i", answer, offset + _HEADER.size)[0]
            offset += _aligned(max(length, _HEADER.size))


def _link(*, up: bool = False) -> bytes:
    return _LINK.pack(socket.AF_UNSPEC, 0, 0, _IFF_UP if up else 0, _IFF_UP if up else 0)


def _address(index: int, address: str, prefix: int) -> bytes:
    raw = socket.inet_aton(address)
    head = _ADDRESS.pack(socket.AF_INET, prefix, 0, _RT_SCOPE_UNIVERSE, index)
    return head + _attribute(_IFA_LOCAL, raw) + _attribute(_IFA_ADDRESS, raw)


def _blackhole(address: str) -> bytes:
    head = _ROUTE.pack(socket.AF_INET, 32, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, _RTN_BLACKHOLE, 0)
    return head + _attribute(_RTA_DST, socket.inet_aton(address))


def _attribute(kind: int, payload: bytes) -> bytes:
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + b"\0" * (_aligned(length) - length)


def _text(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _aligned(length: int) -> int:
    return (length + 3) & ~3
