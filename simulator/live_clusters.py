"""The cluster around a live world: the fake API server of this process, or a real one that a kubeconfig leads to.

A real one is beyond the namespaces that the world stands in. So the half of the playground that stayed on the host
dials for us and hands the connections over (simulator.dialing, `Dialer`), and a relay on our own loopback address
passes the bytes on: nothing of TLS is touched, the kubeconfig that is written here only names the relay, and the
server's name as what its certificate has to say. The node registers there, the pods of the scenario are made there, and
what was made is taken away again at the end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import gevent.socket
import yaml
from gevent.lock import Semaphore
from gevent.pool import Group, Pool
from gevent.server import StreamServer

from simulator.dialing import Unusable, current_cluster
from simulator.fake_kube import FakeKube
from simulator.fake_kube_controllers import Controllers
from vkcocoon_kube import ApiError, HttpKubeApi, KubeApi, KubeconfigError, Object
from vkcocoon_probes import Clock, spawn
from vkcocoon_status import pod_key

__all__ = ["Cluster", "Dialer", "FakeCluster", "RealCluster"]

GONE_S = 30.0  # for our pods to go, once they are deleted
LOOK_S = 0.2
CHUNK = 65536


class Cluster:
    """`api` is the door of people and controllers; `kube` is the fake server, None for a real cluster."""

    api: KubeApi
    kube: FakeKube | None = None

    def start(self, home: Path, *, bridged: bool) -> None:
        """Write HOME/kubeconfig, which leads there from where the daemon is. Raises Unusable."""
        raise NotImplementedError

    def claim(self, node: str) -> None:
        """This node will be ours. Raises Unusable when somebody has one of that name."""

    def make_namespace(self, namespace: str) -> None:
        """It may be there already."""
        with contextlib.suppress(ApiError):
            self.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})

    def tidy(self, node: str) -> list[str]:
        """Take away our pods while the daemon still runs; one line for each that would not go."""
        return []

    def close(self, node: str) -> None:
        """Take away the rest, once the daemon has ended."""


class FakeCluster(Cluster):
    """The fake API server with its few controllers, on `listener`, which the host can reach."""

    def __init__(self, clock: Clock, listener: socket.socket) -> None:
        self.kube: FakeKube = FakeKube(clock, rng=Random())
        self.kube.gate.jitter_s = 0.0  # real time has its own
        self.api = self.kube.admin
        self._listener = listener
        self._controllers = Controllers(self.kube)

    def start(self, home: Path, *, bridged: bool) -> None:
        door = self.kube.serve(self._listener)
        if bridged:
            self.kube.serve(("127.0.0.1", self._listener.getsockname()[1]))
        (home / "kubeconfig").write_text(door.kubeconfig())
        self._controllers.start()

    def close(self, node: str) -> None:
        self._controllers.close()


class RealCluster(Cluster):
    """The cluster behind a kubeconfig file. `dial` gives a connection to its server; None: we can dial ourselves."""

    def __init__(self, kubeconfig: Path, clock: Clock, dial: Callable[[], gevent.socket.socket] | None) -> None:
        self._source = kubeconfig
        self._clock = clock
        self._dial = dial
        self._relay: StreamServer | None = None
        self._claimed = False  # before that, nothing there is ours to take away
        self._made: list[str] = []  # namespaces

    def start(self, home: Path, *, bridged: bool) -> None:
        config, cluster = current_cluster(self._source)
        if self._dial is not None:
            url = urlsplit(cluster["server"])
            self._relay = StreamServer(("127.0.0.1", 0), self._pass_on, spawn=Pool())
            self._relay.start()
            cluster["server"] = f"{url.scheme}://127.0.0.1:{self._relay.server_port}{url.path}"
            if url.scheme == "https":
                cluster.setdefault("tls-server-name", url.hostname)
        path = home / "kubeconfig"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        try:
            self.api = HttpKubeApi(str(path), user_agent="vk-cocoon-playground")
            self.api.list("/api/v1/nodes", limit=1)
        except (KubeconfigError, ApiError) as error:
            raise Unusable(f"{self._source}: {' '.join(str(error).split())}") from error

    def claim(self, node: str) -> None:
        try:
            self.api.get(f"/api/v1/nodes/{node}")
        except ApiError as error:
            if error.status != 404:
                raise Unusable(f"{self._source}: {error}") from error
            self._claimed = True
            return
        raise Unusable(f"{self._source}: there is a node {node!r} already; is another playground running there?")

    def make_namespace(self, namespace: str) -> None:
        with contextlib.suppress(ApiError):
            self.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
            self._made.append(namespace)

    def tidy(self, node: str) -> list[str]:
        for pod in self._ours(node):
            with contextlib.suppress(ApiError):
                self.api.delete(_path(pod))
        end = self._clock.monotonic() + GONE_S
        while (left := self._ours(node)) and self._clock.monotonic() < end:
            self._clock.sleep(LOOK_S)
        for pod in left:
            with contextlib.suppress(ApiError):
                self.api.delete(_path(pod), grace_seconds=0)
        return [f"pod {pod_key(pod)} did not go within {GONE_S:g} s and was removed by force" for pod in left]

    def close(self, node: str) -> None:
        lease = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}"
        made = [f"/api/v1/namespaces/{name}" for name in self._made]
        for path in (*made, f"/api/v1/nodes/{node}", lease) if self._claimed else ():
            with contextlib.suppress(ApiError):
                self.api.delete(path)
        if self._relay is not None:
            self._relay.stop(timeout=0)

    def _ours(self, node: str) -> list[Object]:
        if not self._claimed:
            return []
        with contextlib.suppress(ApiError):
            return list(self.api.list("/api/v1/pods", field_selector=f"spec.nodeName={node}")["items"])
        return []

    def _pass_on(self, near: gevent.socket.socket, _: object) -> None:
        assert self._dial is not None
        with contextlib.suppress(OSError), near, self._dial() as far:
            back = Group()
            spawn(back, "relay", _pump, far, near)
            try:
                _pump(near, far)
                back.join()
            finally:
                back.kill()


def _pump(source: gevent.socket.socket, sink: gevent.socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


class Dialer:
    """The near end: each call gives a connection that somebody else has opened."""

    def __init__(self, channel: gevent.socket.socket) -> None:
        self._channel = channel
        self._turn = Semaphore()

    def __call__(self) -> gevent.socket.socket:
        """Raises OSError when the server cannot be reached."""
        with self._turn:
            self._channel.sendall(b"?")
            gevent.socket.wait_read(self._channel.fileno())
            word, descriptors, _, _ = socket.recv_fds(self._channel, CHUNK, 1)
        if not descriptors:
            raise ConnectionError(word.decode(errors="replace") or "nobody dials for us any more")
        return gevent.socket.socket(fileno=descriptors[0])
