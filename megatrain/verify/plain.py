"""Plain training, the yardstick: Hugging Face's whole model, ``loss.backward()`` and an ordinary optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.config.schema import OptimizerConfig, RunConfig
    from megatrain.data.loader import StepBatch


IGNORED = -100  # the label that Hugging Face's losses skip


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Losses and gradient norms of each step, and the folder of the trained weights."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    folder: Path


def train_plainly(
    config: RunConfig, steps: Iterable[StepBatch], folder: Path, device: torch.device, optimizer: OptimizerConfig
) -> PlainRun:
    """Train the model of a config in fp32 on the same batches, with a constant learning rate; write it to ``folder``.

    Micro-batches are weighted by their trained tokens, and the gradient is clipped by its global norm.
    """
    from transformers import AutoModelForCausalLM

    attention = config.model.attn_implementation
    options = {} if attention == "auto" else {"attn_implementation": attention}
    source = config.model.model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True, **options)
    model.to(device).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in config.model.freeze))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    update = make_plain_optimizer(trained, optimizer)
    losses, norms = [], []
    for step in steps:
        batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in step.micro_batches]
        num_trained = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=num_trained, use_cache=False).loss
            loss.backward()
            total += float(loss.detach())
        most = optimizer.max_grad_norm or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], most)))
        update.step()
        update.zero_grad(set_to_none=True)
        losses.append(total)
    model.cpu().save_pretrained(folder)
    return PlainRun(tuple(losses), tuple(norms), folder)


def make_plain_optimizer(trained: Sequence[tuple[str, Tensor]], table: OptimizerConfig) -> Any:
    """Return the published optimizer that ``table`` names, with its groups and its rule of what decays."""
    groups = []
    for name, parameter in trained:
        own = next((group for group in table.groups if any(fnmatchcase(name, glob) for glob in group.params)), None)
        rate = table.learning_rate if own is None or own.learning_rate is None else own.learning_rate
        decay = table.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        decays = parameter.dim() >= 2 and not any(fnmatchcase(name, glob) for glob in table.weight_decay_exclude)
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay if decays else 0.0})
    betas = (table.adam_beta1, table.adam_beta2)
    if table.optim == "adamw":
        return torch.optim.AdamW(groups, betas=betas, eps=table.adam_epsilon)
    if table.optim == "sgd":
        return torch.optim.SGD(groups, momentum=table.sgd_momentum, nesterov=table.sgd_nesterov)
    if table.optim == "lion":
        return PlainLion(groups, betas)
    from transformers import Adafactor

    return Adafactor(groups, scale_parameter=False, relative_step=False, lr=table.learning_rate)


class PlainLion:
    """Lion as published (Chen et al. 2023, algorithm 2), on whole tensors.

    Args:
        groups: as torch's optimizers take them.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float]) -> None:
        self._groups, self._betas = groups, betas
        self._moments: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        beta1, beta2 = self._betas
        for group in self._groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self._moments.setdefault(id(parameter), torch.zeros_like(parameter))
                direction = moment.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                moment.lerp_(parameter.grad, 1 - beta2)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for group in self._groups:
            for parameter in group["params"]:
                parameter.grad = None
