"""A world to run vk-cocoon in, without hardware.

    from simulator import VirtualClock, World, run_scenario

`World` is a node with everything around it in virtual time, `run_scenario` plays a scenario file (or dict) in one and
returns its `Timeline`, `VirtualClock` is the time of both. They are loaded when they are first asked for: a world
imports the provider, which makes blocking calls cooperative, and that must be its user's decision.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.clock import VirtualClock
    from simulator.scenario import run_scenario
    from simulator.timeline import Timeline
    from simulator.world import World

__all__ = ["Timeline", "VirtualClock", "World", "run_scenario"]

_HOMES = {"Timeline": "timeline", "VirtualClock": "clock", "World": "world", "run_scenario": "scenario"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    return getattr(import_module(f"simulator.{_HOMES[name]}"), name)
