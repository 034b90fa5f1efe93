"""TRL's vLLM engine beside an offloaded policy: it is sent the weights that the store has, one at a time.

Written against TRL 1.16: of ``VLLMGeneration``, which all its trainers with ``use_vllm`` have, ``_iter_named_params``
(what is sent, in order), ``_weight_metadata`` (names, dtypes and shapes, which it would else read all weights for),
``sync_weights`` and ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from megatrain.embed.named import named_shapes, named_tensors
from megatrain.embed.partition import OffloadError
from megatrain.embed.stores import compute_tier, release

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tiered import TieredStore


def follow(generation: Any, model: nn.Module, store: TieredStore) -> None:
    """Let TRL's engine take weights from the store; a colocated one finds GPU memory free.

    The store frees it before the engine is sent weights, and before it writes.

    Raises:
        OffloadError: another TRL, whose engine asks in another way.
    """
    if not hasattr(generation, "_iter_named_params") or not hasattr(generation, "_weight_metadata"):
        raise OffloadError(
            "this TRL's vLLM engine reads weights in a way that an offloaded model has no answer for: install "
            "trl>=1.16, or send them by yourself with megatrain.named_tensors(model)"
        )
    device = generation.accelerator.device

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors(model, device=device):
            yield generation._fix_param_name_to_vllm(name), tensor

    generation._iter_named_params = named
    generation._weight_metadata = [
        (generation._fix_param_name_to_vllm(name), str(dtype).removeprefix("torch."), list(shape))
        for name, dtype, shape in named_shapes(model)
    ]
    if generation.mode == "colocate":
        generation.sync_weights = _releasing(generation.sync_weights, store)
        generation.generate = _releasing(generation.generate, store)


def _releasing(method: Callable[..., Any], store: TieredStore) -> Callable[..., Any]:
    """Return a method of the engine before and after which the store has no copies in GPU memory.

    A sleeping engine takes memory for its weights at the start of ``sync_weights``, and for its cache right after.
    """

    @wraps(method)
    def with_memory(*args: Any, **options: Any) -> Any:
        release(store, compute_tier(store))
        try:
            return method(*args, **options)
        finally:
            release(store, compute_tier(store))

    return with_memory
