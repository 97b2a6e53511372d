"""pytest in several processes that share the work: each takes the next piece when it is done with the last.

    python -m tests.side_by_side [pytest's own words]        as many processes as there are processors

A piece is some tests of one module in a row, or all of a module that is marked `together`. Whoever makes the piece's
file first runs it; the others never do. Tests with the mark `alone` are left for the end, when one process has the
machine for itself.

The first process prints as it goes; what the others said is printed when they are done, and the last line counts all.
What failed is remembered for `--last-failed`, which runs in one process, as does everything that needs a terminal.
"""

import ctypes
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIECE = 25
IN_ONE = ("--last-failed", "--lf", "--failed-first", "--ff", "--pdb", "--trace", "--collect-only", "--cov")
PR_SET_PDEATHSIG = 1
CRASHED = 70


class Share:
    """The plugin of one process: its number, and which tests it takes."""

    def __init__(self, directory: Path, number: int, *, size: int = PIECE, alone: bool = False) -> None:
        self.__name__ = "share"  # how others find it
        self.directory = directory
        self.number = number
        self._size = size
        self._alone = alone

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        """As pytest's own, but for which tests it runs."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        for piece in self._taken(session.items):
            # After a piece comes nothing but the session: what it shares is kept for the next one, and nothing else is.
            for item, following in zip(piece, [*piece[1:], session], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = {name: len(reports) for name, reports in terminalreporter.stats.items() if name}
        (self.directory / f"counts-{self.number}").write_text(json.dumps(counts))

    def _taken(self, items: Sequence[Any]) -> Iterator[list[Any]]:
        quiet = [item for item in items if item.get_closest_marker("alone") is not None]
        if quiet:
            (self.directory / "quiet").touch()
        mine = quiet if self._alone else [item for item in items if item not in set(quiet)]
        for _, module in groupby(mine, key=lambda item: item.path):
            tests = list(module)
            size = len(tests) if tests[0].get_closest_marker("together") else self._size
            for start in range(0, len(tests), size):
                if self._claimed(tests[start].nodeid):
                    yield tests[start : start + size]

    def _claimed(self, name: str) -> bool:
        try:
            (self.directory / sha256(name.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def run(words: Sequence[str], *, processes: int, size: int = PIECE, plugins: Sequence[Any] = ()) -> int:
    """Run pytest with these words in so many forks of this process, and what must be alone in this one; the worst exit
    code. `plugins` are handed to all, with what was made before."""
    if any(word.startswith(IN_ONE) for word in words):
        return int(pytest.main([*words], plugins=[*plugins]))
    if "no:randomly" not in " ".join(words):
        words = [*words, f"--randomly-seed={random.SystemRandom().getrandbits(31)}"]
    with tempfile.TemporaryDirectory(prefix="vk-cocoon-tests-") as name:
        directory = Path(name)
        forks = [_forked(words, Share(directory, number, size=size), plugins) for number in range(processes)]
        codes = []
        for number, word in enumerate(forks):
            codes.append(_code(word))
            if number:
                sys.stdout.write((directory / f"said-{number}").read_text(errors="replace"))
        if (directory / "quiet").exists():
            codes.append(_pytest(words, Share(directory, processes, alone=True), plugins))
        _remember(len(codes))
        counts = sum((Counter(json.loads(file.read_text())) for file in directory.glob("counts-*")), Counter())
    told = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    sys.stdout.write(f"all {len(codes)} processes together: {told or 'nothing'}\n")
    return max(abs(code) for code in codes)


def _forked(words: Sequence[str], share: Share, plugins: Sequence[Any]) -> int:
    """Where its exit code will be read: gevent forgets that of a process nobody has waited for within a minute."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return reading
    code = CRASHED
    try:
        os.close(reading)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if share.number:
            said = os.open(share.directory / f"said-{share.number}", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
        code = _pytest(words, share, plugins)
        sys.stdout.flush()
    finally:
        os.write(writing, bytes([code]))
        os._exit(code)


def _code(reading: int) -> int:
    """Waits for the end of a fork; one that was killed says nothing."""
    select.select([reading], [], [])  # under gevent, others have their turn
    said = os.read(reading, 1)
    os.close(reading)
    return said[0] if said else CRASHED


def _pytest(words: Sequence[str], share: Share, plugins: Sequence[Any]) -> int:
    cache = f"cache_dir={_cache(share.number)}"
    return int(pytest.main([*words, "-o", cache], plugins=[share, *plugins]))


def _cache(number: int) -> Path:
    return ROOT / "build" / f"pytest-{number}"


def _remember(processes: int) -> None:
    """Put what failed anywhere to where `--last-failed` looks for it."""
    failed: dict[str, bool] = {}
    for number in range(processes):
        if (found := _cache(number) / "v/cache/lastfailed").exists():
            failed |= json.loads(found.read_text())
        shutil.rmtree(_cache(number), ignore_errors=True)
    there = ROOT / ".pytest_cache/v/cache/lastfailed"
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text(json.dumps(failed))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], processes=os.cpu_count() or 1))
