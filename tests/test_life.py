"""A daemon that is killed says and writes nothing more; what it had set going in the world goes on without it."""

import gevent
import pytest

from simulator.fake_vms import GuestSpec
from simulator.life import Life
from simulator.world import World
from tests.provider_rig import FAST, calls
from vkcocoon_kube import ApiError


@pytest.fixture(params=[None, 1, 2, 3], ids=lambda seed: f"seed {seed}")
def world(request):
    with World(request.param) as world:
        yield world
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []


def said(world, since):
    """What the daemon did after an instant: commands it began, what it wrote, what it handed over."""
    entries = [entry for entry in world.timeline if entry.seconds > since]
    return [
        entry.text()
        for entry in entries
        if (entry.actor, entry.kind) in {("command", "begins"), ("daemon", "hands over")} or entry.actor == "push"
    ]


def test_a_killed_daemon_does_nothing_any_more(world):
    world.create_pod("web-0", guest=FAST)
    world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=60, lease_s=1, ssh_after_s=1))
    world.run(10)
    world.guest("web-0").silent()
    world.kill()
    requests, killed = len(world.kube.requests), world.clock.elapsed()
    world.delete_pod("web-0")
    world.run(120)
    assert said(world, killed) == []
    assert len(world.kube.requests) == requests
    assert world.kube.open_watches == 0


def test_nothing_of_a_killed_daemon_is_left(world):
    world.create_pod("web-0", guest=FAST)
    world.run(10)
    life = world.life
    assert len(life._members) > 5
    world.kill()
    world.run(0)
    left = [greenlet.name for greenlet in life._members if not greenlet.dead]
    assert [name for name in left if name != "guest vk-default-web-0"] == []  # a VM outlives who started it


def test_an_orderly_stop_still_says_what_it_owes_and_a_kill_does_not(world):
    world.create_pod("web-0", guest=FAST)
    world.run(10)
    world.kube.fail("PATCH */web-0/status", ApiError(500, "InternalError", "boom"), times=None)
    world.guest("web-0").silent()
    world.run(30)
    world.kube.gate.failures.clear()
    assert world.ready("web-0")
    (world.kill if world.seed in (1, 3) else world.stop)()
    world.run(5)
    assert world.ready("web-0") is (world.seed in (1, 3))


def test_a_clone_that_was_under_way_is_finished_without_us_and_adopted(world):
    world.host.cocoon.slow("vm clone", 5)
    world.create_pod("web-0", guest=GuestSpec(boot_s=1.0, lease_s=0.1))
    world.run(2)
    world.kill()
    world.run(1)
    world.start()
    world.run(20)
    assert world.ready("web-0")
    clones = [(entry.kind, dict(entry.fields).get("exit")) for entry in commands(world, "vm clone")]
    assert clones[0] == ("begins", None)
    assert ("ends", "0") in clones
    assert len(world.timeline.of(actor="host", kind="power on")) == 1
    assert "vm rm" not in calls(world.host.cocoon)


def commands(world, verb):
    return [entry for entry in world.timeline.of(actor="command") if dict(entry.fields)["verb"] == verb]


def test_guests_live_on(world):
    world.host.renew_s = 20.0
    world.create_pod("web-0", guest=FAST)
    world.run(10)
    world.kill()
    world.leases.forget_file()
    world.run(30)
    assert world.leases.address(world.guest("web-0").mac)


def test_a_question_that_was_under_way_ends_with_who_asked(world):
    world.host.cocoon.hang("vm inspect")
    world.create_pod("web-0", guest=FAST)
    world.run(2)
    (asking,) = [g for g in world.clock._group if "vm inspect" in g.name]
    world.kill()
    world.run(1)
    assert asking.dead


def test_healthy_guests_do_not_blink_over_a_kill(world):
    world.create_pod("web-0", guest=FAST)
    world.run(10)
    flips = world.flips("web-0")
    world.kill()
    world.run(3)
    world.start()
    world.run(60)
    assert world.flips("web-0") == flips


def test_a_start_while_it_runs_is_refused():
    with World() as world, pytest.raises(RuntimeError, match="runs already"):
        world.start()


def test_each_life_is_told_apart(world):
    first = world.life
    world.kill()
    world.start()
    world.run(1)
    assert isinstance(world.life, Life)
    assert world.life is not first
    assert first.over
    with pytest.raises(gevent.GreenletExit):
        first.check()
