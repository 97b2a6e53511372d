"""The fake `cocoon-macos`: one directory, one record and one QEMU per VM name, and nobody who watches over them.

The record remembers the pid of the last QEMU, also when that has died. `vm start` therefore looks at processes: it
leaves a running QEMU alone, adopts one whose pid was lost, refuses to choose between two, and launches only when there
is none. A QEMU belongs to a VM when its program is qemu-system-x86_64 and its command line names the VM's pid file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from simulator.chance import branch
from simulator.fake_tools import Call, Host, Killed, Knob, Machine, Outcome, Parsed, Refusal, Step, Tool, Verb, pretty

__all__ = ["QEMU", "FakeCocoonMacos"]

Record = dict[str, Any]

QEMU = "qemu-system-x86_64"
VM_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
LONGEST_SOCKET_PATH = 107
LONGEST_PASSWORD = 8  # what VNC can carry
MOST_DATA_DISKS = 4
NO_VNC = -1
ID_LETTERS, ID_LENGTH = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 26

VNC = {"vnc": int, "vnc-password": str}
RUN_TEXTS = (
    "name",
    "memory",
    "net",
    "opencore",
    "ovmf-code",
    "ovmf-vars",
    "tap",
    "bridge",
    "cni-conf-dir",
    "cni-bin-dir",
)
RUN_SWITCHES = ("exit-on-reboot", "random-smbios", "hugepages")
RUN = {
    **dict.fromkeys(RUN_TEXTS, str),
    **dict.fromkeys(RUN_SWITCHES, bool),
    **{"cpus": int, "storage": int, "ssh-port": int, "data-disk": list},
    **VNC,
}
VERBS = (
    Verb("vm run", RUN),
    Verb("vm start", VNC, 1, None),
    Verb("vm stop", {"force": bool}, 1, None),
    Verb("vm rm", {"force": bool}, 1, None),
    Verb("vm inspect", {}),
    Verb("vm list", {"output": str}, 0, 0, {"o": "output"}),
    Verb("image inspect", {}),
    Verb("image pull", {"force": bool}),
    Verb("image list", {"output": str}, 0, 0, {"o": "output"}),
    Verb("image rm", {}),
)


class FakeCocoonMacos(Tool):
    """One host's cocoon-macos. What a call is about (the `name` of a fault): a VM's name, or an image."""

    PROGRAM = "cocoon-macos"
    SHARED_FLAGS = {"state-dir": str}
    VERBS: Mapping[str, Verb] = {verb.name: verb for verb in VERBS}

    shows_state = Knob(True)  # newer versions compute a `state` in what they print
    hides_mac: Knob[tuple[str, ...]] = Knob(())  # names of VMs whose records show no MAC
    firmware_missing = Knob(False)
    busy_displays: Knob[tuple[int, ...]] = Knob(())  # display numbers whose port somebody else listens on

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._performers: dict[str, Callable[[Parsed, Call], Outcome]] = {
            "vm run": self._run_vm,
            "vm start": self._start,
            "vm stop": self._stop,
            "vm rm": self._remove,
            "vm inspect": self._inspect,
            "vm list": self._list,
            "image inspect": self._inspect_image,
            "image pull": self._pull,
            "image list": self._list_images,
            "image rm": self._remove_image,
        }

    # Knobs and views for tests

    def record(self, name: str) -> Record | None:
        """The stored record; None when there is none."""
        record: Record | None = self.host.storage.read(self._record_key(name))
        return record

    def set_record(self, name: str, **members: Any) -> None:
        """Changes the stored record behind the tool's back, say `pid=0` after a lost save."""
        if self.record(name) is None:
            raise KeyError(name)
        self._change(name, **members)

    def vm_names(self) -> list[str]:
        """The names of all VMs of which there is a record."""
        return [name for name in self._names() if self.record(name)]

    def qemus(self, name: str) -> list[int]:
        """The pids of this VM's QEMU processes. More than one is a corrupted disk."""
        return [pid for pid in self.host.pids() if self._is_qemu_of(pid, name)]

    def add_image(self, ref: str) -> None:
        """Makes an image local without pulling it."""
        with self.host.storage.edit(self.key("images"), dict) as images:
            digest = branch(self.host.rng, "image", ref).getrandbits(256)
            images[ref] = {"name": ref, "digest": f"sha256:{digest:064x}"}

    def command_line(self, name: str) -> tuple[str, ...]:
        """QEMU's command line for the record as it is. Raises KeyError."""
        record = self.record(name)
        if record is None:
            raise KeyError(name)
        return self._qemu_argv(record)

    # One call

    def names(self, parsed: Parsed) -> list[str]:
        named = [parsed["name"]] if "name" in parsed.verb.flags and parsed["name"] else []
        return [*named, *parsed.operands]

    def complain(self, sentence: str) -> str:
        """No `Error:` line: the last log record says why."""
        return f'{self.host.now().isoformat()} ERR command failed error="{sentence}"\n'

    def perform(self, parsed: Parsed, call: Call) -> Outcome:
        return self._performers[parsed.verb.name](parsed, call)

    # Verbs

    def _run_vm(self, parsed: Parsed, call: Call) -> Outcome:
        name = parsed["name"] or f"macos-{self.host.now():%Y%m%d%H%M%S}"
        self._check_run(parsed, name)
        image = self._image(parsed.operands[0])
        with self._locked(name):
            if self.record(name) is not None:
                raise Refusal(f'vm "{name}" already exists; rm it first or pick another --name')
            if self.qemus(name):
                raise Refusal(f"{self._directory(name)} has no record, but a live QEMU uses it")
            with self._removed_on_failure(name):
                with self.host.storage.edit(self._record_key(name), dict) as record:
                    record.update(self._new_record(name, image, parsed))
                self._launch(name, call)
        return Outcome(0, self._line(name))

    def _check_run(self, parsed: Parsed, name: str) -> None:
        """Everything that is refused before anything is made."""
        monitor = f"{self._directory(name)}/monitor.sock"
        if not VM_NAME.fullmatch(name) or len(monitor) > LONGEST_SOCKET_PATH:
            raise Refusal(f'invalid VM name "{name}"')
        cpus = parsed.flags.get("cpus", 4)
        if cpus <= 0 or cpus % 2:
            raise Refusal(f"--cpus must be a positive even number, not {cpus}")
        memory = parsed.flags.get("memory", "8192")
        if not (memory.isascii() and memory.isdigit() and int(memory) > 0):
            raise Refusal(f'--memory must be a positive whole number of MiB, not "{memory}"')
        if parsed["tap"] and parsed["net"] != "tap":
            raise Refusal("--tap needs --net tap")
        if len(parsed["data-disk"]) > MOST_DATA_DISKS:
            raise Refusal(f"at most {MOST_DATA_DISKS} data disks")
        if parsed["net"] not in ("", "user", "tap", "bridge", "cni"):
            raise Refusal(f"unknown network mode {parsed['net']!r}")
        self._check_vnc(parsed, parsed["net"] or "user")
        if self.firmware_missing:
            raise Refusal(f"firmware not found: {self.host.macos_root}/firmware/OVMF_CODE.fd")

    def _check_vnc(self, parsed: Parsed, net_mode: str) -> None:
        password = parsed["vnc-password"]
        if len(password) > LONGEST_PASSWORD or not password.isprintable():
            raise Refusal("the VNC password must have at most 8 characters, none of them a control character")
        if parsed.flags.get("vnc", NO_VNC) >= 0 and net_mode == "cni" and not password:
            raise Refusal("VNC with --net cni needs --vnc-password")

    def _start(self, parsed: Parsed, call: Call) -> Outcome:
        return Outcome(0, "".join(self._start_one(name, parsed, call) for name in parsed.operands))

    def _start_one(self, name: str, parsed: Parsed, call: Call) -> str:
        with self._locked(name):
            record = self._existing(name)
            if self._is_qemu_of(record["pid"], name):
                ignored = ", VNC settings are ignored" if "vnc" in parsed.flags else ""
                return f"{name} (pid {record['pid']}, already running{ignored})\n"
            found = self.qemus(name)
            if len(found) > 1:
                raise Refusal(f"multiple qemu processes use disk {record['disk']}: {found}")
            if found:
                self._change(name, pid=found[0])
            else:
                self._check_vnc(parsed, record["net_mode"])
                self._change(name, vnc=parsed.flags.get("vnc", NO_VNC))
                self._launch(name, call)
        return self._line(name)

    def _launch(self, name: str, call: Call) -> None:
        """The record was saved; then QEMU starts; then its pid is recorded. A death in between loses the pid."""
        call.reach(Step.MIDDLE)
        record = self._existing(name)
        if record["vnc"] in self._displays_in_use(name):
            raise Refusal(f"bind vnc port: listen tcp 0.0.0.0:{5900 + record['vnc']}: bind: address already in use")
        pid = self.host.power_on(self._machine(record))
        try:
            call.reach(Step.LATE)
        except Killed:
            raise
        except BaseException:
            self.host.power_off(pid)
            raise
        self._change(name, pid=pid)

    def _displays_in_use(self, name: str) -> set[int]:
        others = [self._existing(other) for other in self._names() if other != name and self.qemus(other)]
        return {*self.busy_displays, *(record["vnc"] for record in others)} - {NO_VNC}

    def _stop(self, parsed: Parsed, call: Call) -> Outcome:
        for name in parsed.operands:
            with self._locked(name):
                self._existing(name)
                call.reach(Step.MIDDLE)
                self._end_qemus(name)
                self._change(name, pid=0, vnc=NO_VNC)
        return Outcome(0, "".join(f"{name}\n" for name in parsed.operands))

    def _remove(self, parsed: Parsed, call: Call) -> Outcome:
        """No such directory is success too. A failure in the network teardown (Step.LATE) keeps the record."""
        for name in parsed.operands:
            with self._locked(name):
                if self.record(name) is None and not self.qemus(name):
                    continue
                call.reach(Step.MIDDLE)
                self._end_qemus(name)
                call.reach(Step.LATE)
                self.host.storage.delete(self._key_of(name))
        return Outcome(0, "".join(f"{name}\n" for name in parsed.operands))

    def _inspect(self, parsed: Parsed, _call: Call) -> Outcome:
        return Outcome(0, pretty(self._shown(self._existing(parsed.operands[0]))))

    def _list(self, parsed: Parsed, _call: Call) -> Outcome:
        shown = [self._shown(self._existing(name)) for name in self._names()]
        if parsed["output"] == "json":
            return Outcome(0, pretty(shown))
        return Outcome(0, "".join(f"{record['name']}  {record['pid']}\n" for record in shown))

    # Images

    def _inspect_image(self, parsed: Parsed, _call: Call) -> Outcome:
        return Outcome(0, pretty(self._image(parsed.operands[0])))

    def _pull(self, parsed: Parsed, call: Call) -> Outcome:
        ref = parsed.operands[0]
        if parsed["force"] or ref not in self._images():
            call.reach(Step.MIDDLE)
            self.add_image(ref)
        return Outcome(0, f"{ref}\n")

    def _list_images(self, _parsed: Parsed, _call: Call) -> Outcome:
        return Outcome(0, pretty(list(self._images().values())))

    def _remove_image(self, parsed: Parsed, _call: Call) -> Outcome:
        self._image(parsed.operands[0])
        with self.host.storage.edit(self.key("images"), dict) as images:
            images.pop(parsed.operands[0], None)
        return Outcome(0)

    def _images(self) -> Mapping[str, Record]:
        return self.host.storage.read(self.key("images")) or {}

    def _image(self, ref: str) -> Record:
        try:
            return self._images()[ref]
        except KeyError:
            raise Refusal(f"image not found: {ref}") from None

    # Records and processes

    def _new_record(self, name: str, image: Record, parsed: Parsed) -> Record:
        rng = branch(self.host.rng, "macos record", name)
        vmid = "".join(rng.choices(ID_LETTERS, k=ID_LENGTH))
        directory, firmware = self._directory(name), f"{self.host.macos_root}/firmware"
        own_opencore = {"opencore": f"{directory}/OpenCore.qcow2"} if parsed["random-smbios"] else {}
        switches = {flag: True for flag in ("hugepages", "exit-on-reboot") if parsed[flag]}
        return {
            "name": name,
            "vmid": vmid,
            "image": image["name"],
            "image_digest": image["digest"],
            "cpus": parsed.flags.get("cpus", 4),
            "memory": parsed.flags.get("memory", "8192"),
            "storage": parsed["storage"],
            "vnc": parsed.flags.get("vnc", NO_VNC),
            "ssh_port": parsed["ssh-port"],
            "net_mode": parsed["net"] or "user",
            **{flag.replace("-", "_"): True for flag in switches},
            "disk": f"{directory}/disk.qcow2",
            **own_opencore,
            "ovmf_code": f"{firmware}/OVMF_CODE.fd",
            "ovmf_vars": f"{directory}/OVMF_VARS.fd",
            "mac": "0a:58:" + ":".join(f"{rng.getrandbits(8):02x}" for _ in range(4)),
            "tap": f"tap{vmid[:8]}-0",
            "tap_owned": True,
            "netns": f"/var/run/netns/cm-{vmid}",
            "pid": 0,
            "created": self.host.now().isoformat(),
        }

    def _machine(self, record: Record) -> Machine:
        return Machine(record["name"], record["vmid"], record["mac"], "macos", self._qemu_argv(record))

    def _qemu_argv(self, record: Record) -> tuple[str, ...]:
        directory = self._directory(record["name"])
        arguments = ["-m", record["memory"], "-smp", f"{record['cpus']},cores={record['cpus']}"]
        arguments += ["-drive", f"id=system,if=none,file={record['disk']}", "-display", "none"]
        arguments += ["-netdev", f"tap,id=net0,ifname={record['tap']},script=no,downscript=no"]
        arguments += ["-device", f"virtio-net-pci,netdev=net0,mac={record['mac']}"]
        arguments += ["-monitor", f"unix:{directory}/monitor.sock,server,nowait"]
        arguments += ["-qmp", f"unix:{directory}/qmp.sock,server,nowait"]
        arguments += ["-daemonize", "-pidfile", f"{directory}/qemu.pid"]
        arguments += ["-no-reboot"] if record.get("exit_on_reboot") else []
        vnc = f"unix:{directory}/vnc.sock,password=on" if record["net_mode"] == "cni" else f"127.0.0.1:{record['vnc']}"
        return (QEMU, *arguments, *(["-vnc", vnc] if record["vnc"] >= 0 else []))

    def _is_qemu_of(self, pid: int, name: str) -> bool:
        argv = self.host.argv_of(pid) if pid > 0 else ()
        if not argv or os.path.basename(argv[0]) != QEMU:
            return False
        return f"{self._directory(name)}/qemu.pid" in argv

    def _end_qemus(self, name: str) -> None:
        for pid in self.qemus(name):
            self.host.power_off(pid)

    @contextmanager
    def _removed_on_failure(self, name: str) -> Iterator[None]:
        """A first boot that fails leaves nothing."""
        try:
            yield
        except Killed:
            raise
        except BaseException:
            self.host.storage.delete(self._key_of(name))
            raise

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with self.host.storage.lock(f"{self.PROGRAM}/vms/.locks/{name}.lock"):
            yield

    def _existing(self, name: str) -> Record:
        record = self.record(name)
        if record is None:
            path = f"{self._directory(name)}/vm.json"
            raise Refusal(f"read vm record: open {path}: no such file or directory")
        return record

    def _change(self, name: str, **members: Any) -> None:
        with self.host.storage.edit(self._record_key(name), dict) as record:
            record.update(members)

    def _shown(self, record: Record) -> Record:
        shown = json.loads(json.dumps(record))
        if record["name"] in self.hides_mac:
            del shown["mac"]
        if self.shows_state:
            shown["state"] = "running" if self._is_qemu_of(record["pid"], record["name"]) else "stopped"
        return dict(shown)

    def _line(self, name: str) -> str:
        return f"{name} (pid {self._existing(name)['pid']})\n"

    def _names(self) -> list[str]:
        every = self.host.storage.keys(f"{self.PROGRAM}/vms")
        return [name for name in every if self.record(name) is not None]

    def _directory(self, name: str) -> str:
        return f"{self.host.macos_root}/vms/{name}"

    def _key_of(self, name: str) -> str:
        return f"{self.PROGRAM}/vms/{name}"

    def _record_key(self, name: str) -> str:
        return f"{self._key_of(name)}/vm.json"
