"""What VMs and the host use, read from /proc and cgroups: the right process, the right numbers, one sample for all.

A number that is wrong is worse than none: an old pid in a record, a pid the kernel gave away again, a zombie are left
out. All on files in a directory and in virtual time; once on a real process.
"""

import os
from datetime import UTC, datetime, timedelta
from time import process_time

import gevent
import pytest
from gevent import subprocess
from gevent.pool import Group
from kubelet_rig import BOOTED, HostFiles

from simulator.clock import VirtualClock
from vkcocoon_exposition import resource_metrics
from vkcocoon_probes import SystemClock, spawn
from vkcocoon_stats import SLICE, Stats, Subject, Traffic
from vkcocoon_vms import VM, Nic

ID = "MZ5XQ2TLK4V7RW3HYB6CJDNEAP"
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def files(tmp_path):
    return HostFiles(tmp_path)


@pytest.fixture
def subjects():
    return [subject()]


@pytest.fixture
def stats(files, clock, subjects):
    return files.stats(clock, lambda: list(subjects))


def subject(name="web-0", vm_id=ID, pid=400, tap="tapMZ5XQ2TL-0", hypervisor="cloud-hypervisor"):
    vm = VM(vm_id, f"vk-{name}", "running", hypervisor, pid, (Nic(mac="0a:58:00:00:00:01", tap=tap),) if tap else ())
    return Subject(f"uid-{name}", "default", name, "agent", vm)


def only(sample):
    (usage,) = sample.pods
    return usage


class TestNumbers:
    def test_cpu_is_the_cgroups_and_memory_the_processs(self, files, stats):
        files.process(400, ID, pages=2048, user=1, system=1)
        files.scope(ID, usage_us=12_345_678)
        usage = only(stats.sample())
        assert (usage.cpu_s, usage.memory) == (12.345678, 2048 * PAGE)
        assert usage.subject == subject()

    def test_without_a_cgroup_cpu_is_the_processs(self, files, stats):
        files.process(400, ID, user=150, system=50)
        assert only(stats.sample()).cpu_s == 200 / TICKS

    def test_it_started_so_long_after_the_host(self, files, stats):
        files.process(400, ID, start=5000)
        started = datetime.fromtimestamp(BOOTED, UTC) + timedelta(seconds=5000 / TICKS)
        assert only(stats.sample()).started == started
        assert stats.started(subject().vm) == started

    def test_the_start_stays_when_the_hosts_wall_clock_is_set(self, files, stats, clock):
        files.process(400, ID)
        before = only(stats.sample()).started
        files.write("proc/stat", f"cpu  1 1 1 1 1 1 1 1\nbtime {BOOTED + 3600}\n")
        clock.run(3)
        assert only(stats.sample()).started == before

    @pytest.mark.parametrize("name", ["a) S 1 (b", "(", ")", "a b c", ") Z 0 0"])
    def test_a_process_may_be_called_anything(self, files, stats, name):
        files.process(400, ID, name=name, pages=7)
        assert only(stats.sample()).memory == 7 * PAGE

    def test_a_mac_is_found_by_its_name(self, files, stats, subjects):
        subjects[:] = [subject("mac-0", "qemu-vk-mac-0", 500, hypervisor="qemu")]
        files.process(500, "vk-mac-0", user=70, system=30)
        assert only(stats.sample()).cpu_s == 100 / TICKS

    def test_the_rate_is_between_two_samples_by_the_monotonic_clock(self, files, stats, clock):
        files.process(400, ID)
        files.scope(ID, usage_us=1_000_000)
        assert only(stats.sample()).cpu_rate is None
        clock.run(10)
        clock.step_wall(-3600)
        files.scope(ID, usage_us=6_000_000)
        assert only(stats.sample()).cpu_rate == 0.5

    def test_a_counter_that_began_anew_has_no_rate(self, files, stats, clock):
        files.process(400, ID)
        files.scope(ID, usage_us=5_000_000)
        stats.sample()
        clock.run(10)
        files.scope(ID, usage_us=1_000_000)
        usage = only(stats.sample())
        assert (usage.cpu_s, usage.cpu_rate) == (1.0, None)

    def test_the_host(self, stats, clock):
        node = stats.sample().node
        # user, nice, system, irq, softirq, steal; guests are in user already
        assert node.cpu_s == (1000 + 100 + 500 + 20 + 30 + 50) / TICKS
        assert node.working_set == (16_000_000 - 4_000_000 - 1_000_000) * 1024
        assert node.used == 12_000_000 * 1024
        assert node.available == 5_000_000 * 1024
        assert (node.at, node.cpu_rate) == (clock.now(), None)
        clock.run(10)
        assert stats.sample().node.cpu_rate == 0

    @pytest.mark.parametrize("name", ["stat", "meminfo"])
    def test_a_host_that_cannot_be_read_does_not_hide_the_pods(self, files, stats, name):
        files.process(400, ID)
        (files.proc / name).unlink()
        sample = stats.sample()
        assert sample.node is None
        assert len(sample.pods) == 1

    @pytest.mark.process
    def test_a_real_process_is_read_as_it_is(self):
        clock = SystemClock()
        script = "i=0; while [ $i -lt 3000000 ]; do i=$((i+1)); done; sleep 60"
        process = subprocess.Popen(["sh", "-c", script, f"/run/{ID}/api.sock"])
        try:
            stats = Stats(clock, lambda: [subject(pid=process.pid)], parent="no.slice")
            first = only(stats.sample())
            while (now := only(stats.sample())).cpu_s < first.cpu_s + 0.05:
                clock.sleep(0.1)
                stats._last = None
            assert now.memory > 100 * 1024
            assert abs((now.started - clock.now()).total_seconds()) < 60
        finally:
            process.kill()
            process.wait()
        stats._last = None
        assert stats.sample().pods == ()


class TestWhichProcess:
    def test_none_is_no_number(self, stats):
        assert stats.sample().pods == ()

    def test_a_stranger_with_the_pid_of_the_record_is_left_out(self, files, stats):
        files.process(400, "SOMEBODYELSE")
        files.scope(ID, usage_us=1_000_000)
        assert stats.sample().pods == ()

    def test_a_pid_that_is_given_away_again_is_noticed(self, files, stats, clock):
        files.process(400, ID, start=5000)
        assert len(stats.sample().pods) == 1
        files.process(400, "SOMEBODYELSE", start=9000)
        clock.run(3)
        assert stats.sample().pods == ()

    def test_a_zombie_is_left_out(self, files, stats):
        files.process(400, ID, state="Z")
        assert stats.sample().pods == ()

    @pytest.mark.parametrize("pid", [0, 999])
    def test_a_record_that_is_out_of_date_is_helped_by_the_cgroup(self, files, stats, subjects, pid):
        subjects[:] = [subject(pid=pid)]
        files.process(77, "SOMEBODYELSE")
        files.process(401, ID, pages=9)
        files.scope(ID, usage_us=3_000_000, pids=(77, 401))
        assert only(stats.sample()).memory == 9 * PAGE

    def test_a_restart_is_followed_and_its_start_is_new(self, files, stats, clock):
        files.process(400, ID, start=5000)
        files.scope(ID, usage_us=9_000_000, pids=(400,))
        before = only(stats.sample())
        files.end(400)
        files.process(401, ID, start=8000)
        files.scope(ID, usage_us=1_000_000, pids=(401,))
        clock.run(3)
        after = only(stats.sample())
        assert after.started - before.started == timedelta(seconds=3000 / TICKS)
        assert after.cpu_rate is None

    def test_one_that_ends_is_left_out_and_the_others_stay(self, files, stats, subjects, clock):
        other = ID[::-1]
        subjects.append(subject("web-1", other, 401))
        files.process(400, ID)
        files.process(401, other)
        assert [usage.subject.name for usage in stats.sample().pods] == ["web-0", "web-1"]
        files.end(400)
        clock.run(3)
        assert [usage.subject.name for usage in stats.sample().pods] == ["web-1"]

    def test_a_pod_whose_vm_was_replaced_is_found_anew(self, files, stats, subjects, clock):
        files.process(400, ID, pages=1)
        stats.sample()
        other = ID[::-1]
        files.process(401, other, pages=2)
        subjects[:] = [subject("web-0", other, 401)]
        clock.run(3)
        assert only(stats.sample()).memory == 2 * PAGE

    @pytest.mark.parametrize("vm_id", ["../../..", "/etc", "", "a/b"])
    def test_an_id_from_an_annotation_leads_nowhere(self, files, stats, subjects, vm_id):
        subjects[:] = [subject(vm_id=vm_id, pid=0)]
        assert stats.sample().pods == ()

    def test_nothing_is_remembered_of_pods_that_are_gone(self, files, stats, subjects, clock):
        files.process(400, ID)
        stats.sample()
        subjects.clear()
        clock.run(3)
        stats.sample()
        assert stats._known == {}


class TestTraffic:
    def test_it_is_seen_from_the_guest(self, files, stats):
        files.process(400, ID)
        files.interfaces({"lo": (1, 1), "tapMZ5XQ2TL-0": (111, 222, 3, 4)}, pid=400)
        traffic = only(stats.sample(traffic=True)).traffic
        assert traffic == Traffic("tapMZ5XQ2TL-0", received=222, sent=111, receive_errors=4, send_errors=3)

    def test_a_tap_beside_the_others_of_the_host_is_found_there(self, files, stats):
        files.process(400, ID)
        files.interfaces({"tapMZ5XQ2TL-0": (1, 2), "tapOTHER": (3, 4)})
        assert only(stats.sample(traffic=True)).traffic.received == 2

    def test_it_is_not_read_when_nobody_asks(self, files, stats):
        files.process(400, ID)
        files.interfaces({"tapMZ5XQ2TL-0": (1, 2)})
        assert only(stats.sample()).traffic is None

    @pytest.mark.parametrize("tap", ["", "tapNOBODY"])
    def test_a_card_that_is_not_there_is_no_traffic_and_no_failure(self, files, stats, subjects, tap):
        subjects[:] = [subject(tap=tap)]
        files.process(400, ID)
        assert only(stats.sample(traffic=True)).traffic is None


class TestSharing:
    def test_a_sample_is_good_for_two_seconds(self, files, stats, clock):
        files.process(400, ID)
        first = stats.sample()
        clock.run(1.999999)
        assert stats.sample() is first
        clock.run(0.000001)
        assert stats.sample() is not first

    def test_one_with_traffic_is_good_for_those_who_want_none(self, files, stats):
        files.process(400, ID)
        first = stats.sample(traffic=True)
        assert stats.sample() is first

    def test_one_without_traffic_is_not_good_for_those_who_want_it(self, files, stats):
        files.process(400, ID)
        first = stats.sample()
        second = stats.sample(traffic=True)
        assert second is not first
        assert stats.sample() is second

    def test_those_who_ask_at_once_share_one(self, files, subjects, stats, clock):
        for number in range(100):
            subjects.append(subject(f"web-{number}", f"{number:026}", 1000 + number))
            files.process(1000 + number, f"{number:026}")
        found = []
        for number in range(20):
            clock.spawn(f"client {number}", lambda: found.append(stats.sample()))
        clock.run(0)
        assert len(found) == 20
        assert len({id(sample) for sample in found}) == 1

    def test_an_impatient_one_does_not_take_it_from_the_others(self, files, subjects, stats, clock):
        for number in range(100):
            subjects.append(subject(f"web-{number}", f"{number:026}", 1000 + number))
        found, greenlets = [], Group()
        first = spawn(greenlets, "first", stats.sample)
        spawn(greenlets, "second", lambda: found.append(stats.sample()))
        spawn(greenlets, "killer", gevent.kill, first)
        clock.run(0)
        assert len(found) == 1

    def test_a_failure_is_everybodys_and_the_next_sample_is_new(self, files, clock):
        def subjects():
            if broken:
                raise RuntimeError(broken.pop())
            return []

        broken = ["no pods today"]
        stats = files.stats(clock, subjects)
        with pytest.raises(RuntimeError, match="no pods today"):
            stats.sample()
        assert stats.sample().pods == ()


class Turns(SystemClock):
    """Counts the turns that were given to everybody else."""

    turns = 0

    def sleep(self, seconds):
        self.turns += 1
        super().sleep(seconds)


class TestCost:
    @pytest.fixture
    def thousand(self, files):
        subjects = []
        for number in range(1000):
            vm_id, pid = f"{number:026}", 10_000 + number
            subjects.append(subject(f"web-{number}", vm_id, pid))
            files.process(pid, vm_id)
            files.scope(vm_id, usage_us=1_000_000 + number, pids=(pid,))
        return subjects

    def test_a_scrape_of_a_thousand_pods_costs_little_more_than_reading_their_files(self, files, thousand):
        """In milliseconds, `python -m tests.bench scrape` says what it costs on a machine."""
        stats = files.stats(SystemClock(), lambda: thousand)
        assert len(stats.sample().pods) == 1000  # found for the first time, which is dearer
        spent, reading = [], []
        for _ in range(5):
            stats._last = None
            began = process_time()
            page = b"".join(resource_metrics(stats.sample()))
            spent.append(process_time() - began)
            began = process_time()
            for subject in thousand:
                stats._read(f"{stats._proc}/{subject.vm.pid}/stat")
                stats._read(f"{stats._scope(subject.vm)}/cpu.stat")
            reading.append(process_time() - began)
        assert page.count(b"container_cpu_usage_seconds_total{") == 1000
        assert min(spent) < 5 * min(reading)

    def test_everybody_else_has_a_turn_every_few_pods(self, files, thousand):
        clock = Turns()
        stats = files.stats(clock, lambda: thousand)
        stats.sample()
        assert clock.turns >= 1000 // SLICE

    def test_nobody_waits_long_for_a_turn_while_it_goes_on(self, files, thousand):
        clock, greenlets, gaps = SystemClock(), Group(), []

        def tick():
            last = process_time()
            while True:
                clock.sleep(0)
                now = process_time()
                gaps.append(now - last)
                last = now

        stats = files.stats(clock, lambda: thousand)
        spawn(greenlets, "tick", tick)
        sample = stats.sample()
        for part in resource_metrics(sample):
            assert part
            clock.sleep(0)
        greenlets.kill()
        assert len(gaps) > 40
        assert sorted(gaps)[-2] < sum(gaps) / 8  # one hiccup of the interpreter is forgiven
