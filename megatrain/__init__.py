"""megatrain: trains Hugging Face decoders layer by layer out of a tiered store; its parts for other trainers."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.config.load import load_config
    from megatrain.embed.activations import offload_activations
    from megatrain.embed.integrations import hf, lightning
    from megatrain.embed.named import named_tensors
    from megatrain.embed.offload import gathered, gradient_lanes, offload
    from megatrain.embed.optimizer import (
        TieredAdafactor,
        TieredAdamW,
        TieredLion,
        TieredMuon,
        TieredOptimizer,
        TieredSGD,
    )
    from megatrain.embed.pretrained import load_pretrained
    from megatrain.embed.stores import open_store, release
    from megatrain.extras.generation import generate
    from megatrain.extras.scoring import Scorer
    from megatrain.plan.planner import plan_run
    from megatrain.training.trainer import Trainer

__all__ = [
    "Scorer",
    "TieredAdafactor",
    "TieredAdamW",
    "TieredLion",
    "TieredMuon",
    "TieredOptimizer",
    "TieredSGD",
    "Trainer",
    "gathered",
    "generate",
    "gradient_lanes",
    "hf",
    "lightning",
    "load_config",
    "load_pretrained",
    "named_tensors",
    "offload",
    "offload_activations",
    "open_store",
    "plan_run",
    "release",
]

# Public name -> its module, imported at first use: the command line's help needs no torch.
# `plan_run`, not `plan`: importing the package `megatrain.plan` binds that name here.
_MODULES = {
    "Scorer": "extras.scoring",
    "TieredAdafactor": "embed.optimizer",
    "TieredAdamW": "embed.optimizer",
    "TieredLion": "embed.optimizer",
    "TieredMuon": "embed.optimizer",
    "TieredOptimizer": "embed.optimizer",
    "TieredSGD": "embed.optimizer",
    "Trainer": "training.trainer",
    "gathered": "embed.offload",
    "generate": "extras.generation",
    "gradient_lanes": "embed.offload",
    "load_config": "config.load",
    "load_pretrained": "embed.pretrained",
    "named_tensors": "embed.named",
    "offload": "embed.offload",
    "offload_activations": "embed.activations",
    "open_store": "embed.stores",
    "plan_run": "plan.planner",
    "release": "embed.stores",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":  # written once, in pyproject.toml
        return import_module("importlib.metadata").version("megatrain-tier")
    if name in ("hf", "lightning"):
        return import_module(f"megatrain.embed.integrations.{name}")
    if name in _MODULES:
        return getattr(import_module(f"megatrain.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'megatrain' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return what is public, also where it is not imported yet: for tab completion and ``help``."""
    has_lightning = (
        find_spec("lightning") is not None
    )  # else `help`, which looks at every name, would end with an error
    return sorted([*(name for name in __all__ if name != "lightning" or has_lightning), "__version__"])


def _ask_for_repeatable_products() -> None:
    """Set what makes the libraries of matrix products add in the same order, while it can still be set.

    Each reads its variable once, at its first product, and that may come long before the engine is made. MKL's sums
    depend on the number of threads by default, and ranks of one host have fewer than a run of one process; its strict
    mode gives a row the same bits among any others, too, on a processor of Intel. For cuBLAS the variable stays unset
    where CUDA is in use already, so that ``megatrain.engine.environment`` can tell.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _shorten_openmp_spinning() -> None:
    """Let OpenMP's threads spin for about 0.1 ms and then sleep, unless the user chose how they wait.

    A spinning thread takes a core from those that transfer and update blocks. Waking a sleeping one takes longer than
    an operator of a small model (decision 0111). Nothing changes in a process that has imported torch already.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # GNU, in torch's packages for Linux
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # LLVM and Intel, in milliseconds


_ask_for_repeatable_products()
_shorten_openmp_spinning()
