"""Methods of a tiered module that read or replace parameters: they go through the store, or refuse."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from megatrain.embed.parameters import AbsentWeightError, block_of
from megatrain.embed.partition import TieringError
from megatrain.embed.weights import let_go

if TYPE_CHECKING:
    from megatrain.embed.tiering import TieredModule
    from megatrain.embed.weights import WeightBlock

__all__ = ["install_methods", "mapped_copy"]

_SHARD_SIZE = "2GB"  # what a writer of safetensors holds at once
_log = logging.getLogger(__name__)


def install_methods(model: nn.Module, tiered: TieredModule) -> None:
    """Replace what would read or move absent numbers, on the module and on all modules inside that own some."""
    mapped = _MappedWeights(tiered)
    for module in model.modules():
        if any(p is not None and block_of(p) is not None for p in module._parameters.values()):
            # torch marks what it is given, which a method cannot be.
            module.register_state_dict_post_hook(partial(mapped.fill))  # type: ignore[no-untyped-call]
            module.__dict__["_load_from_state_dict"] = _loading(module)
            module.__dict__["_apply"] = _applying(module)
        if any(block_of(parameter) is not None for parameter in module.parameters()):
            module.__dict__["__deepcopy__"] = _refuse("copy.deepcopy", "make the second from its config or folder")
            module.__dict__["__reduce_ex__"] = _refuse("pickling", "save it: save_pretrained(folder) or state_dict()")
    model.__dict__["_apply"] = _applying_whole(model, tiered)
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoParallel()
    save_pretrained = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        model.__dict__["save_pretrained"] = _saving(save_pretrained)


class _MappedWeights:
    """``state_dict`` of modules whose weights are in the store: tensors over a file that has no name any more.

    The numbers are copied into the file unit by unit: they take disk, and no memory beyond the kernel's cache. A
    tied parameter gives the same tensor under all its names.
    """

    def __init__(self, tiered: TieredModule) -> None:
        self._tiered, self._blocks = tiered, frozenset(tiered.blocks)
        self._last: dict[int, Tensor] = {}
        self._destination: ref[Any] | None = None

    def fill(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Put numbers in the place of the module's own absent parameters: torch's hook after ``state_dict``."""
        if self._destination is None or self._destination() is not state_dict:
            self._last.clear()  # tied parameters share a copy within one call; what the caller does with it is his
            self._destination = ref(state_dict, lambda _: self._last.clear())
        for leaf, parameter in module._parameters.items():
            key = prefix + leaf
            if parameter is None or key not in state_dict or state_dict[key] is parameter:
                continue  # keep_vars=True asks for the parameters themselves
            block = block_of(parameter)
            if block is None or block not in self._blocks:
                continue
            numbers = self._last.get(id(parameter))
            if numbers is None:
                block.hold()
                try:
                    numbers = mapped_copy(parameter.detach(), self._folder)
                finally:
                    block.let_go()
                self._last[id(parameter)] = numbers
            state_dict[key] = numbers

    @property
    def _folder(self) -> str | None:
        path = self._tiered.store.path
        return path if path is not None and os.path.isdir(path) else None


def mapped_copy(tensor: Tensor, folder: str | None = None) -> Tensor:
    """Return a CPU copy whose memory is a file without a name: it goes when the tensor goes.

    Args:
        folder: on the drive to use; None: the temporary folder.

    Raises:
        OSError: the drive has no room.
    """
    if not tensor.numel():
        return tensor.cpu().clone()
    descriptor, path = tempfile.mkstemp(prefix=".state-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, tensor.numel() * tensor.element_size())  # or a full drive is a bus error
        copy = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return copy.copy_(tensor)


def _loading(module: nn.Module) -> Callable[..., None]:
    """Return ``_load_from_state_dict`` with the module's own weights held for writing."""
    load = module._load_from_state_dict

    def load_into_store(state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise TieringError("load_state_dict(assign=True) would replace parameters by others that no store knows")
        own = {leaf: (p, block) for leaf, p in module._parameters.items() if p is not None and (block := block_of(p))}
        held: list[WeightBlock] = []
        is_failing = True
        try:
            for block in dict.fromkeys(block for _, block in own.values()):
                block.hold("rw")
                held.append(block)
            same = [pair for leaf, pair in own.items() if _is_same(*pair, state_dict.get(prefix + leaf))]
            load(state_dict, prefix, local_metadata, *rest)
            for parameter, block in same:  # so that a master in the store keeps what it has below their precision
                block.is_unchanged(parameter)
            is_failing = False
        finally:
            let_go(held, is_failing=is_failing)

    return load_into_store


def _is_same(parameter: nn.Parameter, block: WeightBlock, numbers: object) -> bool:
    if not isinstance(numbers, Tensor) or numbers.shape != parameter.shape or block.name_of(parameter) in block.missing:
        return False
    return torch.equal(parameter.detach(), numbers.detach().to(parameter.device, parameter.dtype))


def _applying(module: nn.Module) -> Callable[..., nn.Module]:
    """Return ``_apply``, what ``to``, ``cuda``, ``half`` and the like call: for all but the tiered parameters."""
    apply: Callable[..., nn.Module] = module._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = module._parameters
        tiered = {leaf: p for leaf, p in own.items() if p is not None and block_of(p) is not None}
        for parameter in tiered.values():
            _refuse_conversion(fn, parameter.dtype)
        _tell_once()
        module._parameters = {leaf: None if leaf in tiered else p for leaf, p in own.items()}
        try:
            apply(fn, recurse)
            own.update((leaf, p) for leaf, p in module._parameters.items() if leaf not in tiered)
        finally:
            module._parameters = own
        return module

    return apply_to_others


def _applying_whole(model: nn.Module, tiered: TieredModule) -> Callable[..., nn.Module]:
    """Return ``_apply`` of the whole: refuse before anything was converted; buffers stay where the module computes."""
    apply: Callable[..., nn.Module] = model._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dict.fromkeys(block.dtype for block in tiered.blocks):
            _refuse_conversion(fn, dtype)
        before = [(module, leaf, buffer) for module in model.modules() for leaf, buffer in module._buffers.items()]
        apply(fn, recurse)
        for module, leaf, buffer in before:
            now = module._buffers[leaf]
            if buffer is not None and now is not None and now.device != buffer.device:
                module._buffers[leaf] = buffer.to(now.dtype)
        return model

    return apply_to_others


def _refuse_conversion(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    if (other := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
        raise TieringError(
            f"a tiered module cannot be converted from {dtype} to {other}: convert it before megatrain.tier"
        )


class _NoParallel:
    """What ``DistributedDataParallel`` finds when it looks which parameters it shall ignore."""

    def __iter__(self) -> Iterator[str]:
        raise TieringError(
            "DistributedDataParallel around a tiered module: its gradients leave for the store before they could be "
            "averaged. Leave the module ordinary and give it to TieredAdamW(model.parameters(), store=...), which "
            "keeps the state of each rank in the store; or train on one rank"
        )


def _saving(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``save_pretrained`` with files of a size that is held in memory at once."""

    def save(*args: Any, **options: Any) -> Any:
        options.setdefault("max_shard_size", _SHARD_SIZE)
        return save_pretrained(*args, **options)

    return save


def _refuse(what: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AbsentWeightError("this module", f"{what} is refused ({instead})")

    return refuse


_told: list[bool] = []


def _tell_once() -> None:
    if not _told:
        _told.append(True)
        _log.info("a tiered module stays where its store computes: moving its parameters is ignored")
