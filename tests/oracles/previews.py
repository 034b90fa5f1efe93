"""Previews and statistics of a config's data, as on the command line."""

from __future__ import annotations

from megatrain.config.schema import RunConfig
from megatrain.data.encoding import load_tokenizer
from megatrain.data.preview import DataStats, RowPreview, dataset_stats, preview_rows
from megatrain.training.resolve import resolve_batch, resolve_data, resolve_model


def preview_of(config: RunConfig, n: int = 3, row: int | None = None) -> list[RowPreview]:
    model = resolve_model(config)
    tokenizer = load_tokenizer(model.tokenizer_folder, chat_template=model.table.chat_template)
    return preview_rows(resolve_data(config), tokenizer, n, row)


def stats_of(config: RunConfig) -> DataStats:
    model, batch = resolve_model(config), resolve_batch(config, "cpu")
    tokenizer = load_tokenizer(model.tokenizer_folder, chat_template=model.table.chat_template)
    return dataset_stats(resolve_data(config), tokenizer, batch.num_rows, batch.micro_batch_rows)
