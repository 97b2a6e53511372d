"""docs/scenarios.md, made from the tables the language is read by: `python -m simulator.reference > docs/scenarios.md`.

A test fails when the page is older than the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

import vkcocoon  # noqa: F401  before the rest: it makes the process cooperative

# isort: split
from simulator import expectations, happenings, observations, scenario
from simulator.document import Parameter
from simulator.invariants import RULES
from simulator.values import time_text

__all__ = ["page"]

INTRODUCTION = """\
# Scenario files

What a scenario may say, key by key. `vk-cocoon simulate FILE` runs it in virtual time; what that is good for, and how
to get from a bug report to a scenario, is in [simulator.md](simulator.md).

This page is made from the code that reads the files (`make docs`); edits belong there.

```yaml
version: 1
name: the lease moves while the guest hangs
until: 2m
pods:
  - {name: default/web-0, os: linux, guest: {boot: 1s..3s, lease: 500ms}}
events:
  - {id: hang, at: 20s, for: 30s, silent: default/web-0}
  - {when: {pod: default/web-0, sees: probe fails, nth: 2}, lease: {pod: default/web-0, ip: 10.88.0.200}}
expect:
  - {pod: default/web-0, ready: true, by: 6s}
  - {pod: default/web-0, ready: false, after: hang, within: 24s}
  - {pod: default/web-0, flips: 3}
```

Anything that is not on this page is refused, with file, line and a suggestion. Files of the YAML you know, with one
addition: a key that stands twice is an error.

## Values

- A time is a number with a unit, exact to the microsecond: `3.078125s`, `500ms`, `1m30s`. It counts from the start.
- Where the tables say so, a value may be drawn by the seed: a range (`1s..3s`) or a weighted choice
  (`{one_of: [{value: 1s, weight: 9}, {value: 30s..60s, weight: 1}]}`; a weight that is not given is 1). Each pod, each
  key and each event draws from a stream of its own, so that adding one does not change the others. Without a seed a
  range is its beginning and a choice its heaviest branch.
- A pod without a namespace is in `default`.

Without a seed, nothing takes time that was not asked to, and simultaneous things happen in the order they were set.
With one, every call, packet and message takes a little (`jitter`), and the order of what happens at one instant is
drawn.
"""

EVENTS = """\
## Events

Each entry of `events` says when, and exactly one thing that happens. Its parts may be written out as a mapping; a
single value is that of the first part, and `true` stands for none. What has a star lasts, and may be given a duration
with `for`.
"""

TRIGGER = """\
`when` makes an event follow something that is seen, so that a race is hit every time. An event whose moment never
comes, or that finds no guest to happen to, fails the run: a fault that missed its window has proved nothing.
"""

EXPECT = """\
## Expectations

Each entry of `expect` is of one of these kinds; the key in the title tells which. An *instant* is a time, or the `id`
of an event and means the moment that happened. `note` is for people, in every kind.
"""

SEEN = """\
## What can be seen

The words of `when`, `never`, `count` and `order`. What stands in brackets may be left out.
"""

ALWAYS = """\
## What always must hold

No expectation has to ask for these; they are watched in every run.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield INTRODUCTION
    yield f"## A scenario\n\n{_table(scenario.SCENARIO)}"
    yield "Besides these, the lists `pods`, `events` and `expect`.\n"
    yield f"## Pods\n\n{_table(scenario.PODS)}"
    yield f"And `guest`, what happens inside its VM:\n\n{_table(scenario.GUEST)}"
    yield EVENTS
    yield _table(scenario.EVENT)
    yield TRIGGER
    yield _table(scenario.WHEN_SEEN)
    for section, rows in groupby(happenings.HAPPENINGS.values(), key=lambda row: row.section):
        yield f"### {section}\n"
        yield _rows(("event", "what happens", "its parts"), map(_happening, rows))
    yield EXPECT
    for sort in expectations.EXPECTATIONS.values():
        yield f"### {sort.name}\n\n{sort.text}\n"
        yield _table(sort.parameters)
    yield SEEN
    sights = [
        (f"`{' '.join(filter(None, (sight.name, sight.argument)))}`", sight.text) for sight in observations.SIGHTS
    ]
    yield _rows(("observation", "what it is"), sights)
    yield ALWAYS
    yield _rows(("rule", "what it says"), RULES.items())


def _happening(row: happenings.Happening) -> tuple[str, str, str]:
    parts = [f"`{each.name}` {each.text}{_default(each)}: {each.kind.looks}" for each in row.parameters]
    return f"`{row.name}`{'*' if row.lasts else ''}", row.text, "<br>".join(parts)


def _table(parameters: Iterable[Parameter]) -> str:
    rows = [(f"`{each.name}`", f"{each.text}{_default(each)}", each.kind.looks) for each in parameters]
    return _rows(("key", "what it is", "looks like"), rows)


def _default(parameter: Parameter) -> str:
    if parameter.needed:
        return "; needed"
    if parameter.default is None:
        return ""
    value = parameter.default
    shown = str(value).lower() if isinstance(value, bool) else time_text(value) if isinstance(value, float) else value
    return f" (`{shown}`)" if shown != "" else ""


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
