"""docs/lifecycle.md says which test holds what; that each of them is there is asked in test_docs.py."""

from pathlib import Path

from vkcocoon_spec import SpecError
from vkcocoon_watch import COOLDOWN

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "lifecycle.md").read_text()


def test_each_situation_names_what_holds_it():
    rows = [line for line in PAGE.split("## What goes wrong in practice")[1].splitlines() if line.startswith("| ")]
    body = [row for row in rows if not row.startswith(("| situation", "|---"))]
    held = [row for row in body if "::test_" in row]
    assert len(held) >= 80
    assert len(body) - len(held) == PAGE.split("### What cannot happen here")[1].count("\n| ") - 1


def test_the_words_and_numbers_of_the_page_are_those_of_the_code():
    for word in (SpecError.reason, "HibernateNetResizeFailed", "PostCloneExecExhausted", "VMInspectTimeout"):
        assert any(word in path.read_text() for path in TESTS.parent.glob("vkcocoon*.py"))
    assert f"within {COOLDOWN:.0f} s of that" in PAGE
