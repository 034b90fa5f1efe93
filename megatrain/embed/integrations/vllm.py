"""Connection of TRL's vLLM engine to an offloaded policy. The store sends the engine one weight at a time.

Written against TRL 1.16, whose trainers with ``use_vllm`` all have a ``VLLMGeneration``. This module replaces its
``_iter_named_params`` (weights to send, in order) and ``_weight_metadata`` (names, dtypes and shapes, for which TRL
would read all weights), and wraps ``sync_weights`` and ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor, nn

from megatrain.embed.block_homes import compute_tier
from megatrain.embed.named import named_shapes, named_tensors
from megatrain.embed.partition import OffloadError
from megatrain.embed.stores import release
from tiered import TieredStore


def follow(generation: Any, model: nn.Module, store: TieredStore) -> None:
    """Make TRL's engine read weights from the store, and free GPU memory for a colocated engine.

    The store frees the memory before and after each call that sends weights to the engine or generates.

    Raises:
        OffloadError: The engine of the installed TRL version has a different interface.
    """
    if not hasattr(generation, "_iter_named_params") or not hasattr(generation, "_weight_metadata"):
        raise OffloadError(
            "the vLLM engine of this TRL version does not support offloaded models. Install trl>=1.16, or send the "
            "weights with megatrain.named_tensors(model)"
        )
    device = generation.accelerator.device

    def iter_weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors(model, device=device):
            yield generation._fix_param_name_to_vllm(name), tensor

    generation._iter_named_params = iter_weights
    generation._weight_metadata = [
        (generation._fix_param_name_to_vllm(name), str(dtype).removeprefix("torch."), list(shape))
        for name, dtype, shape in named_shapes(model)
    ]
    if generation.mode == "colocate":
        generation.sync_weights = _release_around(generation.sync_weights, store)
        generation.generate = _release_around(generation.generate, store)


def _release_around(method: Callable[..., Any], store: TieredStore) -> Callable[..., Any]:
    """Wrap a method of the engine so that it releases the store's copies in GPU memory before and after the call.

    A sleeping engine allocates its weights at the start of ``sync_weights``, and its cache right afterwards.
    """

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        release(store, compute_tier(store))
        try:
            return method(*args, **options)
        finally:
            release(store, compute_tier(store))

    return call
