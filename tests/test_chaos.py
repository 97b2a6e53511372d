"""Everything at once: pods are made, edited, hibernated, woken and deleted while whatever can fail does.

Each run is one seed: what people do, what breaks and in which order things of one instant happen all follow from it, so
`Chaos(seed).run()` repeats a failure exactly. In the middle of a run nothing is promised but the invariants and the
pace of a pod nobody touches. Then the faults end, and all of this must become true by itself: every pod is what it
should be, with one VM each; nobody died; and when the pods are gone, nothing at all is left of them.
"""

import gc
import random
from collections import Counter
from itertools import pairwise

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations
from vkcocoon_kube import ApiError

SEEDS = range(20)
NAMES = [f"pod-{number}" for number in range(5)]
CALM_S = 900.0  # the longest pauses of retries are five minutes
MAC = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.5)


class Chaos:
    """One run. `wanted` is what the people of this world want: pod -> (os, hibernated).

    In runs with `force` pods are removed by force and replaced by namesakes; in the others the daemon is stopped and
    killed instead. Both together would leave orphans, which are kept on purpose.
    """

    def __init__(self, seed, *, acts=45, seconds=240.0):
        self.force = seed % 2 == 1
        self.rng = random.Random(seed)
        self.world = World(seed, jitter_s=self.rng.choice([0.002, 0.05]))
        self.acts = acts
        self.seconds = seconds
        self.wanted = {}
        self.done = []  # (instant, act): the story of a failed run
        self._undo = []

    # What happens

    def run(self):
        world, rng = self.world, self.rng
        world.start()
        static = {"cocoonset.cocoonstack.io/network": "cocoon-static"}
        world.create_pod("bystander", guest=FAST, annotations=static)
        world.run(10)
        acts = [self.create] * 5 + [self.delete] * 3 + [self.toggle] * 3 + [self.edit, self.restart, self.vm]
        acts += [self.cluster] * 3 + [self.tool] * 4 + [self.guest] * 2 + [self.lease_file, self.lease]
        for at in sorted(rng.uniform(10, 10 + self.seconds) for _ in range(self.acts)):
            self._until(at)
            rng.choice(acts)()
        self._until(world.clock.elapsed() + 60)
        self.calm()
        world.run(CALM_S)

    def calm(self):
        self._until(float("inf"))
        self.world.host.cocoon.faults.clear()
        self.world.host.macos.faults.clear()
        for failure in self.world.kube.gate.failures:
            failure.cancel()
        self.world.leases.write()

    def _until(self, instant):
        """Undo what was to last until then."""
        self._undo.sort(key=lambda entry: entry[0])
        while self._undo and self._undo[0][0] <= instant:
            at, undo = self._undo.pop(0)
            self.world.run(max(0.0, at - self.world.clock.elapsed()))
            undo()
        if instant != float("inf"):
            self.world.run(max(0.0, instant - self.world.clock.elapsed()))

    def _later(self, seconds, undo):
        self._undo.append((self.world.clock.elapsed() + seconds, undo))

    def _note(self, *act):
        self.done.append((round(self.world.clock.elapsed(), 3), *act))

    def living(self):
        """The pods that are there and may stay."""
        found = ((name, self.world.pod(name)) for name in NAMES)
        return [name for name, pod in found if pod is not None and not pod["metadata"].get("deletionTimestamp")]

    # What people do

    def create(self):
        name, os = self.rng.choice(NAMES), self.rng.choice(["linux", "linux", "windows", "macos"])
        if self.world.pod(name) is None:
            guest = MAC if os == "macos" else GuestSpec(os=os, boot_s=self.rng.choice([0.0, 2.0]), lease_s=0.3)
            hibernated = os != "macos" and self.rng.random() < 0.2
            wish = {"vm.cocoonstack.io/hibernate": "true"} if hibernated else {}
            self.world.create_pod(name, os=os, guest=guest, annotations=wish)
            self.wanted[name] = (os, hibernated)
            self._note("create", name, os, hibernated)

    def delete(self):
        if living := self.living():
            name = self.rng.choice(living)
            force = self.force and self.rng.random() < 0.5
            self._note("delete", name, force)
            self.world.delete_pod(name, grace_seconds=0 if force else self.rng.choice([1, 30]))
            if force and self.rng.random() < 0.5:
                self.create()

    def toggle(self):
        candidates = [name for name in self.living() if self.wanted[name][0] != "macos"]
        if candidates:
            name = self.rng.choice(candidates)
            os, hibernated = self.wanted[name]
            self.wanted[name] = (os, not hibernated)
            self._note("wake" if hibernated else "hibernate", name)
            self.world.annotate(name, hibernate=None if hibernated else "true")

    def edit(self):
        for name in self.living()[:1]:
            self._note("edit", name)
            self.world.annotate(name, note=str(self.rng.random()))

    # What breaks

    def restart(self):
        if not self.force and self.world.life is not None:
            how = self.rng.choice([self.world.stop, self.world.kill])
            self._note("restart", how.__name__)
            how()
            self._later(self.rng.choice([0.0, 15.0]), self.world.start)

    def cluster(self):
        kube, seconds = self.world.kube, self.rng.choice([1.0, 10.0, 50.0])
        match = self.rng.choice(["PATCH */status", "PATCH */pods/*", "DELETE */pods/*", "LIST */pods"])
        how = self.rng.choice(["slow", "down", "cut", "forgets", "silent", "refuses", "hangs"])
        self._note("cluster", how, match, seconds)
        if how == "slow":
            kube.latency = self.rng.choice([0.2, 3.0])
            self._later(seconds, lambda: setattr(kube, "latency", 0.0))
        elif how == "down":
            kube.down = True
            self._later(seconds, lambda: setattr(kube, "down", False))
        elif how in ("cut", "forgets"):
            if how == "forgets":
                kube.expire_history()
            kube.cut_watches(mid_line=self.rng.random() < 0.5)
        elif how == "refuses":
            error = ApiError(self.rng.choice([0, 409, 422, 429, 500]), "Injected", "not now")
            kube.fail(match, error, times=2, stored=self.rng.random() < 0.5)
        else:
            self._later(seconds, kube.hang("WATCH */pods" if how == "silent" else match).release)

    def tool(self):
        tool = self.rng.choice([self.world.host.cocoon, self.world.host.macos])
        verb = self.rng.choice(["vm clone", "vm run", "vm rm", "vm start", "vm inspect", "vm list", "snapshot save"])
        step, how = self.rng.choice(["before", "middle", "after"]), self.rng.choice(["slow", "fail", "kill", "garble"])
        self._note("tool", tool.PROGRAM, verb, step, how)
        if how == "slow":
            tool.slow(verb, self.rng.choice([1.0, 20.0]), step=step)
        elif how == "garble":
            tool.garble(verb, "{half a document")
        else:
            getattr(tool, how)(verb, step=step)

    def _guest(self):
        """A guest that runs, None when there is none."""
        for name in self.rng.sample(NAMES, len(NAMES)):
            try:
                guest = self.world.guest(name)
            except LookupError:
                continue
            if guest.pid:
                return guest
        return None

    def vm(self):
        if guest := self._guest():
            how = self.rng.choice(["crash", "reboot"])
            self._note(how, guest.name)
            getattr(guest, how)()

    def guest(self):
        if guest := self._guest():
            self._note("silent", guest.name)
            guest.silent()
            self._later(self.rng.choice([4.0, 25.0]), lambda: guest.silent(False))

    def lease_file(self):
        how = self.rng.choice(["torn", "empty", "object", "missing", "in_place"])
        self._note("lease file", how)
        self.world.leases.write(how)
        self._later(5.0, self.world.leases.write)

    def lease(self):
        taken = {row.ip for row in self.world.leases._leases.values()}
        if (guest := self._guest()) and guest.ip:
            ip = next(ip for ip in (f"10.88.0.{host}" for host in range(2, 250)) if ip not in taken)
            self._note("lease moves", guest.name, ip)
            self.world.leases.lease(guest.mac, ip)
            guest.renumber(ip)

    # What must be true in the end

    def verdict(self):
        """What is wrong with the pods, [] when nothing is."""
        awake, wrong = {"vk-default-bystander"}, []
        macs = 0
        for name in NAMES:
            pod = self.world.pod(name)
            if pod is None:
                continue
            os, hibernated = self.wanted[name]
            state = annotations(self.world, name).get("lifecycle-state")
            if pod["metadata"].get("deletionTimestamp"):
                wrong.append((name, "is still there"))
            elif hibernated and state != "hibernated":
                wrong.append((name, f"is {state} and not hibernated"))
            elif not hibernated and not self.world.ready(name):
                wrong.append((name, "is not Ready", self.world.condition(name)))
            macs += os == "macos"
            awake |= {f"vk-default-{name}"} if os != "macos" and not hibernated else set()
        if {name: "running" for name in awake} != vms(self.world):
            wrong.append(("VMs", vms(self.world), awake))
        if len(self.world.host.pids()) != len(awake) + macs:
            wrong.append(("processes", [self.world.host.argv_of(pid)[:1] for pid in self.world.host.pids()]))
        return wrong

    def bystander(self):
        """What became of the pod nobody touched."""
        return [ready for _, ready in self.world.flips("bystander")]


def vms(world):
    """Name -> state of the VMs of cocoon."""
    records = (world.host.storage.read("cocoon/vms.json") or {}).values()
    return {record["config"]["name"]: record["state"] for record in records}


def leftovers(world):
    """Whatever the daemon still holds of pods, by where it holds it."""
    provider, controller = world.daemon.provider, world.daemon.pods
    work, readiness = provider._removal._work, provider._readiness
    places = {
        "pods": provider._pods._pods,
        "names of pods": provider._pods._uid_of,
        "probes": provider._probes._agents,
        "claims": provider._publication._claimers,
        "addresses": provider._publication._addresses._holder_on,
        "addresses by pod": provider._publication._addresses._addresses_of,
        "VM locks": dict(work.locks._locks),
        "QEMUs": readiness._qemu._guests,
        "displays": readiness._vnc._display,
        "records": controller._pods,
        "lines": controller._lines,
        "publishers": controller._publishers._by_uid,
        "reflector": controller._reflector.objects,
        "names in the reflector": controller._reflector._names,
        "commands": list(world.daemon.ports.runtime._jobs) + list(world.daemon.ports.macos._jobs),
        "greenlets": [
            greenlet.name
            for group in (work.group, controller._group, controller._publishers._group, provider._probes._group)
            for greenlet in group
            if greenlet.name not in ("pod recheck", "sweep VMs")
        ],
    }
    return {place: found for place, found in places.items() if found}


@pytest.mark.parametrize("seed", SEEDS)
def test_when_the_faults_end_every_pod_becomes_what_it_should_be_and_then_nothing_is_left(seed, caplog):
    chaos = Chaos(seed)
    world = chaos.world
    try:
        chaos.run()
        assert (chaos.verdict(), chaos.done) == ([], chaos.done)
        assert ([entry.text() for entry in world.timeline.of(actor="invariant")], chaos.done) == ([], chaos.done)
        assert chaos.bystander() == [False, True]
        for name in ["bystander", *chaos.living()]:
            world.delete_pod(name)
        world.run(120)
        assert (leftovers(world), chaos.done) == ({}, chaos.done)
        assert (vms(world), world.host.pids()) == ({}, [])
        assert [name for name in NAMES if world.pod(name) is not None] == []
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    finally:
        world.close()


def test_a_pod_nobody_touches_is_probed_on_the_dot_while_everything_else_is_on_fire():
    """Without jitter each instant is exact: five seconds after the last one, for as long as the trouble lasts."""
    chaos = Chaos(1, acts=80)
    world = chaos.world = World(1, jitter_s=0.0)
    try:
        chaos.run()
        probes = world.probes("bystander")
        steady = [round(later - former, 6) for former, later in pairwise(probes[2:])]
        assert set(steady) == {5.0}
        assert len(steady) > 200
        assert chaos.bystander() == [False, True]
    finally:
        world.close()


def ours():
    """How many objects of each of our classes there are; events, remembered for a while, have a test of their own.

    Without the entries of the simulation's log, which only grows.
    """
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    rooms = [kind for kind in kinds if str(kind.__module__).startswith("vkcocoon")]
    return Counter(kind.__qualname__ for kind in rooms if kind.__module__ not in ("vkcocoon_events", "vkcocoon_record"))


def test_hundreds_of_pods_later_nothing_has_grown():
    """Events are remembered for ten minutes, so each round of pods is given as long to be forgotten."""

    def churn(world, rounds):
        for _ in range(rounds):
            for number in range(10):
                os, guest = ("macos", MAC) if number == 9 else ("linux", FAST)
                world.create_pod(f"web-{number}", os=os, guest=guest)
            world.run(6)
            for number in range(10):
                world.delete_pod(f"web-{number}", grace_seconds=number % 2)
            world.run(700)

    with World(1) as world:
        churn(world, 3)
        before = ours()
        churn(world, 12)
        assert ours() == before
        assert leftovers(world) == {}


def test_a_guest_that_boots_while_the_daemon_is_killed_comes_up_all_the_same():
    with World() as world:
        world.create_pod("web-0", guest=GuestSpec(boot_s=5.0, lease_s=0.0))
        world.run(2)
        world.kill()
        world.start()
        world.run(10)
        assert world.ready("web-0")
