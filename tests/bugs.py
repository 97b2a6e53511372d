"""Bugs that were made before, here or elsewhere, put back one at a time: what the simulator finds, and how fast.

    vk-cocoon simulate three-strikes --runs 100 --prepare tests.bugs:cumulative_failures
    python -m tests.bugs docs/simulator.md          # renews the table on that page

Each bug changes the daemon at run time, at the place where the guard against it stands, and names the shipped scenario
that should notice. `tests/test_bugs.py` wants every one of them found, within so many seeds, and made small.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vkcocoon  # before the rest: it makes the process cooperative

# isort: split
import vkcocoon_macos
import vkcocoon_net
import vkcocoon_pods
import vkcocoon_probes
import vkcocoon_publish
import vkcocoon_readiness
import vkcocoon_tracking
from simulator import explore
from simulator.catalog import SCENARIOS
from simulator.scenario import load

__all__ = ["BUGS", "MOST_RUNS", "Bug", "found", "put_back"]

MOST_RUNS = 200
BEGIN, END = "<!-- made by python -m tests.bugs -->\n", "<!-- end of bugs -->\n"

Patch = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Bug:
    """What was wrong, which scenario notices, and how it is put back."""

    text: str
    scenario: str
    put: Callable[[Patch], None]


BUGS: dict[str, Bug] = {}


def bug(text: str, scenario: str) -> Callable[[Callable[[Patch], None]], Callable[[], None]]:
    """Registers a bug under its function's name; the function that is left puts it back for good (`--prepare`)."""

    def register(put: Callable[[Patch], None]) -> Callable[[], None]:
        BUGS[put.__name__] = Bug(text, scenario, put)
        return lambda: put(setattr)

    return register


@contextlib.contextmanager
def put_back(name: str) -> Iterator[None]:
    """The bug is there within the block."""
    undo: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, attribute: str, value: Any) -> None:
        undo.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)

    BUGS[name].put(patch)
    try:
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)


# The bugs -------------------------------------------------------------------------------------------------------------


@bug("A result that comes in after `forget` is stored all the same.", "delete-in-flight")
def stored_after_forget(patch: Patch) -> None:
    manager = vkcocoon_probes.ProbeManager
    guarded, owns = manager._guarded, manager._owns
    probed: set[Any] = set()

    def probe(self: Any, agent: Any) -> Any:
        result = guarded(self, agent)
        probed.add(agent)
        return result

    def never_asked(self: Any, agent: Any) -> bool:
        if agent in probed:
            probed.remove(agent)
            return True
        return owns(self, agent)

    patch(manager, "_guarded", probe)
    patch(manager, "_owns", never_asked)


@bug("`forget` names no owner, and comes when the teardown is over: by then the key is a namesake's.", "namesake")
def forget_without_owner(patch: Patch) -> None:
    delete, controller = vkcocoon.Provider.delete_pod, vkcocoon_pods.PodController
    enlist = controller._enlist

    def late(self: Any, pod: Any) -> None:
        delete(self, pod)
        metadata = pod["metadata"]
        self._probes.forget(f"{metadata['namespace']}/{metadata['name']}")

    def at_once(self: Any, record: Any) -> Any:
        """Namesakes did not wait for each other then."""
        record = enlist(self, record)
        line = self._lines[record.key]
        line.insert(0, line.pop())
        return record

    patch(vkcocoon.Provider, "delete_pod", late)
    patch(controller, "_enlist", at_once)


@bug("Failures are counted over a success: three in all, not three in a row.", "three-strikes")
def cumulative_failures(patch: Patch) -> None:
    observe = vkcocoon_probes.ProbeAgent.observe

    def counts_on(self: Any, result: Any) -> bool:
        before = self.failures
        changed = observe(self, result)
        if result.ready:
            self.failures = before % 3
        return changed

    patch(vkcocoon_probes.ProbeAgent, "observe", counts_on)


@bug("Readers see each single result: the state is not debounced.", "three-strikes")
def undebounced(patch: Patch) -> None:
    observe = vkcocoon_probes.ProbeAgent.observe

    def shows(self: Any, result: Any) -> bool:
        changed = observe(self, result)
        self.result = result
        return changed

    patch(vkcocoon_probes.ProbeAgent, "observe", shows)


@bug("The annotation that says ready is written before the status.", "status-first")
def annotation_first(patch: Patch) -> None:
    publisher = vkcocoon_publish._Publisher
    write = publisher._write

    def hasty(self: Any) -> None:
        if self._held is not None and self._wanted is not None:
            body = {"metadata": {"uid": self.uid, "annotations": self._wanted.annotations}}
            self._learn(self._desk.api.patch(self._path, body, kind="merge"))
        write(self)

    patch(publisher, "_write", hasty)


@bug("A status that could not be written is forgotten instead of owed.", "api-outage")
def told_only_once(patch: Patch) -> None:
    def gives_up(self: Any, error: Any) -> None:
        self._wanted = None

    patch(vkcocoon_publish._Publisher, "_failed", gives_up)


@bug("An echo reply counts for whoever waits for that address: also one to an earlier echo.", "late-echo")
def late_echo(patch: Patch) -> None:
    def any_reply(self: Any, source: bytes, header: Any, payload: bytes) -> None:
        for echo in self._pending.values():
            if echo.address == source:
                echo.finish()

    patch(vkcocoon_net.IcmpPinger, "_on_reply", any_reply)


@bug("A lease counts although it has expired, because the file has not changed.", "lease-expires")
def expired_lease(patch: Patch) -> None:
    def lookup(self: Any, mac: str, now: Any) -> Any:
        return self._current().leases.get(vkcocoon_net.normalize_mac(mac))

    patch(vkcocoon_net.LeaseFile, "lookup", lookup)


@bug("The address is looked up once and kept.", "lease-moves")
def address_kept(patch: Patch) -> None:
    readiness = vkcocoon_readiness.Readiness
    resolve = readiness.resolve
    patch(readiness, "resolve", lambda self, entry, vm: entry.ip or resolve(self, entry, vm))


@bug("Nobody asks whether another pod is Ready on the address.", "addresses-swap")
def two_on_one_address(patch: Patch) -> None:
    patch(vkcocoon_tracking.Publication, "holder", lambda self, entry, ip: None)


@bug("A QEMU is restarted without the lock that its deletion holds.", "qemu-crash-while-deleted")
def restart_without_lock(patch: Patch) -> None:
    keeper = vkcocoon_macos.QemuKeeper
    initialize = keeper.__init__

    def unlocked(self: Any, *args: Any, **more: Any) -> None:
        initialize(self, *args, **more)
        self._lock = lambda name: contextlib.nullcontext()
        self.forget = lambda vm_id: None

    patch(keeper, "__init__", unlocked)


@bug("A QEMU that dies at once is restarted on every probe.", "qemu-crash-loop")
def restart_without_limit(patch: Patch) -> None:
    keeper = vkcocoon_macos.QemuKeeper
    dead = keeper._dead

    def at_once(self: Any, guest: Any, vm: Any, owner: Any) -> Any:
        guest.next_at = 0.0
        return dead(self, guest, vm, owner)

    patch(keeper, "_dead", at_once)


@bug("What was adopted at start is published before it was probed: healthy pods blink.", "restart")
def published_before_probed(patch: Patch) -> None:
    readiness = vkcocoon_readiness.Readiness
    start = readiness.start

    def early(self: Any, entry: Any) -> Any:
        self._publication.publish(entry)
        return start(self, entry)

    patch(readiness, "start", early)
    patch(vkcocoon_tracking.TrackedPod, "adopting", False)


# Finding them ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """After how many runs, what was broken, and how much is left of the scenario."""

    runs: int
    what: str
    pods: int
    events: int
    until: float


def found(name: str, most: int = MOST_RUNS) -> Found | None:
    """Put a bug back, look for it with so many seeds, make the scenario small; None when it was not found."""
    with put_back(name):
        scenario = load(SCENARIOS / f"{BUGS[name].scenario}.yaml")
        failure = explore.explore(scenario, range(most), jobs=1, told=lambda n: None)
        if failure is None:
            return None
        shrunk = explore.shrink(scenario, failure)
        left = load(shrunk.document)
        return Found(failure.seed + 1, shrunk.failure.what, len(left.pods), len(left.events), left.until)


def table() -> str:
    rows = ["| bug | scenario | runs | what broke | what is left of the scenario |", "| --- | --- | --: | --- | --- |"]
    for name, each in BUGS.items():
        result = found(name)
        if result is None:
            raise SystemExit(f"{name} was not found in {MOST_RUNS} runs")
        left = f"{_counted(result.pods, 'pod')}, {_counted(result.events, 'event')}, {result.until:.3g} s"
        rows.append(f"| {each.text} | {each.scenario} | {result.runs} | {result.what} | {left} |")
    return "\n".join(rows) + "\n"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    explore.quiet()
    page = Path(sys.argv[1])
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    page.write_text(f"{head}{begin}{table()}{end}{tail}")
