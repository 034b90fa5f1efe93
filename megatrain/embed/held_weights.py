"""Parameters of a part while their values are in memory, and the changes that other code makes to them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from megatrain.base.layout import views
from megatrain.embed.absent_parameters import make_present
from megatrain.embed.partition import Part
from megatrain.embed.room import WeightLease
from tiered import checksum


class HeldWeights:
    """A lease of a part's weights, and the parameters that view it. The constructor makes the parameters present.

    Args:
        missing_names: Names of parameters that have no values yet.
        is_watched: Whether to detect changes that autograd does not see.

    Attributes:
        num_holders: Number of users that have not released the weights yet.
    """

    def __init__(self, part: Part, lease: WeightLease, missing_names: AbstractSet[str], *, is_watched: bool) -> None:
        self._part, self.lease, self.num_holders = part, lease, 0
        self._num_references = count_references(lease.tensor)
        self._versions: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self._checksums: dict[str, str] = {}  # checksums of weights that can change without autograd noticing
        for name, values in views(lease.tensor, part.layout).items():
            parameter = part.parameters[name]
            if is_watched and name not in missing_names:
                self._checksums[name] = _checksum(values)
            make_present(parameter, values)
            self._versions[name], self._addresses[name] = parameter._version, parameter.data_ptr()

    @property
    def has_views(self) -> bool:
        """Whether code outside of the parameters still uses the leased memory."""
        return count_references(self.lease.tensor) > self._num_references

    def watch(self, name: str) -> None:
        """Detect all later changes of a parameter, because its ``data`` was accessed."""
        if name not in self._checksums:
            self._checksums[name] = _checksum(views(self.lease.tensor, self._part.layout)[name])

    def mark_unchanged(self, name: str) -> None:
        """Record that a parameter was overwritten with the values that it already had."""
        self._versions[name] = self._part.parameters[name]._version

    def changed_names(self, missing_names: AbstractSet[str]) -> frozenset[str]:
        """Return the changed parameters' names. Copy values that replaced ``data`` to the lease, if it is writable."""
        names = set()
        with torch.no_grad():
            for name, values in views(self.lease.tensor, self._part.layout).items():
                parameter = self._part.parameters[name]
                if values.numel() and parameter.data_ptr() != self._addresses[name]:  # ``data`` was replaced
                    names.add(name)
                    if self.lease.mode != "r":
                        values.copy_(parameter)
                elif parameter._version != self._versions[name] or (
                    name in self._checksums and (name in missing_names or _checksum(values) != self._checksums[name])
                ):
                    names.add(name)
        return frozenset(names)


def count_references(tensor: Tensor) -> int:
    """Return the number of tensors that share the memory of ``tensor``."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _checksum(values: Tensor) -> str:
    flat = values.detach().reshape(-1)
    return checksum(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else ""
