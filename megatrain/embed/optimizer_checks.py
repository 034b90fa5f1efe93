"""Checks of an embedded optimizer's arguments, group settings and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.embed.groups import StateGroup
from megatrain.embed.stores import check_store
from megatrain.embed.weights import WeightBlock
from megatrain.optim.base import StateKind
from megatrain.optim.moments import STATE_DTYPES
from megatrain.ranks.dtensors import check_parameter, is_dtensor, is_unsharded
from tiered import TieredStore

#: Settings of torch's optimizers that change the update rule and are not supported by the kernels.
UNSUPPORTED_SETTINGS = ("amsgrad", "maximize", "differentiable", "dampening")
_FUSED_REASON = "each placement has one kernel, and all kernels give the same results. Leave the option out"
#: Reasons for rejecting options that torch's optimizers or earlier versions of this project have (decision 0114), by
#: option. The values False and None are accepted.
_REJECTED_OPTIONS = {
    "fused": _FUSED_REASON,
    "foreach": _FUSED_REASON,
    "capturable": "updates run on the CPU or on a stream, outside of CUDA graphs",
    "differentiable": "updates are not differentiable",
    "amsgrad": "AMSGrad's third moment is not supported. Leave the option out",
    "maximize": "negate the loss instead",
    "overlap": "step() updates ordinary parameters. To update each layer right before its next use, call "
    "megatrain.offload(model, store) before creating the optimizer",
}


def check_arguments(caller: str, params: object, store: object, unknown_options: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` if ``params`` is a module, ``store`` is not a store, or an option is not supported."""
    if isinstance(params, nn.Module):
        raise TypeError(f"{caller} takes parameters, not the module {type(params).__name__}. Pass model.parameters()")
    if store is not None:
        check_store(store, caller)
    for name, value in unknown_options.items():
        if name not in _REJECTED_OPTIONS:
            raise TypeError(f"{caller} has no option {name!r}")
        if value:
            raise TypeError(f"{caller} has no option {name!r}: {_REJECTED_OPTIONS[name]}")


def check_options(checkpoint: str, max_grad_norm: float, state_dtype: str, nonfinite: str) -> None:
    """Raise ``ValueError`` if an option that all optimizers share is invalid."""
    for name, value, choices in (
        ("checkpoint", checkpoint, ("auto", "generation", "tensors")),
        ("nonfinite", nonfinite, ("stop", "skip", "ignore")),
        ("state_dtype", state_dtype, tuple(STATE_DTYPES)),
    ):
        if value not in choices:
            raise ValueError(f'{name}="{value}": pass one of {", ".join(choices)}')
    if not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm={max_grad_norm}: pass the maximum norm, or 0 for no clipping")


def check_groups(param_groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if saved groups do not match, or if they use an unsupported setting."""
    sizes = [len(group["params"]) for group in param_groups]
    saved = [len(group["params"]) for group in saved_groups]
    if sizes != saved:
        raise ValueError(f"the saved state has groups of {saved} parameters, but this optimizer has groups of {sizes}")
    for name in (name for group in saved_groups for name in UNSUPPORTED_SETTINGS if group.get(name)):
        raise ValueError(f"the saved optimizer used {name}, which the tiered optimizers do not support")


def check_settings(param_group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a group's settings are invalid, or if a parameter has an unsupported dtype or device."""
    for name in UNSUPPORTED_SETTINGS:
        if param_group.get(name):
            raise ValueError(f"{name}={param_group[name]} is not supported by the tiered optimizers")
    for name in ("lr", "weight_decay", "eps", "momentum"):
        if name in param_group and not float(param_group[name]) >= 0:
            raise ValueError(f"{name}={param_group[name]}: it must be at least 0")
    for beta in param_group.get("betas", ()):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas={tuple(param_group['betas'])}: each must be at least 0 and below 1")
    for parameter in param_group["params"]:
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"a parameter is {parameter.dtype}, but master weights exist for float32 and bfloat16")
        if parameter.requires_grad and parameter.device.type == "meta":
            raise ValueError("a parameter is on the meta device. Load its weights first, or offload the module")


def check_blocks(blocks: Iterable[WeightBlock], store: TieredStore) -> None:
    """Raise an error if an optimizer with this store cannot update one of the offloaded layers.

    Raises:
        ValueError: A block is in a different store or already has an optimizer.
        WeightInUseError: A parameter requires a gradient now, but was frozen when it was offloaded.
    """
    for block in blocks:
        if block.store is not store:
            raise ValueError(f"{block.layout.name} and the optimizer are in different stores")
        if block.updater is not None:
            raise ValueError(f"{block.layout.name} already has an optimizer. To replace it, open a new store")
        block.check_frozen()


def check_sharded(
    parameters: Sequence[nn.Parameter],
    kinds: Sequence[StateKind],
    optimizer: str,
    *,
    has_lost_parameters: bool,
    offloads_gradients: bool,
) -> None:
    """Raise ``ValueError`` if settings or parameters do not support sharding.

    Args:
        parameters: Parameters that get state. Unsharded parameters are skipped.
        optimizer: Name of the optimizer's class.
        has_lost_parameters: Whether state exists for parameters that are no longer in a group.
        offloads_gradients: Whether gradients move to the store as soon as autograd computes them.
    """
    for parameter in parameters:
        if not is_dtensor(parameter):
            continue
        if has_lost_parameters:
            raise ValueError(
                "the parameters of this optimizer were replaced by sharded parameters (fully_shard, accelerate's "
                "prepare). Create the optimizer afterwards, from the model's new parameters"
            )
        check_parameter(parameter)
        if any(kind.needs_whole for kind in kinds) and not is_unsharded(parameter):
            raise ValueError(
                f"{optimizer} needs whole matrices, but a parameter of shape {tuple(parameter.shape)} is sharded. Use "
                "TieredAdamW, TieredLion or TieredSGD"
            )
        if offloads_gradients:
            raise ValueError(
                f"offload_gradients=True with a sharded parameter of shape {tuple(parameter.shape)} is not supported, "
                "because its gradient is reduced over all ranks after autograd. Leave it out"
            )


def check_state(needed_kinds: set[str], parameters: Iterable[nn.Parameter], groups: Iterable[StateGroup]) -> None:
    for group in groups:
        missing = needed_kinds - group.state.kinds.keys()
        if missing and not {id(p) for p in group.parameters.values()}.isdisjoint(map(id, parameters)):
            raise ValueError(
                f"a parameter of this group has no {', '.join(sorted(missing))}, because its settings were different "
                "when its state was created. Pass the settings to the constructor"
            )
