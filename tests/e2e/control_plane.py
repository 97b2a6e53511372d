"""A real control plane on loopback: etcd, API server, controller manager and scheduler, with certificates and RBAC.

    plane = ControlPlane(directory, ran)
    plane.start()
    plane.admin.get("/api/v1/nodes")
    plane.kubectl("get", "pods")
    plane.stop()

Everything is as in a cluster but for four things: one of each, without leader election; etcd does not sync; the node
monitor is quicker (`SILENCE_S`), so that a silent node can be waited for; and everything that users do is written to an
audit log, from which the suite reads which rights the daemon used.

Every program dies with this process, and is stopped by its pid.
"""

import json
import os
import random
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext, create_default_context

import yaml
from gevent import subprocess

from simulator.namespaces import die_with_parent
from tests.e2e import programs
from tests.e2e.api import CLOCK, Api
from tests.e2e.certificates import Authority, signing_key

UP_S = 120.0  # for one program to serve; they start slowly where everything else runs, too
STOP_S = 10.0
SILENCE_S = 30  # a node that did not renew its lease for so long is Unknown; it does so every 10 s
ISSUER = "https://kubernetes.default.svc"
RBAC = programs.ROOT / "packaging" / "rbac.yaml"
ACCOUNT = "kube-system", "vk-cocoon"  # what the daemon runs as, from RBAC

AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


def free_port() -> int:
    """A port below those the kernel hands out by itself, so that no outgoing connection takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def until(holds, within: float, what: str, pause: float = 0.05):
    """The first true value of `holds()`; asks again and again, `within` seconds."""
    end = CLOCK.monotonic() + within
    while True:
        if value := holds():
            return value
        assert CLOCK.monotonic() < end, f"not within {within:g} s: {what}"
        CLOCK.sleep(pause)


def write_kubeconfig(path: Path, cluster: dict, user: dict) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": cluster}],
        "users": [{"name": "e2e", "user": user}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def run_kubectl(kubeconfig: Path, *words: str, fails: bool, input_: str, within: float) -> str:
    """What kubectl prints (with `fails`: on stderr, and it must fail)."""
    argv = [str(programs.path("kubectl")), "--kubeconfig", str(kubeconfig), *words]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(kubeconfig.parent)}  # nothing of the user's own
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=environment, input=input_, timeout=within
    )
    assert (done.returncode != 0) == fails, f"kubectl {' '.join(words)}: {done.returncode}\n{done.stderr}"
    return done.stderr if fails else done.stdout


@dataclass
class Program:
    """One running program of the control plane."""

    name: str
    words: list[str]
    log: Path
    process: subprocess.Popen | None = field(default=None, init=False)

    def start(self) -> None:
        argv = [str(programs.path(self.name)), *self.words]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def stop(self) -> None:
        if self.process is None or self.ended():
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ControlPlane:
    """Started once for all scenarios; `admin` may do everything."""

    name = "real"
    scheme = "https"

    def __init__(self, directory: Path, ran: programs.Ran) -> None:
        self.directory = directory
        self.audit_log = directory / "audit.log"
        self._ran = ran
        self._authority = Authority(directory / "pki")
        self._public_key, self._private_key = signing_key(directory / "pki", "service-accounts")
        self._etcd_port, self._etcd_peer_port, self.port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.admin = self.api("admin", groups=("system:masters",))
        self._programs: dict[str, Program] = {}
        self._kubeconfig: Path | None = None

    # Users --------------------------------------------------------------------------------------------------------

    @property
    def ca(self) -> Path:
        return self._authority.path

    def tls(self, user: str = "", groups: tuple[str, ...] = ()) -> SSLContext:
        """What a client needs to trust the server and, with a `user`, to be believed."""
        context = create_default_context(cafile=str(self.ca))
        if user:
            context.load_cert_chain(*self._authority.client(user, groups=groups))
        return context

    def api(self, user: str, groups: tuple[str, ...] = ()) -> Api:
        return Api(self.url, self.tls(user, groups))

    def kubeconfig(self, user: str, groups: tuple[str, ...] = (), url: str = "") -> Path:
        """A kubeconfig of a user with a client certificate."""
        certificate, key = self._authority.client(user, groups=groups)
        credentials = {"client-certificate": str(certificate), "client-key": str(key)}
        path = self.directory / f"{user.replace(':', '-')}-{os.getpid()}.kubeconfig"
        return write_kubeconfig(path, self._cluster(url), credentials)

    def daemon_kubeconfig(self, path: Path, url: str = "") -> None:
        """A kubeconfig of the account of packaging/rbac.yaml, with its token in a file beside it."""
        token = path.with_name("token")
        token.write_text(self.token(*ACCOUNT))
        write_kubeconfig(path, self._cluster(url), {"tokenFile": str(token)})

    def token(self, namespace: str, account: str, bound_to: dict | None = None) -> str:
        """A token of a service account, for an hour; with `bound_to` (kind, name, uid) it dies with that object."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        spec = {"audiences": [ISSUER], "expirationSeconds": 3600, "boundObjectRef": bound_to}
        return self.admin.create(path, {"spec": spec})["status"]["token"]

    # Life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring everything up, each program when it is needed by the next. Raises AssertionError with a log's end."""
        (self.directory / "audit.yaml").write_text(yaml.safe_dump(AUDIT))
        self._run("etcd", self._etcd_words(), "answers its health check", self._etcd_healthy)
        self._run("kube-apiserver", self._api_server_words(), "is ready", lambda: self._healthy(self.port, "/readyz"))
        for name in ("kube-controller-manager", "kube-scheduler"):
            port = free_port()
            words = self._client_words(name, port)
            self._run(name, words, "is healthy", lambda port=port: self._healthy(port, "/healthz"))
        until(self._settled, UP_S, "the default service account")
        self.kubectl("apply", "-f", str(RBAC))

    def stop(self) -> None:
        for program in reversed(list(self._programs.values())):
            program.stop()

    def restart_api_server(self, meanwhile=lambda: None) -> None:
        """Stop it, do something `meanwhile`, start it again on the same port."""
        program = self._programs["kube-apiserver"]
        program.stop()
        meanwhile()
        program.start()
        self._wait_for(program, "is ready again", lambda: self._healthy(self.port, "/readyz"))

    def compact(self) -> None:
        """Have etcd forget all history, as it does for the API server every five minutes."""
        etcd = Api(f"http://127.0.0.1:{self._etcd_port}")
        status = etcd.ask("POST", "/v3/maintenance/status", {})
        etcd.ask("POST", "/v3/kv/compaction", {"revision": status["header"]["revision"], "physical": True})

    def forget_history(self) -> None:
        """No version but the present one is known any more; the API server alone would go on from memory."""
        self.restart_api_server(meanwhile=self.compact)

    def kubectl(self, *words: str, fails: bool = False, input_: str = "", within: float = 90.0) -> str:
        """What the administrator's kubectl prints; see run_kubectl."""
        printed = run_kubectl(self._admin_kubeconfig(), *words, fails=fails, input_=input_, within=within)
        self._ran.note("kubectl", f"ran {words[0]}")
        return printed

    def requests_of_the_daemons(self) -> list[dict]:
        """The audit log's entries of the daemons, oldest first."""
        user = "system:serviceaccount:{}:{}".format(*ACCOUNT)
        with self.audit_log.open() as lines:
            entries = [json.loads(line) for line in lines if user in line]
        return [entry for entry in entries if entry["user"]["username"] == user]

    def _cluster(self, url: str = "") -> dict:
        return {"server": url or self.url, "certificate-authority": str(self.ca)}

    # Steps --------------------------------------------------------------------------------------------------------

    def _admin_kubeconfig(self) -> Path:
        if self._kubeconfig is None:
            self._kubeconfig = self.kubeconfig("admin", ("system:masters",))
        return self._kubeconfig

    def _run(self, name: str, words: list[str], proof: str, holds) -> None:
        program = self._programs[name] = Program(name, words, self.directory / f"{name}.log")
        program.start()
        self._wait_for(program, proof, holds)
        self._ran.note(name, proof)

    def _wait_for(self, program: Program, proof: str, holds) -> None:
        def up() -> bool:
            assert not program.ended(), f"{program.name} ended:\n{program.tail()}"
            return holds()

        try:
            until(up, UP_S, f"{program.name} {proof}", pause=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{program.tail()}") from None

    def _etcd_healthy(self) -> bool:
        try:
            return Api(f"http://127.0.0.1:{self._etcd_port}").get("/health").get("health") == "true"
        except OSError:
            return False

    def _healthy(self, port: int, path: str) -> bool:
        try:
            return Api(f"https://127.0.0.1:{port}", self.tls()).send("GET", path).status == 200
        except OSError:
            return False

    def _settled(self) -> bool:
        """Pods can be created only after the controller manager has made the namespace's service account."""
        return self.admin.find("/api/v1/namespaces/default/serviceaccounts/default") is not None

    def _etcd_words(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._etcd_peer_port}"
        return [
            f"--data-dir={self.directory / 'etcd'}",
            "--name=e2e",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=e2e={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_server_words(self) -> list[str]:
        certificate, key = self._authority.server("kube-apiserver", ["127.0.0.1"], ["localhost"])
        node_client, node_key = self._authority.client("kube-apiserver-kubelet-client", groups=("system:masters",))
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self.ca}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self._public_key}",
            f"--service-account-signing-key-file={self._private_key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={node_client}",
            f"--kubelet-client-key={node_key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--audit-policy-file={self.directory / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
            f"--cert-dir={self.directory / 'kube-apiserver'}",
        ]

    def _client_words(self, name: str, port: int) -> list[str]:
        """The controller manager and the scheduler, which are clients of the API server."""
        kubeconfig = self.kubeconfig(f"system:{name}")
        certificate, key = self._authority.server(name, ["127.0.0.1"], ["localhost"])
        words = [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            "--leader-elect=false",
        ]
        if name == "kube-controller-manager":
            words += [
                f"--service-account-private-key-file={self._private_key}",
                f"--root-ca-file={self.ca}",
                "--use-service-account-credentials",
                "--node-monitor-period=1s",
                f"--node-monitor-grace-period={SILENCE_S}s",
            ]
        return words
