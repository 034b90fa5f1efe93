"""Tiers that are too small for a run, and config changes that would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiered.units import format_size

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Remedy:
    """Config change that reduces the bytes that a run needs in a tier.

    Attributes:
        fits: Whether the tier's capacity is then sufficient. Always True for a drive that the change adds.
    """

    change: str
    tier: str
    need_bytes: int
    fits: bool

    def __str__(self) -> str:
        if self.tier == "nvme" and self.fits:
            return f"{self.change} of {format_size(self.need_bytes)} for this run: fits"
        return f"{self.change}: {self.tier} needs {format_size(self.need_bytes)}, {'fits' if self.fits else 'too much'}"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Tier that is too small for a run.

    Attributes:
        need_bytes: Smallest sufficient capacity.
        remedies: Config changes that reduce the need.
        message: Message to show instead of the default message about the tier and its bytes, or "" for the default.
    """

    tier: str
    need_bytes: int
    have_bytes: int
    advice: str
    remedies: Sequence[Remedy] = ()
    message: str = ""

    def __str__(self) -> str:
        message = self.message or (
            f"does not fit: tier '{self.tier}' has {self.have_bytes} bytes ({format_size(self.have_bytes)}), "
            f"but this run needs at least {self.need_bytes} ({format_size(self.need_bytes)})"
        )
        return f"{message}. {self.advice}"


class DoesNotFitError(Exception):
    """Error for a run that does not fit in its tiers. Raised before anything is allocated.

    Attributes:
        tier: Tier that is too small.
        need_bytes: Smallest sufficient capacity.
        remedies: Config changes that reduce the need.
    """

    def __init__(self, shortfall: Shortfall) -> None:
        self.shortfall = shortfall
        self.tier, self.remedies = shortfall.tier, shortfall.remedies
        self.need_bytes, self.have_bytes = shortfall.need_bytes, shortfall.have_bytes
        super().__init__(str(shortfall))


def require_fit(result: _Found | Shortfall) -> _Found:
    """Return ``result``, or raise an error if it is a shortfall.

    Raises:
        DoesNotFitError: If a tier is too small.
    """
    if isinstance(result, Shortfall):
        raise DoesNotFitError(result)
    return result
