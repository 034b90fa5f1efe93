"""The cases of `plan_accuracy.py`: models, batch shapes and placements of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.models import write_shape

KINDS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Case:
    """Case of the benchmark: one model, batch shape and placement.

    Attributes:
        model_type, values: Architecture and other values of the model's `config.json`.
        shape: Number of micro-batches, rows per micro-batch, and tokens per row.
        placement: Config table ``[placement]``. The config has a drive if this table has entries or ``ram`` is "TIGHT".
        ram: Size of the RAM tier. "TIGHT" is a third above the minimum.
        optimizer, model, precision: Additional keys of these config tables.
        changes: `--set` values for a second plan and run. In them, "TIGHT" stands for a RAM size a third above the
            minimum, and "FOLDER" for the case's folder.
    """

    model_type: str
    values: Mapping[str, Any]
    shape: tuple[int, int, int]
    placement: Mapping[str, list[str]] = field(default_factory=dict)
    ram: str = "8GiB"
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def tokens_per_step(self) -> int:
        micro_batches, rows, length = self.shape
        return micro_batches * rows * length

    @property
    def has_drive(self) -> bool:
        """Whether the config has a drive."""
        return bool(self.placement) or self.ram == "TIGHT"

    def drive(self, folder: Path) -> list[str]:
        """Return the `--set` values that add a drive, or an empty list if the config already has one."""
        return [] if self.has_drive else [f'tiers.nvme=[{{ path = "{folder / "probe"}", size = "8GiB" }}]']


def llama(hidden: int, layers: int, vocabulary: int = 8192, **more: Any) -> dict[str, Any]:
    """Return the config values of a Llama whose attention heads have 64 dimensions."""
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **more,
    }


def gpt2(width: int, layers: int) -> dict[str, Any]:
    """Return the config values of a GPT-2."""
    shape = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": 1024}
    return {**shape, "vocab_size": 8192, "tie_word_embeddings": True}


def only_on_nvme(*kinds: str) -> dict[str, list[str]]:
    """Return a placement table with these kinds on the drive and all others in RAM."""
    return {kind: ["nvme"] if kind in kinds else ["ram"] for kind in KINDS}


FIRST_HALF_FROZEN = {"freeze": [f"model.layers.{number}.*" for number in range(4)]}
UNCLIPPED = {"max_grad_norm": 0.0, "nonfinite": "ignore"}
QWEN3_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}

CASES: dict[str, Case] = {
    "deep": Case(
        "llama",
        llama(256, 24),
        (2, 2, 256),
        changes=('tiers.nvme=[{path="FOLDER/nvme",size="8GiB"}]', "tiers.ram.size=TIGHT"),
    ),
    "wide": Case("llama", llama(1024, 2), (1, 2, 256), optimizer={"optim": "adafactor"}),
    "gqa_tied": Case("qwen2", llama(512, 6, num_key_value_heads=2, tie_word_embeddings=True), (2, 2, 256)),
    "large_vocabulary": Case(
        "llama", llama(256, 4, 50_000), (1, 4, 128), changes=("training.per_device_train_batch_size=8",)
    ),
    "mixtral": Case("mixtral", llama(256, 4, intermediate_size=512, num_local_experts=8), (2, 2, 256)),
    "qwen3_moe": Case("qwen3_moe", llama(256, 4, **QWEN3_EXPERTS), (1, 4, 256)),
    "gpt2_lion": Case("gpt2", gpt2(512, 8), (1, 4, 256), optimizer={"optim": "lion"}),
    "gemma3": Case("gemma3_text", llama(384, 6, 16_384, sliding_window=128, tie_word_embeddings=True), (2, 1, 512)),
    "long_rows": Case("llama", llama(384, 4), (1, 1, 2048)),
    "many_micro_batches": Case("llama", llama(256, 6), (24, 1, 64), optimizer={"optim": "sgd"}),
    "bf16": Case("llama", llama(512, 4), (1, 2, 256), precision={"compute_dtype": "bfloat16"}),
    "frozen_half": Case("llama", llama(512, 8), (2, 2, 256), model=FIRST_HALF_FROZEN),
    "unclipped": Case("llama", llama(768, 6), (1, 1, 256), optimizer=UNCLIPPED),
    "state_on_nvme": Case("llama", llama(512, 8), (1, 2, 256), placement=only_on_nvme("optimizer"), ram="TIGHT"),
    "activations_on_nvme": Case(
        "llama", llama(512, 6), (4, 2, 128), placement=only_on_nvme("activations"), ram="TIGHT"
    ),
    "all_on_nvme": Case(
        "llama",
        llama(512, 8),
        (1, 2, 256),
        placement=only_on_nvme(*KINDS),
        ram="TIGHT",
        changes=("tiers.ram.size=8GiB",),
    ),
    "tight": Case("llama", llama(512, 8), (2, 2, 128), ram="TIGHT", changes=("tiers.ram.size=8GiB",)),
}

QUICK_CASES: dict[str, Case] = {
    "small": Case("llama", llama(64, 2, 1024), (2, 1, 64)),
    "small_moe": Case("mixtral", llama(64, 2, 1024, num_local_experts=4), (1, 1, 64)),
    "small_on_nvme": Case(
        "llama",
        llama(64, 2, 1024),
        (1, 1, 64),
        placement=only_on_nvme(*KINDS),
        ram="TIGHT",
        changes=("tiers.ram.size=1GiB",),
    ),
}


def write_config(case: Case, folder: Path, text: Path, num_steps: int) -> Path:
    """Write a case's model folder and config, and return the path of the config. The run saves no checkpoints."""
    model = write_shape(folder / "model", case.model_type, **case.values)
    micro_batches, rows, length = case.shape
    tables: dict[str, Mapping[str, Any]] = {
        "model": {
            "model_name_or_path": str(model),
            "train_from_scratch": True,
            "attn_implementation": "sdpa",
            **case.model,
        },
        "precision": {"compute_dtype": "float32", **case.precision},
        "data": {"max_length": length, "packing": True},
        "training": {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": micro_batches,
            "max_steps": num_steps,
        },
        "optimizer": {"learning_rate": 1e-4, **case.optimizer},
        "checkpoint": {"save_strategy": "no", "save_on_signal": False},
        "placement": case.placement,
        "tiers.ram": {"size": "8GiB" if case.ram == "TIGHT" else case.ram},
    }
    lines = ['task = "pretrain"', 'device = "cpu"', f'output_dir = "{folder / "outputs"}"']
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    lines += ["[[data.train]]", f'path = "{text}"']
    if case.has_drive:
        lines += ["[[tiers.nvme]]", f'path = "{folder / "nvme"}"', 'size = "8GiB"']
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
