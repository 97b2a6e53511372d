"""Hibernate and wake step by step: what each failing step leaves and is called, and which saved state counts when."""

import pytest

from simulator.fake_vms import GuestSpec
from tests.provider_rig import FAST, annotations, calls, events, message, reason
from tests.test_last_state import macs, snapshots
from tests.test_sources import argv, clones_of, mark, trait
from vkcocoon_kube import ApiError
from vkcocoon_ports import EARLIER_LIFE

VM = "vk-default-web-0"
NO_SPACE = "Error: no space left on device"


@pytest.fixture
def ready(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    return world


@pytest.fixture
def windows(world):
    world.create_pod("web-0", os="windows", guest=GuestSpec(os="windows", boot_s=0.0, lease_s=0.0))
    world.run(5)
    assert world.ready("web-0")
    return world


def since(world, before):
    return calls(world.host.cocoon)[before:]


# --- Windows ----------------------------------------------------------------------------------------------------------


def test_a_windows_guest_gives_back_its_address_and_is_saved_without_its_card_and_wakes_with_a_new_one(windows):
    before, mac = len(calls(windows.host.cocoon)), windows.guest("web-0").mac
    windows.annotate("web-0", hibernate="true")
    windows.run(5)
    assert since(windows, before) == ["vm exec", "vm net", "snapshot save", "vm rm"]
    assert argv(windows, "vm exec")[-2:] == ["ipconfig", "/release"]
    assert argv(windows, "vm net")[2:4] == ["--nics", "0"]
    assert macs(windows) == []
    windows.annotate("web-0", hibernate=None)
    windows.run(10)
    assert windows.ready("web-0")
    assert " ".join(argv(windows, "vm clone")[-5:-1]) == "--restore-mode copy --nics 1"
    assert windows.guest("web-0").mac != mac


def test_a_windows_guest_that_cannot_be_told_is_saved_all_the_same(windows):
    windows.host.cocoon.fail("vm exec", stderr="Error: exec: dial agent: refused", times=None)
    windows.annotate("web-0", hibernate="true")
    windows.run(5)
    assert annotations(windows, "web-0")["lifecycle-state"] == "hibernated"


def test_a_card_that_is_not_let_go_fails_the_hibernate_and_the_guest_is_told_to_ask_again(windows):
    windows.host.cocoon.fail("vm net", stderr="Error: guest did not acknowledge the removal", times=1)
    windows.annotate("web-0", hibernate="true")
    windows.run(0.5)
    assert "HibernateNetResizeFailed" in [event[0] for event in events(windows, "web-0")]
    assert message(windows, "web-0").startswith("hibernate: cocoon vm net")
    assert windows.host.cocoon.count("snapshot save") == 0
    assert argv(windows, "vm exec")[-2:] == ["ipconfig", "/renew"]
    windows.run(10)
    assert annotations(windows, "web-0")["lifecycle-state"] == "hibernated"


def test_a_save_that_fails_gives_the_guest_a_card_again_and_its_new_mac_is_ours(windows):
    windows.host.cocoon.fail("snapshot save", stderr=NO_SPACE, times=None)
    old = windows.guest("web-0").mac
    windows.annotate("web-0", hibernate="true")
    windows.run(0.5)
    windows.annotate("web-0", hibernate=None)
    windows.run(5)
    record = windows.host.cocoon.record(VM)
    assert record["state"] == "running"
    assert [nic["mac"] for nic in record["network_configs"]] != [old]
    assert annotations(windows, "web-0")["mac"] == record["network_configs"][0]["mac"]
    assert old not in macs(windows)
    assert argv(windows, "vm exec")[-2:] == ["ipconfig", "/renew"]
    assert windows.ready("web-0")
    assert annotations(windows, "web-0")["ip"] == windows.guest("web-0").ip


def test_a_windows_guest_without_a_card_gets_one_after_a_restart_and_the_pod_says_so_until_then(windows):
    """The daemon died after it had taken the card, and the wish to hibernate was taken back meanwhile."""
    windows.host.cocoon.hold("snapshot save")
    windows.annotate("web-0", hibernate="true")
    windows.run(1)
    windows.kill()
    windows.annotate("web-0", hibernate=None)
    windows.host.cocoon.faults.clear()
    windows.host.cocoon.fail("vm net", stderr="Error: not today", times=2)
    windows.start()
    windows.run(1)
    assert message(windows, "web-0", "cocoonstack.io/ProbeReady") == f"VM {VM} has no network card"
    assert ("ProviderUpdateFailed", "not today") in [(told, text[-9:]) for told, text in events(windows, "web-0")]
    windows.run(20)
    assert windows.ready("web-0")
    assert macs(windows) == [windows.guest("web-0").mac] == [annotations(windows, "web-0")["mac"]]
    assert argv(windows, "vm exec")[-2:] == ["ipconfig", "/renew"]


def test_a_card_that_could_not_be_given_back_is_given_when_the_hibernate_is_no_longer_wanted(windows):
    windows.host.cocoon.fail("snapshot save", stderr=NO_SPACE, times=None)
    windows.host.cocoon.fail("vm inspect", times=1)
    windows.annotate("web-0", hibernate="true")
    windows.run(0.5)
    assert windows.host.cocoon.record(VM)["network_configs"] == []
    windows.annotate("web-0", hibernate=None)
    windows.run(20)
    assert windows.ready("web-0")
    assert macs(windows) == [windows.guest("web-0").mac]


def test_a_network_that_cannot_be_restored_is_no_reason_to_lose_the_vm(windows):
    windows.host.cocoon.fail("snapshot save", stderr=NO_SPACE, times=1)
    windows.host.cocoon.hold("vm net").release()
    windows.annotate("web-0", hibernate="true")
    windows.host.cocoon.fail("vm inspect", times=3)
    windows.run(30)
    assert annotations(windows, "web-0")["lifecycle-state"] == "hibernated"
    assert windows.host.cocoon.count("vm rm") == 1


# --- steps that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "event"), [("snapshot save", "HibernateSnapshotFailed"), ("vm rm", "HibernateRemoveFailed")]
)
def test_each_step_that_fails_has_its_own_word_and_keeps_the_vm(ready, verb, event):
    ready.host.cocoon.fail(verb, stderr="Error: not today", times=None)
    ready.annotate("web-0", hibernate="true")
    ready.run(0.5)
    assert event in [told[0] for told in events(ready, "web-0")]
    assert (reason(ready, "web-0"), len(ready.host.pids())) == ("LifecycleFailed", 1)
    assert macs(ready) == [ready.guest("web-0").mac]


def test_a_vm_that_runs_on_after_a_failed_removal_is_saved_again_with_what_it_did_since(ready):
    ready.host.cocoon.fail("vm rm", times=1)
    ready.annotate("web-0", hibernate="true")
    ready.run(0.5)
    mark(ready, "web-0", 7 * 2**30)
    ready.run(10)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    assert trait(ready, "web-0") == 7 * 2**30


def test_a_vm_that_stopped_in_a_failed_removal_is_not_started_but_removed(ready):
    """Its disk may be gone already; what counts was saved before."""
    mark(ready, "web-0", 7 * 2**30)
    ready.host.cocoon.fail("vm rm", step="late", times=3)
    ready.annotate("web-0", hibernate="true")
    ready.run(120)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    assert ready.host.cocoon.count("vm start") == 0
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    assert trait(ready, "web-0") == 7 * 2**30


def test_a_hibernate_that_is_no_longer_wanted_leaves_no_saved_state_of_an_earlier_time(ready):
    ready.host.cocoon.fail("vm rm", times=None)
    ready.annotate("web-0", hibernate="true")
    ready.run(2)
    assert snapshots(ready) == [VM]
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    assert ready.ready("web-0")
    assert snapshots(ready) == []


def test_a_failed_hibernate_is_lifted_by_a_restart_of_the_vm_when_it_is_no_longer_wanted(ready):
    ready.host.cocoon.fail("snapshot save", stderr=NO_SPACE, times=None)
    ready.annotate("web-0", hibernate="true")
    ready.run(1)
    ready.guest("web-0").crash()
    ready.annotate("web-0", hibernate=None)
    ready.run(30)
    assert annotations(ready, "web-0")["lifecycle-state"] == "ready"
    assert ready.ready("web-0")


# --- which state counts -----------------------------------------------------------------------------------------------


def test_the_state_a_vm_woke_from_is_gone_before_its_pod_is_ready(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.host.cocoon.slow("snapshot rm", 3.0, step="before")
    began = ready.clock.elapsed()
    ready.annotate("web-0", hibernate=None)
    ready.run(20)
    assert snapshots(ready) == []
    became = [at for at, value in ready.flips("web-0") if value and at > began]
    assert became and became[0] >= began + 3.0


def test_a_state_that_cannot_be_dropped_does_not_keep_the_pod_from_being_ready(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.host.cocoon.fail("snapshot rm", stderr="Error: input/output error", times=None)
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    assert ready.ready("web-0")


def test_a_vm_that_hibernates_again_while_its_old_state_is_dropped_keeps_the_new_one(ready):
    """The drop waits for the lock, and asks again when it has it."""
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    held = ready.host.cocoon.hold("vm inspect", step="after")
    ready.annotate("web-0", hibernate=None)
    ready.run(1)
    assert held.reached.is_set()
    held.release()
    ready.annotate("web-0", hibernate="true")
    ready.run(10)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    assert snapshots(ready) == [VM]
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    assert ready.ready("web-0")


def test_a_state_from_before_the_last_wake_is_never_put_in_place_of_a_lost_vm(ready):
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.annotate("web-0", hibernate=None)
    ready.run(5)
    ready.stop()
    ready.host.cocoon.execute(["cocoon", "vm", "rm", "--force", VM], 30.0)
    ready.start()
    ready.run(10)
    assert (clones_of(ready, "devbox-base:7"), clones_of(ready, VM)) == (2, 1)


def test_a_saved_vm_whose_pod_never_heard_of_it_is_not_made_anew(ready):
    """The API was away while it was saved and removed, and then we died: all its pod shows is that it was ready."""
    mark(ready, "web-0", 7 * 2**30)
    ready.kube.fail("PATCH */web-0*", ApiError(500, "InternalError", "later"), times=None)
    ready.annotate("web-0", hibernate="true")
    ready.run(10)
    assert ready.host.pids() == []
    ready.kill()
    assert annotations(ready, "web-0")["lifecycle-state"] == "ready"
    ready.kube.gate.failures.clear()
    ready.start()
    ready.run(10)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    assert clones_of(ready, "devbox-base:7") == 1
    assert macs(ready) == []
    ready.annotate("web-0", hibernate=None)
    ready.run(10)
    assert trait(ready, "web-0") == 7 * 2**30


# --- beside what an earlier daemon began ------------------------------------------------------------------------------


def killed_in_the_removal(world):
    """The daemon dies while the VM is being removed; the removal goes on for some seconds."""
    mark(world, "web-0", 7 * 2**30)
    world.host.cocoon.slow("vm rm", 8.0)
    world.annotate("web-0", hibernate="true")
    world.run(2)
    assert snapshots(world) == [VM]
    world.kill()


def test_a_removal_that_goes_on_is_waited_for_before_anything_is_saved_again(ready):
    killed_in_the_removal(ready)
    ready.start()
    ready.run(30)
    assert annotations(ready, "web-0")["lifecycle-state"] == "hibernated"
    assert ready.host.cocoon.count("snapshot rm") == 0
    ready.annotate("web-0", hibernate=None)
    ready.run(10)
    assert trait(ready, "web-0") == 7 * 2**30


def test_a_removal_that_goes_on_and_is_no_longer_wanted_ends_in_a_wake(ready):
    killed_in_the_removal(ready)
    ready.annotate("web-0", hibernate=None)
    ready.start()
    ready.run(40)
    assert ready.ready("web-0")
    assert trait(ready, "web-0") == 7 * 2**30
    assert macs(ready) == [ready.guest("web-0").mac]
    assert snapshots(ready) == []


def test_a_wake_after_such_a_removal_is_tried_until_it_succeeds(ready):
    killed_in_the_removal(ready)
    ready.annotate("web-0", hibernate=None)
    ready.host.cocoon.fail("vm clone", stderr=NO_SPACE, times=4)
    ready.start()
    ready.run(10)
    assert message(ready, "web-0").startswith("wake: ")
    ready.run(120)
    assert trait(ready, "web-0") == 7 * 2**30


def test_a_vm_that_lives_on_after_an_interrupted_hibernate_leaves_no_state_of_an_earlier_time(ready):
    """The save went through and the removal never began."""
    ready.host.cocoon.hold("vm rm")
    ready.host.cocoon.slow("snapshot save", 3.0)
    ready.annotate("web-0", hibernate="true")
    ready.run(1)
    ready.kill()
    ready.run(5)
    assert snapshots(ready) == [VM]
    ready.annotate("web-0", hibernate=None)
    ready.start()
    ready.run(10)
    assert ready.ready("web-0")
    assert annotations(ready, "web-0")["lifecycle-state-message"].startswith("hibernate: ")
    ready.run(EARLIER_LIFE - 20)
    assert snapshots(ready) == [VM]
    ready.run(20)
    assert (ready.ready("web-0"), snapshots(ready), clones_of(ready, VM)) == (True, [], 0)
    assert "lifecycle-state-message" not in annotations(ready, "web-0")


@pytest.mark.parametrize("again", [False, True], ids=["one restart", "two restarts"])
@pytest.mark.parametrize("late", [0.1, 60.0, 200.0])
def test_a_removal_that_gets_to_the_vm_late_and_is_no_longer_wanted_costs_no_state(ready, late, again):
    """It waits for something before it touches the VM, so nothing shows that it is on its way."""
    mark(ready, "web-0", 7 * 2**30)
    removal = ready.host.cocoon.hold("vm rm", times=1)
    ready.annotate("web-0", hibernate="true")
    ready.run(5)
    ready.kill()
    ready.annotate("web-0", hibernate=None)
    ready.start()
    ready.run(10)
    if again:
        ready.stop()
        ready.start()
    ready.run(late)
    removal.release()
    ready.run(60)
    assert (ready.ready("web-0"), len(ready.host.pids())) == (True, 1)
    assert trait(ready, "web-0") == 7 * 2**30
    assert snapshots(ready) == []


def test_whether_a_vm_that_is_gone_was_saved_must_be_certain_before_it_is_lost(ready):
    killed_in_the_removal(ready)
    ready.annotate("web-0", hibernate=None)
    ready.host.cocoon.fail("snapshot inspect", times=5)
    ready.start()
    ready.run(60)
    assert ready.ready("web-0")
    assert trait(ready, "web-0") == 7 * 2**30


@pytest.mark.parametrize("os", ["linux", "windows"])
def test_a_save_that_outlives_two_daemons_and_is_no_longer_wanted_leaves_no_older_state(world, os):
    """What it saved would take the place of the guest when that is lost, or of the next one of its name."""
    world.create_pod("web-0", os=os, guest=GuestSpec(os=os, boot_s=0.0, lease_s=0.0))
    world.run(10)
    world.host.cocoon.slow("snapshot save", 30.0, step="middle")
    world.annotate("web-0", hibernate="true")
    world.run(2)
    assert world.host.cocoon.count("snapshot save") == 1
    world.kill()
    world.annotate("web-0", hibernate=None)
    for _ in range(2):
        world.start()
        world.clock.run_until(lambda: annotations(world, "web-0")["lifecycle-state"] == "creating", 10.0)
        world.run(0.5)
        world.kill()
    world.start()
    world.run(90)
    assert world.ready("web-0")
    world.run(EARLIER_LIFE)
    assert world.ready("web-0")
    assert VM not in snapshots(world)
