"""Weights of one unit in the store: bound to their parameters while somebody holds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from megatrain.embed.parameters import attach, make_absent, make_present
from megatrain.embed.stores import compute_device, compute_tier, ledger_of
from megatrain.models.layout import views

if TYPE_CHECKING:
    from megatrain.embed.gradients import GradientBlock
    from megatrain.models.layout import UnitLayout
    from tiered.lease import Lease
    from tiered.store import TieredStore

__all__ = ["WeightBlock", "WeightInUseError", "block_under", "references"]


_HELD: dict[int, WeightBlock] = {}
"""Address of the memory that holds numbers now -> the block whose they are."""


class WeightInUseError(RuntimeError):
    """Code outside of a module keeps, or changed, the module's weights in a way that the store cannot follow."""


class WeightBlock:
    """The parameters of one layout: one flat block, and one view of a slot per parameter while it is held.

    Held by the forward of every module that uses it, and borrowed by the backward. One thread at a time.

    Args:
        key: of its block, which is registered here. parameters: by the name that the layout has for them.
        homes: tiers that it may live in, most wanted first.

    Attributes:
        gradients: of its parameters; None where they are frozen. missing: names of those that have no numbers yet.
        before_use: called before anybody reads or changes the weights: an update that is due is made then.
        provide: called when code wants numbers that nobody holds; returns whether it held them.
        after_change: called with the names of parameters that somebody other than the optimizer changed.
    """

    def __init__(
        self,
        store: TieredStore,
        key: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        homes: Sequence[str],
    ) -> None:
        self.store, self.key, self.layout, self.dtype = store, key, layout, dtype
        self.parameters = dict(parameters)
        self.gradients: GradientBlock | None = None
        self.before_use: Callable[[], None] | None = None
        self.provide: Callable[[WeightBlock], bool] | None = None
        self.after_change: Callable[[frozenset[str]], None] | None = None
        self.tier, self._device = compute_tier(store), compute_device(store)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._lease: Lease | None = None
        self._num_holders = 0
        self._num_references = 0
        self._versions: dict[str, int] = {}
        self.home = ledger_of(store).register(store, key, layout.num_elements, dtype, homes, durable=True)
        self.missing = set(parameters)

    def name_of(self, parameter: Tensor) -> str:
        """Return the full name of a parameter of the block."""
        return self._names[id(parameter)]

    def take_over(self) -> None:
        """Move the parameters' numbers into the block; each parameter's own memory is free as soon as it was copied.

        Parameters on the meta device have none: the block stays empty until somebody fills it.
        """
        if all(parameter.device.type != "meta" for parameter in self.parameters.values()):
            with torch.no_grad(), self.store.acquire(self.key, "ram", "w") as lease:
                lease.tensor.zero_()
                for name, place in views(lease.tensor, self.layout).items():
                    place.copy_(self.parameters[name])
                    self._detach(name)
            self.filled()
        else:
            for name in self.parameters:
                self._detach(name)

    def filled(self) -> None:
        """Note that the block has the numbers of all its parameters, and let it go home from RAM."""
        self.missing.clear()
        if self.home != "ram":
            self.store.evict(self.key, "ram")

    def _detach(self, name: str) -> None:
        attach(self.parameters[name], self, self._device)

    # -- holding -----------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Return whether the parameters have their numbers now."""
        return self._lease is not None

    def hold(self, mode: Literal["r", "rw"] = "r") -> None:
        """Give the parameters their numbers, until as many ``let_go`` have followed.

        Raises:
            CapacityError: the compute tier is too small for the unit. WeightInUseError: nothing was loaded yet, or
                held for reading and now wanted for writing.
        """
        if self._num_holders == 0:
            if self.before_use is not None:
                self.before_use()
            self._lease = self._acquire(mode)
            self._num_references = references(self._lease.tensor)
            _HELD[_address(self._lease.tensor)] = self
            for name, numbers in views(self._lease.tensor, self.layout).items():
                parameter = self.parameters[name]
                make_present(parameter, numbers)
                self._versions[name] = parameter._version
        elif mode == "rw" and self._lease is not None and self._lease.mode == "r":
            raise WeightInUseError(f"{self.layout.name} is read by its forward now; change its weights before or after")
        self._num_holders += 1

    def let_go(self) -> None:
        """Reverse one ``hold``; after the last one the parameters are absent again.

        Raises:
            WeightInUseError: weights were changed under a hold for reading, or a view of a copy outlives the hold.
        """
        self._num_holders -= 1
        if self._num_holders:
            return
        lease, self._lease = self._lease, None
        assert lease is not None, self.key
        del _HELD[_address(lease.tensor)]
        changed = frozenset(
            name for name, parameter in self.parameters.items() if parameter._version != self._versions[name]
        )
        for parameter in self.parameters.values():
            make_absent(parameter, self._device)
        is_shared = references(lease.tensor) > self._num_references and self.tier != self.home
        mode = lease.mode
        if mode == "w" and not changed:
            lease.abandon()
        else:
            lease.release()
        if sys.exc_info()[0] is not None:
            return  # frames of what went wrong may hold views: that error is the one to tell
        if changed and mode == "r":
            raise WeightInUseError(
                f"{sorted(changed)[0]} was changed in place while held for reading: the change would be lost. "
                "Use `with megatrain.gathered(module, writable=True):`"
            )
        if changed:
            self.changed(changed)
        if is_shared:
            raise WeightInUseError(
                f"something keeps a view of the weights of {self.layout.name} after its forward; the room is used for "
                "other weights next. Take a clone, or leave the module out: megatrain.tier(..., leave=[...])"
            )

    def is_unchanged(self, parameter: nn.Parameter) -> None:
        """Note that what was written to a held parameter is what it had."""
        self._versions[self.name_of(parameter)] = parameter._version

    def changed(self, names: frozenset[str]) -> None:
        """Note that somebody other than the optimizer changed these parameters."""
        self.missing -= set(names)
        ledger_of(self.store).num_changes += 1
        if self.after_change is not None:
            self.after_change(names)

    def borrow(self) -> Lease:
        """Return a lease for the backward, which the caller gives back; parameters stay absent."""
        return self._acquire("r")

    @property
    def held(self) -> Tensor | None:
        """The flat numbers, while held."""
        return None if self._lease is None else self._lease.tensor

    def _acquire(self, mode: Literal["r", "rw"]) -> Lease:
        if self.missing and mode == "r":
            raise WeightInUseError(
                f"{sorted(self.missing)[0]} has no numbers yet: the model was made on the meta device. "
                "Use megatrain.load_pretrained(folder, store), or model.load_state_dict(...)"
            )
        return self.store.acquire(self.key, self.tier, "w" if len(self.missing) == len(self.parameters) else mode)


def block_under(tensor: Tensor) -> WeightBlock | None:
    """Return the block that a tensor is a view of while the block is held; None for all other tensors."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    block = _HELD.get(_address(tensor))
    return block if block is not None and tensor.dtype == block.dtype else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def references(tensor: Tensor) -> int:
    """Return how many tensors share the memory of this one."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return count
