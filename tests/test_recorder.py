"""`run --record`: what a daemon writes down of its world, how little that may cost, and what it must never hold."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from record_rig import SCENARIOS, called, recorded

import vkcocoon_recorder
from simulator.clock import VirtualClock
from simulator.replay import flips_of, read, replay_of
from simulator.scenario import load
from vkcocoon_commands import Completed
from vkcocoon_probes import Cadence, ProbeAgent, ProbeResult
from vkcocoon_record import subject_of
from vkcocoon_recorder import Recorder
from vkcocoon_settings import Settings
from vkcocoon_tracking import PodTable

# Where a daemon sees too little for a replay at the very instants, and why; the flips are the same all the same.
CLOSE = {
    "api-down-at-birth": "the lease is dated by the probe that saw it, so the lifecycle is told a little earlier",
    "api-refuses": "the same",
    "status-first": "the same",
    "killed-in-a-create": "a command that outlives a killed daemon has no end in its log",
    "lossy-line": "answers of 2 ms count as immediate",
    "noise": "answers of 1 ms count as immediate",
    "sizes": "answers of 1 ms count as immediate",
}
NO_GUEST = ("not-managed",)


def names():
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


def replayed(directory):
    made = replay_of(read(directory))
    return made, made.seen(load(made.document).run(None))


# What is in it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in names() if name not in NO_GUEST])
def test_what_a_daemon_records_is_enough_for_the_same_flips(name, tmp_path):
    happened = flips_of(recorded(name, tmp_path / "record"))
    made, seen = replayed(tmp_path / "record")
    assert made.flips == happened
    if name not in CLOSE:
        assert seen == happened
        return
    assert [flip[1:] for flip in seen] == [flip[1:] for flip in happened]
    assert all(abs(ours - theirs) <= 5_000_000 for (ours, *_), (theirs, *_) in zip(seen, happened, strict=True))


SILENT = {
    "until": "60s",
    "pods": [{"name": "web-0", "guest": {"boot": "1s", "lease": "100ms"}}],
    "events": [{"at": "30s", "for": "20s", "silent": "web-0"}],
}


def entries(directory):
    return [json.loads(line) for path in sorted(directory.iterdir()) for line in path.read_text().splitlines()]


def test_probes_that_say_the_same_are_known_by_their_number(tmp_path):
    recorded(SILENT, tmp_path)
    probes = [(row["n"], row["kind"]) for row in entries(tmp_path) if row["actor"] == "probe"]
    up, again = (number for number, kind in probes if kind == "ok")
    failed = [number for number, kind in probes if kind == "fails"]
    down = next(number for number in failed if number > up)
    assert down > up + 1  # those in between succeeded like the one before
    assert failed == [*range(1, up), *range(down, again)]


def test_a_pod_that_is_down_for_hours_costs_a_hundred_lines(tmp_path):
    recorded({"until": "2h", "pods": [{"name": "web-0", "guest": {"boot": "1s", "echo": False}}]}, tmp_path)
    probes = [row for row in entries(tmp_path) if row["actor"] == "probe" and row["reason"] == "PingTimeout"]
    assert len(probes) == vkcocoon_recorder.REPEATS + 1


def test_a_pod_is_known_by_annotations_of_our_groups_alone(tmp_path):
    annotations = {"example.com/token": "s3cret", "vm.cocoonstack.io/probe-port": "8080"}
    labels = {"example.com/owner": "somebody"}
    recorded({"until": "5s", "pods": [{"name": "web-0", "annotations": annotations, "labels": labels}]}, tmp_path)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "probe-port" in text
    assert "s3cret" not in text
    assert "somebody" not in text


def test_what_a_guest_is_told_and_with_which_values_is_not_in_it():
    told = ["cocoon", "vm", "exec", "-e", "TOKEN=s3cret", "vk-default-web-0", "--", "sh", "-c", "echo s3cret"]
    assert subject_of(told) == "vk-default-web-0"
    assert subject_of(["cocoon", "vm", "run", "--name", "vm-0", "image:7"]) == "vm-0"
    assert subject_of(["cocoon", "vm", "list", "-o", "json"]) == ""


def recorder(directory, clock=None, **settings):
    made = Recorder(Settings(record=str(directory), **settings), clock or VirtualClock(), version="1", aside=called)
    made._held = PodTable()
    return made


def test_a_password_that_a_command_complains_about_is_masked(tmp_path):
    made, argv = recorder(tmp_path), ["cocoon-macos", "vm", "run", "--name", "m", "--vnc-password", "hunter2", "img"]
    made._around("cocoon-macos")(lambda argv, limit: Completed(1, "", "Error: bad password hunter2"))(argv, 1.0)
    begins, ends = made._pending
    assert dict(ends.fields)["error"].startswith("Error: bad password ")
    assert "hunter2" not in begins.line() + ends.line()


def test_a_command_that_raises_is_in_the_log_and_raises_all_the_same(tmp_path):
    made = recorder(tmp_path)

    def interrupted(argv, limit):
        raise OSError(errno.EIO, "x")

    with pytest.raises(OSError):
        made._around("cocoon")(interrupted)(["cocoon", "vm", "rm", "x"], 1.0)
    assert dict(made._pending[-1].fields)["exit"] == "failed"


# The files --------------------------------------------------------------------------------------------------------


def test_only_the_owner_can_read_it(tmp_path):
    directory = tmp_path / "a" / "record"
    before = os.umask(0)
    try:
        recorded(SILENT, directory)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()] == [0o600]


BUSY = {
    "until": "5m",
    "pods": [{"name": f"web-{number}", "guest": {"boot": "1s", "lease": "100ms"}} for number in range(10)],
    "events": [
        {"at": f"{10 + number}s", "every": "60s", "for": "30s", "silent": f"web-{number}"} for number in range(10)
    ],
}


def test_the_oldest_file_goes_when_there_is_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(vkcocoon_recorder, "parse_quantity", lambda text: 80_000)
    (tmp_path / "notes.jsonl").write_text("somebody else's\n")
    recorded(BUSY, tmp_path)
    files = sorted(tmp_path.glob("vk-cocoon-*.jsonl"))
    assert 4 <= len(files) <= 9
    assert sum(path.stat().st_size for path in files) <= 80_000
    assert "-00001.jsonl" not in files[0].name
    assert (tmp_path / "notes.jsonl").read_text() == "somebody else's\n"


def test_any_of_its_files_can_be_understood_without_those_before(tmp_path, monkeypatch):
    monkeypatch.setattr(vkcocoon_recorder, "parse_quantity", lambda text: 240_000)
    recorded(BUSY, tmp_path)
    file = sorted(tmp_path.iterdir())[1]
    made, seen = replayed(file)
    assert len(made.flips) >= 10
    for pod in {pod for _, pod, _ in made.flips}:
        assert [flip[2] for flip in seen if flip[1] == pod] == [flip[2] for flip in made.flips if flip[1] == pod]


def test_a_record_that_begins_with_running_pods_adopts_them_in_the_replay(tmp_path, monkeypatch):
    scenario = SILENT | {"until": "100s", "events": [
        {"at": "20s", "for": "5s", "daemon": "stop"}, {"at": "50s", "for": "20s", "silent": "web-0"},
    ]}  # fmt: skip
    recorded(scenario, tmp_path)
    first, second = sorted(tmp_path.iterdir())
    first.unlink()
    made, seen = replayed(second)
    assert [flip[2] for flip in made.flips] == [False, True]
    assert [flip[1:] for flip in seen] == [flip[1:] for flip in made.flips]
    assert all(abs(ours - theirs) <= 100_000 for (ours, *_), (theirs, *_) in zip(seen, made.flips, strict=True))


@pytest.fixture
def said(monkeypatch):
    """What is logged, as (level, event, fields)."""
    heard = []

    class Log:
        def warning(self, event, **fields):
            heard.append(("warning", event, fields))

        def info(self, event, **fields):
            heard.append(("info", event, fields))

    monkeypatch.setattr(vkcocoon_recorder, "log", Log())
    return heard


def test_a_directory_that_cannot_be_made_is_said_once_and_disturbs_no_probe(tmp_path, said):
    (tmp_path / "file").write_text("")
    happened = recorded(SILENT, tmp_path / "file" / "record")
    assert flips_of(happened) == flips_of(load(SILENT).run(None))
    assert [(level, event) for level, event, _ in said] == [
        ("warning", "the event log cannot be written; nothing else depends on it")
    ]
    assert "Not a directory" in said[0][2]["error"]


def test_a_disk_that_is_full_for_a_while_costs_what_could_not_be_written_and_no_more(tmp_path, said, monkeypatch):
    write, calls = os.write, []

    def full(descriptor, data):
        calls.append(len(data))
        if 3 <= len(calls) < 6:
            write(descriptor, data[: len(data) // 2])  # as a disk does that gets full in the middle
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(vkcocoon_recorder.os, "write", full)
    recorded(SILENT, tmp_path)
    assert [(level, event) for level, event, _ in said] == [
        ("warning", "the event log cannot be written; nothing else depends on it"),
        ("info", "the event log is written again"),
    ]
    lost = [row["entries"] for row in entries(tmp_path) if row["kind"] == "lost"]
    assert lost == [said[1][2]["lost"]]
    assert lost[0] > 0


def test_a_disk_that_hangs_costs_memory_for_a_while_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(vkcocoon_recorder, "MOST_PENDING", 10)
    made = recorder(tmp_path)
    for number in range(25):
        made.record("a", "b", str(number), {})
    assert (len(made._pending), made._lost) == (10, 15)
    made._flush()
    made._flush()
    assert [row["key"] for row in entries(tmp_path)] == [*map(str, range(10)), ""]
    assert entries(tmp_path)[-1]["entries"] == 15


def test_two_processes_of_one_second_do_not_share_a_file(tmp_path):
    for _ in range(2):
        made = recorder(tmp_path)
        made.record("a", "b", "c", {})
        made._flush()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_in_its_place_is_not_followed(tmp_path):
    made, victim = recorder(tmp_path), tmp_path / "victim"
    victim.write_text("precious")
    stamp = made._files._stamp
    (tmp_path / f"vk-cocoon-{stamp}-00001.jsonl").symlink_to(victim)
    made.record("a", "b", "c", {})
    made._flush()
    assert victim.read_text() == "precious"
    assert (tmp_path / f"vk-cocoon-{stamp}-00002.jsonl").exists()


# What it costs ----------------------------------------------------------------------------------------------------


def test_a_steady_pod_costs_no_line():
    clock = VirtualClock()
    made = recorder(Path("/nowhere"), clock)
    agent = ProbeAgent("default/web-0", lambda deadline: ProbeResult(), lambda: None, Cadence((1,), 5, 3))
    for took_s in (0.001, 0.002, 0.001, 0.04):
        result = ProbeResult(True, "ProbeSucceeded", "icmp: 10.88.0.4 replies")
        agent.observe(result)
        made._probed(agent, result, 0.0, took_s)
    assert [dict(entry.fields)["n"] for entry in made._pending] == [1]
    made._probed(agent, ProbeResult(True, "ProbeSucceeded", "icmp: 10.88.0.4 replies"), 0.0, 0.2)
    assert [dict(entry.fields)["n"] for entry in made._pending] == [1, 5]
