"""The page about a run: complete, self-contained, safe to open, and really drawn by a browser."""

import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser

import pytest

from simulator import lanes, report
from simulator.lanes import Picture
from simulator.scenario import load, run_scenario
from simulator.simulate import Options, again, main

STORY = {
    "name": "a <b>bold</b> & dangerous name",
    "until": "60s",
    "pods": [
        {"name": "web-0", "guest": {"boot": "1s", "lease": "100ms"}},
        {"name": "mac-0", "os": "macos", "guest": {"boot": "2s", "lease": "1s", "ssh_after": "2s"}},
    ],
    "events": [
        {"at": "20s", "silent": "web-0"},
        {"at": "30s", "banner": {"pod": "mac-0", "text": "<script>alert(1)</script>"}},
        {"at": "50s", "for": "5s", "daemon": "kill"},
    ],
    "expect": [
        {"pod": "web-0", "ready": True, "by": "5s"},
        {"pod": "web-0", "ready": False, "after": "20s", "by": "25s"},
    ],
}


@pytest.fixture(scope="module")
def timeline():
    return run_scenario(STORY)


@pytest.fixture(scope="module")
def html(timeline):
    return report.page(timeline, title=STORY["name"], end=60.0, command="vk-cocoon simulate x.yaml")


class Reader(HTMLParser):
    """Tags with their attributes, and whether they are closed in the order they were opened."""

    VOID = {"meta", "br", "rect", "line", "path"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_every_tag_is_closed(html):
    assert Reader(html).open == []


def test_it_needs_nothing_from_elsewhere_and_runs_nothing(html):
    tags = Reader(html).tags
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    names = {name for _, attributes in tags for name in attributes}
    assert not {"src", "href", "xlink:href"} & names
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", html)


def test_what_a_scenario_says_is_shown_and_not_obeyed(html):
    assert "<b>bold" not in html
    assert "a &lt;b&gt;bold&lt;/b&gt; &amp; dangerous name" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_each_pod_has_its_lanes(timeline):
    sections = {section.name: [lane.name for lane in section.lanes] for section in Picture.of(timeline, 60.0).sections}
    all_lanes = ["happens", "lease", "address", "probes", "probe", "intent", "Ready", "pushes", "commands"]
    assert sections == {"": ["daemon", "happens", "commands"], "default/mac-0": all_lanes, "default/web-0": all_lanes}


def lane(timeline, name, section="default/web-0"):
    (found,) = [each for each in Picture.of(timeline, 60.0).sections if each.name == section]
    return next(each for each in found.lanes if each.name == name)


def test_a_lane_is_what_kubernetes_held_and_when(timeline):
    spans = [(round(span.begin, 2), span.label, span.tone) for span in lane(timeline, "Ready").spans]
    assert [(label, tone) for _, label, tone in spans] == [
        ("False LifecycleCreating", "bad"),
        ("False LeaseFileUnreadable", "bad"),
        ("True ProbeSucceeded", "good"),
        ("False PingTimeout", "bad"),
    ]
    assert lane(timeline, "Ready").spans[-1].end == 60.0
    assert [span.label for span in lane(timeline, "intent").spans] == ["creating", "ready"]


def test_every_probe_is_a_mark_with_its_reason(timeline):
    probes = timeline.of(actor="probe", key="default/web-0")
    marks = lane(timeline, "probes").marks
    assert [mark.at for mark in marks] == [entry.seconds for entry in probes]
    assert "PingTimeout after 3s" in {mark.label for mark in marks}


def test_a_killed_daemon_is_a_gap(timeline):
    assert [(span.begin, span.end) for span in lane(timeline, "daemon", "").spans] == [(0.0, 50.0), (55.0, 60.0)]


def test_expectations_are_marked_where_they_belong(timeline, html):
    (section,) = [each for each in Picture.of(timeline, 60.0).sections if each.name == "default/web-0"]
    assert [(verdict.kind, verdict.begin, verdict.end) for verdict in section.verdicts] == [
        ("met", 0.0, 5.0),
        ("broken", 20.0, 25.0),
    ]
    assert "✓ pod=web-0 ready=True by=5s" in html
    assert "✗ pod=web-0 ready=False after=20s by=25s" in html
    assert "1 broken" in html


def test_the_log_is_whole(timeline, html):
    rows = [tag for tag, attributes in Reader(html).tags if attributes.get("class") == "at"]
    assert len(rows) == 4 * len([entry for entry in timeline if entry.actor != "expect"])


def test_lanes_in_characters_fit_the_terminal(timeline):
    text = lanes.text(Picture.of(timeline, 60.0), columns=90)
    lines = text.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("met", "BROKEN"))) <= 100
    ready = next(line for line in lines[lines.index("default/web-0") :] if line.strip().startswith("Ready"))
    assert re.search(r"x+=ProbeSucceeded=+x+", ready)
    assert "BROKEN pod=web-0 ready=False after=20s by=25s" in text


def test_a_picture_of_no_time_can_be_drawn():
    timeline = run_scenario({"until": "1ms", "pods": [{"name": "web-0"}]})
    assert "default/web-0" in report.page(timeline, title="x", end=0.0, command="")
    assert lanes.text(Picture.of(timeline, 0.0))


def test_the_command_writes_the_page_and_shows_the_lanes(tmp_path, capsys):
    page, path = tmp_path / "run.html", tmp_path / "s.yaml"
    path.write_text("until: 5s\npods: [{name: web-0}]\n")
    assert main(str(path), report=str(page), timeline=True) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "default/web-0\n  happens" in capsys.readouterr().out


def test_a_shipped_scenario_is_called_by_its_name():
    path = load.__globals__["Path"](report.__file__).parent / "scenarios" / "oracle.yaml"
    assert again(str(path), None, Options(until=2.0)) == "vk-cocoon simulate oracle --until 2s"


# In a browser


def pixels(png):
    """Width, height and the set of colors of an 8-bit PNG, without a library."""
    data, place, packed = png.read_bytes(), 8, b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", body[:10])
        packed += body if kind == b"IDAT" else b""
        place += 12 + length
    assert (depth, color) in ((8, 2), (8, 6))
    size = 3 if color == 2 else 4
    raw, stride, colors = zlib.decompress(packed), width * size, set()
    before = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, size)
        colors.update(zip(line[0::size], line[1::size], line[2::size], strict=True))
        before = line
    return width, height, colors


def unfiltered(kind, line, above, size):
    for n in range(len(line)):
        left = line[n - size] if n >= size else 0
        corner = above[n - size] if n >= size else 0
        if kind == 1:
            line[n] = line[n] + left & 255
        elif kind == 2:
            line[n] = line[n] + above[n] & 255
        elif kind == 3:
            line[n] = line[n] + (left + above[n]) // 2 & 255
        elif kind == 4:
            guess = left + above[n] - corner
            nearest = min((left, above[n], corner), key=lambda value: abs(guess - value))
            line[n] = line[n] + nearest & 255
    return line


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_browser_draws_it(html, tmp_path):
    page, picture = tmp_path / "run.html", tmp_path / "run.png"
    page.write_text(html, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars", "--window-size=900,900"]
    command += [f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=50)
    width, height, colors = pixels(picture)
    assert (width, height) == (900, 900)
    # Good, bad and waiting, as the style sheet has them: the lanes are there.
    assert {(0x2D, 0xA4, 0x4E), (0xCF, 0x22, 0x2E), (0xBF, 0x87, 0x00), (0x54, 0xAE, 0xFF)} <= colors
