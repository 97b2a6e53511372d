"""The fake API server (simulator.fake_kube) in the control plane's place: the same suite shows where the two differ.

It is a process of its own with nothing but its HTTP door: no users, no scheduler, no controllers.
"""

import signal
import socket
import sys
from pathlib import Path

from gevent import subprocess

from simulator.namespaces import die_with_parent, environment
from tests.e2e.api import CLOCK, Api
from tests.e2e.control_plane import UP_S, run_kubectl, until, write_kubeconfig


class FakePlane:
    name = "fake"
    scheme = "http"
    ca = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin = Api(self.url)
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        with (self.directory / "fake-kube.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.fake_plane", str(self._listener.fileno())],
                pass_fds=[self._listener.fileno()],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        until(lambda: self.admin.send("GET", "/readyz").status == 200, UP_S, "the fake API server")
        self.daemon_kubeconfig(self.directory / "admin.kubeconfig")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._listener.close()

    def forget_history(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        CLOCK.sleep(0.5)

    def daemon_kubeconfig(self, path: Path, url: str = "") -> None:
        write_kubeconfig(path, {"server": url or self.url}, {})

    def kubectl(self, *words: str, fails: bool = False, input_: str = "", within: float = 90.0) -> str:
        return run_kubectl(self.directory / "admin.kubeconfig", *words, fails=fails, input_=input_, within=within)


def main(descriptor: int) -> None:
    from gevent import monkey

    monkey.patch_all()
    import gevent
    import gevent.socket
    from gevent.event import Event

    from simulator.fake_kube import FakeKube
    from vkcocoon_probes import SystemClock

    kube = FakeKube(SystemClock())
    gevent.signal_handler(signal.SIGUSR1, kube.expire_history)
    kube.serve(gevent.socket.socket(fileno=descriptor))
    Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
