"""Training of Hugging Face decoders, layer by layer from a tiered store. Other trainers can use its parts."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tiered.lazy import lazy_names

if TYPE_CHECKING:
    from megatrain.config.load import load_config as load_config
    from megatrain.embed.activations import offload_activations as offload_activations
    from megatrain.embed.integrations import hf as hf
    from megatrain.embed.integrations import lightning as lightning
    from megatrain.embed.named import named_tensors as named_tensors
    from megatrain.embed.offload import gradient_lanes as gradient_lanes
    from megatrain.embed.offload import offload as offload
    from megatrain.embed.offloaded_module import gathered as gathered
    from megatrain.embed.optimizer import TieredOptimizer as TieredOptimizer
    from megatrain.embed.pretrained import load_pretrained as load_pretrained
    from megatrain.embed.stores import open_store as open_store
    from megatrain.embed.stores import release as release
    from megatrain.embed.update_rules import TieredAdafactor as TieredAdafactor
    from megatrain.embed.update_rules import TieredAdamW as TieredAdamW
    from megatrain.embed.update_rules import TieredLion as TieredLion
    from megatrain.embed.update_rules import TieredMuon as TieredMuon
    from megatrain.embed.update_rules import TieredSGD as TieredSGD
    from megatrain.extras.generation import generate as generate
    from megatrain.extras.scoring import Scorer as Scorer
    from megatrain.plan.planner import plan_run as plan_run
    from megatrain.training.trainer import Trainer as Trainer
else:
    # The public name is `plan_run`, because importing the package `megatrain.plan` binds `plan` in this module.
    __getattr__, _names, __all__ = lazy_names(__name__, distribution="megatrain-tier")

    def __dir__() -> list[str]:
        """Return the public names. ``lightning`` is omitted if it is not installed: ``help`` would fail on it."""
        return [name for name in _names() if name != "lightning" or find_spec("lightning") is not None]


def _set_deterministic_matmul() -> None:
    """Set the environment variables that make matrix products add in a fixed order.

    This must happen at import, because each library reads its variable at its first product. By default, MKL's sums
    depend on the number of threads, and ranks of one host have fewer threads than a single process. On Intel CPUs,
    MKL's strict mode also makes the result of a row independent of all other rows. The cuBLAS variable stays unset if
    CUDA is already in use, so that ``megatrain.engine.device.environment`` can detect this.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _shorten_openmp_spinning() -> None:
    """Let OpenMP threads spin for about 0.1 ms before they sleep, unless the user has set ``OMP_WAIT_POLICY``.

    A spinning thread takes a core from the threads that transfer and update blocks. But waking a thread takes longer
    than an operator of a small model (decision 0111). The setting has no effect if torch is already imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # GNU OpenMP, in torch's packages for Linux
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # LLVM and Intel OpenMP, in milliseconds


_set_deterministic_matmul()
_shorten_openmp_spinning()
