"""The numbers over the kubelet API, as metrics-server and others read them. H14, strictly: a line that only a friendly
parser accepts is a failure, and so is a number that metrics-server would drop.
"""

import json
import os
import re

import pytest
from kubelet_rig import HostFiles, KubeletRig
from prometheus_client.parser import text_string_to_metric_families

from simulator.clock import VirtualClock
from vkcocoon_exposition import resource_metrics
from vkcocoon_http import Metrics
from vkcocoon_stats import Subject
from vkcocoon_vms import VM, Nic

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ([0-9.e+-]+)(?: (\d+))?")


def strictly(text):
    """Samples by name and labels: (value, time in ms or None). Fails for anything the text format does not allow."""
    assert text.endswith("\n")
    samples, described, typed, current = {}, set(), {}, None
    for line in text.removesuffix("\n").split("\n"):
        if found := re.fullmatch(rf"# HELP ({NAME}) \S.*", line):
            assert found[1] not in described, "described twice"
            described.add(found[1])
            current = found[1]
        elif found := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge)", line):
            assert found[1] == current and found[1] not in typed
            typed[found[1]] = found[2]
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            assert found[1] == current and found[1] in typed, "a sample outside of its family"
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found[2] or ""))
            key = (found[1], *sorted(labels.items()))
            assert key not in samples, "sampled twice"
            samples[key] = (float(found[3]), int(found[4]) if found[4] else None)
    assert list(text_string_to_metric_families(text))
    return samples


def as_metrics_server_reads(text):
    """What is left of a page there: CPU, memory and time of the node, and the numbers by pod and container; whatever is
    incomplete or zero is dropped."""
    node, pods = {}, {}
    for (name, *labels), (value, at) in strictly(text).items():
        labels = dict(labels)
        if name in ("node_cpu_usage_seconds_total", "node_memory_working_set_bytes"):
            node[name] = value
            node["at"] = at
        elif name.startswith("container_"):
            container = pods.setdefault((labels["namespace"], labels["pod"]), {}).setdefault(labels["container"], {})
            container[name.removeprefix("container_")] = value
            if at is not None:
                container["at"] = at
    cpu, memory = node.get("node_cpu_usage_seconds_total"), node.get("node_memory_working_set_bytes")
    complete = {}
    for pod, containers in pods.items():
        if all(
            each.get("cpu_usage_seconds_total") and each.get("memory_working_set_bytes") for each in containers.values()
        ):
            complete[pod] = containers
    return ((cpu, memory, node["at"]) if cpu and memory else None), complete


ID = "MZ5XQ2TLK4V7RW3HYB6CJDNEAP"
PAGE = os.sysconf("SC_PAGE_SIZE")


def run_vm(files):
    files.process(400, ID, pages=2048)
    files.scope(ID, usage_us=12_345_678, pids=(400,))
    files.interfaces({"tapMZ5XQ2TL-0": (111, 222, 3, 4)}, pid=400)


@pytest.fixture
def rig(tmp_path):
    rig = KubeletRig(tmp_path)
    run_vm(rig.files)
    rig.pod = rig.held.add(
        vm=VM(ID, "vk-default-web-0", "running", "cloud-hypervisor", 400, (Nic(tap="tapMZ5XQ2TL-0"),)),
        containers=["agent", "sidecar"],
    )
    yield rig
    rig.close()


def next_sample(rig):
    rig.kubelet._stats._last_at = float("-inf")


class TestScrape:
    def test_h14_metrics_server_finds_node_and_pod_complete(self, rig):
        rig.start()
        began = rig.clock.now().timestamp()
        with rig.asking("/metrics/resource") as answer:
            assert answer.status == 200
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            node, pods = as_metrics_server_reads(answer.text())
        (cpu, memory, at) = node
        assert (cpu, memory) == (17.0, 11_000_000 * 1024)
        assert began * 1000 - 1 <= at <= rig.clock.now().timestamp() * 1000 + 1
        assert set(pods) == {("default", "web-0")}
        assert set(pods["default", "web-0"]) == {"agent"}, "one virtual machine is one container, the first of the spec"
        agent = pods["default", "web-0"]["agent"]
        assert agent["cpu_usage_seconds_total"] == 12.345678
        assert agent["memory_working_set_bytes"] == 2048 * PAGE
        assert agent["start_time_seconds"] == 1_700_000_050.0
        assert began * 1000 - 1 <= agent["at"] <= rig.clock.now().timestamp() * 1000 + 1

    def test_h14_the_families_are_a_kubelets(self, rig):
        rig.start()
        text = rig.ask("/metrics/resource")[1]
        assert re.findall(r"^# TYPE (\w+ \w+)$", text, re.MULTILINE) == [
            "node_cpu_usage_seconds_total counter",
            "node_memory_working_set_bytes gauge",
            "container_cpu_usage_seconds_total counter",
            "container_memory_working_set_bytes gauge",
            "container_start_time_seconds gauge",
            "pod_cpu_usage_seconds_total counter",
            "pod_memory_working_set_bytes gauge",
            "resource_scrape_error gauge",
        ]
        assert 'container_cpu_usage_seconds_total{container="agent",namespace="default",pod="web-0"} 12.345678 ' in text
        samples = strictly(text)
        pod = (("namespace", "default"), ("pod", "web-0"))
        assert samples["pod_cpu_usage_seconds_total", *pod][0] == 12.345678
        assert samples["pod_memory_working_set_bytes", *pod][0] == 2048 * PAGE
        assert samples["container_start_time_seconds", ("container", "agent"), *pod][1] is None
        assert samples[("resource_scrape_error",)] == (0.0, None)

    def test_h14_two_scrapes_make_a_rate(self, rig):
        rig.start()
        _, before = as_metrics_server_reads(rig.ask("/metrics/resource")[1])
        rig.files.scope(ID, usage_us=14_345_678, pids=(400,))
        next_sample(rig)
        _, after = as_metrics_server_reads(rig.ask("/metrics/resource")[1])
        before, after = before["default", "web-0"]["agent"], after["default", "web-0"]["agent"]
        assert after["cpu_usage_seconds_total"] - before["cpu_usage_seconds_total"] == pytest.approx(2.0)
        assert after["at"] > before["at"]
        assert after["start_time_seconds"] == before["start_time_seconds"] < before["at"] / 1000

    def test_h14_scrapes_close_together_are_the_same(self, rig):
        rig.start()
        first = rig.ask("/metrics/resource")[1]
        rig.files.scope(ID, usage_us=99_000_000, pids=(400,))
        assert rig.ask("/metrics/resource")[1] == first

    @pytest.mark.parametrize("how", ["no VM", "gone", "no containers", "no process"])
    def test_a_pod_without_numbers_is_left_out_and_the_page_is_whole(self, rig, how):
        if how == "no VM":
            rig.pod.vm = None
        elif how == "gone":
            rig.pod.gone = True
        elif how == "no containers":
            rig.pod.containers = []
        else:
            rig.files.end(400)
        rig.start()
        node, pods = as_metrics_server_reads(rig.ask("/metrics/resource")[1])
        assert node is not None
        assert pods == {}

    def test_a_pod_that_names_the_vm_of_another_gets_none_of_its_numbers(self, rig):
        rig.held.add("evil/pod", "uid-2", vm=rig.pod.vm, managed=False)
        rig.start()
        _, pods = as_metrics_server_reads(rig.ask("/metrics/resource")[1])
        assert set(pods) == {("default", "web-0")}
        del rig.held.pods["default/web-0"]
        next_sample(rig)
        _, pods = as_metrics_server_reads(rig.ask("/metrics/resource")[1])
        assert set(pods) == {("evil", "pod")}

    def test_a_host_that_cannot_be_read_is_an_error_in_the_page(self, rig):
        (rig.files.proc / "stat").unlink()
        rig.start()
        samples = strictly(rig.ask("/metrics/resource")[1])
        assert samples[("resource_scrape_error",)] == (1.0, None)
        assert not any(name.startswith("node_") for name, *_ in samples)

    def test_a_source_that_fails_costs_this_scrape_and_no_other(self, rig):
        rig.start()
        name, rig.pod.key = rig.pod.key, None
        assert rig.ask("/metrics/resource")[0] == 500
        rig.pod.key = name
        assert rig.ask("/metrics/resource")[0] == 200

    def test_no_command_is_run_for_it(self, rig):
        rig.start()
        before = len(rig.cocoon.calls)
        rig.ask("/metrics/resource")
        rig.ask("/stats/summary")
        assert len(rig.cocoon.calls) == before

    def test_names_in_every_legal_spelling(self, tmp_path):
        files, clock = HostFiles(tmp_path), VirtualClock()
        run_vm(files)
        vm = VM(ID, "vk", "running", "cloud-hypervisor", 400)
        longest = ".".join(["a" * 63] * 3) + "." + "b" * 61
        subjects = [Subject("u", "kube-system", longest, "c" * 63, vm), Subject("v", "n", '"\\\n', "{}", vm)]
        samples = strictly(b"".join(resource_metrics(files.stats(clock, lambda: subjects).sample())).decode())
        pods = {dict(labels)["pod"] for name, *labels in samples if name == "pod_cpu_usage_seconds_total"}
        assert pods == {longest, r"\"\\\n"}


class TestSummary:
    def test_it_has_the_numbers_of_node_and_pods(self, rig):
        rig.start()
        summary = rig.get_json("/stats/summary")
        node = summary["node"]
        assert node["nodeName"] == "node-1"
        assert node["startTime"] == "2023-11-14T22:13:20Z"
        assert node["cpu"]["usageCoreNanoSeconds"] == 17_000_000_000
        assert "usageNanoCores" not in node["cpu"], "no rate without an earlier sample"
        assert node["memory"]["workingSetBytes"] == 11_000_000 * 1024
        assert node["memory"]["availableBytes"] == 5_000_000 * 1024
        (pod,) = summary["pods"]
        assert pod["podRef"] == {"name": "web-0", "namespace": "default", "uid": "uid-1"}
        assert pod["startTime"] == "2023-11-14T22:14:10Z"
        (container,) = pod["containers"]
        assert container["name"] == "agent"
        for part in (pod, container):
            assert part["cpu"]["usageCoreNanoSeconds"] == 12_345_678_000
            assert part["memory"]["workingSetBytes"] == part["memory"]["rssBytes"] == 2048 * PAGE
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", part["cpu"]["time"])
        traffic = {"name": "tapMZ5XQ2TL-0", "rxBytes": 222, "rxErrors": 4, "txBytes": 111, "txErrors": 3}
        assert pod["network"].pop("time")
        assert pod["network"] == {**traffic, "interfaces": [traffic]}

    def test_the_second_one_has_rates(self, rig):
        rig.start()
        rig.get_json("/stats/summary")
        next_sample(rig)
        summary = rig.get_json("/stats/summary")
        assert summary["node"]["cpu"]["usageNanoCores"] == 0
        assert summary["pods"][0]["cpu"]["usageNanoCores"] == 0

    def test_only_cpu_and_memory_when_that_is_asked_for(self, rig):
        rig.start()
        assert "network" not in rig.get_json("/stats/summary?only_cpu_and_memory=true")["pods"][0]
        assert "network" in rig.get_json("/stats/summary?only_cpu_and_memory=false")["pods"][0]

    def test_without_pods_it_is_whole(self, rig):
        rig.held.pods.clear()
        rig.start()
        assert rig.get_json("/stats/summary")["pods"] == []

    def test_many_pods_are_one_document(self, rig):
        for number in range(250):
            vm_id = f"{number:026}"
            rig.files.process(1000 + number, vm_id)
            vm = VM(vm_id, f"vk-{number}", "running", "cloud-hypervisor", 1000 + number)
            rig.held.add(f"default/pod-{number}", f"uid-{number}", vm=vm)
        rig.start()
        pods = rig.get_json("/stats/summary")["pods"]
        assert len({pod["podRef"]["name"] for pod in pods}) == 251
        assert len(as_metrics_server_reads(rig.ask("/metrics/resource")[1])[1]) == 251


class TestOtherPages:
    def test_our_own_metrics_are_here_too(self, rig):
        rig.start(exposition=Metrics("1.2.3").exposition)
        status, text = rig.ask("/metrics")
        assert status == 200
        assert 'version="1.2.3"' in text

    @pytest.mark.parametrize("path", ["/metrics/cadvisor", "/metrics/probes"])
    def test_a_scraper_of_kubelets_finds_nothing_but_no_fault(self, rig, path):
        rig.start()
        with rig.asking(path) as answer:
            assert (answer.status, answer.headers["content-length"]) == (200, "0")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")

    def test_pages_are_json_where_they_should_be(self, rig):
        rig.start()
        for path in ("/pods", "/runningpods", "/stats/summary"):
            with rig.asking(path) as answer:
                assert answer.status == 200
                assert answer.headers["content-type"] == "application/json"
                assert json.loads(answer.text())
