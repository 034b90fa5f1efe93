"""Train in a PyTorch loop whose optimizer keeps its state in 5 MiB of RAM and a folder on the drive.

Without the marked lines, AdamW keeps 6.6 MB of state in memory, and its checkpoints contain all of it. Model,
gradients, clipping and schedule do not change. ``--resume`` continues from the last checkpoint, bit for bit. The model
is small and has random weights, so that the program takes seconds. Run
``python examples/python/pytorch_optimizer.py --output /tmp/pytorch_optimizer``.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
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
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model"))
    store = megatrain.open_store(ram="5MiB", nvme=options.output / "store", nvme_size="64MiB")  # megatrain
    # was: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, store=store)  # megatrain
    # For matrices, TieredMuon is an alternative: docs/embedding_pytorch.md#muon
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))

    first_step = 0
    if options.resume:
        checkpoint = torch.load(options.output / "checkpoint.pt", weights_only=True)
        first_step = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    data = batches()
    for step in range(first_step, options.steps):
        ids = data[step % len(data)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step}: loss {loss.item()}")

    options.output.mkdir(parents=True, exist_ok=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({"step": options.steps, **states}, options.output / "checkpoint.pt")


if __name__ == "__main__":
    main()
