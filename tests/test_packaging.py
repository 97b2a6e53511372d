"""What is shipped: every module in the wheel, and a unit that keeps the promises made to hosts (D5, S5.4)."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
