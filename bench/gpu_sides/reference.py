"""The reference's side in `gpu.py`: the MegaTrain code in a checkout.

Written for commit 919520f, with three changes. Attention gets no mask, because the single-GPU path passes the
tokenizer's mask of ones and zeros to sdpa, which rejects it. All rows are full, so causal attention is correct. If
DeepSpeed is missing, torch's fused AdamW replaces the reference's own fallback, which is slower. The data loader is not
used, because it is prone to fork problems. Weights are bf16. Without DeepSpeed, moments are also bf16.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.compare.worker import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from bench.gpu_sides.job import Job, StepSeen, seeded_model

_NEEDED = ("forward_and_backward", "get_parameters", "zero_grad", "_sync_params_to_gpu", "_build_layer_kwargs")
_CHECKPOINT_INTERVAL, _NUM_SLABS = 4, 12  # the reference's defaults


class ReferenceSide:
    """Side that runs the steps of the reference's training script.

    A step runs all rows at once, clips gradients, updates the weights, and copies them back to the GPU.
    """

    def __init__(self, job: Job) -> None:
        model_class, config_class = _import_reference(Path(job.megatrain))
        self._job = job
        self._tokens = job.tokens()
        self._mask = torch.ones_like(self._tokens)
        model = seeded_model(job.model, dtype=job.torch_dtype, device="cpu").eval()  # as in the reference's trainer
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        config = config_class(
            model_name=job.model,
            dataset_path="random tokens",
            dtype=job.torch_dtype,
            attn_implementation="sdpa",
            max_seq_len=job.length,
            batch_size=job.rows,
            checkpoint_interval=_CHECKPOINT_INTERVAL,
            num_grad_slabs=_NUM_SLABS,
            learning_rate=LEARNING_RATE,
            gradient_accumulation_steps=1,
        )
        self._model = _without_mask(model_class)(model, config)
        del model
        gc.collect()
        self._optimizer_name, self._optimizer = _optimizer(self._model.get_parameters())

    def about(self) -> dict[str, Any]:
        """Return the number of parameters, and the optimizer with its precision."""
        return {
            "num_parameters": self._num_parameters,
            "optimizer": f"{self._optimizer_name}, {self._job.dtype} weights updated in place, no master",
        }

    def step(self, *, is_last: bool) -> StepSeen:
        """Run one step."""
        marks = [self._now()]
        loss, _, _ = self._model.forward_and_backward(self._tokens, self._mask, self._tokens)
        marks.append(self._now())
        nn.utils.clip_grad_norm_(self._model.get_parameters(), MAX_GRAD_NORM)
        marks.append(self._now())
        self._optimizer.step()
        marks.append(self._now())
        self._model._sync_params_to_gpu()
        marks.append(self._now())
        self._model.zero_grad()
        self._optimizer.zero_grad()
        marks.append(self._now())
        names = ("forward_backward", "clip", "update", "weights_to_gpu", "zero_grad")
        return StepSeen(float(loss), {name: marks[i + 1] - marks[i] for i, name in enumerate(names)})

    def finish(self) -> dict[str, Any]:
        """Stop this side's threads and free its memory."""
        self._model.cleanup()
        return {}

    def _now(self) -> float:
        if self._job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _import_reference(folder: Path) -> tuple[Any, Any]:
    """Return the reference's trainer and config classes.

    Raises:
        SystemExit: The folder has no package `infinity`, or an incompatible version of it.
    """
    sys.path.insert(0, str(folder))
    try:
        from infinity import CPUMasterConfig, CPUMasterModel  # type: ignore[import-not-found]
    except ImportError as error:
        raise SystemExit(f"--megatrain {folder}: {error}. Name a checkout of MegaTrain") from error
    missing = [name for name in _NEEDED if not hasattr(CPUMasterModel, name)]
    if missing:
        raise SystemExit(f"--megatrain {folder}: its trainer lacks {', '.join(missing)}; commit 919520f has them")
    return CPUMasterModel, CPUMasterConfig


def _without_mask(model_class: Any) -> Any:
    """Return a subclass of the trainer with causal attention and no mask."""

    class CausalOnly(model_class):  # type: ignore[misc]
        def _build_layer_kwargs(self, mask: Any, *rest: Any) -> Any:
            return super()._build_layer_kwargs(None, *rest)

    return CausalOnly


def _optimizer(parameters: list[Tensor]) -> tuple[str, Any]:
    options: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        return "DeepSpeedCPUAdam, fp32 moments", DeepSpeedCPUAdam(parameters, adamw_mode=True, **options)
    except Exception as error:  # a missing package or a failed compilation can raise any error
        name = f"torch fused AdamW, bf16 moments (no DeepSpeedCPUAdam: {type(error).__name__})"
        return name, torch.optim.AdamW(parameters, fused=True, **options)
