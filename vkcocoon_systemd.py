"""What systemd is told: that we are ready, how it goes, that we still live, that we stop.

The unit is `Type=notify` with a watchdog. Ready is said once what runs has been adopted and the node is registered. The
watchdog's pulse is sent by a greenlet, so it proves that greenlets run; and only when the liveness checks have nothing
to say, so it proves that they run to some purpose. A pulse that proved nothing would be worse than none.

Without `$NOTIFY_SOCKET` nothing is sent and nothing is started. Nobody ever waits for systemd here: a message that
cannot be sent is dropped. The daemon owns the one `Systemd` and calls it; children must not inherit the two variables,
or they could speak for us (vkcocoon_commands takes them away).
"""

import os
import socket
from collections.abc import Callable, Mapping

import gevent.event
import gevent.pool
import structlog

from vkcocoon_probes import Clock, spawn

__all__ = ["Systemd"]

log = structlog.get_logger()

# How often the status line is renewed when there is no watchdog that asks for more.
STATUS_PERIOD = 10.0
# How late "ready" may be: nothing waits for it but other units.
STARTED_PERIOD = 1.0


class Systemd:
    """The service manager, or nobody.

    `started` tells when to say "ready", `alive` answers "" while all is well, `describe` is the status line. All three
    only read memory.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        started: Callable[[], bool],
        alive: Callable[[], str] = str,
        describe: Callable[[], str] = str,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._clock = clock
        self._started = started
        self._alive = alive
        self._describe = describe
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._period = _pulse_period(environ)
        self._stop = gevent.event.Event()
        self._group = gevent.pool.Group()

    def start(self) -> None:
        """Begin to pulse; may be called before what takes long at the start."""
        if self._address:
            spawn(self._group, "systemd pulse", self._run)

    def stopping(self) -> None:
        """From now on systemd waits for our end; the pulse goes on, because stopping may hang too."""
        self._send("STOPPING=1")

    def close(self) -> None:
        self._stop.set()
        self._group.join()

    def _run(self) -> None:
        while not self._started():
            if self._clock.wait(self._stop, STARTED_PERIOD):
                return
        self._send("READY=1", f"STATUS={self._describe()}")
        while not self._clock.wait(self._stop, self._period):
            self._pulse()

    def _pulse(self) -> None:
        if trouble := self._alive():
            log.error("not well; the watchdog gets no pulse", trouble=trouble)
            self._send(f"STATUS={trouble}")
        else:
            self._send("WATCHDOG=1", f"STATUS={self._describe()}")

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        # One assignment a line: a line break inside a text would begin another one.
        message = "\n".join(assignment.replace("\n", " ") for assignment in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
                channel.sendto(message.encode(), self._address)
        except OSError as error:
            log.debug("systemd did not take a message", error=str(error))


def _address(text: str) -> str:
    """`@` stands for the zero byte of an abstract name; anything but these two forms is no address."""
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else ""


def _pulse_period(environ: Mapping[str, str]) -> float:
    """Half of what the watchdog allows, if it is meant for this process and not for one that started us."""
    text = environ.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return STATUS_PERIOD
    return min(STATUS_PERIOD, int(text) / 1_000_000 / 2) or STATUS_PERIOD
