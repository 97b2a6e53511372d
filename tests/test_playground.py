"""The playground as its user meets it: a program that shows a tour, can be driven with kubectl, and leaves nothing.

Everything here runs `vk-cocoon playground` as a process, with the real daemon inside.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from simulator import namespaces
from vkcocoon_probes import SystemClock

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]

CLOCK = SystemClock()
LIMIT_S = 60.0
PLAYGROUND = [sys.executable, "-m", "vkcocoon_cli", "playground", "--no-table"]
needs_namespaces = pytest.mark.skipif(not namespaces.available()[0], reason="this kernel grants no namespaces")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def until(holds, limit_s=LIMIT_S, why="never came true"):
    end = CLOCK.monotonic() + limit_s
    while not (found := holds()):
        assert CLOCK.monotonic() < end, why() if callable(why) else why
        CLOCK.sleep(0.05)
    return found


class Playground:
    """One run of the program. What it printed is in `text()`, line by line, as it comes."""

    def __init__(self, directory, *words, command=PLAYGROUND):
        self._out = directory / "out"
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *words], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=directory
            )

    def text(self):
        return self._out.read_text()

    def seen(self, pattern, limit_s=LIMIT_S):
        """Wait for a line; the match."""

        def look():
            assert self.process.poll() is None or re.search(pattern, self.text()), self.text()
            return re.search(pattern, self.text())

        return until(look, limit_s, self.text)

    def wait(self, limit_s=LIMIT_S):
        until(lambda: self.process.poll() is not None, limit_s, self.text)
        return self.process.returncode

    @property
    def server(self):
        return self.seen(r"API server +(\S+)")[1]

    @property
    def kubeconfig(self):
        return self.seen(r"export KUBECONFIG=([^;]+);")[1]

    @property
    def home(self):
        return Path(self.kubeconfig).parent

    def kubectl(self, *words):
        done = subprocess.run(
            ["kubectl", f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self._out.parent}/cache", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def family(self):
        """Every process of this playground but the one we started: {pid: command line}."""
        watcher = until(lambda: children(self.process.pid), why=self.text)[0]
        marks = until(lambda: mark_of(watcher))
        return {pid: line for pid, line in everybody() if mark_of(pid) == marks}

    def role(self, name):
        """The pid of one process by what it is."""
        patterns = {
            "watcher": r"-m simulator\.namespaces ",
            "session": r"^\S+ -m simulator\.playground ",
            "daemon": r"vk-?cocoon(_cli)? run$",
            "guest": r"--vm vk-default-linux-0",
        }
        if name == "terminal":
            return self.process.pid
        if name == "init":
            return children(self.role("watcher"))[0]
        found = [pid for pid, line in self.family().items() if re.search(patterns[name], line)]
        return min(found)

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def everybody():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line:
                    yield int(entry.name), line


def mark_of(pid):
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(namespaces.MARK.encode() + b"="):
                return word
    return b""


def children(pid):
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def alive(pid):
    with contextlib.suppress(OSError):
        return re.search(r"^State:\s+(\w)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1] != "Z"
    return False


def network_of(pid):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def links():
    """The host's network links: a snapshot to compare."""
    return sorted(line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])


@pytest.fixture
def playground(tmp_path):
    started = []

    def start(*words, **more):
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(Playground(directory, *words, **more))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture(scope="module", autouse=True)
def tours(tmp_path_factory):
    """Tours and a scenario take about a minute, so they take it together, and while the other tests run."""
    bridged = Playground(tmp_path_factory.mktemp("bridged"), "tour")
    report = tmp_path_factory.mktemp("reported") / "run.html"
    reported = Playground(report.parent, "lease-moves-in-a-wake", "--report", str(report), "--allowance", "15s")
    loopback = Playground(tmp_path_factory.mktemp("loopback"), "--loopback")
    yield bridged, loopback, reported, report
    for each in (bridged, loopback, reported):
        each.end()


# The tour ---------------------------------------------------------------------------------------------------------


@needs_namespaces
def test_the_tour_is_over_after_a_minute_and_everything_was_as_expected(tours):
    run = tours[0]
    assert run.wait(120) == 0
    text = run.text()
    assert "13 expectations held, 0 broken\n" in text
    assert "instants may be\n               6 s early or late" in text
    assert "FAILED" not in text
    assert "Traceback" not in text
    for what, limit_s in {
        r"default/linux-0 Ready: ProbeSucceeded": 20,
        r"default/windows-0 Ready: ProbeSucceeded": 22,
        r"default/macos-0 still Not Ready: NoSSHBanner": 25,
        r"default/macos-0 Ready: ProbeSucceeded": 30,
        r"default/macos-0 Event GuestRestarted": 45,
        r"default/linux-0 Not Ready: PingTimeout": 50,
    }.items():
        assert float(re.search(rf"([\d.]+)s  {what}", text)[1]) < limit_s, what


def test_on_loopback_the_same_tour_holds_and_says_what_it_cannot_show(tours):
    run = tours[1]
    run.seen("Everything was as expected. The playground stays up", 120)
    home = run.home
    assert home.is_dir()
    run.end()
    assert run.process.returncode == 0
    assert "12 expectations held, 0 broken\n" in run.text()
    assert "What that cannot show: a guest that stops answering echoes" in run.text()
    assert "default/linux-0 Not Ready: PortClosed" in run.text()
    assert "Traceback" not in run.text()
    assert not home.exists()


@needs_namespaces
def test_a_scenario_is_played_and_judged_and_ends_with_its_report(tours):
    _, _, run, report = tours
    code, text = run.wait(150), run.text()
    assert code == 0, text
    assert "3 expectations held, 0 broken\n" in text
    assert "lease default/web-0: ip=10.88.0.200 only=both" in text
    assert "10.88.0.200" in report.read_text()


def test_a_broken_expectation_is_told_with_its_story_and_the_exit_code(playground, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("until: 1s\npods: [{name: web-0}]\nexpect: [{pod: web-0, never: created}, {vms: 7}]\n")
    run = playground(str(path), "--loopback", "--allowance", "500ms")
    assert run.wait() == 1
    assert re.search(r"^BROKEN pod=web-0 never=created: seen at 0\.\d+: ", run.text(), re.MULTILINE)
    assert re.search(r"^BROKEN vms=7: there are \d", run.text(), re.MULTILINE)
    assert "1 expectations held, 2 broken\n" in run.text()


def test_what_cannot_be_played_is_refused_before_anything_begins(playground, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("pods: [{name: web-0}]\nevents:\n  - {at: 1s, wall_clock: 1h}\n")
    run = playground(str(path))
    assert run.wait() == 2
    why = "wall_clock cannot be live: the clock of this host is not ours to set"
    assert run.text() == f"vk-cocoon: {path}:3: {why}\n"
    path.write_text("pods: [{nme: web-0}]\n")
    run = playground(str(path))
    assert run.wait() == 2
    assert run.text() == f"vk-cocoon: {path}:1: unknown key of a pod 'nme'; did you mean 'name'?\n"


@needs_namespaces
def test_where_namespaces_are_refused_the_playground_falls_back_and_says_why(playground):
    """In a user namespace that may have no further ones."""
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && echo 0 > /proc/sys/user/max_net_namespaces"
    # Of the kind "user" and no other: root without a user namespace would write the host's own limits.
    words = namespaces.watcher_command(
        "user", namespaces.free_directory(), ["sh", "-c", f'{forbid} && exec "$@"', "sh", *PLAYGROUND, "--for", "15s"]
    )
    words[words.index("--parent") + 1] = "$$"  # the shell that becomes its parent
    line = " ".join(word if word == "$$" else shlex.quote(word) for word in words)
    run = playground(command=["sh", "-c", f"{line}; exit $?"])
    if run.wait() == 1 and "new user namespace" in run.text():
        pytest.skip("this kernel grants no user namespaces")
    assert run.process.returncode == 0
    assert re.search(r"There are no namespaces for it: new namespaces: .*\.\n", run.text())
    assert re.search(r"There are no namespaces for it: new user namespace: .*\.\n", run.text())
    assert "as expected: linux-0 becomes Ready" in run.text()


# Ending -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_good_order(playground, number):
    run = playground("--no-tour")
    run.seen("node playground Ready")
    family = run.family()
    run.process.send_signal(number)
    assert run.wait(15) == 0
    assert not [pid for pid in family if alive(pid)]
    assert "FAILED" not in run.text()


def test_a_second_signal_does_not_wait_for_a_daemon_that_hangs(playground):
    run = playground("--no-tour")
    run.seen("node playground Ready")
    family = run.family()
    os.kill(run.role("daemon"), signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    CLOCK.sleep(1.0)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.wait(5) == 1
    assert "nothing of it is left" in run.text()
    assert not [pid for pid in family if alive(pid)]


def test_it_ends_when_nobody_reads_it_any_more(playground):
    run = playground("--no-tour", command=["sh", "-c", '"$@" | head -1', "sh", *PLAYGROUND])
    assert run.wait(20) == 0
    assert run.text().count("\n") == 1


def test_it_ends_by_itself_after_the_time_it_was_given(playground):
    begin = CLOCK.monotonic()
    run = playground("--no-tour", "--for", "2s")
    assert run.wait() == 0
    assert CLOCK.monotonic() - begin >= 2.0


def test_what_the_tour_had_no_time_for_is_no_failure_and_is_said(playground):
    run = playground("--for", "1s")
    assert run.wait() == 0
    # As far as it came within the second: perhaps it had begun, and nothing could be judged yet.
    assert re.search(r" 0 broken(, \d+ not reached)?; the playground ended before the scenario did\n", run.text())


def test_a_port_that_is_taken_is_told_in_one_line(playground):
    first = playground("--no-tour")
    port = first.server.rpartition(":")[2]
    second = playground("--no-tour", "--port", port)
    assert second.wait() == 1
    assert second.text() == f"vk-cocoon: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@needs_namespaces
@pytest.mark.parametrize("victim", ["terminal", "watcher", "init", "session"])
def test_nothing_is_left_after_a_sigkill(playground, victim):
    before = links()
    run = playground()
    run.seen("as expected: linux-0 becomes Ready")
    family, home, namespace = run.family(), run.home, network_of(run.role("session"))
    assert len(family) >= 6
    assert namespace != network_of(os.getpid())
    os.kill(run.role(victim), signal.SIGKILL)
    until(lambda: not [pid for pid in family if alive(pid)], 15)
    until(lambda: run.process.poll() is not None, 15)
    assert not home.exists()
    assert links() == before
    assert namespace not in {network_of(pid) for pid, _ in everybody()}
    if victim != "terminal":
        assert run.process.returncode == 1
        assert "nothing of it is left" in run.text()


@pytest.mark.parametrize("victim", ["terminal", "watcher", "session"])
def test_without_namespaces_nothing_is_left_either(playground, victim):
    run = playground("--loopback")
    run.seen("as expected: linux-0 becomes Ready")
    family, home = run.family(), run.home
    assert len(family) >= 5
    assert home.is_dir()
    os.kill(run.role(victim), signal.SIGKILL)
    until(lambda: not [pid for pid in family if alive(pid)], 15)
    until(lambda: run.process.poll() is not None, 15)
    until(lambda: not home.exists(), 15)


@needs_namespaces
def test_the_daemons_death_changes_nothing_for_the_guests_or_the_cluster(playground):
    run = playground()
    run.seen("as expected: windows-0 becomes Ready")
    guest = run.role("guest")
    os.kill(run.role("daemon"), signal.SIGKILL)
    run.seen("vk-cocoon was ended by signal SIGKILL; starting it again")
    # The crash of the Mac is noticed and mended by the second daemon.
    run.seen("as expected: macos-0 is restarted, and an Event says so")
    assert alive(guest)
    assert "default/windows-0 Not Ready" not in run.text().partition("as expected: windows-0 becomes Ready")[2]


# For kubectl ------------------------------------------------------------------------------------------------------


@needs_kubectl
@needs_namespaces
def test_kubectl_sees_the_cluster_and_can_change_it(playground):
    run = playground("--no-tour")
    run.seen("node playground Ready")
    assert re.search(r"^playground +Ready ", run.kubectl("get", "nodes"), re.MULTILINE)
    examples = Path(namespaces.__file__).parent / "examples"
    run.kubectl("create", "--validate=false", "-f", str(examples / "linux.yaml"))
    run.seen("default/linux-0 Ready: ProbeSucceeded")
    pod = json.loads(run.kubectl("get", "pod", "linux-0", "-o", "json"))
    assert re.fullmatch(r"10\.88\.0\.\d+", pod["status"]["podIP"])
    assert re.search(r"^linux-0 +1/1 +Running +0 ", run.kubectl("get", "pods"), re.MULTILINE)
    run.kubectl("annotate", "pod", "linux-0", "playground/guest=silent")
    run.seen(r"default/linux-0 was told 'silent'")
    run.seen(r"default/linux-0 Not Ready: PingTimeout")
    assert re.search(r"^linux-0 +0/1 +Running +0 ", run.kubectl("get", "pods"), re.MULTILINE)
    run.kubectl("delete", "pod", "linux-0", "--timeout=30s")
    run.seen(r"default/linux-0 is gone")
    assert json.loads((run.home / "leases.json").read_text()) in (None, [])


@needs_namespaces
def test_the_address_of_the_api_server_is_the_one_that_was_asked_for(playground):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    run = playground("--no-tour", "--port", str(port))
    assert run.server == f"http://127.0.0.1:{port}"
