"""Every metric is really fed, in the daemon as it runs; the exposition parses strictly; alerts name what exists."""

import re
import shutil
import subprocess
from pathlib import Path

import gevent.pool
import pytest
import yaml

from simulator.fake_vms import GuestSpec
from simulator.world import World
from tests.provider_rig import FAST, PORT
from vkcocoon_http import Metrics
from vkcocoon_kube import ApiError
from vkcocoon_probes import SystemClock, deaths, spawn

ROOT = Path(__file__).parent.parent
MAC = GuestSpec(os="macos", boot_s=1.0, ssh_after_s=1.0)


@pytest.fixture
def world():
    with World() as world:
        world.leases.write()
        yield world


def value(world, name, **labels):
    """A sample of the daemon's metrics, 0 when it is not there."""
    return world.daemon.ports.metrics.registry.get_sample_value(f"cocoon_vk_{name}", labels) or 0


class TestPods:
    def test_pods_and_their_vms_are_counted_as_they_are_now(self, world):
        world.create_pod("web-0", guest=FAST)
        world.create_pod("mac-0", os="macos", guest=GuestSpec(os="macos", boot_s=3600.0))
        world.run(30)
        assert value(world, "pods", os="linux", ready="true") == 1
        assert value(world, "pods", os="macos", ready="false") == 1
        assert value(world, "pods_waiting", reason="WaitingForLease") == 1
        assert value(world, "vm_table_size") == 2
        world.delete_pod("web-0")
        world.run(30)
        assert value(world, "pods", os="linux", ready="true") == 0
        assert value(world, "vm_table_size") == 1

    def test_an_os_nobody_knows_is_other_so_that_no_pod_makes_a_label(self, world):
        world.create_pod("web-0", os="templeos", guest=FAST)
        world.run(5)
        assert value(world, "pods", os="other", ready="true") == 1

    def test_the_time_to_the_first_ready_is_measured_once_from_the_creation(self, world):
        world.create_pod("web-0", guest=GuestSpec(boot_s=4.0, lease_s=0.0))
        world.run(60)
        assert value(world, "time_to_ready_seconds_count", os="linux") == 1
        assert 4.0 <= value(world, "time_to_ready_seconds_sum", os="linux") < 5.5
        world.guest("web-0").silent(True)
        world.run(60)
        world.guest("web-0").silent(False)
        world.run(60)
        assert value(world, "probe_flips_total", to="ready") == 2
        assert value(world, "probe_flips_total", to="not_ready") == 1
        assert value(world, "time_to_ready_seconds_count", os="linux") == 1

    def test_an_adopted_pod_has_no_time_to_ready_since_nobody_saw_it(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        world.stop()
        world.run(60)
        world.start()
        world.run(10)
        assert world.ready("web-0")
        assert value(world, "time_to_ready_seconds_count", os="linux") == 0

    def test_operations_are_counted_with_their_outcome(self, world):
        world.create_pod("web-0", guest=FAST)
        world.create_pod("other-0", annotations={"vm.cocoonstack.io/name": ""})
        world.create_pod("bad-0", annotations={"cocoonset.cocoonstack.io/image": ""})
        world.run(5)
        assert value(world, "pod_lifecycle_total", op="create", result="ok", reason="") == 1
        assert value(world, "pod_lifecycle_total", op="create", result="skipped", reason="NotOurs") == 1
        assert value(world, "pod_lifecycle_total", op="create", result="failed", reason="SpecError") >= 1
        world.delete_pod("web-0")
        world.run(5)
        assert value(world, "pod_lifecycle_total", op="delete", result="ok", reason="") == 1


class TestProbes:
    def test_probes_are_measured_by_the_way_they_ask(self, world):
        world.create_pod("web-0", guest=FAST)
        world.create_pod("web-1", guest=FAST, annotations={PORT: "8080"})
        world.create_pod("mac-0", os="macos", guest=MAC)
        world.run(30)
        for kind, result in (("icmp", "ready"), ("tcp", "not_ready"), ("ssh", "ready")):
            assert value(world, "probe_duration_seconds_count", kind=kind, result=result) > 0, kind
        assert value(world, "probe_duration_seconds_count", kind="tcp", result="ready") == 0
        assert value(world, "probes_total", reason="PortClosed") > 0
        assert value(world, "probe_lateness_seconds_count") > 0

    def test_restarts_of_guests_are_counted_those_that_failed_too(self, world):
        world.create_pod("mac-0", os="macos", guest=MAC)
        world.run(60)
        world.guest("mac-0").crash()
        world.run(30)
        assert value(world, "qemu_restarts_total", result="ok") == 1
        world.host.macos.fail("vm start", times=1)
        world.guest("mac-0").crash()
        world.run(8)
        assert value(world, "qemu_restarts_total", result="failed") == 1


class TestLeases:
    def test_each_lookup_is_counted_by_what_came_of_it(self, world):
        world.create_pod("web-0", guest=GuestSpec(boot_s=2.0))
        world.run(2)
        missing = value(world, "lease_lookups_total", result="missing")
        assert missing > 0
        assert value(world, "lease_lookups_total", result="found") == 0
        world.run(10)
        assert value(world, "lease_lookups_total", result="found") > 0
        mac = next(iter(world.daemon.provider.held)).vm.mac
        world.leases.lease(
            "0a:58:00:00:00:99", world.pod("web-0")["status"]["podIP"], world.clock.now().replace(year=2100)
        )
        world.run(6)
        assert value(world, "lease_lookups_total", result="conflict") > 0, mac

    def test_lookups_without_any_table_are_unreadable(self):
        with World() as world:
            world.create_pod("web-0", guest=GuestSpec(boot_s=3600.0))
            world.run(5)
            assert value(world, "lease_lookups_total", result="unreadable") > 0

    def test_the_age_of_the_file_is_that_of_its_last_change_and_absent_without_a_file(self, tmp_path):
        metrics = Metrics("1")
        path = tmp_path / "leases.json"
        metrics.leases_from(str(path), SystemClock())
        read = metrics.registry.get_sample_value
        assert read("cocoon_vk_lease_file_age_seconds") is None
        path.write_text("[]")
        assert 0 <= read("cocoon_vk_lease_file_age_seconds") < 30


class TestTheApi:
    def test_writes_are_counted_by_what_the_api_said(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)
        assert value(world, "status_writes_total", result="ok") > 0
        world.kube.fail(lambda request: request.verb == "PATCH", ApiError(500), times=2)
        world.guest("web-0").silent(True)
        world.run(40)
        assert value(world, "status_writes_total", result="failed") == 2

    def test_the_way_of_a_state_to_the_api_is_measured_through_an_outage(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(30)
        before = value(world, "notify_total", result="delivered")
        slow = value(world, "notify_duration_seconds_sum")
        world.kube.down = True
        world.guest("web-0").silent(True)
        world.run(60)
        assert value(world, "notify_total", result="delivered") == before
        world.kube.down = False
        world.run(60)
        assert value(world, "notify_total", result="delivered") == before + 1
        assert 20 < value(world, "notify_duration_seconds_sum") - slow < 90

    def test_a_state_that_a_newer_one_replaced_was_superseded_and_is_not_delivered(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(30)
        superseded, delivered = (value(world, "notify_total", result=one) for one in ("superseded", "delivered"))
        world.kube.down = True
        world.guest("web-0").silent(True)
        world.run(40)
        world.guest("web-0").silent(False)
        world.run(10)
        world.kube.down = False
        world.run(60)
        assert value(world, "notify_total", result="superseded") > superseded
        assert value(world, "notify_total", result="delivered") == delivered + 1

    def test_watches_that_end_are_counted_with_the_cause(self, world):
        world.create_pod("web-0", guest=FAST)
        world.run(5)

        def reconnects():
            return {one: value(world, "watch_reconnects_total", reason=one) for one in ("ended", "error", "expired")}

        assert reconnects() == {"ended": 0, "error": 0, "expired": 0}
        world.kube.cut_watches()
        world.run(5)
        assert reconnects() == {"ended": 1, "error": 0, "expired": 0}
        world.kube.cut_watches(mid_line=True)
        world.run(5)
        assert reconnects() == {"ended": 1, "error": 1, "expired": 0}
        world.kube.expire_history()
        world.kube.cut_watches()
        world.run(5)
        assert reconnects() == {"ended": 2, "error": 1, "expired": 1}


class TestProcess:
    def test_a_greenlet_that_dies_is_counted(self):
        metrics = Metrics("1")
        metrics.greenlet_errors_from(deaths)
        before = metrics.registry.get_sample_value("cocoon_vk_greenlet_errors_total")
        group = gevent.pool.Group()
        spawn(group, "mistake", lambda: 1 // 0)
        group.join()
        assert metrics.registry.get_sample_value("cocoon_vk_greenlet_errors_total") == before + 1


# The exposition ---------------------------------------------------------------------------------------------------

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9.e+-]+|\+Inf)")
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}


def families(text):
    """A strict reading of the text format: kind and samples of each family. Raises AssertionError for any departure."""
    assert text.endswith("\n")
    found, name = {}, ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in found, f"{name} twice"
            assert len(line.split(maxsplit=3)) == 4, f"{name} has no help"
            found[name] = ["", {}]
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split()
            assert typed == name, line
            assert found[name] == ["", {}], line
            found[name][0] = kind
        else:
            matched = SAMPLE.fullmatch(line)
            assert matched, line
            kind, samples = found[name]
            assert matched[1] in {name + suffix for suffix in SUFFIXES[kind]}, line
            assert (matched[1], matched[2] or "") not in samples, f"twice: {line}"
            samples[matched[1], matched[2] or ""] = float(matched[3].replace("+Inf", "inf"))
    return found


def check_histogram(name, samples):
    """Buckets grow, the last is +Inf and equals the count."""
    series = {}
    for (sample, labels), number in samples.items():
        if sample == f"{name}_bucket":
            bound = re.search(r'le="([^"]+)"', labels)[1]
            rest = ",".join(part for part in labels.split(",") if not part.startswith("le="))
            series.setdefault(rest, []).append((float(bound.replace("+Inf", "inf")), number))
    assert series, name
    for labels, buckets in series.items():
        assert buckets == sorted(buckets), name
        assert [number for _, number in buckets] == sorted(number for _, number in buckets)
        assert buckets[-1] == (float("inf"), samples[f"{name}_count", labels])
        assert samples[f"{name}_sum", labels] >= 0


class TestExposition:
    @pytest.fixture
    def text(self, world):
        world.daemon.ports.metrics.greenlet_errors_from(deaths)
        world.create_pod("web-0", guest=FAST)
        world.create_pod("mac-0", os="macos", guest=MAC)
        world.run(120)
        return world.daemon.ports.metrics.exposition().decode()

    def test_it_parses_strictly(self, text):
        found = families(text)
        for name, (kind, samples) in found.items():
            assert kind in SUFFIXES, name
            if kind == "histogram" and samples:
                check_histogram(name, samples)
            elif kind == "counter":
                assert name.endswith("_total")
                assert all(number >= 0 for number in samples.values())

    def test_no_pod_and_no_vm_is_a_label(self, text):
        ours = "\n".join(line for line in text.splitlines() if line.startswith("cocoon_vk_"))
        assert "web-0" not in ours
        assert "mac-0" not in ours

    def test_all_that_was_promised_is_there(self, text):
        promised = {
            "build_info",
            "pods",
            "probe_duration_seconds",
            "probe_flips_total",
            "probe_lateness_seconds",
            "time_to_ready_seconds",
            "lease_lookups_total",
            "lease_file_age_seconds",
            "notify_total",
            "notify_duration_seconds",
            "status_writes_total",
            "pinger_degraded",
            "qemu_restarts_total",
            "hub_lag_seconds",
            "watch_reconnects_total",
            "greenlet_errors_total",
        }
        assert {f"cocoon_vk_{name}" for name in promised} <= set(families(text))

    @pytest.mark.parametrize(
        "broken",
        [
            "x 1\n",
            "# HELP a b\n# TYPE a counter\na 1\na 1\n",
            "# HELP a b\n# TYPE a gauge\nb 1\n",
            "# HELP a b\n# TYPE a gauge\na one\n",
            '# HELP a b\n# TYPE a gauge\na{x="\\t"} 1\n',
            "# HELP a b\n# TYPE a gauge\na 1",
        ],
    )
    def test_the_reader_is_strict_indeed(self, broken):
        with pytest.raises((AssertionError, KeyError)):
            families(broken)


class TestAlerts:
    RULES = yaml.safe_load((ROOT / "packaging" / "alerts.yml").read_text())["groups"][0]["rules"]

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
    def test_each_says_what_is_wrong_and_what_to_do(self, rule):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]

    @pytest.mark.process
    @pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
    def test_each_fires_where_it_must_and_nowhere_else(self):
        for words in (["check", "rules", "packaging/alerts.yml"], ["test", "rules", "tests/alerts_test.yml"]):
            ended = subprocess.run(["promtool", *words], cwd=ROOT, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stdout + ended.stderr

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
    def test_each_is_tried_both_ways(self, rule):
        tests = yaml.safe_load((ROOT / "tests" / "alerts_test.yml").read_text())["tests"]
        tried = [case for test in tests for case in test["alert_rule_test"] if case["alertname"] == rule["alert"]]
        assert {bool(case["exp_alerts"]) for case in tried} == {True, False}

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
    def test_each_speaks_of_metrics_and_labels_that_exist(self, rule):
        metrics = Metrics("1")
        metrics.leases_from(__file__, SystemClock())
        metrics.greenlet_errors_from(deaths)
        feeds = [
            lambda: metrics.pods_from(
                lambda: [type("Pod", (), {"os": "linux", "ready": False, "reason": "VMGone", "vm": None})]
            ),
            lambda: [metrics.flip(ready) for ready in (True, False)],
            lambda: [metrics.status_write(result) for result in ("ok", "failed", "gone", "unchanged")],
            lambda: [metrics.qemu_restart(result) for result in ("ok", "failed")],
        ]
        for feed in feeds:
            feed()
        known = {}
        for _, samples in families(metrics.exposition().decode()).values():
            for name, labels in samples:
                known.setdefault(name, set()).update(re.findall(r'(\w+)="([^"]*)"', labels))
        for name, selector in re.findall(r"(cocoon_vk_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            assert name in known, name
            for label, operator, wanted in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
                assert label in {one for one, _ in known[name]}, (name, label)
                if operator == "=":
                    assert (label, wanted) in known[name], (name, label, wanted)
