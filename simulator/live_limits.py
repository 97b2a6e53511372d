"""What of a scenario cannot be played live, said before anything begins: one line each, with file and line.

Whatever cannot happen is refused, since what came after it would be about another story. What cannot be seen (the
daemon's probes, which nobody outside can watch) is not judged, and that is said, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from simulator.expectations import Expectation
from simulator.observations import Observation
from simulator.scenario import SETTING_ROWS, Event, PodPlan, Scenario
from simulator.values import Drawn
from vkcocoon_status import ANNOTATION_PROBE_PORT

__all__ = ["not_judged", "refusals", "variables"]

NETWORK = IPv4Network("10.88.0.0/24")
STATIC = "cocoonset.cocoonstack.io/network"
# Settings that say where the world is; everything of it depends on them.
OURS = frozenset((
    "node_name", "node_ip", "leases_path", "cocoon_net_control_socket", "cocoon_bin", "cocoon_macos_bin",
    "cocoon_root_dir", "state_dir", "kubeconfig", "metrics_addr", "status_socket", "status_addr", "kubelet_port",
    "log_format",
))  # fmt: skip

ECHOES = "for 127.0.0.0/8 the host's own kernel answers echoes"
NEVER: Mapping[str, str] = {
    "wall_clock": "the clock of this host is not ours to set",
    "unreachable": "an error of the network cannot be made to come back for single echoes",
    "flood": "wrong replies can only be made on the simulated wire",
}
QEMU = {
    "reuse pid": "the kernel gives out process ids as it likes",
    "zombie": "a dead guest is reaped at once",
    "second": "a second QEMU would be a second guest with the same address",
}
BRIDGED_ONLY = ("silent", "speaks", "no_echo", "echo", "latency", "loss", "lease")
SECTION_OF_THE_API = "The API server"
INSIDE = {"probe": "what probes find", "daemon": "what is handed over"}


def refusals(scenario: Scenario, *, bridged: bool, real: bool) -> list[str]:
    """One line for each thing that cannot be; none when the scenario can be played. ``real``: on a real cluster."""
    where = _Where(scenario)
    lines = [where.line(pod.line, f"pod {pod.name}: {why}") for pod in scenario.pods for why in _of_pod(pod, bridged)]
    for event in scenario.events:
        for why in _of_event(event, scenario, bridged, real):
            lines.append(where.line(event.line, f"{event.happening.name} cannot be live: {why}"))
    settings = scenario.document.get("settings") or {}
    for name in settings:
        if name in OURS:
            lines.append(where.setting(name, f"settings: {name} is the playground's own"))
    return lines


def not_judged(scenario: Scenario, *, real: bool) -> dict[str, str]:
    """Expectations that cannot be judged live, by their text, each with the line that says why."""
    where = _Where(scenario)
    found = {}
    for expectation in scenario.expectations:
        for sight in _sights(expectation):
            if why := _unseen(sight, real):
                found[expectation.text] = where.line(expectation.line, f"not judged live: {expectation.text}: {why}")
    return found


def variables(scenario: Scenario) -> dict[str, str]:
    """The scenario's settings as the daemon's environment has them."""
    settings = scenario.document.get("settings") or {}
    return {SETTING_ROWS[name].env: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _of_pod(pod: PodPlan, bridged: bool) -> Iterator[str]:
    guest = pod.guest
    if guest.get("flood"):
        yield f"flood: {NEVER['flood']}"
    if STATIC in pod.annotations:
        yield f"{STATIC}: every live guest asks DHCP for its address"
    if by_port(pod) and (guest.get("latency_s") or guest.get("loss")):
        yield "latency and loss are those of echoes, and this pod is asked at a port"
    if bridged:
        return
    if pod.os == "macos" and not pod.annotations.get(ANNOTATION_PROBE_PORT):
        yield "on loopback port 22 is the host's; give it a probe-port"
    wrong = [name for name in ("echo_after_s", "latency_s", "loss", "ssh_after_s") if guest.get(name)]
    if isinstance(echo := guest.get("echo"), Drawn) and any(not low for _, low, _ in echo.branches):
        wrong.append("echo")
    for name in wrong:
        yield f"{name.removesuffix('_s')} is not possible on loopback: {ECHOES}, and port 22 is its own"


def by_port(pod: PodPlan) -> bool:
    return pod.os == "macos" or bool(pod.annotations.get(ANNOTATION_PROBE_PORT))


def _of_event(event: Event, scenario: Scenario, bridged: bool, real: bool) -> Iterator[str]:
    name, values = event.happening.name, event.values
    if name in NEVER:
        yield NEVER[name]
    if name == "qemu" and values["how"] in QEMU:
        yield QEMU[values["how"]]
    if real and event.happening.section == SECTION_OF_THE_API:
        yield "a real API server does not do that for us"
    if not bridged and name in BRIDGED_ONLY:
        yield f"there are no namespaces, and {ECHOES}"
    if name == "lease" and IPv4Address(values["ip"]) not in NETWORK:
        yield f"{values['ip']} is not in the guests' network {NETWORK}"
    if name in ("latency", "loss") and any(pod.name == event.pod and by_port(pod) for pod in scenario.pods):
        yield "only echoes can be slow or lost, and this pod is asked at a port"
    if event.trigger is not None and (why := _unseen(event.trigger.sight, real)):
        yield f"it waits for {event.trigger.sight.text!r}: {why}"


def _sights(expectation: Expectation) -> Iterator[Observation]:
    for name in ("never", "count"):
        if isinstance(sight := expectation.values.get(name), Observation):
            yield sight
    yield from expectation.values.get("order") or ()


def _unseen(sight: Observation, real: bool) -> str:
    actor = sight.sight.actor
    if actor == "probe" or sight.sight.kinds == ("hands over",):
        return f"{INSIDE[actor]} nobody sees outside the daemon"
    if real and actor == "push":
        return "a real API server does not tell who wrote what"
    return ""


class _Where:
    """Lines that begin with the place in the file."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def line(self, number: int | None, text: str) -> str:
        return f"{self._scenario.file}{f':{number}' if number else ''}: {text}"

    def setting(self, name: str, text: str) -> str:
        return self.line(self._scenario.setting_lines.get(name), text)
