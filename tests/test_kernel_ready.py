"""Readiness on a real kernel: the whole path of probe manager, lease file and pinger, on the system's clock.

A guest is an address on a real interface whose kernel answers echoes or does not. What is asserted in seconds here is
the promise itself (T1, T2: a guest that begins to answer is met soon), not the speed of the machine.
"""

import json
import time
from contextlib import closing

import gevent
from gevent.event import Event
from network_rig import flood, in_own_network, lay_silent_net, set_kernel

from vkcocoon_guests import Reach
from vkcocoon_net import LeaseFile, open_pinger, ssh_banner, tcp_accepts
from vkcocoon_probes import ProbeManager, ProbeResult, SystemClock
from vkcocoon_status import Reason

LIVING, DEAD = "127.0.0.11", "198.51.100.55"
MACS = {LIVING: "02:00:00:00:00:0b", DEAD: "02:00:00:00:00:0a"}


def lease_file(tmp_path):
    path = tmp_path / "leases.json"
    rows = [{"mac": mac, "ip": ip, "expiry": "2099-01-01T00:00:00Z"} for ip, mac in MACS.items()]
    path.write_text(json.dumps(rows))
    return LeaseFile(path)


def guest_probe(leases, pinger, mac):
    """The last two checks of the provider's probe: the lease of the MAC, then one echo."""
    reach, clock = Reach(pinger, tcp_accepts, ssh_banner), SystemClock()

    def probe(deadline):
        lease = leases.lookup(mac, clock.now())
        if lease is None:
            return ProbeResult(False, Reason.WAITING_FOR_LEASE, "")
        return reach.guest(lease.ip, {}, deadline)

    return probe


def now():
    return time.monotonic()  # noqa: TID251  a real kernel needs real time


@in_own_network
def test_a_dead_guest_beside_a_living_one_that_is_flooded_is_never_ready(tmp_path):
    lay_silent_net()
    leases, manager = lease_file(tmp_path), ProbeManager(SystemClock())
    with closing(open_pinger()) as pinger, closing(manager), flood(LIVING, identifier=0x1234):
        assert not pinger.degraded
        for ip, mac in MACS.items():
            manager.start(ip, guest_probe(leases, pinger, mac), lambda: None)
        seen = set()
        until = now() + 6.0
        while now() < until:
            seen.add((manager.get(LIVING).ready, manager.get(DEAD).ready))
            Event().wait(0.05)
    assert seen == {(True, False)}


@in_own_network
def test_a_guest_that_begins_to_answer_in_its_first_second_is_ready_within_1_1_seconds_of_it(tmp_path):
    leases = lease_file(tmp_path)
    for tenth in range(10):
        set_kernel("net/ipv4/icmp_echo_ignore_all", 1)
        manager, ready = ProbeManager(SystemClock()), Event()
        with closing(open_pinger()) as pinger, closing(manager):
            began = now()
            answers = []

            def speak(after=0.05 + tenth / 10, answers=answers):
                Event().wait(after)
                set_kernel("net/ipv4/icmp_echo_ignore_all", 0)
                answers.append(now())

            speaking = gevent.spawn(speak)  # noqa: TID251  the guest of this test
            manager.start("guest", guest_probe(leases, pinger, MACS[LIVING]), ready.set)
            assert not manager.get("guest").ready
            while not manager.get("guest").ready and now() < began + 5:
                ready.wait(0.01)
            seen = now()
            speaking.join()
        assert seen - answers[0] <= 1.1, (
            f"spoke after {answers[0] - began:.3f} s, was ready {seen - answers[0]:.3f} s later"
        )


@in_own_network
def test_a_guest_that_falls_silent_is_not_ready_after_three_lost_echoes_and_ready_again_soon_after_it_speaks(tmp_path):
    """The steady pause is shortened here, and only that: three losses in a row, no fewer."""
    leases, losses, flips = lease_file(tmp_path), [], []
    manager = ProbeManager(
        SystemClock(),
        timeout=0.3,
        steady_pause=0.2,
        observer=lambda agent, result, lateness, took: losses.append(result.ready),
    )
    with closing(open_pinger()) as pinger, closing(manager):
        manager.start(
            "guest", guest_probe(leases, pinger, MACS[LIVING]), lambda: flips.append(manager.get("guest").ready)
        )
        assert manager.get("guest").ready
        set_kernel("net/ipv4/icmp_echo_ignore_all", 1)
        losses.clear()
        until = now() + 10
        while not flips and now() < until:
            Event().wait(0.01)
        assert (flips, losses) == ([False], [False, False, False])
        set_kernel("net/ipv4/icmp_echo_ignore_all", 0)
        while len(flips) < 2 and now() < until:
            Event().wait(0.01)
        assert flips == [False, True]
