"""From an event log back to a scenario: what a daemon saw of a run is enough to show another one the same flips."""

import json

import pytest
from record_rig import SCENARIOS

from simulator import explore, replay
from simulator.replay import LogError, flips_of, read, replay_of
from simulator.scenario import load
from vkcocoon_record import Entry

# What a daemon can know; the rest of a simulation's log (people, guests, the host) must not be needed.
KNOWN = ("daemon", "kube", "command", "lease", "probe", "vm", "api", "push")
# Scenarios of which the log does not hold enough, and what the replay shows instead.
NO_GUEST = {"not-managed": "the VM of an unmanaged pod is not made by us, so there is no guest to answer"}
EARLIER = {
    "api-forgets": "the log says when a pod was created, and not that the daemon heard of it only later",
    "api-silent-watch": "a watch that goes silent is an error for nobody, so it is not in the log",
}


def names():
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


def log_of(name, tmp_path, seed=None):
    """The event log of a run, as a file with what a daemon can know."""
    path = tmp_path / f"{name}.jsonl"
    timeline = load(SCENARIOS / f"{name}.yaml").run(seed)
    path.write_text("".join(entry.line() + "\n" for entry in timeline if entry.actor in KNOWN))
    return path


def replayed(made):
    """The flips of a run of the scenario that was written down."""
    return made.seen(load(made.document).run(None))


@pytest.mark.parametrize("name", [name for name in names() if name not in NO_GUEST | EARLIER])
def test_the_log_of_a_shipped_scenario_becomes_one_with_the_same_flips_at_the_same_instants(name, tmp_path):
    made = replay_of(read(log_of(name, tmp_path)))
    assert replayed(made) == made.flips


@pytest.mark.parametrize("name", EARLIER)
def test_where_the_daemon_heard_late_the_flips_are_the_same_only_earlier(name, tmp_path):
    made = replay_of(read(log_of(name, tmp_path)))
    seen = replayed(made)
    assert [flip[1:] for flip in seen] == [flip[1:] for flip in made.flips]
    assert all(ours <= theirs for (ours, *_), (theirs, *_) in zip(seen, made.flips, strict=True))


def test_a_guest_that_nobody_here_made_does_not_answer(tmp_path):
    made = replay_of(read(log_of("not-managed", tmp_path)))
    assert {pod for _, pod, _ in made.flips} - {pod for _, pod, _ in replayed(made)} == {"default/foreign"}


@pytest.mark.parametrize("name", ["oracle", "three-guests", "lease-moves", "restart", "blip"])
def test_a_run_with_a_seed_has_the_same_flips_pod_by_pod(name, tmp_path):
    made = replay_of(read(log_of(name, tmp_path, seed=7)))
    seen = replayed(made)
    for pod in {pod for _, pod, _ in made.flips}:
        ours, theirs = ([flip for flip in flips if flip[1] == pod] for flips in (made.flips, seen))
        assert [flip[2] for flip in ours] == [flip[2] for flip in theirs]
        assert all(abs(one[0] - other[0]) <= 500_000 for one, other in zip(ours, theirs, strict=True))


def test_the_scenario_is_one_that_a_person_can_read(tmp_path):
    made = replay_of(read(log_of("oracle", tmp_path)), name="the incident")
    assert explore.written(made.document, "Made from a log.").splitlines()[:11] == [
        "# Made from a log.",
        "version: 1",
        "name: the incident",
        "until: 60s",
        "pods:",
        "  - {name: default/web-0, os: linux, at: 0s, annotations: {vm.cocoonstack.io/probe-port: '8080'},"
        " guest: {boot: 1000h, echo: false}}",
        "events:",
        "  - {when: {pod: default/web-0, sees: probe, nth: 1}, lease: {pod: default/web-0, ip: 10.88.0.4}}",
        "  - {when: {pod: default/web-0, sees: probe, nth: 7}, open: {pod: default/web-0, port: 8080}}",
        "  - {when: {pod: default/web-0, sees: probe, nth: 11}, close: {pod: default/web-0, port: 8080}}",
        "  - {when: {pod: default/web-0, sees: probe, nth: 24}, open: {pod: default/web-0, port: 8080}}",
    ]


def test_its_expectations_are_the_flips_of_the_log(tmp_path):
    made = replay_of(read(log_of("oracle", tmp_path)))
    assert [(row["pod"], row.get("ready", row.get("flips"))) for row in made.document["expect"]] == [
        ("default/web-0", True),
        ("default/web-0", False),
        ("default/web-0", True),
        ("default/web-0", 3),
    ]


# Reading ----------------------------------------------------------------------------------------------------------


def entry(us, actor="daemon", kind="start", key="node", **fields):
    return Entry(us, actor, kind, key, tuple(fields.items()))


def test_a_line_is_read_as_it_was_written():
    written = entry(5, "probe", "ok", "default/web-0", reason="ProbeSucceeded", took_us=3)
    assert Entry.of_line(written.line()) == written


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "an entry is a JSON object"),
        ('{"us": 1}', "an entry has 'actor'"),
        ('{"us": "x", "actor": "a", "kind": "b", "key": "c"}', "'x' is no number of microseconds"),
        ("{", "Expecting property name"),
    ],
)
def test_what_is_no_entry_is_named_with_its_line(tmp_path, line, says):
    path = tmp_path / "log.jsonl"
    path.write_text(f"{entry(1).line()}\n{line}\n{entry(2).line()}\n")
    with pytest.raises(LogError, match=f"log.jsonl:2: {says}"):
        read(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (entry(-1), "us: -1 is no number of microseconds"),
        (entry(1, "probe", "ok", "default/web-0", took_us=3), "probe ok: reason is missing"),
        (
            entry(1, "probe", "fails", "default/web-0", reason="VMGone", took_us="9" * 5000),
            "probe fails: took_us: '999",
        ),
        (entry(1, "probe", "ok", "default/web-0", reason="X", took_us=float("inf")), "probe ok: took_us: inf is no"),
        (entry(1, "probe", "ok", "default/web-0", reason="X", n=None), "probe ok: n: None is no whole number"),
        (entry(1, "command", "begins", "x", tool="cocoon"), "command begins: verb is missing"),
        (entry(1, "command", "begins", "x", verb="vm list"), "command begins: tool is missing"),
        (entry(1, "command", "ends", "x", verb="vm rm", tool="cocoon", exit="0"), "command ends: took_us is missing"),
        (entry(1, "lease", "granted", "default/web-0", ip="x"), "lease granted: ip: 'x' is no IPv4 address"),
        (entry(1, "api", "fails", "", request="GET /x", took_us=1), "api fails: status is missing"),
        (entry(1, "kube", "created", "x/"), "'x/' is no pod name"),
        (
            entry(1, "kube", "annotations", "default/x", annotations=[]),
            r"kube annotations: annotations: \[\] is no mapping",
        ),
        (entry(1, "record", "begins", "node", wall="today"), "record begins: wall: Invalid isoformat string"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named_with_its_line_also_in_the_last_one(tmp_path, line, says):
    path = tmp_path / "log.jsonl"
    path.write_text(f"{entry(1).line()}\n{line.line()}\n")
    with pytest.raises(LogError, match=f"log.jsonl:2: {says}"):
        read(path)


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(f"{'[' * 100_000}\n{entry(1).line()}\n")
    with pytest.raises(LogError, match=r"log\.jsonl:1: it is nested too deeply"):
        read(path)


def test_what_a_guest_said_may_hold_separators_of_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    said = entry(1, "probe", "fails", "default/web-0", reason="NoSSHBanner", message="said 'a\u2028b\x85c'")
    path.write_text(f"{said.line()}\n")
    assert read(path) == [said]


def test_the_half_line_that_a_killed_daemon_left_is_no_error(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{entry(1).line()}\n{{"us": 2, "act')
    assert read(path) == [entry(1)]


@pytest.mark.parametrize("content", [None, ""])
def test_a_log_that_is_not_there_or_empty_is_said_so(tmp_path, content):
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LogError, match=r"log\.jsonl: (No such file|nothing is in it)"):
        read(path)
    with pytest.raises(LogError, match=r"no file in it ends in \.jsonl"):
        read(SCENARIOS)


def test_the_lives_of_a_daemon_have_one_time(tmp_path):
    for number, wall in enumerate(("2026-01-01T10:00:00+00:00", "2026-01-01T10:01:00+00:00")):
        first = entry(5, "record", "begins", wall=wall)
        (tmp_path / f"{number}.jsonl").write_text(f"{first.line()}\n{entry(7).line()}\n")
    assert [each.at_us for each in read(tmp_path)] == [0, 2, 60_000_000, 60_000_002]


def test_a_clock_that_was_set_back_lets_no_life_begin_before_the_end_of_the_last(tmp_path):
    for number, wall in enumerate(("2026-01-01T10:00:00+00:00", "2026-01-01T09:00:00+00:00")):
        first = entry(0, "record", "begins", wall=wall)
        (tmp_path / f"{number}.jsonl").write_text(f"{first.line()}\n{entry(7).line()}\n")
    assert [each.at_us for each in read(tmp_path)] == [0, 7, 7, 14]


# The command ------------------------------------------------------------------------------------------------------


def simulate(*words):
    from click.testing import CliRunner

    from vkcocoon_cli import cli

    return CliRunner().invoke(cli, ["simulate", *map(str, words)])


def test_the_command_writes_the_scenario_runs_it_and_compares(tmp_path):
    path = tmp_path / "mine.yaml"
    result = simulate("--from-log", log_of("oracle", tmp_path), "--write", path)
    assert result.exit_code == 0, result.output
    assert "replay:     the same flips, at most 0 s apart" in result.output
    assert load(path).until == 60.0
    assert simulate(path).exit_code == 0


def test_what_goes_to_stdout_is_the_scenario_alone(tmp_path):
    result = simulate("--from-log", log_of("oracle", tmp_path), "--write", "-")
    assert result.exit_code == 0
    path = tmp_path / "again.yaml"
    path.write_text(result.stdout)
    assert load(path).name == "replay of oracle.jsonl"


def test_other_flips_than_those_of_the_log_are_a_failure(tmp_path, monkeypatch):
    log = log_of("oracle", tmp_path)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    flip = next(line for line in lines if line["kind"] == "ready" and line["was"] == "True")
    log.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not flip))
    result = simulate("--from-log", log, "--write", tmp_path / "x.yaml")
    assert result.exit_code == 1
    assert "DIFFERS" in result.output
    assert "replay:     not the flips of the log" in result.output


@pytest.mark.parametrize("words", [[], ["oracle", "--from-log", "x"]])
def test_there_is_either_a_scenario_or_a_log(words):
    result = simulate(*words)
    assert result.exit_code == 2
    assert "say either SCENARIO or --from-log PATH" in result.output


def test_a_log_that_cannot_be_read_is_one_line(tmp_path):
    result = simulate("--from-log", tmp_path / "none.jsonl")
    assert result.exit_code == 2
    assert result.stderr == f"vk-cocoon: {tmp_path}/none.jsonl: No such file or directory\n"


def test_flips_do_not_count_the_first_status():
    rows = [("", "False"), ("False", "True"), ("True", "False")]
    entries = [entry(us, "kube", "ready", "a/b", ready=new, was=old) for us, (old, new) in enumerate(rows)]
    assert flips_of(entries) == [(1, "a/b", True), (2, "a/b", False)]
    assert replay.Replay({}, [], 2).seen(entries) == [(2, "a/b", False)]
