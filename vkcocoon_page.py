"""The status page: the document of vkcocoon_overview as one HTML page, pure text in and out.

The page loads nothing: no script, no font, no picture. It renews itself every few seconds, reads on a phone and in the
dark, and never says anything by color alone. Whoever opens it wants to know what is wrong, so pods that are not ready
come first, each with the sentence its condition has.

Names and messages come from outside: everything goes through `escape` once, and nothing else puts text into the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from vkcocoon_terminal import DASH, ago, milliseconds

__all__ = ["page", "sparkline"]

Entry = Mapping[str, Any]

RENEW_S = 5
HISTORY_S = 3600.0
WIDTH, HEIGHT = 180, 20  # of a sparkline

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #656d76; --paper: #ffffff; --line: #d8dee4;
  --good: #1a7f37; --bad: #cf222e; --bad-soft: #fff1f0; --none: #eaeef2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #8d96a0; --paper: #0d1117; --line: #30363d;
  --good: #3fb950; --bad: #f85149; --bad-soft: #2a1517; --none: #21262d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .3rem 1.2rem; margin-bottom: 1rem; }
h1 { font-size: 1.35rem; margin: 0; }
h2 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
.dim, th, .sub { color: var(--dim); }
.good { color: var(--good); } .bad { color: var(--bad); }
.sub { display: block; font-size: .82rem; }
.counts b { font-size: 1.35rem; }
.trouble { background: var(--bad-soft); border-left: 3px solid var(--bad); padding: .5rem .8rem; margin: .4rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; font-size: .82rem; white-space: nowrap; }
th, td { padding: .45rem .8rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.mono, code { font-family: ui-monospace, monospace; font-size: .86rem; white-space: nowrap; }
.state { font-weight: 600; white-space: nowrap; }
.why { min-width: 16rem; }
svg { display: block; } .up { fill: var(--good); } .down { fill: var(--bad); } .span { fill: var(--none); }
footer { margin-top: 1.5rem; font-size: .82rem; }
@media (max-width: 44rem) {
  body { padding: 1rem; }
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem 1rem; padding: .7rem 0;
    border-bottom: 1px solid var(--line); }
  td { padding: 0; border: 0; min-width: 0; overflow-wrap: anywhere; }
  td:nth-child(2) { text-align: right; }
  td.why { grid-column: 1 / -1; min-width: 0; }
  svg { max-width: 100%; }
  td[data-head]::before { content: attr(data-head); display: block; color: var(--dim);
    font: .82rem/1.45 system-ui, sans-serif; }
}
"""


def page(document: Entry) -> str:
    """The whole page."""
    now = _instant(document["now"])
    pods = sorted(document["pods"], key=lambda pod: (pod["ready"], pod["namespace"], pod["name"]))
    node = escape(document["node"])
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="refresh" content="{RENEW_S}">',
            f"<title>{_summary(pods)} · {node}</title><style>{STYLE}</style></head><body>",
            f"<header><h1>{node}</h1>{_counts(pods)}",
            f'<span class="dim">vk-cocoon {escape(document["version"])}, up {ago(document["uptime_seconds"])}</span>',
            "</header>",
            *_troubles(document),
            _table(pods, now) if pods else '<p class="dim">No pods are bound to this node.</p>',
            f'<footer class="dim">As of {escape(document["now"])}, renewed every {RENEW_S} s. The same as data: '
            '<a href="status.json">status.json</a>. What a reason means: docs/not-ready.md.</footer>',
            "</body></html>",
            "",
        ]
    )


def _summary(pods: Sequence[Entry]) -> str:
    return f"{sum(pod['ready'] for pod in pods)}/{len(pods)} ready"


def _counts(pods: Sequence[Entry]) -> str:
    ready = sum(pod["ready"] for pod in pods)
    waiting = len(pods) - ready
    parts = [f'<b class="good">{ready}</b> ready']
    parts += [f'<b class="bad">{waiting}</b> not ready'] if waiting else []
    return f'<span class="counts">{" · ".join(parts)}</span>'


def _troubles(document: Entry) -> Iterable[str]:
    """What is wrong with the node itself, in front of its pods."""
    for check in document["checks"]:
        if check["trouble"]:
            yield f'<p class="trouble"><b>{escape(check["name"])}</b>: {escape(check["trouble"])}</p>'
    if document["pinger_degraded"]:
        yield (
            '<p class="trouble"><b>degraded</b>: no raw ICMP socket; guests without a probe port count as ready '
            "as soon as they have an address</p>"
        )


def _table(pods: Iterable[Entry], now: datetime) -> str:
    heads = ("Pod", "Ready", "Why", "Address", "Probe", "Lifecycle", "Last hour")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    rows = "\n".join(_row(pod, now) for pod in pods)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _row(pod: Entry, now: datetime) -> str:
    cells = [
        f"<td>{_named(pod)}</td>",
        f"<td>{_state(pod, now)}</td>",
        f'<td class="why">{_why(pod)}</td>',
        f'<td class="mono" data-head="Address">{escape(pod["ip"]) or DASH}</td>',
        f'<td data-head="Probe">{_probe(pod)}</td>',
        f'<td data-head="Lifecycle">{escape(pod["lifecycle"]) or DASH}{_restarts(pod)}</td>',
        f"<td>{sparkline(pod, now)}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _named(pod: Entry) -> str:
    guest = " · ".join(escape(text) for text in (pod["os"], pod["vm"]) if text)
    return f'<span class="dim">{escape(pod["namespace"])}/</span>{escape(pod["name"])}<span class="sub">{guest}</span>'


def _state(pod: Entry, now: datetime) -> str:
    word, kind = ("Ready", "good") if pod["ready"] else ("Not ready", "bad")
    since = (
        f'<span class="sub">for {ago((now - _instant(pod["since"])).total_seconds())}</span>' if pod["since"] else ""
    )
    return f'<span class="state {kind}">{word}</span>{since}'


def _why(pod: Entry) -> str:
    notes = [] if pod["published"] else ["not yet written to the API"]
    notes += ["being deleted"] if pod["terminating"] and pod["reason"] != "Terminating" else []
    text = "; ".join(part for part in (escape(pod["message"]), *notes) if part)
    return f'{escape(pod["reason"])}<span class="sub">{text}</span>'


def _probe(pod: Entry) -> str:
    way, last = escape(pod["probe"]) or DASH, pod["last_probe"]
    if last is None:
        return f'{way}<span class="sub">not probed</span>'
    found = "answered" if last["ready"] else "failed"
    failures = f", {last['failures']} of {last['failure_threshold']} failures" if last["failures"] else ""
    following = max(0.0, last["next_seconds"])
    text = f"{found} in {milliseconds(last['took_seconds'])}{failures}; next in {following:.1f}s"
    return f'{way}<span class="sub">{text}</span>'


def _restarts(pod: Entry) -> str:
    number = pod["restarts"]
    return f'<span class="sub">{number} restart{"" if number == 1 else "s"}</span>' if number else ""


# Sparklines -------------------------------------------------------------------------------------------------------


def sparkline(pod: Entry, now: datetime) -> str:
    """When the pod was ready within the last hour: a tall bar while it was, a low one while it was not."""
    spans = _spans(pod, now)
    ready_s = sum(end - start for start, end, ready in spans if ready)
    known_s = sum(end - start for start, end, _ in spans)
    changes = len(pod["flips"])
    words = f"{changes} change{'' if changes == 1 else 's'}; ready for {ago(ready_s)} of {ago(known_s)}"
    bars = "".join(_bar(*span) for span in spans)
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{words}</title>'
        f'<rect class="span" y="{HEIGHT - 2}" width="{WIDTH}" height="2"/>{bars}</svg>'
        f'<span class="sub">{words}</span>'
    )


def _spans(pod: Entry, now: datetime) -> list[tuple[float, float, bool]]:
    """Start, end (seconds since an hour ago) and readiness of each stretch in which it did not change."""
    flips = [(HISTORY_S - (now - _instant(flip["at"])).total_seconds(), flip["ready"]) for flip in pod["flips"]]
    created = HISTORY_S - (now - _instant(pod["created"])).total_seconds() if pod["created"] else 0.0
    first = not flips[0][1] if flips else pod["ready"]
    changes = [(min(max(0.0, created), flips[0][0] if flips else HISTORY_S), first), *flips]
    ends = [at for at, _ in changes[1:]] + [HISTORY_S]
    return [
        (max(0.0, at), min(end, HISTORY_S), ready)
        for (at, ready), end in zip(changes, ends, strict=True)
        if end > max(0.0, at)
    ]


def _bar(start: float, end: float, ready: bool) -> str:
    left, width = start / HISTORY_S * WIDTH, max(1.0, (end - start) / HISTORY_S * WIDTH)
    height, kind = (HEIGHT, "up") if ready else (HEIGHT // 4, "down")
    return f'<rect class="{kind}" x="{left:.1f}" y="{HEIGHT - height}" width="{width:.1f}" height="{height}"/>'


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)
