"""`vk-cocoon playground`: a cluster of one node to look at, with the real daemon in it and nothing around it.

Two halves. `main` runs in the user's terminal, on the host: it opens a port on the host's loopback for kubectl, chooses
what kind of corner the kernel grants (simulator.namespaces), starts the other half in there and waits for it. That
other half is simulator.live_session: the world, the view of the cluster, the table and the scenario.

They share a socket pair: the inner half stops in an orderly way when the outer half closes its end, which Ctrl-C makes
it do, and which the kernel does for a process that was killed. A second Ctrl-C does not wait.

Exit code 0: it ended as asked and no expectation was broken. 1: one was, or the world could not stand. 2: what was
asked for cannot be played.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from simulator import namespaces
from simulator.dialing import Unusable, dial, server_of

__all__ = ["main"]

STOP_PATIENCE_S = 15.0  # the daemon's grace and some more; then the watcher is told to end it all
LOOK_S = 0.25
ALLOWANCE_S = 6.0  # a healthy guest is asked every 5 s, and programs take a moment to start
SHOW_CURSOR = "\x1b[?25h"


def main(
    scenario: str | None = None,
    *,
    seconds: float | None = None,
    port: int = 0,
    table: bool = True,
    loopback: bool = False,
    tour: bool = True,
    kubeconfig: str | None = None,
    seed: int | None = None,
    allowance: float = ALLOWANCE_S,
    report: str | None = None,
    stay: bool = False,
) -> int:
    """Play a scenario file, or the tour, or nothing, until it is over or Ctrl-C; returns the exit code.

    `port` 0 is any free one. `table` False gives plain lines even on a terminal; `loopback` does without namespaces
    even where they are granted; `tour` False leaves the cluster empty. `kubeconfig` leads to a real cluster in place of
    the fake one. `allowance`: see `simulator.expectations.Run`. `stay`: do not end with the scenario.
    """
    try:
        server = server_of(Path(kubeconfig)) if kubeconfig is not None else None
    except Unusable as error:
        sys.stderr.write(f"vk-cocoon: {error}\n")
        return 2
    try:
        listener = _listen(port)
    except OSError as error:
        sys.stderr.write(f"vk-cocoon: cannot listen on 127.0.0.1:{port}: {error.strerror}\n")
        return 1
    kind, refusals = ("", []) if loopback else namespaces.available()
    words = [] if kind else ["--loopback", "; ".join(refusals)]
    words += [] if table else ["--no-table"]
    words += [] if tour else ["--no-tour"]
    words += ["--stay"] if stay or scenario is None else []
    words += [f"--for={seconds}"] if seconds is not None else []
    words += [f"--seed={seed}"] if seed is not None else []
    words += [f"--allowance={allowance}"]
    files = {"--scenario": scenario, "--kubeconfig": kubeconfig, "--report": report}
    paths = {flag: str(Path(file).absolute()) for flag, file in files.items() if file is not None}
    words += [f"{flag}={path}" for flag, path in paths.items()]
    with listener:
        return _Playground(kind or "none", [*paths.values()], server).run(listener, words)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


# On the host ------------------------------------------------------------------------------------------------------


class _Playground:
    """The inner half as a process, and its end. `files` must be visible to it, `server` is dialed for it."""

    def __init__(self, kind: str, files: Sequence[str], server: tuple[str, int] | None) -> None:
        self._kind = kind
        self._files = files
        self._server = server
        self._channel: socket.socket | None = None  # on which we are asked to dial
        self._token = secrets.token_hex(8)
        self._asked = 0  # how often it was asked to stop

    def run(self, listener: socket.socket, words: Sequence[str]) -> int:
        inside_one = self._kind != "none"
        home = namespaces.free_directory(*self._files) if inside_one else namespaces.temporary_home()
        ours, theirs = socket.socketpair()
        fixed = ["--home", home, "--listener", str(listener.fileno()), "--stop", str(theirs.fileno())]
        passed = [listener.fileno(), theirs.fileno()]
        dialing: socket.socket | None = None
        if self._server is not None and inside_one:
            near, dialing = socket.socketpair()
            passed.append(dialing.fileno())
            fixed += ["--dial", str(dialing.fileno())]
            self._channel = near
        inside = [sys.executable, "-m", "simulator.playground", *fixed, *words]
        more = {name: os.environ[name] for name in ("NO_COLOR", "COLUMNS", "LINES") if name in os.environ}
        try:
            with self._signals(ours):
                process = subprocess.Popen(
                    namespaces.watcher_command(self._kind, home, inside),
                    env=namespaces.environment(**{namespaces.MARK: self._token}, **more),
                    stdin=subprocess.DEVNULL,
                    pass_fds=passed,
                    start_new_session=True,  # Ctrl-C is for us alone: we turn it into a request
                )
                theirs.close()
                if dialing is not None:
                    dialing.close()
                return self._wait(process)
        finally:
            ours.close()
            if self._kind == "none":  # the watcher does this too, unless it was the one that got killed
                namespaces.sweep(self._token)
                shutil.rmtree(home, ignore_errors=True)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        patience = STOP_PATIENCE_S
        ended = os.pidfd_open(process.pid)
        while True:
            if (code := process.poll()) is not None:
                break
            self._look(ended)
            if self._asked:
                patience -= LOOK_S
            if self._asked > 1 or patience <= 0:
                process.terminate()
        if code in (0, 1, 2):
            return code
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # the table hides it, and had no chance to bring it back
            sys.stdout.flush()
        ending = f"signal {-code}" if code < 0 else f"code {code}"
        sys.stderr.write(f"vk-cocoon: the playground ended with {ending}; nothing of it is left\n")
        return 1

    def _look(self, ended: int) -> None:
        """Wait a little, dial when we are asked to, and come back at once when the process has ended."""
        channel, server = self._channel, self._server
        asked = [] if channel is None else [channel.fileno()]
        readable, _, _ = select.select([ended, *asked], [], [], LOOK_S)
        if channel is None or server is None or channel.fileno() not in readable:
            return
        with contextlib.suppress(OSError):
            if dial(channel, server):
                return
        self._channel = None

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
