"""DeepSpeed's side in `gpu.py`: ZeRO-3 on one GPU, with parameters and optimizer state in page-locked RAM."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch

from bench.compare.worker import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from bench.gpu_sides.job import Job, StepSeen, seeded_model


class Zero3Side:
    """Side that runs steps of DeepSpeed: bf16 layers, fp32 masters and moments on the CPU, every layer recomputed."""

    def __init__(self, job: Job) -> None:
        os.environ.update(_one_process(job.device))
        import deepspeed  # type: ignore[import-not-found]

        self._job = job
        deepspeed.init_distributed(dist_backend="nccl" if job.device == "cuda" else "gloo")
        model: Any = seeded_model(job.model, dtype=torch.float32, device="cpu").train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(job))
        self._batches = [{k: v.to(job.device) for k, v in batch.items()} for batch in job.micro_batches()]

    def about(self) -> dict[str, Any]:
        """Return the number of parameters, and the optimizer with its precision."""
        return {"num_parameters": self._num_parameters, "optimizer": "DeepSpeedCPUAdam, fp32 master and moments"}

    def step(self, *, is_last: bool) -> StepSeen:
        """Run one step. The part "update" is the time from the last backward to the end of the step."""
        loss, update_s = 0.0, 0.0
        for batch in self._batches:
            term = self._engine(**batch, use_cache=False).loss
            self._engine.backward(term)
            loss += float(term.detach()) / len(self._batches)
            start_s = time.perf_counter()
            self._engine.step()  # updates only after the last micro-batch
            update_s = time.perf_counter() - start_s
        return StepSeen(loss, {"update": update_s})

    def finish(self) -> dict[str, Any]:
        """Return an empty dict, because this side has no final measurements."""
        return {}


def _one_process(device: str) -> dict[str, str]:
    """Return the environment variables for a single process without a network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**world, "DS_ACCELERATOR": device, "HF_HUB_OFFLINE": "1"}


def _config(job: Job) -> dict[str, Any]:
    adamw = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": job.micro_rows,
        "gradient_accumulation_steps": job.rows // job.micro_rows,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }
