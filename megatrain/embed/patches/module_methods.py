"""Replacements for methods of modules that would otherwise read, copy or move absent weights.

The replacements are attributes of the instances and last as long as the module, because its weights stay in the store.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from megatrain.embed.absent_parameters import AbsentWeightError
from megatrain.embed.block_homes import compute_device, mapped_copy
from megatrain.embed.offloaded_module import OffloadedModule
from megatrain.embed.partition import OffloadError
from megatrain.embed.weights import WeightBlock, block_of, release_all
from tiered.units import round_up

_SHARD_SIZE = "2GB"  # the safetensors writer holds a whole shard in memory
_log = logging.getLogger(__name__)


def install_methods(model: nn.Module, offloaded: OffloadedModule) -> None:
    """Replace methods of the module and its submodules that would read or move absent weights."""
    mapped_weights = _MappedWeights(offloaded)
    for module in model.modules():
        if any(p is not None and block_of(p) is not None for p in module._parameters.values()):
            # partial() allows torch to set an attribute on the hook, which a bound method does not allow.
            module.register_state_dict_post_hook(partial(mapped_weights.fill))  # type: ignore[no-untyped-call]
            module.__dict__["_load_from_state_dict"] = _wrap_load(module)
            module.__dict__["_apply"] = _wrap_apply(module)
        if any(block_of(parameter) is not None for parameter in module.parameters()):
            module.__dict__["__deepcopy__"] = _refusal("copy.deepcopy", "create a second one from its config or folder")
            module.__dict__["__reduce_ex__"] = _refusal("pickling", "save it: save_pretrained(folder) or state_dict()")
        if hasattr(type(module), "resize_token_embeddings"):
            module.__dict__["resize_token_embeddings"] = _wrap_resize(module)
    install_on_outermost(model, offloaded)


def install_on_outermost(model: nn.Module, offloaded: OffloadedModule) -> None:
    """Replace methods that users call only on the outermost module."""
    model.__dict__["_apply"] = _wrap_outermost_apply(model, offloaded)
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _DdpRefusal()
    save_pretrained = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        model.__dict__["save_pretrained"] = _limit_shard_size(save_pretrained)


class _MappedWeights:
    """``state_dict`` hooks that return weights in the store as tensors in unlinked memory-mapped files.

    The hooks copy values to the files unit by unit, so copies use disk space and page cache but no other memory. All
    names of a tied parameter map to the same tensor.
    """

    def __init__(self, offloaded: OffloadedModule) -> None:
        self._store, self._blocks = offloaded.store, frozenset(offloaded.blocks)
        self._copies: dict[int, Tensor] = {}
        self._destination: ref[Any] | None = None

    def fill(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace absent parameters in ``state_dict`` with their values. torch calls this hook for each module."""
        if self._destination is None or self._destination() is not state_dict:
            self._copies.clear()  # share tied copies only within one call: callers may change them
            self._destination = ref(state_dict, lambda _: self._copies.clear())
        for leaf, parameter in module._parameters.items():
            key = prefix + leaf
            if parameter is None or key not in state_dict or state_dict[key] is parameter:
                continue  # the caller asked for the parameters themselves (keep_vars=True)
            block = block_of(parameter)
            if block is None or block not in self._blocks:
                continue
            values = self._copies.get(id(parameter))
            if values is None:
                block.hold()
                try:
                    values = mapped_copy(parameter.detach(), self._store)
                finally:
                    block.release()
                self._copies[id(parameter)] = values
            state_dict[key] = values


def _wrap_load(module: nn.Module) -> Callable[..., None]:
    """Return ``_load_from_state_dict``, wrapped to hold the module's weights for writing."""
    load = module._load_from_state_dict

    def load_into_store(state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise OffloadError("load_state_dict(assign=True) would replace parameters with new ones outside the store")
        own = {leaf: (p, block) for leaf, p in module._parameters.items() if p is not None and (block := block_of(p))}
        held_blocks: list[WeightBlock] = []
        is_failing = True
        try:
            for block in dict.fromkeys(block for _, block in own.values()):
                block.hold("rw")
                held_blocks.append(block)
            unchanged = [pair for leaf, pair in own.items() if _is_same(*pair, state_dict.get(prefix + leaf))]
            load(state_dict, prefix, local_metadata, *args)
            for parameter, block in unchanged:  # so that the store keeps the low halves of their masters
                block.mark_unchanged(parameter)
            is_failing = False
        finally:
            release_all(held_blocks, is_failing=is_failing)

    return load_into_store


def _is_same(parameter: nn.Parameter, block: WeightBlock, values: object) -> bool:
    is_missing = block.name_of(parameter) in block.missing_names
    if is_missing or not isinstance(values, Tensor) or values.shape != parameter.shape:
        return False
    return torch.equal(parameter.detach(), values.detach().to(parameter.device, parameter.dtype))


def _wrap_resize(module: nn.Module) -> Callable[..., Any]:
    """Return a ``resize_token_embeddings`` that raises if the size changes, because the size of a block is fixed."""

    def resize(new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any) -> Any:
        embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
        size = int(embedding.weight.shape[0])
        new_size = round_up(new_num_tokens or size, pad_to_multiple_of or 1)
        if new_size == size:
            return embedding
        raise OffloadError(
            f"resize_token_embeddings({new_size}): the embedding of {size} tokens is in the store, where sizes are "
            f"fixed. Call model.resize_token_embeddings({new_size}) before megatrain.offload(model, store). Before "
            "megatrain.load_pretrained, resize an ordinary model, save it with save_pretrained, and load its folder"
        )

    return resize


def _wrap_apply(module: nn.Module) -> Callable[..., nn.Module]:
    """Return an ``_apply`` that skips offloaded parameters. ``to``, ``cuda``, ``half`` etc. call ``_apply``."""
    apply: Callable[..., nn.Module] = module._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        parameters = module._parameters
        absent = {leaf: p for leaf, p in parameters.items() if p is not None and block_of(p) is not None}
        for parameter in absent.values():
            _refuse_conversion(fn, parameter.dtype)
        if (block := next(map(block_of, absent.values()), None)) is not None:
            _log_if_moved(fn, compute_device(block.store))
        module._parameters = {leaf: None if leaf in absent else p for leaf, p in parameters.items()}
        try:
            apply(fn, recurse)
            parameters.update((leaf, p) for leaf, p in module._parameters.items() if leaf not in absent)
        finally:
            module._parameters = parameters
        return module

    return apply_to_others


def _wrap_outermost_apply(model: nn.Module, offloaded: OffloadedModule) -> Callable[..., nn.Module]:
    """Return ``_apply`` for the outermost module. It refuses conversions and keeps buffers on the compute device."""
    apply: Callable[..., nn.Module] = model._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dict.fromkeys(block.dtype for block in offloaded.blocks):
            _refuse_conversion(fn, dtype)
        buffers = [(module, leaf, buffer) for module in model.modules() for leaf, buffer in module._buffers.items()]
        apply(fn, recurse)
        for module, leaf, buffer in buffers:
            new_buffer = module._buffers[leaf]
            if buffer is not None and new_buffer is not None and new_buffer.device != buffer.device:
                module._buffers[leaf] = buffer.to(new_buffer.dtype)
        return model

    return apply_to_others


def _refuse_conversion(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    try:
        new_dtype = fn(torch.empty(0, dtype=dtype)).dtype
    except (AssertionError, RuntimeError) as error:  # torch raises these errors if a device does not exist
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise OffloadError(
            f"an offloaded module cannot be moved there: {reason}. It computes on the device of its store"
        ) from error
    if new_dtype != dtype:
        raise OffloadError(
            f"an offloaded module cannot be converted from {dtype} to {new_dtype}. Convert it before megatrain.offload"
        )


class _DdpRefusal:
    """List of parameters that ``DistributedDataParallel`` should ignore. Iterating over it raises an error."""

    def __iter__(self) -> Iterator[str]:
        raise OffloadError(
            "DistributedDataParallel around an offloaded module cannot average gradients, because they move to the "
            "store. Instead, offload the module with group=torch.distributed.group.WORLD; or do not offload it, and "
            "use TieredAdamW(model.parameters(), store=...), which keeps the state of each rank in the store"
        )


def _limit_shard_size(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``save_pretrained``, wrapped to write files small enough to fit in memory."""

    def save(*args: Any, **options: Any) -> Any:
        options.setdefault("max_shard_size", _SHARD_SIZE)
        return save_pretrained(*args, **options)

    return save


def _refusal(operation: str, alternative: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AbsentWeightError("this module", f"{operation} is not supported ({alternative})")

    return refuse


def _log_if_moved(fn: Callable[[Tensor], Tensor], store_device: torch.device) -> None:
    """Log, once per device, that a move is ignored and that inputs must be on the store's compute device."""
    device = fn(torch.empty(0, device=store_device)).device
    if device.type != store_device.type:
        # Trainers move models to the CPU and back routinely, but a move to another device is probably intentional.
        log_ignored_move(str(device), str(store_device), logging.INFO if device.type == "cpu" else logging.WARNING)


@functools.cache
def log_ignored_move(device: str, store_device: str, level: int) -> None:
    """Log that a move is ignored, and what to do instead."""
    remedy = 'open the store with gpu="auto" to compute on a CUDA device' if store_device == "cpu" else "leave it there"
    _log.log(
        level,
        'moving an offloaded module to "%s" is ignored, because its store computes on "%s". Its inputs must be on the '
        "same device. Move the inputs, or %s",
        device,
        store_device,
        remedy,
    )
