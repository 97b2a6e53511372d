"""Builds what is shipped into dist/: a wheel, the single file, a deb that holds it, and SHA256SUMS.

    python packaging/build_dist.py [--output DIR]        (`make dist` builds twice, compares, and tries all of it)

Run by the Python the single file is for; it is good for that minor version and architecture alone, because compiled
libraries are in it, and its name says which. Everything is made of the last commit, whatever else lies around, and of
the exact versions in runtime.lock and pack.lock, with all times set to the commit's: two builds of one commit are equal
to the byte.

The tools (pip, shiv) live in an environment of their own, build/pack, made when pack.lock changes. dpkg-deb is the
system's; without it there is no deb, and the build says so.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build" / "pack"

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
MACHINE = platform.machine()
DEB_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Half of what the Kubernetes client brings is its asynchronous twin, and nobody runs tests from a single file.
PRUNED = ("kubernetes/aio", "kubernetes/test", "gevent/tests", "greenlet/tests", "bin", "share", "**/__pycache__")
# What pip notes about its own work: paths of this machine, and hashes of them.
NOTES = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    output = parser.parse_args().output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    work = output / "work"
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    os.umask(0o022)
    source = checkout(work)
    tools(source)
    wheel = build_wheel(source, output)
    single = build_single(source, work, wheel, output)
    if shutil.which("dpkg-deb"):
        build_deb(source, work, single, output)
    else:
        say("dpkg-deb is not installed: no deb is built")
    shutil.rmtree(work)
    write_sums(output)
    for path in sorted(output.iterdir()):
        say(f"{path.stat().st_size / 1e6:8.1f} MB  {path.name}")


def say(text: str) -> None:
    sys.stderr.write(f"dist: {text}\n")


def run(*command: str | Path, cwd: Path = ROOT, **environ: str) -> str:
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | environ, check=False, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"dist: {command[0]} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def checkout(work: Path) -> Path:
    """The last commit's files: a build leaves traces next to its sources, and must not pick up anybody's."""
    source = work / "source"
    source.mkdir(parents=True)
    if run("git", "status", "--porcelain"):
        say("there are changes that are not committed, and they are not in what is built")
    run("git", "archive", "--format=tar", f"--output={work / 'source.tar'}", "HEAD")
    shutil.unpack_archive(work / "source.tar", source, filter="data")
    return source


def version(source: Path) -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', (source / "vkcocoon.py").read_text(), re.MULTILINE)
    assert found
    return found[1]


# Tools ------------------------------------------------------------------------------------------------------------


def tools(source: Path) -> None:
    """build/pack, as pack.lock wants it."""
    lock = source / "packaging" / "pack.lock"
    mark = TOOLS / "made-from"
    wanted = f"{MINOR} {hashlib.sha256(lock.read_bytes()).hexdigest()}"
    if mark.is_file() and mark.read_text() == wanted:
        return
    say("making build/pack")
    run(sys.executable, "-m", "venv", "--clear", TOOLS)
    pip("install", "--require-hashes", "-r", lock)
    mark.write_text(wanted)


def pip(*arguments: str | Path) -> None:
    run(TOOLS / "bin" / "python", "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check")


# Wheel ------------------------------------------------------------------------------------------------------------


def build_wheel(source: Path, output: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", output, source)
    (wheel,) = output.glob("*.whl")
    return wheel


# The single file --------------------------------------------------------------------------------------------------


def build_single(source: Path, work: Path, wheel: Path, output: Path) -> Path:
    site = work / "site"
    pip("install", "--require-hashes", "--no-deps", "--target", site, "-r", source / "packaging/runtime.lock")
    pip("install", "--no-deps", "--no-index", "--target", site, wheel)
    prune(site)
    packed = work / "packed.pyz"
    entry = ("--entry-point", "vkcocoon_entry:main", "--python", "/usr/bin/env python3")
    how = ("--reproducible", "--compressed", "--compile-pyc", "--site-packages", site)
    run(TOOLS / "bin" / "python", "-m", "shiv", *entry, *how, "--output-file", packed)
    single = output / f"vk-cocoon-{version(source)}-cp{MINOR.replace('.', '')}-linux-{MACHINE}.pyz"
    rewrite(packed, single, (source / "packaging/single_main.py").read_text())
    return single


def prune(site: Path) -> None:
    for pattern in PRUNED:
        for path in site.glob(pattern):
            shutil.rmtree(path)
    for name in NOTES:
        for path in site.glob(f"*.dist-info/{name}"):
            path.unlink()


def rewrite(packed: Path, single: Path, first: str) -> None:
    """The same archive with our own first step, which answers clearly on another Python and on a full disk."""
    first = first.replace('"@MINOR@"', repr(MINOR)).replace('"@MACHINE@"', repr(MACHINE))
    with zipfile.ZipFile(packed) as archive, single.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", compression=zipfile.ZIP_DEFLATED) as target:
            for entry in archive.infolist():
                content = first.encode() if entry.filename == "__main__.py" else archive.read(entry)
                copy = zipfile.ZipInfo(entry.filename, date_time=entry.date_time)
                copy.compress_type = zipfile.ZIP_DEFLATED
                copy.external_attr = (stat.S_IFREG | mode_of(entry)) << 16
                target.writestr(copy, content)
    single.chmod(0o755)


def mode_of(entry: zipfile.ZipInfo) -> int:
    return 0o755 if entry.external_attr >> 16 & 0o100 else 0o644


# Deb --------------------------------------------------------------------------------------------------------------


def build_deb(source: Path, work: Path, single: Path, output: Path) -> None:
    tree, here = work / "deb", source / "packaging" / "deb"
    for origin, target, mode in deb_files(source, work, single):
        place = tree / target
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, place)
        place.chmod(mode)
    link = tree / "usr/bin/vk-cocoon"
    link.parent.mkdir(parents=True)
    link.symlink_to("../lib/vk-cocoon/vk-cocoon.pyz")
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file()) // 1024
    control = (here / "control").read_text()
    major, minor = MINOR.split(".")
    values = {
        "VERSION": version(source),
        "ARCHITECTURE": DEB_ARCHITECTURES.get(MACHINE, MACHINE),
        "PYTHON": MINOR,
        "NEXT_PYTHON": f"{major}.{int(minor) + 1}",
        "SIZE": str(size),
    }
    for name, value in values.items():
        control = control.replace(f"@{name}@", value)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN" / "control").write_text(control)
    for script in ("postinst", "prerm", "postrm"):
        shutil.copyfile(here / script, tree / "DEBIAN" / script)
        (tree / "DEBIAN" / script).chmod(0o755)
    name = f"vk-cocoon_{version(source)}_{values['ARCHITECTURE']}.deb"
    for path in (tree, *tree.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", tree, output / name)


def deb_files(source: Path, work: Path, single: Path) -> Iterator[tuple[Path, str, int]]:
    """Source, place in the package, mode."""
    here, docs = source / "packaging", "usr/share/doc/vk-cocoon"
    unit = work / "vk-cocoon.service"
    text = (here / "vk-cocoon.service").read_text()
    assert "/usr/local/bin/vk-cocoon" in text
    unit.write_text(text.replace("/usr/local/bin/vk-cocoon", "/usr/bin/vk-cocoon"))
    yield single, "usr/lib/vk-cocoon/vk-cocoon.pyz", 0o755
    yield unit, "lib/systemd/system/vk-cocoon.service", 0o644
    yield here / "vk-cocoon.env.example", f"{docs}/vk-cocoon.env.example", 0o644
    yield here / "rbac.yaml", f"{docs}/rbac.yaml", 0o644
    yield here / "alerts.yml", f"{docs}/alerts.yml", 0o644
    yield source / "LICENSE", f"{docs}/copyright", 0o644
    yield source / "CHANGELOG.md", f"{docs}/changelog.md", 0o644
    for page in sorted((source / "docs").glob("*.*")):
        yield page, f"{docs}/docs/{page.name}", 0o644
    places = {
        "bash": "usr/share/bash-completion/completions/vk-cocoon",
        "zsh": "usr/share/zsh/vendor-completions/_vk-cocoon",
        "fish": "usr/share/fish/vendor_completions.d/vk-cocoon.fish",
    }
    for shell, place in places.items():
        script = work / f"completion.{shell}"
        script.write_text(run(sys.executable, single, "completion", shell, SHIV_ROOT=str(work / "unpacked")))
        yield script, place, 0o644


# Sums -------------------------------------------------------------------------------------------------------------


def artefacts(output: Path) -> Sequence[Path]:
    return sorted(path for path in output.iterdir() if path.suffix in (".whl", ".pyz", ".deb"))


def write_sums(output: Path) -> None:
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in artefacts(output)]
    (output / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    assert sysconfig.get_platform().startswith("linux"), "only on Linux"
    main()
