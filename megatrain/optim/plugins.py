"""Optimizers that installed packages bring: found by an entry point, and made with the arguments of a config."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megatrain.optim.base import Optimizer

__all__ = ["ENTRY_POINT_GROUP", "OptimizerError", "available_optimizers", "make_custom_optimizer"]

#: The group under which a package names its optimizers: classes, or functions that return one.
ENTRY_POINT_GROUP = "megatrain.optimizers"


class OptimizerError(ValueError):
    """What the config says of the optimizer cannot be done; the text says which key, and what to write."""


def available_optimizers() -> tuple[str, ...]:
    """Return the names that installed packages have, in order. Imports none of them."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def make_custom_optimizer(name: str, arguments: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer of an installed package.

    Args:
        arguments: Passed by keyword.

    Raises:
        OptimizerError: no package has it, two have, it cannot be imported or made, or it is no optimizer.
    """
    where = f'optimizer.custom_optimizer = "{name}"'
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        known = ", ".join(available_optimizers()) or "none"
        raise OptimizerError(
            f"{where}: no installed package has an optimizer of this name; there are: {known}. Install the package "
            f"that brings it (its entry point in the group '{ENTRY_POINT_GROUP}' has that name)"
        )
    if len({point.value for point in points}) > 1:
        places = " and ".join(sorted(_place_of(point) for point in points))
        raise OptimizerError(f"{where} is in {places}: uninstall one of them")
    place = _place_of(points[0])
    try:
        factory = points[0].load()
    except Exception as cause:  # whatever a module does when it is imported
        text = f"{where} of {place} cannot be imported: {type(cause).__name__}: {cause}"
        raise OptimizerError(f"{text}. Install what it needs, or another version of it") from cause
    try:
        made = factory(**arguments)
    except Exception as cause:  # arguments that it does not take, or values that it refuses
        text = f"{where} of {place} cannot be made of optimizer.optim_args: {type(cause).__name__}: {cause}"
        raise OptimizerError(text) from cause
    if not isinstance(made, Optimizer):
        text = f"{where} of {place} is a {type(made).__name__}, which lacks something of megatrain.optim.base.Optimizer"
        raise OptimizerError(f"{text}: state_kinds, update, warm_up. Its tests: megatrain.optim.testing.OptimizerSuite")
    names = [kind.name for kind in made.state_kinds(True)]
    if names[:2] != ["weight", "low"] or len(set(names)) != len(names):
        text = f"{where} of {place}: its kinds of state are {', '.join(names)}"
        raise OptimizerError(f"{text}; weight and low come first, and each has a name of its own")
    return made


def _place_of(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else f"package '{point.dist.name}' {point.dist.version}"
    return f"{package} ({point.value})"
