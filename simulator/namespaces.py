"""A corner of the kernel for one program: its own processes, mounts, network and host name, gone with its last process.

    python -m simulator.namespaces --kind user --home /run/playground --parent PID -- COMMAND ARGUMENTS...

runs COMMAND in there, with an empty tmpfs as its home. Three processes stand behind one another:

    the caller -> the watcher (this program) -> init, process 1 of the new namespace -> COMMAND

Each dies with the one before it (PR_SET_PDEATHSIG), and when init is gone the kernel kills everything in its process
namespace and takes apart its mounts and links. So nothing of it survives whichever process is killed, in whatever way.
Init reaps: the guests are daemons, and a dead one must not stay a zombie, which would look alive by its pid.

Where the kernel refuses namespaces (`refusals` tries, and says why), the kind `none` runs COMMAND without any: the
watcher then finds what belongs to it by a mark in the environment, kills that, and removes the home directory.

Written without gevent and threads, because both are in the way of unshare and fork; uses nothing but the kernel.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from simulator.netlink import Netlink

__all__ = [
    "KINDS",
    "MARK",
    "Refused",
    "available",
    "code_path",
    "die_with_parent",
    "environment",
    "free_directory",
    "lay_cable",
    "leave_network",
    "open_network",
    "sweep",
    "temporary_home",
    "watcher_command",
    "without_raw_sockets",
]

KINDS = ("root", "user")  # in the order they are tried: root needs no user namespace, and then maps nothing
MARK = "PLAYGROUND_TOKEN"  # carries a token through the environment of everything that belongs to one playground
OUTER_PID = "PLAYGROUND_PID"  # how the host calls the init process: its way in through /proc
TMPFS_OPTIONS = "mode=0755,size=256m"
HOST_NAME = "playground"
KILLED = 128  # plus the signal: the exit code of a command that a signal ended, as shells count

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_CAP_NET_RAW = 13

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel does not allow one step; the message names the step and the kernel's reason."""


# System calls -----------------------------------------------------------------------------------------------------


def _check(step: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise Refused(f"{step}: {os.strerror(code)}")


def _unshare(step: str, flags: int) -> None:
    _check(step, _libc.unshare(ctypes.c_int(flags)))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word.encode() if word else None for word in (source, target, kind, options)]
    step = f"mount {kind} on {target}" if kind else f"make {target} private"
    _check(step, _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `signum` when its parent dies. Lost by whoever gains capabilities later."""
    _check("prctl", _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0))


def without_raw_sockets() -> None:
    """`die_with_parent`, and no raw sockets for what is run next, root or not."""
    die_with_parent()
    _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(_CAP_NET_RAW), 0, 0, 0)  # who may not drop it has none to begin with


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"{name}: {error.strerror or error}") from error


# Networks of the guests -------------------------------------------------------------------------------------------


def open_network(bridge: str, address: str, prefix: int) -> None:
    """Lay the bridge of this namespace and give it its address."""
    with contextlib.closing(Netlink()) as links:
        links.add_bridge(bridge)
        links.add_address(socket.if_nametoindex(bridge), address, prefix)


def leave_network() -> tuple[Netlink, Netlink]:
    """Move this process to a network namespace of its own, where `lo` is up and nothing else is there.

    Returns the netlink socket of the namespace it left and that of its own. Raises Refused or OSError.
    """
    outside = Netlink()
    _unshare("new network namespace", _CLONE_NEWNET)
    inside = Netlink()
    inside.set_up("lo")
    return outside, inside


def lay_cable(outside: Netlink, master: int, cable: str, mac: str) -> None:
    """Plug this process's network namespace into the bridge with index `master` in the namespace of `outside`.

    `cable` is the name of the bridge's end. Ours is called `eth0`, has the address `mac` and is still down. Raises
    OSError.
    """
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        outside.add_veth(cable, master=master, peer="eth0", peer_mac=mac, peer_namespace=here)
    finally:
        os.close(here)


# The watcher and its init -----------------------------------------------------------------------------------------


def watcher_command(kind: str, home: str, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in namespaces of this kind (or none) and dies with the calling process."""
    parent = str(os.getpid())
    head = [sys.executable, "-m", "simulator.namespaces", "--kind", kind, "--home", home, "--parent", parent]
    return [*head, "--", *command]


def _watch(kind: str, home: str, parent: int, command: Sequence[str]) -> int:
    """Run the command to its end, or until our parent is gone; returns its exit code. Nothing of it is left then."""
    # Blocked and waited for, so that a death between two looks is not missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    _follow(parent)
    try:
        if kind == "none":
            child = _fork(lambda: _execute(command))
        else:
            _enter(kind, parent)
            child = _fork(lambda: _init(home, command))
        return _wait_for(child)
    finally:
        if kind == "none":
            sweep(os.environ[MARK])
            shutil.rmtree(home, ignore_errors=True)


def _follow(parent: int) -> None:
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise Refused("the process that asked for this is gone")


def _wait_for(child: int) -> int:
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return _exit_code(status)


def _enter(kind: str, parent: int) -> None:
    """Leave all the host's namespaces but the process one, which only children change."""
    if kind == "user":
        uid, gid = os.geteuid(), os.getegid()
        _unshare("new user namespace", _CLONE_NEWUSER)
        with _step("map the user"):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        # The kernel forgets the request when a process gains capabilities, which it just did.
        _follow(parent)
    _unshare("new namespaces", _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS)


def _fork(body: Callable[[], object]) -> int:
    """A child that runs `body` and dies with us even when we die before it could ask for that."""
    alive, ours = os.pipe()
    child = os.fork()
    if child:
        os.close(alive)
        return child
    try:
        os.close(ours)
        die_with_parent(signal.SIGKILL)
        if select.select([alive], [], [], 0)[0]:  # end of file: nobody holds the other end any more
            os._exit(KILLED + signal.SIGKILL)
        os.close(alive)
        body()
    except Exception as error:  # noqa: BLE001  the root of a forked process: nothing may run on into our caller's code
        sys.stderr.write(f"playground: {error}\n")
    finally:
        os._exit(1)


def _init(home: str, command: Sequence[str]) -> NoReturn:
    os.environ[OUTER_PID] = os.readlink("/proc/self")  # the host's /proc still: its number for us
    _furnish(home)
    child = _fork(lambda: _execute(command))
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(_exit_code(status))


def _furnish(home: str) -> None:
    """Private mounts, our own /proc, an empty home, a loopback link."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    top = str(Path(home).parent)
    os.chdir("/")  # nobody may still stand in what gets covered
    _mount("tmpfs", top, "tmpfs", _MS_NOSUID | _MS_NODEV, TMPFS_OPTIONS)
    os.mkdir(home)
    with _step("set the host name"):
        socket.sethostname(HOST_NAME)
    with _step("set lo up"), contextlib.closing(Netlink()) as links:
        links.set_up("lo")


def _execute(command: Sequence[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.execvp(command[0], list(command))


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return KILLED - code if code < 0 else code


# What the caller asks ---------------------------------------------------------------------------------------------


def available() -> tuple[str, list[str]]:
    """The kind of namespaces this kernel allows us, "" when none, and one sentence for each kind it refused.

    Tries each for real in a short-lived process, down to a bridge and a guest's cable: some kernels grant an empty
    namespace and refuse what makes it useful.
    """
    reasons: list[str] = []
    for kind in KINDS:
        if kind == "root" and os.geteuid() != 0:
            continue
        home = free_directory()
        trial = watcher_command(kind, home, [sys.executable, "-m", "simulator.namespaces", "--try-network"])
        done = subprocess.run(trial, capture_output=True, text=True, check=False, env=environment())
        if done.returncode == 0:
            return kind, reasons
        reasons.append((done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("playground: "))
    return "", reasons


def free_directory(*needed_too: str) -> str:
    """Where an empty home can be mounted without hiding anything that we run from, or these. Nothing is made there
    yet."""
    places = (sys.prefix, sys.base_prefix, sys.executable, *code_path().split(":"), *needed_too)
    needed = [Path(place).resolve() for place in places]
    for top in ("/run", "/mnt", "/srv", "/media", "/opt", "/tmp"):
        if os.path.isdir(top) and not any(place.is_relative_to(top) for place in needed):
            return f"{top}/playground"
    raise Refused("no directory such as /run or /mnt can be covered: the program itself lies in each of them")


def temporary_home() -> str:
    """An empty directory for a world without namespaces. Its path is short: it has to hold the paths of sockets."""
    top = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="vk-cocoon-", dir=top if len(top) <= 24 else "/tmp")


def environment(**more: str) -> dict[str, str]:
    """The environment for our own programs: nothing of the user's configuration, and our code found from anywhere."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TERM") if name in os.environ}
    return {**kept, "PYTHONPATH": code_path(), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **more}


def code_path() -> str:
    """The directories that hold our modules and the installed ones, as PYTHONPATH has them."""
    found = [str(Path(__file__).resolve().parent.parent)]
    for name in ("vkcocoon_probes", "gevent"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            path = Path(spec.origin).resolve().parent
            found.append(str(path.parent if path.name == name else path))
    return ":".join(dict.fromkeys(found))


def sweep(token: str) -> None:
    """Kill whatever carries this token in its environment, until nothing does. Never ourselves."""
    while marked := [pid for pid in _marked(token) if pid != os.getpid()]:
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Reap what was ours; of the others the kernel makes short work, and a zombie has no environment any more.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _marked(token: str) -> Iterator[int]:
    wanted = f"{MARK}={token}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    yield int(entry)


def _try_network() -> None:
    open_network("cni0", "10.88.0.1", 24)
    master = socket.if_nametoindex("cni0")
    lay_cable(leave_network()[0], master, "tap1", "0a:58:0a:58:00:02")
    with _step("open a raw ICMP socket"):
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.namespaces", description="Run a command in namespaces.")
    parser.add_argument("--kind", choices=[*KINDS, "none"])
    parser.add_argument("--home", help="an empty directory in there; its parent is covered by a tmpfs")
    parser.add_argument("--parent", type=int, help="end with this process, which must be the one that started us")
    parser.add_argument("--try-network", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(arguments)
    try:
        if options.try_network:
            _try_network()
            return 0
        return _watch(options.kind, options.home, options.parent, options.command)
    except (Refused, OSError) as error:
        sys.stderr.write(f"playground: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
