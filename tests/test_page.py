"""The status page: what it says of each pod, what the sparklines show, what cannot get into it, and how it looks."""

import re
import shutil
import struct
import subprocess
import zlib
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from vkcocoon_page import page, sparkline
from vkcocoon_probes import SystemClock
from vkcocoon_window import StatusPage

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
GOOD, BAD = (0x1A, 0x7F, 0x37), (0xCF, 0x22, 0x2E)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def at(minutes_ago):
    return (NOW - timedelta(minutes=minutes_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(name="web-0", *, ready=True, flips=(), created=600, **changes):
    found = {
        "namespace": "default",
        "name": name,
        "uid": f"uid-{name}",
        "created": None if created is None else at(created),
        "os": "linux",
        "vm": f"vk-default-{name}",
        "probe": "icmp",
        "vm_id": "VM1",
        "ip": "10.88.0.23",
        "ready": ready,
        "reason": "ProbeSucceeded" if ready else "PingTimeout",
        "message": "icmp: 10.88.0.23 replies" if ready else "icmp: no reply from 10.88.0.23",
        "lifecycle": "ready",
        "lifecycle_ready": True,
        "probe_ready": ready,
        "probe_reason": "ProbeSucceeded",
        "since": at(12),
        "restarts": 0,
        "terminating": False,
        "published": True,
        "last_probe": {
            "at": at(0),
            "ready": ready,
            "reason": "",
            "message": "",
            "took_seconds": 0.0004,
            "failures": 0,
            "failure_threshold": 3,
            "next_seconds": 3.1,
        },
        "flips": [{"at": at(minutes), "ready": up} for minutes, up in flips],
    }
    return found | changes


def document(*pods, **changes):
    found = {
        "node": "rack1-host7",
        "version": "0.1.0",
        "now": at(0),
        "uptime_seconds": 183900.0,
        "healthy": True,
        "ready": True,
        "pinger_degraded": False,
        "checks": [{"name": "api", "live": False, "trouble": ""}],
        "pods": list(pods),
    }
    return found | changes


class Text(HTMLParser):
    """The words of a page and the tags that could load something."""

    VOID = {"meta"}

    def __init__(self, text):
        super().__init__()
        self.words, self.loads, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        assert tag not in ("script", "link", "iframe", "img", "object", "form")
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        assert tag == "rect"

    def handle_data(self, data):
        self.words.append(data)


def text_of(html):
    return " ".join(" ".join(Text(html).words).split())


class TestPage:
    def test_it_is_well_formed_and_loads_nothing(self):
        parsed = Text(page(document(pod(), pod("web-1", ready=False))))
        assert parsed.open == []
        assert parsed.loads == ["status.json"]
        assert "http" not in page(document(pod())).replace("http-equiv", "")

    def test_it_counts_and_names_what_runs(self):
        text = text_of(page(document(pod(), pod("web-1", ready=False), pod("web-2"))))
        assert "2/3 ready · rack1-host7" in text
        assert "2 ready · 1 not ready" in text
        assert "vk-cocoon 0.1.0, up 2d3h" in text

    def test_pods_that_are_not_ready_come_first_with_their_reason(self):
        text = text_of(page(document(pod("a"), pod("z", ready=False))))
        assert text.index("vk-default-z") < text.index("vk-default-a")
        assert "Not ready for 12m PingTimeout icmp: no reply from 10.88.0.23" in text

    def test_what_is_wrong_with_the_node_stands_above_its_pods(self):
        checks = [{"name": "leases", "live": False, "trouble": "lease file x is empty"}]
        text = text_of(page(document(pod(), checks=checks, pinger_degraded=True)))
        assert text.index("leases : lease file x is empty") < text.index("vk-default")
        assert "no raw ICMP socket" in text

    def test_a_node_without_pods_says_so(self):
        assert "No pods are bound to this node." in text_of(page(document()))

    def test_failures_nobody_sees_yet_and_states_not_yet_written_are_told(self):
        probed = pod()["last_probe"] | {"ready": False, "failures": 2}
        text = text_of(page(document(pod(last_probe=probed, published=False, restarts=2, terminating=True))))
        assert "failed in 0.4ms, 2 of 3 failures; next in 3.1s" in text
        assert "not yet written to the API; being deleted" in text
        assert "2 restarts" in text

    def test_a_pod_that_nobody_probes_is_one_line_like_the_others(self):
        ours = {"probe": "", "ip": "", "vm": "", "lifecycle": "", "since": None, "last_probe": None}
        assert "NotOurs" in text_of(page(document(pod(ready=False, reason="NotOurs", message="", **ours))))

    def test_nothing_from_outside_becomes_markup(self):
        evil = "<script>alert(1)</script>\"'&"
        fields = ("namespace", "name", "os", "vm", "probe", "ip", "reason", "message", "lifecycle")
        html = page(document(pod(**dict.fromkeys(fields, evil)), node=evil, version=evil))
        assert "<script" not in html
        assert text_of(html).count("alert(1)") == len(fields) + 3
        checks = [{"name": evil, "live": True, "trouble": evil}]
        assert "<script" not in page(document(checks=checks))


def bars(found):
    """Kind, left edge and width of each bar, in minutes of the hour."""
    drawn = re.findall(r'class="(up|down)" x="([\d.]+)" y="\d+" width="([\d.]+)"', found)
    return [(kind, round(float(x) / 3), round(float(width) / 3)) for kind, x, width in drawn]


class TestSparkline:
    @pytest.mark.parametrize(
        ("found", "drawn", "words"),
        [
            (pod(), [("up", 0, 60)], "0 changes; ready for 60m of 60m"),
            (pod(ready=False), [("down", 0, 60)], "0 changes; ready for 0s of 60m"),
            (pod(created=30), [("up", 30, 30)], "0 changes; ready for 30m of 30m"),
            (
                pod(created=45, flips=[(40, True), (10, False), (5, True)]),
                [("down", 15, 5), ("up", 20, 30), ("down", 50, 5), ("up", 55, 5)],
                "3 changes; ready for 35m of 45m",
            ),
            (
                pod(flips=[(40, False), (20, True)]),
                [("up", 0, 20), ("down", 20, 20), ("up", 40, 20)],
                "2 changes; ready for 40m of 60m",
            ),
            (pod(ready=False, created=None), [("down", 0, 60)], "0 changes; ready for 0s of 60m"),
        ],
    )
    def test_it_shows_when_the_pod_was_ready(self, found, drawn, words):
        svg = sparkline(found, NOW)
        assert bars(svg) == drawn
        assert f"<title>{words}</title>" in svg

    def test_an_outage_too_short_for_its_width_is_seen_all_the_same(self):
        (_, outage, _) = bars(sparkline(pod(flips=[(10, False), (9.9, True)]), NOW))
        assert outage[0] == "down"
        assert 'width="1.0"' in sparkline(pod(flips=[(10, False), (9.9, True)]), NOW)


# How it looks -----------------------------------------------------------------------------------------------------


def pixels(png):
    """How many pixels of each color there are in an 8 bit RGB(A) picture, and its size."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    position, data = 8, b""
    while position < len(png):
        (length,), kind = struct.unpack(">I", png[position : position + 4]), png[position + 4 : position + 8]
        chunk = png[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8
            size = {2: 3, 6: 4}[color]
        elif kind == b"IDAT":
            data += chunk
        position += length + 12
    raw, stride, above, counts = zlib.decompress(data), width * size, bytes(width * size), {}
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, size)
        for x in range(0, stride, size):
            pixel = tuple(line[x : x + 3])
            counts[pixel] = counts.get(pixel, 0) + 1
        above = line
    return width, height, counts


def unfiltered(how, line, above, size):
    for x in range(len(line)):
        left, up = (line[x - size] if x >= size else 0), above[x]
        corner = above[x - size] if x >= size else 0
        if how == 1:
            line[x] = (line[x] + left) & 255
        elif how == 2:
            line[x] = (line[x] + up) & 255
        elif how == 3:
            line[x] = (line[x] + (left + up) // 2) & 255
        elif how == 4:
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda one: abs(guess - one))
            line[x] = (line[x] + nearest) & 255
    return line


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
class TestInABrowser:
    @pytest.fixture
    def browse(self, tmp_path):
        """Opens the page in headless Chromium; what it did with it."""
        windows = []

        def run(found, *arguments):
            window = StatusPage(("127.0.0.1", 0), lambda: found, clock=SystemClock())
            window.start()
            windows.append(window)
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
            flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
            flags += [f"--user-data-dir={tmp_path}/profile", "--force-color-profile=srgb", "--hide-scrollbars"]
            url = f"http://127.0.0.1:{window.address[1]}/"
            # From gevent: the page is served by this process while the browser looks at it.
            return subprocess.run(
                [CHROMIUM, *flags, *arguments, url], capture_output=True, text=True, check=True, timeout=90
            )

        yield run
        for window in windows:
            window.close()

    FOUND = document(
        pod("web-0", flips=[(40, False), (38, True)]),
        pod("web-1"),
        pod("win-0", os="windows", probe="tcp :3389", ip="10.88.0.31", created=25, flips=[(20, True)]),
        pod(
            "builder-0",
            namespace="mac",
            os="macos",
            probe="ssh :22",
            ready=False,
            ip="10.88.0.40",
            reason="NoSSHBanner",
            message="no ssh banner at 10.88.0.40:22: timed out",
            lifecycle="ready",
            restarts=1,
            created=50,
            flips=[(44, True), (12, False)],
        ),
        pod(
            "fresh-0",
            ready=False,
            ip="",
            reason="WaitingForLease",
            message="waiting for DHCP lease of 0a:58:5e:00:10:07",
            lifecycle="creating",
            created=1,
            since=at(1),
        ),
        checks=[
            {"name": "leases", "live": False, "trouble": "lease file leases.json is empty; the last good table stays"}
        ],
    )

    def test_a_screenshot_shows_readiness_in_both_colors(self, browse, tmp_path):
        target = tmp_path / "page.png"
        browse(self.FOUND, f"--screenshot={target}", "--window-size=1280,620")
        width, height, counts = pixels(target.read_bytes())
        assert (width, height) == (1280, 620)
        # Each full sparkline has 180 by 20 pixels; text in the same colors is antialiased and counts for little.
        assert counts[GOOD] > 2 * 180 * 20
        assert counts[BAD] > 100

    def test_a_browser_finds_nothing_to_complain_about(self, browse):
        ended = browse(self.FOUND, "--dump-dom", "--enable-logging=stderr")
        assert ended.stdout.count("<svg") == 5
        assert "builder-0" in ended.stdout
        assert "CONSOLE" not in ended.stderr

    def test_on_a_phone_nothing_is_beyond_the_edge(self, browse, tmp_path):
        target = tmp_path / "phone.png"
        browse(self.FOUND, f"--screenshot={target}", "--window-size=500,1300")
        counts = pixels(target.read_bytes())[2]
        assert counts[BAD] > 20
        # The sparklines come last in each row, and two of them are full.
        assert counts[GOOD] > 2 * 180 * 20
