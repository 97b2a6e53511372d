"""What the daemon knows, in one document: the same reasons as everywhere (K5), keys that stay, health when asked."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import vkcocoon_cli
from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, PORT, events, message, reason
from vkcocoon_kube import ApiError

GOLDEN = Path(__file__).parent / "golden" / "status.json"


@pytest.fixture
def world():
    with World() as world:
        world.leases.write()
        yield world


def document(world):
    return world.daemon.overview(world.daemon.checks()).document()


def pod_of(world, name):
    (found,) = [pod for pod in document(world)["pods"] if pod["name"] == name]
    return found


class TestDocument:
    def test_it_is_what_was_promised_to_the_byte(self, world):
        world.create_pod("web-0", guest=FAST)
        world.create_pod("web-1", guest=FAST, annotations={PORT: "8080"})
        world.create_pod("daemonset-x", annotations={"vm.cocoonstack.io/name": ""})
        world.run(20)
        world.guest("web-0").silent(True)
        world.run(7)
        found = document(world)
        found["version"] = "x.y.z"
        for number, pod in enumerate(found["pods"]):
            pod["uid"], pod["vm_id"] = f"uid-{number}", pod["vm_id"] and f"vm-{number}"
        text = json.dumps(found, indent=2) + "\n"
        assert text == GOLDEN.read_text(), f"if this is meant, write it to {GOLDEN.name}, and only ever add keys"

    def test_every_pod_has_the_same_keys_whoever_holds_it(self, world):
        world.create_pod("web-0", guest=FAST)
        world.create_pod("other-0", annotations={"vm.cocoonstack.io/name": ""})
        world.run(5)
        held, bound = pod_of(world, "web-0"), pod_of(world, "other-0")
        assert list(held) == list(bound)

    def test_a_waiting_pod_says_what_its_condition_its_event_and_the_metrics_say(self, world):
        world.create_pod("web-0", guest=FAST, annotations={PORT: "8080"})
        world.run(5)
        pod = pod_of(world, "web-0")
        assert (pod["ready"], pod["reason"]) == (False, "PortClosed")
        assert (pod["reason"], pod["message"]) == (reason(world, "web-0"), message(world, "web-0"))
        world.run(60)  # Events of one object are kept apart
        assert ("Unhealthy", f"PortClosed: {pod['message']}") in events(world, "web-0")
        sample = world.daemon.ports.metrics.registry.get_sample_value
        assert sample("cocoon_vk_pods_waiting", {"reason": "PortClosed"}) == 1

    def test_a_pod_still_without_address_says_what_its_probe_waits_for(self, world):
        world.create_pod("web-0", guest=GuestSpec(boot_s=3600.0))
        world.run(5)
        pod = pod_of(world, "web-0")
        assert (pod["lifecycle"], pod["reason"], pod["ip"]) == ("creating", "WaitingForLease", "")

    def test_failures_that_nobody_sees_yet_are_seen_here(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(20)
        world.guest("web-0").silent(True)
        world.run(8.5)
        pod = pod_of(world, "web-0")
        assert (pod["ready"], pod["last_probe"]["ready"], pod["last_probe"]["failures"]) == (True, False, 1)
        assert pod["last_probe"]["reason"] == "PingTimeout"

    def test_the_next_probe_is_told_exactly(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(20)
        first = pod_of(world, "web-0")["last_probe"]["next_seconds"]
        assert 0 < first <= 5
        world.run(first / 2)
        assert pod_of(world, "web-0")["last_probe"]["next_seconds"] == pytest.approx(first / 2, abs=0.001)

    def test_flips_of_the_last_hour_are_kept_and_older_ones_are_not(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(60)
        world.guest("web-0").silent(True)
        world.run(60)
        assert [flip["ready"] for flip in pod_of(world, "web-0")["flips"]] == [True, False]
        world.run(3530)
        assert [flip["ready"] for flip in pod_of(world, "web-0")["flips"]] == [False]

    def test_what_the_api_does_not_hold_yet_is_marked(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        assert pod_of(world, "web-0")["published"] is True
        world.kube.down = True
        world.guest("web-0").silent(True)
        world.run(30)
        pod = pod_of(world, "web-0")
        assert (pod["ready"], pod["published"]) == (False, False)

    def test_a_pod_that_is_going_says_so(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        hold = world.host.cocoon.hold("vm rm")
        world.delete_pod("web-0")
        world.run(1)
        assert hold.reached.is_set()
        pod = pod_of(world, "web-0")
        assert (pod["terminating"], pod["reason"], pod["last_probe"]) == (True, "Terminating", None)
        hold.release()
        world.run(5)
        assert document(world)["pods"] == []


class TestHealth:
    def trouble(self, world):
        return {check["name"]: check["trouble"] for check in document(world)["checks"] if check["trouble"]}

    def test_a_node_that_runs_is_healthy_and_ready(self, world):
        found = document(world)
        assert (found["healthy"], found["ready"], self.trouble(world)) == (True, True, {})

    def test_an_api_server_that_is_away_is_no_reason_to_restart(self, world):
        world.kube.down = True
        world.kube.cut_watches()
        world.run(30)
        found = document(world)
        assert (found["healthy"], found["ready"]) == (True, False)
        assert list(self.trouble(world)) == ["api"]
        world.kube.down = False
        world.run(60)
        assert self.trouble(world) == {}

    def test_a_lease_file_that_is_torn_is_told_although_no_probe_fails_for_it(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        world.leases.write("torn")
        assert "is not one complete JSON document" in self.trouble(world)["leases"]
        assert world.ready("web-0")

    def test_before_the_start_has_ended_it_is_not_ready_but_lives(self):
        with World() as world:
            world.stop()
            world.kube.fail(lambda request: True, ApiError(503), times=1000)
            world.start()
            world.run(30)
            found = document(world)
            assert (found["healthy"], found["ready"]) == (True, False)
            assert {"api", "node", "start-up", "leases"} == set(self.trouble(world))

    def test_a_probe_that_does_not_come_back_makes_the_process_ill_and_names_the_pod(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(21)
        agent = world.daemon.provider.held.find("default/web-0").agent
        agent.due = world.clock.monotonic() - 100.0
        found = document(world)
        assert (found["healthy"], found["ready"]) == (False, False)
        assert self.trouble(world) == {"probes": "overdue: default/web-0 by 100 s"}


class TestStatusCommand:
    @pytest.fixture
    def shown(self, world, monkeypatch):
        """What `vk-cocoon status` prints of that world."""

        def run(*arguments):
            found = document(world)
            monkeypatch.setattr("vkcocoon_window.ask", lambda path: found)
            return CliRunner().invoke(vkcocoon_cli.cli, ["status", "--env-file", "/dev/null", *arguments])

        return run

    def test_the_table_says_for_each_pod_what_it_waits_for(self, world, shown):
        world.create_pod("web-0", guest=FAST)
        world.create_pod("web-1", guest=FAST, annotations={PORT: "8080"})
        world.run(20)
        result = shown()
        assert result.exit_code == 0
        header, first, second = [line.split() for line in result.stdout.splitlines()]
        assert header == ["POD", "OS", "VM", "IP", "PROBE", "READY", "LIFECYCLE", "REASON", "LAST", "FAILS", "NEXT"]
        assert [first[0], first[4], first[5], first[7]] == ["default/web-0", "icmp", "True", "ProbeSucceeded"]
        assert [second[0], *second[4:7], second[8]] == ["default/web-1", "tcp", ":8080", "False", "PortClosed"]
        assert "2 pods, 1 ready" in result.stderr

    def test_wide_has_everything_a_line_can_hold(self, world, shown):
        world.create_pod("web-0", guest=FAST)
        world.run(20)
        header, line = shown("-o", "wide").stdout.splitlines()
        assert header.split()[-5:] == ["SINCE", "RESTARTS", "WRITTEN", "UID", "MESSAGE"]
        assert world.pod("web-0")["metadata"]["uid"] in line

    def test_json_is_the_document_and_watching_makes_lines_of_it(self, world, shown, monkeypatch):
        world.create_pod("web-0", guest=FAST)
        world.run(20)
        whole = json.loads(shown("-o", "json").stdout)
        assert whole == json.loads(json.dumps(document(world)))
        looks = iter([None, None, KeyboardInterrupt()])

        def pause(seconds):
            assert seconds == 0.5
            if isinstance(stop := next(looks), BaseException):
                raise stop

        monkeypatch.setattr("time.sleep", pause)
        result = shown("-o", "json", "--watch", "--every", "0.5")
        assert result.exit_code == 0
        assert [json.loads(line) for line in result.stdout.splitlines()] == [whole] * 3

    def test_what_is_wrong_with_the_node_is_said_beside_the_data(self, world, shown):
        world.leases.write("torn")
        result = shown("-o", "table")
        assert "leases: lease file" in result.stderr
        assert "lease file" not in result.stdout
