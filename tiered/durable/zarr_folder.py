"""zarr documents in a store's folder. The link ``latest`` leads to the current generation, and groups list members.

To find the members of a group, zarr lists its folder and warns about every other file (manifests, locks,
ownership notes). If the group's document contains the members' metadata (consolidated metadata), zarr does not list the
folder. These documents are only for viewers: the store never reads them, and ignores errors when writing them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiered.tiers.directory import read_document, read_own_attributes, write_document
from tiered.tiers.layout import group_document
from tiered.units import PAGE_BYTES

LATEST_NAME = "latest"


def write_members(folder: Path, keys: Iterable[str]) -> None:
    """Write the zarr document in a generation's folder, with a list of the arrays. Raises ``OSError``."""
    write_document(folder, generation_document(folder, keys), replace=True)


def generation_document(folder: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Return the zarr document for a generation's folder, including a list of the arrays in this folder.

    Args:
        keys: keys of all blocks. Blocks with arrays elsewhere are omitted.
    """
    members: dict[str, Any] = {}
    for key in keys:
        document = read_document(folder / key)
        if document is None:
            continue
        groups = key.split("/")[:-1]
        for end in range(1, len(groups) + 1):
            members.setdefault("/".join(groups[:end]), group_document())
        members[key] = document
    return _with_members(group_document(), members)


def show_latest(directory: Path, generation: Path | None) -> None:
    """Make ``latest`` and the document of a store's folder refer to a generation, or to no generation if None.

    Called after the generation has become current. After a crash before this call, the next commit updates both.
    """
    link = directory / LATEST_NAME
    try:
        if generation is None:
            link.unlink(missing_ok=True)
        else:
            _replace_link(link, os.path.relpath(generation, directory))
        if read_own_attributes(directory) is not None:
            document = group_document({"page_bytes": PAGE_BYTES})
            # Flush this document, because it also marks the folder as belonging to a store.
            write_document(directory, directory_document(directory, document), replace=True, durable=True)
    except OSError:  # The drive is full or does not support links. Remove the link rather than leave it stale.
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)


def directory_document(directory: Path, base: dict[str, Any]) -> dict[str, Any]:
    """Return the zarr document for a store's folder: ``base``, plus the target of ``latest`` as a member."""
    latest = read_document(directory / LATEST_NAME)
    if latest is None:
        return _with_members(base, {})
    metadata = latest.pop("consolidated_metadata", {}).get("metadata", {})
    members = {f"{LATEST_NAME}/{key}": document for key, document in metadata.items()}
    return _with_members(base, {LATEST_NAME: latest, **members})


def _replace_link(link: Path, target: str) -> None:
    temporary_link = link.with_suffix(".tmp")
    temporary_link.unlink(missing_ok=True)
    os.symlink(target, temporary_link)
    os.replace(temporary_link, link)


def _with_members(document: dict[str, Any], members: dict[str, Any]) -> dict[str, Any]:
    result = {name: value for name, value in document.items() if name != "consolidated_metadata"}
    if not members:
        return result
    return {**result, "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": members}}
