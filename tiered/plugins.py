"""Lookup of tiers by name: built-in tiers, and tiers that installed packages provide through an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from tiered.errors import TieredError
from tiered.tiers.base import Tier
from tiered.tiers.gpu import GpuTier
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier

#: Entry-point group for tiers.
ENTRY_POINT_GROUP = "tiered.tiers"
#: A tier class, or a function that returns a tier. Each tier defines its own arguments.
TierFactory = Callable[..., Tier]

_BUILT_IN: dict[str, TierFactory] = {"gpu": GpuTier, "ram": RamTier, "nvme": NvmeTier}


def available_tiers() -> tuple[str, ...]:
    """Return the names that ``tier_class`` accepts: gpu, ram, nvme, then the sorted names of other tiers.

    Installed packages provide the other tiers; this function does not import them.
    """
    return (*_BUILT_IN, *sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - set(_BUILT_IN)))


def tier_class(name: str) -> TierFactory:
    """Import and return the tier class (or factory function) with this name.

    The names gpu, ram and nvme always mean the built-in tiers.

    Raises:
        TieredError: no installed package provides the tier, several packages provide it, or the import fails.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        raise TieredError(
            f"no tier is called '{name}'; available tiers: {', '.join(available_tiers())}. "
            f"Install the package that provides it by an entry point in the group '{ENTRY_POINT_GROUP}'"
        )
    if len({point.value for point in points}) > 1:
        providers = " and ".join(sorted(_provider(point) for point in points))
        raise TieredError(f"tier '{name}' is in {providers}: uninstall one package, or import the class directly")
    try:
        entry = points[0].load()
    except Exception as cause:  # Importing a package can raise any exception.
        text = f"tier '{name}' of {_provider(points[0])} cannot be imported: {type(cause).__name__}: {cause}"
        raise TieredError(f"{text}. Install its dependencies, or another version") from cause
    if not callable(entry):
        text = f"the entry point of tier '{name}' of {_provider(points[0])} is wrong: it names a {type(entry).__name__}"
        raise TieredError(f"{text}, not a class or function that creates a tier")
    factory: TierFactory = entry
    return factory


def _provider(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else f"package '{point.dist.name}' {point.dist.version}"
    return f"{package} ({point.value})"
