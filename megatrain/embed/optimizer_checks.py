"""Refusals of an embedded optimizer: arguments, settings of groups, and parameters that it cannot update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.embed.groups import StateGroup
from megatrain.embed.stores import check_store
from megatrain.embed.weights import WeightBlock
from megatrain.optim.base import StateKind
from megatrain.ranks.dtensors import check_parameter, is_dtensor, is_whole
from tiered import TieredStore

#: Settings of torch's optimizers that change the update rule, but have no kernel here.
UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "dampening")
_ONE_KERNEL = "there is one kernel for each placement, and all give the same results. Leave the option out"
#: Further options of torch's optimizers -> reason for rejecting them; false and None have no effect.
_OPTIONS_OF_TORCH = {
    "fused": _ONE_KERNEL,
    "foreach": _ONE_KERNEL,
    "capturable": "updates run on the CPU or on a stream, outside of CUDA graphs",
    "differentiable": "nothing is differentiated through an update",
    "amsgrad": "AMSGrad keeps a third moment, which has no kernel here. Leave the option out",
    "maximize": "negate the loss instead",
}
#: Options of earlier versions -> their replacement (decision 0114).
_ENDED_OPTIONS = {
    "overlap": "step() makes the updates of ordinary parameters. Write megatrain.offload(model, store) before the "
    "optimizer: each layer is then updated right before its next use",
}


def check_arguments(kind: str, params: object, store: object, unknown: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for a module instead of its parameters, and for options that only torch's optimizers have."""
    if isinstance(params, nn.Module):
        raise TypeError(f"{kind} takes parameters, not the module {type(params).__name__}: give model.parameters()")
    if store is not None:
        check_store(store, kind)
    reasons = _OPTIONS_OF_TORCH | _ENDED_OPTIONS
    for name, value in unknown.items():
        if name not in reasons:
            raise TypeError(f"{kind} has no option {name!r}")
        if value:
            raise TypeError(f"{kind} has no option {name!r}: {reasons[name]}")


def check_groups(own: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for saved groups that do not match, and for variants without a kernel.

    Raises:
        ValueError: they do not match, or use such a variant.
    """
    now = [len(group["params"]) for group in own]
    saved = [len(group["params"]) for group in groups]
    if now != saved:
        raise ValueError(f"the saved state has groups of {saved} parameters, this optimizer of {now}")
    for name in (name for group in groups for name in UNSUPPORTED if group.get(name)):
        raise ValueError(f"the saved state is of an optimizer with {name}: the tiered optimizers have no such variant")


def check_settings(param_group: Mapping[str, Any]) -> None:
    """Raise for settings of a group that are out of range, and for parameters without master weights.

    Raises:
        ValueError: a setting or parameter is invalid.
    """
    for name in UNSUPPORTED:
        if param_group.get(name):
            raise ValueError(f"{name}={param_group[name]}: the tiered optimizers have no such variant")
    for name in ("lr", "weight_decay", "eps", "momentum"):
        if name in param_group and not float(param_group[name]) >= 0:
            raise ValueError(f"{name}={param_group[name]}: it cannot be below 0")
    for beta in param_group.get("betas", ()):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas={tuple(param_group['betas'])}: each must be at least 0 and below 1")
    for parameter in param_group["params"]:
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"a parameter is {parameter.dtype}; master weights exist for float32 and bfloat16")
        if parameter.requires_grad and parameter.device.type == "meta":
            raise ValueError("a parameter is on the meta device: load its weights first, or offload the module")


def check_blocks(blocks: Iterable[WeightBlock], store: TieredStore) -> None:
    """Raise for offloaded layers that the optimizer of a store cannot update.

    Raises:
        ValueError: a block is in another store, or has an optimizer.
        WeightInUseError: a trained parameter was frozen when it was offloaded.
    """
    for block in blocks:
        if block.store is not store:
            raise ValueError(f"{block.layout.name} is in another store than the optimizer's")
        if block.updater is not None:
            raise ValueError(
                f"{block.layout.name} has an optimizer already. Parameters of one layer go to one optimizer; to "
                "make another for all of them, open a new store"
            )
        block.check_frozen()


def check_sharded(
    parameters: Sequence[nn.Parameter],
    kinds: Sequence[StateKind],
    optimizer: str,
    *,
    is_lost: bool,
    offloads_gradients: bool,
) -> None:
    """Raise for settings and parameters that do not work with sharded parameters.

    Args:
        parameters: parameters that get state; ordinary ones are skipped.
        optimizer: name of its class.
        is_lost: whether there is state of parameters that are no longer in a group.
        offloads_gradients: whether gradients move to the store when autograd computes them.

    Raises:
        ValueError: a setting or parameter does not work.
    """
    for parameter in parameters:
        if not is_dtensor(parameter):
            continue
        if is_lost:
            raise ValueError(
                "the parameters of this optimizer were replaced by sharded ones (fully_shard, accelerate's "
                "prepare): make the optimizer after that, from the model's parameters as they are then"
            )
        check_parameter(parameter)
        shape = tuple(parameter.shape)
        if any(kind.needs_whole for kind in kinds) and not is_whole(parameter):
            raise ValueError(
                f"{optimizer} needs whole matrices, and a parameter of shape {shape} is sharded: use "
                "TieredAdamW, TieredLion or TieredSGD"
            )
        if offloads_gradients:
            raise ValueError(
                f"offload_gradients=True with a sharded parameter, of shape {shape}: its gradient is made from "
                "the gradients of all ranks, after autograd. Leave it out"
            )


def check_state(
    needed: set[str], parameters: Iterable[nn.Parameter], taken: Iterable[tuple[StateGroup, Mapping[str, object]]]
) -> None:
    for group, _ in taken:
        missing = needed - group.kinds.keys()
        if missing and not {id(p) for p in group.parameters.values()}.isdisjoint(map(id, parameters)):
            raise ValueError(
                f"no {', '.join(sorted(missing))} is kept of a parameter of this group: its settings were others when "
                "its state was made. Give them to the constructor"
            )
