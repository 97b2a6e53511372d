"""A kubelet API on a real TLS socket of the loopback, for its tests: certificates made here, a fake API server to ask
about clients, a simulated host with VMs in it whose time goes on by itself, and a client that speaks plain HTTP.
"""

import datetime
import ipaddress
import json
import shutil
import socket
import ssl
import struct
from contextlib import contextmanager
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from gevent.event import Event
from gevent.pool import Group
from host_rig import Rig

from simulator.fake_kube import FakeKube
from vkcocoon_kubelet import LIMITS, Kubelet
from vkcocoon_probes import SystemClock, spawn
from vkcocoon_settings import Settings
from vkcocoon_stats import Stats
from vkcocoon_vms import CocoonCLI

NODE = "node-1"
NODE_IP = "192.0.2.10"
DAY = datetime.timedelta(days=1)
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class Authority:
    """Signs certificates for a test; with `above` it is itself signed by another one."""

    def __init__(self, directory, name="test-ca", above=None):
        self.directory, self.name = directory, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._above = above
        self.certificate = self._signed(self.key, name, ca=True, by=above or self)
        self.path = self._write(f"{name}.crt", _pem(self.certificate))

    def issue(self, name, *, groups=(), usage=CLIENT, start=-DAY, end=DAY, alternative=()):
        """Paths of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(
            key, name, groups=groups, usage=usage, start=start, end=end, alternative=alternative, by=self
        )
        stem = f"{self.name}-{name}-{certificate.serial_number}"
        return self._write(f"{stem}.crt", _pem(certificate)), self._write(f"{stem}.key", _pem_key(key))

    def _signed(self, key, name, *, by, groups=(), usage=None, start=-DAY, end=DAY, alternative=(), ca=False):
        now = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC) if ca else SystemClock().now()
        begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) if ca else now + start
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        attributes += [x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(attributes))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by.name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(now if ca else now + end)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if alternative:
            names = [_general_name(each) for each in alternative]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(by.key, hashes.SHA256())

    def _write(self, name, content):
        path = self.directory / name
        path.write_bytes(content)
        return str(path)


def _general_name(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_key(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# What the provider holds ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Held:
    """A pod as the provider holds it."""

    key: str
    uid: str
    vm: object = None
    gone: bool = False
    status: dict = None
    reason: str = "LifecycleCreating"
    containers: list = field(default_factory=lambda: ["agent"])
    annotations: dict = field(default_factory=dict)
    managed: bool = True

    @property
    def spec(self):
        return self

    @property
    def pod(self):
        namespace, _, name = self.key.partition("/")
        return {
            "metadata": {"namespace": namespace, "name": name, "uid": self.uid, "annotations": self.annotations},
            "spec": {"containers": [{"name": each, "image": "placeholder:1"} for each in self.containers]},
            "status": {"phase": "Pending"},
        }


class HeldPods:
    def __init__(self):
        self.pods = {}

    def __iter__(self):
        return iter(list(self.pods.values()))

    def find(self, key):
        return self.pods.get(key)

    def add(self, key="default/web-0", uid="uid-1", **members):
        self.pods[key] = Held(key, uid, **members)
        return self.pods[key]


# The whole --------------------------------------------------------------------------------------------------------


class KubeletRig:
    """`kubelet` serves on 127.0.0.1; it lets in the token "good" and certificates of `authority`."""

    def __init__(self, directory):
        self.directory = directory
        self.clock = SystemClock()
        self.authority = Authority(directory)
        self.kube = FakeKube(self.clock)
        self.kube.tokens["good"] = {"username": "system:serviceaccount:kube-system:metrics-server", "groups": ["sa"]}
        self.held = HeldPods()
        self.assigned = None
        self.files = HostFiles(directory / "host")
        self.host = Rig(directory)
        self.cocoon = self.host.cocoon
        self.cli = CocoonCLI("cocoon", execute=self.cocoon.execute, output=self.host.host.output, clock=self.host.clock)
        self.logs = self.cli.logs
        self.kubelet = None
        self._greenlets = Group()
        self._stop = Event()

    def start(self, *, limits=LIMITS, exposition=lambda: b"", **settings):
        """Serve; `settings` as in Settings."""
        chosen = {"kubelet_client_ca": self.authority.path, "kubelet_port": free_port(), "node_ip": NODE_IP}
        chosen |= {"tls_cert": str(self.directory / "none.crt"), "tls_key": str(self.directory / "none.key")}
        self.settings = Settings(node_name=NODE, **chosen | settings)
        self.kubelet = Kubelet(
            self.settings,
            self.clock,
            held=self.held,
            assigned=lambda: [pod.pod for pod in self.held] if self.assigned is None else self.assigned,
            logs=self._read_logs,
            reviews=self.kube,
            exposition=exposition,
            limits=limits,
            proc=str(self.files.proc),
            cgroup=str(self.files.cgroup),
        )
        self.kubelet.start()
        return self

    def _read_logs(self, ref, **options):
        """A test may put another reader in place at any time."""
        return self.logs(ref, **options)

    def close(self):
        self._stop.set()
        self._greenlets.join()
        if self.kubelet is not None:
            self.kubelet.close()
        self.host.clock.close()

    def let_time_pass(self):
        """From here on the simulated host's time goes on by itself, faster than ours."""
        spawn(self._greenlets, "time of the host", self._run)

    def _run(self):
        while not self._stop.is_set():
            self.host.clock.run(0.05)
            self.clock.sleep(0.005)

    def vm_pod(self, name="web-0", uid="uid-1", **members):
        """A pod with a VM on the simulated host."""
        vm = self.host.clone_vm(f"vk-default-{name}")
        return self.held.add(f"default/{name}", uid, vm=vm, **members)

    # Clients

    @property
    def address(self):
        return ("127.0.0.1", self.kubelet.address[1])

    def context(self, certificate=None, *, trust=None):
        """A client's TLS: `certificate` are paths, `trust` the path of an authority; without it anybody is believed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if trust is None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            context.load_verify_locations(trust)
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context

    def connect(self, context=None, *, server_hostname=None):
        raw = socket.create_connection(self.address, timeout=20)
        return (context or self.context()).wrap_socket(raw, server_hostname=server_hostname)

    @contextmanager
    def asking(self, path, *, token="good", method="GET", headers=(), context=None, body=b""):
        """A connection on which the request has been sent."""
        lines = [f"{method} {path} HTTP/1.1", "Host: node", *headers]
        lines += [f"Authorization: Bearer {token}"] if token else []
        with self.connect(context) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            answer = Answer(connection)
            try:
                yield answer
            finally:
                answer.close()

    def ask(self, path, **options):
        """Status and body."""
        with self.asking(path, **options) as answer:
            return answer.status, answer.text()

    def get_json(self, path, **options):
        status, text = self.ask(path, **options)
        assert status == 200, text
        return json.loads(text)

    def until(self, true, seconds=10.0):
        """Wait until something is true that no clock can tell."""
        with self.clock.timeout(seconds):
            while not true():
                self.clock.sleep(0.005)


class Answer:
    """What comes back, read as far as somebody asks."""

    def __init__(self, connection):
        self.connection = connection
        self._file = connection.makefile("rb")
        self._status = None
        self.headers = {}

    def close(self):
        self._file.close()
        self.connection.close()

    def abort(self):
        """Close as the kernel does for a process that is killed: by a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    @property
    def status(self):
        if self._status is None:
            self._status = int(self._file.readline().split()[1])
            while line := self._file.readline().strip():
                name, _, value = line.decode().partition(": ")
                self.headers[name.lower()] = value
        return self._status

    def piece(self):
        """The next chunk, b"" at the end of the body. Raises EOFError when the body has no end."""
        assert self.status and self.headers.get("transfer-encoding") == "chunked"
        line = self._file.readline()
        if not line:
            raise EOFError("the body was cut")
        length = int(line, 16)
        piece = self._file.read(length)
        if len(piece) < length or self._file.readline() != b"\r\n":
            raise EOFError("the body was cut")
        return piece

    def body(self):
        if self.status and self.headers.get("transfer-encoding") == "chunked":
            return b"".join(iter(self.piece, b""))
        length = int(self.headers["content-length"])
        body = self._file.read(length)
        if len(body) < length:
            raise EOFError("the body was cut")
        return body

    def text(self):
        return self.body().decode()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# A host's files ---------------------------------------------------------------------------------------------------

BOOTED = 1_700_000_000  # seconds of the epoch


class HostFiles:
    """/proc and the cgroups of a host with VMs, in a directory: what Stats reads, and nothing more."""

    def __init__(self, directory):
        self.proc, self.cgroup = directory / "proc", directory / "cgroup"
        self.write(
            "proc/stat", f"cpu  1000 100 500 90000 800 20 30 50 400 0\ncpu0 1 2 3\nbtime {BOOTED}\nctxt 5\n", directory
        )
        self.memory(16_000_000, 4_000_000, 1_000_000)
        self.interfaces({"lo": (0, 0)})

    def write(self, path, content, directory=None):
        path = (directory or self.proc.parent) / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def memory(self, total, free, inactive):
        """In KiB."""
        self.write(
            "proc/meminfo",
            f"MemTotal:       {total} kB\nMemFree:        {free} kB\nMemAvailable:   {free + inactive} kB\n"
            f"Inactive:       999 kB\nInactive(file): {inactive} kB\nHugePages_Total:       0\n",
        )

    def interfaces(self, rows, pid=None):
        """`rows` are bytes received and sent, and errors, by interface, as the host sees them."""
        head = "Inter-|   Receive                                                |  Transmit\n face |bytes\n"
        lines = [
            f"{name:>6}: {row[0]:7} 10 {row[2] if len(row) > 2 else 0} 0 0 0 0 0 "
            f"{row[1]} 20 {row[3] if len(row) > 3 else 0} 0 0 0 0 0\n"
            for name, row in rows.items()
        ]
        self.write(f"proc/{pid}/net/dev" if pid else "proc/net/dev", head + "".join(lines))

    def process(self, pid, about, *, start=5000, user=150, system=50, pages=2048, state="S", name="cloud-hyperviso"):
        """A process whose command line names a path in the directory `about`; start and times in ticks."""
        fields = ["0"] * 50
        fields[0] = state
        fields[11], fields[12], fields[19], fields[21] = (str(each) for each in (user, system, start, pages))
        self.write(f"proc/{pid}/stat", f"{pid} ({name}) {' '.join(fields)}\n")
        self.write(f"proc/{pid}/cmdline", f"cloud-hypervisor\0--api-socket\0/run/ch/{about}/api.sock\0")

    def end(self, pid):
        shutil.rmtree(self.proc / str(pid))

    def scope(self, vm_id, *, usage_us=None, pids=()):
        where = f"cgroup/cocoon.slice/vm-{vm_id}.scope"
        if usage_us is not None:
            self.write(f"{where}/cpu.stat", f"usage_usec {usage_us}\nuser_usec 1\nsystem_usec 1\nnr_periods 0\n")
        self.write(f"{where}/cgroup.procs", "".join(f"{pid}\n" for pid in pids))

    def stats(self, clock, subjects):
        return Stats(clock, subjects, parent="cocoon.slice", proc=str(self.proc), cgroup=str(self.cgroup))
