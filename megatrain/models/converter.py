"""The door for quirks of models: a converter is one file that the core does not import.

The core builds a skeleton of a folder, finds its units, streams their weights through its forwards, and writes them
back. What only some models or some runs need beside that (adapters, experts in parts, images, attention inside of
documents) changes the model at one of a few moments. Those are the methods of `ModelConverter`, in order of time; each
does nothing until a converter says otherwise. Which converters a run has is decided above
(``megatrain/converters/spec.py``) and handed in as a tuple, which the core calls in its order.
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
"""Gives the fp32 master weights of one layout for as long as the context is open."""


class ModelConverter:
    """What one quirk changes of one model, and when. A converter serves one graph, and may remember what it found.

    Attributes:
        freezes_weights: True: the model's own weights are not trained, so a folder may have them quantized.
    """

    freezes_weights: bool = False

    # -- the skeleton, whose parameters are on the meta device --------------------------------------------------------

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return the class of transformers that the skeleton is of, having changed its config; None: no other one."""
        return None

    def take_out(self, model: PreTrainedModel) -> None:
        """Take tensors out of a skeleton that has no buffers yet, or freeze some of its parameters."""

    def convert(self, model: PreTrainedModel) -> None:
        """Add or exchange modules of a skeleton that is complete. New parameters are on the meta device."""

    def plain_model(self) -> AbstractContextManager[None]:
        """Return a context in which modules and names are those of the model's folder."""
        return nullcontext()

    # -- its units and layouts ----------------------------------------------------------------------------------------

    def plain_name(self, name: str) -> str:
        """Return the name that blocks, checkpoints and exports give to a parameter of the converted model."""
        return name

    def is_unit(self, module: nn.Module) -> bool:
        """Return whether a module is one unit although its parameters are those of modules inside of it."""
        return False

    def is_optional(self, module: nn.Module) -> bool:
        """Return whether micro-batches may leave a unit out. It is visited in each step all the same."""
        return False

    def cut(self, model: PreTrainedModel, layer: nn.Module) -> Sequence[InnerUnit]:
        """Return the units that take the place of one layer, in the order of its forward; empty: it is one unit.

        Together they own all parameters of the layer. Called once for each layer that all micro-batches reach.
        """
        return ()

    # -- a pass, and an export ----------------------------------------------------------------------------------------

    def computing(self, on_dense_mask: Callable[[str], None], *, is_compiled: bool) -> AbstractContextManager[None]:
        """Return the context that forward and backward of a pass run in. For one thread.

        Args:
            on_dense_mask: to be called with what needs it whenever an attention mask of [S, S] is made.
            is_compiled: layers are compiled, so that what a context replaces in them is not seen.
        """
        return nullcontext()

    def exported(self, graph: ConvertedGraph, source: WeightSource) -> WeightSource:
        """Return the weights that an export of the whole model writes, given those that the blocks have."""
        return source


class ConverterSpec(Protocol):
    """What a config says of a converter: a value, of which each graph gets a new one."""

    def converter(self) -> ModelConverter:
        """Return a new converter."""
        ...


class ConvertedGraph(Protocol):
    """What a converter and an export need to know of a model graph."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def layouts(self) -> Mapping[str, UnitLayout]: ...

    def plain_model(self) -> AbstractContextManager[None]: ...

    def exported(self, source: WeightSource) -> WeightSource: ...


@dataclass(frozen=True, slots=True, eq=False)
class InnerUnit:
    """A unit inside of a layer.

    Attributes:
        path: Path inside of the layer.
        part: The part of a larger module that it is; None: it is a module of the model.
    """

    path: str
    module: nn.Module
    part: LayerPart | None = None


class LayerPart(Protocol):
    """Some rows of all parameters of a module, as a unit that computes with the tokens that were routed to it.

    The parts of a module are called one right after the other, with the same arguments. Its parameters have the names
    that they have in the whole module.
    """

    @property
    def whole(self) -> nn.Module:
        """The module of all parts, whose parameters the model's names mean."""

    @property
    def rows(self) -> range:
        """Its rows: the first dimension of every parameter."""

    @property
    def num_all(self) -> int:
        """Rows of the whole module."""

    @property
    def siblings(self) -> Sequence[LayerPart]:
        """All parts of the module, in the order in which they are called."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all parts have in common that compute alike, with as much memory."""

    def is_routed(self, arguments: Sequence[Any]) -> bool:
        """Return whether the arguments of a call say where tokens go: they have values, and are not only traced."""

    def is_idle(self, arguments: Sequence[Any]) -> bool:
        """Return whether no token of a call goes to the part; False where that is not known. The host may wait."""

    def chance_of_no_token(self, arguments: Sequence[Any]) -> float:
        """Return how likely a token goes to no row of the part, where all rows are as likely."""

    def uncomputed(self, arguments: Sequence[Tensor]) -> Tensor:
        """Return a result of the shape and dtype of the part's, with gradients for all that has one, uncomputed."""
