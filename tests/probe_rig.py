"""A probe manager on a virtual clock, and a record of all it did. What the test_probe_* files share."""

from gevent.event import Event

from simulator.clock import VirtualClock
from vkcocoon_probes import ProbeManager, ProbeResult

UP = ProbeResult(True, "Up", "answers")
DOWN = ProbeResult(False, "Down", "silent")


class Rig:
    """``probes``: (instant, key) of each probe that began. ``told``: (instant, ready) of each callback."""

    def __init__(self, *, seed=None, **options):
        self.clock = VirtualClock(seed)
        self.manager = ProbeManager(self.clock, **options)
        self.probes = []
        self.told = []

    def start(self, probe, key="pod", on_update=None):
        """Start ``probe`` (a function of nothing or of a deadline, see below) and record it."""

        def recorded(deadline):
            self.probes.append((self.clock.elapsed(), key))
            return probe(deadline)

        return self.manager.start(key, recorded, on_update or self.tell(key))

    def tell(self, key="pod"):
        return lambda: self.told.append((self.clock.elapsed(), self.manager.get(key).ready))

    def instants(self, key="pod"):
        return [instant for instant, probed in self.probes if probed == key]

    def greenlets(self):
        """How many greenlets the manager has. None may be left after forget, close or the agent's end."""
        return len(self.manager._group)

    def guest(self, *answering):
        """A guest that answers at once, and only within the half-open intervals (from, to) given in seconds."""

        def probe(deadline):
            now = self.clock.elapsed()
            return UP if any(begin <= now < end for begin, end in answering) else DOWN

        return probe


def script(outcomes):
    """One letter for each probe, the last one repeats: S succeeds, F fails."""
    left = list(outcomes)

    def probe(deadline):
        letter = left.pop(0) if len(left) > 1 else left[0]
        return UP if letter == "S" else DOWN

    return probe


class Gate:
    """Holds every probe between ``entered`` and ``release``, so that a test decides what happens in between."""

    def __init__(self, clock, answer=UP):
        self.clock = clock
        self.answer = answer
        self.entered = Event()
        self.release = Event()
        self.left = 0

    def __call__(self, deadline):
        self.entered.set()
        self.clock.wait(self.release, None)
        self.left += 1
        return self.answer
