"""The doctor: each check in health and illness, a fix for every illness, and rights that are those we ask for."""

import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import vkcocoon_doctor
from simulator.fake_kube import FakeKube
from vkcocoon_commands import CommandError, Completed
from vkcocoon_doctor import RIGHTS, SECTIONS, Site, examine
from vkcocoon_kube import ApiError, KubeconfigError
from vkcocoon_net import NopPinger
from vkcocoon_node import INSTANCE
from vkcocoon_probes import SystemClock
from vkcocoon_settings import Address, Settings
from vkcocoon_terminal import Mark
from vkcocoon_window import NoAnswer

ROOT = Path(__file__).parent.parent
OK, WARNING, FAILED = Mark.OK, Mark.WARNING, Mark.FAILED
CLOCK = SystemClock()
LOADED = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "WatchdogUSec": "30s",
    "KillMode": "process",
    "OOMPolicy": "continue",
    "Type": "notify",
}
DOCUMENT = {"version": "1.2.3", "uptime_seconds": 61.0, "checks": [], "pods": [{"ready": True}, {"ready": False}]}


class Door:
    """The fake cluster, which in process knows no /version."""

    def __init__(self, kube, version, ahead):
        self.kube = kube
        self.version = version
        self.answered_at = CLOCK.now().replace(microsecond=0) + timedelta(seconds=ahead)

    def get(self, path):
        if path != "/version":
            return self.kube.get(path)
        self.kube.list("/api/v1/nodes")  # as reachable as everything else
        return {"gitVersion": self.version}

    def create(self, path, body):
        return self.kube.create(path, body)


class Patient:
    """A host on which all is well, until a test says otherwise."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.kube = FakeKube(CLOCK)
        self.server = "v1.37.2"
        self.server_ahead = 0.0
        self.strangers = {}
        self.unit = dict(LOADED)
        self.vms = "[]"
        self.document = dict(DOCUMENT)
        self.settings = {
            "node_name": "rack1",
            "node_ip": "127.0.0.1",
            "kubeconfig": str(self.file("kubeconfig", "clusters: []")),
            "leases_path": str(self.file("leases.json", "[]")),
            "cocoon_net_control_socket": str(home / "control.sock"),
            "cocoon_root_dir": str(home),
            "state_dir": str(home / "state"),
            "cocoon_bin": "/usr/local/bin/cocoon",
            "cocoon_macos_bin": sys.executable,
            "tls_cert": str(home / "tls.crt"),
            "kubelet_client_ca": str(home / "ca.crt"),
            "kubelet_port": 10250,
            "metrics_addr": Address("127.0.0.1", 0),
            "status_addr": None,
        }
        self.env_file = str(self.file("env", ""))
        (home / "dev").mkdir()
        self.file("dev/kvm", "")
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.control.bind(self.settings["cocoon_net_control_socket"])
        self.control.listen(8)

    def file(self, name, text, mode=0o600):
        path = self.home / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def execute(self, argv, limit):
        if argv[0] == "systemctl":
            if self.unit is None:
                raise CommandError(argv, None, "", why="cannot be run: No such file or directory")
            return Completed(0, "".join(f"{name}={value}\n" for name, value in self.unit.items()), "")
        if self.vms is None:
            return Completed(1, "", "permission denied")
        return Completed(0, self.vms, "")

    def connect(self):
        if self.kube is None:
            raise KubeconfigError("no kubeconfig")
        return Door(self.kube, self.server, self.server_ahead)

    def ask(self, path):
        if self.document is None:
            raise NoAnswer(f"vk-cocoon does not run here: nobody answers at {path}")
        return self.document

    def site(self):
        return Site(
            settings=Settings(**self.settings),
            clock=CLOCK,
            execute=self.execute,
            connect=self.connect,
            ask=self.ask,
            version="1.2.3",
            env_file=self.env_file,
            strangers=self.strangers,
            dev=str(self.home / "dev"),
        )

    def findings(self, name, **how):
        return [finding for _, finding in examine(self.site(), **how) if finding.name == name]

    def one(self, name):
        (finding,) = self.findings(name)
        return finding


@pytest.fixture
def patient(tmp_path):
    patient = Patient(tmp_path)
    yield patient
    patient.control.close()


@pytest.fixture(autouse=True)
def synchronized(monkeypatch):
    """The clock of the machine that runs the tests is nobody's concern here."""

    class Library:
        answer = 0

        def adjtimex(self, timex):
            return self.answer

    monkeypatch.setattr(vkcocoon_doctor.ctypes, "CDLL", lambda name: Library())
    return Library


def certificate(path, days):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    now = datetime.now(UTC)  # noqa: TID251  certificates live in real time
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=400)).not_valid_after(now + timedelta(days=days, hours=1))
    path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


class TestHealth:
    def test_where_all_is_well_nothing_is_to_be_done(self, patient):
        found = list(examine(patient.site()))
        assert [finding for _, finding in found if finding.mark is not OK] == []
        assert [finding.fix for _, finding in found if finding.fix] == []
        assert list(dict.fromkeys(section for section, _ in found)) == [section.name for section in SECTIONS]

    def test_before_the_installation_only_the_host_is_asked(self, patient):
        patient.kube = patient.unit = None
        assert {section for section, _ in examine(patient.site(), pre=True)} == {"host"}

    def test_a_check_that_fails_itself_hides_no_other(self, patient, monkeypatch):
        def broken(*_):
            raise ZeroDivisionError("oops")

        patient.ask = broken
        found = [finding for _, finding in examine(patient.site())]
        (failed,) = [finding for finding in found if finding.mark is FAILED]
        assert failed.name == "daemon"
        assert failed.text == "the check itself failed: ZeroDivisionError: oops"
        assert found[-1].name != "daemon"


class TestIllness:
    def test_every_illness_has_a_fix(self, patient, monkeypatch, synchronized):
        """Everything at once: nothing is found without a way out of it."""
        monkeypatch.setattr(vkcocoon_doctor, "open_pinger", NopPinger)
        monkeypatch.setattr(vkcocoon_doctor.resource, "getrlimit", lambda which: (64, 64))
        synchronized.answer = 5
        patient.settings |= {
            "leases_path": "/none",
            "cocoon_net_control_socket": "/none",
            "cocoon_root_dir": "/none",
            "state_dir": "/none/state",
            "node_ip": "192.0.2.1",
            "node_name": Settings().node_name,
            "kubelet_client_ca": "",
            "kubelet_auth": "off",
        }
        patient.file("tls.crt", "nonsense")
        os.chmod(patient.settings["kubeconfig"], 0o644)
        patient.vms, patient.document, patient.unit["KillMode"] = None, None, "control-group"
        patient.kube.allows = lambda spec: False
        patient.env_file = "/none"
        os.unlink(patient.home / "dev" / "kvm")
        found = [finding for _, finding in examine(patient.site())]
        ill = {finding.name for finding in found if finding.mark is not OK}
        assert ill == {
            "raw-socket",
            "open-files",
            "kvm",
            "clock",
            "address",
            "lease-file",
            "control-socket",
            "state-dir",
            "cocoon",
            "root-dir",
            "kubeconfig",
            "rights",
            "node-name",
            "env-file",
            "unit",
            "daemon",
            "certificate",
            "client-ca",
            "kubelet-auth",
        } | ({"receive-buffer"} & ill)
        assert all(bool(finding.fix) is (finding.mark is not OK) for finding in found)
        assert all("\n" not in finding.text + finding.fix for finding in found)

    def test_no_raw_socket_is_a_warning_because_probe_ports_work(self, patient, monkeypatch):
        monkeypatch.setattr(vkcocoon_doctor, "open_pinger", NopPinger)
        assert patient.one("raw-socket").mark is WARNING

    @pytest.mark.parametrize(
        ("place", "mark", "words"),
        [
            ("", OK, "can be written"),
            ("new", OK, "can be made"),
            ("a/b", WARNING, "cannot"),
            ("env", WARNING, "cannot"),
        ],
    )
    def test_what_must_outlive_the_daemon_has_a_place_or_can_get_one(self, patient, place, mark, words):
        patient.settings["state_dir"] = str(patient.home / place).rstrip("/")
        found = patient.one("state-dir")
        assert (found.mark, words in found.text) == (mark, True)

    @pytest.mark.parametrize(("content", "mark"), [("[]", OK), ("null", OK), ("{", FAILED), ("", FAILED)])
    def test_a_lease_file_is_a_table_or_it_is_not(self, patient, content, mark):
        patient.file("leases.json", content)
        assert patient.one("lease-file").mark is mark

    def test_a_lease_file_that_is_torn_now_and_then_is_a_warning(self, patient, monkeypatch):
        contents = iter(["[", "[]", "[]", "[", "[]"])

        class Sleepy:
            def __getattr__(self, name):
                return getattr(CLOCK, name)

            def sleep(self, seconds):
                patient.file("leases.json", next(contents, "[]"))

        site = patient.site()
        sleepy = Site(**{name: getattr(site, name) for name in Site.__slots__} | {"clock": Sleepy()})
        (finding,) = [finding for _, finding in examine(sleepy) if finding.name == "lease-file"]
        assert (finding.mark, "torn in 2 of 5 looks" in finding.text) == (WARNING, True)

    def test_what_cocoon_says_is_repeated(self, patient):
        patient.vms = None
        finding = patient.one("cocoon")
        assert (finding.mark, "permission denied" in finding.text) == (FAILED, True)

    @pytest.mark.parametrize(("version", "mark"), [("v1.37.2", OK), ("v1.30.0", OK), ("v1.29.9", WARNING), ("", OK)])
    def test_an_old_api_server_is_a_warning(self, patient, version, mark):
        patient.server = version
        assert patient.one("api-server").mark is mark

    @pytest.mark.parametrize(
        ("ahead", "mark", "word"),
        [(0.0, OK, "agree"), (-2.0, OK, "agree"), (30.0, WARNING, "behind"), (-30.0, WARNING, "ahead of")],
    )
    def test_a_clock_that_differs_from_the_servers_is_a_warning(self, patient, ahead, mark, word):
        patient.server_ahead = ahead
        finding = patient.one("clock-skew")
        assert (finding.mark, word in finding.text) == (mark, True)

    def test_a_variable_that_is_nearly_a_setting_is_told_with_the_one_that_was_meant(self, patient):
        patient.strangers = {"VK_LEASE_PATH": "VK_LEASES_PATH"}
        finding = patient.one("settings")
        assert (finding.mark, finding.fix) == (WARNING, "did you mean VK_LEASES_PATH?")

    def test_an_api_server_that_is_away_is_one_error_and_no_more(self, patient):
        patient.kube.down = True
        found = [finding for section, finding in examine(patient.site()) if section == "kubernetes"]
        assert [(finding.name, finding.mark) for finding in found] == [("kubeconfig", OK), ("api-server", FAILED)]

    def test_a_kubeconfig_that_is_none_is_told(self, patient):
        patient.kube = None
        assert patient.one("api-server").text == "no usable kubeconfig: no kubeconfig"

    def test_a_missing_right_is_named(self, patient):
        patient.kube.allows = lambda spec: spec["resourceAttributes"].get("subresource") != "status"
        assert patient.one("rights").text == "may not patch pods/status, patch nodes/status"

    def test_a_server_that_does_not_answer_about_rights_is_a_warning(self, patient):
        patient.kube.fail(lambda request: "selfsubject" in request.path, ApiError(403, "Forbidden"), times=1)
        assert patient.one("rights").mark is WARNING

    @pytest.mark.parametrize(
        ("host", "ready", "mark"),
        [("elsewhere", "True", FAILED), ("elsewhere", "False", OK), (os.uname().nodename, "True", OK)],
    )
    def test_a_node_that_another_host_runs_is_an_error(self, patient, host, ready, mark):
        metadata = {"name": "rack1", "annotations": {INSTANCE: f"{host}/1/2026-01-01T00:00:00Z"}}
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        patient.kube.admin.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        patient.kube.admin.patch("/api/v1/nodes/rack1/status", {"status": status}, kind="merge")
        assert patient.one("node").mark is mark

    def test_a_unit_that_would_end_the_vms_is_an_error(self, patient):
        patient.unit["KillMode"] = "control-group"
        bad, summary = patient.findings("unit")
        assert (bad.mark, bad.fix) == (FAILED, "KillMode=process in the unit")
        assert "would end every VM" in bad.text
        assert summary.mark is OK

    @pytest.mark.parametrize(("unit", "mark"), [(None, WARNING), ({"LoadState": "not-found"}, FAILED)])
    def test_a_host_without_the_unit_is_told_how_to_get_it(self, patient, unit, mark):
        patient.unit = unit
        assert patient.one("unit").mark is mark

    def test_what_the_running_daemon_complains_of_is_an_error_and_its_version_a_warning(self, patient):
        trouble = [{"name": "api", "live": False, "trouble": "the API does not answer"}]
        patient.document |= {"version": "1.0.0", "checks": trouble}
        old, ill, summary = patient.findings("daemon")
        assert (old.mark, old.text) == (WARNING, "version 1.0.0 runs, 1.2.3 is installed")
        assert (ill.mark, ill.text) == (FAILED, "api: the API does not answer")
        assert summary.text == "it runs for 61s, 2 pods, 1 not ready"

    def test_without_a_running_daemon_its_ports_must_be_free(self, patient):
        patient.document = None
        with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as free:
            taken, port = other.getsockname()[1], free.getsockname()[1]
            free.close()
            patient.settings |= {"kubelet_port": port, "metrics_addr": Address("127.0.0.1", taken)}
            kubelet, metrics = patient.findings("ports")
        assert (kubelet.mark, metrics.mark) == (OK, FAILED)
        assert metrics.text.startswith("VK_METRICS_ADDR: ")
        assert metrics.text.endswith(f"who has it: ss -ltnp 'sport = :{taken}'")
        assert metrics.fix == "end what has it, or set VK_METRICS_ADDR"

    @pytest.mark.parametrize(("days", "mark"), [(-1, FAILED), (10, WARNING), (31, OK)])
    def test_a_certificate_is_renewed_in_time(self, patient, days, mark):
        certificate(patient.home / "tls.crt", days)
        assert patient.one("certificate").mark is mark

    @pytest.mark.parametrize("name", ["env", "kubeconfig"])
    def test_secrets_are_for_their_owner_only(self, patient, name):
        (patient.home / name).chmod(0o640)
        finding = patient.one({"env": "env-file"}.get(name, name))
        assert (finding.mark, finding.fix) == (WARNING, f"chmod 0600 {patient.home}/{name}")


class TestRights:
    def test_they_are_exactly_those_of_the_manifest(self):
        granted = set()
        for document in yaml.safe_load_all((ROOT / "packaging" / "rbac.yaml").read_text()):
            if document["kind"] in ("ClusterRole", "Role"):
                namespace = document["metadata"].get("namespace", "") if document["kind"] == "Role" else ""
                for rule in document["rules"]:
                    for plural in rule["resources"]:
                        name, _, subresource = plural.partition("/")
                        granted |= {
                            (verb, rule["apiGroups"][0], name, subresource, namespace) for verb in rule["verbs"]
                        }
        assert granted == set(RIGHTS)


@pytest.mark.process
class TestCommand:
    def run(self, *arguments):
        environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.run(
            [sys.executable, "-m", "vkcocoon_cli", "doctor", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environ | {"PYTHONPATH": str(ROOT), "VK_LEASES_PATH": "/none"},
        )

    def test_a_sick_host_is_1_and_what_is_wrong_stands_on_stdout_with_its_fix(self):
        ended = self.run("--env-file", "/dev/null")
        assert ended.returncode == 1
        lines = ended.stdout.splitlines()
        (at,) = [number for number, line in enumerate(lines) if line.startswith("× lease file /none")]
        assert lines[at + 1].startswith("    fix: ")
        assert lines[0] == "host"
        assert lines[-1].split()[1].startswith("error")
        assert ended.stderr == ""

    def test_json_has_stable_keys_and_the_same_verdict(self):
        ended = self.run("-o", "json", "--env-file", "/dev/null")
        found = json.loads(ended.stdout)
        assert ended.returncode == 1
        assert list(found) == ["errors", "warnings", "sections"]
        checks = [check for section in found["sections"] for check in section["checks"]]
        assert found["errors"] == sum(check["result"] == "failed" for check in checks)
        assert {tuple(check) for check in checks} == {("name", "result", "text", "fix")}

    def test_strict_makes_warnings_count(self):
        lax, strict = self.run("--pre", "-o", "json"), self.run("--pre", "-o", "json", "--strict")
        found = json.loads(lax.stdout)
        assert lax.returncode == (1 if found["errors"] else 0)
        assert strict.returncode == (1 if found["errors"] or found["warnings"] else 0)
