"""Replacements for methods of peft's layers and tuners that merge adapters or unload them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain.embed.offloaded_module import OffloadedModule, gathered, offloaded_module
from megatrain.embed.partition import OffloadError
from megatrain.embed.patches.module_methods import install_on_outermost


def install_adapter_methods(model: nn.Module, offloaded: OffloadedModule) -> None:
    """Make peft's layers merge into weights in the store, and make its tuners return offloaded modules."""
    for module in model.modules():
        if hasattr(type(module), "get_base_layer"):
            _wrap_methods(module, ("merge", "unmerge"), _wrap_merge)
        _wrap_methods(module, ("merge_and_unload", "unload"), partial(_wrap_unload, offloaded=offloaded))


def _wrap_methods(module: nn.Module, names: Iterable[str], wrap: Callable[..., Callable[..., Any]]) -> None:
    for name in names:
        if hasattr(type(module), name):  # check the class: peft's instances forward unknown attributes to the model
            module.__dict__[name] = wrap(getattr(module, name), module)


def _wrap_merge(merge: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    def merge_in_store(*args: Any, **options: Any) -> Any:
        if isinstance(getattr(layer, "base_layer", None), nn.MultiheadAttention):
            raise OffloadError(
                "adapters on torch's MultiheadAttention cannot be merged in the store, because peft creates new "
                "parameters. Save the adapters (save_pretrained) and merge them into an ordinary model"
            )
        with torch.no_grad(), gathered(layer, writable=True):
            return merge(*args, **options)

    return merge_in_store


def _wrap_unload(unload: Callable[..., Any], tuner: nn.Module, *, offloaded: OffloadedModule) -> Callable[..., Any]:
    """Return peft's ``merge_and_unload`` or ``unload``, wrapped so that its result is an offloaded module."""

    def unload_in_store(*args: Any, **options: Any) -> Any:
        model: Any = tuner.model
        config: Any = getattr(model, "config", None)
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        if is_tied:  # peft would compare absent weights' addresses; the code below compares identity
            config.tie_word_embeddings = False
        try:
            result = unload(*args, **options)
        finally:
            if is_tied:
                head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
                config.tie_word_embeddings = getattr(head, "weight", None) is getattr(embedding, "weight", None)
        if offloaded_module(result) is None:
            offloaded.install(result)
            install_on_outermost(result, offloaded)
        return result

    return unload_in_store
