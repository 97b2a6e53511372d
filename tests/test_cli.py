"""The commands: exit codes (D5), what each loads and in which order (D6), and how log lines look."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

import vkcocoon_cli
import vkcocoon_logs
from vkcocoon_settings import SETTINGS

ROOT = Path(__file__).parent.parent


@pytest.fixture
def invoke(monkeypatch):
    """Runs a command in this process, with no settings in the environment but those given."""
    for row in SETTINGS:
        monkeypatch.delenv(row.env, raising=False)

    def run(*arguments: str, **environ: str):
        return CliRunner().invoke(vkcocoon_cli.cli, arguments, env=environ, prog_name="vk-cocoon")

    return run


@pytest.fixture
def kubeconfig(tmp_path):
    """The path of one that can be used."""
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c"}}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "c"}))
    return str(path)


def process(*arguments: str, path=(), environ=None, code="import vkcocoon_cli; vkcocoon_cli.main()"):
    """Runs the program in a process of its own, with `path` in front of what can be imported."""
    clean = {name: value for name, value in os.environ.items() if name not in {row.env for row in SETTINGS}}
    clean["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=clean | (environ or {}),
        stdin=subprocess.DEVNULL,
    )


class TestHelp:
    def test_no_arguments_is_help_and_ok(self, invoke):
        result = invoke()
        assert result.exit_code == 0
        assert result.stdout == invoke("--help").stdout

    def test_commands_stand_under_headings(self, invoke):
        text = invoke("--help").stdout
        for heading, command in [("Service:", "run"), ("Simulate:", "playground"), ("Other:", "version")]:
            section = text.split(heading)[1].split("\n\n")[0]
            assert re.search(rf"^  {command} ", section, re.MULTILINE)
        assert "Commands:" not in text

    @pytest.mark.parametrize("command", [None, "run", "simulate", "playground", "version"])
    def test_each_help_has_examples_that_name_the_program(self, invoke, command):
        arguments = [command] if command else []
        examples = invoke(*arguments, "--help").stdout.split("Examples:\n")[1].split("\n\n")[0]
        assert all(line.strip().startswith("vk-cocoon") for line in examples.splitlines())

    def test_every_command_has_a_section(self):
        assert set(vkcocoon_cli.SECTIONS) == set(vkcocoon_cli.cli.commands)

    def test_run_shows_each_setting_with_its_flag_variable_and_default(self, invoke):
        text = "".join(invoke("run", "--help").stdout.split())  # wherever the lines were broken
        for row in SETTINGS:
            if row.flag:
                default = row.default or row.absent
                option = f"{row.flag} {row.kind.metavar} {row.help} [{row.env}; default: {default}]"
                assert "".join(option.split()) in text

    def test_a_secret_is_no_option(self, invoke):
        assert "password" not in invoke("run", "--help").stdout.lower().replace("cocoon_macos_vnc_password", "")
        assert invoke("run", "--macos-vnc-password", "x").exit_code == 2


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "hint"),
        [
            (["rum"], "Did you mean 'run'?"),
            (["run", "--node-nmae", "x"], "--node-name"),
            (["run", "extra"], "unexpected extra argument"),
            (["simulate"], "say either SCENARIO or --from-log PATH"),
            (["simulate", "oracel"], "there is no file 'oracel'; did you mean oracle?"),
            (["simulate", "no/such.yaml"], "shipped are "),
            (["simulate", "x.yaml", "--seed", "seven"], "'seven' is not a valid integer"),
            (["simulate", "x.yaml", "--seed", "-1"], "-1"),
            (["simulate", "x.yaml", "--until", "soon"], "'soon' is not a duration such as 30s"),
            (["playground", "--for", "5 minutes"], "is not a duration"),
            (["playground", "--port", "65536"], "65536"),
            (["version", "-o", "xml"], "'xml'"),
        ],
    )
    def test_wrong_usage_is_2_and_says_what_was_meant(self, invoke, arguments, hint):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert hint in result.stderr
        assert result.stdout == ""

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("30", 30.0),
            ("0.5", 0.5),
            ("30s", 30.0),
            ("6m20s", 380.0),
            ("500ms", 0.5),
            ("2h", 7200.0),
            ("1h1m1s1ms", 3661.001),
        ],
    )
    def test_durations_are_seconds_or_have_units(self, text, seconds):
        assert vkcocoon_cli.DURATION.convert(text, None, None) == seconds


class TestSettings:
    def test_a_wrong_flag_is_78_in_one_line(self, invoke):
        result = invoke("run", "--kubelet-port", "0")
        assert result.exit_code == 78
        assert result.stderr == "vk-cocoon: --kubelet-port: '0' is not possible; allowed: a port from 1 to 65535\n"
        assert result.stdout == ""

    def test_a_wrong_variable_is_78_in_one_line(self, invoke):
        result = invoke("run", VK_RESERVE_PERCENT="120")
        assert result.exit_code == 78
        assert result.stderr == (
            "vk-cocoon: VK_RESERVE_PERCENT: '120' is not possible; allowed: a whole number from 0 to 100\n"
        )

    def test_every_setting_that_is_wrong_is_named_in_a_line_of_its_own(self, invoke):
        result = invoke("run", "--kubelet-port", "0", VK_NODE_NAME="A", VK_LOG_LEVEL="loud")
        assert result.exit_code == 78
        named = [line.split(": ")[:2] for line in result.stderr.splitlines()]
        assert named == [["vk-cocoon", name] for name in ("VK_NODE_NAME", "--kubelet-port", "VK_LOG_LEVEL")]

    def test_a_registry_stops_the_start(self, invoke):
        result = invoke("run", OCI_REGISTRY="registry.example")
        assert result.exit_code == 78
        assert "registries are not supported yet" in result.stderr

    def test_a_kubeconfig_that_is_not_there_is_78(self, invoke, tmp_path):
        result = invoke("run", "--check-config", KUBECONFIG=str(tmp_path / "none"))
        assert result.exit_code == 78
        assert result.stderr.startswith("vk-cocoon: KUBECONFIG: ")

    def test_where_run_would_find_no_kubeconfig_check_config_says_so(self, invoke, tmp_path):
        result = invoke("run", "--check-config", HOME=str(tmp_path))
        assert result.exit_code == 78
        assert result.stderr.startswith("vk-cocoon: KUBECONFIG: no kubeconfig is set, ~/.kube/config is not there")

    def test_all_files_that_cannot_be_used_are_named(self, invoke, tmp_path):
        (tmp_path / "junk").write_text("clusters: [")
        junk = str(tmp_path / "junk")
        result = invoke("run", "--check-config", KUBECONFIG=junk, VK_TLS_CERT=junk, VK_TLS_KEY=junk)
        assert result.exit_code == 78
        assert [line.split(": ")[1] for line in result.stderr.splitlines()] == ["KUBECONFIG", "VK_TLS_KEY"]

    def test_check_config_shows_each_value_and_where_it_comes_from(self, invoke, kubeconfig):
        flags = ("--log-level", "debug", "--kubeconfig", kubeconfig)
        result = invoke("run", "--check-config", *flags, VK_NODE_NAME="rack1", COCOON_MACOS_VNC_PASSWORD="hunter2")
        assert result.exit_code == 0
        rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
        assert list(rows) == [row.env for row in SETTINGS]
        assert rows["VK_NODE_NAME"] == ["VK_NODE_NAME", "rack1"]
        assert rows["VK_LOG_LEVEL"] == ["--log-level", "debug"]
        assert rows["VK_METRICS_ADDR"] == ["default", ":9091"]
        assert rows["COCOON_MACOS_VNC_PASSWORD"] == ["COCOON_MACOS_VNC_PASSWORD", "(secret)"]
        assert "hunter2" not in result.output

    def test_check_config_remarks_on_an_address_this_host_does_not_have(self, invoke, kubeconfig):
        result = invoke("run", "--check-config", KUBECONFIG=kubeconfig, VK_NODE_IP="192.0.2.1")
        assert result.exit_code == 0
        assert result.stderr == (
            "vk-cocoon: VK_NODE_IP: 192.0.2.1 is no address of this host; is it where the API server finds it?\n"
        )

    def test_check_config_reports_a_variable_that_is_no_setting(self, invoke, kubeconfig):
        result = invoke("run", "--check-config", VK_NODE_NMAE="rack1", KUBECONFIG=kubeconfig)
        assert result.exit_code == 0
        assert result.stderr == (
            "vk-cocoon: VK_NODE_NMAE is no setting of vk-cocoon and is ignored; did you mean VK_NODE_NAME?\n"
        )


class TestScenarioFile:
    def test_a_file_is_taken_as_it_is_also_when_it_is_named_like_a_shipped_one(self, tmp_path, monkeypatch):
        (tmp_path / "oracle").write_text("")
        monkeypatch.chdir(tmp_path)
        assert vkcocoon_cli._scenario_file("oracle") == "oracle"

    def test_the_name_of_a_shipped_scenario_is_enough(self):
        assert Path(vkcocoon_cli._scenario_file("oracle")) == ROOT / "simulator" / "scenarios" / "oracle.yaml"


class TestErrors:
    def test_an_error_nobody_expected_is_70_with_everything_a_report_needs(self, invoke, monkeypatch):
        monkeypatch.setattr(vkcocoon_cli, "_build", lambda: {}["nothing"])
        result = invoke("version")
        assert result.exit_code == 70
        assert result.stderr.startswith("vk-cocoon ")
        assert "KeyError: 'nothing'" in result.stderr
        assert "please report" in result.stderr

    def test_an_interrupt_is_130_and_says_nothing(self, invoke, monkeypatch):
        def interrupted():
            raise KeyboardInterrupt

        monkeypatch.setattr(vkcocoon_cli, "_build", interrupted)
        result = invoke("version")
        assert (result.exit_code, result.output.strip()) == (130, "")


class TestVersion:
    def test_three_ways_show_the_same_version(self, invoke):
        build = json.loads(invoke("version", "-o", "json").stdout)
        assert re.fullmatch(r"\d+\.\d+\.\d+", build["version"])
        assert invoke("--version").stdout == f"vk-cocoon {build['version']}\n"
        assert invoke("version").stdout.splitlines()[0].split() == ["version:", build["version"]]

    def test_json_says_what_a_bug_report_needs(self, invoke):
        build = json.loads(invoke("version", "-o", "json").stdout)
        assert list(build) == ["version", "python", "platform", "gevent", "loop", "kubernetes"]
        assert all(build.values())


# A stand-in for the provider: what was loaded before it, and what it was called with.
PROVIDER = """
    import sys
    EARLY = sorted({"gevent", "ssl", "socket", "kubernetes", "paramiko", "structlog", "rich"} & set(sys.modules))
    __version__ = "0.0.0"
    def main(settings):
        import logging
        print(EARLY, settings.node_name)
        logging.getLogger("x").info("hello")
        return OUTCOME
"""


@pytest.fixture
def provider(tmp_path):
    """A directory whose vkcocoon ends with an exit code, or raises."""

    def write(outcome: str):
        (tmp_path / "vkcocoon.py").write_text(textwrap.dedent(PROVIDER).replace("return OUTCOME", outcome))
        return tmp_path

    return write


@pytest.mark.process
class TestProcess:
    @pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], []])
    def test_quick_answers_load_nothing_heavy(self, arguments):
        heavy = ["gevent", "kubernetes", "paramiko", "rich", "structlog", "prometheus_client", "ssl", "simulator"]
        code = f"""
import sys, vkcocoon_cli
try:
    vkcocoon_cli.main()
finally:
    print(sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)
"""
        ended = process(*arguments, code=code)
        assert (ended.returncode, ended.stderr) == (0, "[]\n")

    def test_run_loads_the_provider_before_anything_it_must_patch(self, provider):
        ended = process("run", "--node-name", "rack1", path=[provider("return 0")])
        assert ended.stdout == "[] rack1\n"
        assert ended.returncode == 0

    @pytest.mark.parametrize("code", [0, 1, 70])
    def test_run_ends_with_what_the_provider_says(self, provider, code):
        assert process("run", path=[provider(f"return {code}")]).returncode == code

    def test_a_setting_found_wrong_only_at_start_is_78(self, provider):
        outcome = "from vkcocoon_settings import SettingError; raise SettingError('VK_NODE_IP', '', 'an address')"
        ended = process("run", path=[provider(outcome)])
        assert ended.returncode == 78
        assert ended.stderr.splitlines()[-1] == "vk-cocoon: VK_NODE_IP: '' is not possible; allowed: an address"

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            ("vkcocoon_http CannotListen 'cannot listen on :9091: in use'", 1, "cannot listen on :9091: in use"),
            ("vkcocoon_host HostError 'no address: set VK_NODE_IP'", 1, "no address: set VK_NODE_IP"),
            ("vkcocoon_kube KubeconfigError '/x:\\n  line 2'", 78, "KUBECONFIG: /x: line 2"),
        ],
    )
    def test_what_may_be_right_when_the_unit_tries_again_is_1_and_what_will_not_is_78(
        self, provider, error, code, line
    ):
        module, name, text = error.split(" ", 2)
        ended = process("run", path=[provider(f"from {module} import {name}; raise {name}({text})")])
        assert (ended.returncode, ended.stderr.splitlines()[-1]) == (code, f"vk-cocoon: {line}")

    @pytest.mark.parametrize("content", ["", "a: 1", "clusters: [", "[]"])
    def test_a_kubeconfig_that_is_none_is_78_in_one_line(self, tmp_path, content):
        (tmp_path / "config").write_text(content)
        flags = ["--kubeconfig", str(tmp_path / "config"), "--node-ip", "127.0.0.1", "--metrics-addr", "127.0.0.1:0"]
        ended = process("run", *flags)
        assert ended.returncode == 78
        assert "Traceback" not in ended.stderr
        assert ended.stderr.splitlines()[-1].startswith("vk-cocoon: KUBECONFIG: ")

    def test_a_crash_of_the_provider_is_70(self, provider):
        ended = process("run", path=[provider("return 1 // 0")])
        assert ended.returncode == 70
        assert "ZeroDivisionError" in ended.stderr

    def test_logs_go_to_stderr_and_a_stranger_is_warned_of(self, provider):
        ended = process("run", "--log-format", "json", path=[provider("return 0")], environ={"VK_NODE_NMAE": "x"})
        lines = [json.loads(line) for line in ended.stderr.splitlines()]
        assert [(line["level"], line["event"]) for line in lines] == [
            ("warning", "VK_NODE_NMAE is no setting of vk-cocoon and is ignored; did you mean VK_NODE_NAME?"),
            ("info", "hello"),
        ]

    def test_the_run_shown_in_the_readme_is_what_one_sees(self):
        command, *picture = re.search(r"```\n\$ (.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1].splitlines()
        name, *arguments = command.split()
        assert name == ".venv/bin/vk-cocoon"
        ended = process(*arguments)
        assert ended.returncode == 0
        assert [line for line in ended.stdout.splitlines() if not line.startswith("digest:")] == picture
        assert ended.stderr == ""

    def test_a_closed_pipe_is_no_crash(self):
        code = """
import os
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
import vkcocoon_cli
vkcocoon_cli.main(["run", "--help"])
"""
        ended = process(code=code)
        assert (ended.returncode, ended.stderr) == (1, "")

    @pytest.mark.parametrize(
        "words", [["--version"], ["--help"], ["run", "--help"], ["completion", "bash"], ["version"]]
    )
    @pytest.mark.parametrize("environ", [{"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": ""}])
    def test_a_full_disk_behind_stdout_is_one_line_and_1(self, words, environ):
        code = """
import os
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
import vkcocoon_cli
vkcocoon_cli.main()
"""
        ended = process(*words, code=code, environ=environ)
        line = "vk-cocoon: stdout cannot be written: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (1, line)

    def test_without_stdout_a_command_works_all_the_same(self):
        ended = process("version", code="import sys; sys.stdout = None; import vkcocoon_cli; vkcocoon_cli.main()")
        assert (ended.returncode, ended.stderr) == (0, "")

    @pytest.mark.parametrize("loads", ["click", "vkcocoon_inspection", "gevent", "vkcocoon_window", "nothing"])
    def test_an_interrupt_at_any_moment_is_130_without_a_traceback(self, loads):
        code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored: what runs in the background inherits that
import vkcocoon_entry
class Finder:
    def find_spec(self, name, *_):
        if name == {loads!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
if {loads!r} == "nothing":
    import vkcocoon_inspection
    vkcocoon_inspection.loaded = lambda _: signal.raise_signal(signal.SIGINT)
vkcocoon_entry.main()
"""
        ended = process("status", code=code)
        assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, "", "")


# Log lines --------------------------------------------------------------------------------------------------------


@pytest.fixture
def logs():
    """Configures logging to a text buffer, and puts back what was there."""
    # Whoever else configured logging in this process took the warnings before pytest took them for this test.
    logging.captureWarnings(False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    buffers = []

    def configure(level="info", form="json", **options):
        stream = io.StringIO()
        buffers.append(stream)
        vkcocoon_logs.configure(level, form, stream=stream, environ={}, **options)
        return stream

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def only(stream) -> dict:
    (line,) = stream.getvalue().splitlines()
    return json.loads(line)


class TestLogs:
    def test_our_lines_and_those_of_libraries_look_the_same(self, logs):
        stream = logs()
        structlog.get_logger("vkcocoon.x").warning("Pod flipped", pod="default/web-0", ready=True)
        logging.getLogger("library").warning("Pod %s", "flipped", extra={"pod": "default/web-0"})
        ours, theirs = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert (ours["event"], ours["pod"], ours["level"], ours["ready"]) == (
            "Pod flipped",
            "default/web-0",
            "warning",
            True,
        )
        assert (theirs["event"], theirs["pod"], theirs["level"]) == ("Pod flipped", "default/web-0", "warning")
        assert (ours["logger"], theirs["logger"]) == ("vkcocoon.x", "library")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", ours["timestamp"])

    def test_what_is_below_the_level_is_not_written(self, logs):
        stream = logs("warning")
        structlog.get_logger("x").info("quiet")
        logging.getLogger("y").info("quiet")
        assert stream.getvalue() == ""

    def test_a_logger_made_before_the_configuration_follows_it(self, logs):
        early = structlog.get_logger("early")
        stream = logs()
        early.info("late")
        assert only(stream)["event"] == "late"

    @pytest.mark.parametrize("library", ["kubernetes.client.rest", "urllib3.connectionpool", "paramiko.transport"])
    def test_debug_does_not_print_the_bodies_libraries_would_print(self, logs, library):
        stream = logs("debug")
        logging.getLogger(library).debug("response body: {password}")
        assert stream.getvalue() == ""
        logging.getLogger("vkcocoon.probes").debug("probe")
        assert only(stream)["event"] == "probe"

    def test_an_exception_is_one_line_of_json_without_local_variables(self, logs):
        stream = logs()

        def fail():
            password = "hunter" + "2"
            raise ValueError(len(password))

        try:
            fail()
        except ValueError:
            structlog.get_logger("x").exception("Failed")
        line = only(stream)
        assert "ValueError: 7" in line["exception"]
        assert "hunter2" not in stream.getvalue()

    def test_what_cannot_be_json_is_written_as_text(self, logs):
        stream = logs()
        structlog.get_logger("x").info("Odd", path=Path("/x"), error=ValueError("why"))
        assert only(stream)["path"] == "/x"

    def test_a_guests_text_cannot_forge_a_line_or_move_the_cursor(self, logs):
        stream = logs(form="text")
        structlog.get_logger("x").info("Banner\x1b[2J", banner="SSH-2.0\x1b[31m\nERROR all is lost")
        text = stream.getvalue()
        assert "\x1b" not in text
        assert len(text.splitlines()) == 1

    def test_text_into_a_file_has_no_colors(self, logs):
        stream = logs(form="text")
        structlog.get_logger("x").error("Plain", pod="a/b")
        assert "\x1b" not in stream.getvalue()
        assert "Plain" in stream.getvalue()
        assert "pod=a/b" in stream.getvalue()

    def test_a_warning_of_python_is_a_log_line(self, logs):
        import warnings

        stream = logs()
        warnings.warn("old", UserWarning, stacklevel=1)
        assert "UserWarning: old" in only(stream)["event"]


class TestJournal:
    """`$JOURNAL_STREAM` is set for the unit's children too: only the descriptor it names is the journal."""

    @pytest.fixture
    def journal(self, tmp_path):
        with open(tmp_path / "journal", "w+") as stream:
            status = os.fstat(stream.fileno())
            yield stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}

    def test_it_is_recognized_by_device_and_inode(self, journal, tmp_path):
        stream, environ = journal
        assert vkcocoon_logs.under_journal(stream, environ)
        assert not vkcocoon_logs.under_journal(stream, {})
        assert not vkcocoon_logs.under_journal(stream, {"JOURNAL_STREAM": "0:0"})
        with open(tmp_path / "other", "w") as other:
            assert not vkcocoon_logs.under_journal(other, environ)
        assert not vkcocoon_logs.under_journal(io.StringIO(), environ)

    def written(self, logs, journal, form, act) -> list[str]:
        stream, environ = journal
        logs()  # so that the fixture puts things back
        vkcocoon_logs.configure("debug", form, stream=stream, environ=environ)
        act(structlog.get_logger("x"))
        stream.seek(0)
        return stream.read().splitlines()

    @pytest.mark.parametrize(
        ("method", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 2)]
    )
    def test_each_line_starts_with_its_priority(self, logs, journal, method, priority):
        (line,) = self.written(logs, journal, "auto", lambda log: getattr(log, method)("Hello"))
        assert line.startswith(f"<{priority}>{{")
        assert json.loads(line[3:])["event"] == "Hello"

    def test_a_library_has_priorities_too(self, logs, journal):
        (line,) = self.written(logs, journal, "auto", lambda _: logging.getLogger("y").error("Hello"))
        assert line.startswith("<3>{")

    def test_each_line_of_a_traceback_in_text_has_its_priority(self, logs, journal):
        def act(log):
            try:
                raise ValueError("x")
            except ValueError:
                log.exception("Failed")

        lines = self.written(logs, journal, "text", act)
        assert len(lines) > 2
        assert all(line.startswith("<3>") for line in lines)

    def test_elsewhere_auto_is_text_without_priorities(self, logs):
        stream = logs(form="auto")
        structlog.get_logger("x").info("Hello")
        assert re.match(r"\d{4}-\d\d-\d\dT.* \[info *\] Hello", stream.getvalue())

    @pytest.mark.process
    def test_a_terminal_gets_colors_unless_it_asked_for_none(self):
        code = """
import os, pty, sys
import structlog, vkcocoon_logs
parent, child = pty.openpty()
with os.fdopen(child, "w") as stream:
    vkcocoon_logs.configure("info", "auto", stream=stream)
    structlog.get_logger("x").error("Hello")
print(os.read(parent, 4096))
"""
        assert "\\x1b[" in process(code=code, environ={"NO_COLOR": ""}).stdout
        plain = process(code=code, environ={"NO_COLOR": "1"})
        assert "\\x1b" not in plain.stdout
        assert "Hello" in plain.stdout
