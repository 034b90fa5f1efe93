"""Train in an FSDP2 loop, as in torchtitan and accelerate, with the optimizer state on a drive.

Without the marked lines, AdamW keeps 8 bytes per parameter in the memory of the ranks. Sharding, clipping, schedule and
checkpoints by ``torch.distributed.checkpoint`` do not change. ``--resume`` continues from the last checkpoint. With the
same number of ranks, the result is bit-identical; a different number of ranks also works. The model is small and has
random weights, so that the program takes seconds on a CPU::

    torchrun --nproc-per-node 2 examples/python/fsdp2.py --output /tmp/fsdp2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import megatrain  # megatrain

QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def batches(num_rows: int = 8, num_tokens: int = 64) -> list[Tensor]:
    """Return token ids from chapter 1 of Moby Dick, in batches of shape (num_rows, num_tokens)."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model", model_max_length=1_000_000)
    ids = torch.tensor(tokenizer((QUICKSTART / "loomings.txt").read_text(encoding="utf-8"))["input_ids"])
    size = num_rows * num_tokens
    return [batch.view(num_rows, num_tokens) for batch in ids.split(size) if len(batch) == size]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (num_ranks,))

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model")).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    store = megatrain.open_store(ram="4MiB", nvme=options.output / "store", nvme_size="64MiB")  # megatrain
    # was: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    settings = {"store": store, "state": "nvme"}  # megatrain
    optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, **settings)  # megatrain
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))

    first_step = 0
    if options.resume:
        weights, moments = get_state_dict(model, optimizer)
        states = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": 0}
        checkpoint.load(states, checkpoint_id=options.output / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        scheduler.load_state_dict(states["scheduler"])
        first_step = states["step"]

    data = batches()
    for step in range(first_step, options.steps):
        ids = data[step % len(data)][rank::num_ranks].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step}: rank {rank}: loss {loss.item()}")

    weights, moments = get_state_dict(model, optimizer)
    states = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": options.steps}
    checkpoint.save(states, checkpoint_id=options.output / "checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
