"""The interface for quirks of models. A converter is one file, which the core does not import.

The core builds a skeleton of a folder, finds its units, streams their weights through its forwards, and writes them
back. Some models or runs need more: adapters, experts in parts, images, attention within documents. A converter adds
it at one of a few moments, the methods of `ModelConverter`, listed in order of time. By default each method does
nothing. ``megatrain/converters/spec.py`` chooses the converters of a run; the core receives them as a tuple and calls
them in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from megatrain.base.layout import UnitLayout

__all__ = ["ConvertedGraph", "ConverterSpec", "InnerUnit", "LayerPart", "ModelConverter", "ReadMaster", "WeightSource"]

ReadMaster = Callable[[int, int], Tensor]
"""Returns elements of a layout's block from the first number to the second: 1-D fp32, valid until the next call."""

WeightSource = Callable[["UnitLayout"], AbstractContextManager[ReadMaster]]
"""Opens the fp32 master weights of one layout; they are valid within the context."""


class ModelConverter:
    """The changes for one quirk of one model. A converter serves one graph, and may keep state.

    Attributes:
        freezes_weights: Whether the model's weights are frozen, so that a folder may have them quantized.
    """

    freezes_weights: bool = False

    # -- the skeleton, whose parameters are on the meta device --------------------------------------------------------

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return the skeleton's transformers class after changing its config, or None for the default class."""
        return None

    def take_out(self, model: PreTrainedModel) -> None:
        """Remove tensors from a skeleton that has no buffers yet, or freeze some of its parameters."""

    def convert(self, model: PreTrainedModel) -> None:
        """Add or replace modules of a complete skeleton. New parameters are on the meta device."""

    def plain_model(self) -> AbstractContextManager[None]:
        """Return a context in which modules and names equal those in the model's folder."""
        return nullcontext()

    # -- its units and layouts ----------------------------------------------------------------------------------------

    def plain_name(self, name: str) -> str:
        """Return the name of a converted model's parameter in blocks, checkpoints and exports."""
        return name

    def is_unit(self, module: nn.Module) -> bool:
        """Return whether a module is one unit although the modules inside it own its parameters."""
        return False

    def is_optional(self, module: nn.Module) -> bool:
        """Return whether micro-batches may skip a unit. It is still visited in each step."""
        return False

    def cut(self, model: PreTrainedModel, layer: nn.Module) -> Sequence[InnerUnit]:
        """Return the units that replace one layer, in forward order; empty if the layer is one unit.

        Together they own all parameters of the layer. Called once for each layer that all micro-batches reach.
        """
        return ()

    # -- a pass, and an export ----------------------------------------------------------------------------------------

    def computing(self, on_dense_mask: Callable[[str], None], *, is_compiled: bool) -> AbstractContextManager[None]:
        """Return the context for the forward and backward of a pass. For one thread.

        Args:
            on_dense_mask: called with the cause whenever an attention mask of [S, S] is made.
            is_compiled: Whether layers are compiled, so that replacements inside them have no effect.
        """
        return nullcontext()

    def exported(self, graph: ConvertedGraph, source: WeightSource) -> WeightSource:
        """Return the weights for an export of the whole model, given the weights in the blocks."""
        return source


class ConverterSpec(Protocol):
    """A converter's settings in a config, from which each graph gets a new converter."""

    def converter(self) -> ModelConverter:
        """Return a new converter."""
        ...


class ConvertedGraph(Protocol):
    """The part of a model graph that converters and exports use."""

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
        part: The part of a larger module; None if it is a module of the model.
    """

    path: str
    module: nn.Module
    part: LayerPart | None = None


class LayerPart(Protocol):
    """Some rows of all parameters of a module, as a unit that computes the tokens routed to it.

    The parts of a module are called consecutively, with the same arguments. Parameter names equal those in the whole
    module.
    """

    @property
    def whole(self) -> nn.Module:
        """The unsplit module, whose names the model uses."""

    @property
    def rows(self) -> range:
        """Its range in the first dimension of every parameter."""

    @property
    def num_all(self) -> int:
        """Number of rows of the whole module."""

    @property
    def siblings(self) -> Sequence[LayerPart]:
        """All parts of the module, in call order."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Grouping key of parts with equal computation and memory."""

    def is_routed(self, arguments: Sequence[Any]) -> bool:
        """Return whether the arguments of a call have routing values, and are not only traced."""

    def is_idle(self, arguments: Sequence[Any]) -> bool:
        """Return whether no token of a call is routed to the part; False if unknown. May wait for the device."""

    def chance_of_no_token(self, arguments: Sequence[Any]) -> float:
        """Return the probability that a token is not routed to the part, assuming uniform routing."""

    def placeholder_result(self, arguments: Sequence[Tensor]) -> Tensor:
        """Return a placeholder result with the part's shape and dtype and the same gradient structure."""
