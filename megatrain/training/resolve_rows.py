"""Resolves a config's model folder, tokenizer folder and data sets, without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.config.schema import RunConfig
from megatrain.data.dataset import DataSpec
from megatrain.data.table import DatasetConfig
from megatrain.models.hub import find_hub_model

__all__ = ["resolve_data", "resolve_folders"]


def resolve_folders(config: RunConfig) -> tuple[str, str]:
    """Return the folders of the model and its tokenizer. Download missing hub files, except weights.

    Raises:
        HubError: The hub has no such model, or cannot be reached.
    """
    table = config.model
    hub = find_hub_model(table.model_name_or_path, table.revision)
    folder = table.model_name_or_path if hub is None else str(hub.folder)
    if table.tokenizer_name_or_path is None:
        return folder, folder
    tokenizer = find_hub_model(table.tokenizer_name_or_path, None)
    return folder, table.tokenizer_name_or_path if tokenizer is None else str(tokenizer.folder)


def resolve_data(config: RunConfig, sources: Sequence[DatasetConfig] | None = None) -> DataSpec:
    """Return the spec of the training data.

    Args:
        sources: Data sets that replace ``[[data.train]]``. A validation split is then disabled.
    """
    keys, kind = dict[str, Any](), config.row_kind
    if sources is not None:
        is_streamed = config.data.streaming and all(source in config.data.train for source in sources)
        keys |= {"train": tuple(sources), "val_size": None, "streaming": is_streamed}
    if kind.reader is not None:
        datasets = config.data.train if sources is None else sources
        keys |= {
            "train": tuple(source.model_copy(update={"format": kind.reader.name}) for source in datasets),
            "train_on": "completion",
        }
    return DataSpec(
        table=config.data.model_copy(update=keys),
        kind=kind,
        seed=config.data_seed,
        images_folder=None if config.model.images == "off" else resolve_folders(config)[0],
        scores=config.distill.scores if config.task == "distill" and sources is None else None,
    )
