"""The model of a run, and the converters that build it."""

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
    """Return new converters for one graph, in the order in which they change it."""
    found = [None if settings.of_task is None else settings.of_task.converter()]
    for name in CONVERTERS:
        file, _, made = name.partition(".")
        found.append(getattr(import_module(f"megatrain.converters.{file}"), made).for_model(settings))
    return tuple(converter for converter in found if converter is not None)


def build_graph(
    config_or_folder: PretrainedConfig | Path | str,
    table: ModelConfig | None = None,
    *,
    lora: LoraConfig | None = None,
    of_task: ConverterSpec | None = None,
    dtype: torch.dtype = torch.float32,
    is_trained: bool = True,
    **keys: Any,
) -> ModelGraph:
    """Build the graph of a model with the converters that it needs.

    Args:
        config_or_folder: A Hugging Face configuration, or a folder with `config.json`.
        table: The ``[model]`` table, or None for ``keys`` and the defaults of all other keys.
        lora: As in `ModelSettings`.
        of_task: As in `ModelSettings`.
        dtype: As in `converted_graph`.
        is_trained: As in `converted_graph`.
        keys: Keys of ``[model]``.

    Raises:
        UnsupportedModelError: no language model, no layers, or quantized weights that would be trained.
        FreezeError: a pattern matches nothing, or everything is frozen.
        AdapterError: the model has no place for such adapters.
    """
    table = table or ModelConfig.model_construct(**keys)
    return converted_graph(
        config_or_folder,
        converters_for(ModelSettings(table, lora, of_task)),
        attn_implementation=table.attn_implementation,
        freeze=table.freeze,
        dtype=dtype,
        text_only=table.train_from_scratch,
        is_trained=is_trained,
    )


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
            self.folder, self.table, lora=self.lora, of_task=self.of_task, dtype=dtype, is_trained=self.is_trained
        )
