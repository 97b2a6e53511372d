"""Starts the live guests of one world: it has imported what a guest needs, and forks one for each power-on.

    python -m simulator.guest_starter

A Python of its own would cost each guest a quarter of a second of CPU for its imports; a fork costs some milliseconds.
For that this process has no thread and no event loop, and does nothing but wait for a line on its standard input:

    {"argv": ["qemu-system-x86_64", "-m", "simulator.fake_guests", ...], "log": "/path"}

The guest answers for itself, {"pid": 123}, once it is all that others go by: a process in a session of its own, with
that command line in /proc, its output in the log file. So nobody finds its pid before it can be told from others. Where
it cannot become that, the answer is {"error": ...} and there is no guest. The end of the input is the end of this
process, which no guest minds: they hang on their power cords.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "show_command_line"]

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF  # of the executable: it stays what it is
# Numbers of fields in /proc/PID/stat, as proc(5) counts them.
_CODE, _STACK, _DATA, _ENVIRONMENT = (26, 27), 28, (45, 46, 47), (50, 51)
_MAP = struct.Struct("=11QQII")  # struct prctl_mm_map: eleven addresses, the auxiliary vector's, its size, the file

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_shown: list[ctypes.Array[ctypes.c_char]] = []  # what the kernel reads our command line from, kept alive


def show_command_line(words: Sequence[str]) -> None:
    """Have this process's /proc/PID/cmdline say these words. Needs no privilege; raises OSError where the kernel was
    built without it (CONFIG_CHECKPOINT_RESTORE)."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    memory = ctypes.create_string_buffer(text, len(text))
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()

    def of(*numbers: int) -> list[int]:
        return [int(fields[number - 3]) for number in numbers]  # the first two come before the parenthesis

    begin = ctypes.addressof(memory)
    arguments = [begin, begin + len(text)]
    addresses = [*of(*_CODE), *of(*_DATA), _libc.sbrk(0), *of(_STACK), *arguments, *of(*_ENVIRONMENT)]
    layout = ctypes.create_string_buffer(_MAP.pack(*addresses, 0, 0, _NO_FILE))
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(_MAP.size), ctypes.c_ulong(0)):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl PR_SET_MM_MAP: {os.strerror(code)}")
    _shown[:] = [memory]


def main() -> None:
    """Serve the standard input to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: a dead guest must not look alive by its pid
    set_signal = signal.signal
    from gevent import monkey

    monkey.patch_all()
    import pprint  # noqa: F401  which gevent's event loop imports where it begins: in each guest

    from simulator import fake_guests  # what takes long

    fork = monkey.get_original("os", "fork")  # gevent's would begin an event loop in here
    with open(0, "rb", closefd=False) as orders:
        for line in orders:
            order = json.loads(line)
            if "macos" in order["argv"]:
                import simulator.fake_sshd  # noqa: F401  what takes as long again
            gc.freeze()  # a collection in a guest need not write to memory that all of them share
            if fork() == 0:
                set_signal(signal.SIGCHLD, signal.SIG_DFL)
                if _become(order):
                    fake_guests.main(order["argv"][3:])
                os._exit(1)


def _become(order: Mapping[str, Any]) -> bool:
    """In the child: what a program started by hand would be. Answers on what was our output; True when it is."""
    answers = os.dup(1)
    try:
        os.setsid()
        for path, flags, ours in (
            (os.devnull, os.O_RDONLY, (0,)),
            (order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, (1, 2)),
        ):
            opened = os.open(path, flags, 0o644)
            for number in ours:
                os.dup2(opened, number)
            os.close(opened)
        show_command_line(order["argv"])
        answer: dict[str, Any] = {"pid": os.getpid()}
    except OSError as error:
        answer = {"error": str(error)}
    os.write(answers, json.dumps(answer).encode() + b"\n")
    os.close(answers)
    return "pid" in answer


if __name__ == "__main__":
    main()
    sys.exit(0)
