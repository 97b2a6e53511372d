"""Every shipped scenario meets its expectations, twice the same; one that is wrong is refused with its line."""

from pathlib import Path

import pytest

import simulator
from simulator.scenario import ScenarioError, load, main, run_scenario, seconds_of

SHIPPED = sorted((Path(simulator.__file__).parent / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario_holds_and_can_be_repeated(path, seed):
    timeline = run_scenario(path, seed)
    assert timeline.first_difference(run_scenario(path, seed)) == ""
    if seed is not None and path.stem == "oracle":
        return  # its instants are those of probes that cost nothing; a seed makes everything take a little
    assert [entry.text() for entry in timeline.of(kind="broken")] == []


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
        {"pod": "web-0", "ready": False, "after": "1s", "by": "20s"},
        {"pod": "web-0", "never": "ready"},
        {"pod": "web-0", "flips": 0},
        {"pod": "web-0", "reason": "PingTimeout", "at": "10s"},
    ],
    ids=str,
)
def test_an_expectation_that_is_not_met_is_broken(expectation):
    assert len(broken(expect=[expectation])) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"evnts": []}, "unknown key 'evnts'; did you mean 'events'?"),
        ({"version": 2}, "version 2 is not known"),
        ({"until": "fast"}, "until: 'fast' is no time such as"),
        ({"pods": [{"name": "Web_0"}]}, "'Web_0' is no pod name"),
        ({"pods": [{"name": "web-0", "guest": {"boots": "1s"}}]}, "did you mean 'boot'?"),
        ({"events": [{"at": "1s", "silnt": "web-0"}]}, "unknown event 'silnt'; did you mean 'silent'?"),
        ({"events": [{"at": "1s", "silent": "web-1"}]}, "unknown pod 'default/web-1'; did you mean 'default/web-0'?"),
        ({"events": [{"at": "1s", "silent": "web-0", "crash": "web-0"}]}, "exactly one thing that happens"),
        ({"events": [{"silent": "web-0"}]}, "an event has an instant"),
        ({"events": [{"at": "1s", "open": "web-0"}]}, "open needs port"),
        ({"events": [{"at": "1s", "kube": "dwn"}]}, "did you mean 'down'?"),
        ({"expect": [{"pod": "web-0", "redy": True}]}, "did you mean 'ready'?"),
        ({"expect": [{"pod": "web-0", "ready": "yes", "by": "1s"}]}, "ready is true or false"),
        ({"expect": [{"pod": "web-0", "ready": True}]}, "either at (the exact instant) or by"),
        ({"expect": [{"pod": "web-0", "never": "redy"}]}, "did you mean 'ready'?"),
        ({"pods": {"name": "web-0"}}, "pods must be a list"),
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
        ("pods:\n  - name: web-0\n    name: web-1\n", 2, "'name' stands twice"),
        ("pods: [\n", 2, "expected"),
    ],
)
def test_a_refusal_names_file_and_line(tmp_path, text, line, says):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}:{line}: ")
    assert says in str(refused.value)


def test_the_command_tells_met_from_broken_from_wrong_by_its_exit_code(tmp_path, capsys):
    path = tmp_path / "s.yaml"
    path.write_text("until: 5s\npods: [{name: web-0}]\nexpect: [{pod: web-0, ready: true, by: 4s}]\n")
    assert main(str(path), check=True) == 0
    assert "second run: the same" in capsys.readouterr().out
    path.write_text("until: 5s\npods: [{name: web-0}]\nexpect: [{pod: web-0, never: ready}]\n")
    assert main(str(path), seed=3) == 1
    assert f"vk-cocoon simulate {path} --seed 3" in capsys.readouterr().out
    assert main(str(tmp_path / "none.yaml")) == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("500ms", 0.5), ("3.078125s", 3.078125), ("1m30s", 90), ("1h", 3600), ("10us", 1e-5)],
)
def test_times_are_exact(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1s1", "٣s", None])
def test_a_time_without_a_unit_or_with_anything_else_is_none(text):
    with pytest.raises(ValueError, match="is no time"):
        seconds_of(text)
