"""First the monkey patch, before anything that opens a socket; then what every test file shares."""

from gevent import monkey

monkey.patch_all()

import logging

import freezegun
import pytest
import structlog

# kubernetes loads its models lazily, and its validation library does not accept a fake datetime class while it does.
freezegun.configure(extend_ignore_list=["kubernetes"])

# Plain and quiet: the fancy tracebacks of the default renderer cost more than the test that logs one.
structlog.configure(
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    processors=[
        structlog.stdlib.add_log_level,
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(),
    ],
)


@pytest.fixture
def world():
    """A whole node in virtual time; no invariant of the simulator may have been broken by the end of the test."""
    from simulator.world import World

    with World() as world:
        yield world
        assert [entry.text() for entry in world.timeline.of(actor="invariant")] == []
