"""offload_activations: what autograd saves for the backward waits in a store, not in memory."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from megatrain.embed.activation_blocks import pool_of
from megatrain.embed.activation_shelf import Original, Shelf, StoredSpan, WeakStorage, witness_of
from megatrain.embed.spans import Place, Span, can_be_placed
from tiered.units import MiB, format_size

if TYPE_CHECKING:
    from tiered.store import TieredStore

__all__ = ["ActivationStats", "offload_activations"]

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

#: Nodes of the graph that show the same numbers in another shape or dtype.
_SAME_NUMBERS = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze"),
    *("T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
}
_MAX_NODES = 8


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """Figures of one ``offload_activations``, since it was made.

    Attributes:
        offloaded_bytes: written to blocks.
        restored_bytes: read back from them; what somebody else still had in memory is taken from there and not counted.
        deduplicated_bytes: of saved tensors whose bytes were in a block already.
        no_room_bytes: of storages that stayed in memory since no tier had room.
        small_bytes: of saved tensors below ``min_bytes``.
        pack_wait_s: seconds that forward and backward waited for the store.
        unpack_wait_s: seconds that forward and backward waited for the store.
        registered_bytes: blocks for activations in this store now, in use or kept for the next step.
        num_registered: blocks for activations in this store now, in use or kept for the next step.
        in_use_bytes: of those blocks that a graph needs now.
    """

    offloaded_bytes: int
    restored_bytes: int
    deduplicated_bytes: int
    no_room_bytes: int
    small_bytes: int
    pack_wait_s: float
    unpack_wait_s: float
    registered_bytes: int
    num_registered: int
    in_use_bytes: int


class offload_activations:
    """Context manager: tensors that autograd saves inside it wait in the store until the backward wants them.

    ::

        with megatrain.offload_activations(store, model=model):
            loss = model(**batch).loss
        loss.backward()

    Results do not change by a bit. Enter it around the forward; it can be entered again and again, nested, and by
    several threads, and a new one for every step is as good: the blocks belong to the store and are used again.
    Tensors on a device wait in RAM or on a drive, tensors in memory on a drive; what finds no room there stays, and
    is counted. Every tier keeps to its capacity; memory that the backward works with comes on top, as always. On a CPU
    set ``MALLOC_MMAP_THRESHOLD_=1048576`` for the process: else glibc keeps much of what is freed in its heap.

    Saved views of one storage share one block while the storage is not modified in place, and share memory again when
    they are back. As in plain PyTorch the backward raises ``RuntimeError`` for a tensor that was modified in place
    after it was saved. Changes that autograd cannot know of (through ``.data``, or by a kernel that does not tell) are
    not seen: of a storage that was saved before and after such a change, name the tensors in ``keep``.

    Weights stay: parameters, their views, and copies of them in another dtype or shape. Without ``model`` also leaves
    that require gradients; with it, its buffers. Saved-tensor hooks around this context get what it does not take;
    inside ``torch.utils.checkpoint`` only the inputs of a segment are saved, and those it takes. Tensor subclasses and
    layouts other than strided stay.

    Args:
        store: not closed before the last backward.
        tier: home of the blocks; None: the slowest tier with room, but not that of the tensor itself.
        model: module, or several, whose parameters and buffers stay where they are.
        min_bytes: smaller tensors stay: moving them costs more time than it saves memory.
        max_bytes: most bytes of blocks for activations in this store; None: as much as there is room.
        lookahead_bytes: how much of the fast tier may hold what was saved last and what the backward wants next; None:
            a quarter of its capacity, at most 1 GiB.
        keep: called with a tensor that is about to be saved; True leaves it in memory. Must not keep the tensor.

    Raises:
        ValueError: the store has no such tier.
        TransferError: in the forward or backward: a drive failed.
        CapacityError: in the backward: the fast tier is too small to bring back a single tensor.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        tier: str | None = None,
        model: nn.Module | Iterable[nn.Module] | None = None,
        min_bytes: int = MiB,
        max_bytes: int | None = None,
        lookahead_bytes: int | None = None,
        keep: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._store = store
        self._shelf = Shelf(store, tier, max_bytes, lookahead_bytes)
        self._modules = None if model is None else [model] if isinstance(model, nn.Module) else list(model)
        self._min_bytes = min_bytes
        self._keep = keep
        self._module_storages: dict[int, WeakStorage] = {}
        self._entered = threading.local()
        # One thread packs at a time; unpacking never takes this lock, since it may hold what packing waits for.
        self._packing = threading.RLock()
        self._originals: WeakValueDictionary[int, Original] = WeakValueDictionary()
        self._deduplicated_bytes = self._no_room_bytes = self._small_bytes = 0

    def __enter__(self) -> offload_activations:
        self._module_storages = _storages_of(self._modules or [])
        outer: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(self._pack, outer), _unpack)
        hooks.__enter__()
        self._stack().append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack().pop().__exit__()
        pool_of(self._store).end_round(self._store)

    def stats(self) -> ActivationStats:
        """Return the figures so far."""
        pool = pool_of(self._store)
        pool.collect(self._store)
        return ActivationStats(
            offloaded_bytes=self._shelf.written_bytes,
            restored_bytes=self._shelf.restored_bytes,
            deduplicated_bytes=self._deduplicated_bytes,
            no_room_bytes=self._no_room_bytes,
            small_bytes=self._small_bytes,
            pack_wait_s=self._shelf.write_wait_s,
            unpack_wait_s=self._shelf.read_wait_s,
            registered_bytes=pool.registered_bytes,
            num_registered=pool.num_registered,
            in_use_bytes=pool.in_use_bytes,
        )

    def close(self) -> None:
        """Give the store's blocks for activations back, but for those that a graph still needs. Can be used again."""
        pool_of(self._store).trim(self._store)

    def _stack(self) -> list[torch.autograd.graph.saved_tensors_hooks]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[torch.autograd.graph.saved_tensors_hooks] = self._entered.stack
        return stack

    # -- packing -----------------------------------------------------------------------------------------------

    def _pack(self, outer: _Hooks | None, tensor: Tensor) -> _Packed:
        packed: _Packed | None = None
        if can_be_placed(tensor) and tensor.numel() and not self._stays(tensor):
            with self._packing:
                packed = self._move(tensor, may_keep=outer is None)
        if packed is not None:
            return packed
        return _Kept(tensor) if outer is None else _Delegated(outer[1], outer[0](tensor))

    def _stays(self, tensor: Tensor) -> bool:
        base = tensor._base
        if isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter):
            return True
        if self._modules is None:
            source = tensor if base is None else base
            if source.is_leaf and source.requires_grad:
                return True
        elif tensor.untyped_storage()._cdata in self._module_storages:
            return True
        return _is_copy_of_weight(tensor) or (self._keep is not None and self._keep(tensor))

    def _move(self, tensor: Tensor, *, may_keep: bool) -> _Packed | None:
        """Return what stands for the tensor without its memory; None: it stays."""
        place, storage = Place.of(tensor), tensor.untyped_storage()
        is_small = place.own_bytes < self._min_bytes
        if is_small:
            self._small_bytes += place.own_bytes
            if storage.nbytes() < self._min_bytes:
                return None
        original = self._originals.get(storage._cdata)
        if original is None or not original.is_still(tensor._version):
            original = self._originals[storage._cdata] = Original(tensor, storage)
        if original.kept is not None and original.kept() is not None:
            return None  # its memory stays anyway
        if is_small:
            return _Copied(tensor, place, storage)  # it must not keep all the storage
        stored = original.find(place)
        if stored is not None:
            self._deduplicated_bytes += place.own_bytes
        else:
            span = Span.around(place, storage.nbytes())
            stored = self._shelf.write(original, span, storage)
        if stored is not None:
            return _Stored(tensor, place, stored, self._shelf)
        self._note_no_room(storage.nbytes())
        if not may_keep:
            return None
        kept = _Kept(tensor, original)
        original.kept = ref(kept)
        return kept

    def _note_no_room(self, nbytes: int) -> None:
        pool = pool_of(self._store)
        if not pool.has_told:
            pool.has_told = True
            logging.getLogger(__name__).warning(
                "No tier of the store has room for %s of activations: they stay in memory. Give a slower tier more "
                "room; stats().no_room_bytes of offload_activations says how much it is",
                format_size(nbytes),
            )
        self._no_room_bytes += nbytes


# -- what the graph holds -----------------------------------------------------------------------------------------


class _Packed(ABC):
    """Stands in the graph for a saved tensor."""

    __slots__ = ()

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the tensor, as it was saved."""


class _Delegated(_Packed):
    """What the hooks around this context made of a tensor."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Callable[[Any], Tensor], packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def unpack(self) -> Tensor:
        return self._unpack(self._packed)


class _Versioned(_Packed):
    """Knows which version of a tensor was saved, as autograd does for what no hook takes."""

    __slots__ = ("_version", "_witness")

    def __init__(self, tensor: Tensor, witness: Tensor) -> None:
        self._witness = witness
        self._version = None if tensor.is_inference() else tensor._version

    def check_version(self) -> None:
        """Raise ``RuntimeError`` if the tensor was modified in place since it was saved."""
        if self._version is not None and self._witness._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._describe()} is at version {self._witness._version}; expected version {self._version} instead. "
                "It was saved inside offload_activations; torch.autograd.set_detect_anomaly(True) shows by what"
            )

    def _describe(self) -> str:
        return f"[{self._witness.type()} {list(self._witness.shape)}]"


class _Kept(_Versioned):
    """A tensor that stays in memory. Detached: a saved output must not hold the node that holds it."""

    __slots__ = ("__weakref__", "_original")

    def __init__(self, tensor: Tensor, original: Original | None = None) -> None:
        super().__init__(tensor, tensor.detach())
        self._original = original

    def unpack(self) -> Tensor:
        self.check_version()
        return self._witness


class _Copied(_Versioned):
    """A small part of a large storage, in memory of its own."""

    __slots__ = ("_memory", "_place", "_start")

    def __init__(self, tensor: Tensor, place: Place, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor, witness_of(tensor))
        span = Span.around(place, place.stop)
        contents = torch.empty(span.nbytes, dtype=torch.uint8, device=storage.device)
        span.read(storage, contents)
        self._place, self._start, self._memory = place, span.start, span.restore(contents, storage.device)

    def unpack(self) -> Tensor:
        self.check_version()
        return self._place.view(self._memory, self._start)

    def _describe(self) -> str:
        return f"[{self._witness.type()} {list(self._place.shape)}]"


class _Stored(_Versioned):
    """A tensor whose bytes are in a block."""

    __slots__ = ("_place", "_shelf", "_stored")

    def __init__(self, tensor: Tensor, place: Place, stored: StoredSpan, shelf: Shelf) -> None:
        super().__init__(tensor, witness_of(tensor))
        self._place, self._stored, self._shelf = place, stored, shelf

    def unpack(self) -> Tensor:
        self.check_version()
        memory = self._stored.original.memory()
        if memory is not None:
            return self._place.view(memory)
        return self._place.view(self._shelf.read(self._stored), self._stored.span.start)

    def _describe(self) -> str:
        return f"[{self._witness.type()} {list(self._place.shape)}]"


def _unpack(packed: _Packed) -> Tensor:
    return packed.unpack()


# -- what is a weight ---------------------------------------------------------------------------------------------


def _storages_of(modules: Iterable[nn.Module]) -> dict[int, WeakStorage]:
    """Return the storages of parameters and buffers by address; the references keep an address from being reused."""
    found = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if can_be_placed(tensor):
                storage = tensor.untyped_storage()
                found[storage._cdata] = WeakStorage(storage)
    return found


def _is_copy_of_weight(tensor: Tensor) -> bool:
    """Return whether the numbers are those of a parameter, such as what autocast makes of one."""
    node = tensor.grad_fn
    for _ in range(_MAX_NODES):
        if node is None:
            return False
        if node.name() == "torch::autograd::AccumulateGrad":
            variable = node.variable  # type: ignore[attr-defined]
            return isinstance(variable, nn.Parameter) and tensor.numel() <= variable.numel()
        if node.name().rstrip("0123456789").removesuffix("Backward") not in _SAME_NUMBERS:
            return False
        node = node.next_functions[0][0]
    return False
