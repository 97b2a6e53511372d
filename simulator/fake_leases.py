"""cocoon-net as its neighbors see it: the lease file it writes and the control socket it answers.

`FakeCocoonNet` keeps leases as the daemon does, in memory first and in the file after every change. The file is real
and written the way the daemon writes it: a new one with a unique name beside it, renamed over the old one, rows in no
particular order, expired rows left in until the sweep of the minute. What the daemon never does but a reader must
survive (rewriting in place, half a document, a vanished file) is a fault and is asked for by name: `write("torn")`.

Time comes from the clock handed in and chance from `rng`, so one seed is one history. In a simulation, guests call
`request` and the provider's `release_lease` is bound to `release`; against a real daemon process, `serve` opens the
control socket. `close` ends both, and saves once more as the daemon does.
"""

from __future__ import annotations

import json
import logging
import os
import random
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from http import HTTPStatus
from ipaddress import IPv4Network
from typing import Any, Literal, NamedTuple, get_args

import gevent.socket
from gevent.event import Event
from gevent.pool import Group
from gevent.pywsgi import WSGIServer

from simulator.chance import branch
from vkcocoon_net import LeaseReleaseError, is_unicast_ipv4, normalize_mac
from vkcocoon_probes import Clock, spawn

__all__ = ["FakeCocoonNet", "Write"]

log = logging.getLogger("simulator.leases")

NETWORK = "10.88.0.0/24"
SWEEP_S = 60.0
LEASE_S = 86400
CONTROL_PREFIX = "/v1/leases/"

# How the file gets its next content. "rename" is the daemon's way, all others are faults.
Write = Literal[
    "rename",
    "in_place",  # truncate, then the whole document
    "torn",  # truncate, then half of it
    "same_stamp",  # in place with the old modification time, as a restoring tool does
    "empty",  # no byte at all
    "null",  # "no leases", whatever there is
    "two_documents",  # the document twice
    "object",  # wrapped in an object, as a newer daemon might
    "missing",  # no file
    "unreadable",  # a directory in its place: the one thing root cannot read either
]


class _Row(NamedTuple):
    ip: str
    expiry: datetime


class FakeCocoonNet:
    """One daemon with one pool. Addresses go out at random; the first of the network is the gateway.

    `on_change(mac, ip)` is told of every lease that is new, moved or gone ("" = gone); it must not switch greenlets.
    Knobs: `zone`, the host's time zone, in which the end of a lease is written; `frozen`, while True leases change in
    memory only and nothing but an explicit `write` touches the file; `failing_releases`, how many of the next release
    requests are answered with 500 because the file cannot be saved.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock,
        *,
        rng: random.Random,
        network: str = NETWORK,
        lease_seconds: int = LEASE_S,
    ) -> None:
        self.zone: tzinfo = UTC
        self.frozen = False
        self.failing_releases = 0
        self.on_change: Callable[[str, str], None] = lambda mac, ip: None
        self._path = os.fspath(path)
        self._clock = clock
        self._rng = rng
        self._pool = [str(host) for host in IPv4Network(network).hosts()][1:]
        self._duration = timedelta(seconds=lease_seconds)
        self._leases: dict[str, _Row] = {}
        self._stop = Event()
        self._group = Group()
        self._server: WSGIServer | None = None
        self._socket_path = ""

    # What guests do -----------------------------------------------------------------------------------------------

    def request(self, mac: str) -> str:
        """A guest asks for its address, first or again; the address, "" when the pool is used up (no offer comes).

        A known client keeps its address for another lease time. One that slept past its end is refused and gets
        another address, even when nobody took the old one.
        """
        mac = _checked(mac)
        known = self._leases.get(mac)
        ip = known.ip if known and self._clock.now() < known.expiry else self._free_address(mac)
        if ip:
            self.lease(mac, ip)
        return ip

    def lease(self, mac: str, ip: str, expiry: datetime | None = None) -> None:
        """Decide a lease: any address, also one that is taken, until `expiry` (aware; a full lease time if None)."""
        if not is_unicast_ipv4(ip):
            raise ValueError(f"{ip!r} is not a unicast IPv4 address")
        end = expiry if expiry is not None else (self._clock.now() + self._duration).astimezone(self.zone)
        mac = _checked(mac)
        before = self._leases.get(mac)
        self._leases[mac] = _Row(ip, end)
        if before is None or before.ip != ip:
            self.on_change(mac, ip)
        self._save()

    def address(self, mac: str) -> str:
        """The address `mac` holds in memory, expired or not; "" when it holds none."""
        row = self._leases.get(_checked(mac))
        return row.ip if row else ""

    def _free_address(self, mac: str) -> str:
        taken, rng = {row.ip for row in self._leases.values()}, branch(self._rng, "address", mac)
        # Mostly not what is left over by the others, so that they do not matter for what this one gets.
        if (first := rng.choice(self._pool)) not in taken:
            return first
        free = [ip for ip in self._pool if ip not in taken]
        return rng.choice(free) if free else ""

    # What the provider does ---------------------------------------------------------------------------------------

    def release(self, mac: str, socket_path: str = "") -> None:
        """What `vkcocoon_net.release_lease` does, without the socket: same normalization, retry and errors."""
        if not normalize_mac(mac):
            raise LeaseReleaseError(f"{mac!r} is not a MAC address")
        status, text = self._answer("DELETE", CONTROL_PREFIX + mac)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            status, text = self._answer("DELETE", CONTROL_PREFIX + mac)
        if status != HTTPStatus.NO_CONTENT:
            raise LeaseReleaseError(f"cocoon-net answered {status} to the release of {mac}: {text.strip()}")

    def _answer(self, method: str, path: str) -> tuple[HTTPStatus, str]:
        if not path.startswith(CONTROL_PREFIX):
            return HTTPStatus.NOT_FOUND, "404 page not found\n"
        if method != "DELETE":
            return HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed\n"
        mac = normalize_mac(path.removeprefix(CONTROL_PREFIX))
        if not mac:
            return HTTPStatus.BAD_REQUEST, "invalid MAC address\n"
        if self.failing_releases > 0:
            self.failing_releases -= 1
            return HTTPStatus.INTERNAL_SERVER_ERROR, "lease release failed\n"
        if self._leases.pop(mac, None):
            self.on_change(mac, "")
            self._save()
        return HTTPStatus.NO_CONTENT, ""

    # What the daemon does by itself -------------------------------------------------------------------------------

    def start(self) -> None:
        """Sweep once a minute from now on."""
        spawn(self._group, "cocoon-net sweep", self._sweep_for_ever)

    def sweep(self) -> None:
        """Drop what has expired; the file is written only when something was."""
        now = self._clock.now()
        expired = [mac for mac, row in self._leases.items() if row.expiry <= now]
        for mac in expired:
            del self._leases[mac]
            self.on_change(mac, "")
        if expired:
            self._save()

    def forget_file(self) -> None:
        """The daemon lost its state: no file, nothing in memory. Living guests come back when they renew."""
        self._leases.clear()
        self.write("missing")

    def restart(self) -> None:
        """Start anew from the file. Rows that are odd or over are dropped silently; nothing is written yet."""
        self._leases.clear()
        try:
            with open(self._path, "rb") as file:
                rows = json.load(file)
        except (OSError, ValueError):
            return
        for row in rows if isinstance(rows, list) else []:
            with suppress(KeyError, TypeError, ValueError):
                end = datetime.fromisoformat(row["expiry"])
                if end > self._clock.now() and is_unicast_ipv4(row["ip"]):
                    self._leases[_checked(row["mac"])] = _Row(row["ip"], end)

    def close(self) -> None:
        """Shut down cleanly: no more sweeps, no socket, the file saved once more."""
        self._stop.set()
        if self._server:
            self._server.stop(timeout=0)
            self._server = None
            with suppress(FileNotFoundError):
                os.unlink(self._socket_path)
        self.write()

    def _sweep_for_ever(self) -> None:
        while not self._clock.wait(self._stop, SWEEP_S):
            self.sweep()

    # The file -----------------------------------------------------------------------------------------------------

    def write(self, how: Write = "rename") -> None:
        """Bring the file up to date in the daemon's way, or spoil it in one of the others (see `Write`)."""
        if how not in get_args(Write):
            raise ValueError(f"cannot write a lease file {how!r}; known: {', '.join(get_args(Write))}")
        document = self._document()
        self._clear_directory()
        if how == "rename":
            self._replace(document)
        elif how == "missing":
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        elif how == "unreadable":
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            os.mkdir(self._path)
        else:
            self._overwrite(_spoiled(document, how), keep_mtime=how == "same_stamp")

    def _save(self) -> None:
        if not self.frozen:
            self.write()

    def _document(self) -> bytes:
        """An array with two spaces of indentation and no line end; the four letters "null" for no leases."""
        macs = sorted(self._leases)
        self._rng.shuffle(macs)
        rows = ",\n".join(_entry(mac, self._leases[mac]) for mac in macs)
        return f"[\n{rows}\n]".encode() if rows else b"null"

    def _replace(self, document: bytes) -> None:
        draft = os.path.join(os.path.dirname(self._path), f"leases-{self._rng.randrange(10**9, 4 * 10**9)}.json")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(document)
            file.flush()
            os.fchmod(descriptor, 0o644)
        os.rename(draft, self._path)

    def _overwrite(self, content: bytes, *, keep_mtime: bool) -> None:
        before = os.stat(self._path).st_mtime_ns if keep_mtime and os.path.exists(self._path) else None
        with open(self._path, "wb") as file:
            file.write(content)
        if before is not None:
            os.utime(self._path, ns=(before, before))

    def _clear_directory(self) -> None:
        """Undo an earlier write("unreadable")."""
        if os.path.isdir(self._path):
            os.rmdir(self._path)

    # The control socket -------------------------------------------------------------------------------------------

    def serve(self, socket_path: str | os.PathLike[str]) -> None:
        """Answer releases on a unix socket that only this user may use. Raises OSError when the name is taken."""
        self._socket_path = os.fspath(socket_path)
        self._server = WSGIServer(_listen(self._socket_path), self._application, log=None, error_log=log)
        self._server.start()

    def _application(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        status, text = self._answer(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        headers = [("Content-Type", "text/plain; charset=utf-8")] if text else []
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "DELETE"))
        start_response(f"{status.value} {status.phrase}", headers)
        return [text.encode()] if text else []


def _checked(mac: str) -> str:
    normal = normalize_mac(mac)
    if not normal:
        raise ValueError(f"{mac!r} is not a MAC address")
    return normal


def _entry(mac: str, row: _Row) -> str:
    # Written out rather than dumped: many saves of many rows are most of what a big simulation does.
    end = row.expiry.isoformat(timespec="seconds").replace("+00:00", "Z")
    return f'''  {{
    "mac": "{mac}",
    "ip": "{row.ip}",
    "expiry": "{end}"
  }}'''


def _spoiled(document: bytes, how: Write) -> bytes:
    if how == "torn":
        return document[: len(document) // 2]
    if how == "empty":
        return b""
    if how == "null":
        return b"null"
    if how == "two_documents":
        return document + b"\n" + document
    if how == "object":
        return b'{"leases": ' + document + b"}"
    return document


def _listen(path: str) -> gevent.socket.socket:
    """A listener in place of an older one; a file of another kind under that name is left alone and refused."""
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = gevent.socket.socket(gevent.socket.AF_UNIX, gevent.socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(16)
    return listener
