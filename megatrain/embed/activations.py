"""``offload_activations``: moves tensors that autograd saves for the backward into a store.

The engine stores only the inputs of its layers, whose shapes are known (``StoreAccess.put_activation``). In user code,
autograd can save any tensor, several tensors can view one storage, and other code can own the memory. A saved tensor is
therefore split: its bytes move to a block (``megatrain.embed.activation_cache``), and its view stays in the graph.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from megatrain.embed.activation_cache import ActivationCache, ActivationStats
from megatrain.embed.saved_tensors import (
    KeptTensor,
    OuterHooks,
    OuterSavedTensor,
    SavedTensor,
    VersionedTensor,
    make_saving_hooks,
    outer_hooks,
)
from megatrain.embed.source_storages import SourceStorage, StorageView, StoredElements, WeakStorage, is_plain_strided
from megatrain.engine.unit.graph_keeping import version_probe
from tiered import TieredStore
from tiered.units import MiB, format_size

#: Graph nodes that keep the values of their input, but can change its shape or dtype.
_SAME_VALUES = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze"),
    *("T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
}
_MAX_NODES = 8


class offload_activations:
    """Context manager that moves tensors saved by autograd into a store until the backward needs them.

    ::

        with megatrain.offload_activations(store, model=model):
            loss = model(**batch).loss
        loss.backward()

    Results are bit-identical to plain PyTorch. Enter the context around the forward. The context can be entered
    repeatedly, nested, and by several threads, or created again for each step. Device tensors move to RAM or a drive,
    and tensors in RAM move to a drive. Tensors for which no tier has space stay in memory, and ``stats`` counts their
    bytes. No tier exceeds its capacity, but restored tensors need memory outside of the tiers. On a CPU, set
    ``MALLOC_MMAP_THRESHOLD_=1048576`` for the process, because glibc otherwise keeps a lot of freed memory in its heap.

    Saved views of one storage share a block until the storage is modified in place. After they are restored, they share
    memory. As in plain PyTorch, the backward raises ``RuntimeError`` for a tensor that was modified in place after it
    was saved. Changes that autograd does not see (through ``.data`` or by a custom kernel) are not detected. Use
    ``keep`` for a storage that is saved both before and after such a change.

    Parameters, their views, and their copies in a different dtype or shape stay in memory. Buffers of ``model`` also
    stay. Without ``model``, all other leaves that require gradients stay. Outer saved-tensor hooks receive the tensors
    that this context does not move. Inside ``torch.utils.checkpoint``, only a segment's inputs are saved, and the
    context moves them. Tensor subclasses and tensors with non-strided layouts stay.

    Args:
        store: Store, which must stay open until the last backward has ended.
        tier: Home of the blocks. Default: the slowest tier with space, except the tensor's own tier.
        model: Modules whose parameters and buffers stay in memory.
        min_bytes: Minimum size of moved tensors. Moving smaller tensors takes too long for the little memory it frees.
        max_bytes: Limit on the total bytes of activation blocks in this store. Default: the tiers' free space.
        lookahead_bytes: Bytes of the staging tier for tensors that were saved last or are needed next. Default: a
            quarter of the tier's capacity, at most 1 GiB.
        keep: Function that returns True for tensors that must stay in memory. It must not store references to them.

    Raises:
        ValueError: The store has no tier with this name.
        TransferError: A drive failed during the forward or the backward.
        CapacityError: The fast tier is too small to restore a tensor in the backward.
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
        self._cache = ActivationCache(store, tier, max_bytes, lookahead_bytes)
        self._modules = None if model is None else [model] if isinstance(model, nn.Module) else list(model)
        self._min_bytes = min_bytes
        self._keep = keep
        self._module_storages: dict[int, WeakStorage] = {}
        self._per_thread = threading.local()
        # One thread packs at a time. Unpacking never takes this lock, because an unpacking thread can hold the space
        # that packing waits for.
        self._pack_lock = threading.RLock()
        self._sources: WeakValueDictionary[int, SourceStorage] = WeakValueDictionary()

    def __enter__(self) -> offload_activations:
        self._module_storages = _storages_of(self._modules or [])
        hooks = make_saving_hooks(partial(self._pack, outer_hooks()))
        hooks.__enter__()
        self._entered_hooks().append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered_hooks().pop().__exit__()
        self._cache.blocks.collect(self._store)

    def stats(self) -> ActivationStats:
        """Return the current statistics."""
        self._cache.blocks.collect(self._store)
        return replace(self._cache.stats, in_use_bytes=self._cache.blocks.in_use_bytes)

    def close(self) -> None:
        """Wait for transfers of blocks that no graph needs, and unregister these blocks. The context stays usable."""
        self._cache.blocks.collect(self._store, wait=True)

    def _entered_hooks(self) -> list[torch.autograd.graph.saved_tensors_hooks]:
        if not hasattr(self._per_thread, "stack"):
            self._per_thread.stack = []
        stack: list[torch.autograd.graph.saved_tensors_hooks] = self._per_thread.stack
        return stack

    def _pack(self, outer: OuterHooks | None, tensor: Tensor) -> SavedTensor:
        result: SavedTensor | None = None
        if is_plain_strided(tensor) and tensor.numel() and not self._is_kept(tensor):
            with self._pack_lock:
                result = self._move(tensor, may_keep=outer is None)
        if result is not None:
            return result
        return _TensorWithSource(tensor) if outer is None else OuterSavedTensor(outer, tensor)

    def _is_kept(self, tensor: Tensor) -> bool:
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

    def _move(self, tensor: Tensor, *, may_keep: bool) -> SavedTensor | None:
        """Move a tensor into the store and return a placeholder, or return None if the tensor must stay in memory."""
        view, storage = StorageView.of(tensor), tensor.untyped_storage()
        nbytes = view.elements.nbytes
        is_small = nbytes < self._min_bytes
        if is_small:
            self._cache.stats.small_bytes += nbytes
            if storage.nbytes() < self._min_bytes:
                return None
        source = self._sources.get(storage._cdata)
        if source is None or not source.is_current(tensor._version):
            source = self._sources[storage._cdata] = SourceStorage(tensor, storage)
        if source.keeper is not None and source.keeper() is not None:
            return None  # another saved tensor keeps the storage, so a move would free nothing
        if is_small:
            return _CopiedTensor(tensor, view, storage)  # a view would keep the whole storage in memory
        stored = source.find(view)
        if stored is not None:
            self._cache.stats.deduplicated_bytes += nbytes
        else:
            stored = self._cache.write(source, source.elements_to_store(view), storage)
            if stored is None and nbytes < storage.nbytes():  # the whole storage does not fit, so try only the tensor
                stored = self._cache.write(source, view.elements, storage)
        if stored is not None:
            return _StoredTensor(tensor, view, stored, self._cache)
        self._warn_no_space(storage.nbytes())
        if not may_keep:
            return None
        result = _TensorWithSource(tensor, source)
        source.keeper = ref(result)
        return result

    def _warn_no_space(self, nbytes: int) -> None:
        if not self._cache.blocks.has_warned:
            self._cache.blocks.has_warned = True
            logging.getLogger(__name__).warning(
                "No tier of the store has space for %s of activations, so they stay in memory. Increase the size of a "
                "slower tier. stats().no_room_bytes of offload_activations counts these bytes",
                format_size(nbytes),
            )
        self._cache.stats.no_room_bytes += nbytes


class _OffloadedTensor(VersionedTensor):
    """A saved tensor whose memory was freed. Its version probe lacks the shape of the tensor."""

    __slots__ = ("_view",)
    context_name = "offload_activations"

    def __init__(self, tensor: Tensor, view: StorageView) -> None:
        super().__init__(tensor, version_probe(tensor))
        self._view = view

    def _describe(self) -> str:
        return f"[{self._probe.type()} {list(self._view.shape)}]"


class _TensorWithSource(KeptTensor):
    """A tensor that stays in memory, with a reference to its ``SourceStorage``."""

    __slots__ = ("__weakref__", "_source")
    context_name = "offload_activations"

    def __init__(self, tensor: Tensor, source: SourceStorage | None = None) -> None:
        super().__init__(tensor)
        self._source = source


class _CopiedTensor(_OffloadedTensor):
    """A copy of a small part of a large storage, so that the storage can be freed."""

    __slots__ = ("_memory",)

    def __init__(self, tensor: Tensor, view: StorageView, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor, view)
        contents = torch.empty(view.elements.nbytes, dtype=torch.uint8, device=storage.device)
        view.elements.read(storage, contents)
        self._memory = view.elements.restore(contents, storage.device)

    def unpack(self) -> Tensor:
        self.check_version()
        return self._view.view(self._memory, self._view.elements.first_byte)


class _StoredTensor(_OffloadedTensor):
    """A saved tensor whose bytes are in a block."""

    __slots__ = ("_cache", "_stored")

    def __init__(self, tensor: Tensor, view: StorageView, stored: StoredElements, cache: ActivationCache) -> None:
        super().__init__(tensor, view)
        self._stored, self._cache = stored, cache

    def unpack(self) -> Tensor:
        self.check_version()
        memory = self._stored.source.memory()
        if memory is not None:
            return self._view.view(memory)
        return self._view.view(self._cache.read(self._stored), self._stored.elements.first_byte)


def _storages_of(modules: Iterable[nn.Module]) -> dict[int, WeakStorage]:
    """Return weak references to the storages of parameters and buffers, by address. They prevent address reuse."""
    storages = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if is_plain_strided(tensor):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = WeakStorage(storage)
    return storages


def _is_copy_of_weight(tensor: Tensor) -> bool:
    """Return whether a tensor contains the values of a parameter, such as a copy made by autocast."""
    node = tensor.grad_fn
    for _ in range(_MAX_NODES):
        if node is None:
            return False
        if node.name() == "torch::autograd::AccumulateGrad":
            variable = node.variable  # type: ignore[attr-defined]
            return isinstance(variable, nn.Parameter) and tensor.numel() <= variable.numel()
        if node.name().rstrip("0123456789").removesuffix("Backward") not in _SAME_VALUES:
            return False
        node = node.next_functions[0][0]
    return False
