"""Reference in plain torch and transformers: the model in memory, `loss.backward()`, and torch's optimizer.

Only the seeds of micro-batches come from this project.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.engine.unit.state import micro_batch_seed


@dataclass
class Reference:
    """Loss of a step, and the gradients by parameter name. Parameters without a gradient are absent."""

    loss: float
    gradients: dict[str, torch.Tensor]


def build_model(config: Any, dtype: torch.dtype = torch.float32, freeze: Sequence[str] = ()) -> Any:
    """Build a model with random weights that are large enough that every gradient matters."""
    torch.manual_seed(1234)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).train()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.add_(noise.to(parameter.dtype))
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in freeze):
            parameter.requires_grad_(False)
    return model


def add_gradients(model: Any, batch: Mapping[str, Tensor], num_items: int) -> float:
    """Run the backward of a micro-batch's loss times its share of the step's labels, and return the product."""
    count = int((batch["labels"][:, 1:] != -100).sum())
    if not count:
        return 0.0
    loss = model(**batch, use_cache=False).loss * (count / num_items)
    loss.backward()
    return float(loss.detach())


def train_step(model: Any, micro_batches: Sequence[Mapping[str, torch.Tensor]], seed: int) -> Reference:
    """Return the accumulated gradients of all micro-batches, and the mean loss over all trained tokens."""
    num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    model.zero_grad(set_to_none=True)
    total = 0.0
    for number, batch in enumerate(micro_batches):
        torch.manual_seed(micro_batch_seed(seed, number))
        total += add_gradients(model, batch, num_items)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Reference(total, gradients)


def evaluate(model: Any, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> tuple[float, int]:
    """Return the mean loss in eval mode over all labeled tokens, and the number of these tokens."""
    total, num_tokens = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in micro_batches:
            count = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch, use_cache=False).loss) * count
            num_tokens += count
    return total / num_tokens, num_tokens


@dataclass
class PlainRun:
    """Results of a run: losses, gradient norms, and final weights by parameter name."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def train_plainly(
    folder: Path,
    steps: Sequence[Sequence[Mapping[str, Tensor]]],
    *,
    lr: Callable[[int], float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decays: Callable[[str, Tensor], bool],
    max_grad_norm: float,
    make_optimizer: Callable[[list[dict[str, Any]]], Any] | None = None,
    unit_of: Callable[[str], str] | None = None,
) -> PlainRun:
    """Train in fp32 on the CPU, with token-weighted accumulation, global-norm clipping and decoupled weight decay.

    `make_optimizer` creates an optimizer from parameter groups; the default is torch's AdamW. If `unit_of` maps
    parameter names to units, each unit's gradients are clipped by the unit's norm instead of the global norm.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    make = make_optimizer or partial(torch.optim.AdamW, lr=lr(0), betas=betas, eps=eps)
    optimizer = make(groups)
    run = PlainRun([], [], {})
    for number, micro_batches in enumerate(steps):
        num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        total = 0.0
        for batch in micro_batches:
            total += add_gradients(model, batch, num_items)
        norm = torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])
        for unit in dict.fromkeys("" if unit_of is None else unit_of(n) for n, _ in named):
            mine = [p for n, p in named if unit_of is None or unit_of(n) == unit]
            torch.nn.utils.clip_grad_norm_(mine, max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = lr(number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(total)
        run.grad_norms.append(float(norm))
    run.weights = {name: parameter.detach().clone() for name, parameter in named}
    return run


def assert_same_gradients(expected: Reference, loss: float, gradients: Mapping[str, torch.Tensor]) -> None:
    """Assert that a step's loss and gradients equal the results of ``train_step``, up to rounding in fp32."""
    assert loss == pytest.approx(expected.loss, rel=2e-6)
    assert set(gradients) == set(expected.gradients)
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= max(noise, 1e-5 * gradient.abs().max()), (name, float(error))
