"""Weight decoder for the int4 format of compressed-tensors (``pack-quantized``), used by ``quantized.py``.

A weight ``W`` [R, C] is stored as several tensors. ``W_packed`` int32 [R, ceil(C/8)] contains eight numbers per
element, lowest bits first, each with a bias of 8. ``W_scale`` [R, G] has one scale per group of columns, or one per row
(G = 1). ``W_shape`` is int64 [2]. An asymmetric weight also has ``W_zero_point`` int32 [ceil(R/8), G], packed along the
rows. The numbers are ``(packed - zero point) * scale``. Kimi K2's experts and llm-compressor's W4A16 use this format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["find_int4"]

_PACKED, _SCALE, _ZERO, _SHAPE = "_packed", "_scale", "_zero_point", "_shape"
_SCALES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_PER_WORD, _BIAS, _LARGEST_NUMBER = 8, 8, 15
_MAX_BF16 = 3.38e38  # largest number that is finite in bf16


@dataclass(frozen=True)
class _Int4:
    parts: tuple[str, ...]
    packed_names: tuple[str, ...]  # names of the tensors with numbers, scales and, if asymmetric, zero points
    shape: tuple[int, int]
    group_size: int  # number of columns in a group
    dtype: torch.dtype  # dtype of the scales
    is_transposed: bool = False

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)

    @property
    def _row_bytes(self) -> int:
        return 4 * -(-self.shape[1] // _PER_WORD)

    def _rows(self, start: int, count: int) -> range:
        columns = self.shape[1]
        return range(start // columns, -(-(start + count) // columns))

    def spans(self, start: int, count: int) -> tuple[range, ...]:
        rows, scale_bytes = self._rows(start, count), self.dtype.itemsize * self._num_groups
        numbers = range(rows.start * self._row_bytes, rows.stop * self._row_bytes)
        scales = range(rows.start * scale_bytes, rows.stop * scale_bytes)
        if len(self.packed_names) == 2:
            return numbers, scales
        zero_bytes = 4 * self._num_groups
        return numbers, scales, range(rows.start // _PER_WORD * zero_bytes, -(-rows.stop // _PER_WORD) * zero_bytes)

    def numbers(self, start: int, count: int, buffers: Sequence[Tensor]) -> Tensor:
        rows, columns = self._rows(start, count), self.shape[1]
        numbers = _unpack(buffers[0].view(len(rows), -1))[:, :columns]
        device = numbers.device
        column_groups = torch.arange(columns, device=device) // self.group_size
        if len(self.packed_names) > 2:
            # Each word contains the zero points of eight rows. Unpack whole words, then select the requested rows.
            words = buffers[2].view(-1, self._num_groups, 4).transpose(0, 1).reshape(self._num_groups, -1)
            num_skipped = rows.start % _PER_WORD
            zero_points = _unpack(words)[:, num_skipped : num_skipped + len(rows)].T
            numbers = numbers - zero_points.index_select(1, column_groups)
        scales = buffers[1].view(self.dtype).view(-1, self._num_groups).float()
        numbers = numbers * scales.index_select(1, column_groups)
        return numbers.reshape(-1)[start - rows.start * columns :][:count]

    def is_finite(self, name: str, data: Tensor) -> bool:
        if name != self.packed_names[1]:
            return True
        # All products are finite if the product with the largest packed number is.
        return bool((data.view(self.dtype).float().abs() * _LARGEST_NUMBER <= _MAX_BF16).all())


def _unpack(data: Tensor) -> Tensor:
    """Unpack bytes, ``(rows, bytes)``, to fp32 numbers, ``(rows, 2 * bytes)``. The low half of a byte comes first."""
    pairs = torch.stack([data & 0xF, data >> 4], dim=-1)
    return pairs.view(data.shape[0], -1).float() - _BIAS


def find_int4(
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    table: Mapping[str, Any],
    read: Callable[[str, int, int], Tensor],
) -> dict[str, _Int4]:
    """Return the decoders for a folder's int4 weights. See ``quantized.find_decoders``.

    Raises:
        ValueError: The folder uses another format of compressed-tensors, or a weight's parts do not fit together.
    """
    groups = _group_sizes(table)
    decoders: dict[str, _Int4] = {}
    for name, (packed_shape, dtype) in shapes.items():
        if not name.endswith(_PACKED) or f"{name.removesuffix(_PACKED)}{_SHAPE}" not in shapes:
            continue
        base = name.removesuffix(_PACKED)
        if f"{base}_g_idx" in shapes:
            raise ValueError(f"{base} has reordered columns (actorder), which this program does not support")
        if dtype != "I32" or len(packed_shape) != 2 or shapes[f"{base}{_SHAPE}"] != ((2,), "I64"):
            raise ValueError(f"{name} is {dtype} {list(packed_shape)}, which is not a packed matrix")
        rows, columns = read(f"{base}{_SHAPE}", 0, 16).view(torch.int64).tolist()
        if packed_shape != (rows, -(-columns // _PER_WORD)):
            raise ValueError(f"{name} {list(packed_shape)} does not fit [{rows}, {columns}] numbers of 4 bits")
        scale_shape, scale_dtype = shapes.get(f"{base}{_SCALE}", ((), ""))
        if len(scale_shape) != 2 or scale_shape[0] != rows or scale_dtype not in _SCALES:
            raise ValueError(f"{base}{_SCALE} is {scale_dtype or 'missing'} {list(scale_shape)}, not [{rows}, groups]")
        count = scale_shape[1]
        group_size = columns if count == 1 else next((g for g in groups if -(-columns // g) == count), 0)
        if not group_size:
            raise ValueError(f"{base}{_SCALE} has {count} groups of {columns} columns, but config.json no such size")
        packed_names: tuple[str, ...] = (name, f"{base}{_SCALE}")
        if (zeros := f"{base}{_ZERO}") in shapes:
            spec = ((-(-rows // _PER_WORD), count), "I32")
            if shapes[zeros] != spec:
                raise ValueError(f"{zeros} is {shapes[zeros][1]} {list(shapes[zeros][0])}, not I32 {list(spec[0])}")
            packed_names = (*packed_names, zeros)
        parts = (*packed_names, f"{base}{_SHAPE}")
        decoders[base] = _Int4(parts, packed_names, (rows, columns), group_size, _SCALES[scale_dtype])
    return decoders


def _group_sizes(table: Mapping[str, Any]) -> list[int]:
    """Return the sizes of the column groups in a config. Raises ValueError if the format is not supported."""
    default_format = str(table.get("format", ""))
    schemes = [scheme for scheme in (table.get("config_groups") or {}).values() if isinstance(scheme, Mapping)]
    formats = {str(scheme.get("format") or default_format) for scheme in schemes} or {default_format}
    if formats != {"pack-quantized"}:
        raise ValueError(f"of compressed-tensors, only pack-quantized is supported, not {', '.join(sorted(formats))}")
    sizes = []
    for scheme in schemes:
        weights = scheme.get("weights") or {}
        if weights.get("num_bits") != 4 or weights.get("type", "int") != "int":
            raise ValueError(f"its weights have {weights.get('num_bits')} bits ({weights.get('type')}), not 4 (int)")
        if scheme.get("input_activations"):
            raise ValueError("its activations are also quantized, but training computes them in the compute dtype")
        if size := weights.get("group_size"):
            sizes.append(int(size))
    return [size for size in sizes if size > 0]
