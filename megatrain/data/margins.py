"""Margins of pairs in a dataset: one more number behind the tokens of a document.

Files, caches and checksums of datasets treat this number as a token. The mask says which documents have one.
"""

from __future__ import annotations

import struct

__all__ = ["HAS_MARGIN", "as_number", "of_number"]

#: Added to the role of a document whose last number is no token but a margin.
HAS_MARGIN = 4


def as_number(value: float) -> int:
    """Return the 32 bits of a number as an integer that is stored as a token."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def of_number(bits: int) -> float:
    """Return the number that ``as_number`` was given, rounded to fp32."""
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
