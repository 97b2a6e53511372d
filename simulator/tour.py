"""The playground's tour: three pods, one silence, one crash, and what must follow from them.

The tour acts as a user would: it creates pods through the API and does things to guests. Whether what had to follow did
follow is read from the cluster alone (`ClusterView`), never from what the tour itself just did. Each expectation has a
bound made of the daemon's own pace, so a tour on a healthy daemon cannot miss one by bad luck:

- a failing echo of a ready pod may take the whole bound of a probe, so three failures take at most 3 x (5 s + 3 s);
- once not ready, a guest that answers again is met within a second.

The three stories run side by side and end within a minute.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from gevent.pool import Group

from simulator.cluster_view import ClusterView, PodRow
from simulator.fake_guests import tell
from simulator.fake_vms import GuestSpec
from simulator.live_world import Place
from vkcocoon_kube import KubeApi
from vkcocoon_probes import Clock, spawn
from vkcocoon_status import ANNOTATION_PROBE_PORT, ANNOTATION_VM_NAME, Reason

__all__ = ["Expectation", "Tour", "manifest"]

EXAMPLES = Path(__file__).parent / "examples"
Say = Callable[[str, str], None]

PODS = "/api/v1/namespaces/default/pods"

NODE_READY_S = 30.0  # the daemon's own start
COMES_UP_S = 20.0  # from creating the pod: two short-lived programs, a guest's boot, and a probe
MAC_COMES_UP_S = 30.0
FALLS_S = 3 * (5.0 + 3.0) + 3.0
RISES_S = 5.0
RESTART_S = 5.0 + 3.0 + 5.0  # the pace until the death is seen, a probe, and two calls of cocoon-macos

# Cold boots cut short: a real Mac takes minutes.
LINUX = GuestSpec(os="linux", boot_s=0.5, lease_s=0.3)
WINDOWS = GuestSpec(os="windows", boot_s=2.0, lease_s=0.5, ports=(3389,))
# sshd speaks so long after the lease that a dial can give up in between: a pause of 1 s and a probe of 3 s, and some.
MACOS = GuestSpec(os="macos", boot_s=2.0, lease_s=0.5, ssh_after_s=6.0)
# After the crash it checks its disk first: long enough for the cluster to see it Not Ready.
MACOS_AFTER_CRASH = dataclasses.replace(MACOS, boot_s=16.0, ssh_after_s=2.0)
# Without namespaces each pod needs a port to tell silence by, one that needs no privileges.
LOOPBACK_PORTS = {"linux": 28022, "windows": 23389, "macos": 22022}


@dataclass(slots=True)
class Expectation:
    """Something the cluster must show. `held` is None until that is decided."""

    text: str
    held: bool | None = None


class _StoryEnds(Exception):
    """An expectation did not hold: what would come next makes no sense."""


def manifest(name: str) -> dict[str, Any]:
    """One of the example pods, as examples/NAME.yaml has it."""
    loaded = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


class Tour:
    """`run` returns when all stories are told or it was stopped; `expectations` can be read at any time."""

    def __init__(self, view: ClusterView, api: KubeApi, clock: Clock, place: Place, say: Say) -> None:
        self.expectations: list[Expectation] = []
        self.over = False
        self._view = view
        self._api = api
        self._clock = clock
        self._place = place
        self._say = say
        self._greenlets = Group()
        self._stopped = False

    def run(self) -> None:
        self._tell(self._node)
        for story in (self._linux, self._windows, self._macos):
            if not self._stopped and not self.failed:
                spawn(self._greenlets, f"tour {story.__name__}", self._tell, story)
        self._greenlets.join()
        self.over = not self._stopped

    def stop(self) -> None:
        """End it where it is; what is not decided by now stays undecided."""
        self._stopped = True
        self._greenlets.kill()

    @property
    def failed(self) -> bool:
        return any(each.held is False for each in self.expectations)

    # The stories ------------------------------------------------------------------------------------------------------

    def _node(self) -> None:
        self._expect("the node is Ready", lambda: "Ready" in self._view.nodes.values(), NODE_READY_S)

    def _linux(self) -> None:
        pod = self._create("linux", LINUX)
        self._expect("linux-0 becomes Ready", pod.is_ready, COMES_UP_S)
        self._clock.sleep(1.0)
        port = LOOPBACK_PORTS["linux"]
        silence: dict[str, object]
        speech: dict[str, object]
        if self._place.bridged:
            silence, speech, reason = {"echo": False}, {"echo": True}, Reason.PING_TIMEOUT
            self._say("linux-0 falls silent: its kernel ignores echoes from now on", "step")
        else:
            silence, speech, reason = {"close": port}, {"open": port}, Reason.PORT_CLOSED
            self._say(f"linux-0 falls silent: it closes port {port}", "step")
        tell(self._place.home, pod.vm, silence)
        self._expect(f"linux-0 becomes Not Ready: {reason}", lambda: pod.is_not_ready(reason), FALLS_S)
        self._clock.sleep(1.0)
        self._say("linux-0 speaks again", "step")
        tell(self._place.home, pod.vm, speech)
        self._expect("linux-0 is Ready again", pod.is_ready, RISES_S)

    def _windows(self) -> None:
        pod = self._create("windows", WINDOWS)
        self._expect("windows-0 becomes Ready by its probe-port", pod.is_ready, COMES_UP_S)

    def _macos(self) -> None:
        pod = self._create("macos", MACOS)
        self._expect("macos-0 becomes Ready", pod.is_ready, MAC_COMES_UP_S)
        if self._place.bridged:
            spoken = tell(self._place.home, pod.vm, {"status": True})["banner"] is not None
            self._expect("macos-0 was not Ready before its sshd spoke", lambda: spoken, 0.0)
        self._clock.sleep(2.0)
        before, first = pod.row, tell(self._place.home, pod.vm, {"status": True})
        self._write_spec(pod.vm, "macos", MACOS_AFTER_CRASH)
        self._say(f"macos-0 crashes: its QEMU, process {first['pid']}, is killed", "step")
        tell(self._place.home, pod.vm, {"crash": True})
        self._expect("macos-0 is restarted, and an Event says so", lambda: pod.has_event("GuestRestarted"), RESTART_S)
        self._expect("macos-0 becomes Not Ready while it boots", pod.is_not_ready, FALLS_S)
        self._expect("macos-0 is Ready again", pod.is_ready, MAC_COMES_UP_S)
        after, second = pod.row, tell(self._place.home, pod.vm, {"status": True})
        self._say(f"macos-0 runs on as process {second['pid']}, same record, same MAC {second['mac']}", "note")
        in_place = (after.uid, after.vm_id, after.ip) == (before.uid, before.vm_id, before.ip)
        self._expect("macos-0 is the same pod, VM and address as before", lambda: in_place, 0.0)

    # What they are made of --------------------------------------------------------------------------------------------

    def _tell(self, story: Callable[[], None]) -> None:
        try:
            story()
        except _StoryEnds:
            pass
        except Exception as error:  # noqa: BLE001  a story that breaks is a failed one; the others go on
            broken = f"the story of {story.__name__.strip('_')} goes on ({type(error).__name__}: {error})"
            self.expectations.append(Expectation(broken, held=False))
            self._say(f"FAILED: {broken}", "bad")

    def _create(self, os_name: str, spec: GuestSpec) -> _Pod:
        pod = manifest(os_name)
        annotations = pod["metadata"]["annotations"]
        if not self._place.bridged:
            annotations[ANNOTATION_PROBE_PORT] = str(LOOPBACK_PORTS[os_name])
        self._write_spec(annotations[ANNOTATION_VM_NAME], os_name, spec)
        name = pod["metadata"]["name"]
        self._say(f"{name} is created from examples/{os_name}.yaml", "step")
        self._api.create(PODS, pod)
        return _Pod(self._view, f"default/{name}", annotations[ANNOTATION_VM_NAME])

    def _write_spec(self, vm: str, os_name: str, spec: GuestSpec) -> None:
        if not self._place.bridged:
            spec = dataclasses.replace(spec, ports=(LOOPBACK_PORTS[os_name],), ssh_after_s=None)
        (self._place.home / "guests" / f"{vm}.json").write_text(json.dumps(dataclasses.asdict(spec)))

    def _expect(self, text: str, holds: Callable[[], bool], within_s: float) -> None:
        expectation = Expectation(text)
        self.expectations.append(expectation)
        expectation.held = self._view.wait_until(holds, within_s)
        if not expectation.held:
            self._say(f"FAILED: {text} (within {within_s:g} s)", "bad")
            raise _StoryEnds
        self._say(f"as expected: {text}", "good")


class _Pod:
    """A pod as the cluster shows it at the moment."""

    def __init__(self, view: ClusterView, key: str, vm: str) -> None:
        self.vm = vm
        self._view = view
        self._key = key

    @property
    def row(self) -> PodRow:
        """Raises KeyError when the cluster does not know the pod."""
        return self._view.pods[self._key]

    def is_ready(self) -> bool:
        row = self._view.pods.get(self._key)
        return row is not None and row.ready

    def is_not_ready(self, reason: str = "") -> bool:
        row = self._view.pods.get(self._key)
        return row is not None and not row.ready and reason in ("", row.reason)

    def has_event(self, reason: str) -> bool:
        return any(
            event.get("reason") == reason and event["involvedObject"].get("uid") == self.row.uid
            for event in self._view.events.values()
        )
