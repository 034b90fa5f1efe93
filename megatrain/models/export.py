"""Export of a trained model to a Hugging Face folder, unit by unit, with verification and an atomic rename.

The files are written to a hidden folder next to the target. This folder is renamed after all files have been verified.
An export needs RAM for the layouts that its source has leased, and for one small piece of a tensor. A conversion that
does more than stack, join, cut and transpose also needs RAM for all of its tensors.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from megatrain.base.layout import TensorEntry, UnitLayout
from megatrain.models.checkpoint_names import Conversion, plan_export, tied_groups
from megatrain.models.converter import ConvertedGraph, ReadMaster, WeightSource
from megatrain.models.folder import (
    ADAPTER_CONFIG,
    INDEX_FILE,
    PIECE_BYTES,
    SINGLE_FILE,
    ModelFolder,
    ModelFolderError,
    TensorReader,
    dtype_name,
    join_names,
    read_config_json,
    tensor_bytes,
)
from megatrain.models.load import Origin
from megatrain.models.regions import Region, read_regions
from megatrain.models.skeleton import loaded_dtypes
from megatrain.models.table import ExportConfig
from megatrain.models.task_head import head_of
from tiered.units import format_size, is_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "RECORD_FILE",
    "DamagedShardError",
    "ExportError",
    "ExportTargetError",
    "ShardPlan",
    "ShardWriter",
    "atomic_folder",
    "check_target",
    "copy_tokenizer",
    "export_dtype",
    "export_model",
    "exported_step",
    "plan_file",
    "plan_shards",
    "write_record",
]


def export_dtype(table: ExportConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of exported weights. For "auto", this is the compute dtype."""
    return compute_dtype if table.dtype == "auto" else getattr(torch, table.dtype)


#: Bytes per element of the widest dtype in which weights are read.
_MAX_DTYPE_BYTES = 4


class DamagedShardError(Exception):
    """Error for a file that does not contain the data that was written to it."""


@dataclass(frozen=True)
class ShardPlan:
    """Layout of a weight file: the header's bytes, and each tensor's offset."""

    file_name: str
    header: bytes
    offsets: dict[str, int]
    nbytes: int


def plan_shards(tensors: Mapping[str, Tensor], max_shard_nbytes: int) -> list[ShardPlan]:
    """Distribute meta tensors, in writing order, over files with at most ``max_shard_nbytes`` of weights each.

    As in transformers, a larger tensor gets its own file.
    """
    assert max_shard_nbytes > 0, max_shard_nbytes
    groups: list[list[str]] = [[]]
    shard_nbytes = 0
    for name, tensor in tensors.items():
        if groups[-1] and shard_nbytes + tensor.nbytes > max_shard_nbytes:
            groups.append([])
            shard_nbytes = 0
        groups[-1].append(name)
        shard_nbytes += tensor.nbytes
    if len(groups) == 1:
        return [plan_file(SINGLE_FILE, groups[0], tensors)]
    names = [f"model-{index:05d}-of-{len(groups):05d}.safetensors" for index in range(1, len(groups) + 1)]
    return [plan_file(name, group, tensors) for name, group in zip(names, groups, strict=True)]


def plan_file(file_name: str, names: list[str], tensors: Mapping[str, Tensor]) -> ShardPlan:
    """Return the layout of a file that contains the tensors ``names``. ``tensors`` has all tensors, as meta tensors."""
    # Store wide dtypes first, so that every tensor is aligned to its element size.
    sorted_names = sorted(names, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted_names:
        tensor = tensors[name]
        starts[name] = end
        end += tensor.nbytes
        header[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    offsets = {name: data_start + start for name, start in starts.items()}
    return ShardPlan(file_name, len(text).to_bytes(8, "little") + text, offsets, data_start + end)


class ShardWriter:
    """Writer and verifier for a folder's planned weight files.

    Attributes:
        checksums: Checksum of each tensor's bytes in the file, by name (xxh3-64, hexadecimal).
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[ShardPlan],
        tensors: Mapping[str, Tensor],
        on_bytes: OnBytes = lambda done, total: None,
    ) -> None:
        self._folder, self._shards, self._tensors = folder, shards, tensors
        self._on_bytes, self._done_bytes = on_bytes, 0
        self._num_bytes = 2 * sum(tensor.nbytes for tensor in tensors.values())  # each byte is written and read back
        self._shard_by_name = {name: shard for shard in shards for name in shard.offsets}
        self._started_files: set[str] = set()
        self.checksums: dict[str, str] = {}

    def write(self, name: str, read: Callable[[int, int], Tensor]) -> None:
        """Write a tensor in small pieces.

        Args:
            name: Name of the tensor in the files.
            read: Function (start, stop) that returns a range of elements: 1-D, any floating-point dtype, any device.
        """
        template = self._tensors[name]
        count, step = template.numel(), max(1, PIECE_BYTES // _MAX_DTYPE_BYTES)
        ranges = ((start, min(start + step, count)) for start in range(0, count, step))
        self._write(name, (read(start, stop).to("cpu", template.dtype).contiguous() for start, stop in ranges))

    def copy(self, name: str, folder: ModelFolder) -> None:
        """Copy a tensor's bytes from another folder."""
        self._write(name, (piece for _, piece in folder.pieces(name)))

    def _write(self, name: str, pieces: Iterable[Tensor]) -> None:
        assert name not in self.checksums, name
        shard = self._shard_by_name[name]
        path = self._folder / shard.file_name
        if shard.file_name not in self._started_files:
            self._started_files.add(shard.file_name)
            with path.open("xb") as file:
                file.write(shard.header)
                file.truncate(shard.nbytes)
        digest = xxhash.xxh3_64()
        with path.open("r+b", buffering=0) as file:
            file.seek(shard.offsets[name])
            for piece in pieces:
                memory = tensor_bytes(piece)
                digest.update(memory)
                while memory:
                    memory = memory[file.write(memory) :]
                self._report_progress(piece)
        self.checksums[name] = digest.hexdigest()

    def _report_progress(self, piece: Tensor) -> None:
        self._done_bytes += piece.nbytes
        self._on_bytes(self._done_bytes, self._num_bytes)

    def finish(self) -> None:
        """Flush all files to the drive. If there are several weight files, first write an index."""
        missing_names = sorted(set(self._tensors) - set(self.checksums))
        assert not missing_names, missing_names[:5]
        if len(self._shards) > 1:
            total_nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
            metadata = {"total_parameters": sum(t.numel() for t in self._tensors.values()), "total_size": total_nbytes}
            weight_map = {name: self._shard_by_name[name].file_name for name in sorted(self._tensors)}
            text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"
            (self._folder / INDEX_FILE).write_text(text, encoding="utf-8")
        paths = sorted(self._folder.rglob("*"))  # chat templates can be in a subfolder
        _fsync(paths)
        for path in filter(Path.is_file, paths):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # make `verify` read the drive

    def verify(self, folder: TensorReader | None = None) -> None:
        """Read all headers and tensors back, and compare checksums.

        Args:
            folder: The written files. None to open them as a model folder, which requires ``config.json``.

        Raises:
            DamagedShardError: A tensor's data differs from what was written.
            ModelFolderError: A header is damaged.
        """
        folder = folder or ModelFolder(self._folder)
        for name, template in self._tensors.items():
            record = folder.records.get(name)
            if record is None or record.shape != tuple(template.shape) or record.dtype != template.dtype:
                raise DamagedShardError(f"{self._folder}: the header of {name} reads back as {record}")
            digest = xxhash.xxh3_64()
            for _, piece in folder.pieces(name):
                digest.update(tensor_bytes(piece))
                self._report_progress(piece)
            if digest.hexdigest() != self.checksums[name]:
                raise DamagedShardError(
                    f"{record.file}: tensor {name} reads back with checksum {digest.hexdigest()}, "
                    f"expected {self.checksums[name]}. The drive or the memory of this machine is faulty"
                )


RECORD_FILE = "export.json"
_PROGRAM = "megatrain-tier"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
    "*.jinja",
)
_OTHER_FILES = (
    "*processor_config.json",
    "*feature_extractor_config.json",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)

OnBytes = Callable[[int, int], None]
"""Progress callback. Called with the number of bytes finished and the total number of bytes."""


class ExportError(Exception):
    """Failure of an export. An existing target folder is unchanged."""


class ExportTargetError(ExportError):
    """Error for a target folder with files of other programs, or with an export that must not be replaced."""


def export_model(
    graph: ConvertedGraph,
    source: WeightSource,
    out_dir: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_nbytes: int = 5_000_000_000,
    tokenizer: PreTrainedTokenizerBase | None = None,
    copy_from: Path | str | None = None,
    record: Mapping[str, int] | None = None,
    origin: Origin | None = None,
    passthrough_checksum: str | None = None,
    on_bytes: OnBytes = lambda done, total: None,
) -> Path:
    """Write the model to a Hugging Face folder that ``from_pretrained`` can load. Converters can change the weights.

    With an ``origin``, the export has the origin's config, class and tensor names. Trained tensors have ``dtype``, and
    all other tensors are copied byte by byte.

    Args:
        graph: Skeleton and layouts of the model. Without an origin, persistent buffers come from the skeleton.
        source: Source of the master weights.
        out_dir: Folder to create. It can exist if it is empty or contains an earlier export of this program.
        dtype: dtype of the weights, except weights that the model's class keeps in fp32. Buffers keep their dtype.
        max_shard_nbytes: Maximum bytes of weights per file.
        tokenizer: Tokenizer to save, or None to copy the tokenizer files from ``copy_from``.
        copy_from: Folder of the tokenizer. Without an origin, the generation config, processors and licence are also
            copied from this folder.
        record: Additional keys for ``export.json``, for example the step.
        origin: Folder from which the weights were loaded. None for a model without a folder.
        passthrough_checksum: The origin's ``PassthroughTensors.checksum`` when training began. None skips the check.

    Returns:
        The absolute path of the finished folder.

    Raises:
        ExportError: ``out_dir`` contains other files, the drive is too full, writing or verifying failed, or
            pass-through tensors are missing or have changed since training began.
        ConversionError: The weights cannot be converted to the checkpoint form of this model.
    """
    out = Path(out_dir).absolute()
    check_target(out)
    source = graph.export_source(source)
    with graph.plain_model():
        model = graph.model
        steps, inputs = _plan_steps(model, dtype, origin)
        layout_names = _layouts_by_name(graph)
        order = {name: index for index, name in enumerate(graph.layouts)}
        layout_indices = {id(step): _find_layouts(step, layout_names, order) for step in steps}
        steps.sort(key=lambda step: (not layout_indices[id(step)], layout_indices[id(step)]))
        tensors = {name: value for step in steps for name, value in step.targets.items()}
        if origin is not None:
            records = [origin.folder.records[name] for name in origin.passthrough.names]
            tensors.update((r.name, torch.empty(r.shape, dtype=r.dtype, device="meta")) for r in records)
        shards = plan_shards(tensors, max_shard_nbytes)
        with atomic_folder(out, shards) as folder:
            writer = ShardWriter(folder, shards, tensors, on_bytes)
            layouts = list(graph.layouts.values())
            for indices, group in groupby(steps, key=lambda step: layout_indices[id(step)]):
                _write_group([layouts[index] for index in indices], list(group), source, writer, model, inputs)
            if origin is not None:
                _copy_passthrough(origin, writer, passthrough_checksum)
            _write_config(folder, model, dtype, origin)
            folders = [origin.folder.path] if origin is not None else []
            _write_companions(folder, model, tokenizer, folders + ([] if copy_from is None else [Path(copy_from)]))
            writer.finish()
            writer.verify()
            write_record(folder, dtype, writer.checksums, record or {})
    return out


@contextmanager
def atomic_folder(out: Path, shards: Sequence[ShardPlan]) -> Iterator[Path]:
    """Yield a hidden folder to write to. At the end of the context, rename it to ``out`` if no error occurred.

    Args:
        out: Path of the export. `check_target` must have accepted it.
        shards: Planned weight files, used to check the free space.

    Raises:
        ExportError: The drive is too full, or writing or verifying failed. ``out`` is unchanged.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_free_space(out, sum(shard.nbytes for shard in shards))
    folder = _create_sibling(out, "partial")
    try:
        yield folder
        _publish(folder, out)
    except (OSError, DamagedShardError) as error:
        raise ExportError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # does nothing after the rename


def _plan_steps(
    model: PreTrainedModel, dtype: torch.dtype, origin: Origin | None
) -> tuple[list[Conversion], dict[str, Tensor]]:
    """Return the conversion steps and their inputs. The inputs are meta tensors by name in the model.

    Tied tensors are written under every name that they have in the origin's files, or once without an origin.
    """
    state = model.state_dict(keep_vars=True)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    excluded = set(model._keys_to_ignore_on_save or ())
    for names in tied_groups(model):
        excluded.update(names[1:])
    if origin is not None:
        target_steps = origin.plan.target_steps
        for names in tied_groups(model):
            excluded.update(names if any(name in target_steps for name in names) else names[1:])
        excluded -= set(origin.trained)
        excluded.update(name for name in state if name not in parameters and name in target_steps)  # pass-through
    dtypes = loaded_dtypes(model, dtype)
    inputs: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name not in excluded:
            # A converter may have added parameters that the plain class lacks.
            target_dtype = dtypes.get(name, dtype) if name in parameters else tensor.dtype
            inputs[name] = torch.empty(tensor.shape, dtype=target_dtype, device="meta")
    return plan_export(model, inputs, None if origin is None else origin.plan), inputs


def _layouts_by_name(graph: ConvertedGraph) -> dict[str, list[str]]:
    """Return the names of the layouts that contain a parameter or its parts, by parameter name. Include tied names."""
    layouts: dict[str, list[str]] = {}
    for layout in graph.layouts.values():
        for entry in layout.entries:
            layouts.setdefault(entry.parameter, []).append(layout.name)
    for names in tied_groups(graph.model):
        owner = next((layouts[name] for name in names if name in layouts), None)
        if owner is not None:
            layouts.update(dict.fromkeys(names, owner))
    return layouts


def _find_layouts(
    step: Conversion, layout_names: Mapping[str, Sequence[str]], order: Mapping[str, int]
) -> tuple[int, ...]:
    return tuple(sorted({order[layout] for name in step.source_names for layout in layout_names.get(name, ())}))


def _write_group(
    layouts: list[UnitLayout],
    steps: list[Conversion],
    source: WeightSource,
    writer: ShardWriter,
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
) -> None:
    with ExitStack() as stack, torch.no_grad():
        open_layouts = [(layout, stack.enter_context(source(layout))) for layout in layouts]
        weights = _OpenWeights(model, open_layouts)
        for step in steps:
            regions = step.regions(model)
            if regions is not None:
                for target, parts in regions.items():
                    writer.write(target, partial(_read_parts, parts, weights))
                continue
            # Convert in the file's dtype to save memory. This is exact, because the transforms only move elements.
            outputs = step.run(lambda name: weights.read_whole(name, inputs[name].dtype), model)
            for target in list(outputs):
                flat = outputs.pop(target).reshape(-1)
                writer.write(target, lambda start, stop, flat=flat: flat[start:stop])  # type: ignore[misc]


def _read_parts(regions: Sequence[Region], weights: _OpenWeights, start: int, stop: int) -> Tensor:
    out = torch.empty(stop - start, dtype=weights.dtype_of(regions[0].source))
    read_regions(regions, start, out, weights.read, max(1, PIECE_BYTES // _MAX_DTYPE_BYTES))
    return out


class _OpenWeights:
    """Reader of the tensors in several open layouts, and of the model's buffers."""

    def __init__(self, model: PreTrainedModel, layouts: Sequence[tuple[UnitLayout, ReadMaster]]) -> None:
        self._model = model
        self._entries: dict[str, list[tuple[TensorEntry, ReadMaster]]] = {}
        for layout, read in layouts:
            for entry in layout.entries:
                self._entries.setdefault(entry.parameter, []).append((entry, read))
        for names in tied_groups(model):
            entries = next((self._entries[name] for name in names if name in self._entries), None)
            if entries is not None:
                self._entries.update(dict.fromkeys(names, entries))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read."""
        return torch.float32 if name in self._entries else self._get_buffer(name).dtype

    def read(self, name: str, start: int, count: int, out: Tensor | None = None) -> Tensor:
        """Return a range of a tensor's elements. See ``ReadSpan``."""
        if name not in self._entries:
            return self._get_buffer(name).reshape(-1)[start : start + count]
        pieces: list[Tensor] = []
        for entry, read in self._entries[name]:
            overlap_start, overlap_stop = max(start, entry.start), min(start + count, entry.start + entry.numel)
            if overlap_start < overlap_stop:
                shift = entry.offset - entry.start
                pieces.append(read(overlap_start + shift, overlap_stop + shift))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def read_whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a complete tensor in ``dtype``."""
        if name not in self._entries:
            return self._get_buffer(name).to(dtype)
        entries = [entry for entry, _ in self._entries[name]]
        out = torch.empty(
            (sum(entry.shape[0] for entry in entries), *entries[0].shape[1:]) if entries[0].shape else (), dtype=dtype
        )
        flat, step = out.view(-1), max(1, PIECE_BYTES // _MAX_DTYPE_BYTES)
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            part.copy_(self.read(name, start, part.numel()))
        return out

    def _get_buffer(self, name: str) -> Tensor:
        buffer: Tensor = self._model.get_buffer(name)
        assert buffer.device.type != "meta", f"buffer {name} was never loaded"
        return buffer


def _copy_passthrough(origin: Origin, writer: ShardWriter, checksum: str | None) -> None:
    """Copy the pass-through tensors. Check that they have not changed since training began."""
    passthrough = origin.passthrough
    try:
        for name in passthrough.names:
            writer.copy(name, origin.folder)
    except ModelFolderError as error:
        raise ExportError(f"{passthrough}. That folder is needed for the export: {error}") from error
    if checksum is not None and passthrough.combine_checksums(writer.checksums) != checksum:
        raise ExportError(
            f"{origin.folder.path}: {passthrough}, but they are no longer those that the run began with. Restore the "
            "original files, or use a copy of the folder: megatrain-tier export --model FOLDER"
        )


def _write_config(folder: Path, model: PreTrainedModel, dtype: torch.dtype, origin: Origin | None) -> None:
    """Write ``config.json``: the origin's values with the new dtype, or the model's config if there is no origin."""
    if origin is None:
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        return
    values = read_config_json(origin.folder.path)
    values.setdefault("architectures", [type(model).__name__])
    if (head := head_of(model)) is not None:
        values.update(head.config)
    values.pop("quantization_config", None)  # exported weights are not quantized
    _set_dtype(values, dtype)
    for key in model.config.sub_configs:
        if isinstance(values.get(key), dict) and getattr(model.config, key) is model.config.get_text_config():
            _set_dtype(values[key], dtype, is_new=False)
    (folder / "config.json").write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _set_dtype(values: dict[str, Any], dtype: torch.dtype, *, is_new: bool = True) -> None:
    key = "torch_dtype" if "torch_dtype" in values and "dtype" not in values else "dtype"
    if is_new or key in values:
        values[key] = str(dtype).removeprefix("torch.")


def _write_companions(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, copy_from: list[Path]
) -> None:
    """Write or copy all files except the weights and the config.

    Args:
        copy_from: The model's folder, then the tokenizer's folder. Folders that do not exist are skipped.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    else:
        copy_tokenizer(copy_from[-1:], folder)
    _copy_files(copy_from[:1], _OTHER_FILES, folder)
    if not (folder / "generation_config.json").exists() and model.can_generate():
        model.generation_config.save_pretrained(folder)


def copy_tokenizer(sources: list[Path], folder: Path) -> None:
    """Copy tokenizer files from several folders to ``folder``. Existing files are not overwritten."""
    _copy_files(sources, _TOKENIZER_FILES, folder)


def _copy_files(sources: list[Path], patterns: Iterable[str], folder: Path) -> None:
    for path in sorted({path for source in sources for pattern in patterns for path in source.glob(pattern)}):
        target = folder / path.name
        if path.is_file() and not target.exists():
            shutil.copyfile(path, target)
        elif path.name.endswith("chat_templates") and not target.exists():
            shutil.copytree(path, target)


def exported_step(folder: Path) -> int | None:
    """Return the step from which a folder was exported, or None if the step was not recorded."""
    try:
        step = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8")).get("step")
    except (OSError, ValueError, AttributeError):
        return None
    return step if isinstance(step, int) else None


def check_target(out: Path, *, overwrite: bool = True) -> None:
    """Check that an export can be written to ``out``. This writes nothing.

    Args:
        overwrite: Whether the export can replace an earlier export.

    Raises:
        ExportError: ``out`` is a file, contains files that no earlier export wrote, or is an earlier export and
            ``overwrite`` is False.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ExportTargetError(f"{out} is a file. Use another folder")
    files = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    if not files:
        return
    try:
        record = json.loads((out / RECORD_FILE).read_text(encoding="utf-8"))
        is_export = record["program"] == _PROGRAM
        known_files = set(record["files"]) | {RECORD_FILE}
    except (OSError, ValueError, KeyError, TypeError):
        is_export, known_files = False, set()
    if not is_export:
        raise ExportTargetError(f"{out} is neither empty nor an export of this program. Remove it or use another one")
    if files - known_files:
        raise ExportError(
            f"{out} contains files that the earlier export did not write: {join_names(sorted(files - known_files))}. "
            "Move them away or use another folder"
        )
    if not overwrite:
        step = f" of step {record['step']}" if "step" in record else ""
        kind = "an adapter" if (out / ADAPTER_CONFIG).is_file() else "a model"
        raise ExportTargetError(
            f"{out} contains {kind}{step} from an earlier export; nothing was written. Use another folder, or "
            "--overwrite to replace it"
        )


def _check_free_space(out: Path, need_nbytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if need_nbytes > free:
        raise ExportError(
            f"{out}: the weights need {need_nbytes} bytes ({format_size(need_nbytes)}), but the drive of {out.parent} "
            f"has {free} ({format_size(free)}) free. Free {format_size(need_nbytes - free)} or use another folder"
        )


def _create_sibling(out: Path, label: str) -> Path:
    """Create an empty hidden folder next to ``out``. First remove the hidden folders of dead processes."""
    for path in out.parent.glob(f".{out.name}.{label}-*"):
        pid = path.name.rpartition("-")[2]
        if is_number(pid) and (int(pid) == os.getpid() or not Path("/proc", pid).exists()):
            shutil.rmtree(path, ignore_errors=True)
    sibling = out.with_name(f".{out.name}.{label}-{os.getpid()}")
    try:
        sibling.mkdir()
    except OSError as error:
        raise ExportError(f"cannot make {sibling}: {error}") from error
    return sibling


def write_record(folder: Path, dtype: torch.dtype, checksums: Mapping[str, str], extra_keys: Mapping[str, int]) -> None:
    """Write ``export.json``, an export's last file. Later exports recognize a finished export by this file.

    Args:
        folder: Folder that contains all other files of the export.
        dtype: dtype of the weights.
        checksums: Checksum of each tensor's bytes (xxh3-64, hexadecimal).
        extra_keys: Additional keys, for example the step.
    """
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
    record = {
        **extra_keys,
        "program": _PROGRAM,
        "dtype": str(dtype).removeprefix("torch."),
        "files": files,
        "xxh3_64": dict(sorted(checksums.items())),
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _fsync([folder / RECORD_FILE, folder])


def _publish(folder: Path, out: Path) -> None:
    """Rename the finished folder to ``out``. First move an earlier export aside, and remove it afterwards."""
    old_folder: Path | None = None
    if out.exists() and any(out.iterdir()):
        old_folder = _create_sibling(out, "old")
        os.rename(out, old_folder)  # an empty folder need not be moved, because the rename below replaces it
    try:
        os.rename(folder, out)
    except OSError:
        if old_folder is not None:
            os.rename(old_folder, out)
        raise
    _fsync([out.parent])
    if old_folder is not None:
        shutil.rmtree(old_folder, ignore_errors=True)


def _fsync(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
