"""The model of a run, and the converters that build it. No other file imports all converters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatrain.converters.adapters import Adapters
from megatrain.converters.documents import AttentionByDocuments
from megatrain.converters.experts import ExpertsInParts
from megatrain.converters.multimodal import Images, MultimodalModules
from megatrain.models.graph import converted_graph

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

    from megatrain.models.converter import ConverterSpec, ModelConverter
    from megatrain.models.graph import ModelGraph
    from megatrain.models.hub import HubModel
    from megatrain.models.table import LoraConfig, ModelConfig

__all__ = ["ModelSpec", "build_graph", "converters_for"]


def converters_for(
    *,
    images: Images = "off",
    lora: LoraConfig | None = None,
    cuts_experts: bool = False,
    text_only: bool = False,
    of_task: ConverterSpec | None = None,
) -> tuple[ModelConverter, ...]:
    """Return new converters for one graph, in the order in which they change the model.

    Args:
        images: Treatment of image modules. "off" passes them through; other values keep them in the model.
        lora: Settings of adapters, which freeze the model's weights; None for no adapters.
        cuts_experts: Whether to cut fused experts that are larger than a part into several units.
        text_only: Whether the model has no folder with weights, so that no tensors can be passed through.
        of_task: Settings of the converter that turns a language model into the model of the task, if any.
    """
    found: list[ModelConverter] = []
    if of_task is not None:
        found.append(of_task.converter())
    if images != "off" or not text_only:
        found.append(MultimodalModules(images))
    if lora is not None:
        found.append(Adapters(lora, images))
    if cuts_experts:
        found.append(ExpertsInParts())
    found.append(AttentionByDocuments())
    return tuple(found)


def build_graph(
    config_or_folder: PretrainedConfig | Path | str,
    *,
    images: Images = "off",
    lora: LoraConfig | None = None,
    cuts_experts: bool = False,
    text_only: bool = False,
    of_task: ConverterSpec | None = None,
    **options: Any,
) -> ModelGraph:
    """Build the graph of a model with the converters that it needs.

    Args:
        config_or_folder: Hugging Face configuration, or a folder with `config.json`.
        options: Arguments of `converted_graph`. All other arguments are described at `converters_for`.

    Raises:
        UnsupportedModelError: If the model has no language model or no layers, or would train quantized weights.
        FreezeError: If a pattern matches no parameter, or if all parameters are frozen.
        AdapterError: If the model does not support these adapters.
    """
    converters = converters_for(
        images=images, lora=lora, cuts_experts=cuts_experts, text_only=text_only, of_task=of_task
    )
    return converted_graph(config_or_folder, converters, text_only=text_only, **options)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Specification of a run's model and its kernels.

    Attributes:
        table: The ``[model]`` table.
        folder: Hugging Face folder with config.json and safetensors.
        tokenizer_folder: Folder with the tokenizer's files.
        hub: Hub model, if ``folder`` is in the hub's cache; None for a folder of the user.
        lora: Settings of the adapters that are trained instead of the model, if any.
        is_trained: Whether weights are trained. If False, all weights are frozen.
        of_task: Settings of the converter that turns a language model into the model of the task, if any.
    """

    table: ModelConfig
    folder: str
    tokenizer_folder: str
    hub: HubModel | None = None
    lora: LoraConfig | None = None
    is_trained: bool = True
    of_task: ConverterSpec | None = None

    @property
    def name(self) -> str:
        """Id on the hub, or the folder."""
        return self.folder if self.hub is None else self.hub.id

    def build(self, dtype: torch.dtype) -> ModelGraph:
        """Return the graph of the model on the meta device. Raises the errors of `build_graph`."""
        return build_graph(
            self.folder,
            images=self.table.images,
            lora=self.lora,
            cuts_experts=self.table.split_experts,
            text_only=self.table.train_from_scratch,
            of_task=self.of_task,
            attn_implementation=self.table.attn_implementation,
            freeze=self.table.freeze,
            dtype=dtype,
            is_trained=self.is_trained,
        )
