"""megatrain: trains Hugging Face decoders layer by layer out of a tiered store; its parts for other trainers."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.embed.activations import offload_activations
    from megatrain.embed.integrations import hf, lightning
    from megatrain.embed.optimizer import TieredAdafactor, TieredAdamW, TieredLion, TieredOptimizer, TieredSGD
    from megatrain.embed.pretrained import load_pretrained
    from megatrain.embed.stores import open_store
    from megatrain.embed.tier import gathered, tier

__all__ = [
    "TieredAdafactor",
    "TieredAdamW",
    "TieredLion",
    "TieredOptimizer",
    "TieredSGD",
    "gathered",
    "hf",
    "lightning",
    "load_pretrained",
    "offload_activations",
    "open_store",
    "tier",
]

#: Imported when they are first asked for: the command line asks for none, and its help needs no torch.
_HOMES = {
    "TieredAdafactor": "optimizer",
    "TieredAdamW": "optimizer",
    "TieredLion": "optimizer",
    "TieredOptimizer": "optimizer",
    "TieredSGD": "optimizer",
    "gathered": "tier",
    "load_pretrained": "pretrained",
    "offload_activations": "activations",
    "open_store": "stores",
    "tier": "tier",
}


def __getattr__(name: str) -> Any:
    if name in ("hf", "lightning"):
        return import_module(f"megatrain.embed.integrations.{name}")
    if name in _HOMES:
        return getattr(import_module(f"megatrain.embed.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'megatrain' has no attribute '{name}'")


def _ask_for_repeatable_cublas() -> None:
    """Set what makes cuBLAS add in the same order at every run, while it can still be set.

    torch reads the variable once, at its first matrix product on a GPU, and that may come long before the engine asks
    for deterministic kernels. Where CUDA is in use already the variable stays unset, so that
    ``megatrain.engine.environment`` can tell.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


_ask_for_repeatable_cublas()
