"""`vk-cocoon doctor`: is everything this host needs there, and if not, what is to be done.

Each check asks one question and finds one thing: well, a warning, or an error, the latter two with the fix: a command
to type or a setting to change. Checks are generators in the order of a person's questions (the host, the leases,
cocoon, the cluster, the service) and independent of each other: one that raises is an error of its own, and the others
are asked all the same. Nothing is changed, and nothing is asked of the running daemon but its status.

`Site` is what the checks look at: the settings, and doors to the world that a test replaces. The findings are data;
vkcocoon_inspection prints them. What a running kubelet needs of the cluster is `RIGHTS`, which a test holds against
packaging/rbac.yaml.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

import gevent

from vkcocoon_certificates import end_of_certificate
from vkcocoon_commands import CommandError, Execute
from vkcocoon_host import HostError, is_own_address, node_address
from vkcocoon_kube import ApiError, KubeApi, KubeconfigError
from vkcocoon_net import LeaseFile, LeaseFileError, open_pinger
from vkcocoon_node import INSTANCE
from vkcocoon_probes import Clock
from vkcocoon_server import CannotListen, listen
from vkcocoon_settings import Settings
from vkcocoon_status import condition_of
from vkcocoon_terminal import Mark, ago
from vkcocoon_vms import CocoonCLI
from vkcocoon_window import NoAnswer

__all__ = ["RIGHTS", "SECTIONS", "Finding", "Section", "Site", "examine"]

OK, WARNING, FAILED = Mark.OK, Mark.WARNING, Mark.FAILED

# Who may do what, as the API server is asked: verb, group, resource, subresource, namespace.
RIGHTS = (
    *((verb, "", "pods", "", "") for verb in ("get", "list", "watch", "patch", "delete")),
    ("patch", "", "pods", "status", ""),
    *((verb, "", "nodes", "", "") for verb in ("get", "create", "patch")),
    ("patch", "", "nodes", "status", ""),
    *((verb, "", "events", "", "") for verb in ("create", "patch")),
    *((verb, "coordination.k8s.io", "leases", "", "kube-node-lease") for verb in ("get", "create", "update")),
    ("create", "authentication.k8s.io", "tokenreviews", "", ""),
    ("create", "authorization.k8s.io", "subjectaccessreviews", "", ""),
)
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
OLDEST_SERVER = (1, 30)

ENOUGH_FILES = 4096  # a pod needs some, a storm of commands some more
ENOUGH_BUFFER = 4 << 20  # what the pinger asks for; without CAP_NET_ADMIN the system's limit stands
CAP_NET_ADMIN = 12
TIME_ERROR = 5  # adjtimex: the clock is not synchronized
TORN_READS = 5
FULL = 0.9
COMMAND_S = 30.0
SKEW_S = 3.0  # between two clocks that are kept; a slow answer is no skew
RENEWAL = timedelta(days=30)  # of certificates, before their end
SERVICE = "vk-cocoon.service"
UNIT = {
    "KillMode": ("process", "a restart of the unit would end every VM"),
    "OOMPolicy": ("continue", "one VM out of memory would stop the unit"),
    "Type": ("notify", "other units cannot wait for it, and there is no watchdog"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `name` is for machines and stays; `fix` is "" where nothing is to be done."""

    name: str
    mark: Mark
    text: str
    fix: str = ""


class DatedApi(KubeApi, Protocol):
    """What `vkcocoon_kube.HttpKubeApi` has besides."""

    answered_at: datetime | None


Check = Callable[["Site"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    checks: tuple[Check, ...]
    pre: bool  # asked before anything is installed or connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is looked at."""

    settings: Settings
    clock: Clock
    execute: Execute
    connect: Callable[[], DatedApi]  # raises KubeconfigError
    ask: Callable[[str], Mapping[str, Any]]  # the running daemon's document; raises NoAnswer
    version: str
    env_file: str
    strangers: Mapping[str, str] = field(default_factory=dict)  # `Settings.strangers`
    proc: str = "/proc"
    dev: str = "/dev"


def examine(site: Site, *, pre: bool = False) -> Iterator[tuple[str, Finding]]:
    """Section and finding, one after the other as they are found; with `pre` only what can be asked of a bare host."""
    for section in SECTIONS:
        if pre and not section.pre:
            continue
        for check in section.checks:
            try:
                for finding in check(site):
                    yield section.name, finding
            except Exception as error:  # noqa: BLE001  a check that fails must not hide the others
                text = f"the check itself failed: {type(error).__name__}: {error}"
                yield section.name, Finding(check.__name__.strip("_"), FAILED, text, "please report this")


# The host ---------------------------------------------------------------------------------------------------------


def _python(site: Site) -> Iterator[Finding]:
    loop = gevent.get_hub().loop
    text = f"Python {'.'.join(map(str, sys.version_info[:3]))}, gevent {gevent.__version__} on {loop.backend}"
    yield Finding("python", OK, text)


def _raw_socket(site: Site) -> Iterator[Finding]:
    pinger = open_pinger()
    pinger.close()
    if pinger.degraded:
        fix = "run as root, or grant CAP_NET_RAW; otherwise give every pod a probe port"
        text = "no raw ICMP socket: guests without a probe port would count as ready unasked"
        yield Finding("raw-socket", WARNING, text, fix)
    else:
        yield Finding("raw-socket", OK, "CAP_NET_RAW is effective (raw ICMP socket opened)")


def _open_files(site: Site) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < ENOUGH_FILES:
        yield Finding("open-files", WARNING, f"open files limit {hard} is small", "LimitNOFILE=1048576 in the unit")
    else:
        yield Finding("open-files", OK, f"open files limit {hard}")


def _buffers(site: Site) -> Iterator[Finding]:
    largest = int(_content(f"{site.proc}/sys/net/core/rmem_max") or "0")
    effective = int(_field(f"{site.proc}/self/status", "CapEff") or "0", 16)
    if largest >= ENOUGH_BUFFER or effective >> CAP_NET_ADMIN & 1:
        yield Finding("receive-buffer", OK, "the ping socket may have a receive buffer of 4 MiB")
    else:
        text = f"net.core.rmem_max {largest} is small for {site.settings.node_pods} pods: replies to bursts may be lost"
        yield Finding("receive-buffer", WARNING, text, f"sysctl -w net.core.rmem_max={ENOUGH_BUFFER}")


def _kvm(site: Site) -> Iterator[Finding]:
    path = f"{site.dev}/kvm"
    if not os.path.exists(path):
        fix = "modprobe kvm_intel or kvm_amd; if that fails, switch virtualization on in the firmware"
        yield Finding("kvm", FAILED, f"{path} is missing: VMs cannot run", fix)
    elif not os.access(path, os.R_OK | os.W_OK):
        yield Finding("kvm", FAILED, f"{path} is not for this user", "run as root")
    else:
        yield Finding("kvm", OK, f"{path} is there")


def _clock(site: Site) -> Iterator[Finding]:
    timex = ctypes.create_string_buffer(512)  # all zero: only look
    if ctypes.CDLL(None).adjtimex(timex) == TIME_ERROR:
        text = "the clock is not synchronized: leases end by it, and others compare our timestamps"
        yield Finding("clock", WARNING, text, "timedatectl set-ntp true")
    else:
        yield Finding("clock", OK, "the clock is synchronized")


def _address(site: Site) -> Iterator[Finding]:
    wanted = site.settings.node_ip
    try:
        address = wanted or node_address()
    except HostError as error:
        yield Finding("address", FAILED, str(error), "set VK_NODE_IP to the address others reach this host under")
        return
    if not is_own_address(address):
        yield Finding("address", FAILED, f"{address} is no address of this host", "set VK_NODE_IP to one that is")
        return
    yield Finding("address", OK, f"the node's address is {address}{'' if wanted else ' (found out)'}")


# Leases -----------------------------------------------------------------------------------------------------------


def _lease_file(site: Site) -> Iterator[Finding]:
    path, now = site.settings.leases_path, site.clock.now()
    fix = "systemctl status cocoon-net; VK_LEASES_PATH must be the file it writes"
    torn = 0
    for _ in range(TORN_READS):
        try:
            rows = LeaseFile(path).rows(now)
        except LeaseFileError as error:
            torn, problem = torn + 1, str(error)
        site.clock.sleep(0.02)
    if torn == TORN_READS:
        yield Finding("lease-file", FAILED, problem, fix)
    elif torn:
        text = f"{path} is torn in {torn} of {TORN_READS} looks: its writer does not replace it whole"
        yield Finding("lease-file", WARNING, text, "use a cocoon-net that writes a new file and renames it")
    else:
        age = ago(now.timestamp() - os.stat(path).st_mtime)
        yield Finding("lease-file", OK, f"{path} is readable, {len(rows)} live leases, written {age} ago")


def _control_socket(site: Site) -> Iterator[Finding]:
    path = site.settings.cocoon_net_control_socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        try:
            channel.connect(path)
        except OSError as error:
            text = f"nobody answers at {path} ({error.strerror}): leases are not given back when pods are deleted"
            yield Finding(
                "control-socket", WARNING, text, "systemctl status cocoon-net; or VK_COCOON_NET_CONTROL_SOCKET"
            )
            return
    yield Finding("control-socket", OK, f"cocoon-net answers at {path}")


def _state_dir(site: Site) -> Iterator[Finding]:
    path = site.settings.state_dir
    there = os.path.exists(path)
    place = path if there else os.path.dirname(path)  # of which the daemon makes only the last directory
    if os.path.isdir(place) and os.access(place, os.W_OK):
        yield Finding("state-dir", OK, f"{path} can be written" if there else f"{path} can be made")
    else:
        text = f"{path} cannot be written: a kill in the middle of a removal leaves an address leased"
        yield Finding("state-dir", WARNING, text, "make it a directory that root may write to, or set VK_STATE_DIR")


# Cocoon -----------------------------------------------------------------------------------------------------------


def _cocoon(site: Site) -> Iterator[Finding]:
    binary = site.settings.cocoon_bin
    try:
        records = CocoonCLI(binary, execute=site.execute, clock=site.clock).list()
    except CommandError as error:
        fix = f"run it by hand: {binary} vm list -o json; VK_COCOON_BIN names the program"
        yield Finding("cocoon", FAILED, f"the VMs cannot be listed: {error}", fix)
        return
    running = sum(record.running for record in records)
    yield Finding("cocoon", OK, f"{binary} lists {len(records)} VMs, {running} running")


def _root_dir(site: Site) -> Iterator[Finding]:
    path = site.settings.cocoon_root_dir
    if not os.path.isdir(path):
        yield Finding(
            "root-dir", FAILED, f"{path} is missing", "install cocoon, or set COCOON_ROOT_DIR to its directory"
        )
        return
    facts = os.statvfs(path)
    used = 1 - facts.f_bavail / facts.f_blocks if facts.f_blocks else 0.0
    text = f"{path} has {facts.f_bavail * facts.f_frsize >> 30} GiB free"
    if used > FULL:
        yield Finding(
            "root-dir", WARNING, f"{text}, {used:.0%} are used", "remove images, snapshots and VMs nobody needs"
        )
    else:
        yield Finding("root-dir", OK, text)


def _macos(site: Site) -> Iterator[Finding]:
    binary, vnc = site.settings.cocoon_macos_bin, bool(site.settings.macos_vnc_password)
    if not shutil.which(binary):
        yield Finding("cocoon-macos", OK, f"{binary} is not installed; only macOS guests need it")
    else:
        yield Finding("cocoon-macos", OK, f"{binary} is there; VNC is {'on' if vnc else 'off'}")


# Kubernetes -------------------------------------------------------------------------------------------------------


def _kubeconfig(site: Site) -> Iterator[Finding]:
    paths = [path for path in map(os.path.expanduser, site.settings.kubeconfig.split(":")) if os.path.isfile(path)]
    for path in paths:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o077:
            yield Finding("kubeconfig", WARNING, f"others may read {path}: mode {mode:04o}", f"chmod 0600 {path}")
        else:
            yield Finding("kubeconfig", OK, f"{path} is readable, and for its owner only")


def _cluster(site: Site) -> Iterator[Finding]:
    try:
        api = site.connect()
    except KubeconfigError as error:
        text = f"no usable kubeconfig: {' '.join(str(error).split())}"
        yield Finding("api-server", FAILED, text, "set KUBECONFIG; packaging/rbac.yaml says how its token is made")
        return
    try:
        found = api.get("/version")
    except ApiError as error:
        fix = "is its address in the kubeconfig right, and reachable from here?"
        yield Finding("api-server", FAILED, f"the API server does not answer: {error}", fix)
        return
    yield _server_version(found)
    yield from _skew(api.answered_at, site.clock.now())
    yield from _rights(api)
    yield from _node(api, site)


def _server_version(found: Mapping[str, Any]) -> Finding:
    text = str(found.get("gitVersion") or "")
    numbers = [part for part in text.lstrip("v").split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and tuple(map(int, numbers)) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        return Finding("api-server", WARNING, f"API server {text} is older than {oldest}", "upgrade the control plane")
    return Finding("api-server", OK, f"API server {text or 'of unknown version'} is reachable")


def _skew(server: datetime | None, now: datetime) -> Iterator[Finding]:
    """Both clocks against each other; the server's is told in whole seconds."""
    if server is None:
        return
    seconds = (now - server).total_seconds() - 0.5
    if abs(seconds) > SKEW_S:
        side = "ahead of" if seconds > 0 else "behind"
        text = f"this clock is {ago(abs(seconds))} {side} the API server's: ages and certificates are misjudged"
        yield Finding("clock-skew", WARNING, text, "timedatectl set-ntp true, here or there")
    else:
        yield Finding("clock-skew", OK, f"this clock and the API server's agree to {SKEW_S:g} s")


def _rights(api: KubeApi) -> Iterator[Finding]:
    denied = []
    for verb, group, plural, subresource, namespace in RIGHTS:
        wanted = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "namespace": namespace}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {name: value for name, value in wanted.items() if value}},
        }
        try:
            answer = api.create(REVIEWS, body)
        except ApiError as error:
            yield Finding("rights", WARNING, f"the API server does not say what we may do: {error}", "see its log")
            return
        if not (answer.get("status") or {}).get("allowed"):
            denied.append(f"{verb} {plural}{'/' if subresource else ''}{subresource}")
    if denied:
        fix = "kubectl apply -f packaging/rbac.yaml, and use its service account's token"
        yield Finding("rights", FAILED, f"may not {', '.join(denied)}", fix)
    else:
        yield Finding("rights", OK, f"has all {len(RIGHTS)} rights it needs")


def _node(api: KubeApi, site: Site) -> Iterator[Finding]:
    name = site.settings.node_name
    if name == Settings().node_name:
        text = f"the node is called {name}, as on every host where nobody chose a name"
        yield Finding("node-name", WARNING, text, "set VK_NODE_NAME to a name only this host has")
    try:
        node = api.get(f"/api/v1/nodes/{name}")
    except ApiError as error:
        if error.status != 404:
            raise
        yield Finding("node", OK, f"no node {name} yet; it is made at the first start")
        return
    instance = str((node["metadata"].get("annotations") or {}).get(INSTANCE) or "")
    host = instance.partition("/")[0]
    ready = condition_of(node.get("status") or {}, "Ready").get("status") == "True"
    if host and host != os.uname().nodename and ready:
        text = f"node {name} is run by another host: {host}"
        yield Finding("node", FAILED, text, "set VK_NODE_NAME to a name only this host has")
    else:
        yield Finding("node", OK, f"node {name} is {'Ready' if ready else 'registered, and not Ready'}")


# The service ------------------------------------------------------------------------------------------------------


def _env_file(site: Site) -> Iterator[Finding]:
    path = site.env_file
    if not os.path.exists(path):
        yield Finding(
            "env-file",
            FAILED,
            f"{path} is missing: the unit does not start",
            f"install -D -m 0600 packaging/vk-cocoon.env.example {path}",
        )
        return
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        yield Finding("env-file", WARNING, f"others may read {path}, which holds secrets", f"chmod 0600 {path}")
    else:
        yield Finding("env-file", OK, f"{path} is for its owner only")


def _strangers(site: Site) -> Iterator[Finding]:
    for name, meant in site.strangers.items():
        fix = f"did you mean {meant}?" if meant else "take it out; docs/configuration.md has all there are"
        yield Finding("settings", WARNING, f"{name} is no setting of vk-cocoon and is ignored", fix)


def _unit(site: Site) -> Iterator[Finding]:
    wanted = ("LoadState", "ActiveState", "WatchdogUSec", *UNIT)
    argv = ["systemctl", "show", SERVICE, *(f"--property={name}" for name in wanted)]
    try:
        shown = site.execute(argv, COMMAND_S)
    except CommandError as error:
        yield Finding("unit", WARNING, f"systemd cannot be asked: {error}", "run this on the host itself")
        return
    found = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    if shown.returncode or found.get("LoadState") != "loaded":
        fix = f"install packaging/{SERVICE} in /etc/systemd/system; systemctl daemon-reload"
        yield Finding("unit", FAILED, f"{SERVICE} is not installed", fix)
        return
    for name, (value, otherwise) in UNIT.items():
        if found.get(name) != value:
            yield Finding("unit", FAILED, f"{name}={found.get(name, '')}: {otherwise}", f"{name}={value} in the unit")
    yield Finding("unit", OK, f"{SERVICE} is {found.get('ActiveState')}, watchdog {found.get('WatchdogUSec', 'off')}")


def _daemon(site: Site) -> Iterator[Finding]:
    """The running daemon; when there is none, the ports it will want."""
    try:
        document = site.ask(site.settings.status_socket)
    except NoAnswer as error:
        yield Finding("daemon", WARNING, str(error), "systemctl start vk-cocoon; journalctl -u vk-cocoon")
        yield from _ports(site)
        return
    if document["version"] != site.version:
        text = f"version {document['version']} runs, {site.version} is installed"
        yield Finding("daemon", WARNING, text, "systemctl restart vk-cocoon; no guest notices")
    for check in document["checks"]:
        if check["trouble"]:
            yield Finding(
                "daemon", FAILED, f"{check['name']}: {check['trouble']}", "journalctl -u vk-cocoon -p warning"
            )
    waiting = [pod for pod in document["pods"] if not pod["ready"]]
    text = f"it runs for {ago(document['uptime_seconds'])}, {len(document['pods'])} pods, {len(waiting)} not ready"
    yield Finding("daemon", OK, text)


def _ports(site: Site) -> Iterator[Finding]:
    settings = site.settings
    wanted = {"VK_KUBELET_PORT": ("", settings.kubelet_port), "VK_METRICS_ADDR": settings.metrics_addr}
    if settings.status_addr is not None:
        wanted["VK_STATUS_ADDR"] = settings.status_addr
    for variable, (host, port) in wanted.items():
        try:
            listen((host, port), variable).close()
        except CannotListen as error:
            yield Finding("ports", FAILED, str(error), f"end what has it, or set {variable}")
        else:
            yield Finding("ports", OK, f"{host}:{port} is free for {variable}")


def _certificates(site: Site) -> Iterator[Finding]:
    settings, now = site.settings, site.clock.now()
    if not os.path.exists(settings.tls_cert):
        yield Finding("certificate", OK, f"no {settings.tls_cert}; one is made for the node at start")
    else:
        yield _certificate(settings.tls_cert, now)
    if settings.kubelet_auth == "off":
        text = "the kubelet API answers everybody, logs and all"
        yield Finding("kubelet-auth", WARNING, text, "VK_KUBELET_AUTH=on")
    if not settings.kubelet_client_ca:
        text = "kubectl logs will not work: no authority vouches for the API server"
        yield Finding("client-ca", WARNING, text, "set VK_KUBELET_CLIENT_CA to a copy of the control plane's CA")


def _certificate(path: str, now: datetime) -> Finding:
    try:
        end = end_of_certificate(path)
    except (OSError, ValueError) as error:
        return Finding("certificate", FAILED, f"{path} cannot be used: {error}", "make it again, or take it away")
    left = end - now
    if left <= timedelta(0):
        return Finding("certificate", FAILED, f"{path} ended on {end:%Y-%m-%d}", "renew it; no restart is needed")
    if left < RENEWAL:
        return Finding("certificate", WARNING, f"{path} ends in {left.days} days", "renew it; no restart is needed")
    return Finding("certificate", OK, f"{path} is good for {left.days} days")


# Reading ----------------------------------------------------------------------------------------------------------


def _content(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    lines = (line.partition(":") for line in _content(path).splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


SECTIONS = (
    Section("host", (_python, _raw_socket, _open_files, _buffers, _kvm, _clock, _address), pre=True),
    Section("leases", (_lease_file, _control_socket, _state_dir), pre=False),
    Section("cocoon", (_cocoon, _root_dir, _macos), pre=False),
    Section("kubernetes", (_kubeconfig, _cluster), pre=False),
    Section("service", (_env_file, _strangers, _unit, _daemon, _certificates), pre=False),
)
