"""Quantized folders: their weights as the fp32 numbers that they stand for, a few rows at a time.

Three public formats, whose tensors are found by name:

- fp8 with scales of blocks (DeepSeek): ``W`` float8 [R, C] and ``W_scale_inv`` [ceil(R/b), ceil(C/b)];
- mxfp4 (gpt-oss): ``W_blocks`` bytes [..., R, C/32, 16], two e2m1 numbers in each, the low half first, and ``W_scales``
  [..., R, C/32], exponents of two with a bias of 127; the model has ``W`` as [..., C, R];
- nf4 of bitsandbytes: ``W`` bytes, two numbers of a table in each, the high half first, with ``W.absmax`` per block of
  the flattened weight, itself perhaps in 8 bits (``nested``), and ``W.quant_state.bitsandbytes__nf4``, JSON.

Numbers are made on the host, as bytes come from the folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["METHODS", "Decoder", "QuantizationError", "find_decoders", "method_of"]

#: ``quant_method`` of a config -> what it is called here.
METHODS = {"fp8": "fp8 with scales of blocks", "mxfp4": "mxfp4", "bitsandbytes": "nf4"}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MX_BLOCK = 32
_EXPONENT_BIAS = 127
_NF4_STATE = ".quant_state.bitsandbytes__nf4"

#: Returns some bytes of a tensor in the files: ``read(name, first byte, number of bytes)``, a fresh 1-D uint8 tensor.
ReadBytes = Callable[[str, int, int], Tensor]


class QuantizationError(Exception):
    """Quantized tensors are not in a form that can be read; the text says which."""


class Decoder(Protocol):
    """Makes the numbers of one weight. Thread-safe.

    Attributes:
        parts: names of the tensors in the files that it is made of.
        shape: of the numbers as they are decoded, in rows.
        is_transposed: the model has the last two dimensions the other way round.
    """

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_transposed(self) -> bool: ...

    def decode(self, first: int, count: int, read: ReadBytes) -> Tensor:
        """Return ``count`` numbers of the flattened weight from ``first`` on, fp32."""


def method_of(table: object) -> str:
    """Return the quantization method that a config names; "" where it is unknown."""
    if not isinstance(table, Mapping):
        return ""
    method = str(table.get("quant_method") or ("bitsandbytes" if table.get("load_in_4bit") else ""))
    return method


def find_decoders(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], table: Mapping[str, Any], read: ReadBytes
) -> dict[str, Decoder]:
    """Return the quantized weights of a folder: name that the model's checkpoints have -> its decoder.

    Args:
        shapes: of all tensors in the files, with their dtypes as safetensors calls them.
        table: ``quantization_config`` of the config.
        read: for small tables that a decoder keeps.

    Raises:
        QuantizationError: tensors of a method, or of a kind of one, that is not read here.
    """
    method = method_of(table)
    if method == "fp8":
        return _find_fp8(shapes, table)
    if method == "mxfp4":
        return _find_mxfp4(shapes)
    if method == "bitsandbytes":
        return _find_nf4(shapes, read)
    raise QuantizationError(f"its method, {method or 'without a name'}, is not read here")


# -- fp8 -------------------------------------------------------------------------------------------------------------

_FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class _Fp8:
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, int]
    is_transposed: bool = False

    def decode(self, first: int, count: int, read: ReadBytes) -> Tensor:
        _, columns = self.shape
        start, stop = first // columns, -(-(first + count) // columns)
        name, scale_name = self.parts
        numbers = read(name, start * columns, (stop - start) * columns).view(self.dtype).float().view(-1, columns)
        across = -(-columns // self.block[1])
        first_block, last_block = start // self.block[0], (stop - 1) // self.block[0]
        num_blocks = last_block - first_block + 1
        scales = read(scale_name, 4 * first_block * across, 4 * num_blocks * across).view(torch.float32)
        of_row = torch.arange(start, stop) // self.block[0] - first_block
        of_column = torch.arange(columns) // self.block[1]
        numbers *= scales.view(num_blocks, across)[of_row][:, of_column]
        return numbers.view(-1)[first - start * columns :][:count]


def _find_fp8(shapes: Mapping[str, tuple[tuple[int, ...], str]], table: Mapping[str, Any]) -> dict[str, Decoder]:
    size = table.get("weight_block_size")
    found: dict[str, Decoder] = {}
    for name, (shape, dtype) in shapes.items():
        if dtype not in _FP8:
            continue
        scale = f"{name}_scale_inv"
        if scale not in shapes or len(shape) != 2 or not isinstance(size, list | tuple) or len(size) != 2:
            raise QuantizationError(f"{name} is fp8 without scales of blocks ({scale}, weight_block_size)")
        block = (int(size[0]), int(size[1]))
        wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        if shapes[scale] != (wanted, "F32"):
            raise QuantizationError(f"{scale} is {shapes[scale][1]} {list(shapes[scale][0])}, not F32 {list(wanted)}")
        found[name] = _Fp8((name, scale), shape, _FP8[dtype], block)
    return found


# -- mxfp4 -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mxfp4:
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    is_transposed: bool = True

    def decode(self, first: int, count: int, read: ReadBytes) -> Tensor:
        start, stop = first // _MX_BLOCK, -(-(first + count) // _MX_BLOCK)
        blocks = read(self.parts[0], start * _MX_BLOCK // 2, (stop - start) * _MX_BLOCK // 2)
        exponents = read(self.parts[1], start, stop - start).to(torch.int32) - _EXPONENT_BIAS
        numbers = _halves(blocks, torch.tensor(_E2M1), high_first=False).view(-1, _MX_BLOCK)
        return torch.ldexp(numbers, exponents[:, None]).view(-1)[first - start * _MX_BLOCK :][:count]


def _halves(packed: Tensor, table: Tensor, *, high_first: bool) -> Tensor:
    """Return two numbers of a table for each byte."""
    low, high = (packed & 0xF).long(), (packed >> 4).long()
    return table[torch.stack([high, low] if high_first else [low, high], dim=-1)].view(-1)


def _find_mxfp4(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Decoder]:
    found: dict[str, Decoder] = {}
    for name, (shape, dtype) in shapes.items():
        if not name.endswith("_blocks") or dtype != "U8":
            continue
        whole = name.removesuffix("_blocks")
        scales = f"{whole}_scales"
        if len(shape) < 3 or shape[-1] != _MX_BLOCK // 2 or shapes.get(scales) != (shape[:-1], "U8"):
            raise QuantizationError(f"{name} {list(shape)} has no {scales} of its shape")
        found[whole] = _Mxfp4((name, scales), (*shape[:-2], shape[-2] * _MX_BLOCK))
    return found


# -- nf4 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Nf4:
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    table: Tensor
    absmax: Tensor
    block: int
    is_transposed: bool = False

    def decode(self, first: int, count: int, read: ReadBytes) -> Tensor:
        start, stop = first // self.block, -(-(first + count) // self.block)
        total = math.prod(self.shape)
        end = min(stop * self.block, total)
        packed = read(self.parts[0], start * self.block // 2, -(-(end - start * self.block) // 2))
        numbers = _halves(packed, self.table, high_first=True)[: end - start * self.block]
        numbers = numbers * self.absmax[start:stop].repeat_interleave(self.block)[: numbers.numel()]
        return numbers[first - start * self.block :][:count]


def _find_nf4(shapes: Mapping[str, tuple[tuple[int, ...], str]], read: ReadBytes) -> dict[str, Decoder]:
    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        if name not in shapes:
            raise QuantizationError(f"{name} is missing")
        return read(name, 0, math.prod(shapes[name][0]) * dtype.itemsize).view(dtype)

    found: dict[str, Decoder] = {}
    extra: tuple[str, ...]
    for state_name in [name for name in shapes if ".quant_state." in name]:
        if not state_name.endswith(_NF4_STATE):
            raise QuantizationError(f"{state_name} is of another format than nf4")
        name = state_name.removesuffix(_NF4_STATE)
        state = json.loads(bytes(tensor(state_name, torch.uint8).tolist()))
        table = tensor(f"{name}.quant_map", torch.float32)
        if f"{name}.nested_absmax" in shapes:
            nested = tensor(f"{name}.nested_quant_map", torch.float32)
            coarse = tensor(f"{name}.nested_absmax", torch.float32)
            fine = nested[tensor(f"{name}.absmax", torch.uint8).long()]
            size = int(state["nested_blocksize"])
            absmax = fine * coarse.repeat_interleave(size)[: fine.numel()] + float(state["nested_offset"])
            extra = (f"{name}.nested_absmax", f"{name}.nested_quant_map")
        else:
            absmax, extra = tensor(f"{name}.absmax", torch.float32), ()
        parts = (name, f"{name}.absmax", f"{name}.quant_map", state_name, *extra)
        found[name] = _Nf4(parts, tuple(state["shape"]), table, absmax, int(state["blocksize"]))
    left = [name for name in shapes if name.endswith((".SCB", ".weight_format"))]
    if left:
        raise QuantizationError(f"{left[0]} is of LLM.int8, which is not read here")
    return found
