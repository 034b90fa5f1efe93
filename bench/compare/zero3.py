"""DeepSpeed's side of a comparison: ZeRO-3 on the CPU, with parameters and optimizer state on NVMe."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bench.compare.worker import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Job, Steps

#: Number of parameters per update. Buffers are multiples of this size, so the default of 1e9 would take 48 GB.
SUB_GROUP_ELEMENTS = 20_000_000
#: With pipelining and several sub-groups, DeepSpeed fails an assertion if it has fewer than 12 buffers.
NUM_STATE_BUFFERS = 12
#: Number of buffers for parameters. Each buffer holds one parameter, whatever the parameter's size.
NUM_PARAMETER_BUFFERS = 24
#: Number of elements to reduce or prefetch at a time. In a model smaller than 20 buckets, DeepSpeed would fetch a
#: parameter in the next step while it is still in flight, which causes an assertion error.
BUCKET_ELEMENTS = 5_000_000


class Zero3Side:
    """Side that runs steps of DeepSpeed with bf16 layers, and fp32 masters and moments.

    Nothing is recomputed, which favors DeepSpeed.
    """

    def __init__(self, job: Job) -> None:
        os.environ.update(_world(job))
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM

        deepspeed.init_distributed(dist_backend="gloo")
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa")
        model.train()
        sizes = [parameter.numel() for parameter in model.parameters()]
        self._job, self._num_parameters = job, sum(sizes)
        self._state_memory = state_memory(sizes)
        config = _config(job, sizes)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def about(self) -> dict[str, Any]:
        """Return the size of the model and the size of the buffers for state."""
        return {"num_parameters": self._num_parameters, "state_memory": self._state_memory}

    def steps(self, batches: Sequence[Sequence[Mapping[str, Tensor]]]) -> Steps:
        """Run consecutive steps. The part "update" is the time from a step's last backward to the end of the step."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        loss, update_s = 0.0, 0.0
        for all_micro_batches in batches:
            loss, count = 0.0, len(all_micro_batches) // self._job.size
            micro_batches = all_micro_batches[self._job.rank * count :][:count]
            for batch in micro_batches:
                term = self._engine(**batch, use_cache=False).loss
                self._engine.backward(term)
                loss += float(term.detach()) / len(micro_batches)
                update_start_s = time.perf_counter()
                self._engine.step()  # updates only after the last micro-batch
            update_s += time.perf_counter() - update_start_s
        num_steps = len(batches)
        cpu_s = time.process_time() - start_cpu_s
        parts_s = {"update": update_s / num_steps, "cpu": cpu_s / num_steps}
        return Steps((time.perf_counter() - start_s) / num_steps, parts_s, loss)


def state_memory(sizes: Sequence[int]) -> int:
    """Return the bytes of RAM for state, without gradients, given the number of elements of each parameter."""
    return 4 * NUM_STATE_BUFFERS * max(SUB_GROUP_ELEMENTS, *sizes) + 2 * NUM_PARAMETER_BUFFERS * max(sizes)


def free_port() -> str:
    """Return a free port on this machine for the processes' rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _world(job: Job) -> dict[str, str]:
    """Return the environment variables for a process of the job. All of its processes run on this machine."""
    rank = str(job.rank)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(job.size), "MASTER_ADDR": "127.0.0.1"}
    settings = {"LOCAL_SIZE": str(job.size), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    return {**world, **settings, "MASTER_PORT": job.meeting or free_port()}


def _config(job: Job, sizes: Sequence[int]) -> dict[str, Any]:
    num_micro_batches, rows, _ = job.shape
    bucket = min(BUCKET_ELEMENTS, sum(sizes) // 20)
    state = {
        "device": "nvme",
        "nvme_path": job.nvme,
        "pin_memory": False,  # page-locked memory has no benefit without a GPU
        "buffer_count": NUM_STATE_BUFFERS,
        "pipeline_read": job.is_pipelined,
        "pipeline_write": job.is_pipelined,
    }
    parameters = {
        "device": "nvme",
        "nvme_path": job.nvme,
        "pin_memory": False,
        "buffer_count": NUM_PARAMETER_BUFFERS,
        "buffer_size": max(sizes),
        "max_in_cpu": 0,
    }
    adamw = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": num_micro_batches // job.size,
        "gradient_clipping": job.max_grad_norm,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_ELEMENTS,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": state,
            "offload_param": parameters,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }
