"""Train with Lightning; 6 MiB of RAM and a folder on the drive hold weights, gradients and optimizer state.

Without the marked lines, this is an ordinary program that keeps all 13 MB in memory. ``--resume`` continues from
the last checkpoint that Lightning wrote, bit for bit. The model is small and has random weights, so that the program
takes seconds. Run
``python examples/python/lightning_offload.py --output /tmp/lightning_offload --epochs 2``.
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import megatrain  # megatrain

QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def rows(num_tokens: int = 64) -> list[Tensor]:
    """Return rows of ``num_tokens`` token ids from chapter 1 of Moby Dick."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model", model_max_length=1_000_000)
    ids = torch.tensor(tokenizer((QUICKSTART / "loomings.txt").read_text(encoding="utf-8"))["input_ids"])
    return [row for row in ids.split(num_tokens) if len(row) == num_tokens]


class Reader(lightning.LightningModule):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model"))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a batch of token ids, (rows, tokens)."""
        loss = self.model(input_ids=ids, labels=ids).loss
        print(f"step {self.global_step}: loss {loss.item()}")
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        """Log the loss of a batch that is not trained on."""
        self.log("validation_loss", self.model(input_ids=ids, labels=ids).loss, batch_size=len(ids))

    def configure_optimizers(self) -> dict:
        """Return AdamW with a decreasing learning rate."""
        # was: optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        optimizer = megatrain.TieredAdamW(self.parameters(), lr=1e-3, weight_decay=0.1)  # megatrain
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--epochs", type=int, default=2, help="number of epochs; each has 5 steps")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()

    lightning.seed_everything(0)
    store = megatrain.open_store(ram="6MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    trainer = lightning.Trainer(
        strategy=megatrain.lightning.TierStrategy(store),  # megatrain
        accelerator="cpu",
        max_epochs=options.epochs,
        limit_train_batches=10,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.output, save_last=True)],
        default_root_dir=options.output,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training, validation = rows()[8:], rows()[:8]
    trainer.fit(
        Reader(),
        DataLoader(training, batch_size=4),
        DataLoader(validation, batch_size=4),
        ckpt_path="last" if options.resume else None,
    )
    trainer.save_checkpoint(options.output / "final.ckpt", weights_only=True)


if __name__ == "__main__":
    main()
