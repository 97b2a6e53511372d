"""Leases that are owed back: written down before a VM is removed, crossed out when they were given back.

A VM that is no more cannot be asked for its MACs, and a row of the lease file does not say whose it is: the host may
have VMs that are none of ours. So whoever removes a VM writes down its MACs first. A daemon that is killed in between
leaves them to the next one, also when neither a pod nor a VM is there any more that could tell.

The file is one JSON object, `{"<VM id>": ["<MAC>", ...]}`, and is replaced whole by a rename, so that a kill leaves
either the old one or the new one. It is not flushed to the disk: only a loss of power could tell the difference, and
all probes would wait for the disk. It helps, and is never a condition: what cannot be read or written is said in the
log, and costs at most an address until its lease ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import structlog

from vkcocoon_net import normalize_mac

__all__ = ["LeaseDebts"]

FILE = "leases-owed.json"
LONGEST = 4 * 1024 * 1024  # bytes; a VM takes about a hundred

log = structlog.get_logger()


class LeaseDebts:
    """The MACs whose leases are to be given back when their VM is no more, by the id of that VM."""

    def __init__(self, directory: str) -> None:
        """With what an earlier life left in ``directory``, which is made when something is to be kept there."""
        self._path = Path(directory) / FILE
        self._owed = self._read()
        self._failing = False

    def owed(self) -> Mapping[str, frozenset[str]]:
        """A copy: whoever walks it may switch greenlets or change it."""
        return dict(self._owed)

    def note(self, vm_id: str, macs: Set[str]) -> None:
        """That VM is about to be removed, and these MACs may have leases until it is."""
        before = self._owed.get(vm_id, frozenset())
        if not macs <= before or (macs and self._failing):
            self._owed[vm_id] = before | macs
            self._write()

    def settled(self, macs: Set[str]) -> None:
        """The leases of these MACs were given back, as well as could be."""
        left = {vm_id: rest for vm_id, owed in self._owed.items() if (rest := owed - macs)}
        if left != self._owed:
            self._owed = left
            self._write()

    def _read(self) -> dict[str, frozenset[str]]:
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
        found = {vm_id: _macs(listed) for vm_id, listed in document.items()}
        if wrong := [vm_id for vm_id, macs in found.items() if not macs]:
            self._unreadable(f"no list of MACs at {', '.join(sorted(wrong))[:200]}")
        return {vm_id: macs for vm_id, macs in found.items() if macs}

    def _unreadable(self, why: str) -> None:
        consequence = "addresses of VMs whose removal was interrupted are free again when their leases end"
        log.warning("leases that are owed cannot be read", file=str(self._path), error=why, consequence=consequence)

    def _write(self) -> None:
        document = {vm_id: sorted(macs) for vm_id, macs in sorted(self._owed.items())}
        fresh = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh.write_text(json.dumps(document, indent=1) + "\n")
            os.replace(fresh, self._path)
        except OSError as error:
            if not self._failing:
                consequence = "a kill in the middle of a removal leaves an address leased until its lease ends"
                text = "leases that are owed cannot be written down"
                log.warning(text, file=str(self._path), error=str(error), consequence=consequence)
            self._failing = True
        else:
            if self._failing:
                log.info("leases that are owed can be written down again", file=str(self._path))
            self._failing = False


def _macs(listed: Any) -> frozenset[str]:
    """The MACs of one entry; none when it is not a list of them, for then it is somebody else's writing."""
    texts = listed if isinstance(listed, list) else []
    macs = [normalize_mac(text) if isinstance(text, str) else "" for text in texts]
    return frozenset(macs) if all(macs) else frozenset()
