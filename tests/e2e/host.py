"""One host with a real `vk-cocoon run` on it: fake command lines, live guests on loopback addresses, a lease file.

    host = Host(plane, directory, name="n1", number=1)
    host.start()                              the guests' network, then the daemon
    host.guest("vm-a", ports=(8080,))         what the VM of that name will do, once somebody starts it
    plane.admin.create(PODS, host.pod("a"))
    host.daemon.kill(); host.daemon.start()
    host.stop()

The daemon is a process of its own that knows the cluster by its kubeconfig and the host by its environment. The host's
guests have addresses of 127.x.y.0/24, where x and y are the host's number; the kernel answers echoes for all of them,
so silence is a closed port.
"""

import dataclasses
import ipaddress
import json
import os
import signal
import ssl
import sys
from pathlib import Path

from gevent import subprocess

from simulator import fake_vms, namespaces
from simulator.fake_executables import LiveHost
from simulator.fake_guests import tell
from simulator.fake_vms import GuestSpec
from simulator.live_world import GuestNetwork
from tests.e2e.api import CLOCK, Api, condition
from tests.e2e.control_plane import free_port, until
from tests.e2e.link import Link

PORT = 28080  # the port of a guest that its pod is probed by
STOP_S = 15.0
QUICK = GuestSpec(boot_s=0.05, lease_s=0.05, ports=(PORT,))
ANNOTATIONS = {
    "cocoonset.cocoonstack.io/managed": "true",
    "cocoonset.cocoonstack.io/mode": "run",
    "cocoonset.cocoonstack.io/os": "linux",
    "cocoonset.cocoonstack.io/image": "registry.example/linux/debian:13",
    "cocoonset.cocoonstack.io/network": "cocoon-dhcp",
    "cocoonset.cocoonstack.io/storage": "20Gi",
    "vm.cocoonstack.io/probe-port": str(PORT),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the guests of one host are; see simulator.live_world.Place."""

    home: Path
    network: ipaddress.IPv4Network
    bridged: bool = False

    @property
    def gateway(self) -> str:
        return str(self.network[1])


class Host:
    def __init__(self, plane, home: Path, *, name: str, number: int, direct: bool = True) -> None:
        """`direct` False puts a `Link` between the daemon and the API server; the link is `self.link`."""
        self.plane = plane
        self.name = name
        self.home = home
        self.place = Place(home, ipaddress.IPv4Network(f"127.{64 + number // 250}.{number % 250}.0/24"))
        self.link = None if direct else Link("127.0.0.1", plane.port)
        self.network = GuestNetwork(self.place, CLOCK)
        self.tools = LiveHost(home)
        self.settings: dict[str, str] = {}
        self.metrics_port, self.kubelet_port = free_port(), free_port()
        self.daemon = Daemon(self.environment, home / "vk-cocoon.log")

    def start(self, *, daemon: bool = True) -> None:
        self.network.start()
        (self.home / "bin").mkdir()
        fake_vms.install_executables(self.home / "bin")
        url = f"{self.plane.scheme}://127.0.0.1:{self.link.port}" if self.link else ""
        self.plane.daemon_kubeconfig(self.home / "kubeconfig", url)
        if daemon:
            self.daemon.start()

    def stop(self) -> None:
        self.daemon.stop()
        self.network.close()
        if self.link:
            self.link.close()

    def wait_until_ready(self, within: float = 60.0) -> None:
        """Until the node is there, Ready, and taken for so by the node lifecycle controller, if there is one."""

        def ready() -> bool:
            assert self.daemon.alive, f"the daemon ended:\n{self.daemon.log()[-4000:]}"
            node = self.plane.admin.find(f"/api/v1/nodes/{self.name}")
            taints = (node or {}).get("spec", {}).get("taints") or []
            marked = any(taint["key"].startswith("node.kubernetes.io/") for taint in taints)
            return node is not None and condition(node).get("status") == "True" and not marked

        until(ready, within, f"node {self.name} is ready")

    def wait_until_started(self, within: float = 60.0) -> None:
        """Until the daemon has taken up what it found, and follows its pods."""

        def started() -> bool:
            try:
                return Api(f"http://127.0.0.1:{self.metrics_port}").send("GET", "/readyz").status == 200
            except OSError:
                return False

        until(started, within, f"the daemon of {self.name} is ready")

    def environment(self) -> dict[str, str]:
        home = self.home
        settings = {
            "HOME": str(home),
            "KUBECONFIG": str(home / "kubeconfig"),
            "FAKE_COCOON_HOME": str(home),
            "VK_NODE_NAME": self.name,
            "VK_NODE_IP": self.place.gateway,
            "VK_LEASES_PATH": str(home / "leases.json"),
            "VK_COCOON_NET_CONTROL_SOCKET": str(home / "cocoon-net.sock"),
            "VK_COCOON_BIN": str(home / "bin/cocoon"),
            "VK_COCOON_MACOS_BIN": str(home / "bin/cocoon-macos"),
            "COCOON_ROOT_DIR": str(home),
            "VK_STATE_DIR": str(home / "state"),
            "VK_NODE_CPU": "512",
            "VK_NODE_MEM": "2Ti",
            "VK_NODE_STORAGE": "64Ti",
            "VK_METRICS_ADDR": f"127.0.0.1:{self.metrics_port}",
            "VK_STATUS_SOCKET": str(home / "status.sock"),
            "VK_STATUS_ADDR": "off",
            "VK_KUBELET_PORT": str(self.kubelet_port),
            "VK_KUBELET_CLIENT_CA": str(self.plane.ca or ""),
            "VK_LOG_FORMAT": "text",
            "VK_LOG_LEVEL": "debug",
        }
        return namespaces.environment(**settings | self.settings)

    def kubelet(self, token: str = "") -> Api:
        """The kubelet API as somebody reaches it who has a token and no certificate."""
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        return Api(f"https://{self.place.gateway}:{self.kubelet_port}", tls, token=token)

    # Guests ---------------------------------------------------------------------------------------------------------

    def guest(self, vm_name: str, **changes) -> None:
        """What the VM of this name does from its next power-on; fields of simulator.fake_vms.GuestSpec."""
        spec = dataclasses.replace(QUICK, **changes)
        (self.home / "guests" / f"{vm_name}.json").write_text(json.dumps(dataclasses.asdict(spec)))

    def tell(self, vm_name: str, **order) -> dict:
        """Give a running guest an order, such as open=8080; returns its status."""
        return tell(self.home, vm_name, order)

    def pod(self, name: str, *, namespace: str = "default", bound: bool = True, grace: int = 30, **changes) -> dict:
        """A pod for this host whose guest comes up at once; `changes` are merged into its annotations.

        Its VM is called vm-NAME and its guest is QUICK, unless `guest` was called before.
        """
        vm_name = changes.get("vm.cocoonstack.io/name", f"vm-{name}")
        if vm_name and not (self.home / "guests" / f"{vm_name}.json").exists():
            self.guest(vm_name)
        annotations = {**ANNOTATIONS, "vm.cocoonstack.io/name": vm_name, **changes}
        spec = {
            "terminationGracePeriodSeconds": grace,
            "automountServiceAccountToken": False,
            "tolerations": [{"key": "virtual-kubelet.io/provider", "operator": "Exists"}],
            "containers": [{"name": "agent", "image": "registry.example/placeholder:1"}],
        }
        if bound:
            spec["nodeName"] = self.name
        else:
            spec["nodeSelector"] = {"kubernetes.io/hostname": self.name}
        metadata = {"name": name, "namespace": namespace}
        metadata["annotations"] = {key: value for key, value in annotations.items() if value is not None}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def vms(self) -> set[str]:
        """The names of the VMs that exist on this host."""
        listed = json.loads(self.tools.cocoon.run(["vm", "list", "-o", "json"]).stdout or "null") or []
        return {record["config"]["name"] for record in listed}


class Daemon:
    """`vk-cocoon run` as a process."""

    def __init__(self, environment, log: Path) -> None:
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen | None = None
        self.started_at = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.alive
        self.started_at = CLOCK.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vkcocoon_cli", "run"],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=namespaces.die_with_parent,
            )

    def stop(self) -> int | None:
        """SIGTERM; the exit code. Kills it when that is not enough."""
        if self._process is None:
            return None
        if self.alive:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """It lives and does nothing, as on a host that swaps itself to death."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_for_log(self, text: str, within: float = 15.0) -> None:
        until(lambda: text in self.log(), within, f"{text!r} in the daemon's log")

    def memory(self) -> int:
        """Resident bytes."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
