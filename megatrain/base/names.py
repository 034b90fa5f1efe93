"""Names that several packages must agree on: what a run's folder holds, and what is known of optimizers by name.

Imports no torch, so that ``status`` answers at once.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CHECKPOINTS_NAME",
    "COPIES_NAME",
    "ELEMENT_WISE",
    "FINAL_NAME",
    "INDEX_FILE",
    "LOCK_NAME",
    "RANKS_NAME",
    "RESOLVED_NAME",
    "SINGLE_FILE",
    "run_of_final",
    "trained_model",
]


#: Where checkpoints, and whole copies of them, go inside ``output_dir``.
CHECKPOINTS_NAME = "checkpoints"
COPIES_NAME = "copies"
#: Which generations of the ranks belong together, inside either of them.
RANKS_NAME = "RANKS.json"
#: The config with all defaults, inside ``output_dir``.
RESOLVED_NAME = "config.resolved.toml"
#: The trained model, inside ``output_dir``.
FINAL_NAME = "final"
#: Weights inside a model's folder: one file, or the index of several.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: The lock of a folder, as ``tiered`` names it.
LOCK_NAME = "LOCK"

#: One of them is in a folder that holds a model, or an adapter.
_OF_MODELS = ("config.json", "adapter_config.json")

#: Optimizers that treat every element alone, so that a parameter can be updated part by part.
ELEMENT_WISE = ("adamw", "lion", "sgd")


def trained_model(folder: Path) -> Path:
    """Return the folder of the model that a run wrote, for the run's own folder; any other folder as it is."""
    final = folder / FINAL_NAME
    has_own, has_final = (any((each / name).is_file() for name in _OF_MODELS) for each in (folder, final))
    return final if has_final and not has_own else folder


def run_of_final(folder: Path) -> Path | None:
    """Return the run whose trained model is in a folder; None: the folder is another one."""
    folder = folder.absolute()
    is_of_run = folder.name == FINAL_NAME and (folder.parent / CHECKPOINTS_NAME).is_dir()
    return folder.parent if is_of_run else None
