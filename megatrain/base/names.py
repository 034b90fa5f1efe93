"""Names that several packages use: files in a run's folder, and properties of optimizers.

Does not import torch, so that ``status`` starts fast.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CHECKPOINTS_NAME",
    "COPIES_NAME",
    "ELEMENTWISE_OPTIMIZERS",
    "FINAL_NAME",
    "INDEX_FILE",
    "LOCK_NAME",
    "RANKS_NAME",
    "RESOLVED_NAME",
    "SINGLE_FILE",
    "find_source_run",
    "trained_model",
]


#: Folders for checkpoints and for complete copies of checkpoints, inside ``output_dir``.
CHECKPOINTS_NAME = "checkpoints"
COPIES_NAME = "copies"
#: List of the checkpoints of several ranks, with the ranks' generations, inside either folder.
RANKS_NAME = "RANKS.json"
#: The config with all defaults, inside ``output_dir``.
RESOLVED_NAME = "config.resolved.toml"
#: The trained model, inside ``output_dir``.
FINAL_NAME = "final"
#: Weights inside a model's folder: a single file, or the index of several files.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Lock file in a folder. ``tiered`` uses the same name.
LOCK_NAME = "LOCK"

#: A folder with one of these files contains a model or an adapter.
_MODEL_FILES = ("config.json", "adapter_config.json")

#: Optimizers that update each element independently, so that a parameter can be updated in parts.
ELEMENTWISE_OPTIMIZERS = ("adamw", "lion", "sgd")


def trained_model(folder: Path) -> Path:
    """Return the folder of the trained model if ``folder`` is a run's folder, else return ``folder`` unchanged."""
    final = folder / FINAL_NAME
    has_model, has_final = (any((path / name).is_file() for name in _MODEL_FILES) for path in (folder, final))
    return final if has_final and not has_model else folder


def find_source_run(folder: Path) -> Path | None:
    """Return the folder of the run that wrote its trained model to ``folder``, or None."""
    folder = folder.absolute()
    is_final = folder.name == FINAL_NAME and (folder.parent / CHECKPOINTS_NAME).is_dir()
    return folder.parent if is_final else None
