"""The tutorial's commands and what they print: `python -m tests.tutorial docs/tutorial.md` renews the outputs.

A block of kind `console` is one command line after `$` and its output, run in a directory that has the files of the
page's `yaml` blocks (each begins with a comment, its name). Lists of events and digests are left out of what is shown:
the page is about the verdicts and the picture. `tests/test_tutorial.py` wants the page to be what this makes of it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from simulator import namespaces

__all__ = ["files", "renewed"]

BLOCK = re.compile(r"^```console\n\$ (.*)\n(?:.*\n)*?```$", re.MULTILINE)
FILE = re.compile(r"^```yaml\n# (\S+)\n((?:.*\n)*?)```$", re.MULTILINE)
LEFT_OUT = re.compile(r"^ +\d+\.\d{6}  |^digest: ")
MANY, FEW = 2000, 12


def files(page: str) -> dict[str, str]:
    """The files that the page writes, by name."""
    return dict(FILE.findall(page))


def renewed(page: str, *, quick: bool = False) -> str:
    """The page with the outputs of now. ``quick``: of runs that all hold, only a few are made."""
    with tempfile.TemporaryDirectory(prefix="vk-cocoon-tutorial-") as directory:
        for name, text in files(page).items():
            Path(directory, name).write_text(text)
        return BLOCK.sub(lambda block: f"```console\n$ {block[1]}\n{_output(block[1], directory, quick)}```", page)


def _output(command: str, directory: str, quick: bool) -> str:
    words = shlex.split(command)
    holds = f"--runs {MANY}" in command and "--prepare" not in command
    if words[0] == "vk-cocoon":
        words[:1] = [sys.executable, "-m", "vkcocoon_cli"]
    if holds and quick:
        words[words.index(str(MANY))] = str(FEW)
    root = str(Path(__file__).resolve().parent.parent)
    environ = {**namespaces.environment(COLUMNS="100"), "PYTHONPATH": os.pathsep.join((root, namespaces.code_path()))}
    done = subprocess.run(words, cwd=directory, env=environ, capture_output=True, text=True, check=False, timeout=600)
    if done.stderr:
        raise SystemExit(f"{command}: {done.stderr}")
    text = "".join(line for line in done.stdout.splitlines(keepends=True) if not LEFT_OUT.match(line))
    if holds and quick:
        text = text.replace(f"{FEW} runs held, seeds 0 to {FEW - 1}", f"{MANY} runs held, seeds 0 to {MANY - 1}")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
