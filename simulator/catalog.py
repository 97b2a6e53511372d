"""What the shipped scenarios are about: `python -m simulator.catalog docs/simulator.md` renews the map on that page.

A scenario begins with a comment that says what happens and what is right, with the clauses and decisions it holds the
daemon to in brackets. The map on the page is made of these comments, so a scenario without one cannot be shipped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SCENARIOS", "SECTIONS", "about", "renewed", "table"]

BEGIN, END = "<!-- made by python -m simulator.catalog -->\n", "<!-- end -->\n"
SCENARIOS = Path(__file__).parent / "scenarios"

# The map's sections, each with the scenarios in it; a test wants every shipped one in exactly one place.
SECTIONS: dict[str, tuple[str, ...]] = {
    "The contract": (
        "oracle", "fast-guest", "slow-guest", "three-strikes", "ready-needs-both", "intent-without-probe",
        "status-first", "probe-port", "static-address", "degraded", "three-guests", "sizes", "tour", "tour-on-loopback",
    ),
    "Leases and addresses": (
        "lease-moves", "lease-moves-in-a-wake", "lease-expires", "lease-comes-late", "lease-file-appears",
        "lease-file-blinks",
        "lease-file-odd-writes", "lease-file-says-none", "dhcp-daemon-dead", "dhcp-daemon-forgets", "addresses-swap",
        "addresses-swap-at-the-wrong-moment", "clones-fight",
    ),
    "Echoes, ports and banners": (
        "dead-among-living", "noise", "late-echo", "lossy-line", "answers-late", "blip", "macos-cold-boot",
        "macos-probe-port", "macos-says-something-else",
    ),
    "QEMU": (
        "qemu-crash", "qemu-crash-loop", "qemu-lookalikes", "qemu-slow-start", "qemu-crash-while-deleted",
        "qemu-second", "guests-reboot",
    ),
    "Commands and VMs": (
        "commands-fail", "clone-killed-halfway", "events-break", "vm-vanishes", "deleted-while-cloned",
        "hibernate-and-wake", "tools-of-another-kind",
    ),
    "What the cluster is told": (
        "api-outage", "api-slow", "api-refuses", "api-forgets", "api-silent-watch", "api-down-at-birth",
        "api-stale-lists", "rejected-status", "somebody-else-writes",
    ),
    "Whose pod it is": ("namesake", "delete-in-flight", "wake-then-updates", "not-ours", "not-managed"),
    "Restarts and clocks": (
        "restart", "killed-while-healthy", "killed-in-a-create", "killed-in-a-delete", "killed-in-a-hibernation",
        "hibernated-over-a-restart", "deleted-while-away", "died-while-away", "wall-clock",
    ),
}  # fmt: skip


def about(name: str) -> str:
    """The comment a shipped scenario begins with, as one line."""
    lines = (SCENARIOS / f"{name}.yaml").read_text().splitlines()
    head = [line for line, _ in zip(lines, _while_comment(lines), strict=False)]
    return " ".join(re.sub(r"^# ?", "", line) for line in head)


def _while_comment(lines: list[str]) -> Iterator[None]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield None


def table() -> str:
    """The map: what happens and what is right, and the name of the scenario."""
    parts = []
    for section, names in SECTIONS.items():
        rows = [f"| {about(name)} | [{name}](../simulator/scenarios/{name}.yaml) |" for name in names]
        parts.append(
            "\n".join([f"### {section}", "", "| what happens, and what is right | scenario |", "| --- | --- |", *rows])
        )
    return "\n\n".join(parts) + "\n"


def renewed(page: str) -> str:
    """The page with the map as it is now between its two marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}{table()}{end}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
