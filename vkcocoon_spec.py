"""What a pod asks for: the annotation contract read into the orders that the command lines take.

Pure and strict in one direction only: what is missing gets the contract's default, what is wrong raises SpecError with
a sentence that names the annotation, its value and the way out. The provider reads a pod through this module and never
touches a raw input annotation itself. Written by the operator, these annotations are read-only for us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from vkcocoon_status import (
    ANNOTATION_GENERATION,
    ANNOTATION_HIBERNATE,
    ANNOTATION_PROBE_PORT,
    ANNOTATION_VM_NAME,
    ProviderFailure,
)
from vkcocoon_vms import CloneSpec, MacosSpec, RunSpec

__all__ = ["PodSpec", "SpecError", "parse_quantity", "probe_port"]

IMAGE = "cocoonset.cocoonstack.io/image"
MODE = "cocoonset.cocoonstack.io/mode"
OS = "cocoonset.cocoonstack.io/os"
STORAGE = "cocoonset.cocoonstack.io/storage"
NETWORK = "cocoonset.cocoonstack.io/network"
MANAGED = "cocoonset.cocoonstack.io/managed"
FORCE_PULL = "cocoonset.cocoonstack.io/force-pull"
BACKEND = "vm.cocoonstack.io/backend"
NO_DIRECT_IO = "vm.cocoonstack.io/no-direct-io"
RESTORE = "vm.cocoonstack.io/restore-from-hibernate"
KEEP_SNAPSHOT = "vm.cocoonstack.io/keep-snapshot-on-delete"
FORK_FROM = "vm.cocoonstack.io/fork-from"
CLONE_FROM_DIR = "vm.cocoonstack.io/clone-from-dir"

_IDENTITY = (ANNOTATION_VM_NAME, OS)

# cocoon refuses a longer name only after work was done; we say so before.
_VM_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?\d+)?", re.ASCII)
_FACTOR = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{suffix + "i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}


class SpecError(ProviderFailure):
    """A pod asks for something that cannot be; the message names the annotation, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod's wishes, read once per create or update. ``annotations`` are the pod's, ``resources`` container 0's."""

    vm_name: str
    annotations: Mapping[str, str]
    resources: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> PodSpec:
        annotations = pod["metadata"].get("annotations") or {}
        containers = (pod.get("spec") or {}).get("containers") or [{}]
        resources = containers[0].get("resources") or {}
        return cls(annotations.get(ANNOTATION_VM_NAME, "").strip(), annotations, resources)

    def with_identity_of(self, former: PodSpec) -> PodSpec:
        """The same wishes for the VM that ``former`` named: a VM cannot be renamed, nor become one of another tool."""
        annotations = {key: text for key, text in self.annotations.items() if key not in _IDENTITY}
        annotations |= {key: former.annotations[key] for key in _IDENTITY if key in former.annotations}
        return PodSpec(former.vm_name, annotations, self.resources)

    def flag(self, key: str) -> bool:
        """Booleans of the contract: exactly ``true`` is true, everything else is false."""
        return self.annotations.get(key) == "true"

    @property
    def managed(self) -> bool:
        return self.flag(MANAGED)

    @property
    def hibernate(self) -> bool:
        return self.flag(ANNOTATION_HIBERNATE)

    @property
    def restore(self) -> bool:
        return self.flag(RESTORE)

    @property
    def force_pull(self) -> bool:
        return self.flag(FORCE_PULL)

    @property
    def keep_snapshot(self) -> bool:
        return self.flag(KEEP_SNAPSHOT)

    @property
    def os(self) -> str:
        return self.annotations.get(OS, "").strip().casefold() or "linux"

    @property
    def macos(self) -> bool:
        return self.managed and self.os == "macos"

    @property
    def generation(self) -> int:
        """The operator's generation; missing or unreadable reads as 0."""
        text = self.annotations.get(ANNOTATION_GENERATION, "")
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0

    @property
    def image(self) -> str:
        return self.annotations.get(IMAGE, "").strip()

    @property
    def run_mode(self) -> bool:
        """Anything but ``run`` behaves as clone."""
        return self.annotations.get(MODE, "").strip().casefold() == "run"

    def check_name(self) -> None:
        if not _VM_NAME.fullmatch(self.vm_name):
            raise SpecError(
                f"annotation {ANNOTATION_VM_NAME}={self.vm_name!r} is no VM name: 1 to 63 letters, digits, dots, "
                "underscores and hyphens, the first a letter or digit"
            )

    def run_spec(self) -> RunSpec:
        """The order for ``cocoon vm run``: vCPU from the limit (rounded up), else the request; memory the other way."""
        self._refuse_unbuilt_sources()
        self._need_image()
        return RunSpec(
            name=self.vm_name,
            image=self.image,
            cpu=self._cpus(),
            memory=self._memory(),
            storage=self._storage(),
            network=self.annotations.get(NETWORK, ""),
            windows=self.os == "windows",
            firecracker=self._firecracker,
            no_direct_io=self.flag(NO_DIRECT_IO),
        )

    def clone_spec(self, snapshot: str = "") -> CloneSpec:
        """The order for ``cocoon vm clone`` of ``snapshot``, or of the image annotation (``repo[:tag]``)."""
        if not snapshot:
            self._refuse_unbuilt_sources()
            self._need_image()
        return CloneSpec(
            name=self.vm_name,
            snapshot=snapshot or self.image.removesuffix(":latest"),
            network=self.annotations.get(NETWORK, ""),
            no_direct_io=self.flag(NO_DIRECT_IO),
            firecracker=self._firecracker,
        )

    def macos_spec(self, vnc: int) -> MacosSpec:
        """The order for ``cocoon-macos vm run``: an even number of vCPUs, memory in whole MiB, storage in bytes."""
        self._need_image()
        cpus = self._cpus() or 4
        memory = self._memory()
        return MacosSpec(
            name=self.vm_name,
            image=self.image,
            cpu=cpus + cpus % 2,
            memory_mib=memory // 2**20 if memory else 8192,
            storage=int(self._storage() or 0),
            vnc=vnc,
        )

    @property
    def _firecracker(self) -> bool:
        return self.annotations.get(BACKEND, "").strip() == "firecracker"

    def _need_image(self) -> None:
        if not self.image:
            raise SpecError(f"annotation {IMAGE} is missing: it names what the VM is made from")

    def _refuse_unbuilt_sources(self) -> None:
        """A source that we cannot serve yet must not silently become another one."""
        for key in (FORK_FROM, CLONE_FROM_DIR):
            if self.annotations.get(key):
                raise SpecError(f"annotation {key}={self.annotations[key]!r} is not supported by this version")

    def _resource(self, name: str, *order: str) -> int:
        for kind in order:
            if text := (self.resources.get(kind) or {}).get(name):
                return _round_up(text, f"resources.{kind}.{name}")
        return 0

    def _cpus(self) -> int:
        return self._resource("cpu", "limits", "requests")

    def _memory(self) -> int:
        return self._resource("memory", "requests", "limits")

    def _storage(self) -> str:
        text = self.annotations.get(STORAGE, "").strip()
        return str(_round_up(text, f"annotation {STORAGE}")) if text else ""


def probe_port(annotations: Mapping[str, str]) -> int | None:
    """The declared probe port, or None when none is declared (O1).

    Raises SpecError for anything that is not 1 to 5 ASCII digits with a value of 1 to 65535 once blanks are stripped:
    falling back to an echo would call a guest ready whose service nobody checked.
    """
    text = annotations.get(ANNOTATION_PROBE_PORT, "")
    if not text:
        return None
    digits = text.strip()
    if len(digits) <= 5 and digits.isascii() and digits.isdigit() and 1 <= int(digits) <= 65535:
        return int(digits)
    raise SpecError(f"annotation {ANNOTATION_PROBE_PORT}={text!r} is no port: decimal digits, 1 to 65535")


def parse_quantity(text: str) -> Decimal:
    """A Kubernetes quantity as a number (``500m`` is 0.5, ``4Gi`` is 4294967296). Raises ValueError."""
    match = _QUANTITY.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is no quantity")
    number, suffix = match.groups()
    try:
        return Decimal(number) * (_FACTOR[suffix or ""] if (suffix or "") in _FACTOR else Decimal(f"1{suffix}"))
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is no quantity") from error


def _round_up(text: str, what: str) -> int:
    try:
        value = parse_quantity(str(text))
    except ValueError as error:
        raise SpecError(f"{what}={text!r} is no quantity such as 2, 500m or 20Gi") from error
    if value <= 0:
        raise SpecError(f"{what}={text!r} must be more than zero")
    return int(value.to_integral_value(rounding="ROUND_CEILING"))
