"""Decision L10 over the whole life of a pod: an address is withheld from others only while its pod may be seen there.

A claim that outlives its pod would keep every later guest of that address from being Ready, for ever: these tests end
pods in each way a pod can end and then give their address to somebody else.
"""

import itertools

import pytest

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, reason


def the_next_guest_of(world, ip):
    """A new pod whose guest gets exactly that address."""
    world.create_pod("next", guest=GuestSpec(boot_s=1.0, lease_s=0.0))
    world.run(0.5)
    world.leases.lease(world.guest("next").mac, ip)
    world.run(5)


@pytest.mark.parametrize("grace_seconds", [0, 1])
def test_the_address_of_a_deleted_pod_is_free_for_the_next_guest(world, grace_seconds):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    ip = world.guest("web-0").ip
    world.delete_pod("web-0", grace_seconds=grace_seconds)
    world.run(10)
    the_next_guest_of(world, ip)
    assert (reason(world, "next"), world.ready("next")) == ("ProbeSucceeded", True)


def test_the_address_of_a_pod_that_went_before_the_first_look_is_free(world):
    """It was adopted at start and force deleted before the pods were listed for the first time."""
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    ip = world.guest("web-0").ip
    world.stop()
    lists = itertools.count()
    hold = world.kube.hang(lambda request: str(request) == "LIST /api/v1/pods" and next(lists) == 1)
    world.start()
    world.run(1)
    assert hold.reached.is_set()  # adopted, and not yet listed by the controller
    world.delete_pod("web-0", grace_seconds=0)
    hold.release()
    world.run(60)
    assert world.host.pids() == []
    the_next_guest_of(world, ip)
    assert (reason(world, "next"), world.ready("next")) == ("ProbeSucceeded", True)


def test_the_address_of_a_pod_that_a_namesake_replaced_is_free(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    ip = world.guest("web-0").ip
    world.kube.cut_watches()
    world.delete_pod("web-0", grace_seconds=0)
    world.create_pod("web-0", guest=FAST)
    world.run(60)
    assert world.ready("web-0")
    if world.guest("web-0").ip != ip:
        the_next_guest_of(world, ip)
        assert world.ready("next")


def test_no_claim_is_left_when_all_pods_are_gone():
    for seed in range(3):
        with World(seed) as world:
            for number in range(4):
                world.create_pod(f"web-{number}", guest=FAST)
            world.run(5)
            for number in range(4):
                world.delete_pod(f"web-{number}", grace_seconds=number % 2)
            world.run(30)
            publication = world.daemon.provider._publication
            assert (publication._claimers, publication._addresses._holder_on) == ({}, {})


def test_a_pod_that_waited_for_its_new_address_without_falling_is_shown_there_once_it_is_free():
    with World() as world:
        guest = GuestSpec(boot_s=1.0, lease_s=0.1)
        for name, ip in (("web-0", "10.88.0.200"), ("web-1", "10.88.0.201")):
            world.create_pod(name, guest=guest)
            world.run(2)
            move(world, name, ip)
        world.run(20)
        move(world, "web-0", "10.88.0.201")
        # It fails once for the conflict; the other one leaves before that makes three.
        assert world.clock.run_until(lambda: failed(world, "web-0"), 10)
        move(world, "web-1", "10.88.0.200")
        world.run(60)
        shown = {name: (world.ready(name), world.pod(name)["status"]["podIP"]) for name in ("web-0", "web-1")}
        assert shown == {"web-0": (True, "10.88.0.201"), "web-1": (True, "10.88.0.200")}
        assert world.timeline.of(actor="invariant") == []


def move(world, name, ip):
    world.leases.lease(world.guest(name).mac, ip)
    world.guest(name).renumber(ip)


def failed(world, name):
    return world.timeline.of(actor="probe", kind="fails", key=f"default/{name}")[-1].seconds > 20
