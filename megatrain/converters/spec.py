"""Specification of a run's model, and the converters that build it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.models.converter import ConverterSpec, ModelConverter, ModelSettings
from megatrain.models.graph import ModelGraph, converted_graph
from megatrain.models.hub import HubModel
from megatrain.models.table import CONVERTERS, LoraConfig, ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ModelSpec", "build_graph", "converters_for"]


def converters_for(settings: ModelSettings) -> tuple[ModelConverter, ...]:
    """Return new converters for one graph, in the order in which they change the graph."""
    converters = [None if settings.task_spec is None else settings.task_spec.converter()]
    for name in CONVERTERS:
        module_name, _, class_name = name.partition(".")
        converters.append(getattr(import_module(f"megatrain.converters.{module_name}"), class_name).for_model(settings))
    return tuple(converter for converter in converters if converter is not None)


def build_graph(
    config_or_folder: PretrainedConfig | Path | str,
    table: ModelConfig | None = None,
    *,
    lora: LoraConfig | None = None,
    task_spec: ConverterSpec | None = None,
    dtype: torch.dtype = torch.float32,
    is_trained: bool = True,
    **keys: Any,
) -> ModelGraph:
    """Build a model's graph with the converters that its settings select.

    Args:
        config_or_folder: Hugging Face configuration, or a folder with `config.json`.
        table: The ``[model]`` table, or None to build it from ``keys`` and defaults.
        lora: As in `ModelSettings`.
        task_spec: As in `ModelSettings`.
        dtype: As in `converted_graph`.
        is_trained: As in `converted_graph`.
        keys: Keys of ``[model]``.

    Raises:
        UnsupportedModelError: If there is no language model, it has no layers, or quantized weights would be trained.
        FreezeError: If a pattern matches no parameter, or if all parameters are frozen.
        AdapterError: If the model does not support these adapters.
    """
    table = table or ModelConfig.model_construct(**keys)
    return converted_graph(
        config_or_folder,
        converters_for(ModelSettings(table, lora, task_spec)),
        attn_implementation=table.attn_implementation,
        freeze=table.freeze,
        dtype=dtype,
        text_only=table.train_from_scratch,
        is_trained=is_trained,
    )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Specification of a run's model.

    Attributes:
        table: The ``[model]`` table.
        folder: Hugging Face folder with config.json and safetensors.
        tokenizer_folder: Folder with the tokenizer's files.
        hub: Hub model if ``folder`` is in the hub's cache, or None for a local folder.
        lora: Settings of the adapters that are trained instead of the model, or None.
        is_trained: Whether weights are trained. If False, all weights are frozen.
        task_spec: Settings of the converter that turns a language model into the task's model, or None.
    """

    table: ModelConfig
    folder: str
    tokenizer_folder: str
    hub: HubModel | None = None
    lora: LoraConfig | None = None
    is_trained: bool = True
    task_spec: ConverterSpec | None = None

    @property
    def name(self) -> str:
        """Id of the hub model, or the folder."""
        return self.folder if self.hub is None else self.hub.id

    def build(self, dtype: torch.dtype) -> ModelGraph:
        """Build the model's graph on the meta device. Raises the same errors as `build_graph`."""
        return build_graph(
            self.folder, self.table, lora=self.lora, task_spec=self.task_spec, dtype=dtype, is_trained=self.is_trained
        )
