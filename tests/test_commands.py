"""Real processes: whatever a command does, it ends in an answer or in CommandError, in time and within bounds.

Clauses: a question ends with whoever asks, a change outlives its caller (M2); a guest survives the end of the provider;
no operation holds the hub. Everything here runs on the real clock, because a kernel is being asked: waits have an upper
bound and no lower one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gevent
import pytest
from gevent.pool import Group

from vkcocoon_commands import CommandError, CommandRunner, CommandStream, Completed
from vkcocoon_probes import ProbeTimeout, SystemClock, spawn

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
SOON = 5.0  # seconds that something quick may take on a busy machine


@pytest.fixture
def clock():
    return SystemClock()


@pytest.fixture
def greenlets():
    group = Group()
    yield group
    group.kill()


@pytest.fixture(params=["question", "change"])
def run(request):
    return CommandRunner(outlives=request.param == "change", grace=1.0)


@pytest.fixture
def ask():
    return CommandRunner(grace=1.0)


@pytest.fixture
def change():
    return CommandRunner(outlives=True, grace=1.0)


def shell(script, *arguments):
    return ["sh", "-c", script, "sh", *map(str, arguments)]


def is_running(pid):
    """Alive and not merely waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(clock, holds, limit=SOON):
    end = clock.monotonic() + limit
    while not holds():
        assert clock.monotonic() < end, "never came true"
        clock.sleep(0.01)


class Heartbeat:
    """How late the hub ever was, in seconds."""

    def __init__(self, clock, greenlets):
        self.clock = clock
        self.worst = 0.0
        spawn(greenlets, "heartbeat", self._beat)

    def _beat(self):
        while True:
            began = self.clock.monotonic()
            self.clock.sleep(0.01)
            self.worst = max(self.worst, self.clock.monotonic() - began - 0.01)


# --- answers -------------------------------------------------------------------------------------------------------


def test_both_streams_and_the_exit_status_are_the_answer(run):
    assert run(shell("echo out; echo err >&2; exit 3"), SOON) == Completed(3, "out\n", "err\n")


def test_a_death_by_signal_is_an_answer_of_its_own_kind(run):
    assert run(shell("kill -9 $$"), SOON).returncode == -signal.SIGKILL


def test_bytes_that_are_no_text_do_not_break_the_answer(run):
    assert run(shell(r"printf 'a\377b'"), SOON).stdout == "a\ufffdb"


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["/nowhere/cocoon", "vm", "list"], "cannot be run: No such file or directory"),
        (["/etc/passwd"], "cannot be run: Permission denied"),
        (["sh", "-c", "a\0b"], "cannot be run: embedded null byte"),
        (["true", "x" * 3_000_000], "cannot be run: Argument list too long"),
    ],
)
def test_what_cannot_be_run_says_why_and_leaks_nothing(run, clock, argv, why):
    clock.sleep(0.01)  # the hub has its descriptors now
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CommandError) as caught:
        run(argv, SOON)
    assert caught.value.why == why and caught.value.returncode is None
    until(clock, lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_command_has_a_session_of_its_own_and_nothing_to_read(run):
    sid = run(shell("ps -o sid= -p $$ 2>/dev/null || cut -d' ' -f6 /proc/$$/stat"), SOON).stdout
    assert int(sid) not in (0, os.getsid(0))
    assert run(shell("read line || echo nothing"), SOON).stdout == "nothing\n"


def test_our_own_variables_do_not_reach_the_command(run, monkeypatch):
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "COCOON_MACOS_VNC_PASSWORD"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.setenv("COCOON_ROOT_DIR", "/srv/cocoon")
    environment = run(["env"], SOON).stdout
    assert "ours" not in environment
    assert "COCOON_ROOT_DIR=/srv/cocoon" in environment


def test_120_commands_at_once_get_their_own_answers_and_leave_nothing(clock, greenlets, ask, change):
    clock.sleep(0.01)
    before = len(os.listdir("/proc/self/fd"))

    def one(number):
        run = change if number % 2 else ask
        return run(shell("echo $1; exit $2", number, number % 7), 60.0)

    callers = [spawn(greenlets, "call", one, number) for number in range(120)]
    gevent.joinall(callers, raise_error=True)
    assert [caller.value for caller in callers] == [Completed(n % 7, f"{n}\n", "") for n in range(120)]
    until(clock, lambda: len(os.listdir("/proc/self/fd")) <= before)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert [pid for pid in children if not is_running(pid)] == []


# --- bounds --------------------------------------------------------------------------------------------------------


def test_fifty_megabytes_are_an_error_and_nobody_is_held_up(clock, greenlets, run):
    heartbeat = Heartbeat(clock, greenlets)
    with pytest.raises(CommandError, match="printed more than 32 MiB"):
        run(shell("head -c 52428800 /dev/zero"), 30.0)
    assert heartbeat.worst < 0.15


def test_endless_output_is_ended(clock, greenlets, run):
    heartbeat = Heartbeat(clock, greenlets)
    with pytest.raises(CommandError, match="printed more than 32 MiB"):
        run(shell("exec timeout 10 yes >&2"), 30.0)
    assert heartbeat.worst < 0.15


def test_a_helper_that_floods_a_change_is_refused_and_not_given_our_memory(clock, change, tmp_path):
    """Nobody would end it, for it may be a VMM. What it can fill is bounded all the same."""
    said = tmp_path / "said"
    script = "(timeout 10 yes 2> $1; echo ended >> $1) & wait; echo done"
    with pytest.raises(CommandError, match="printed more than 32 MiB"):
        change(shell(script, said), 30.0)
    until(clock, lambda: "ended" in said.read_text())
    assert "Operation not permitted" in said.read_text()


def test_thirty_megabytes_are_an_answer(run):
    assert len(run(shell("head -c 31457280 /dev/zero"), 30.0).stdout) == 31457280


def test_a_command_over_its_limit_is_asked_to_end(clock, run):
    began = clock.monotonic()
    with pytest.raises(CommandError) as caught:
        run(shell("trap 'echo cleaned up >&2; exit 1' TERM; while :; do sleep 0.05; done"), 0.3)
    assert caught.value.why == "still running after 0.3 s"
    assert caught.value.returncode is None
    assert clock.monotonic() - began < SOON


def test_one_that_does_not_listen_is_killed_after_the_grace(clock, run, tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(CommandError, match="still running"):
        run(shell("trap '' TERM; echo $$ > $1; while :; do sleep 0.05; done", pid_file), 0.3)
    assert not is_running(int(pid_file.read_text()))


@pytest.mark.parametrize("limit", [0, -1])
def test_no_time_at_all_is_an_error_at_once(run, limit):
    with pytest.raises(CommandError, match="still running"):
        run(["sleep", "60"], limit)


def test_a_helper_that_keeps_the_output_open_holds_nobody(clock, run, tmp_path):
    pid_file = tmp_path / "pid"
    began = clock.monotonic()
    done = run(shell("sleep 60 & echo $! > $1; echo started", pid_file), 30.0)
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert clock.monotonic() - began < SOON
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


# --- who is interrupted, and what goes on --------------------------------------------------------------------------


def test_a_question_ends_with_its_whole_group_when_its_caller_is_killed(clock, greenlets, ask, tmp_path):
    pids = tmp_path / "pids"
    caller = spawn(greenlets, "ask", ask, shell("sleep 60 & echo $$ $! > $1; wait", pids), 60.0)
    until(clock, lambda: pids.exists() and len(pids.read_text().split()) == 2)
    caller.kill()
    until(clock, lambda: not any(is_running(pid) for pid in pids.read_text().split()))


def test_a_bound_around_a_question_holds_even_if_the_command_does_not_listen(clock, ask, tmp_path):
    pid_file = tmp_path / "pid"
    began = clock.monotonic()
    with pytest.raises(ProbeTimeout), clock.timeout(0.3):
        ask(shell("trap '' TERM; echo $$ > $1; while :; do sleep 0.05; done", pid_file), 60.0)
    assert clock.monotonic() - began < 1.0, "the caller does not wait for the grace"
    until(clock, lambda: not is_running(pid_file.read_text().strip()))


def test_a_change_goes_on_when_its_caller_is_killed(clock, greenlets, change, tmp_path):
    begun, done = tmp_path / "begun", tmp_path / "done"
    caller = spawn(greenlets, "change", change, shell("touch $1; sleep 0.5; touch $2", begun, done), 60.0)
    until(clock, begun.exists)
    caller.kill()
    assert not done.exists()
    until(clock, done.exists)


def test_a_change_over_its_limit_ends_without_what_it_started(clock, change, tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(CommandError, match="still running"):
        change(shell("sleep 60 & echo $! > $1; wait", pid_file), 0.5)
    vmm = int(pid_file.read_text())
    try:
        assert is_running(vmm), "a VMM the tool has started is not ours to end"
    finally:
        os.kill(vmm, signal.SIGKILL)


KILLED_PROVIDER = """
import sys
from gevent import monkey; monkey.patch_all()
from vkcocoon_commands import CommandRunner
CommandRunner(outlives=True)(sys.argv[1:], 60)
"""
TALKATIVE_CHANGE = """
touch $1/begun
while [ ! -e $1/go ]; do sleep 0.02; done
echo on stdout && echo on stderr >&2 && touch $1/done
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_change_that_talks_survives_the_end_of_the_provider(clock, tmp_path, number):
    """With a pipe, its first word after our death would be its last."""
    provider = subprocess.Popen(
        [sys.executable, "-c", KILLED_PROVIDER, *shell(TALKATIVE_CHANGE, tmp_path)], cwd=ROOT, start_new_session=True
    )
    until(clock, (tmp_path / "begun").exists, 30.0)
    os.killpg(provider.pid, number)
    provider.wait()
    (tmp_path / "go").touch()
    until(clock, (tmp_path / "done").exists)


def test_a_pipe_would_not_have_survived_it(clock, tmp_path):
    """The control: the same command, asked as a question."""
    code = KILLED_PROVIDER.replace("outlives=True", "outlives=False")
    provider = subprocess.Popen([sys.executable, "-c", code, *shell(TALKATIVE_CHANGE, tmp_path)], cwd=ROOT)
    until(clock, (tmp_path / "begun").exists, 30.0)
    provider.kill()
    provider.wait()
    (tmp_path / "go").touch()
    clock.sleep(0.5)
    assert not (tmp_path / "done").exists()


# --- streams -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream():
    return CommandStream(grace=1.0)


def test_lines_come_as_they_are_printed_also_the_last_without_an_end(stream):
    assert list(stream(shell("echo a; echo; printf c"))) == ["a", "", "c"]


def test_a_line_is_there_before_the_command_goes_on(stream, tmp_path):
    go = tmp_path / "go"
    lines = stream(shell("echo first; while [ ! -e $1 ]; do sleep 0.02; done; echo second", go))
    assert next(lines) == "first"
    go.touch()
    assert list(lines) == ["second"]


def test_a_line_too_long_is_dropped_whole_and_those_around_it_stay(stream):
    script = r"echo before; head -c 3000000 /dev/zero | tr '\0' x; echo; echo after; head -c 3000000 /dev/zero"
    assert list(stream(shell(script))) == ["before", "after"]
    exactly = r"head -c 1048576 /dev/zero | tr '\0' x; echo; head -c 1048577 /dev/zero | tr '\0' y; echo"
    assert [(line[0], len(line)) for line in stream(shell(exactly))] == [("x", 1048576)]


def test_a_letter_in_two_pieces_is_one_letter(stream):
    assert list(stream(shell(r"printf '\303'; sleep 0.1; printf '\244\n'"))) == ["ä"]


def test_a_stream_that_fails_ends_in_its_last_words(stream):
    lines = stream(shell("echo a; head -c 1000000 /dev/zero | tr '\\0' z >&2; echo no such host >&2; exit 4"))
    assert next(lines) == "a"
    with pytest.raises(CommandError) as caught:
        list(lines)
    assert caught.value.returncode == 4
    assert caught.value.stderr.endswith("no such host\n")
    assert len(caught.value.stderr) <= 65536


def test_a_stream_that_cannot_start_says_why_and_leaks_nothing(clock, stream):
    clock.sleep(0.01)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(CommandError, match="cannot be run: No such file"):
            list(stream(["/nowhere/cocoon"]))
    until(clock, lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_streams_closed_at_any_moment_leak_nothing(clock, stream):
    clock.sleep(0.01)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        lines = stream(shell("echo $$; sleep 60"))
        if number % 3:
            next(lines)
        if number % 3 == 2:
            clock.sleep(0.01)
        lines.close()
    until(clock, lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_the_end_of_a_command_is_seen_by_an_idle_hub(stream, ask):
    """Nothing else may have to wake the hub for it: no timer, no other process."""
    for _ in range(50):
        assert list(stream(["echo", "a"])) == ["a"]
    assert ask(["echo", "a"], SOON).stdout == "a\n"


def test_closing_a_stream_ends_its_command_with_everything_it_started(clock, stream):
    lines = stream(shell("sleep 60 & echo $$ $!; wait"))
    pids = next(lines).split()
    lines.close()
    until(clock, lambda: not any(is_running(pid) for pid in pids))


def test_killing_who_listens_ends_the_command_even_if_it_does_not_want_to(clock, greenlets, stream):
    heard = []

    def listen():
        for line in stream(shell("trap '' TERM; echo $$; while :; do sleep 0.05; done")):
            heard.append(line)

    listener = spawn(greenlets, "listen", listen)
    until(clock, lambda: heard)
    began = clock.monotonic()
    listener.kill()
    assert clock.monotonic() - began < 0.5, "nobody waits for the grace"
    until(clock, lambda: not is_running(heard[0]))


def test_an_endless_stream_holds_nobody_up(clock, greenlets, stream):
    heartbeat = Heartbeat(clock, greenlets)
    lines = stream(["yes", json.dumps({"event": "ADDED", "vm": {}})])
    for _ in range(200_000):
        next(lines)
    lines.close()
    assert heartbeat.worst < 0.15


def test_the_clock_of_these_tests_is_the_real_one():
    assert abs(SystemClock().monotonic() - time.monotonic()) < SOON  # noqa: TID251  that is the claim
