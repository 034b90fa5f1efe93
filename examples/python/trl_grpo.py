"""Train with TRL's GRPOTrainer: a model in 8 MiB of RAM and a drive generates answers and learns from them.

Without the marked lines, this is an ordinary program that keeps 13 MB in memory. Every generated token streams the
weights once, for all answers of a batch, so use large batches and short answers. ``--resume`` continues from the
trainer's last checkpoint. Needs ``pip install trl``. Run
``python examples/python/trl_grpo.py --output /tmp/trl_grpo``.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

import megatrain as mt  # megatrain

GRPOTrainer = mt.hf.offloaded(GRPOTrainer)  # megatrain
QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def questions() -> Dataset:
    """Return questions about whales."""
    lines = (QUICKSTART / "whales.jsonl").read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([{"prompt": json.loads(line)["messages"][0]["content"] + "\n"} for line in lines])


def vowels(completions: list[str], **rest: object) -> list[float]:
    """Return the number of vowels in each answer, as its reward."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()

    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model"))
    store = mt.open_store(ram="8MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    mt.offload(model, store)  # megatrain
    arguments = GRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        beta=0.0,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    trainer = GRPOTrainer(
        model=model, reward_funcs=vowels, args=arguments, train_dataset=questions(), processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
