"""Access to local shards of DTensors: torch.distributed's sharded parameters (FSDP2, tensor parallelism).

Uses only public interfaces of ``DTensor``. Importing ``torch.distributed.tensor`` takes a second, so these functions
import it only after they have received a ``DTensor``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from megatrain.ranks.collectives import Collectives

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "add_over_shards",
    "check_gradient",
    "check_parameter",
    "first_element",
    "is_dtensor",
    "is_unsharded",
    "local_shard",
    "make_dtensor",
    "tensor_version",
]


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a ``DTensor``."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a ``DTensor`` without a copy or autograd. Return any other tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def tensor_version(tensor: Tensor) -> object:
    """Return a value that changes whenever the tensor, or this rank's shard of the tensor, is modified in place."""
    return (tensor._version, local_shard(tensor)._version) if is_dtensor(tensor) else tensor._version


def is_unsharded(parameter: DTensor) -> bool:
    """Return whether this rank has all elements of a parameter."""
    return not _sharded_dims(parameter)


def check_parameter(parameter: DTensor) -> None:
    """Check that the ranks hold a parameter's values, not terms that must be summed to get the values.

    Raises:
        ValueError: The parameter is partial, so each rank has only one term of a sum.
    """
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is a DTensor with the placements "
            f"{tuple(parameter.placements)}: each rank has only one term of a sum, which cannot be trained. Change it "
            "to Shard or Replicate first: parameter.redistribute(...)"
        )


def check_gradient(gradient: Tensor, parameter: DTensor) -> None:
    """Check that a gradient is sharded like its parameter.

    Raises:
        ValueError: The gradient is not a DTensor, or it is sharded differently from the parameter.
    """
    if not is_dtensor(gradient):
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is an ordinary tensor, but the parameter "
            "is a DTensor. Assign a DTensor with the same mesh and placements"
        )
    if (gradient.device_mesh, gradient.placements) != (parameter.device_mesh, parameter.placements):
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} has the placements "
            f"{tuple(gradient.placements)}, but the parameter has {tuple(parameter.placements)}. Before the step: "
            "p.grad = p.grad.redistribute(p.device_mesh, p.placements)"
        )


def first_element(parameter: DTensor) -> int:
    """Return a number that identifies the first element of this rank's shard.

    If only rows are sharded, as in FSDP2, the number is the element's index in the whole parameter. Otherwise, it is
    only guaranteed to differ between ranks with different shards.
    """
    from torch.distributed.tensor import Shard

    dims = _sharded_dims(parameter)
    if not dims:
        return 0
    (dim, *other_dims) = dims
    placement, mesh = parameter.placements[dim], parameter.device_mesh
    if not other_dims and type(placement) is Shard and placement.dim == 0:
        num_rows = parameter.shape[0]
        rows_per_rank = -(-num_rows // mesh.size(dim))
        row = min(num_rows, mesh.get_local_rank(dim) * rows_per_rank)
        return row * (parameter.numel() // max(1, num_rows))
    index = 0
    for dim in dims:
        index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index * parameter.numel()


def make_dtensor(local: Tensor, parameter: DTensor) -> Tensor:
    """Create a DTensor from this rank's shard. The DTensor is sharded like the parameter."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def add_over_shards(parameters: Sequence[Tensor], values: Sequence[float]) -> list[float]:
    """Sum one value per parameter over the ranks that shard it. Values for unsharded parameters stay unchanged.

    Values are added in rank order, so that all ranks get bit-identical sums. This is a collective: all ranks must call
    it with the same parameters.

    Args:
        parameters: Parameters on any meshes.
        values: This rank's values, one per parameter.
    """
    totals = list(values)
    groups: dict[Any, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if is_dtensor(parameter):
            groups.setdefault((parameter.device_mesh, _sharded_dims(parameter)), []).append(index)
    for (mesh, dims), indices in groups.items():
        addend = torch.tensor([totals[index] for index in indices], dtype=torch.float64, device=mesh.device_type)
        for dim in reversed(dims):
            ranks = Collectives(mesh.get_group(dim))
            addends = torch.empty(ranks.size * len(addend), dtype=addend.dtype, device=addend.device)
            ranks.gather(addends, addend)
            rank_sum, *rest = addends.view(ranks.size, -1).cpu().unbind()  # add on the host, in rank order
            for value in rest:
                rank_sum = rank_sum + value
            addend = rank_sum.to(mesh.device_type)
        for index, total in zip(indices, addend.tolist(), strict=True):
            totals[index] = total
    return totals


def _sharded_dims(parameter: DTensor) -> tuple[int, ...]:
    """Return the mesh dimensions along which ranks have different elements."""
    sizes = parameter.device_mesh.shape
    return tuple(dim for dim, spec in enumerate(parameter.placements) if not spec.is_replicate() and sizes[dim] > 1)
