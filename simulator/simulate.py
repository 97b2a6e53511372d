"""The `simulate` command: one scenario, run for a person or for a CI.

Prints what the cluster saw and what was done to it, then the verdicts, then how to see it again. Exit codes: 0
everything held, 1 something did not, 2 the file is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from simulator.scenario import Scenario, ScenarioError, load
from simulator.timeline import Timeline

__all__ = ["main"]

# What a person wants to read of a run; everything is in the event log.
TOLD = {("daemon", kind) for kind in ("start", "stop", "kill")} | {
    ("kube", kind) for kind in ("created", "deleted", "phase", "ready", "reason", "address", "lifecycle", "terminating")
}


def main(
    scenario: str,
    *,
    seed: int | None = None,
    until: float | None = None,
    events: str | None = None,
    check: bool = False,
) -> int:
    """Run a scenario file and return the exit code. ``events``: where to write the event log, - is stdout."""
    try:
        plan = load(scenario)
    except ScenarioError as error:
        click.echo(f"vk-cocoon: {error}", err=True)
        return 2
    if until is not None:
        plan = replace(plan, until=until)
    seed = plan.seed if seed is None else seed
    timeline = plan.run(seed)
    aside = events == "-"
    if aside:
        click.echo("\n".join(entry.line() for entry in timeline))
    elif events:
        Path(events).write_text("".join(entry.line() + "\n" for entry in timeline))
    _show(plan, seed, timeline, err=aside)
    if check:
        difference = timeline.first_difference(plan.run(seed))
        click.echo(f"second run: {'the same' if not difference else 'differs:'}", err=aside)
        if difference:
            click.echo(difference, err=True)
            return 1
    if timeline.of(actor="expect", kind="broken"):
        click.echo(f"reproduce:  {again(scenario, seed)}", err=aside)
        return 1
    return 0


def again(scenario: str, seed: int | None) -> str:
    """The command line that shows the same once more."""
    return f"vk-cocoon simulate {scenario}" + (f" --seed {seed}" if seed is not None else "")


def _show(plan: Scenario, seed: int | None, timeline: Timeline, *, err: bool) -> None:
    click.echo(f"{plan.name}: {plan.until:g} s of virtual time, seed {'none' if seed is None else seed}", err=err)
    for entry in timeline:
        if (entry.actor, entry.kind) in TOLD or entry.actor in ("scenario", "invariant"):
            click.echo(entry.text(), err=err)
    for entry in timeline.of(actor="expect"):
        mark = click.style("met   ", fg="green") if entry.kind == "met" else click.style("BROKEN", fg="red")
        why = dict(entry.fields).get("why", "")
        click.echo(f"{mark} {entry.key}{f': {why}' if why else ''}", err=err)
    click.echo(f"digest:     {timeline.digest()}", err=err)
