"""The simulator finds bugs: each of those that were made before is put back, found, and made small."""

from pathlib import Path

import pytest

from simulator import explore
from simulator.catalog import SCENARIOS
from simulator.scenario import load
from tests import bugs


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_bug_that_is_put_back_is_found_and_made_small(name):
    result = bugs.found(name)
    assert result is not None
    assert result.pods <= 2
    assert result.events <= 4


def test_without_any_of_them_their_scenarios_hold():
    for scenario in sorted({bug.scenario for bug in bugs.BUGS.values()}):
        plan = load(SCENARIOS / f"{scenario}.yaml")
        assert [explore.failure_of(plan.run(seed), seed) for seed in (1, 2)] == [None, None], scenario


def test_a_bug_is_gone_after_its_block():
    plan = load(SCENARIOS / "three-strikes.yaml")
    with bugs.put_back("cumulative_failures"):
        assert explore.failure_of(plan.run(1), 1) is not None
    assert explore.failure_of(plan.run(1), 1) is None


def test_each_can_be_put_back_from_the_command_line():
    for name in bugs.BUGS:
        assert callable(getattr(bugs, name))


def test_the_table_on_the_page_has_them_all():
    page = (Path(__file__).parent.parent / "docs" / "simulator.md").read_text()
    table = page.partition(bugs.BEGIN)[2].partition(bugs.END)[0]
    assert all(f"| {bug.text} | {bug.scenario} |" in table for bug in bugs.BUGS.values())
    assert len(bugs.BUGS) >= 10
