"""What an engine is given beside a store: a model whose weights are blocks of it, and how its steps are computed."""

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
    """A model that runs on a device while its weights are blocks of a store. A plan makes it.

    Attributes:
        stays: Copies that stay in the compute tier from one use to the next; nothing: each is fetched for each use.
    """

    graph: ModelGraph
    trace: VisitTrace
    program: StepProgram
    homes: Mapping[str, str]
    device: torch.device
    stays: Stays = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecipe:
    """How the steps of a model are computed.

    Attributes:
        segments: Returns what of a layout is updated, with learning rate and decay.
        max_grad_norm: Clips the global norm, or each layer's where the program does not defer updates; 0: no clipping.
        device_optimizer: Updates blocks in the compute tier, if the program has such updates.
        nonfinite: What to do with a gradient that is NaN or infinite: ``stop`` raises, ``skip`` leaves its update out,
            ``ignore`` uses it. Where updates are not deferred each layer's gradient is judged alone.
        seed: Random numbers of dropout and noise come from it.
        order: "layer": all micro-batches of a unit before the next unit; "micro_batch": one micro-batch at a time.
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
