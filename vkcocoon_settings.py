"""What an operator can set: one table, from which flags, checks, the environment example and the docs page are made.

The fields of `Settings` are the table. Each carries its environment variable, its kind (how the text is read and what
is allowed), its help and whether it is secret; the flag is the field's name with dashes. A flag wins over the
environment, the environment over the default, and an empty text counts as unset everywhere.

Values are checked when they are loaded and nowhere else. Values that cannot be right stop the start with a line for
each that names the setting, the value and what is allowed (exit code 78, D5); nothing falls back silently to a
default, because a node that runs with a port or a policy nobody chose is found out only when it hurts. Loading looks at
no clock, and at files only when asked to; what else depends on the host is checked by whoever uses it.

vkcocoon_cli builds its options from `SETTINGS` and calls `Settings.load`; everybody else gets a finished `Settings`.
Tests write `Settings(node_name="n1")`: every field has its default.

`python -m vkcocoon_settings configuration` and `... environment` print docs/configuration.md and the example env-file.
"""

import difflib
import ipaddress
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from vkcocoon_quantity import parse_quantity

__all__ = [
    "SETTINGS",
    "Address",
    "Kind",
    "Setting",
    "SettingError",
    "Settings",
    "WrongSettings",
    "configuration_page",
    "environment_example",
]

# Longest piece of a wrong value that is repeated to the user: enough to recognize it, short enough for one line.
SHOWN_VALUE = 80
# The kernel's limit for the path of a unix socket, without its final NUL.
SOCKET_PATH_BYTES = 107
MIB = 2**20
READABLE = "a file that exists and can be read"


class SettingError(Exception):
    """A setting that cannot be right; `str()` is the one line for the user.

    `setting` is what the user wrote: the flag or the environment variable. A secret's value is never repeated.
    """

    def __init__(self, setting: str, value: str, allowed: str, *, secret: bool = False) -> None:
        shown = "(secret)" if secret else repr(value if len(value) <= SHOWN_VALUE else value[:SHOWN_VALUE] + "...")
        super().__init__(f"{setting}: {shown} is not possible; allowed: {allowed}")
        self.setting = setting
        self.value = "" if secret else value
        self.allowed = allowed


class WrongSettings(Exception):
    """Settings that cannot be right: `wrong` are they, and `str()` is a line for each."""

    def __init__(self, wrong: Iterable[SettingError]) -> None:
        self.wrong = tuple(wrong)
        super().__init__("\n".join(map(str, self.wrong)))


class Address(NamedTuple):
    """Where to listen: `host` "" is every interface, `port` 0 any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# Kinds of values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """How the text of a setting is read.

    `metavar` stands for the value in the help, `allowed` says to a person what is accepted, `read` returns the value
    or raises ValueError. `read` never sees an empty text.
    """

    metavar: str
    allowed: str
    read: Callable[[str], Any]


def _checked(text: str, possible: object) -> str:
    if not possible:
        raise ValueError(text)
    return text


def _matching(pattern: str, *, longest: int) -> Callable[[str], str]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: _checked(text, len(text) <= longest and compiled.fullmatch(text))


def _whole(lowest: int, highest: int) -> Callable[[str], int]:
    # int() alone would take "1_000", " 7 " and the digits of every script.
    digits = _matching(r"[0-9]+", longest=9)
    return lambda text: int(_checked(digits(text), lowest <= int(digits(text)) <= highest))


def _choice(*words: str, also: Mapping[str, str] | None = None) -> Kind:
    spellings = {word: word for word in words} | dict(also or {})
    allowed = ", ".join(words[:-1]) + f" or {words[-1]}"
    return Kind(
        "|".join(words), allowed, lambda text: _checked(spellings.get(text.lower(), ""), text.lower() in spellings)
    )


def _path(text: str) -> str:
    return _checked(text, text.startswith("/") and text.isprintable())


def _socket_path(text: str) -> str:
    return _checked(_path(text), len(os.fsencode(text)) <= SOCKET_PATH_BYTES)


def _program(text: str) -> str:
    """A relative path would depend on the directory the daemon was started in; a bare name is looked up in PATH."""
    return _checked(text, text.isprintable() and text.strip() == text and (text[0] == "/" or "/" not in text))


def _kubeconfig(text: str) -> str:
    return _checked(text, text.isprintable() and any(text.split(":")))


def _ipv4(text: str) -> str:
    address = ipaddress.IPv4Address(text)  # strict: four decimal numbers, no leading zeros
    nobody = address.is_multicast or address.is_unspecified or int(address) == 2**32 - 1
    return _checked(str(address), not nobody)


def _listen(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    _checked(text, colon)
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif re.fullmatch(r"[0-9.]+", host, re.ASCII):
        host = str(ipaddress.IPv4Address(host))
    elif host:
        _matching(HOST_NAME, longest=253)(host)
    return Address(host, _whole(0, 65535)(port))


def _vnc_password(text: str) -> str:
    """VNC knows at most 8 bytes; a quote or a blank would end the word in QEMU's monitor, which is how it is set."""
    return _checked(text, len(os.fsencode(text)) <= 8 and text.isprintable() and not re.search(r'[\s"]', text))


def _cpus(text: str) -> str:
    return _checked(text, parse_quantity(text) >= 1)


def _byte_amount(lowest: int, *, zero: bool = False) -> Callable[[str], str]:
    """Whole bytes, and not so few that a unit must have been forgotten ("64", "512m")."""

    def read(text: str) -> str:
        amount = parse_quantity(text)
        enough = amount >= lowest or (zero and amount == 0)
        return _checked(text, enough and amount == amount.to_integral_value())

    return read


def _never(text: str) -> str:
    return _checked(text, False)


HOST_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
CGROUP = r"[A-Za-z0-9_:@-][A-Za-z0-9_.:@-]*(/[A-Za-z0-9_:@-][A-Za-z0-9_.:@-]*)*"

# 63 and not 253 characters: the name is also the value of the label kubernetes.io/hostname.
NODE_NAME = Kind(
    "NAME",
    "a DNS name of at most 63 characters: lower-case letters, digits, dashes and dots",
    _matching(HOST_NAME, longest=63),
)
LABEL = Kind(
    "LABEL",
    "a label value: at most 63 letters, digits, dashes, underscores and dots, first and last a letter or digit",
    _matching(LABEL_VALUE, longest=63),
)
IPV4 = Kind("IPV4", "one IPv4 address of this host, such as 10.0.0.5", _ipv4)
PROVIDER_ID = Kind("ID", "text without blanks, such as cocoon://rack1/host7", _matching(r"[!-~]+", longest=253))
LEVEL = _choice("debug", "info", "warning", "error", also={"warn": "warning"})
PATH = Kind("PATH", "an absolute path", _path)
SOCKET = Kind("PATH", f"an absolute path of at most {SOCKET_PATH_BYTES} bytes", _socket_path)
PROGRAM = Kind("PROGRAM", "an absolute path, or a program's name to look up in PATH", _program)
KUBECONFIG = Kind("PATH", "the path of a kubeconfig file, or several with colons between them", _kubeconfig)
PORT = Kind("PORT", "a port from 1 to 65535", _whole(1, 65535))
LISTEN = Kind("HOST:PORT", "HOST:PORT or :PORT, an IPv6 host in brackets, port 0 for any free one", _listen)
LISTEN_OR_OFF = Kind(
    "HOST:PORT",
    "HOST:PORT or :PORT, an IPv6 host in brackets, port 0 for any free one; or off",
    lambda text: None if text.lower() == "off" else _listen(text),
)
PASSWORD = Kind("PASSWORD", 'at most 8 bytes without blanks, control characters or "', _vnc_password)
PERCENT = Kind("PERCENT", "a whole number from 0 to 100", _whole(0, 100))
PROCESSES = Kind("NUMBER", "a whole number from 1 to 64", _whole(1, 64))
PODS = Kind("NUMBER", "a whole number from 1 to 10000", _whole(1, 10000))
CPUS = Kind("QUANTITY", "a Kubernetes quantity of at least 1, such as 16 or 15500m", _cpus)
BYTES = Kind("QUANTITY", "a Kubernetes quantity of at least 1Mi, such as 64Gi", _byte_amount(MIB))
HUGEPAGES = Kind(
    "QUANTITY", "0 or a Kubernetes quantity of at least 2Mi, such as 8Gi", _byte_amount(2 * MIB, zero=True)
)
CGROUP_NAME = Kind(
    "NAME", "a cgroup below the root of the hierarchy, such as cocoon.slice", _matching(CGROUP, longest=255)
)
UNSET = Kind("UNSET", "only unset: registries are not supported yet, snapshots stay on this host", _never)


# The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: `name` is the field of `Settings`; `flag` is "" for a secret, which must not stand in a command line.

    `default` is the text one would have to write to get the default; "" where the default is found out at start
    (`absent` says how) or where the thing is simply off.
    """

    name: str
    env: str
    kind: Kind
    default: str
    help: str
    group: str
    absent: str = ""
    secret: bool = False

    @property
    def flag(self) -> str:
        return "" if self.secret else "--" + self.name.replace("_", "-")

    def read(self, text: str, written_as: str) -> Any:
        """The value of a non-empty text. Raises SettingError, naming `written_as` (the flag or the variable)."""
        try:
            return self.kind.read(text)
        except ValueError:
            raise SettingError(written_as, text, self.kind.allowed, secret=self.secret) from None


def _setting(
    env: str, kind: Kind, default: str, help: str, *, group: str, absent: str = "", secret: bool = False
) -> Any:
    row = {"env": env, "kind": kind, "default": default, "help": help, "group": group}
    value = kind.read(default) if default else ""
    return field(default=value, repr=not secret, metadata=row | {"absent": absent, "secret": secret})


CLUSTER, HOST, CAPACITY, MACOS, SERVICE = "Cluster", "Cocoon on this host", "Capacity", "macOS guests", "Service"
KUBELET = "Kubelet API"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything an operator chose, checked. A text field that is "" was not set and has no fixed default."""

    kubeconfig: str = _setting(
        "KUBECONFIG",
        KUBECONFIG,
        "",
        "How to reach the cluster.",
        group=CLUSTER,
        absent="~/.kube/config if it exists, else the service account of the pod it runs in",
    )
    node_name: str = _setting(
        "VK_NODE_NAME",
        NODE_NAME,
        "cocoon-pool",
        "Name of the node this host appears as. Two hosts must never share one.",
        group=CLUSTER,
    )
    node_pool: str = _setting(
        "VK_NODE_POOL", LABEL, "default", "Value of the node's label cocoonstack.io/pool.", group=CLUSTER
    )
    node_ip: str = _setting(
        "VK_NODE_IP",
        IPV4,
        "",
        "Address the node reports, under which the API server finds it.",
        group=CLUSTER,
        absent="the first IPv4 address of this host that is not loopback",
    )
    provider_id: str = _setting(
        "VK_PROVIDER_ID", PROVIDER_ID, "", "The node's spec.providerID.", group=CLUSTER, absent="none"
    )
    snapshot_cpu_class: str = _setting(
        "VK_SNAPSHOT_CPU_CLASS",
        LABEL,
        "",
        "Value of the node's label cocoonstack.io/snapshot-cpu-class: hosts whose snapshots fit each other's CPUs.",
        group=CLUSTER,
        absent="the label is removed",
    )

    cocoon_bin: str = _setting(
        "VK_COCOON_BIN", PROGRAM, "/usr/local/bin/cocoon", "The cocoon command line.", group=HOST
    )
    cocoon_processes: int = _setting(
        "VK_COCOON_PROCESSES", PROCESSES, "8", "How many of its commands may run at the same time.", group=HOST
    )
    cocoon_root_dir: str = _setting(
        "COCOON_ROOT_DIR",
        PATH,
        "/var/lib/cocoon",
        "Where cocoon keeps its disks; its file system is the node's storage.",
        group=HOST,
    )
    cocoon_cgroup_parent: str = _setting(
        "COCOON_CGROUP_PARENT", CGROUP_NAME, "cocoon.slice", "The cgroup under which cocoon runs its VMs.", group=HOST
    )
    leases_path: str = _setting(
        "VK_LEASES_PATH",
        PATH,
        "/var/lib/cocoon/net/leases.json",
        "cocoon-net's DHCP lease file, looked at on each probe.",
        group=HOST,
    )
    cocoon_net_control_socket: str = _setting(
        "VK_COCOON_NET_CONTROL_SOCKET",
        SOCKET,
        "/run/cocoon-net/control.sock",
        "cocoon-net's control socket, where leases are given back.",
        group=HOST,
    )
    orphan_policy: str = _setting(
        "VK_ORPHAN_POLICY",
        _choice("alert", "keep", "destroy"),
        "alert",
        "What to do at start with a VM no pod asks for: report it, leave it, or destroy it.",
        group=HOST,
    )
    restore_mode: str = _setting(
        "VK_RESTORE_MODE",
        _choice("mmap", "copy", "ondemand"),
        "mmap",
        "How a clone gets its memory; Windows guests are always restored by copy.",
        group=HOST,
    )
    oci_registry: str = _setting(
        "OCI_REGISTRY",
        UNSET,
        "",
        "Must not be set yet: hibernation keeps its snapshots on this host.",
        group=HOST,
        absent="local snapshots only",
    )

    cocoon_macos_bin: str = _setting(
        "VK_COCOON_MACOS_BIN",
        PROGRAM,
        "/usr/local/bin/cocoon-macos",
        "The cocoon-macos command line.",
        group=MACOS,
    )
    macos_vnc_password: str = _setting(
        "COCOON_MACOS_VNC_PASSWORD",
        PASSWORD,
        "",
        "Password of the guests' VNC screens.",
        group=MACOS,
        absent="VNC is off",
        secret=True,
    )

    reserve_percent: int = _setting(
        "VK_RESERVE_PERCENT", PERCENT, "20", "Share of CPU, memory and storage that is kept from pods.", group=CAPACITY
    )
    node_cpu: str = _setting(
        "VK_NODE_CPU", CPUS, "", "CPUs the node offers.", group=CAPACITY, absent="the CPUs of this host"
    )
    node_mem: str = _setting(
        "VK_NODE_MEM", BYTES, "", "Memory the node offers.", group=CAPACITY, absent="the memory of this host"
    )
    node_storage: str = _setting(
        "VK_NODE_STORAGE",
        BYTES,
        "",
        "Storage the node offers.",
        group=CAPACITY,
        absent="the file system of COCOON_ROOT_DIR",
    )
    node_hugepages: str = _setting(
        "VK_NODE_HUGEPAGES",
        HUGEPAGES,
        "",
        "Memory in 2 MiB pages the node offers.",
        group=CAPACITY,
        absent="the huge pages of this host",
    )
    node_pods: int = _setting("VK_NODE_PODS", PODS, "256", "Pods the node takes.", group=CAPACITY)

    kubelet_port: int = _setting(
        "VK_KUBELET_PORT", PORT, "10250", "Port of the kubelet API, as reported by the node.", group=KUBELET
    )
    kubelet_auth: str = _setting(
        "VK_KUBELET_AUTH",
        _choice("on", "off"),
        "on",
        "Whether clients of the kubelet API must be known and allowed; off lets everybody read every log.",
        group=KUBELET,
    )
    kubelet_client_ca: str = _setting(
        "VK_KUBELET_CLIENT_CA",
        PATH,
        "",
        "Authorities whose clients may use the kubelet API with a certificate, as the API server does.",
        group=KUBELET,
        absent="only clients with a token, so no kubectl logs",
    )
    tls_cert: str = _setting(
        "VK_TLS_CERT",
        PATH,
        "/etc/cocoon/vk/tls/vk-kubelet.crt",
        "Certificate of the kubelet API. If it and its key have their defaults and neither exists, one is made.",
        group=KUBELET,
    )
    tls_key: str = _setting(
        "VK_TLS_KEY", PATH, "/etc/cocoon/vk/tls/vk-kubelet.key", "Key of that certificate.", group=KUBELET
    )

    state_dir: str = _setting(
        "VK_STATE_DIR",
        PATH,
        "/var/lib/vk-cocoon",
        "Directory for the little that must outlive the process: whose VMs are, which leases are owed.",
        group=SERVICE,
    )
    metrics_addr: Address = _setting(  # noqa: RUF009  a field, as all of them
        "VK_METRICS_ADDR", LISTEN, ":9091", "Where /metrics, /healthz and /readyz are served.", group=SERVICE
    )
    status_socket: str = _setting(
        "VK_STATUS_SOCKET",
        SOCKET,
        "/run/vk-cocoon/status.sock",
        "Where vk-cocoon status asks the daemon; only root may. Its directory is made if only that is missing.",
        group=SERVICE,
    )
    status_addr: Address | None = _setting(  # noqa: RUF009  a field, as all of them
        "VK_STATUS_ADDR",
        LISTEN_OR_OFF,
        "127.0.0.1:9092",
        "Where the status page is served; whoever can reach it can read it.",
        group=SERVICE,
    )
    record: str = _setting(
        "VK_RECORD",
        PATH,
        "",
        "Directory for the event log, from which vk-cocoon simulate --from-log makes a scenario.",
        group=SERVICE,
        absent="nothing is recorded",
    )
    record_size: str = _setting(
        "VK_RECORD_SIZE",
        BYTES,
        "64Mi",
        "How much of the event log is kept; the oldest goes first.",
        group=SERVICE,
    )
    log_level: str = _setting(
        "VK_LOG_LEVEL", LEVEL, "info", "The least important messages that are logged.", group=SERVICE
    )
    log_format: str = _setting(
        "VK_LOG_FORMAT",
        _choice("auto", "text", "json"),
        "auto",
        "How log lines look; auto is JSON with priorities under the systemd journal, else text.",
        group=SERVICE,
    )

    @classmethod
    def load(
        cls, environ: Mapping[str, str], flags: Mapping[str, str] | None = None, *, files: bool = False
    ) -> "Settings":
        """Settings from the environment and the flags given (`flags`: field name to text; flags win, empty is unset).

        Raises WrongSettings for all values that cannot be right; with `files` a file that somebody named and that
        cannot be read is one of them.
        """
        values: dict[str, Any] = {}
        wrong: list[SettingError] = []
        for row in SETTINGS:
            text, origin = _written(row, environ, flags or {})
            if not text:
                continue
            try:
                values[row.name] = row.read(text, origin)
            except SettingError as error:
                wrong.append(error)
                continue
            if files and row.name in FILES and text != row.default and not FILES[row.name](text):
                wrong.append(SettingError(origin, text, READABLE))
        if not wrong:
            settings = cls(**values)
            wrong = [*_taken_twice(settings, environ, flags or {})]
            if not wrong:
                return settings
        raise WrongSettings(wrong)

    @staticmethod
    def origin(name: str, environ: Mapping[str, str], flags: Mapping[str, str] | None = None) -> str:
        """Where the value of field `name` comes from: the flag or the variable as the user wrote it, or "default"."""
        return _written(next(row for row in SETTINGS if row.name == name), environ, flags or {})[1]

    @staticmethod
    def strangers(environ: Mapping[str, str]) -> dict[str, str]:
        """Variables that look like ours but are not, each with the one that may have been meant ("" if none is near).

        A mistyped VK_ variable would otherwise be ignored in silence.
        """
        known = [row.env for row in SETTINGS]
        suspects = sorted(name for name in environ if name.startswith(("VK_", "COCOON_")) and name not in known)
        meant = {name: "".join(difflib.get_close_matches(name, known, n=1, cutoff=0.8)) for name in suspects}
        # Cocoon has variables of its own; only one that is nearly ours is suspect.
        return {name: near for name, near in meant.items() if near or name.startswith("VK_")}


def _readable(path: str) -> bool:
    path = os.path.expanduser(path)
    return os.path.isfile(path) and os.access(path, os.R_OK)


def _one_readable(paths: str) -> bool:
    """Like kubectl: of several files some may be missing."""
    return any(_readable(path) for path in paths.split(":") if path)


# Settings that name files to be read; at their default places there need not be any.
FILES: dict[str, Callable[[str], bool]] = {
    "kubeconfig": _one_readable,
    "kubelet_client_ca": _readable,
    "tls_cert": _readable,
    "tls_key": _readable,
}


def _taken_twice(settings: Settings, environ: Mapping[str, str], flags: Mapping[str, str]) -> Iterable[SettingError]:
    """Ports that are to serve two things, which would fail at each start as if a stranger had them."""
    rows = {row.name: row for row in SETTINGS}
    served = {"kubelet_port": Address("", settings.kubelet_port), "metrics_addr": settings.metrics_addr}
    if settings.status_addr is not None:
        served["status_addr"] = settings.status_addr
    for name, other in itertools.combinations(served, 2):
        one, two = served[name], served[other]
        if one.port == two.port != 0 and (one.host == two.host or "" in (one.host, two.host)):
            text, origin = _written(rows[other], environ, flags)
            allowed = f"a port other than {rows[name].env}'s"
            yield SettingError(origin if text else rows[other].env, text or rows[other].default, allowed)


def _written(row: Setting, environ: Mapping[str, str], flags: Mapping[str, str]) -> tuple[str, str]:
    if row.flag and flags.get(row.name):
        return flags[row.name], row.flag
    if environ.get(row.env):
        return environ[row.env], row.env
    return "", "default"


SETTINGS: tuple[Setting, ...] = tuple(Setting(name=one.name, **one.metadata) for one in fields(Settings))


# Pages made from the table ----------------------------------------------------------------------------------------


def _groups() -> Iterable[tuple[str, list[Setting]]]:
    for group in dict.fromkeys(row.group for row in SETTINGS):
        yield group, [row for row in SETTINGS if row.group == group]


def _default_shown(row: Setting) -> str:
    return f"`{row.default}`" if row.default else row.absent


def configuration_page() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `make docs` from the table in vkcocoon_settings.py; edit it there. -->",
        "",
        "`vk-cocoon run` is configured by environment variables, usually from `/etc/cocoon/vk-cocoon.env`, each of",
        "them also a flag. A flag wins over the environment, the environment over the default. An empty value is an",
        "unset one.",
        "",
        "Values that cannot be right stop the start with exit code 78 and a line for each that names the setting, the",
        "value and what is allowed, wherever the value came from; so do a kubeconfig and certificates that cannot be",
        "used. `vk-cocoon config` tells without starting, from the same file, and shows where each value comes from;",
        "`vk-cocoon run --check-config` does so for its own flags and environment and does not look at the file. A",
        "variable that starts with `VK_` and is not listed here is reported once at start and otherwise ignored. A",
        "secret has no flag, because everybody on a host can read command lines.",
    ]
    for group, rows in _groups():
        lines += ["", f"## {group}", ""]
        for row in rows:
            flag = f", `{row.flag} {row.kind.metavar}`" if row.flag else ", a secret"
            lines += [f"**`{row.env}`**{flag}", "", f"{row.help}  "]
            lines += [f"Default: {_default_shown(row)}. Allowed: {row.kind.allowed}.", ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def environment_example() -> str:
    """packaging/vk-cocoon.env.example: every variable, commented out, with its default."""
    lines = [
        "# Settings of vk-cocoon: copy to /etc/cocoon/vk-cocoon.env with mode 0600 and uncomment what differs.",
        "# Made by `make docs` from the table in vkcocoon_settings.py. Check with: vk-cocoon config",
    ]
    for group, rows in _groups():
        lines += ["", f"## {group}"]
        for row in rows:
            lines += ["", f"# {row.help}"]
            lines += [f"# Allowed: {row.kind.allowed}."]
            lines += [] if row.default else [f"# Unset: {row.absent}."]
            lines += [f"#{row.env}={row.default}"]
    return "\n".join(lines) + "\n"


def _main(arguments: list[str]) -> int:
    pages = {"configuration": configuration_page, "environment": environment_example}
    if len(arguments) != 1 or arguments[0] not in pages:
        sys.stderr.write(f"usage: python -m vkcocoon_settings {'|'.join(pages)}\n")
        return 2
    sys.stdout.write(pages[arguments[0]]())
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
