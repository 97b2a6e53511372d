"""The sshd of a live guest: paramiko's server behind a banner that can be withheld or changed.

Port 22 of a guest accepts before anybody speaks: launchd opens it early in the boot of a Mac, sshd answers much later.
That gap is why the readiness of a macOS guest asks for the banner and not for the accept. `Sshd.banner` is what the
guest says at the moment: None keeps every connection waiting, a text that starts with `SSH-` is spoken by a real
server, and any other text is sent as it stands, for whoever wants to see a wrong one.

Any user and any password get in, because the guest cannot be reached from outside the playground and holds nothing: a
command or a shell gets one line about the guest, never a program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import gevent.socket
import paramiko
from gevent.event import Event
from gevent.pool import Group
from paramiko.common import AUTH_SUCCESSFUL, OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED, OPEN_SUCCEEDED

from vkcocoon_probes import spawn

__all__ = ["Sshd"]

log = logging.getLogger("simulator.guest")


class Sshd:
    """`serve` is the connection handler of a listener; `about` makes the line that visitors get."""

    def __init__(self, banner: str | None, about: Callable[[], str]) -> None:
        self._about = about
        self._key = paramiko.ECDSAKey.generate()
        self._greenlets = Group()
        self._speaking = Event()
        self._banner = ""
        self.banner = banner
        # Its complaints about probes that hang up after the banner are about us doing our work.
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)

    @property
    def banner(self) -> str | None:
        return self._banner if self._speaking.is_set() else None

    @banner.setter
    def banner(self, text: str | None) -> None:
        if text is None:
            self._speaking.clear()
        else:
            self._banner = text
            self._speaking.set()

    def serve(self, connection: gevent.socket.socket, address: object) -> None:
        """One connection to its end."""
        visitor = spawn(self._greenlets, f"ssh {address}", self._speak, connection)
        try:
            visitor.join()
        finally:
            visitor.kill()
            connection.close()

    def _speak(self, connection: gevent.socket.socket) -> None:
        self._speaking.wait()
        if not self._banner.startswith("SSH-"):
            connection.sendall(f"{self._banner}\r\n".encode())
            while connection.recv(1024):
                pass
            return
        transport = paramiko.Transport(connection)
        transport.local_version = self._banner
        transport.add_server_key(self._key)
        try:
            transport.start_server(server=_Door(self._about))
            transport.join()
        except (paramiko.SSHException, EOFError, OSError) as error:
            log.debug("ssh visitor left: %s", error)
        finally:
            transport.close()


class _Door(paramiko.ServerInterface):
    def __init__(self, about: Callable[[], str]) -> None:
        self._about = about

    def get_allowed_auths(self, username: str) -> str:
        return "password"

    def check_auth_password(self, username: str, password: str) -> int:
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if kind == "session":
            return OPEN_SUCCEEDED
        return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_pty_request(self, channel: paramiko.Channel, *terminal: object) -> bool:
        return True

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        spawn(Group(), "ssh answer", self._answer, channel)
        return True

    def check_channel_shell_request(self, channel: paramiko.Channel) -> bool:
        spawn(Group(), "ssh answer", self._answer, channel)
        return True

    def _answer(self, channel: paramiko.Channel) -> None:
        # In a greenlet of its own: what is sent before the request is confirmed would confuse the client.
        channel.sendall(f"{self._about()}\r\n".encode())
        channel.send_exit_status(0)
        channel.close()
