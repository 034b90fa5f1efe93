"""Datasets of the hub: fetched by ``datasets`` into its own cache, read from there as Arrow files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatrain.data.errors import DataError
from megatrain.data.files import EXTRA

_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def is_hub_name(path: str) -> bool:
    """Return whether a path is the name of a dataset, owner/name, and nothing of that name is here."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def fetch_dataset(path: str, name: str | None = None, split: str | None = None) -> list[Path]:
    """Return the Arrow files of a dataset, fetched if the cache of ``datasets`` does not hold them. Runs no code of it.

    Args:
        path: owner/name.
        name: its configuration, where it has several.
        split: Default: "train".

    Raises:
        DataError: ``datasets`` is not installed, or it cannot be fetched; with its own words.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            path,
            "there is no such file or folder, and datasets of the hub need the package datasets",
            f"Check the path, which is relative to the config file, or install the data extra: {EXTRA}",
        ) from None
    try:
        found = datasets.load_dataset(path, name, split=split or "train")
    except Exception as error:  # it raises whatever its many readers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = any(os.environ.get(key, "").upper() in ("1", "ON", "YES", "TRUE") for key in _OFFLINE)
        raise DataError(
            path,
            f"this is no file or folder here, and no dataset that could be fetched: {reason.rstrip('.')}",
            "HF_HUB_OFFLINE is set: fetch it once without, or write the path of a file" if offline
            else "Check the spelling, name and split; without a network, write the path of a file",
        ) from None  # fmt: skip
    files = [Path(entry["filename"]) for entry in found.cache_files]
    if not files:
        raise DataError(path, "datasets keeps no files of it", "Save it as parquet and name that file")
    return files


_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
