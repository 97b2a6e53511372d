"""Every shipped scenario meets its expectations, twice the same; one that is wrong is refused with its line."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

import simulator
from simulator import catalog, reference
from simulator.fake_cocoon import FakeCocoon
from simulator.fake_macos import FakeCocoonMacos
from simulator.fake_tools import Knob
from simulator.happenings import BEHAVIORS, HAPPENINGS
from simulator.scenario import Performance, ScenarioError, load, run_scenario
from simulator.simulate import main
from simulator.world import World

SHIPPED = sorted((Path(simulator.__file__).parent / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario_holds_and_can_be_repeated(path):
    for seed in (None, 7, 8):
        timeline = run_scenario(path, seed)
        assert [entry.text() for entry in timeline.of(kind="broken")] == [], f"seed {seed}"
    assert timeline.first_difference(run_scenario(path, seed)) == ""


def test_every_shipped_scenario_is_on_the_map_once_and_says_what_it_is_about():
    names = [name for section in catalog.SECTIONS.values() for name in section]
    assert sorted(names) == sorted(path.stem for path in SHIPPED)
    assert all(len(catalog.about(name)) > 40 for name in names)
    page = Path(__file__).parent.parent / "docs" / "simulator.md"
    assert page.read_text() == catalog.renewed(page.read_text()), "make docs"


def test_everything_that_can_happen_happens_in_a_shipped_scenario():
    happening = {event.happening.name for path in SHIPPED for event in load(path).events}
    assert happening == set(HAPPENINGS)


def test_every_knob_of_the_tools_can_be_turned_in_a_scenario():
    """But those that say how fast or how big the host is, or what there was before."""
    host = {"least_latency_s", "most_latency_s", "host_cpus", "event_interval_s", "event_debounce_s", "exec_replies"}
    host |= {"golden", "networks"}
    every = {name for fake in (FakeCocoon, FakeCocoonMacos) for name in dir(fake) if type(getattr(fake, name)) is Knob}
    assert every - host == {knob for _, knob, _ in BEHAVIORS.values()}
    events = [event for path in SHIPPED for event in load(path).events]
    assert {event.values["how"] for event in events if event.happening.name == "behaves"} == set(BEHAVIORS)


@pytest.mark.parametrize("how", BEHAVIORS)
def test_a_tool_that_behaves_otherwise_for_a_while_behaves_as_before_after_it(how):
    program, knob, _ = BEHAVIORS[how]
    with World() as world:
        world.create_pod("web-0")
        fake = world.host.macos if program == "macos" else world.host.cocoon
        before = getattr(fake, knob)
        undo = HAPPENINGS["behaves"].act(world, how=how, pod=None, display=3)
        assert getattr(fake, knob) not in (before, ())
        undo()
        assert getattr(fake, knob) == before


def test_every_clause_of_the_specification_is_held_to_by_a_shipped_scenario():
    root = Path(__file__).parent.parent
    clauses = set(re.findall(r"\*\*(S\d\.\d)\*\*", (root / "docs" / "specification.md").read_text()))
    cited = set(re.findall(r"\bS\d\.\d\b", catalog.table()))
    # Of adoption at start, of on_update, of what is weaker than an echo, and of the unit file there is no more to see.
    assert clauses - cited <= {"S4.1", "S4.5", "S5.3", "S5.4"}


def test_the_oracle_probes_at_exactly_the_instants_of_the_contract():
    timeline = run_scenario(next(path for path in SHIPPED if path.stem == "oracle"))
    assert timeline.at(actor="probe") == [
        0.0, 0.1, 0.25, 0.475, 0.8125, 1.31875, 2.078125, 3.078125, 8.078125, 13.078125, 18.078125, 23.078125,
        28.078125, 33.078125, 33.178125, 33.328125, 33.553125, 33.890625, 34.396875, 35.15625, 36.15625, 37.15625,
        38.15625, 39.15625, 40.15625, 45.15625, 50.15625, 55.15625,
    ]  # fmt: skip
    pushed = [(entry.seconds, dict(entry.fields)["ready"]) for entry in timeline.of(actor="kube", kind="ready")]
    assert pushed == [(0.0, "False"), (3.078125, "True"), (33.078125, "False"), (40.15625, "True")]


def test_another_seed_is_another_run_of_the_same_truth():
    path = next(path for path in SHIPPED if path.stem == "three-guests")
    assert run_scenario(path, 1).digest() != run_scenario(path, 2).digest()


GOOD = {
    "until": "20s",
    "pods": [{"name": "web-0", "guest": {"boot": "1s", "lease": "100ms"}}],
    "expect": [{"pod": "web-0", "ready": True, "by": "5s"}],
}


def broken(**change):
    timeline = run_scenario(GOOD | change)
    return [entry.key for entry in timeline.of(actor="expect", kind="broken")]


def test_a_scenario_may_be_a_dict_and_a_pod_without_namespace_is_in_default():
    assert broken() == []


@pytest.mark.parametrize(
    "expectation",
    [
        {"pod": "web-0", "ready": True, "by": "1s"},
        {"pod": "web-0", "ready": True, "at": "1s"},
        {"pod": "web-0", "ready": True, "after": "10s", "by": "20s"},
        {"pod": "web-0", "ready": True, "after": "10s", "within": "1s"},
        {"pod": "web-0", "ready": False, "after": "1s", "by": "20s"},
        {"pod": "web-0", "never": "ready"},
        {"never": "probe ok", "from": "5s", "to": "10s"},
        {"pod": "web-0", "flips": 0},
        {"pod": "web-0", "shows": {"reason": "PingTimeout"}, "at": "10s"},
        {"pod": "web-0", "shows": {"ready": True}, "from": "0s", "to": "10s"},
        {"pod": "web-0", "shows": {"exists": False}, "at": "10s"},
        {"pod": "web-0", "count": "probe", "at_most": 3},
        {"pod": "web-0", "count": "probe", "at_least": 300},
        {"count": "daemon starts", "is": 2},
        {"pod": "web-0", "order": ["ready", "created"]},
        {"pod": "web-0", "order": ["created", "deleted"]},
        {"vms": 2},
        {"pod": "web-0", "vms": 0},
    ],
    ids=str,
)
def test_an_expectation_that_is_not_met_is_broken(expectation):
    assert len(broken(expect=[expectation])) == 1


@pytest.mark.parametrize(
    "expectation",
    [
        {"pod": "web-0", "ready": True, "after": "1s", "within": "1s"},
        {"pod": "web-0", "never": "flip", "from": "5s"},
        {"pod": "web-0", "shows": {"ready": True, "phase": "Running", "lifecycle": "ready"}, "from": "5s", "to": "20s"},
        {"pod": "web-0", "shows": {"exists": True, "terminating": None}, "at": "20s"},
        {"count": "begins vm clone", "is": 1},
        {"pod": "web-0", "order": ["created", "begins vm clone", "lease", "probe ok", "ready", "push of annotations"]},
        {"settled": True},
        {"vms": 1, "note": "for people"},
    ],
    ids=str,
)
def test_an_expectation_that_is_met_is_met(expectation):
    if "order" in expectation:
        expectation = expectation | {"from": "1s"}
        expectation["order"] = expectation["order"][2:5]
    assert broken(expect=[expectation]) == []


def test_what_is_owed_at_the_end_is_not_settled():
    events = [{"at": "10s", "api_down": True}, {"at": "10s", "lease": {"pod": "web-0", "ip": "10.88.0.9"}}]
    assert broken(events=events, expect=[{"settled": True}]) == ["settled=True"]


def test_a_verdict_says_what_it_is_about_and_what_was_seen():
    timeline = run_scenario(GOOD | {"expect": [{"pod": "web-0", "ready": False, "after": "5s", "within": "2s"}]})
    (entry,) = timeline.of(actor="expect", kind="broken")
    fields = dict(entry.fields)
    assert fields["why"].startswith("became False at 0.000000; last events:")
    assert "probe    ok" in fields["why"]
    assert (fields["pod"], fields["from"], fields["to"]) == ("default/web-0", 5.0, 7.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"evnts": []}, "unknown key 'evnts'; did you mean 'events'?"),
        ({"version": 2}, "version 2 is not known"),
        ({"until": "fast"}, "until: 'fast' is no time such as"),
        ({"settings": {"orphan_polcy": "destroy"}}, "did you mean 'orphan_policy'?"),
        ({"settings": {"orphan_policy": "maybe"}}, "orphan_policy: 'maybe' is not possible"),
        ({"pods": [{"name": "Web_0"}]}, "'Web_0' is no pod name"),
        ({"pods": [{"os": "linux"}]}, "a pod needs name"),
        ({"pods": [{"name": "a"}, {"name": "a"}]}, "pod 'default/a' stands twice"),
        ({"pods": [{"name": "web-0", "resources": {"cpus": 2}}]}, "did you mean 'cpu'?"),
        ({"pods": [{"name": "web-0", "guest": {"boots": "1s"}}]}, "did you mean 'boot'?"),
        ({"pods": [{"name": "web-0", "guest": {"boot": "3s..1s"}}]}, "'3s..1s' ends before it begins"),
        ({"pods": [{"name": "web-0", "guest": {"boot": {"one_of": []}}}]}, "one_of is a list of values"),
        ({"pods": [{"name": "web-0", "guest": {"boot": {"one_of": [{"wait": 1}]}}}]}, "a branch of one_of has a value"),
        ({"pods": [{"name": "web-0", "guest": {"loss": "130%"}}]}, "'130%' is no share"),
        ({"pods": [{"name": "web-0", "guest": {"ports": [0]}}]}, "0 is no port"),
        ({"pods": [{"name": "web-0", "guest": {"echo": "yes"}}]}, "'yes' is not true or false"),
        ({"events": [{"at": "1s", "silnt": "web-0"}]}, "unknown event 'silnt'; did you mean 'silent'?"),
        ({"events": [{"at": "1s", "silent": "web-1"}]}, "unknown pod 'default/web-1'; did you mean 'default/web-0'?"),
        ({"events": [{"at": "1s", "silent": "web-0", "crash": "web-0"}]}, "exactly one thing that happens"),
        ({"events": [{"silent": "web-0"}]}, "an event has an instant (at) or a trigger (when)"),
        (
            {"events": [{"at": "1s", "when": {"sees": "ready"}, "silent": "web-0"}]},
            "an instant (at) or a trigger (when)",
        ),
        ({"events": [{"when": {"sees": "raedy"}, "silent": "web-0"}]}, "did you mean 'ready'?"),
        ({"events": [{"when": {"sees": "reason"}, "silent": "web-0"}]}, "'reason' needs to say which: reason REASON"),
        ({"events": [{"when": {"sees": "ready now"}, "silent": "web-0"}]}, "unknown observation 'ready now'"),
        ({"events": [{"at": "1s", "open": "web-0"}]}, "open needs port"),
        ({"events": [{"at": "1s", "for": "2s", "crash": "web-0"}]}, "crash is over at once"),
        ({"events": [{"at": "1s", "api_down": "now"}]}, "api_down takes nothing: write api_down: true"),
        ({"events": [{"at": "1s", "lease_file": "tron"}]}, "did you mean 'torn'?"),
        ({"events": [{"at": "1s", "api_fails": 418}]}, "418 is no status; known: 0, 400"),
        ({"events": [{"at": "1s", "command": {"verb": "vm clone", "slwo": "1s"}}]}, "did you mean 'slow'?"),
        ({"events": [{"at": "1s", "id": "a b", "crash": "web-0"}]}, "'a b' is no id"),
        ({"events": [{"at": "1s", "id": "x", "crash": "web-0"}] * 2}, "'x' is no id, or stands twice"),
        ({"expect": [{"pod": "web-0", "redy": True}]}, "did you mean 'ready'?"),
        ({"expect": [{"pod": "web-0", "ready": "yes", "by": "1s"}]}, "'yes' is not true or false"),
        ({"expect": [{"pod": "web-0", "ready": True}]}, "ready needs one of at, by and within"),
        ({"expect": [{"pod": "web-0", "ready": True, "at": "1s", "by": "2s"}]}, "ready needs one of at, by and within"),
        ({"expect": [{"pod": "web-0", "never": "redy"}]}, "did you mean 'ready'?"),
        ({"expect": [{"pod": "web-0", "count": "probe"}]}, "count needs is, at_least or at_most"),
        ({"expect": [{"pod": "web-0", "shows": {"redy": True}, "at": "1s"}]}, "did you mean 'ready'?"),
        (
            {"expect": [{"pod": "web-0", "shows": {"ready": True}, "at": "1s", "to": "2s"}]},
            "shows has at, or from and to",
        ),
        (
            {"expect": [{"pod": "web-0", "ready": True, "after": "hang", "within": "1s"}]},
            "unknown id of an event 'hang'",
        ),
        ({"expect": [{"pod": "web-0", "order": ["ready"]}]}, "order is a list of at least two"),
        ({"expect": [{"pod": "web-0"}]}, "an expectation has exactly one of ready, shows"),
        ({"pods": {"name": "web-0"}}, "pods must be a list"),
        ({"expect": {}}, "expect must be a list, not {}"),
        ({"events": ""}, "events must be a list, not ''"),
        ({"name": [1]}, "name: [1] is no text"),
        ({"name": None}, "name: nothing is no text"),
        ({"until": "0s"}, "until: '0s' is no time; it must be more than 0"),
        ({"events": [{"at": "1s", "every": "0s", "crash": "web-0"}]}, "every: '0s' is no time; it must be more than 0"),
        ({"events": [{"when": {"sees": "ready", "nth": 0}, "crash": "web-0"}]}, "nth: 0 is never"),
        ({"pods": [{"name": "web-0", "guest": []}]}, "guest must be a mapping, not []"),
        ({"pods": [{"name": "web-0", "annotations": {"a": [1]}}]}, "annotations: a is [1]; a value is a text, a whole"),
        (
            {"pods": [{"name": "web-0", "annotations": {"a": 1.10}}]},
            "annotations: a is 1.1; a value is a text, a whole",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_known_is_refused_with_a_way_out(change, says):
    with pytest.raises(ScenarioError) as refused:
        load(GOOD | change)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("pods:\n  - {name: web-0}\nevents:\n  - {at: 1s, sielnt: web-0}\n", 4, "did you mean 'silent'?"),
        ("pods:\n  - name: web-0\n    name: web-1\n", 3, "'name' stands twice"),
        ("pods: [\n", 2, "expected"),
        ("pods:\n  - {name: web-0}\nsettings:\n  orphan_policy: keep\n  pase: 1s\n", 5, "unknown setting 'pase'"),
        ("settings:\n  node_cpu: '2'\n  orphan_policy: maybe\n", 3, "orphan_policy: 'maybe' is not possible"),
        ("pods:\n  - name: web-0\n    guest:\n      boot: 1s\n      lease: now\n", 5, "lease: 'now' is no time"),
        ("pods:\n  - name: web-0\n    resources:\n      cpu: 1\n      cpus: 2\n", 5, "did you mean 'cpu'?"),
        ("until: 1s\nversion: 2\n", 2, "version 2 is not known"),
        ("until: 1s\nexpect: {}\n", 2, "expect must be a list"),
        ("until: 1s\nname: [1]\n", 2, "name: [1] is no text"),
        ("until: 1s\nname: a\0b\n", 2, "a character that YAML does not have; is it the right file?"),
        ("until: 1s\nname: \udcff\n", 2, "this is no text in UTF-8, as YAML is; is it the right file?"),
    ],
)
def test_a_refusal_names_file_and_line(tmp_path, text, line, says):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ScenarioError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}:{line}: ")
    assert says in str(refused.value)


def test_a_trigger_may_be_drawn_too():
    later = {"one_of": ["1s", "2s"]}
    (event,) = load(GOOD | {"events": [{"when": {"sees": "ready", "later": later}, "crash": "web-0"}]}).events
    assert not event.trigger.later.fixed


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 100_000)
    with pytest.raises(ScenarioError, match=r"deep\.yaml: it is nested too deeply"):
        load(path)


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    with pytest.raises(ScenarioError, match="a scenario must be a mapping, not empty"):
        load(path)


def test_the_command_tells_met_from_broken_from_wrong_by_its_exit_code(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("until: 5s\npods: [{name: web-0}]\nexpect: [{pod: web-0, ready: true, by: 4s}]\n")
    assert main(str(path), check=True) == 0
    assert "second run: the same" in capsys.readouterr().out
    path.write_text("until: 5s\npods: [{name: web-0}]\nexpect: [{pod: web-0, never: ready}]\n")
    assert main(str(path), seed=3) == 1
    assert f"vk-cocoon simulate {path} --seed 3" in capsys.readouterr().out
    assert main(str(tmp_path / "none.yaml")) == 2


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_verdicts_have_colors_on_a_terminal_that_wants_them(environ, colored, capsys, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(str(next(path for path in SHIPPED if path.stem == "oracle"))) == 0
    assert ("\x1b[32m" in capsys.readouterr().out) is colored


def test_what_cannot_be_written_is_named_and_the_end_that_was_chosen_is_kept(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("pods: [{name: web-0}]\nexpect: [{pod: web-0, never: ready}]\n")
    with pytest.raises(click.FileError) as refused:
        main(str(path), events=str(tmp_path / "no" / "events"), until=4.0)
    assert str(tmp_path / "no" / "events") in refused.value.format_message()
    assert main(str(path), seed=3, until=4.0) == 1
    assert f"vk-cocoon simulate {path} --seed 3 --until 4s" in capsys.readouterr().out


SILENT = {"at": "5s", "silent": "web-0"}


def kinds(until, events=(), **expectation):
    """What becomes of an expectation of a run of 40 s that is ended at `until`."""
    document = GOOD | {"until": "40s", "events": list(events), "expect": [expectation]}
    timeline = replace(load(document), cut=until).run(None)
    return [entry.kind for entry in timeline.of(actor="expect")][:-1]


@pytest.mark.parametrize(
    ("until", "expectation", "kind"),
    [
        (1.0, {"pod": "web-0", "ready": True, "by": "5s"}, "not reached"),
        (6.0, {"pod": "web-0", "ready": False, "after": "1s", "by": "5s"}, "broken"),
        (4.0, {"pod": "web-0", "ready": True, "by": "5s"}, "met"),  # it is already
        (4.0, {"pod": "web-0", "shows": {"ready": True}, "at": "5s"}, "not reached"),
        (4.0, {"pod": "web-0", "shows": {"ready": True}, "from": "3s", "to": "5s"}, "not reached"),
        (4.0, {"pod": "web-0", "shows": {"ready": False}, "from": "0s", "to": "5s"}, "broken"),
        (4.0, {"pod": "web-0", "never": "probe fails", "from": "3s", "to": "9s"}, "not reached"),
        (4.0, {"pod": "web-0", "never": "probe ok", "to": "9s"}, "broken"),
        (4.0, {"pod": "web-0", "never": "flip", "from": "2s", "to": "3s"}, "met"),
        (4.0, {"pod": "web-0", "flips": 2}, "not reached"),
        (4.0, {"pod": "web-0", "flips": 0}, "broken"),
        (4.0, {"pod": "web-0", "count": "probe", "at_least": 99}, "not reached"),
        (4.0, {"pod": "web-0", "count": "probe", "at_least": 2}, "met"),
        (4.0, {"pod": "web-0", "count": "probe", "at_most": 2}, "broken"),
        (4.0, {"pod": "web-0", "count": "probe", "at_most": 99}, "not reached"),
        (4.0, {"pod": "web-0", "order": ["created", "deleted"]}, "not reached"),
        (4.0, {"pod": "web-0", "order": ["ready", "created"]}, "broken"),
        (4.0, {"settled": True}, "not reached"),
        (4.0, {"vms": 9}, "not reached"),
        (99.0, {"vms": 9}, "broken"),
    ],
    ids=str,
)
def test_what_a_run_that_is_ended_early_has_no_time_for_is_not_broken(until, expectation, kind):
    assert kinds(until, **expectation) == [kind]


def test_an_event_that_a_run_ended_early_has_no_time_for_is_not_broken():
    events = [{"id": "gone", "when": {"pod": "web-0", "sees": "deleted"}, "silent": "web-0"}]
    assert kinds(4.0, events, pod="web-0", ready=False, after="gone", within="1s") == ["not reached", "not reached"]


@pytest.mark.parametrize(
    ("expectation", "allowance", "kind"),
    [
        ({"pod": "web-0", "ready": True, "by": "1s"}, 0.0, "broken"),
        ({"pod": "web-0", "ready": True, "by": "1s"}, 0.1, "broken"),
        ({"pod": "web-0", "ready": True, "by": "1s"}, 0.5, "met"),  # it is at 1.3 s
        ({"pod": "web-0", "ready": True, "at": "1700ms"}, 0.5, "met"),
        ({"pod": "web-0", "ready": True, "at": "2s"}, 0.5, "broken"),
        ({"pod": "web-0", "shows": {"ready": True}, "at": "1s"}, 0.5, "met"),
        ({"pod": "web-0", "shows": {"ready": True}, "from": "1s", "to": "9s"}, 0.5, "met"),
        ({"pod": "web-0", "shows": {"ready": True}, "from": "0s", "to": "9s"}, 0.5, "broken"),
        ({"pod": "web-0", "never": "ready", "to": "1500ms"}, 0.5, "met"),
        ({"pod": "web-0", "never": "ready"}, 0.5, "broken"),
        ({"pod": "web-0", "count": "ready", "is": 1, "to": "1s"}, 0.5, "met"),
        ({"pod": "web-0", "count": "ready", "is": 2}, 0.5, "broken"),
        ({"pod": "web-0", "flips": 0, "to": "3s"}, 0.5, "broken"),
    ],
    ids=str,
)
def test_in_real_time_the_edges_of_an_expectation_may_be_moved_by_so_much(expectation, allowance, kind):
    with World() as world:
        performance = Performance(load(GOOD | {"expect": [expectation]}), world, allowance)
        timeline = performance.perform()
    assert timeline.of(actor="expect")[0].kind == kind


def test_what_is_met_for_good_is_known_before_the_end():
    expect = [{"pod": "web-0", "ready": True, "by": "5s"}, {"pod": "web-0", "flips": 1}]
    with World() as world:
        performance = Performance(load(GOOD | {"expect": expect}), world)
        world.clock.at(1.0, lambda: seen.append([each.text for each in performance.met()]))
        world.clock.at(2.0, lambda: seen.append([each.text for each in performance.met()]))
        seen = []
        performance.perform()
    assert seen == [[], ["pod=web-0 ready=True by=5s"]]


def test_what_is_not_reached_is_said_and_fails_nothing(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("pods: [{name: web-0}]\nexpect: [{pod: web-0, ready: true, by: 20s}, {pod: web-0, flips: 1}]\n")
    assert main(str(path), until=1.0, report=str(tmp_path / "run.html")) == 0
    assert "not reached pod=web-0 ready=True by=20s\n" in capsys.readouterr().out
    assert "everything held</span>, <span class=soft>2 not reached<" in (tmp_path / "run.html").read_text()
    assert main(str(path), until=1.0, timeline=True) == 0
    assert "not reached pod=" in capsys.readouterr().out
    assert main(str(path), until=60.0) == 0
    assert "not reached" not in capsys.readouterr().out


def test_what_lasts_ends_after_its_time():
    expect = [
        {"pod": "web-0", "ready": False, "after": "hang", "within": "24s"},
        {"pod": "web-0", "ready": True, "after": "45s", "within": "2s"},
    ]
    events = [SILENT | {"id": "hang", "for": "40s"}]
    assert broken(until="60s", events=events, expect=expect) == []


def test_an_event_may_happen_again_and_again():
    def sides(**more):
        timeline = run_scenario(GOOD | {"events": [{"at": "5s", "every": "4s", "lose_lease": "web-0", **more}]})
        return timeline.at(actor="scenario", kind="lose_lease")

    assert sides() == [5, 9, 13, 17]
    assert sides(times=2) == [5, 9]


def test_an_event_may_follow_something_that_is_seen():
    when = {"pod": "web-0", "sees": "probe ok", "nth": 2, "later": "250ms"}
    timeline = run_scenario(GOOD | {"events": [{"when": when, "silent": "web-0"}]})
    ok = timeline.at(actor="probe", kind="ok")
    assert timeline.at(actor="scenario", kind="silent") == [ok[1] + 0.25]


def test_an_event_whose_moment_never_comes_fails_the_run():
    events = [{"when": {"pod": "web-0", "sees": "deleted"}, "silent": "web-0"}]
    assert broken(events=events) == ["the event happens: silent web-0"]


def test_an_event_that_finds_no_guest_fails_the_run():
    events = [{"at": "1s", "silent": "later"}]
    pods = [{"name": "later", "at": "10s"}]
    timeline = run_scenario({"pods": pods, "events": events})
    (entry,) = timeline.of(kind="broken")
    assert dict(entry.fields)["why"] == "at 1.000000: no VM 'vk-default-later' was ever powered on"


def test_an_expectation_about_an_event_that_never_happened_is_broken():
    events = [{"id": "gone", "when": {"pod": "web-0", "sees": "deleted"}, "silent": "web-0"}]
    expect = [{"pod": "web-0", "ready": False, "after": "gone", "within": "1s"}]
    assert broken(events=events, expect=expect)[1:] == ["pod=web-0 ready=False after=gone within=1s"]


def boots(seed, **guest):
    pods = [{"name": name, "guest": {"lease": "0s", **guest}} for name in ("web-0", "web-1")]
    timeline = run_scenario({"until": "40s", "jitter": "0s", "pods": pods}, seed)
    return [timeline.at(actor="guest", kind="address", key=f"default/{name}") for name in ("web-0", "web-1")]


def test_a_range_is_drawn_for_each_pod_and_is_its_beginning_without_a_seed():
    first, second = boots(3, boot="10s..20s")
    assert first != second
    assert all(10 <= at <= 20 for (at,) in (first, second))
    assert boots(3, boot="10s..20s") == [first, second] != boots(4, boot="10s..20s")
    assert boots(None, boot="10s..20s") == [[10], [10]]


def test_a_choice_is_drawn_by_weight_and_is_its_heaviest_without_a_seed():
    choice = {"one_of": ["1s", {"value": "5s", "weight": 3}, {"value": "7s..8s", "weight": 2}]}
    assert boots(None, boot=choice) == [[5], [5]]
    drawn = [at for seed in range(12) for (at,) in boots(seed, boot=choice)]
    assert set(map(int, drawn)) == {1, 5, 7}


def test_resources_labels_and_annotations_reach_the_vm():
    pod = {
        "name": "web-0",
        "resources": {"cpu": 6, "memory": "3Gi"},
        "labels": {"a": "b"},
        "annotations": {"cocoonset.cocoonstack.io/mode": "run", "cocoonset.cocoonstack.io/managed": None},
    }
    from simulator.world import World

    plan = load({"pods": [pod]})
    assert plan.pods[0].resources == {"cpu": "6", "memory": "3Gi"}
    with World() as world:
        made = world.create_pod("x", annotations=plan.pods[0].annotations, resources=plan.pods[0].resources)
        assert "cocoonset.cocoonstack.io/managed" not in made["metadata"]["annotations"]
        world.create_pod("y", annotations={"cocoonset.cocoonstack.io/mode": "run"}, resources={"cpu": "6"})
        world.run(5)
        assert world.host.cocoon.record("vk-default-y")["config"]["cpu"] == 6


def test_settings_are_read_as_the_daemon_reads_them():
    plan = load(GOOD | {"settings": {"orphan_policy": "destroy", "cocoon_processes": 3}})
    assert plan.options["cocoon_processes"] == 3
    assert plan.options["orphan_policy"] == "destroy"


def test_the_page_about_scenarios_is_as_new_as_the_code():
    page = Path(__file__).parent.parent / "docs" / "scenarios.md"
    assert page.read_text() == reference.page(), "make docs"


def test_the_example_on_the_page_about_scenarios_holds(tmp_path):
    path = tmp_path / "example.yaml"
    path.write_text(reference.page().split("```yaml")[1].split("```")[0])
    for seed in range(5):
        assert run_scenario(path, seed).of(kind="broken") == []
