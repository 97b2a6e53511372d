"""What a kill would make us forget, in files: whose VMs are, and which leases are owed.

    leases-owed.json   {"<VM id>": ["<MAC>", ...]}: written down before a VM is removed, crossed out when its leases
                       were given back
    pods.json          {"<pod UID>": {"vm": "<VM name>", "os": "<os>", "macs": ["<MAC>", ...]}}: written down before the
                       first VM of a pod is made, and whenever its MACs change, until the pod is gone

A VM that is no more cannot be asked for its MACs, and a row of the lease file does not say whose it is: the host may
have VMs that are none of ours. So whoever removes a VM writes down its MACs first. In the same way nobody can tell by
the name of a VM whether a pod that names it has anything to do with it; and what its annotations say, anybody may have
written. So whoever makes a VM writes down for whom.

A file is replaced whole by a rename, so that a kill leaves either the old one or the new one. It is not flushed to the
disk: only a loss of power could tell the difference, and all probes would wait for the disk. It helps, and is never a
condition: what cannot be read or written is said in the log, and costs at most an address until its lease ends, or a VM
that stays because nobody knows that it was ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from vkcocoon_net import normalize_mac

__all__ = ["Claim", "Claims", "LeaseDebts"]

FILE = "leases-owed.json"
CLAIMS_FILE = "pods.json"
LONGEST = 4 * 1024 * 1024  # bytes; a VM takes about a hundred

T = TypeVar("T")

log = structlog.get_logger()


class _Kept(Generic[T]):
    """Entries by a key, of which each change is in a file before it returns."""

    file: ClassVar[str]
    what: ClassVar[str]  # for people
    unread: ClassVar[str]  # what is lost with a file that cannot be read
    unwritten: ClassVar[str]  # and with one that cannot be written

    def __init__(self, directory: str) -> None:
        """With what an earlier life left in ``directory``, which is made when something is to be kept there."""
        self._path = Path(directory) / self.file
        self._entries = self._read()
        self._lines: dict[str, tuple[T, str]] = {}  # what was written of each entry: most are as they were
        self._failing = False

    def _entry(self, document: Any) -> T | None:
        """One entry as it was read; None when it makes no sense, for then it is somebody else's writing."""
        raise NotImplementedError

    def _document(self, entry: T) -> Any:
        raise NotImplementedError

    def _read(self) -> dict[str, T]:
        try:
            with open(self._path, "rb") as file:
                document = json.loads(file.read(LONGEST))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._unreadable(str(error))
            return {}
        if not isinstance(document, dict):
            self._unreadable("not an object")
            return {}
        found = {key: self._entry(value) for key, value in document.items()}
        if wrong := [key for key, entry in found.items() if entry is None]:
            self._unreadable(f"what makes no sense is at {', '.join(sorted(wrong))[:200]}")
        return {key: entry for key, entry in found.items() if entry is not None}

    def _unreadable(self, why: str) -> None:
        log.warning(f"{self.what} cannot be read", file=str(self._path), error=why, consequence=self.unread)

    def _write(self) -> None:
        lines = {key: self._line(key, entry) for key, entry in sorted(self._entries.items())}
        self._lines = {key: (self._entries[key], line) for key, line in lines.items()}
        fresh = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh.write_text("{" + ",".join(lines.values()) + "\n}\n")
            os.replace(fresh, self._path)
        except OSError as error:
            if not self._failing:
                text = f"{self.what} cannot be written down"
                log.warning(text, file=str(self._path), error=str(error), consequence=self.unwritten)
            self._failing = True
        else:
            if self._failing:
                log.info(f"{self.what} can be written down again", file=str(self._path))
            self._failing = False

    def _line(self, key: str, entry: T) -> str:
        """A line of the file, whose writing must not take longer for each pod there is."""
        known = self._lines.get(key)
        if known is not None and known[0] is entry:
            return known[1]
        return f"\n {json.dumps(key)}: {json.dumps(self._document(entry))}"


class LeaseDebts(_Kept[frozenset[str]]):
    """The MACs whose leases are to be given back when their VM is no more, by the id of that VM."""

    file, what = FILE, "leases that are owed"
    unread = "addresses of VMs whose removal was interrupted are free again when their leases end"
    unwritten = "a kill in the middle of a removal leaves an address leased until its lease ends"

    def owed(self) -> Mapping[str, frozenset[str]]:
        """A copy: whoever walks it may switch greenlets or change it."""
        return dict(self._entries)

    def note(self, vm_id: str, macs: Set[str]) -> None:
        """That VM is about to be removed, and these MACs may have leases until it is."""
        before = self._entries.get(vm_id, frozenset())
        if not macs <= before or (macs and self._failing):
            self._entries[vm_id] = before | macs
            self._write()

    def settled(self, macs: Set[str]) -> None:
        """The leases of these MACs were given back, as well as could be."""
        left = {vm_id: rest for vm_id, owed in self._entries.items() if (rest := owed - macs)}
        if left != self._entries:
            self._entries = left
            self._write()

    def _entry(self, document: Any) -> frozenset[str] | None:
        return _macs(document) or None

    def _document(self, entry: frozenset[str]) -> Any:
        return sorted(entry)


@dataclass(frozen=True, slots=True)
class Claim:
    """What there may be of a pod on this host: the VM of that name, of that guest system, and leases of these MACs."""

    vm_name: str
    os: str
    macs: frozenset[str] = frozenset()


class Claims(_Kept[Claim]):
    """What was begun for which pod, by its UID."""

    file, what = CLAIMS_FILE, "VMs of pods"
    unread = "a VM that was being made when vk-cocoon ended stays when its pod is deleted"
    unwritten = "a VM that is being made when vk-cocoon ends stays when its pod is deleted"

    def get(self, uid: str) -> Claim | None:
        return self._entries.get(uid)

    def note(self, uid: str, claim: Claim | None) -> None:
        """From now on there may be this of that pod; None: nothing any more."""
        if claim is None:
            if self._entries.pop(uid, None) is not None:
                self._write()
        elif claim != self._entries.get(uid) or self._failing:
            self._entries[uid] = claim
            self._write()

    def keep(self, uids: Set[str]) -> None:
        """Forget all pods but these."""
        if left := self._entries.keys() - uids:
            for uid in left:
                del self._entries[uid]
            self._write()

    def _entry(self, document: Any) -> Claim | None:
        found = document if isinstance(document, dict) else {}
        vm_name, os_, macs = found.get("vm"), found.get("os"), _macs(found.get("macs"))
        if macs is None or not (isinstance(vm_name, str) and vm_name and isinstance(os_, str)):
            return None
        return Claim(vm_name, os_, macs)

    def _document(self, entry: Claim) -> Any:
        return {"vm": entry.vm_name, "os": entry.os, "macs": sorted(entry.macs)}


def _macs(listed: Any) -> frozenset[str] | None:
    """The MACs of a list; None when it is no list of them."""
    texts = listed if isinstance(listed, list) else [None]
    macs = [normalize_mac(text) if isinstance(text, str) else "" for text in texts]
    return frozenset(macs) if all(macs) else None
