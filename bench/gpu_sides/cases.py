"""The model shapes, parts and compared sides of `gpu.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

#: ``config.json`` values that all shapes share. The shapes are Qwen2.5 7B and 14B, and a model of 20.1 B parameters,
#: between the published 14B and 32B models.
_QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
}


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        **_QWEN,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


SHAPES: Mapping[str, dict[str, Any]] = {
    "7b": _qwen(3584, 18_944, 28, 28, 4, 152_064),
    "14b": _qwen(5120, 13_824, 48, 40, 8, 152_064),
    "20b": _qwen(5120, 27_648, 38, 40, 8, 152_064),
}
QUICK_SHAPE = _qwen(64, 160, 2, 4, 2, 512)

#: Names of the sides that a part compares. Ours comes first, and all others are compared with it.
OURS, PLAIN, REFERENCE, ZERO3 = "ours", "plain", "megatrain", "zero3"


@dataclass(frozen=True)
class Part:
    """A comparison of sides, or a run of our side alone.

    Attributes:
        shape: Key of ``SHAPES``.
        layers: Reduced number of layers, or None for all layers of the shape.
        rows, length: Rows per step and tokens per row; T is their product.
        micro_rows: Rows per micro-batch. The reference does not split the rows of a step.
        num_steps: Number of steps measured after one warm-up step, or 0 to measure the first step.
        sides: Names of the compared sides, ours first.
        target: Minimum ratio of our tokens/s to the other side's tokens/s.
        rate: Minimum tokens/s of our side on one H200.
        share: Minimum ratio of our hardware FLOP/s to the rate of matrix products.
        uses_drive: Whether our side has an NVMe tier.
        tables: Additional tables of our config.
    """

    shape: str
    rows: int
    length: int
    micro_rows: int
    num_steps: int = 3
    layers: int | None = None
    sides: tuple[str, ...] = (OURS,)
    target: float | None = None
    rate: float | None = None
    share: float | None = None
    uses_drive: bool = False
    tables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens per step, T."""
        return self.rows * self.length

    def small(self) -> Part:
        """Return the same part, but small enough for a CPU to run within seconds. Without CUDA, liger is disabled."""
        length = min(self.length, 64)
        rows = min(self.rows, 2)
        model = dict(self.tables.get("model", {}))
        if "mlp_rows" in model:
            model["mlp_rows"] = 16
        if "use_liger_kernel" in model:
            model["use_liger_kernel"] &= torch.version.cuda is not None
        tables = {**self.tables, "model": model}
        return replace(self, rows=rows, length=length, micro_rows=1, num_steps=1, layers=None, tables=tables)


_AGAINST_REFERENCE = (OURS, REFERENCE)
#: Config tables with the defaults that a run uses on a GPU.
_DEFAULT = {"model": {"use_liger_kernel": True}, "training": {"recompute": "auto"}}
#: Settings that give our side the same work as the others: every layer is recomputed, and norms and MLPs are eager.
_EQUAL_WORK = {"model": {"use_liger_kernel": False}, "training": {"recompute": "full"}}
_LONG = {**_DEFAULT, "model": {"use_liger_kernel": True, "mlp_rows": 4096}}
PARTS: Mapping[str, Part] = {
    "7b_64k": Part("7b", 64, 1024, 4, num_steps=2, rate=12_000, share=0.6, tables=_DEFAULT),
    "7b_4k": Part("7b", 4, 1024, 4, tables=_DEFAULT),
    "7b_16k": Part("7b", 16, 1024, 4, tables=_DEFAULT),
    # 8 rows at a time: with 16, the workspace displaces a few groups from a 140 GB GPU.
    "7b_64k_equal": Part("7b", 64, 1024, 8, num_steps=2, sides=_AGAINST_REFERENCE, target=1.5, tables=_EQUAL_WORK),
    "7b_4k_equal": Part("7b", 4, 1024, 4, sides=_AGAINST_REFERENCE, target=2.5, tables=_EQUAL_WORK),
    "plain": Part("7b", 16, 1024, 4, sides=(OURS, PLAIN), target=1.0, tables=_EQUAL_WORK),
    "zero3": Part("7b", 16, 1024, 4, layers=12, sides=(OURS, ZERO3), target=1.84, tables=_EQUAL_WORK),
    "14b": Part("14b", 16, 1024, 4, num_steps=2, tables=_DEFAULT),
    # Gradients are in bf16, because fp32 gradients and 12 bytes per parameter for weights and state would need 350 GB.
    "20b_nvme": Part(
        "20b", 16, 1024, 16, num_steps=1, uses_drive=True, tables={**_DEFAULT, "precision": {"grad_dtype": "bfloat16"}}
    ),
    "long_32k": Part("7b", 1, 32 << 10, 1, num_steps=2, tables=_LONG),
    "long_128k": Part("7b", 1, 128 << 10, 1, num_steps=1, uses_drive=True, tables=_LONG),
    # Attention, quadratic in the length, dominates the step: 28 layers would take ten minutes.
    "long_512k": Part("7b", 1, 512 << 10, 1, num_steps=0, layers=6, uses_drive=True, tables=_LONG),
}

#: Config changes of our side by name. For example, "7b_4k+eager" runs only our side, with the change "eager".
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "any_kernel": {"full_determinism": False},
    "full_recompute": {"training": {"recompute": "full"}},
    "bf16_gradients": {"precision": {"grad_dtype": "bfloat16"}},
    "eager": {"model": {"use_liger_kernel": False}},
    "compile": {"model": {"use_liger_kernel": False, "compile": True}},
    "no_streaming": {"advanced": {"stream_updates": 0}},
}


def part_named(name: str) -> Part:
    """Return a part of ``PARTS``. If the name contains variants, only our side runs, without claims.

    Raises:
        KeyError: There is no such part, or no such variant.
    """
    base, *variants = name.split("+")
    part = PARTS[base]
    for variant in variants:
        tables = merged(part.tables, VARIANTS[variant])
        part = replace(part, sides=(OURS,), target=None, rate=None, share=None, tables=tables)
    return part


def merged(tables: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return config tables with those in ``more`` merged into them. Values in ``more`` take precedence."""
    found = dict(tables)
    for name, value in more.items():
        found[name] = {**found.get(name, {}), **value} if isinstance(value, Mapping) else value
    return found


def write_shape(folder: Path, part: Part, *, quick: bool) -> Path:
    """Write the ``config.json`` of a part's model, and return the folder."""
    values = dict(QUICK_SHAPE if quick else SHAPES[part.shape])
    if part.layers is not None:
        values["num_hidden_layers"] = part.layers
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return folder
