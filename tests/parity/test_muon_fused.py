"""Muon on fused parameters equals torch's Muon on the split matrices. A resumed run keeps its rule for splitting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.checkpoint.state import DecidedSettings
from megatrain.config import load_config
from megatrain.config.resolved import changes_from, to_toml, with_values
from megatrain.training.resolve import resolve
from megatrain.training.start import with_checkpoint_settings
from megatrain.training.trainer import Trainer
from oracles.families import tiny_config
from oracles.huggingface import add_gradients
from oracles.tiered_run import QUICKSTART, add_tokenizer, config_text, make_loader, plan_of, run_config

MUON = 'optim = "muon"\nmax_grad_norm = 0\nweight_decay = 0.1'
#: Rows of q, k and v (4 query heads and 2 key/value heads of size 8), and of gate and up (an MLP of width 48).
PARTS = {"qkv_proj": (32, 16, 16), "gate_up_proj": (48, 48)}


@pytest.fixture(scope="module")
def fused_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("fused"), tiny_config("phi3")
    config.vocab_size = AutoConfig.from_pretrained(QUICKSTART).vocab_size
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return add_tokenizer(folder)


def split(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    sizes = next((sizes for part, sizes in PARTS.items() if f".{part}." in name), None)
    return [tensor] if sizes is None else list(tensor.split(sizes))


def step_with_torch_muon(
    model: Path, micro_batches: list[dict[str, torch.Tensor]], *, whole: bool
) -> dict[str, torch.Tensor]:
    """Return the weights after one step of torch's Muon on split or whole matrices, and AdamW on all other weights."""
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    for batch in micro_batches:
        add_gradients(plain, batch, num_items)
    twins: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in plain.named_parameters():
        parts, gradients = [parameter.detach()], [parameter.grad]
        if not whole:
            parts, gradients = split(name, parts[0]), split(name, parameter.grad)
        twins[name] = [torch.nn.Parameter(part.clone()) for part in parts]
        for twin, gradient in zip(twins[name], gradients, strict=True):
            twin.grad = gradient
    is_matrix = {name: each[0].ndim == 2 and "embed" not in name and "head" not in name for name, each in twins.items()}
    matrices = [twin for name, each in twins.items() if is_matrix[name] for twin in each]
    torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    others = [{"params": each, "weight_decay": 0.0} for name, each in twins.items() if not is_matrix[name]]
    torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95)).step()
    return {name: torch.cat([twin.detach() for twin in each]) for name, each in twins.items()}


@pytest.mark.parametrize("rule", ["auto", "whole"])
def test_fused_muon_step_matches_torch(rule: str, fused_model: Path, tmp_path: Path) -> None:
    text = config_text(tmp_path, fused_model, optimizer=f'{MUON}\nmuon_fused = "{rule}"')
    found = run_config(text, tmp_path, num_steps=1).weights
    config = load_config(tmp_path / "run.toml").config
    micro_batches = next(make_loader(config, plan_of(config))).micro_batches
    expected = step_with_torch_muon(fused_model, micro_batches, whole=rule == "whole")
    other = step_with_torch_muon(fused_model, micro_batches, whole=rule != "whole")
    fused = [name for name in expected if any(f".{part}." in name for part in PARTS)]
    assert len(fused) == 6
    for name in fused:
        difference = float((found[name] - expected[name]).abs().max())
        assert difference < 0.05 * float((other[name] - expected[name]).abs().max()), name


def test_resumed_run_keeps_its_muon_fused_rule(
    fused_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(folder: str, rule: str, steps: int) -> Trainer:
        own = tmp_path / folder
        own.mkdir(exist_ok=True)
        lines = f"{MUON}\n" + (f'muon_fused = "{rule}"' if rule else "")
        text = config_text(own, fused_model, optimizer=lines).replace("[training]", f"[training]\nmax_steps = {steps}")
        (own / "run.toml").write_text(f"{text}\n[checkpoint]\nsave_steps = 2\n")
        return Trainer(load_config(own / "run.toml").config)

    for folder, rule in (("new", ""), ("old", "whole")):
        trainer(folder, rule, 2).train()
        resumed = trainer(folder, "", 4)
        assert resumed.run.optimizer.muon_fused == (rule or "parts")
        assert resumed.train().num_steps == 4
    # Runs that started before this key existed keep the rule "whole".
    config = load_config(tmp_path / "old" / "run.toml").config
    before = to_toml(config).replace('muon_fused = "auto"\n', "")
    assert "muon_fused" not in before
    assert not changes_from(before, config).altering
    assert [
        str(each.key) for each in changes_from(before, with_values(config, {"optimizer.muon_fused": "parts"})).altering
    ] == ["optimizer.muon_fused"]
    older = DecidedSettings.of_meta({"config_toml": '[optimizer]\noptim = "muon"'})
    monkeypatch.setattr("megatrain.training.start.settings_of_newest", lambda *_: older)
    assert with_checkpoint_settings(resolve(config)).optimizer.muon_fused == "whole"
    monkeypatch.setattr("megatrain.training.start.settings_of_newest", lambda *_: None)
    assert with_checkpoint_settings(resolve(config)).optimizer.muon_fused == "parts"
