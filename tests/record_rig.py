"""A simulated daemon that records as one on a host does: the same doors, the same files, in virtual time."""

from pathlib import Path

import pytest

import simulator.world
from simulator.life import Life
from simulator.scenario import load
from vkcocoon_recorder import Recorder

SCENARIOS = Path(simulator.world.__file__).parent / "scenarios"


def called(function, arguments):
    """In place of a thread, which no virtual time waits for."""
    return function(*arguments)


class RecordedLife(Life):
    """A life that records into the directory that its world's settings name."""

    def __init__(self, world, number):
        self.recorder = Recorder(world.settings, world.clock, version="test", aside=called)
        super().__init__(world, number)
        notify = self.daemon.provider._publication.notify
        self.recorder.start(self.daemon.provider, notify)

    def _ports(self):
        return self.recorder.observe(super()._ports())

    def stop(self):
        super().stop()
        self.recorder.close()


def recorded(name, directory, *, seed=None, **settings):
    """Run a scenario with a daemon that records; its timeline, with what really happened."""
    plan = load(name if isinstance(name, dict) else SCENARIOS / f"{name}.yaml")
    plan.options.update(record=str(directory), **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator.world, "Life", RecordedLife)
        return plan.run(seed)
