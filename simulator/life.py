"""One life of the daemon: from its start to its orderly stop, or to the moment something kills it.

A killed process does nothing any more: no farewell, no clean-up, no last write. Its greenlets here are Python and would
do all of that on their way out, so everything the daemon reaches the world through is a door that can be shut, and a
kill shuts the doors first. What the daemon had set going in the world goes on, as it does in reality: a command that
changes something runs to its end without it (vkcocoon_commands), and guests never belonged to it.

The doors also keep the log of what the daemon does: its commands with begin and end, and what it writes about pods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event

from simulator.fake_tools import Tool
from simulator.wire import WirePinger
from simulator.witness import Witness
from vkcocoon import Ports
from vkcocoon_commands import Completed, Execute
from vkcocoon_daemon import Daemon
from vkcocoon_guests import Pinger
from vkcocoon_host import Host
from vkcocoon_kube import KubeApi
from vkcocoon_net import NopPinger
from vkcocoon_probes import ProbeAgent, ProbeResult
from vkcocoon_record import RecordedApi, command_fields, subject_of
from vkcocoon_vms import CocoonCLI, CocoonMacosCLI, VMEvent

if TYPE_CHECKING:
    from simulator.world import World

__all__ = ["CHANGES", "Life"]

HOST = Host(cpus=64, memory=256 * 2**30, storage=4 * 2**40, storage_available=3 * 2**40, address="192.0.2.10")
# The commands that change a VM, or make or remove one; the others only ask.
CHANGES = ("vm run", "vm clone", "vm start", "vm stop", "vm rm", "vm net", "snapshot save")
# Those that go on without the daemon that began them.
OUTLIVING = (*CHANGES, "snapshot rm", "image pull", "vm reconcile-stale-create")


class Life:
    """Made and started by the world; ends by `stop` or by `kill`."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.over = False
        self._members: weakref.WeakSet[gevent.Greenlet[..., Any]] = weakref.WeakSet()
        # What each pod's probe said last: most say the same for hours, and an hour has many probes.
        self._said: dict[str, tuple[tuple[bool, str, str], tuple[str, str], tuple[str, str]]] = {}
        self._changing: dict[str, str] = {}  # VM name -> the command that changes it at the moment
        self._witness: Witness | None = None
        self.ports = self._ports()
        self.daemon = Daemon(world.settings, self.ports, host=HOST, instance=f"sim/{number}")
        self._witness = Witness(self.daemon, world.clock, world.rulebook, world.record)

    def start(self) -> None:
        """Begin, in a family of greenlets of its own, so that a kill finds all of them."""
        gevent.Greenlet.add_spawn_callback(self._born)
        root = gevent.Greenlet(self.daemon.start)
        root.spawn_tree_locals = {"life": self}
        root.name = "daemon"
        root.start()
        self._members.add(root)

    def stop(self) -> None:
        """As SIGTERM does."""
        self.daemon.close()
        self._end()

    def kill(self) -> None:
        """As SIGKILL does. Guests and commands live on, although they were begun from here: the clock's greenlets are
        nobody's children."""
        self._end()
        gevent.killall(list(self._members), block=False)

    def check(self) -> None:
        """Called at every door: a dead daemon reaches nothing."""
        if self.over:
            raise gevent.GreenletExit

    def _end(self) -> None:
        self.over = True
        if isinstance(self.ports.pinger, WirePinger):
            self.ports.pinger.close()
        gevent.Greenlet.remove_spawn_callback(self._born)

    def _born(self, greenlet: gevent.Greenlet[..., Any]) -> None:
        if (getattr(greenlet, "spawn_tree_locals", None) or {}).get("life") is self:
            self._members.add(greenlet)

    # The doors

    def _ports(self) -> Ports:
        world, host = self.world, self.world.host
        runtime = CocoonCLI(
            "cocoon",
            execute=self._commands(host.cocoon, host.cocoon.execute),
            stream=host.stream,
            output=host.output,
            clock=world.clock,
        )
        runtime.on_event = self._told
        return Ports(
            clock=world.clock,
            runtime=runtime,
            macos=CocoonMacosCLI(
                "cocoon-macos",
                execute=self._commands(host.macos, host.macos.execute),
                processes=host.processes,
                vnc_password=world.settings.macos_vnc_password,
                clock=world.clock,
            ),
            kube=RecordedApi(ApiDoor(world.kube, self), world.record, lambda: world.clock.now_us),
            pinger=self._pinger(),
            tcp_accepts=host.tcp_accepts,
            ssh_banner=host.ssh_banner,
            release_lease=self._release_lease,
            on_probe=self._probed,
        )

    def _pinger(self) -> Pinger:
        if self.world.degraded:
            return NopPinger()
        return WirePinger(self.world.host) if self.world.packets else self.world.host.pinger

    def _release_lease(self, mac: str, socket_path: str) -> None:
        self.check()
        self.world.leases.release(mac, socket_path)

    def _told(self, event: VMEvent) -> None:
        self.world.record("vm", event.kind, self.world.pod_of(event.vm.name), {"state": event.vm.state})

    def _probed(self, agent: ProbeAgent, result: ProbeResult, lateness_s: float, took_s: float) -> None:
        if self._witness is not None:
            self._witness.probed(agent, result, lateness_s, took_s)
        said = self._said.get(agent.key)
        if said is None or said[0] != result[:3]:
            message = result.message.replace(self.world.directory, "")  # which has another name in every run
            said = result[:3], ("reason", str(result.reason)), ("message", message)
            self._said[agent.key] = said
        _, reason, words = said
        took = "took_us", round(took_s * 1_000_000)
        self.world.timeline.add("probe", "ok" if result.ready else "fails", agent.key, (reason, words, took))

    def _commands(self, tool: Tool, execute: Execute) -> Execute:
        def run(argv: Sequence[str], limit: float) -> Completed:
            self.check()
            return _Command(self, tool, argv).run(lambda: execute(argv, limit))

        return run

    def begins(self, command: _Command) -> None:
        if command.changes:
            if other := self._changing.get(command.vm):
                text = f"{command.verb} begins while {other} is under way"
                self.world.rulebook.broken("changes do not cross", self.world.pod_of(command.vm), text)
            self._changing[command.vm] = command.verb

    def ended(self, command: _Command) -> None:
        if command.changes:
            self._changing.pop(command.vm, None)


class _Command:
    """One command of the daemon, in a greenlet of its own, as a process is: the one who waits for it may go."""

    def __init__(self, life: Life, tool: Tool, argv: Sequence[str]) -> None:
        self._life = life
        self._clock = life.world.clock
        self._done = Event()
        self._outcome: Completed | BaseException | None = None
        self.tool = tool.PROGRAM
        self.verb = " ".join(argv[1:3])
        self.vm = life.world.vm_name(subject_of(argv))
        self.changes = self.verb in CHANGES
        self.outlives = self.verb in OUTLIVING

    def run(self, call: Callable[[], Completed]) -> Completed:
        greenlet = self._clock.spawn(f"{self.tool} {self.verb} {self.vm}", self._perform, call)
        try:
            self._clock.wait(self._done, None)
        except BaseException:
            if not self.outlives:
                greenlet.kill(block=False)
            raise
        self._life.check()
        if isinstance(self._outcome, Completed):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    def _perform(self, call: Callable[[], Completed]) -> None:
        self._life.begins(self)
        self._note("begins", {})
        began_us = self._clock.now_us
        try:
            self._outcome = call()
        except Exception as error:  # noqa: BLE001  it belongs to the caller
            self._outcome = error
        finally:
            self._life.ended(self)
            self._note("ends", command_fields(self._outcome, self._clock.now_us - began_us))
            self._done.set()

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        world = self._life.world
        world.record("command", kind, world.pod_of(self.vm), {"verb": self.verb, "tool": self.tool, **fields})


class ApiDoor:
    """The API as one life reaches it: a `vkcocoon_kube.KubeApi` that a dead daemon finds shut."""

    def __init__(self, kube: KubeApi, life: Life) -> None:
        self._kube = kube
        self._life = life

    def __getattr__(self, name: str) -> Any:
        self._life.check()
        return getattr(self._kube, name)
