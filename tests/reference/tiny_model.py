"""The in-repo 0.82 M model with fixed random weights, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def write_tiny_model(folder: Path) -> Path:
    """Write weights, config and tokenizer into a folder and return it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART), dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, folder / name)
    return folder
