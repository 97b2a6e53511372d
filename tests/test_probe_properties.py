"""The whole probe loop against a second, independent description of it, over random guests and random orders of events.

What the loop is specified to do is written down here once more, as a plain walk over integer microseconds without
clock, greenlets or debouncing object; both must agree to the microsecond.
"""

from itertools import count, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from probe_rig import DOWN, UP, Rig

from vkcocoon_probes import ProbeResult

RAMP_US = (100_000, 150_000, 225_000, 337_500, 506_250, 759_375)
MINUTES = settings(deadline=None, max_examples=150)  # no example has to be fast

# Lengths in microseconds of the guest's alternating silent and answering times; silent first, so it may be 0.
TIMELINES = st.lists(st.integers(0, 40_000_000), max_size=12)
HORIZON_US = 180_000_000


def answers(timeline, now_us):
    """Whether the guest answers at ``now_us``; after its timeline it stays as it was last."""
    up = False
    for length in timeline:
        if now_us < length:
            return up
        now_us -= length
        up = not up
    return up


def expected(timeline, costs):
    """Instants the probes begin at, and (instant, ready) of the first decision and of every flip, in microseconds."""
    begins, flips = [], []
    now, ready, failures, pauses_taken = 0, None, 0, 0
    for index in range(1_000_000):
        if now > HORIZON_US:
            return begins, flips
        begins.append(now)
        now += costs[index % len(costs)]
        up = answers(timeline, now)
        failures = 0 if up else failures + 1
        if up:
            settled = True
        elif ready is None or failures >= 3:
            settled = False
        else:
            settled = ready
        if settled != ready:
            flips.append((now, settled))
            pauses_taken = 0
            ready = settled
        if ready:
            now += 5_000_000
        else:
            now += RAMP_US[pauses_taken] if pauses_taken < len(RAMP_US) else 1_000_000
            pauses_taken += 1
    raise AssertionError("the walk does not end")


def probing(rig, timeline, costs):
    """A probe that takes its next cost and then says whether the guest answers."""
    index = count()

    def probe(deadline):
        cost = costs[next(index) % len(costs)]
        if cost:
            rig.clock.sleep(cost / 1_000_000)
        return UP if answers(timeline, rig.clock.now_us) else DOWN

    return probe


COSTS = st.lists(st.integers(0, 2_900_000), min_size=1, max_size=6) | st.just([0])
SAMPLES = st.lists(st.integers(0, HORIZON_US), max_size=40)


@MINUTES
@given(TIMELINES, COSTS, SAMPLES)
def test_probes_flips_and_what_readers_see_agree_with_the_description(timeline, costs, samples):
    rig = Rig()
    rig.start(probing(rig, timeline, costs))
    seen = []
    for instant in sorted(samples):
        if instant < rig.clock.now_us:
            continue  # the first probe took longer
        rig.clock.run((instant - rig.clock.now_us) / 1_000_000)
        seen.append((instant, rig.manager.get("pod").ready))
    rig.clock.run((HORIZON_US - rig.clock.now_us) / 1_000_000)

    begins, flips = expected(timeline, costs)
    assert [round(instant * 1_000_000) for instant in rig.instants()] == begins
    told = [(round(instant * 1_000_000), ready) for instant, ready in rig.told]
    assert told == [flip for flip in flips[1:] if flip[0] <= HORIZON_US]
    for instant, ready in seen:
        assert ready == [settled for at, settled in flips if at <= instant][-1]
    rig.manager.close()
    assert rig.greenlets() == 0


@MINUTES
@given(TIMELINES)
def test_flips_alternate_and_are_as_far_apart_as_the_rules_say(timeline):
    rig = Rig()
    rig.start(probing(rig, timeline, [0]))
    first = rig.manager.get("pod").ready
    rig.clock.run(180)
    told = [(0, first), *rig.told]
    for (before, was_ready), (after, is_ready) in pairwise(told):
        assert is_ready is not was_ready
        assert round((after - before) * 1_000_000) >= (15_000_000 if was_ready else 100_000)
    rig.manager.close()


@MINUTES
@given(st.lists(st.sampled_from(["up", "lease", "port"]), min_size=2, max_size=40))
def test_readers_are_told_of_every_change_they_can_see_and_of_nothing_else(states):
    """Whoever copies ``get`` at each callback always holds what ``get`` says, apart from the time."""
    results = {
        "up": UP,
        "lease": ProbeResult(False, "WaitingForLease", "waiting for DHCP lease"),
        "port": ProbeResult(False, "PortClosed", "port 22 is closed"),
    }
    rig = Rig()
    left = iter(states)
    copies = []

    def visible():
        result = rig.manager.get("pod")
        return result.ready, result.reason, result.message

    rig.start(lambda deadline: results[next(left, states[-1])], on_update=lambda: copies.append(visible()))
    copies.append(visible())
    while rig.clock.elapsed() < 240:
        rig.clock.run(0.05)
        assert copies[-1] == visible()
    assert all(old != new for old, new in pairwise(copies))
    rig.manager.close()


KEYS = st.sampled_from("ab")
STEPS = st.one_of(
    st.tuples(st.just("start"), KEYS, st.integers(0, 2_500), st.booleans()),
    st.tuples(st.just("forget"), KEYS),
    st.tuples(st.just("forget as an old owner"), KEYS),
    st.tuples(st.just("wait"), st.integers(0, 6_000)),
    st.tuples(st.just("kill"), KEYS),
)


class World:
    """Starts, forgets and kills agents whose results carry their number, and notes whenever a former one acts."""

    def __init__(self, seed):
        self.numbers = count(1)
        self.current = {}  # key -> number of the agent that was started last and not forgotten
        self.agents = {}  # number -> agent
        self.wrong = []
        self.rig = Rig(seed=seed, observer=self.observe)

    def observe(self, agent, result, lateness, took):
        if result.message != self.current.get(agent.key):
            self.wrong.append(f"result of a former agent of {agent.key}")

    def look(self):
        for key in "ab":
            if self.rig.manager.get(key).message not in ("", self.current.get(key)):
                self.wrong.append(f"state of a former agent of {key}")

    def start(self, key, cost_ms, flapping):
        number = self.current[key] = str(next(self.numbers))
        outcomes = count()

        def probe(deadline):
            self.rig.clock.sleep(cost_ms / 1000)
            return ProbeResult(not flapping or next(outcomes) % 4 == 0, "Reason", number)

        def told():
            if self.current.get(key) != number:
                self.wrong.append(f"callback of a former agent of {key}")

        self.agents[number] = self.rig.start(probe, key=key, on_update=told)

    def forget(self, key):
        self.current.pop(key, None)
        self.rig.manager.forget(key)
        if self.rig.manager.get(key) != ProbeResult():
            self.wrong.append(f"{key} is still there")

    def forget_as_an_old_owner(self, key):
        for number, agent in self.agents.items():
            if agent.key == key and number != self.current.get(key) and self.rig.manager.forget(key, agent):
                self.wrong.append(f"a former agent stopped the one of {key}")

    def kill(self, key):
        for greenlet in list(self.rig.manager._group):
            if greenlet.name == f"probe {key}":
                greenlet.kill(block=False)

    def take(self, step):
        match step:
            case ("start", key, cost_ms, flapping):
                self.rig.clock.spawn(f"start {key}", self.start, key, cost_ms, flapping)
                self.rig.clock.run(0)
            case ("forget", key):
                self.forget(key)
            case ("forget as an old owner", key):
                self.forget_as_an_old_owner(key)
            case ("kill", key):
                self.kill(key)
            case ("wait", milliseconds):
                self.rig.clock.run(milliseconds / 1000)


@MINUTES
@given(st.integers(0, 2**32), st.lists(STEPS, max_size=40))
def test_in_any_order_of_start_forget_and_kill_only_the_registered_agent_acts(seed, steps):
    world = World(seed)
    for step in steps:
        world.take(step)
        world.look()
        assert len(world.rig.manager) <= 2
    assert world.wrong == []
    world.rig.manager.close()
    probes = len(world.rig.probes)
    world.rig.clock.run(30)
    assert len(world.rig.probes) == probes
    assert (len(world.rig.manager), world.rig.greenlets()) == (0, 0)
    assert world.wrong == []
