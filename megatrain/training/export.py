"""Exports a checkpoint to a Hugging Face folder, piece by piece, without a store or a GPU, even during the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.base.layout import UnitLayout
from megatrain.base.precision import encode_high_half
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.inventory import find_checkpoint
from megatrain.checkpoint.listing import still_exists
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.state import CheckpointError
from megatrain.config.resolved import config_from_toml
from megatrain.converters.adapters import adapters_of, export_adapter
from megatrain.converters.spec import ModelSpec
from megatrain.engine.program.block_keys import key_kind, state_key, stored_parts, weight_key
from megatrain.models.converter import ReadMaster
from megatrain.models.export import check_target, export_dtype, export_model
from megatrain.models.folder import BASE_CHECKSUM
from megatrain.models.graph import ModelGraph
from megatrain.models.load import WeightLoader, open_loader
from megatrain.models.passthrough import PASSTHROUGH_CHECKSUM
from megatrain.optim.average import EMA
from megatrain.training.resolve import resolve_model
from megatrain.training.weight_parts import decode_master, overlaps
from tiered.errors import TieredError
from tiered.ext import dtype_from_name

__all__ = ["OnProgress", "export_checkpoint"]

#: Function that receives the current activity, the finished bytes and the total bytes. Bytes read back are included.
OnProgress = Callable[[str, int, int], None]


def export_checkpoint(
    run: Path | str,
    out: Path | str,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
    model_folder: Path | str | None = None,
    merge: bool | None = None,
    ema: bool = False,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Path:
    """Export a checkpoint to a Hugging Face folder, as a finished run does. Needs RAM for only a few 16 MiB pieces.

    Args:
        run: ``output_dir``, its folder of checkpoints, or ``snap/<generation>`` in that folder.
        out: Folder to create. It may exist if it is empty.
        step: Step of the checkpoint. Default: the newest checkpoint.
        dtype: Dtype of the weights. Default: the dtype in the run's config. fp32 writes the exact master weights.
        max_shard_size: Maximum bytes of weights in one file. Default: the value in the run's config.
        model_folder: Copy of the model's folder, if the original folder no longer exists.
        merge: Whether to merge adapters into the model or to write only adapters. Default: the run's config.
        ema: Whether to write the average of the trained weights (``optimizer.ema_decay``) instead of the weights.
        overwrite: Whether to replace an earlier export by this program in ``out``.

    Returns:
        The absolute path of the finished folder.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, from a different model, or was removed during the export.
        ConfigError: The config in the checkpoint has keys that this version does not know.
        ModelFolderError: The model's folder cannot be used.
        ExportError: ``out`` cannot be written.
    """
    checkpoint = find_checkpoint(run, step).checkpoint
    check_target(Path(out).absolute(), overwrite=overwrite)
    config = config_from_toml(checkpoint.state.config_toml, f"the config in {checkpoint}")
    model, table = resolve_model(config), config.export
    source = _CheckpointWeights(checkpoint, on_progress, is_ema=ema)
    record = {"step": checkpoint.state.step, **({"ema": True} if ema else {})}
    folder = _model_folder(checkpoint, model, model_folder)
    graph = replace(model, folder=str(folder)).build(source.dtype)
    loader = None if model.table.train_from_scratch else open_loader(folder, graph)
    source.check(graph, folder, loader)
    # If the user passed a new path for the model's folder, also read the tokenizer from that path.
    tokenizer_folder = folder if model.tokenizer_folder == model.folder else Path(model.tokenizer_folder)
    copy_from = tokenizer_folder if tokenizer_folder.is_dir() else folder
    if adapters_of(graph) is not None and not (table.merge if merge is None else merge):
        return export_adapter(
            graph,
            source.weights,
            out,
            base_model=model.name if model_folder is None else str(folder),
            dtype=dtype or export_dtype(table, graph.dtype),
            copy_from=copy_from,
            record=record,
        )
    return export_model(
        graph,
        source.weights,
        out,
        dtype=dtype or export_dtype(table, graph.dtype),
        max_shard_nbytes=max_shard_size or table.max_shard_size,
        copy_from=copy_from,
        record=record,
        origin=None if loader is None else loader.origin,
        passthrough_checksum=checkpoint.state.model.get(PASSTHROUGH_CHECKSUM),
        on_bytes=source.on_bytes,
    )


def _model_folder(checkpoint: Checkpoint, model: ModelSpec, path: Path | str | None) -> Path:
    folder = Path(path if path is not None else model.folder)
    if path is None and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint} was trained from the model in '{folder}', which does not exist. Name a copy of that folder: "
            "--model FOLDER"
        )
    return folder


class _CheckpointWeights:
    """Reader of a checkpoint's master weights, one layout at a time."""

    def __init__(self, checkpoint: Checkpoint, on_progress: OnProgress | None, *, is_ema: bool) -> None:
        self._checkpoint, self._on_progress, self._is_ema = checkpoint, on_progress, is_ema
        self._unit = ""
        #: Last piece that was read, by kind of block: the block's key, the first byte and the contents.
        self._cached_pieces: dict[str, tuple[str, int, Tensor]] = {}
        with self._explain_errors():
            self._reader = CheckpointReader(checkpoint)
        dtypes = {record.dtype for key, record in self._reader.blocks.items() if key_kind(key) == "weight"}
        if len(dtypes) != 1:
            raise CheckpointError(
                f"{checkpoint} holds no weights of one dtype: {sorted(dtypes)}. Export another checkpoint"
            )
        self.dtype = dtype_from_name(dtypes.pop())
        if is_ema and not any(key_kind(key) == EMA.name for key in self._reader.blocks):
            raise CheckpointError(
                f"{checkpoint} holds no average of the weights: its run has no optimizer.ema_decay. "
                "Export it without --ema"
            )

    def check(self, graph: ModelGraph, folder: Path, loader: WeightLoader | None) -> None:
        """Raise ``CheckpointError`` if the blocks do not belong to this model.

        Args:
            loader: Reader of the model's folder, for frozen weights that are not in the checkpoint.
        """
        self._graph, self._loader = graph, loader
        if loader is not None and BASE_CHECKSUM in self._checkpoint.state.model:
            self._check_base(loader)
        expected = {weight_key(layout.name): layout.num_elements for layout in graph.layouts.values()}
        blocks = self._reader.blocks
        sizes: dict[str, int] = {}
        for key, record in blocks.items():
            if key_kind(key) == "weight":
                weight = weight_key(key.rpartition("/")[0])
                sizes[weight] = sizes.get(weight, 0) + record.shape[0]
        frozen_layouts = [layout for layout in graph.layouts.values() if not layout.trainable]
        folder_keys = set() if loader is None else {weight_key(layout.name) for layout in frozen_layouts}
        expected = {key: size for key, size in expected.items() if key in sizes or key not in folder_keys}
        mismatches = sorted(key for key in expected.keys() | sizes.keys() if expected.get(key) != sizes.get(key))
        if mismatches:
            key = mismatches[0]
            raise CheckpointError(
                f"{self._checkpoint} does not belong to the model in '{folder}': block '{key}' has "
                f"{sizes.get(key, 0)} elements, the model's {expected.get(key, 0)}. Name the folder of the model that "
                "was trained: --model FOLDER"
            )

    @contextmanager
    def weights(self, layout: UnitLayout) -> Iterator[ReadMaster]:
        """Yield a reader for a unit's fp32 master weights, or for their averages if the export is of averages."""
        self._unit = layout.name
        weight_parts = stored_parts(weight_key(layout.name), self._reader.blocks)
        # Frozen weights have no averages.
        average_parts = stored_parts(state_key(layout.name, EMA.name), self._reader.blocks) if self._is_ema else []
        if average_parts:
            yield partial(self._read_parts, average_parts, EMA.dtype)
            return
        if not weight_parts:
            yield partial(self._read_folder, layout)
            return
        low_parts = stored_parts(state_key(layout.name, "low"), self._reader.blocks)

        def read(start: int, stop: int) -> Tensor:
            values = self._read_parts(weight_parts, self.dtype, start, stop)
            if self.dtype == torch.float32:
                return values
            if not low_parts:
                return values.float()  # a frozen weight has no low half
            return decode_master(
                values, low_parts, start, lambda low, inside: self._read(low, torch.int16, inside.start, inside.stop)
            )

        yield read

    def on_bytes(self, done: int, total: int) -> None:
        """Report the finished bytes of an export."""
        if self._on_progress is not None:
            self._on_progress(self._unit if 2 * done <= total else "reading it back", done, total)

    def _read_parts(self, parts: Sequence[tuple[range, str]], dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return a range of elements, joined if it spans several blocks."""
        ranges = [self._read(key, dtype, part.start, part.stop) for key, part, _ in overlaps(parts, start, stop)]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges)

    def _read(self, key: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Read and verify a range of a block's elements, piece by piece. Cache the last piece of each kind of block."""
        first_byte, last_byte, step = start * dtype.itemsize, stop * dtype.itemsize, self._reader.piece_bytes
        out = torch.empty(stop - start, dtype=dtype)
        memory = out.view(torch.uint8)
        for piece_start in range(first_byte // step * step, last_byte, step):
            piece = self._piece(key, piece_start)
            part = piece[max(0, first_byte - piece_start) : last_byte - piece_start]
            offset = max(0, piece_start - first_byte)
            memory[offset : offset + part.numel()] = part
        return out

    def _piece(self, key: str, start: int) -> Tensor:
        kind = key_kind(key)
        if kind not in self._cached_pieces or self._cached_pieces[kind][:2] != (key, start):
            stop = min(start + self._reader.piece_bytes, self._reader.blocks[key].nbytes)
            with self._explain_errors():
                self._cached_pieces[kind] = key, start, self._reader.read_range(key, start, stop)
        return self._cached_pieces[kind][2]

    def _check_base(self, loader: WeightLoader) -> None:
        folder = loader.origin.folder
        if folder.fingerprint() != self._checkpoint.state.model[BASE_CHECKSUM]:
            raise CheckpointError(
                f"{folder.path}: its weights are not those that {self._checkpoint} began with, which holds only the "
                "trained weights. Bring the original files back, or name a copy of the folder: --model FOLDER"
            )

    def _read_folder(self, layout: UnitLayout, start: int, stop: int) -> Tensor:
        """Return a range of frozen weights from the model's folder, rounded to the run's compute dtype."""
        assert self._loader is not None
        master = torch.zeros(stop - start)
        with self._graph.plain_model():
            self._loader.read(layout, start, master)
        if self.dtype != torch.float32:
            high_halves = torch.empty(stop - start, dtype=self.dtype)
            encode_high_half(master, high_halves)
            master.copy_(high_halves)
        return master

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Convert store errors about a damaged or missing generation to ``CheckpointError`` with a remedy."""
        checkpoint = self._checkpoint
        try:
            yield
        except (TieredError, OSError) as error:
            if not still_exists(checkpoint):
                raise CheckpointError(
                    f"{checkpoint} was removed while it was being exported: the run keeps "
                    "checkpoint.save_total_limit of them. Export again, or raise that number"
                ) from error
            raise CheckpointError(
                f"{checkpoint} cannot be exported: {error}. Choose another one with --step"
            ) from error
