"""The wire between one daemon and the API server, which a scenario can break in the ways networks break.

    link = Link("127.0.0.1", 6443)
    link.port             where the daemon is told to connect
    link.refuse()         nobody listens, and what was open is cut
    link.stall()          connections are taken and kept, and nothing passes in either direction
    link.cut()            what is open now is broken; new connections work
    link.restore()        works again, also what was stalled
    link.reroute()        new connections work; those that were stalled stay silent for ever, and nobody hears of it

It passes bytes on and knows nothing of TLS or HTTP.
"""

import contextlib
import socket

import gevent.socket
from gevent.event import Event
from gevent.pool import Pool
from gevent.server import StreamServer


class Link:
    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._open: set[gevent.socket.socket] = set()
        self._flowing = Event()
        self._flowing.set()
        self._server = self._listen(("127.0.0.1", 0))
        self.port: int = self._server.server_port

    def refuse(self) -> None:
        self._server.stop(timeout=0)
        self.cut()

    def stall(self) -> None:
        self._flowing.clear()

    def cut(self) -> None:
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        self._flowing.set()
        if self._server.closed:
            self._server = self._listen(("127.0.0.1", self.port))

    def reroute(self) -> None:
        self._flowing = Event()  # those that are open wait for the old one
        self._flowing.set()

    def close(self) -> None:
        self._server.stop(timeout=0)
        self.cut()

    def _listen(self, address: tuple[str, int]) -> StreamServer:
        server = StreamServer(address, self._join, spawn=Pool())
        server.start()
        return server

    def _join(self, client: gevent.socket.socket, _: object) -> None:
        with contextlib.suppress(OSError), client:
            server = gevent.socket.create_connection(self._upstream)
            ends, flowing = {client, server}, self._flowing
            self._open |= ends
            try:
                with server:
                    for end in ends:
                        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    back = gevent.spawn(self._pump, server, client, flowing)  # noqa: TID251  harness, joined below
                    self._pump(client, server, flowing)
                    back.join()
            finally:
                self._open -= ends

    def _pump(self, source: gevent.socket.socket, target: gevent.socket.socket, flowing: Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                flowing.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
