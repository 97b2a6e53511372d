"""The suite against a real control plane; run it with `make e2e`.

    make e2e                                         real and fake, everything
    make e2e ARGS='--control-plane=fake'             without Go
    make e2e ARGS='--control-plane=real -k drain'
    python -m pytest tests/e2e -k drain              in one process, which starts what it needs

A scenario carries its number in its name (N: nodes, P: pods, H: the kubelet API; docs/kubernetes.md says what each is
about) and runs once against the real control plane and once against the fake API server; the mark `real` is on those
that need more than an API server, or rights, or its storage. Without the directory on the command line nothing of this
is collected.
"""

import functools
import re
import shutil
from pathlib import Path

import pytest

from simulator.namespaces import temporary_home
from tests.e2e import programs, results
from tests.e2e.api import CLOCK, Watcher
from tests.e2e.control_plane import ControlPlane
from tests.e2e.fake_plane import FakePlane
from tests.e2e.host import Host

HERE = Path(__file__).parent
SCENARIO = re.compile(r"test_([HNP]\d+)_(\w+?)(?:\[(.*)\])?$")
SCENARIO_LIMIT_S = 300
PODS = "/api/v1/pods"


def pytest_addoption(parser):
    group = parser.getgroup("e2e")
    group.addoption("--control-plane", choices=["real", "fake", "both"], default="both", help="what e2e runs against")


def pytest_configure(config):
    config.addinivalue_line("markers", "real(why): runs against the real control plane only")
    if asked_for(config) and not config.pluginmanager.has_plugin("planes"):
        results.begin()


def asked_for(config) -> bool:
    """Is this directory, or something in it, on the command line?"""
    given = (Path(word.split("::")[0]).resolve() for word in config.args)
    return any(path == HERE or HERE in path.parents for path in given)


def pytest_ignore_collect(collection_path, config):
    return True if collection_path.name.startswith("test_") and not asked_for(config) else None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SCENARIO_LIMIT_S))
    if asked_for(config) and config.getoption("--control-plane") == "fake":
        left_out = [item for item in items if item.get_closest_marker("real")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_generate_tests(metafunc):
    if "plane" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--control-plane")
        planes = ["real", "fake"] if asked == "both" else [asked]
        if metafunc.definition.get_closest_marker("real"):
            planes = ["real"]  # left out below where the real one was not asked for
        elif asked == "both" and metafunc.definition.get_closest_marker("alone"):
            planes = ["real"]  # nobody waits for the fake one
        metafunc.parametrize("plane", planes, indirect=True, scope="session")


# What is there ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared(request):
    """What `make e2e` started for all its processes, if it is that which runs; see tests/e2e/__main__.py."""
    return request.config.pluginmanager.get_plugin("planes")


@pytest.fixture(scope="session")
def ran(shared):
    return shared.ran if shared else programs.Ran()


@pytest.fixture(scope="session")
def plane(request, ran, shared):
    """The control plane: real, or the fake in its place."""
    if shared:
        yield shared.by_name[request.param]
        return
    directory = Path(temporary_home())
    plane = ControlPlane(directory, ran) if request.param == "real" else FakePlane(directory)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def numbers(request):
    """Every host of a run has a network and a name of its own."""
    share = request.config.pluginmanager.get_plugin("share")
    return iter(range(1 + 1000 * (share.number if share else 0), 10_000))


def _host(plane, numbers, **how):
    number = next(numbers)
    home = Path(temporary_home())
    return Host(plane, home, name=f"n{number}", number=number, **how)


def _close(host):
    host.stop()
    # Silent nodes would pile up, and a cluster of mostly silent nodes evicts nothing any more.
    host.plane.admin.send("DELETE", f"/api/v1/nodes/{host.name}")
    shutil.rmtree(host.home, ignore_errors=True)


@pytest.fixture(scope="session")
def host(plane, numbers):
    """A host that is registered and ready, for scenarios that only use it."""
    host = _host(plane, numbers)
    host.start()
    host.wait_until_ready()
    yield host
    _close(host)


@pytest.fixture
def new_host(plane, numbers, request):
    """Makes hosts for one scenario: `new_host(direct=False)`; nothing of it is started yet."""
    made = []

    def make(**how):
        made.append(_host(plane, numbers, **how))
        request.node.user_properties.append(("host", made[-1]))
        return made[-1]

    yield make
    for host in made:
        _close(host)


@pytest.fixture
def namespace(plane, request):
    """A namespace for one scenario. It is left to be deleted with everything in it."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
    name = f"{name}-{CLOCK.monotonic() * 1000:.0f}"
    plane.admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    plane.admin.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def pods(plane):
    """An observer of all pods that shares nothing with the daemon."""
    watcher = Watcher(plane.admin, PODS)
    yield watcher
    watcher.close()


@pytest.fixture
def measured(plane):
    """Notes one measurement for the end of the run: `measured(what, result)`."""
    return functools.partial(results.measured, plane.name)


# What is said -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed and HERE in item.path.parents:
        hosts = [value for name, value in item.user_properties if name == "host"]
        if "host" in item.funcargs:
            hosts.append(item.funcargs["host"])
        for host in hosts:
            lines = host.daemon.log().splitlines()[-80:]
            report.sections.append((f"the last lines of the daemon on {host.name}", "\n".join(lines)))
    decided = report.when == "call" or (report.when == "setup" and not report.passed)
    if decided and (found := SCENARIO.match(item.name)):
        number, words, plane = found.groups()
        results.scenario(number, words, plane or "", report.outcome, report.duration)


def pytest_terminal_summary(terminalreporter, config):
    if not asked_for(config):
        terminalreporter.write_line("e2e was not run; `make e2e` runs it against a real control plane")
        return
    if not config.pluginmanager.has_plugin("planes"):
        results.show(terminalreporter.write)
