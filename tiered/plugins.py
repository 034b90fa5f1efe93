"""Tiers by name: built-in tiers, and tiers of installed packages with an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from tiered.errors import TieredError
from tiered.tiers.base import Tier
from tiered.tiers.gpu import GpuTier
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier

#: The group under which a package names its tiers.
ENTRY_POINT_GROUP = "tiered.tiers"
#: A tier class, or a function that returns a tier, with any arguments.
TierFactory = Callable[..., Tier]

_OWN: dict[str, TierFactory] = {"gpu": GpuTier, "ram": RamTier, "nvme": NvmeTier}


def available_tiers() -> tuple[str, ...]:
    """Return the names that ``tier_class`` accepts: gpu, ram, nvme, then names of installed packages in order.

    Imports none of those packages.
    """
    return (*_OWN, *sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - set(_OWN)))


def tier_class(name: str) -> TierFactory:
    """Return the class of the tiers of a name (or the function that makes them), imported now.

    The names of this package always mean its own tiers.

    Raises:
        TieredError: no installed package has such a tier, two have, or it cannot be imported.
    """
    if name in _OWN:
        return _OWN[name]
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        raise TieredError(
            f"no tier is called '{name}'; there are {', '.join(available_tiers())}. "
            f"Install the package that brings it (its entry point in the group '{ENTRY_POINT_GROUP}' has that name)"
        )
    if len({point.value for point in points}) > 1:
        places = " and ".join(sorted(_place_of(point) for point in points))
        raise TieredError(f"tier '{name}' is in {places}: uninstall one of them, or import the class you mean")
    try:
        found = points[0].load()
    except Exception as cause:  # an import may raise anything
        text = f"tier '{name}' of {_place_of(points[0])} cannot be imported: {type(cause).__name__}: {cause}"
        raise TieredError(f"{text}. Install what it needs, or another version of it") from cause
    if not callable(found):
        text = f"tier '{name}' of {_place_of(points[0])} is a {type(found).__name__}, not a class or a function"
        raise TieredError(f"{text} that makes a tier: its entry point is wrong")
    factory: TierFactory = found
    return factory


def _place_of(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else f"package '{point.dist.name}' {point.dist.version}"
    return f"{package} ({point.value})"
