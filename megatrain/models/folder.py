"""Reader of a Hugging Face folder: the config, and the tensors one at a time.

Nothing is memory-mapped or cached. A tensor's bytes are read from the file into the caller's memory. If the dtype
changes, the bytes pass through one small buffer. A run therefore never has a second copy of a model in RAM.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from megatrain.base.errors import ModelFolderError as ModelFolderError
from megatrain.base.facts import ModelFacts
from megatrain.base.names import INDEX_FILE as INDEX_FILE
from megatrain.base.names import SINGLE_FILE as SINGLE_FILE
from megatrain.models.quantized import METHODS, Decoder, QuantizationError, decode, find_decoders, find_method

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ADAPTER_CONFIG = "adapter_config.json"  # file name that identifies a peft adapter folder
PIECE_BYTES = 16 << 20  # size of the pieces in which tensors are read and converted
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
#: Key in ``RunState.model`` for the ``ModelFolder.fingerprint`` of a base model, whose weights are not in checkpoints.
BASE_CHECKSUM = "base_xxh3_64"
_NUM_SAMPLES, _SAMPLE_BYTES = 4096, 4096  # maximum number of samples in a fingerprint, and size of each sample
PLAIN_ADVICE = (
    "De-quantize it with transformers (from_pretrained with dequantize=True, then save_pretrained), or use the "
    "original model"
)
_COPY_AGAIN = "Copy or download the model again"
_SIZE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Location of a checkpoint tensor: ``nbytes`` bytes at ``offset`` in ``file``.

    A quantized tensor has a ``decoder``. Its ``nbytes`` and ``offset`` then refer to the decoded fp32 elements, in
    decoding order.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    decoder: Decoder | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_config(path: Path | str) -> PretrainedConfig:
    """Return the config of the model in folder ``path``. No code from the folder is executed.

    Raises:
        ModelFolderError: The folder or its ``config.json`` is missing or unusable, the ``model_type`` is unknown, or
            the quantization method is not supported.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = Path(path)
    values = read_config_json(folder)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        import transformers

        raise ModelFolderError(
            folder / "config.json",
            f"model_type {model_type!r} is unknown to transformers {transformers.__version__}. "
            "Install a version that supports it; code inside a model folder is never run",
        )
    _check_sizes(folder / "config.json", values)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types of errors; each means that the file is unusable
        reason = " ".join(str(error).split())
        raise ModelFolderError(
            folder / "config.json",
            f"transformers cannot use it: {reason}. Fix that value, or copy or download the file again",
        ) from error
    return config


def _check_sizes(path: Path, values: dict[str, Any]) -> None:
    """Reject sizes below 1, because models with such sizes would fail later with obscure errors."""
    for name in _SIZE_KEYS:
        if type(values.get(name)) is int and values[name] < 1:
            raise ModelFolderError(path, f"{name} = {values[name]} is not a valid size. Copy or download it again")


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the values in ``config.json``. Raises ModelFolderError if this program cannot read the model."""
    if not folder.is_dir():
        advice = "Use the folder that contains config.json and *.safetensors"
        if not folder.is_absolute():  # the name can be a hub id
            advice += ", or the id of a model on the hub, as OWNER/NAME"
        raise ModelFolderError(folder, f"{'is not a folder' if folder.exists() else 'does not exist'}. {advice}")
    path = folder / "config.json"
    if not path.exists():
        _reject_adapter(folder)
    subfolders = sorted(file.parent for glob in ("*", "snapshots/*") for file in folder.glob(f"{glob}/config.json"))
    values = _read_json_object(path, f"Use {subfolders[0]}" if subfolders else "Use a Hugging Face model folder")
    table = find_quantization(values)
    if table is not None and find_method(table) not in METHODS:
        raise ModelFolderError(
            path,
            f"the model is quantized ({find_method(table) or 'unknown method'}), which is not supported; with [lora], "
            f"{', '.join(METHODS.values())} are supported. {PLAIN_ADVICE}",
        )
    return values


def _reject_adapter(folder: Path) -> None:
    """Raise ModelFolderError if a folder contains a peft adapter instead of a model."""
    if not any(file.name.startswith("adapter_") for file in folder.iterdir()):
        return
    try:
        base_model = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base_model = None
    base_text = f"its base model ({base_model})" if isinstance(base_model, str) and base_model else "its base model"
    raise ModelFolderError(
        folder,
        f"contains an adapter, not a model. Use the folder of {base_text}; to continue training the adapter, also set "
        "lora.adapter_name_or_path to its folder",
    )


def find_quantization(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return ``quantization_config`` from the top level of ``config.json`` or from its ``text_config``, or None."""
    table, text_config = values.get("quantization_config"), values.get("text_config")
    if table is None and isinstance(text_config, dict):
        table = text_config.get("quantization_config")
    return None if table is None else table if isinstance(table, dict) else {}


def _read_json_object(path: Path, advice: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(path, f"is missing. {advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(path, f"cannot be read as JSON ({error}). Copy or download it again") from error
    if not isinstance(values, dict):
        raise ModelFolderError(path, "does not contain a JSON object. Copy or download it again")
    return values


class TensorReader:
    """Reader of the tensors in safetensors files.

    Attributes:
        records: Location of each tensor, by name, in file order. Quantized weights appear as decoded tensors.
        file_records: Location of each tensor in the files, by name. Quantized weights appear as their stored parts.
        largest_piece_nbytes: Peak size in bytes of this object's buffers. The callers' memory is not counted.
    """

    def __init__(self, records: dict[str, TensorRecord]) -> None:
        self.records = self.file_records = records
        self.largest_piece_nbytes = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in its record's dtype."""
        record = self.records[name]
        self.largest_piece_nbytes = max(self.largest_piece_nbytes, record.nbytes)
        if record.decoder is not None and record.decoder.is_transposed:
            buffer = torch.empty(record.decoder.shape, dtype=record.dtype)
            self._read_bytes(record, 0, buffer)
            return buffer.transpose(-1, -2).contiguous()
        tensor = torch.empty(record.shape, dtype=record.dtype)
        self._read_bytes(record, 0, tensor)
        return tensor

    def read_span(self, name: str, start: int, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return elements ``start`` to ``start + count`` of a tensor. See ``ReadSpan``.

        The bytes after this range are prefetched, because tensors are usually read in file order.
        """
        record = self.records[name]
        if out is None or out.dtype != record.dtype or not out.is_contiguous() or out.device.type != "cpu":
            nbytes = count * record.dtype.itemsize
            if self._buffer.numel() < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
            out = self._buffer[:nbytes].view(record.dtype)
            self.largest_piece_nbytes = max(self.largest_piece_nbytes, nbytes)
        self._read_bytes(record, start * record.dtype.itemsize, out, prefetch=True)
        return out

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of first element, 1-D piece) for each piece of a tensor. A piece is valid until the next one."""
        record = self.records[name]
        step = max(1, PIECE_BYTES // record.dtype.itemsize)
        buffer = torch.empty(min(step, record.numel), dtype=record.dtype)
        self.largest_piece_nbytes = max(self.largest_piece_nbytes, buffer.nbytes)
        for start in range(0, record.numel, step):
            piece = buffer[: min(step, record.numel - start)]
            self._read_bytes(record, start * record.dtype.itemsize, piece)
            yield start, piece

    def find_nonfinite(
        self, names: Iterable[str], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[str]:
        """Read tensors piece by piece. Return the names of the tensors that contain NaN or infinite values.

        Args:
            names: Names of the tensors to check. Tensors with an integer dtype are skipped.
            on_progress: Called with the number of bytes read so far and the total number.
        """
        records = [self.records[name] for name in names if self.records[name].dtype.is_floating_point]
        num_read, total, bad_names = 0, sum(record.nbytes for record in records), []
        for record in records:
            for _, piece in self.pieces(record.name):
                minimum, maximum = torch.aminmax(piece if piece.dtype.itemsize > 1 else piece.float())
                num_read += piece.nbytes
                on_progress(num_read, total)
                if not (torch.isfinite(minimum) and torch.isfinite(maximum)):
                    bad_names.append(record.name)
                    break
        return bad_names

    def read_stored(self, name: str, start: int, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` bytes of a stored tensor, starting at byte ``start``."""
        out = torch.empty(nbytes, dtype=torch.uint8)
        self._read_bytes(self.file_records[name], start, out)
        return out

    def _read_bytes(
        self, record: TensorRecord, skip_nbytes: int, destination: torch.Tensor, *, prefetch: bool = False
    ) -> None:
        """Fill the contiguous CPU tensor ``destination`` with the tensor's bytes, starting at byte ``skip_nbytes``.

        Args:
            prefetch: Whether to let the kernel prefetch the same number of bytes after this range.
        """
        if destination.numel() == 0:
            return
        if record.decoder is not None:
            index = (record.offset + skip_nbytes) // record.dtype.itemsize
            destination.view(-1).copy_(decode(record.decoder, index, destination.numel(), self.read_stored))
            return
        memory = tensor_bytes(destination)
        start, num_read = record.offset + skip_nbytes, 0
        try:
            with record.file.open("rb", buffering=0) as file:
                if prefetch:
                    os.posix_fadvise(file.fileno(), start, 2 * len(memory), os.POSIX_FADV_WILLNEED)
                while num_read < len(memory):
                    count = os.preadv(file.fileno(), [memory[num_read:]], start + num_read)
                    if count == 0:
                        raise ModelFolderError(record.file, f"ends inside tensor {record.name}. Copy it again")
                    num_read += count
        except OSError as error:
            raise ModelFolderError(record.file, f"cannot be read: {error}") from error


class TensorFile(TensorReader):
    """Reader of a single safetensors file.

    Raises:
        ModelFolderError: The file is missing, truncated or damaged.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(_read_header(Path(path)))


class ModelFolder(TensorReader):
    """Reader of a folder's safetensors files.

    Args:
        path: A folder that contains ``model.safetensors``, or shards and ``model.safetensors.index.json``.

    Raises:
        ModelFolderError: A file is missing, truncated or damaged, or the folder has no safetensors file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        read_config_json(self.path)
        super().__init__({})
        if (self.path / SINGLE_FILE).is_file():
            self.records = _read_header(self.path / SINGLE_FILE)
        elif (self.path / INDEX_FILE).is_file():
            self._read_shards()
        else:
            self._raise_no_weights()
        self.file_records = self.records
        if table := find_quantization(read_config_json(self.path)):
            self._add_decoders(table)
        record = next((r for r in self.records.values() if r.dtype in _QUANTIZED_DTYPES), None)
        if record is not None:
            raise ModelFolderError(
                record.file,
                f"tensor {record.name} has dtype {dtype_name(record.dtype)}, but config.json does not say how it is "
                "quantized. Use the original model in float32, bfloat16 or float16",
            )

    def _add_decoders(self, table: Mapping[str, Any]) -> None:
        """Replace the records of each quantized weight's parts with a record of the decoded weight."""
        shapes = {name: (record.shape, dtype_name(record.dtype)) for name, record in self.file_records.items()}
        try:
            decoders = find_decoders(shapes, table, self.read_stored)
        except (QuantizationError, ValueError, KeyError) as error:
            raise ModelFolderError(
                self.path, f"its quantized weights cannot be read: {error}. {PLAIN_ADVICE}"
            ) from error
        parts = {part for decoder in decoders.values() for part in decoder.parts}
        self.records = {name: record for name, record in self.file_records.items() if name not in parts}
        for name, decoder in decoders.items():
            shape = decoder.shape
            if decoder.is_transposed:
                shape = (*shape[:-2], shape[-1], shape[-2])
            file = self.file_records[decoder.parts[0]].file
            self.records[name] = TensorRecord(name, file, torch.float32, shape, 0, 4 * math.prod(shape), decoder)

    def fingerprint(self) -> str:
        """Return a checksum of all headers and of at most 4096 samples, 4 KiB each, from the tensors.

        This takes seconds for models of any size. The checksum detects a different model with the same shapes, but not
        a few changed bytes.
        """
        digest = xxhash.xxh3_64()
        records = sorted(self.file_records.values(), key=lambda record: record.name)
        for record in records:
            digest.update(f"{record.name} {dtype_name(record.dtype)} {list(record.shape)}\n".encode())
        step = max(1, -(-len(records) // _NUM_SAMPLES))
        for record in records[::step]:
            nbytes = min(_SAMPLE_BYTES, record.nbytes)
            sample = torch.empty(nbytes, dtype=torch.uint8)
            self._read_bytes(record, (record.nbytes - nbytes) // 2, sample)
            digest.update(tensor_bytes(sample) if nbytes else b"")
        return digest.hexdigest()

    def _read_shards(self) -> None:
        index = self.path / INDEX_FILE
        weight_map = _read_json_object(index, "Copy or download it again").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFolderError(index, "has no weight_map. Copy or download it again")
        names = sorted({str(name) for name in weight_map.values()})
        bad_names = [name for name in names if Path(name).name != name]
        if bad_names:
            raise ModelFolderError(index, f"lists files outside of the folder: {join_names(bad_names)}. {_COPY_AGAIN}")
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise ModelFolderError(
                self.path,
                f"{len(missing)} of {len(names)} shards are missing: {join_names(missing)}. Copy or download them",
            )
        for name in names:
            self.records.update(_read_header(self.path / name))
        tensors = sorted(set(weight_map) - set(self.records))
        if tensors:
            text = f"lists {len(tensors)} tensors that no shard contains: {join_names(tensors)}. {_COPY_AGAIN}"
            raise ModelFolderError(index, text)

    def _raise_no_weights(self) -> None:
        names = sorted(path.name for path in self.path.iterdir())
        _reject_adapter(self.path)
        shards = [name for name in names if name.endswith(".safetensors")]
        if shards:
            raise ModelFolderError(
                self.path, f"has {join_names(shards)} but no {INDEX_FILE}. Copy or download it again"
            )
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            raise ModelFolderError(
                self.path,
                "has only pickle files, but this program reads only safetensors. Convert them with "
                "transformers: AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(NEW_FOLDER)",
            )
        if any(name.endswith(".gguf") for name in names):
            raise ModelFolderError(self.path, "is a GGUF model. Use the Hugging Face folder of the original model")
        raise ModelFolderError(self.path, f"has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}. {_COPY_AGAIN}")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory as a writable memoryview of bytes."""
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.device.type == "cpu", tensor.device
    return tensor.view(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in safetensors files."""
    return next(name for name, value in _DTYPES.items() if value == dtype)


def join_names(names: list[str], limit: int = 6) -> str:
    """Return the first ``limit`` names and the number of remaining names, as text for messages."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _read_header(path: Path) -> dict[str, TensorRecord]:
    """Return the records of a safetensors file. Check that they cover all of its data bytes without overlaps."""
    advice = "The file is damaged or truncated: copy or download it again"
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix == b"version ":
                raise ModelFolderError(path, "is a Git LFS pointer, not the file. Fetch the file with `git lfs pull`")
            header_nbytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_nbytes > _MAX_HEADER_BYTES:
                raise ModelFolderError(path, f"is not a safetensors file. {advice}")
            text = file.read(header_nbytes)
            file_nbytes = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise ModelFolderError(path, f"cannot be read: {error}") from error
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        header.pop("__metadata__", None)
        records = {name: _parse_record(path, name, fields, 8 + header_nbytes) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFolderError(path, f"has no valid safetensors header ({error}). {advice}") from error
    end = 8 + header_nbytes
    for record in sorted(records.values(), key=lambda record: (record.offset, record.nbytes)):
        if record.offset != end:
            raise ModelFolderError(path, f"tensor {record.name} does not start where the previous one ends. {advice}")
        end = record.offset + record.nbytes
    if file_nbytes != end:
        raise ModelFolderError(path, f"has {file_nbytes} bytes, but its header describes {end}. {advice}")
    return records


def _parse_record(path: Path, name: str, fields: dict[str, Any], data_start: int) -> TensorRecord:
    dtype = _DTYPES.get(fields["dtype"])
    if dtype is None:
        raise ModelFolderError(
            path,
            f"tensor {name} has dtype {fields['dtype']}, which is not supported (a quantized model?). "
            "Use the original model in float32, bfloat16 or float16",
        )
    start, end = (int(value) for value in fields["data_offsets"])
    shape = tuple(int(size) for size in fields["shape"])
    if end - start != math.prod(shape) * dtype.itemsize or start < 0 or any(size < 0 for size in shape):
        raise ValueError(f"tensor {name} has shape {list(shape)} and {end - start} bytes")
    return TensorRecord(name, path, dtype, shape, data_start + start, end - start)


def weight_file_bytes(folder: str) -> int:
    """Return the total size of a folder's weight files, or 0 if there are none."""
    try:
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    except OSError:
        return 0


def model_facts(name: str, folder: Path | None) -> ModelFacts:
    """Return facts about a model from its folder. Facts that cannot be read are 0.

    Args:
        name: Name of the model in the config.
        folder: Folder of the model, or None if the model is not on this machine.
    """
    if folder is None or not folder.is_dir():
        return ModelFacts(name)
    try:
        records = ModelFolder(folder).records
        num_parameters = sum(record.numel for record in records.values() if record.dtype.is_floating_point)
    except (ModelFolderError, OSError):
        num_parameters = 0
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        positions = values.get("max_position_embeddings", values.get("n_positions", 0))
    except (OSError, ValueError, AttributeError):
        positions = 0
    return ModelFacts(name, num_parameters, positions if isinstance(positions, int) and positions > 1 else 0)
