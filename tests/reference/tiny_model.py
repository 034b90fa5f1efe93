"""The in-repo 0.82 M model with fixed random weights, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write weights, config and tokenizer into a folder and return it; ``changes`` are other values of the config."""
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(QUICKSTART, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, folder / name)
    return folder
