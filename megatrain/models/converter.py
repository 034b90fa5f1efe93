"""Interface of converters. A converter adapts a model. It is in a separate file, which the core never imports.

The core builds a folder's skeleton, finds its units, streams their weights through the forwards, and writes the weights
back. Some models or runs need more: adapters, split experts, images, or attention within documents. Converters add
this by overriding methods of `ModelConverter`. By default, each method does nothing. The methods are listed in the
order in which the core calls them. ``CONVERTERS`` in ``megatrain/models/table.py`` lists the converters. Each converter
decides whether a run needs it. The core gets the required converters as a tuple, in the order of ``CONVERTERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from megatrain.base.layout import UnitLayout
from megatrain.models.table import LoraConfig, ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "ConvertedGraph",
    "ConverterSpec",
    "InnerUnit",
    "LayerPart",
    "ModelConverter",
    "ModelSettings",
    "ReadMaster",
    "WeightSource",
]

ReadMaster = Callable[[int, int], Tensor]
"""Function (start, stop) that returns a range of a layout's block: 1-D, fp32, valid until the next call."""

WeightSource = Callable[["UnitLayout"], AbstractContextManager[ReadMaster]]
"""Function that opens a layout's fp32 master weights. They can be read inside the returned context."""


class ModelConverter:
    """Base class of converters. A converter serves a single graph and can keep state.

    Attributes:
        freezes_weights: Whether the converter freezes the model's weights. Frozen weights can be quantized.
    """

    freezes_weights: bool = False

    @classmethod
    def for_model(cls, settings: ModelSettings) -> ModelConverter | None:
        """Return a new converter for one graph, or None if the run needs none. The default always returns one."""
        return cls()

    # -- the skeleton, whose parameters are on the meta device --------------------------------------------------------

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return the skeleton's transformers class, or None for the default class. Can change ``config``."""
        return None

    def remove_untrained(self, model: PreTrainedModel) -> None:
        """Remove tensors from a skeleton, or freeze parameters. Called before the buffers are created."""

    def convert(self, model: PreTrainedModel) -> None:
        """Add or replace modules in a complete skeleton. New parameters must be on the meta device."""

    def plain_model(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the same modules and names as its folder."""
        return nullcontext()

    # -- units and layouts --------------------------------------------------------------------------------------------

    def plain_name(self, name: str) -> str:
        """Convert a parameter's name in the converted model to its name in blocks, checkpoints and exports."""
        return name

    def is_unit(self, module: nn.Module) -> bool:
        """Return whether a module is one unit even though its submodules own its parameters."""
        return False

    def is_optional(self, module: nn.Module) -> bool:
        """Return whether micro-batches can skip a unit. Each step still visits the unit once."""
        return False

    def split_layer(self, model: PreTrainedModel, layer: nn.Module) -> Sequence[InnerUnit]:
        """Return the units that replace a layer, in forward order, or an empty sequence to keep the layer as one unit.

        Together, the units must own all of the layer's parameters. Called once per layer that every micro-batch uses.
        """
        return ()

    # -- passes and exports -------------------------------------------------------------------------------------------

    def pass_context(self, on_dense_mask: Callable[[str], None], *, is_compiled: bool) -> AbstractContextManager[None]:
        """Return the context in which a pass runs its forward and backward. Not thread-safe.

        Args:
            on_dense_mask: Called whenever a dense attention mask, ``(S, S)``, is created. The argument is the cause.
            is_compiled: Whether layers are compiled. If they are, functions inside them cannot be replaced.
        """
        return nullcontext()

    def export_source(self, graph: ConvertedGraph, source: WeightSource) -> WeightSource:
        """Return the source of the weights to export. ``source`` reads the weights from the blocks."""
        return source


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of a run that determine which converters the model needs.

    Attributes:
        table: The ``[model]`` table.
        lora: Settings of the adapters, or None for no adapters. Adapters freeze the model's weights.
        task_spec: Settings of the converter that turns a language model into the task's model. None if not needed.
    """

    table: ModelConfig
    lora: LoraConfig | None = None
    task_spec: ConverterSpec | None = None


class ConverterSpec(Protocol):
    """Settings of a converter in a config. Each graph gets a new converter with these settings."""

    def converter(self) -> ModelConverter:
        """Create a converter for one graph."""
        ...


class ConvertedGraph(Protocol):
    """Interface of a model graph for converters and exports."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def layouts(self) -> Mapping[str, UnitLayout]: ...

    def plain_model(self) -> AbstractContextManager[None]: ...

    def export_source(self, source: WeightSource) -> WeightSource: ...


@dataclass(frozen=True, slots=True, eq=False)
class InnerUnit:
    """A unit inside a layer.

    Attributes:
        path: Path inside the layer.
        part: Part of a larger module that the unit runs, or None if ``module`` is one of the model's own modules.
    """

    path: str
    module: nn.Module
    part: LayerPart | None = None


class LayerPart(Protocol):
    """A unit that owns a range of rows of every parameter of a module. It computes only the tokens routed to it.

    A module's parts are called one after another with the same arguments. Their parameters have the same names as the
    whole module's parameters.
    """

    @property
    def parent(self) -> nn.Module:
        """The unsplit module in the model."""

    @property
    def rows(self) -> range:
        """Row range of this part in the first dimension of every parameter."""

    @property
    def total_rows(self) -> int:
        """Number of rows in the whole module."""

    @property
    def siblings(self) -> Sequence[LayerPart]:
        """All parts of the module, in call order."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Grouping key. Parts with equal keys need the same amounts of computation and memory."""

    def has_routing(self, arguments: Sequence[Any]) -> bool:
        """Return whether a call's arguments contain real routing values, which a trace does not have."""

    def is_idle(self, arguments: Sequence[Any]) -> bool:
        """Return whether a call is known to route no token to this part. Can synchronize with the device."""

    def no_token_probability(self, arguments: Sequence[Any]) -> float:
        """Return the probability that a given token is not routed to this part if routing is uniform."""

    def placeholder_result(self, arguments: Sequence[Tensor]) -> Tensor:
        """Return a placeholder for the part's result. It has the same shape, dtype and autograd inputs."""
