"""Train in a PyTorch loop with weights, gradients, optimizer state and activations in 6 MiB of RAM and a folder.

Without the marked lines, the program keeps all activations and 13 MB of weights, gradients and state in memory.
``--resume`` continues from the last checkpoint, bit for bit. The program creates a small model with random weights
instead of downloading a model, and takes seconds. Run
``python examples/python/pytorch_offload.py --output /tmp/pytorch_offload``.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import megatrain  # megatrain

QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def model_folder(folder: Path) -> Path:
    """Return a folder with a model. The first call creates the folder."""
    if not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model")).save_pretrained(folder)
    return folder


def batches(num_rows: int = 8, num_tokens: int = 64) -> list[Tensor]:
    """Return token ids from chapter 1 of Moby Dick, in batches of shape (num_rows, num_tokens)."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model", model_max_length=1_000_000)
    ids = torch.tensor(tokenizer((QUICKSTART / "loomings.txt").read_text(encoding="utf-8"))["input_ids"])
    size = num_rows * num_tokens
    return [batch.view(num_rows, num_tokens) for batch in ids.split(size) if len(batch) == size]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of model and checkpoint")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args()

    folder = model_folder(options.output / "model")
    store = megatrain.open_store(ram="6MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    # was: model = AutoModelForCausalLM.from_pretrained(folder)
    model = megatrain.load_pretrained(folder, store)  # megatrain
    # was: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)  # megatrain
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))

    first_step = 0
    if options.resume:
        checkpoint = torch.load(options.output / "checkpoint.pt", mmap=True, weights_only=True)
        first_step = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    data = batches()
    for step in range(first_step, options.steps):
        ids = data[step % len(data)]
        # was: with torch.autograd.graph.save_on_cpu():
        with megatrain.offload_activations(store, model=model, min_bytes=1 << 16):  # megatrain
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        # was: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step}: loss {loss.item()}")

    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({"step": options.steps, **states}, options.output / "new.pt")
    (options.output / "new.pt").replace(options.output / "checkpoint.pt")


if __name__ == "__main__":
    main()
