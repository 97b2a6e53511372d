"""The daemon is killed between any two of its steps and started again: no VM is lost or doubled, no lease leaks, no
older state takes the place of a newer one, and the pod ends where it should.

A step is whatever leaves the process: a command begins or ends, a write of the API, a lease that is given back. Each
story is told once without a kill, which counts its steps, and then once for each of them: at that step the daemon is
dead, commands that change something run to their end without it, and another daemon starts, either when all of that is
over or beside what still runs.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations, status
from tests.test_last_state import macs, snapshots
from tests.test_sources import mark, trait
from vkcocoon_ports import EARLIER_LIFE

VM = "vk-default-web-0"
MAC_GUEST = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
FORK = "vm.cocoonstack.io/fork-from"
FIRECRACKER = {"vm.cocoonstack.io/backend": "firecracker", "cocoonset.cocoonstack.io/image": "fc-base:1"}
STATE = 7 * 2**30  # how a VM that matters is told from a fresh one


class Story:
    """What there is, what somebody does, and what must have come of it however often the daemon died."""

    os = "linux"
    wishes: dict = {}
    settings: dict = {}
    waits = 30.0  # from the deed to its end, without a kill
    least = 4  # steps; fewer mean that the story was not told

    def begin(self, world):
        world.host.cocoon.add_snapshot("fc-base:1", hypervisor="firecracker")
        world.create_pod("web-0", os=self.os, guest=MAC_GUEST if self.os == "macos" else FAST, annotations=self.wishes)
        world.run(12)
        assert world.ready("web-0")
        if self.os != "macos":
            mark(world, "web-0", STATE)

    def act(self, world):
        raise NotImplementedError

    def meanwhile(self, world):
        """What somebody does while the daemon is dead, and without a kill when all is over."""

    def check(self, world):
        raise NotImplementedError


def lives(world, *, state=None):
    """Ready, with one VM that is the pod's, its own lease and nobody else's."""
    assert world.ready("web-0")
    assert len(world.host.pids()) == 1
    assert macs(world) == [world.guest("web-0").mac]
    assert annotations(world, "web-0")["mac"] == world.guest("web-0").mac
    if state is not None:
        assert trait(world, "web-0") == state


def gone(world):
    assert (world.pod("web-0"), world.host.pids(), macs(world)) == (None, [], [])


class Create(Story):
    def begin(self, world):
        world.host.cocoon.add_snapshot("fc-base:1", hypervisor="firecracker")

    def act(self, world):
        world.create_pod("web-0", os=self.os, guest=MAC_GUEST if self.os == "macos" else FAST, annotations=self.wishes)

    def check(self, world):
        lives(world)
        assert snapshots(world) == ["fc-base:1"]
        assert status(world, "web-0")["containerStatuses"][0]["restartCount"] == 0


class CreateNoMore(Create):
    """The pod is deleted while the daemon is dead, whose command still makes the VM."""

    def begin(self, world):
        super().begin(world)
        world.leases.lease("0a:58:00:00:00:01", "10.88.0.201")
        world.leases.release("0a:58:00:00:00:01")  # so that there is a lease file

    def meanwhile(self, world):
        world.delete_pod("web-0", grace_seconds=30)

    def check(self, world):
        gone(world)


class CreateByRunNoMore(CreateNoMore):
    os = "windows"


class CreateMacosNoMore(CreateNoMore):
    """A guest that is removed within a second of its launch has not asked for an address yet."""

    os = "macos"

    def act(self, world):
        world.create_pod("web-0", os=self.os, guest=replace(MAC_GUEST, lease_s=1.0))


class CreateByRun(Create):
    os = "windows"


class CreateMacos(Create):
    os = "macos"


class CreateWithSetUp(Create):
    wishes = FIRECRACKER

    def check(self, world):
        super().check(world)
        assert annotations(world, "web-0")["post-clone-state"] == "done"


class CreateByFork(Create):
    wishes = {FORK: "vk-default-main"}

    def begin(self, world):
        super().begin(world)
        world.create_pod("main", guest=FAST)
        world.run(5)
        mark(world, "main", STATE)

    def check(self, world):
        assert world.ready("web-0") and world.ready("main")
        assert len(world.host.pids()) == 2
        assert trait(world, "web-0") == STATE
        assert macs(world) == sorted(world.guest(name).mac for name in ("web-0", "main"))


class CreateByDirectory(Create):
    def begin(self, world):
        super().begin(world)
        config = {"cpu": 2, "memory": STATE, "storage": 2**34, "image": "x", "image_digest": "sha256:1"}
        config |= {"image_type": "oci", "hypervisor": "cloud-hypervisor", "nics": 1}
        directory = Path(world.settings.leases_path).parent / "export"
        directory.mkdir()
        (directory / "snapshot.json").write_text(json.dumps({"version": 1, "config": config}))
        self.wishes = {"vm.cocoonstack.io/clone-from-dir": str(directory), "cocoonset.cocoonstack.io/image": ""}

    def check(self, world):
        super().check(world)
        assert trait(world, "web-0") == STATE


class CreateFromHibernated(Create):
    """The predecessor was hibernated and its state kept; nothing on the new pod says so."""

    def begin(self, world):
        Story.begin(self, world)
        world.annotate("web-0", hibernate="true", keep_snapshot_on_delete="true")
        world.run(10)
        world.delete_pod("web-0")
        world.run(10)
        assert (world.pod("web-0"), snapshots(world)) == (None, ["fc-base:1", VM])

    def check(self, world):
        super().check(world)
        assert trait(world, "web-0") == STATE


class CreateByRestore(CreateFromHibernated):
    def act(self, world):
        self.wishes = {"vm.cocoonstack.io/restore-from-hibernate": "true"}
        super().act(world)


class Unmanaged(Story):
    """Its VM is the operator's, whatever becomes of the pod: it runs on and keeps its lease."""

    least = 2

    def begin(self, world):
        world.host.specs["theirs"] = FAST
        world.host.cocoon.execute(["cocoon", "vm", "clone", "--name", "theirs", "devbox-base:7"], 30.0)
        world.run(5)
        self.guest = world.host.guest("theirs")
        self.wishes = {
            "cocoonset.cocoonstack.io/managed": None,
            "vm.cocoonstack.io/name": "theirs",
            "vm.cocoonstack.io/id": "THEIRS",
            "vm.cocoonstack.io/ip": self.guest.ip,
        }

    def act(self, world):
        world.create_pod("web-0", annotations=self.wishes)

    def check(self, world):
        assert world.ready("web-0")
        assert {key: annotations(world, "web-0")[key] for key in ("id", "ip")} == {"id": "THEIRS", "ip": self.guest.ip}
        world.delete_pod("web-0", grace_seconds=30)
        world.run(10)
        assert world.pod("web-0") is None
        assert (len(world.host.pids()), macs(world)) == (1, [self.guest.mac])


class DeleteUnmanaged(Unmanaged):
    def begin(self, world):
        super().begin(world)
        super().act(world)
        world.run(5)
        assert world.ready("web-0")

    def act(self, world):
        world.delete_pod("web-0", grace_seconds=30)

    def check(self, world):
        assert (world.pod("web-0"), len(world.host.pids()), macs(world)) == (None, 1, [self.guest.mac])


class Delete(Story):
    def act(self, world):
        world.delete_pod("web-0", grace_seconds=30)

    def check(self, world):
        gone(world)
        assert snapshots(world) == ["fc-base:1", f"latest-{VM}"]
        world.create_pod("heir", guest=FAST, annotations={"cocoonset.cocoonstack.io/image": f"latest-{VM}"})
        world.run(10)
        assert trait(world, "heir") == STATE


class DeleteMacos(Delete):
    os = "macos"

    def check(self, world):
        gone(world)


class DeleteByForce(Story):
    """Its pod is gone at once, so nothing in the cluster tells the next daemon of it. A VM whose removal had not begun
    is an orphan then, and keeps what it has."""

    least = 3

    def act(self, world):
        world.delete_pod("web-0", grace_seconds=0)

    def check(self, world):
        world.run(120)
        assert world.pod("web-0") is None
        assert macs(world) == [world.guest("web-0").mac for _ in world.host.pids()]


class DeleteByForceMacos(DeleteByForce):
    os = "macos"


class DestroyAnOrphan(Story):
    settings: dict = {"orphan_policy": "destroy"}
    least = 3

    def begin(self, world):
        super().begin(world)
        world.stop()
        world.delete_pod("web-0", grace_seconds=0)

    def act(self, world):
        world.start()

    def check(self, world):
        world.run(120)
        gone(world)


class DestroyAnOrphanMacos(DestroyAnOrphan):
    os = "macos"


class DeleteInCreate(Story):
    """The pod is no longer wanted while its VM is being made."""

    os = "linux"
    waits = 60.0

    def begin(self, world):
        for tool in (world.host.cocoon, world.host.macos):
            for verb in ("vm clone", "vm run"):
                tool.slow(verb, 1.0, step="late", times=None)
        world.create_pod("web-0", os=self.os, guest=MAC_GUEST if self.os == "macos" else FAST, annotations=self.wishes)
        world.run(0.5)

    def act(self, world):
        world.delete_pod("web-0", grace_seconds=30)

    def check(self, world):
        gone(world)


class DeleteInCreateMacos(DeleteInCreate):
    os = "macos"


class DeleteTheForked(Delete):
    def begin(self, world):
        super().begin(world)
        world.create_pod("child", guest=FAST, annotations={FORK: VM})
        world.run(10)
        assert snapshots(world) == ["fc-base:1", f"fork-{VM}"]

    def check(self, world):
        assert snapshots(world) == ["fc-base:1", f"latest-{VM}"]
        assert (world.pod("web-0"), len(world.host.pids())) == (None, 1)
        assert macs(world) == [world.guest("child").mac]


class DeleteTheForkedInAFork(DeleteTheForked):
    """Somebody is being cloned from it all the while."""

    def begin(self, world):
        Story.begin(self, world)
        world.host.cocoon.slow("vm clone", 10.0, name="vk-default-child", step="late")
        world.create_pod("child", guest=FAST, annotations={FORK: VM})
        world.run(5)
        assert snapshots(world) == ["fc-base:1", f"fork-{VM}"]


class DeleteHibernated(Delete):
    def begin(self, world):
        super().begin(world)
        world.annotate("web-0", hibernate="true")
        world.run(10)

    def check(self, world):
        gone(world)
        assert snapshots(world) == ["fc-base:1"]


class Hibernate(Story):
    def act(self, world):
        world.annotate("web-0", hibernate="true")

    def check(self, world):
        assert annotations(world, "web-0")["lifecycle-state"] == "hibernated"
        assert status(world, "web-0")["phase"] == "Pending"
        assert not {"id", "ip", "mac"} & set(annotations(world, "web-0"))
        assert (world.host.pids(), macs(world), snapshots(world)) == ([], [], sorted(["fc-base:1", VM]))
        world.annotate("web-0", hibernate=None)
        world.run(30)
        lives(world, state=STATE)
        assert snapshots(world) == ["fc-base:1"]


class HibernateWindows(Hibernate):
    os = "windows"


class HibernateNoMore(Hibernate):
    """The wish is taken back while the daemon is dead: whatever was done, the guest goes on where it was."""

    def meanwhile(self, world):
        world.annotate("web-0", hibernate=None)

    def check(self, world):
        lives(world, state=STATE)
        assert annotations(world, "web-0")["lifecycle-state"] == "ready"
        if snapshots(world) != ["fc-base:1"]:  # kept for as long as the VM may still be removed
            world.run(EARLIER_LIFE)
            lives(world, state=STATE)
        assert snapshots(world) == ["fc-base:1"]


class HibernateNoMoreWindows(HibernateNoMore):
    os = "windows"


class HibernateUnheard(Hibernate):
    """The API takes nothing of what we say of the pod, so a new daemon finds it as it was before."""

    def act(self, world):
        world.kube.fail("PATCH */web-0*", _later(), times=None)
        super().act(world)

    def check(self, world):
        world.kube.gate.failures.clear()
        world.run(60)
        super().check(world)


class Wake(Story):
    def begin(self, world):
        super().begin(world)
        world.annotate("web-0", hibernate="true")
        world.run(10)
        assert annotations(world, "web-0")["lifecycle-state"] == "hibernated"

    def act(self, world):
        world.annotate("web-0", hibernate=None)

    def check(self, world):
        lives(world, state=STATE)
        assert annotations(world, "web-0")["lifecycle-state"] == "ready"
        assert snapshots(world) == ["fc-base:1"]


class WakeNoMore(Wake):
    """It shall sleep on: a wish that comes while the daemon is dead. Of what the guest did since, nothing is lost."""

    def meanwhile(self, world):
        world.annotate("web-0", hibernate="true")

    def check(self, world):
        Hibernate.check(self, world)


class WakeNoMoreWindows(WakeNoMore):
    os = "windows"


class WakeWithSetUp(Wake):
    wishes = FIRECRACKER

    def check(self, world):
        super().check(world)
        assert annotations(world, "web-0")["post-clone-state"] == "done"


class WakeUnheard(Wake):
    def act(self, world):
        world.kube.fail("PATCH */web-0*", _later(), times=None)
        super().act(world)

    def check(self, world):
        world.kube.gate.failures.clear()
        world.run(60)
        super().check(world)


class Restart(Story):
    def act(self, world):
        self.id = annotations(world, "web-0")["id"]
        world.guest("web-0").crash()

    def check(self, world):
        lives(world, state=STATE)
        assert annotations(world, "web-0")["id"] == self.id


class RestartMacos(Story):
    os = "macos"

    def act(self, world):
        world.guest("web-0").crash()

    def check(self, world):
        lives(world)
        assert world.host.macos.count("vm run") == 1


class Evict(Story):
    """Whoever owns the pod makes a new one; this one may also be brought up again, if nobody saw the loss."""

    def act(self, world):
        world.host.cocoon.execute(["cocoon", "vm", "rm", "--force", VM], 30.0)

    def check(self, world):
        if world.pod("web-0") is None:
            gone(world)
        else:
            lives(world)


class EvictWhatStopsAgain(Evict):
    def begin(self, world):
        super().begin(world)
        world.guest("web-0").crash()
        world.run(10)
        assert world.ready("web-0")

    def act(self, world):
        world.guest("web-0").crash()


def _later():
    from vkcocoon_kube import ApiError

    return ApiError(500, "InternalError", "later")


class Killer:
    """Counts the steps of the daemon from now on, and ends it at one of them (None: at none)."""

    STEPS = {
        ("command", "begins"),
        ("command", "ends"),
        ("push", "status"),
        ("push", "annotations"),
        ("push", "delete"),
    }

    def __init__(self, world, at):
        self.world, self.at = world, at
        self.steps = []
        self.killed = ""
        world.timeline.listeners.append(self.hear)
        world.leases.on_change = self.leases_changed(world.leases.on_change)

    def leases_changed(self, tell):
        def changed(*news):
            tell(*news)
            if self.world.life is not None and self.releasing():
                self.step("lease changes")

        return changed

    def releasing(self):
        return not self.killed

    def hear(self, entry):
        if (entry.actor, entry.kind) in self.STEPS and entry.key != "default/heir":
            what = dict(entry.fields).get("verb", "")
            if what not in ("vm list", "snapshot list", "vm status"):
                self.step(f"{entry.actor} {entry.kind} {what}".strip())

    def step(self, text):
        if self.killed or self.world.life is None:
            return
        if self.at is not None and len(self.steps) == self.at:
            self.killed = f"step {self.at}: {text}"
            self.world.life.over = True  # from here on it reaches nothing
            self.world.clock.at(self.world.clock.elapsed(), self.world.kill)
        self.steps.append(text)


SLOW = ("vm clone", "vm run", "vm start", "vm rm", "snapshot save", "snapshot rm", "image pull")


def told(story, at, beside, again=None):
    """Tell the story with a kill at that step (None: without); the steps it took, and where it was killed. ``beside``:
    where in each command time is spent, so that the next daemon starts beside it; "" for nowhere. ``again``: the step
    of the next daemon at which that one is killed, too, if it takes so many."""
    with World(**story.settings) as world:
        story.begin(world)
        for verb in SLOW if beside else ():
            for tool in (world.host.cocoon, world.host.macos):
                tool.slow(verb, 3.0, times=None, step=beside)
        killer = Killer(world, at)
        story.act(world)
        world.run(story.waits if at is None else 0)
        if at is not None:
            world.clock.run_until(lambda: world.life is None, story.waits)
            if killer.killed:
                world.run(0.5 if beside else 20.0)
                story.meanwhile(world)
                if again is not None:
                    killed_again(world, again)
                    world.run(0.5 if beside else 20.0)
                world.start()
                world.run(120)
        steps, killer.killed = list(killer.steps), killer.killed or "not"
        if at is None:
            story.meanwhile(world)
            world.run(story.waits)
        story.check(world)
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []
        return steps, killer.killed


def killed_again(world, at):
    """Start the daemon, and end it at that step of its own; at the latest when it has none left."""
    killer = Killer(world, at)
    world.start()
    world.clock.run_until(lambda: world.life is None, 30.0)
    if not killer.killed:
        killer.killed = "not"
        world.kill()


STORIES = [
    Create,
    CreateNoMore,
    CreateByRunNoMore,
    CreateMacosNoMore,
    CreateByRun,
    CreateMacos,
    CreateWithSetUp,
    CreateByFork,
    CreateByDirectory,
    CreateFromHibernated,
    CreateByRestore,
    Unmanaged,
    DeleteUnmanaged,
    Delete,
    DeleteMacos,
    DeleteByForce,
    DeleteByForceMacos,
    DestroyAnOrphan,
    DestroyAnOrphanMacos,
    DeleteInCreate,
    DeleteInCreateMacos,
    DeleteTheForked,
    DeleteTheForkedInAFork,
    DeleteHibernated,
    Hibernate,
    HibernateWindows,
    HibernateNoMore,
    HibernateNoMoreWindows,
    HibernateUnheard,
    Wake,
    WakeNoMore,
    WakeNoMoreWindows,
    WakeWithSetUp,
    WakeUnheard,
    Restart,
    RestartMacos,
    Evict,
    EvictWhatStopsAgain,
]


def walked(story, beside, again=None):
    """Kill the daemon at each step in turn; the steps at which the story did not end as it should, and how."""
    steps, _ = told(story(), None, beside)
    assert len(steps) >= story.least, steps
    failed = {}
    for at in range(len(steps)):
        try:
            _, killed = told(story(), at, beside, again)
            assert killed != "not"
        except AssertionError as error:
            failed[f"{at}: {steps[at]}"] = str(error).splitlines()[0]
    return failed


@pytest.mark.parametrize("beside", ["", "middle"], ids=["after it", "beside it"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_wherever_the_daemon_dies_the_next_one_brings_the_story_to_its_end(story, beside):
    assert walked(story, beside) == {}


@pytest.mark.parametrize("again", [0, 1, 4])
@pytest.mark.parametrize("beside", ["", "middle"], ids=["after it", "beside it"])
@pytest.mark.parametrize("story", [CreateMacosNoMore, DeleteByForce, HibernateNoMore], ids=lambda story: story.__name__)
def test_a_daemon_that_dies_again_soon_after_its_start_loses_nothing_either(story, beside, again):
    assert walked(story, beside, again) == {}


CHANGED = [story for story in STORIES if story.meanwhile is not Story.meanwhile]


@pytest.mark.parametrize("story", [*CHANGED, Create, CreateByRun, CreateMacos], ids=lambda story: story.__name__)
def test_a_command_that_leaves_no_trace_before_the_next_daemon_looks_makes_nothing_that_stays(story):
    assert walked(story, "before") == {}
