"""The suite in several processes: what a session shares is made once in each of them."""

import subprocess
import sys
from pathlib import Path

import pytest

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
