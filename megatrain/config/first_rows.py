"""Facts about the first rows of local training data, from which ``init`` writes a first config."""

from __future__ import annotations

from pathlib import Path

from megatrain.config.starter import DataFacts
from megatrain.data.files import ARROW_SUFFIXES, TEXT_SUFFIXES, suffix_of
from megatrain.data.row_kind import row_kind
from megatrain.data.rows_report import DataError
from megatrain.data.sources import detect_format, is_hub_name
from megatrain.tasks.table import TASK_FACTS


def first_rows(path: str, config_path: str, task: str | None) -> DataFacts:
    """Return facts about the first rows of a file, glob or folder. Nothing is fetched from the network.

    Args:
        config_path: Path as written in the config.
        task: Task of the rows, or None to derive the task from the rows.
    """
    if is_hub_name(path):
        if suffix_of(Path(path)) in (*TEXT_SUFFIXES, *ARROW_SUFFIXES):
            return DataFacts(config_path, problem=f"{config_path}: there is no such file yet")
        return DataFacts(config_path)  # a data set on the hub, which `init` does not fetch
    try:
        preview = detect_format(path, None if task is None else row_kind(TASK_FACTS[task].rows(None)))
    except DataError as error:
        return DataFacts(config_path, problem=str(error))
    return DataFacts(config_path, preview.format, preview.columns, preview.fields, preview.problem, preview.has_label)
