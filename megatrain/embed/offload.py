"""``offload``: moves the parameters of a module into a store, in place, and loads each layer's weights when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from megatrain.embed.block_homes import compute_device, home_order
from megatrain.embed.offloaded_module import OffloadedModule, offloaded_module
from megatrain.embed.partition import OffloadError, partition
from megatrain.embed.patches.adapter_methods import install_adapter_methods
from megatrain.embed.patches.foreign_optimizers import refuse_foreign_optimizers
from megatrain.embed.patches.module_methods import install_methods
from megatrain.embed.room import LocalBlocks, find_homes
from megatrain.embed.shared import ModuleRanks
from megatrain.embed.stores import check_store
from tiered import TieredStore

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def offload(
    model: AnyModule,
    store: TieredStore,
    *,
    name: str = "model",
    weights: Sequence[str] | str = "auto",
    gradients: Sequence[str] | str = "auto",
    leave: Sequence[str] = (),
    group: ProcessGroup | None = None,
    gradient_lanes: int | None = None,
) -> AnyModule:
    """Move a module's parameters to a store, in place, and return the module.

    Each layer's weights are fetched when its forward or backward needs them. Weights are prefetched in the order in
    which they were last used. Gradients move to the store as soon as they are computed. ``parameters()`` returns the
    same objects as before, for ``TieredAdamW``. Freeze parameters (``requires_grad``) before the call. Forward,
    backward, ``generate``, ``state_dict``, ``load_state_dict`` and ``save_pretrained`` work as before. The module
    computes on the device of the store's fastest tier: moves to another device are ignored, and dtype conversions raise
    an error.

    With ``group``, each rank stores a shard of the weights, gradients and state. Weights are gathered for each forward
    and backward of a layer. ``step`` uses the mean gradient of all ranks, as DistributedDataParallel does, but in a
    fixed order: each rank's gradients are a lane, and lanes are added in a fixed tree. Forward, backward, ``step``,
    ``state_dict``, ``load_state_dict`` and ``gathered`` are then collectives. All ranks must use the same layers in the
    same order. Otherwise, all ranks raise ``RanksDifferError``.

    Args:
        name: Key prefix of the module's blocks. Modules in the same store need different prefixes.
        weights: Allowed home tiers, preferred first. "auto" uses RAM while it has space, then drives.
        gradients: Allowed home tiers, as for ``weights``.
        leave: Globs of parameter names. Matching parameters are not moved.
        group: Process group of ranks that share the module, for example ``dist.group.WORLD``. It needs a gloo backend,
            because weights and gradients move between host memories even if modules compute on GPUs.
        gradient_lanes: Number of lanes with ``group``. Default: one per rank. Runs with half or a third of the ranks
            are bit-identical if each rank computes several lanes (``megatrain.gradient_lanes``).

    Raises:
        OffloadError: A dtype has no master weights, the module has nothing to offload, or it is already offloaded.
        CapacityError: The module does not fit in the store.
        RanksDifferError: The module differs between ranks.
        ValueError: Settings contradict each other.
        TypeError: ``model`` is not a module, or ``store`` is not a store.
    """
    check_store(store, "offload")
    if not isinstance(model, nn.Module):
        raise TypeError(f"offload takes a torch.nn.Module, not {model!r:.60}")
    if group is None and gradient_lanes is not None:
        raise ValueError("gradient_lanes without group: a single process adds gradients in order of arrival")
    access = LocalBlocks(store) if group is None else ModuleRanks(group, store, gradient_lanes)
    units = partition(model, name, leave)
    home_tiers = home_order(store, weights), home_order(store, gradients)
    homes = access.check_module(model, units, partial(find_homes, access, name, units, *home_tiers))
    refuse_foreign_optimizers()
    offloaded = OffloadedModule(units, homes, access)
    offloaded.install(model)
    move_buffers(model, compute_device(store))
    install_methods(model, offloaded)
    install_adapter_methods(model, offloaded)
    return model


def gradient_lanes(model: nn.Module) -> Iterator[int]:
    """Yield the numbers of this rank's lanes, for a module with ``group``. Gradients go to the lane yielded last.

    Each lane does the work of one rank in a run with one rank per lane. Choose each lane's part of the batch by the
    lane's number. With several micro-batches per lane, iterate over the lanes once per micro-batch.
    """
    offloaded = offloaded_module(model)
    ranks = None if offloaded is None else offloaded.access
    if not isinstance(ranks, ModuleRanks):
        raise OffloadError("gradient lanes need a module that was offloaded with group=...")
    for lane in ranks.own_lanes:
        ranks.lane = lane
        yield lane


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a module's buffers to the compute device, except meta buffers."""
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                module._buffers[leaf] = buffer.to(device)
