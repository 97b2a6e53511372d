"""The pages: what is made from the code is fresh, what is quoted exists, and what is to be typed works (S5.4)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vkcocoon_cli
from vkcocoon_settings import SETTINGS
from vkcocoon_status import MEANING, Reason

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
GENERATED = {"commands.md", "configuration.md", "metrics.md", "reasons.md", "scenarios.md"}


@pytest.mark.process
def test_the_pages_made_from_the_code_are_fresh():
    command = [sys.executable, DOCS / "reference.py", "--check"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert ended.returncode == 0, ended.stderr.splitlines()[-1]


class TestReference:
    def test_each_reason_has_a_meaning(self):
        assert set(MEANING) == set(Reason)
        assert all(text.endswith(".") and text[0].isupper() for text in MEANING.values())

    def test_each_command_has_its_section(self):
        sections = re.findall(r"^## (\S+)$", (DOCS / "commands.md").read_text(), re.MULTILINE)
        assert sections == list(vkcocoon_cli.cli.commands)

    def test_each_metric_that_a_page_names_exists(self):
        known = set(re.findall(r"^\| `(cocoon_vk_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
        for page in PAGES:
            for name in re.findall(r"cocoon_vk_\w+[a-z]", page.read_text()):
                assert name in known, f"{page.name}: {name}"

    def test_each_variable_that_a_page_names_is_a_setting_or_said_to_be_none(self):
        known = {row.env for row in SETTINGS} | {"VK_STAGING_DIR", "VK_PEER_ADDR", "VK_COCOON_SNAPSHOT_DIR"}
        for page in PAGES:
            for name in re.findall(r"\bVK_[A-Z_]+[A-Z]\b", page.read_text()):
                assert name in known or name.startswith("VK_NODE_NMAE"), f"{page.name}: {name}"


class TestTests:
    def test_each_test_that_a_page_names_exists(self):
        missing = []
        for page in PAGES:
            for file, name in re.findall(r"`((?:e2e/)?test_\w+\.py)::(test_\w+)`", page.read_text()):
                if not re.search(rf"^ *def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE):
                    missing.append(f"{page.name}: {file}::{name}")
        assert missing == []

    def test_each_scenario_is_on_the_page_about_kubernetes_once_and_shown_where_it_says(self):
        """N1 to N18, P1 to P35, H1 to H17: each is a row, or is said not to be supported."""
        text = (DOCS / "kubernetes.md").read_text()
        rows = re.findall(r"^\| ([NPH]\d[^|]*) \|.*\| ([^|]*) \|$", text, re.MULTILINE)
        (absent,) = re.findall(r"^(H\d.*) are about `exec`", text, re.MULTILINE)
        numbers = [number for row, _ in rows for number in spelled_out(row)] + spelled_out(absent)
        wanted = [f"{kind}{n}" for kind, last in (("N", 18), ("P", 35), ("H", 17)) for n in range(1, last + 1)]
        assert sorted(numbers) == sorted(wanted)
        e2e = "\n".join(path.read_text() for path in (ROOT / "tests" / "e2e").glob("test_*.py"))
        run = set(re.findall(r"^def test_([NPH]\d+)_", e2e, re.MULTILINE))
        for row, shown in rows:
            places = shown.split(", ")
            if places == ["e2e"]:
                assert set(spelled_out(row)) <= run, row
            elif "e2e" in places:
                assert set(spelled_out(row)) & run, row
            for place in set(places) - {"e2e", "traces"}:
                assert (ROOT / place).is_file(), f"{row}: {place}"
        assert run <= set(wanted)


def spelled_out(text: str) -> list[str]:
    """N1, N5 to N7 and N9: the numbers one by one."""
    found = []
    for kind, first, last in re.findall(r"([NPH])(\d+)(?: to [NPH](\d+))?", text):
        found += [f"{kind}{n}" for n in range(int(first), int(last or first) + 1)]
    return found


def typed(page: Path) -> list[str]:
    """The command lines of a page's blocks."""
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines]


class TestTyped:
    @pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
    def test_each_command_of_ours_that_a_page_types_is_understood(self, page):
        """Every option a page names is one of that command's; nothing is run."""
        for line in typed(page):
            words = line.split()
            if not words or Path(words[0]).name != "vk-cocoon" or len(words) < 2 or words[1].startswith("-"):
                continue
            command = vkcocoon_cli.cli.commands.get(words[1])
            assert command is not None, f"{page.name}: {line}"
            options = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            for word in words[2:]:
                if re.match(r"--?[a-z]", word):
                    assert word.partition("=")[0] in options, f"{page.name}: {line}"

    def test_the_files_that_the_installation_copies_are_shipped(self):
        text = (DOCS / "installation.md").read_text()
        for name in re.findall(r"(?:install|apply) .*?([\w.-]+\.(?:service|env\.example|yaml))", text):
            assert (ROOT / "packaging" / name).is_file(), name

    def test_each_make_target_that_a_page_types_exists(self):
        targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for page in PAGES:
            for line in typed(page):
                if line.startswith("make "):
                    assert line.split()[1] in targets, f"{page.name}: {line}"
