"""The daemon's own pinger on a simulated wire (I1): what is late, lost, repeated or somebody else's does not count."""

import struct

import pytest

from simulator import wire
from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, reason
from vkcocoon_net import IcmpPinger


@pytest.fixture
def world():
    with World(packets=True) as world:
        yield world
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []


def test_it_is_the_real_pinger(world):
    assert isinstance(world.daemon.ports.pinger, IcmpPinger)


def test_probes_happen_at_the_same_instants_as_with_a_fake_pinger(world):
    with World() as other:
        for each in (world, other):
            each.create_pod("web-0", guest=GuestSpec(boot_s=1.0, lease_s=0.1, latency_s=0.004))
            each.run(30)
            each.guest("web-0").silent()
            each.run(60)
        assert world.probes("web-0") == other.probes("web-0")
        assert world.flips("web-0") == other.flips("web-0")


def test_a_guest_among_noise_is_ready_and_a_dead_one_beside_it_is_not(world):
    world.create_pod("web-0", guest=GuestSpec(boot_s=0, lease_s=0, flood=True))
    world.create_pod("web-1", guest=GuestSpec(boot_s=0, lease_s=0, echo=False))
    world.run(120)
    assert (world.ready("web-0"), len(world.flips("web-0"))) == (True, 2)
    assert (world.ready("web-1"), reason(world, "web-1")) == (False, "PingTimeout")


@pytest.mark.parametrize("respect", range(5), ids=["nonce", "sequence", "identifier", "sender", "length"])
def test_a_reply_that_is_wrong_in_one_respect_makes_nobody_ready(world, monkeypatch, respect):
    def forge(self, ip, request, flood):
        identifier, sequence = struct.unpack("!HH", request[4:8])
        self._packets.append(wire.noise(ip, identifier, sequence, request[8:])[respect])
        self._arrived()

    monkeypatch.setattr(wire._Wire, "_deliver", forge)
    world.create_pod("web-0", guest=FAST)
    world.run(60)
    assert len(world.flips("web-0")) == 1


def test_the_same_reply_without_the_wrong_respect_does(world, monkeypatch):
    def answer(self, ip, request, flood):
        identifier, sequence = struct.unpack("!HH", request[4:8])
        self._packets.append(wire.reply(ip, identifier, sequence, request[8:]))
        self._arrived()

    monkeypatch.setattr(wire._Wire, "_deliver", answer)
    world.create_pod("web-0", guest=FAST)
    world.run(1)
    assert world.ready("web-0")


def test_a_reply_that_comes_after_its_echo_was_given_up_does_not_count_for_the_next(world):
    # While not ready an echo waits for at most a second (T1); every answer of this guest takes longer.
    world.create_pod("web-0", guest=GuestSpec(boot_s=0, lease_s=0, latency_s=1.5))
    world.run(60)
    assert len(world.flips("web-0")) == 1
    assert reason(world, "web-0") == "PingTimeout"


def test_every_second_echo_lost_is_no_flip(world):
    world.create_pod("web-0", guest=FAST)
    world.run(6)
    world.guest("web-0").loss = 0.3
    world.run(600)
    results = [entry.kind for entry in world.timeline.of(actor="probe", key="default/web-0") if entry.seconds > 6]
    assert 0.2 < results.count("fails") / len(results) < 0.5
    longest = max(len(run) for run in "".join(kind[0] for kind in results).split("o"))
    assert (len(world.flips("web-0")) == 2) is (longest < 3)


def test_an_unreachable_guest_is_a_failed_probe_with_its_reason(world):
    world.create_pod("web-0", guest=FAST)
    world.run(6)
    world.host.pinger.fail(world.guest("web-0").ip, times=3)
    world.run(15)
    flips = world.timeline.of(actor="kube", kind="ready", key="default/web-0")
    assert dict(flips[-2].fields)["reason"] == "PingFailed"
