"""The suite as `make e2e` runs it: one control plane of each kind for several processes, with pytest's own words.

Most scenarios wait most of the time (for a lease, a node that is found silent, a pause after a failure), so they do it
side by side. What restarts the control plane or measures speed is marked `alone` and comes last.
"""

from gevent import monkey

monkey.patch_all()

import argparse
import contextlib
import os
import shutil
import sys
from pathlib import Path

from simulator.namespaces import temporary_home
from tests import side_by_side
from tests.e2e import programs, results
from tests.e2e.control_plane import ControlPlane
from tests.e2e.fake_plane import FakePlane

PROCESSES = int(os.environ.get("E2E_PROCESSES", "8"))


class Planes:
    """The plugin by which each process finds what runs already."""

    def __init__(self, ran: programs.Ran) -> None:
        self.__name__ = "planes"
        self.ran = ran
        self.by_name: dict[str, ControlPlane | FakePlane] = {}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--control-plane", default="both")
    asked = parser.parse_known_args(words)[0].control_plane
    results.begin()
    planes = Planes(programs.Ran())
    with contextlib.ExitStack() as stack:
        for name in ("real", "fake") if asked == "both" else (asked,):
            directory = Path(temporary_home())
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            plane = ControlPlane(directory, planes.ran) if name == "real" else FakePlane(directory)
            stack.callback(plane.stop)
            plane.start()
            planes.by_name[name] = plane
        given = [word for word in words if not word.startswith("-") and "e2e" in word]
        code = side_by_side.run(
            [*([] if given else ["tests/e2e"]), *words], processes=PROCESSES, size=1, plugins=[planes]
        )
    results.show(sys.stdout.write)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
