"""What this host is and has: the facts that a node reports, read once at start from /proc, /sys and the kernel.

`read_host` is called by the daemon; in a simulation and in tests a `Host` is simply written down. Nothing here waits.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Host", "HostError", "is_own_address", "node_address", "read_host"]

SIOCGIFADDR = 0x8915
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PAGE_NAMES = {2048: "hugepages-2Mi", 1048576: "hugepages-1Gi"}  # KiB of a page -> name of the resource


class HostError(Exception):
    """A fact without which there is no node; the message says which setting stands in for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Sizes are bytes; `address` is "" when the host has no IPv4 address but loopback."""

    cpus: int
    memory: int
    storage: int  # of the file system that holds cocoon's disks
    storage_available: int
    hugepages: dict[str, int] = field(default_factory=dict)  # name of the resource -> bytes
    address: str = ""
    architecture: str = "amd64"
    kernel: str = ""
    os_image: str = ""
    machine_id: str = ""
    boot_id: str = ""
    system_uuid: str = ""


def read_host(root_dir: str, *, proc: str = "/proc", sys: str = "/sys", etc: str = "/etc") -> Host:
    """The facts of this host; raises HostError when memory or storage cannot be read.

    `root_dir` need not exist yet: the file system it would be on counts.
    """
    kernel = platform.uname()
    storage, available = _storage(Path(root_dir))
    return Host(
        cpus=len(os.sched_getaffinity(0)),
        memory=_memory(Path(proc, "meminfo")),
        storage=storage,
        storage_available=available,
        hugepages=_hugepages(Path(sys, "kernel/mm/hugepages")),
        address=_address(Path(proc, "net/route")),
        architecture=ARCHITECTURES.get(kernel.machine, kernel.machine),
        kernel=kernel.release,
        os_image=_os_image(Path(etc, "os-release")),
        machine_id=_text(Path(etc, "machine-id")),
        boot_id=_text(Path(proc, "sys/kernel/random/boot_id")),
        system_uuid=_text(Path(sys, "class/dmi/id/product_uuid")),
    )


def node_address(*, proc: str = "/proc") -> str:
    """The address under which others reach this host; raises HostError when it has none."""
    address = _address(Path(proc, "net/route"))
    if not address:
        raise HostError("this host has no IPv4 address but loopback: set VK_NODE_IP")
    return address


def is_own_address(address: str) -> bool:
    """Whether this host has that IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.bind((address, 0))
        except OSError:
            return False
    return True


def _text(path: Path) -> str:
    """The content of a small file, "" when there is none or it is not for us."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _memory(path: Path) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB$", _text(path), re.M)
    if found is None:
        raise HostError(f"{path} names no MemTotal: set VK_NODE_MEM")
    return int(found[1]) * 1024


def _storage(path: Path) -> tuple[int, int]:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        facts = os.statvfs(path)
    except OSError as error:
        raise HostError(f"the file system of {path} cannot be measured: {error}") from error
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _hugepages(directory: Path) -> dict[str, int]:
    pages = {}
    for kib, name in PAGE_NAMES.items():
        count = _text(directory / f"hugepages-{kib}kB" / "nr_hugepages")
        if count.isdigit():
            pages[name] = int(count) * kib * 1024
    return pages


def _os_image(path: Path) -> str:
    found = re.search(r'^PRETTY_NAME="?(.*?)"?$', _text(path), re.M)
    return found[1] if found else "Linux"


def _address(route: Path) -> str:
    """The first IPv4 address that is not loopback, of the interface of the default route if there is one.

    A cocoon host has bridges with addresses of their own, under which nobody else can reach it.
    """
    names = [name for _, name in socket.if_nameindex()]
    default = [line.split()[0] for line in _text(route).splitlines()[1:] if line.split()[1:2] == ["00000000"]]
    for name in [*default, *names]:
        address = _interface_address(name)
        if address and not address.startswith("127."):
            return address
    return ""


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # no IPv4 address
            return ""
    return socket.inet_ntoa(answer[20:24])
