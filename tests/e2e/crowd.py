"""Many pods at little cost: unmanaged ones, whose VMs somebody else runs, with guests that are doors in this process.

A door is a listening socket on the address and port that a pod is probed by. It is opened when the scenario says so and
notes the instant in which the daemon's first dial was accepted, which is when the first successful probe began to end.
"""

import contextlib
import socket

import gevent.socket
from gevent.pool import Group

from tests.e2e.api import CLOCK, create_pod
from tests.e2e.control_plane import free_port
from vkcocoon_probes import spawn


class Crowd:
    """The unmanaged pods of one host, numbered from 0."""

    def __init__(self, plane, host, namespace: str) -> None:
        self._plane = plane
        self._host = host
        self._namespace = namespace
        self._group = Group()
        self._doors: list[gevent.socket.socket] = []
        # Two runs on one machine have the same addresses.
        self.open_port, self.silent_port = free_port(), free_port()
        self.met: dict[int, float] = {}  # pod number -> instant of the first dial that was accepted

    def name(self, number: int) -> str:
        return f"crowd-{number}"

    def address(self, number: int) -> str:
        """Two hosts of one run share no address."""
        _, _, third, _ = self._host.place.gateway.split(".")
        return f"127.{1 + int(third) % 60}.{number // 250}.{number % 250 + 1}"

    def create(self, numbers, *, silent: bool = False) -> dict[int, dict]:
        """Pods by number, as the API made them; `silent` ones are probed where nobody answers yes or no."""
        port = self.silent_port if silent else self.open_port
        made: dict[int, dict] = {}

        def make(number: int) -> None:
            made[number] = create_pod(self._plane.admin, self._pod(number, port))

        pool = Group()
        for chunk in _chunks(list(numbers), 16):
            for number in chunk:
                spawn(pool, f"create {number}", make, number)
            pool.join()
        return made

    def open(self, number: int) -> None:
        """The guest of one pod answers from now on."""
        door = gevent.socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((self.address(number), self.open_port))
        door.listen(8)
        self._doors.append(door)
        spawn(self._group, f"door {number}", self._serve, number, door)

    def open_all(self) -> None:
        """Every guest answers from now on, by one door for all addresses."""
        door = gevent.socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("0.0.0.0", self.open_port))
        door.listen(4096)
        self._doors.append(door)
        spawn(self._group, "door for all", self._serve, -1, door)

    def silence(self) -> None:
        """Dials to the silent port are answered neither yes nor no: the queue of its only door is full."""
        door = socket.socket()
        door.bind(("0.0.0.0", self.silent_port))
        door.listen(0)
        self._doors.append(door)
        for _ in range(2):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", self.silent_port))
            self._doors.append(filler)

    def close(self) -> None:
        self._group.kill()
        for door in self._doors:
            door.close()
        self._doors.clear()

    def _serve(self, number: int, door: gevent.socket.socket) -> None:
        while True:
            connection, _ = door.accept()
            self.met.setdefault(number, CLOCK.monotonic())
            connection.close()

    def _pod(self, number: int, port: int) -> dict:
        name = self.name(number)
        changes = {
            "cocoonset.cocoonstack.io/managed": None,
            "vm.cocoonstack.io/id": f"vm-id-{number}",
            "vm.cocoonstack.io/ip": self.address(number),
            "vm.cocoonstack.io/probe-port": str(port),
        }
        return self._host.pod(name, namespace=self._namespace, **changes)


def _chunks(values: list, size: int):
    for start in range(0, len(values), size):
        yield values[start : start + size]
