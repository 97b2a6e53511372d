"""The inner half of the playground: the world, what is seen of it, and when it ends.

Started by simulator.playground inside the namespaces (or without any, and `--loopback` says why). What it prints about
pods, nodes and events is what `ClusterView` got from the API; only lines that begin with what the tour does, and the
daemon's own end, come from elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gevent.socket
from gevent.event import Event
from gevent.pool import Group

from simulator import namespaces
from simulator.cluster_view import ClusterView, PodRow, describe_change, describe_event
from simulator.guest_orders import GuestOrders
from simulator.live_world import NODE_NAME, LiveWorld, Place
from simulator.table import Display, open_display
from simulator.tour import Tour
from vkcocoon_probes import SystemClock, spawn

__all__ = ["main"]

TICK_S = 1.0  # how often ages move in the table
KEPT_REQUESTS = 1000
CANNOT_SHOW = (
    "What that cannot show: a guest that stops answering echoes (for 127.0.0.0/8 the host's kernel answers), and the",
    "banner of a Mac's sshd on port 22. So each pod of the tour has a probe-port, and a guest falls silent by closing",
    "it. Its processes are visible to the whole host; they are removed at the end all the same.",
)


class _Session:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._clock = SystemClock()
        self._begin = self._clock.monotonic()
        self._listener = gevent.socket.socket(fileno=options.listener)
        self._server = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._place = Place(options.home, bridged=options.loopback is None)
        footer = f"kubectl --server={self._server} get pods -A -w     Ctrl-C ends it"
        self._display: Display = open_display(sys.stdout, table=options.table, footer=footer)
        self._world = LiveWorld(self._place, self._clock, self._say)
        self._view = ClusterView(
            self._world.kube.admin, self._clock, on_change=self._changed, on_event=self._event, on_node=self._node
        )
        self._tour = Tour(self._view, self._world.kube.admin, self._clock, self._place, self._say)
        self._orders = GuestOrders(options.home, self._say)
        self._greenlets = Group()
        self._end = Event()

    def run(self) -> int:
        """Until somebody or something ends it; the exit code."""
        try:
            spawn(self._greenlets, "wait for the end", self._wait_for_end)
            self._introduce()
            self._world.start(self._listener)
            self._view.start()
            spawn(self._greenlets, "table", self._move_ages)
            spawn(self._greenlets, "given up", self._wait_for_giving_up)
            if self._options.tour:
                spawn(self._greenlets, "tour", self._take_tour)
            self._clock.wait(self._end, self._options.seconds)
        finally:
            self._tour.stop()
            self._orders.close()
            self._greenlets.kill()
            self._world.close()
            self._view.close()
            self._display.close()
        return self._sum_up()

    # What ends it

    def _wait_for_end(self) -> None:
        gevent.socket.socket(fileno=self._options.stop).recv(1)
        self._end.set()

    def _wait_for_giving_up(self) -> None:
        self._world.daemon.given_up.wait()
        self._end.set()

    # What is seen

    def _introduce(self) -> None:
        for line in self._header():
            with self._reader():
                self._display.say(line)

    def _say(self, text: str, kind: str = "") -> None:
        for line in text.splitlines():
            with self._reader():
                self._display.say(f"{self._clock.monotonic() - self._begin:6.1f}s  {line}", kind)

    def _changed(self, before: PodRow | None, after: PodRow | None) -> None:
        either = after or before
        if either and (what := describe_change(before, after)):
            self._say(f"{either.key} {what}")
        self._orders.changed(before, after)
        self._show()

    def _event(self, event: dict[str, Any]) -> None:
        self._say(describe_event(event), "event")

    def _node(self, name: str, text: str) -> None:
        self._say(f"node {name} {text}")

    def _show(self) -> None:
        nodes = ", ".join(f"{name} {state}" for name, state in sorted(self._view.nodes.items()))
        with self._reader():
            self._display.show(self._view.rows(), self._clock.now(), f"node {nodes or NODE_NAME + ' is not there yet'}")

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        """Whoever reads what we print may stop reading (`| head`): then there is nobody to stand for."""
        try:
            yield
        except BrokenPipeError:
            self._end.set()

    def _move_ages(self) -> None:
        while True:
            self._show()
            # The API server remembers every request, for tests; a playground may stand for weeks.
            del self._world.kube.requests[:-KEPT_REQUESTS]
            self._clock.sleep(TICK_S)

    # The tour and the end

    def _take_tour(self) -> None:
        self._tour.run()
        if self._tour.over and not self._tour.failed and self._options.seconds is None:
            self._say("The tour is over, everything was as expected. The playground stays up until Ctrl-C. Try", "note")
            self._say("  kubectl describe pod macos-0; kubectl delete pod linux-0; kill -9 the daemon", "note")

    def _sum_up(self) -> int:
        held = sum(each.held is True for each in self._tour.expectations)
        failed = [each.text for each in self._tour.expectations if each.held is False]
        summary = f"{held} expectations of the tour held, {len(failed)} failed"
        failed += self._world.daemon.failures
        lines = [f"FAILED: {text}" for text in failed]
        if self._options.tour:
            lines.append(summary + ("" if self._tour.over else "; the playground ended before the tour did"))
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
        return 1 if failed else 0

    def _header(self) -> Iterator[str]:
        home = self._place.home
        if self._place.bridged:
            yield "A cluster of one node with the real vk-cocoon in it, in namespaces of its own. Ctrl-C ends it."
            home = Path(f"/proc/{os.environ[namespaces.OUTER_PID]}/root{home}")
        else:
            why = self._options.loopback
            yield "A cluster of one node with the real vk-cocoon in it, on loopback addresses. Ctrl-C ends it."
            yield from (f"There are no namespaces for it: {reason}." for reason in why.split("; ") if reason)
            yield from CANNOT_SHOW
        yield f"  API server   {self._server}"
        yield f"  kubectl      kubectl --server={self._server} get pods -A -w"
        yield f"  or           export KUBECONFIG={shlex.quote(str(home / 'kubeconfig'))}; kubectl get pods -A -w"
        yield "  and then     kubectl annotate pod linux-0 playground/guest=silent --overwrite  # or speaking, crash"
        yield f"  daemon log   tail -f {shlex.quote(str(home / 'vk-cocoon.log'))}"
        yield ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.playground", description="The inner half.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--listener", type=int, required=True, help="a listening socket that the host can reach")
    parser.add_argument("--stop", type=int, required=True, help="a socket; its other end closed means stop")
    parser.add_argument("--for", dest="seconds", type=float)
    parser.add_argument("--no-table", dest="table", action="store_false")
    parser.add_argument("--no-tour", dest="tour", action="store_false")
    parser.add_argument(
        "--loopback", metavar="WHY", help="there are no namespaces; WHY is empty when nobody asked for any"
    )
    return _Session(parser.parse_args(arguments)).run()
