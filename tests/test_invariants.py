"""Each rule of the simulator is broken here on purpose, and caught: a rule that cannot fail would be decoration.

What is broken is the daemon (patched at run time), or a liar writes to Kubernetes in its place.
"""

import pytest

from simulator.fake_vms import GuestSpec
from simulator.invariants import RULES, ClusterRules, Rulebook
from simulator.world import World
from tests.provider_rig import FAST
from vkcocoon import Provider
from vkcocoon_probes import ProbeAgent, ProbeManager, ProbeResult, spawn
from vkcocoon_status import LIFECYCLE_READY, PROBE_READY
from vkcocoon_tracking import TrackedPod

COVERED = set()


@pytest.fixture
def world():
    with World() as world:
        yield world


def breaks(rule):
    """Marks the test that breaks a rule."""
    assert rule in RULES
    COVERED.add(rule)
    return lambda test: test


def broken(world):
    return {dict(entry.fields)["rule"] for entry in world.timeline.of(actor="invariant")}


def claim(world, name="web-0", *, phase="Running", ip="10.9.9.9", **conditions):
    """Somebody writes a status as if it were the daemon."""
    listed = [{"type": type_.replace("_", "/"), "status": status} for type_, status in conditions.items()]
    body = {"status": {"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}] if ip else [], "conditions": listed}}
    world.kube.admin.patch(f"/api/v1/namespaces/default/pods/{name}/status", body, kind="strategic")


def all_ready():
    return dict.fromkeys(("Ready", PROBE_READY.replace("/", "_"), LIFECYCLE_READY.replace("/", "_")), "True")


def alone(world, *names):
    """Pods on a node whose daemon does not run: nobody corrects the liar."""
    world.stop()
    for name in names or ("web-0",):
        world.create_pod(name)


def test_a_truthful_world_breaks_nothing(world):
    world.create_pod("web-0", guest=FAST)
    world.run(30)
    world.guest("web-0").silent()
    world.run(30)
    world.delete_pod("web-0")
    world.run(30)
    assert broken(world) == set()


@breaks("ready means both halves")
def test_ready_without_its_halves(world):
    alone(world)
    claim(world, Ready="True")
    assert broken(world) == {"ready means both halves"}


@breaks("ready means an address")
@pytest.mark.parametrize("ip", ["", "0.0.0.0", "224.0.0.1"])
def test_ready_on_no_address(world, ip):
    alone(world)
    claim(world, ip=ip, **all_ready())
    assert broken(world) == {"ready means an address"}


@breaks("ready means running")
def test_ready_while_pending(world):
    alone(world)
    claim(world, phase="Pending", **all_ready())
    assert broken(world) == {"ready means running"}


@breaks("one ready pod an address")
def test_two_ready_pods_on_one_address(world):
    alone(world, "web-0", "web-1")
    claim(world, "web-0", **all_ready())
    assert broken(world) == set()
    claim(world, "web-1", **all_ready())
    assert broken(world) == {"one ready pod an address"}


def test_two_ready_pods_on_one_address_are_fine_when_one_of_them_is_not_managed(world):
    world.stop()
    world.create_pod("web-0")
    world.create_pod("web-1", annotations={"cocoonset.cocoonstack.io/managed": "false"})
    for name in ("web-0", "web-1"):
        claim(world, name, **all_ready())
    assert broken(world) == set()


@breaks("status before annotation")
def test_the_ready_annotation_before_its_status(world):
    alone(world)
    world.annotate("web-0", lifecycle_state="ready")
    assert broken(world) == {"status before annotation"}


@breaks("terminal stays terminal")
def test_a_pod_that_comes_back_from_the_dead(world):
    alone(world)
    claim(world, phase="Succeeded")
    # The fake API server refuses that, as the real one does not: it is told where the server could not be asked.
    rules = ClusterRules(world.kube.store, world.rulebook)
    old = world.pod("web-0")
    new = {**old, "status": {**old["status"], "phase": "Running"}}
    for rule, text in rules._problems("default/web-0", old, new):
        world.rulebook.broken(rule, "default/web-0", text)
    assert broken(world) == {"terminal stays terminal"}


@breaks("transitions tell the truth")
def test_a_transition_time_that_moves_without_a_transition(world):
    pod = world.create_pod("web-0")
    world.run(0)
    for time in ("2026-01-01T00:00:00Z", "2026-01-01T00:00:07Z"):
        condition = {"type": "Ready", "status": "False", "lastTransitionTime": time}
        status = {"phase": "Pending", "conditions": [condition]}
        world.daemon.provider._publication.notify({"metadata": dict(pod["metadata"], annotations={}), "status": status})
    assert broken(world) == {"transitions tell the truth"}


def test_a_change_and_back_that_the_cluster_was_too_slow_to_see_is_the_truth_too(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.kube.down = True
    world.guest("web-0").silent()
    world.run(20)
    world.guest("web-0").silent(False)
    world.run(5)
    world.kube.down = False
    world.run(60)
    assert world.ready("web-0")
    assert broken(world) == set()


@breaks("nothing after forget")
def test_a_result_that_is_stored_after_forget(world, monkeypatch):
    monkeypatch.setattr(ProbeManager, "_owns", lambda self, agent: True)
    manager = world.daemon.provider._probes

    def probe(deadline):
        world.clock.sleep(1)
        return ProbeResult(True)

    world.clock.spawn("starts", manager.start, "default/x", probe, lambda: None)
    world.run(6.5)  # in the middle of the second probe
    manager.forget("default/x")
    world.run(1)
    assert broken(world) == {"nothing after forget"}


def test_a_first_result_that_is_stored_after_forget(world, monkeypatch):
    monkeypatch.setattr(ProbeManager, "_owns", lambda self, agent: True)
    manager = world.daemon.provider._probes

    def probe(deadline):
        manager.forget("default/x")
        return ProbeResult(True)

    world.clock.spawn("starts", manager.start, "default/x", probe, lambda: None)
    world.run(0)
    assert broken(world) == {"nothing after forget"}


@breaks("stopped by its owner")
def test_an_old_incarnation_that_stops_its_successor(monkeypatch):
    forget = ProbeManager.forget
    monkeypatch.setattr(ProbeManager, "forget", lambda self, key, owner=None: forget(self, key))
    with World() as world:
        manager = world.daemon.provider._probes

        def story():
            first = manager.start("default/x", lambda deadline: ProbeResult(True), lambda: None)
            manager.start("default/x", lambda deadline: ProbeResult(True), lambda: None)
            manager.forget("default/x", first)

        world.clock.spawn("story", story)
        world.run(0)
        assert broken(world) == {"stopped by its owner"}


@breaks("one probe at a time")
def test_two_loops_for_one_pod(world, monkeypatch):
    run = ProbeManager._run

    def twice(self, agent):
        spawn(self._group, "second loop", run, self, agent)
        run(self, agent)

    monkeypatch.setattr(ProbeManager, "_run", twice)
    world.create_pod("web-0", guest=GuestSpec(boot_s=0, lease_s=0, echo=False))
    world.run(10)
    assert "one probe at a time" in broken(world)


@breaks("three strikes")
def test_failures_that_are_never_forgotten(world, monkeypatch):
    observe = ProbeAgent.observe

    def cumulative(self, result):
        before = self.failures
        changed = observe(self, result)
        if result.ready:
            self.failures = before
        return changed

    monkeypatch.setattr(ProbeAgent, "observe", cumulative)
    world.create_pod("web-0", guest=FAST)
    world.run(7)
    for _ in range(3):
        world.host.pinger.fail(world.guest("web-0").ip)
        world.run(10)
    assert "three strikes" in broken(world)


@breaks("the pace of the contract")
def test_a_pace_of_its_own(world, monkeypatch):
    monkeypatch.setattr(ProbeAgent, "pause_us", property(lambda self: 2_000_000))
    world.create_pod("web-0", guest=FAST)
    world.run(10)
    assert broken(world) == {"the pace of the contract"}


@breaks("bounded probes")
def test_a_probe_without_its_bound(world):
    world.daemon.provider._probes._timeout = 10.0
    world.create_pod("web-0", guest=FAST)
    world.run(2)
    world.guest("web-0").silent()
    world.run(30)
    assert broken(world) == {"bounded probes"}


@breaks("said as probed")
def test_a_publication_that_knows_better_than_the_probe(monkeypatch):
    monkeypatch.setattr(Provider, "_probe_of", lambda self, entry: ProbeResult(True, "ProbeSucceeded"))
    with World() as world:
        world.create_pod("web-0", guest=GuestSpec(boot_s=0, lease_s=0, echo=False))
        world.run(10)
        assert broken(world) == {"said as probed"}


@breaks("last words are last")
def test_a_status_after_the_last_one(world, monkeypatch):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.slow("vm rm", 30)
    world.delete_pod("web-0")
    world.run(5)
    monkeypatch.setattr(TrackedPod, "terminating", property(lambda self: False))
    (entry,) = world.daemon.provider._pods
    world.daemon.provider._publication.publish(entry)
    assert broken(world) == {"last words are last"}


@breaks("one QEMU a VM")
def test_two_qemus_on_one_disk(world):
    world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=1, lease_s=0, ssh_after_s=0))
    world.run(10)
    world.host.power_on(world.guest("mac-0")._machine)
    assert broken(world) == {"one QEMU a VM"}


@breaks("changes do not cross")
def test_two_commands_that_change_one_vm_at_once(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    world.host.cocoon.slow("vm stop", 5)
    runtime = world.daemon.ports.runtime
    world.clock.spawn("one", runtime.stop, "vk-default-web-0")
    world.clock.spawn("other", runtime.start, "vk-default-web-0")
    world.run(10)
    assert broken(world) == {"changes do not cross"}


@breaks("time goes forward")
def test_a_clock_that_goes_back(world):
    world.run(10)
    world.record("test", "now", "here")
    world.clock.now_us -= 1
    world.record("test", "earlier", "here")
    assert broken(world) == {"time goes forward"}


def test_every_rule_is_broken_by_a_test():
    assert set(RULES) == COVERED


def test_a_rule_is_told_once_for_each_pod():
    told = []
    rulebook = Rulebook(lambda *words: told.append(words))
    for key in ("a", "b", "a"):
        rulebook.broken("one probe at a time", key, "text")
    assert [key for _, key, _ in told] == ["a", "b"]


def test_nobody_reports_a_rule_that_is_not_on_the_list():
    with pytest.raises(KeyError):
        Rulebook(lambda *_: None).broken("no such rule", "a", "text")
