"""Training objective: a loss and, optionally, noise on the embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain.engine.head.cross_entropy import PLAIN
from megatrain.engine.head.loss import Loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss of training steps, and noise on the input embeddings. Evaluations use plain cross entropy.

    Attributes:
        loss: Loss to minimize. All losses except plain cross entropy need a chunked head.
        neftune_noise_alpha: Strength of the uniform noise on input embeddings; 0 for no noise. The noise is at most
            alpha / sqrt(tokens in a row x width). Noise and dropout share the micro-batch's random stream.
    """

    loss: Loss = PLAIN
    neftune_noise_alpha: float = 0.0

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        """Within the context, apply the changes that the loss makes to the model, and add noise to input embeddings."""
        with self.loss.applied(model):
            if not self.neftune_noise_alpha:
                yield
                return
            hook = model.get_input_embeddings().register_forward_hook(_noise_hook(self.neftune_noise_alpha))
            try:
                yield
            finally:
                hook.remove()


def _noise_hook(alpha: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a forward hook that adds noise. A recompute restores the random state, so it draws the same noise."""

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        limit = float(np.float32(alpha) / np.sqrt(np.float32(output.shape[1] * output.shape[2])))
        return output + torch.zeros_like(output).uniform_(-limit, limit)

    return add_noise
