"""The window in the daemon's wall: a socket on this host where root may look in, and a page for browsers.

    /run/vk-cocoon/status.sock   GET /status: the document of vkcocoon_overview; root only (D4)
    VK_STATUS_ADDR               GET /: the page; GET /status.json: the same document; loopback unless told otherwise

Both are served within the bounds of vkcocoon_server and only ever show; there is nothing to change through them. The
daemon works without either: one that cannot be opened is one warning.

A socket file that a dead daemon left behind is replaced; one on which somebody answers is not, and neither is a file
that is no socket. `ask` is the client's end, for `vk-cocoon status`; it is the only part that may block.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from vkcocoon_page import page
from vkcocoon_probes import Clock
from vkcocoon_server import BoundedServer, CannotListen, Limits, listen, text_answer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

__all__ = ["NoAnswer", "StatusPage", "StatusSocket", "ask"]

log = structlog.get_logger()

Document = dict[str, Any]

ASK_S = 5.0
HTML, JSON = "text/html; charset=utf-8", "application/json"
# The page needs nothing from anywhere and may not be put into somebody else's.
FENCES = [
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
]


class _Window:
    """Serves some paths on a listening socket; `_views` maps a path to what renders the document for it."""

    _views: dict[str, tuple[str, Callable[[Document], str]]]

    def __init__(self, document: Callable[[], Document], *, clock: Clock) -> None:
        self._document = document
        self._clock = clock
        self._server: BoundedServer | None = None

    def _serve(self, listener: socket.socket) -> None:
        self._server = BoundedServer(listener, self._answer, clock=self._clock, limits=Limits())
        self._server.start()

    def close(self) -> None:
        """Stop at once; safe to repeat."""
        if self._server is not None:
            self._server.close_all()
            self._server = None

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        view = self._views.get(environ["PATH_INFO"])
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return text_answer(environ, start_response, HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
        if not self._known(environ.get("HTTP_HOST", "")):
            return text_answer(environ, start_response, HTTPStatus.FORBIDDEN, "ask for this page by its address")
        if view is None:
            return text_answer(environ, start_response, HTTPStatus.NOT_FOUND, f"try {' or '.join(self._views)}")
        kind, render = view
        body = render(self._document()).encode()
        headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")]
        start_response("200 OK", [*headers, *FENCES, ("Connection", "close")])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _known(self, host: str) -> bool:
        return True


class StatusSocket(_Window):
    """The socket at `path`, for root (or whoever runs the daemon) alone."""

    _views = {"/status": (JSON, json.dumps)}

    def __init__(self, path: str, document: Callable[[], Document], *, clock: Clock) -> None:
        super().__init__(document, clock=clock)
        self._path = path
        self._inode = 0

    def start(self) -> None:
        """Raises CannotListen."""
        try:
            listener = self._listen()
        except OSError as error:
            raise CannotListen(f"VK_STATUS_SOCKET: cannot listen on {self._path}: {error.strerror or error}") from error
        self._inode = os.stat(self._path).st_ino
        self._serve(listener)

    def close(self) -> None:
        was_open = self._server is not None
        super().close()
        with contextlib.suppress(OSError):
            if was_open and os.stat(self._path).st_ino == self._inode:  # not what a successor put there
                os.unlink(self._path)

    def _listen(self) -> socket.socket:
        # Only the last directory: of a path whose beginning is mistyped nothing should appear.
        Path(self._path).parent.mkdir(mode=0o700, exist_ok=True)
        self._clear()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)  # no moment in which others could connect
        try:
            listener.bind(self._path)
            listener.listen(16)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(mask)
        return listener

    def _clear(self) -> None:
        """Take away what a daemon left behind that did not end by itself."""
        try:
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                raise CannotListen(
                    f"VK_STATUS_SOCKET: cannot listen on {self._path}: there is a file that is no socket"
                )
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._path)
            except (ConnectionRefusedError, FileNotFoundError):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
                return
            except BlockingIOError:  # somebody is there and busy
                pass
        raise CannotListen(f"VK_STATUS_SOCKET: cannot listen on {self._path}: another vk-cocoon answers there")


class StatusPage(_Window):
    """The page at `addr`; `address` is where it really is, once started."""

    _views = {"/": (HTML, page), "/status.json": (JSON, json.dumps)}

    def __init__(self, addr: tuple[str, int], document: Callable[[], Document], *, clock: Clock) -> None:
        super().__init__(document, clock=clock)
        self.address = addr

    def start(self) -> None:
        """Raises CannotListen."""
        listener = listen(self.address, "VK_STATUS_ADDR")
        self._local = listener.getsockname()[0].startswith(("127.", "::1"))
        self.address = listener.getsockname()[:2]
        self._serve(listener)
        log.info("serving the status page", host=self.address[0], port=self.address[1])

    def _known(self, host: str) -> bool:
        """A page on loopback is for this host: a name that leads here by somebody's DNS is no way in."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return (
            not self._local or name in ("", "localhost", "[::1]") or re.fullmatch(r"127(\.[0-9]+){3}", name) is not None
        )


class NoAnswer(Exception):
    """The daemon cannot be asked; `str()` is one line saying why and what to do."""


def ask(path: str, *, limit: float = ASK_S) -> Document:
    """The document of the daemon behind the socket. Raises NoAnswer. Blocks for `limit` seconds at most each time."""
    connection = http.client.HTTPConnection("localhost", timeout=limit)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(limit)
            channel.connect(path)
            connection.sock = channel
            connection.request("GET", "/status")
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != HTTPStatus.OK:
            raise NoAnswer(f"the daemon behind {path} answers {answer.status} {answer.reason}; is it another version?")
    except PermissionError:
        raise NoAnswer(f"{path} is for root only; run this as root") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise NoAnswer(
            f"vk-cocoon does not run here: nobody answers at {path}; see systemctl status vk-cocoon"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(f"the daemon behind {path} does not answer: {str(error) or type(error).__name__}") from error
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoAnswer(f"the daemon behind {path} answers something else: {error}") from None
    if wrong := _wrong(document, _DOCUMENT, ""):
        version = document.get("version") if isinstance(document, dict) else None
        raise NoAnswer(
            f"the daemon behind {path} answers something else: {wrong}; "
            f"it is {f'version {version}' if isinstance(version, str) else 'another version'}; "
            "if it is vk-cocoon, systemctl restart vk-cocoon lets it run the version that is installed"
        )
    found: Document = document
    return found


# What the commands read of the document (vkcocoon_overview makes it). Another version may say more.
_TEXT, _NUMBER, _FLAG = (str,), (int, float), (bool,)
_LAST_PROBE = {"took_seconds": _NUMBER, "failures": _NUMBER, "failure_threshold": _NUMBER, "next_seconds": _NUMBER}
_POD = {
    **dict.fromkeys(("namespace", "name", "uid", "os", "vm", "ip", "probe", "lifecycle", "reason", "message"), _TEXT),
    "ready": _FLAG,
    "published": _FLAG,
    "restarts": _NUMBER,
    "since": (str, type(None)),
    "last_probe": (_LAST_PROBE, type(None)),
}
_DOCUMENT = {
    "node": _TEXT,
    "version": _TEXT,
    "uptime_seconds": _NUMBER,
    "pinger_degraded": _FLAG,
    "checks": [{"name": _TEXT, "trouble": _TEXT}],
    "pods": [_POD],
}


def _wrong(given: Any, wanted: Any, where: str) -> str:
    """What in ``given`` is not as ``wanted``: types, a list of one such form, or a mapping; "" when all is."""
    if isinstance(wanted, tuple):
        forms = [form for form in wanted if isinstance(form, dict)]
        if isinstance(given, tuple(form for form in wanted if isinstance(form, type))):
            return ""
        return _wrong(given, forms[0], where) if forms else f"{where} is {type(given).__name__}"
    kind = type(wanted)
    if not isinstance(given, kind):
        return f"{where or 'the document'} is {type(given).__name__} and no {kind.__name__}"
    if isinstance(wanted, list):
        found = (_wrong(each, wanted[0], f"{where}[{number}]") for number, each in enumerate(given))
    else:
        dot = f"{where}." if where else ""
        found = (
            _wrong(given[name], form, dot + name) if name in given else f"{dot}{name} is missing"
            for name, form in wanted.items()
        )
    return next(filter(None, found), "")
