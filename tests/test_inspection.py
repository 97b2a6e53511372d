"""The commands that look and change nothing: config, leases, probe; the env-file and what is printed (D5, L4)."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import vkcocoon_cli
from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, PORT
from vkcocoon_envfile import EnvFileError, load_environment, parse
from vkcocoon_guests import Reach
from vkcocoon_net import LeaseFile, NopPinger
from vkcocoon_settings import SETTINGS
from vkcocoon_stages import Tools, examine_address, examine_pod
from vkcocoon_terminal import Mark, Paint, ago, columns, printable
from vkcocoon_vms import CocoonCLI, CocoonMacosCLI

ROOT = Path(__file__).parent.parent


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Runs a command in this process, with no settings but those given, and no env-file of this host."""
    for row in SETTINGS:
        monkeypatch.delenv(row.env, raising=False)
    monkeypatch.setattr("vkcocoon_envfile.DEFAULT_PATH", str(tmp_path / "none.env"))

    def run(*arguments: str, **environ: str):
        if arguments[0] == "leases":  # not the daemon of this host
            environ.setdefault("VK_STATUS_SOCKET", str(tmp_path / "none.sock"))
        return CliRunner().invoke(vkcocoon_cli.cli, arguments, env=environ, prog_name="vk-cocoon")

    return run


class TestEnvFile:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("A=1\nB=two words\n", {"A": "1", "B": "two words"}),
            ("# A=1\n ; B=2\n\nC=\n", {"C": ""}),
            ("A=1\nA=2\n", {"A": "2"}),
            ("A='x \"y\" \\n'", {"A": 'x "y" \\n'}),
            ('A="x \\"y\\" # no comment"', {"A": 'x "y" # no comment'}),
            ("  A = 1  ", {"A": "1"}),
            ("A=one\\\ntwo\nB=3", {"A": "onetwo", "B": "3"}),
            ("A=a=b", {"A": "a=b"}),
        ],
    )
    def test_it_is_read_as_systemd_reads_it(self, text, found):
        assert parse(text, "f") == found

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("A=1\nexport B=2", "f:2: 'export B=2' is not NAME=value"),
            ("\nnonsense", "f:2: 'nonsense' is not NAME=value"),
            ("A='x", "f:1: a quote is not closed"),
        ],
    )
    def test_a_line_that_is_none_is_named(self, text, line):
        with pytest.raises(EnvFileError) as caught:
            parse(text, "f")
        assert str(caught.value) == line

    def test_the_shell_wins_over_the_file_and_an_empty_variable_does_not(self, tmp_path):
        file = tmp_path / "e"
        file.write_text("A=file\nB=file\nC=file\n")
        found = load_environment({"A": "shell", "B": "", "D": "shell"}, str(file))
        assert found.values == {"A": "shell", "B": "file", "C": "file", "D": "shell"}
        assert found.origins == {"B": str(file), "C": str(file)}

    @pytest.mark.parametrize(
        "make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff=1")]
    )
    def test_one_that_is_asked_for_must_be_readable(self, tmp_path, make):
        make(tmp_path / "e")
        with pytest.raises(EnvFileError, match=r"the env-file .*/e cannot be read: "):
            load_environment({}, str(tmp_path / "e"))

    def test_at_the_usual_place_there_need_not_be_one(self, monkeypatch, tmp_path):
        monkeypatch.setattr("vkcocoon_envfile.DEFAULT_PATH", str(tmp_path / "none"))
        assert load_environment({"A": "1"}, None) == ({"A": "1"}, {})

    def test_every_command_that_reads_settings_ends_with_78_when_it_cannot(self, invoke, tmp_path):
        for command in (["config"], ["leases"], ["probe", "127.0.0.1"]):
            result = invoke(*command, "--env-file", str(tmp_path / "none"))
            assert (result.exit_code, result.stdout) == (78, "")
            assert result.stderr == (
                f"vk-cocoon: the env-file {tmp_path}/none cannot be read: No such file or directory\n"
            )

    def test_the_example_is_one(self):
        text = (ROOT / "packaging" / "vk-cocoon.env.example").read_text()
        assert parse(text, "example") == {}
        active = "\n".join(
            line.removeprefix("#")
            for line in text.splitlines()
            if line.startswith(tuple("#" + row.env for row in SETTINGS))
        )
        assert set(parse(active, "example")) == {row.env for row in SETTINGS}


class TestConfig:
    @pytest.fixture(autouse=True)
    def kubeconfig(self, monkeypatch, tmp_path):
        """One that can be used, at the usual place."""
        (tmp_path / ".kube").mkdir()
        cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
        context = {"name": "c", "context": {"cluster": "c"}}
        text = json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "c"})
        (tmp_path / ".kube" / "config").write_text(text)
        monkeypatch.setenv("HOME", str(tmp_path))
        return tmp_path / ".kube" / "config"

    @pytest.mark.parametrize("form", ["table", "env", "json"])
    def test_what_would_stop_the_start_is_said_after_the_table_and_ends_with_78(self, invoke, kubeconfig, form):
        assert invoke("config", "-o", form).exit_code == 0
        kubeconfig.write_text("clusters: [")
        result = invoke("config", "-o", form)
        assert result.exit_code == 78
        assert "VK_NODE_NAME" in result.stdout
        assert result.stderr.startswith("vk-cocoon: KUBECONFIG: ")
        result = invoke("config", "-o", form, KUBECONFIG="/none", VK_KUBELET_CLIENT_CA="/none")
        assert [line.split(": ")[1] for line in result.stderr.splitlines()] == ["KUBECONFIG", "VK_KUBELET_CLIENT_CA"]

    def test_as_env_what_is_not_set_is_a_comment_and_a_secret_too(self, invoke):
        lines = invoke("config", "-o", "env", VK_NODE_NAME="rack1", COCOON_MACOS_VNC_PASSWORD="hunter2").stdout
        assert len(lines.splitlines()) == len(SETTINGS)
        assert [line for line in lines.splitlines() if not line.startswith("#")] == ["VK_NODE_NAME=rack1"]
        assert "#VK_NODE_PODS=256\n" in lines
        assert "#COCOON_MACOS_VNC_PASSWORD=(secret)\n" in lines

    def test_what_is_odd_is_remarked_on(self, invoke):
        result = invoke("config", VK_LEASE_PATH="/x", VK_NODE_IP="192.0.2.1")
        assert result.exit_code == 0
        assert result.stderr.splitlines() == [
            "vk-cocoon: VK_LEASE_PATH is no setting of vk-cocoon and is ignored; did you mean VK_LEASES_PATH?",
            "vk-cocoon: VK_NODE_IP: 192.0.2.1 is no address of this host; is it where the API server finds it?",
        ]

    def test_each_value_is_shown_with_its_origin_and_no_secret(self, invoke, tmp_path):
        file = tmp_path / "e"
        file.write_text("VK_NODE_NAME=rack1\nCOCOON_MACOS_VNC_PASSWORD=hunter2\n")
        result = invoke("config", "--env-file", str(file), VK_LOG_LEVEL="debug")
        rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
        assert list(rows) == [row.env for row in SETTINGS]
        assert rows["VK_NODE_NAME"] == [str(file), "rack1"]
        assert rows["VK_LOG_LEVEL"] == ["VK_LOG_LEVEL", "debug"]
        assert rows["VK_METRICS_ADDR"] == ["default", ":9091"]
        assert rows["COCOON_MACOS_VNC_PASSWORD"] == [str(file), "(secret)"]
        assert "hunter2" not in result.output

    def test_json_has_every_setting_with_stable_keys(self, invoke):
        document = json.loads(invoke("config", "-o", "json", COCOON_MACOS_VNC_PASSWORD="hunter2").stdout)
        assert list(document) == [row.name for row in SETTINGS]
        assert document["kubelet_port"] == {
            "variable": "VK_KUBELET_PORT",
            "origin": "default",
            "value": 10250,
            "secret": False,
        }
        assert document["macos_vnc_password"]["value"] == "(secret)"

    def test_what_is_printed_as_env_is_an_env_file_that_gives_the_same_settings(self, invoke, tmp_path):
        written = invoke("config", "-o", "env", VK_PROVIDER_ID="cocoon://r1/h7;x", VK_NODE_NAME="rack1").stdout
        file = tmp_path / "e"
        file.write_text(written)
        assert parse(written, "e") == {"VK_NODE_NAME": "rack1", "VK_PROVIDER_ID": "cocoon://r1/h7;x"}
        assert invoke("config", "--env-file", str(file), "-o", "env").stdout == written

    def test_a_wrong_value_in_the_file_is_78_and_named(self, invoke, tmp_path):
        (tmp_path / "e").write_text("VK_NODE_PODS=many\n")
        result = invoke("config", "--env-file", str(tmp_path / "e"))
        assert result.exit_code == 78
        assert result.stderr.startswith("vk-cocoon: VK_NODE_PODS: 'many' is not possible")

    def test_a_mistyped_variable_is_told_on_stderr(self, invoke):
        result = invoke("config", VK_NODE_NMAE="x")
        assert result.exit_code == 0
        assert "did you mean VK_NODE_NAME?" in result.stderr


def leases_file(path, *rows):
    path.write_text(
        json.dumps([{"mac": mac, "ip": ip, "expiry": expiry, "lease_time": 86400} for mac, ip, expiry in rows])
    )
    return str(path)


A, B, C = "0a:58:00:00:00:01", "0a:58:00:00:00:02", "0a:58:00:00:00:03"
LATER, LATEST, PAST = "2999-01-01T00:00:00Z", "2999-01-02T00:00:00Z", "2001-01-01T00:00:00Z"


class TestLeases:
    def test_leases_in_force_are_listed_by_address_and_a_conflict_is_told(self, invoke, tmp_path):
        path = leases_file(
            tmp_path / "l",
            (B, "10.0.0.9", "0001-01-01T00:00:00Z"),
            (A, "10.0.0.10", LATER),
            (C, "10.0.0.10", LATEST),
            ("0a:58:00:00:00:04", "10.0.0.1", PAST),
        )
        result = invoke("leases", VK_LEASES_PATH=path)
        assert result.exit_code == 0
        header, *rows = [line.split(maxsplit=3) for line in result.stdout.splitlines()]
        assert header[:3] == ["MAC", "IP", "POD"]
        assert [row[:2] for row in rows] == [[B, "10.0.0.9"], [A, "10.0.0.10"], [C, "10.0.0.10"]]
        assert (rows[0][2], rows[0][3].split()) == ("–", ["never", "–"])
        assert rows[1][3].endswith(f"10.0.0.10 is leased to {C} as well")
        told, written = result.stderr.splitlines()
        assert "which pod has an address is not shown: vk-cocoon does not run here" in told
        assert re.fullmatch(rf"vk-cocoon: {path}, written \d+s ago", written)

    def test_a_running_daemon_says_whose_address_it_is(self, invoke, tmp_path, monkeypatch):
        pods = [{"namespace": "default", "name": "web-0", "ip": "10.0.0.9"}, {"namespace": "a", "name": "b", "ip": ""}]
        monkeypatch.setattr("vkcocoon_window.ask", lambda path: {"pods": pods})
        path = leases_file(tmp_path / "l", (A, "10.0.0.9", LATER), (B, "10.0.0.10", LATER))
        found = json.loads(invoke("leases", "-o", "json", VK_LEASES_PATH=path).stdout)["leases"]
        assert [(row["ip"], row["pod"]) for row in found] == [("10.0.0.9", "default/web-0"), ("10.0.0.10", "")]

    def test_json_says_the_same(self, invoke, tmp_path):
        path = leases_file(tmp_path / "l", (A, "10.0.0.10", LATER))
        document = json.loads(invoke("leases", "-o", "json", VK_LEASES_PATH=path).stdout)
        assert document.pop("age_seconds") < 60
        assert document == {
            "file": path,
            "leases": [{"mac": A, "ip": "10.0.0.10", "pod": "", "expires": LATER, "conflict": ""}],
        }

    def test_one_mac_in_any_spelling(self, invoke, tmp_path):
        path = leases_file(tmp_path / "l", (A, "10.0.0.10", LATER), (B, "10.0.0.11", LATER))
        result = invoke("leases", "--mac", "0A-58-0-0-0-2", VK_LEASES_PATH=path)
        assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["10.0.0.11"]

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["--mac", C], 1, f"no lease in force for {C}"),
            (["--mac", "nonsense"], 2, "'nonsense' is no MAC address"),
        ],
    )
    def test_a_mac_without_a_lease_and_a_text_that_is_no_mac_are_told_apart(
        self, invoke, tmp_path, arguments, code, words
    ):
        result = invoke("leases", *arguments, VK_LEASES_PATH=leases_file(tmp_path / "l", (A, "10.0.0.10", LATER)))
        assert result.exit_code == code
        assert words in result.stderr

    @pytest.mark.parametrize("content", [None, "", "{", '{"a": 1}'])
    def test_a_file_that_is_no_table_is_1_and_names_the_setting(self, invoke, tmp_path, content):
        if content is not None:
            (tmp_path / "l").write_text(content)
        result = invoke("leases", VK_LEASES_PATH=str(tmp_path / "l"))
        assert (result.exit_code, result.stdout) == (1, "")
        assert "VK_LEASES_PATH must be cocoon-net's file" in result.stderr.splitlines()[-1]


@pytest.fixture
def world():
    with World() as world:
        yield world


def examined(world, name, pinger=None):
    """The stages of a pod, by hand, on the fake host: (stage, mark, reason, milliseconds)."""
    tools = Tools(
        clock=world.clock,
        runtime=CocoonCLI("cocoon", execute=world.host.cocoon.execute, clock=world.clock),
        macos=CocoonMacosCLI(
            "cocoon-macos", execute=world.host.macos.execute, processes=world.host.processes, clock=world.clock
        ),
        leases=LeaseFile(world.settings.leases_path),
        reach=Reach(pinger or world.host.pinger, world.host.tcp_accepts, world.host.ssh_banner),
    )
    found = []
    act = (
        (lambda: found.extend(examine_address(name, tools)))
        if name[0].isdigit()
        else (lambda: found.extend(examine_pod(world.pod(name), tools)))
    )
    world.clock.spawn("by hand", act)
    world.run(10)
    return found


class TestStages:
    def test_a_ready_pod_passes_each_stage(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        vm, address, answer = examined(world, "web-0")
        ip = world.pod("web-0")["status"]["podIP"]
        assert [stage.mark for stage in (vm, address, answer)] == [Mark.OK] * 3
        assert address.text.startswith(f"{ip} is leased to ")
        assert (answer.reason, answer.text) == ("ProbeSucceeded", f"icmp: {ip} replies")

    def test_it_stops_where_the_probe_would_with_the_reason_the_pod_has(self, world):
        world.leases.write()
        world.create_pod("web-0", guest=GuestSpec(boot_s=3600.0))
        world.run(5)
        vm, address = examined(world, "web-0")
        assert (vm.mark, address.mark, address.reason) == (Mark.OK, Mark.FAILED, "WaitingForLease")
        assert world.condition("web-0", "cocoonstack.io/ProbeReady")["reason"] == "WaitingForLease"

    def test_a_silent_guest_costs_its_bound_and_no_more(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        world.guest("web-0").silent(True)
        *_, answer = examined(world, "web-0")
        assert (answer.mark, answer.reason, answer.seconds) == (Mark.FAILED, "PingTimeout", 3.0)

    def test_a_declared_port_is_dialed(self, world):
        world.create_pod("web-0", guest=FAST, annotations={PORT: "8080"})
        world.run(5)
        *_, answer = examined(world, "web-0")
        assert (answer.mark, answer.reason) == (Mark.FAILED, "PortClosed")
        world.guest("web-0").open(8080)
        *_, answer = examined(world, "web-0")
        assert (answer.mark, answer.reason) == (Mark.OK, "ProbeSucceeded")

    def test_a_vm_that_is_gone_is_said_to_be(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        world.stop()
        tool = CocoonCLI("cocoon", execute=world.host.cocoon.execute, clock=world.clock)
        world.clock.spawn("rm", tool.remove, "vk-default-web-0")
        world.run(10)
        (vm,) = examined(world, "web-0")
        assert (vm.mark, vm.reason) == (Mark.FAILED, "VMGone")

    def test_a_macos_guest_whose_qemu_died_is_told_by_its_process(self, world):
        world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=1.0, ssh_after_s=1.0))
        world.run(60)
        assert [stage.reason for stage in examined(world, "mac-0")][-1] == "ProbeSucceeded"
        world.stop()
        world.guest("mac-0").crash()
        (vm,) = examined(world, "mac-0")
        assert (vm.mark, vm.reason) == (Mark.FAILED, "QEMUDead")

    def test_an_unmanaged_pod_is_asked_at_the_address_it_names(self, world):
        named = {
            "cocoonset.cocoonstack.io/managed": "false",
            "vm.cocoonstack.io/id": "x1",
            "vm.cocoonstack.io/ip": "192.0.2.77",
        }
        world.create_pod("other-0", annotations=named)
        world.run(5)
        _, address, answer = examined(world, "other-0")
        assert address.text == "192.0.2.77 is given by vm.cocoonstack.io/ip"
        assert (answer.mark, answer.reason) == (Mark.FAILED, "PingTimeout")

    def test_a_pod_that_names_no_vm_is_not_ours(self, world):
        world.create_pod("odd-0", annotations={"vm.cocoonstack.io/name": ""})
        world.run(5)
        (vm,) = examined(world, "odd-0")
        assert (vm.mark, vm.reason) == (Mark.FAILED, "NotOurs")

    def test_without_a_raw_socket_the_answer_is_a_warning_not_a_success(self, world):
        (answer,) = examined(world, "10.88.0.9", pinger=NopPinger())
        assert (answer.mark, answer.reason) == (Mark.WARNING, "PingSkipped")


@pytest.mark.process
class TestProbeByHand:
    def run(self, *arguments):
        clean = {name: value for name, value in os.environ.items() if name not in {row.env for row in SETTINGS}}
        command = [sys.executable, "-m", "vkcocoon_cli", "probe", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/", env=clean | {"PYTHONPATH": str(ROOT)}
        )

    def test_an_open_port_is_0_and_a_closed_one_is_1(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            ended = self.run("127.0.0.1", "--port", str(port))
            assert (ended.returncode, ended.stderr) == (0, "")
            sign, stage, time, text = ended.stdout.rstrip("\n").split(maxsplit=3)
            assert (sign, stage) == ("√", "answer")
            assert time.endswith("ms")
            assert text == f"tcp 127.0.0.1:{port} accepts  ProbeSucceeded"
        ended = self.run("127.0.0.1", "--port", str(port), "-o", "json")
        document = json.loads(ended.stdout)
        assert (ended.returncode, document["ready"], document["stages"][0]["reason"]) == (1, False, "PortClosed")
        assert list(document) == ["target", "ready", "stages"]
        assert list(document["stages"][0]) == ["stage", "result", "reason", "message", "seconds"]

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["::1"], "'::1' is no pod"),
            (["a/b/c"], "'a/b/c' is no pod"),
            (["224.0.0.1"], "'224.0.0.1' is no pod"),
            (["127.0.0.1", "--port", "1", "--ssh-banner"], "--port and --ssh-banner exclude each other"),
        ],
    )
    def test_what_cannot_be_asked_is_refused_before_anything_is_looked_for(self, arguments, named):
        ended = self.run(*arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert named in ended.stderr

    def test_a_pod_takes_no_port_and_a_cluster_that_is_none_is_told(self):
        assert self.run("web-0", "--port", "22").returncode == 2
        ended = self.run("web-0", "--env-file", "/dev/null")
        assert ended.returncode in (1, 78)
        assert len(ended.stderr.splitlines()) == 1


class TestTerminal:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (-3, "0s"),
            (0.9, "0s"),
            (119, "119s"),
            (125, "2m5s"),
            (300, "5m"),
            (3600, "60m"),
            (10800, "3h"),
            (183900, "2d3h"),
        ],
    )
    def test_lengths_of_time_read_like_kubectls(self, seconds, text):
        assert ago(seconds) == text

    def test_columns_are_aligned_and_an_empty_cell_is_a_dash(self):
        assert columns(("A", "BB"), [("longer", ""), ("x", "y")]) == ["A       BB", "longer  –", "x       y"]

    def test_what_came_from_outside_cannot_move_the_cursor(self):
        assert printable("a\x1b[2J\nb") == "a\\x1b[2J\\nb"

    @pytest.mark.parametrize(
        ("choice", "tty", "environ", "on"),
        [
            ("auto", True, {}, True),
            ("auto", True, {"NO_COLOR": "1"}, False),
            ("auto", True, {"TERM": "dumb"}, False),
            ("auto", False, {}, False),
            ("always", False, {"NO_COLOR": "1"}, True),
            ("never", True, {}, False),
        ],
    )
    def test_colors_are_for_terminals_unless_somebody_says_otherwise(self, choice, tty, environ, on):
        class Stream:
            def isatty(self):
                return tty

        assert Paint(choice, Stream(), environ).on is on


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_each_shell_gets_a_script_that_asks_the_program(self, invoke, shell):
        result = invoke("completion", shell)
        assert result.exit_code == 0
        assert "_VK_COCOON_COMPLETE" in result.stdout

    def test_it_completes_commands_options_and_words(self, invoke):
        def complete(line):
            last = str(len(line.split(" ")) - 1)
            words = {"_VK_COCOON_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": last}
            command = [sys.executable, "-m", "vkcocoon_cli"]
            ended = subprocess.run(
                command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | words
            )
            return {item.partition(",")[2] for item in ended.stdout.split()}

        assert {"run", "config", "probe", "leases"} <= complete("vk-cocoon ")
        assert "--env-file" in complete("vk-cocoon config --")
        assert complete("vk-cocoon completion ") == {"bash", "zsh", "fish"}
