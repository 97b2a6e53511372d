"""How a tool is started: quickly, with nothing of ours but its three descriptors, and with signals as tools expect."""

import os
import subprocess
import sys

import pytest

from vkcocoon_commands import CommandError, CommandRunner

pytestmark = pytest.mark.process


@pytest.mark.parametrize("outlives", [False, True])
def test_a_descriptor_that_was_left_to_us_is_not_passed_on(outlives):
    """In a process of its own, because only what was there at its start may be inheritable."""
    script = (
        "from gevent import monkey; monkey.patch_all()\n"
        "from vkcocoon_commands import CommandRunner\n"
        f"done = CommandRunner(outlives={outlives})(['ls', '/proc/self/fd'], 10.0)\n"
        "print(sorted(int(name) for name in done.stdout.split()))\n"
    )
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            pass_fds=(read, write),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    finally:
        os.close(read)
        os.close(write)
    assert done.stdout.strip() == "[0, 1, 2, 3]"  # the fourth is the directory that ls reads


def test_signals_are_as_a_tool_expects_them():
    """Python ignores SIGPIPE; a tool that does so too writes for ever to somebody who left."""
    status = CommandRunner()(["cat", "/proc/self/status"], 10.0).stdout
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
    assert int(masks["SigIgn"], 16) & (1 << 12) == 0  # 13 is SIGPIPE
    assert int(masks["SigBlk"], 16) == 0


@pytest.mark.parametrize("argv", [["/no/such/tool"], ["true\0"], ["/etc"]])
def test_what_cannot_be_started_is_an_error_at_once(argv):
    with pytest.raises(CommandError, match="cannot be run"):
        CommandRunner()(argv, 10.0)


def test_hundreds_of_short_tools_are_all_collected_with_their_own_status():
    run = CommandRunner()
    assert [run(["sh", "-c", f"exit {number % 200}"], 10.0).returncode for number in range(300)] == [
        number % 200 for number in range(300)
    ]
    assert run(["sh", "-c", "kill -9 $$"], 10.0).returncode == -9
