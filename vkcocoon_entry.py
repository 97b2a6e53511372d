"""The first thing that runs: Ctrl-C ends this program with 130 and without a traceback, whatever it is just doing.

Python raises KeyboardInterrupt wherever it stands. In the middle of an import that leaves halves and locks behind, and
what comes of it is any error at all, so there the process ends at once: nothing was begun yet. Everywhere else the
commands see it, and may put things in order. Imports nothing before that but what the interpreter has loaded anyway.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

INTERRUPTED = 130  # as shells say it


def main() -> None:
    """The program; ends it with its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may have been told to ignore it
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from vkcocoon_cli import main as commands

        commands()
    except KeyboardInterrupt:  # after the commands, or before them
        os._exit(INTERRUPTED)
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left but to go


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            os._exit(INTERRUPTED)
        frame = frame.f_back
    if gevent := sys.modules.get("gevent"):
        # It may be the hub that is hit: it hands this on to the main greenlet, and need not print it before.
        hub = gevent.get_hub()
        hub.NOT_ERROR = (*hub.NOT_ERROR, KeyboardInterrupt)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
