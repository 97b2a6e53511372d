"""The programs of a real control plane: which ones must run, where they are found, how they are built, which ran.

    python -m tests.e2e.programs build     makes what is missing, with Go
    python -m tests.e2e.programs check     fails unless every listed program ran in the last run of the suite

The list is controlplane/programs.txt, the versions are in controlplane/go.mod. A program is looked for in
$KUBEBUILDER_ASSETS first, as envtest does, then in a cache outside the tree. The suite notes every program that proved
to work (`Ran`), so that a run which quietly did without one cannot pass for a whole one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = Path(__file__).resolve().parent / "controlplane"
RAN = ROOT / "build" / "e2e" / "programs-that-ran.txt"
# Where Kubernetes keeps its version; without it the programs call themselves v0.0.0-master.
VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")


class Missing(Exception):
    """A program is not there and cannot be made; one line says why and what to do."""


def listed() -> dict[str, str]:
    """Name and Go package of each program that must run."""
    lines = (line.split("#")[0].split() for line in (MODULE / "programs.txt").read_text().splitlines())
    return {words[0]: words[1] for words in lines if words}


def version() -> str:
    """The release of Kubernetes, such as v1.37.2."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert found is not None, "go.mod names no release of k8s.io/kubernetes"
    return found[1]


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vk-cocoon" / f"controlplane-{version()}"


def find(name: str) -> Path | None:
    places = [Path(os.environ["KUBEBUILDER_ASSETS"])] if os.environ.get("KUBEBUILDER_ASSETS") else []
    return next((place / name for place in (*places, cache()) if os.access(place / name, os.X_OK)), None)


def path(name: str) -> Path:
    """Where a program is; raises Missing."""
    found = find(name)
    if found is None:
        raise Missing(f"{name} is not there; `make e2e` builds it into {cache()}")
    return found


def build() -> None:
    """Make what is missing; raises Missing when that is not possible here."""
    missing = {name: package for name, package in listed().items() if find(name) is None}
    if not missing:
        return
    if shutil.which("go") is None:
        raise Missing(
            f"{', '.join(missing)}: not in KUBEBUILDER_ASSETS nor in {cache()}, and Go is not installed to build them"
        )
    cache().mkdir(parents=True, exist_ok=True)
    for number, (name, package) in enumerate(missing.items(), start=1):
        sys.stdout.write(f"Building {name} ({number} of {len(missing)}); it is done once and takes some minutes.\n")
        sys.stdout.flush()
        new = cache() / f".{name}.{os.getpid()}"
        words = ["go", "build", "-trimpath", "-ldflags", _stamps(), "-o", str(new), package]
        done = subprocess.run(words, cwd=MODULE, env=os.environ | {"CGO_ENABLED": "0"}, check=False)
        if done.returncode != 0:
            raise Missing(f"{name} could not be built (go build ended with {done.returncode})")
        new.replace(cache() / name)


def _stamps() -> str:
    major, minor, _ = version().removeprefix("v").split(".", 2)
    facts = {"gitVersion": version(), "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = [f"-X {package}.{key}={value}" for package in VERSION_PACKAGES for key, value in facts.items()]
    return " ".join(["-s -w", *stamps])


class Ran:
    """What a run of the suite has proved; a file, so that others can read it afterwards."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        RAN.parent.mkdir(parents=True, exist_ok=True)
        RAN.unlink(missing_ok=True)

    def note(self, name: str, proof: str) -> None:
        """The program did what only the real one does; `proof` says what."""
        if name not in self._known:
            self._known.add(name)
            with RAN.open("a") as file:
                file.write(f"{name}\t{path(name)}\t{proof}\n")


def unproved() -> list[str]:
    """Listed programs that did not run in the last run of the suite."""
    ran = {line.split("\t")[0] for line in RAN.read_text().splitlines()} if RAN.exists() else set()
    return [name for name in listed() if name not in ran]


def main(arguments: list[str]) -> int:
    if arguments == ["build"]:
        try:
            build()
        except Missing as reason:
            sys.stderr.write(f"e2e: {reason}\n")
            return 1
        return 0
    if arguments == ["check"]:
        if absent := unproved():
            sys.stderr.write(f"e2e: listed but never ran: {', '.join(absent)}\n")
            return 1
        sys.stdout.write(f"e2e: all {len(listed())} listed programs of {version()} ran: {', '.join(listed())}\n")
        return 0
    sys.stderr.write("usage: python -m tests.e2e.programs build|check\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
