"""Train a reward model with TRL's RewardTrainer in 6 MiB of RAM and a folder on the drive.

Without the marked lines, this is an ordinary program that keeps 13 MB in memory. ``--resume`` continues from the
trainer's last checkpoint, bit for bit. To train a real model, call
``AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)``. Needs ``pip install trl``. Run
``python examples/python/trl_reward.py --output /tmp/trl_reward``.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer

import megatrain as mt  # megatrain

RewardTrainer = mt.hf.offloaded(RewardTrainer)  # megatrain
QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def preferences() -> Dataset:
    """Return questions about whales, each with its answer and with the answer to a different question."""
    lines = (QUICKSTART / "whales.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [[turn["content"] for turn in json.loads(line)["messages"][:2]] for line in lines]
    others = [answer for _, answer in pairs[1:] + pairs[:1]]
    return Dataset.from_list(
        [
            {"prompt": question + "\n", "chosen": answer, "rejected": other}
            for (question, answer), other in zip(pairs, others, strict=True)
        ]
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    config = AutoConfig.from_pretrained(QUICKSTART / "model", num_labels=1, pad_token_id=tokenizer.pad_token_id)
    set_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    store = mt.open_store(ram="6MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    mt.offload(model, store)  # megatrain
    arguments = RewardConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        max_length=128,
        bf16=False,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = RewardTrainer(model=model, args=arguments, train_dataset=preferences(), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
