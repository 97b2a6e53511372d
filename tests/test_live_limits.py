"""What cannot be live is refused before anything begins, and what cannot be seen is not judged: with file and line."""

import pytest

from simulator.live_limits import not_judged, refusals, variables
from simulator.scenario import load

HEAD = "pods:\n  - {name: web-0}\n  - {name: mac-0, os: macos}\nevents:\n"


def scenario(tmp_path, text):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return load(path)


def refused(tmp_path, text, *, bridged=True, real=False):
    lines = refusals(scenario(tmp_path, text), bridged=bridged, real=real)
    return [line.removeprefix(f"{tmp_path}/s.yaml:") for line in lines]


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ("wall_clock: 1h", "5: wall_clock cannot be live: the clock of this host is not ours to set"),
        ("unreachable: web-0", "5: unreachable cannot be live: an error of the network"),
        ("flood: web-0", "5: flood cannot be live: wrong replies can only be made on the simulated wire"),
        ("qemu: {pod: mac-0, how: zombie}", "5: qemu cannot be live: a dead guest is reaped at once"),
        ("lease: {pod: web-0, ip: 10.1.0.2}", "5: lease cannot be live: 10.1.0.2 is not in the guests' network"),
        ("latency: {pod: mac-0, value: 1s}", "5: latency cannot be live: only echoes can be slow or lost"),
    ],
)
def test_what_cannot_happen_live_is_refused_with_its_line(tmp_path, event, says):
    (line,) = refused(tmp_path, f"{HEAD}  - {{at: 1s, {event}}}\n")
    assert line.startswith(says)


def test_what_waits_for_something_that_nobody_sees_is_refused(tmp_path):
    (line,) = refused(tmp_path, f"{HEAD}  - {{when: {{sees: probe fails}}, crash: web-0}}\n")
    assert line.startswith("5: crash cannot be live: it waits for 'probe fails': what probes find nobody sees")


@pytest.mark.parametrize(
    "event",
    [
        "lease_file: torn", "lease_file: 'null'", "lease_file: stale", "lease_file: in_place", "crash: mac-0",
        "command: {verb: vm clone, slow: 2s}", "command: {verb: vm rm, fails: no}", "api_down: true",
        "api_fails: {status: 409}", "daemon: kill", "silent: web-0", "no_echo: web-0", "close: {pod: web-0, port: 22}",
        "banner: {pod: mac-0, text: hello}", "latency: {pod: web-0, value: 1s}", "loss: {pod: web-0, value: 10%}",
        "lease: {pod: web-0, ip: 10.88.0.9}", "reboot: web-0", "commands_missing: true", "hibernate: web-0",
    ],
)  # fmt: skip
def test_what_can_happen_live_is_not_refused(tmp_path, event):
    assert refused(tmp_path, f"{HEAD}  - {{at: 1s, {event}}}\n") == []


def test_on_a_real_cluster_nothing_is_done_to_the_api_server(tmp_path):
    events = "  - {at: 1s, api_down: true}\n  - {at: 1s, silent: web-0}\n  - {when: {sees: push}, crash: web-0}\n"
    lines = refused(tmp_path, HEAD + events, real=True)
    assert [line.partition(": it waits")[0] for line in lines] == [
        "5: api_down cannot be live: a real API server does not do that for us",
        "7: crash cannot be live",
    ]


def test_on_loopback_the_hosts_kernel_answers_echoes(tmp_path):
    pods = "pods:\n  - {name: web-0, guest: {latency: 1s}}\n  - {name: mac-0, os: macos}\n"
    text = f"{pods}events:\n  - {{at: 1s, silent: web-0}}\n"
    assert [line[:2] for line in refused(tmp_path, text, bridged=False)] == ["2:", "3:", "5:"]


def test_settings_of_the_playground_are_its_own_and_the_others_reach_the_daemon(tmp_path):
    text = "settings:\n  orphan_policy: destroy\n  node_name: me\n"
    assert refused(tmp_path, text) == ["3: settings: node_name is the playground's own"]
    assert variables(scenario(tmp_path, text))["VK_ORPHAN_POLICY"] == "destroy"


def test_what_nobody_sees_is_not_judged(tmp_path):
    expect = (
        "expect:\n  - {never: probe fails}\n  - {pod: web-0, count: push, at_least: 1}\n"
        "  - {pod: web-0, order: [created, hands over]}\n  - {pod: web-0, ready: true, by: 5s}\n"
    )
    plan = scenario(tmp_path, "pods:\n  - {name: web-0}\n" + expect)
    assert list(not_judged(plan, real=False)) == ["never=probe fails", "pod=web-0 order=[created, hands over]"]
    assert not_judged(plan, real=False)["never=probe fails"].startswith(f"{tmp_path}/s.yaml:4: not judged live: never")
    assert "pod=web-0 count=push at_least=1" in not_judged(plan, real=True)
