"""The inner half of the playground: the world, the scenario that is played in it, what is seen, and when it ends.

Started by simulator.playground inside the namespaces (or without any, and `--loopback` says why). What it prints about
pods, nodes and events is what `ClusterView` got from the API; only what the scenario does, and the daemon's own end,
come from elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import gevent.socket
from gevent.event import Event
from gevent.pool import Group

from simulator import lanes, namespaces, report
from simulator.cluster_view import ClusterView, PodRow, describe_change, describe_event
from simulator.dialing import Unusable
from simulator.expectations import Expectation
from simulator.guest_orders import GuestOrders
from simulator.live_clock import LiveClock
from simulator.live_clusters import Cluster, Dialer, FakeCluster, RealCluster
from simulator.live_limits import not_judged, refusals, variables
from simulator.live_stage import LiveStage
from simulator.live_world import NODE_NAME, LiveWorld, Place
from simulator.scenario import Performance, Scenario, ScenarioError, load
from simulator.table import Display, open_display
from vkcocoon_kube import Object
from vkcocoon_probes import spawn
from vkcocoon_record import Entry

__all__ = ["main"]

TICK_S = 1.0  # how often ages move in the table, and expectations are looked at
KEPT_REQUESTS = 1000
NODE_READY_S = 60.0  # for the daemon to start and to register
JUDGE_S = 10.0  # for a performance that was ended to say its verdicts
OK, FAILED, WRONG = 0, 1, 2
TOURS = {True: "tour", False: "tour-on-loopback"}
CANNOT_SHOW = (
    "What that cannot show: a guest that stops answering echoes (for 127.0.0.0/8 the host's kernel answers), and the",
    "banner of a Mac's sshd on port 22. So each pod of the tour has a probe-port, and a guest falls silent by closing",
    "it. Its processes are visible to the whole host; they are removed at the end all the same.",
)


class _Refused(Exception):
    """The scenario cannot be played; each argument is a line for the user."""


class _Session:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._clock = LiveClock(self._event_failed)
        self._begin = self._clock.monotonic()
        self._place = Place(options.home, bridged=options.loopback is None)
        self._scenario = _scenario(options, self._place)
        self._unjudged: dict[str, str] = {}
        if self._scenario is not None:
            self._unjudged = not_judged(self._scenario, real=options.kubeconfig is not None)
            judged = [each for each in self._scenario.expectations if each.text not in self._unjudged]
            self._scenario = replace(self._scenario, expectations=tuple(judged))
        self._cluster = self._find_cluster()
        footer = f"{self._kubectl} get pods -A -w     Ctrl-C ends it"
        self._display: Display = open_display(sys.stdout, table=options.table, footer=footer)
        self._world = LiveWorld(self._place, self._clock, self._cluster, self._say)
        if self._scenario is not None:
            self._world.settings = variables(self._scenario)
            self._world.daemon.raw_socket = not self._scenario.options["degraded"]
        self._orders = GuestOrders(options.home, self._say)
        self._view: ClusterView | None = None
        self._stage: LiveStage | None = None
        self._performance: Performance | None = None
        self._greenlets = Group()
        self._end = Event()
        self._over = Event()  # the performance
        self._met: list[Expectation] = []
        self._failures: list[str] = []

    def _find_cluster(self) -> Cluster:
        options = self._options
        if options.kubeconfig is None:
            listener = gevent.socket.socket(fileno=options.listener)
            self._server = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._kubectl = f"kubectl --server={self._server}"
            return FakeCluster(self._clock, listener)
        self._server = f"that of {options.kubeconfig}"
        self._kubectl = f"kubectl --kubeconfig={shlex.quote(str(options.kubeconfig))}"
        dial = None if options.dial is None else Dialer(gevent.socket.socket(fileno=options.dial))
        return RealCluster(options.kubeconfig, self._clock, dial)

    def run(self) -> int:
        """Until somebody or something ends it; the exit code. Raises Unusable."""
        try:
            spawn(self._greenlets, "wait for the end", self._wait_for_end)
            self._introduce()
            self._world.start()
            self._look()
            self._world.daemon.start()
            spawn(self._greenlets, "table", self._move_ages)
            spawn(self._greenlets, "given up", self._wait_for_giving_up)
            if self._scenario is not None:
                spawn(self._greenlets, "scenario", self._perform, self._scenario)
            self._clock.wait(self._end, self._options.seconds)
        finally:
            self._close()
        return self._sum_up()

    def _close(self) -> None:
        if self._stage is not None:
            self._stage.stopped.set()
            if self._performance is not None:
                self._clock.wait(self._over, JUDGE_S)
        self._orders.close()
        self._greenlets.kill()
        self._world.close()
        if self._stage is not None:
            self._stage.close()
        if self._view is not None:
            self._view.close()
        self._display.close()

    # What ends it

    def _wait_for_end(self) -> None:
        gevent.socket.socket(fileno=self._options.stop).recv(1)
        self._end.set()

    def _wait_for_giving_up(self) -> None:
        self._world.daemon.given_up.wait()
        self._end.set()

    # What is seen

    def _look(self) -> None:
        self._stage = LiveStage(self._world, self._clock, self._options.seed)
        self._view = ClusterView(
            self._cluster.api,
            self._clock,
            on_change=self._changed,
            on_event=self._event,
            on_node=self._node,
            on_pod=self._stage.saw_pod,
        )
        self._view.start()

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

    def _event(self, event: Object) -> None:
        self._say(describe_event(event), "event")
        if self._stage is not None:
            self._stage.saw_event(event)

    def _node(self, name: str, text: str) -> None:
        self._say(f"node {name} {text}")

    def _show(self) -> None:
        if self._view is None:
            return
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
            self._tell_what_is_met()
            if self._cluster.kube is not None:
                # The API server remembers every request, for tests; a playground may stand for weeks.
                del self._cluster.kube.requests[:-KEPT_REQUESTS]
            self._clock.sleep(TICK_S)

    def _tell_what_is_met(self) -> None:
        for expectation in self._performance.met() if self._performance is not None else ():
            if expectation not in self._met:
                self._met.append(expectation)
                self._say(f"as expected: {expectation.values.get('note') or expectation.text}", "good")

    # The scenario

    def _perform(self, scenario: Scenario) -> None:
        assert self._view is not None
        assert self._stage is not None
        view, stage = self._view, self._stage
        if not view.wait_until(lambda: view.nodes.get(NODE_NAME) == "Ready", NODE_READY_S):
            self._fail(f"the node did not become Ready within {NODE_READY_S:g} s")
            self._end.set()
            return
        self._clock.begin()
        stage.begin()
        stage.timeline.listeners.append(self._tell)
        self._performance = Performance(scenario, stage, self._options.allowance)
        try:
            self._performance.perform()
        except Exception as error:  # noqa: BLE001  whatever it is, it is told and the world is taken down in good order
            self._fail(f"the scenario cannot go on: {type(error).__name__}: {error}")
            self._end.set()
            return
        finally:
            self._over.set()
        self._tell_what_is_met()
        broken = stage.timeline.of(actor="expect", kind="broken")
        if not self._options.stay or broken:
            self._end.set()
        elif self._options.seconds is None and not self._end.is_set():
            self._say("Everything was as expected. The playground stays up until Ctrl-C. Try", "note")
            self._say("  kubectl describe pod macos-0; kubectl delete pod linux-0; kill -9 the daemon", "note")

    def _tell(self, entry: Entry) -> None:
        if entry.actor == "scenario":
            about = f" {entry.key}" if entry.key else ""
            what = dict(entry.fields).get("what", "")
            self._say(f"{entry.kind}{about}{f': {what}' if what else ''}", "step")
        elif entry.actor == "invariant":
            self._say(entry.text().strip(), "bad")

    def _event_failed(self, owner: str, error: Exception) -> None:
        self._fail(f"{owner}: {error}")

    def _fail(self, text: str) -> None:
        self._failures.append(text)
        self._say(f"FAILED: {text}", "bad")

    def _sum_up(self) -> int:
        failed = self._failures + self._world.daemon.failures
        lines = [f"FAILED: {text}" for text in failed]
        verdicts = self._stage.timeline.of(actor="expect") if self._stage is not None else []
        kinds = Counter(entry.kind for entry in verdicts)
        if self._scenario is not None:
            for entry in verdicts:
                why = dict(entry.fields).get("why", "")
                lines.append(f"{lanes.SIGNS[entry.kind]} {entry.key}{f': {why}' if why else ''}")
            lines.append(self._count(kinds))
        if self._options.report and self._stage is not None and self._scenario is not None:
            end = max(0.001, min(self._scenario.until, self._stage.ended))
            command = shlex.join(["vk-cocoon", "playground", self._scenario.file])
            page = report.page(self._stage.timeline, title=f"{self._scenario.name}, live", end=end, command=command)
            try:
                self._options.report.write_text(page)
            except OSError as error:
                lines.append(f"FAILED: {self._options.report}: {error.strerror}")
                failed.append("")
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
        return FAILED if failed or kinds["broken"] else OK

    def _count(self, kinds: Counter[str]) -> str:
        text = f"{kinds['met']} expectations held, {kinds['broken']} broken"
        if self._performance is None or kinds["not reached"]:
            open_ = f", {kinds['not reached']} not reached" if kinds["not reached"] else ""
            return f"{text}{open_}; the playground ended before the scenario did"
        return text

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
        yield f"  kubectl      {self._kubectl} get pods -A -w"
        kubeconfig = self._options.kubeconfig or home / "kubeconfig"
        yield f"  or           export KUBECONFIG={shlex.quote(str(kubeconfig))}; kubectl get pods -A -w"
        yield "  and then     kubectl annotate pod linux-0 playground/guest=silent --overwrite  # or speaking, crash"
        yield f"  daemon log   tail -f {shlex.quote(str(home / 'vk-cocoon.log'))}"
        if self._scenario is not None:
            yield f"  scenario     {self._scenario.name}, {self._scenario.until:g} s; instants may be"
            yield f"               {self._options.allowance:g} s early or late, since real time is never exact"
            yield from self._unjudged.values()
        yield ""


def _scenario(options: argparse.Namespace, place: Place) -> Scenario | None:
    """What is to be played; None for an empty cluster. Raises ScenarioError and _Refused."""
    if options.scenario is None and not options.tour:
        return None
    path = options.scenario or Path(__file__).parent / "scenarios" / f"{TOURS[place.bridged]}.yaml"
    scenario = load(path)
    if lines := refusals(scenario, bridged=place.bridged, real=options.kubeconfig is not None):
        raise _Refused(*lines)
    return scenario


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.playground", description="The inner half.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--listener", type=int, help="a listening socket that the host can reach")
    parser.add_argument("--stop", type=int, required=True, help="a socket; its other end closed means stop")
    parser.add_argument("--dial", type=int, help="a socket; see simulator.dialing")
    parser.add_argument("--kubeconfig", type=Path)
    parser.add_argument("--scenario", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--allowance", type=float, default=0.0)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--for", dest="seconds", type=float)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--no-table", dest="table", action="store_false")
    parser.add_argument("--no-tour", dest="tour", action="store_false")
    parser.add_argument(
        "--loopback", metavar="WHY", help="there are no namespaces; WHY is empty when nobody asked for any"
    )
    try:
        return _Session(parser.parse_args(arguments)).run()
    except _Refused as refused:
        sys.stderr.write("".join(f"vk-cocoon: {line}\n" for line in refused.args))
    except (ScenarioError, Unusable) as error:
        sys.stderr.write(f"vk-cocoon: {error}\n")
    return WRONG
