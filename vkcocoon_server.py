"""HTTP servers that no client can use to hurt the probes: the bounds of everything this process serves.

A request has a size, a time and a number of neighbors it may have, one connection carries one request, and anything
outside is cut off. With TLS the handshake has a time of its own, and the context is asked for anew at each connection,
so that certificates change without a restart. What a client may see is decided by the application; what it may cost,
here.

When all places are taken, the client that has kept us waiting goes (for its handshake, its request, or to take its
answer): first the oldest one of the address that has most of them. So whoever says what they want at once is answered,
however many others hold connections open. A request that is being worked on is never cut off for another.

Answers that have no end of their own (a log that is followed) are a `Stream`. It is outside the time of a request and
has other bounds instead: its source runs in a greenlet that ends with the answer, at most about `BUFFER` bytes wait for
a slow reader, a reader that takes nothing for `Limits.stall_s` is cut off, and one that hangs up ends the source at
once, also while there is nothing to send.

Used by vkcocoon_http (metrics, health) and vkcocoon_kubelet (the kubelet API). `BoundedServer` is a gevent WSGI server:
its greenlets belong to its pool and end with `close`.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus, client
from typing import TYPE_CHECKING, Any

import gevent.pool
import gevent.pywsgi
import structlog
from gevent import getcurrent
from gevent.event import Event
from gevent.pool import Group

from vkcocoon_probes import Clock, ProbeTimeout, spawn

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["PEER", "BoundedServer", "CannotListen", "Limits", "Stream", "listen", "text_answer"]

log = structlog.get_logger()

PEER = "vkcocoon.peer"  # in the environment of a request: the client's verified certificate, as getpeercert() has it

BUFFER = 256 * 1024  # bytes of a stream that wait for their reader; more than one read of a source, and little enough
LOOK_S = 1.0  # how often a stream that has nothing to send looks whether what it is about is still there
PIECE = 4096
# A client whose host has died is noticed after about a minute, also while nothing is sent to it.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class CannotListen(Exception):
    """The address cannot be listened on now; `str()` is one line naming it and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may cost. The defaults are for a scraper: some hundred bytes of request, some milliseconds."""

    request_bytes: int = 16 * 1024  # head and body; what follows on the same connection counts, too
    request_s: float = 10.0  # from the first byte to the last of the answer
    at_once: int = 32  # connections; for one more, somebody who keeps us waiting must go, or it waits in the kernel
    handshake_s: float = 5.0
    stall_s: float = 900.0  # of a stream; somebody who reads a log in a pager may well pause for some minutes


def listen(addr: tuple[str, int], setting: str) -> socket.socket:
    """A listening socket; without a host on every interface, for IPv6 too where there is any.

    Raises CannotListen, naming the setting where the address comes from.
    """
    host, port = addr
    try:
        if not host and socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            except OSError:  # compiled in, but switched off on this host; or truly in use, as the next try will tell
                pass
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # The library adds the address to its own text; a name that cannot be resolved has a negative number.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        taken = f"; who has it: ss -ltnp 'sport = :{port}'" if error.errno == errno.EADDRINUSE else ""
        raise CannotListen(f"{setting}: cannot listen on {shown}: {why}{taken}") from error


def text_answer(
    environ: WSGIEnvironment,
    start_response: StartResponse,
    status: HTTPStatus,
    text: str,
    headers: Sequence[tuple[str, str]] = (),
) -> Iterable[bytes]:
    """A small answer for people: `text` and a newline."""
    body = f"{text}\n".encode()
    fixed = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
        ("Connection", "close"),
    ]
    start_response(f"{status.value} {status.phrase}", [*fixed, *headers])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


# Streams ----------------------------------------------------------------------------------------------------------


class Stream:
    """An answer that may go on for ever: an application returns it in place of a body.

    `source` is iterated in a greenlet of its own, from `open` to `close`; leaving the iteration must end whatever is
    behind it. The answer ends when the source does, when `alive` says so (asked every `LOOK_S` while there is nothing
    to send; it must not wait), or when the client hangs up. What the source raises after its first piece cuts the
    connection without the end of the body, so that the client knows that something is missing.
    """

    def __init__(
        self, source: Iterable[bytes], *, clock: Clock, name: str, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._source = source
        self._clock = clock
        self._name = name
        self._alive = alive
        self._pieces: list[bytes] = []
        self._waiting = 0  # bytes in them
        self._changed = Event()
        self._room = Event()
        self._ended = False
        self._error: Exception | None = None
        self._gone = False
        self._group = Group()
        self.closed = False

    def open(self, patience: float | None) -> None:
        """Start the source, and wait `patience` seconds for its first word. Raises what it raised without one."""
        spawn(self._group, self._name, self._pump)
        self._clock.wait(self._changed, patience)
        if self._error is not None and not self._pieces:
            raise self._error

    def hang_up(self) -> None:
        """The client is gone."""
        self._gone = True
        self._changed.set()

    def close(self) -> None:
        """End the source; safe to repeat."""
        self.closed = True
        self._group.kill(block=False)

    def __iter__(self) -> Iterator[bytes]:
        """What there is, in pieces as large as the reader is slow."""
        while not self._gone:
            self._changed.clear()
            if self._pieces:
                piece, self._pieces, self._waiting = b"".join(self._pieces), [], 0
                self._room.set()
                yield piece
            elif self._ended or not self._alive():
                break
            else:
                self._clock.wait(self._changed, LOOK_S)
        if self._error is not None and not self._gone and self._alive():
            raise self._error

    def _pump(self) -> None:
        try:
            for piece in self._source:
                self._pieces.append(piece)
                self._waiting += len(piece)
                self._changed.set()
                while self._waiting >= BUFFER:
                    self._room.clear()
                    self._clock.wait(self._room, None)
        except Exception as error:  # noqa: BLE001  it belongs to whoever reads the stream
            self._error = error
        finally:
            self._ended = True
            self._changed.set()
            if isinstance(self._source, Iterator) and hasattr(self._source, "close"):
                self._source.close()


# One request ------------------------------------------------------------------------------------------------------


class _TooLarge(OSError, ValueError):
    """Both, because the WSGI server answers 400 to a ValueError in a head and drops an OSError in a body quietly."""


class _Place:
    """One connection among those of a server: whose it is, and whether it is the client we wait for."""

    def __init__(self, greenlet: Any, host: str) -> None:
        self.greenlet = greenlet  # of the server's pool
        self.host = host
        self.waits = False
        self.streams = False  # an answer without an end has bounds of its own, and is not in the way of its client

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits = not self.streams
        try:
            yield
        finally:
            self.waits = False


class _BoundedReader(io.RawIOBase):
    """Reads at most so many bytes of one connection."""

    def __init__(self, sock: socket.socket, limit: int, place: _Place) -> None:
        self._sock = sock
        self._left = limit
        self._place = place

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise _TooLarge("the request is larger than anything served here could need")
        with self._place.waiting():
            read = self._sock.recv_into(memoryview(buffer)[: self._left])
        self._left -= read
        return read


class _Rest:
    """What an application left of the body of a request."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def _discard(self) -> None:
        """Read it, so that the answer is not lost in a reset. Raises OSError when it is not what a body looks like."""
        try:
            self._body._discard()
        except ValueError as error:  # the library reports this one as a failure of the application
            raise OSError(str(error)) from error


class _Handler(gevent.pywsgi.WSGIHandler):
    """One request on one connection, within its bounds."""

    server: BoundedServer

    def __init__(self, sock: Any, address: Any, server: Any) -> None:
        super().__init__(sock, address, server)
        self._place: _Place = server.place()
        self.rfile = io.BufferedReader(_BoundedReader(sock, server.limits.request_bytes, self._place))
        self._stream: Stream | None = None

    def handle(self) -> None:
        try:
            super().handle()
        except ProbeTimeout:
            log.debug("a client was too slow and was cut off", client=str(self.client_address))
        except OSError as error:
            log.debug("a client went away", client=str(self.client_address), error=str(error))
        finally:
            if self._stream is not None:
                self._stream.close()

    def handle_one_request(self) -> Any:
        with self.server.clock.timeout(self.server.limits.request_s):
            answer = super().handle_one_request()
        if self._stream is not None:
            self._send(self._stream)
        return answer

    def read_request(self, raw_requestline: str) -> Any:
        understood = super().read_request(raw_requestline)
        self.close_connection = True
        return understood

    def get_environ(self) -> Any:
        environ = super().get_environ()
        rest: Any = _Rest(self.wsgi_input)
        self.wsgi_input = rest
        if isinstance(self.socket, ssl.SSLSocket):
            environ[PEER] = self.socket.getpeercert()
        return environ

    def _sendall(self, data: Any) -> None:
        with self._place.waiting():
            super()._sendall(data)  # type: ignore[misc]  # the stubs leave it out

    def process_result(self) -> None:
        if isinstance(self.result, Stream):
            # Sent later, when the time of the request no longer counts; the library must not close it before.
            self._stream, self.result = self.result, None
        else:
            super().process_result()

    def _send(self, stream: Stream) -> None:
        clock, stall_s = self.server.clock, self.server.limits.stall_s
        attention = Group()
        self._place.streams = True
        try:
            spawn(attention, f"listen to {self.client_address}", self._listen, stream)
            for option, value in KEEPALIVE:
                self.socket.setsockopt(socket.IPPROTO_TCP, option, value)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.write(b"")  # the head alone: the first word may be hours away
            for piece in stream:
                with clock.timeout(stall_s):
                    self.write(piece)
            if self.response_use_chunked:
                with clock.timeout(stall_s):
                    self.socket.sendall(b"0\r\n\r\n")
        except (ProbeTimeout, OSError):
            raise
        except Exception as error:  # noqa: BLE001  whatever the source raised: the body has no end, and that is the answer
            log.warning("a stream was cut short", path=self.path, error=str(error))
        finally:
            attention.kill(block=False)

    def _listen(self, stream: Stream) -> None:
        """Until the client hangs up; it has nothing more to say, and may not say much of it."""
        reader = self.rfile
        try:
            while reader.read1(PIECE):
                pass
        except (OSError, ValueError):  # reset, too much, or closed by ourselves
            pass
        stream.hang_up()

    def _handle_client_error(self, ex: Exception) -> tuple[str, bytes]:
        """The answer to a head that cannot be read. The library prints a traceback of whatever it did not expect."""
        large = isinstance(ex, (_TooLarge, client.HTTPException)) or self.headers.status
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if large else HTTPStatus.BAD_REQUEST
        log.debug(
            "a request cannot be read", client=str(self.client_address), answered=int(status), error=str(ex) or repr(ex)
        )
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        return str(status.value), head.encode()

    def handle_error(self, t: Any, v: Any, tb: Any) -> None:
        if not issubclass(t, Exception):
            raise v  # the time is up, or the server stops: nothing to answer any more
        if issubclass(t, OSError):
            self.close_connection = True  # nobody is left to answer to
            return
        super().handle_error(t, v, tb)

    def _log_error(self, t: Any, v: Any, tb: Any) -> None:
        log.error("a request failed", path=self.path, exc_info=(t, v, tb))


class BoundedServer(gevent.pywsgi.WSGIServer):
    """Serves a WSGI application on a listening socket within `limits`.

    `tls` is asked for the context of each connection, and must not wait. One that cannot be agreed on with a client
    costs that connection and a line in the log for debugging.
    """

    handler_class = _Handler

    def __init__(
        self,
        listener: socket.socket,
        application: WSGIApplication,
        *,
        clock: Clock,
        limits: Limits,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self.clock = clock
        self.limits = limits
        self._tls = tls
        self._places: dict[object, _Place] = {}  # by greenlet, the oldest first
        super().__init__(
            listener,
            application,
            spawn=gevent.pool.Pool(limits.at_once),
            # Requests are not logged: a scraper's line every few seconds would bury what matters.
            log=None,
            error_log=None,
            # Otherwise asked of the name service, which may take its time.
            environ={"SERVER_NAME": "localhost", "wsgi.url_scheme": "https" if tls else "http"},
        )

    def place(self) -> _Place:
        """Of the connection that is handled here."""
        return self._places[getcurrent()]

    def handle(self, sock: Any, address: Any) -> None:
        greenlet = getcurrent()
        self._places[greenlet] = _Place(greenlet, str(address[0]) if address else "")
        try:
            self._make_room()
            self._serve(sock, address)
        finally:
            self._places.pop(greenlet, None)

    def _make_room(self) -> None:
        """Leave a place for whoever comes next, as long as somebody keeps us waiting."""
        if len(self._places) < self.limits.at_once:
            return
        waiting = [place for place in self._places.values() if place.waits]
        if not waiting:
            return
        of_host = Counter(place.host for place in waiting)
        slow = max(waiting, key=lambda place: of_host[place.host])
        del self._places[slow.greenlet]
        log.debug("a client that kept us waiting had to go for another", client=slow.host)
        slow.greenlet.kill(block=False)

    def _serve(self, sock: Any, address: Any) -> None:
        if self._tls is None:
            super().handle(sock, address)
            return
        secured = self._secured(self._tls, sock, address)
        if secured is None:
            return
        try:
            super().handle(secured, address)
        finally:
            secured.close()

    def _secured(self, tls: Callable[[], ssl.SSLContext], sock: Any, address: Any) -> ssl.SSLSocket | None:
        secured = None
        try:
            secured = tls().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            with self.clock.timeout(self.limits.handshake_s), self.place().waiting():
                secured.do_handshake()
        except (OSError, ValueError, ProbeTimeout) as error:
            log.debug("no TLS connection with a client", client=str(address), error=str(error))
        except BaseException:
            if secured is not None:
                secured.close()
            raise
        else:
            return secured
        if secured is not None:
            secured.close()
        return None

    def close_all(self) -> None:
        """Stop at once; who is just being answered is cut off."""
        self.stop(timeout=0)
