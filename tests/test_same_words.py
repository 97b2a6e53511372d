"""Whoever looks anywhere reads the same word and the same sentence, for every reason of docs/reasons.md (K5).

The doors: the conditions and Events that `kubectl describe pod` prints, the document behind `vk-cocoon status`, the
status page, and the metrics. How each reason comes about is tested where its cause is; here it is simply given.
"""

import re
from html import unescape

import pytest

import vkcocoon_readiness
from simulator.world import World
from tests.provider_rig import FAST, events, message, reason
from vkcocoon_page import page
from vkcocoon_probes import ProbeResult
from vkcocoon_status import IntentState, Reason

READY = {Reason.PROBE_SUCCEEDED, Reason.PING_SKIPPED}
INTENTS = {
    Reason.LIFECYCLE_HIBERNATING: IntentState.HIBERNATING,
    Reason.LIFECYCLE_HIBERNATED: IntentState.HIBERNATED,
    Reason.LIFECYCLE_FAILED: IntentState.FAILED,
}
# What only a pod without a VM shows; and what never is why a pod waits, because it is the half of Ready that is there.
OTHERS = {Reason.LIFECYCLE_CREATING, Reason.TERMINATING, Reason.LIFECYCLE_READY}
PROBED = [one for one in Reason if one not in INTENTS and one not in OTHERS]


@pytest.fixture
def world(monkeypatch):
    with World() as world:
        world.leases.write()
        world.answer = ProbeResult(True, Reason.PROBE_SUCCEEDED, "it answers")
        monkeypatch.setattr(vkcocoon_readiness.Readiness, "_guest_probe", lambda *_: world.answer)
        yield world


def document(world):
    return world.daemon.overview(world.daemon.checks()).document()


def held(world):
    (entry,) = list(world.daemon.provider.held)
    return entry


def shown(world):
    """The words of the page's row."""
    row = re.search(r"<tbody>(.*?)</tbody>", page(document(world)), re.DOTALL)[1]
    return unescape(re.sub(r"<[^>]+>", "\n", row))


def check_doors(world, why, sentence):
    (pod,) = document(world)["pods"]
    sample = world.daemon.ports.metrics.registry.get_sample_value
    assert (reason(world, "web-0"), message(world, "web-0")) == (why, sentence)
    assert (pod["reason"], pod["message"]) == (why, sentence)
    assert {why, sentence} <= set(shown(world).splitlines())
    assert pod["ready"] is world.ready("web-0") is (why in READY)
    assert sample("cocoon_vk_pods_waiting", {"reason": why}) == (None if why in READY else 1)


@pytest.mark.parametrize("why", PROBED)
def test_what_the_probe_found_is_told_alike_at_every_door(world, why):
    sentence = f"words about <{why}> & more"
    world.create_pod("web-0", guest=FAST)
    world.run(20)
    world.answer = ProbeResult(why in READY, why, sentence)
    if why in READY:  # a pod that stays ready keeps the words it became ready with
        world.answer = ProbeResult(False, Reason.PING_TIMEOUT, "silence")
        world.run(20)
        world.answer = ProbeResult(True, why, sentence)
    world.run(120)
    check_doors(world, why, sentence)
    kind = "Healthy" if why in READY else "Unhealthy"
    assert (kind, f"{why}: {sentence}") in events(world, "web-0")


@pytest.mark.parametrize("why", INTENTS)
def test_what_the_lifecycle_says_is_told_alike_at_every_door_and_before_the_probes_word(world, why):
    world.create_pod("web-0", guest=FAST)
    world.run(20)
    entry = held(world)
    entry.set_intent(INTENTS[why], f"words about {why}")
    world.daemon.provider._publication.publish(entry)
    world.run(120)
    check_doors(world, why, f"words about {why}")


def test_a_pod_whose_vm_is_being_made_says_so_at_every_door(world):
    world.host.cocoon.hold("vm clone")
    world.create_pod("web-0", guest=FAST)
    world.run(10)
    check_doors(world, Reason.LIFECYCLE_CREATING, message(world, "web-0"))


def test_a_pod_that_is_being_deleted_says_so_at_every_door(world):
    world.create_pod("web-0", guest=FAST)
    world.run(20)
    world.host.cocoon.hold("vm rm")
    world.delete_pod("web-0")
    world.run(10)
    check_doors(world, Reason.TERMINATING, message(world, "web-0"))
