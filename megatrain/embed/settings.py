"""What an optimizer looks at before it makes state or an update: settings of groups, sizes of blocks, room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain.embed.groups import Settings
from megatrain.embed.stores import room_for_homes
from tiered.errors import CapacityError

if TYPE_CHECKING:
    from megatrain.embed.groups import StateGroup
    from megatrain.optim.base import Optimizer
    from tiered.store import TieredStore

__all__ = [
    "BYTES_AT_ONCE",
    "UNSUPPORTED",
    "NotCopied",
    "check_room",
    "check_settings",
    "packed",
    "plain",
    "settings_of",
]

#: Settings of torch's optimizers that change what an update does, and that there is no kernel for.
UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "dampening")
#: Per parameter: state and gradient of the group that is updated, and of the one that is fetched meanwhile.
BYTES_AT_ONCE = 2 * (12 + 4)
_GROUP_ELEMENTS = (1 << 19, 1 << 24)
"""Ordinary parameters are put together up to the size of the largest one, for which there must be room anyway; but up
to 2 MiB of each kind of state in fp32 in any case, and not beyond 64 MiB. That does not depend on the size of the
tiers, so that a state can be loaded where they are others."""


class NotCopied:
    """An object of which the store holds a part: there is one of it."""

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse: the state is in the store once."""
        raise TypeError("an optimizer with its state in a store cannot be copied: make another, load its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: ``state_dict`` is what can be saved."""
        raise TypeError("an optimizer with its state in a store cannot be pickled: save its state_dict()")


def check_room(store: TieredStore, groups: Sequence[StateGroup]) -> None:
    """Refuse now what the first step would.

    Raises:
        CapacityError: RAM cannot hold what an update of some group needs at once, beside the homes there.
    """
    ram, room = store.tier("ram"), room_for_homes(store, "ram")
    known = {spec.key: spec for spec in store.blocks()}
    for group in groups:
        specs = [known[key] for key in group.keys_at_once()]
        need = sum(ram.slot_bytes(spec.nbytes) for spec in specs if spec.home != "ram")
        if need > room:
            raise CapacityError(
                "ram",
                need,
                max(0, room),
                detail=f"to update {group.layout.name} with its state and gradient. Give ram more room",
            )


def check_settings(param_group: Mapping[str, Any]) -> None:
    """Refuse settings of a group that make no sense, and parameters that have no master weights.

    Raises:
        ValueError: with what, and what to do.
    """
    for name in UNSUPPORTED:
        if param_group.get(name):
            raise ValueError(f"{name}={param_group[name]}: the tiered optimizers have no such variant")
    for name in ("lr", "weight_decay", "eps", "momentum"):
        if name in param_group and not float(param_group[name]) >= 0:
            raise ValueError(f"{name}={param_group[name]}: it cannot be below 0")
    for beta in param_group.get("betas", ()):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas={tuple(param_group['betas'])}: each lies from 0 up to below 1")
    for parameter in param_group["params"]:
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"a parameter is {parameter.dtype}; master weights exist for float32 and bfloat16")
        if parameter.requires_grad and parameter.device.type == "meta":
            raise ValueError("a parameter is on the meta device: load its weights first, or tier the module")


def settings_of(
    taken: Sequence[tuple[StateGroup, Mapping[str, object]]],
    param_groups: Iterable[Mapping[str, Any]],
    arithmetic_of: Callable[[Mapping[str, Any]], Optimizer],
    steps: Mapping[nn.Parameter, int],
) -> tuple[dict[int, Settings], list[tuple[nn.Parameter, int]]]:
    """Return how each parameter with a gradient is updated, by its id, and which step of its own that is.

    Parameters of a group that are at the same step share one object.

    Args:
        taken: groups of state, with the names that have a gradient.
        steps: that were made before.

    Raises:
        ValueError: a setting was changed to one that needs state which was never made.
    """
    with_gradient = {id(group.parameters[name]) for group, names in taken for name in names}
    found: dict[int, Settings] = {}
    counted: list[tuple[nn.Parameter, int]] = []
    for param_group in param_groups:
        own = [parameter for parameter in param_group["params"] if id(parameter) in with_gradient]
        arithmetic, lr = arithmetic_of(param_group), float(param_group["lr"])
        decay = float(param_group.get("weight_decay", 0.0))
        _check_state({kind.name for kind in arithmetic.state_kinds(False)} - {"weight"}, own, taken)
        counts = [steps.get(parameter, 0) + 1 for parameter in own]
        at_step = {step: Settings(arithmetic, step, lr, decay) for step in set(counts)}
        counted.extend(zip(own, counts, strict=True))
        found.update(zip(map(id, own), map(at_step.__getitem__, counts), strict=True))
    return found, counted


def _check_state(
    needed: set[str], parameters: Iterable[nn.Parameter], taken: Iterable[tuple[StateGroup, Mapping[str, object]]]
) -> None:
    for group, _ in taken:
        missing = needed - group.kinds.keys()
        if missing and not {id(p) for p in group.parameters.values()}.isdisjoint(map(id, parameters)):
            raise ValueError(
                f"no {', '.join(sorted(missing))} is kept of a parameter of this group: its settings were others when "
                "its state was made. Give them to the constructor"
            )


def packed(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Put ordinary parameters together that are alike in dtype and device, up to a size."""
    together: list[nn.Parameter] = []
    fewest, most = _GROUP_ELEMENTS
    limit = max(fewest, min(most, max((parameter.numel() for parameter in parameters), default=0)))
    for parameter in parameters:
        if together:
            alike = (parameter.dtype, parameter.device) == (together[0].dtype, together[0].device)
            if not alike or sum(p.numel() for p in together) + parameter.numel() > limit:
                yield together
                together = []
        together.append(parameter)
    if together:
        yield together


def plain(value: Any) -> Any:
    """Return a setting as numbers that can be compared."""
    return tuple(float(one) for one in value) if isinstance(value, list | tuple) else float(value)
