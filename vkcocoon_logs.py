"""How log lines look: text for people, JSON for machines, priorities for the journal.

Everything logged in the process, by us through structlog or by a library through the standard library, leaves through
one handler on stderr and looks the same. `configure` is called once by vkcocoon_cli, before anything logs; no other
room formats a line or knows who reads it.

Under the systemd journal (`$JOURNAL_STREAM` names stderr's device and inode) each line starts with `<N>`, which the
journal takes off again and keeps as the line's priority: `journalctl -p warning` works, and a line of JSON stays JSON.

Text that came from outside (a guest's banner, a pod's annotation) must not be able to move the cursor of a terminal
or to forge a second line: in text, control characters are written as escapes.
"""

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

__all__ = ["configure", "under_journal"]

# syslog's numbers, which are the journal's, highest level first
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
# These libraries put whole requests and responses into their debug messages, and with them the secrets of pods.
TALKATIVE = ("kubernetes", "urllib3", "paramiko", "requests")

EventDict = MutableMapping[str, Any]


def under_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether `stream` is the one systemd connected to the journal, and not, say, redirected to a file since."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # no descriptor behind it, or closed
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def configure(
    level: str, form: str = "auto", *, stream: TextIO | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Sends all logging to `stream` (stderr): `level` as in VK_LOG_LEVEL, `form` auto, text or json."""
    stream = stream or sys.stderr
    environ = os.environ if environ is None else environ
    journal = under_journal(stream, environ)
    if form == "json" or (form == "auto" and journal):
        last: list[structlog.typing.Processor] = [_json()]
    else:
        last = [_printable, _text(colors=stream.isatty() and not environ.get("NO_COLOR"))]

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        # Plain traceback text: the richer formatters print local variables, and passwords are among them.
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # a logger made at import time must follow a later configure
    )
    kind = _JournalFormatter if journal else structlog.stdlib.ProcessorFormatter
    formatter = kind(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    _install(formatter, stream, level)


def _install(formatter: logging.Formatter, stream: TextIO, level: str) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))
    logging.captureWarnings(True)


def _json() -> structlog.typing.Processor:
    return structlog.processors.JSONRenderer(ensure_ascii=False, default=str)


def _text(*, colors: bool) -> structlog.typing.Processor:
    return structlog.dev.ConsoleRenderer(
        colors=colors, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
    )


def _printable(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Escapes control characters everywhere but in our own tracebacks."""
    for key, value in event.items():
        if isinstance(value, str) and key not in ("exception", "stack") and not value.isprintable():
            event[key] = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return event


class _JournalFormatter(structlog.stdlib.ProcessorFormatter):
    """The priority stands in front of each line, because the journal makes an entry of each line."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())
