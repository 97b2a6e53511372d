"""How the processes of a live world tell what happens to them: one JSON datagram each to HOME/world.sock.

Programs and guests only send; nobody has to listen, and who sends never waits. Imports next to nothing, because every
call of a fake program pays for it.
"""

import contextlib
import json
import os
import socket
from typing import Any

__all__ = ["SOCKET", "say"]

SOCKET = "world.sock"
LONGEST = 65536


def say(home: str | os.PathLike[str], actor: str, kind: str, vm_name: str, **fields: Any) -> None:
    """Something happened to a VM; nothing is said where nobody listens."""
    message = json.dumps([actor, kind, vm_name, fields]).encode()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message, os.path.join(home, SOCKET))
