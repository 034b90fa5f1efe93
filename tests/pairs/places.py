"""Tiny models for all levels, and data for training and evaluation."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TokenizersBackend,
)

from oracles.families import tiny_config
from oracles.image_models import chat, make_folder, png
from oracles.quantize import METHODS, nf4, write_quantized

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
LENGTH = 96  # tokens per row
NUM_ROWS, NUM_HELD_OUT = 13, 5
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "head_dim": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
#: Config values of each model in addition to ``_SIZES``. Layers have about 100,000 elements, more than a minimal part.
_VALUES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 96, "mlp_only_layers": []},
    "gpt_oss": {"sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 192,
        "attention_head_dim": 48,
        "head_dim": None,
    },
    "gpt2": {"n_embd": 96, "n_layer": 2, "n_positions": 512},
}
#: Base or model -> name endings of its quantized weights. The default is ``proj.weight``.
_ENDS = {
    "mxfp4": ("experts.gate_up_proj", "experts.down_proj"),
    "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
}


@dataclass(frozen=True)
class Place:
    """Folder with models and data. Each is created at its first use."""

    folder: Path

    def model(self, family: str, base: str = "plain", task: str = "sft") -> Path:
        """Return the folder of a model."""
        return self._plain(family, task) if base == "plain" else self._quantized(family, base, task) / "quantized"

    def meant(self, family: str, base: str, task: str = "sft") -> Path:
        """Return the folder of an unquantized model with the same weight values, decoded if ``base`` is quantized."""
        return self._plain(family, task) if base == "plain" else self._quantized(family, base, task) / "plain"

    def _plain(self, family: str, task: str = "sft") -> Path:
        if family == "qwen2_5_vl":
            folder = self.folder / "models" / family
            return folder if folder.exists() else make_folder(family, self.folder / "models")
        is_judge = task == "reward"
        folder = self.folder / "models" / (f"{family}-reward" if is_judge else family)
        if not folder.exists():
            write_model(family, folder, self.tokenizer, is_judge=is_judge)
        return folder

    def _quantized(self, family: str, base: str, task: str) -> Path:
        plain = self._plain(family, task)
        folder = self.folder / "models" / f"{plain.name}-{base}"
        if not folder.exists():
            quantize(plain, folder, family, base)
        return folder

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of all models except the image-text model."""
        made = TokenizersBackend(
            tokenizer_object=AutoTokenizer.from_pretrained(QUICKSTART / "model").backend_tokenizer,
            eos_token=END,
            pad_token=END,
            additional_special_tokens=[START, END],
        )
        made.chat_template = TEMPLATE
        return made

    def teacher(self, family: str) -> Path:
        """Return the folder of a teacher with the vocabulary of a model family."""
        is_image_text = family == "qwen2_5_vl"
        folder = self.folder / "models" / ("teacher-images" if is_image_text else "teacher")
        if not folder.exists():
            tokenizer = AutoTokenizer.from_pretrained(self._plain(family)) if is_image_text else self.tokenizer
            write_model("llama", folder, tokenizer, seed=11)
        return folder

    def data(self, task: str, *, images: bool = False) -> tuple[Path, Path]:
        """Return the training file and the evaluation file."""
        kinds = {"pretrain": "text", "distill": "sft", "kto": "dpo", "orpo": "dpo", "reward": "dpo"}
        kind = "images" if images else kinds.get(task, task)
        folder = self.folder / "data" / kind
        if not folder.exists():
            folder.mkdir(parents=True)
            made = rows_of(kind, folder)
            for name, part in (("train", made[NUM_HELD_OUT:]), ("held_out", made[:NUM_HELD_OUT])):
                (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        return folder / "train.jsonl", folder / "held_out.jsonl"


def rows_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Return rows of a kind, held-out rows first. Preferences have fewer rows, so that an epoch is one step."""
    if kind == "images":
        return [image_row(number, folder) for number in range(NUM_HELD_OUT + NUM_ROWS)]
    if kind == "text":
        text = (QUICKSTART / "loomings.txt").read_text().split(". ")
        return [{"text": each.strip()[:100] + "."} for each in text[: NUM_HELD_OUT + NUM_ROWS]]
    name = "preferences.jsonl" if kind == "dpo" else "whales.jsonl"
    rows = [json.loads(line) for line in (QUICKSTART / name).read_text().splitlines()]
    rows = [row for row in rows if len(json.dumps(row)) < 320]
    return rows[: NUM_HELD_OUT + (8 if kind == "dpo" else NUM_ROWS)]


def image_row(number: int, folder: Path) -> dict[str, Any]:
    """Return a conversation with zero, one or two images."""
    parts: list[Any] = []
    for index in range(number % 3):
        name = f"{number}-{index}.png"
        (folder / name).write_bytes(png(40 + number, 33 + 7 * index, 10 * number + index))
        parts += [f"picture {index}: ", {"type": "image_url", "image_url": {"url": name}}]
    return {"messages": chat(*parts, "what is it?", answer=f"it is the whale of row {number}")}


def write_model(family: str, folder: Path, tokenizer: Any, seed: int = 7, *, is_judge: bool = False) -> Path:
    """Write a model with random weights that are large enough for every gradient to matter.

    Args:
        family: Model type.
        folder: Folder to create.
        tokenizer: Tokenizer of the model.
        seed: Seed of the weights.
        is_judge: Whether the model has a reward head (one number per text) instead of an output head.
    """
    words = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    values = {} if family == "gpt2" else dict(_SIZES)
    values |= {"tie_word_embeddings": family == "gpt2", **_VALUES[family], **words, "vocab_size": len(tokenizer)}
    config = tiny_config(family, **values)
    torch.manual_seed(seed)
    kind = AutoModelForSequenceClassification if is_judge else AutoModelForCausalLM
    config.num_labels = 1 if is_judge else config.num_labels
    model = kind.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def quantize(source: Path, folder: Path, family: str, base: str) -> None:
    """Write two copies of a model: one with quantized weights, and one with their decoded values."""
    method = METHODS["nf4" if base == "nf4" else base]
    ends = _ENDS.get(base) or _ENDS.get(family) or ("proj.weight",)
    tensors, parts = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(ends) and "visual" not in name]:
        weight = tensors[name]
        if family == "gpt2":  # bitsandbytes stores Conv1D transposed
            parts[name], meant = nf4(weight.T.contiguous())
            tensors[name] = meant.T.contiguous()
        else:
            parts[name], tensors[name] = method.quantize(weight)
    assert parts, (family, base)
    folder.mkdir()
    write_quantized(source, folder / "quantized", method.table, parts)
    shutil.copytree(source, folder / "plain")
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
