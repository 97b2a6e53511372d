"""`vk-cocoon playground`: a cluster of one node to look at, with the real daemon in it and nothing around it.

Two halves. `main` runs in the user's terminal, on the host: it opens a port on the host's loopback for kubectl, chooses
what kind of corner the kernel grants (simulator.namespaces), starts the other half in there and waits for it. That
other half is simulator.live_session: the world, the view of the cluster, the table and the tour.

They share a socket pair: the inner half stops in an orderly way when the outer half closes its end, which Ctrl-C makes
it do, and which the kernel does for a process that was killed. A second Ctrl-C does not wait.

Exit code 0: it ended as asked and no expectation of the tour failed. 1: one failed, or the world could not stand.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from simulator import namespaces

__all__ = ["main"]

STOP_PATIENCE_S = 15.0  # the daemon's grace and some more; then the watcher is told to end it all
LOOK_S = 0.25
SHOW_CURSOR = "\x1b[?25h"


def main(
    *, seconds: float | None = None, port: int = 0, table: bool = True, loopback: bool = False, tour: bool = True
) -> int:
    """Run a playground until Ctrl-C, or for `seconds`; returns the exit code. `port` 0 is any free one.

    `table` False gives plain lines even on a terminal; `loopback` does without namespaces even where they are granted;
    `tour` False leaves the cluster empty.
    """
    try:
        listener = _listen(port)
    except OSError as error:
        sys.stderr.write(f"vk-cocoon: cannot listen on 127.0.0.1:{port}: {error.strerror}\n")
        return 1
    kind, refusals = ("", []) if loopback else namespaces.available()
    words = [] if kind else ["--loopback", "; ".join(refusals)]
    words += [] if table else ["--no-table"]
    words += [] if tour else ["--no-tour"]
    words += [f"--for={seconds}"] if seconds is not None else []
    with listener:
        return _Playground(kind or "none").run(listener, words)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


# On the host ------------------------------------------------------------------------------------------------------


class _Playground:
    """The inner half as a process, and its end."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._token = secrets.token_hex(8)
        self._asked = 0  # how often it was asked to stop

    def run(self, listener: socket.socket, words: Sequence[str]) -> int:
        home = namespaces.free_directory() if self._kind != "none" else namespaces.temporary_home()
        ours, theirs = socket.socketpair()
        fixed = ["--home", home, "--listener", str(listener.fileno()), "--stop", str(theirs.fileno())]
        inside = [sys.executable, "-m", "simulator.playground", *fixed, *words]
        more = {name: os.environ[name] for name in ("NO_COLOR", "COLUMNS", "LINES") if name in os.environ}
        try:
            with self._signals(ours):
                process = subprocess.Popen(
                    namespaces.watcher_command(self._kind, home, inside),
                    env=namespaces.environment(**{namespaces.MARK: self._token}, **more),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(listener.fileno(), theirs.fileno()),
                    start_new_session=True,  # Ctrl-C is for us alone: we turn it into a request
                )
                theirs.close()
                return self._wait(process)
        finally:
            ours.close()
            if self._kind == "none":  # the watcher does this too, unless it was the one that got killed
                namespaces.sweep(self._token)
                shutil.rmtree(home, ignore_errors=True)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        patience = STOP_PATIENCE_S
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=LOOK_S)
                break
            if self._asked:
                patience -= LOOK_S
            if self._asked > 1 or patience <= 0:
                process.terminate()
        if code in (0, 1):
            return code
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # the table hides it, and had no chance to bring it back
            sys.stdout.flush()
        ending = f"signal {-code}" if code < 0 else f"code {code}"
        sys.stderr.write(f"vk-cocoon: the playground ended with {ending}; nothing of it is left\n")
        return 1

    @contextlib.contextmanager
    def _signals(self, ours: socket.socket) -> Iterator[None]:
        def stop(signum: int, frame: object) -> None:
            self._asked += 1
            with contextlib.suppress(OSError):  # it ended by itself in this very moment
                ours.shutdown(socket.SHUT_WR)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


if __name__ == "__main__":
    # The inner half. Patched before anything that opens a socket is imported, as the daemon does.
    from gevent import monkey

    monkey.patch_all()
    from simulator import live_session

    sys.exit(live_session.main(sys.argv[1:]))
