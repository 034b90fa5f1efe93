"""Decoders for quantized weights. A decoder returns any range of a weight's numbers, in fp32.

Four public formats are supported. Their tensors are found by name:

- fp8 with block scales (DeepSeek): ``W`` float8 [R, C], and ``W_scale_inv`` [ceil(R/b), ceil(C/b)];
- mxfp4 (gpt-oss): ``W_blocks`` bytes [..., R, C/32, 16], each with two e2m1 numbers, low half first; and ``W_scales``
  [..., R, C/32], exponents of two with a bias of 127. The model has ``W`` as [..., C, R];
- nf4 of bitsandbytes: ``W`` bytes, each with two indices into a table, high half first; ``W.absmax`` per block of the
  flattened weight, which can itself be quantized to 8 bits (``nested``); and JSON, ``W.quant_state.bitsandbytes__nf4``;
- int4 of compressed-tensors, in ``int4.py``.

Decoding uses torch operations whose results are bit-identical on every device. It runs on the host when weights are
loaded or exported, and on the compute device for blocks of packed bytes (``packed.py``).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.models.int4 import find_int4

__all__ = ["METHODS", "Decoder", "QuantizationError", "decode", "find_decoders", "find_method"]

#: Names of the quantization methods in messages. Keys are values of ``quant_method`` in a config.
METHODS = {
    "fp8": "fp8 with block scales",
    "mxfp4": "mxfp4",
    "bitsandbytes": "nf4",
    "compressed-tensors": "int4 (pack-quantized)",
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MX_BLOCK = 32
_EXPONENT_BIAS = 127
_NF4_STATE = ".quant_state.bitsandbytes__nf4"
#: Largest number that is finite in bf16; largest mxfp4 scale whose products are finite; largest value that this program
#: accepts in nf4's tables and scales. With this limit, all nf4 products are finite.
_MAX_BF16, _LARGEST_SCALE, _LARGEST_NF4 = 3.38e38, 252, 1e18
_SMALLEST_SCALE_BITS = 0x0040_0000  # bits of 2 ** -127, a subnormal number

#: Function (name, first byte, number of bytes) that returns bytes of a stored tensor as a new 1-D uint8 tensor.
ReadBytes = Callable[[str, int, int], Tensor]


class QuantizationError(Exception):
    """Error for quantized tensors with an unsupported format. The message describes the format."""


class Decoder(Protocol):
    """Decoder for a single weight. Thread-safe.

    Attributes:
        parts: Names of the weight's tensors in the files.
        packed_names: The ``parts`` that decoding reads. All other parts are read once, when the decoder is created.
        shape: Shape of the weight in decoding order.
        is_transposed: Whether the model swaps the last two dimensions of the weight.
    """

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def packed_names(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_transposed(self) -> bool: ...

    def spans(self, start: int, count: int) -> tuple[range, ...]:
        """Return, for each of ``packed_names``, the byte range needed for ``count`` numbers starting at ``start``."""

    def numbers(self, start: int, count: int, buffers: Sequence[Tensor]) -> Tensor:
        """Decode ``count`` numbers of the flattened weight, starting at ``start``, to fp32 on the device of the bytes.

        Does not synchronize with the device.

        Args:
            buffers: Bytes of each range that ``spans`` returns: 1-D uint8 tensors on one device, aligned to four bytes.
        """

    def is_finite(self, name: str, data: Tensor) -> bool:
        """Return whether a range of a stored tensor's bytes decodes to finite numbers.

        Args:
            name: One of ``packed_names``.
            data: Bytes in host memory. The range starts and ends at a multiple of four bytes or at the tensor's end.
        """


def decode(decoder: Decoder, start: int, count: int, read: ReadBytes) -> Tensor:
    """Read and decode ``count`` numbers of a flattened weight, starting at ``start``, to fp32."""
    spans = zip(decoder.packed_names, decoder.spans(start, count), strict=True)
    return decoder.numbers(start, count, [read(name, span.start, len(span)) for name, span in spans])


def find_method(table: object) -> str:
    """Return the quantization method that a config names, or "" if it is unknown."""
    if not isinstance(table, Mapping):
        return ""
    method = str(table.get("quant_method") or ("bitsandbytes" if table.get("load_in_4bit") else ""))
    return method


def find_decoders(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], table: Mapping[str, Any], read: ReadBytes
) -> dict[str, Decoder]:
    """Return the decoders for a folder's quantized weights, by the weights' names.

    Args:
        shapes: Shape and safetensors dtype of each stored tensor, by name.
        table: ``quantization_config`` of the config.
        read: Function that reads bytes of a stored tensor.

    Raises:
        QuantizationError: The method, or this variant of the method, is not supported.
    """
    method = find_method(table)
    if method == "fp8":
        return _find_fp8(shapes, table)
    if method == "mxfp4":
        return _find_mxfp4(shapes)
    if method == "bitsandbytes":
        return _find_nf4(shapes, read)
    if method == "compressed-tensors":
        return dict(find_int4(shapes, table, read))
    raise QuantizationError(f"its method, {method or 'without a name'}, is not supported")


# -- fp8 -------------------------------------------------------------------------------------------------------------

_FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class _Fp8:
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, int]
    is_transposed: bool = False

    @property
    def packed_names(self) -> tuple[str, ...]:
        return self.parts

    def _rows(self, start: int, count: int) -> range:
        columns = self.shape[1]
        return range(start // columns, -(-(start + count) // columns))

    def spans(self, start: int, count: int) -> tuple[range, ...]:
        columns, rows = self.shape[1], self._rows(start, count)
        num_blocks = -(-columns // self.block[1])
        first_block, end_block = rows.start // self.block[0], -(-rows.stop // self.block[0])
        scales = range(4 * first_block * num_blocks, 4 * end_block * num_blocks)
        return range(rows.start * columns, rows.stop * columns), scales

    def numbers(self, start: int, count: int, buffers: Sequence[Tensor]) -> Tensor:
        columns, rows = self.shape[1], self._rows(start, count)
        numbers = buffers[0].view(self.dtype).float().view(-1, columns)
        scales = buffers[1].view(torch.float32).view(-1, -(-columns // self.block[1]))
        device = scales.device
        row_blocks = torch.arange(rows.start, rows.stop, device=device) // self.block[0] - rows.start // self.block[0]
        column_blocks = torch.arange(columns, device=device) // self.block[1]
        numbers *= scales[row_blocks].index_select(1, column_blocks)
        return numbers.view(-1)[start - rows.start * columns :][:count]

    def is_finite(self, name: str, data: Tensor) -> bool:
        if name == self.parts[1]:
            # All products are finite if the product with the largest fp8 number is.
            return bool((data.view(torch.float32).abs() * torch.finfo(self.dtype).max <= _MAX_BF16).all())
        magnitude = data & 0x7F
        return not bool((magnitude == 0x7F if self.dtype == torch.float8_e4m3fn else magnitude >= 0x7C).any())


def _find_fp8(shapes: Mapping[str, tuple[tuple[int, ...], str]], table: Mapping[str, Any]) -> dict[str, Decoder]:
    block_size = table.get("weight_block_size")
    decoders: dict[str, Decoder] = {}
    for name, (shape, dtype) in shapes.items():
        if dtype not in _FP8:
            continue
        scale = f"{name}_scale_inv"
        if scale not in shapes or len(shape) != 2 or not isinstance(block_size, list | tuple) or len(block_size) != 2:
            raise QuantizationError(f"{name} is fp8 without block scales ({scale}, weight_block_size)")
        block = (int(block_size[0]), int(block_size[1]))
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        if shapes[scale] != (grid, "F32"):
            raise QuantizationError(f"{scale} is {shapes[scale][1]} {list(shapes[scale][0])}, not F32 {list(grid)}")
        decoders[name] = _Fp8((name, scale), shape, _FP8[dtype], block)
    return decoders


# -- mxfp4 -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mxfp4:
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    is_transposed: bool = True

    @property
    def packed_names(self) -> tuple[str, ...]:
        return self.parts

    def spans(self, start: int, count: int) -> tuple[range, ...]:
        block_start, block_stop = start // _MX_BLOCK, -(-(start + count) // _MX_BLOCK)
        return range(block_start * _MX_BLOCK // 2, block_stop * _MX_BLOCK // 2), range(block_start, block_stop)

    def numbers(self, start: int, count: int, buffers: Sequence[Tensor]) -> Tensor:
        numbers = _unpack_pairs(buffers[0], _e2m1_pairs(buffers[0].device)).view(-1, _MX_BLOCK)
        # Build 2 ** (scale - 127) from its bits, because power functions differ between devices.
        exponents = buffers[1].to(torch.int32)
        scales = torch.where(exponents == 0, _SMALLEST_SCALE_BITS, exponents << 23).view(torch.float32)
        numbers *= scales[:, None]
        return numbers.view(-1)[start % _MX_BLOCK :][:count]

    def is_finite(self, name: str, data: Tensor) -> bool:
        return name == self.parts[0] or not bool((data > _LARGEST_SCALE).any())


@functools.cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    return _make_pair_table(torch.tensor(_E2M1), high_first=False).to(device)


def _make_pair_table(table: Tensor, *, high_first: bool) -> Tensor:
    """Return the two numbers that each possible byte encodes, ``(256, 2)``, given the table of the 16 4-bit codes."""
    low_numbers, high_numbers = table.repeat(16), table.repeat_interleave(16)
    return torch.stack([high_numbers, low_numbers] if high_first else [low_numbers, high_numbers], dim=-1)


def _unpack_pairs(data: Tensor, pairs: Tensor) -> Tensor:
    """Decode each byte to two numbers."""
    return pairs.index_select(0, data.to(torch.int32)).view(-1)


def _find_mxfp4(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Decoder]:
    decoders: dict[str, Decoder] = {}
    for name, (shape, dtype) in shapes.items():
        if not name.endswith("_blocks") or dtype != "U8":
            continue
        base = name.removesuffix("_blocks")
        scales = f"{base}_scales"
        if len(shape) < 3 or shape[-1] != _MX_BLOCK // 2 or shapes.get(scales) != (shape[:-1], "U8"):
            raise QuantizationError(f"{name} {list(shape)} has no {scales} of a matching shape")
        decoders[base] = _Mxfp4((name, scales), (*shape[:-2], shape[-2] * _MX_BLOCK))
    return decoders


# -- nf4 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _QuantizedScales:
    """Block scales that are themselves quantized to 8 bits: ``table[code] * coarse + offset``."""

    block: int
    offset: float


@dataclass(frozen=True)
class _Nf4:
    parts: tuple[str, ...]
    packed_names: tuple[str, ...]  # tensors with numbers, scales, table; if nested, also coarse scales and their table
    shape: tuple[int, ...]
    block: int
    nested: _QuantizedScales | None
    is_transposed: bool = False

    def _blocks(self, start: int, count: int) -> range:
        return range(start // self.block, -(-(start + count) // self.block))

    def spans(self, start: int, count: int) -> tuple[range, ...]:
        blocks = self._blocks(start, count)
        end = min(blocks.stop * self.block, math.prod(self.shape))
        numbers, table = range(blocks.start * self.block // 2, -(-end // 2)), range(64)
        if self.nested is None:
            return numbers, range(4 * blocks.start, 4 * blocks.stop), table
        size = self.nested.block
        coarse_scales = range(4 * (blocks.start // size), 4 * -(-blocks.stop // size))
        return numbers, range(blocks.start, blocks.stop), table, coarse_scales, range(4 * 256)

    def numbers(self, start: int, count: int, buffers: Sequence[Tensor]) -> Tensor:
        blocks = self._blocks(start, count)
        numbers = _unpack_pairs(buffers[0], _make_pair_table(buffers[2].view(torch.float32), high_first=True))
        numbers = functional.pad(numbers, (0, len(blocks) * self.block - numbers.numel()))
        numbers.view(-1, self.block).mul_(self._scales(blocks, buffers)[:, None])
        return numbers[start - blocks.start * self.block :][:count]

    def _scales(self, blocks: range, buffers: Sequence[Tensor]) -> Tensor:
        if self.nested is None:
            return buffers[1].view(torch.float32)
        table, coarse = buffers[4].view(torch.float32), buffers[3].view(torch.float32)
        size = self.nested.block
        block_groups = torch.arange(blocks.start, blocks.stop, device=coarse.device) // size - blocks.start // size
        scales = table.index_select(0, buffers[1].to(torch.int32)) * coarse.index_select(0, block_groups)
        return scales + self.nested.offset

    def is_finite(self, name: str, data: Tensor) -> bool:
        if name == self.packed_names[0] or (self.nested is not None and name == self.packed_names[1]):
            return True
        return bool((data.view(torch.float32).abs() <= _LARGEST_NF4).all())


def _find_nf4(shapes: Mapping[str, tuple[tuple[int, ...], str]], read: ReadBytes) -> dict[str, Decoder]:
    def check(name: str, count: int, dtype: str) -> None:
        if name not in shapes:
            raise QuantizationError(f"{name} is missing")
        shape, file_dtype = shapes[name]
        if math.prod(shape) != count or file_dtype != dtype:
            raise QuantizationError(f"{name} is {file_dtype} {list(shape)}, not {dtype} [{count}]")

    decoders: dict[str, Decoder] = {}
    for state_name in [name for name in shapes if ".quant_state." in name]:
        if not state_name.endswith(_NF4_STATE):
            raise QuantizationError(f"{state_name} has a format other than nf4")
        name = state_name.removesuffix(_NF4_STATE)
        state = json.loads(bytes(read(state_name, 0, math.prod(shapes[state_name][0])).tolist()))
        shape, block = tuple(int(size) for size in state["shape"]), int(state["blocksize"])
        if block < 2 or block % 2:
            raise QuantizationError(f"{state_name} has blocks of {block} numbers")
        num_blocks = -(-math.prod(shape) // block)
        packed_names: tuple[str, ...] = (name, f"{name}.absmax", f"{name}.quant_map")
        check(name, -(-math.prod(shape) // 2), "U8")
        check(packed_names[2], 16, "F32")
        nested = None
        if f"{name}.nested_absmax" in shapes:
            packed_names = (*packed_names, f"{name}.nested_absmax", f"{name}.nested_quant_map")
            nested = _QuantizedScales(int(state["nested_blocksize"]), float(state["nested_offset"]))
            if not math.isfinite(nested.offset):
                raise QuantizationError(f"{state_name} has an offset of {nested.offset}")
            check(packed_names[1], num_blocks, "U8")
            check(packed_names[3], -(-num_blocks // max(1, nested.block)), "F32")
            check(packed_names[4], 256, "F32")
        else:
            check(packed_names[1], num_blocks, "F32")
        decoders[name] = _Nf4((*packed_names, state_name), packed_names, shape, block, nested)
    int8_names = [name for name in shapes if name.endswith((".SCB", ".weight_format"))]
    if int8_names:
        raise QuantizationError(f"{int8_names[0]} belongs to LLM.int8, which is not supported")
    return decoders
