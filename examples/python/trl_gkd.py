"""Distill with TRL's GKDTrainer on text that the student generates; 8 MiB of RAM and a drive hold both models.

Without the marked lines, this is an ordinary program that keeps 16 MB in memory. The student generates answers, and
learns the teacher's probabilities for each token. ``lmbda`` is the share of steps with generated answers; the other
steps use the answers in the data. ``--resume`` continues from the trainer's last checkpoint. Needs ``pip install trl``.
Run ``python examples/python/trl_gkd.py --output /tmp/trl_gkd``.

The teacher is frozen. It takes 2 bytes per parameter in bf16, and only one of its layers is in memory at a time. If the
teacher exceeds RAM, load it from its folder directly into the store: replace the line that creates it and the line that
offloads it with megatrain's ``load_pretrained(folder, store, name="teacher", trainable=False)``.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl.experimental.gkd import GKDConfig, GKDTrainer

import megatrain as mt  # megatrain

GKDTrainer = mt.hf.offloaded(GKDTrainer)  # megatrain
QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"
TEMPLATE = "{% for message in messages %}{{ message.content + '\n' }}{% endfor %}"


def chats() -> Dataset:
    """Return conversations about whales."""
    lines = (QUICKSTART / "whales.jsonl").read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([{"messages": json.loads(line)["messages"][:2]} for line in lines])


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()

    config = AutoConfig.from_pretrained(QUICKSTART / "model")
    set_seed(0)
    student = AutoModelForCausalLM.from_config(config)
    teacher = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    store = mt.open_store(ram="8MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    mt.offload(student, store)  # megatrain
    mt.offload(teacher, store, name="teacher")  # megatrain
    arguments = GKDConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        lmbda=0.5,
        beta=0.5,
        max_new_tokens=8,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        max_length=64,
        bf16=False,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    tokenizer.chat_template = TEMPLATE
    trainer = GKDTrainer(
        model=student, teacher_model=teacher, args=arguments, train_dataset=chats(), processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
