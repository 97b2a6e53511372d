"""Many runs of a scenario: the failure with the lowest seed, whatever the number of processes, and made smaller."""

import pytest
import yaml

from simulator import explore
from simulator.scenario import load
from simulator.simulate import main
from vkcocoon_probes import ProbeManager

# Whether two or three probes meet the silence depends on when the guest came up.
FLAKY = {
    "until": "60s",
    "pods": [
        {"name": "web-0", "guest": {"boot": "1s..4s", "lease": "100ms", "latency": "0s..1ms"}},
        {"name": "web-1", "os": "windows"},
        {"name": "web-2", "annotations": {"a": "b"}},
    ],
    "events": [
        {"at": "20s", "silent": "web-1"},
        {"at": "20s", "for": "20s", "silent": "web-0"},
        {"at": "5s", "wall_clock": "1h"},
    ],
    "expect": [{"pod": "web-0", "flips": 1}, {"pod": "web-1", "ready": True, "by": "10s"}],
}
SOUND = FLAKY | {"events": [], "until": "10s"}


def never(number):
    pass


def test_a_scenario_that_holds_is_run_with_every_seed():
    told = []
    assert explore.explore(load(SOUND), range(5, 25), jobs=1, told=told.append) is None
    assert told == [8, 16, 20]


@pytest.mark.process
def test_the_failure_found_is_the_one_with_the_lowest_seed_whatever_the_number_of_processes():
    scenario = load(FLAKY)
    failing = [seed for seed in range(24) if explore.failure_of(scenario.run(seed), seed)]
    assert 0 < len(failing) < 24
    for jobs in (1, 2, 3):
        failure = explore.explore(scenario, range(24), jobs=jobs, told=never)
        assert (failure.seed, failure.what) == (failing[0], "pod=web-0 flips=1")


@pytest.mark.process
def test_all_processes_together_run_all_seeds():
    told = []
    assert explore.explore(load(SOUND), range(20), jobs=2, told=told.append) is None
    assert told[-1] == 20


@pytest.mark.process
def test_what_a_process_cannot_do_is_said_by_the_one_who_started_it():
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        explore.explore(load(SOUND), range(20), jobs=2, told=never, prepared="no_such_module:x")


def shrunk(document, first=0):
    scenario = load(document)
    failure = explore.explore(scenario, range(first, first + 50), jobs=1, told=never)
    return explore.shrink(scenario, failure, first=first)


def test_what_does_not_matter_is_taken_away():
    result = shrunk(FLAKY)
    document = result.document
    assert [pod["name"] for pod in document["pods"]] == ["web-0"]
    assert [list(event) for event in document["events"]] == [["at", "for", "silent"]]
    assert document["expect"] == [{"pod": "web-0", "flips": 1}]
    assert result.failure.what == "pod=web-0 flips=1"


def test_the_smallest_fails_in_the_same_way_when_it_is_read_again(tmp_path):
    result = shrunk(FLAKY)
    path = tmp_path / "smallest.yaml"
    path.write_text(explore.written(result.document, "why\nwhat"))
    assert path.read_text().startswith("# why\n# what\n")
    scenario = load(path)
    failure = explore.failure_of(scenario.run(scenario.seed), scenario.seed)
    assert (failure.what, failure.seed) == (result.failure.what, result.failure.seed)


def test_an_event_that_a_flip_is_expected_from_stays():
    events = [*FLAKY["events"], {"at": "20s", "for": "30s", "silent": "web-0"}]
    late = FLAKY | {"events": events, "expect": [{"pod": "web-0", "ready": False, "after": "20s", "by": "42s"}]}
    result = shrunk(late)
    assert any("silent" in event for event in result.document["events"])
    # Without the silence it would be missing, too, with every seed: that is another failure.
    assert explore.failure_of(load(result.document).run(result.failure.seed), result.failure.seed)
    assert any(explore.failure_of(load(result.document).run(seed), seed) is None for seed in range(12))


def test_what_fails_with_every_seed_keeps_its_pod_as_it_is():
    always = FLAKY | {"expect": [{"pod": "web-0", "ready": False, "after": "20s", "by": "21s"}]}
    result = shrunk(always)
    assert [pod["name"] for pod in result.document["pods"]] == ["web-0"]
    assert result.document["pods"] == FLAKY["pods"][:1]
    assert [list(event) for event in result.document["events"]] == [["at", "for", "silent"], ["at", "wall_clock"]]
    assert result.document["until"] == "21s"


def test_a_broken_rule_needs_no_expectation_and_ends_the_run(monkeypatch):
    guarded, owns = ProbeManager._guarded, ProbeManager._owns
    probed = set()

    def probe(self, agent):
        result = guarded(self, agent)
        probed.add(agent)
        return result

    def careless(self, agent):
        if agent in probed:
            probed.remove(agent)
            return True
        return owns(self, agent)

    monkeypatch.setattr(ProbeManager, "_guarded", probe)
    monkeypatch.setattr(ProbeManager, "_owns", careless)
    events = [*FLAKY["events"], {"at": "22s..40s", "delete": "web-0"}]
    story = FLAKY | {"events": events, "expect": FLAKY["expect"][1:]}
    result = shrunk(story)
    assert result.failure.what == "invariant nothing after forget"
    assert "expect" not in result.document
    assert [pod["name"] for pod in result.document["pods"]] == ["web-0"]
    assert load(result.document).until < 45


def test_the_command_explores_and_says_how_to_see_it_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flaky.yaml").write_text(yaml.safe_dump(FLAKY))
    assert main("flaky.yaml", runs=20, jobs=1) == 1
    out = capsys.readouterr().out
    seed = next(n for n in range(20) if explore.failure_of(load(FLAKY).run(n), n))
    assert f"flaky: seed {seed} fails" in out
    assert f"reproduce:  vk-cocoon simulate flaky.yaml --seed {seed}\n" in out
    assert f"smallest:   vk-cocoon simulate flaky.seed-{seed}.yaml\n" in out
    assert main(f"flaky.seed-{seed}.yaml") == 1
    (tmp_path / "sound.yaml").write_text(yaml.safe_dump(SOUND))
    assert main("sound.yaml", runs=4, jobs=1, seed=3) == 0
    assert "sound: 4 runs held, seeds 3 to 6" in capsys.readouterr().out
