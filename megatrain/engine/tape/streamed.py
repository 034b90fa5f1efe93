"""Arguments of the engines: a model whose weights are blocks of a store, and a recipe for optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.head.objective import Objective

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.engine.program.step_program import NextUses, StepProgram
    from megatrain.engine.program.visit_trace import VisitTrace
    from megatrain.engine.unit.compiled_layers import LayerCompiler
    from megatrain.models.graph import ModelGraph
    from megatrain.optim.base import Optimizer, Segment


@dataclass(frozen=True, slots=True)
class StreamedModel:
    """Model that runs on a device while its weights are blocks of a store. Created from a plan.

    Attributes:
        stays: Copies that stay in the compute tier between two uses. All other copies are fetched for each use.
    """

    graph: ModelGraph
    trace: VisitTrace
    program: StepProgram
    homes: Mapping[str, str]
    device: torch.device
    stays: NextUses = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecipe:
    """Settings for a model's optimizer steps.

    Attributes:
        segments: Function that returns the segments of a layout to update, with learning rates and weight decays.
        max_grad_norm: Limit on the global norm, or on each layer's norm if updates are not deferred; 0 for no clipping.
        device_optimizer: Optimizer for updates in the compute tier; None if no update runs there.
        nonfinite: Reaction to NaN or infinite gradients: ``stop`` raises an error, ``skip`` skips the update,
            ``ignore`` uses the gradients. If updates are not deferred, this applies to each layer separately.
        seed: Seed for dropout and noise.
        order: "layer" runs all micro-batches of a unit before the next unit; "micro_batch" runs them one at a time.
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
