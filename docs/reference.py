"""Makes the pages that say what the code says: commands, metrics, reasons, and the picture of the timing contract.

    python docs/reference.py            writes them (`make docs`)
    python docs/reference.py --check    says which are stale, and ends with 1 if any is

The picture is a run of the simulator in virtual time, so it shows what the probe loop does and not what somebody
believes it does.
"""

from gevent import monkey

monkey.patch_all()

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

import vkcocoon_cli
from simulator.fake_vms import GuestSpec
from simulator.world import World
from vkcocoon_http import Metrics
from vkcocoon_probes import SystemClock, deaths
from vkcocoon_status import MEANING, Reason

HERE = Path(__file__).resolve().parent
MADE = "<!-- Made by `make docs`; edit {} instead. -->"
WIDTH = 100


# Commands ---------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """docs/commands.md."""
    lines = [
        "# Commands",
        "",
        MADE.format("the commands in vkcocoon_cli.py and vkcocoon_inspection.py"),
        "",
        "Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 failed, 2 wrong usage, 70 an error of",
        "vk-cocoon's own, 78 a setting that cannot be right, 130 ended by Ctrl-C.",
    ]
    root = click.Context(vkcocoon_cli.cli, info_name="vk-cocoon", terminal_width=WIDTH, max_content_width=WIDTH)
    for name, command in vkcocoon_cli.cli.commands.items():
        context = click.Context(command, info_name=name, parent=root, terminal_width=WIDTH, max_content_width=WIDTH)
        text = command.get_help(context)
        lines += ["", f"## {name}", "", "```", *(line.rstrip() for line in text.splitlines()), "```"]
    return "\n".join(lines) + "\n"


# Metrics ----------------------------------------------------------------------------------------------------------

# What a label can say; a label that is missing here is an error, so that none is left unexplained.
LABELS = {
    "version": "of vk-cocoon",
    "python": "that runs it",
    "os": "linux, windows, macos, other",
    "ready": "true, false",
    "reason": "see [reasons](reasons.md)",
    "kind": "icmp, tcp, ssh",
    "to": "ready, not_ready",
    "op": "create, update, delete",
    ("probe_duration_seconds", "result"): "ready, not_ready",
    ("lease_lookups", "result"): "found, missing, conflict, unreadable",
    ("lease_release", "result"): "ok, failed",
    ("status_writes", "result"): "ok, failed, gone (the pod is no longer there), unchanged (the API held it)",
    ("qemu_restarts", "result"): "ok, failed",
    ("notify", "result"): "delivered, superseded (a newer state went instead), dropped (the pod is gone)",
    ("vm_restarts", "result"): "ok, failed",
    ("postclone", "kind"): "linux_static, linux_fc, windows",
    ("postclone", "result"): "ok, failed",
    ("evictions", "reason"): "of the container's end",
    ("stale_create_reconcile", "outcome"): "what cocoon made of it: collected, busy, not-creating, not-found, error",
    ("pod_lifecycle", "result"): "ok, failed, skipped",
    ("pod_lifecycle", "reason"): "the kind of error",
    ("watch_reconnects", "reason"): "ended (as planned), expired (history gone), error",
}


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        MADE.format("the class Metrics in vkcocoon_http.py"),
        "",
        "Served on `VK_METRICS_ADDR` under `/metrics`, in base units. No pod and no VM ever becomes a label; which pod",
        "it is, `vk-cocoon status` and the status page say. [packaging/alerts.yml](../packaging/alerts.yml) has alerts",
        "on them.",
        "",
        "| metric | type | labels | what it is |",
        "|---|---|---|---|",
    ]
    for name, kind, labels, text in sorted(_families()):
        shown = f"`{name}_total`" if kind == "counter" else f"`{name}`"
        lines.append(f"| {shown} | {kind} | {'; '.join(_label(name, label) for label in labels)} | {text} |")
    return "\n".join(lines) + "\n"


def _families() -> Iterator[tuple[str, str, Sequence[str], str]]:
    metrics = Metrics("0")
    metrics.leases_from("/none", SystemClock())
    metrics.greenlet_errors_from(deaths)
    for collector in list(metrics.registry._collector_to_names):
        for family in collector.collect():
            owner: Any = collector if hasattr(collector, "_labelnames") else family
            yield family.name, family.type, owner._labelnames, family.documentation


def _label(name: str, label: str) -> str:
    short = name.removeprefix("cocoon_vk_")
    said = LABELS.get((short, label)) or LABELS.get(label)
    if said is None:
        raise SystemExit(f"docs/reference.py: say in LABELS what the label {label} of {name} can be")
    return f"`{label}`: {said}"


# Reasons ----------------------------------------------------------------------------------------------------------


def reasons_page() -> str:
    """docs/reasons.md."""
    lines = [
        "# Reasons",
        "",
        MADE.format("Reason and MEANING in vkcocoon_status.py"),
        "",
        "One vocabulary: the same word is the reason of a pod's conditions, stands in its Events and in the log, is a",
        "label of the metrics, and is what `vk-cocoon status`, `vk-cocoon probe` and the status page show.",
        "[Why is my pod not ready?](not-ready.md) says for each what to look at.",
        "",
        "| reason | meaning |",
        "|---|---|",
    ]
    lines += [f"| [`{reason}`](not-ready.md#{reason.lower()}) | {MEANING[reason]} |" for reason in Reason]
    return "\n".join(lines) + "\n"


# The timing contract ----------------------------------------------------------------------------------------------

END_S = 60.0
UP = ((3.0, 20.0), (40.0, END_S))  # when the guest answers
LEFT, RIGHT, TOP = 96, 24, 56
CHART = 860
LANE, GAP = 30, 26
STYLE = """
  .paper { fill: #ffffff; } text { font: 13px system-ui, sans-serif; fill: #1b1f24; } .dim { fill: #656d76; }
  .title { font-size: 15px; font-weight: 600; } .rail { fill: #eaeef2; } .up { fill: #1a7f37; } .down { fill: #cf222e; }
  text.on { fill: #ffffff; } .grid { stroke: #d8dee4; } .tick-up { stroke: #1a7f37; stroke-width: 1.6; }
  .tick-down { stroke: #cf222e; stroke-width: 1.6; } .mark { stroke: #1b1f24; stroke-dasharray: 3 3; }
"""


def timing_picture() -> str:
    """docs/timing.svg: the whole minute above, its first four seconds below."""
    probes, flips = _minute()
    width, height = LEFT + CHART + RIGHT, 412
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        *_chart(
            TOP, 0.0, END_S, 10.0, "One minute: the guest answers from 3 s to 20 s and from 40 s on", probes, flips
        ),
        *_chart(TOP + 196, 0.0, 4.0, 0.5, "Its first four seconds: pauses of 100 ms that grow to 1 s", probes, flips),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _minute() -> tuple[list[tuple[float, bool]], list[tuple[float, bool]]]:
    """Each probe and each flip of that minute, as the simulator runs it: (instant, ready)."""
    with World() as world:
        port = {"vm.cocoonstack.io/probe-port": "8080"}
        world.create_pod("web-0", guest=GuestSpec(boot_s=0.0, lease_s=0.0), annotations=port)
        moments = sorted({moment for span in UP for moment in span} - {END_S})
        for number, moment in enumerate(moments):
            world.run(moment - (moments[number - 1] if number else 0.0))
            guest = world.guest("web-0")
            (guest.open if any(moment == start for start, _ in UP) else guest.close)(8080)
        world.run(END_S - moments[-1])
        probes = [
            (entry.seconds, entry.kind == "ok") for entry in world.timeline.of(actor="probe", key="default/web-0")
        ]
        return probes, world.flips("web-0")


def _chart(
    top: int, start: float, end: float, step: float, title: str, probes: list[tuple[float, bool]], flips: list[Any]
) -> Iterator[str]:
    def x(second: float) -> float:
        return round(LEFT + (second - start) / (end - start) * CHART, 1)

    lanes = [top + number * (LANE + 6) for number in range(3)]
    bottom = lanes[-1] + LANE
    yield f'<text class="title" x="{LEFT}" y="{top - 14}">{title}</text>'
    second = start
    while second <= end:
        yield f'<line class="grid" x1="{x(second)}" x2="{x(second)}" y1="{top - 4}" y2="{bottom + 6}"/>'
        yield f'<text class="dim" x="{x(second)}" y="{bottom + 22}" text-anchor="middle">{second:g} s</text>'
        second += step
    for name, lane in zip(("guest", "probes", "Ready"), lanes, strict=True):
        yield f'<text x="{LEFT - 12}" y="{lane + 20}" text-anchor="end">{name}</text>'
    for lane in (lanes[0], lanes[2]):
        yield f'<rect class="rail" x="{LEFT}" y="{lane}" width="{CHART}" height="{LANE}"/>'
    for begin, finish in UP:
        if begin < end:
            yield _span(x(begin), x(min(finish, end)), lanes[0], "up")
    for at, ready in probes:
        if start <= at <= end:
            kind, high = ("tick-up", 4) if ready else ("tick-down", 12)
            yield f'<line class="{kind}" x1="{x(at)}" x2="{x(at)}" y1="{lanes[1] + high}" y2="{lanes[1] + LANE - 2}"/>'
    ends = [at for at, _ in flips[1:]] + [END_S]
    for (at, ready), finish in zip(flips, ends, strict=True):
        if at < end:
            yield _span(x(at), x(min(finish, end)), lanes[2], "up" if ready else "down", low=not ready)
        if 0 < at < end:
            yield f'<line class="mark" x1="{x(at)}" x2="{x(at)}" y1="{top - 4}" y2="{lanes[2]}"/>'
            ink = "on" if ready else "off"
            yield f'<text class="{ink}" x="{x(at) + 6}" y="{lanes[2] + 18}">{at:.6f} s</text>'


def _span(left: float, right: float, lane: int, kind: str, *, low: bool = False) -> str:
    height = LANE // 4 if low else LANE
    return (
        f'<rect class="{kind}" x="{left}" y="{lane + LANE - height}" width="{round(right - left, 1)}" '
        f'height="{height}"/>'
    )


PAGES = {
    "commands.md": commands_page,
    "metrics.md": metrics_page,
    "reasons.md": reasons_page,
    "timing.svg": timing_picture,
}


def main(arguments: Sequence[str]) -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = HERE / name, make()
        if arguments == ["--check"]:
            stale += [name] if not path.exists() or path.read_text() != text else []
        else:
            path.write_text(text)
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run make docs\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
