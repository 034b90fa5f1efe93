"""A checkpoint into a Hugging Face folder, unit by unit: no store, no GPU, and beside a living run if need be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatrain.checkpoint.catalog import find_checkpoint, search_paths
from megatrain.checkpoint.resume import Checkpoint
from megatrain.checkpoint.state import CheckpointError
from megatrain.config.resolve import resolve_export, resolve_model
from megatrain.config.resolved import config_from_toml
from megatrain.engine.program import state_key, stored_keys, weight_key
from megatrain.models.carried import CARRIED_CHECKSUM
from megatrain.models.export import check_target, export_model
from megatrain.models.graph import ModelGraph, ModelSpec
from megatrain.models.layout import UnitLayout, views
from megatrain.models.load import WeightLoader
from megatrain.precision import decode
from tiered import GenerationReader, list_generations
from tiered.errors import TieredError
from tiered.ext import dtype_from_name

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["OnProgress", "export_checkpoint"]

#: Told the unit that is read next, its number from 1, and how many there are.
OnProgress = Callable[[str, int, int], None]


def export_checkpoint(
    run: Path | str,
    out: Path | str,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
    model_folder: Path | str | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Write the Hugging Face folder of a checkpoint, as the run itself would at its end. RAM: that of one unit.

    Args:
        run: ``output_dir``, its folder of checkpoints, or ``snap/<generation>`` of one.
        out: the folder to make. It may exist if it is empty or an earlier export of this program.
        step: of which checkpoint; default: the newest.
        dtype: of the weights; default: as the run's config says. fp32 gives the exact master weights.
        max_shard_size: weight bytes in one file; default: as the run's config says.
        model_folder: a copy of the model's folder, where the one of the run is gone.

    Returns:
        The absolute path of the finished folder.

    Raises:
        CheckpointError: no such checkpoint; or it is damaged, does not belong to the model, or was removed meanwhile.
        ConfigError: its config has keys that this version does not know.
        ModelFolderError: the model's folder cannot be used.
        ExportError: ``out`` cannot be written.
    """
    found = find_checkpoint(run, step)
    check_target(Path(out).absolute())
    config = config_from_toml(found.state.config_toml, f"the config in {found}")
    model, spec = resolve_model(config), resolve_export(config)
    source = _Source(found, on_progress)
    folder = _model_folder(found, model, model_folder)
    graph = replace(model, folder=str(folder)).build(source.dtype)
    source.check(graph, folder)
    origin = None if model.from_scratch else WeightLoader(folder, graph.model).origin
    # Where the model's folder was given anew, so is that of its tokenizer.
    companions = folder if model.tokenizer_folder == model.folder else Path(model.tokenizer_folder)
    return export_model(
        graph,
        source.weights,
        out,
        dtype=dtype or spec.dtype or graph.dtype,
        max_shard_nbytes=max_shard_size or spec.max_shard_bytes,
        copy_from=companions if companions.is_dir() else folder,
        record={"step": found.state.step},
        origin=origin,
        carried_checksum=found.state.model.get(CARRIED_CHECKSUM),
    )


def _model_folder(found: Checkpoint, model: ModelSpec, given: Path | str | None) -> Path:
    folder = Path(given if given is not None else model.folder)
    if given is None and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{found} was trained from the model in '{folder}', which is not there. Name a copy of that folder: "
            "--model FOLDER"
        )
    return folder


class _Source:
    """The master weights of a committed generation, one layout at a time."""

    def __init__(self, found: Checkpoint, on_progress: OnProgress | None) -> None:
        self._found, self._on_progress = found, on_progress
        self._num_read = self._num_layouts = 0
        with self._explained():
            self._reader = GenerationReader(found.path, found.generation, search_paths(found.path))
        dtypes = {record.dtype for key, record in self._reader.blocks.items() if key.endswith("/weight")}
        if len(dtypes) != 1:
            raise CheckpointError(f"{found} holds no weights of one dtype: {sorted(dtypes)}. Export another checkpoint")
        self.dtype = dtype_from_name(dtypes.pop())

    def check(self, graph: ModelGraph, folder: Path) -> None:
        """Raise ``CheckpointError`` unless the blocks are those of this model."""
        self._num_layouts = len(graph.layouts)
        expected = {weight_key(layout.name): layout.num_elements for layout in graph.layouts.values()}
        blocks = self._reader.blocks
        found = {key: record.shape[0] for key, record in blocks.items() if key.endswith("/weight")}
        different = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        if different:
            key = different[0]
            raise CheckpointError(
                f"{self._found} does not belong to the model in '{folder}': block '{key}' has "
                f"{found.get(key, 0)} elements, the model's {expected.get(key, 0)}. Name the folder of the model that "
                "was trained: --model FOLDER"
            )

    @contextmanager
    def weights(self, layout: UnitLayout) -> Iterator[Mapping[str, Tensor]]:
        """Yield a unit's fp32 master weights by full parameter name; a ``WeightSource``."""
        self._num_read += 1
        if self._on_progress is not None:
            self._on_progress(layout.name, self._num_read, self._num_layouts)
        weight = self._read(weight_key(layout.name), self.dtype)
        low = stored_keys(state_key(layout.name, "low"), self._reader.blocks)
        if self.dtype == torch.float32:
            master = weight
        elif low:
            master = torch.empty(layout.num_elements)
            sizes = [self._reader.blocks[key].shape[0] for key in low]
            for key, high, part in zip(low, torch.split(weight, sizes), torch.split(master, sizes), strict=True):
                decode(high, self._read(key, torch.int16), part)
        else:
            master = weight.float()  # frozen: there is no more than the bf16 weight
        yield views(master, layout)

    def _read(self, key: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(self._reader.blocks[key].shape, dtype=dtype)
        with self._explained():
            self._reader.read(key, tensor)
        return tensor

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the store says about a damaged or vanished generation into what to do here."""
        found = self._found
        try:
            yield
        except (TieredError, OSError) as error:
            if found.generation not in list_generations(found.path):
                raise CheckpointError(
                    f"{found} was removed while it was being exported: the run keeps checkpoint.save_total_limit of "
                    "them. Export again, or raise that number"
                ) from error
            raise CheckpointError(f"{found} cannot be exported: {error}. Another one: --step") from error
