"""The oracle of a whole run: a plain PyTorch loop with Hugging Face's model and torch's AdamW, or another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass
class PlainRun:
    """Losses, gradient norms and final weights by parameter name."""

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
) -> PlainRun:
    """Train in fp32 on the CPU: token-weighted accumulation, global-norm clipping, decoupled decay.

    `make_optimizer` makes an optimizer of parameter groups; None: torch's AdamW.
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
            loss = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = lr(number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(total)
        run.grad_norms.append(float(norm))
    run.weights = {name: parameter.detach().clone() for name, parameter in named}
    return run
