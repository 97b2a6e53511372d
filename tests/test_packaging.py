"""What is shipped: every module in the wheel, a unit that keeps the promises made to hosts (D5, S5.4), locks, a deb."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vkcocoon_settings import Settings

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "packaging" / "vk-cocoon.service"


def simulator_files() -> list[Path]:
    """Also those behind a link to a directory, which glob would not follow."""
    return [
        Path(folder) / name
        for folder, _, names in os.walk(ROOT / "simulator", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """Names of the files in a wheel made of what is here now."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    # A copy, because building writes next to the sources.
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        (source / path.name).write_bytes(path.read_bytes())
    for path in simulator_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


@pytest.mark.process
class TestWheel:
    def test_every_module_is_in_it(self, wheel):
        assert {path.name for path in ROOT.glob("vkcocoon*.py")} <= wheel

    def test_the_whole_simulator_is_in_it(self, wheel):
        assert {str(path.relative_to(ROOT)) for path in simulator_files()} - wheel == set()

    def test_nothing_else_is_in_it(self, wheel):
        tops = {name.split("/")[0] for name in wheel}
        ours = {path.name for path in ROOT.glob("vkcocoon*.py")} | {"simulator"}
        assert {name for name in tops - ours if not name.endswith(".dist-info")} == set()


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    return parser


class TestUnit:
    @pytest.mark.parametrize(
        ("key", "value", "why"),
        [
            ("Type", "notify", "ready only when the node is registered"),
            ("NotifyAccess", "main", "children must not speak for us"),
            ("KillMode", "process", "VMs outlive a restart"),
            ("OOMPolicy", "continue", "one VM out of memory must not stop the unit"),
            ("Restart", "always", "nothing else brings it back"),
            ("RestartPreventExitStatus", "78", "a setting that cannot be right will not become right"),
            ("TimeoutStartSec", "infinity", "the API server may be away for long"),
            ("TasksMax", "infinity", "the VMs count as its tasks"),
            ("CacheDirectory", "vk-cocoon", "the single file unpacks there"),
            ("Environment", "SHIV_ROOT=%C/vk-cocoon", "and is told so, because the homes are read-only"),
            ("RuntimeDirectory", "vk-cocoon", "the status socket stands there"),
            ("RuntimeDirectoryMode", "0700", "and is root's alone"),
        ],
    )
    def test_it_keeps_its_promises(self, key, value, why):
        assert unit()["Service"][key] == value, why

    def test_it_runs_as_root_and_takes_no_capability_from_the_vms(self):
        service = unit()["Service"]
        assert "User" not in service
        harmful = {"CapabilityBoundingSet", "PrivateDevices", "RestrictNamespaces", "NoNewPrivileges", "PrivateTmp"}
        assert not harmful & set(service)

    def test_it_starts_the_command_that_exists(self):
        assert unit()["Service"]["ExecStart"].split()[1:] == ["run"]

    @pytest.mark.process
    @pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
    def test_systemd_finds_nothing_wrong_with_it(self, tmp_path):
        # The program itself is not installed where the tests run; any other executable will do.
        text = UNIT.read_text().replace("/usr/local/bin/vk-cocoon", sys.executable)
        (tmp_path / "vk-cocoon.service").write_text(text)
        command = ["systemd-analyze", "verify", str(tmp_path / "vk-cocoon.service")]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        about_us = [line for line in ended.stderr.splitlines() if "vk-cocoon" in line]
        assert (ended.returncode, about_us) == (0, [])

    @pytest.mark.process
    @pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
    def test_its_exposure_does_not_grow(self):
        """The number is high because VMs inherit what is taken away here; it may not rise further."""
        command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        (score,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", ended.stdout)
        assert float(score) <= 8.6

    def test_the_status_socket_stands_in_its_runtime_directory(self):
        assert Settings().status_socket == f"/run/{unit()['Service']['RuntimeDirectory']}/status.sock"


# What the unit's options take from the bounding set, besides CapabilityBoundingSet (systemd.exec).
TAKEN = {"ProtectClock": ("sys_time", "wake_alarm"), "ProtectKernelLogs": ("syslog",)}
CHILD = """
from gevent import monkey; monkey.patch_all()
import sys
from vkcocoon_commands import CommandRunner
done = CommandRunner()(sys.argv[1:], 20.0)
print(done.stdout, end=""); print(done.stderr, end="", file=sys.stderr)
sys.exit(done.returncode)
"""


@pytest.mark.kernel
@pytest.mark.skipif(os.geteuid() != 0, reason="the unit runs as root")
@pytest.mark.skipif(not (shutil.which("setpriv") and shutil.which("ip")), reason="needs setpriv and ip")
class TestCapabilities:
    """A command of the daemon, with exactly the capabilities that a process of the unit has."""

    def run(self, *command: str, bounding: str):
        argv = ["unshare", "--net", "setpriv", f"--bounding-set={bounding}", sys.executable, "-c", CHILD, *command]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=environ)

    @pytest.fixture
    def bounding(self):
        """The unit's bounding set as setpriv wants it: everything but what its options take."""
        service = unit()["Service"]
        assert "CapabilityBoundingSet" not in service
        assert service["ProtectClock"] == service["ProtectKernelLogs"] == "yes"
        others = {"ProtectKernelModules", "ProtectKernelTunables", "PrivateDevices"}  # they would take more
        assert not others & set(service)
        return ",".join(f"-{name}" for names in TAKEN.values() for name in names)

    def test_a_command_that_needs_network_administration_works(self, bounding):
        ended = self.run("ip", "link", "add", "vkc0", "type", "bridge", bounding=bounding)
        assert (ended.returncode, ended.stderr) == (0, "")

    @pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="this kernel has no TAP devices")
    def test_a_command_that_makes_the_tap_of_a_vm_works(self, bounding):
        ended = self.run("ip", "tuntap", "add", "vkt0", "mode", "tap", bounding=bounding)
        assert (ended.returncode, ended.stderr) == (0, "")

    def test_the_command_has_exactly_the_capabilities_of_the_unit(self, bounding):
        ours = int(re.search(r"CapBnd:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
        taken = sum(1 << number for number in (25, 34, 35))  # sys_time, syslog, wake_alarm
        ended = self.run("cat", "/proc/self/status", bounding=bounding)
        found = {name: int(value, 16) for name, value in re.findall(r"(Cap\w+):\s*(\w+)", ended.stdout)}
        assert found["CapBnd"] == found["CapEff"] == ours & ~taken

    def test_the_bounding_set_one_might_wish_for_would_break_it(self):
        ended = self.run("ip", "link", "add", "vkc0", "type", "bridge", bounding="-all,+net_raw")
        assert ended.returncode != 0
        assert "not permitted" in ended.stderr


class TestDeb:
    @pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
    def test_its_scripts_are_shell(self, script):
        path = ROOT / "packaging" / "deb" / script
        subprocess.run(["sh", "-n", path], check=True)
        assert "set -e" in path.read_text()

    def test_it_wants_the_python_the_single_file_is_for(self):
        control = (ROOT / "packaging" / "deb" / "control").read_text()
        assert "Depends: python3 (>= @PYTHON@), python3 (<< @NEXT_PYTHON@)\n" in control

    def test_an_upgrade_and_a_removal_do_not_touch_the_settings(self):
        for script in ("postinst", "prerm", "postrm"):
            assert "/etc/cocoon" not in (ROOT / "packaging" / "deb" / script).read_text()


def pinned(path: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / path).read_text(), re.MULTILINE))


class TestLocks:
    def test_what_is_shipped_is_what_is_tested(self):
        everything, shipped = pinned("requirements.lock"), pinned("packaging/runtime.lock")
        assert {name: everything[name] for name in shipped} == shipped

    def test_every_dependency_is_in_it_and_no_tool_of_ours(self):
        shipped = pinned("packaging/runtime.lock")
        declared = re.findall(r'"([A-Za-z][\w-]*)>=', (ROOT / "setup.py").read_text().split("DEV")[0])
        assert {name.lower() for name in declared} <= set(shipped)
        assert not {"pytest", "mypy", "ruff", "hypothesis", "shiv"} & set(shipped)

    @pytest.mark.parametrize("path", ["packaging/runtime.lock", "packaging/pack.lock"])
    def test_every_version_has_its_hashes(self, path):
        text = (ROOT / path).read_text()
        for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
            assert "--hash=sha256:" in entry


class TestFirstStep:
    """What the single file does before it is unpacked (packaging/single_main.py)."""

    @pytest.fixture
    def first(self, monkeypatch, capsys):
        def run(minor, machine, step="check"):
            text = (ROOT / "packaging" / "single_main.py").read_text()
            filled = text.replace('"@MINOR@"', repr(minor)).replace('"@MACHINE@"', repr(machine))
            names = {"__name__": "first"}
            exec(compile(filled, "single_main.py", "exec"), names)
            monkeypatch.setattr(sys, "argv", ["/x/vk-cocoon.pyz"])
            names[step]()

        return run

    HERE = (f"{sys.version_info.major}.{sys.version_info.minor}", os.uname().machine)

    def test_the_right_python_goes_on(self, first):
        first(*self.HERE)

    @pytest.mark.parametrize(("minor", "machine"), [("3.99", HERE[1]), (HERE[0], "vax")])
    def test_another_one_is_told_which_it_takes(self, first, capsys, minor, machine):
        with pytest.raises(SystemExit) as ended:
            first(minor, machine)
        assert ended.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"vk-cocoon: this file is for Python {minor} on {machine}, and this is Python ")
        assert line.endswith(f"; run it as: python{minor} /x/vk-cocoon.pyz")

    def test_any_python_3_can_read_it(self):
        import ast

        ast.parse((ROOT / "packaging" / "single_main.py").read_text(), feature_version=(3, 4))
