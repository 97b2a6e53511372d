"""What the README shows of `make run` is what somebody sees who types it. (Its other run is held by test_cli, the lines
for a host by packaging/try_dist.py, and what kubectl describes by tests/e2e.)"""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from vkcocoon_probes import SystemClock

ROOT = Path(__file__).parent.parent
CLOCK = SystemClock()
LIMIT_S = 150.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


def picture() -> list[str]:
    """The lines that scroll by, without their instants; below them is the table, which only a terminal gets."""
    block = re.search(r"```\n(   \d\.\ds  .*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.split("s  ", 1)[1] for line in block[1].splitlines()]


def pattern(line: str) -> str:
    """Addresses and processes are others each time."""
    changing = r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}|(?:\d+\.){3}\d+|(?<=process )\d+"
    parts = re.split(f"({changing})", line)
    return (
        r"^ *[\d.]+s  "
        + "".join(re.escape(part) if i % 2 == 0 else r"[0-9a-f:.]+" for i, part in enumerate(parts))
        + "$"
    )


def test_make_run_shows_what_the_readme_says(tmp_path):
    output = tmp_path / "output"
    with output.open("w") as file:
        running = subprocess.Popen(
            ["make", "--no-print-directory", "run", f"ARGS=--for {LIMIT_S:.0f}s"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    end = CLOCK.monotonic() + LIMIT_S
    missing = picture()
    assert len(missing) > 5
    try:
        while missing and CLOCK.monotonic() < end and running.poll() is None:
            CLOCK.sleep(0.2)
            text = output.read_text(errors="replace")
            missing = [line for line in missing if not re.search(pattern(line), text, re.MULTILINE)]
        assert missing == [], output.read_text(errors="replace")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGINT)
        running.wait(timeout=30)
