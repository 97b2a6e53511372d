"""A run as one page: `page` draws the lanes of simulator.lanes as SVG, in a file that needs nothing else.

No script, no font, no picture from elsewhere: it can be mailed, attached to a bug report and opened in ten years. What
a thing is exactly stands in its title, which browsers show when one points at it; everything is in the log below, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape

from simulator.lanes import Lane, Mark, Picture, Section, Span, Verdict, nice_step
from simulator.timeline import Timeline
from simulator.values import time_text
from vkcocoon_record import Entry

__all__ = ["page"]

LEFT, RIGHT = 92, 24  # room for the names of lanes, and after the end
ROW, BAR, TOP, BRACKET = 26, 16, 24, 20
LEAST_WIDTH, MOST_WIDTH, PER_SECOND = 1000, 6000, 12
LETTER = 6.4  # width of a letter in the small type
MOST_LOG = 3000

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #fff; --good: #2da44e;
  --bad: #cf222e; --wait: #bf8700; --off: #8250df; --plain: #54aeff; --event: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --ink: #f0f6fc; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
  --good: #3fb950; --bad: #f85149; --wait: #d29922; --off: #ab7df8; --plain: #4493f8; --event: #f0f6fc; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 24px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 22px 0 4px; }
p, table { margin: 4px 0; } .soft { color: var(--soft); } code, pre, td.at { font: 12.5px/1.5 ui-monospace, monospace; }
.lanes { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
svg { display: block; } svg text { font: 11px ui-monospace, monospace; fill: var(--ink); }
svg .name { font-size: 12px; fill: var(--soft); } svg .on { fill: #fff; } svg .tick { stroke: var(--line); }
svg .axis { fill: var(--soft); } td { padding: 1px 14px 1px 0; vertical-align: top; text-align: left; }
.met { color: var(--good); } .broken { color: var(--bad); font-weight: 600; } pre { white-space: pre-wrap; }
"""
CLASSES = {"met": "met", "broken": "broken", "not reached": "soft"}
for _tone in ("good", "bad", "wait", "off", "plain", "event"):
    STYLE += f".s-{_tone} {{ fill: var(--{_tone}); }} .m-{_tone} {{ stroke: var(--{_tone}); }}\n"


def page(timeline: Timeline, *, title: str, end: float, command: str) -> str:
    """The page about a run that ended at ``end`` seconds; ``command`` shows it again."""
    picture = Picture.of(timeline, end)
    return "\n".join(_page(picture, timeline, title, command)) + "\n"


def _page(picture: Picture, timeline: Timeline, title: str, command: str) -> Iterator[str]:
    kinds = Counter(verdict.kind for verdict in picture.verdicts)
    ending = "<span class=met>everything held</span>"
    if kinds["broken"]:
        ending = f"<span class=broken>{kinds['broken']} broken</span>"
    if kinds["not reached"]:
        ending += f", <span class=soft>{kinds['not reached']} not reached</span>"
    yield f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
    yield '<meta name=viewport content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body>"
    yield f"<h1>{escape(title)}</h1><p>{time_text(picture.end)} of virtual time; {ending}</p>"
    yield f"<p class=soft>Again: <code>{escape(command)}</code><br>{timeline.digest()}</p>"
    yield from _verdicts(picture.verdicts)
    for section in picture.sections:
        yield f"<h2>{escape(section.name or 'The daemon and everything else')}</h2><div class=lanes>"
        yield from _drawing(section, picture.end)
        yield "</div>"
    yield from _log(timeline)
    yield "</body></html>"


def _verdicts(verdicts: Iterable[Verdict]) -> Iterator[str]:
    yield "<table>"
    for verdict in verdicts:
        word = verdict.kind
        why = f"<pre>{escape(verdict.why)}</pre>" if verdict.why else ""
        sign = f"<td class={CLASSES[word]}>{word.upper() if why else word}</td>"
        yield f"<tr>{sign}<td>{escape(verdict.text)}{why}</td></tr>"
    yield "</table>"


# One pod --------------------------------------------------------------------------------------------------------------


def _drawing(section: Section, end: float) -> Iterator[str]:
    width = min(MOST_WIDTH, max(LEAST_WIDTH, round(end * PER_SECOND)))
    timed = [verdict for verdict in section.verdicts if verdict.end is not None]
    height = TOP + ROW * len(section.lanes) + BRACKET * len(timed) + (4 if timed else 0)
    scale = _Scale(end, width)
    names = ", ".join(lane.name for lane in section.lanes)
    label = escape(f"{section.name or 'the daemon'}: {names}", quote=True)
    yield f'<svg width="{width + LEFT + RIGHT}" height="{height}" role="img" aria-label="{label}">'
    yield from _axis(scale, height)
    for index, lane in enumerate(section.lanes):
        yield from _lane(lane, TOP + ROW * index, scale)
    for index, verdict in enumerate(timed):
        yield from _bracket(verdict, TOP + ROW * len(section.lanes) + BRACKET * index, scale)
    yield "</svg>"


class _Scale:
    def __init__(self, end: float, width: int) -> None:
        self.end, self.width = end, width

    def x(self, at: float) -> float:
        return round(LEFT + (at / self.end if self.end else 0.0) * self.width, 1)


def _axis(scale: _Scale, height: int) -> Iterator[str]:
    step = nice_step(scale.end, scale.width / 70)
    count = int(scale.end / step) + 1
    for n in range(count):
        x = scale.x(n * step)
        yield f'<line class=tick x1="{x}" x2="{x}" y1="18" y2="{height}"/>'
        yield f'<text class=axis x="{x + 2}" y="14">{time_text(n * step)}</text>'


def _lane(lane: Lane, y: int, scale: _Scale) -> Iterator[str]:
    yield f'<text class=name x="8" y="{y + 13}">{escape(lane.name)}</text>'
    for span in lane.spans:
        yield _span(span, y, scale)
    for mark in lane.marks:
        yield _mark(mark, y, scale)
    yield from _labels(lane, y, scale)


def _span(span: Span, y: int, scale: _Scale) -> str:
    begin, end = scale.x(span.begin), scale.x(span.end)
    width = max(1.5, round(end - begin, 1))
    title = escape(f"{span.label}, {time_text(span.begin)} to {time_text(span.end)}")
    bar = f'<rect class=s-{span.tone} x="{begin}" y="{y}" width="{width}" height="{BAR}" rx="2"/>'
    shown = ""
    if width > len(span.label) * LETTER + 8:
        shown = f'<text class=on x="{begin + 4}" y="{y + 12}">{escape(span.label)}</text>'
    return f"<g><title>{title}</title>{bar}{shown}</g>"


def _mark(mark: Mark, y: int, scale: _Scale) -> str:
    x, title = scale.x(mark.at), escape(f"{time_text(mark.at)}: {mark.label}")
    top = y if mark.tone == "bad" else y + 4
    line = f'<line class=m-{mark.tone} stroke-width="1.6" x1="{x}" x2="{x}" y1="{top}" y2="{y + BAR}"/>'
    return f"<g><title>{title}</title>{line}</g>"


def _labels(lane: Lane, y: int, scale: _Scale) -> Iterator[str]:
    """Words beside the marks of what happens, as long as there is room for them."""
    if lane.name not in ("happens", "broken"):
        return
    marks = [mark for mark in lane.marks if mark.tone != "plain"]
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        x = scale.x(mark.at)
        room = (scale.x(following.at) if following else LEFT + scale.width + RIGHT) - x - 8
        letters = int(room / LETTER)
        if letters >= 4:
            shown = mark.label if len(mark.label) <= letters else f"{mark.label[: letters - 1]}…"
            yield f'<text x="{x + 4}" y="{y + 12}">{escape(shown)}</text>'


def _bracket(verdict: Verdict, y: int, scale: _Scale) -> Iterator[str]:
    """The time an expectation is about, with what became of it."""
    begin, end = scale.x(verdict.begin or 0.0), scale.x(min(verdict.end or 0.0, scale.end))
    tone, sign = {"met": ("good", "✓"), "broken": ("bad", "✗")}.get(verdict.kind, ("plain", "…"))
    title = escape(f"{verdict.kind}: {verdict.text}")
    path = f"M{begin},{y + 11} v4 H{max(end, begin + 1)} v-4"
    letters = int((LEFT + scale.width + RIGHT - begin) / LETTER) - 3
    label = verdict.text if len(verdict.text) <= letters else f"{verdict.text[: max(0, letters - 1)]}…"
    shown = f'<text x="{begin + 4}" y="{y + 11}" class=s-{tone}>{sign} {escape(label)}</text>'
    yield f'<g><title>{title}</title><path class=m-{tone} fill="none" stroke-width="1.4" d="{path}"/>{shown}</g>'


# The log --------------------------------------------------------------------------------------------------------------


def _log(timeline: Timeline) -> Iterator[str]:
    entries = [entry for entry in timeline if entry.actor != "expect"]
    shown = entries[:MOST_LOG]
    more = f", the first {MOST_LOG} of them" if len(shown) < len(entries) else ""
    yield f"<h2>The log</h2><details><summary>{len(entries)} entries{more}</summary><table>"
    for entry in shown:
        yield _log_row(entry)
    yield "</table></details>"


def _log_row(entry: Entry) -> str:
    fields = " ".join(f"{name}={value}" for name, value in entry.fields if value not in ("", None))
    cells = (f"{entry.seconds:.6f}", f"{entry.actor} {entry.kind}", entry.key, fields)
    return f"<tr>{''.join(f'<td class=at>{escape(cell)}</td>' for cell in cells)}</tr>"
