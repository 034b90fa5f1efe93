"""Adapters on a quantized model folder: loss and every gradient match peft on the decoded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.config import load_config
from oracles.huggingface import train_step
from oracles.peft_model import plain_name, with_adapters
from oracles.quantize import quantized_pair
from oracles.tiered_run import config_text, make_loader, plan_of, run_config

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS},
    "fp8 experts": {"target_modules": "all-linear"},
    "nested nf4": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("method", SETTINGS)
def test_quantized_lora_matches_peft_on_the_plain_model(method: str, tmp_path: Path) -> None:
    model, plain = quantized_pair(tmp_path, method)
    base = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    theirs = with_adapters(base, {"r": 4, "lora_alpha": 8, **SETTINGS[method]})
    theirs.save_pretrained(tmp_path / "adapter")
    text = config_text(
        tmp_path / "run",
        model,
        nvme=0,
        placement='weights = ["folder"]',
        precision='compute_dtype = "float32"',
        # One step of plain SGD with learning rate 1 subtracts the gradient from each weight.
        optimizer='optim = "sgd"\nsgd_momentum = 0\nweight_decay = 0\nmax_grad_norm = 0',
    ).replace("learning_rate = 1e-3", "learning_rate = 1.0")
    lora = f'[lora]\nadapter_name_or_path = "{tmp_path / "adapter"}"\n[training]'
    run = run_config(text.replace("[training]", lora, 1), tmp_path / "run", num_steps=1)
    assert any(block.num_packed for block in run.plan.program.blocks.values())
    config = load_config(tmp_path / "run/run.toml").config
    expected = train_step(theirs, next(make_loader(config, plan_of(config))).micro_batches, 0)
    assert run.losses[0] == pytest.approx(expected.loss, rel=1e-5)
    before = {plain_name(name): p.detach() for name, p in theirs.named_parameters() if p.requires_grad}
    gradients = {plain_name(name): gradient for name, gradient in expected.gradients.items()}
    assert gradients.keys() == before.keys() and len(gradients) > 3
    for name, gradient in gradients.items():
        found, most = before[name] - run.weights[name], float(gradient.abs().max())
        # The difference between two weights has the rounding error of the larger one.
        error, rounding = float((found - gradient).abs().max()), 1e-7 * float(before[name].abs().max())
        assert most > 0 and error <= 1e-4 * most + rounding, (name, error, most)
