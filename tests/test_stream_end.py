"""A stream has one reader: when the daemon is gone, even by SIGKILL, the command that fed it does not stay behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import gevent
import pytest

READER = """
from gevent import monkey; monkey.patch_all()
import sys
from vkcocoon_commands import CommandStream
for line in CommandStream()([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]):
    print(line, flush=True)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_the_command_of_a_stream_ends_with_its_reader(how):
    root = Path(__file__).resolve().parent.parent
    reader = subprocess.Popen([sys.executable, "-c", READER], stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        child = int(reader.stdout.readline())
        assert alive(child)
        reader.send_signal(how)
        reader.wait(30)
        for _ in range(300):
            if not alive(child):
                break
            gevent.sleep(0.1)  # noqa: TID251  another process ends in real time
        assert not alive(child)
    finally:
        reader.kill()
        if alive(child):
            os.kill(child, signal.SIGKILL)
