"""Loads a Hugging Face folder directly into a store. The whole model is never in memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain.base.layout import build_layout, views
from megatrain.embed.block_homes import compute_device
from megatrain.embed.offload import move_buffers, offload
from megatrain.embed.offloaded_module import offloaded_module
from megatrain.embed.weights import block_of
from megatrain.models.folder import join_names
from megatrain.models.hub import fetch_weights, find_hub_model
from megatrain.models.load import WeightLoader
from megatrain.models.skeleton import build_skeleton, resolve_config
from tiered import TieredStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_pretrained(
    folder: Path | str,
    store: TieredStore,
    *,
    dtype: torch.dtype | str = "auto",
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    trainable: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """Return an offloaded causal language model. Its weights are read from a folder into the store, unit by unit.

    Args:
        folder: Hugging Face folder with safetensors files, or id of a model on the hub.
        dtype: Dtype of the weights, such as "bfloat16" or ``torch.bfloat16``; "auto" for the dtype in the config.
        attn_implementation: As in transformers; "auto" for transformers' default.
        revision: Branch, tag or commit of a model on the hub.
        trainable: False for a teacher or a reference model. It is frozen and has no gradients.
        options: Further arguments of ``offload``.

    Raises:
        ValueError: The dtype does not exist.
        ModelFolderError: The folder is damaged, or its weights do not match its config. The subclass ``HubError`` is
            raised if a hub model cannot be fetched.
        UnsupportedModelError: The model is not a causal language model, or its weights are quantized.
        CapacityError: The store is too small.
    """
    hub = find_hub_model(str(folder), revision)
    if hub is not None:
        fetch_weights(hub, show_bar=True)
        folder = hub.folder
    config = resolve_config(Path(folder), trust_remote_code=trust_remote_code)
    weight_dtype = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else _parse_dtype(dtype)
    model = build_skeleton(
        config,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        dtype=weight_dtype,
        text_only=True,
    )
    weights = WeightLoader(folder, model)
    if extra_names := [name for name, owner in weights.origin.passthrough.owners.items() if owner != "buffers"]:
        warnings.warn(
            f"{folder}: {len(extra_names)} tensors do not belong to {type(model).__name__} and will not be saved: "
            f"{join_names(extra_names)}",
            stacklevel=2,
        )
    model.requires_grad_(trainable)
    offload(model, store, **options)
    offloaded = offloaded_module(model)
    assert offloaded is not None
    for block in offloaded.blocks:
        with block.new_contents() as flat:
            weights.fill(block.layout, views(flat, block.layout))
        block.mark_filled()
    _load_ordinary(model, weights, compute_device(store))
    weights.load_buffers()
    move_buffers(model, compute_device(store))
    return model


def _parse_dtype(name: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'dtype="{name}" does not exist. Pass "bfloat16", "float32" or "auto"')
    return dtype


def _load_ordinary(model: PreTrainedModel, weights: WeightLoader, device: torch.device) -> None:
    """Load the parameters that stay outside of the store."""
    parameters = {name: p for name, p in model.named_parameters() if block_of(p) is None}
    if not parameters:
        return
    values = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in parameters.items()}
    layout = build_layout("left", ((name, p.shape) for name, p in parameters.items()), trainable=False)
    weights.fill(layout, values)
    names = {id(parameter): name for name, parameter in parameters.items()}
    new_parameters: dict[str, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in names:
                name = names[id(parameter)]
                if name not in new_parameters:
                    new_parameters[name] = nn.Parameter(values[name].to(device), parameter.requires_grad)
                module._parameters[leaf] = new_parameters[name]
