"""Numbers that others wrote: Kubernetes quantities ("500m", "4Gi", "1e3") and whole numbers."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["parse_quantity", "whole_number"]

# As the API server's own pattern, with bounds: it keeps no more than 64 bits and a fraction of nine digits.
_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,19}(?:\.\d{0,19})?|\.\d{1,19}))(?:[eE]([+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII
)
_WORTH: dict[str, Decimal] = {
    "": Decimal(1),
    **{name: Decimal(10) ** power for name, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", start=1)},
}


def parse_quantity(text: str) -> Decimal:
    """The number a quantity means: 0.5, 4294967296, 1000 for those above. Raises ValueError."""
    matched = _QUANTITY.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text!r} is no quantity")
    digits, exponent, suffix = matched.groups()
    return Decimal(digits).scaleb(int(exponent or 0)) * _WORTH[suffix or ""]


def whole_number(text: str, *, digits: int = 18) -> int | None:
    """What 1 to so many ASCII digits mean; None for every other text, which Python may refuse to read at all."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None
