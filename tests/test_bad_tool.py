"""A tool that fails in every way a tool can, in the middle of everything a pod goes through: its neighbor notices
nothing, nothing is lost or doubled, and in the end the pod is where it should be."""

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, annotations, status
from tests.test_last_state import macs
from tests.test_sources import mark, trait

VM = "vk-default-web-0"
STATE = 7 * 2**30
MAC = GuestSpec(os="macos", boot_s=0.0, lease_s=0.0, ssh_after_s=0.0)
LONG_S = 1500.0  # twice the longest limit that is met here, and the pauses of the retries


def exits(tool, verb, name=VM):
    tool.fail(verb, name=name, stderr="\x00\u2603 panic: runtime error: not found? no such thing!\n\n", times=3)


def exits_after_its_work(tool, verb, name=VM):
    tool.fail(verb, name=name, step="after", stderr="", returncode=77, times=2)


def says_nothing(tool, verb, name=VM):
    tool.garble(verb, "", name=name, times=3)


def says_half(tool, verb, name=VM):
    tool.garble(verb, '{"id": "7ETWEWAFNAJ77D', name=name, times=3)


def says_too_much(tool, verb, name=VM):
    tool.garble(verb, "x" * 50_000_000, name=name, times=1)


def says_something_else(tool, verb, name=VM):
    tool.garble(verb, '{"id": "SOMEBODYELSES", "state": "running", "pid": 1, "config": {"name": "other"}}', name=name)


def hangs(tool, verb, name=VM):
    tool.slow(verb, 600.0, name=name, step="before", times=1)


def is_killed(tool, verb, name=VM):
    tool.kill(verb, name=name, step="middle", times=2)


WAYS = [exits, exits_after_its_work, says_nothing, says_half, says_too_much, says_something_else, hangs, is_killed]


@pytest.fixture
def world():
    with World() as world:
        world.create_pod("neighbor", guest=FAST)
        world.run(5)
        yield world
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []
        # Ready once, and never anything else, unless the test says why.
        assert len(world.flips("neighbor")) == getattr(world, "flips_of_the_neighbor", 2)


def well(world):
    assert world.ready("web-0") and world.ready("neighbor")
    assert len(world.host.pids()) == 2
    assert macs(world) == sorted(world.guest(name).mac for name in ("web-0", "neighbor"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("verb", ["vm clone", "vm inspect"])
def test_a_create(world, verb, way):
    way(world.host.cocoon, verb)
    world.create_pod("web-0", guest=FAST)
    world.run(LONG_S)
    well(world)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("verb", ["vm run", "vm inspect"])
def test_a_macos_create(world, verb, way):
    world.host.specs[VM] = MAC
    way(world.host.macos, verb)
    world.create_pod("web-0", os="macos", guest=MAC)
    world.run(LONG_S)
    well(world)
    assert len(world.host.macos.qemus(VM)) == 1


@pytest.fixture
def ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    mark(world, "web-0", STATE)
    return world


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("verb", ["snapshot save", "vm rm", "vm inspect"])
def test_a_deletion(ready, verb, way):
    way(ready.host.cocoon, verb)
    ready.delete_pod("web-0", grace_seconds=30)
    ready.run(LONG_S)
    assert ready.pod("web-0") is None
    assert (len(ready.host.pids()), macs(ready)) == (1, [ready.guest("neighbor").mac])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("verb", ["snapshot save", "vm rm", "vm clone", "vm inspect", "snapshot rm"])
def test_a_hibernate_and_a_wake(ready, verb, way):
    way(ready.host.cocoon, verb)
    ready.annotate("web-0", hibernate="true")
    ready.run(LONG_S)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    ready.annotate("web-0", hibernate=None)
    ready.run(LONG_S)
    well(ready)
    assert trait(ready, "web-0") == STATE


@pytest.mark.parametrize(
    "way", [hangs, is_killed, says_nothing, says_half, says_too_much], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("verb", ["vm start", "vm inspect"])
def test_a_restart_in_place(ready, verb, way):
    ready.run(2)
    way(ready.host.cocoon, verb)
    ready.guest("web-0").crash()
    ready.run(LONG_S)
    well(ready)
    assert trait(ready, "web-0") == STATE


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("verb", ["vm list", "snapshot list"])
def test_a_start(ready, verb, way):
    ready.run(2)
    made = ready.host.cocoon.count("vm clone")
    # Nobody could look for 30 s: not Ready after 15. Who is not listed is gone until the name turns out to be taken.
    if way is hangs or (way is says_nothing and verb == "vm list"):
        ready.flips_of_the_neighbor = 4
    ready.stop()
    way(ready.host.cocoon, verb, name="*")
    ready.start()
    ready.run(LONG_S)
    well(ready)
    assert trait(ready, "web-0") == STATE
    assert [status(ready, name)["containerStatuses"][0]["restartCount"] for name in ("web-0", "neighbor")] == [0, 0]
    # A list of nothing is what the tool prints on a host without VMs: then their names turn out to be taken.
    assert ready.host.cocoon.count("vm clone") - made <= (2 if way is says_nothing else 0)


@pytest.mark.parametrize("os", ["linux", "macos"])
def test_a_tool_that_is_away_for_a_minute_in_the_middle_of_everything(world, os):
    tools = (world.host.cocoon, world.host.macos)
    world.create_pod("web-0", os=os, guest=MAC if os == "macos" else FAST)
    for act in (
        lambda: None,
        lambda: world.guest("web-0").crash(),
        lambda: world.delete_pod("web-0", grace_seconds=600),
    ):
        act()
        for tool in tools:
            tool.missing = True
        world.run(60)
        for tool in tools:
            tool.missing = False
        world.run(120)
        if world.pod("web-0") is not None:
            well(world)
    assert world.pod("web-0") is None
    assert len(world.host.pids()) == 1
