"""Clause 1 and 2: create starts the probe, whose first run is in what create publishes; then the ways a VM comes up."""

import pytest

from simulator.fake_vms import GuestSpec
from tests.provider_rig import FAST, PORT, annotations, calls, events, message, reason, status, writes
from vkcocoon_status import condition_of


def test_a_clone_is_probed_before_create_ends_and_published_with_what_the_probe_found(world):
    world.host.cocoon.slow("vm inspect", 0.5, step="before")  # by then the guest has its address
    world.create_pod("web-0", guest=GuestSpec(boot_s=0.1, lease_s=0.0, ports=(80,)), annotations={PORT: "80"})
    world.run(0.5)
    assert calls(world.host.cocoon) == ["vm clone", "vm inspect"]  # a clone's record has no pid yet
    assert world.flips("web-0") == [(0.0, False), (0.5, True)]
    assert world.probes("web-0") == [0.5]


def test_the_status_that_ends_a_create_carries_the_first_probe(world):
    """No second push is needed for a guest that answers at once, and none for one that does not."""
    world.create_pod("web-0", annotations={PORT: "80"})
    world.leases.write()
    world.run(0)
    assert (reason(world, "web-0"), reason(world, "web-0", "cocoonstack.io/ProbeReady")) == (
        "LifecycleCreating",
        "WaitingForLease",
    )
    assert world.probes("web-0") == [0.0]


def test_run_pulls_the_image_and_runs_it(world):
    world.create_pod("win-0", os="windows", guest=FAST)
    world.run(2)
    assert calls(world.host.cocoon) == ["image pull", "vm run"]
    assert world.ready("win-0")


def test_a_running_pod_says_where_its_vm_is(world):
    world.create_pod("web-0", guest=FAST)
    world.run(2)
    ip = world.guest("web-0").ip
    found = annotations(world, "web-0")
    assert (found["ip"], found["lifecycle-state"], found["lifecycle-observed-generation"]) == (ip, "ready", "0")
    assert "lifecycle-state-message" not in found
    assert status(world, "web-0")["podIP"] == ip
    assert status(world, "web-0")["podIPs"] == [{"ip": ip}]
    assert status(world, "web-0")["hostIP"] == "192.0.2.10"
    assert found["id"] == world.daemon.ports.runtime.inspect("vk-default-web-0").id


def test_a_pod_without_a_vm_name_is_left_alone_and_told_why_once(world):
    world.create_pod("stray", annotations={"vm.cocoonstack.io/name": ""})
    world.run(600)
    assert status(world, "stray")["phase"] == "Pending"
    assert condition_of(status(world, "stray"), "Ready") == {}
    assert [found[0] for found in events(world, "stray")] == ["NotOurs"]
    assert calls(world.host.cocoon) == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"vm.cocoonstack.io/name": "x" * 64}, "vm.cocoonstack.io/name"),
        ({"cocoonset.cocoonstack.io/image": ""}, "cocoonset.cocoonstack.io/image"),
        ({"cocoonset.cocoonstack.io/mode": "run", "cocoonset.cocoonstack.io/storage": "lots"}, "storage"),
        ({"cocoonset.cocoonstack.io/managed": "yes"}, "vm.cocoonstack.io/id"),
    ],
)
def test_an_order_that_cannot_be_met_is_a_failed_lifecycle_that_names_it_and_costs_no_command(world, wrong, named):
    world.create_pod("web-0", annotations=wrong)
    world.create_pod("ok-0", guest=FAST)
    world.run(5)
    assert (reason(world, "web-0"), annotations(world, "web-0")["lifecycle-state"]) == ("LifecycleFailed", "failed")
    assert named in message(world, "web-0")
    assert world.ready("ok-0")
    assert world.host.cocoon.count("vm clone") == 1


def test_a_failed_create_is_tried_again_and_heals_by_itself(world):
    world.host.cocoon.fail("vm clone", times=3, stderr="Error: clone VM: no space left on device")
    world.create_pod("web-0", guest=FAST)
    world.run(2)
    assert annotations(world, "web-0")["lifecycle-state"] == "failed"
    assert "no space left on device" in message(world, "web-0")
    world.run(60)
    assert world.ready("web-0")
    assert annotations(world, "web-0")["lifecycle-state"] == "ready"
    assert world.host.cocoon.count("vm clone") == 4


def test_while_it_is_tried_again_a_failure_stays_visible(world):
    """Each attempt shown as creating would make watchers see progress where there is none."""
    world.host.cocoon.fail("vm clone", times=None)
    world.create_pod("web-0", guest=FAST)
    world.run(300)
    states = [dict(entry.fields)["lifecycle"] for entry in world.timeline.of(actor="kube", kind="lifecycle")]
    assert states == ["creating", "failed"]
    assert world.host.cocoon.count("vm clone") > 5


@pytest.mark.parametrize("answer", ["", "{", "[]", "null", '{"id": ""}', "not json", '{"id": 7}'])
def test_garbage_from_the_tool_is_a_failed_create_and_nobody_else_notices(world, answer):
    world.host.cocoon.garble("vm clone", answer, name="vk-default-web-0", times=1)
    world.create_pod("web-0", guest=FAST)
    world.create_pod("ok-0", guest=FAST)
    world.run(1)
    assert world.ready("ok-0")
    world.run(30)
    assert world.ready("web-0")
    assert world.host.cocoon.count("vm clone", "vk-default-web-0") == 2  # the second finds the name taken and adopts


def test_a_create_that_was_half_done_is_adopted_and_not_made_twice(world):
    world.host.cocoon.fail("vm clone", times=1, step="after", stderr="Error: exit after the work was done")
    world.create_pod("web-0", guest=FAST)
    world.run(30)
    assert world.ready("web-0")
    assert len(world.host.pids()) == 1


def test_two_pods_that_want_one_vm_name_do_not_share_the_vm(world):
    world.create_pod("web-0", guest=FAST, annotations={"vm.cocoonstack.io/name": "one"})
    world.run(2)
    world.create_pod("web-1", annotations={"vm.cocoonstack.io/name": "one"})
    world.run(30)
    assert (world.ready("web-0"), world.ready("web-1")) == (True, False)
    assert "belongs to pod default/web-0" in message(world, "web-1")
    world.delete_pod("web-1")
    world.run(5)
    assert world.pod("web-1") is None
    assert world.ready("web-0")
    assert len(world.host.pids()) == 1


def test_a_slow_create_holds_up_nobody(world):
    world.host.cocoon.slow("vm clone", 240.0, name="vk-default-slow")
    world.create_pod("slow")
    world.create_pod("quick", guest=FAST)
    world.run(2)
    assert world.ready("quick")
    world.run(250)
    assert world.ready("slow")


def test_an_unmanaged_pod_is_probed_where_the_operator_says_and_keeps_the_operators_annotations(world):
    guest = GuestSpec(boot_s=0.0, lease_s=0.0)
    world.create_pod("real", guest=guest)
    world.run(2)
    ip = world.guest("real").ip
    given = {"managed": "", "mode": "static"}
    world.create_pod(
        "tool",
        annotations={f"cocoonset.cocoonstack.io/{key}": value for key, value in given.items()}
        | {"vm.cocoonstack.io/id": "STATIC", "vm.cocoonstack.io/ip": ip},
    )
    world.run(2)
    found = annotations(world, "tool")
    assert (found["id"], found["ip"], found["lifecycle-state"]) == ("STATIC", ip, "ready")
    assert world.ready("tool")
    for _, _, body in writes(world, "tool"):
        assert not {"vm.cocoonstack.io/id", "vm.cocoonstack.io/ip"} & set(
            (body.get("metadata") or {}).get("annotations") or {}
        )
    before = calls(world.host.cocoon)
    world.annotate("tool", hibernate="true")
    world.run(5)
    world.delete_pod("tool")
    world.run(5)
    assert world.pod("tool") is None
    assert calls(world.host.cocoon) == before


def test_an_unmanaged_pod_that_is_pointed_elsewhere_is_probed_there_before_it_is_published(world):
    for name in ("first", "second"):
        world.create_pod(name, guest=GuestSpec(boot_s=0.0, lease_s=0.0))
    world.run(2)
    first, second = (world.guest(name).ip for name in ("first", "second"))
    pointer = {"vm.cocoonstack.io/id": "A", "vm.cocoonstack.io/ip": first}
    world.create_pod("tool", annotations={"cocoonset.cocoonstack.io/managed": ""} | pointer)
    world.run(2)
    assert world.ready("tool")
    world.guest("second").silent()
    edit(world, "tool", {"vm.cocoonstack.io/id": "B", "vm.cocoonstack.io/ip": second})
    world.run(5)
    said = status(world, "tool")
    assert (world.ready("tool"), said["podIP"]) == (False, second)
    assert said["containerStatuses"][0]["containerID"] == "cocoon://B"
    shown = [dict(entry.fields) for entry in world.timeline.of(actor="daemon", kind="hands over", key="default/tool")]
    assert [each["ready"] for each in shown] == ["True", "False"]
    world.guest("second").silent(False)
    world.run(2)
    assert world.ready("tool")


def test_an_unmanaged_pod_that_is_pointed_at_nothing_stays_with_what_it_had(world):
    world.create_pod("real", guest=GuestSpec(boot_s=0.0, lease_s=0.0))
    world.run(2)
    pointer = {"vm.cocoonstack.io/id": "A", "vm.cocoonstack.io/ip": world.guest("real").ip}
    world.create_pod("tool", annotations={"cocoonset.cocoonstack.io/managed": ""} | pointer)
    world.run(2)
    edit(world, "tool", {"vm.cocoonstack.io/ip": "elsewhere"})
    world.run(30)
    assert (world.ready("tool"), status(world, "tool")["podIP"]) == (True, pointer["vm.cocoonstack.io/ip"])
    assert events(world, "tool")[-1] == (
        "ProviderUpdateFailed",
        "an unmanaged pod needs vm.cocoonstack.io/id and vm.cocoonstack.io/ip (a dotted IPv4 address); "
        "it has 'A' and 'elsewhere'",
    )
    world.guest("real").silent()
    world.run(25)
    assert not world.ready("tool")


def edit(world, name, values):
    world.kube.admin.patch(
        f"/api/v1/namespaces/default/pods/{name}", {"metadata": {"annotations": values}}, kind="merge"
    )


def test_a_pod_that_is_already_terminal_is_never_brought_up(world):
    pod = world.create_pod("done", guest=FAST)
    world.kube.admin.patch(
        "/api/v1/namespaces/default/pods/done/status", {"status": {"phase": "Succeeded"}}, kind="strategic"
    )
    assert pod["metadata"]["name"] == "done"
    world.run(60)
    assert calls(world.host.cocoon) == []
