"""LoRA reference without code from this project: the plain model wrapped by peft, in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from oracles.huggingface import build_model


def peft_model(config: Any, settings: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> PeftModel:
    """Return a model with random weights and random nonzero adapters."""
    return with_adapters(build_model(config, dtype), settings)


def with_adapters(model: Any, settings: Mapping[str, Any]) -> PeftModel:
    """Add random nonzero adapters to a model, and return peft's model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.add_(noise.to(parameter.dtype))
    return model.train()


def plain_name(name: str) -> str:
    """Return the name that a peft parameter has in the adapter's or model's file."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", "")
    if ".lora_" not in name:  # adapters of experts are nested, so their names keep ``.base_layer``
        name = name.replace(".base_layer", "")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name


def parameters_by_name(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return all parameters by their names in the model's and adapter's files."""
    found = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return found | {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def opened(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    """Load peft's model from the folders of the base model and the adapter."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers warns about a call inside peft
        return PeftModel.from_pretrained(model, adapter)
