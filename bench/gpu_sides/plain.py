"""Plain PyTorch's side in `gpu.py`: everything on the device, with the largest number of layers that fits."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.compare.worker import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from bench.gpu_sides.job import Job, StepSeen, seeded_model


class PlainSide:
    """Plain PyTorch side: fp32 weights with autocast, activation checkpointing and fused AdamW."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._batches = [{k: v.to(job.device) for k, v in batch.items()} for batch in job.micro_batches()]
        config = json.loads((Path(job.model) / "config.json").read_text(encoding="utf-8"))
        for layers in (config["num_hidden_layers"], *job.layers_to_try):
            folder = _with_layers(job, config, layers)
            if self._fits(folder):
                break
        else:
            raise SystemExit(f"plain PyTorch does not fit here, not even with {layers} layers")
        self._num_layers = layers
        self._set_up(folder)

    def _set_up(self, folder: Path, *, is_real: bool = True) -> None:
        self._model = seeded_model(folder, dtype=torch.float32, device=self._job.device, is_real=is_real)
        self._model.train()
        model: Any = self._model  # transformers 5.23 renamed the method that enables checkpointing
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
        )

    def _fits(self, folder: Path) -> bool:
        """Return whether two steps fit in memory, and free it. Only the second step starts with all optimizer state."""
        fits = True
        try:
            self._set_up(folder, is_real=False)
            for _ in range(2):
                self.step(is_last=False)
        except torch.OutOfMemoryError:
            fits = False
        # The model cannot be freed in the `except` block, because the error's stack frames refer to it.
        self.__dict__.pop("_model", None)
        self.__dict__.pop("_optimizer", None)
        gc.collect()
        if self._job.device == "cuda":
            torch.cuda.empty_cache()
        return fits

    def about(self) -> dict[str, Any]:
        """Return the numbers of parameters and layers, and the optimizer with its precision."""
        parameters = list(self._model.parameters())
        return {
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "num_layers": self._num_layers,
            "optimizer": f"fused AdamW, fp32 weights and moments, {self._job.dtype} autocast",
        }

    def step(self, *, is_last: bool) -> StepSeen:
        """Run one step."""
        job, marks, loss = self._job, [self._now()], 0.0
        num_items = job.rows * (job.length - 1)
        for batch in self._batches:
            with torch.autocast(job.device, job.torch_dtype, enabled=job.torch_dtype != torch.float32):
                term = self._model(**batch, num_items_in_batch=num_items, use_cache=False).loss
            term.backward()
            loss += float(term.detach())
        marks.append(self._now())
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        marks.append(self._now())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        marks.append(self._now())
        names = ("forward_backward", "clip", "update")
        return StepSeen(loss, {name: marks[i + 1] - marks[i] for i, name in enumerate(names)})

    def finish(self) -> dict[str, Any]:
        """Return an empty dict, because this side has no final measurements."""
        return {}

    def _now(self) -> float:
        if self._job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _with_layers(job: Job, config: Mapping[str, Any], layers: int) -> Path:
    folder = Path(job.scratch, f"layers{layers}")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), encoding="utf-8")
    return folder
