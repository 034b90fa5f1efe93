"""The model of a run, and the converters that build it; the only file that imports all converters."""

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
    """Return new converters for one graph, in the order in which they change it.

    Args:
        images: Treatment of image modules: "off" passes them through, otherwise they are in the model.
        lora: Adapters, to train or only to run; they freeze the model's weights.
        cuts_experts: Whether fused experts that are larger than a part become several units.
        text_only: Whether no folder has weights of the model, so that nothing can be passed through.
        of_task: Converter settings that turn a language model into the task's model, if it is another one.
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
        config_or_folder: A Hugging Face configuration, or a folder with `config.json`.
        images: As in `converters_for`.
        lora: As in `converters_for`.
        cuts_experts: As in `converters_for`.
        text_only: As in `converters_for`, and in `converted_graph`.
        of_task: As in `converters_for`.
        options: Options of `converted_graph`.

    Raises:
        UnsupportedModelError: no language model, no layers, or quantized weights that would be trained.
        FreezeError: a pattern matches nothing, or everything is frozen.
        AdapterError: the model has no place for such adapters.
    """
    converters = converters_for(
        images=images, lora=lora, cuts_experts=cuts_experts, text_only=text_only, of_task=of_task
    )
    return converted_graph(config_or_folder, converters, text_only=text_only, **options)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The trained model and its kernels.

    Attributes:
        table: The ``[model]`` table.
        folder: Hugging Face folder with config.json and safetensors.
        tokenizer_folder: folder with the tokenizer's files.
        hub: the hub model whose cache the folder is; None for the user's folder.
        lora: adapters that are trained instead of the model, if any.
        is_trained: False if the model is only run, with all weights frozen.
        of_task: converter settings that turn a language model into the task's model, if it is another one.
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
        """The id on the hub, or the folder."""
        return self.folder if self.hub is None else self.hub.id

    def build(self, dtype: torch.dtype) -> ModelGraph:
        """Return the graph of the model, on the meta device. Raises as :func:`build_graph`."""
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
