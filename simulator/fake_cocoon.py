"""The fake `cocoon`: the microVM command line, its records, its odd corners.

Records are the documents the real tool prints, kept under a lock and saved whole. A call holds the VM's operation lock
from the moment its name is taken until it is done, so concurrent calls about one VM queue as they do in reality, and a
call that is killed leaves exactly what it had recorded: a `creating` placeholder that holds the name, a pending
snapshot, a hypervisor nobody knows about.

A VM's stored state says what was last done to it; what is shown is compared with its process first, and a dead one
reads `stopped (stale)`. Nobody is told of a death: the event stream looks every five seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from simulator.chance import branch
from simulator.fake_tools import Call, Host, Killed, Knob, Machine, Outcome, Parsed, Refusal, Step, Tool, Verb, pretty

__all__ = ["FakeCocoon"]

Record = dict[str, Any]

STALE = "stopped (stale)"
UNITS = {"": 1, "B": 1} | {unit + b: 2 ** (10 * n) for n, unit in enumerate("KMGT", 1) for b in ("", "B", "iB")}
LEAST_MEMORY, LEAST_STORAGE = 512 * UNITS["M"], 10 * UNITS["G"]
ID_LETTERS, ID_LENGTH, LEAST_PREFIX = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 26, 3
WINDOWS = re.compile(r"\bwin|windows", re.IGNORECASE)  # how an image says that a disk image is inside, not layers
VM_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
SNAPSHOT_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:/-]{0,62}")
DIRECTORIES = {"cloud-hypervisor": "cloudhypervisor", "firecracker": "firecracker"}

POLICY = {"cpu-weight": int, "cpu-quota-us": int, "cpu-period-us": int, "cpu-burst-us": int, "cpuset-cpus": str}
OUTPUT = {"output": str}
CREATE = {
    "name": str,
    "network": str,
    "nics": int,
    "bridge": str,
    "no-direct-io": bool,
    "pci": bool,
    **POLICY,
    **OUTPUT,
}
RUN_SIZES = {"cpu": int, "memory": str, "storage": str, "queue-size": int, "disk-queue-size": int, "data-disk": list}
RUN_SWITCHES = ("windows", "fc", "shared-memory", "hugepages", "mergeable", "no-watchdog", "no-balloon")
RUN = {**CREATE, **RUN_SIZES, **dict.fromkeys(RUN_SWITCHES, bool), "user": str, "password": str}
CLONE = {**CREATE, "from-dir": str, "pull": bool, "restore-mode": str}
STATUS = {"event": bool, "watch": bool, "format": str, "interval": int}
SHORT_O = {"o": "output"}

VERBS = (
    Verb("vm run", RUN, shorts=SHORT_O),
    Verb("vm clone", CLONE, 0, shorts=SHORT_O),
    Verb("vm start", OUTPUT, 1, None, SHORT_O),
    Verb("vm stop", {**OUTPUT, "force": bool, "timeout": int}, 1, None, SHORT_O),
    Verb("vm rm", {**OUTPUT, "force": bool}, 1, None, {**SHORT_O, "f": "force"}),
    Verb("vm list", OUTPUT, 0, 0, SHORT_O),
    Verb("vm ls", OUTPUT, 0, 0, SHORT_O),
    Verb("vm inspect", {}),
    Verb("vm status", STATUS, 0, None, {"n": "interval"}),
    Verb("vm exec", {"interactive": bool, "env": list}, 2, None, {"i": "interactive", "e": "env"}),
    Verb("vm logs", {"follow": bool, "tail": int}, shorts={"f": "follow"}),
    Verb("vm net", {**OUTPUT, "nics": int}, shorts=SHORT_O),
    Verb("vm reconcile-stale-create", OUTPUT, shorts=SHORT_O),
    Verb("snapshot save", {"name": str, "description": str}),
    Verb("snapshot inspect", {}),
    Verb("snapshot list", {**OUTPUT, "vm": str}, 0, 0, SHORT_O),
    Verb("snapshot rm", {}, 1, None),
    Verb("image pull", {"force": bool}, 1, None),
    Verb("image inspect", {}),
    Verb("image list", OUTPUT, 0, 0, SHORT_O),
)
NEWER_VERBS = ("vm reconcile-stale-create", "vm exec", "vm logs")


class FakeCocoon(Tool):
    """One host's cocoon. What a call is about (the `name` of a fault): a VM's name or id, a snapshot, an image."""

    PROGRAM = "cocoon"
    SHARED_FLAGS = dict.fromkeys(
        ("config", "root-dir", "run-dir", "log-dir", "log-level", "cni-conf-dir", "cni-bin-dir", "dns"), str
    )
    VERBS: Mapping[str, Verb] = {verb.name: verb for verb in VERBS}

    old = Knob(False)  # a cocoon without `vm reconcile-stale-create`, `vm exec` and `vm logs`
    empty_sentence = Knob(False)  # `No VMs found.` instead of `[]`
    list_hides_stale = Knob(False)  # `vm list` shows the stored state, as older versions do
    clone_hides_pid = Knob(True)  # the record a clone prints has pid 0
    run_hides_start = Knob(False)  # the record a run prints was read before the start: `created`, pid 0
    empty_network = Knob(False)  # NICs with DHCP carry an empty `network` object
    daemon = Knob(False)  # the optional daemon: a dead hypervisor is stored as stopped when it is noticed
    host_cpus = Knob(64)
    event_interval_s = Knob(5.0)
    event_debounce_s = Knob(0.2)
    exec_replies: Knob[dict[str, list[Any]]] = Knob({})  # guest command, joined by blanks -> [exit status, stdout]
    # Snapshots and images that were there before the story begins, by patterns of their names.
    golden = Knob(("*base*", "*golden*"))
    # conflist -> first three octets of the addresses it assigns, "" when they come by DHCP
    networks = Knob({"cocoon-dhcp": "", "cocoon-static": "10.22.0"})

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._listed: tuple[object, str] = None, ""  # what the newest JSON list was made of, and its text
        self._performers: dict[str, Callable[[Parsed, Call], Outcome]] = {
            "vm run": self._run_vm,
            "vm clone": self._clone,
            "vm start": self._start,
            "vm stop": self._stop,
            "vm rm": self._remove,
            "vm list": self._list,
            "vm ls": self._list,
            "vm inspect": self._inspect,
            "vm exec": self._exec,
            "vm logs": self._logs,
            "vm net": self._net,
            "vm reconcile-stale-create": self._reconcile_stale_create,
            "snapshot save": self._save,
            "snapshot inspect": self._inspect_snapshot,
            "snapshot list": self._list_snapshots,
            "snapshot rm": self._remove_snapshots,
            "image pull": self._pull,
            "image inspect": self._inspect_image,
            "image list": self._list_images,
        }

    # Knobs and views for tests

    def fail_listing(self, times: int = 1) -> None:
        """The event stream's next looks cannot read the list: DELETED for every VM, ADDED again afterwards."""
        self.fail("events list", times=times)

    def tear_line(self, text: str = '{"event":"MODIF') -> None:
        """The event stream prints, at its next look, a line that is not whole JSON."""
        self.garble("events line", text)

    def end_stream(self) -> None:
        """The event stream ends at its next look, with exit 0."""
        self.fail("events end")

    def record(self, ref: str) -> Record | None:
        """The stored record of a VM by id or name, with the pid as stored; None when there is none."""
        return next((vm for vm in self._all().values() if ref in (vm["id"], vm["config"]["name"])), None)

    def set_record(self, ref: str, **members: Any) -> None:
        """Changes the stored record behind the tool's back, say `state="creating"`."""
        found = self.record(ref)
        if found is None:
            raise KeyError(ref)
        self._change(found["id"], **members)

    def add_image(self, ref: str) -> None:
        """Makes an image local without pulling it; an older one of that name goes."""
        image = self._new_image(ref)
        with self.host.storage.edit(self.key("images"), dict) as images:
            images[ref] = image

    def add_snapshot(self, name: str, **members: Any) -> None:
        """Makes a finished snapshot as an import would, say `hypervisor="firecracker"`, in place of an older one."""
        snapshot = {**self._imported_snapshot(name), **members}
        with self._snapshots() as snapshots:
            for old in [each["id"] for each in snapshots.values() if each["name"] == name]:
                del snapshots[old]
            snapshots[snapshot["id"]] = snapshot

    def add_log(self, ref: str, *texts: str) -> None:
        """The hypervisor of a VM has something to say."""
        record = self._existing(self._resolve(ref))
        with self.host.storage.edit(_log_key(record["id"]), list) as lines:
            lines += [self._log_line(record, text) for text in texts]

    def hold_lock(self, ref: str) -> AbstractContextManager[None]:
        """Holds a VM's operation lock, as a call in flight does."""
        return self.host.storage.lock(self._lock_key(self._resolve(ref)))

    def lease_snapshot(self, name: str) -> AbstractContextManager[None]:
        """Reads from a snapshot, as a clone in flight does: it cannot be removed meanwhile."""
        return self.host.storage.share(self._lease_key(self._snapshot(name)["id"]))

    # One call

    def names(self, parsed: Parsed) -> list[str]:
        names = [text for flag in ("name",) if flag in parsed.verb.flags and (text := parsed[flag])]
        for operand in parsed.operands:
            names.append(operand)
            if parsed.verb.name.startswith("vm") and (vm := self.record(operand)):
                names += [vm["id"], vm["config"]["name"]]
        return names

    def complain(self, sentence: str) -> str:
        return f"Error: {sentence}\n"

    def perform(self, parsed: Parsed, call: Call) -> Outcome:
        verb = parsed.verb.name
        if self.old and verb in NEWER_VERBS:
            raise Refusal(f'unknown command "{verb.split()[1]}" for "cocoon vm"')
        if verb not in self._performers:
            raise Refusal(f"{verb}: only the event stream (--event) is simulated")
        return self._performers[verb](parsed, call)

    # Creating

    def _run_vm(self, parsed: Parsed, call: Call) -> Outcome:
        image = self._image(parsed.operands[0])
        self._check_run(parsed, image)
        hypervisor = "firecracker" if parsed["fc"] else "cloud-hypervisor"
        config = {
            "cpu": parsed["cpu"] or 2,
            "memory": _size(parsed["memory"], "memory", LEAST_MEMORY, UNITS["G"]),
            "storage": _size(parsed["storage"], "storage", LEAST_STORAGE, LEAST_STORAGE),
            "image": image["name"],
            "image_digest": image["id"],
            "image_type": image["type"],
            **({"windows": True} if parsed["windows"] else {}),
        }
        record = self._new_record(parsed, hypervisor, config, default_name="cocoon-")
        identifier = record["id"]
        with self._created(record):
            call.reach(Step.MIDDLE)
            self._change(identifier, state="created", network_configs=self._nics(record, parsed))
            with self._error_state(identifier):
                before = self._shown(self._all()[identifier])
                self._boot(identifier, call, "boot")
        return Outcome(0, pretty(before if self.run_hides_start else self._shown(self._all()[identifier])))

    def _check_run(self, parsed: Parsed, image: Record) -> None:
        if parsed["fc"] and parsed["windows"]:
            raise Refusal("--fc does not support --windows")
        if parsed["windows"] and image["type"] == "oci":
            raise Refusal("--windows needs a cloud image, not an OCI image")
        if parsed["fc"] and image["type"] == "cloudimg":
            raise Refusal("--fc does not support cloud images")
        if parsed.flags.get("cpu", 1) < 1:
            raise Refusal("--cpu must be at least 1")
        if parsed["cpu"] > self.host_cpus:
            raise Refusal(f"--cpu {parsed['cpu']} exceeds the {self.host_cpus} CPUs of this host")

    def _clone(self, parsed: Parsed, call: Call) -> Outcome:
        source = self._clone_source(parsed)
        if source["hypervisor"] == "firecracker" and ("nics" in parsed.flags or parsed["restore-mode"]):
            raise Refusal("--nics and --restore-mode need cloud-hypervisor")
        if parsed["restore-mode"] not in ("", "copy", "ondemand", "mmap"):
            raise Refusal(f"unknown restore mode {parsed['restore-mode']!r}")
        copied = ("cpu", "memory", "storage", "image", "image_digest", "image_type", "windows")
        config = {key: source[key] for key in copied if key in source}
        record = self._new_record(parsed, source["hypervisor"], config, default_name="cocoon-clone-")
        network = {"network": parsed["network"] or source.get("network", "")}
        nics = parsed["nics"] if "nics" in parsed.flags else source.get("nics", 1)
        identifier = record["id"]
        with self.host.storage.share(self._lease_key(source["id"])), self._created(record):
            call.reach(Step.MIDDLE)
            self._change(identifier, network_configs=self._nics(record, parsed, nics, network["network"]))
            self._boot(identifier, call, "clone", resumed=True)
        shown = self._shown(self._all()[identifier])
        if self.clone_hides_pid:
            shown = {key: value for key, value in shown.items() if key != "socket_path"} | {"pid": 0}
        return Outcome(0, pretty(shown))

    def _clone_source(self, parsed: Parsed) -> Record:
        directory = parsed["from-dir"]
        if bool(directory) == bool(parsed.operands):
            raise Refusal("exactly one of SNAPSHOT and --from-dir is needed")
        if not directory:
            try:
                return self._snapshot(parsed.operands[0])
            except Refusal as refusal:
                raise Refusal(f"inspect snapshot {parsed.operands[0]}: {refusal}") from None
        try:
            envelope = json.loads(Path(directory, "snapshot.json").read_text())
            return {"id": self._new_id(), **envelope["config"]}
        except FileNotFoundError:
            raise Refusal(f"load envelope: open {directory}/snapshot.json: no such file or directory") from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Refusal(f"load envelope: {error}") from None

    def _new_record(self, parsed: Parsed, hypervisor: str, config: Record, default_name: str) -> Record:
        """A placeholder. Raises Refusal for what is refused before anything is made."""
        identifier = self._new_id(parsed["name"])
        name = parsed["name"] or default_name + identifier[:8].lower()
        if not VM_NAME.fullmatch(name):
            raise Refusal(f'invalid VM name "{name}": must match ^{VM_NAME.pattern}$')
        if parsed["bridge"] and parsed["network"]:
            raise Refusal("--bridge and --network exclude each other")
        network = parsed["network"] or next(iter(self.networks))
        if network not in self.networks:
            raise Refusal(f'conflist "{network}" not found (available: {", ".join(self.networks)})')
        switches = {"no_direct_io": True} if parsed["no-direct-io"] else {}
        return {
            "id": identifier,
            "hypervisor": hypervisor,
            "state": "creating",
            "config": {**config, "network": network, "name": name, **switches},
            "pid": 0,
            "first_booted": False,
            "transition_generation": 1,
            "last_transition_reason": "create",
            "created_at": self._now(),
            "updated_at": self._now(),
        }

    @contextmanager
    def _created(self, record: Record) -> Iterator[None]:
        """Takes the name and holds the lock; gives the name back when the block fails before it is `created`."""
        identifier, name = record["id"], record["config"]["name"]
        with self.host.storage.lock(self._lock_key(identifier)):
            with self._vms() as vms:
                if taken := next((vm for vm in vms.values() if vm["config"]["name"] == name), None):
                    raise Refusal(f'reserve VM record: vm name "{name}" already exists (id: {taken["id"]})')
                vms[identifier] = record
            try:
                yield
            except Killed:
                raise
            except BaseException:
                with self._vms() as vms:
                    if vms.get(identifier, {}).get("state") == "creating":
                        del vms[identifier]
                raise

    @contextmanager
    def _error_state(self, identifier: str) -> Iterator[None]:
        """A start that fails leaves the record, in state `error`."""
        try:
            yield
        except Killed:
            raise
        except BaseException:
            self._change(identifier, "error", state="error", pid=0)
            raise

    def _boot(self, identifier: str, call: Call, reason: str, *, resumed: bool = False) -> None:
        record = self._all()[identifier]
        pid = self.host.power_on(self._machine(record, resumed))
        try:
            call.reach(Step.LATE)
        except Killed:
            raise
        except BaseException:
            self.host.power_off(pid)
            raise
        self._change(identifier, reason, state="running", pid=pid, first_booted=True, started_at=self._now())
        with self.host.storage.edit(_log_key(identifier), list) as lines:
            lines[:] = [self._log_line(record, f"booted {record['config']['name']} in process {pid}")]

    def _machine(self, record: Record, resumed: bool) -> Machine:
        directory = self._run_directory(record)
        nic = (record.get("network_configs") or [{}])[0]
        return Machine(
            name=record["config"]["name"],
            vm_id=record["id"],
            mac=nic.get("mac", ""),
            os="windows" if record["config"].get("windows") else "linux",
            argv=(record["hypervisor"], "--api-socket", f"{directory}/api.sock"),
            static_ip=nic.get("network", {}).get("ip", ""),
            resumed=resumed,
        )

    def _nics(self, record: Record, parsed: Parsed, count: int | None = None, network: str = "") -> list[Record]:
        wanted = count if count is not None else parsed["nics"] if "nics" in parsed.flags else 1
        network = network if network in self.networks else record["config"]["network"]
        return [self._nic(record, index, network, parsed["bridge"]) for index in range(wanted)]

    def _nic(self, record: Record, index: int, network: str, bridge: str = "") -> Record:
        """A fresh network card: a new MAC every time, whatever the VM was made from."""
        identifier, rng = record["id"], branch(self.host.rng, "mac", record["config"]["name"])
        mac = "0a:58:" + ":".join(f"{rng.getrandbits(8):02x}" for _ in range(4))
        queues = {"mac": mac, "num_queues": 2 * record["config"]["cpu"], "queue_size": 512}
        if bridge:
            return {"tap": f"bt{identifier[:8]}-{index}", **queues, "backend": "bridge", "bridge_dev": bridge}
        nic = {"tap": f"tap{identifier[:8]}-{index}", **queues, "backend": "cni", "netns_path": self._netns(record)}
        if octets := self.networks[network]:
            address = f"{octets}.{self._free_host_number(octets)}"
            return {**nic, "network": {"ip": address, "gateway": f"{octets}.1", "prefix": 24}}
        return {**nic, "network": {}} if self.empty_network else nic

    def _free_host_number(self, octets: str) -> int:
        nics = [nic for vm in self._all().values() for nic in vm.get("network_configs", ())]
        taken = {nic["network"]["ip"] for nic in nics if nic.get("network")}
        return next(number for number in range(2, 255) if f"{octets}.{number}" not in taken)

    # Power and removal

    def _start(self, parsed: Parsed, call: Call) -> Outcome:
        return self._each(parsed, "started", lambda identifier: self._start_one(identifier, call))

    def _start_one(self, identifier: str, call: Call) -> None:
        if self._state(self._existing(identifier)) == "running":
            return
        if self._existing(identifier)["state"] == "creating":
            raise Refusal(f"start VM {identifier}: VM is still being created")
        with self._error_state(identifier):
            call.reach(Step.MIDDLE)
            self._boot(identifier, call, "restart")

    def _stop(self, parsed: Parsed, call: Call) -> Outcome:
        def stop(identifier: str) -> None:
            record = self._existing(identifier)
            if record["state"] == "running":
                call.reach(Step.MIDDLE)
                self.host.power_off(record["pid"])
                self._change(identifier, "stop-user", state="stopped", pid=0, stopped_at=self._now())

        return self._each(parsed, "stopped", stop)

    def _remove(self, parsed: Parsed, call: Call) -> Outcome:
        def remove(identifier: str) -> None:
            record = self._existing(identifier)
            if self._state(record) == "running":
                if not parsed["force"]:
                    raise Refusal(f"vm {identifier}: stop before delete: running (force required)")
                call.reach(Step.MIDDLE)
            self.host.power_off(record["pid"])
            call.reach(Step.LATE)
            self.host.storage.delete(_run_key(record))
            self.host.storage.delete(_log_key(identifier))
            with self._vms() as vms:
                vms.pop(identifier, None)

        return self._each(parsed, "deleted VM", remove)

    def _each(self, parsed: Parsed, done: str, action: Callable[[str], None]) -> Outcome:
        """Acts on each operand under its operation lock; waits for whoever holds it."""
        succeeded = []
        for ref in parsed.operands:
            identifier = self._resolve(ref)
            with self.host.storage.lock(self._lock_key(identifier)):
                action(identifier)
            succeeded.append(identifier)
        stdout = pretty({"succeeded": succeeded}) if parsed["output"] == "json" else ""
        return Outcome(0, stdout, "".join(f"{done}: {identifier}\n" for identifier in succeeded))

    def _reconcile_stale_create(self, parsed: Parsed, _call: Call) -> Outcome:
        try:
            identifier = self._resolve(parsed.operands[0])
        except Refusal:
            return Outcome(0, pretty({"outcome": "not-found"}))
        outcome = "busy"
        if not self.host.storage.locked(self._lock_key(identifier)):
            with self._vms() as vms:
                outcome = "collected" if vms[identifier]["state"] == "creating" else "not-creating"
                if outcome == "collected":
                    del vms[identifier]
        return Outcome(0, pretty({"id": identifier, "outcome": outcome}))

    def _net(self, parsed: Parsed, call: Call) -> Outcome:
        identifier = self._resolve(parsed.operands[0])
        if "nics" not in parsed.flags or parsed["nics"] < 0:
            raise Refusal("--nics N is needed, and not negative")
        with self.host.storage.lock(self._lock_key(identifier)):
            record = self._existing(identifier)
            if self._state(record) != "running":
                raise Refusal(f"net: vm {identifier}: VM not running")
            before = list(record.get("network_configs", ()))
            call.reach(Step.MIDDLE)  # where a guest may refuse to let a card go
            fresh = range(len(before), parsed["nics"])
            added = [self._nic(record, index, record["config"]["network"]) for index in fresh]
            cards = before[: parsed["nics"]] + added
            self._change(identifier, "net", network_configs=cards)
            first = cards[0] if cards else {}
            self.host.plug(record["config"]["name"], first.get("mac", ""), first.get("network", {}).get("ip", ""))
        return Outcome(0, pretty({"before": len(before), "after": parsed["nics"]}))

    # Asking

    def _inspect(self, parsed: Parsed, _call: Call) -> Outcome:
        try:
            return Outcome(0, pretty(self._shown(self._existing(self._resolve(parsed.operands[0])))))
        except Refusal as refusal:
            raise Refusal(f"inspect: {refusal}") from None

    def _list(self, parsed: Parsed, _call: Call) -> Outcome:
        records = list(self._all().values())  # kept in the order of their creation
        if not records and self.empty_sentence:
            return Outcome(0, "No VMs found.\n")
        if parsed["output"] == "json":
            # Many VMs are much to write, and where nothing has changed it would be the same again.
            at = self.host.storage.version(self.PROGRAM), self.host.census(), self.list_hides_stale
            if at != self._listed[0]:
                self._listed = at, pretty(self._views(records))
            return Outcome(0, self._listed[1])
        lines = [f"{view['id']}  {view['config']['name']}  {view['state']}\n" for view in self._views(records)]
        return Outcome(0, "".join(lines))

    def _views(self, records: list[Record]) -> list[Record]:
        shown = [self._shown(record) for record in records]
        if self.list_hides_stale:
            shown = [{**view, "state": record["state"]} for view, record in zip(shown, records, strict=True)]
        return shown

    def _exec(self, parsed: Parsed, _call: Call) -> Outcome:
        ref, *command = parsed.operands
        try:
            record = self._existing(self._resolve(ref))
        except Refusal as refusal:
            raise Refusal(f"exec: {refusal}") from None
        if self._state(record) != "running":
            raise Refusal(f"exec: vm {ref}: VM not running")
        returncode, stdout = self.exec_replies.get(" ".join(command), [0, ""])
        return Outcome(returncode, stdout)

    def _logs(self, parsed: Parsed, _call: Call) -> Outcome:
        lines = _last(self._log(self._logged(parsed)), parsed["tail"])
        return Outcome(0, "".join(line + "\n" for line in lines))

    def _logged(self, parsed: Parsed) -> str:
        """The id of the VM whose log is asked for. Raises Refusal."""
        try:
            record = self._existing(self._resolve(parsed.operands[0]))
        except Refusal as refusal:
            raise Refusal(f"logs: {refusal}") from None
        if not record["first_booted"]:
            raise Refusal(f"open log {self._run_directory(record)}: VM may not have been started yet")
        return str(record["id"])

    def _log(self, identifier: str) -> list[str]:
        return list(self.host.storage.read(_log_key(identifier)) or ())

    def _log_line(self, record: Record, text: str) -> str:
        if record["hypervisor"] == "firecracker":  # local time without a zone
            return f"{self.host.now():%Y-%m-%dT%H:%M:%S.%f}000 [{record['id']}:main] {text}"
        started = datetime.fromisoformat(self._all()[record["id"]]["started_at"])
        return f"cloud-hypervisor: {(self.host.now() - started).total_seconds():.6f}s: <vmm> INFO:vmm.rs:1 -- {text}"

    # Snapshots

    def _save(self, parsed: Parsed, call: Call) -> Outcome:
        ref, name = parsed.operands[0], parsed["name"]
        try:
            record = self._existing(self._resolve(ref))
        except Refusal as refusal:
            raise Refusal(f"find VM {ref}: {refusal}") from None
        if not SNAPSHOT_NAME.fullmatch(name):
            raise Refusal(f'invalid snapshot name "{name}"')
        with self.host.storage.lock(self._lock_key(record["id"])):
            if self._state(self._existing(record["id"])) != "running":
                raise Refusal(f"snapshot VM {ref}: VM not running")
            snapshot = self._new_snapshot(record, name)
            self._take_snapshot(record["id"], snapshot, call)
        return Outcome(0, "", f"snapshotting VM {ref} ...\nsnapshot saved: {snapshot['id']}\n")

    def _take_snapshot(self, identifier: str, snapshot: Record, call: Call) -> None:
        with self._snapshots() as snapshots:
            for other in snapshots.values():
                if other["name"] == snapshot["name"]:
                    pending = f"already in use by {other['id']}" if other["pending"] else "already exists"
                    raise Refusal(f'snapshot name "{snapshot["name"]}" {pending}')
            snapshots[snapshot["id"]] = snapshot
        try:
            call.reach(Step.MIDDLE)
        except Killed:
            raise
        except BaseException:
            with self._snapshots() as snapshots:
                snapshots.pop(snapshot["id"], None)
            raise
        with self._snapshots() as snapshots:
            snapshots[snapshot["id"]]["pending"] = False
        taken = {**self._existing(identifier).get("snapshot_ids", {}), snapshot["id"]: {}}
        self._change(identifier, snapshot_ids=taken)

    def _new_snapshot(self, record: Record, name: str) -> Record:
        copied = ("cpu", "memory", "storage", "image", "image_digest", "image_type", "network", "windows")
        return {
            **{key: record["config"][key] for key in copied if key in record["config"]},
            "id": self._new_id(name),
            "name": name,
            "image_blob_ids": {record["config"]["image_digest"].removeprefix("sha256:")[:8]: {}},
            "hypervisor": record["hypervisor"],
            "nics": len(record.get("network_configs", ())),
            "created_at": self._now(),
            "vm": record["id"],
            "pending": True,
        }

    def _snapshot(self, ref: str) -> Record:
        self._provide_golden_snapshot(ref)
        finished = [snapshot for snapshot in self._all_snapshots().values() if not snapshot["pending"]]
        found = [each for each in finished if ref in (each["id"], each["name"])]
        found = found or [each for each in finished if len(ref) >= LEAST_PREFIX and each["id"].startswith(ref)]
        if not found:
            raise Refusal("snapshot not found")
        if len(found) > 1:
            raise Refusal(f'ambiguous ref "{ref}": multiple matches')
        return found[0]

    def _provide_golden_snapshot(self, name: str) -> None:
        if self._is_golden(name):
            snapshot = self._imported_snapshot(name)
            with self._snapshots() as snapshots:
                if not any(each["name"] == name for each in snapshots.values()):
                    snapshots[snapshot["id"]] = snapshot

    def _is_golden(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.golden)

    def _imported_snapshot(self, name: str) -> Record:
        windows = {"windows": True} if WINDOWS.search(name) else {}
        digest = f"sha256:{branch(self.host.rng, 'image', name).getrandbits(256):064x}"
        return {
            **{"cpu": 2, "memory": 4 * UNITS["G"], "storage": 20 * UNITS["G"], **windows},
            **{"image": name, "image_digest": digest, "image_type": "oci", "image_blob_ids": {}},
            **{"id": self._new_id(name), "name": name, "network": "", "nics": 1, "hypervisor": "cloud-hypervisor"},
            **{"created_at": self._now(), "vm": "", "pending": False},
        }

    def _inspect_snapshot(self, parsed: Parsed, _call: Call) -> Outcome:
        try:
            return Outcome(0, pretty(_shown_snapshot(self._snapshot(parsed.operands[0]))))
        except Refusal as refusal:
            raise Refusal(f"inspect: {refusal}") from None

    def _list_snapshots(self, parsed: Parsed, _call: Call) -> Outcome:
        of = self._resolve(parsed["vm"]) if parsed["vm"] else ""
        every = [each for each in self._all_snapshots().values() if not each["pending"] and of in ("", each["vm"])]
        if not every:
            return Outcome(0, "No snapshots found for VM.\n" if of else "No snapshots found.\n")
        return Outcome(0, pretty([_shown_snapshot(each) for each in every]))

    def _remove_snapshots(self, parsed: Parsed, call: Call) -> Outcome:
        doomed = []
        for ref in parsed.operands:  # all of them are looked up before the first is deleted
            pending = self._all_snapshots().get(ref)  # one that is half-made answers to its full id only
            try:
                doomed.append(pending if pending else self._snapshot(ref))
            except Refusal as refusal:
                raise Refusal(f'rm: resolve "{ref}": {refusal}') from None
        for snapshot in doomed:
            if self.host.storage.locked(self._lease_key(snapshot["id"])):
                raise Refusal(f"rm: snapshot {snapshot['id']} is in use by an active clone/restore/export")
            call.reach(Step.MIDDLE)
            with self._snapshots() as snapshots:
                snapshots.pop(snapshot["id"], None)
        return Outcome(0, "", "".join(f"deleted: {snapshot['id']}\n" for snapshot in doomed))

    # Images

    def _pull(self, parsed: Parsed, call: Call) -> Outcome:
        for ref in parsed.operands:
            if parsed["force"] or ref not in self._all_images():
                call.reach(Step.MIDDLE)
                self.add_image(ref)
        return Outcome(0)

    def _new_image(self, ref: str) -> Record:
        kind = "cloudimg" if ref.startswith(("http://", "https://")) or WINDOWS.search(ref) else "oci"
        digest = f"sha256:{branch(self.host.rng, 'image', ref).getrandbits(256):064x}"
        return {"id": digest, "name": ref, "type": kind, "size": 2 * UNITS["G"], "created_at": self._now()}

    def _image(self, ref: str) -> Record:
        if self._is_golden(ref) and ref not in self._all_images():
            with self.host.storage.edit(self.key("images"), dict) as images:
                images.setdefault(ref, self._new_image(ref))
        image: Record | None = self._all_images().get(ref)
        if image is None:
            raise Refusal(f'image "{ref}" not resolved: not found in any backend')
        return image

    def _inspect_image(self, parsed: Parsed, _call: Call) -> Outcome:
        try:
            return Outcome(0, pretty(self._image(parsed.operands[0])))
        except Refusal:
            raise Refusal(f'inspect: image "{parsed.operands[0]}": not found in any backend') from None

    def _list_images(self, _parsed: Parsed, _call: Call) -> Outcome:
        images = list(self._all_images().values())
        return Outcome(0, pretty(images) if images else "No images found.\n")

    # What goes on until somebody has heard enough

    @staticmethod
    def goes_on(arguments: Sequence[str]) -> bool:
        """Whether these are the arguments of a `stream`."""
        return "--event" in arguments or ("logs" in arguments and not {"-f", "--follow"}.isdisjoint(arguments))

    def stream(self, arguments: Sequence[str]) -> Iterator[str]:
        """The lines of `vm status --event --format json` or `vm logs -f`. Faults of the verb strike before the first.

        Raises Refusal, Failed, and what the host interrupts it with.
        """
        parsed, call = self.begin(arguments)
        follow = parsed.verb.name == "vm logs" and parsed["follow"]
        if self.old and parsed.verb.name in NEWER_VERBS:
            raise Refusal(f'unknown command "{parsed.verb.name.split()[1]}" for "cocoon vm"')
        if not follow:
            self._check_events(parsed)
        call.reach(Step.BEFORE)
        return self._follow(self._logged(parsed), parsed["tail"]) if follow else self._events(parsed)

    def _check_events(self, parsed: Parsed) -> None:
        if parsed.verb.name != "vm status" or not parsed["event"]:
            raise Refusal("status: not an event stream")
        if parsed["watch"]:
            raise Refusal("--event and --watch exclude each other")
        if parsed["format"] not in ("", "json"):
            raise Refusal(f"unknown format {parsed['format']!r}")

    def _follow(self, identifier: str, tail: int) -> Iterator[str]:
        """A log from its last lines on. A restart begins it anew; the removal of the VM does not end it."""
        directory = _log_key(identifier).rpartition("/")[0]
        version = self.host.storage.version(directory)
        lines = self._log(identifier)
        head, seen = lines[:1], len(lines)
        yield from _last(lines, tail)
        while True:
            if self.host.wait_for_change(directory, version, self.event_interval_s):
                self.host.sleep(self.event_debounce_s)
            version = self.host.storage.version(directory)
            lines = self._log(identifier)
            if lines[:1] != head:
                head, seen = lines[:1], 0
            yield from lines[seen:]
            seen = len(lines)

    def _events(self, parsed: Parsed) -> Iterator[str]:
        interval = parsed["interval"] or self.event_interval_s
        seen: dict[str, _Seen] = {}
        looked: object = None
        while not self.faults.take("events end", ()):
            version = self.host.storage.version(self.PROGRAM)
            last, looked = looked, (version, self.host.census())
            if looked != last:  # else nothing is new, not even a fault ahead: another look would see the same
                present = self._present(seen)
                for fault in self.faults.take("events line", ()):
                    yield fault.stdout or ""
                yield from _differences(seen, present)
                seen = present
            if self.host.wait_for_change(self.PROGRAM, version, interval):
                self.host.sleep(self.event_debounce_s)

    def _present(self, before: Mapping[str, _Seen]) -> dict[str, _Seen]:
        """What one look at the list sees, in no order; a look that fails sees nothing."""
        if self.faults.take("events list", ()):
            return {}
        records = list(self._all().values())
        if self.daemon:
            for record in [each for each in records if self._state(each) == STALE]:
                self._change(record["id"], "unexpected-exit", state="stopped", pid=0, stopped_at=self._now())
        branch(self.host.rng, "order").shuffle(records)
        return {record["id"]: self._seen(record, before.get(record["id"])) for record in records}

    def _seen(self, record: Record, before: _Seen | None) -> _Seen:
        """One VM as a look sees it. A new pid, MAC or leased address makes no event."""
        config, nics = record["config"], record.get("network_configs", ())
        addresses = [nic.get("network", {}).get("ip") for nic in nics]
        noticed = [config["name"], self._state(record), config["cpu"], config["memory"], addresses, config["image"]]
        return before if before and before.noticed == noticed else _Seen(noticed, self._shown(record))

    # The store

    def _vms(self) -> AbstractContextManager[dict[str, Record]]:
        return self.host.storage.edit(self.key("vms"), dict)

    def _snapshots(self) -> AbstractContextManager[dict[str, Record]]:
        return self.host.storage.edit(self.key("snapshots"), dict)

    def _all(self) -> Mapping[str, Record]:
        return self.host.storage.read(self.key("vms")) or {}

    def _all_snapshots(self) -> Mapping[str, Record]:
        return self.host.storage.read(self.key("snapshots")) or {}

    def _all_images(self) -> Mapping[str, Record]:
        return self.host.storage.read(self.key("images")) or {}

    def _resolve(self, ref: str) -> str:
        """The id that a full id, an exact name or the beginning of an id stands for. Raises Refusal."""
        vms = self._all()
        if ref in vms:
            return ref
        found = [vm["id"] for vm in vms.values() if vm["config"]["name"] == ref]
        found = found or [each for each in vms if len(ref) >= LEAST_PREFIX and each.startswith(ref)]
        if not found:
            raise Refusal(f"vm {ref}: VM not found")
        if len(found) > 1:
            raise Refusal(f'ambiguous ref "{ref}": multiple matches')
        return str(found[0])

    def _existing(self, identifier: str) -> Record:
        """The stored record, which may have gone while we waited for a lock. Raises Refusal."""
        try:
            return self._all()[identifier]
        except KeyError:
            raise Refusal(f"vm {identifier}: VM not found") from None

    def _change(self, identifier: str, reason: str = "", **members: Any) -> None:
        with self._vms() as vms:
            record = vms[identifier]
            record.update(members, updated_at=self._now())
            if reason:
                record["transition_generation"] += 1
                record.update(last_transition_reason=reason, last_transition_at=self._now())

    def _state(self, record: Record) -> str:
        """The state as shown: a VM said to run whose process is dead is stale."""
        stored: str = record["state"]
        return STALE if stored == "running" and not self.host.argv_of(record["pid"]) else stored

    def _shown(self, record: Record) -> Record:
        state = self._state(record)
        first = {"id": record["id"], "hypervisor": record["hypervisor"], "state": state, "config": record["config"]}
        middle: Record = {"pid": record["pid"] if record["state"] == "running" else 0}
        if state == "running":
            middle["socket_path"] = f"{self._run_directory(record)}/api.sock"
        if record.get("network_configs"):
            middle |= {"net_backend": record["network_configs"][0]["backend"], "netns_path": self._netns(record)}
        rest = {key: value for key, value in record.items() if key not in first and key != "pid"}
        return {**first, **middle, **{key: value for key, value in rest.items() if value not in ([], {})}}

    def _run_directory(self, record: Record) -> str:
        return f"{self.host.root}/{_run_key(record)}"

    def _netns(self, record: Record) -> str:
        return f"/var/run/netns/cocoon-{record['id']}"

    def _lock_key(self, identifier: str) -> str:
        return f"{self.PROGRAM}/locks/{identifier}"

    def _lease_key(self, identifier: str) -> str:
        return f"{self.PROGRAM}/leases/{identifier}"

    def _new_id(self, name: str = "") -> str:
        return "".join(branch(self.host.rng, "id", name).choices(ID_LETTERS, k=ID_LENGTH))

    def _now(self) -> str:
        return self.host.now().isoformat()


def _size(text: str, flag: str, least: int, default: int) -> int:
    """A byte count, bare or with a suffix. Raises Refusal."""
    if not text:
        return default
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", text)
    unit = UNITS.get(found[2].upper().replace("IB", "iB")) if found else None
    if not found or unit is None:
        raise Refusal(f'--{flag}: invalid size "{text}"')
    size: int = int(found[1]) * unit
    if size < least:
        raise Refusal(f"--{flag} must be at least {least // UNITS['M']}M")
    return size


def _run_key(record: Record) -> str:
    return f"run/{DIRECTORIES[record['hypervisor']]}/{record['id']}"


def _log_key(identifier: str) -> str:
    return f"log/{identifier}.json"


def _last(lines: list[str], number: int) -> list[str]:
    """The last lines; zero and less are all of them, as the real tool has it."""
    return lines[-number:] if number > 0 else lines


def _shown_snapshot(snapshot: Record) -> Record:
    return {key: value for key, value in snapshot.items() if key not in ("pending", "vm")}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A VM at one look: what makes an event when it changes, and the record that is printed then."""

    noticed: list[Any]
    shown: Record


def _differences(before: Mapping[str, _Seen], now: Mapping[str, _Seen]) -> Iterator[str]:
    """Event lines between two looks: what came and what changed, then what went."""
    for identifier, vm in now.items():
        if identifier not in before:
            yield _event("ADDED", vm.shown)
        elif vm is not before[identifier]:
            yield _event("MODIFIED", vm.shown)
    for identifier, vm in before.items():
        if identifier not in now:
            yield _event("DELETED", vm.shown)


def _event(kind: str, record: Record) -> str:
    return json.dumps({"event": kind, "vm": record}, separators=(",", ":"))
