"""The live simulator's corner of the kernel: what it isolates, and that nothing of it survives a SIGKILL."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from simulator import namespaces

pytestmark = pytest.mark.process

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root has namespaces without a user namespace")
LIMIT_S = 20
# Starts the watcher as the playground does, and prints its process id.
CALLER = """
import subprocess, sys
from simulator import namespaces
kind, home, token, *command = sys.argv[1:]
process = subprocess.Popen(
    namespaces.watcher_command(kind, home, command), env=namespaces.environment(**{namespaces.MARK: token})
)
print(process.pid, flush=True)
sys.exit(process.wait())
"""


def granted(kind):
    if kind == "none":
        return True
    home = namespaces.free_directory()
    command = namespaces.watcher_command(kind, home, ["true"])
    return subprocess.run(command, env=namespaces.environment(), capture_output=True, check=False).returncode == 0


def run_inside(kind, script, **environment):
    home = namespaces.free_directory() if kind != "none" else namespaces.temporary_home()
    done = subprocess.run(
        namespaces.watcher_command(kind, home, [sys.executable, "-c", textwrap.dedent(script)]),
        env=namespaces.environment(**{namespaces.MARK: "unused"}, HOME_IN_THERE=home, **environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def kinds(*more):
    return [pytest.param("root", marks=AS_ROOT), "user", *more]


@pytest.fixture(params=kinds())
def kind(request):
    if not granted(request.param):
        pytest.skip(f"this kernel grants no {request.param} namespaces")
    return request.param


def test_a_program_sees_only_itself_an_empty_home_and_a_loopback_link(kind):
    code, out, err = run_inside(
        kind,
        """
        import os, socket
        print(sorted(int(pid) for pid in os.listdir("/proc") if pid.isdigit()) == [1, os.getpid()])
        print(os.listdir(os.environ["HOME_IN_THERE"]), os.getcwd(), os.geteuid(), socket.gethostname())
        print([name for _, name in socket.if_nameindex()])
        with socket.create_server(("127.0.0.1", 80)) as server:
            socket.create_connection(server.getsockname()).close()
        """,
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == ["True", "[] / 0 playground"]
    assert "lo" in out.splitlines()[2] and "eth0" not in out


def test_files_and_links_made_inside_are_not_seen_outside(kind):
    links = Path("/proc/net/dev").read_text().count(":")
    code, out, _ = run_inside(
        kind,
        """
        import os, sys
        from simulator import namespaces
        namespaces.open_network("cni0", "10.88.0.1", 24)
        open(os.environ["HOME_IN_THERE"] + "/mark", "w").close()
        print(os.path.exists(os.environ["HOME_IN_THERE"] + "/mark"), "cni0" in open("/proc/net/dev").read())
        """,
    )
    assert (code, out) == (0, "True True\n")
    assert not Path(namespaces.free_directory()).exists()
    assert Path("/proc/net/dev").read_text().count(":") == links


def test_the_exit_code_of_the_program_comes_through(kind):
    assert run_inside(kind, "raise SystemExit(7)")[0] == 7
    assert run_inside(kind, "import os; os.kill(os.getpid(), 9)")[0] == 128 + 9


def test_a_daemon_left_behind_does_not_outlive_the_program(kind, tmp_path):
    done = run_inside(kind, "import subprocess; subprocess.Popen(['sleep', '3600.25'], start_new_session=True)")
    assert done[0] == 0
    assert running("sleep", "3600.25") == []


def test_a_dead_daemon_is_reaped_so_that_its_pid_is_not_taken_for_alive(kind):
    code, out, err = run_inside(
        kind,
        """
        import os, select, sys
        reads, writes = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(writes, str(os.getpid()).encode())
                os._exit(0)
            os._exit(0)
        os.wait()
        orphan = os.read(reads, 16).decode()
        os.close(writes)
        os.read(reads, 1)  # end of file: the orphan has ended
        while os.path.exists(f"/proc/{orphan}"):
            select.select([], [], [], 0.01)
        print("gone")
        """,
    )
    assert (code, out, err) == (0, "gone\n", "")


@pytest.mark.parametrize("kind_", kinds("none"))
@pytest.mark.parametrize("victim", ["caller", "watcher", "init"])
def test_nothing_survives_the_sigkill_of_any_process(kind_, victim):
    if not granted(kind_):
        pytest.skip(f"this kernel grants no {kind_} namespaces")
    if (kind_, victim) == ("none", "watcher"):
        pytest.skip("without namespaces the watcher's own death is its caller's to clean up after: see test_playground")
    home = namespaces.free_directory() if kind_ != "none" else namespaces.temporary_home()
    seconds = f"3600.{os.getpid()}"
    script = f"(setsid sleep {seconds} &) ; touch $0/mark; exec sleep {seconds}"
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, kind_, home, f"t{os.getpid()}", "sh", "-c", script, home],
        env=namespaces.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        watcher = int(caller.stdout.readline())
        wait_until(lambda: len(running("sleep", seconds)) == 2)
        pids = {"caller": caller.pid, "watcher": watcher, "init": children(watcher)[0]}
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: running("sleep", seconds) == [] and not alive(watcher) and not Path(home).exists())
    finally:
        caller.kill()
        caller.wait()
        caller.stdout.close()


def test_what_is_refused_is_told_with_the_step_and_the_reason():
    """In a user namespace that may have no further ones, every way in is refused."""
    code, out, err = run_inside(
        "user",
        """
        import json
        from pathlib import Path
        from simulator import namespaces
        for name in ("user", "net"):
            Path(f"/proc/sys/user/max_{name}_namespaces").write_text("0")
        print(json.dumps(namespaces.available()))
        """,
    )
    if code and "new user namespace" in err:
        pytest.skip("this kernel grants no user namespaces")
    assert code == 0, err
    kind, reasons = json.loads(out)
    assert kind == ""
    assert [reason.split(":")[0] for reason in reasons] == ["new namespaces", "new user namespace"]


def test_the_directory_that_gets_covered_holds_none_of_our_code(monkeypatch):
    assert namespaces.free_directory() == "/run/playground"
    monkeypatch.setattr(sys, "prefix", "/run/venv")
    assert not namespaces.free_directory().startswith("/run/")


def test_the_environment_of_our_programs_carries_no_settings_of_the_user(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/home/somebody/.kube/config")
    monkeypatch.setenv("VK_NODE_NAME", "production")
    environment = namespaces.environment(VK_NODE_NAME="playground")
    assert "KUBECONFIG" not in environment
    assert environment["VK_NODE_NAME"] == "playground"


def test_our_code_is_found_from_any_directory(tmp_path):
    (tmp_path / "simulator.py").write_text("raise SystemExit('a stranger of the same name')")
    done = subprocess.run(
        [sys.executable, "-c", "import simulator.netlink, vkcocoon_probes, gevent"],
        cwd=tmp_path,
        env=namespaces.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def running(*words):
    """The processes of this machine with exactly this command line."""
    wanted = b"".join(word.encode() + b"\0" for word in words)
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == wanted:
                found.append(int(entry.name))
    return found


def alive(pid):
    with contextlib.suppress(OSError):
        return re.search(r"^State:\s+(\w)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1] != "Z"
    return False


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(holds):
    for _ in range(LIMIT_S * 100):
        if holds():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # the only wait in here that no clock stands behind
            subprocess.run(["sleep", "0.01"], check=True)
    raise AssertionError("never came true")
