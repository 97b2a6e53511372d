"""A simulated host with the real command-line adapters on it, for the tests of the host and of what runs on it."""

import random

from simulator.clock import VirtualClock
from simulator.fake_leases import FakeCocoonNet
from simulator.fake_vms import FakeHost
from vkcocoon_probes import Deadline
from vkcocoon_vms import CloneSpec, CocoonCLI, CocoonMacosCLI, MacosSpec, RunSpec

__all__ = ["PASSWORD", "Rig"]

PASSWORD = "pa55word"


class Rig:
    """A host, the real command-line adapters on it, and a log of what happened when."""

    def __init__(self, path, *, seed=None, jitter_s=0.0):
        self.clock = VirtualClock(seed)
        self.lease_path = path / "leases.json"
        self.leases = FakeCocoonNet(self.lease_path, self.clock, rng=random.Random(1))
        self.log = []
        self.host = FakeHost(
            self.clock, rng=random.Random(seed or 2), leases=self.leases, record=self._record, jitter_s=jitter_s
        )
        self.cocoon, self.macos = self.host.cocoon, self.host.macos
        self.cli = CocoonCLI("cocoon", execute=self.cocoon.execute, stream=self.host.stream, clock=self.clock)
        self.mac_cli = CocoonMacosCLI(
            "cocoon-macos",
            execute=self.macos.execute,
            processes=self.host.processes,
            vnc_password=PASSWORD,
            clock=self.clock,
        )

    def _record(self, actor, kind, key, fields):
        self.log.append((self.clock.elapsed(), actor, kind, key, fields))

    def run_vm(self, name="web-0", **more):
        self.cocoon.add_image("img")
        return self.cli.run(RunSpec(name=name, image="img", **more))

    def clone_vm(self, name="web-0", **more):
        return self.cli.clone(CloneSpec(name=name, snapshot="devbox-base:7", **more))

    def run_mac(self, name="mac-0", **more):
        self.macos.add_image("tahoe")
        return self.mac_cli.run(MacosSpec(name=name, image="tahoe", **more))

    def deadline(self, seconds=3.0):
        return Deadline(self.clock, seconds)

    def during(self, function, *args):
        """What a call returned or raised, and how long it took; called from a greenlet of its own."""
        began, result = self.clock.elapsed(), []

        def call():
            try:
                result.append(function(*args))
            except Exception as error:  # noqa: BLE001  it is the result
                result.append(error)
            result.append(round(self.clock.elapsed() - began, 6))

        self.clock.spawn("call", call)
        assert self.clock.run_until(lambda: len(result) == 2, 10_000)
        return tuple(result)

    def background(self, function, *args):
        """Like `during`, but the caller lets time pass; the list fills when the call has ended."""
        result = []

        def call():
            try:
                result.append(function(*args))
            except Exception as error:  # noqa: BLE001  it is the result
                result.append(error)
            result.append(self.clock.elapsed())

        self.clock.spawn("call", call)
        return result
