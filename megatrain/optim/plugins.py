"""Discovery of optimizers in installed packages by entry point, and their construction from a config's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megatrain.optim.base import Optimizer

__all__ = ["ENTRY_POINT_GROUP", "OptimizerError", "available_optimizers", "make_custom_optimizer"]

#: Entry point group for optimizers. Each entry point is a class, or a function that returns an optimizer.
ENTRY_POINT_GROUP = "megatrain.optimizers"


class OptimizerError(ValueError):
    """Error for an invalid optimizer setting. The message contains the config key and the remedy."""


def available_optimizers() -> tuple[str, ...]:
    """Return the sorted names of optimizers in installed packages. Does not import the packages."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def make_custom_optimizer(name: str, arguments: Mapping[str, Any]) -> Optimizer:
    """Construct an optimizer from an installed package.

    Args:
        arguments: Keyword arguments for the optimizer.

    Raises:
        OptimizerError: No package or more than one package defines the optimizer, or it cannot be imported or
            constructed, or the object is not an optimizer.
    """
    setting = f'optimizer.custom_optimizer = "{name}"'
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        available = ", ".join(available_optimizers()) or "none"
        raise OptimizerError(
            f"{setting}: no installed package has an optimizer with this name. Available: {available}. Install the "
            f"package whose entry point in the group '{ENTRY_POINT_GROUP}' has this name"
        )
    if len({point.value for point in points}) > 1:
        packages = " and ".join(sorted(_package_text(point) for point in points))
        raise OptimizerError(f"{setting} is defined in {packages}. Uninstall one of them")
    package = _package_text(points[0])
    try:
        factory = points[0].load()
    except Exception as cause:  # importing a module can raise any error
        text = f"{setting} from {package} cannot be imported: {type(cause).__name__}: {cause}"
        raise OptimizerError(f"{text}. Install its missing dependencies, or a different version of it") from cause
    try:
        optimizer = factory(**arguments)
    except Exception as cause:  # the arguments may be unknown or invalid
        text = f"{setting} from {package} rejects optimizer.optim_args: {type(cause).__name__}: {cause}"
        raise OptimizerError(text) from cause
    if not isinstance(optimizer, Optimizer):
        text = f"{setting} from {package} is a {type(optimizer).__name__}, not a megatrain.optim.base.Optimizer"
        raise OptimizerError(f"{text}: state_kinds, update, warm_up. Its tests: megatrain.optim.testing.OptimizerSuite")
    names = [kind.name for kind in optimizer.state_kinds(True)]
    if names[:2] != ["weight", "low"] or len(set(names)) != len(names):
        text = f"{setting} from {package}: its kinds of state are {', '.join(names)}"
        raise OptimizerError(f"{text}; weight and low must come first, and names must be unique")
    return optimizer


def _package_text(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else f"package '{point.dist.name}' {point.dist.version}"
    return f"{package} ({point.value})"
