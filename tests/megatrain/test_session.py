"""In a run with frozen bf16 weights, a frozen layer has only a weight block and never changes. The rest is trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oracles.tiered_run import EXAMPLES, config_text, run_config


def test_frozen_bfloat16_weights_stay_as_they_were(tmp_path: Path) -> None:
    source, model = EXAMPLES / "quickstart" / "model", tmp_path / "model"
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
    plain.save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, model / name)
    text = config_text(tmp_path, model, precision='compute_dtype = "bfloat16"')
    run = run_config(text.replace("[data]", 'freeze = ["model.layers.0.*"]\n[data]'), tmp_path, num_steps=2)
    kinds = {key.split("/")[1] for key in run.digests if key.startswith("model.layers.0/")}
    assert kinds == {"weight"}
    for name, weight in plain.named_parameters():
        assert torch.equal(run.weights[name], weight.float()) == name.startswith("model.layers.0."), name
