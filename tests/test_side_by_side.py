"""The suite in several processes: what a session shares is made once in each of them, and how each ended is known."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import side_by_side

ROOT = Path(__file__).resolve().parents[1]
# What failed is remembered elsewhere: this may run within a run that remembers, too.
RUN = """
import pathlib, sys
from tests import side_by_side
side_by_side.ROOT = pathlib.Path(sys.argv[1])
sys.exit(side_by_side.run(sys.argv[2:], processes=1, size=1))
"""
MODULE = """
import pytest

@pytest.fixture(scope="session")
def numbers():
    return iter(range(1, 10))

@pytest.fixture(scope="module")
def letters():
    return iter("abc")

@pytest.mark.parametrize("turn", [1, 2, 3])
def test_it(numbers, letters, turn):
    assert (next(numbers), next(letters)) == (turn, "a")
"""


@pytest.mark.process
def test_the_pieces_of_one_module_share_what_the_session_shares_and_nothing_else(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    words = ["-q", "-p", "no:randomly", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Forks a process that ends as `act` does, and asks for its code when nothing else knows of it any more."""

    def fork(act):
        monkeypatch.setattr(side_by_side, "_pytest", lambda *_: act())
        word = side_by_side._forked([], side_by_side.Share(tmp_path, 1), [])
        monkeypatch.setattr(os, "waitpid", forgotten)
        return side_by_side._code(word)

    return fork


def forgotten(*_):
    """What gevent says of a process that ended more than a minute ago."""
    raise ChildProcessError


@pytest.mark.process
def test_a_code_is_known_however_late_it_is_asked_for(ended):
    assert ended(lambda: 3) == 3


@pytest.mark.process
def test_a_process_that_was_killed_has_failed(ended):
    assert ended(lambda: os.kill(os.getpid(), signal.SIGKILL)) == side_by_side.CRASHED
