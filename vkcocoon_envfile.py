"""The env-file as systemd reads it, for the commands that a person types.

The unit gives the daemon its settings by `EnvironmentFile=`. A shell has none of them, and a `doctor` that looked at
the defaults instead would be well where the daemon is ill. So the commands read the same file. What the shell's
environment sets wins over the file, as a flag wins over both.

Understood is what systemd understands: `NAME=value`, single and double quotes, a backslash in front of one character,
a line that goes on after a backslash, and comments after # or ;. What systemd would ignore with a warning in its log is
an error here, because the person who mistyped it is looking.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["DEFAULT_PATH", "EnvFileError", "Environment", "load_environment", "parse"]

DEFAULT_PATH = "/etc/cocoon/vk-cocoon.env"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LARGEST = 1 << 20  # bytes; settings have some hundred


class EnvFileError(Exception):
    """The file cannot be read or understood; `str()` is one line naming it."""


class Environment(NamedTuple):
    """Variables with their values, and for those that come from the file, that file."""

    values: dict[str, str]
    origins: dict[str, str]


def load_environment(environ: Mapping[str, str], path: str | None) -> Environment:
    """What is in `environ` and, for what is not set there, in the file at `path`; None is the usual place.

    At the usual place there need not be a file. Raises EnvFileError.
    """
    chosen = DEFAULT_PATH if path is None else path
    if path is None and not os.path.lexists(chosen):
        return Environment(dict(environ), {})
    try:
        with open(chosen, encoding="utf-8") as file:
            text = file.read(_LARGEST)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise EnvFileError(f"the env-file {chosen} cannot be read: {why}") from error
    written = parse(text, chosen)
    given = {name: value for name, value in environ.items() if value}
    return Environment({**written, **given}, {name: chosen for name in written if name not in given})


def parse(text: str, path: str) -> dict[str, str]:
    """The variables of a file's text; a later line wins over an earlier one. Raises EnvFileError."""
    found: dict[str, str] = {}
    for number, line in _logical_lines(text):
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise EnvFileError(f"{path}:{number}: {line.strip()[:40]!r} is not NAME=value")
        found[name.strip()] = _value(value.strip(), f"{path}:{number}")
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, those that go on joined, without blanks and comments."""
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        began = began if pending else number
        if not pending and (not line.strip() or line.strip()[0] in "#;"):
            continue
        if line.endswith("\\") and not line.endswith("\\\\"):
            pending += line[:-1]
            continue
        yield began, pending + line
        pending = ""
    if pending:
        yield began, pending


def _value(text: str, where: str) -> str:
    """A value without its quotes."""
    value, quote, escaped = "", "", False
    for char in text:
        if escaped:
            value, escaped = value + char, False
        elif char == "\\" and quote != "'":
            escaped = True
        elif char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        else:
            value += char
    if quote:
        raise EnvFileError(f"{where}: a quote is not closed")
    return value
