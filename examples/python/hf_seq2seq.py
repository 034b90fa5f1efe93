"""Train T5, an encoder-decoder, with Hugging Face's Seq2SeqTrainer in 6 MiB of RAM and a folder on the drive.

Without the marked lines, this is an ordinary program that keeps 18 MB of weights, gradients and optimizer state in
memory. ``--resume`` continues from the Trainer's own checkpoint, bit for bit. The model is small and has random
weights, so that the program takes seconds. For a real model, call
``AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-3b")`` and set store sizes that fit the model. Run
``python examples/python/hf_seq2seq.py --output /tmp/hf_seq2seq``.
"""

import argparse
import json
from pathlib import Path

from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    set_seed,
)

import megatrain as mt  # megatrain

Seq2SeqTrainer = mt.hf.offloaded(Seq2SeqTrainer)  # megatrain
QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"


def rows(tokenizer: AutoTokenizer) -> list[dict[str, list[int]]]:
    """Return questions about whales, and their answers."""
    lines = (QUICKSTART / "whales.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [[turn["content"] for turn in json.loads(line)["messages"][:2]] for line in lines]
    return [{**tokenizer(question), "labels": tokenizer(answer)["input_ids"]} for question, answer in pairs]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    set_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    store = mt.open_store(ram="6MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    mt.offload(model, store)  # megatrain
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=rows(tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
