"""How the processes of a live world talk: they tell what happens to them, and ask one another.

What they tell is one JSON datagram each to HOME/world.sock. Programs and guests only send; nobody has to listen, and
who sends never waits. A question is one line of JSON to a socket in HOME, and its answer another. Imports next to
nothing, because every call of a fake program pays for it.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

__all__ = ["LONGEST", "SOCKET", "ask", "say"]

SOCKET = "world.sock"
LONGEST = 65536
ANSWER_S = 5.0  # the longest wait for a step of a conversation


def say(home: str | os.PathLike[str], actor: str, kind: str, vm_name: str, **fields: Any) -> None:
    """Something happened to a VM; nothing is said where nobody listens."""
    message = json.dumps([actor, kind, vm_name, fields]).encode()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message, os.path.join(home, SOCKET))


def ask(path: str | os.PathLike[str], question: Mapping[str, Any], seconds: float = ANSWER_S) -> dict[str, Any]:
    """The answer of whoever listens at this socket. Raises OSError, ValueError when it is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(os.fspath(path))
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile("r") as lines:
            answer = json.loads(lines.readline(LONGEST))
    if not isinstance(answer, dict):
        raise ValueError(f"{os.path.basename(path)} answered {answer!r}")
    return answer
