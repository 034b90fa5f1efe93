"""Train with TRL's SFTTrainer; 6 MiB of RAM and a folder on the drive hold weights, gradients and optimizer state.

Without the marked lines, this is an ordinary program that keeps all 13 MB in memory. ``--resume`` continues from
the trainer's last checkpoint, bit for bit. Needs ``pip install trl``. Run
``python examples/python/trl_sft.py --output /tmp/trl_sft``.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

import megatrain as mt  # megatrain

SFTTrainer = mt.hf.offloaded(SFTTrainer)  # megatrain
QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def questions() -> Dataset:
    """Return questions about whales, and their answers. The loss covers only the answers."""
    pairs = []
    for line in (QUICKSTART / "whales.jsonl").read_text(encoding="utf-8").splitlines():
        first, second, *_ = json.loads(line)["messages"]
        pairs.append({"prompt": first["content"] + "\n", "completion": second["content"]})
    return Dataset.from_list(pairs)


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
    arguments = SFTConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        max_length=128,
        bf16=False,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=questions(), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
