"""Arguments of an engine in addition to a store: a model whose weights are blocks, and the recipe of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.objective import Objective

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.engine.compiled_layers import LayerCompiler
    from megatrain.engine.program import Stays, StepProgram, VisitTrace
    from megatrain.models.graph import ModelGraph
    from megatrain.optim.base import Optimizer, Segment

__all__ = ["StepRecipe", "StreamedModel"]


@dataclass(frozen=True, slots=True)
class StreamedModel:
    """Model that runs on a device while its weights are blocks of a store. A plan creates it.

    Attributes:
        stays: Copies that stay in the compute tier from one use to the next. All other copies are fetched for each use.
    """

    graph: ModelGraph
    trace: VisitTrace
    program: StepProgram
    homes: Mapping[str, str]
    device: torch.device
    stays: Stays = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecipe:
    """Computation of the steps of a model.

    Attributes:
        segments: Returns the updated segments of a layout, with learning rate and decay.
        max_grad_norm: Limit of the global norm, or of each layer's norm if updates are not deferred; 0 for no clipping.
        device_optimizer: Updates blocks in the compute tier, if the program has such updates.
        nonfinite: Treatment of a gradient that is NaN or infinite: ``stop`` raises, ``skip`` skips its update,
            ``ignore`` uses it. If updates are not deferred, each layer's gradient is judged alone.
        seed: Seed of the random numbers for dropout and noise.
        order: "layer" for all micro-batches of a unit before the next unit; "micro_batch" for one micro-batch at a
            time.
    """

    optimizer: Optimizer
    segments: Callable[[UnitLayout], Sequence[Segment]]
    max_grad_norm: float
    device_optimizer: Optimizer | None = None
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    seed: int = 0
    order: Literal["layer", "micro_batch"] = "layer"
    objective: Objective = field(default_factory=Objective)
    compiler: LayerCompiler | None = None
