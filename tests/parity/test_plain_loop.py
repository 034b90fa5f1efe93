"""A 20-step run equals a plain PyTorch loop with torch.optim.AdamW, step by step."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import torch

from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from oracles.huggingface import train_plainly
from oracles.tiered_run import config_text, make_loader, run_config

NUM_STEPS = 20


def test_twenty_steps_equal_plain_pytorch(tiny_model: Path, tmp_path: Path) -> None:
    """Losses agree within 2e-6, norms within 1e-4, and weights within 4e-4 of the tensor's largest weight.

    The arithmetic is the same, but a few sums are computed differently (the loss in pieces, the norm in fp64). The
    steps amplify the difference, because Adam's first steps divide by gradients near zero. On an AMD EPYC, the measured
    differences are 8e-8, 8e-6 and 7e-6. On an Intel Xeon, weights differ by 1.1e-4 to 2.7e-4, depending on MKL's mode.
    The plain loop itself differs by up to 1.9e-4 between two MKL modes.
    """
    text = config_text(tmp_path, tiny_model, ram="5500KiB")
    ours = run_config(text, tmp_path, num_steps=NUM_STEPS)
    config = load_config(tmp_path / "run.toml").config
    loader = make_loader(config, plan_run(resolve(config)))
    table = config.optimizer
    plain = train_plainly(
        tiny_model,
        [next(loader).micro_batches for _ in range(NUM_STEPS)],
        lr=lambda step: table.learning_rate,
        betas=(table.adam_beta1, table.adam_beta2),
        eps=table.adam_epsilon,
        weight_decay=table.weight_decay,
        decays=lambda name, p: p.dim() >= 2 and not any(fnmatchcase(name, g) for g in table.weight_decay_exclude),
        max_grad_norm=table.max_grad_norm,
    )
    for step, (mine, theirs) in enumerate(zip(ours.losses, plain.losses, strict=True)):
        assert abs(mine - theirs) <= 2e-6 * abs(theirs), (step, mine, theirs)
    for mine, theirs in zip(ours.grad_norms, plain.grad_norms, strict=True):
        assert abs(mine - theirs) <= 1e-4 * theirs
    for name, weight in plain.weights.items():
        worst = (ours.weights[name] - weight).abs().max()
        assert worst <= 4e-4 * weight.abs().max(), (name, worst)
    assert torch.isfinite(torch.tensor(ours.losses)).all()


def test_all_parameters_decay_if_nothing_is_excluded(tiny_model: Path, tmp_path: Path) -> None:
    """Vectors also decay, as with `torch.optim.AdamW` and a single parameter group."""
    text = config_text(tmp_path, tiny_model, ram="5500KiB", optimizer="weight_decay = 5.0\nweight_decay_exclude = []")
    ours = run_config(text, tmp_path, num_steps=3)
    config = load_config(tmp_path / "run.toml").config
    loader = make_loader(config, plan_run(resolve(config)))
    table = config.optimizer
    plain = train_plainly(
        tiny_model,
        [next(loader).micro_batches for _ in range(3)],
        lr=lambda step: table.learning_rate,
        betas=(table.adam_beta1, table.adam_beta2),
        eps=table.adam_epsilon,
        weight_decay=table.weight_decay,
        decays=lambda name, p: True,
        max_grad_norm=table.max_grad_norm,
    )
    assert any(weight.dim() == 1 for weight in plain.weights.values())
    for name, weight in plain.weights.items():
        assert (ours.weights[name] - weight).abs().max() <= 4e-4 * weight.abs().max(), name
