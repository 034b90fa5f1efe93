"""Weights of one unit in the store: bound to their parameters while somebody holds them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from megatrain.embed.parameters import attach, make_absent, make_present
from megatrain.embed.stores import compute_device, compute_tier, ledger_of
from megatrain.models.layout import views
from tiered.checksums import checksum

if TYPE_CHECKING:
    from megatrain.embed.gradients import GradientBlock
    from megatrain.embed.saved import BackwardWindow
    from megatrain.models.layout import UnitLayout
    from tiered.lease import Lease
    from tiered.store import TieredStore

__all__ = ["WeightBlock", "WeightInUseError", "block_under", "let_go", "references"]


_HELD: dict[int, WeightBlock] = {}
"""Address of the memory that holds numbers now -> the block whose they are."""


class WeightInUseError(RuntimeError):
    """Code outside of a module keeps, or changed, the module's weights in a way that the store cannot follow."""


class WeightBlock:
    """The parameters of one layout: one flat block, and one view of a slot per parameter while it is held.

    Held by the forward of every module that uses it, and borrowed by the backward. One thread at a time.

    Args:
        key: of its block, which is registered here.
        parameters: by the name that the layout has for them.
        homes: tiers that it may live in, most wanted first.

    Attributes:
        gradients: of its parameters; None where they are frozen.
        missing: names of those that have no numbers yet.
        before_use: called before anybody reads or changes the weights: an update that is due is made then.
        provide: called when code wants numbers that nobody holds; returns whether it held them.
        after_change: called with the names of parameters that somebody other than the optimizer changed.
        recover: called when they are held and should not be: whoever died without letting go does so then.
        window: leases of the backward, among them perhaps one of this block.
        version: changes of the numbers so far, those that are due included.
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
        self.recover: Callable[[], None] | None = None
        self.window: BackwardWindow | None = None
        self.version = 0
        self.tier, self._device = compute_tier(store), compute_device(store)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._lease: Lease | None = None
        self._num_holders = 0
        self._num_references = 0
        self._versions: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self._checksums: dict[str, str] = {}  # of numbers that somebody may change without autograd's notice
        self.home = ledger_of(store).register(store, key, layout.num_elements, dtype, homes, durable=True)
        self.missing = set(parameters)

    def name_of(self, parameter: Tensor) -> str:
        """Return the full name of a parameter of the block."""
        return self._names[id(parameter)]

    def take_over(self) -> None:
        """Move the parameters' numbers into the block; each parameter's own memory is free as soon as it was copied.

        Parameters on the meta device have none: they are missing until somebody fills them.
        """
        self.missing = {name for name, parameter in self.parameters.items() if parameter.device.type == "meta"}
        if len(self.missing) == len(self.parameters):
            for name in self.parameters:
                self._detach(name)
            return
        with torch.no_grad(), self.store.acquire(self.key, "ram", "w") as lease:
            lease.tensor.zero_()
            for name, place in views(lease.tensor, self.layout).items():
                if name not in self.missing:
                    place.copy_(self.parameters[name])
                self._detach(name)
        _return_memory()
        self._go_home()

    def filled(self) -> None:
        """Note that the block has the numbers of all its parameters, and let it go home from RAM."""
        self.missing.clear()
        self._go_home()

    def _go_home(self) -> None:
        if self.home != "ram":
            self.store.evict(self.key, "ram")

    def _detach(self, name: str) -> None:
        attach(self.parameters[name], self, self._device)

    # -- holding -----------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Return whether the parameters have their numbers now."""
        return self._lease is not None

    def hold(self, mode: Literal["r", "rw"] = "r", *, is_watched: bool = False) -> None:
        """Give the parameters their numbers, until as many ``let_go`` have followed.

        Args:
            is_watched: changes that autograd does not see, through ``data`` or numpy, count too.

        Raises:
            CapacityError: the compute tier is too small for the unit.
            WeightInUseError: nothing was loaded yet, or held for reading and now wanted for writing.
        """
        if self._num_holders == 0:
            if self.before_use is not None:
                self.before_use()
            self._lease = self._acquire(mode)
            self._num_references = references(self._lease.tensor)
            _HELD[_address(self._lease.tensor)] = self
            self._checksums.clear()
            for name, numbers in views(self._lease.tensor, self.layout).items():
                parameter = self.parameters[name]
                if is_watched and name not in self.missing:
                    self._checksums[name] = _checksum(numbers)
                make_present(parameter, numbers)
                self._versions[name], self._addresses[name] = parameter._version, parameter.data_ptr()
        elif mode == "rw" and self._lease is not None and self._lease.mode == "r":
            raise WeightInUseError(f"{self.layout.name} is read by its forward now; change its weights before or after")
        self._num_holders += 1

    def let_go(self, *, is_failing: bool = False) -> None:
        """Reverse one ``hold``; after the last one the parameters are absent again.

        Args:
            is_failing: because of an error, which is the one to tell: this says nothing more.

        Raises:
            WeightInUseError: weights were changed under a hold for reading, or a view of a copy outlives the hold.
        """
        self._num_holders -= 1
        if self._num_holders:
            return
        lease, self._lease = self._lease, None
        assert lease is not None, self.key
        _HELD.pop(_address(lease.tensor), None)
        changed = self._changes(lease)
        for parameter in self.parameters.values():
            make_absent(parameter, self._device)
        is_shared = references(lease.tensor) > self._num_references and self.tier != self.home
        mode = lease.mode
        if mode == "w" and not changed:
            lease.abandon()
        else:
            lease.release()
        if changed and mode == "r" and self.tier != self.home:
            self.store.evict(self.key, self.tier)  # a copy with numbers that its home has not
        elif changed:
            self.changed(changed)
        if changed and mode == "r" and not is_failing:
            raise WeightInUseError(
                f"{sorted(changed)[0]} was changed while held for reading: the change would be lost. "
                "Use `with megatrain.gathered(module, writable=True):`"
            )
        if is_shared and not is_failing:
            raise WeightInUseError(
                f"something keeps a view of the weights of {self.layout.name} after its forward; the room is used for "
                "other weights next. Take a clone, or leave the module out: megatrain.tier(..., leave=[...])"
            )

    def _changes(self, lease: Lease) -> frozenset[str]:
        """Return the names of what was changed while it was held, however that was done."""
        changed = set()
        with torch.no_grad():
            for name, place in views(lease.tensor, self.layout).items():
                parameter = self.parameters[name]
                if place.numel() and parameter.data_ptr() != self._addresses[name]:  # its data was replaced
                    changed.add(name)
                    if lease.mode != "r":
                        place.copy_(parameter)
                elif parameter._version != self._versions[name] or (
                    name in self._checksums and (name in self.missing or _checksum(place) != self._checksums[name])
                ):
                    changed.add(name)
        return frozenset(changed)

    def check_frozen(self) -> None:
        """Refuse parameters that were frozen when they were tiered and are to be trained now: nobody would.

        Raises:
            WeightInUseError: there is one.
        """
        if self.gradients is None:
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    raise WeightInUseError(
                        f"{name} was frozen when it was tiered, so the store has no room for its gradient: set "
                        "requires_grad before megatrain.tier, and freeze afterwards what is not to be trained yet"
                    )

    def note_data_taken(self, parameter: nn.Parameter) -> None:
        """Note that somebody takes ``data`` of a held parameter, and may write there."""
        name = self.name_of(parameter)
        if self._lease is not None and name not in self._checksums:
            self._checksums[name] = _checksum(views(self._lease.tensor, self.layout)[name])

    def prepare_update(self) -> None:
        """Let go of what is left of a backward, before an optimizer changes the numbers.

        Raises:
            WeightInUseError: somebody holds them now, or a graph still looks at them.
        """
        if self._lease is not None and self.recover is not None:
            self.recover()
        if self._lease is not None:
            raise WeightInUseError(
                f"the weights of {self.layout.name} are held now, and cannot be updated: step outside of "
                "megatrain.gathered and of the module's forward"
            )
        if self.window is not None:
            self.window.close(self)

    def is_unchanged(self, parameter: nn.Parameter) -> None:
        """Note that what was written to a held parameter is what it had."""
        self._versions[self.name_of(parameter)] = parameter._version

    def changed(self, names: frozenset[str]) -> None:
        """Note that somebody other than the optimizer changed these parameters."""
        self.version += 1
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
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _return_memory() -> None:
    """Let the C library give the system back what parameters have left free: it keeps blocks of some MB otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _checksum(numbers: Tensor) -> str:
    flat = numbers.detach().reshape(-1)
    return checksum(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else ""


def let_go(blocks: Iterable[WeightBlock], *, is_failing: bool) -> None:
    """Let go of blocks, of all of them whatever one of them says."""
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.let_go, is_failing=is_failing)
