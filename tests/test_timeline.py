"""The event log: each line says when, and two runs can be told apart by the first line in which they differ."""

import json

import pytest

from simulator.clock import VirtualClock
from simulator.scenario import run_scenario
from simulator.timeline import Timeline
from vkcocoon_record import Entry


def test_no_field_hides_what_every_line_has():
    with pytest.raises(ValueError, match="must not be called us"):
        Entry(5, "a", "b", "c", (("us", 7),)).line()


def test_the_lines_of_a_run_are_in_the_order_of_their_instants():
    timeline = run_scenario({"until": "20s", "pods": [{"name": "web-0"}, {"name": "mac-0", "os": "macos"}]}, 3)
    instants = [json.loads(entry.line())["us"] for entry in timeline]
    assert instants == sorted(instants)
    assert instants == [entry.at_us for entry in timeline]


def test_two_runs_differ_where_they_first_differ():
    def timeline(*kinds):
        clock = VirtualClock()
        made = Timeline(clock)
        for kind in kinds:
            made.record("actor", kind, "key")
        return made

    assert timeline("a", "b").first_difference(timeline("a", "b")) == ""
    assert "actor    b" in timeline("a", "b").first_difference(timeline("a", "c"))
    assert timeline("a").first_difference(timeline("a", "c")).startswith("one run ends, the other goes on")
    assert timeline("a", "b").digest() != timeline("a", "c").digest()


def test_a_listener_hears_of_every_entry():
    timeline, heard = Timeline(VirtualClock()), []
    timeline.listeners.append(heard.append)
    timeline.record("actor", "kind", "key", {"field": 1})
    assert heard == list(timeline)
