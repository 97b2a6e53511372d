"""Where the randomness of a run comes from: one seed, and a stream for each purpose and subject.

A `Chance` is a `random.Random` that branches. `chance.of("vms", "vk-default-web-0")` has a stream of its own, which is
the same whoever else draws and however often; so one more pod in a scenario does not change what happens to the others,
and a failing scenario can be made smaller without losing its failure. `unit` draws without any stream: the same words
give the same number, which suits what happens at an instant and may happen any number of times.

Fakes take a `Random`, so that a test can hand them a plain one, and go through `branch`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random

__all__ = ["Chance", "Draw", "branch"]

Draw = Callable[[int], float]


class Chance(Random):
    """A source of randomness by name; equal names of one seed are equal sources, in every process."""

    def __init__(self, name: object) -> None:
        super().__init__(str(name))
        self._name = str(name)
        self._branches: dict[tuple[str, ...], Chance] = {}

    def of(self, *subject: str) -> Chance:
        """The stream for that purpose and subject; asking again goes on where the last draw ended."""
        found = self._branches.get(subject)
        if found is None:
            found = self._branches[subject] = Chance("/".join((self._name, *subject)))
        return found

    def unit(self, *words: object) -> float:
        """A number from 0 (included) to 1 that depends on the name and the words alone."""
        return zlib.crc32("/".join((self._name, *map(str, words))).encode()) / 2**32

    def unit_of(self, *words: object) -> Draw:
        """``unit`` with one word to come, a number: for what is drawn again and again about the same."""
        begin = zlib.crc32("/".join((self._name, *map(str, words), "")).encode())
        return lambda number: zlib.crc32(b"%d" % number, begin) / 2**32


def branch(rng: Random, *subject: str) -> Random:
    """The stream of that subject if `rng` branches, else `rng` itself."""
    return rng.of(*subject) if isinstance(rng, Chance) else rng
