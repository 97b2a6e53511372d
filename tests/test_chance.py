"""Randomness comes in one stream per purpose and subject: one more pod leaves the others what they drew."""

import subprocess
import sys
from random import Random

import pytest

from simulator.chance import Chance, branch
from simulator.world import World


def test_a_stream_does_not_feel_the_others():
    alone = Chance(7)
    first = [alone.of("guest", "web-0").random() for _ in range(3)]
    crowded = Chance(7)
    second = []
    for _ in range(3):
        crowded.of("guest", "web-1").random()
        crowded.random()
        second.append(crowded.of("guest", "web-0").random())
    assert second == first
    assert Chance(8).of("guest", "web-0").random() != first[0]


def test_a_draw_without_a_stream_depends_on_its_words_alone():
    draws = [Chance(7).unit("echo", n) for n in range(1000)]
    assert draws == [Chance(7).unit("echo", n) for n in range(1000)]
    assert all(0 <= draw < 1 for draw in draws)
    assert 0.45 < sum(draws) / 1000 < 0.55


def test_a_plain_random_does_not_branch():
    rng = Random(3)
    assert branch(rng, "anything") is rng
    assert branch(Chance(3), "a").random() == Chance(3).of("a").random()


@pytest.mark.process
def test_a_seed_is_the_same_in_every_process():
    program = "from simulator.chance import Chance; c = Chance(5); print(c.of('a', 'b').random(), c.unit('c', 1))"
    output = {
        subprocess.check_output([sys.executable, "-c", program], env={"PYTHONHASHSEED": str(n)}, text=True)
        for n in range(2)
    }
    assert output == {f"{Chance(5).of('a', 'b').random()} {Chance(5).unit('c', 1)}\n"}


def drawn(world, name):
    """What a seed decided about a pod: its identifiers, its address, and how long its commands took."""
    pod = world.pod(name)
    vm = world.host.cocoon.record(f"vk-default-{name}")
    starts = world.timeline.of(actor="host", kind="power on", key=f"default/{name}")
    return pod["metadata"]["uid"], vm["id"], vm["network_configs"], pod["status"]["podIP"], starts[0].at_us


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_more_pod_does_not_change_what_happens_to_the_others(seed):
    def run(*names):
        with World(seed) as world:
            for name in names:
                world.run(1)
                world.create_pod(name)
            world.run(10)
            return drawn(world, "web-0")

    assert run("web-0") == run("web-0", "web-1", "db-0")
