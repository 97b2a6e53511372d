"""A root to install into and throw away: this host's own, with everything that is written kept in memory.

An overlay in a mount namespace of its own, so packages are installed, upgraded and removed by the real dpkg with their
scripts, and nothing of it reaches the host. There is no systemd in it: `systemctl` notes what it is asked, and when it
is asked to stop the unit, ends the process whose number is in /run/vk-cocoon.pid with SIGTERM and waits for its end,
as systemd does under KillMode=process. Needs root.
"""

import shlex
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

CHROOT = (
    shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin:/bin") or "chroot"
)  # also for whoever has no sbin in PATH
HOLD = """
set -e
mount -t tmpfs -o size=2g none {place}
mkdir {place}/upper {place}/work {place}/whole
mount -t overlay -o lowerdir=/,upperdir={place}/upper,workdir={place}/work none {place}/whole
for shared in proc dev tmp; do mount --rbind /$shared {place}/whole/$shared; done
echo ready
exec sleep infinity
"""
SYSTEMCTL = """#!/bin/sh
echo "$*" >>/run/systemctl.log
case "$*" in
*disable*--now*)
    main=$(cat /run/vk-cocoon.pid) && kill -TERM "$main"
    while kill -0 "$main" 2>/dev/null; do sleep 0.1; done ;;
esac
"""


class ThrowAwayRoot:
    """Entered, it exists; left, it and every process in it are gone."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self._place = place

    def __enter__(self) -> "ThrowAwayRoot":
        script = HOLD.format(place=shlex.quote(str(self._place)))
        self._holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "no root can be made: it takes root and overlayfs"
        self.run("mkdir", "-p", "/run/systemd/system", "/etc/cocoon")
        self.write("/usr/local/sbin/systemctl", SYSTEMCTL, 0o755)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()

    def argv(self, *words: str) -> list[str]:
        """What runs `words` in it; the process that is started becomes that program."""
        return ["nsenter", f"--target={self._holder.pid}", "--mount", CHROOT, f"{self._place}/whole", *words]

    def run(self, *words: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environ = {
            "PATH": path,
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
            "SHIV_ROOT": "/var/cache/vk-cocoon",
        }
        return subprocess.run(
            self.argv(*words),
            env=environ,
            cwd="/",
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def has(self, path: str) -> bool:
        return self.run("test", "-e", path).returncode == 0

    def write(self, path: str, text: str, mode: int) -> None:
        assert self.run("sh", "-c", f"umask 077; cat >{path} && chmod {mode:o} {path}", text=text).returncode == 0

    def asked_of_systemd(self) -> list[str]:
        """What systemctl was asked since the last look."""
        found = self.run("sh", "-c", "cat /run/systemctl.log 2>/dev/null; : >/run/systemctl.log").stdout
        return found.splitlines()
