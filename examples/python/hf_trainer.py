"""Train with Hugging Face's Trainer; 6 MiB of RAM and a drive hold weights, gradients and optimizer state.

Without the marked lines, this is an ordinary program that keeps all 13 MB in memory. You can stop it at any time
and continue with ``--resume`` from the Trainer's own checkpoints, bit for bit. The model is small and has random
weights, so that the program takes seconds. Run
``python examples/python/hf_trainer.py --output /tmp/hf_trainer``.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

import megatrain as mt  # megatrain

Trainer = mt.hf.offloaded(Trainer)  # megatrain
QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def rows(num_tokens: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return rows of ``num_tokens`` token ids from chapter 1 of Moby Dick, with the same ids as labels."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model", model_max_length=1_000_000)
    ids = torch.tensor(tokenizer((QUICKSTART / "loomings.txt").read_text(encoding="utf-8"))["input_ids"])
    return [{"input_ids": row, "labels": row} for row in ids.split(num_tokens) if len(row) == num_tokens]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()

    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model"))
    store = mt.open_store(ram="6MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    mt.offload(model, store)  # megatrain
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=1.0,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows())
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
