"""Model folders with quantized weights, and the decoded values. The code follows the formats' specifications."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from oracles.families import tiny_config
from oracles.tiered_run import QUICKSTART, write_tiny_model

#: The 16 values of NF4, from its paper.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def fp8(weight: Tensor, block: int) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a weight to float8. Return values and block scales by name suffix, and the decoded weight."""
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
    """Quantize a weight to NF4. Return the tensors that bitsandbytes saves, by name suffix, and the decoded weight."""
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
    """Quantize expert weights [E, C, R] to MXFP4. Return blocks and scales by name suffix, and the decoded weights."""
    rows = weight.transpose(-1, -2).reshape(*weight.shape[:-2], weight.shape[-1], -1, 32)
    exponents = torch.floor(torch.log2(rows.abs().amax(dim=-1) / 6)) + 1
    codes = (rows / torch.exp2(exponents)[..., None])[..., None].sub(FP4).abs().argmin(dim=-1)
    meant = (FP4[codes] * torch.exp2(exponents)[..., None]).flatten(-2).transpose(-1, -2).contiguous()
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {"_blocks": packed, "_scales": (exponents + 127).to(torch.uint8)}, meant


def int4(weight: Tensor, group: int, *, symmetric: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a weight [R, C] to 4 bits, in compressed-tensors' pack-quantized format.

    Return the tensors by name suffix, and the decoded weight.
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, group)
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    if symmetric:
        scales, zeros = (torch.maximum(-low, high) / 7.5).bfloat16(), torch.zeros(rows, columns // group)
    else:
        scales = ((high - low) / 15).bfloat16()
        zeros = (-8 - (low / scales.float()).round()).clamp(-8, 7)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(-8, 7)
    meant = ((codes - zeros[..., None]) * scales.float()[..., None]).view(rows, columns)
    found = {"_packed": _words(codes.view(rows, columns)), "_scale": scales, "_shape": torch.tensor([rows, columns])}
    if not symmetric:
        found["_zero_point"] = _words(zeros.T).T.contiguous()
    return found, meant


def _words(numbers: Tensor) -> Tensor:
    """Pack numbers from -8 to 7 [R, C] into int32 [R, ceil(C/8)], lowest bits first."""
    padded = torch.nn.functional.pad(numbers.long() + 8, (0, -numbers.shape[1] % 8)).view(numbers.shape[0], -1, 8)
    words = (padded << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def write_quantized(plain: Path, folder: Path, table: dict[str, object], parts: dict[str, dict[str, Tensor]]) -> None:
    """Copy a model folder, and replace some weights with quantized tensors.

    Args:
        table: ``quantization_config`` of the copy.
        parts: Tensors of each quantized weight, by the weight's name and by name suffix.
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


Parts = tuple[dict[str, Tensor], Tensor]
BLOCK = 48  # does not divide the weights evenly, so every weight has incomplete blocks


@dataclass(frozen=True)
class Method:
    """Quantization of a tiny model folder.

    Attributes:
        table: ``quantization_config`` of the folder.
        quantize: Function that quantizes one weight.
        ends: Name suffixes of the weights to quantize.
        family: Model family in ``oracles.families``, or "" for the quickstart's 0.82 M-parameter model.
        values: Values to replace in the model's configuration.
    """

    table: dict[str, object]
    quantize: Callable[[Tensor], Parts]
    ends: tuple[str, ...] = ("proj.weight",)
    family: str = ""
    values: dict[str, Any] = field(default_factory=dict)


_FP8: dict[str, object] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
_NF4: dict[str, object] = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def _int4_table(group: int, *, symmetric: bool) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    groups = {"group_0": {"weights": weights, "input_activations": None, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


METHODS = {
    "fp8": Method(_FP8, lambda weight: fp8(weight, BLOCK)),
    "nf4": Method(_NF4, nf4),
    "nested nf4": Method(_NF4, lambda weight: nf4(weight, nested=True)),
    "int4": Method(_int4_table(16, symmetric=False), lambda weight: int4(weight, 16)),
    # MXFP4 is the format of gpt-oss. NF4 and float8 are used with separate experts, as in Qwen and DeepSeek models.
    "mxfp4": Method(
        {"quant_method": "mxfp4"},
        mxfp4,
        ("experts.gate_up_proj", "experts.down_proj"),
        "gpt_oss",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "nf4 experts": Method(
        _NF4,
        lambda weight: nf4(weight, nested=True),
        family="qwen3_moe",
        values={"hidden_size": 64, "head_dim": 16},
    ),
    "fp8 experts": Method(
        _FP8, lambda weight: fp8(weight, BLOCK), family="qwen3_moe", values={"hidden_size": 64, "head_dim": 16}
    ),
    # Only the experts are quantized, as in Kimi K2.
    "int4 experts": Method(
        _int4_table(8, symmetric=True),
        lambda weight: int4(weight, 8, symmetric=True),
        tuple(f".experts.{number}.{part}_proj.weight" for number in range(8) for part in ("gate", "up", "down")),
        family="qwen3_moe",
        values={"hidden_size": 64, "head_dim": 16},
    ),
}


def quantized_pair(folder: Path, method: str) -> tuple[Path, Path]:
    """Write a folder with quantized weights and a plain folder with the decoded values, and return both."""
    made, source = METHODS[method], folder / "source"
    if made.family:
        torch.manual_seed(7)
        words = {"vocab_size": 1024, "max_position_embeddings": 512, "eos_token_id": 0, "bos_token_id": 0}
        config = tiny_config(made.family, tied=False, **{**words, "num_hidden_layers": 2, **made.values})
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(source)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(QUICKSTART / name, source / name)
    else:
        write_tiny_model(source)
    tensors, parts = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(made.ends)]:
        parts[name], tensors[name] = made.quantize(tensors[name])
    quantized, plain = folder / "quantized", folder / "plain"
    write_quantized(source, quantized, made.table, parts)
    shutil.copytree(source, plain)
    save_file({k: t.contiguous() for k, t in tensors.items()}, plain / "model.safetensors", metadata={"format": "pt"})
    return quantized, plain
