"""Many runs of one scenario, each with a seed of its own; and the smallest scenario that still fails.

`explore` runs seeds in processes of its own (spawned, so that none inherits a hub) and stops at the first failure.
Which failure that is does not depend on how many processes there are or how fast: it is the one with the lowest seed.

`shrink` makes a failing scenario smaller while it fails in the same way: fewer expectations, pods and events, less of
each, an earlier end. Because chance comes in one stream per purpose and pod, what is left behaves as before when
something else is taken away; where it does not, a few other seeds are tried.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.process
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from multiprocessing import connection
from typing import Any

import yaml

import vkcocoon  # noqa: F401  before the rest: it makes the process cooperative

# isort: split
from simulator.expectations import Expectation
from simulator.scenario import Event, Scenario, ScenarioError, load
from simulator.timeline import Timeline
from simulator.values import pod_name, time_text

__all__ = ["Failure", "Shrunk", "default_jobs", "explore", "failure_of", "prepare", "quiet", "shrink", "written"]

OTHER_SEEDS = 4  # tried when a smaller scenario holds with the seed that failed
MOST_ATTEMPTS = 400  # to make it smaller
BATCH = 8  # runs that a process takes at once

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that failed: its seed, what was broken ("invariant RULE" or the text of an expectation), when, and why."""

    seed: int
    what: str
    at: float
    why: str


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest scenario found, how it fails, and how many runs that took."""

    document: Document
    failure: Failure
    attempts: int


def prepare(name: str) -> None:
    """Call the function ``module:function``, which may change the daemon: to put a bug back, say."""
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function)()


def failure_of(timeline: Timeline, seed: int) -> Failure | None:
    """The first thing that broke in a run; None when everything held. A broken rule comes before expectations."""
    for entry in timeline.of(actor="invariant"):
        fields = dict(entry.fields)
        return Failure(seed, f"invariant {fields['rule']}", entry.seconds, f"{entry.key}: {fields['why']}")
    for entry in timeline.of(actor="expect", kind="broken"):
        fields = dict(entry.fields)
        return Failure(seed, entry.key, float(fields.get("to") or entry.seconds), str(fields["why"]))
    return None


# Many runs ------------------------------------------------------------------------------------------------------------


def explore(
    scenario: Scenario, seeds: range, *, jobs: int, told: Callable[[int], None], prepared: str = ""
) -> Failure | None:
    """Run a scenario with each of the seeds; the failure with the lowest one, None when all held.

    ``told(n)`` is called now and then with the number of runs that are over. ``prepared``: see `prepare`.
    """
    batches = [seeds[n : n + BATCH] for n in range(0, len(seeds), BATCH)]
    if jobs <= 1 or len(batches) == 1:
        if prepared:
            prepare(prepared)
        return _alone(scenario, batches, told)
    document = {**plain(scenario.document), "until": time_text(scenario.until)}
    crew = _Crew(min(jobs, len(batches)), document, scenario.cut, prepared)
    try:
        return crew.run(batches, told)
    finally:
        crew.dismiss()


def _alone(scenario: Scenario, batches: list[range], told: Callable[[int], None]) -> Failure | None:
    over = 0
    for batch in batches:
        failure = _run_batch(scenario, batch)
        over += len(batch)
        told(over)
        if failure is not None:
            return failure
    return None


def _run_batch(scenario: Scenario, batch: range) -> Failure | None:
    return next((failure for seed in batch if (failure := failure_of(scenario.run(seed), seed))), None)


class _Crew:
    """Processes that run batches. A pool of the library would need threads, which are greenlets in this process."""

    def __init__(self, size: int, document: Document, cut: float | None, prepared: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._members: dict[Any, tuple[Any, multiprocessing.process.BaseProcess]] = {}
        for _ in range(size):
            # One-way pipes: a two-way one is made of sockets, which do not block in a process made cooperative.
            work, orders = context.Pipe(duplex=False)
            answers, results = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(work, results, document, cut, prepared), daemon=True)
            process.start()
            work.close()
            results.close()
            self._members[answers] = (orders, process)

    def run(self, batches: list[range], told: Callable[[int], None]) -> Failure | None:
        waiting, busy, over = list(enumerate(batches)), dict[Any, int](), 0
        found: dict[int, Failure] = {}  # by the place of its batch
        idle = list(self._members)
        while True:
            while idle and waiting and not found:
                place, batch = waiting.pop(0)
                line = idle.pop()
                self._members[line][0].send((batch.start, batch.stop))
                busy[line] = place
            # An earlier batch that is not over yet may still have a lower seed.
            if not busy or (found and min(busy.values()) > min(found)):
                return found[min(found)] if found else None
            for line in connection.wait(list(busy)):
                place = busy.pop(line)
                if (failure := self._answer(line)) is not None:
                    found[place] = failure
                idle.append(line)
                over += len(batches[place])
                told(over)

    def _answer(self, line: Any) -> Failure | None:
        try:
            answer = line.recv()
        except EOFError:
            raise RuntimeError("a process that ran scenarios ended by itself") from None
        if isinstance(answer, str):
            raise RuntimeError(f"a process that ran scenarios failed:\n{answer}")
        return Failure(*answer) if answer else None

    def dismiss(self) -> None:
        for answers, (orders, process) in self._members.items():
            orders.close()
            answers.close()
            process.terminate()
            process.join()


def _serve(work: Any, results: Any, document: Document, cut: float | None, prepared: str) -> None:
    """A process of the crew: batches in, the first failure of each out; a text instead means that it cannot go on."""
    try:
        quiet()
        if prepared:
            prepare(prepared)
        scenario = replace(load(document), cut=cut)
        gc.freeze()  # what is loaded stays: the collector need not look at it after each run
        while True:
            start, stop = work.recv()
            failure = _run_batch(scenario, range(start, stop))
            results.send(astuple(failure) if failure else None)
    except EOFError:
        return
    except Exception:  # noqa: BLE001  the root of a process: whoever started it has to hear
        results.send(traceback.format_exc())


def quiet() -> None:
    """Nothing of the daemon's log: what goes wrong in a scenario is its purpose, and in its event log."""
    import vkcocoon_logs

    vkcocoon_logs.configure("error", "text")


# Smaller --------------------------------------------------------------------------------------------------------------


def shrink(
    scenario: Scenario, failure: Failure, *, first: int = 0, told: Callable[[int], None] = lambda attempts: None
) -> Shrunk:
    """The smallest scenario that was found to fail like this one. Runs in this process.

    ``first``: the seed the search began with; those from there up to the failing one are known to hold.
    """
    return _Shrinker(plain(scenario.document), failure, first, told).shrunk()


class _Shrinker:
    """Takes away what is not needed for a failure.

    A rule that is broken stays broken for its own reason. An expectation does not: without the event that a flip is
    expected from, the flip is missing, too. So a smaller scenario must still hold with some other seed. If no seed is
    known with which even the whole scenario holds, the pod that the expectation is about is left as it is.
    """

    def __init__(self, document: Document, failure: Failure, first: int, told: Callable[[int], None]) -> None:
        self._document = document
        self._failure = failure
        self._told = told
        self._attempts = 0
        self._known: dict[str, Failure | None] = {}
        self._rule = failure.what.startswith("invariant ")
        self._holding: list[int] = []
        if not self._rule:
            seeds = range(first, failure.seed)[-OTHER_SEEDS:] or range(failure.seed + 1, failure.seed + 9)
            self._holding = [seed for seed in seeds if self._run(load(document), seed) is None][:OTHER_SEEDS]
        self._untouched = "" if self._rule or self._holding else self._pod_of_failure()

    def shrunk(self) -> Shrunk:
        self._keep_rows("expect", [n for n, each in enumerate(load(self._document).expectations) if self._is_it(each)])
        smaller = True
        while smaller and self._attempts < MOST_ATTEMPTS:
            rows = [self._fewer(key) for key in ("pods", "events", "expect")]
            smaller = any([self._earlier(), *rows, self._plainer()])
        return Shrunk({**self._document, "seed": self._failure.seed}, self._failure, self._attempts)

    def _pod_of_failure(self) -> str:
        about = [each.pod for each in load(self._document).expectations if self._is_it(each)]
        return (about[0] if about else None) or "*"

    def _is_it(self, expectation: Expectation) -> bool:
        return expectation.text == self._failure.what

    # Each of these returns whether it made anything smaller.

    def _earlier(self) -> bool:
        """End as soon as what broke is broken; what is missing is missing only when its time is over."""
        end = load(self._document).until
        until = round(self._failure.at + (0.001 if self._rule else 0.0), 6)
        return 0 < until < end and self._try({**self._document, "until": time_text(until)})

    def _fewer(self, key: str) -> bool:
        """Take away rows, the larger part first."""
        smaller, size = False, len(self._document.get(key) or [])
        while size >= 1 and self._attempts < MOST_ATTEMPTS:
            start = 0
            while start < (count := len(self._document.get(key) or [])):
                if self._keep_rows(key, [n for n in range(count) if not start <= n < start + size]):
                    smaller = True
                else:
                    start += size
            size //= 2
        return smaller

    def _keep_rows(self, key: str, kept: list[int]) -> bool:
        """Only these rows; events and expectations about pods, or events, that are no more go with them."""
        plan, document = load(self._document), {**self._document}
        gone = {about for n, about in enumerate(_subjects(plan, key)) if n not in kept and about}
        if gone and self._untouched and (self._untouched == "*" or gone & {self._untouched, "*"}):
            return False
        document[key] = [document[key][n] for n in kept] if key in document else []
        pods = {pod_name(row["name"]) for row in document.get("pods") or []}
        if key == "pods":
            stays = [_abouts(event) <= pods for event in plan.events]
            document["events"] = [row for row, stay in zip(document.get("events") or [], stays, strict=True) if stay]
            stays = [each.pod is None or each.pod in pods for each in plan.expectations]
            document["expect"] = [row for row, stay in zip(document.get("expect") or [], stays, strict=True) if stay]
        return self._try({name: value for name, value in document.items() if value != []})

    def _plainer(self) -> bool:
        """Take away single keys: of the scenario, of pods and guests, of events; and draws that need not be drawn."""
        smaller = False
        if not self._untouched:
            for candidate in _plainer(self._document):
                smaller = self._try(candidate) or smaller
        return smaller

    def _try(self, candidate: Document) -> bool:
        """Keep the candidate if it is another one and fails in the same way."""
        if candidate == self._document or self._attempts >= MOST_ATTEMPTS:
            return False
        failure = self._fails(candidate)
        if failure is None:
            return False
        self._document, self._failure = candidate, failure
        return True

    def _fails(self, candidate: Document) -> Failure | None:
        text = yaml.safe_dump(candidate)
        if text not in self._known:
            self._known[text] = self._find(candidate)
        return self._known[text]

    def _find(self, candidate: Document) -> Failure | None:
        try:
            scenario = load(candidate)
        except ScenarioError:
            return None  # something that is left refers to what was taken away
        for seed in (self._failure.seed, *range(1, OTHER_SEEDS + 1)):
            failure = self._run(scenario, seed)
            if failure is not None and failure.what == self._failure.what:
                return failure if self._holds_otherwise(scenario) else None
        return None

    def _holds_otherwise(self, scenario: Scenario) -> bool:
        return not self._holding or any(self._run(scenario, seed) is None for seed in self._holding)

    def _run(self, scenario: Scenario, seed: int) -> Failure | None:
        self._attempts += 1
        self._told(self._attempts)
        return failure_of(scenario.run(seed), seed)


def _abouts(event: Event) -> set[str]:
    """The pods an event refers to."""
    return {pod for pod in (event.pod, event.trigger.pod if event.trigger else None) if pod is not None}


def _subjects(plan: Scenario, key: str) -> list[str]:
    """What each row of a list is about: a pod, or "*" for everything. Expectations may always go."""
    if key == "pods":
        return [pod.name for pod in plan.pods]
    return [event.pod or "*" for event in plan.events] if key == "events" else [""] * len(plan.expectations)


def _plainer(document: Document) -> Iterator[Document]:
    for key in ("settings", "jitter", "wire", "raw_socket"):
        if key in document:
            yield {name: value for name, value in document.items() if name != key}
    for key, fixed in (("pods", ("name",)), ("events", ())):
        for index, row in enumerate(document.get(key) or []):
            for smaller in _plainer_row(row, fixed):
                rows = list(document[key])
                rows[index] = smaller
                yield {**document, key: rows}


def _plainer_row(row: Document, fixed: tuple[str, ...] = ()) -> Iterator[Document]:
    """Without one of its keys, or with the beginning of a range in its place; the same for mappings within."""
    for key, value in row.items():
        if key in fixed:
            continue
        yield {name: each for name, each in row.items() if name != key}
        if isinstance(value, str) and ".." in value:
            yield {**row, key: value.partition("..")[0]}
        if isinstance(value, dict) and len(value) > 1:
            yield from ({**row, key: smaller} for smaller in _plainer_row(value))


# Written --------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A document as plain dicts and lists, to be changed and written."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def written(document: Mapping[str, Any], comment: str) -> str:
    """A scenario as a file, one row a line, with a comment on top."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for key in ("version", "name", "seed", "until", "jitter", "wire", "raw_socket", "settings"):
        if key in document:
            lines.append(f"{key}: {_flow(document[key])}")
    for key in ("pods", "events", "expect"):
        if document.get(key):
            lines.append(f"{key}:")
            lines += [f"  - {_flow(row)}" for row in document[key]]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").removesuffix("...").strip()


def default_jobs() -> int:
    return len(os.sched_getaffinity(0))
