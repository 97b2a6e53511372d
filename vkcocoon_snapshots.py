"""Snapshots on this host: which there are, what their names mean, and how several want one at once.

    <vm>            the state of a hibernated VM; while it is there, a fresh VM of that name would be somebody's loss
    fork-<vm>       of a running VM, for those that are cloned from it
    latest-<vm>     of a VM whose pod was deleted, for as long as nobody removes it

`Snapshots` is the only one who saves and drops them, so it knows what there is from one list at start. It has to: every
creation asks whether its VM was hibernated here, and an answer that costs a process each time would be too dear. What
somebody else saves under such a name counts from the next start.

`Flights` lets several who want the same thing wait for one piece of work, which belongs to none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from gevent.event import Event
from gevent.pool import Group

from vkcocoon_ports import Workplace
from vkcocoon_probes import Clock, spawn
from vkcocoon_vms import RELEASE_S, Snapshot, SnapshotNotFound

__all__ = ["Flights", "Snapshots", "fork_name", "latest_name"]

LONGEST_NAME = 63  # cocoon refuses longer ones


def fork_name(vm_name: str) -> str:
    """The snapshot others are forked from."""
    return _fitting(f"fork-{vm_name}")


def latest_name(vm_name: str) -> str:
    """The last state of a VM whose pod was deleted."""
    return _fitting(f"latest-{vm_name}")


def _fitting(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


class Flights:
    """One piece of work per key at a time, in a greenlet of its own; everybody who wants it shares how it ends."""

    def __init__(self, clock: Clock, group: Group) -> None:
        self._clock = clock
        self._group = group
        self._flying: dict[str, _Flight] = {}

    def run(self, key: str, work: Callable[[], None]) -> None:
        """Return when the work for ``key`` is done. Raises what it ended with."""
        flight = self._flying.get(key)
        if flight is None:
            flight = self._flying[key] = _Flight()
            spawn(self._group, key, self._fly, key, flight, work)
        self._clock.wait(flight.landed, None)
        if flight.error is not None:
            raise flight.error

    def _fly(self, key: str, flight: _Flight, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  it belongs to those who wait
            flight.error = error
        finally:
            # First the registry, then the signal: whoever comes later needs a flight of its own.
            del self._flying[key]
            flight.landed.set()


class _Flight:
    def __init__(self) -> None:
        self.landed = Event()
        self.error: Exception | None = None


class Snapshots:
    """The snapshots of this host that are ours, by name. Methods that run a command raise CommandError."""

    def __init__(self, work: Workplace) -> None:
        self._runtime = work.ports.runtime
        self._locks = work.locks
        self._flights = Flights(work.clock, work.group)
        self._found: dict[str, Snapshot | None] = {}  # None: saved since the start
        self._forks: dict[str, str] = {}  # name -> id of the VM it is of; those of an earlier life are not trusted

    def load(self) -> None:
        """Read which there are; before it was read, there is none for us."""
        self._found = {snapshot.name: snapshot for snapshot in self._runtime.snapshots()}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def suspect(self, name: str) -> None:
        """It may be there by the time it matters: an earlier life was about to save it."""
        self._found.setdefault(name, None)

    def exists(self, name: str) -> bool:
        """Is it certainly there now?"""
        if name not in self._found:
            return False
        try:
            self._runtime.snapshot_inspect(name)
        except SnapshotNotFound:
            return False
        return True

    def get(self, name: str) -> Snapshot:
        """Its record. Raises SnapshotNotFound, CommandError."""
        return self._found.get(name) or self._runtime.snapshot_inspect(name)

    def save(self, name: str, vm_id: str) -> None:
        """Save a running VM; an older snapshot of that name makes room."""
        self._runtime.snapshot_save(name, vm_id)
        self._found[name] = None

    def drop(self, name: str, patience: float = RELEASE_S) -> None:
        """Remove it if it is there; waits a little for a clone that still reads from it. Raises SnapshotInUse when
        that takes longer."""
        if name in self._found:
            self._runtime.snapshot_remove(name, patience)
            self._found.pop(name, None)
            self._forks.pop(name, None)

    def fork_source(self, vm_name: str) -> str:
        """The id of the VM that the fork of that name is of; "" for none, and for one of an earlier life."""
        return self._forks.get(fork_name(vm_name), "")

    def fork(self, vm_name: str) -> str:
        """The name of a snapshot of that VM, saved now unless there is one of this very VM.

        However many want it at once, it is saved once: it takes about two seconds per GiB.
        """
        name = fork_name(vm_name)
        self._flights.run(name, lambda: self._fork(vm_name, name))
        return name

    def _fork(self, vm_name: str, name: str) -> None:
        with self._locks.held(vm_name):
            vm = self._runtime.inspect(vm_name)
            if self._forks.get(name) != vm.id or name not in self._found:
                self.save(name, vm.id)
                self._forks[name] = vm.id
