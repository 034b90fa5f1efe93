"""A Hugging Face folder straight into the store: the model is never whole in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatrain.embed.stores import compute_device
from megatrain.embed.tiering import tier, tiered_module
from megatrain.models.layout import views
from megatrain.models.load import WeightLoader
from megatrain.models.skeleton import build_skeleton, resolve_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tiered.store import TieredStore

__all__ = ["load_pretrained"]


def load_pretrained(
    folder: Path | str,
    store: TieredStore,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Return a tiered causal language model with the weights of a folder, read into the store unit by unit.

    Args:
        folder: a Hugging Face folder with safetensors.
        dtype: of the weights; "auto": that of the config.
        attn_implementation: as in transformers; "auto" leaves the choice to it.
        options: as for ``tier``.

    Raises:
        ModelFolderError: the folder is damaged or its weights do not fit its config. UnsupportedModelError: no causal
            language model, or quantized weights. CapacityError: the store is too small.
    """
    config = resolve_config(Path(folder), trust_remote_code=trust_remote_code)
    wanted = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    model = build_skeleton(
        config, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, dtype=wanted
    )
    weights = WeightLoader(folder, model)
    tier(model, store, **options)
    for block in tiered_module(model).blocks:
        with torch.no_grad(), store.acquire(block.key, "ram", "w") as lease:
            lease.tensor.zero_()
            weights.fill(block.layout, views(lease.tensor, block.layout))
        block.filled()
    weights.load_buffers()
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(compute_device(store))
    return model
