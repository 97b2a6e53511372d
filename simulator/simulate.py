"""The `simulate` command: one scenario, run for a person or for a CI.

Prints what the cluster saw and what was done to it, then the verdicts, then how to see it again. Exit codes: 0
everything held, 1 something did not, 2 the file is wrong.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from simulator import explore, lanes, replay, report
from simulator.scenario import Scenario, ScenarioError, load
from simulator.timeline import Timeline
from vkcocoon_terminal import Mark, Paint

__all__ = ["main"]

# What a person wants to read of a run; everything is in the event log.
TOLD = {("daemon", kind) for kind in ("start", "stop", "kill")} | {
    ("kube", kind) for kind in ("created", "deleted", "phase", "ready", "reason", "address", "lifecycle", "terminating")
}

MARKS = {"met": Mark.OK, "broken": Mark.FAILED}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for besides the scenario.

    ``from_log``: the event log to make the scenario from, ``write``: where to write that (- is stdout). ``events`` and
    ``report``: where to write the event log (- is stdout) and the page; ``timeline``: lanes in characters instead of a
    list. ``runs`` and ``jobs``: explore that many seeds in so many processes. ``smallest``: where to write the smallest
    scenario that fails. ``prepare``: ``module:function`` to be called first, in every process.
    """

    from_log: str | None = None
    write: str | None = None
    seed: int | None = None
    until: float | None = None
    events: str | None = None
    report: str | None = None
    timeline: bool = False
    check: bool = False
    runs: int | None = None
    jobs: int | None = None
    smallest: str | None = None
    prepare: str = ""


def main(scenario: str | None, **given: Any) -> int:
    """Run a scenario file, or many seeds of it, and return the exit code; the keywords are those of `Options`.

    Without a scenario there is a log to make one from.
    """
    options, made = Options(**given), None
    try:
        if scenario is None:
            scenario, made = _from_log(options)
        plan = load(made.document) if made is not None and scenario == "-" else load(scenario)
    except (ScenarioError, replay.LogError) as error:
        click.echo(f"vk-cocoon: {error}", err=True)
        return 2
    if options.until is not None:
        plan = replace(plan, until=max(plan.until, options.until), cut=options.until)
    if options.runs is not None:
        return _explore(scenario, plan, options)
    if options.prepare:
        explore.prepare(options.prepare)
    return _run(scenario, plan, options, made)


def _from_log(options: Options) -> tuple[str, replay.Replay]:
    """The scenario made from a log, and where it was written."""
    log = Path(options.from_log or "")
    made = replay.replay_of(replay.read(log), name=f"replay of {log.name}")
    flips = len(made.flips)
    text = explore.written(made.document, f"Made from {log}, which has {flips} {'flip' if flips == 1 else 'flips'}.")
    path = options.write or f"{log.name.removesuffix('.jsonl')}.replay.yaml"
    if path == "-":
        click.echo(text, nl=False)
    else:
        _write(path, text)
        click.echo(f"scenario:   {path}", err=options.events == "-")
    return path, made


def _answers(made: replay.Replay, timeline: Timeline, *, err: bool) -> bool:
    """The flips of a log beside those of its replay; are they the same, pod by pod?"""
    seen, same, late_us = made.seen(timeline), True, 0
    for pod in dict.fromkeys(key for _, key, _ in (*made.flips, *seen)):
        logged, shown = ([flip for flip in flips if flip[1] == pod] for flips in (made.flips, seen))
        for ours, theirs in zip_longest(logged, shown):
            fits = ours is not None and theirs is not None and ours[2] is theirs[2]
            same = same and fits
            late_us = max(late_us, abs(ours[0] - theirs[0]) if fits else 0)
            told = [f"{flip[0] / 1e6:12.6f} {flip[2]!s:<5}" if flip else f"{'-':>12}      " for flip in (ours, theirs)]
            click.echo(f"flip        {pod:<24} log {told[0]}  replay {told[1]}{'' if fits else '  DIFFERS'}", err=err)
    verdict = f"the same flips, at most {late_us / 1e6:g} s apart" if same else "not the flips of the log"
    click.echo(f"replay:     {verdict}", err=err)
    return same


def _run(scenario: str, plan: Scenario, options: Options, made: replay.Replay | None = None) -> int:
    seed = plan.seed if options.seed is None else options.seed
    timeline = plan.run(seed)
    aside = "-" in (options.events, scenario)
    if options.events == "-":
        click.echo("\n".join(entry.line() for entry in timeline))
    elif options.events:
        _write(options.events, "".join(entry.line() + "\n" for entry in timeline))
    command = again(scenario, seed, options)
    if options.report:
        title = f"{plan.name}, {'no seed' if seed is None else f'seed {seed}'}"
        page = report.page(timeline, title=title, end=plan.end, command=command)
        _write(options.report, page)
    if options.timeline:
        columns = shutil.get_terminal_size((100, 24)).columns
        click.echo(lanes.text(lanes.Picture.of(timeline, plan.end), columns), err=aside, nl=False)
    else:
        _show(plan, seed, timeline, err=aside)
    if options.check:
        difference = timeline.first_difference(plan.run(seed))
        click.echo(f"second run: {'the same' if not difference else 'differs:'}", err=aside)
        if difference:
            click.echo(difference, err=True)
            return 1
    answered = made is None or options.until is not None or _answers(made, timeline, err=aside)
    if timeline.of(actor="expect", kind="broken") or not answered:
        click.echo(f"reproduce:  {command}", err=aside)
        return 1
    return 0


def _explore(scenario: str, plan: Scenario, options: Options) -> int:
    """Many seeds; the first failure is made smaller, written down, and told how to be seen again."""
    assert options.runs is not None
    first = plan.seed if options.seed is None else options.seed
    seeds = range(first or 0, (first or 0) + options.runs)
    jobs = options.jobs or explore.default_jobs()
    with _Progress(f"{plan.name}: run", len(seeds)) as progress:
        failure = explore.explore(plan, seeds, jobs=jobs, told=progress.told, prepared=options.prepare)
    if failure is None:
        click.echo(f"{plan.name}: {len(seeds)} runs held, seeds {seeds[0]} to {seeds[-1]}")
        return 0
    click.echo(f"{plan.name}: seed {failure.seed} fails, after {failure.seed - seeds[0]} that held")
    paint = Paint("auto", sys.stdout, os.environ)
    click.echo(f"{paint.colored('BROKEN', Mark.FAILED)} {failure.what}: {failure.why}")
    click.echo(f"reproduce:  {again(scenario, failure.seed, options)}")
    with _Progress("making it smaller: run", None) as progress:
        if options.prepare:
            explore.prepare(options.prepare)
        shrunk = explore.shrink(plan, failure, first=seeds[0], told=progress.told)
    path = options.smallest or f"{Path(scenario).stem}.seed-{failure.seed}.yaml"
    story = f"The smallest found of {Path(scenario).name} that fails as it does with seed {failure.seed}:"
    _write(path, explore.written(shrunk.document, f"{story}\n{failure.what}"))
    click.echo(f"smallest:   {again(path, None, options)}")
    return 1


class _Progress:
    """One line that says how far it is, on a terminal only; gone when it is over."""

    def __init__(self, what: str, of: int | None) -> None:
        self._what, self._of = what, "" if of is None else f" of {of}"
        self._shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)

    def told(self, number: int) -> None:
        if self._shown:
            click.echo(f"\r\x1b[K{self._what} {number}{self._of}", err=True, nl=False)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(path, error.strerror) from error


def again(scenario: str, seed: int | None, options: Options) -> str:
    """The command line that shows the same once more."""
    shipped = Path(scenario).resolve().parent == Path(__file__).parent / "scenarios"
    words = ["vk-cocoon simulate", Path(scenario).stem if shipped else scenario]
    words = [f"vk-cocoon simulate --from-log {options.from_log}"] if scenario == "-" else words
    words += [f"--seed {seed}"] if seed is not None else []
    words += [f"--until {options.until:g}s"] if options.until is not None else []
    words += [f"--prepare {options.prepare}"] if options.prepare else []
    return " ".join(words)


def _show(plan: Scenario, seed: int | None, timeline: Timeline, *, err: bool) -> None:
    click.echo(f"{plan.name}: {plan.end:g} s of virtual time, seed {'none' if seed is None else seed}", err=err)
    for entry in timeline:
        if (entry.actor, entry.kind) in TOLD or entry.actor in ("scenario", "invariant"):
            click.echo(entry.text(), err=err)
    paint = Paint("auto", sys.stderr if err else sys.stdout, os.environ)
    for entry in timeline.of(actor="expect"):
        sign = lanes.SIGNS[entry.kind]
        mark = paint.colored(sign, MARKS[entry.kind]) if entry.kind in MARKS else sign
        why = dict(entry.fields).get("why", "")
        click.echo(f"{mark} {entry.key}{f': {why}' if why else ''}", err=err)
    click.echo(f"digest:     {timeline.digest()}", err=err)
