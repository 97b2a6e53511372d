"""What a pod asks for: the annotation contract read into the orders that the command lines take.

Pure and strict in one direction only: what is missing gets the contract's default, what is wrong raises SpecError with
a sentence that names the annotation, its value and the way out. The provider reads a pod through this module and never
touches a raw input annotation itself. Written by the operator, these annotations are read-only for us.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, TypedDict

from vkcocoon_quantity import parse_quantity, whole_number
from vkcocoon_status import (
    ANNOTATION_GENERATION,
    ANNOTATION_HIBERNATE,
    ANNOTATION_PROBE_PORT,
    ANNOTATION_VM_NAME,
    ProviderFailure,
)
from vkcocoon_vms import CloneSpec, MacosSpec, RunSpec

__all__ = ["EvidenceError", "PodSpec", "SpecError", "probe_port"]

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
SNAPSHOT_POLICY = "cocoonset.cocoonstack.io/snapshot-policy"
CPU_CLASS = "cocoonstack.io/snapshot-cpu-class"  # a node selector

LONGEST_SNAPSHOT_NAME = 63
CPU_PERIOD_US = 100_000  # the kernel's own default
LEAST_CPU_QUOTA_US = 1_000  # the kernel refuses less

_IDENTITY = (ANNOTATION_VM_NAME, OS)

# cocoon refuses a longer name only after work was done; we say so before.
_VM_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


class SpecError(ProviderFailure):
    """A pod asks for something that cannot be; the message names the annotation, the value and what is allowed."""

    reason = "CreateBringUpFailed"  # of the Event that tells of it


class EvidenceError(SpecError):
    """What is left of an earlier life of the VM contradicts what the pod asks for."""

    reason = "HibernateEvidenceFailed"


class CpuPolicy(TypedDict, total=False):
    """What a VM's cgroup is told; what is not in it is left to cocoon."""

    cpu_weight: int
    cpu_quota_us: int
    cpu_period_us: int


@dataclass(frozen=True)
class PodSpec:
    """A pod's wishes, read once per create or update. ``annotations`` are the pod's, ``resources`` container 0's.

    What every probe asks for is kept once it was read: the annotations of one spec never change.
    """

    vm_name: str
    annotations: Mapping[str, str]
    resources: Mapping[str, Mapping[str, str]]
    cpu_class: str = ""  # the class of hosts its node selector asks for
    main: bool = False  # the first VM of its CocoonSet

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> PodSpec:
        metadata, spec = pod["metadata"], pod.get("spec") or {}
        annotations = metadata.get("annotations") or {}
        resources = (spec.get("containers") or [{}])[0].get("resources") or {}
        vm_name = annotations.get(ANNOTATION_VM_NAME, "").strip()
        cpu_class = (spec.get("nodeSelector") or {}).get(CPU_CLASS, "")
        return cls(vm_name, annotations, resources, cpu_class, _is_main(metadata, vm_name))

    def with_identity_of(self, former: PodSpec) -> PodSpec:
        """The same wishes for the VM that ``former`` named: a VM cannot be renamed, nor become one of another tool."""
        annotations = {key: text for key, text in self.annotations.items() if key not in _IDENTITY}
        annotations |= {key: former.annotations[key] for key in _IDENTITY if key in former.annotations}
        return replace(self, vm_name=former.vm_name, annotations=annotations)

    def of_vm(self, vm_name: str, os: str) -> PodSpec:
        """The same wishes for the VM of that name and guest system, whatever the annotations say by now."""
        annotations = {**self.annotations, ANNOTATION_VM_NAME: vm_name, OS: os}
        return replace(self, vm_name=vm_name, annotations=annotations)

    def flag(self, key: str) -> bool:
        """Booleans of the contract: exactly ``true`` is true, everything else is false."""
        return self.annotations.get(key) == "true"

    @cached_property
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

    @cached_property
    def os(self) -> str:
        return self.annotations.get(OS, "").strip().casefold() or "linux"

    @cached_property
    def macos(self) -> bool:
        return self.managed and self.os == "macos"

    @property
    def generation(self) -> int:
        """The operator's generation; missing or unreadable reads as 0."""
        return whole_number(self.annotations.get(ANNOTATION_GENERATION, "")) or 0

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

    def check_cpu_class(self, ours: str) -> None:
        """A memory image only fits the CPUs it was made on. Raises SpecError for a pod that was sent elsewhere."""
        if self.cpu_class and self.cpu_class != ours:
            here = f"this node is {ours!r}" if ours else "this node has none (VK_SNAPSHOT_CPU_CLASS)"
            raise SpecError(f"node selector {CPU_CLASS}={self.cpu_class!r}: {here}")

    @property
    def fork_from(self) -> str:
        """The VM whose state this one begins with; "" for none."""
        return self.annotations.get(FORK_FROM, "").strip()

    @property
    def clone_from_dir(self) -> str:
        """The directory of an exported snapshot; "" for none. It wins over mode, and contradicts what it cannot."""
        directory = self.annotations.get(CLONE_FROM_DIR, "")
        if not directory:
            return ""
        if not os.path.isabs(directory) or os.path.normpath(directory) != directory or directory.startswith("//"):
            raise SpecError(f"annotation {CLONE_FROM_DIR}={directory!r} is no absolute path in its shortest form")
        if self.run_mode or self.fork_from:
            other = FORK_FROM if self.fork_from else MODE
            raise SpecError(
                f"annotation {CLONE_FROM_DIR}={directory!r} contradicts {other}={self.annotations[other]!r}: "
                "a VM has one source"
            )
        return directory

    @property
    def saved_at_deletion(self) -> bool:
        """Whether the state of the VM outlives its pod: always unless said otherwise, or only that of a set's main."""
        policy = self.annotations.get(SNAPSHOT_POLICY, "")
        return self.main if policy == "main-only" else policy != "never"

    def run_spec(self) -> RunSpec:
        """The order for ``cocoon vm run``: vCPU from the limit (rounded up), else the request; memory the other way."""
        self._need_image()
        return RunSpec(
            name=self.vm_name,
            image=self.image,
            cpu=self._cpus(),
            memory=self._memory(),
            storage=self._storage(),
            network=self.annotations.get(NETWORK, ""),
            windows=self.os == "windows",
            firecracker=self.firecracker,
            no_direct_io=self.flag(NO_DIRECT_IO),
            **self._cpu_policy(),
        )

    def clone_spec(
        self, snapshot: str = "", *, from_dir: str = "", restore_mode: str = "", nics: int | None = None
    ) -> CloneSpec:
        """The order for ``cocoon vm clone``: of ``from_dir``, of ``snapshot``, or of the image annotation
        (``repo[:tag]``). How many CPUs and how much memory it has is the snapshot's business."""
        if not snapshot and not from_dir:
            snapshot = self._image_snapshot()
        return CloneSpec(
            name=self.vm_name,
            snapshot=snapshot,
            from_dir=from_dir,
            network=self.annotations.get(NETWORK, ""),
            no_direct_io=self.flag(NO_DIRECT_IO),
            # Windows notices when memory arrives late.
            restore_mode="copy" if restore_mode and self.os == "windows" else restore_mode,
            firecracker=self.firecracker,
            nics=nics,
            **self._cpu_policy(),
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
    def firecracker(self) -> bool:
        return self.annotations.get(BACKEND, "").strip() == "firecracker"

    def _image_snapshot(self) -> str:
        self._need_image()
        name = self.image.removesuffix(":latest")
        if len(name) > LONGEST_SNAPSHOT_NAME:
            longest = f"a snapshot has a name of at most {LONGEST_SNAPSHOT_NAME} characters"
            raise SpecError(f"annotation {IMAGE}={self.image!r}: {longest}")
        return name

    def _need_image(self) -> None:
        if not self.image:
            raise SpecError(f"annotation {IMAGE} is missing: it names what the VM is made from")

    def _cpu_policy(self) -> CpuPolicy:
        """What Kubernetes promises a container, for the cgroup of the VM: a share of busy CPUs by the request (which is
        the limit where there is none), at most so much by the limit."""
        request = self._milli_cpus("requests") or self._milli_cpus("limits")
        limit = self._milli_cpus("limits")
        policy = CpuPolicy()
        if request:
            # As the kubelet and its runtimes turn CPUs into shares of cgroup v1, and those into the weight of v2.
            shares = min(max(request * 1024 // 1000, 2), 262_144)
            policy["cpu_weight"] = 1 + (shares - 2) * 9999 // 262_142
        if limit:
            policy["cpu_quota_us"] = max(limit * CPU_PERIOD_US // 1000, LEAST_CPU_QUOTA_US)
            policy["cpu_period_us"] = CPU_PERIOD_US
        return policy

    def _milli_cpus(self, kind: str) -> int:
        text = (self.resources.get(kind) or {}).get("cpu")
        return int(_amount(text, f"resources.{kind}.cpu") * 1000) if text else 0

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
    port = whole_number(text.strip(), digits=5)
    if port is not None and 1 <= port <= 65535:
        return port
    raise SpecError(f"annotation {ANNOTATION_PROBE_PORT}={text!r} is no port: decimal digits, 1 to 65535")


def _is_main(metadata: Mapping[str, Any], vm_name: str) -> bool:
    """Slot 0 of the set that owns the pod: told by the owner and the VM's name, since a pod may be called anything."""
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("kind") == "CocoonSet"]
    return any(vm_name == f"vk-{metadata.get('namespace', 'default')}-{owner.get('name')}-0" for owner in owners)


def _amount(text: str, what: str) -> Decimal:
    try:
        value = parse_quantity(str(text).strip())
    except ValueError as error:
        raise SpecError(f"{what}={text!r} is no quantity such as 2, 500m or 20Gi") from error
    if value <= 0:
        raise SpecError(f"{what}={text!r} must be more than zero")
    return value


def _round_up(text: str, what: str) -> int:
    return int(_amount(text, what).to_integral_value(rounding="ROUND_CEILING"))
