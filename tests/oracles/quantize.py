"""Folders whose weights are quantized, with the numbers they stand for: written after the formats' descriptions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: The 16 numbers of nf4, as its paper gives them.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def fp8(weight: Tensor, block: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return float8 numbers with scales of square blocks, by the end of their names, and what they stand for."""
    rows, columns = weight.shape
    down, across = math.ceil(rows / block), math.ceil(columns / block)
    scales = torch.empty(down, across)
    numbers, meant = torch.empty_like(weight), torch.empty_like(weight)
    for i in range(down):
        for j in range(across):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[at].abs().max() / 448
            numbers[at] = weight[at] / scales[i, j]
            meant[at] = numbers[at].to(torch.float8_e4m3fn).float() * scales[i, j]
    return {"": numbers.to(torch.float8_e4m3fn), "_scale_inv": scales}, meant


def nf4(weight: Tensor, block: int = 64, *, nested: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Return what bitsandbytes saves of a weight, and what it stands for."""
    flat = weight.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(dim=1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    found: dict[str, Tensor] = {".quant_map": NF4.clone()}
    if nested:
        table = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        size = 256
        rest = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % size)).view(-1, size)
        coarse = rest.abs().amax(dim=1)
        codes = (rest / coarse[:, None])[..., None].sub(table).abs().argmin(dim=-1).view(-1)[: absmax.numel()]
        absmax = table[codes] * coarse.repeat_interleave(size)[: absmax.numel()] + offset
        state |= {"nested_blocksize": size, "nested_offset": offset, "nested_dtype": "float32"}
        found |= {".absmax": codes.to(torch.uint8), ".nested_absmax": coarse, ".nested_quant_map": table}
    else:
        found[".absmax"] = absmax
    codes = (blocks / absmax[:, None])[..., None].sub(NF4).abs().argmin(dim=-1)
    meant = (NF4[codes] * absmax[:, None]).view(-1)[: flat.numel()].view(weight.shape)
    pairs = codes.view(-1)[: flat.numel() + flat.numel() % 2].view(-1, 2)
    found[""] = (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None]
    found[".quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return found, meant


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return blocks and scales of experts' weights [E, C, R], by the end of their names, and what they stand for."""
    rows = weight.transpose(-1, -2).reshape(*weight.shape[:-2], weight.shape[-1], -1, 32)
    exponents = torch.floor(torch.log2(rows.abs().amax(dim=-1) / 6)) + 1
    codes = (rows / torch.exp2(exponents)[..., None])[..., None].sub(FP4).abs().argmin(dim=-1)
    meant = (FP4[codes] * torch.exp2(exponents)[..., None]).flatten(-2).transpose(-1, -2).contiguous()
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {"_blocks": packed, "_scales": (exponents + 127).to(torch.uint8)}, meant


def write_quantized(plain: Path, folder: Path, table: dict[str, object], parts: dict[str, dict[str, Tensor]]) -> None:
    """Make a copy of a model's folder with some weights quantized.

    Args:
        table: ``quantization_config``.
        parts: name of a weight -> its tensors by the end of their names.
    """
    tensors = load_file(plain / "model.safetensors")
    for name, quantized in parts.items():
        del tensors[name]
        tensors.update({f"{name}{end}": tensor.contiguous() for end, tensor in quantized.items()})
    folder.mkdir(exist_ok=True)
    for path in plain.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    values = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": table}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
