"""Interface of converters, which adapt models. Each converter is one file that the core never imports.

The core builds a skeleton of a folder, finds its units, streams their weights through its forwards, and writes them
back. Some models or runs need more: adapters, experts in parts, images, attention within documents. A converter adds
this in the methods of `ModelConverter`, which the core calls in the order in which they are listed. By default, each
method does nothing. ``CONVERTERS`` in ``megatrain/models/table.py`` lists the converters, and each one decides whether
a run needs it. The core receives them as a tuple and calls them in this order.
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
"""Function (start, stop) that returns these elements of a layout's block: 1-D, fp32, valid until the next call."""

WeightSource = Callable[["UnitLayout"], AbstractContextManager[ReadMaster]]
"""Function that opens the fp32 master weights of a layout, which are valid within the returned context."""


class ModelConverter:
    """Base class of converters. A converter belongs to one graph, and can keep state.

    Attributes:
        freezes_weights: Whether the converter freezes the model's weights, so that they can be quantized.
    """

    freezes_weights: bool = False

    @classmethod
    def for_model(cls, settings: ModelSettings) -> ModelConverter | None:
        """Return a new converter for one graph, or None if the run does not need it. By default every run does."""
        return cls()

    # -- the skeleton, whose parameters are on the meta device --------------------------------------------------------

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return the transformers class of the skeleton, or None for the default class. Can change ``config``."""
        return None

    def take_out(self, model: PreTrainedModel) -> None:
        """Remove tensors from a skeleton, or freeze parameters, before the buffers are created."""

    def convert(self, model: PreTrainedModel) -> None:
        """Add or replace modules of a complete skeleton. New parameters must be on the meta device."""

    def plain_model(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the modules and names of its folder."""
        return nullcontext()

    # -- units and layouts --------------------------------------------------------------------------------------------

    def plain_name(self, name: str) -> str:
        """Return the name of a converted model's parameter in blocks, checkpoints and exports."""
        return name

    def is_unit(self, module: nn.Module) -> bool:
        """Return whether a module is one unit although its parameters belong to modules inside it."""
        return False

    def is_optional(self, module: nn.Module) -> bool:
        """Return whether micro-batches can skip a unit. Each step visits it nevertheless."""
        return False

    def cut(self, model: PreTrainedModel, layer: nn.Module) -> Sequence[InnerUnit]:
        """Return the units that replace a layer, in forward order, or nothing if the layer stays one unit.

        Together, the units own all parameters of the layer. Called once for each layer that no micro-batch skips.
        """
        return ()

    # -- passes and exports -------------------------------------------------------------------------------------------

    def computing(self, on_dense_mask: Callable[[str], None], *, is_compiled: bool) -> AbstractContextManager[None]:
        """Return the context for the forward and backward of a pass. Not thread-safe.

        Args:
            on_dense_mask: Called with the cause whenever a dense attention mask, ``(S, S)``, is created.
            is_compiled: Whether layers are compiled, so that functions inside them cannot be replaced.
        """
        return nullcontext()

    def exported(self, graph: ConvertedGraph, source: WeightSource) -> WeightSource:
        """Return the source of the weights to export, given the source of the weights in the blocks."""
        return source


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of a run that decide which converters its model needs.

    Attributes:
        table: The ``[model]`` table.
        lora: Adapters, to train or only to run, or None; they freeze the model's weights.
        of_task: Converter settings that turn a language model into the task's model, or None if it is one.
    """

    table: ModelConfig
    lora: LoraConfig | None = None
    of_task: ConverterSpec | None = None


class ConverterSpec(Protocol):
    """A converter's settings in a config, from which each graph gets a new converter."""

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

    def exported(self, source: WeightSource) -> WeightSource: ...


@dataclass(frozen=True, slots=True, eq=False)
class InnerUnit:
    """A unit inside a layer.

    Attributes:
        path: Path inside the layer.
        part: Part of a larger module. None if ``module`` is a module of the model.
    """

    path: str
    module: nn.Module
    part: LayerPart | None = None


class LayerPart(Protocol):
    """A unit with a range of rows of each parameter of a module, which computes the tokens that are routed to it.

    The parts of a module are called consecutively, with the same arguments. Their parameters have the names of the
    whole module's parameters.
    """

    @property
    def whole(self) -> nn.Module:
        """The unsplit module in the model."""

    @property
    def rows(self) -> range:
        """Range of the part in the first dimension of every parameter."""

    @property
    def num_all(self) -> int:
        """Number of rows in the whole module."""

    @property
    def siblings(self) -> Sequence[LayerPart]:
        """All parts of the module, in call order."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Grouping key; parts with equal keys need equal computation and memory."""

    def has_routing(self, arguments: Sequence[Any]) -> bool:
        """Return whether a call's arguments contain actual routing values, unlike in a trace."""

    def is_idle(self, arguments: Sequence[Any]) -> bool:
        """Return whether it is known that no token of a call is routed to the part. Can synchronize with the device."""

    def chance_of_no_token(self, arguments: Sequence[Any]) -> float:
        """Return the probability that a token is not routed to the part, assuming uniform routing."""

    def placeholder_result(self, arguments: Sequence[Tensor]) -> Tensor:
        """Return a placeholder for the part's result, with the same shape, dtype and autograd inputs."""
