"""Orders to live guests through kubectl: an annotation on the pod, carried out once for each new value.

    kubectl annotate pod linux-0 playground/guest=silent --overwrite

The words are those of a person who stands at the machine: silent, speaking, crash, renew, open PORT, close PORT,
banner TEXT, no-banner. An order that makes no sense is answered on the playground's screen, and changes nothing. The
daemon knows nothing of this annotation: it only sees what then becomes of the guest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gevent.pool import Group

from simulator.cluster_view import PodRow
from simulator.fake_guests import GuestError, tell
from vkcocoon_probes import spawn

__all__ = ["GuestOrders", "parse_order"]

_PLAIN: dict[str, dict[str, Any]] = {
    "silent": {"echo": False},
    "speaking": {"echo": True},
    "crash": {"crash": True},
    "renew": {"renew": True},
    "no-banner": {"banner": None},
}


def parse_order(text: str) -> dict[str, Any]:
    """The guest's command for these words. Raises GuestError, whose message names the words there are."""
    word, _, rest = text.strip().partition(" ")
    if word in _PLAIN and not rest:
        return _PLAIN[word]
    if word in ("open", "close") and rest.isascii() and rest.isdigit():
        return {word: int(rest)}
    if word == "banner" and rest:
        return {word: rest}
    raise GuestError(f"{text!r} is no order; there are {', '.join(_PLAIN)}, open PORT, close PORT, banner TEXT")


class GuestOrders:
    """Watches the rows go by and passes each new order on; never waits in the caller."""

    def __init__(self, home: Path, say: Callable[[str, str], None]) -> None:
        self._home = home
        self._say = say
        self._greenlets = Group()

    def changed(self, before: PodRow | None, after: PodRow | None) -> None:
        if after and after.order and (before is None or before.order != after.order):
            spawn(self._greenlets, f"order to {after.key}", self._carry_out, after)

    def close(self) -> None:
        self._greenlets.kill()

    def _carry_out(self, row: PodRow) -> None:
        try:
            answer = tell(self._home, row.vm_name, parse_order(row.order))
            shown = ", ".join(f"{name} {json.dumps(answer[name])}" for name in ("ip", "echo", "ports", "banner"))
            self._say(f"{row.key} was told {row.order!r}: {shown}", "step")
        except (GuestError, OSError, ValueError) as error:
            self._say(f"{row.key} was told {row.order!r}: {error}", "bad")
