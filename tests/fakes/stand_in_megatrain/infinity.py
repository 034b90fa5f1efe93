"""CPU stand-in for the reference trainer, with the API that `bench/gpu.py` calls. The reference itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class CPUMasterConfig(SimpleNamespace):
    """Config that accepts any arguments."""


class CPUMasterModel:
    """Stand-in for the reference's model class, with plain autograd on the whole model.

    Rejects a mask, because the reference's SDPA path does not support one.
    """

    def __init__(self, model: nn.Module, config: CPUMasterConfig) -> None:
        self._model, self._config = model, config
        self._is_synced = True

    def get_parameters(self) -> list[Tensor]:
        return list(self._model.parameters())

    def forward_and_backward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[float, int, dict[str, float]]:
        assert self._is_synced and ids.shape == (self._config.batch_size, self._config.max_seq_len)
        loss = self._model(input_ids=ids, labels=labels, **self._build_layer_kwargs(mask)).loss
        loss.backward()
        self._is_synced = False
        return float(loss.detach()), ids.numel(), {"forward": 0.0, "backward": 0.0}

    def _build_layer_kwargs(self, mask: Tensor | None, *rest: Any) -> dict[str, Any]:
        if mask is not None:
            raise RuntimeError(f"expected no mask but {mask.dtype}")
        return {"use_cache": False}

    def _sync_params_to_gpu(self) -> None:
        self._is_synced = True

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def cleanup(self) -> None:
        torch.set_grad_enabled(True)
