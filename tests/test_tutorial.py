"""The tutorial: what it types works and prints what it shows, and the scenario it ends with is shipped."""

from pathlib import Path

import pytest
import yaml

from simulator.catalog import SCENARIOS
from tests import tutorial

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
SHIPPED = SCENARIOS / "lease-moves-in-a-wake.yaml"


@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_commands_of_the_tutorial_print_what_it_shows():
    page = PAGE.read_text()
    assert tutorial.renewed(page, quick=True) == page, "python -m tests.tutorial docs/tutorial.md"


def test_the_report_takes_twelve_lines_and_ends_as_a_shipped_scenario():
    (text,) = tutorial.files(PAGE.read_text()).values()
    assert len(text.splitlines()) == 12
    shipped = yaml.safe_load(SHIPPED.read_text())
    assert {key: shipped[key] for key in ("until", "pods", "events", "expect")} == yaml.safe_load(text)
